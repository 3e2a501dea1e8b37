"""The metrics of a step, under the names that people know from TRL, and the table of its rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from groupwise.config import Recipe
from groupwise.core import group_statistics
from groupwise.grouping.diversity import diversity, is_good
from groupwise.grouping.labels import LABELS, compute_group_distribution_per_prompt
from groupwise.grouping.text import result_text
from groupwise.rewards import distinct_n
from groupwise.training.preference.group_pairs import REASONS
from groupwise.training.rollout.batch import Batch, GroupAdvantages
from groupwise.training.rollout.collector import RolloutResult
from groupwise.training.update.minibatch import MiniBatch
from groupwise.training.update.result import UpdateResult


def step_metrics(
    sampled: RolloutResult,
    group_advantages: GroupAdvantages,
    names: Sequence[str],
    minibatches: Sequence[MiniBatch],
    updates: Sequence[UpdateResult],
    now: Recipe,
) -> dict[str, float]:
    """Everything about a step but its timing and the settings that were in force."""
    learned = {**_pairs(group_advantages, minibatches, now), **_updates(updates)}
    if not len(sampled.batch):
        return learned
    return {
        **sampled.metrics,  # first: what a reward logs must not pass for what is measured here
        **_rewards(sampled.batch, group_advantages, names),
        **_completions(sampled.batch),
        **_signal(sampled, group_advantages, minibatches),
        **_similarity(sampled, now),
        **learned,
        **_masks(sampled.batch, group_advantages, minibatches, updates, now),
    }


def with_aliases(metrics: Mapping[str, float], aliases: Mapping[str, str]) -> dict[str, float]:
    """The metrics, and those that an algorithm's document calls otherwise under its names too."""
    return {**metrics, **{alias: metrics[name] for alias, name in aliases.items() if name in metrics}}


def _rewards(batch: Batch, group_advantages: GroupAdvantages, names: Sequence[str]) -> dict[str, float]:
    groups = group_statistics(group_advantages.rewards, group_advantages.groups)
    known = group_advantages.rewards[~group_advantages.rewards.isnan()]
    found = {
        "reward": _mean(known),
        "reward_std": _mean(groups.std[groups.count > 1]),
        "frac_reward_zero_std": _mean(groups.equal.double()),
        "advantage/largest": float(group_advantages.advantages.abs().max()),
    }
    for name, results in group_advantages.graded.items():
        found[name] = sum(map(bool, results)) / len(results)
        found[f"{name}_no_answer"] = sum(result is None for result in results) / len(results)
    for name, column in zip(names, batch.rewards.unbind(1), strict=True):
        scored = column[~column.isnan()]
        found[f"rewards/{name}/mean"] = _mean(scored)
        found[f"rewards/{name}/std"] = float(scored.std()) if len(scored) > 1 else 0.0
    return found


def _completions(batch: Batch) -> dict[str, float]:
    lengths = batch.lengths.double()
    cut = torch.tensor([reason == "length" for reason in batch.stop_reasons])
    ended = lengths[~cut]
    return {
        "completions/mean_length": _mean(lengths),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/mean_terminated_length": _mean(ended),
        "completions/clipped_ratio": _mean(cut.double()),
    }


def _signal(
    sampled: RolloutResult, group_advantages: GroupAdvantages, minibatches: Sequence[MiniBatch]
) -> dict[str, float]:
    """What taught, what was left out of the computation, and what refilling cost."""
    batch = sampled.batch
    everything = sum(len(prompt.ids) for prompt in batch.prompts) + int(batch.lengths.sum())
    computed = sum(sum(map(len, minibatch.prompts)) + minibatch.totals.computed_tokens for minibatch in minibatches)
    found = {
        "signal/teaching": _mean(group_advantages.contributes.double()),
        "signal/tokens_not_computed": 1 - computed / everything,
        "rewards_failed": float(len(sampled.failures)),
    }
    if group_advantages.difficulty is not None:
        taught = group_advantages.difficulty[group_advantages.contributes]
        found["difficulty/weight_max"] = float(taught.max()) if len(taught) else 1.0
    if sampled.rounds:
        found["resample/rounds"] = float(sampled.rounds)
        found["resample/replaced"] = float(sampled.replaced)
        found["resample/extra_tokens"] = float(sampled.tokens - int(batch.lengths.sum()))
    return found


def _similarity(sampled: RolloutResult, now: Recipe) -> dict[str, float]:
    """How the answers to a prompt fall into clusters, under the third document's names, and how different they are."""
    batch = sampled.batch
    if batch.similarity is None:
        return {}
    labels = batch.extra[LABELS]
    uids = [label.partition("_")[0] for label in labels]
    found = compute_group_distribution_per_prompt(labels, uids, scores=batch.similarity.scores)
    found["similarity_groups/good_diversity"] = float(is_good(found))
    if now.grouping.skip_single_members:
        found["similarity_groups/n_rewards_skipped"] = float(sampled.skipped)
    found |= diversity(batch.similarity)
    texts = [result_text(text, now.grouping.text_after) for text in batch.texts]
    for n in (1, 2, 3):
        shares = [distinct_n(texts[start : start + batch.samples], n) for start in range(0, len(texts), batch.samples)]
        found[f"diversity/distinct_{n}"] = sum(shares) / len(shares)
    return found


