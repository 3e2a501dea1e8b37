"""What every test gets: one thread, a fixed seed, and no network."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from hypothesis import HealthCheck, settings

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
