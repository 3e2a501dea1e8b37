"""A run folder: one process writes to it at a time, and nothing is overwritten by accident.

Example::

    with RunDir.create("runs/quiz") as run:
        run.write_json("config.json", config)
        run.metrics.record(1, {"reward": 0.4})
        with run.folder("checkpoint-1") as folder:
            write_safetensors(folder / "model.safetensors", weights)

The operating system releases the lock of a killed process.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise import __version__
from groupwise.errors import CheckpointError, InputError, RunDirError
from groupwise.paths import kind_of, path_reason, show_path
from groupwise.rundir.files import (
    NOT_IN_PLACE,
    atomic_folder,
    delete_folder,
    is_still,
    read_json,
    remove_leftovers,
    same_folder,
    write_json,
)
from groupwise.rundir.metrics import MetricsRecorder
from groupwise.text import error_reason

if TYPE_CHECKING:
    from filelock import FileLock

MARKER = "run.json"
FORMAT = 1
LOCK = ".lock"
HOLDER = ".holder.json"
METRICS = "metrics.jsonl"
CLOCK_CHANGE = 3600.0  # seconds by which a clock may have been set since a process was started


def new_run_path(root: str | Path, name: str) -> Path:
    """A new path below ``root``: date, time and ``name``, with a number if that exists already."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise InputError(f"a run's name may hold letters, digits, '.', '_' and '-', got {name!r}")
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    path, number = Path(root) / stem, 1
    while path.exists():
        number += 1
        path = Path(root) / f"{stem}-{number}"
    return path


def check_unused(path: Path, *, beside_other_files: bool = False) -> None:
    """Raise an error if a run cannot be started in this folder because it holds a run or, unless that is allowed, other
    files."""
    try:
        names = {entry.name for entry in path.iterdir()} if kind_of(path, RunDirError) else set()
    except OSError as error:
        raise RunDirError(f"{path} cannot be used: {error_reason(error)}; choose another folder") from error
    if MARKER in names:
        raise RunDirError(
            f"{path} already holds a run: continue it (--resume, in Python resume=True), replace it (--overwrite, "
            "overwrite=True), or choose another folder"
        )
    if names - {LOCK, HOLDER} and not beside_other_files:
        raise RunDirError(f"{path} is not empty and holds no run; choose a new folder")


def holds_run(path: Path) -> bool:
    """Whether a folder holds a run; an error if it cannot be looked into."""
    return kind_of(path / MARKER, RunDirError) is not None


def check_is_run(path: Path) -> None:
    """Raise an error if the folder holds no run."""
    if not holds_run(path):
        raise RunDirError(f"{path} holds no run (there is no {MARKER} in it): nothing to resume")


