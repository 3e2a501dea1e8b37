"""How each question was answered in the course of a run: training rows at each visit, held-out rows at each evaluation.

Only the columns that are needed are read, and each file once; `Questions.update` adds the new steps of a running run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from groupwise.analysis.groups import GRADE, Visit
from groupwise.analysis.run_reader import RunReader, file_state
from groupwise.errors import CheckpointError, RunDirError
from groupwise.training.monitor.question_log import QUESTIONS, status_of
from groupwise.training.store.rollout_files import ROLLOUTS, read_columns, step_files
from groupwise.training.store.token_files import EVALUATIONS


@dataclass(frozen=True)
class QuestionHistory:
    """A row of the data: the share of right answers at each visit, and its status by `status_of`."""

    row: int
    steps: list[int]
    prompt_numbers: list[int]  # in its step's rollouts; the row itself for held-out rows
    values: list[float]
    status: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Answer(NamedTuple):
    """A prompt of a step: the mean over its samples."""

    row: int
    prompt_number: int
    value: float


class Questions:
    """The questions of a run. Call `update` to take in new steps.

    A grade gives the share of right answers. Without one, the mean reward is used; if rewards lie outside of 0 to 1,
    they are scaled by the smallest and the largest mean that occurred (``scale``).
    """

    def __init__(self, reader: RunReader) -> None:
        self.reader = reader
        self.graded_by: str | None = None  # the grade, None for the reward
        self.problems: list[str] = []
        self._answers: dict[str, dict[int, tuple[Any, list[_Answer]]]] = {ROLLOUTS: {}, EVALUATIONS: {}}
        self._histories: dict[str, list[QuestionHistory]] = {}  # what was made of them, by folder
        self.update()

    def update(self) -> bool:
        """Read the steps that are new or were written again; whether there were any."""
        self.problems = []
        changes = [self._update(folder) for folder in self._answers]
        if any(changes):
            self._histories.clear()  # of both, as they have one scale
        return any(changes)

    def _update(self, folder: str) -> bool:
        known = self._answers[folder]
        try:
            files = step_files(self.reader.path / folder)
        except RunDirError as error:
            self.problems.append(str(error))
            files = {}
        gone = known.keys() - files.keys()
        for step in gone:
            del known[step]
        changed = bool(gone)
        for step, path in sorted(files.items()):
            state = file_state(path)
            if step in known and known[step][0] == state:
                continue
            try:
                known[step] = state, self._read(path)
            except CheckpointError as error:
                known.pop(step, None)
                if file_state(path) is not None:
                    self.problems.append(str(error))
            changed = True
        return changed

    def _read(self, path: Path) -> list[_Answer]:
        metric = self.reader.grade
        columns = read_columns(path, ["prompt_number", "row", "reward", *([f"{GRADE}{metric}"] if metric else [])])
        if (graded := columns.get(f"{GRADE}{metric}")) is not None:
            self.graded_by = metric
            values: Sequence[float | None] = [float(bool(result)) for result in graded]
        else:
            values = columns.get("reward", [])
        rows = columns.get("row", [])
        if len(values) != len(rows) or None in rows:
            raise CheckpointError(f"{path} is damaged: rows or rewards are missing in it. Remove it")
        members: dict[tuple[int, int], list[float]] = {}
        for row, number, value in zip(rows, columns.get("prompt_number", rows), values, strict=True):
            if value is not None:
                members.setdefault((row, number), []).append(value)
        return [_Answer(row, number, fmean(found)) for (row, number), found in members.items()]

    @property
    def scale(self) -> tuple[float, float] | None:
        """The smallest and the largest mean reward, if they are used to scale the values to 0 to 1."""
        if self.graded_by is not None:
            return None
        values = [answer.value for folder in self._answers.values() for _, found in folder.values() for answer in found]
        low, high = min(values, default=0.0), max(values, default=1.0)
        return None if low >= 0 and high <= 1 else (low, high)

    def training(self) -> list[QuestionHistory]:
        """The training rows that were visited. Without saved rollouts, by questions.jsonl, which knows no steps."""
        if not self._answers[ROLLOUTS]:
            return _logged(self.reader.path / QUESTIONS)
        return self._questions(ROLLOUTS)

    def held_out(self) -> list[QuestionHistory]:
        """The held-out rows, if the run has kept its evaluations."""
        return self._questions(EVALUATIONS)

    def visits(self, row: int) -> list[Visit]:
        """When a training row was sampled."""
        steps = sorted(self._answers[ROLLOUTS].items())
        return [
            Visit(step, answer.prompt_number) for step, (_, found) in steps for answer in found if answer.row == row
        ]

    def _questions(self, folder: str) -> list[QuestionHistory]:
        if folder not in self._histories:
            self._histories[folder] = self._make_histories(folder)
        return self._histories[folder]

    def _make_histories(self, folder: str) -> list[QuestionHistory]:
        low, high = self.scale or (0.0, 1.0)
        rows: dict[int, list[tuple[int, int, float]]] = {}
        for step, (_, found) in sorted(self._answers[folder].items()):
            for answer in found:
                value = (answer.value - low) / (high - low) if high > low else answer.value
                rows.setdefault(answer.row, []).append((step, answer.prompt_number, value))
        return [
            QuestionHistory(
                row,
                steps=[step for step, _, _ in visits],
                prompt_numbers=[number for _, number, _ in visits],
                values=(values := [value for _, _, value in visits]),
                status=status_of(values),
            )
            for row, visits in sorted(rows.items())
        ]


def count_statuses(questions: Iterable[QuestionHistory]) -> dict[str, int]:
    """The number of questions with each status."""
    return dict(Counter(question.status for question in questions))


def _logged(path: Path) -> list[QuestionHistory]:
    """What questions.jsonl says, if it can be read."""
    try:
        records: list[Mapping[str, Any]] = [json.loads(line) for line in path.read_bytes().splitlines()]
        return [
            QuestionHistory(record["row"], [], [], [float(value) for value in record["history"]], record["status"])
            for record in records
            if record["visits"]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []
