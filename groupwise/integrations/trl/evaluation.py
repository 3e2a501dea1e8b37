"""Evaluation as in TRL: completions sampled with the settings of training, their rewards, lengths, entropy and loss."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from groupwise.config import Recipe, with_settings
from groupwise.data import Order
from groupwise.generate import Generator
from groupwise.integrations.trl.logs import (
    MetricAverages,
    batch_metrics,
    logged_by_rewards,
    tool_metrics,
    update_metrics,
)
from groupwise.model.logprobs import completion_logps
from groupwise.seeds import derive_seed
from groupwise.tasks.base import TaskRow
from groupwise.training.components import RunComponents
from groupwise.training.rollout.advantages import compute_group_advantages
from groupwise.training.rollout.batch import Batch, GroupAdvantages, join
from groupwise.training.rollout.collector import RolloutCollector, pool_metrics
from groupwise.training.rollout.make_collector import make_conversations
from groupwise.training.update.local_statistics import local_statistics, sample_statistics
from groupwise.training.update.minibatch import build_minibatch
from groupwise.training.update.objective import MicroBatch, Objective, needs_ref_logps
from groupwise.training.update.reference import Reference

CHUNK = 512  # rows that are sampled and scored at once; of conversations, those of a batch


@dataclass(frozen=True)
class SampledEvaluation:
    """The completions of an evaluation set, and its metrics by TRL's names without a prefix, with the loss."""

    batch: Batch
    advantages: Tensor  # (B,)
    metrics: dict[str, Any]


def evaluate_sampled(
    components: RunComponents,
    generator: Generator,
    rows: Sequence[TaskRow],
    args: Any,
    *,
    reference: Reference | None,
    trainer_state: Any,
    batches: Sequence[range],
    after_batch: Callable[[], None],
) -> SampledEvaluation:
    """Sample ``num_generations_eval`` completions of every row and score them.

    Metrics are TRL's: means over the evaluation ``batches`` of those of each batch by itself, with ratios of 1. Without
    a ``reference`` the policy itself is the reference.
    """
    samples = args.num_generations_eval or args.num_generations
    recipe = with_settings(
        components.recipe,
        {
            "train.accumulation": 1,
            "train.mini_batch_by": "prompts",
            "train.local_batch_size": max(samples, args.per_device_eval_batch_size * args.world_size),  # a batch
            "train.skip_equal_rewards": False,
        },
    )
    prompts = components.builder.build(rows)
    seed = derive_seed("evaluation", recipe.train.seed)
    rewards = () if components.scorer is None else components.scorer.functions

    def advantages(batch: Batch, step_recipe: Recipe) -> GroupAdvantages:
        return compute_group_advantages(
            batch, step_recipe, [reward.weight for reward in rewards], grades={}, metric=None
        )

    collector = RolloutCollector(
        generator,
        components.tokenizer,
        rows,
        prompts,
        components.scorer,
        Order(len(rows), shuffle=False),
        advantages,
        prompt_column=recipe.data.prompt,
        seed=seed,
        stop=components.stop,
        conversations=make_conversations(components, seed),
    )
    chunk = CHUNK if components.environment is None else len(batches[0])
    sampled: list[Batch] = []
    logged: dict[str, float] = {}
    for start in range(0, len(rows), chunk):
        count = min(chunk, len(rows) - start)
        chunk_recipe = _with_samples(with_settings(recipe, {"train.batch_size": count}), samples)
        result = collector.collect(start, chunk_recipe, trainer_state, lambda name: nullcontext())
        logged = pool_metrics(logged, start, logged_by_rewards(result.metrics), count)
        sampled.append(result.batch)
    batch = join(sampled)
    recipe = _with_samples(recipe, samples)
    averages, shares, losses = MetricAverages(), [], []
    for prompt_numbers in batches:
        part = batch.take(prompt_numbers)
        group_advantages = advantages(part, recipe)
        measured = _batch_objective(components, part, recipe, group_advantages, reference)
        averages.add({**batch_metrics(part, rewards, args), **tool_metrics(part, components.environment)})
        averages.add(update_metrics(measured, args))
        shares.append(group_advantages.advantages)
        losses.append(measured["loss"])
        after_batch()
    loss = _mean_loss(losses, len(rows), args.per_device_eval_batch_size * args.world_size)
    return SampledEvaluation(batch, torch.cat(shares), {"loss": loss, **averages.take(), **logged})


