"""The pairs of a data set: loaded, put in order beside the prompts, and measured where they are held out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from groupwise.config import Recipe
from groupwise.data import Order, Pair, PairBuilder, PromptBuilder
from groupwise.errors import ConfigError
from groupwise.model.handle import ModelHandle, without_dropout
from groupwise.model.logprobs import default_token_budget
from groupwise.stats import mean_interval
from groupwise.tasks.base import Row
from groupwise.tasks.rows import read_section
from groupwise.training.monitor.log_prob_mismatch import has_dropout
from groupwise.training.preference.reference_cache import TokenPair, pair_lengths, pair_logps, reference_logps
from groupwise.training.store.recorder import LIKELIER, PREFERRED
from groupwise.training.update.minibatch import DatasetPairs
from groupwise.training.update.objective import pairs_loss
from groupwise.training.update.reference import Reference

if TYPE_CHECKING:
    from groupwise.training.components import RunComponents
    from groupwise.training.trainer import Trainer

Say = Callable[[str], None]

BETTER = torch.tensor([1.0, -1.0], dtype=torch.float64)  # the chosen answer's number less the rejected one's
WHY_REFUSED = {
    "same_answer": "the chosen and the rejected answer are the same",
    "no_answer": "an answer is empty",
    "too_long": "they are longer than preference.max_length",
}


@dataclass(frozen=True)
class PairSplits:
    """A data set's pairs, to train on and held out."""

    train: list[TokenPair]
    held_out: list[TokenPair]


def load_pairs(recipe: Recipe, builder: PromptBuilder, window: int | None, *, learns: bool, say: Say) -> PairSplits:
    """The pairs that ``[preference]`` names; ``learns``: whether the run is to learn from pairs at all."""
    how = recipe.preference
    if how.pairs != "group" and how.train is None and learns:
        raise ConfigError(
            f"preference.pairs is {how.pairs!r}, so preference.train must name a data set with chosen and rejected "
            "answers (.jsonl, .json, .parquet, .csv, a folder, or a hub data set owner/name); 'group' takes pairs from "
            "the sampled answers"
        )
    if how.train is None and how.held_out is None:
        return PairSplits([], [])
    if how.max_length is not None and window is not None and how.max_length > window:
        say(f"preference.max_length is {how.max_length}; the model's window of {window} tokens is what counts")
    limit = min((length for length in (how.max_length, window) if length is not None), default=None)
    train, held_out = read_section(recipe, "preference")
    make = PairBuilder(
        builder,
        prompt=how.prompt,
        chosen=how.chosen,
        rejected=how.rejected,
        max_length=limit,
        on_too_long=how.on_too_long,
    )
    return PairSplits(_built(make, train, "training", say), _built(make, held_out, "held-out", say))


def _built(make: PairBuilder, rows: Sequence[Row], which: str, say: Say) -> list[TokenPair]:
    if not rows:
        return []
    pairs = make.build(rows)
    for reason, number in make.refused.items():
        if number:
            say(f"{number} of {len(rows)} {which} pairs are left out: {WHY_REFUSED[reason]}")
    if make.retokenised:
        say(
            f"in {make.retokenised} of {len(rows)} {which} pairs a prompt's last tokens change once an answer follows: "
            "there the answers begin a little earlier"
        )
    return [_tensors(pair) for pair in pairs]


def _tensors(pair: Pair) -> TokenPair:
    return TokenPair(pair.prompt, torch.tensor(pair.chosen), torch.tensor(pair.rejected))


