"""Pairs out of groups: the best against the worst, and a reason for each pair that is refused."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.errors import ConfigError
from groupwise.training.monitor.metrics import rollout_table
from groupwise.training.preference.group_pairs import REASONS, GroupPairs, build_group_pairs
from groupwise.training.rollout.advantages import compute_group_advantages
from tests.training.factories import make_batch, short_recipe

NAN = math.nan


def paired(rewards, *, groups=None, prompts=None, answers=None, allowed=None, **options):
    """`build_group_pairs`, by default of one prompt with different completions."""
    number = len(rewards)
    return build_group_pairs(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(groups or [0] * number),
        torch.tensor(prompts or [0] * number),
        [torch.tensor(ids) for ids in answers or [[sample] for sample in range(number)]],
        torch.tensor(allowed or [True] * number),
        **options,
    )


def numbers(result):
    return list(zip(result.chosen.tolist(), result.rejected.tolist(), strict=True))


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_the_best_is_paired_with_the_worst():
    result = paired([0.5, 0.1, 0.9, 0.3])
    assert numbers(result) == [(2, 1)]
    assert result.refused == {}
    assert (result.chosen.dtype, result.rejected.dtype) == (torch.long, torch.long)
    assert len(result) == 1


def test_further_pairs_go_inwards():
    rewards = [0.5, 0.1, 0.9, 0.3, 0.7]
    assert numbers(paired(rewards, per_group=2)) == [(2, 1), (4, 3)]
    assert numbers(paired(rewards, per_group=3)) == [(2, 1), (4, 3)]  # the middle one has no partner
    assert numbers(paired(rewards[:4], per_group=9)) == [(2, 1), (0, 3)]


def test_equal_rewards_make_no_pair():
    assert paired([1.0, 1.0, 1.0, 1.0], per_group=2).refused == {"tie": 2}
    result = paired([1.0, 0.5, 0.5, 0.0], per_group=2)
    assert numbers(result) == [(0, 3)]
    assert result.refused == {"tie": 1}
    assert numbers(paired([0.0, -0.0])) == []


def test_among_equal_rewards_the_first_sample_ranks_higher():
    result = paired([0.0, 1.0, 1.0, 0.0], per_group=2)
    assert numbers(result) == [(1, 3), (2, 0)]


@pytest.mark.parametrize(
    ("margin", "pairs", "refused"),
    [
        (0.0, [(0, 3), (1, 2)], {}),
        (0.249, [(0, 3), (1, 2)], {}),
        (0.25, [(0, 3)], {"margin": 1}),
        (1, [], {"margin": 2}),
    ],
)
def test_the_difference_must_be_more_than_the_margin(margin, pairs, refused):
    result = paired([1.0, 0.5, 0.25, 0.0], per_group=2, min_margin=margin)
    assert (numbers(result), result.refused) == (pairs, refused)


def test_the_same_completion_twice_makes_no_pair():
    answers = [[5, 6], [7], [8, 9], [5, 6]]
    result = paired([1.0, 0.6, 0.4, 0.0], answers=answers, per_group=2)
    assert numbers(result) == [(1, 2)]
    assert result.refused == {"same_answer": 1}
    longer = [[5, 6], [7], [8], [5, 6, 6]]
    assert numbers(paired([1.0, 0.6, 0.4, 0.0], answers=longer)) == [(0, 3)]


def test_samples_without_reward_or_masked_are_in_no_pair():
    result = paired([NAN, 0.9, 0.5, 0.1, 0.0], allowed=[True, False, True, True, True], per_group=2)
    assert numbers(result) == [(2, 4)]
    assert paired([NAN, 1.0, 0.0], allowed=[True, True, False]).refused == {"alone": 1}
    assert paired([NAN, NAN]).refused == {"alone": 1}


def test_pairs_do_not_cross_prompts_or_groups():
    rewards = [1.0, 0.0, 2.0, 3.0, 9.0, 4.0]
    assert numbers(paired(rewards, prompts=[0, 0, 1, 1, 2, 2])) == [(0, 1), (3, 2), (4, 5)]
    # One group over two prompts, and two groups within a prompt.
    assert numbers(paired(rewards, prompts=[0, 0, 0, 1, 1, 1])) == [(2, 1), (4, 3)]
    result = paired(rewards, prompts=[0, 0, 0, 1, 1, 1], groups=[0, 0, 1, 1, 2, 2])
    assert numbers(result) == [(0, 1), (4, 5)]
    assert result.refused == {"alone": 2}


def test_members_and_roles():
    result = GroupPairs(torch.tensor([4, 1]), torch.tensor([0, 2]))
    assert result.members(6).tolist() == [True, True, True, False, True, False]
    assert result.roles(6) == ["rejected", "chosen", "rejected", None, "chosen", None]
    nothing = paired([1.0, 1.0])
    assert nothing.members(2).tolist() == [False, False]
    assert nothing.roles(2) == [None, None]
    assert len(nothing) == 0
    assert nothing.chosen.dtype == torch.long


# --- random batches ---------------------------------------------------------------------------------------------------


def naive(rewards, groups, prompts, answers, allowed, per_group, min_margin):
    """Repeatedly the first of the best against the last of the worst; quadratic, without sorting."""
    pairs, refused = [], Counter()
    places = list(dict.fromkeys(zip(prompts, groups, strict=True)))
    for place in places:
        left = [
            sample
            for sample in range(len(rewards))
            if (prompts[sample], groups[sample]) == place and allowed[sample] and not math.isnan(rewards[sample])
        ]
        if len(left) < 2:
            refused["alone"] += 1
        for _ in range(per_group):
            if len(left) < 2:
                break
            best = worst = left[0]
            for sample in left:
                if rewards[sample] > rewards[best]:
                    best = sample
                if rewards[sample] <= rewards[worst]:
                    worst = sample
            left = [sample for sample in left if sample not in (best, worst)]
            if rewards[best] == rewards[worst]:
                refused["tie"] += 1
            elif not rewards[best] - rewards[worst] > min_margin:
                refused["margin"] += 1
            elif answers[best] == answers[worst]:
                refused["same_answer"] += 1
            else:
                pairs.append((best, worst))
    return pairs, dict(refused)


@st.composite
def batches(draw):
    """Few different rewards, completions, prompts and groups, so that there are many coincidences."""
    number = draw(st.integers(0, 14))

    def column(values):
        return draw(st.lists(values, min_size=number, max_size=number))

    return {
        "rewards": column(st.one_of(st.just(NAN), st.integers(-4, 4).map(lambda value: value / 4))),
        "groups": column(st.integers(0, 2)),
        "prompts": column(st.integers(0, 2)),
        "answers": column(st.lists(st.integers(0, 1), min_size=1, max_size=3)),
        "allowed": column(st.sampled_from([True, True, True, False])),
        "per_group": draw(st.integers(1, 4)),
        "min_margin": draw(st.sampled_from([0.0, 0.25, 0.3, 1.0])),
    }


def pairs_of(batch):
    return build_group_pairs(
        torch.tensor(batch["rewards"], dtype=torch.float64),
        torch.tensor(batch["groups"], dtype=torch.long),
        torch.tensor(batch["prompts"], dtype=torch.long),
        [torch.tensor(ids) for ids in batch["answers"]],
        torch.tensor(batch["allowed"], dtype=torch.bool),
        per_group=batch["per_group"],
        min_margin=batch["min_margin"],
    )


@given(batches())
def test_the_pairs_are_those_of_the_naive_version(batch):
    result = pairs_of(batch)
    pairs, refused = naive(**batch)
    assert numbers(result) == pairs
    assert result.refused == refused


@given(batches())
def test_properties_of_every_batch(batch):
    result = pairs_of(batch)
    rewards, places = batch["rewards"], list(zip(batch["prompts"], batch["groups"], strict=True))
    seen = [sample for pair in numbers(result) for sample in pair]
    assert len(seen) == len(set(seen))
    for better, worse in numbers(result):
        assert places[better] == places[worse]
        assert batch["allowed"][better]
        assert batch["allowed"][worse]
        assert batch["answers"][better] != batch["answers"][worse]
        assert rewards[better] - rewards[worse] > batch["min_margin"]
    usable = Counter(
        place
        for place, reward, allowed in zip(places, rewards, batch["allowed"], strict=True)
        if allowed and not math.isnan(reward)
    )
    assert set(result.refused) <= set(REASONS)
    assert all(result.refused.values())
    possible = sum(min(batch["per_group"], usable[place] // 2) for place in set(places))
    alone = result.refused.get("alone", 0)
    assert alone == sum(usable[place] < 2 for place in set(places))
    assert len(result) + sum(result.refused.values()) - alone == possible
    members = result.members(len(rewards)).tolist()
    roles = result.roles(len(rewards))
    assert [sample for sample, member in enumerate(members) if member] == sorted(seen)
    assert [sample for sample, role in enumerate(roles) if role == "chosen"] == sorted(result.chosen.tolist())
    assert [sample for sample, role in enumerate(roles) if role == "rejected"] == sorted(result.rejected.tolist())


# --- pairs of group advantages ----------------------------------------------------------------------------------------


def advantages_of(settings=None, *, weights=(1.0,), ranked_by=None, grouping=None, **options):
    batch = make_batch(**options)
    recipe = short_recipe({"preference.weight": 1.0, **(settings or {})})
    return batch, compute_group_advantages(batch, recipe, list(weights), grouping=grouping, ranked_by=ranked_by)


def test_samples_are_ranked_by_the_weighted_sum():
    """Rewards: 1, 0, 0, ½; four times 1; 0, 2, 1, 1; 0, 0, 1, 0."""
    _, result = advantages_of()
    assert numbers(result.pairs) == [(0, 2), (9, 8), (14, 15)]
    assert result.pairs.refused == {"tie": 1}
    _, result = advantages_of({"preference.pairs_per_group": 2, "preference.min_margin": 0.5})
    assert numbers(result.pairs) == [(0, 2), (9, 8), (14, 15)]
    assert result.pairs.refused == {"tie": 4, "margin": 1}


def test_another_reward_may_rank_the_samples():
    """The second reward has weight 0, and ranks opposite to the first in all groups but one."""
    first = torch.tensor([1.0, 0.0, 0.0, 0.5] * 4, dtype=torch.float64)
    second = torch.tensor([0.0, 3.0, 2.0, 1.0] * 3 + [NAN, 1.0, 1.0, NAN], dtype=torch.float64)
    columns = torch.stack([first, second], 1)
    _, result = advantages_of(columns=columns, weights=(1.0, 0.0))
    assert numbers(result.pairs) == [(0, 2), (4, 6), (8, 10), (12, 14)]
    _, result = advantages_of(columns=columns, weights=(1.0, 0.0), ranked_by=1)
    assert numbers(result.pairs) == [(1, 0), (5, 4), (9, 8)]
    assert result.pairs.refused == {"tie": 1}
    assert result.advantages[0] > 0 > result.advantages[1]


def test_masked_and_dropped_samples_are_in_no_pair():
    _, result = advantages_of({"masks.truncated": True}, cut=[0, 15], dropped=[9])
    assert numbers(result.pairs) == [(3, 2), (10, 8), (14, 13)]


def test_a_custom_grouping_does_not_pair_across_prompts():
    _, result = advantages_of(grouping=lambda batch: ["all"] * len(batch))
    assert numbers(result.pairs) == [(0, 2), (9, 8), (14, 15)]
    _, result = advantages_of(grouping=lambda batch: [number % 2 for number in range(len(batch))])
    # Even samples of each prompt, then odd ones: 1, 0 and 0, ½; 1, 1 twice; 0, 1 and 2, 1; 0, 1 and 0, 0.
    assert numbers(result.pairs) == [(0, 2), (3, 1), (10, 8), (9, 11), (14, 12)]
    assert result.pairs.refused == {"tie": 3}


@pytest.mark.parametrize(
    "settings",
    [
        {"preference.weight": 0.0},
        {"preference.pairs": "data", "preference.train": "pairs.jsonl"},
        {"preference.weight": 0.0, "preference.pairs": "both", "preference.train": "pairs.jsonl"},
    ],
    ids=["no weight", "data", "both without weight"],
)
def test_without_weight_or_with_a_data_set_only_there_are_no_group_pairs(settings):
    batch, result = advantages_of(settings)
    assert result.pairs is None
    assert "pair" not in rollout_table(1, batch, result, ["one"])


def test_both_sources_include_group_pairs():
    _, result = advantages_of({"preference.pairs": "both", "preference.train": "pairs.jsonl"})
    assert len(result.pairs) == 3


def test_which_samples_contribute():
    """Those with an advantage or in a pair; without the policy loss only those in a pair."""
    batch, result = advantages_of()
    wanted = (result.advantages != 0).tolist()
    assert result.contributes.tolist() == wanted
    assert rollout_table(1, batch, result, ["one"])["pair"] == result.pairs.roles(16)
    _, alone = advantages_of({"loss.policy_coef": 0.0})
    assert [sample for sample, contributes in enumerate(alone.contributes.tolist()) if contributes] == [
        0,
        2,
        8,
        9,
        14,
        15,
    ]
    # Equal sums have no learning signal, but a reward that ranks them does.
    columns = torch.tensor([[1.0, float(number % 4)] for number in range(16)], dtype=torch.float64)
    _, ranked = advantages_of(columns=columns, weights=(1.0, 0.0), ranked_by=1)
    assert bool(ranked.equal.all())
    assert [sample for sample, contributes in enumerate(ranked.contributes.tolist()) if contributes] == [
        sample for sample in range(16) if sample % 4 in (0, 3)
    ]


def test_a_single_sample_per_prompt_is_refused():
    settings = {"preference.weight": 1.0, "sampling.samples_per_prompt": 1, "advantages.baseline": "none"}
    with pytest.raises(ConfigError, match="no group has two completions for a pair; use at least 2"):
        short_recipe(settings)
