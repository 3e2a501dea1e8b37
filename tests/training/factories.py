"""Small batches, updaters and trainers for the tests of one step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from groupwise.config import Recipe, make_recipe, with_settings
from groupwise.core import DivergenceLimit, kl_estimate, policy_loss, prompt_totals
from groupwise.core.aggregation import aggregate
from groupwise.core.filters import KeptSets
from groupwise.core.losses import Loss
from groupwise.core.masks import high_entropy_mask, off_policy_sequence_mask
from groupwise.data import Prompt
from groupwise.model.handle import ModelHandle, prepare
from groupwise.model.precision import MasterWeights
from groupwise.tasks.base import Task
from groupwise.training.rollout.advantages import compute_group_advantages
from groupwise.training.rollout.batch import Batch, GroupAdvantages
from groupwise.training.trainer import Callback, Trainer
from groupwise.training.update.correction import corrects_sampler
from groupwise.training.update.minibatch import MiniBatch, build_minibatch
from groupwise.training.update.objective import find_loss
from groupwise.training.update.reference import Reference
from groupwise.training.update.result import UpdateResult
from groupwise.training.update.updater import Updater
from tests.model.models import SIZE, VOCABULARY, exact, padded_logps
from tests.training.runs import RecordingDisplay

PROMPTS = (3, 0, 1)  # of the mini-batch in `moved_minibatch`
BUDGETS = (1, 40, 10**6)  # one sample at a time, a few, all at once
LENGTHS = [[3, 7, 1, 5], [4, 4, 2, 6], [8, 1, 3, 2], [5, 2, 7, 7]]
REWARDS = [[1.0, 0.0, 0.0, 0.5], [1.0, 1.0, 1.0, 1.0], [0.0, 2.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0]]

SMALL = {
    "train": {"steps": 2, "batch_size": 2, "accumulation": 1},
    "sampling": {"samples_per_prompt": 4, "max_new_tokens": 8},
    "optimizer": {"learning_rate": 1e-3, "max_grad_norm": None},
    "model": {"gradient_checkpointing": False, "dtype": "float32"},
    "run": {"tensorboard": False, "plot": False, "save_rollouts": False, "checkpoint_every": 0},
    "data": {"chat": False},
}


def short_recipe(settings: Mapping[str, Any] | None = None) -> Recipe:
    """A small recipe with these dotted settings."""
    return with_settings(make_recipe(SMALL), {"loss.ratio": None, **(settings or {})})


def make_batch(
    rewards: Sequence[Sequence[float]] = REWARDS,
    lengths: Sequence[Sequence[int]] = LENGTHS,
    *,
    seed: int = 0,
    texts: Sequence[str] | None = None,
    cut: Sequence[int] = (),
    dropped: Sequence[int] = (),
    kept: bool = False,
    columns: Tensor | None = None,
) -> Batch:
    """Random ids with these rewards and lengths. ``cut``: truncated samples; ``kept``: with kept token sets."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> Tensor:
        return torch.randint(VOCABULARY, (length,), generator=generator)

    flat = [length for group in lengths for length in group]
    completions = [ids(length) for length in flat]
    prompts = [ids(3 + 2 * number) for number in range(len(rewards))]
    gone = torch.zeros(len(flat), dtype=torch.bool)
    gone[list(dropped)] = True
    scores = torch.tensor([reward for group in rewards for reward in group], dtype=torch.float64)[:, None]
    return Batch(
        rows=[{"prompt": f"row {number}"} for number in range(len(rewards))],
        row_numbers=[10 + number for number in range(len(rewards))],
        prompts=[Prompt(tuple(prompt.tolist()), f"prompt {n}") for n, prompt in enumerate(prompts)],
        samples=len(rewards[0]),
        ids=completions,
        texts=list(texts) if texts is not None else [f"text {number}" for number in range(len(flat))],
        stop_reasons=["length" if number in cut else "eos" for number in range(len(flat))],
        sampler_logps=[-4 - torch.rand(length, generator=generator) for length in flat],
        versions=[torch.zeros(length, dtype=torch.int32) for length in flat],
        kept=make_kept_sets(completions, generator) if kept else None,
        rewards=scores if columns is None else columns,
        dropped=gone,
    )


