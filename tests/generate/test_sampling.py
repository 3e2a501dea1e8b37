"""Sampling: the right distribution, the same numbers for the same seed, and no filtered token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core.filters import filter_logits
from groupwise.errors import InputError
from groupwise.generate import sampling as sampling_module
from groupwise.generate.sampling import draw, uniforms
from groupwise.generate.types import Sampling

NO_EOS = torch.zeros(11, dtype=torch.bool)


def test_every_token_has_its_share_of_the_unit_interval():
    """Over a fine grid of u, each token is sampled in proportion to its probability."""
    logits = torch.randn(1, 11).double() * 2
    grid = (torch.arange(20_000) + 0.5) / 20_000
    drawn = draw(logits.expand(20_000, -1), grid, None, NO_EOS, Sampling(temperature=0.8))
    share = torch.bincount(drawn.ids, minlength=11) / 20_000
    wanted = (logits[0] / 0.8).softmax(-1)
    torch.testing.assert_close(share.double(), wanted, rtol=0, atol=1e-4)
    torch.testing.assert_close(drawn.logps, (logits[0] / 0.8).log_softmax(-1)[drawn.ids])
    assert torch.equal(drawn.logps, drawn.filtered_logps)


@pytest.mark.parametrize("order", ["transformers", "vllm", "mlx_lm"])
def test_filters(order):
    logits = torch.randn(300, 11) * 2
    sampling = Sampling(temperature=1.3, top_k=6, top_p=0.8, min_p=0.05, order=order)
    drawn = draw(logits, torch.rand(300), None, NO_EOS, sampling)
    wanted = filter_logits(logits, temperature=1.3, top_k=6, top_p=0.8, min_p=0.05, order=order)
    assert torch.equal(drawn.filtered, wanted)
    torch.testing.assert_close(drawn.filtered_logps, wanted.log_softmax(-1)[torch.arange(300), drawn.ids])
    torch.testing.assert_close(drawn.logps, (logits / 1.3).log_softmax(-1)[torch.arange(300), drawn.ids])
    assert (drawn.filtered_logps > drawn.logps - 1e-6).all()
    assert (drawn.filtered == -math.inf).any()


def mlx_lm_probabilities(logits, *, temp, top_p=1.0, top_k=None, min_p=None):
    """mlx-lm's pipeline for one row, filter by filter: top-k, min-p and top-p on log-probs, then the temperature."""
    logprobs = logits.log_softmax(-1)
    if top_k is not None and top_k > 0:
        removed = torch.argsort(-logprobs)[top_k:]
        logprobs = logprobs.scatter(0, removed, -math.inf)
    if min_p is not None and min_p > 0:
        logprobs = torch.where(logprobs < logprobs.max() + math.log(min_p), -math.inf, logprobs)
    if top_p < 1.0:
        indices = torch.argsort(logprobs)
        cumulative = torch.empty_like(logprobs).scatter(0, indices, logprobs.exp()[indices].cumsum(0))
        logprobs = torch.where(cumulative > 1 - top_p, logprobs, -math.inf)
    return (logprobs * (1 / temp)).softmax(-1)


@pytest.mark.parametrize("temp", [0.6, 1.0, 1.7])
@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 4},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 7, "min_p": 0.03, "top_p": 0.9},
        {"top_k": 5, "top_p": 0.7},
    ],
    ids=str,
)
def test_frequencies_and_log_probs_in_the_order_of_mlx_lm(filters, temp):
    logits = torch.randn(11, dtype=torch.float64) * 2
    wanted = mlx_lm_probabilities(logits, temp=temp, **filters)
    grid = (torch.arange(20_000) + 0.5) / 20_000
    sampling = Sampling(temperature=temp, order="mlx_lm", **filters)
    drawn = draw(logits.expand(20_000, -1), grid, None, NO_EOS, sampling)
    share = torch.bincount(drawn.ids, minlength=11) / 20_000
    torch.testing.assert_close(share.double(), wanted, rtol=0, atol=1e-4)
    torch.testing.assert_close(drawn.filtered_logps.exp(), wanted[drawn.ids])
    torch.testing.assert_close(drawn.logps, (logits / temp).log_softmax(-1)[drawn.ids])


