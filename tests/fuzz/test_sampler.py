"""The sampler over extreme logits and settings: the token has a probability, or the engine refuses the model."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.generate.sampling import draw
from groupwise.generate.types import Sampling
from tests.fuzz import accepted, many, tried

V = 6
LOGIT = st.one_of(
    st.floats(-30, 30, width=32),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from([-math.inf, 0.0, -0.0, 88.0, -104.0, 1e30, -1e30, 3.4028234663852886e38]),
)
LOGITS = st.lists(LOGIT, min_size=V, max_size=V)
BROKEN = st.lists(st.one_of(LOGIT, st.sampled_from([math.nan, math.inf])), min_size=V, max_size=V)
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.one_of(st.floats(), st.sampled_from([1e-6, 1e6, 5e-324, 1e-300, 1e-45, 1e300, 0.7])),
        "top_k": st.one_of(st.none(), st.integers(-1, V + 2), st.just(10**30)),
        "top_p": st.one_of(st.floats(0, 1), st.sampled_from([5e-324, 1e-300, 0.9, math.nan])),
        "min_p": st.one_of(st.none(), st.floats(0, 1), st.sampled_from([1.0, 5e-324, math.nan])),
        "order": st.sampled_from(["transformers", "vllm", "mlx_lm"]),
        "greedy": st.booleans(),
    },
)
NO_EOS = torch.zeros(V, dtype=torch.bool)


def literal(logits: list[float], temperature: float) -> list[float]:
    """The probabilities of a softmax, in Python's floats."""
    scaled = [logit / temperature for logit in logits]
    top = max(scaled)
    weights = [math.exp(value - top) if value > -math.inf else 0.0 for value in scaled]
    return [weight / math.fsum(weights) for weight in weights]


@many(12)
@given(LOGITS, SETTINGS, st.floats(0, 1, exclude_max=True, width=32))
def test_the_token_has_a_probability(logits, settings, uniform):
    sampling = accepted("sampling settings", lambda: Sampling(**settings))
    row = torch.tensor([logits], dtype=torch.float32)
    if sampling is None or (row / sampling.temperature).isinf().logical_and(row > 0).any() or row.isneginf().all():
        return
    tried("logits")
    drawn = draw(row, torch.tensor([uniform]), None, NO_EOS, sampling)
    token = int(drawn.ids[0])
    assert 0 <= token < V
    assert math.isfinite(float(drawn.logps[0])) or sampling.greedy is False
    temperature = 1.0 if sampling.greedy else sampling.temperature
    probabilities = literal([float(value) for value in row[0]], temperature)
    if sampling.greedy or sampling.top_k == 1:
        assert row[0, token] == row.max()
    if not sampling.filters or sampling.greedy:
        assert probabilities[token] > 0 or float(drawn.logps[0]) < -80
        if probabilities[token] > 1e-30:
            tolerance = 1e-5 + 2e-6 * float(row[row > -math.inf].abs().max()) / temperature
            assert math.isclose(float(drawn.logps[0]), math.log(probabilities[token]), abs_tol=tolerance)
    assert float(drawn.filtered_logps[0]) <= 1e-4
    assert drawn.filtered[0, token] > -math.inf


@many(8)
@given(BROKEN, SETTINGS, st.floats(0, 1, exclude_max=True, width=32))
def test_no_logits_give_an_invalid_token(logits, settings, uniform):
    """With NaN or an infinity anywhere the id is valid, and a log-prob that is not finite tells the engine."""
    sampling = accepted("sampling settings", lambda: Sampling(**settings))
    if sampling is None:
        return
    tried("logits")
    row = torch.tensor([logits], dtype=torch.float32)
    drawn = draw(row, torch.tensor([uniform]), None, NO_EOS, sampling)
    assert 0 <= int(drawn.ids[0]) < V
    if row.isnan().any() or row.isposinf().any() or row.isneginf().all():
        numbers = np.array([float(drawn.logps[0]), float(drawn.filtered_logps[0])])
        assert not np.isfinite(numbers).all()
