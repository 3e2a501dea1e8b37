"""A task: rows with prompts, rewards to learn from, and grades to evaluate by. Plain records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from groupwise.config import Recipe
from groupwise.config.layers import read_options
from groupwise.environments import EnvironmentFactory
from groupwise.errors import ConfigError
from groupwise.redaction import resolve_secrets
from groupwise.rewards.contract import RewardFunction

TaskRow = dict[str, Any]
"""A row of data: "prompt" is a text or a list of chat messages, the other columns are passed to the rewards."""

Grade = Callable[[TaskRow, str], bool | None]
"""Grades a completion: right, wrong, or None where it contains no answer."""


@dataclass(frozen=True)
class Task:
    """What to ask, how to reward a completion, and how to grade it.

    ``held_out`` are rows, or several sets of rows by name, whose metrics are ``eval/NAME/…``.
    ``grades`` are for evaluation only; the one named ``metric`` selects the best checkpoint. Without grades, held-out
    rows are evaluated by the mean reward. ``examples`` are (prompt, completion) pairs for SFT. A completion is a text
    or, with an environment, the messages of a conversation, of which the assistant's are learned. ``notes`` are shown
    when a run starts. ``environment`` makes the environment that answers the model's turns; without one a completion
    is a single turn. ``health_checks`` adds to those of `training.monitor.checks`: each gets the recent steps and
    returns a warning or None.
    """

    name: str
    train: Sequence[TaskRow]
    held_out: Sequence[TaskRow] | Mapping[str, Sequence[TaskRow]] = ()
    rewards: tuple[RewardFunction, ...] = ()
    grades: Mapping[str, Grade] = field(default_factory=dict)
    metric: str | None = None
    examples: Sequence[tuple[Any, str | list[dict[str, Any]]]] = ()
    environment: EnvironmentFactory | None = None
    stop: tuple[str, ...] = ()
    system_prompt: str | None = None
    goal: float | None = None
    notes: tuple[str, ...] = ()
    health_checks: Mapping[str, Callable[[Any], str | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.grades and self.metric not in self.grades:
            raise ConfigError(
                f"the metric {self.metric!r} of the task {self.name!r} is none of its grades ({', '.join(self.grades)})"
            )
        for name in self.held_out_sets:
            if not isinstance(name, str) or "/" in name:
                raise ConfigError(f"held_out of the task {self.name!r}: {name!r} cannot be the name of a set of rows")

    @property
    def held_out_sets(self) -> dict[str, Sequence[TaskRow]]:
        """The held-out rows by the name of their set, which is empty if there is only one."""
        return dict(self.held_out) if isinstance(self.held_out, Mapping) else {"": self.held_out}

    @property
    def held_out_rows(self) -> list[TaskRow]:
        """The held-out rows of all sets."""
        return [row for rows in self.held_out_sets.values() for row in rows]


@dataclass(frozen=True)
class TaskReport:
    """The result of `groupwise eval --report`."""

    files: Sequence[Path]
    summary: Sequence[Any] = ()  # texts and rich tables for the terminal
    answers: Sequence[Mapping[str, Any]] = ()  # one record per completion


@dataclass(frozen=True)
class TaskDefinition:
    """What an entry point of the group ``groupwise.tasks`` may name beside a plain function from a recipe to a task.

    ``options`` is the pydantic class of the recipe's ``[task_options]``; without it the task takes none.
    ``report(recipe, folder, against=…, progress=…, say=…)`` evaluates the recipe's model and writes a report into the
    folder. ``against`` is None, a model, or a folder with an earlier report, to compare with; ``progress`` takes a
    description, the number of rows done and their total.
    """

    make: Callable[[Recipe, Any], Task]
    options: type[BaseModel] | None = None
    report: Callable[..., TaskReport] | None = None

    def read_options(self, recipe: Recipe) -> Any:
        """The recipe's ``[task_options]``, checked; None for a task without options."""
        if self.options is not None:
            options = resolve_secrets(recipe.task_options, "task_options")
            return read_options(self.options, options, f"[task_options] of the task {recipe.task!r}")
        if recipe.task_options:
            raise ConfigError(
                f"[task_options]: the task {recipe.task!r} has no options, but "
                f"{', '.join(map(repr, recipe.task_options))} is set; leave [task_options] out"
            )
        return None

    def __call__(self, recipe: Recipe) -> Task:
        return self.make(recipe, self.read_options(recipe))
