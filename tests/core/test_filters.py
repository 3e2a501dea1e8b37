"""Sampling filters against transformers' logits processors and literal versions, and kept sets."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core import KeptSets, filter_logits, keep_sampling_mask
from groupwise.errors import InputError

INF = math.inf


def random_logits(seed, rows=4, vocabulary=40):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64) * 3


def literal_transformers(logits, temperature, top_k, top_p, min_p, keep):
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    for active, processor in (
        (temperature != 1.0, lambda: TemperatureLogitsWarper(temperature)),
        (top_k is not None, lambda: TopKLogitsWarper(top_k, min_tokens_to_keep=keep)),
        (top_p < 1, lambda: TopPLogitsWarper(top_p, min_tokens_to_keep=keep)),
        (min_p is not None, lambda: MinPLogitsWarper(min_p, min_tokens_to_keep=keep)),
    ):
        if active:
            logits = processor()(None, logits)
    return logits


@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([1.0, 0.3, 0.7, 2.5]),
    top_k=st.one_of(st.none(), st.integers(1, 60)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.none(), st.floats(0.001, 1.0)),
    keep=st.integers(1, 5),
)
def test_equal_to_transformers(seed, temperature, top_k, top_p, min_p, keep):
    logits = random_logits(seed)
    ours = filter_logits(
        logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, min_tokens_to_keep=keep
    )
    torch.testing.assert_close(ours, literal_transformers(logits, temperature, top_k, top_p, min_p, keep))
    assert ((ours > -INF).sum(-1) >= keep).all()


@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([1.0, 0.7, 1.7]),
    top_k=st.one_of(st.none(), st.integers(1, 60)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.none(), st.floats(0.001, 1.0)),
)
def test_vllm_order(seed, temperature, top_k, top_p, min_p):
    """vLLM applies min-p before top-k and top-p: the same filters, each by itself, in that order."""
    ours = filter_logits(
        random_logits(seed), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, order="vllm"
    )
    step = filter_logits(random_logits(seed), temperature=temperature)
    step = filter_logits(step, min_p=min_p)
    step = filter_logits(step, top_k=top_k)
    assert torch.equal(ours, filter_logits(step, top_p=top_p))


def literal_mlx_lm(logits, temperature, top_k, top_p, min_p):
    """mlx-lm's filters, one row at a time in plain Python."""
    result = []
    for row in logits.log_softmax(-1).tolist():
        if top_k:
            last = sorted(row)[-min(top_k, len(row))]
            row = [x if x >= last else -INF for x in row]
        if min_p:
            bound = max(row) + math.log(min_p)
            row = [x if x >= bound else -INF for x in row]
        if top_p < 1:
            order = sorted(range(len(row)), key=row.__getitem__)
            total, kept = 0.0, []
            for position in order:
                total += math.exp(row[position])
                if total > 1 - top_p:
                    kept.append(position)
            row = [x if position in kept else -INF for position, x in enumerate(row)]
        result.append([x / temperature for x in row])
    return torch.tensor(result, dtype=torch.float64)


@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([1.0, 0.5, 2.0]),
    top_k=st.one_of(st.none(), st.integers(1, 60)),
    top_p=st.one_of(st.just(1.0), st.floats(0.3, 0.999)),
    min_p=st.one_of(st.none(), st.floats(0.001, 1.0)),
)
def test_mlx_lm_order(seed, temperature, top_k, top_p, min_p):
    logits = random_logits(seed)
    ours = filter_logits(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, order="mlx_lm")
    literal = literal_mlx_lm(logits, temperature, top_k, top_p, min_p)
    some = (literal > -INF).any(-1)
    assert torch.equal((ours > -INF)[some], (literal > -INF)[some])
    torch.testing.assert_close(ours[some].softmax(-1), literal[some].softmax(-1))
    assert ((ours[~some] > -INF).sum(-1) == 1).all()  # mlx-lm would leave no token; ours keeps the best


def test_the_orders_keep_different_sets():
    percent = torch.tensor([30, 20, 14, 10, 8, 6, 5, 4, 3], dtype=torch.float64)
    logits = torch.log(percent / 100)
    kept = {
        order: (filter_logits(logits, top_p=0.7, min_p=0.3, order=order) > -INF).sum().item()
        for order in ("transformers", "vllm", "mlx_lm")
    }
    # top-p cuts a tail of up to 30: 3 + 4 + 5 + 6 + 8 = 26. Of the rest (30 20 14 10) all are ≥ 0.3 · 30.
    # min-p first leaves 30 20 14 10, together 74: the tail 10/74 is cut, 24/74 would be too much.
    # mlx-lm does not renormalise: 10 and 14 are within 30 of 100, so both are cut.
    assert kept == {"transformers": 4, "vllm": 3, "mlx_lm": 2}
    hot = filter_logits(logits, temperature=10.0, top_p=0.5)
    late = filter_logits(logits, temperature=10.0, top_p=0.5, order="mlx_lm")
    assert (hot > -INF).sum() > (late > -INF).sum()  # temperature flattens before the filter, or after it


def test_ties_at_rank_k_all_stay():
    logits = torch.tensor([3.0, 1.0, 2.0, 2.0, 2.0, 0.0])
    assert (filter_logits(logits, top_k=2) > -INF).tolist() == [True, False, True, True, True, False]


def test_settings_without_effect():
    logits = random_logits(0)
    for settings in ({}, {"top_k": 40}, {"top_k": 10_000}, {"top_k": 0}, {"top_p": 1.0}, {"min_p": 0.0}):
        assert torch.equal(filter_logits(logits, **settings), logits), settings


