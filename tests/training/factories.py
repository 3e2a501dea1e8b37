"""Batches, updaters and trainers for the tests of one step: small, and under the test's control."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from groupwise.config import Recipe, make_recipe
from groupwise.core import kl_estimate, policy_loss
from groupwise.core.filters import KeptSets
from groupwise.core.losses import Loss, aggregate
from groupwise.core.masks import high_entropy_mask, off_policy_sequence_mask
from groupwise.data import Prompt
from groupwise.model.handle import ModelHandle, prepare
from groupwise.model.logprobs import padded_logps
from groupwise.model.precision import MasterWeights
from groupwise.tasks.base import Task
from groupwise.training.rollout.batch import Batch, GroupAdvantages
from groupwise.training.trainer import Callback, Trainer
from groupwise.training.update.objective import find_loss
from groupwise.training.update.reference import Reference
from groupwise.training.update.updater import Updater
from tests.model.models import SIZE, VOCABULARY, exact

LENGTHS = [[3, 7, 1, 5], [4, 4, 2, 6], [8, 1, 3, 2], [5, 2, 7, 7]]
REWARDS = [[1.0, 0.0, 0.0, 0.5], [1.0, 1.0, 1.0, 1.0], [0.0, 2.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0]]

SMALL = {
    "train": {"steps": 2, "batch_size": 2, "accumulation": 1},
    "sampling": {"samples_per_prompt": 4, "max_new_tokens": 8},
    "optimizer": {"learning_rate": 1e-3, "max_grad_norm": None},
    "model": {"gradient_checkpointing": False, "dtype": "float32"},
    "run": {"tensorboard": False, "picture": False, "save_rollouts": False, "checkpoint_every": 0},
    "data": {"chat": False},
}


def made_recipe(settings: Mapping[str, Any] | None = None) -> Recipe:
    """A small recipe in which these dotted settings hold."""
    return make_recipe(SMALL).with_settings({"loss.ratio": None, **(settings or {})})


def made_batch(
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
    """Random ids with these rewards and lengths. ``cut``: samples that ended by their length; ``kept``: with sets."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> Tensor:
        return torch.randint(VOCABULARY, (length,), generator=generator)

    flat = [length for group in lengths for length in group]
    answers = [ids(length) for length in flat]
    prompts = [ids(3 + 2 * number) for number in range(len(rewards))]
    gone = torch.zeros(len(flat), dtype=torch.bool)
    gone[list(dropped)] = True
    scores = torch.tensor([reward for group in rewards for reward in group], dtype=torch.float64)[:, None]
    return Batch(
        rows=[{"prompt": f"row {number}"} for number in range(len(rewards))],
        row_numbers=[10 + number for number in range(len(rewards))],
        prompts=[Prompt(tuple(prompt.tolist()), f"prompt {n}", None) for n, prompt in enumerate(prompts)],
        samples=len(rewards[0]),
        ids=answers,
        texts=list(texts) if texts is not None else [f"text {number}" for number in range(len(flat))],
        stop_reasons=["length" if number in cut else "eos" for number in range(len(flat))],
        sampler_logps=[-4 - torch.rand(length, generator=generator) for length in flat],
        kept=made_sets(answers, generator) if kept else None,
        rewards=scores if columns is None else columns,
        dropped=gone,
    )


def made_sets(answers: Sequence[Tensor], generator: torch.Generator) -> KeptSets:
    """For every token a set that holds it and some others; now and then an empty one, which means all."""
    sets = []
    for token in torch.cat(list(answers)).tolist():
        others = torch.randperm(VOCABULARY, generator=generator)[: 3 + token % 4].tolist()
        sets.append(sorted({token, *others}) if token % 5 else [])
    counts = torch.tensor([0, *map(len, sets)])
    return KeptSets(torch.tensor([i for own in sets for i in own], dtype=torch.int32), counts.cumsum(0))


def small_llama(dtype: torch.dtype = torch.float64) -> nn.Module:
    """One layer, so that a test of many updates is quick; in float64 it computes in float64 throughout."""
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


class Keeper(torch.optim.SGD):
    """An optimizer that remembers the gradients it was given, and moves by ``lr`` times them."""

    def __init__(self, masters: MasterWeights, lr: float = 0.0) -> None:
        super().__init__(list(masters.parameters()), lr=lr)
        self.masters = masters
        self.seen: list[dict[str, Tensor]] = []

    def step(self, closure: Any = None) -> Any:
        self.seen.append({n: p.grad.clone() for n, p in self.masters.named_parameters() if p.grad is not None})
        return super().step(closure)


def made_updater(
    now: Recipe,
    *,
    model: nn.Module | None = None,
    budget: int = 10**6,
    lr: float = 0.0,
    reference: bool = False,
    **more: Any,
) -> Updater:
    """An updater of a Llama of a few thousand float64 weights, with a `Keeper` as its optimizer."""
    handle = prepare(small_llama() if model is None else model)
    masters = MasterWeights(handle.model)
    own = Reference(masters) if reference else None
    return Updater(handle, masters, Keeper(masters, lr), own, budget, find_loss(now.loss.name), **more)


