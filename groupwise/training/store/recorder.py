"""What a run leaves behind to look at: metrics and every rollout, and whoever watches.

The run's own files (``metrics.jsonl``, ``rollouts/step-000012.parquet``) are the record: if one of them cannot be
written, the run is told. TensorBoard and Weights & Biases only watch: one that fails is named once, is left out from
then on, and never stops the run.
"""

from __future__ import annotations

import re
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from groupwise.errors import MissingExtraError, RunDirError
from groupwise.rundir import RunDir, read_json
from groupwise.rundir.files import reason_of
from groupwise.training.store.rollout_files import ROLLOUTS, kinds_so_far, rollout_files, write_rollouts

if TYPE_CHECKING:
    pass

Value = float | int | None
Say = Callable[[str], None]

TENSORBOARD = "tensorboard"
WANDB = "wandb.json"
EVALUATION = "eval/"
PREFERRED, LIKELIER = "preference_accuracy", "preference_logp_accuracy"  # what held-out pairs are measured by


LARGEST = 3.4028234e38  # TensorBoard keeps 32 bits of a number
FLUSH_SECONDS = 5.0


def _say_on_stderr(text: str) -> None:
    sys.stderr.write(f"groupwise: {text}\n")


class MetricSink(Protocol):
    """Somebody outside who gets the same numbers."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Recorder:
    """Writes what happens in a run. Without ``rollouts`` those files are left out; ``wandb`` names a project.

    A run that goes on after a checkpoint calls `rewind` first and says by ``resumed_at`` after which step it resumes:
    then TensorBoard forgets what came later too, and W&B continues the same run (steps done twice keep their first
    values there). ``settings`` is the recipe, for W&B; ``say`` gets a sentence when a watcher is missing or fails.
    """

    def __init__(
        self,
        run: RunDir,
        *,
        rollouts: bool = True,
        tensorboard: bool = True,
        wandb: str | None = None,
        settings: Mapping[str, Any] | None = None,
        resumed_at: int | None = None,
        say: Say = _say_on_stderr,
    ) -> None:
        self._run = run
        self._say = say
        self._keep_rollouts = rollouts
        self._kinds: dict[str, str] | None = None  # of the columns that reward functions add
        self._watchers: dict[str, MetricSink] = {}
        if wandb:
            self._watch("Weights & Biases", lambda: WeightsAndBiases(run, wandb, settings or {}))
        if tensorboard:
            folder, purge_step = run.path / TENSORBOARD, None if resumed_at is None else resumed_at + 1
            try:
                self._watch("TensorBoard", lambda: TensorBoard(folder, purge_step))
            except MissingExtraError:
                say("TensorBoard events are not written: for them, pip install 'groupwise[tensorboard]'")

    def step(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Record a training step's metrics."""
        self._run.metrics.record(step, metrics)
        self._tell(step, metrics)

    def evaluation(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Record an evaluation after ``step`` (0: before the first); the names get the prefix ``eval/``."""
        self.step(step, {_evaluation_name(name): value for name, value in metrics.items()})

    def rollouts(self, step: int, table: Mapping[str, Sequence[Any]]) -> None:
        """Write a step's samples down, where the run is told to keep them."""
        if not self._keep_rollouts:
            return
        folder = self._run.path / ROLLOUTS
        if self._kinds is None:
            self._kinds = kinds_so_far(folder)
        write_rollouts(folder, step, table, self._kinds)

    def close(self) -> None:
        """Finish the watchers' files. The run folder stays open: it belongs to whoever opened it."""
        for name, watcher in list(self._watchers.items()):
            self._protected(name, watcher.close)
        self._watchers.clear()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _watch(self, name: str, make: Callable[[], MetricSink]) -> None:
        try:
            self._watchers[name] = make()
        except MissingExtraError:
            raise
        except Exception as error:
            self._say(f"{name} gets no metrics: {_told(error)}. The run goes on; metrics.jsonl has them all")

    def _tell(self, step: int, metrics: Mapping[str, Value]) -> None:
        numbers = _numbers(metrics)
        for name, watcher in list(self._watchers.items()):
            self._protected(name, partial(watcher.write, step, numbers))

    def _protected(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            failed = self._watchers.pop(name)
            with suppress(Exception):  # it has failed already; what it holds open is let go
                failed.close()
            self._say(f"{name} gets no more metrics: {_told(error)}. The run goes on; metrics.jsonl has them all")


class TensorBoard:
    """An event file that TensorBoard reads.

    It is written by tensorboardX's RecordWriter, not by its SummaryWriter: that one hands events to a thread through a
    bounded queue, and when the disk is full the thread dies and the training run waits on the queue for ever.
    """

    def __init__(self, folder: Path, purge_step: int | None) -> None:
        try:
            from tensorboardX import RecordWriter
            from tensorboardX.proto import event_pb2, summary_pb2
        except ImportError as error:
            raise MissingExtraError("writing TensorBoard events", "tensorboardX", "tensorboard") from error
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        folder.mkdir(parents=True, exist_ok=True)
        # Viewers read the files in the order of their names, and two runs may start within one second.
        number = sum(1 for _ in folder.glob("events.out.tfevents.*"))
        name = f"events.out.tfevents.{int(time.time()):010d}.{number:04d}.{socket.gethostname()}"
        self._file = RecordWriter(str(folder / name))
        self._flushed = time.monotonic()
        try:
            self._write(file_version="brain.Event:2")
            if purge_step is not None:
                start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
                self._write(step=purge_step, session_log=start)
            self._file.flush()
        except OSError:
            with suppress(OSError):
                self._file.close()
            raise

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
        self._write(step=step, summary=self._summary(value=values))
        if time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self._file.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        self._file.close()

    def _write(self, **fields: Any) -> None:
        self._file.write(self._event(wall_time=time.time(), **fields).SerializeToString())


class WeightsAndBiases:
    """A run on W&B. Its id is kept in the run folder, so that a resumed run goes on with the same one."""

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
            name=run.path.name,
            id=read_json(path)["id"],
            resume="allow",
            dir=str(run.path),
            config=dict(settings),
        )

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


def rewind(run: RunDir, step: int) -> None:
    """Forget what came after ``step``: later rows of metrics and later rollouts.

    TensorBoard's files are not touched; `Recorder` with ``resumed_at=step`` tells its viewers to forget.
    """
    run.metrics.rewind(step)
    for number, path in rollout_files(run.path / ROLLOUTS).items():
        if number > step:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise RunDirError(
                    f"{path}, of a step that is done again, cannot be deleted: {reason_of(error)}"
                ) from error


def is_share(metric: str) -> bool:
    """Whether a metric, by its name, is a share of things, to be shown in percent."""
    return bool(re.search(r"(^|[^a-z])(accuracy|share|rate|ratio|right|correct|pass)([^a-z]|$)", metric))


def _evaluation_name(name: str) -> str:
    return name if name.startswith(EVALUATION) else EVALUATION + name


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that a watcher can draw."""
    numbers = {name: value for name, value in metrics.items() if value is not None and not isinstance(value, str)}
    return {name: float(value) for name, value in numbers.items() if abs(value) <= LARGEST}


def _told(error: Exception) -> str:
    return " ".join((reason_of(error) or type(error).__name__).split()).rstrip(".")
