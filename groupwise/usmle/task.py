"""Multiple-choice questions of the US medical licensing examination: MedQA, MedMCQA, MMLU, and a packaged sample.

A row has a question, options (letters with their texts), the right letter, and where known an explanation, a category
and the exam's step. Files are read as their makers sync_to_model them, and so are the data sets on the hub; what is no sound
question is refused by file and line. Without any data the packaged sample is used: questions of our own writing.

The rewards are the first document's: 1 for the right letter, or the enhanced one (`rewards.medical`). An answer is read
by `rewards.extract_answer`, strictly for the metric ``accuracy``, as a careful reader would for ``accuracy_lenient``.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from groupwise import data
from groupwise.config import Recipe
from groupwise.rewards import RewardFunction, text_of
from groupwise.tasks.base import Row, Task
from groupwise.usmle.answers import Choice, extract_answer
from groupwise.usmle.rewards import EnhancedReward, enhanced_reward, load_medical_vocabulary
from groupwise.usmle.rows import read_questions, sample_questions

__all__ = ["Choice", "extract_answer", "format_prompt", "usmle_task"]

INSTRUCTIONS = {
    "chat": "Reason step by step in a few sentences. End with a line that says 'Answer:' and the letter of the right "
    "option ({letters}).",
    "direct": "Reply with one line that says 'Answer:' and the letter of the right option ({letters}), nothing else.",
}


def usmle_task(recipe: Recipe) -> Task:
    """The task from the files or hub data sets of ``[data]``, or from the packaged sample where none is named."""
    how = recipe.usmle
    skipped: Counter[str] = Counter()
    if recipe.data.train is None and recipe.data.held_out is None:
        train, held_out = sample_questions(recipe)
    else:
        train, held_out = read_questions(recipe, skipped if how.bad_rows == "skip" else None)
    strict = how.reading == "strict"
    if how.reward == "binary":
        reward = RewardFunction("correct", partial(correct_letter, strict=strict))
    else:
        score = partial(
            enhanced_reward,
            term_bonus=how.term_bonus,
            short_penalty=how.short_penalty,
            short_length=how.short_length,
            bonus_when="right" if how.reward == "enhanced_when_right" else "always",
            vocabulary=load_medical_vocabulary(how.vocabulary),
        )
        reward = RewardFunction("enhanced", partial(enhanced, strict=strict, score=score))
    asked = partial(ask, form=how.prompt)
    rows = [asked(row) for row in train]
    for copy in range(1, how.copies):
        rows += [
            reordered(row, f"copy {copy} {recipe.train.seed} {number}", form=how.prompt)
            for number, row in enumerate(train)
        ]
    return Task(
        "usmle",
        rows,
        [asked(row) for row in held_out],
        rewards=(reward,),
        grades={"accuracy": strict_grade, "accuracy_lenient": lenient_grade},
        metric="accuracy",
        examples=[(row["prompt"], worked_answer(row, how.prompt)) for row in rows],
        choices=partial(letter_answers, form=how.prompt),
        reorder=partial(reordered, form=how.prompt),
        notes=tuple(
            f"{number} {'row is' if number == 1 else 'rows are'} left out: {reason}"
            for reason, number in skipped.items()
        ),
    )


# --- prompts ----------------------------------------------------------------------------------------------------------


def format_prompt(row: Mapping[str, Any], form: str = "chat") -> str:
    """A question as it is asked: in the first document's words, or with the instruction to end with ``Answer: X``."""
    listed = "".join(f"{letter}. {text}\n" for letter, text in sorted(row["options"].items()))
    letters = _either(sorted(row["options"]))
    if form == "completion":
        return (
            f"Medical Question: {row['question']}\n\nOptions:\n{listed}\n"
            f"Analyze the case and provide the correct answer ({letters}): "
        )
    return f"{row['question']}\n\n{listed}\n{INSTRUCTIONS[form].format(letters=letters)}"


def ask(row: Row, *, form: str) -> Row:
    """The row with its prompt."""
    return data.Row({**row, "prompt": format_prompt(row, form)}, data.where_of(row, 0))


def letter_answers(row: Row, *, form: str) -> dict[str, str]:
    """The shortest answer for each letter: what a model's probabilities of the letters are read from."""
    return {letter: letter if form == "completion" else f"Answer: {letter}" for letter in sorted(row["options"])}


