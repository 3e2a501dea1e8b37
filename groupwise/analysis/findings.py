"""`diagnose`: what is wrong with a run, as named findings with evidence, examples and what to change.

The checks are those of `training.monitor.checks`, which warn while a run trains; here they look at the recorded
metrics, step after step, with the settings of each step. So a run that is being trained, one that was interrupted and
an old one get the same findings. `groupwise doctor`, the page and the report show them.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

from groupwise.analysis.examples import Example, find_examples
from groupwise.analysis.run_reader import RunReader
from groupwise.analysis.step_settings import StepSettings
from groupwise.config import setting_names
from groupwise.errors import CheckpointError
from groupwise.training.monitor.checks import CHECKS, EVALUATION_CHECKS
from groupwise.training.monitor.checks.base import Problem, Severity
from groupwise.training.monitor.health_checks import HealthChecks
from groupwise.training.store import EVAL_PREFIX
from groupwise.training.store.recorder import missing_steps

WARNING = "warnings/"
NO_ANSWER = "_no_answer"
SHOWN_PROBLEMS = 5

DAMAGED, MISSING = "damaged_files", "missing_steps"
ALL_CHECKS = (*CHECKS, *EVALUATION_CHECKS, DAMAGED, MISSING)
"""The names of all findings but those of a task's own checks."""


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a run.

    severity: "error" if the run cannot learn, or learns something wrong; else "warning".
    steps: the first and the last step after which it was seen. evidence: the numbers at the last one, by metric.
    remedy: what to change, with the values of the settings at that step; ``settings`` are their names.
    """

    name: str
    severity: Severity
    title: str
    message: str
    steps: tuple[int, int]
    evidence: dict[str, float | str] = field(default_factory=dict)
    examples: list[Example] = field(default_factory=list)
    remedy: str = ""
    settings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The finding as JSON."""
        return {**asdict(self), "steps": list(self.steps)}


def diagnose(reader: RunReader) -> list[Finding]:
    """The findings of a run, errors first. Quick to repeat: only the steps since the last call are looked at.

    Call the reader's `refresh` first to take in what a running run has written.
    """
    with _lock:
        diagnosis = _diagnoses.get(reader)
        if diagnosis is None or not diagnosis.continues(reader):
            diagnosis = _diagnoses[reader] = _Diagnosis(reader)
        diagnosis.read(reader)
        findings = [*_folder_findings(reader, checked=diagnosis.recipe is not None), *diagnosis.findings(reader)]
    return sorted(findings, key=lambda finding: finding.severity != "error")


@dataclass
class _Seen:
    """A problem that the checks have found: when, and the newest of the most severe."""

    first: int
    last: int
    step: int
    problem: Problem
    evidence: dict[str, float | str]


