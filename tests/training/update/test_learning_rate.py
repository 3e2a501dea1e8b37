"""Warm-up and decay of the learning rate."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.training.update.optimizer import warmup_decay


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("constant", {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0, 8: 1.0, 12: 1.0, 99: 1.0}),
        ("linear", {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0, 6: 0.8, 8: 0.6, 12: 0.2, 99: 0.2}),
        ("cosine", {0: 0.25, 3: 1.0, 4: 1.0, 6: 0.6 + 0.4 * math.sqrt(0.5), 8: 0.6, 12: 0.2, 99: 0.2}),
    ],
)
def test_warmup_and_decay_by_hand(shape, expected):
    for step, factor in expected.items():
        result = warmup_decay(step, warmup_steps=4, total_steps=12, shape=shape, final=0.2)
        assert result == pytest.approx(factor, rel=1e-12), step


def test_no_warmup_and_a_warmup_longer_than_the_run():
    assert warmup_decay(0, warmup_steps=0, total_steps=10, shape="linear", final=0.0) == 1.0
    assert warmup_decay(5, warmup_steps=0, total_steps=10, shape="linear", final=0.0) == 0.5
    assert warmup_decay(0, warmup_steps=1, total_steps=10, shape="constant", final=0.0) == 1.0
    assert warmup_decay(4, warmup_steps=10, total_steps=5, shape="cosine", final=0.1) == 0.5
    assert warmup_decay(10, warmup_steps=10, total_steps=10, shape="cosine", final=0.1) == 0.1


@given(
    step=st.integers(0, 60),
    warmup=st.integers(0, 20),
    total=st.integers(1, 50),
    shape=st.sampled_from(["constant", "linear", "cosine"]),
    final=st.floats(0, 1),
)
def test_the_factor_never_rises_after_the_warmup(step, warmup, total, shape, final):
    factor, later = (
        warmup_decay(s, warmup_steps=warmup, total_steps=total, shape=shape, final=final) for s in (step, step + 1)
    )
    assert 0 <= factor <= 1
    if step >= warmup:
        assert final - 1e-12 <= later <= factor
