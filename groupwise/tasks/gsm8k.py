"""GSM8K: grade-school maths with a number as the answer, in the data set's form ``#### N``.

The rewards are 1 for the right number after ``####`` and 0.1 for the form. The strict grade requires the form, the
lenient one takes the last number of an answer without it. A model that only learns the form improves under the first.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from groupwise import data
from groupwise.config import Recipe, with_settings
from groupwise.data.read import is_local
from groupwise.errors import DataError, MissingExtraError
from groupwise.rewards import RewardFunction
from groupwise.rewards.maths import (
    correct_number,
    gold_number,
    lenient_answer,
    number_format,
    same_number,
    strict_answer,
)
from groupwise.tasks.base import Task, TaskRow
from groupwise.tasks.rows import listed, read_both

INSTRUCTION = (
    "Solve the problem step by step. End with a line that holds four number signs and the final number alone, "
    "like this:\n#### 42"
)
FORMAT_WEIGHT = 0.1
HUB = "openai/gsm8k"


def gsm8k_task(recipe: Recipe) -> Task:
    """GSM8K from files with the columns ``question`` and ``answer``, or from the hub (openai/gsm8k, subset main)."""
    train, held_out = read_gsm8k(recipe)
    return Task(
        "gsm8k",
        [make_row(row) for row in train],
        [make_row(row) for row in held_out],
        rewards=(RewardFunction("correct", correct_number), RewardFunction("format", number_format, FORMAT_WEIGHT)),
        grades={"accuracy": partial(grade, strict=True), "accuracy_lenient": partial(grade, strict=False)},
        metric="accuracy",
    )


def read_gsm8k(recipe: Recipe) -> tuple[list[TaskRow], list[TaskRow]]:
    """The rows. From the hub the defaults are its subset ``main``, and its splits ``train`` and ``test``."""
    settings = recipe.data
    if HUB not in (*listed(settings.train), *listed(settings.held_out)) or is_local(HUB):
        return read_both(recipe)
    defaults = {"data.subset": "main"}
    if HUB in listed(settings.held_out):
        defaults["data.held_out_split"] = "test"
    missing = {name: value for name, value in defaults.items() if recipe.get(name) is None}
    try:
        return read_both(with_settings(recipe, missing) if missing else recipe)
    except (DataError, MissingExtraError) as error:
        raise DataError(
            f"GSM8K needs the hub data set {HUB}, or --data.train FILE --data.held_out FILE with the columns question "
            f"and answer (which ends in '#### N'); {error}"
        ) from error


def make_row(row: Any) -> TaskRow:
    """A row with its prompt; an error names the file and line if the question or a number as its answer is missing."""
    where = getattr(row, "where", "a row of GSM8K")
    for column in ("question", "answer"):
        if not isinstance(row.get(column), str) or not row[column].strip():
            raise DataError(f"{where}: GSM8K needs the column {column!r} with a text, got {row.get(column)!r}")
    try:
        gold_number(row["answer"])
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    return data.Row({**row, "prompt": f"{row['question'].strip()}\n\n{INSTRUCTION}"}, where)


def grade(row: TaskRow, answer: str, *, strict: bool) -> bool | None:
    """Right in the requested form or, unless ``strict``, if the last number of the answer is right."""
    number = strict_answer(answer) if strict else lenient_answer(answer)
    return None if number is None else same_number(number, gold_number(row["answer"]))
