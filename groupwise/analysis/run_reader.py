"""A run folder, read by someone who does not own it, also while the run trains.

`RunReader` takes no lock and writes nothing. What cannot be read is left out and named in ``problems``: an interrupted
run, a damaged line, a recipe of another version, a file that was deleted in between. Opening a run reads its metrics;
rollouts, tokens and held-out answers are read step by step, when they are asked for.
"""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from groupwise.config import Recipe, load_recipe, resolve_scheduled, scheduled_names
from groupwise.errors import CheckpointError, ConfigError, RunDirError
from groupwise.paths import FOLDER, kind_of, path_reason, show_path
from groupwise.rundir import MetricsFollower
from groupwise.rundir.files import read_object
from groupwise.rundir.run import FORMAT, HOLDER, MARKER, METRICS, is_held
from groupwise.training.schedule.lengths import RunLength, run_length
from groupwise.training.schedule.parse import parse_phases
from groupwise.training.schedule.schedule import Schedule
from groupwise.training.store import EVAL_PREFIX
from groupwise.training.store.rollout_files import ROLLOUTS, read_rows, step_files
from groupwise.training.store.run_folder import (
    FINISHED,
    INPUTS,
    RECIPE,
    RUNS,
    TRAINING_PAIRS,
    TRAINING_ROWS,
    VERSIONS,
    checkpoints_in,
)
from groupwise.training.store.token_files import EVALUATIONS, TOKENS, TokenRow

BEST, RESUMED = "best.json", "resumed.json"
SMALL_FILES = (MARKER, RECIPE, INPUTS, VERSIONS, RESUMED, BEST, FINISHED)
CACHED = 16  # steps whose rows are kept
NEEDED = ("step", "prompt_number", "row", "sample", "prompt", "completion")  # columns of a rollout file
DEEPEST = 2  # folders below a root in which runs are looked for

Status = Literal["running", "finished", "stopped", "unknown"]


class RunPhase(NamedTuple):
    """A phase of the schedule, and the steps that were done in it; the last one may go on."""

    name: str
    first: int
    last: int


