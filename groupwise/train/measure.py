"""The metrics of a step, under the names that people know from TRL, and the table of its rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from groupwise.core import group_statistics
from groupwise.train.batch import Batch, Comparison
from groupwise.train.rollout import Sampled
from groupwise.train.step import Update, Work


def step_metrics(
    sampled: Sampled, comparison: Comparison, names: Sequence[str], works: Sequence[Work], updates: Sequence[Update]
) -> dict[str, float]:
    """Everything about a step but its timing and the settings that were in force."""
    return {
        **sampled.metrics,  # first: what a reward logs must not pass for what is measured here
        **_rewards(sampled.batch, comparison, names),
        **_completions(sampled.batch),
        **_signal(sampled, comparison, works),
        **_updates(works, updates, len(sampled.batch)),
    }


def _rewards(batch: Batch, comparison: Comparison, names: Sequence[str]) -> dict[str, float]:
    groups = group_statistics(comparison.rewards, comparison.groups)
    known = comparison.rewards[~comparison.rewards.isnan()]
    found = {
        "reward": _mean(known),
        "reward_std": _mean(groups.std[groups.count > 1]),
        "frac_reward_zero_std": _mean(groups.equal.double()),
        "advantage/largest": float(comparison.advantages.abs().max()),
    }
    for name, results in comparison.graded.items():
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


def _signal(sampled: Sampled, comparison: Comparison, works: Sequence[Work]) -> dict[str, float]:
    """What taught, what was left out of the computation, and what refilling cost."""
    batch = sampled.batch
    everything = sum(len(prompt.ids) for prompt in batch.prompts) + int(batch.lengths.sum())
    computed = sum(sum(map(len, work.prompts)) + work.totals.computed_tokens for work in works)
    found = {
        "signal/teaching": _mean(comparison.teaches.double()),
        "signal/tokens_not_computed": 1 - computed / everything,
        "rewards_failed": float(len(sampled.failures)),
    }
    for name, failed in comparison.silenced.items():
        found[f"masks/{name}"] = _mean(failed.double())
    if sampled.rounds:
        found["refill/rounds"] = float(sampled.rounds)
        found["refill/replaced"] = float(sampled.replaced)
        found["refill/extra_tokens"] = float(sampled.tokens - int(batch.lengths.sum()))
    return found


def _updates(works: Sequence[Work], updates: Sequence[Update], samples: int) -> dict[str, float]:
    moved = [update for update in updates if not update.skipped]
    found: dict[str, float] = {"updates": float(len(moved)), "updates_not_finite": float(len(updates) - len(moved))}
    if not moved:
        return found
    found["loss"] = sum(sum(update.values.values()) for update in moved) / len(moved)
    for name in moved[0].values:
        found[f"loss/{name}"] = sum(update.values.get(name, 0.0) for update in moved) / len(moved)
    statistics = {
        name: sum(update.statistics.get(name, 0.0) for update in moved) / len(moved) for name in moved[0].statistics
    }
    low, high = statistics.pop("clip_fraction_low", 0.0), statistics.pop("clip_fraction_high", 0.0)
    found |= {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low + high}
    found |= statistics
    found["grad_norm"] = sum(update.grad_norm for update in moved) / len(moved)
    passes = len(updates) / sum(1 for work in works if len(work))  # over the batch, in mini-batches
    for name in dict.fromkeys(name for update in updates for name in update.silenced):
        found[f"masks/{name}"] = sum(update.silenced.get(name, 0) for update in updates) / passes / samples
    gap = updates[0].gap
    if gap is not None and gap.tokens:
        found["sampler/logp_difference_mean"] = gap.mean
        found["sampler/logp_difference_max"] = gap.largest
    for update in updates:
        found |= update.terms
    return found


def rollout_table(step: int, batch: Batch, comparison: Comparison, names: Sequence[str]) -> dict[str, list[Any]]:
    """One row per sample, for the step's Parquet file."""
    prompts = batch.prompt_of.tolist()
    table: dict[str, list[Any]] = {
        "step": [step] * len(batch),
        "prompt_number": prompts,
        "row": [batch.row_numbers[prompt] for prompt in prompts],
        "sample": [number % batch.samples for number in range(len(batch))],
        "group": comparison.groups.tolist(),
        "prompt": [batch.prompts[prompt].text for prompt in prompts],
        "completion": list(batch.texts),
        "reward": comparison.rewards.tolist(),
    }
    for name, column in zip(names, batch.rewards.unbind(1), strict=True):
        table[f"reward/{name}"] = column.tolist()
    table |= {
        "advantage": comparison.advantages.tolist(),
        "teaches": comparison.teaches.tolist(),
        "silenced": comparison.why_not(),
        "prompt_tokens": [len(batch.prompts[prompt].ids) for prompt in prompts],
        "completion_tokens": batch.lengths.tolist(),
        "stop_reason": list(batch.stop_reasons),
    }
    return {**table, **{name: values for name, values in batch.extra.items() if name not in table}}


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if len(values) else 0.0