def load_reference_logps(trainer: Trainer) -> None:
    """Find the reference's log-probs of a run's pairs, on the disk or by computing them, unless it is going to move."""
    recipe, reference = trainer.recipe, trainer.reference
    if reference is None or not trainer.components.keeps_reference:
        return

    def look_up(pairs: Sequence[TokenPair]) -> Tensor:
        return reference_logps(
            trainer.components.handle,
            reference,
            pairs,
            token_budget=default_token_budget(trainer.components.handle),
            progress=lambda done, total: trainer.display.stage(f"reference: {done:,} of {total:,} pairs"),
            say=trainer.say,
            dropout=has_dropout(recipe),
        )

    source = trainer.pairs
    if source.sets.train and trainer.components.learns_from_pairs:
        source.train_reference = look_up(source.sets.train)
    if source.sets.held_out:
        source.held_out_reference = look_up(source.sets.held_out)


class PairSampler:
    """The pairs of a run: so many for each step, in an order of their own, and those to measure by.

    Where the reference stays what it is, its log-probs are known to begin with; else each step computes its own.
    """

    def __init__(self, sets: PairSplits, recipe: Recipe) -> None:
        how, self.sets = recipe.preference, sets
        self.batch_size = how.batch_size
        self.order: Order | None = None
        if sets.train:
            self.order = Order(len(sets.train), shuffle=how.shuffle, seed=recipe.train.seed)
        self.train_reference: Tensor | None = None  # (n, 2)
        self.held_out_reference: Tensor | None = None  # (m, 2)

    @property
    def epoch(self) -> float:
        return 0.0 if self.order is None else self.order.epoch

    def take(self, now: Recipe) -> DatasetPairs:
        """The data set's pairs of the next step; none where they are not learned from."""
        if self.order is None or not now.preference.weight:
            return DatasetPairs()
        rows, known = self.order.take(self.batch_size), self.train_reference
        return DatasetPairs([self.sets.train[row] for row in rows], None if known is None else known[rows])

    def state(self) -> dict[str, Any] | None:
        return None if self.order is None else self.order.state()

    def load_state(self, state: dict[str, Any] | None) -> None:
        if self.order is not None and state is not None:
            self.order.load_state(state)

    def measure(
        self, handle: ModelHandle, reference: Reference, now: Recipe, token_budget: int, *, dropout: bool = False
    ) -> dict[str, float]:
        """How the policy does on held-out pairs: by DPO's reward, relative to the reference, and by log-probs alone.

        A margin of nothing, such as before the first step, counts as half right. ``preference_logp_accuracy`` asks
        which answer is likelier per token, whatever the reference says.
        """
        pairs, ref = self.sets.held_out, self.held_out_reference
        if not pairs:
            return {}
        with without_dropout(handle.model) if dropout else nullcontext():
            logps = pair_logps(handle, pairs, token_budget=token_budget)
            if ref is None:
                with reference.in_place():
                    ref = pair_logps(handle, pairs, token_budget=token_budget)
        loss, statistics = pairs_loss(now, logps, ref, pair_lengths(pairs), len(pairs))
        found = _share(PREFERRED, (logps - ref) @ BETTER) | _likelier(pairs, logps)
        found["preference_loss"] = float(loss)
        for name in ("margin", "chosen_reward", "rejected_reward"):
            found[f"preference_{name}"] = float(statistics[f"preference/{name}"])
        return found


def likelier_answers(components: RunComponents) -> dict[str, float]:
    """What can be said of held-out pairs without a reference: how often the better answer is the likelier one."""
    pairs, handle = components.pairs.held_out, components.handle
    if not pairs:
        return {}
    return _likelier(pairs, pair_logps(handle, pairs, token_budget=default_token_budget(handle)))


def _likelier(pairs: Sequence[TokenPair], logps: Tensor) -> dict[str, float]:
    """By the mean log-prob of a token, so that the shorter answer is not the likelier one by its length."""
    return _share(LIKELIER, (logps / pair_lengths(pairs)) @ BETTER)


def _share(name: str, margins: Tensor) -> dict[str, float]:
    """The share of margins above 0, with its interval; a margin of nothing counts as half."""
    band = mean_interval(((margins > 0).double() + 0.5 * (margins == 0)).numpy())
    return {name: band.estimate, f"{name}_low": band.low, f"{name}_high": band.high}
