"""The task ``usmle``: multiple-choice questions of medical exams (MedQA, MedMCQA, MMLU), or the packaged sample.

Completions are graded by two readers: ``accuracy`` counts an answer only in the form that the prompt asked for,
``accuracy_lenient`` in any form that a careful reader understands.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Literal

from groupwise.config import Recipe
from groupwise.config.sections import Count, CountOrZero, NotNegative, Section
from groupwise.rewards import RewardFunction
from groupwise.tasks.base import Task, TaskDefinition
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
    reading: Literal["strict", "lenient"] = "strict"
    """what the reward takes as an answer: the required form only, or any form that is clear to a careful reader"""
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
    form = options.prompt
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
        rewards=(_reward(options),),
        grades={"accuracy": partial(grade, strict=True), "accuracy_lenient": partial(grade, strict=False)},
        metric="accuracy",
        examples=[(row["prompt"], worked_answer(row, form)) for row in rows],
        notes=tuple(
            f"{number} {'row is' if number == 1 else 'rows are'} left out: {reason}"
            for reason, number in skipped.items()
        ),
        health_checks=HEALTH_CHECKS,
    )


def _reward(options: UsmleOptions) -> RewardFunction:
    strict = options.reading == "strict"
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