def _mean_loss(losses: Sequence[float], rows: int, batch_size: int) -> float:
    """The mean loss of all batches as TRL has it: each counts ``batch_size`` times, and the last one as often as the
    number of rows (not of completions) leaves over."""
    weights = [*[batch_size] * (len(losses) - 1), rows % batch_size or batch_size]
    return sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights)


def evaluation_batches(rows: int, args: Any) -> list[range]:
    """The rows of each evaluation batch: ``per_device_eval_batch_size`` completions on each process."""
    samples = args.num_generations_eval or args.num_generations
    size = max(1, args.per_device_eval_batch_size * args.world_size // samples)
    return [range(start, min(start + size, rows)) for start in range(0, rows, size)]


def _with_samples(recipe: Recipe, samples: int) -> Recipe:
    """The recipe with this number of samples per prompt. Unlike a recipe to train with, it may have one."""
    return recipe.model_copy(update={"sampling": recipe.sampling.model_copy(update={"samples_per_prompt": samples})})


@torch.no_grad()
def _batch_objective(
    components: RunComponents,
    batch: Batch,
    recipe: Recipe,
    group_advantages: GroupAdvantages,
    reference: Reference | None,
) -> dict[str, float]:
    minibatch = build_minibatch(batch, group_advantages, range(len(batch.prompts)), recipe)
    arguments: Any = (components.handle, minibatch.prompts, minibatch.completions)
    options: dict[str, Any] = {"temperature": recipe.sampling.temperature, "kept": minibatch.kept}
    current = completion_logps(*arguments, with_entropy=True, **options)
    ref_logps = current.logps if needs_ref_logps(recipe) else None
    if ref_logps is not None and reference is not None:
        with reference.in_place():
            ref_logps = completion_logps(*arguments, **options).logps
    micro_batch = MicroBatch(
        current.logps,
        current.mask,
        advantages=minibatch.advantages.to(current.logps),
        policy_mask=None if bool(minibatch.allowed.all()) else minibatch.allowed.to(current.logps.device),
        ref_logps=ref_logps,
        entropy=current.entropy,
    )
    objective = Objective(recipe, components.loss, minibatch.totals)
    values, statistics = objective.terms(micro_batch)
    measured = {f"loss/{name}": float(value) for name, value in values.items()}
    measured |= {name: float(value) for name, value in statistics.items()}
    samples = {name: value.cpu() for name, value in sample_statistics(objective, micro_batch).items()}
    measured |= local_statistics(minibatch, samples, recipe, components.loss)
    low, high = measured.pop("clip_fraction_low", math.nan), measured.pop("clip_fraction_high", math.nan)
    clipped = {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low + high}
    return {"loss": sum(float(value) for value in values.values()), **measured, **clipped}


def held_out_row(metrics: Mapping[str, float], name: str) -> dict[str, float]:
    """The metrics as a run records those of its held-out rows; ``name`` is that of the evaluation set, or empty."""
    renamed = {"completions/mean_length": "mean_length", "completions/clipped_ratio": "truncated"}
    prefix = f"{name}/" if name else ""
    return {f"{prefix}{renamed.get(metric, metric)}": value for metric, value in metrics.items() if value is not None}


def reference_model(model: Any, reference: Reference | None) -> Any:
    """A copy of the model with the weights of the reference, or of the model itself before training."""
    copied = type(model)(copy.deepcopy(model.config)).to(model.device, model.dtype)
    copied.load_state_dict(model.state_dict())
    if reference is not None:
        copied.load_state_dict(reference.state_dict(), strict=False)
    return copied.eval().requires_grad_(False)
