"""From rewards to advantages: who is compared with whom, by how much each is better, and who may not teach.

Everything here is a property of the sampled batch alone; masks that depend on the policy's log-probs (off-policy,
entropy) are the updater's. Samples that are masked_out stay in the baseline and in every denominator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from groupwise.config import Recipe
from groupwise.core import group_advantages, group_index, group_statistics
from groupwise.core.advantages import lies_within
from groupwise.core.masks import validity_reasons
from groupwise.errors import ConfigError, RewardError, check_choice
from groupwise.grouping.labels import LABELS, parent_labels
from groupwise.rewards import load_function, overlong_penalty, weighted_total
from groupwise.tasks.base import Grade
from groupwise.training.preference.group_pairs import GroupPairs, build_group_pairs
from groupwise.training.rollout.batch import Batch, GroupAdvantages
from groupwise.training.rollout.difficulty import difficulty_weights, how_right

OVERLONG = "overlong"  # the name of the soft penalty among the rewards

AdvantageFunction = Callable[[Tensor, Tensor, Tensor], Any]
GroupingFunction = Callable[[Batch], Sequence[Any] | Tensor]


ADVANTAGES: dict[str, AdvantageFunction] = {}
"""Advantages of one's own, by name: put one here and name it in ``advantages.function``."""


def similar(batch: Batch) -> list[str]:
    """The cluster of each sample among the answers to its prompt, as it was found when they were sampled."""
    if LABELS not in batch.extra:
        raise ConfigError("advantages.grouping is 'similarity', but this batch was sampled without a grouper")
    return batch.extra[LABELS]


GROUPINGS: dict[str, GroupingFunction | None] = {"prompt": None, "similarity": similar}
"""Who is compared with whom, by name: put one here and name it in ``advantages.grouping``."""


def find_advantage(name: str | None) -> AdvantageFunction | None:
    """A registered advantage or ``module:function``; None for the built-in one."""
    if name is None or name in ADVANTAGES:
        return ADVANTAGES[name] if name is not None else None
    if ":" not in name:
        check_choice("advantages.function", name, [*ADVANTAGES, "module:function"], ConfigError)
    return load_function(name, what="advantage")


def find_grouping(name: str) -> GroupingFunction | None:
    """A registered grouping or ``module:function``; None for the prompt's own group."""
    if name in GROUPINGS:
        return GROUPINGS[name]
    if ":" not in name:
        check_choice("advantages.grouping", name, [*GROUPINGS, "module:function"], ConfigError)
    return load_function(name, what="grouping")


def compare(
    batch: Batch,
    now: Recipe,
    weights: Sequence[float],
    *,
    advantage: AdvantageFunction | None = None,
    grouping: GroupingFunction | None = None,
    grades: Mapping[str, Grade] | None = None,
    metric: str | None = None,
    ranked_by: int | None = None,
) -> GroupAdvantages:
    """Rewards ``(B, K)`` become advantages ``(B,)``; ``advantage`` and ``grouping`` replace the built-in ones.

    ``grades`` only watch; the one named ``metric`` also says for the validity mask whether an answer can be found, and
    for weights by difficulty whether it is right. ``ranked_by``: the reward that orders the answers of a group for
    pairs, in place of the weighted sum.
    """
    if not len(batch):
        nothing = torch.zeros(0)
        return GroupAdvantages(nothing.double(), nothing.long(), nothing, {}, nothing.bool())
    graded = {name: _graded(batch, grade) for name, grade in (grades or {}).items()}
    how = now.advantages
    groups = _groups(batch, grouping)
    larger = _larger(batch, grouping, groups) if how.shrinkage and grouping is not None else []
    factors = torch.tensor(list(weights), dtype=torch.float64)
    rewards = batch.scored
    total = weighted_total(rewards, weights)
    if advantage is not None:
        advantages = _checked(advantage(rewards, groups, factors), len(batch))
    else:
        advantages = group_advantages(
            rewards,
            groups,
            scale=how.scale,
            eps=how.eps,
            unbiased=how.unbiased,
            baseline=how.baseline,
            weights=factors,
            combine=how.combine,
            within=larger,
            shrinkage=how.shrinkage,
        )
    # Clusters that borrow from their prompt teach as long as not all answers to it are equally good.
    statistics = group_statistics(total, larger[0] if larger else groups)
    found = GroupAdvantages(
        rewards=total,
        groups=groups,
        advantages=torch.where(batch.dropped, 0.0, advantages).float(),
        masked_out=_silenced(batch, now, graded.get(metric or "")),
        equal=statistics.equal[statistics.index],
        graded=graded,
        by_advantage=bool(now.loss.policy_coef),
    )
    if now.advantages.difficulty != "none":
        right = how_right(graded.get(metric or ""), total)
        louder = difficulty_weights(now.advantages.difficulty, right, groups, found.contributes)
        found = replace(found, advantages=(found.advantages * louder).float(), difficulty=louder)
    if now.preference.weight and now.preference.pairs != "data":
        ranks = total if ranked_by is None else rewards[:, ranked_by]
        found = replace(found, pairs=_pairs(batch, now, ranks, found))
    return found


