"""A quiz that the package makes itself: which of four drugs is for the complaint that is named?

    A lutin
    B rinib
    C pulol
    D wepam
    For sleep

The answer is one letter and nothing else, here D: names that end in -pam are for sleep. The names are invented, the
endings are those of real drugs (atenolol, temazepam, imatinib, simvastatin), and what they stand for is said nowhere: a
reward of 1 for the right letter is all there is to learn it from. Rows have the keys of the USMLE questions.

What the quiz promises, and its tests hold:

- Four questions in a row share their options, in the same order, and each option is the answer to one of the four. So
  whatever looks at the options alone, or always takes one letter, is right in one question out of four.
- Training, held-out questions and the examples of the warm-up take the beginnings of their names from three sets that
  have none in common, whatever the seed: no name of one is ever seen in another.
- The warm-up's examples have letters drawn at random. They teach what an answer looks like and nothing about drugs.

Two things help a model of two layers that reads bytes to find the rule. The complaint stands at the very end, so that
the position that has to name a letter knows what it looks for; and names have one length, so that a name's end is
always as far from its letter. Four questions of a kind in one batch (``data.shuffle = false``) take the letters' own
luck out of the gradient.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice, product
from typing import Any

from groupwise.config import Recipe
from groupwise.errors import ConfigError, InputError
from groupwise.rewards import RewardFunction, text_of
from groupwise.tasks.base import Row, Task

LETTERS = ("A", "B", "C", "D")
# Complaints end in different bytes, and so do the names for them: one look is enough to tell them apart. All have five
# letters, so that all questions are of one length.
ENDINGS = {
    "heart": "lol",
    "lipid": "tin",
    "tumor": "nib",
    "sleep": "pam",
}
CONSONANTS, VOWELS = "bcdfghjklmnprstvwz", "aeiou"
PARTS = {"train": range(7), "held_out": range(7, 9), "examples": range(9, 10)}  # shares in tenths of all beginnings
TRAIN_ROWS, HELD_OUT_ROWS, EXAMPLES = 16_000, 512, 1024


def make_quiz(*, train_rows: int = TRAIN_ROWS, held_out_rows: int = HELD_OUT_ROWS, seed: int = 0) -> Task:
    """A quiz of any size; the same seed gives the same questions, and a longer quiz begins with the shorter one's."""
    for name, number, least in (("train_rows", train_rows, 1), ("held_out_rows", held_out_rows, 1), ("seed", seed, 0)):
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise InputError(f"{name} must be a whole number of at least {least}, got {number!r}")
    return Task(
        name="quiz",
        train=list(islice(questions("train", seed), train_rows)),
        held_out=list(islice(questions("held_out", seed), held_out_rows)),
        rewards=(RewardFunction("correct", correct_letter),),
        grades={"accuracy": grade_letter},
        metric="accuracy",
        examples=_examples(seed),
        stop=LETTERS,  # the letter is the answer, and nothing needs to follow it
        goal=0.9,
    )


def quiz_task(recipe: Recipe) -> Task:
    """The quiz of a recipe: as many rows as ``[data]`` says, from the run's seed."""
    data = recipe.data
    for key in ("train", "held_out", "held_out_from_train"):
        if getattr(data, key):
            raise ConfigError(
                f"the task 'quiz' makes its own questions, but data.{key} is {getattr(data, key)!r}; leave it out, or "
                "set task to 'rows'"
            )
    return make_quiz(
        train_rows=data.train_rows or TRAIN_ROWS,
        held_out_rows=data.held_out_rows or HELD_OUT_ROWS,
        seed=recipe.train.seed,
    )


def questions(part: str, seed: int) -> Iterator[Row]:
    """The rows of a part of the quiz, without end: four questions about the same four options at a time."""
    chance = random.Random(f"quiz {part} {seed}")
    beginnings = beginnings_of(part)
    while True:
        complaints = chance.sample(list(ENDINGS), len(LETTERS))
        names = [
            beginning + ENDINGS[complaint]
            for beginning, complaint in zip(chance.sample(beginnings, len(LETTERS)), complaints, strict=True)
        ]
        for right in chance.sample(range(len(LETTERS)), len(LETTERS)):
            yield _row(f"For {complaints[right]}", names, right)


def beginnings_of(part: str) -> list[str]:
    """The beginnings of names that only this part uses."""
    tenths = PARTS[part]
    return [
        CONSONANTS[first] + VOWELS[second]
        for first, second in product(range(len(CONSONANTS)), range(len(VOWELS)))
        if (7 * first + 3 * second) % 10 in tenths
    ]


def answer_letter(answer: str) -> str | None:
    """The letter that an answer consists of; None for anything else, so that naming several letters is no answer."""
    return answer if answer in LETTERS else None


def correct_letter(completions: Sequence[Any], answer_idx: Sequence[str], **_: Any) -> list[float]:
    """1 for the right letter alone, 0 for everything else."""
    return [
        float(answer_letter(text_of(completion)) == right)
        for completion, right in zip(completions, answer_idx, strict=True)
    ]


def grade_letter(row: Row, answer: str) -> bool | None:
    """Whether the answer is the right letter; None where it is no letter."""
    letter = answer_letter(answer)
    return None if letter is None else letter == row["answer_idx"]


def _row(question: str, names: Sequence[str], right: int) -> Row:
    options = dict(zip(LETTERS, names, strict=True))
    lines = [f"{letter} {name}" for letter, name in options.items()]
    return {
        "prompt": "\n".join([*lines, question]),
        "question": question,
        "options": options,
        "answer_idx": LETTERS[right],
        "answer": names[right],
    }


def _examples(seed: int) -> list[tuple[str, str]]:
    chance = random.Random(f"quiz letters {seed}")
    rows = islice(questions("examples", seed), EXAMPLES)
    return [(row["prompt"], chance.choice(LETTERS)) for row in rows]
