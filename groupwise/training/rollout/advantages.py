"""From rewards to advantages: the groups, the advantage of each sample in its group, and masks.

Everything here follows from the sampled batch; masks that need the policy's log-probs (off-policy, entropy) are in
update/policy_masks.py. Masked samples still count in baselines and denominators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from groupwise.config import Recipe
from groupwise.core import group_advantages, group_index, group_statistics, pass_at_k_advantages
from groupwise.core.advantages import lies_within
from groupwise.core.masks import validity_reasons
from groupwise.core.ragged import Ragged
from groupwise.core.turn_advantages import discounted_returns, turn_advantages
from groupwise.errors import ConfigError, RewardError, check_choice
from groupwise.grouping.labels import LABELS, parent_labels
from groupwise.rewards import weighted_total
from groupwise.tasks.base import Grade
from groupwise.training.preference.group_pairs import build_group_pairs
from groupwise.training.rollout.batch import Batch, GroupAdvantages
from groupwise.training.rollout.difficulty import correctness, difficulty_weights
from groupwise.user_code import failures_named, load_function

AdvantageFunction = Callable[[Tensor, Tensor, Tensor], Any]
"""Rewards ``(B, K)``, group of each sample ``(B,)``, weights ``(K,)`` to advantages ``(B,)``."""

GroupingFunction = Callable[[Batch], Sequence[Any] | Tensor]
"""A batch to one label per sample; samples with equal labels are compared with each other."""

ADVANTAGES: dict[str, AdvantageFunction] = {}
"""Custom advantages by name: add one here and set ``advantages.function`` to its name."""


def similarity_grouping(batch: Batch) -> list[str]:
    """The cluster of each sample among the completions of its prompt."""
    if LABELS not in batch.extra:
        raise ConfigError("advantages.grouping is 'similarity', but this batch was sampled without a grouper")
    return batch.extra[LABELS]


GROUPINGS: dict[str, GroupingFunction | None] = {"prompt": None, "similarity": similarity_grouping}
"""Groupings by name: add one here and set ``advantages.grouping`` to its name."""


def find_advantage(name: str | None) -> AdvantageFunction | None:
    """A registered advantage or ``module:function``; None for the built-in one."""
    return None if name is None else _find(name, ADVANTAGES, "advantages.function", "advantage")


def find_grouping(name: str) -> GroupingFunction | None:
    """A registered grouping or ``module:function``; None to group by prompt."""
    return _find(name, GROUPINGS, "advantages.grouping", "grouping")


def _find(
    name: str, registered: Mapping[str, Callable[..., Any] | None], setting: str, what: str
) -> Callable[..., Any] | None:
    if ":" not in name:
        check_choice(setting, name, [*registered, "module:function"], ConfigError)
    if name in registered:
        return registered[name]
    return load_function(name, what=what)


def compute_group_advantages(
    batch: Batch,
    step_recipe: Recipe,
    weights: Sequence[float],
    *,
    advantage: AdvantageFunction | None = None,
    grouping: GroupingFunction | None = None,
    grades: Mapping[str, Grade] | None = None,
    metric: str | None = None,
    ranked_by: int | None = None,
) -> GroupAdvantages:
    """Rewards ``(B, K)`` to advantages ``(B,)``; ``advantage`` and ``grouping`` replace the built-in functions.

    weights: of the ``K`` rewards.
    grades: only reported, except the one named ``metric``: the validity mask asks it whether there is an answer, and
        weights by difficulty whether the answer is correct.
    ranked_by: the reward that ranks the samples of a group for preference pairs, instead of the weighted sum.
    """
    if not len(batch):
        nothing = torch.zeros(0)
        return GroupAdvantages(nothing.double(), nothing.long(), nothing, {}, nothing.bool())
    rows = [batch.rows[prompt] for prompt in batch.prompt_of.tolist()]
    graded: dict[str, list[bool | None]] = {}
    for name, grade in (grades or {}).items():
        with failures_named(f"the grade {name!r}"):
            graded[name] = [grade(row, text) for row, text in zip(rows, batch.texts, strict=True)]
    settings, answers = step_recipe.advantages, graded.get(metric or "")
    groups = _groups(batch, grouping)
    parents = _parent_groups(batch, grouping, groups) if settings.shrinkage and grouping is not None else []
    factors = torch.tensor(list(weights), dtype=torch.float64)
    rewards = batch.scored
    total = weighted_total(rewards, weights)
    # With shrinkage, a cluster of equal rewards has a learning signal unless all rewards of its prompt are equal.
    statistics = group_statistics(total, parents[0] if parents else groups)
    equal = statistics.equal[statistics.index]
    left_out = {"equal_rewards": equal} if step_recipe.masks.drop_equal_rewards and rewards.shape[1] else {}
    if advantage is not None:
        with failures_named(f"the advantage function {settings.function}"):
            values = advantage(rewards, groups, factors)
        advantages = _check_advantages(values, len(batch))
    elif not rewards.shape[1]:
        advantages = torch.zeros(len(batch))  # a run without rewards
    elif settings.pass_at_k is not None:
        threshold, k = step_recipe.scoring.success_threshold, settings.pass_at_k
        advantages = pass_at_k_advantages(total, groups, k, threshold=threshold, scale=settings.scale, eps=settings.eps)
    else:
        if settings.scale == "mean":
            _check_not_negative(total, batch)
        advantages = group_advantages(
            torch.where(equal[:, None], torch.nan, rewards) if left_out else rewards,
            groups,
            scale=settings.scale,
            eps=settings.eps,
            unbiased=settings.unbiased,
            baseline=settings.baseline,
            weights=factors,
            combine=settings.combine,
            within=parents,
            shrinkage=settings.shrinkage,
        )
    advantages = torch.where(batch.dropped, 0.0, advantages).float()
    if not bool(advantages.isfinite().all()):
        where = int((~advantages.isfinite()).nonzero()[0])
        raise RewardError(
            f"the advantage of completion {where % batch.samples + 1} of {batch.samples} of row "
            f"{batch.row_numbers[where // batch.samples]}, whose reward is {float(total[where]):g}, is beyond float32; "
            "scale the rewards, or divide by their standard deviation (advantages.scale = 'group' or 'batch')"
        )
    result = GroupAdvantages(
        rewards=total,
        groups=groups,
        advantages=advantages,
        masked_out=_masks(batch, step_recipe, answers) | left_out,
        equal=equal,
        graded=graded,
        uses_advantages=bool(step_recipe.loss.policy_coef),
        taught=step_recipe.taught,
    )
    if settings.difficulty != "none":
        correct = correctness(answers, total)
        difficulty = difficulty_weights(settings.difficulty, correct, groups, result.contributes)
        result = replace(result, advantages=(result.advantages * difficulty).float(), difficulty=difficulty)
    if settings.turn_weight and batch.turn_facts is not None:
        result = replace(result, token_advantages=_with_turns(result, batch, step_recipe))
    preference = step_recipe.preference
    if preference.weight and preference.pairs != "data":
        pairs = build_group_pairs(
            total if ranked_by is None else rewards[:, ranked_by],
            groups,
            batch.prompt_of,
            batch.ids,
            result.allowed,
            per_group=preference.pairs_per_group,
            min_margin=preference.min_margin,
        )
        result = replace(result, pairs=pairs)
    return result


def _with_turns(result: GroupAdvantages, batch: Batch, step_recipe: Recipe) -> Ragged:
    """The advantage of each token: its conversation's, plus that of its turn among the turns at the same state.

    The weighted sum of the conversation's rewards counts for its last turn, beside what the environment gave per turn.
    """
    settings, facts = step_recipe.advantages, batch.turn_facts or []
    rewards = Ragged.of([torch.tensor(one.rewards, dtype=torch.float64) for one in facts])
    rewards.values[rewards.lengths.cumsum(0) - 1] += result.rewards
    turns = turn_advantages(
        discounted_returns(rewards, settings.turn_discount),
        [
            None if state is None else (prompt, state)
            for prompt, one in zip(batch.prompt_of.tolist(), facts, strict=True)
            for state in one.states
        ],
        result.groups,
        scale="none" if settings.scale == "none" else "group",
        eps=settings.eps,
        unbiased=settings.unbiased,
    )
    factors = torch.ones(len(batch)) if result.difficulty is None else result.difficulty
    own = (turns.values * factors.double().repeat_interleave(turns.lengths)).nan_to_num(0.0)
    tokens = torch.tensor([count for one in facts for count in one.tokens])
    both = result.advantages.double().repeat_interleave(turns.lengths) + settings.turn_weight * own
    both = torch.where(batch.dropped.repeat_interleave(turns.lengths), 0.0, both)
    return Ragged(both.float().repeat_interleave(tokens), batch.lengths)


def repetition(text: str) -> float:
    """The share of a text's word triples that repeat an earlier one; 0 for fewer than four words."""
    words = text.split()
    triples = list(zip(words, words[1:], words[2:], strict=False))
    return 1 - len(set(triples)) / len(triples) if len(triples) > 1 else 0.0


