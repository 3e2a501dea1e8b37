"""Take the pictures of docs/view.md and docs/report.md from real runs, with Chromium and a real `groupwise view`.

python tools/screenshots.py RUN OTHER_RUN                   # all pictures, into docs/pictures
python tools/screenshots.py RUN OTHER_RUN --only time --out /tmp
python tools/screenshots.py RUN OTHER_RUN --answers RUN --clusters RUN --comparison FOLDER

RUN should be a finished run of the quiz, OTHER_RUN one to compare it with. Pictures of samples are taken of a run of
examples/facts.py (--answers), of one with similarity groups (--clusters), and of `groupwise control compare`
(--comparison), if they are given. A picture is a PNG, 1280 pixels wide.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).parents[1]
WAIT = 120_000  # milliseconds for a view to appear
SETTLE = 700  # milliseconds for its charts
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}

# Name, address, theme, and what has to be there before the picture is taken.
PICTURES = [
    ("view-curves", "#/run/{run}/curves", "light", ".chart[data-drawn]"),
    ("view-curves-dark", "#/run/{run}/curves", "dark", ".chart[data-drawn]"),
    ("view-compare-dark", "#/compare?runs={run},{other}", "dark", ".chart[data-drawn]"),
    ("view-questions", "#/run/{run}/questions?part=held_out", "light", ".chart[data-drawn]"),
    ("view-groups", "#/run/{answers}/groups?step=22", "light", "section.group"),
    ("view-group", "#/run/{answers}/group?step=22&prompt=0", "light", ".tree .leaf"),
    ("view-tokens-dark", "#/run/{answers}/tokens?step=22&prompt=0&sample=0&mode=entropy", "dark", ".chart[data-drawn]"),
    ("view-clusters-dark", "#/run/{clusters}/clusters", "dark", ".map[data-drawn]"),
    ("view-time", "#/run/{run}/time", "light", ".chart[data-drawn]"),
]
REPORTS = {"report": ("run", 1160), "report-comparison": ("comparison", 1000)}  # of which folder, and the height


def take(browser: Browser, url: str, theme: str, ready: str, path: Path, height: int = 800) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": height}, color_scheme=theme)
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector(ready, timeout=WAIT)
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(SETTLE)
    page.screenshot(path=path)
    context.close()
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def take_report(browser: Browser, folder: Path, path: Path, height: int) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        page = Path(temporary) / "report.html"
        command = [sys.executable, "-m", "groupwise", "report", folder, "--out", page]
        subprocess.run(command, check=True, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
        take(browser, page.as_uri(), "light", ".chart[data-drawn]", path, height)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("other", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    parser.add_argument("--only", default="", help="only pictures whose name contains this")
    parser.add_argument("--answers", type=Path, help="a run with longer answers")
    parser.add_argument("--clusters", type=Path, help="a run with similarity groups")
    parser.add_argument("--comparison", type=Path, help="a comparison of control runs")
    arguments = parser.parse_args()
    runs = {name: getattr(arguments, name) for name in ("run", "other", "answers", "clusters")}
    names = {name: path.resolve().name for name, path in runs.items() if path is not None}
    command = [sys.executable, "-m", "groupwise", "view", *filter(None, runs.values()), "--no-open", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as server:
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
                for name, (kind, height) in REPORTS.items():
                    folder = getattr(arguments, kind)
                    if arguments.only in name and folder is not None:
                        take_report(browser, folder, arguments.out / f"{name}.png", height)
                browser.close()
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
