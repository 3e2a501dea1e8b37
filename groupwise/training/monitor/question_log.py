"""The accuracy of every training question at each of its visits during a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from groupwise.data.rows import Row
from groupwise.rundir import write_bytes
from groupwise.rundir.files import json_bytes
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


class QuestionLog:
    """The history of each training row. ``metric`` is the task's grade; without one the mean reward is used."""

    def __init__(self, rows: Sequence[TaskRow], metric: str | None = None) -> None:
        self.rows, self.metric = rows, metric
        self._history: dict[int, list[float]] = {}

    def observe(self, batch: Batch, group_advantages: GroupAdvantages) -> None:
        """Add a visit of each prompt of a batch, except prompts without a scored answer."""
        graded = group_advantages.graded.get(self.metric or "")
        values = group_advantages.rewards.tolist() if graded is None else [float(bool(result)) for result in graded]
        dropped = group_advantages.rewards.isnan().tolist()
        for prompt, row in enumerate(batch.row_numbers):
            members = range(prompt * batch.samples, (prompt + 1) * batch.samples)
            scored = [values[sample] for sample in members if not dropped[sample]]
            if scored:
                self._history.setdefault(row, []).append(sum(scored) / len(scored))

    def table(self) -> list[dict[str, Any]]:
        """One record per training row."""
        records = []
        for number, row in enumerate(self.rows):
            history = self._history.get(number, [])
            records.append(
                {
                    "row": number,
                    **({"where": row.where} if isinstance(row, Row) else {}),  # its file and line
                    **{name: row[name] for name in ROW_COLUMNS if name in row},
                    "visits": len(history),
                    "first": history[0] if history else None,
                    "last": history[-1] if history else None,
                    "best": max(history, default=None),
                    "status": status_of(history),
                    "history": history,
                }
            )
        return records

    def write(self, folder: Path) -> None:
        """Write the table into the run folder, atomically."""
        lines = (json_bytes(record, default=str) + b"\n" for record in self.table())
        write_bytes(folder / QUESTIONS, b"".join(lines))

    def state(self) -> dict[str, list[float]]:
        return {str(row): list(history) for row, history in self._history.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`; later visits are dropped."""
        self._history = {int(row): list(history) for row, history in state.items()}


def summarise(records: Iterable[Mapping[str, Any]]) -> str:
    """The number of questions with each status, in one line."""
    counts = Counter(str(record["status"]) for record in records)
    parts = [f"{counts[status]:,} {label}" for status, label in STATUSES.items() if counts[status]]
    return f"questions: {', '.join(parts) or 'none'}"
