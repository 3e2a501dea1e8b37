"""What a task is: rows with prompts, rewards for answers, and grades for an evaluation. Plain data, one record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from groupwise.errors import ConfigError
from groupwise.rewards.contract import RewardFunction

Row = dict[str, Any]
"""A row of data: "prompt" is a text or a list of chat messages, everything else is a column that rewards see."""

Grade = Callable[[Row, str], bool | None]
"""One answer's text against its row: right, wrong, or None where no answer can be found in it."""

Choices = Callable[[Row], Mapping[str, str]]
"""The answers that can be given to a row of multiple choice, by letter, in their shortest form."""

Reorder = Callable[[Row, str], Row]
"""A row with its options in an order that comes from a seed; its column ``moved`` says which letter became which."""


@dataclass(frozen=True)
class Task:
    """A task: what to ask, how to reward an answer, and how to tell whether it is right.

    ``grades`` are for evaluation and never teach; the one named ``metric`` chooses the best checkpoint. Without any,
    held-out rows are judged by the mean reward. ``examples`` are (prompt, answer) pairs for a supervised warm-up that
    teaches the form of an answer. ``choices`` and ``reorder`` mark multiple choice: rows then have ``options`` and
    ``answer``, a letter. ``notes`` are sentences that whoever starts a run should read.
    """

    name: str
    train: Sequence[Row]
    held_out: Sequence[Row] = ()
    rewards: tuple[RewardFunction, ...] = ()
    grades: Mapping[str, Grade] = field(default_factory=dict)
    metric: str | None = None
    examples: Sequence[tuple[Any, str]] = ()
    stop: tuple[str, ...] = ()
    system_prompt: str | None = None
    goal: float | None = None
    choices: Choices | None = None
    reorder: Reorder | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.grades and self.metric not in self.grades:
            raise ConfigError(
                f"the task {self.name!r} is judged by {self.metric!r}, which is none of its grades "
                f"({', '.join(self.grades)})"
            )