@pytest.mark.parametrize("order", ["transformers", "vllm", "mlx_lm"])
def test_rows_of_minus_infinity(order):
    logits = torch.tensor([[-INF] * 4, [1.0, -INF, 2.0, 0.0]])
    ours = filter_logits(logits, temperature=0.5, top_k=3, top_p=0.9, min_p=0.05, order=order)
    assert not ours.isnan().any()
    assert (ours[0] == -INF).all()
    assert ours[1, 1] == -INF
    assert ours[1, 2] > -INF


def test_shapes_and_types():
    logits = torch.randn(2, 3, 8).bfloat16()
    ours = filter_logits(logits, top_k=3, top_p=0.9)
    assert ours.shape == (2, 3, 8)
    assert ours.dtype == torch.float32
    assert torch.equal(ours[1, 2], filter_logits(logits[1, 2], top_k=3, top_p=0.9))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "temperature must be a number from 1e-06 to 1e.06, got 0.0; .*greedily"),
        ({"temperature": 1e-300}, "temperature must be"),
        ({"temperature": 1e300}, "temperature must be"),
        ({"temperature": 10**400}, "temperature must be"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"temperature": math.nan}, "temperature must be"),
        ({"top_k": -1}, "top_k must be an integer"),
        ({"top_k": 2.5}, "top_k must be an integer"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.1}, "top_p must be"),
        ({"top_p": None}, "top_p must be"),
        ({"top_p": "0.9"}, "top_p must be"),
        ({"temperature": "1"}, "temperature must be"),
        ({"min_p": "0.1"}, "min_p must be"),
        ({"min_p": -0.1}, r"min_p must be in \[0, 1\]"),
        ({"min_p": 2.0}, "min_p must be"),
        ({"min_tokens_to_keep": 0}, "min_tokens_to_keep must be"),
        ({"order": "hf"}, "unknown order 'hf'"),
    ],
)
def test_invalid_arguments(settings, message):
    with pytest.raises(InputError, match=message):
        filter_logits(torch.randn(5), **settings)


# --- kept sets -------------------------------------------------------------------------------------------------------


def test_kept_sets_round_trip():
    filtered = filter_logits(random_logits(3, rows=6).view(2, 3, 40), top_k=5)
    filtered[1, 1] = 0.0  # a position where nothing was filtered is stored as an empty set
    sets = KeptSets.from_logits(filtered)
    assert len(sets) == 6
    assert sets.ids.dtype == torch.int32
    assert sets.offsets.tolist() == [0, 5, 10, 15, 20, 20, 25]
    assert torch.equal(sets.mask(0, 6, 40), (filtered > -INF).view(6, 40))
    assert torch.equal(sets.mask(2, 5, 40), (filtered > -INF).view(6, 40)[2:5])


def test_renormalised_over_the_kept_set():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.1, 0.1]], dtype=torch.float64)).requires_grad_()
    kept = torch.tensor([[True, True, False, False]])
    ours = keep_sampling_mask(logits, kept)
    torch.testing.assert_close(ours.exp(), torch.tensor([[0.625, 0.375, 0, 0]], dtype=torch.float64))
    gradient = torch.autograd.grad(ours[0, 0], logits)[0]
    torch.testing.assert_close(gradient, torch.tensor([[0.375, -0.375, 0, 0]], dtype=torch.float64))
    sets = KeptSets(torch.tensor([1, 0], dtype=torch.int32), torch.tensor([0, 2]))
    assert torch.equal(keep_sampling_mask(logits, sets), ours)
    torch.testing.assert_close(keep_sampling_mask(logits, torch.zeros(1, 4)), logits.log_softmax(-1))


@given(seed=st.integers(0, 10_000), top_k=st.integers(1, 10), top_p=st.floats(0.1, 1.0))
def test_training_distribution_is_the_sampling_distribution(seed, top_k, top_p):
    """Renormalising over the kept set gives the filtered distribution."""
    logits = random_logits(seed)
    filtered = filter_logits(logits, temperature=0.8, top_k=top_k, top_p=top_p)
    ours = keep_sampling_mask(logits / 0.8, KeptSets.from_logits(filtered))
    torch.testing.assert_close(ours.exp(), filtered.softmax(-1))


def test_invalid_kept_sets():
    with pytest.raises(InputError, match=r"kept sets need ids \(M,\)"):
        KeptSets(torch.zeros(2, 2), torch.zeros(2))
    with pytest.raises(InputError, match="1 kept sets were given for 2 positions"):
        keep_sampling_mask(torch.zeros(2, 4), KeptSets(torch.zeros(0), torch.zeros(2)))
    with pytest.raises(InputError, match="kept has shape"):
        keep_sampling_mask(torch.zeros(2, 4), torch.zeros(2, 3))


def test_top_p_keeps_ties_with_the_last_token():
    logits = torch.tensor([[0.2, 0.4, 0.2, 0.2]]).log()
    assert torch.equal(filter_logits(logits, top_p=0.5) > -torch.inf, torch.ones(1, 4, dtype=torch.bool))
    assert (filter_logits(logits, top_p=0.39) > -torch.inf).tolist() == [[False, True, False, False]]


def test_kept_sets_of_some_positions():
    mask = torch.rand(20, 30) < 0.3
    mask[4] = False
    kept = KeptSets.from_logits(torch.where(mask, 0.0, -torch.inf))
    chosen = torch.tensor([7, 4, 4, 0, 19, 3])
    some = kept.select(chosen).to("cpu")
    assert torch.equal(some.mask(0, 6, 30), kept.mask(0, 20, 30)[chosen])
    assert len(kept.select(chosen[:0])) == 0