def worked_answer(row: Row, form: str) -> str:
    """The answer that supervised fine-tuning teaches: the explanation, where there is one, and the letter."""
    letter = row["answer"]
    if form == "completion":
        return f"{letter}. {row['options'][letter]}"
    explanation = row.get("explanation")
    return f"{explanation.strip()}\n\nAnswer: {letter}" if explanation and form == "chat" else f"Answer: {letter}"


def reordered(row: Row, seed: str, *, form: str) -> Row:
    """The same question, asked with its options' texts under other letters; the right letter moves along.

    ``moved`` says where each option went, from its old letter to the new one. An explanation may speak of the old
    letters, so it is left behind.
    """
    letters = sorted(row["options"])
    places = letters.copy()
    chance = random.Random(seed)
    while places == letters:
        chance.shuffle(places)
    moved = dict(zip(letters, places, strict=True))
    options = {moved[letter]: row["options"][letter] for letter in letters}
    changed = {
        **row,
        "options": dict(sorted(options.items())),
        "answer": moved[row["answer"]],
        "explanation": None,
        "moved": moved,
    }
    return ask(data.Row(changed, data.where_of(row, 0)), form=form)


def _either(letters: Sequence[str]) -> str:
    """A or B; A, B, or C: as the first document writes it."""
    return " or ".join(letters) if len(letters) < 3 else f"{', '.join(letters[:-1])}, or {letters[-1]}"


# --- rewards and grades -----------------------------------------------------------------------------------------------


def correct_letter(
    completions: Sequence[Any],
    options: Sequence[Mapping[str, str]],
    answer: Sequence[str],
    log_extra: Any = None,
    log_metric: Any = None,
    *,
    strict: bool = True,
) -> list[float]:
    """1 for the right letter, 0 for any other and for none; the document's facts of each answer are recorded."""
    texts = [text_of(completion) for completion in completions]
    found = [extract_answer(text, own, strict=strict) for text, own in zip(texts, options, strict=True)]
    correct = [choice.letter == right for choice, right in zip(found, answer, strict=True)]
    if log_extra is not None:
        log_extra("predicted", [choice.letter for choice in found])
        log_extra("ground_truth", list(answer))
        log_extra("correct", correct)
        log_extra("has_valid_answer", [choice.letter is not None for choice in found])
        log_extra("response_length", [len(text) for text in texts])
        log_extra("rule", [choice.rule for choice in found])
    if log_metric is not None:
        _log_letters(log_metric, [choice.letter for choice in found], options, answer)
    return [float(right) for right in correct]


def enhanced(
    completions: Sequence[Any],
    options: Sequence[Mapping[str, str]],
    answer: Sequence[str],
    log_extra: Any = None,
    log_metric: Any = None,
    *,
    strict: bool = True,
    score: Callable[[bool, str], EnhancedReward] = enhanced_reward,
) -> list[float]:
    """The document's reward with bonus and penalty (`rewards.medical`); each part is recorded by itself."""
    correct = correct_letter(completions, options, answer, log_extra, log_metric, strict=strict)
    parts = [score(bool(right), text_of(completion)) for right, completion in zip(correct, completions, strict=True)]
    for name in ("correctness", "term_bonus", "short_penalty", "clamped"):
        values = [float(getattr(part, name)) for part in parts]
        if log_extra is not None:
            log_extra(f"enhanced/{name}", values)
        if log_metric is not None:
            log_metric(f"enhanced/{name}", sum(values) / len(values))
    return [part.total for part in parts]


def _log_letters(
    log_metric: Any, predicted: Sequence[str | None], options: Sequence[Mapping[str, str]], answer: Sequence[str]
) -> None:
    """What guessing would reach, and the shares of the letters among answers given and right answers."""
    log_metric("chance", sum(1 / len(own) for own in options) / len(options))
    given = [letter for letter in predicted if letter is not None]
    for letter in sorted({letter for own in options for letter in own}):
        log_metric(f"letters/{letter}", given.count(letter) / max(len(given), 1))
        log_metric(f"letters_right/{letter}", list(answer).count(letter) / len(answer))


def strict_grade(row: Row, answer: str) -> bool | None:
    """Right only in the form that was asked for."""
    found = extract_answer(answer, row["options"], strict=True).letter
    return None if found is None else found == row["answer"]


def lenient_grade(row: Row, answer: str) -> bool | None:
    """Right if a careful reader would take it so."""
    found = extract_answer(answer, row["options"]).letter
    return None if found is None else found == row["answer"]
