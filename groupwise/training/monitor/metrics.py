"""The metrics of a step, with TRL's names where TRL has them, and the table of its rollouts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
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
from groupwise.training.rollout.batch import TURN_DETAILS, Batch, GroupAdvantages
from groupwise.training.rollout.collector import RolloutResult
from groupwise.training.update.correction import correction_metrics
from groupwise.training.update.minibatch import MiniBatch
from groupwise.training.update.objective import reported_terms, samples_completions
from groupwise.training.update.result import LogProbMismatch, UpdateResult
from groupwise.training.update.updater import Updater


def step_metrics(
    rollout: RolloutResult,
    group_advantages: GroupAdvantages,
    weights: Mapping[str, float],
    minibatches: Sequence[MiniBatch],
    updates: Sequence[UpdateResult],
    step_recipe: Recipe,
) -> dict[str, float]:
    """All metrics of a step but its timing and its settings. ``weights``: of the reward functions."""
    learned = {**_pair_metrics(group_advantages, minibatches, step_recipe), **_update_metrics(updates, step_recipe)}
    if not len(rollout.batch):
        return learned
    return {
        **rollout.metrics,  # first: a reward's own metrics must not replace those computed here
        **_reward_metrics(rollout.batch, group_advantages, weights),
        **_variance_shares(rollout.batch, group_advantages, weights, step_recipe),
        **_completion_metrics(rollout.batch),
        **_signal_metrics(rollout, group_advantages, minibatches),
        **_similarity_metrics(rollout, step_recipe),
        **learned,
        **_mask_metrics(rollout.batch, group_advantages, minibatches, updates, step_recipe),
        **correction_metrics([part.correction for part in minibatches if part.correction is not None], step_recipe),
        **rollout.queue,
    }


def settings_metrics(step_recipe: Recipe, updater: Updater, *, tokens: int, epoch: float) -> dict[str, float]:
    """The settings that may change during a run, and how far it has come."""
    metrics = {
        "learning_rate": updater.optimizer.param_groups[0]["lr"],  # the embeddings' group, if any, is the last
        "temperature": step_recipe.sampling.temperature,
        "samples_per_prompt": step_recipe.sampling.samples_per_prompt,
        "kl_coef": step_recipe.loss.kl_coef,
        "num_tokens": tokens,
        "epoch": epoch,
        "token_budget": updater.token_budget,
    }
    if step_recipe.loss.entropy_target is not None:
        metrics["entropy_coef"] = updater.entropy.coefficient(step_recipe)
    if updater.token_budget < updater.full_budget:
        metrics["token_budget_full"] = updater.full_budget
    return metrics if updater.reference is None else {**metrics, "reference_refreshes": updater.reference.refreshes}


def with_aliases(metrics: Mapping[str, float], aliases: Mapping[str, str]) -> dict[str, float]:
    """The metrics, and under the names in ``aliases`` (alias → name) too."""
    return {**metrics, **{alias: metrics[name] for alias, name in aliases.items() if name in metrics}}


def _reward_metrics(batch: Batch, group_advantages: GroupAdvantages, names: Iterable[str]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    if batch.rewards.shape[1]:  # else the run learns from a teacher alone
        groups = group_statistics(group_advantages.rewards, group_advantages.groups)
        metrics = {
            "reward": _mean(group_advantages.rewards[~group_advantages.rewards.isnan()]),
            "reward_std": _mean(groups.std[groups.count > 1]),
            "frac_reward_zero_std": _mean(groups.equal.double()),
            "advantage/largest": float(group_advantages.advantages.abs().max()),
        }
    for name, results in group_advantages.graded.items():
        metrics[name] = sum(map(bool, results)) / len(results)
        metrics[f"{name}_no_answer"] = sum(result is None for result in results) / len(results)
    for name, column in zip(names, batch.rewards.unbind(1), strict=True):
        scored = column[~column.isnan()]
        metrics[f"rewards/{name}/mean"] = _mean(scored)
        metrics[f"rewards/{name}/std"] = float(scored.std()) if len(scored) > 1 else 0.0
    return metrics


def _variance_shares(
    batch: Batch, group_advantages: GroupAdvantages, weights: Mapping[str, float], step_recipe: Recipe
) -> dict[str, float]:
    """The variance of each function's weighted reward within groups, as a share of the sum over the functions.

    Only of several functions, and not if each is normalized by itself.
    """
    if len(weights) < 2 or step_recipe.advantages.combine != "sum_then_normalize":
        return {}
    variances = {}
    for (name, weight), column in zip(weights.items(), batch.scored.unbind(1), strict=True):
        groups = group_statistics(weight * column, group_advantages.groups, unbiased=False)
        variances[name] = float((groups.count * groups.std.square()).nansum())
    total = sum(variances.values())
    return {f"rewards/{name}/variance_share": value / total for name, value in variances.items() if total}


def _completion_metrics(batch: Batch) -> dict[str, float]:
    lengths = batch.lengths.double()
    cut = torch.tensor([reason == "length" for reason in batch.stop_reasons])
    ended = lengths[~cut]
    metrics = {
        "completions/mean_length": _mean(lengths),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/mean_terminated_length": _mean(ended),
        "completions/clipped_ratio": _mean(cut.double()),
    }
    if batch.samples > 1:
        groups = [batch.texts[start : start + batch.samples] for start in range(0, len(batch), batch.samples)]
        metrics["completions/identical"] = sum(len(set(group)) == 1 for group in groups) / len(groups)
    return metrics


def _signal_metrics(
    rollout: RolloutResult, group_advantages: GroupAdvantages, minibatches: Sequence[MiniBatch]
) -> dict[str, float]:
    """The share of samples with a learning signal, the share of tokens not computed, and the cost of resampling."""
    batch = rollout.batch
    tokens = len(batch.prompt_ids.values) + len(batch.ids.values)
    computed = sum(len(minibatch.prompts.values) + minibatch.totals.computed_tokens for minibatch in minibatches)
    metrics = {
        "signal/contributing": _mean(group_advantages.contributes.double()),
        "signal/tokens_not_computed": 1 - computed / tokens,
        "rewards_failed": float(len(rollout.failures)),
    }
    if group_advantages.difficulty is not None:
        weights = group_advantages.difficulty[group_advantages.contributes]
        metrics["difficulty/weight_max"] = float(weights.max()) if len(weights) else 1.0
    if rollout.rounds:
        metrics["resample/rounds"] = float(rollout.rounds)
        metrics["resample/replaced"] = float(rollout.replaced)
        metrics["resample/extra_tokens"] = float(rollout.tokens - int(batch.lengths.sum()))
    return metrics


def _similarity_metrics(rollout: RolloutResult, step_recipe: Recipe) -> dict[str, float]:
    """The clusters of the answers to each prompt, and how diverse the answers are."""
    batch = rollout.batch
    if batch.similarity is None:
        return {}
    labels = batch.extra[LABELS]
    uids = [label.partition("_")[0] for label in labels]
    metrics = compute_group_distribution_per_prompt(labels, uids, scores=batch.similarity.scores)
    metrics["similarity_groups/good_diversity"] = float(is_good(metrics))
    if step_recipe.grouping.skip_single_members:
        metrics["similarity_groups/n_rewards_skipped"] = float(rollout.skipped)
    metrics |= diversity(batch.similarity)
    texts = [result_text(text, step_recipe.grouping.text_after) for text in batch.texts]
    for n in (1, 2, 3):
        shares = [distinct_n(texts[start : start + batch.samples], n) for start in range(0, len(texts), batch.samples)]
        metrics[f"diversity/distinct_{n}"] = sum(shares) / len(shares)
    return metrics


def _pair_metrics(
    group_advantages: GroupAdvantages, minibatches: Sequence[MiniBatch], step_recipe: Recipe
) -> dict[str, float]:
    """The number of pairs by source, and the number of refused ones by reason."""
    preference = step_recipe.preference
    if not preference.weight:
        return {}
    from_groups = sum(len(minibatch.pairs.rows) for minibatch in minibatches)
    from_data = sum(len(minibatch.pairs.dataset.pairs) for minibatch in minibatches)
    metrics = {"preference/weight": preference.weight, "preference/pairs": float(from_groups + from_data)}
    if preference.pairs == "both":
        metrics |= {"preference/pairs_group": float(from_groups), "preference/pairs_data": float(from_data)}
    if group_advantages.pairs is not None:
        refused = group_advantages.pairs.refused
        metrics |= {f"preference/refused/{reason}": float(refused.get(reason, 0)) for reason in REASONS}
    return metrics


def _mask_metrics(
    batch: Batch,
    group_advantages: GroupAdvantages,
    minibatches: Sequence[MiniBatch],
    updates: Sequence[UpdateResult],
    step_recipe: Recipe,
) -> dict[str, float]:
    """The share of samples that each mask drops and, if any mask is on, the share that is left.

    A mask that depends on the current policy may drop a sample in one pass over the batch and keep it in the next; such
    a sample counts by its share of the passes. Samples that are not computed are not counted as dropped.
    """
    metrics = {f"masks/{name}": _mean(dropped.double()) for name, dropped in group_advantages.masked_out.items()}
    others = {name: reason for name, reason in group_advantages.masked_out.items() if name != "equal_rewards"}
    left = replace(group_advantages, masked_out=others).allowed.double()  # equal rewards have no signal in any case
    passes = len(updates) / max(1, sum(not minibatch.empty for minibatch in minibatches))
    for name in dict.fromkeys(name for update in updates for name in update.masked_out):
        samples = [sample for update in updates for sample in update.masked_out.get(name, ())]
        metrics[f"masks/{name}"] = len(samples) / passes / len(batch)
        left -= torch.bincount(torch.tensor(samples, dtype=torch.long), minlength=len(batch)) / passes
    if batch.filtered_probability is not None:
        metrics["masks/keep_sampling_mask"] = float(batch.filtered_probability.sum()) / max(1, int(batch.lengths.sum()))
    masks = step_recipe.masks
    selects = masks.truncated or masks.drop_truncated or masks.validity or masks.off_policy or masks.high_entropy
    if not (selects or masks.keep_sampling_mask):
        return metrics
    metrics["mask_ratio"] = _mean(left)
    if bool(left.any()):
        for name, results in group_advantages.graded.items():
            right = torch.tensor([bool(result) for result in results]).double()
            metrics[f"{name}_masked"] = float((left * right).sum() / left.sum())
    return metrics


def _update_metrics(updates: Sequence[UpdateResult], step_recipe: Recipe) -> dict[str, float]:
    """Means over the updates that were not skipped. Without any, the same metrics are 0, or NaN if not measured."""
    done = [update for update in updates if not update.skipped]
    number = len(done) or (math.nan if updates else 1)  # if all were skipped, the loss was not finite
    metrics: dict[str, float] = {"updates": float(len(done)), "updates_not_finite": float(len(updates) - len(done))}
    metrics["loss"] = sum(sum(update.values.values()) for update in done) / number
    terms = reported_terms(step_recipe)
    for name in dict.fromkeys([*(term.name for term in terms), *(name for update in done for name in update.values)]):
        metrics[f"loss/{name}"] = sum(update.values.get(name, 0.0) for update in done) / number
    statistics = {name: value for term in terms for name, value in term.statistics.items()}
    for name in dict.fromkeys(name for update in done for name in update.statistics):
        values = [update.statistics[name] for update in done if name in update.statistics]
        statistics[name] = sum(values) / len(values)
    if "clip_fraction_low" in statistics:
        low, high = statistics.pop("clip_fraction_low"), statistics.pop("clip_fraction_high")
        metrics |= {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low + high}
    metrics |= statistics
    metrics["grad_norm"] = sum(update.grad_norm for update in done) / number
    if samples_completions(step_recipe):
        metrics |= ((updates[0].mismatch if updates else None) or LogProbMismatch()).metrics()
    for update in updates:
        metrics |= update.term_gradients
    return metrics


def rollout_table(
    step: int,
    batch: Batch,
    group_advantages: GroupAdvantages,
    names: Sequence[str],
    masked: Mapping[int, str] | None = None,
) -> dict[str, list[Any]]:
    """One row per sample, for the step's Parquet file. ``masked``: samples dropped in the updates, and by what."""
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
    for name, results in group_advantages.graded.items():
        table[f"grade/{name}"] = list(results)
    table |= {
        "advantage": group_advantages.advantages.tolist(),
        "contributes": group_advantages.contributes.tolist(),
        "masked_out": [reason or (masked or {}).get(n) for n, reason in enumerate(group_advantages.skip_reasons())],
        "prompt_tokens": [len(batch.prompts[prompt].ids) for prompt in prompts],
        "completion_tokens": batch.lengths.tolist(),
        "stop_reason": list(batch.stop_reasons),
    }
    if group_advantages.pairs is not None:
        table["pair"] = group_advantages.pairs.roles(len(batch))
    if batch.turn_facts is not None:
        by_token = group_advantages.token_advantages
        advantages = [None] * len(batch) if by_token is None else by_token.tolist()
        facts = zip(batch.turn_facts, advantages, strict=True)
        table[TURN_DETAILS] = [turns.as_json(of_tokens) for turns, of_tokens in facts]
    return {**table, **{name: values for name, values in batch.extra.items() if name not in table}}


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if len(values) else 0.0