def _groups(batch: Batch, grouping: GroupingFunction | None) -> Tensor:
    if grouping is None:
        return batch.prompt_of
    with failures_named("the grouping function"):
        labels = grouping(batch)
    try:
        return group_index(labels, len(batch))[0]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the grouping function returned labels that cannot be used: {error}") from error


def _parent_groups(batch: Batch, grouping: GroupingFunction, groups: Tensor) -> list[Tensor]:
    """The groups that contain ``groups``, for shrinkage: prompts, then levels of clusters, largest first."""
    prompts = batch.prompt_of
    if not lies_within(groups, prompts):
        raise ConfigError(
            "advantages.shrinkage is above 0, but the grouping function puts completions of different prompts into one "
            "group, so there is no prompt mean to shrink towards; set it to 0"
        )
    parents = [prompts]
    if grouping is similarity_grouping and batch.similarity is not None:
        labels = similarity_grouping(batch)
        for _ in range(batch.similarity.labels.shape[-1] - 1):
            labels = parent_labels(labels)
            parents.insert(1, group_index(labels, len(batch))[0])
    return parents


def _check_advantages(advantages: Any, number: int) -> Tensor:
    try:
        given = torch.as_tensor(advantages)
        if given.is_complex():
            raise TypeError("complex numbers")
        values = given.detach().to(device="cpu", dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise RewardError(
            f"the advantage function returned {type(advantages).__name__}, not one number per sample"
        ) from error
    if values.shape != (number,):
        raise RewardError(f"the advantage function returned shape {tuple(values.shape)}; expected ({number},)")
    if not bool(values.isfinite().all()):
        where = int((~values.isfinite()).nonzero()[0])
        raise RewardError(f"the advantage function returned {float(values[where])} for sample {where}")
    return values


def _check_not_negative(rewards: Tensor, batch: Batch) -> None:
    """Raise an error for the first reward below 0, which MaxRL's scale does not allow."""
    if bool((rewards < 0).any()):
        where = int((rewards < 0).nonzero()[0])
        raise RewardError(
            f"the reward of completion {where % batch.samples + 1} of {batch.samples} of row "
            f"{batch.row_numbers[where // batch.samples]} is {float(rewards[where]):g}; advantages.scale 'mean' "
            "divides by the group's mean, so the weighted sum of the rewards must be at least 0: add a constant, or "
            "use another advantages.scale"
        )


def _masks(batch: Batch, step_recipe: Recipe, graded: list[bool | None] | None) -> dict[str, Tensor]:
    """The samples that are excluded from the policy loss, ``(B,)`` bool for each reason."""
    masks = step_recipe.masks
    reasons: dict[str, Tensor] = {}
    if bool(batch.dropped.any()):
        reasons["dropped"] = batch.dropped
    if masks.truncated or masks.drop_truncated:
        reasons["truncated"] = torch.tensor([reason == "length" for reason in batch.stop_reasons])
    if masks.validity:
        answered = None if graded is None else torch.tensor([result is not None for result in graded])
        reasons |= validity_reasons(
            lengths=torch.tensor([len(text) for text in batch.texts]),
            min_length=masks.min_length,
            has_answer=answered,
            repetition=torch.tensor([repetition(text) for text in batch.texts]),
            max_repetition=masks.max_repetition,
        )
    return reasons
