"""What a run leaves behind to look at: metrics, every rollout, and a picture of the curves.

The run's own files (``metrics.jsonl``, ``rollouts/step-000012.parquet``) are the record: if one of them cannot be
written, the run is told. TensorBoard and Weights & Biases only watch: one that fails is named once, is left out from
then on, and never stops the run.
"""

from __future__ import annotations

import io
import math
import re
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from groupwise.errors import CheckpointError, InputError, MissingExtraError, RunDirError
from groupwise.rundir import RunDir, metric_column, read_json, read_metrics, write_bytes
from groupwise.rundir.files import reason_of

if TYPE_CHECKING:
    import pyarrow

Value = float | int | None
Say = Callable[[str], None]

ROLLOUTS = "rollouts"
TENSORBOARD = "tensorboard"
WANDB = "wandb.json"
CURVES = "curves.png"
EVALUATION = "eval/"

# The columns of a rollout file that groupwise fills, in their order, with Arrow's names of their types. They are told
# to Arrow, not guessed from the values: a column that is empty in one step must not change its type there.
COLUMNS = {
    "step": "int64",
    "prompt_number": "int64",
    "row": "int64",
    "sample": "int64",
    "group": "int64",
    "prompt": "string",
    "completion": "string",
    "reward": "double",
    "reward/": "double",  # one for each reward function
    "advantage": "double",
    "teaches": "bool",
    "silenced": "string",
    "prompt_tokens": "int64",
    "completion_tokens": "int64",
    "stop_reason": "string",
}
WIDENING = ("bool", "double", "string")  # of a column that a reward function adds: each can hold the ones before it

LARGEST = 3.4028234e38  # TensorBoard keeps 32 bits of a number
FLUSH_SECONDS = 5.0
NICE = (1, 2, 5, 10)  # between the ticks of an axis
SMOOTHED_SHARE = 0.05  # of a curve's points, on each side, go into a point of its smoothed line


def _say_on_stderr(text: str) -> None:
    sys.stderr.write(f"groupwise: {text}\n")


