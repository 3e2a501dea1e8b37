"""A generated quiz: which of four drugs is for the complaint?

    A lutin
    B rinib
    C pulol
    D wepam
    For sleep

The answer is one letter and nothing else, here D, because names that end in -pam are for sleep. The names are invented;
their endings are those of real drugs (atenolol, temazepam, imatinib, simvastatin). Nothing in the prompt says what they
stand for: it must be learned from the reward of 1 for the right letter.

Four consecutive questions share their options, in the same order, and each option is the answer to one of the four, so
the options alone say nothing; with ``data.shuffle = false`` the four stay in one batch, which reduces the variance of
the gradient. Training questions, held-out questions and SFT examples use disjoint sets of name beginnings. The SFT
examples have random letters: they show the form of an answer and nothing about drugs.

A two-layer model on bytes can find the rule because the complaint stands just before the answer, and because all names
have the same length, so that a name's ending is always equally far from its letter.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice, product
from typing import Any

from groupwise.config import Recipe
from groupwise.errors import ConfigError
from groupwise.rewards import RewardFunction, text_of
from groupwise.tasks.base import Task, TaskRow

LETTERS = ("A", "B", "C", "D")
# The last byte identifies a complaint, and the last byte of a name identifies its ending. All complaints have five
# letters, so that all questions have the same length.
ENDINGS = {"heart": "lol", "lipid": "tin", "tumor": "nib", "sleep": "pam"}
CONSONANTS, VOWELS = "bcdfghjklmnprstvwz", "aeiou"
PARTS = {"train": range(7), "held_out": range(7, 9), "examples": range(9, 10)}  # tenths of all beginnings
TRAIN_ROWS, HELD_OUT_ROWS, EXAMPLES = 16_000, 512, 1024


def quiz_task(recipe: Recipe) -> Task:
    """As many questions as ``[data]`` says. A seed gives always the same ones; a longer quiz extends a shorter one."""
    data, seed = recipe.data, recipe.train.seed
    for key in ("train", "held_out", "held_out_from_train"):
        if getattr(data, key):
            raise ConfigError(
                f"the task 'quiz' generates its questions, but data.{key} is {getattr(data, key)!r}; leave it out, or "
                "set task to 'rows'"
            )
    letters = random.Random(f"quiz letters {seed}")
    return Task(
        name="quiz",
        train=list(islice(questions("train", seed), data.train_rows or TRAIN_ROWS)),
        held_out=list(islice(questions("held_out", seed), data.held_out_rows or HELD_OUT_ROWS)),
        rewards=(RewardFunction("correct", correct_letter),),
        grades={"accuracy": grade_letter},
        metric="accuracy",
        examples=[(row["prompt"], letters.choice(LETTERS)) for row in islice(questions("examples", seed), EXAMPLES)],
        stop=LETTERS,
        goal=0.9,
    )


def questions(part: str, seed: int) -> Iterator[TaskRow]:
    """An endless stream of rows: four questions about the same four options at a time."""
    generator = random.Random(f"quiz {part} {seed}")
    beginnings = beginnings_of(part)
    while True:
        complaints = generator.sample(list(ENDINGS), len(LETTERS))
        names = [
            beginning + ENDINGS[complaint]
            for beginning, complaint in zip(generator.sample(beginnings, len(LETTERS)), complaints, strict=True)
        ]
        for right in generator.sample(range(len(LETTERS)), len(LETTERS)):
            question, options = f"For {complaints[right]}", dict(zip(LETTERS, names, strict=True))
            yield {
                "prompt": "\n".join([*(f"{letter} {name}" for letter, name in options.items()), question]),
                "question": question,
                "options": options,
                "answer_idx": LETTERS[right],
                "answer": names[right],
            }


def beginnings_of(part: str) -> list[str]:
    """The name beginnings that only this part uses."""
    tenths = PARTS[part]
    letters = product(enumerate(CONSONANTS), enumerate(VOWELS))
    return [a + b for (first, a), (second, b) in letters if (7 * first + 3 * second) % 10 in tenths]


def correct_letter(completions: Sequence[Any], answer_idx: Sequence[str], **_: Any) -> list[float]:
    """1 for exactly the right letter, else 0."""
    return [float(text_of(completion) == right) for completion, right in zip(completions, answer_idx, strict=True)]


def grade_letter(row: TaskRow, answer: str) -> bool | None:
    """Whether the answer is the right letter; None if it is not a letter."""
    return answer == row["answer_idx"] if answer in LETTERS else None