def make_kept_sets(completions: Sequence[Tensor], generator: torch.Generator) -> KeptSets:
    """For every token a set with it and some others; some sets are empty, which means all tokens."""
    sets = []
    for token in torch.cat(list(completions)).tolist():
        others = torch.randperm(VOCABULARY, generator=generator)[: 3 + token % 4].tolist()
        sets.append(sorted({token, *others}) if token % 5 else [])
    counts = torch.tensor([0, *map(len, sets)])
    return KeptSets(torch.tensor([i for kept in sets for i in kept], dtype=torch.int32), counts.cumsum(0))


def small_llama(dtype: torch.dtype = torch.float64) -> nn.Module:
    """A one-layer Llama; in float64 everything is computed in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**{**SIZE, "num_hidden_layers": 1}))
        for parameter in model.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.3)
    model = model.to(dtype).eval()
    if dtype == torch.float64:
        exact(model)
    return model


class RecordingSGD(torch.optim.SGD):
    """SGD that records the gradients of each step."""

    def __init__(self, masters: MasterWeights, lr: float = 0.0) -> None:
        super().__init__(list(masters.parameters()), lr=lr)
        self.masters = masters
        self.seen: list[dict[str, Tensor]] = []

    def step(self, closure: Any = None) -> Any:
        self.seen.append({n: p.grad.clone() for n, p in self.masters.named_parameters() if p.grad is not None})
        return super().step(closure)


def make_updater(
    recipe: Recipe,
    *,
    model: nn.Module | None = None,
    budget: int = 10**6,
    lr: float = 0.0,
    reference: bool = False,
    **more: Any,
) -> Updater:
    """An updater of a tiny float64 Llama, with `RecordingSGD`."""
    handle = prepare(small_llama() if model is None else model)
    masters = MasterWeights(handle.model)
    ref = Reference(masters) if reference else None
    return Updater(handle, masters, RecordingSGD(masters, lr), ref, budget, find_loss(recipe.loss.name), **more)


def last_gradient(updater: Updater) -> dict[str, Tensor]:
    optimizer = updater.optimizer
    assert isinstance(optimizer, RecordingSGD)
    return optimizer.seen[-1]


@torch.no_grad()
def perturb(model: nn.Module, size: float = 0.05, seed: int = 1) -> None:
    """Add noise to the trainable weights."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_((size * noise).to(parameter))


