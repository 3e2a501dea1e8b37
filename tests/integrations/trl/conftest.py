"""TRL warns that environments and rollout functions are experimental there, and warnings are errors in these tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_warning_of_experiments(monkeypatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
