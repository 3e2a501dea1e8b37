"""Records a run: ``metrics.jsonl``, ``rollouts/step-000012.parquet``, TensorBoard and Weights & Biases.

A run stops if its own files cannot be written. TensorBoard and W&B are optional: the first error is reported, that sink
is dropped, and the run continues.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from groupwise.errors import MissingExtraError, RunDirError, is_installed
from groupwise.rundir import RunDir, read_json, read_metrics
from groupwise.rundir.run import METRICS
from groupwise.text import Say, error_reason, one_line
from groupwise.training.store import EVAL_PREFIX as EVAL_PREFIX
from groupwise.training.store.arrivals import rewind_arrivals
from groupwise.training.store.rollout_files import ROLLOUTS, RolloutWriter, step_files
from groupwise.training.store.token_files import EVALUATIONS, TOKENS, TokenRow, write_tokens

MetricValue = float | int | None

TENSORBOARD = "tensorboard"
WANDB = "wandb.json"
MAX_FLOAT32 = 3.4028234e38  # TensorBoard stores 32-bit floats
SHOWN_GAPS = 10  # in a message about lost steps
CONTINUES = "The run continues; metrics.jsonl has them all"


class TensorBoard:
    """A TensorBoard event file. ``purge_step`` hides what earlier files have from that step on."""

    def __init__(self, folder: Path, purge_step: int | None) -> None:
        # Not tensorboardX's SummaryWriter: on a full disk its thread dies and the run hangs on the thread's queue.
        try:
            from tensorboardX import RecordWriter
            from tensorboardX.proto import event_pb2, summary_pb2
        except ImportError as error:
            raise MissingExtraError("writing TensorBoard events", "tensorboardX", "tensorboard") from error
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files in the order of their names, and two runs may start within a second.
        number = sum(1 for _ in folder.glob("events.out.tfevents.*"))
        name = f"events.out.tfevents.{int(time.time()):010d}.{number:04d}.{socket.gethostname()}"
        self._file = RecordWriter(str(folder / name))
        try:
            self._write(file_version="brain.Event:2")
            if purge_step is not None:
                start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
                self._write(step=purge_step, session_log=start)
        except OSError:
            with suppress(OSError):
                self._file.close()
            raise

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
        self._write(step=step, summary=self._summary(value=values))

    def close(self) -> None:
        self._file.close()

    def _write(self, **fields: Any) -> None:
        self._file.write(self._event(wall_time=time.time(), **fields).SerializeToString())
        self._file.flush()


class WeightsAndBiases:
    """A W&B run. Its id is stored in the run folder, so a resumed run continues it."""

    def __init__(self, run: RunDir, project: str, settings: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError("reporting to Weights & Biases", "wandb", "wandb") from error
        path = run.path / WANDB
        if not path.exists():
            run.write_json(WANDB, {"id": uuid.uuid4().hex[:12]})
        self._run = wandb.init(
            project=project,
            name=one_line(run.path.name),
            id=read_json(path)["id"],
            resume="allow",
            dir=str(run.path),
            config=dict(settings),
        )

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class Recorder:
    """Writes metrics to the run folder and to the sinks, and rollouts to Parquet files.

    ``wandb`` is a project's name and ``settings`` its config. A resumed run calls `rewind` first and passes the step it
    resumes after as ``resumed_at``, so TensorBoard drops the later steps. W&B continues the same run; there repeated
    steps keep their first values. ``tensorboard`` None writes events if tensorboardX is installed. ``say`` reports a
    sink that fails.
    """

    def __init__(
        self,
        run: RunDir,
        *,
        say: Say,
        tensorboard: bool | None = None,
        wandb: str | None = None,
        settings: Mapping[str, Any] | None = None,
        resumed_at: int | None = None,
    ) -> None:
        self._run = run
        self._rollouts = RolloutWriter(run.path / ROLLOUTS)
        self._evaluations = RolloutWriter(run.path / EVALUATIONS)
        self._say = say
        self._sinks: dict[str, TensorBoard | WeightsAndBiases] = {}
        if wandb:
            self._open("Weights & Biases", lambda: WeightsAndBiases(run, wandb, settings or {}))
        if tensorboard or (tensorboard is None and is_installed("tensorboardX")):
            purge_step = None if resumed_at is None else resumed_at + 1
            self._open("TensorBoard", lambda: TensorBoard(run.path / TENSORBOARD, purge_step))

    def step(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        """Record the metrics of a training step."""
        self._run.check_in_place()
        self._run.metrics.record(step, metrics)
        numbers = _numbers(metrics)
        for name, sink in list(self._sinks.items()):
            self._try(name, partial(sink.write, step, numbers))

    def evaluation(
        self, step: int, metrics: Mapping[str, MetricValue], answers: Mapping[str, Sequence[Any]] | None = None
    ) -> None:
        """Record an evaluation after ``step`` (0: before the first), and its completions; names get ``eval/``."""
        if answers:
            self._run.check_in_place()
            self._evaluations.write(step, answers)
        self.step(step, {EVAL_PREFIX + name: value for name, value in metrics.items()})

    def rollouts(self, step: int, table: Mapping[str, Sequence[Any]], tokens: Sequence[TokenRow] = ()) -> None:
        self._run.check_in_place()
        self._rollouts.write(step, table)
        if tokens:
            write_tokens(self._run.path / TOKENS, step, tokens)

    def close(self) -> None:
        """Close the sinks. The run folder stays open."""
        for name, sink in list(self._sinks.items()):
            self._try(name, sink.close)
        self._sinks.clear()

    def _open(self, name: str, make: Callable[[], TensorBoard | WeightsAndBiases]) -> None:
        try:
            self._sinks[name] = make()
        except MissingExtraError:
            raise
        except Exception as error:
            self._say(f"{name} gets no metrics: {error_reason(error)}. {CONTINUES}")

    def _try(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            failed = self._sinks.pop(name)
            with suppress(Exception):
                failed.close()
            self._say(f"{name} gets no more metrics: {error_reason(error)}. {CONTINUES}")


def rewind(run: RunDir, step: int, *, evaluated: bool = True) -> list[str]:
    """Delete what was recorded after ``step``, and its evaluation unless that was finished (``evaluated``).

    Returns notices: about damaged lines, and steps whose metrics are lost. The run's weights do not depend on those.
    """

    def is_evaluation(row: Mapping[str, Any]) -> bool:
        return all(name.startswith(EVAL_PREFIX) for name in row.keys() - {"step"})

    arrivals = rewind_arrivals(run.path, step)
    note = run.metrics.rewind(step, drop=lambda row: not evaluated and row["step"] == step and is_evaluation(row))
    kept = {ROLLOUTS: step, TOKENS: step, EVALUATIONS: step if evaluated else step - 1}
    files = [(number, path, folder) for folder in kept for number, path in step_files(run.path / folder).items()]
    for path in [path for number, path, folder in files if number > kept[folder]]:
        try:
            path.unlink()
        except OSError as error:
            raise RunDirError(f"{path}, which is written again, cannot be deleted: {error_reason(error)}") from error
    recorded = {row["step"] for row in read_metrics(run.metrics.path) if not is_evaluation(row)}
    lost = missing_steps(recorded, step)
    gap = f"{run.metrics.path.name} lacks the metrics of {lost}: they are lost, and the curves have a gap there"
    return [*([note] if note else []), *([arrivals] if arrivals else []), *([gap] if lost else [])]


def missing_steps(recorded: Collection[int], last: int) -> str:
    """The steps from 1 to ``last`` that are not ``recorded``: ``step 3``, or ``steps 3, 7–9``; empty without any."""
    known = [0, *sorted(step for step in set(recorded) if 0 < step <= last), last + 1]
    gaps = [(before + 1, after - 1) for before, after in pairwise(known) if after > before + 1]
    shown = [str(first) if first == end else f"{first}–{end}" for first, end in gaps[:SHOWN_GAPS]]
    more = f" and {len(gaps) - SHOWN_GAPS} more gaps" if len(gaps) > SHOWN_GAPS else ""
    noun = "step" if len(gaps) == 1 and gaps[0][0] == gaps[0][1] else "steps"
    return f"{noun} {', '.join(shown)}{more}" if gaps else ""


def last_metrics(folder: Path) -> dict[str, Any]:
    """The metrics of a run's last step, also if it was taken before the run was resumed."""
    path = folder / METRICS
    rows = reversed(read_metrics(path) if path.exists() else [])
    last = (row for row in rows if not any(name.startswith(EVAL_PREFIX) for name in row))
    return {name: value for name, value in next(last, {}).items() if name != "step"}


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that can be drawn."""
    numbers = {name: value for name, value in metrics.items() if value is not None and not isinstance(value, str)}
    return {name: float(value) for name, value in numbers.items() if abs(value) <= MAX_FLOAT32}
