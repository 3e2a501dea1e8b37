"""How a batch is divided into mini-batches and local batches, and the means over these."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from groupwise.core import policy_loss
from groupwise.training.rollout.advantages import compute_group_advantages
from groupwise.training.update.minibatch import DatasetPairs, MiniBatch, build_from_samples, split_minibatches
from tests.training.factories import BUDGETS, check_update, make_batch, make_updater, naive_logps, perturb, short_recipe

LENGTHS = torch.tensor([3, 7, 1, 5, 4, 4, 2, 6, 8, 1, 3, 2, 5, 2, 7, 7])
EVERYTHING = {"train.skip_equal_rewards": False}


def split(settings, seed=3, **options) -> tuple[list[MiniBatch], object, object, object]:
    recipe = short_recipe(settings)
    batch = make_batch(**options)
    group_advantages = compute_group_advantages(batch, recipe, [1.0])
    return split_minibatches(batch, group_advantages, recipe, DatasetPairs(), seed), recipe, batch, group_advantages


def test_completions_are_shuffled_over_mini_batches():
    parts, _, batch, group_advantages = split({**EVERYTHING, "train.mini_batch_by": "samples", "train.mini_batches": 3})
    assert [len(part) for part in parts] == [5, 5, 6]
    assert sorted(sample for part in parts for sample in part.samples) == list(range(16))
    assert any(len({sample // 4 for sample in part.samples}) > 1 for part in parts)
    for part in parts:
        flat = [ids for members in part.completions for ids in members]
        for row, sample in enumerate(part.samples):  # everything is of the same sample
            assert flat[row].tolist() == batch.ids[sample].tolist()
            assert part.advantages[row] == group_advantages.advantages[sample]
            assert part.sampler_logps[row, : len(flat[row])].tolist() == batch.sampler_logps[sample].tolist()
        assert part.totals.tokens == int(LENGTHS[part.samples].sum())
        mean = float(LENGTHS[part.samples].double().mean())
        assert part.totals.token_scale == pytest.approx(mean / float(LENGTHS.double().mean()))
    again = split({**EVERYTHING, "train.mini_batch_by": "samples", "train.mini_batches": 3}, seed=4)[0]
    assert [part.samples for part in again] != [part.samples for part in parts]


def test_one_mini_batch_is_shuffled_only_for_local_batches():
    assert split({**EVERYTHING, "train.mini_batch_by": "samples"})[0][0].samples == list(range(16))
    (part,) = split({**EVERYTHING, "train.mini_batch_by": "samples", "train.local_batch_size": 4})[0]
    assert part.samples != list(range(16))
    order = torch.randperm(16, generator=torch.Generator().manual_seed(3)).tolist()
    for row, sample in enumerate(part.samples):
        number = order.index(sample) // 4
        assert int(part.local_batch[row]) == number
        assert float(part.local_lengths[row]) == float(LENGTHS[order[number * 4 : number * 4 + 4]].double().mean())


def test_truncated_completions_are_empty_if_they_are_dropped():
    settings = {**EVERYTHING, "masks.drop_truncated": True, "train.local_batch_size": 8}
    (part,) = split(settings, cut=[1, 12])[0]
    assert part.samples == [sample for sample in range(16) if sample not in (1, 12)]
    assert part.totals.tokens == int(LENGTHS.sum()) - 7 - 5
    assert part.totals.sequences == 16
    assert part.local_lengths.unique().tolist() == sorted([(32 - 7) / 8, (35 - 5) / 8])


@pytest.mark.parametrize("everything", [True, False])
def test_groups_of_equal_rewards_that_are_dropped_are_in_no_denominator(everything):
    """The rewards of the second prompt, samples 4 to 7, are equal."""
    settings = {"masks.drop_equal_rewards": True, "train.local_batch_size": 6, "train.skip_equal_rewards": False}
    (part,) = split({**settings, "train.skip_equal_rewards": not everything})[0]
    rest = [*range(4), *range(8, 16)]
    tokens = int(LENGTHS[rest].sum())
    assert set(part.samples) <= set(rest)
    assert (part.samples == rest) is everything
    assert (part.totals.tokens, part.totals.sequences, part.totals.prompts) == (tokens, 12, 3)
    assert (part.totals.policy_tokens, part.totals.policy_sequences) == (tokens, 12)
    assert set(part.local_lengths.tolist()) == {float(LENGTHS[rest[a : a + 6]].double().mean()) for a in (0, 6)}
    assert set(part.prompt_tokens.tolist()) == {16, 14, 21}


def test_a_mini_batch_of_dropped_groups_is_empty():
    settings = {"masks.drop_equal_rewards": True, "train.mini_batches": 4}
    parts = split(settings)[0]
    assert sorted(part.empty for part in parts) == [False, False, False, True]
    (empty,) = (part for part in parts if part.empty)
    assert (empty.totals.tokens, empty.totals.sequences, empty.totals.prompts) == (0, 0, 0)


def literal_terms(updater, batch, advantages, order, size, recipe) -> dict[str, Tensor]:
    """BNPO's loss and the entropy bonus of one local batch after another, each of which is a mean over its tokens."""
    rows = naive_logps(updater.handle, batch, range(4), recipe)
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    policy, bonus = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for members in batches:
        mask = rows["mask"][members]
        old = rows["logps"].detach()[members]
        value, _ = policy_loss(rows["logps"][members], old, advantages[members], mask, loss="bnpo")
        policy = policy + value * len(members) / len(order)
        bonus = bonus + rows["entropy"][members][mask].mean() * len(members) / len(order)
    return {"policy": policy, "entropy": -recipe.loss.entropy_coef * bonus}