class RunReader:
    """The folder of a run. `refresh` takes in what the run has written since; the rest is read when it is used.

    What is returned is shared with later calls and must not be changed.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        _check_is_run(self.path)
        self.name = self.path.absolute().name
        self._lock = threading.RLock()  # a server answers from several threads
        self._metrics = MetricsFollower(self.path / METRICS)
        self._files: dict[str, tuple[Any, dict[str, Any], str]] = {}  # its state, its content, what is wrong with it
        self._steps: dict[str, dict[int, Path]] = {}  # the files of each step, by folder
        self._folder_problems: dict[str, str] = {}
        self._cache: OrderedDict[tuple[Any, ...], list[dict[str, Any]]] = OrderedDict()
        self._parsed: tuple[Any, Recipe | None, str] = (None, None, "")  # the file's state, and the recipe or a problem
        self._schedule: tuple[Any, RunLength | None, str] = (None, None, "")
        self._seen: tuple[Any, ...] = ()
        self.training_rows: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.metric_names: list[str] = []
        self.refresh()

    def __repr__(self) -> str:
        return f"RunReader({str(self.path)!r})"

    # What the run has measured

    def refresh(self) -> bool:
        """Read what was written since the last time; whether anything has changed."""
        with self._lock:
            self._steps.clear()
            changed = self._metrics.read()
            if changed:
                self.training_rows = [row for row in self.rows if not _is_evaluation(row)]
                self.evaluations = [row for row in self.rows if _is_evaluation(row)]
                names: dict[str, Any] = {}
                for row in self.rows:
                    names |= row
                self.metric_names = [name for name in names if name != "step"]
            seen = (self.status, *(file_state(self.path / name) for name in (RECIPE, FINISHED, BEST, RESUMED)))
            changed, self._seen = changed or seen != self._seen, seen
            return changed

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Every row of metrics.jsonl."""
        return self._metrics.rows

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """The steps at which a metric was recorded, and its values: numbers only, NaN and infinities too."""
        pairs = [(row["step"], _float(row[name])) for row in self.rows if isinstance(row.get(name), (int, float))]
        return [step for step, _ in pairs], [value for _, value in pairs]

    @property
    def metric(self) -> str | None:
        """The main held-out metric, such as "accuracy"; None if nothing was evaluated and the recipe names none."""
        if isinstance(name := self._object(BEST).get("metric"), str):
            return name
        if isinstance(name := self.settings.get("evaluate.metric"), str):
            return name
        names = [name.removeprefix(EVAL_PREFIX) for name in self.metric_names if name.startswith(EVAL_PREFIX)]
        return next((name for name in names if f"{name}_low" in names), names[0] if names else None)

    @property
    def grade(self) -> str | None:
        """The grade of single answers that `metric` is of: its name without that of a held-out set."""
        if self.metric is None or self.metric in self.metric_names:
            return self.metric
        return self.metric.partition("/")[2] or self.metric

    @property
    def step(self) -> int:
        """The last step that was recorded."""
        return max((row["step"] for row in self.training_rows), default=0)

    # What the run is

    @property
    def problems(self) -> list[str]:
        """What could not be read, in sentences."""
        for name in SMALL_FILES:
            self._object(name)
        self._length()
        found = [problem for _, _, problem in self._files.values()]
        if (marker := self._object(MARKER)) and marker.get("format") != FORMAT:
            found.append(f"{MARKER} has format {marker.get('format')!r:.50}; this groupwise reads format {FORMAT}")
        found += [self._parsed[2], self._schedule[2], *self._folder_problems.values()]
        return [*self._metrics.problems, *filter(None, found)]

    @property
    def recipe(self) -> dict[str, Any]:
        """Every setting, nested as in recipe.json; empty if that cannot be read, or is not written yet."""
        return self._object(RECIPE)

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting by its dotted name: ``{"loss.kl_coef": 0.3}``."""
        return dict(flat_settings(self.recipe))

    def parsed_recipe(self) -> Recipe | None:
        """The recipe; None, with a problem, if this version of groupwise cannot read it."""
        state = file_state(self.path / RECIPE)
        if state != self._parsed[0]:
            self._parsed = state, None, ""
            try:
                if self.recipe:
                    self._parsed = state, load_recipe(self.path / RECIPE), ""
            except ConfigError as error:
                self._parsed = state, None, f"the settings cannot be used by this groupwise: {error}"
        return self._parsed[1]

    @property
    def inputs(self) -> dict[str, Any]:
        """What the run was started with: names and hashes of the model, the task, the rows and the rewards."""
        return self._object(INPUTS)

    @property
    def versions(self) -> dict[str, Any]:
        return self._object(VERSIONS)

    @property
    def created(self) -> str:
        """When the run was started, such as ``2026-11-18T09:54:39+0000``; empty if that is not known."""
        return str(self._object(MARKER).get("created", ""))

    @property
    def changes(self) -> list[dict[str, Any]]:
        """What was changed when the run was resumed: ``{"step": 40, "changed": {setting: [before, after]}}``."""
        entries = self._object(RESUMED).get("resumed")
        return [entry for entry in entries if _is_change(entry)] if isinstance(entries, list) else []

    @property
    def status(self) -> Status:
        """Whether the run trains. "unknown": a process on another machine has it open, or had when it died."""
        finished, holder = self._object(FINISHED), self._object(HOLDER)
        ended = isinstance(finished.get("step"), int) and finished["step"] >= self.step
        held = is_held(holder)
        if ended and (held is False or _time_of(self.path / FINISHED) >= _time_of(self.path / HOLDER)):
            return "finished"
        return "running" if held else "unknown" if held is None else "stopped"

    @property
    def total_steps(self) -> int | None:
        """The number of steps that the run will have; None if it depends on what it samples, or is not known."""
        finished, length = self._object(FINISHED), self._length()
        if length is not None and length.steps:
            return length.steps
        total = self.settings.get("sft.steps") if length is not None and length.steps == 0 else None
        return total or (finished["total_steps"] if isinstance(finished.get("total_steps"), int) else None)

    @property
    def phases(self) -> list[RunPhase]:
        """The phases of the schedule that have begun."""
        recipe, length = self.parsed_recipe(), self._length()
        if recipe is None or length is None or not length.phases:
            return []
        schedule = Schedule(scheduled_names(recipe), phases=length.phases, ends=recipe.ends_with_phases)
        phases: list[RunPhase] = []
        tokens = 0
        for row in self.training_rows:
            step, name = row["step"], schedule.phase(row["step"] - 1, tokens)
            if phases and phases[-1].name == name:
                phases[-1] = phases[-1]._replace(last=step)
            elif name is not None:
                phases.append(RunPhase(name, step, step))
            tokens = int(row.get("num_tokens") or tokens)
        return phases

    def _length(self) -> RunLength | None:
        """The steps and phases of the run, by its recipe and the number of its rows."""
        key = (file_state(self.path / RECIPE), file_state(self.path / INPUTS))
        if key != self._schedule[0]:
            try:
                self._schedule = key, self._find_length(), ""
            except ConfigError as error:
                self._schedule = key, None, f"the length of the run is not known: {error}"
        return self._schedule[1]

    def _find_length(self) -> RunLength | None:
        recipe = self.parsed_recipe()
        return None if recipe is None else self.length_of(recipe)

    def length_of(self, recipe: Recipe) -> RunLength | None:
        """The steps and phases of a recipe with the run's rows; None if their number is not known."""
        samples = recipe.loss.policy_coef != 0 or recipe.preference.pairs != "data" or bool(recipe.phases)
        rows = _count(self.inputs.get(TRAINING_ROWS if samples else TRAINING_PAIRS))
        if not rows and recipe.train.steps is None:
            return None
        phases = parse_phases(recipe.phases, lambda name: resolve_scheduled(recipe, name))
        return run_length(recipe, phases, rows, samples=samples)

    # What the run has sampled

    @property
    def rollout_steps(self) -> list[int]:
        return sorted(self._step_files(ROLLOUTS))

    @property
    def token_steps(self) -> list[int]:
        return sorted(self._step_files(TOKENS))

    @property
    def evaluation_steps(self) -> list[int]:
        """The steps whose held-out completions are kept; 0 is before training."""
        return sorted(self._step_files(EVALUATIONS))

    def rollouts(self, step: int, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """The samples of a step, one row each; only these ``columns``, as far as there are such.

        A CheckpointError if there are none, or if the file is damaged or was deleted.
        """
        rows = self._read(ROLLOUTS, step, columns)
        self._check(ROLLOUTS, step, rows, NEEDED if columns is None else [])
        return rows

    def tokens(self, step: int) -> list[TokenRow]:
        """The completions of a step whose tokens were recorded; errors as in `rollouts`."""
        rows = self._read(TOKENS, step, TokenRow._fields)
        self._check(TOKENS, step, rows, [name for name in TokenRow._fields if name not in TokenRow._field_defaults])
        return [TokenRow(**row) for row in rows]

    def evaluation_answers(self, step: int) -> list[dict[str, Any]]:
        """The held-out completions of an evaluation, one row each; errors as in `rollouts`."""
        rows = self._read(EVALUATIONS, step, None)
        self._check(EVALUATIONS, step, rows, ["row", "sample", "prompt", "completion"])
        return rows

    @property
    def checkpoints(self) -> dict[int, Path]:
        """The checkpoints that exist now, by step. A run deletes the older ones."""
        return checkpoints_in(self.path)

    def _read(self, folder: str, step: int, columns: Sequence[str] | None) -> list[dict[str, Any]]:
        path = self._file(folder, step)
        key = (path, file_state(path), None if columns is None else tuple(columns))
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        rows = read_rows(path, columns)
        with self._lock:
            self._cache[key] = rows
            while len(self._cache) > CACHED:
                self._cache.popitem(last=False)
        return rows

    def _check(self, folder: str, step: int, rows: Sequence[Mapping[str, Any]], needed: Sequence[str]) -> None:
        """Raise an error if a column that every row has is missing: then another program wrote the file."""
        if missing := [name for name in needed if any(row.get(name) is None for row in rows)]:
            raise CheckpointError(f"{self._file(folder, step)} is damaged: {missing[0]!r} is missing in it. Remove it")

    def _file(self, folder: str, step: int) -> Path:
        files = self._step_files(folder)
        if step not in files:
            there = f"there are {len(files)} steps between {min(files)} and {max(files)}" if files else "there are none"
            raise CheckpointError(f"{self.path / folder} has no file of step {step}; {there}")
        return files[step]

    def _step_files(self, folder: str) -> dict[int, Path]:
        with self._lock:
            if folder not in self._steps:
                self._folder_problems.pop(folder, None)
                try:
                    self._steps[folder] = step_files(self.path / folder)
                except RunDirError as error:
                    self._steps[folder], self._folder_problems[folder] = {}, str(error)
            return self._steps[folder]

    def _object(self, name: str) -> dict[str, Any]:
        """The object in a JSON file of the run; empty if the file is missing or, with a problem, damaged."""
        state = file_state(self.path / name)
        with self._lock:
            known = self._files.get(name)
            if known is None or known[0] != state:
                value, problem = ({}, "") if state is None else _read_object(self.path / name)
                known = self._files[name] = (state, value, problem)
        return known[1]


def find_runs(roots: Sequence[str | Path] = (RUNS,)) -> list[Path]:
    """The run folders among and below ``roots``, at most two folders deep, newest first.

    A root that does not exist, or in which there is no run, is an error.
    """
    runs: dict[Path, Path] = {}
    for root in map(Path, roots):
        if kind_of(root, RunDirError) != FOLDER:
            what = "does not exist" if kind_of(root, RunDirError) is None else "is not a folder"
            raise RunDirError(f"{show_path(root)} {what}; give the folder of a run, or one that holds runs")
        found = _runs_below(root, DEEPEST)
        if not found:
            raise RunDirError(
                f"{show_path(root)} holds no run (no {MARKER} in it or in the folders below); give the folder of a "
                "run, or one that holds runs"
            )
        for path in found:
            runs.setdefault(path.resolve(), path)
    return sorted(runs.values(), key=_created, reverse=True)


def _runs_below(folder: Path, depth: int) -> list[Path]:
    if os.path.exists(folder / MARKER):
        return [folder]
    if not depth:
        return []
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and _is_folder(entry))
    except OSError as error:
        if depth < DEEPEST:  # someone else's folder among the runs
            return []
        raise RunDirError(f"{show_path(folder)} cannot be read: {path_reason(error)}") from error
    return [run for name in names for run in _runs_below(folder / name, depth - 1)]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # links in a circle
        return False