@given(st.integers(1, 6), st.sampled_from([0.0, 1e-8, 0.5, 1 - 2**-24]))
def test_filtered_tokens_are_never_sampled(kept, uniform):
    logits = torch.full((1, 11), -math.inf)
    logits[0, 3 : 3 + kept] = torch.linspace(-20, 3, kept)
    token = int(draw(logits, torch.tensor([uniform]), None, NO_EOS, Sampling()).ids)
    assert 3 <= token < 3 + kept
    if uniform == 0.0:
        assert token == 3
    if uniform > 0.9:
        assert token == 2 + kept


def test_greedy():
    logits = torch.randn(50, 11)
    drawn = draw(logits, torch.rand(50), None, NO_EOS, Sampling(greedy=True, temperature=0.3, top_k=2))
    assert torch.equal(drawn.ids, logits.argmax(-1))
    torch.testing.assert_close(drawn.logps, logits.log_softmax(-1).amax(-1))
    assert not drawn.filtered_logps.any()


@pytest.mark.parametrize("greedy", [True, False])
def test_a_ban_holds_for_its_rows_only(greedy):
    logits = torch.zeros(200, 11)
    logits[:, 4] = 9.0
    eos = torch.zeros(11, dtype=torch.bool)
    eos[4] = True
    banned = torch.arange(200) % 2 == 0
    drawn = draw(logits, torch.rand(200), banned, eos, Sampling(greedy=greedy))
    assert (drawn.ids[banned] != 4).all()
    assert (drawn.ids[~banned] == 4).float().mean() > 0.9
    # The full distribution is the model's, without the ban.
    torch.testing.assert_close(drawn.logps, logits.log_softmax(-1)[torch.arange(200), drawn.ids])
    if not greedy:
        torch.testing.assert_close(drawn.filtered_logps[banned], torch.full((100,), -math.log(10)))


def test_uniforms_never_change():
    """Pinned: a changed generator would change every seeded run."""
    (numbers,) = uniforms(7, 3, [1], 4)
    assert numbers.dtype == np.float32
    np.testing.assert_allclose(numbers, PINNED, rtol=0, atol=1e-7)
    assert np.array_equal(uniforms(7, 3, [1], 9)[0, :4], numbers)
    assert np.array_equal(uniforms(7, 3, [5, 1, 0], 4)[1], numbers)
    others = [uniforms(8, 3, [1], 4), uniforms(7, 2, [1], 4), uniforms(7, 3, [0], 4)]
    assert not any(np.array_equal(other[0], numbers) for other in others)
    many = np.concatenate([uniforms(0, key, [0, 1], 500) for key in range(50)])
    assert many.min() >= 0
    assert many.max() < 1
    assert abs(many.mean() - 0.5) < 0.01


PINNED = [0.5891598, 0.7473645, 0.7999392, 0.4358629]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1, got 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"max_new_tokens": True}, "max_new_tokens"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"min_new_tokens": 300}, "min_new_tokens 300 is more than max_new_tokens 256"),
        ({"temperature": 0.0}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"order": "tranformers"}, "did you mean 'transformers'"),
        ({"seed": -1}, "seed"),
        ({"kept_bytes": 0}, "kept_bytes"),
        ({"eos_ids": ("a",)}, "eos_ids"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(InputError, match=message):
        Sampling(**settings)


@given(
    st.integers(0, 2**32), st.sampled_from([{"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.3}, {"top_k": 30, "top_p": 0.9}])
)
def test_sums_over_what_is_kept_are_those_over_the_vocabulary(seed, settings):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 200, generator=generator).mul(4).round(decimals=seed % 3)  # with ties
    uniform, eos = torch.rand(5, generator=generator), torch.zeros(200, dtype=torch.bool)
    got = draw(logits, uniform, None, eos, Sampling(**settings))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling_module, "_kept_only", lambda filtered: (filtered, None))
        wanted = draw(logits, uniform, None, eos, Sampling(**settings))
    assert torch.equal(got.ids, wanted.ids)
    assert torch.equal(got.filtered, wanted.filtered)
    torch.testing.assert_close(
        (got.logps, got.filtered_logps), (wanted.logps, wanted.filtered_logps), rtol=0, atol=1e-6
    )