class Watcher(Protocol):
    """Somebody outside who gets the same numbers."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Records:
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
        self._watchers: dict[str, Watcher] = {}
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
        """Write one row per sample, whole or not at all. See COLUMNS; other columns are kept as they are given.

        In those, numbers, booleans and strings stay what they are, anything else becomes its text; numbers are all
        floats, so that a column does not change its type from one step to the next. NaN is written as a missing value.
        """
        if not self._keep_rollouts:
            return
        import pyarrow
        import pyarrow.parquet

        if self._kinds is None:
            self._kinds = _kinds_so_far(self._run.path / ROLLOUTS)
        rows = _arrow_table(table, self._kinds)
        buffer = io.BytesIO()
        pyarrow.parquet.write_table(rows, buffer, compression="zstd")
        write_bytes(_rollout_path(self._run.path / ROLLOUTS, step), buffer.getvalue())

    def close(self) -> None:
        """Finish the watchers' files. The run folder stays open: it belongs to whoever opened it."""
        for name, watcher in list(self._watchers.items()):
            self._protected(name, watcher.close)
        self._watchers.clear()

    def __enter__(self) -> Records:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _watch(self, name: str, make: Callable[[], Watcher]) -> None:
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

    TensorBoard's files are not touched; `Records` with ``resumed_at=step`` tells its viewers to forget.
    """
    run.metrics.rewind(step)
    for number, path in _rollout_files(run.path / ROLLOUTS).items():
        if number > step:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise RunDirError(
                    f"{path}, of a step that is done again, cannot be deleted: {reason_of(error)}"
                ) from error


def read_rollouts(folder: Path, steps: Iterable[int] | None = None) -> pyarrow.Table:
    """The rollouts of all steps, or of the given ones, as one table. ``folder`` is the run's or its rollouts'."""
    import pyarrow
    import pyarrow.parquet

    folder = Path(folder)
    folder = folder / ROLLOUTS if (folder / ROLLOUTS).is_dir() else folder
    files = _rollout_files(folder)
    if not files:
        raise RunDirError(f"{folder} holds no rollouts (step-….parquet); was the run told to keep them?")
    wanted = sorted(files) if steps is None else list(dict.fromkeys(steps))
    missing = [step for step in wanted if step not in files]
    if missing:
        raise RunDirError(
            f"{folder} has no rollouts of step {', '.join(map(str, missing))}; "
            f"it has {len(files)} steps between {min(files)} and {max(files)}"
        )
    if not wanted:
        raise InputError("read_rollouts was asked for no step at all; leave out steps to read every one")
    tables = []
    for step in wanted:
        try:
            tables.append(pyarrow.parquet.read_table(files[step]))
        except (pyarrow.ArrowException, OSError) as error:
            raise CheckpointError(f"{files[step]} is damaged: {error}. Remove it, or restore it from a copy") from error
    return pyarrow.concat_tables(_same_types(tables), promote_options="default")


def draw_curves(run_folder: Path, *, metric: str | None, goal: float | None = None) -> Path | None:
    """Draw a run's curves into its ``curves.png``: reward, ``metric`` on held-out rows, entropy and KL, lengths.

    What was not recorded is left out. None without matplotlib, or when there is nothing to draw.
    """
    from groupwise.plots import COLOURS, new_figure, save_figure

    folder = Path(run_folder)
    rows = read_metrics(folder / "metrics.jsonl")
    blue, orange, green, pink = COLOURS[:4]
    held_out = f"{EVALUATION}{metric}"
    cells = [
        [("reward while training", "reward", blue)],
        [(_held_out_title(metric or ""), held_out, green)],
        [("entropy", "entropy", orange), ("KL to the reference", "kl", pink)],
        [
            ("tokens in an answer", "completions/mean_length", blue),
            ("answers cut off", "completions/clipped_ratio", orange),
        ],
    ]
    curves = {name: _finite(rows, name) for cell in cells for _, name, _ in cell}
    cells = [[panel for panel in cell if curves[panel[1]][0]] for cell in cells]
    cells = [cell for cell in cells if cell]
    if not cells:
        return None
    columns, lines = min(2, len(cells)), math.ceil(len(cells) / 2)
    try:
        figure = new_figure(5.4 * columns, 3.3 * lines)
    except MissingExtraError:
        return None
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    grid = figure.add_gridspec(2 * lines, columns)  # a line of panels has two halves, for two small ones
    for number, cell in enumerate(cells):
        alone = number == len(cells) - 1 and number % 2 == 0
        across = slice(None) if alone else number % 2
        for position, (title, name, colour) in enumerate(cell):
            top = number // 2 * 2 + position
            axes = figure.add_subplot(grid[top : top + 3 - len(cell), across])
            share = is_share(name) and max(curves[name][1]) <= 1
            if name == held_out:
                _draw_held_out(axes, rows, name, colour, goal, share)
            else:
                _draw_smoothed(axes, *curves[name], colour)
            _finish_axes(axes, title, share, last=position == len(cell) - 1)
    save_figure(figure, folder / CURVES)
    return folder / CURVES


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


def _rollout_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.parquet"


def _rollout_files(folder: Path) -> dict[int, Path]:
    found = ((re.fullmatch(r"step-(\d+)\.parquet", path.name), path) for path in folder.glob("step-*.parquet"))
    return {int(match[1]): path for match, path in found if match}


def _arrow_table(table: Mapping[str, Sequence[Any]], kinds: dict[str, str]) -> pyarrow.Table:
    """The columns in their order, with types. ``kinds`` remembers the types of those that are not groupwise's own."""
    import pyarrow

    columns = {name: _plain(values) for name, values in table.items()}
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise InputError(f"the columns of the rollouts must be equally long, got {lengths}")
    order = list(COLUMNS)
    known = [name for name in columns if _own(name) in COLUMNS]
    arrays = {}
    for name in sorted(known, key=lambda name: order.index(_own(name))) + [n for n in columns if n not in known]:
        kind = COLUMNS.get(_own(name)) or _kind(columns[name], kinds.get(name))
        if name not in known and any(value is not None for value in columns[name]):
            kinds[name] = kind
        try:
            arrays[name] = pyarrow.array(_as(kind, columns[name]), pyarrow.type_for_alias(kind))
        except (pyarrow.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"the rollouts' column {name!r} must hold {kind} values: {error}") from error
    return pyarrow.table(arrays)


def _own(name: str) -> str:
    return "reward/" if name.startswith("reward/") else name


def _plain(values: Any) -> list[Any]:
    """A list of Python's own values, from a list, an array or a tensor."""
    values = values.tolist() if hasattr(values, "tolist") else list(values)
    return [value.item() if getattr(value, "shape", None) == () else value for value in values]


