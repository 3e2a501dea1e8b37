/* The settings of a run. */
"use strict";

gw.views.add({
  name: "settings", title: "Settings", order: 90,
  render(element, run) {
    gw.fill(element, gw.el("div", {class: "card"}, gw.table([
      {title: "setting", value: ([name]) => gw.el("code", {}, name)},
      {title: "value", value: ([, value]) => gw.el("code", {}, gw.format.setting(value))},
    ], Object.entries(run.settings))));
  },
});
