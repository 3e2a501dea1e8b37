"""Multiple-choice questions as prompts, and the answers that go with each form of prompt."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from groupwise import data
from groupwise.tasks.base import TaskRow

INSTRUCTIONS = {
    "chat": "Reason step by step in a few sentences. End with a line that says 'Answer:' and the letter of the right "
    "option ({letters}).",
    "direct": "Reply with one line that says 'Answer:' and the letter of the right option ({letters}), nothing else.",
}


def format_prompt(row: Mapping[str, Any], form: str = "chat") -> str:
    """The question, its options, and the instruction of one of the forms chat, direct and completion."""
    listed = "".join(f"{letter}. {text}\n" for letter, text in sorted(row["options"].items()))
    names = sorted(row["options"])
    letters = " or ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])}, or {names[-1]}"
    if form == "completion":
        return (
            f"Medical Question: {row['question']}\n\nOptions:\n{listed}\n"
            f"Analyze the case and provide the correct answer ({letters}): "
        )
    return f"{row['question']}\n\n{listed}\n{INSTRUCTIONS[form].format(letters=letters)}"


def with_prompt(row: TaskRow, *, form: str, **changes: Any) -> TaskRow:
    """The row with other values in some columns, and with its prompt."""
    changed = {**row, **changes}
    return data.Row({**changed, "prompt": format_prompt(changed, form)}, data.where_of(row, 0))


def letter_answers(row: TaskRow, *, form: str) -> dict[str, str]:
    """The shortest answer for each letter, from which the letters' probabilities are computed."""
    return {letter: letter if form == "completion" else f"Answer: {letter}" for letter in sorted(row["options"])}


def worked_answer(row: TaskRow, form: str) -> str:
    """The target of SFT: the explanation, if there is one, and the letter."""
    letter = row["answer"]
    if form == "completion":
        return f"{letter}. {row['options'][letter]}"
    explanation = row.get("explanation")
    return f"{explanation.strip()}\n\nAnswer: {letter}" if explanation and form == "chat" else f"Answer: {letter}"


def shuffle_options(row: TaskRow, seed: str, *, form: str) -> TaskRow:
    """The same question with its options under other letters, never in the order that they had.

    The column ``moved`` maps each old letter to its new one. The explanation is dropped, since it may mention letters.
    """
    letters = sorted(row["options"])
    places = letters.copy()
    generator = random.Random(seed)
    while places == letters:
        generator.shuffle(places)
    return _move_options(row, dict(zip(letters, places, strict=True)), form)


def rotate_options(row: TaskRow, by: int, *, form: str) -> TaskRow:
    """The same with each option ``by`` letters further on: so many orders as options put each under each letter."""
    letters = sorted(row["options"])
    return _move_options(row, {letter: letters[(n + by) % len(letters)] for n, letter in enumerate(letters)}, form)


def _move_options(row: TaskRow, moved: Mapping[str, str], form: str) -> TaskRow:
    options = {new: row["options"][old] for old, new in sorted(moved.items(), key=lambda pair: pair[1])}
    return with_prompt(row, form=form, options=options, answer=moved[row["answer"]], explanation=None, moved=moved)
