"""What every test gets: one thread, a fixed seed, no network, and signals that are not ignored."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from hypothesis import HealthCheck, settings

from tests.fuzz import TRIED

# A shell starts background jobs with some signals ignored, and a run honours that.
for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL),
                        (signal.SIGHUP, signal.SIG_DFL)):  # fmt: skip
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, default)

# `make test` tries few examples of each property, `make test-all` (--hypothesis-profile all) many.
for profile, examples in (("quick", 12), ("all", 100)):
    settings.register_profile(
        profile,
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize=True,
    )
settings.load_profile("quick")


@pytest.fixture(autouse=True)
def _quiet_torch() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist sends how many random inputs it tried at each border."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["tried"] = dict(TRIED)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    TRIED.update(getattr(node, "workeroutput", {}).get("tried", {}))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if TRIED:
        terminalreporter.section(f"random inputs tried: {sum(TRIED.values()):,}")
        for border, count in sorted(TRIED.items()):
            terminalreporter.write_line(f"{count:8,}  {border}")
