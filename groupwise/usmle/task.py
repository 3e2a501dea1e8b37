"""The task ``usmle``: multiple-choice questions of medical exams (MedQA, MedMCQA, MMLU), or the packaged sample.

Completions are graded by two readers: ``accuracy`` counts an answer only in the form that the prompt asked for,
``accuracy_lenient`` in any form that a careful reader understands.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

from groupwise.config import Recipe
from groupwise.rewards import RewardFunction
from groupwise.tasks.base import Task, TaskDefinition
from groupwise.usmle.evaluation import report_on_model
from groupwise.usmle.health_checks import HEALTH_CHECKS
from groupwise.usmle.medical_words import load_medical_vocabulary
from groupwise.usmle.options import UsmleOptions
from groupwise.usmle.prompts import shuffle_options, with_prompt, worked_answer
from groupwise.usmle.rewards import correct_letter, enhanced, enhanced_reward, grade
from groupwise.usmle.rows import read_questions, sample_questions


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
