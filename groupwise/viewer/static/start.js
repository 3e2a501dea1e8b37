/* Loaded last, when all views are there. */
"use strict";

gw.page.start();