def _kind(values: list[Any], before: str | None) -> str:
    """The type of a column that a reward function added; never narrower than it was ``before``."""
    present = [value for value in values if value is not None]
    if not present:
        return before or "string"
    if all(isinstance(value, bool) for value in present):
        kind = "bool"
    else:
        kind = "double" if all(isinstance(value, (int, float)) for value in present) else "string"
    return max(kind, before or kind, key=WIDENING.index)


def _as(kind: str, values: list[Any]) -> list[Any]:
    if kind == "double":
        return [None if value is None or math.isnan(value) else float(value) for value in values]
    if kind == "string":  # a lone surrogate, which no file can hold, becomes a question mark
        return [None if value is None else str(value).encode("utf-8", "replace").decode() for value in values]
    broken = [value for value in values if isinstance(value, float) and not value.is_integer()]
    if broken:
        raise ValueError(f"{broken[0]} is no whole number")  # Arrow would cut it off without a word
    return values


def _kinds_so_far(folder: Path) -> dict[str, str]:
    """The types of the added columns when a run is resumed. Text tells nothing: an empty column is text as well."""
    import pyarrow.parquet

    files = _rollout_files(folder)
    try:
        newest = pyarrow.parquet.read_schema(files[max(files)]) if files else []
    except (pyarrow.ArrowException, OSError):
        return {}  # whoever reads the rollouts hears of the damage; writing can go on
    kinds = {field.name: str(field.type) for field in newest if _own(field.name) not in COLUMNS}
    return {name: kind for name, kind in kinds.items() if kind in WIDENING and kind != "string"}


def _same_types(tables: list[pyarrow.Table]) -> list[pyarrow.Table]:
    """The tables with one type per column: the widest that one of them has."""
    import pyarrow

    widest: dict[str, str] = {}
    for table in tables:
        for name, column in zip(table.column_names, table.columns, strict=True):
            kind = str(column.type)
            if kind in WIDENING and not (kind == "string" and column.null_count == len(column)):
                widest[name] = max(kind, widest.get(name, kind), key=WIDENING.index)
    for number, table in enumerate(tables):
        for position, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
            if str(column.type) != widest.get(name, str(column.type)):
                column = column.cast(pyarrow.type_for_alias(widest[name]))
                tables[number] = tables[number].set_column(position, name, column)
    return tables


def _finite(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    steps, values = metric_column(rows, name)
    kept = [
        (step, float(value))
        for step, value in zip(steps, values, strict=True)
        if isinstance(value, (int, float)) and math.isfinite(value)
    ]
    return [step for step, _ in kept], [value for _, value in kept]


def _held_out_title(metric: str) -> str:
    return "right on held-out questions" if "accuracy" in metric else f"{metric.replace('_', ' ')}, held out"


def _draw_smoothed(axes: Any, steps: list[int], values: list[float], colour: str) -> None:
    import numpy as np

    reach = int(len(values) * SMOOTHED_SHARE)
    if reach:
        axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.3)
    sums, at = np.concatenate([[0.0], np.cumsum(values)]), np.arange(len(values))
    first, end = np.maximum(at - reach, 0), np.minimum(at + reach + 1, len(values))
    smooth = (sums[end] - sums[first]) / (end - first)
    axes.plot(steps, smooth, color=colour, linewidth=2, marker="o" if len(steps) == 1 else None, markersize=4)


def _draw_held_out(
    axes: Any, rows: list[dict[str, Any]], name: str, colour: str, goal: float | None, share: bool
) -> None:
    steps, values = _finite(rows, name)
    low, high = (dict(zip(*_finite(rows, name + end), strict=True)) for end in ("_low", "_high"))
    band = [step for step in steps if step in low and step in high]
    axes.fill_between(band, [low[s] for s in band], [high[s] for s in band], color=colour, alpha=0.16, linewidth=0)
    axes.plot(steps, values, color=colour, linewidth=2, marker="o", markersize=4.5)
    if goal is not None:
        axes.axhline(goal, color="0.4", linewidth=1, linestyle=(0, (4, 3)))
        text = f"goal {_percent(goal)}" if share else f"goal {goal:g}"
        where = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        axes.annotate(text, (0, goal), (4, 3), fontsize=8, color="0.4", **where)


def _percent(value: float) -> str:
    return f"{round(100 * value, 6):g} %"


def _finish_axes(axes: Any, title: str, share: bool, last: bool) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_title(title, loc="left", fontsize=10)
    axes.tick_params(labelsize=8, labelbottom=last, color="0.6")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, steps=NICE))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=NICE))
    if share:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _percent(value)))
    if last:
        axes.set_xlabel("step", fontsize=9)
