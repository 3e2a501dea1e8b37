"""Accuracy per question and step, as the heat map shows it, and one question through the run."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from groupwise.analysis.groups import PromptGroup, follow, main_grade, summary_of
from groupwise.analysis.questions import QuestionHistory, Questions, count_statuses
from groupwise.analysis.run_reader import RunReader
from groupwise.errors import CheckpointError
from groupwise.text import plural
from groupwise.training.monitor.question_log import STATUSES
from groupwise.viewer.api import Query, run_route
from groupwise.viewer.routes.groups import group_fields
from groupwise.viewer.runs import NotServedError, ServedRun

ROWS_PER_PAGE = 40
COLUMNS = 80  # of the heat map; more steps are put together
EXCERPT = 160  # characters of a prompt
PARTS = {"train": "training", "held_out": "held-out"}
ORDER = ("learnt", "forgotten", "never", "between", "always", "unseen")

SORTS: dict[str, tuple[str, Callable[[QuestionHistory], Any]]] = {
    "status": ("status", lambda question: (ORDER.index(question.status), -len(question.values), question.row)),
    "change": ("change, largest first", lambda question: (question.values[0] - question.values[-1], question.row)),
    "last": ("last accuracy, lowest first", lambda question: (question.values[-1], question.row)),
    "row": ("row", lambda question: question.row),
}


_questions: WeakKeyDictionary[ServedRun, Questions] = WeakKeyDictionary()


def questions_of(run: ServedRun) -> Questions:
    """The run's questions, up to date; a step's file is read once."""
    if run not in _questions:
        _questions[run] = Questions(run.reader)
    else:
        _questions[run].update()
    return _questions[run]


@run_route("questions")
def questions(run: ServedRun, query: Query) -> dict[str, Any]:
    """A page of questions with the share of right answers over the steps, and how many have each status."""
    found = questions_of(run)
    asked = {"train": found.training(), "held_out": found.held_out()}
    parts = [name for name, members in asked.items() if members] or ["train"]
    # Where training rows are seen once, only the held-out ones have a history.
    seen_once = sum(len(question.values) for question in asked["train"]) < 2 * len(asked["train"])
    part = query.choice("part", PARTS, "held_out" if seen_once and "held_out" in parts else parts[0])
    status = query.choice("status", ("all", *STATUSES), "all")
    sort = query.choice("sort", SORTS, "status")
    members = asked[part]
    chosen = sorted((one for one in members if status in ("all", one.status)), key=SORTS[sort][1])
    pages = max(1, -(-len(chosen) // ROWS_PER_PAGE))
    page = min(query.integer("page", 1, least=1), pages)
    shown = chosen[(page - 1) * ROWS_PER_PAGE : page * ROWS_PER_PAGE]
    starts, names = _columns([step for question in members for step in question.steps])
    counts = count_statuses(members)
    prompts = _prompts(run.reader, shown, held_out=part == "held_out")
    return {
        "part": part,
        "parts": [{"name": name, "title": PARTS[name]} for name in parts],
        "statuses": [
            {"name": "all", "title": "All", "count": len(members)},
            *({"name": name, "title": STATUSES[name], "count": counts[name]} for name in ORDER if counts.get(name)),
        ],
        "sorts": [{"name": name, "title": title} for name, (title, _) in SORTS.items()],
        "value_name": _value_name(found),
        "summary": _summary(part, members, len(starts)),
        "note": "" if members else _note(run.reader, part),
        "bins": names,
        "page": page,
        "pages": pages,
        "rows": [
            {
                "row": question.row,
                "status": question.status,
                "status_title": STATUSES[question.status],
                "first": question.values[0],
                "last": question.values[-1],
                "visits": len(question.values),
                "prompt": prompts.get(question.row, ""),
                "cells": _cells(question, starts),
            }
            for question in shown
        ],
    }


@run_route("prompt")
def prompt(run: ServedRun, query: Query) -> dict[str, Any]:
    """One training row (or with ``held_out`` a held-out one) through the run: its visits, its answers then and now.

    "Now" is the last visit, or the one of step ``at``.
    """
    row, held_out = query.integer("row"), bool(query.text("held_out"))
    found = questions_of(run)
    asked = found.held_out() if held_out else found.training()
    question = next((one for one in asked if one.row == row), None)
    if question is None:
        kind = "held-out question" if held_out else "training row"
        raise NotServedError(f"{kind} {row} was not sampled in a recorded step")
    at = query.integer("at", question.steps[-1] if question.steps else 0)  # shown beside the first visit
    ends = _held_out_ends(run, question, at) if held_out else _training_ends(run, found, row, at)
    if not ends:
        raise NotServedError(f"the answers to row {row} were not recorded, or can no longer be read")
    return {
        "row": row,
        "prompt": ends[0].prompt,
        "status": STATUSES[question.status],
        "value_name": _value_name(found),
        "visits": [
            {"step": step, "prompt_number": number, "value": value}
            for step, number, value in zip(question.steps, question.prompt_numbers, question.values, strict=True)
        ],
        "ends": [group_fields(group) for group in ends],
    }


def _columns(steps: Sequence[int]) -> tuple[list[int], list[str]]:
    """The first step of each column, and its name: one per step, or of equal widths if those are too many."""
    different = sorted(set(steps))
    if len(different) <= COLUMNS:
        return different, list(map(str, different))
    width = -(-(different[-1] - different[0] + 1) // COLUMNS)
    starts = list(range(different[0], different[-1] + 1, width))
    return starts, [f"{start}–{min(start + width - 1, different[-1])}" for start in starts]


def _cells(question: QuestionHistory, starts: Sequence[int]) -> list[tuple[int, float, int]]:
    """(column, value, whether it was measured there) from the first visit on; a value holds until the next visit."""
    measured = {
        bisect_right(starts, step) - 1: value for step, value in zip(question.steps, question.values, strict=False)
    }
    cells: list[tuple[int, float, int]] = []
    for column in range(min(measured, default=len(starts)), len(starts)):
        cells.append((column, measured.get(column, cells[-1][1] if cells else 0.0), int(column in measured)))
    return cells


def _value_name(questions: Questions) -> str:
    return questions.graded_by or ("mean reward" if questions.scale is None else "mean reward, scaled to 0–1")


def _summary(part: str, members: Sequence[QuestionHistory], evaluations: int) -> str:
    what = plural(len(members), "question")
    if part == "held_out":
        return f"{what} at {plural(evaluations, 'evaluation')}. Click a row for its answers then and now."
    visits = sum(len(question.values) for question in members)
    return (
        f"{what}, {plural(visits, 'visit')}; pale: not sampled, the value of the last visit. "
        "Click a row for its answers then and now."
    )


def _note(reader: RunReader, part: str) -> str:
    if part == "held_out":
        return "This run has kept no held-out answers; with run.save_rollouts = true, evaluations are recorded."
    return "No question has been sampled yet." if reader.status == "running" else "This run has recorded no answers."


def _prompts(reader: RunReader, questions: Sequence[QuestionHistory], *, held_out: bool) -> dict[int, str]:
    """The beginning of each question's prompt, as far as it can be read."""
    prompts: dict[int, str] = {}
    for question in questions:
        if question.row in prompts or not question.steps:
            continue
        step = question.steps[-1]
        try:
            rows = reader.evaluation_answers(step) if held_out else reader.rollouts(step, ("row", "prompt"))
        except CheckpointError:
            continue
        prompts |= {row["row"]: row["prompt"][:EXCERPT] for row in rows}
    return prompts


def _training_ends(run: ServedRun, questions: Questions, row: int, at: int) -> list[PromptGroup]:
    """The groups of a training row at its first visit and at step ``at``."""
    visits = questions.visits(row)
    ends = [*visits[:1], *(visit for visit in visits[1:] if visit.step == at)]
    return list(follow(run.reader, ends, run.reader.grade))


def _held_out_ends(run: ServedRun, question: QuestionHistory, at: int) -> list[PromptGroup]:
    """The answers to a held-out question at the first evaluation and at that of step ``at``."""
    ends = []
    for step in dict.fromkeys((*question.steps[:1], at)):
        rows = [row for row in run.reader.evaluation_answers(step) if row["row"] == question.row]
        if rows:
            grade = main_grade(rows, run.reader.grade)
            samples = [{"step": step, "prompt_number": question.row, **row} for row in rows]
            summary = summary_of(samples, grade)
            ends.append(PromptGroup(step, question.row, question.row, rows[0]["prompt"], samples, grade, summary))
    return ends