class RunDir:
    """An open run folder, locked until `close`. Open one with `create` or `resume`."""

    def __init__(self, path: Path, *, new: bool, new_parents: Sequence[Path] = ()) -> None:
        self._open, self._lock = ExitStack(), _acquire(path)
        self._new_parents = new_parents  # created for this run, innermost first
        try:
            self.path = path
            self._lock_file = os.stat(path / LOCK)
            if new:
                _write_marker(path)
            else:
                _check_marker(path)
                remove_leftovers(path)
            self.metrics = MetricsRecorder(path / METRICS, resume=not new)
        except BaseException:
            self._open.close()
            self._lock.release()
            raise

    @property
    def path(self) -> Path:
        return self._path

    @path.setter
    def path(self, path: Path) -> None:
        """Set by who moves the folder on purpose."""
        self._open.close()
        self._path, self._is_same = path, self._open.enter_context(same_folder(path))

    def check_in_place(self) -> None:
        """Raise an error if the folder was deleted, moved or replaced, or if another process has taken it over."""
        if not self._is_same():
            raise RunDirError(f"{self.path} {NOT_IN_PLACE}")
        if not is_still(self._lock_file, self.path / LOCK):  # it was deleted: another process may have locked a new one
            released, self._lock = self._lock, _acquire(self.path)
            released.release()
            self._lock_file = os.stat(self.path / LOCK)

    @classmethod
    def create(cls, path: str | Path, *, overwrite: bool = False, beside_other_files: bool = False) -> RunDir:
        """Start a run in a new or empty folder; with ``overwrite`` an existing run is deleted first.

        beside_other_files: the folder may hold other files, but no run.
        """
        path = Path(path)
        if overwrite and holds_run(path):
            cls.resume(path).close()  # an error while another process has the lock
            shutil.rmtree(path)
        new_parents = [parent for parent in path.parents if not os.path.exists(parent)]
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            reason = f"{show_path(path)} cannot be created: {path_reason(error)}"
            raise RunDirError(f"{reason}; choose another folder") from error
        check_unused(path, beside_other_files=beside_other_files)
        return cls(path, new=True, new_parents=new_parents)

    @classmethod
    def resume(cls, path: str | Path) -> RunDir:
        """Open the folder of an existing run; unfinished files of a killed process are removed."""
        path = Path(path)
        check_is_run(path)
        return cls(path, new=False)

    def write_json(self, name: str, value: Any) -> None:
        self.check_in_place()
        write_json(self.path / name, value)

    @contextmanager
    def folder(self, name: str) -> Iterator[Path]:
        """A folder of this run that appears, with its manifest, once it is complete. See `atomic_folder`."""
        self.check_in_place()
        try:
            with atomic_folder(self.path / name) as unfinished:
                yield unfinished
        except CheckpointError:
            self.check_in_place()  # the run's folder is gone, which is the reason
            raise

    def close(self) -> None:
        self.metrics.close()
        with suppress(OSError):
            if self._is_same() and is_still(self._lock_file, self.path / LOCK):
                (self.path / HOLDER).unlink()
        self._open.close()
        self._lock.release()

    def clear(self) -> None:
        """Delete everything in the folder, to start a run again in it."""
        self.metrics.close()
        for entry in list(self.path.iterdir()):
            if entry.name not in (LOCK, HOLDER):
                delete_folder(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        _write_marker(self.path)
        self.metrics = MetricsRecorder(self.path / METRICS)

    def discard(self) -> None:
        """Close the folder; delete it, and what was created for it above, if nothing has been written to it yet."""
        self.metrics.close()
        unused = (MARKER, LOCK, HOLDER, *([METRICS] if self.metrics.last_step is None else []))
        empty = self._is_same() and all(entry.name in unused for entry in self.path.iterdir())
        if empty:
            (self.path / MARKER).unlink(missing_ok=True)
        self.close()
        if empty:
            shutil.rmtree(self.path, ignore_errors=True)
            with suppress(OSError):  # another run has begun in it
                for parent in self._new_parents:
                    parent.rmdir()

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RunView(RunDir):
    """The folder of a run that another process of the run has opened and writes to: this one writes nothing."""

    def __init__(self, path: Path) -> None:
        self._open, self.path = ExitStack(), path

    def check_in_place(self) -> None:
        """The process that writes checks it."""

    def write_json(self, name: str, value: Any) -> None:
        """The process that writes does that."""

    def close(self) -> None:
        self._open.close()

    def discard(self) -> None:
        self.close()


def _write_marker(path: Path) -> None:
    write_json(path / MARKER, {"format": FORMAT, "groupwise": __version__, "created": _timestamp()})


def _check_marker(path: Path) -> None:
    marker = read_json(path / MARKER)
    if not isinstance(marker, dict) or marker.get("format") != FORMAT:
        raise RunDirError(
            f"{path / MARKER} does not have format {FORMAT}, which this groupwise needs; restore it from a copy, or "
            "start a new run"
        )


def _acquire(path: Path) -> FileLock:
    from filelock import FileLock, Timeout

    lock = FileLock(path / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise RunDirError(
            f"{path} is in use by {_holder(path)}: wait for it, stop it, or choose another folder"
        ) from None
    except OSError as error:
        raise RunDirError(f"{path} cannot be locked: {error_reason(error)}") from error
    write_json(path / HOLDER, {"pid": os.getpid(), "host": socket.gethostname(), "since": _timestamp()})
    return lock


def _holder(path: Path) -> str:
    try:
        holder = read_json(path / HOLDER)
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (CheckpointError, KeyError, TypeError):
        return "another process"


def is_held(holder: Mapping[str, Any]) -> bool | None:
    """Whether the process that opened the run still lives; None if that cannot be known from this machine.

    A process that is younger than the entry has been given the number of the dead one.
    """
    if not holder:
        return False
    pid, host = holder.get("pid"), holder.get("host")
    if type(pid) is not int or pid < 1 or host != socket.gethostname() or os.name == "nt":
        return None  # on Windows os.kill would end the process
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError, ValueError):
        return False
    except PermissionError:
        pass  # it is another user's
    with suppress(OSError, ValueError, TypeError, KeyError, IndexError, StopIteration):
        return _started(pid) <= datetime.fromisoformat(holder["since"]).timestamp() + CLOCK_CHANGE
    return True


def _started(pid: int) -> float:
    """When a process was started, in seconds of the clock; an error where there is no /proc."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")


def package_versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of groupwise, Python and those of ``packages`` that are installed, and the kind of machine."""
    versions = {"groupwise": __version__, "python": platform.python_version(), "machine": platform.machine()}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _timestamp() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