def _pairs(group_advantages: GroupAdvantages, minibatches: Sequence[MiniBatch], now: Recipe) -> dict[str, float]:
    """How many pairs taught, where they came from, and why a group had none or fewer than it might."""
    if not now.preference.weight:
        return {}
    sampled = sum(len(minibatch.pairs.chosen) for minibatch in minibatches if minibatch.pairs is not None)
    fixed = sum(len(minibatch.pairs.fixed.pairs) for minibatch in minibatches if minibatch.pairs is not None)
    found = {"preference/weight": now.preference.weight, "preference/pairs": float(sampled + fixed)}
    if now.preference.pairs == "both":
        found |= {"preference/pairs_group": float(sampled), "preference/pairs_data": float(fixed)}
    if group_advantages.pairs is not None:
        found |= {f"preference/refused/{why}": float(group_advantages.pairs.refused.get(why, 0)) for why in REASONS}
    return found


def _masks(
    batch: Batch,
    group_advantages: GroupAdvantages,
    minibatches: Sequence[MiniBatch],
    updates: Sequence[UpdateResult],
    now: Recipe,
) -> dict[str, float]:
    """What each mask took, by its cause; and what they left, where any is switched on.

    A mask that depends on the policy may take a sample in one pass over the batch and not in the next: it counts by
    the share of passes. Samples that teach nothing and are not computed are not taken.
    """
    found = {f"masks/{name}": _mean(failed.double()) for name, failed in group_advantages.masked_out.items()}
    left = group_advantages.allowed.double()
    passes = len(updates) / max(
        1, sum(not minibatch.empty for minibatch in minibatches)
    )  # over the batch, in mini-batches
    for name in dict.fromkeys(name for update in updates for name in update.masked_out):
        taken = [sample for update in updates for sample in update.masked_out.get(name, ())]
        found[f"masks/{name}"] = len(taken) / passes / len(batch)
        left -= torch.bincount(torch.tensor(taken, dtype=torch.long), minlength=len(batch)) / passes
    if batch.cut_away is not None:
        found["masks/keep_sampling_mask"] = float(batch.cut_away.sum()) / max(1, int(batch.lengths.sum()))
    masks = now.masks
    if not (masks.truncated or masks.validity or masks.off_policy or masks.high_entropy or masks.keep_sampling_mask):
        return found
    found["mask_ratio"] = _mean(left)
    if bool(left.any()):
        for name, results in group_advantages.graded.items():
            right = torch.tensor([bool(result) for result in results]).double()
            found[f"{name}_masked"] = float((left * right).sum() / left.sum())
    return found


def _updates(updates: Sequence[UpdateResult]) -> dict[str, float]:
    moved = [update for update in updates if not update.skipped]
    found: dict[str, float] = {"updates": float(len(moved)), "updates_not_finite": float(len(updates) - len(moved))}
    if not moved:
        return found
    found["loss"] = sum(sum(update.values.values()) for update in moved) / len(moved)
    for name in dict.fromkeys(name for update in moved for name in update.values):
        found[f"loss/{name}"] = sum(update.values.get(name, 0.0) for update in moved) / len(moved)
    statistics = {}
    for name in dict.fromkeys(name for update in moved for name in update.statistics):
        known = [update.statistics[name] for update in moved if name in update.statistics]
        statistics[name] = sum(known) / len(known)
    if "clip_fraction_low" in statistics:
        low, high = statistics.pop("clip_fraction_low"), statistics.pop("clip_fraction_high")
        found |= {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low + high}
    found |= statistics
    found["grad_norm"] = sum(update.grad_norm for update in moved) / len(moved)
    mismatch = updates[0].mismatch
    if mismatch is not None and mismatch.tokens:
        found["sampler/logp_difference_mean"] = mismatch.mean
        found["sampler/logp_difference_max"] = mismatch.largest
    for update in updates:
        found |= update.terms
    return found


def rollout_table(
    step: int, batch: Batch, group_advantages: GroupAdvantages, names: Sequence[str]
) -> dict[str, list[Any]]:
    """One row per sample, for the step's Parquet file."""
    prompts = batch.prompt_of.tolist()
    table: dict[str, list[Any]] = {
        "step": [step] * len(batch),
        "prompt_number": prompts,
        "row": [batch.row_numbers[prompt] for prompt in prompts],
        "sample": [number % batch.samples for number in range(len(batch))],
        "group": group_advantages.groups.tolist(),
        "prompt": [batch.prompts[prompt].text for prompt in prompts],
        "completion": list(batch.texts),
        "reward": group_advantages.rewards.tolist(),
    }
    for name, column in zip(names, batch.rewards.unbind(1), strict=True):
        table[f"reward/{name}"] = column.tolist()
    table |= {
        "advantage": group_advantages.advantages.tolist(),
        "contributes": group_advantages.contributes.tolist(),
        "masked_out": group_advantages.skip_reasons(),
        "prompt_tokens": [len(batch.prompts[prompt].ids) for prompt in prompts],
        "completion_tokens": batch.lengths.tolist(),
        "stop_reason": list(batch.stop_reasons),
    }
    if group_advantages.pairs is not None:
        table["pair"] = group_advantages.pairs.roles(len(batch))
    return {**table, **{name: values for name, values in batch.extra.items() if name not in table}}


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if len(values) else 0.0
