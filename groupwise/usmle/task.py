"""The task ``usmle``: multiple-choice questions of medical exams (MedQA, MedMCQA, MMLU), or the packaged sample.

Completions are graded by two readers: ``accuracy_strict`` counts an answer only in the form that the prompt asked for,
``accuracy_lenient`` in any form that a careful reader understands. ``accuracy`` is that of the reward's reader.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Literal

from groupwise.config import Recipe
from groupwise.config.sections import Count, CountOrZero, NotNegative, Section
from groupwise.rewards import RewardFunction
from groupwise.tasks.base import Task, TaskDefinition
from groupwise.text import plural
from groupwise.usmle.evaluation import report_on_model
from groupwise.usmle.health_checks import HEALTH_CHECKS
from groupwise.usmle.medical_words import load_medical_vocabulary
from groupwise.usmle.prompts import shuffle_options, with_prompt, worked_answer
from groupwise.usmle.rewards import correct_letter, enhanced, enhanced_reward, grade
from groupwise.usmle.rows import read_questions, sample_questions


class UsmleOptions(Section):
    """The ``[task_options]`` of the task ``usmle``."""

    prompt: Literal["chat", "direct", "completion"] = "chat"
    """the prompt asks for reasoning and a last line "Answer: X"; for that line alone; or ends before a bare letter"""
    reading: Literal["lenient", "strict"] = "lenient"
    """what the reward and accuracy take as an answer: any form that a careful reader understands, or only the requested
    form"""
    reward: Literal["binary", "enhanced", "enhanced_when_right"] = "binary"
    """1 for the right letter; that with a bonus and a penalty; or with the bonus for right answers only"""
    term_bonus: NotNegative = 0.05
    """enhanced: bonus for medical terminology"""
    short_penalty: NotNegative = 0.1
    """enhanced: penalty for a very short answer"""
    short_length: CountOrZero = 50
    """enhanced: an answer of fewer characters is very short"""
    vocabulary: str | None = None
    """enhanced: a file of medical words, one per line, instead of the packaged list"""
    copies: Count = 1
    """copies of each training question; all but the first have their options in another order"""
    bad_rows: Literal["error", "skip"] = "error"
    """a row that is not a valid question: stop with an error, or skip it and count it"""


def usmle_task(recipe: Recipe, options: UsmleOptions) -> Task:
    """The task from the files or hub data sets of ``[data]``; without any, from the packaged sample."""
    skipped: Counter[str] = Counter()
    if recipe.data.train is None and recipe.data.held_out is None:
        train, held_out = sample_questions(recipe)
    else:
        train, held_out = read_questions(recipe, skipped if options.bad_rows == "skip" else None)
    form, strict = options.prompt, options.reading == "strict"
    rows = [with_prompt(row, form=form) for row in train]
    for copy in range(1, options.copies):
        rows += [
            shuffle_options(row, f"copy {copy} {recipe.train.seed} {number}", form=form)
            for number, row in enumerate(train)
        ]
    return Task(
        "usmle",
        rows,
        [with_prompt(row, form=form) for row in held_out],
        rewards=(_reward(options, strict=strict),),
        grades={
            "accuracy": partial(grade, strict=strict),
            "accuracy_strict": partial(grade, strict=True),
            "accuracy_lenient": partial(grade, strict=False),
        },
        metric="accuracy",
        examples=[(row["prompt"], worked_answer(row, form)) for row in rows],
        notes=(
            *(f"{plural(number, 'row is', 'rows are')} left out: {reason}" for reason, number in skipped.items()),
            *_length_note(recipe, form),
        ),
        health_checks=HEALTH_CHECKS,
    )


def _length_note(recipe: Recipe, form: str) -> Iterator[str]:
    """A warning if the validity mask takes every answer of the requested form for too short."""
    masks, requested = recipe.masks, "Answer: X"
    if form == "direct" and masks.validity and masks.min_length > len(requested):
        yield (
            f"masks.min_length {masks.min_length} masks every answer that task_options.prompt 'direct' asks for "
            f"({requested!r} has {len(requested)} characters); set it to {len(requested)} or less"
        )


def _reward(options: UsmleOptions, *, strict: bool) -> RewardFunction:
    if options.reward == "binary":
        return RewardFunction("correct", partial(correct_letter, strict=strict))
    score = partial(
        enhanced_reward,
        term_bonus=options.term_bonus,
        short_penalty=options.short_penalty,
        short_length=options.short_length,
        bonus_when="right" if options.reward == "enhanced_when_right" else "always",
        vocabulary=load_medical_vocabulary(options.vocabulary),
    )
    return RewardFunction("enhanced", partial(enhanced, strict=strict, score=score))


USMLE = TaskDefinition(usmle_task, options=UsmleOptions, report=report_on_model)
