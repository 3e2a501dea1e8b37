"""Preference pairs of a data set: loading, the order of training, and metrics of held-out pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from groupwise.config import Recipe
from groupwise.data import Order, PairBuilder, PromptBuilder
from groupwise.distributed.ranks import Ranks
from groupwise.errors import ConfigError
from groupwise.model.handle import ModelHandle, eval_mode
from groupwise.model.packing import default_token_budget
from groupwise.seeds import derive_seed
from groupwise.stats import mean_interval
from groupwise.tasks.base import TaskRow
from groupwise.tasks.rows import read_section
from groupwise.text import Say
from groupwise.training.preference import LOGP_ACCURACY, PREFERENCE_ACCURACY
from groupwise.training.preference.reference_cache import TokenPair, pair_lengths, pair_logps, reference_logps
from groupwise.training.update.minibatch import DatasetPairs
from groupwise.training.update.objective import pairs_loss
from groupwise.training.update.reference import Reference

REFUSAL_REASONS = {
    "same_answer": "the chosen and the rejected completion are the same",
    "no_answer": "a completion is empty",
    "too_long": "they are longer than preference.max_length",
}


@dataclass(frozen=True)
class PairSplits:
    """A data set's pairs for training, and the held-out ones."""

    train: list[TokenPair]
    held_out: list[TokenPair]


def load_pairs(recipe: Recipe, builder: PromptBuilder, window: int | None, *, learns: bool, say: Say) -> PairSplits:
    """The pairs of the data sets in ``[preference]``; ``learns``: whether the run trains on pairs at some time."""
    settings = recipe.preference
    if settings.pairs != "group" and settings.train is None and learns:
        raise ConfigError(
            f"preference.pairs is {settings.pairs!r}, so preference.train must name a data set of pairs (a file, a "
            "folder, or owner/name on the hub); 'group' makes pairs of the sampled completions"
        )
    if settings.train is None and settings.held_out is None:
        return PairSplits([], [])
    limit = settings.max_length
    if window is not None and (limit is None or limit > window):
        if limit is not None:
            say(f"preference.max_length {limit} is more than the model's window of {window} tokens, which is used")
        limit = window
    train, held_out = read_section(recipe, "preference")
    pair_builder = PairBuilder(
        builder,
        prompt=settings.prompt,
        chosen=settings.chosen,
        rejected=settings.rejected,
        max_length=limit,
        on_too_long=settings.on_too_long,
    )
    return PairSplits(_build(pair_builder, train, "training", say), _build(pair_builder, held_out, "held-out", say))


def load_reference_logps(
    sampler: PairSampler,
    handle: ModelHandle,
    reference: Reference,
    *,
    learns_from_pairs: bool,
    dropout: bool,
    ranks: Ranks | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    say: Say = lambda text: None,
) -> None:
    """Give the sampler the reference's log-probs of its pairs, read from disk or computed.

    Only for a reference that is never refreshed: otherwise each step computes its own.
    """
    budget = default_token_budget(handle)

    def load(pairs: Sequence[TokenPair]) -> Tensor:
        options: dict[str, Any] = {"token_budget": budget, "ranks": ranks, "progress": progress, "say": say}
        return reference_logps(handle, reference, pairs, dropout=dropout, **options)

    if sampler.splits.train and learns_from_pairs:
        sampler.train_reference = load(sampler.splits.train)
    if sampler.splits.held_out:
        sampler.held_out_reference = load(sampler.splits.held_out)