class _Diagnosis:
    """The state of the checks after the rows read so far."""

    def __init__(self, reader: RunReader) -> None:
        self.recipe = reader.parsed_recipe()
        self._source, self._phases = reader.recipe, reader.phases
        self._settings = None if self.recipe is None else StepSettings(reader, strict=False)
        self._checks = HealthChecks(held_out=reader.metric)
        self._rows: list[dict[str, Any]] = []
        self._tokens = 0
        self._seen: dict[str, _Seen] = {}
        self._recorded: dict[str, list[int]] = {}  # warnings of checks that are not known here: a task's
        self._examples: dict[tuple[str, int], list[Example]] = {}

    def continues(self, reader: RunReader) -> bool:
        """Whether the run has only gone on: its settings and the rows that were read are the same."""
        rows = reader.rows
        return (
            reader.recipe == self._source
            and (not self._phases or reader.phases == self._phases)
            and len(rows) >= len(self._rows)
            and (not self._rows or rows[len(self._rows) - 1] is self._rows[-1])
        )

    def read(self, reader: RunReader) -> None:
        """Look at the rows that are new."""
        if self._settings is None:
            return
        if self._checks.held_out is None:
            self._checks.held_out = reader.metric
        rows = reader.rows
        for row in rows[len(self._rows) :]:
            step, metrics = row["step"], {name: value for name, value in row.items() if name != "step"}
            recipe = self._settings.at(step, self._tokens)
            if metrics and all(name.startswith(EVAL_PREFIX) for name in metrics):
                held_out = {name.removeprefix(EVAL_PREFIX): value for name, value in metrics.items()}
                self._add(step, self._checks.look_at_evaluation(step, held_out, recipe))
            else:
                self._checks.metric = self._checks.metric or _grade(metrics)
                self._add(step, self._checks.look(step, metrics, recipe))
                self._tokens = int(metrics.get("num_tokens") or self._tokens)
                for name in metrics:
                    if name.startswith(WARNING) and name.removeprefix(WARNING) not in CHECKS:
                        self._recorded.setdefault(name.removeprefix(WARNING), []).append(step)
            self._settings.observe(step, metrics)
        self._rows = list(rows)

    def _add(self, step: int, problems: Mapping[str, Problem]) -> None:
        for name, problem in problems.items():
            seen = self._seen.get(name)
            if seen is None:
                self._seen[name] = _Seen(step, step, step, problem, dict(problem.evidence))
                continue
            seen.last = step
            if problem.severity == "error" or seen.problem.severity == "warning":
                seen.step, seen.problem, seen.evidence = step, problem, dict(problem.evidence)

    def findings(self, reader: RunReader) -> list[Finding]:
        findings = [self._finding(reader, name, self._seen[name]) for name in ALL_CHECKS if name in self._seen]
        return findings + [_of_a_task(name, steps) for name, steps in self._recorded.items()]

    def _finding(self, reader: RunReader, name: str, seen: _Seen) -> Finding:
        problem, key = seen.problem, (name, seen.step)
        if key not in self._examples:
            self._examples[key] = find_examples(reader, name, seen.step, problem)
        check = CHECKS.get(name) or EVALUATION_CHECKS[name]
        return Finding(
            name,
            problem.severity,
            check.title,
            problem.message,
            (seen.first, seen.last),
            {"step": seen.step, **seen.evidence},
            self._examples[key],
            problem.remedy,
            _settings_in(problem.remedy),
        )


_lock = threading.Lock()
_diagnoses: WeakKeyDictionary[RunReader, _Diagnosis] = WeakKeyDictionary()


def _grade(metrics: Mapping[str, Any]) -> str | None:
    """The task's grade that is measured in training: the first one."""
    return next((name.removesuffix(NO_ANSWER) for name in metrics if name.endswith(NO_ANSWER)), None)


def _settings_in(text: str) -> list[str]:
    known = {name for name, _ in setting_names()}
    return [name for name in dict.fromkeys(re.findall(r"[a-z]\w*(?:\.\w+)+", text)) if name in known]


def _of_a_task(name: str, steps: Sequence[int]) -> Finding:
    times = f"{len(steps)} times" if len(steps) > 1 else "once"
    return Finding(
        name,
        "warning",
        name.replace("_", " "),
        f"a check of the run's task warned {times}, first after step {steps[0]}",
        (steps[0], steps[-1]),
        {"step": steps[-1], f"{WARNING}{name}": 1.0},
        remedy="the warning in the run's output says what to change",
    )


def _folder_findings(reader: RunReader, *, checked: bool) -> list[Finding]:
    """What is wrong with the files of the run. ``checked``: its settings can be read, so that the checks could look."""
    last = reader.step
    problems = list(reader.problems)
    if reader.rollout_steps:
        try:
            reader.rollouts(reader.rollout_steps[-1], ["step"])
        except CheckpointError as error:
            problems.append(str(error))
    findings = []
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        unchecked = "" if checked else "; without the settings nothing else can be checked"
        shown: dict[str, float | str] = {f"problem {n}": text for n, text in enumerate(problems[:SHOWN_PROBLEMS], 1)}
        findings.append(
            Finding(
                DAMAGED,
                "warning",
                "files of the run cannot be read",
                f"{problems[0]}{more}{unchecked}",
                (0, last),
                shown,
                remedy="restore the files from a copy; a run that is resumed sets damaged lines aside and goes on from "
                "its last intact checkpoint",
            )
        )
    recorded = {row["step"] for row in reader.training_rows}
    lost = missing_steps(recorded, last) if checked else ""
    if lost:
        known = sorted({0, *recorded})
        gaps = [(before, after) for before, after in pairwise(known) if after > before + 1]
        findings.append(
            Finding(
                MISSING,
                "warning",
                "steps are missing",
                f"the metrics of {lost} are missing, so that the checks and the curves have a gap there",
                (gaps[0][0] + 1, gaps[-1][1] - 1),
                {"steps without metrics": sum(after - before - 1 for before, after in gaps)},
                remedy="the weights do not depend on them; restore metrics.jsonl from a copy if you need the curves",
            )
        )
    return findings
