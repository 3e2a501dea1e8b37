"""Advantages of turns on their way from the batch to the update."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from groupwise.core.ragged import Ragged
from groupwise.core.sequences import TokenSequence, Turns
from groupwise.model.handle import prepare
from groupwise.model.logprobs import completion_logps
from groupwise.training.rollout.advantages import compute_group_advantages
from groupwise.training.rollout.batch import Batch, TurnFacts, join
from groupwise.training.update.minibatch import build_minibatch
from tests.training.factories import (
    VOCABULARY,
    gradient_of,
    last_gradient,
    make_batch,
    make_updater,
    short_recipe,
    small_llama,
)

FACTS = [
    TurnFacts((2, 1), (0.0, 0.0), (0, 1)),
    TurnFacts((1, 2), (0.5, 0.0), (0, 2)),
    TurnFacts((2, 1), (0.0, 0.0), (0, 1)),
    TurnFacts((3,), (0.0,), (0,)),
    TurnFacts((1, 1, 1), (0.0, 0.0, 0.0), (0, None, 1)),
    TurnFacts((1,), (0.0,), (None,)),
]
SETTINGS = {"advantages.turn_weight": 0.5, "advantages.turn_discount": 0.9, "advantages.scale": "none"}


def with_turns() -> Batch:
    """Two prompts with three conversations each, with given tokens between their turns."""
    batch = make_batch(
        [[1.0, 0.0, 0.0], [2.0, 1.0, 0.0]], [[sum(facts.tokens) for facts in part] for part in (FACTS[:3], FACTS[3:])]
    )
    generator = torch.Generator().manual_seed(5)
    sequences = []
    for ids, facts in zip(batch.ids, FACTS, strict=True):
        parts, mask = [], []
        for part in ids.split(list(facts.tokens)):
            parts += [part, torch.randint(VOCABULARY, (2,), generator=generator)]
            mask += [torch.ones(len(part)), torch.zeros(2)]
        sequences.append(TokenSequence(torch.cat(parts)[:-2], torch.cat(mask)[:-2].bool()))
    return replace(batch, turns=Turns.of(sequences), turn_facts=list(FACTS))


def test_by_hand():
    batch = with_turns()
    result = compute_group_advantages(batch, short_recipe(SETTINGS), [1.0])
    assert result.token_advantages is not None
    first = [1 - 1 / 3, -1 / 3, -1 / 3]  # of the conversations of the first prompt
    # Returns at "start": 0.9 · 1, 0.5 + 0, 0; at "left": 1 and 0.
    start = [0.9 - 1.4 / 3, 0.5 - 1.4 / 3, 0.0 - 1.4 / 3]
    wanted = [
        [first[0] + 0.5 * start[0]] * 2 + [first[0] + 0.5 * 0.5],
        [first[1] + 0.5 * start[1]] + [first[1]] * 2,
        [first[2] + 0.5 * start[2]] * 2 + [first[2] - 0.5 * 0.5],
    ]
    for got, values in zip(result.token_advantages, wanted, strict=False):
        assert got.tolist() == pytest.approx(values, abs=1e-6)
    second = [1.0, 0.0, -1.0]
    at_start = [2.0 - (2.0 + 0.81) / 2, 0.81 - (2.0 + 0.81) / 2]
    assert result.token_advantages[3].tolist() == pytest.approx([second[0] + 0.5 * at_start[0]] * 3, abs=1e-6)
    assert result.token_advantages[4].tolist() == pytest.approx([second[1] + 0.5 * at_start[1], 0.0, 0.0], abs=1e-6)
    assert result.token_advantages[5].tolist() == pytest.approx([-1.0])


def test_states_of_different_prompts_are_not_compared():
    batch = with_turns()
    apart = compute_group_advantages(batch, short_recipe(SETTINGS), [1.0])
    together = compute_group_advantages(batch, short_recipe(SETTINGS), [1.0], grouping=lambda batch: [0] * 6)
    assert apart.token_advantages is not None
    assert together.token_advantages is not None
    # The baseline of a conversation is another one, its turns are compared with the same ones.
    moved = (together.advantages - apart.advantages).repeat_interleave(batch.lengths)
    torch.testing.assert_close(together.token_advantages.values, apart.token_advantages.values + moved)


def test_without_the_weight_nothing_changes():
    result = compute_group_advantages(with_turns(), short_recipe(), [1.0])
    assert result.token_advantages is None


def test_a_conversation_without_an_advantage_contributes_by_its_turns():
    batch = with_turns()
    batch = replace(batch, rewards=torch.ones(6, 1, dtype=torch.float64))
    result = compute_group_advantages(batch, short_recipe(SETTINGS), [1.0])
    assert not result.advantages.any()
    assert result.contributes.tolist() == [True, True, True, True, True, False]


def test_taking_and_joining_keeps_the_turns():
    batch = with_turns()
    both = join([batch.take([1]), batch.take([0])])
    assert both.turn_facts == FACTS[3:] + FACTS[:3]
    assert both.turns is not None
    assert [sequence.ids.tolist() for sequence in both.turns][3:] == [
        sequence.ids.tolist() for sequence in list(with_turns().turns or ())[:3]
    ]


@pytest.mark.parametrize("loss", ["dapo", "grpo", "reinforce"])
def test_the_update_weighs_each_token_by_its_turn(loss):
    """The gradient is that of −Σ A_t log π(o_t), with each conversation computed by itself."""
    batch = with_turns()
    recipe = short_recipe({**SETTINGS, "loss.name": loss, "loss.aggregation": "token_mean", "loss.kl_coef": 0.0})
    advantages = compute_group_advantages(batch, recipe, [1.0])
    minibatch = build_minibatch(batch, advantages, [0, 1], recipe)
    assert minibatch.token_advantages is not None
    updater = make_updater(recipe)
    updater.update(minibatch, recipe)
    handle = prepare(small_llama(), plain=True)
    total = torch.zeros((), dtype=torch.float64)
    weights = advantages.token_advantages or Ragged.of([])
    for number, sequence in enumerate(batch.turns or ()):
        prompt = batch.prompts[number // 3].ids
        logps = completion_logps(handle, [prompt], [[sequence]]).logps[0]
        total = total - (weights[number].double() * logps).sum()
    wanted = gradient_of(handle.model, total / sum(len(ids) for ids in batch.ids))
    got = last_gradient(updater)
    assert wanted
    for name, gradient in wanted.items():
        assert (got[name] - gradient).norm() <= 1e-6 * gradient.norm(), name
