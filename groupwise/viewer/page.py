"""The files of the page: what `server.py` serves and `report.py` puts into one file.

Scripts are classic ones, in the order of `scripts`; their names are in ``gw``. Each file in ``static/views`` is a view.
"""

from __future__ import annotations

import html
from pathlib import Path

STATIC = Path(__file__).parent / "static"
SHELL = ("vendor/echarts.min.js", "app.js", "charts.js", "curves.js", "samples.js")
PLACE = "<!-- styles and scripts -->"  # in index.html


def scripts() -> list[str]:
    """The page's scripts in order, relative to `STATIC`."""
    return [*SHELL, *_views("js"), "start.js"]


def styles() -> list[str]:
    """The page's style sheets in order, relative to `STATIC`."""
    return ["style.css", *_views("css")]


def index(head: str | None = None) -> str:
    """The page, with ``head`` (default: links to its styles and scripts) in it."""
    if head is None:
        links = [f'<link rel="stylesheet" href="static/{html.escape(name)}">' for name in styles()]
        links += [f'<script src="static/{html.escape(name)}" defer></script>' for name in scripts()]
        head = "\n  ".join(links)
    return (STATIC / "index.html").read_text(encoding="utf-8").replace(PLACE, head)


def _views(ending: str) -> list[str]:
    return [path.relative_to(STATIC).as_posix() for path in sorted((STATIC / "views").glob(f"*.{ending}"))]
