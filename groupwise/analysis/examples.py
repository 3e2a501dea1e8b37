"""Completions that show a finding, from the rollouts of the step at which it was seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from groupwise.analysis.run_reader import RunReader
from groupwise.errors import CheckpointError
from groupwise.training.monitor.checks import WINDOW
from groupwise.training.monitor.checks.base import Problem

MOST = 3  # examples of a finding, each of another prompt

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Example:
    """A completion: its place in the rollouts of a step."""

    step: int
    prompt_number: int
    sample: int


def find_examples(reader: RunReader, name: str, step: int, problem: Problem) -> list[Example]:
    """Up to three completions that show the finding ``name``; none if nothing was recorded or nothing can show it."""
    choose = _CHOICES.get(name)
    steps = [recorded for recorded in reader.rollout_steps if step - WINDOW < recorded <= step] if choose else []
    for recorded in reversed(steps):
        examples: dict[int, Example] = {}
        with suppress(CheckpointError):  # deleted meanwhile, or damaged, which is a finding of its own
            for row in choose(reader.rollouts(recorded), problem) if choose else ():
                place = Example(recorded, row["prompt_number"], row["sample"])
                examples.setdefault(place.prompt_number, place)
        if examples:
            return list(examples.values())[:MOST]
    return []


def _cut_off(rows: Sequence[Row], problem: Problem) -> list[Row]:
    return [row for row in rows if row.get("stop_reason") == "length"]


def _without_answer(rows: Sequence[Row], problem: Problem) -> list[Row]:
    grades = [f"grade/{name.removesuffix('_no_answer')}" for name in problem.evidence if name.endswith("_no_answer")]
    return [row for row in rows if any(name in row and row[name] is None for name in grades)]


def _longest(rows: Sequence[Row], problem: Problem) -> list[Row]:
    return sorted(rows, key=lambda row: -(row.get("completion_tokens") or 0))


def _identical(rows: Sequence[Row], problem: Problem) -> list[Row]:
    texts: dict[Any, set[Any]] = {}
    for row in rows:
        texts.setdefault(row["prompt_number"], set()).add(row.get("completion"))
    return [row for row in rows if len(texts[row["prompt_number"]]) == 1]


def _without_signal(rows: Sequence[Row], problem: Problem) -> list[Row]:
    return [row for row in rows if row.get("masked_out") == "equal_rewards"]


def _masked(rows: Sequence[Row], problem: Problem) -> list[Row]:
    masks = [name.removeprefix("masks/") for name in problem.evidence if name.startswith("masks/")]
    return [row for row in rows if row.get("masked_out") in masks]


def _failed(rows: Sequence[Row], problem: Problem) -> list[Row]:
    return [row for row in rows if row.get("masked_out") == "dropped"]


def _highest_reward(rows: Sequence[Row], problem: Problem) -> list[Row]:
    scored = [row for row in rows if row.get("reward") is not None]
    return sorted(scored, key=lambda row: -row["reward"])


def _any(rows: Sequence[Row], problem: Problem) -> list[Row]:
    return list(rows)


_CHOICES: dict[str, Callable[[Sequence[Row], Problem], list[Row]]] = {
    "truncated": _cut_off,
    "no_answer": _without_answer,
    "answers_longer": _longest,
    "answers_identical": _identical,
    "answers_alike": _any,
    "entropy_collapsed": _any,
    "entropy_exploded": _any,
    "no_learning_signal": _without_signal,
    "zero_spread": _without_signal,
    "masked": _masked,
    "rewards_failed": _failed,
    "reward_constant": _any,
    "reward_dominates": _highest_reward,
    "overfitting": _highest_reward,
}
