"""The accuracy of every training question at each of its visits during a run."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.data import PassRates
from groupwise.data.rows import Row
from groupwise.errors import CheckpointError
from groupwise.rundir import as_json, write_bytes
from groupwise.stats import mean

if TYPE_CHECKING:
    from groupwise.tasks.base import TaskRow
    from groupwise.training.rollout.batch import Batch, GroupAdvantages

QUESTIONS = "questions.jsonl"
SOLVED = 0.5  # minimum share of right answers in a visit
ROW_COLUMNS = ("id", "category")  # copied from a row that has them

STATUSES = {  # in the order of the summary
    "always": "always right",
    "learnt": "learnt",
    "between": "in between",
    "forgotten": "forgotten",
    "never": "never solved",
    "unseen": "unseen",
}


def status_of(history: Sequence[float]) -> str:
    """A question's status, from the share of right answers at each visit.

    "learnt": not solved at the first visit, solved at the last. "forgotten": solved before, but not at the last visit.
    """
    if not history:
        return "unseen"
    if min(history) >= SOLVED:
        return "always"
    if max(history) <= 0:
        return "never"
    if history[0] < SOLVED <= history[-1]:
        return "learnt"
    if max(history) >= SOLVED > history[-1]:
        return "forgotten"
    return "between"


def _visits(history: list[float]) -> dict[str, Any]:
    return {
        "visits": len(history),
        "first": history[0] if history else None,
        "last": history[-1] if history else None,
        "best": max(history, default=None),
        "status": status_of(history),
        "history": history,
    }


class QuestionLog:
    """The history of each training row. ``metric`` is the task's grade; without one the mean reward is used.

    rates: running pass rates, which take in each visit. They follow from the log, so a checkpoint does not have them.
    """

    def __init__(self, rows: Sequence[TaskRow], metric: str | None = None, rates: PassRates | None = None) -> None:
        self.rows, self.metric, self.rates = rows, metric, rates
        # One entry per visit: 16 bytes, where a list per row would take a hundred and more.
        self._visited, self._values = array("q"), array("d")

    def observe(self, batch: Batch, group_advantages: GroupAdvantages) -> None:
        """Add a visit of each prompt of a batch, except prompts without a scored answer."""
        graded = group_advantages.graded.get(self.metric or "")
        values = group_advantages.rewards.tolist() if graded is None else [float(bool(result)) for result in graded]
        dropped = group_advantages.rewards.isnan().tolist()
        for prompt, row in enumerate(batch.row_numbers):
            members = range(prompt * batch.samples, (prompt + 1) * batch.samples)
            scored = [values[sample] for sample in members if not dropped[sample]]
            if scored:
                self._add(row, mean(scored))

    def _add(self, row: int, value: float) -> None:
        self._visited.append(row)
        self._values.append(value)
        if self.rates is not None:
            self.rates.add(row, value)

    def table(self) -> list[dict[str, Any]]:
        """One record per training row."""
        histories = self._histories()
        return [
            {**self._row(number), **self._result(number, histories.get(number))} for number in range(len(self.rows))
        ]

    def write(self, folder: Path) -> None:
        """Write the table into the run folder, atomically."""
        histories, encode = self._histories(), json.JSONEncoder(ensure_ascii=False, default=str).encode
        unseen = encode(self._result(0, None))[1:]  # most rows of a large data set, and the same for all
        lines = [
            f"{encode(self._row(number))[:-1]}, "
            f"{encode(as_json(self._result(number, histories[number])))[1:] if number in histories else unseen}\n"
            for number in range(len(self.rows))
        ]
        write_bytes(folder / QUESTIONS, "".join(lines).encode("utf-8", "backslashreplace"))

    def state(self) -> dict[str, list[float]]:
        return {str(row): history for row, history in self._histories().items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`; later visits are dropped."""
        self._visited, self._values = array("q"), array("d")
        if any(int(row) >= len(self.rows) for row in state):
            raise CheckpointError(f"the saved questions are of more rows than the {len(self.rows)} that there are")
        if self.rates is not None:
            self.rates.clear()
        for row, history in state.items():
            for value in history:
                self._add(int(row), float(value))

    def _row(self, number: int) -> dict[str, Any]:
        """What identifies a row: its number, its file and line, its id and category."""
        row = self.rows[number]
        where = {"where": row.where} if isinstance(row, Row) else {}
        return {"row": number, **where, **{name: row[name] for name in ROW_COLUMNS if name in row}}

    def _result(self, number: int, history: list[float] | None) -> dict[str, Any]:
        """The visits of a row, and its pass rate if the order of the rows depends on it."""
        rates = {} if self.rates is None else {"pass_rate": self.rates.of(number) if history else None}
        return {**_visits(history or []), **rates}

    def _histories(self) -> dict[int, list[float]]:
        """The values of each visited row, in order of its first visit."""
        histories: dict[int, list[float]] = {}
        for row, value in zip(self._visited, self._values, strict=True):
            histories.setdefault(row, []).append(value)
        return histories


def summarise(records: Iterable[Mapping[str, Any]]) -> str:
    """The number of questions with each status, in one line."""
    counts = Counter(str(record["status"]) for record in records)
    parts = [f"{counts[status]:,} {label}" for status, label in STATUSES.items() if counts[status]]
    return f"questions: {', '.join(parts) or 'none'}"
