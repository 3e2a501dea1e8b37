"""Take the pictures of docs/view.md from real runs, with Chromium and a real `groupwise view`.

python tools/screenshots.py RUN OTHER_RUN                   # all pictures, into docs/pictures
python tools/screenshots.py RUN OTHER_RUN --only time --out /tmp
python tools/screenshots.py RUN OTHER_RUN --answers RUN --clusters RUN

RUN should be a finished run of the quiz, OTHER_RUN one to compare it with. Pictures of samples are taken of a run of
examples/facts.py (--answers) and of one with similarity groups (--clusters), if they are given.
A picture is a PNG of 1280 × 800.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).parents[1]
WAIT = 120_000  # milliseconds for a view to appear
SETTLE = 700  # milliseconds for its charts

# Name, address, theme, and what has to be there before the picture is taken.
PICTURES = [
    ("view-curves", "#/run/{run}/curves", "light", ".chart[data-drawn]"),
    ("view-curves-dark", "#/run/{run}/curves", "dark", ".chart[data-drawn]"),
    ("view-compare-dark", "#/compare?runs={run},{other}", "dark", ".chart[data-drawn]"),
    ("view-questions", "#/run/{run}/questions?part=held_out", "light", ".chart[data-drawn]"),
    ("view-groups", "#/run/{answers}/groups?step=22", "light", "section.group"),
    ("view-group", "#/run/{answers}/group?step=22&prompt=0", "light", ".tree .leaf"),
    ("view-tokens-dark", "#/run/{answers}/tokens?step=22&prompt=0&sample=0&mode=entropy", "dark", ".chart[data-drawn]"),
    ("view-clusters-dark", "#/run/{clusters}/clusters?step=1", "dark", ".map[data-drawn]"),
    ("view-time", "#/run/{run}/time", "light", ".chart[data-drawn]"),
]


def take(browser: Browser, url: str, theme: str, ready: str, path: Path) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme=theme)
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector(ready, timeout=WAIT)
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(SETTLE)
    page.screenshot(path=path)
    context.close()
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("other", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    parser.add_argument("--only", default="", help="only pictures whose name contains this")
    parser.add_argument("--answers", type=Path, help="a run with longer answers")
    parser.add_argument("--clusters", type=Path, help="a run with similarity groups")
    arguments = parser.parse_args()
    runs = {name: getattr(arguments, name) for name in ("run", "other", "answers", "clusters")}
    names = {name: path.resolve().name for name, path in runs.items() if path is not None}
    command = [sys.executable, "-m", "groupwise", "view", *filter(None, runs.values()), "--no-open", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            line = server.stdout.readline() if server.stdout else ""
            address = re.search(r"http://\S+", line)
            if address is None:
                sys.exit(f"`groupwise view` did not start: {line}")
            chromium = os.environ.get("GROUPWISE_CHROMIUM") or shutil.which("chromium")
            with sync_playwright() as driver:
                browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
                for name, place, theme, ready in PICTURES:
                    if arguments.only in name and all(run in names for run in re.findall(r"{(\w+)}", place)):
                        take(browser, address[0] + place.format(**names), theme, ready, arguments.out / f"{name}.png")
                browser.close()
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
