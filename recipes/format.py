"""The task of format.toml: answer in one short sentence. An example of a custom reward."""

from __future__ import annotations

import re
from typing import Any

from groupwise.config import Recipe
from groupwise.rewards import RewardFunction, text_of
from groupwise.tasks import Task

THINGS = (
    "animal", "city", "colour", "country", "drink", "flower", "fruit", "game", "herb", "insect", "instrument", "island",
    "job", "language", "lake", "metal", "month", "mountain", "ocean", "planet", "river", "shape", "ship", "spice",
    "sport", "star", "stone", "tool", "tree", "vegetable", "bird", "fish",
)  # fmt: skip
LETTERS = "ABCDEFGHILMNOPRST"
WORDS = 6
SENTENCE = re.compile(r"[A-Z][^.!?\n]*\.")


def in_form(completions: list[Any], **_: Any) -> list[float]:
    """1 for one short sentence, 0.3 for one that is too long, 0 otherwise."""
    texts = [text_of(completion).strip() for completion in completions]
    return [0.0 if not SENTENCE.fullmatch(text) else 1.0 if len(text.split()) <= WORDS else 0.3 for text in texts]


def graded(row: dict[str, Any], answer: str) -> bool | None:
    """Whether an answer is one short sentence."""
    return in_form([answer]) == [1.0]


def make_task(recipe: Recipe) -> Task:
    """Questions such as "Name a river that begins with T."; every eighth is held out."""
    named = [f"an {thing}" if thing[0] in "aio" else f"a {thing}" for thing in THINGS]
    rows = [
        {"prompt": f"Name {thing} that begins with {letter}. Answer in one short sentence."}
        for letter in LETTERS
        for thing in named
    ]
    return Task(
        "format",
        [row for number, row in enumerate(rows) if number % 8],
        [row for number, row in enumerate(rows) if not number % 8][: recipe.data.held_out_rows],
        rewards=(RewardFunction("in_form", in_form),),
        grades={"right_form": graded},
        metric="right_form",
        goal=0.9,
    )