def last_gradient(updater: Updater) -> dict[str, Tensor]:
    optimizer = updater.optimizer
    assert isinstance(optimizer, Keeper)
    return optimizer.seen[-1]


@torch.no_grad()
def perturb(model: nn.Module, size: float = 0.05, seed: int = 1) -> None:
    """Move the weights that are trained."""
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


# --- the literal computation ------------------------------------------------------------------------------------------


def literal_logps(handle: ModelHandle, batch: Batch, prompts: Sequence[int], now: Recipe) -> dict[str, Tensor]:
    """Every sample of these prompts by itself, then side by side: logps, entropy and mask ``(n, T)``."""
    members = [prompt * batch.samples + sample for prompt in prompts for sample in range(batch.samples)]
    found: dict[str, list[Tensor]] = {"logps": [], "entropy": [], "mask": [], "sampler": []}
    for i in members:
        one = padded_logps(
            handle,
            [torch.tensor(batch.prompts[i // batch.samples].ids)],
            [[batch.ids[i]]],
            temperature=now.sampling.temperature,
            kept=None if batch.kept is None else batch.kept.select(batch.places([i])),
            with_entropy=True,
        )
        assert one.entropy is not None
        found["logps"].append(one.logps[0])
        found["entropy"].append(one.entropy[0])
        found["mask"].append(one.mask[0])
        found["sampler"].append(batch.sampler_logps[i])
    return {name: nn.utils.rnn.pad_sequence(rows, batch_first=True) for name, rows in found.items()}


def literal_terms(
    handle: ModelHandle,
    batch: Batch,
    group_advantages: GroupAdvantages,
    prompts: Sequence[int],
    now: Recipe,
    *,
    loss: str | Loss | None = None,
    old: Tensor | None = None,
    ref: Tensor | None = None,
    weights: Tensor | None = None,
) -> dict[str, Tensor]:
    """The objective's terms over the whole mini-batch at once, as the formulas have them."""
    members = torch.tensor([prompt * batch.samples + g for prompt in prompts for g in range(batch.samples)])
    found = literal_logps(handle, batch, prompts, now)
    mask, advantages = found["mask"], group_advantages.advantages[members]
    teaching = group_advantages.allowed[members][:, None] & mask
    if now.masks.off_policy is not None:
        rule = now.masks.off_policy
        other = found["sampler"] if rule == "v3.2" or ref is None else ref
        threshold = now.masks.off_policy_threshold
        near = off_policy_sequence_mask(found["logps"], other, advantages, mask, threshold=threshold, rule=rule)
        teaching = teaching & near[:, None]
    if now.masks.high_entropy is not None:
        teaching = teaching & (advantages != 0)[:, None]
        teaching = high_entropy_mask(found["entropy"], teaching, top_fraction=now.masks.high_entropy)
    how = now.loss
    value, _ = policy_loss(
        found["logps"],
        old,
        advantages,
        mask,
        loss=loss or how.name,
        ratio=how.ratio,
        clip_low=how.clip_low,
        clip_high=how.clip_high,
        dual_clip=how.dual_clip,
        max_length=now.sampling.max_new_tokens,
        policy_mask=teaching if weights is None else teaching * weights,
        denominator=how.denominator,
    )
    terms = {"policy": value}
    if how.kl_coef:
        assert ref is not None
        kl = kl_estimate(found["logps"], ref, estimator=how.kl, old_logps=old, mask=mask)
        aggregation = find_loss(how.name).aggregation
        terms["kl"] = how.kl_coef * aggregate(kl, mask, aggregation, max_length=now.sampling.max_new_tokens)
    if how.entropy_coef:
        terms["entropy"] = -how.entropy_coef * found["entropy"][mask].mean()
    return terms


def gradient_of(model: nn.Module, value: Tensor) -> dict[str, Tensor]:
    trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    names, parameters = zip(*trained, strict=True)
    return dict(zip(names, torch.autograd.grad(value, parameters), strict=True))


# --- whole trainers ---------------------------------------------------------------------------------------------------


class Lines:
    """A display that remembers what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: None

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *details: object) -> None: ...


def spread(prompts: Sequence[str], completions: Sequence[str], completion_ids: Sequence[Sequence[int]]) -> list[float]:
    """A reward that hardly ever gives the same twice."""
    return [sum(ids) % 97 / 97 for ids in completion_ids]


@contextmanager
def made_trainer(
    folder: Any,
    settings: Mapping[str, Any] | None = None,
    *,
    reward: Any = spread,
    callbacks: Sequence[Callback] = (),
    rows: int = 10,
    task: Task | None = None,
) -> Iterator[Trainer]:
    """A trainer on a few rows; what it said is ``trainer.display.said``."""
    task = task or Task("made", [{"prompt": f"Say number {number}: ", "number": number} for number in range(rows)])
    display: Any = Lines()
    trainer = Trainer(
        made_recipe(settings), task=task, rewards=[reward], callbacks=callbacks, display=display, folder=folder / "run"
    )
    try:
        yield trainer
    finally:
        trainer.close()
