"""How long `groupwise view`, `report` and `doctor` take on a large run, and the page in a real browser.

Usage::

    python benchmarks/view.py                                     # 1,000 steps × 256 samples, in a temporary folder
    python benchmarks/view.py --run runs/large                    # an existing run
    python benchmarks/view.py --json benchmarks/results/view.json

The run is written by `large_run.py` with the trainer's own writers. Beside it the naive way is measured: reading all of
the run's files with pyarrow and json before showing anything, as a viewer without an index does. Each figure is the
median of ``--repeat`` rounds; commands are new processes each time. The browser is Chromium, driven by Playwright;
without it these figures are left out. The folder's files are in the page cache, as after training. Compare the ratios
rather than the seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from large_run import write_large_run

DRAWN = ".chart[data-drawn]"
VIEWS = {  # what is opened, and the element that shows that it is there
    "open, until the curves are drawn": ("curves", f".view-curves {DRAWN}"),
    "summary": ("summary", f".view-summary {DRAWN}"),
    "findings": ("findings", ".view-findings > *"),
    "groups of the last step": ("groups", ".group"),
    "groups of another step": ("groups?step=500", '.group[data-step="500"]'),
    "search in a step": ("groups?step=500&search=viral", ".group mark"),
    "search in all steps": ("groups?search=bronchitis&everywhere=1", ".matches li"),
    "one group": ("group?step=300&prompt=3", ".view-group .tree-scroll"),
    "tokens": ("tokens?step=501", ".view-tokens .token-panel"),
    "questions": ("questions", f".view-questions {DRAWN}"),
    "time": ("time", f".view-time {DRAWN}"),
    "settings": ("settings", ".view-settings table"),
}
GROUPWISE = [sys.executable, "-m", "groupwise"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="an existing run (default: one is written)")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = args.run
        if run is None:
            run = Path(folder) / "large"
            write_large_run(run, steps=args.steps, samples=args.samples)
        figures = measure(run.absolute(), Path(folder), args.repeat)
    what = f"{args.steps:,} steps × {args.samples} samples" if args.run is None else args.run.name
    print(f"{what} on {platform.machine()}, {os.cpu_count()} cores; median of {args.repeat}")
    width = max(map(len, figures))
    for name, seconds in figures.items():
        print(f"  {name:{width}}  {seconds:7.2f} s")
    if args.json:
        result = {"work": what, "machine": platform.machine(), "cores": os.cpu_count(), "seconds": figures}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def measure(run: Path, folder: Path, repeat: int) -> dict[str, float]:
    """Seconds of everything, by name, in order."""
    report = str(folder / "report.html")
    commands = {
        "read everything with pyarrow and json (naive)": [sys.executable, __file__, "--naive", str(run)],
        "groupwise doctor": [*GROUPWISE, "doctor", str(run)],
        "groupwise report": [*GROUPWISE, "report", str(run), "--out", report, "--force"],
    }
    figures = {name: _median(repeat, lambda command=command: _run(command)) for name, command in commands.items()}
    figures["groupwise view, until it answers"] = _median(repeat, lambda: _start_and_stop(run))
    with serving(run) as address:
        figures |= in_browser(address, run.name, repeat)
    return figures


def _median(repeat: int, act: Callable[[], float]) -> float:
    return statistics.median(act() for _ in range(repeat))


def _run(command: list[str]) -> float:
    start = time.perf_counter()
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode not in (0, 1):  # 1: the doctor has found something
        sys.exit(f"{' '.join(command)} failed:\n{result.stderr}")
    return time.perf_counter() - start


def read_everything(run: Path) -> int:
    """The naive way: every row of the run, in memory."""
    import pyarrow.parquet

    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    for path in sorted(run.glob("*/step-*.parquet")):
        rows += pyarrow.parquet.read_table(path).to_pylist()
    return len(rows)


@contextmanager
def serving(run: Path) -> Iterator[str]:
    """`groupwise view` as a process of its own; its address."""
    command = [*GROUPWISE, "view", str(run), "--no-open"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        for line in process.stdout or ():
            if match := re.search(r"http://\S+", line):
                yield match[0]
                return
        sys.exit("groupwise view has printed no address")
    finally:
        process.terminate()
        process.wait()


def _start_and_stop(run: Path) -> float:
    from urllib.request import urlopen

    start = time.perf_counter()
    with serving(run) as address:
        urlopen(address).read()
        return time.perf_counter() - start


def in_browser(address: str, run: str, repeat: int) -> dict[str, float]:
    """Seconds until the page shows each view, in new tabs of one browser; the first load of the page is without a
    cache."""
    chromium = os.environ.get("GROUPWISE_CHROMIUM") or shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        chromium = None
    if chromium is None:
        print("no Chromium or no Playwright: the page is not measured")
        return {}
    figures: dict[str, list[float]] = {}

    def timed(name: str, act: Callable[[], Any]) -> None:
        start = time.perf_counter()
        act()
        figures.setdefault(name, []).append(time.perf_counter() - start)

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for _ in range(repeat):
            page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()

            def show(view: str, selector: str, page: Any = page) -> None:
                page.goto(f"{address}#/run/{run}/{view}")
                page.wait_for_selector(selector, timeout=60_000)

            for name, (view, selector) in VIEWS.items():
                timed(f"page: {name}", lambda view=view, selector=selector: show(view, selector))
            page.context.close()
        browser.close()
    return {name: statistics.median(seconds) for name, seconds in figures.items()}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--naive"]:
        read_everything(Path(sys.argv[2]))
    else:
        main()