@pytest.mark.parametrize("size", [6, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4, 16, 99))])
def test_means_over_local_batches_do_not_depend_on_packs(size):
    settings = {"loss.name": "bnpo", "loss.entropy_coef": 0.3, "train.local_batch_size": size}
    recipe, batch = short_recipe(settings), make_batch()
    group_advantages = compute_group_advantages(batch, recipe, [1.0])
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1)).tolist()
    updater = make_updater(recipe)
    perturb(updater.handle.model)
    minibatch = build_from_samples(batch, group_advantages, order, recipe)
    terms = literal_terms(updater, batch, group_advantages.advantages, order, size, recipe)
    check_update(updater, minibatch, recipe, terms, BUDGETS)


def test_every_token_of_a_batch_has_the_same_weight_in_mini_batches_of_completions():
    """The loss dapo divides by the mean number of tokens of a mini-batch, as in TRL."""
    parts, recipe, batch, group_advantages = split({"train.mini_batch_by": "samples", "train.mini_batches": 2})
    updater = make_updater(recipe)
    perturb(updater.handle.model)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(3)).tolist()
    for part, members in zip(parts, (order[:8], order[8:]), strict=True):
        rows = naive_logps(updater.handle, batch, range(4), recipe)
        ratio = (rows["logps"] - rows["logps"].detach()).exp()[members]
        values = -ratio * group_advantages.advantages[members][:, None].double() * rows["mask"][members]
        terms = {"policy": values.sum() / (int(LENGTHS.sum()) / 2)}
        check_update(updater, part, recipe, terms, (40,))


def test_high_entropy_tokens_of_each_local_batch():
    settings = {"masks.high_entropy": 0.4, "train.local_batch_size": 4, "loss.name": "grpo"}
    recipe, batch = short_recipe(settings), make_batch()
    group_advantages = compute_group_advantages(batch, recipe, [1.0])
    updater = make_updater(recipe)
    perturb(updater.handle.model)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1)).tolist()
    rows = naive_logps(updater.handle, batch, range(4), recipe)
    value = torch.zeros((), dtype=torch.float64)
    for start in range(0, 16, 4):
        members = order[start : start + 4]
        mask, entropy = rows["mask"][members], rows["entropy"][members].detach()
        high = mask & (entropy >= torch.quantile(entropy[mask], 0.6))
        assert 0 < int(high.sum()) < int(mask.sum())
        old = rows["logps"].detach()[members]
        advantages = group_advantages.advantages[members]
        share, _ = policy_loss(rows["logps"][members], old, advantages, mask, loss="grpo", policy_mask=high)
        value = value + share / 4
    minibatch = build_from_samples(batch, group_advantages, order, recipe)
    check_update(updater, minibatch, recipe, {"policy": value}, (40,))