class PairSampler:
    """Draws the pairs of each step, in an order independent of the prompts', and evaluates the held-out ones."""

    def __init__(self, splits: PairSplits, recipe: Recipe) -> None:
        settings, self.splits = recipe.preference, splits
        self.batch_size = settings.batch_size
        self.order: Order | None = None
        if splits.train:
            seed = derive_seed("pairs", recipe.train.seed)
            self.order = Order(len(splits.train), shuffle=settings.shuffle, seed=seed)
        self.train_reference: Tensor | None = None  # (n, 2) if the reference is fixed
        self.held_out_reference: Tensor | None = None  # (m, 2)

    @property
    def epoch(self) -> float:
        return 0.0 if self.order is None else self.order.epoch

    def take(self, step_recipe: Recipe) -> DatasetPairs:
        """The pairs of the next step; none if the preference loss has no weight."""
        if self.order is None or not step_recipe.preference.weight:
            return DatasetPairs()
        rows, reference = self.order.take(self.batch_size), self.train_reference
        return DatasetPairs([self.splits.train[row] for row in rows], None if reference is None else reference[rows])

    def undo_point(self) -> Callable[[], None]:
        """A function that returns to this moment, after a step that could not be finished."""
        before = self.state()
        return lambda: self.load_state(before)

    def state(self) -> dict[str, Any] | None:
        return None if self.order is None else self.order.state()

    def load_state(self, state: dict[str, Any] | None) -> None:
        if self.order is not None and state is not None:
            self.order.load_state(state)

    def measure(
        self,
        handle: ModelHandle,
        reference: Reference,
        step_recipe: Recipe,
        token_budget: int,
        *,
        dropout: bool = False,
        ranks: Ranks | None = None,
    ) -> dict[str, float]:
        """Metrics of the held-out pairs: by DPO's reward, relative to the reference, and by log-probs alone.

        A margin of 0, such as before the first step, counts as half correct.
        """
        pairs, ref_logps = self.splits.held_out, self.held_out_reference
        if not pairs:
            return {}
        with eval_mode(handle.model) if dropout else nullcontext():
            logps = pair_logps(handle, pairs, token_budget=token_budget, ranks=ranks)
            if ref_logps is None:
                with reference.in_place():
                    ref_logps = pair_logps(handle, pairs, token_budget=token_budget, ranks=ranks)
        loss, statistics = pairs_loss(step_recipe, logps, ref_logps, pair_lengths(pairs), len(pairs))
        metrics = _accuracy(PREFERENCE_ACCURACY, logps - ref_logps) | _logp_accuracy(pairs, logps)
        metrics["preference_loss"] = float(loss)
        for name in ("margin", "chosen_reward", "rejected_reward"):
            metrics[f"preference_{name}"] = float(statistics[f"preference/{name}"])
        return metrics


def logp_accuracy(handle: ModelHandle, pairs: Sequence[TokenPair]) -> dict[str, float]:
    """How often the chosen completion is the likelier one per token; this needs no reference."""
    if not pairs:
        return {}
    return _logp_accuracy(pairs, pair_logps(handle, pairs, token_budget=default_token_budget(handle)))


def _build(builder: PairBuilder, rows: Sequence[TaskRow], which: str, say: Say) -> list[TokenPair]:
    if not rows:
        return []
    pairs = builder.build(rows)
    for reason, number in builder.refused.items():
        if number:
            say(f"{number} of {len(rows)} {which} pairs are left out: {REFUSAL_REASONS[reason]}")
    if builder.retokenised:
        say(
            f"in {builder.retokenised} of {len(rows)} {which} pairs the prompt's last tokens change when a completion "
            "follows; there the completions begin a little earlier"
        )
    return [TokenPair(pair.prompt, torch.tensor(pair.chosen), torch.tensor(pair.rejected)) for pair in pairs]


def _logp_accuracy(pairs: Sequence[TokenPair], logps: Tensor) -> dict[str, float]:
    """By the mean log-prob per token, so that short completions have no advantage."""
    return _accuracy(LOGP_ACCURACY, logps / pair_lengths(pairs))


def _accuracy(name: str, values: Tensor) -> dict[str, float]:
    """The share of pairs ``(n, 2)`` with a margin above 0, with its interval; a margin of 0 counts as half."""
    margins = values[:, 0] - values[:, 1]
    interval = mean_interval(((margins > 0).double() + 0.5 * (margins == 0)).numpy())
    return {name: interval.estimate, f"{name}_low": interval.low, f"{name}_high": interval.high}
