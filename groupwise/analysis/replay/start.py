"""Where a replay begins: the nearest earlier checkpoint of a run, in a copy of the run that shares its files."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from groupwise.analysis.run_reader import RunReader
from groupwise.analysis.step_settings import is_setting
from groupwise.errors import CheckpointError, ConfigError, InputError, RunDirError
from groupwise.paths import kind_of
from groupwise.rundir.run import MARKER, METRICS
from groupwise.text import error_reason, plural
from groupwise.training.store.arrivals import ARRIVALS
from groupwise.training.store.changes import RESUMED
from groupwise.training.store.checkpoint import MASTERS, checkpoint_name, verify_checkpoint
from groupwise.training.store.run_folder import INPUTS, RECIPE, VERSIONS
from groupwise.training.store.sharded import SHARDS

COPIED = (MARKER, RECIPE, INPUTS, VERSIONS, METRICS, RESUMED, ARRIVALS)


def find_start(reader: RunReader, step: int, *, from_start: bool = False) -> int | None:
    """The step of the nearest earlier checkpoint that is intact; None for the start of the run."""
    total = reader.total_steps
    if step < 1 or (total is not None and step > total):
        raise InputError(f"{reader.path} has {plural(total or 0, 'step')}; --step must be one of them, got {step}")
    resumable = [step for step, folder in sorted(reader.checkpoints.items()) if _is_resumable(folder)]
    problems: list[str] = []
    for start in reversed([number for number in resumable if number < step]):
        try:
            verify_checkpoint(reader.checkpoints[start])
        except (CheckpointError, OSError, KeyError) as error:
            resumable.remove(start)
            problems.append(str(error))
            continue
        if (refusal := _changed_inputs(reader, start, step)) is not None:
            raise ConfigError(refusal)
        return start
    if from_start:
        return None
    raise CheckpointError(_no_checkpoint(reader, step, resumable, problems))


def _is_resumable(folder: Path) -> bool:
    return (folder / MASTERS).exists() or (folder / SHARDS).is_dir()


def _changed_inputs(reader: RunReader, start: int, step: int) -> str | None:
    """Why a run that was resumed with other inputs cannot be run again from a checkpoint before that."""
    for entry in reader.changes:
        names = [name for name, values in entry["changed"].items() if not is_setting(name, values)]
        if start < entry["step"] < step and names:
            return (
                f"{reader.path} was resumed after step {entry['step']} with other inputs ({', '.join(names)}), so the "
                f"steps before that cannot be run again; replay a step from a later checkpoint"
            )
    return None


def _no_checkpoint(reader: RunReader, step: int, resumable: Sequence[int], problems: Sequence[str]) -> str:
    """The sentence about a step before which no checkpoint is kept: what can be replayed, and what keeps more."""
    settings = reader.settings
    every, keep = settings.get("run.checkpoint_every"), settings.get("run.keep_checkpoints")
    damaged = f" ({'; '.join(problems)})" if problems else ""
    if settings.get("run.resumable") is False:
        return f"{reader.path} keeps only policies (run.resumable is false), so no step of it can be replayed{damaged}"
    end = f" to {reader.total_steps}" if reader.total_steps is not None else " on"
    can = f"steps {resumable[0] + 1}{end} can be replayed" if resumable else "no step can be replayed"
    saves = f"every {every} steps (run.checkpoint_every)" if every else "at its end only (run.checkpoint_every is 0)"
    return (
        f"{reader.path} has no checkpoint before step {step}{damaged}: {can}. The run saves {saves} and keeps the last "
        f"{keep} and the best; a higher run.keep_checkpoints keeps more. With --from-start, the steps before it are "
        "run again from the beginning"
    )


@contextmanager
def workspace(keep: str | Path | None) -> Iterator[Path]:
    """A folder for the replays: a temporary one, or a new one that is kept."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="groupwise-replay-", ignore_cleanup_errors=True) as temporary:
            yield Path(temporary)
        return
    folder = Path(keep)
    if kind_of(folder, RunDirError) is not None and (not folder.is_dir() or any(folder.iterdir())):
        raise RunDirError(f"{folder} exists and is not an empty folder; choose another one for --keep")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirError(
            f"{folder} cannot be created: {error_reason(error)}; choose another one for --keep"
        ) from error
    yield folder


def copy_run(reader: RunReader, folder: Path, start: int | None) -> None:
    """A copy of a run that can be resumed from a checkpoint; None: one that starts at the beginning."""
    folder.mkdir()
    if start is None:
        return
    for name in COPIED:
        if (reader.path / name).exists():
            shutil.copyfile(reader.path / name, folder / name)
    source = reader.path / checkpoint_name(start)
    try:
        for path in sorted(source.rglob("*")):
            target = folder / checkpoint_name(start) / path.relative_to(source)
            if path.is_dir():
                target.mkdir(parents=True, exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                _link(path, target)
    except OSError as error:
        raise CheckpointError(
            f"{source} cannot be copied to {folder}: {error_reason(error)}. If the run has just deleted it "
            "(run.keep_checkpoints), try again; if there is no room, choose another folder with --keep"
        ) from error


def _link(path: Path, target: Path) -> None:
    """A hard link, which stays when a running run deletes the checkpoint; a copy on another file system."""
    with suppress(OSError):
        os.link(path, target)
        return
    shutil.copyfile(path, target)