def _created(path: Path) -> tuple[float, str]:
    with suppress(CheckpointError, ValueError, TypeError, KeyError):
        return datetime.fromisoformat(read_object(path / MARKER)["created"]).timestamp(), path.name
    return _time_of(path / MARKER), path.name


def _check_is_run(path: Path) -> None:
    kind = kind_of(path, RunDirError)
    if kind is None:
        raise RunDirError(f"{show_path(path)} does not exist; give the folder of a run")
    if kind != FOLDER:
        raise RunDirError(f"{show_path(path)} is a {kind}, not the folder of a run")
    if kind_of(path / MARKER, RunDirError) is None:
        raise RunDirError(
            f"{show_path(path)} holds no run (there is no {MARKER} in it); give the folder of a run, such as one below "
            f"{RUNS}/"
        )


def _is_evaluation(row: Mapping[str, Any]) -> bool:
    return len(row) > 1 and all(name == "step" or name.startswith(EVAL_PREFIX) for name in row)


def _float(number: float) -> float:
    """The number; an integer beyond the largest float, which a damaged file may hold, is infinite."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _is_change(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("step"), int) and isinstance(entry.get("changed"), dict)


def file_state(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file is written again; None without the file."""
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size, state.st_ino


def _time_of(path: Path) -> float:
    state = file_state(path)
    return 0.0 if state is None else state[0] / 1e9


def _read_object(path: Path) -> tuple[dict[str, Any], str]:
    """The object in a file, and what is wrong with it; a file that is deleted in between counts as missing."""
    try:
        return read_object(path), ""
    except CheckpointError as error:
        return {}, "" if file_state(path) is None else str(error)


def flat_settings(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Every setting of nested tables with its dotted name."""
    entries: list[tuple[str, Any]] = []
    for key, value in table.items():
        name = f"{prefix}{key}"
        entries += flat_settings(value, f"{name}.") if isinstance(value, Mapping) and value else [(name, value)]
    return entries


def _count(described: Any) -> int:
    """The number of rows in a line of inputs.json such as ``16000, b40e9b1306a4134e``."""
    number = str(described).partition(",")[0]
    return int(number) if number.isdecimal() else 0
