"""Preemption that is forced at random, for tests that it changes nothing."""

from __future__ import annotations

import random

import pytest

from groupwise.generate.request import ActiveSamples


def preempt_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that grow ask for pages that they do not need yet, and half of the requests are refused."""
    rng, without_room, grow = random.Random(0), ActiveSamples.without_room, ActiveSamples.grow

    def some(active):
        """Those that need a page, and now and then others."""
        running = list(active.scheduler.slot_of) if active.scheduler.grows else []
        return list(dict.fromkeys([*without_room(active), *(s for s in running if rng.random() < 0.05)]))

    def now_and_then(active, sample):
        return rng.random() < 0.5 and (sample not in without_room(active) or grow(active, sample))

    monkeypatch.setattr(ActiveSamples, "without_room", some)
    monkeypatch.setattr(ActiveSamples, "grow", now_and_then)
