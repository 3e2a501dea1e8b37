"""GSM8K: grade-school maths with a number as the answer, in the data set's form ``#### N``.

The rewards are 1 for the right number after ``####`` and 0.1 for the form. The strict grade requires the form, the
lenient one takes the last number of an answer without it. A model that only learns the form improves under the first.

With the tool arithmetic, the rows are also examples for SFT: GSM8K's answers have their calculations in brackets,
``6 * 7 = <<6*7=42>>42``, and become conversations in which the tool is called for each of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any

from groupwise import data
from groupwise.config import Recipe, with_settings
from groupwise.data.read import is_local
from groupwise.environments import Message, arithmetic
from groupwise.errors import DataError, InputError, MissingExtraError
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
EXAMPLES = 1024
CALCULATION = re.compile(r"<<([^<>=]+)=([^<>]+)>>")
HUB = "openai/gsm8k"


def gsm8k_task(recipe: Recipe) -> Task:
    """GSM8K from files with the columns ``question`` and ``answer``, or from the hub (openai/gsm8k, subset main)."""
    train, held_out = ([make_row(row) for row in rows] for rows in read_gsm8k(recipe))
    return Task(
        "gsm8k",
        train,
        held_out,
        rewards=(RewardFunction("correct", correct_number), RewardFunction("format", number_format, FORMAT_WEIGHT)),
        grades={"accuracy": partial(grade, strict=True), "accuracy_lenient": partial(grade, strict=False)},
        metric="accuracy",
        examples=calculator_examples(train) if "arithmetic" in recipe.environment.tools else (),
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


def calculator_examples(rows: Sequence[TaskRow]) -> list[tuple[str, list[Message]]]:
    """The first rows whose answer has calculations, all of them right, each with its conversation."""
    pairs = ((row["prompt"], calculator_conversation(row["answer"])) for row in rows)
    return list(islice(((prompt, said) for prompt, said in pairs if len(said) > 1), EXAMPLES))


def calculator_conversation(answer: str) -> list[Message]:
    """The answer as a conversation with the calculator, a call before the line that has its result.

    Without calculations, or with one that the calculator finds wrong, it is the answer alone.
    """
    conversation: list[Message] = []
    said: list[str] = []
    for line in answer.strip().splitlines():
        for expression, value in CALCULATION.findall(line):
            result = _calculated(expression, value)
            if result is None:
                return [{"role": "assistant", "content": answer}]
            arguments = {"name": "arithmetic", "arguments": {"expression": expression}}
            call = {"type": "function", "function": arguments}
            conversation += [
                {"role": "assistant", "content": "\n".join(said), "tool_calls": [call]},
                {"role": "tool", "content": result, "name": "arithmetic"},
            ]
            said = []
        said.append(CALCULATION.sub("", line))
    return [*conversation, {"role": "assistant", "content": "\n".join(said)}]


def _calculated(expression: str, value: str) -> str | None:
    """What the calculator says, if it is this value."""
    try:
        result = arithmetic(expression)
    except InputError:
        return None
    return result if same_number(result, value) else None


def grade(row: TaskRow, answer: str, *, strict: bool) -> bool | None:
    """Right in the requested form or, unless ``strict``, if the last number of the answer is right."""
    number = strict_answer(answer) if strict else lenient_answer(answer)
    return None if number is None else same_number(number, gold_number(row["answer"]))