def _pairs(batch: Batch, now: Recipe, ranks: Tensor, found: GroupAdvantages) -> GroupPairs:
    how = now.preference
    return build_group_pairs(
        ranks,
        found.groups,
        batch.prompt_of,
        batch.ids,
        found.allowed,
        per_group=how.pairs_per_group,
        min_margin=how.min_margin,
    )


def _graded(batch: Batch, grade: Grade) -> list[bool | None]:
    rows = [batch.rows[number] for number in batch.prompt_of.tolist()]
    return [grade(row, text) for row, text in zip(rows, batch.texts, strict=True)]


def with_overlong_penalty(rewards: Tensor, batch_lengths: Sequence[int], now: Recipe) -> Tensor:
    """The rewards with one more column: the soft penalty for answers that come near the longest length allowed."""
    limit, buffer = now.sampling.max_new_tokens, min(now.scoring.overlong_buffer, now.sampling.max_new_tokens)
    column = [now.scoring.overlong_weight * overlong_penalty(length, limit, buffer) for length in batch_lengths]
    return torch.cat([rewards, torch.tensor(column, dtype=torch.float64)[:, None]], dim=1)


def repetition(text: str) -> float:
    """The share of a text's word triples that had been there before; 0 for texts of fewer than four words."""
    words = text.split()
    triples = list(zip(words, words[1:], words[2:], strict=False))
    return 1 - len(set(triples)) / len(triples) if len(triples) > 1 else 0.0


def _silenced(batch: Batch, now: Recipe, graded: list[bool | None] | None) -> dict[str, Tensor]:
    masks = now.masks
    found: dict[str, Tensor] = {}
    if bool(batch.dropped.any()):
        found["dropped"] = batch.dropped
    if masks.truncated:
        found["truncated"] = torch.tensor([reason == "length" for reason in batch.stop_reasons])
    if masks.validity:
        answers = None if graded is None else torch.tensor([result is not None for result in graded])
        found |= validity_reasons(
            lengths=torch.tensor([len(text) for text in batch.texts]),
            min_length=masks.min_length,
            has_answer=answers,
            repetition=torch.tensor([repetition(text) for text in batch.texts]),
            max_repetition=masks.max_repetition,
        )
    return found


def _groups(batch: Batch, grouping: GroupingFunction | None) -> Tensor:
    if grouping is None:
        return batch.prompt_of
    labels = grouping(batch)
    try:
        return group_index(labels, len(batch))[0]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the grouping function returned labels that cannot be used: {error}") from error


def _larger(batch: Batch, grouping: GroupingFunction, groups: Tensor) -> list[Tensor]:
    """What small groups borrow from: their prompt, and with several levels of clusters those between, largest first."""
    prompts = batch.prompt_of
    if not lies_within(groups, prompts):
        raise ConfigError(
            "advantages.shrinkage is above 0, but the grouping function compares answers to different prompts, so "
            "there is no prompt to borrow from; set it to 0"
        )
    found = [prompts]
    if grouping is similar and batch.similarity is not None:
        labels = similar(batch)
        between = []
        for _ in range(batch.similarity.labels.shape[-1] - 1):
            labels = parent_labels(labels)
            between.append(group_index(labels, len(batch))[0])
        found += reversed(between)
    return found


def _checked(advantages: Any, number: int) -> Tensor:
    try:
        found = torch.as_tensor(advantages, dtype=torch.float32).detach().cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise RewardError(
            f"the advantage function returned {type(advantages).__name__}, not one number each"
        ) from error
    if found.shape != (number,):
        raise RewardError(f"the advantage function returned shape {tuple(found.shape)}; expected ({number},)")
    if not bool(found.isfinite().all()):
        where = int((~found.isfinite()).nonzero()[0])
        raise RewardError(f"the advantage function returned {float(found[where])} for sample {where}")
    return found
