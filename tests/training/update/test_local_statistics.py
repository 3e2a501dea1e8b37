"""Means over local batches, by hand: two local batches of three completions, of which one is not computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from groupwise.core.losses import LOSSES
from groupwise.training.update.local_statistics import local_statistics

LENGTHS = [2, 1, 3, 2, 4]  # computed ones; the local batch 1 has another one with 4 tokens
SAMPLES = {
    "entropy": torch.tensor([1.0, 2.0, 3.0, 1.0, 2.0]),
    "clip_fraction_low": torch.tensor([0.5, 1.0, 1 / 3, 0.5, 0.25]),
    "clip_fraction_high": torch.tensor([0.5, 0.0, 0.0, 0.5, 0.0]),
}


def statistics(level: str, **changes: Any) -> dict[str, float]:
    minibatch: Any = SimpleNamespace(
        mask=torch.arange(4) < torch.tensor(LENGTHS)[:, None],
        local_batch=torch.tensor([0, 0, 0, 1, 1]),
        local_lengths=torch.tensor([2.0, 2.0, 2.0, 10 / 3, 10 / 3], dtype=torch.float64),
        totals=SimpleNamespace(sequences=6),
    )
    vars(minibatch).update(changes)
    loss = SimpleNamespace(ratio=level)
    recipe: Any = SimpleNamespace(train=SimpleNamespace(local_batch_size=3), loss=loss)
    return local_statistics(
        minibatch, {name: values.double() for name, values in SAMPLES.items()}, recipe, LOSSES["grpo"]
    )


def test_ratios_of_tokens() -> None:
    found = statistics("token")
    assert found["entropy"] == pytest.approx(((2 + 2 + 9) / 6 + (2 + 8) / 6) / 2)
    assert found["clip_fraction_low"] == pytest.approx((3 / 6 + 2 / 10) / 2)
    assert found["clip_fraction_high"] == pytest.approx((1 / 6 + 1 / 10) / 2)
    assert found["clip_ratio/low_min"] == pytest.approx((1 / 3 + 0) / 2)
    assert found["clip_ratio/high_max"] == pytest.approx((0.5 + 0.5) / 2)


def test_ratios_of_sequences() -> None:
    found = statistics("sequence")
    assert found["clip_fraction_low"] == pytest.approx((11 / 6 / 3 + 0.75 / 3) / 2)
    assert found["clip_ratio/low_min"] == pytest.approx((1 / 3 + 0) / 2)


def test_without_local_batches_there_are_none() -> None:
    assert statistics("token", local_batch=None) == {}


def test_a_local_batch_of_which_nothing_is_computed_has_no_clipped_tokens() -> None:
    found = statistics("token", totals=SimpleNamespace(sequences=9))
    assert found["clip_fraction_high"] == pytest.approx((1 / 6 + 1 / 10 + 0) / 3)
    assert found["entropy"] == pytest.approx(((2 + 2 + 9) / 6 + (2 + 8) / 6) / 2)
