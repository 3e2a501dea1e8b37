"""Real runs, a real server and a real browser for the tests of the page.

`quiz_run` is trained once per session; do not write into it, copy it. Tests that use `page` are slow.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from groupwise.config import load_recipe
from groupwise.training.trainer import Trainer

ROOT = Path(__file__).parents[2]
CHROMIUM = os.environ.get("GROUPWISE_CHROMIUM") or shutil.which("chromium")
QUIZ = {  # the quiz of `groupwise train quiz`, with small batches
    "sft.steps": 40,
    "sampling.samples_per_prompt": 8,
    "train.steps": 12,
    "train.batch_size": 8,
    "evaluate.every": 4,
    "data.held_out_rows": 16,
    "run.checkpoint_every": 6,
    "run.save_tokens_every": 1,
    "run.tensorboard": False,
    "run.plot": False,
}


@pytest.fixture(scope="session")
def quiz_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 12 steps, with tokens of every step and four evaluations."""
    folder = tmp_path_factory.mktemp("runs") / "quiz"
    Trainer(load_recipe("quiz", {**QUIZ, "run.folder": str(folder)})).run()
    return folder


def groupwise(*arguments: str | Path) -> list[str]:
    """The command, in this Python."""
    return [sys.executable, "-m", "groupwise", *map(str, arguments)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


Viewer = Callable[..., str]


@pytest.fixture(scope="module")
def view() -> Iterator[Viewer]:
    """Start `groupwise view` on folders, and options; returns its address. It ends with the module."""
    processes = []

    def start(*arguments: str | Path) -> str:
        command = groupwise("view", *arguments, "--no-open", "--port", "0")
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
        )
        processes.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.search(r"http://\S+", line)
        assert address, line + process.stdout.read()
        return address[0]

    yield start
    for process in processes:
        process.terminate()
        process.wait(20)
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium; it ends with the module, because Playwright's event loop would disturb other tests."""
    if CHROMIUM is None:
        pytest.skip("there is no chromium: install Debian's package, or set GROUPWISE_CHROMIUM to its path")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page of 1280 × 800. ``page.requested`` has the URLs of all requests, ``page.errors`` what went wrong in the
    scripts or was refused by the content security policy; a test fails if there is any."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(120_000)  # milliseconds: a busy machine is no failure
    page = context.new_page()
    page.requested, page.errors = [], []
    context.on("request", lambda request: page.requested.append(request.url))
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on("console", lambda message: page.errors.append(message.text) if message.type == "error" else None)
    yield page
    context.close()
    assert page.errors == []


def until(page: Any, expression: str, seconds: float = 60) -> None:
    """Wait until an expression is true; Playwright's own way needs `eval`, which the page's policy forbids."""
    for _ in range(int(10 * seconds)):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(100)
    pytest.fail(f"after {seconds} s it is still not true: {expression}")
