"""The quiz with answers of different lengths: any number of dots may follow the letter.

The examples of SFT have up to three of them at random, so at first the length has nothing to do with success.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from groupwise.config import Recipe
from groupwise.rewards import RewardFunction, text_of
from groupwise.tasks.base import Task, TaskRow
from groupwise.tasks.quiz import grade_letter, quiz_task

MOST_DOTS = 3


def long_quiz(recipe: Recipe) -> Task:
    task, dots = quiz_task(recipe), random.Random(f"dots {recipe.train.seed}")
    return replace(
        task,
        name="long_quiz",
        rewards=(RewardFunction("correct", correct_letter),),
        grades={"accuracy": grade},
        examples=[(prompt, letter + "." * dots.randint(0, MOST_DOTS)) for prompt, letter in task.examples],
        stop=(),  # of the quiz: the letters themselves
    )


def correct_letter(completions: Sequence[Any], answer_idx: Sequence[str], **_: Any) -> list[float]:
    """1 for the right letter and any number of dots, else 0."""
    answers = (text_of(completion).rstrip(".") for completion in completions)
    return [float(answer == right) for answer, right in zip(answers, answer_idx, strict=True)]


def grade(row: TaskRow, answer: str) -> bool | None:
    return grade_letter(row, answer.rstrip("."))