def assert_same(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], relative: float = 1e-9) -> None:
    assert got.keys() == wanted.keys()
    assert sum(float(gradient.norm()) for gradient in wanted.values()) > 0
    size = max(float(gradient.norm()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        bound = relative * max(float(gradient.norm()), 1e-3 * size)
        assert float((got[name] - gradient).norm()) <= bound, name


# --- the naive computation --------------------------------------------------------------------------------------------


def naive_logps(handle: ModelHandle, batch: Batch, prompts: Sequence[int], recipe: Recipe) -> dict[str, Tensor]:
    """Every sample of these prompts computed on its own: logps, entropy and mask ``(n, T)``."""
    members = [prompt * batch.samples + sample for prompt in prompts for sample in range(batch.samples)]
    rows: dict[str, list[Tensor]] = {"logps": [], "entropy": [], "mask": [], "sampler": []}
    for i in members:
        one = padded_logps(
            handle,
            [torch.tensor(batch.prompts[i // batch.samples].ids)],
            [[batch.ids[i]]],
            temperature=recipe.sampling.temperature,
            kept=None if batch.kept is None else batch.kept.select(batch.token_indices([i])),
            with_entropy=True,
        )
        assert one.entropy is not None
        rows["logps"].append(one.logps[0])
        rows["entropy"].append(one.entropy[0])
        rows["mask"].append(one.mask[0])
        rows["sampler"].append(batch.sampler_logps[i])
    return {name: nn.utils.rnn.pad_sequence(values, batch_first=True) for name, values in rows.items()}


def naive_terms(
    handle: ModelHandle,
    batch: Batch,
    group_advantages: GroupAdvantages,
    prompts: Sequence[int],
    recipe: Recipe,
    *,
    loss: str | Loss | None = None,
    old: Tensor | None = None,
    ref: Tensor | None = None,
    weights: Tensor | None = None,
) -> dict[str, Tensor]:
    """The objective's terms of all samples at once, straight from the formulas."""
    members = torch.tensor([prompt * batch.samples + g for prompt in prompts for g in range(batch.samples)])
    rows = naive_logps(handle, batch, prompts, recipe)
    if recipe.masks.drop_equal_rewards:
        stays = ~group_advantages.equal[members]
        members, rows = members[stays], {name: values[stays] for name, values in rows.items()}
        old, ref, weights = (None if values is None else values[stays] for values in (old, ref, weights))
    mask, advantages = rows["mask"], group_advantages.advantages[members]
    policy_mask = group_advantages.allowed[members][:, None] & mask
    if recipe.masks.off_policy is not None:
        rule = recipe.masks.off_policy
        other = rows["sampler"] if rule == "v3.2" or ref is None else ref
        threshold = recipe.masks.off_policy_threshold
        kept = off_policy_sequence_mask(rows["logps"], other, advantages, mask, threshold=threshold, rule=rule)
        policy_mask = policy_mask & kept[:, None]
    if recipe.masks.high_entropy is not None:
        policy_mask = policy_mask & (advantages != 0)[:, None]
        policy_mask = high_entropy_mask(rows["entropy"], policy_mask, top_fraction=recipe.masks.high_entropy)
    settings, divergence, threshold = recipe.loss, recipe.masks.divergence, recipe.masks.divergence_threshold
    value, _ = policy_loss(
        rows["logps"],
        old,
        advantages,
        mask,
        loss=loss or settings.name,
        aggregation=settings.aggregation,
        ratio=settings.ratio,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
        max_length=recipe.sampling.max_new_tokens,
        prompts=prompt_totals(mask, batch.samples),
        policy_mask=policy_mask if weights is None else policy_mask * weights,
        denominator=settings.denominator,
        divergence=None if divergence is None else DivergenceLimit(rows["sampler"], divergence, threshold),
    )
    terms = {"policy": value}
    if settings.kl_coef:
        assert ref is not None
        ratio = settings.ratio or find_loss(settings.name).ratios[0]
        kl = kl_estimate(rows["logps"], ref, estimator=settings.kl, old_logps=old, mask=mask, ratio=ratio)
        aggregation = settings.aggregation or find_loss(settings.name).aggregation
        terms["kl"] = settings.kl_coef * aggregate(
            kl,
            mask,
            "token_mean" if settings.kl_aggregation == "token_mean" else aggregation,
            max_length=recipe.sampling.max_new_tokens,
            prompts=prompt_totals(mask, batch.samples),
        )
    if settings.entropy_coef:
        terms["entropy"] = -settings.entropy_coef * rows["entropy"][mask].mean()
    return terms


def gradient_of(model: nn.Module, value: Tensor) -> dict[str, Tensor]:
    trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    names, parameters = zip(*trained, strict=True)
    return dict(zip(names, torch.autograd.grad(value, parameters), strict=True))


def moved_minibatch(
    settings: Mapping[str, Any],
    *,
    model: Any = None,
    budget: int = 10**6,
    old: bool = True,
    naive: bool = True,
    size: float = 0.02,
) -> tuple[Recipe, Batch, GroupAdvantages, Updater, MiniBatch, dict[str, Any]]:
    """A mini-batch whose policy has moved away from its old log-probs and from the reference, by ``size``.

    The last value are the old and reference log-probs of `naive_terms`, unless ``naive`` is False.
    """
    recipe = short_recipe(settings)
    batch = make_batch(cut=[1, 3, 12], kept=recipe.masks.keep_sampling_mask)
    group_advantages = compute_group_advantages(batch, recipe, [1.0])
    updater = make_updater(recipe, model=model, budget=budget, reference=True)
    minibatch = build_minibatch(batch, group_advantages, PROMPTS, recipe)
    inputs: dict[str, Any] = {}
    with torch.no_grad():
        if naive:
            inputs["ref"] = naive_logps(updater.handle, batch, PROMPTS, recipe)["logps"]
        perturb(updater.handle.model, seed=2, size=size)
        if naive:
            before = naive_logps(updater.handle, batch, PROMPTS, recipe)
            inputs["old"] = before["logps"] if old else None
            if recipe.masks.divergence is not None and recipe.loss.importance_cap is None:
                inputs["old"] = before["sampler"]
            if corrects_sampler(recipe):
                inputs["weights"] = naive_weights(before["logps"], before["sampler"], before["mask"].sum(1), recipe)
    updater.precompute_logps(minibatch, recipe, old=old)
    perturb(updater.handle.model, seed=3, size=size)
    return recipe, batch, group_advantages, updater, minibatch, inputs


def naive_weights(logps: Tensor, sampler: Tensor, lengths: Tensor, recipe: Recipe) -> Tensor:
    """The weight of each token for the sampler's other log-probs, one after another."""
    loss, weights = recipe.loss, torch.ones_like(logps)
    low, high = loss.importance_floor or 0.0, loss.importance_cap or math.inf
    for row, length in enumerate(lengths.tolist()):
        differences = [float(logps[row, place]) - float(sampler[row, place]) for place in range(length)]
        statistic = {
            "geometric": [math.exp(sum(differences) / length)],
            "product": [math.exp(sum(differences))],
            "any_token": [math.exp(difference) for difference in differences],
            "k3": [sum(math.exp(difference) - difference - 1 for difference in differences) / length],
        }[loss.rejection]
        for place, difference in enumerate(differences):
            ratio = math.exp(sum(differences) if "sequence" in loss.importance_sampling else difference)
            weight = min(max(ratio, low), high) if "truncate" in loss.importance_sampling else ratio
            within = [(loss.rejection_low or 0.0) <= value <= (loss.rejection_high or math.inf) for value in statistic]
            if not low <= weight <= high or not all(within):
                weight = 0.0
            if loss.importance_cap is None and loss.importance_floor is None:
                weight = float(weight != 0)
            weights[row, place] = weight
    if loss.importance_normalize:
        weights /= weights[torch.arange(logps.shape[1]) < lengths[:, None]].mean()
    return weights


def check_update(
    updater: Updater,
    minibatch: MiniBatch,
    recipe: Recipe,
    terms: Mapping[str, Tensor],
    budgets: Sequence[int] = BUDGETS,
) -> list[UpdateResult]:
    """Check the values of these terms and the gradient of their sum, however samples are packed."""
    wanted = gradient_of(updater.handle.model, torch.stack(list(terms.values())).sum())
    results = []
    for budget in budgets:
        updater.token_budget = budget
        results.append(updater.update(minibatch, recipe))
        assert_same(last_gradient(updater), wanted)
        for name, value in terms.items():
            assert results[-1].values[name] == pytest.approx(float(value.detach()), rel=1e-9, abs=1e-12), name
        norm = sum(float(gradient.square().sum()) for gradient in wanted.values()) ** 0.5
        assert results[-1].grad_norm == pytest.approx(norm)
    return results


# --- trainers ---------------------------------------------------------------------------------------------------------


def spread(prompts: Sequence[str], completions: Sequence[str], completion_ids: Sequence[Sequence[int]]) -> list[float]:
    """A reward that is rarely the same for two completions."""
    return [sum(ids) % 97 / 97 for ids in completion_ids]


@contextmanager
def make_trainer(
    folder: Any,
    settings: Mapping[str, Any] | None = None,
    *,
    reward: Any = spread,
    callbacks: Sequence[Callback] = (),
    rows: int = 10,
    task: Task | None = None,
) -> Iterator[Trainer]:
    """A trainer on a few rows; what it said is ``trainer.display.said``."""
    task = task or Task("numbers", [{"prompt": f"Say number {number}: ", "number": number} for number in range(rows)])
    trainer = Trainer(
        short_recipe(settings),
        task=task,
        rewards=[reward],
        callbacks=callbacks,
        display=RecordingDisplay(),
        folder=folder / "run",
    )
    try:
        yield trainer
    finally:
        trainer.close()
