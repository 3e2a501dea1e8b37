"""Every training question over a run: how often it was asked, and how right its answers were each time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from groupwise.errors import CheckpointError, RunDirError
from groupwise.rundir import write_bytes
from groupwise.tasks.base import Row
from groupwise.training.rollout.batch import Batch, GroupAdvantages

QUESTIONS = "questions.jsonl"
SOLVED = 0.5  # the share of a visit's answers that must be right
DETAILS = ("id", "category")  # of a row, where it has them

# In the order of the summary, with what is said there.
STATUSES = {
    "always": "always right",
    "learnt": "learnt",
    "between": "in between",
    "forgotten": "forgotten",
    "never": "never solved",
    "unseen": "unseen",
}


def status_of(history: Sequence[float]) -> str:
    """What became of a question, from the share of right answers at each visit.

    ``learnt`` and ``forgotten`` are about the first and the last visit, and so need two; what is none of the others
    is ``between``.
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
    """The history of each training row, by its number. ``metric`` is the task's grade; without one rewards count."""

    def __init__(self, rows: Sequence[Row], metric: str | None = None) -> None:
        self.rows, self.metric = rows, metric
        self._history: dict[int, list[float]] = {}

    def observe(self, batch: Batch, group_advantages: GroupAdvantages) -> None:
        """Take in a visit of each of a batch's prompts. One of whose answers none was scored was not visited."""
        graded = group_advantages.graded.get(self.metric or "")
        values = group_advantages.rewards.tolist() if graded is None else [float(bool(result)) for result in graded]
        dropped = group_advantages.rewards.isnan().tolist()
        for prompt, row in enumerate(batch.row_numbers):
            members = range(prompt * batch.samples, (prompt + 1) * batch.samples)
            known = [values[sample] for sample in members if not dropped[sample]]
            if known:
                self._history.setdefault(row, []).append(sum(known) / len(known))

    def table(self) -> list[dict[str, Any]]:
        """One record for each training row."""
        return [self._record(number, row) for number, row in enumerate(self.rows)]

    def write(self, folder: Path) -> None:
        """Put the table into the run folder, whole."""
        lines = (json.dumps(record, ensure_ascii=False, default=str) + "\n" for record in self.table())
        write_bytes(folder / QUESTIONS, "".join(lines).encode())

    def state(self) -> dict[str, list[float]]:
        """All that is remembered, as JSON."""
        return {str(row): list(history) for row, history in self._history.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` gave: what came after it is forgotten."""
        try:
            self._history = {int(row): [float(share) for share in history] for row, history in state.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the saved questions are damaged ({type(error).__name__}: {error}); resume from another checkpoint"
            ) from error

    def _record(self, number: int, row: Row) -> dict[str, Any]:
        history = self._history.get(number, [])
        return {
            "row": number,
            **{name: row[name] for name in DETAILS if name in row},
            "visits": len(history),
            "first": history[0] if history else None,
            "last": history[-1] if history else None,
            "best": max(history, default=None),
            "status": status_of(history),
            "history": history,
        }


def read_questions(folder: str | Path) -> list[dict[str, Any]]:
    """The records of a run's ``questions.jsonl``."""
    path = Path(folder) / QUESTIONS
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        raise RunDirError(f"there is no {QUESTIONS} in {folder}; a run writes it with its first checkpoint") from None
    except (OSError, ValueError) as error:
        raise RunDirError(f"{path} cannot be read: {error}; the run writes it anew with its next checkpoint") from error


def summarise(records: Iterable[Mapping[str, Any]]) -> str:
    """How many questions became what, in one line."""
    counts = Counter(str(record["status"]) for record in records)
    components = [f"{counts[status]:,} {words}" for status, words in STATUSES.items() if counts[status]]
    return f"questions: {', '.join(components) or 'none'}"
