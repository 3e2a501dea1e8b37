"""Whatever a reward function returns, logs or is weighted by: finite rewards, or one sentence."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.rewards import Scorer, named
from tests.fuzz import accepted, many


class Refuses:
    """An object that refuses everything asked of it."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    __float__ = __iter__ = __len__ = __bool__ = __repr__  # type: ignore[assignment]


class Lies(list):
    """A list of another length than it says."""

    def __len__(self) -> int:
        return 3


ROWS = 3
NUMBERS = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([1.7e308, -1.7e308, 5e-324, -0.0, math.nan, math.inf]),
    st.integers(),
    st.sampled_from([10**400, -(10**400), True, False]),
    st.just(5000).map(lambda digits: 10**digits),  # not a constant: Python refuses to show it
    st.fractions(),
    st.sampled_from([Fraction(10**400), Decimal("1e999999"), Decimal("sNaN"), 1j]),
    st.sampled_from([np.float16("inf"), np.float64(1e308), np.longdouble("1e4000"), np.int8(3), np.bool_(True)]),
    st.sampled_from(
        [torch.tensor(1.0), torch.tensor(math.nan), torch.tensor([1.0]), torch.tensor(1, dtype=torch.int8)]
    ),
)
OTHERS = st.one_of(
    st.none(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.sampled_from([object(), Refuses(), SimpleNamespace(shape=(), item=lambda: "x"), lambda: 1, ..., int, [], {}]),
    st.lists(st.floats(), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)
VALUES = st.one_of(NUMBERS, NUMBERS, OTHERS)
RESULTS = st.one_of(
    st.lists(VALUES, min_size=ROWS, max_size=ROWS),
    st.lists(NUMBERS, min_size=ROWS, max_size=ROWS),
    st.lists(VALUES, max_size=5),
    st.lists(VALUES, min_size=ROWS, max_size=ROWS).map(tuple),
    st.lists(st.floats(width=32), min_size=ROWS, max_size=ROWS).map(torch.tensor),
    st.lists(st.floats(), min_size=ROWS, max_size=ROWS).map(np.array),
    st.lists(VALUES, min_size=ROWS, max_size=ROWS).map(lambda values: np.array([*values, None], dtype=object)[:-1]),
    st.sampled_from(
        [
            torch.ones(ROWS, 1),
            torch.ones(ROWS, dtype=torch.complex64),
            torch.ones(ROWS).to_sparse(),
            Lies([1.0]),
            Refuses(),
            SimpleNamespace(shape=(ROWS,), tolist=lambda: [1.0]),
            SimpleNamespace(shape=(ROWS,), tolist=lambda: 5),
            np.datetime64("nat"),
        ]
    ),
    VALUES,
)


def scored(result: Any, weights: list[float], on_error: str, log: Any = None, column: Any = None) -> Any:
    """The scores of two functions: one that returns ``result``, and one that returns 1 for every row."""

    def fuzzed(completions: list[str], log_metric: Any, log_extra: Any, **_: Any) -> Any:
        if log is not None:
            log_metric("value", log)
        if column is not None:
            log_extra("column", column)
        return result if len(completions) == ROWS else result[:1]

    functions = [
        named(fuzzed, weights[0]),
        named(lambda completions, **_: [1.0] * len(completions), weights[1], "ones"),
    ]
    scorer = Scorer(functions, timeout=None, on_error=on_error)
    return scorer.score(["p"] * ROWS, ["a", "b", "c"], {})


WEIGHTS = st.lists(
    st.one_of(st.floats(), st.sampled_from([1.0, 10**400, 1.7e308, True, "1", None])), min_size=2, max_size=2
)


@many(12)
@given(RESULTS, st.sampled_from(["stop", "drop"]))
def test_any_result(result, on_error):
    scores = accepted("results of rewards", lambda: scored(result, [1.0, 1.0], on_error))
    if scores is not None:
        check_scores(scores, [1.0, 1.0])


@many(6)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=ROWS, max_size=ROWS), WEIGHTS)
def test_any_weight(rewards, weights):
    scores = accepted("weights of rewards", lambda: scored(rewards, weights, "stop"))
    if scores is not None:
        check_scores(scores, weights)


@many(4)
@given(VALUES, st.one_of(st.none(), RESULTS))
def test_any_logged_value(value, column):
    scores = accepted("logged by rewards", lambda: scored([1.0, 2.0, 3.0], [1.0, 1.0], "drop", value, column))
    if scores is not None:
        assert all(isinstance(number, float) for number in scores.metrics.values())


def check_scores(scores: Any, weights: list[float]) -> None:
    """Rewards are finite, or NaN where there is none; so is their weighted sum; a failed row has none."""
    assert scores.rewards.shape == (ROWS, 2)
    assert not scores.rewards.isinf().any()
    assert scores.rewards[scores.dropped].isnan().all()
    assert (scores.rewards * torch.tensor(weights, dtype=torch.float64)).nansum(1).isfinite().all()
    assert len(scores.failures) >= bool(scores.dropped.any())
