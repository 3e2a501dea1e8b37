"""Files that are either complete or absent.

A file is written under a temporary name, flushed to the disk and renamed into place. A folder is written the same way,
with a manifest of its files' hashes written last. So a reader sees the old content or the new, never a part of it, even
after a crash or on a full disk. `verify_manifest` detects later damage.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.errors import CheckpointError, RunDirError
from groupwise.text import error_reason

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
UNFINISHED = ".unfinished-"
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}  # as JSON holds them: in strings


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write ``data`` to the file at ``path``, atomically."""
    with _publishing(Path(path)) as unfinished:
        unfinished.write_bytes(data)


def write_json(path: str | Path, value: Any) -> None:
    """Write ``value`` as JSON. NaN and infinities become strings, see `as_json`; they never prevent a checkpoint."""
    try:
        text = json.dumps(as_json(value), indent=2, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RuntimeError) as error:  # a RecursionError too: it holds itself
        raise CheckpointError(f"{path} cannot be written as JSON: {error}") from error
    write_bytes(path, encode_json(text + "\n"))


def encode_json(text: str) -> bytes:
    """JSON as UTF-8. Half of a surrogate pair, which UTF-8 cannot hold, becomes JSON's own escape of it."""
    return text.encode(errors="backslashreplace")


def as_json(value: Any) -> Any:
    """The value with each number as JSON can hold it: NaN and infinities as the strings of `NOT_FINITE`, which
    ``float`` reads, and numbers of NumPy and tensors of one number as Python's."""
    if isinstance(value, Mapping):
        return {key: as_json(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(entry) for entry in value]
    if isinstance(value, (str, bool)) or value is None:
        return value
    if hasattr(value, "item") and getattr(value, "size", None) is not None:
        value = value.item()  # a ValueError or RuntimeError unless it is one number
    if isinstance(value, int) and abs(value) < 10**308:
        return value
    if isinstance(value, Real):
        try:
            number = float(value)
        except OverflowError:  # an integer or a fraction beyond the largest float
            number = math.inf if abs(value) == value else -math.inf
        if not math.isfinite(number):
            return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
        return number
    return value


def from_json(value: Any) -> Any:
    """The value with the strings of `NOT_FINITE` as numbers; for metrics, which have no other strings like them."""
    if isinstance(value, Mapping):
        return {key: from_json(entry) for key, entry in value.items()}
    return NOT_FINITE.get(value, value) if isinstance(value, str) else value


def read_json(path: str | Path) -> Any:
    """The value in a JSON file; a CheckpointError names the file if it is missing or damaged."""
    try:
        return json.loads(Path(path).read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error_reason(error)}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged, it holds no valid JSON: {error}") from error


def write_csv(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as CSV, with a column for every name in order of appearance; missing and None are empty cells."""
    rows = list(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_bytes(path, text.getvalue().encode(errors="backslashreplace"))


def write_safetensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write named tensors in the safetensors format."""
    from safetensors.torch import save_file

    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with _publishing(Path(path)) as unfinished:
        save_file(contiguous, unfinished, metadata=dict(metadata or {"format": "pt"}))


def write_manifest(folder: str | Path) -> None:
    """Write the size and SHA-256 of every file below ``folder`` into its ``manifest.json``."""
    folder = Path(folder)
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST and not path.name.startswith(UNFINISHED)
    }
    write_json(folder / MANIFEST, {"version": MANIFEST_VERSION, "files": files})


def verify_manifest(folder: str | Path) -> dict[str, Any]:
    """Check that every file in the manifest of ``folder`` exists with the right size and hash; return the manifest.

    Otherwise a CheckpointError lists what is missing or damaged.
    """
    folder = Path(folder)
    if not (folder / MANIFEST).exists():
        raise CheckpointError(f"{folder} has no {MANIFEST}: it is not a finished checkpoint")
    manifest = read_json(folder / MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("version") != MANIFEST_VERSION:
        raise CheckpointError(
            f"{folder / MANIFEST} does not have version {MANIFEST_VERSION}, which this groupwise needs"
        )
    problems = []
    for name, facts in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size != facts["bytes"]:
            problems.append(f"{name} has {path.stat().st_size} bytes instead of {facts['bytes']}")
        elif _sha256(path) != facts["sha256"]:
            problems.append(f"{name} has been changed (its SHA-256 differs)")
    if problems:
        raise CheckpointError(f"{folder} is damaged: {'; '.join(problems)}. Use an earlier checkpoint")
    return manifest


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """A folder to fill. At the end it appears at ``path`` with its manifest; after an error nothing is left of it."""
    path = Path(path)
    if path.exists():
        raise RunDirError(f"{path} exists already; a finished folder is never overwritten")
    with _publishing(path) as unfinished:
        unfinished.mkdir()
        yield unfinished
        write_manifest(unfinished)


def remove_leftovers(folder: str | Path) -> None:
    """Delete unfinished files and folders of a killed process. Only the process that holds the lock may call this."""
    for path in list(Path(folder).rglob(f"{UNFINISHED}*")):
        _remove(path)


@contextmanager
def _publishing(path: Path) -> Iterator[Path]:
    """A temporary path to write a file or a folder to. At the end it becomes ``path``; after an error it is removed."""
    from safetensors import SafetensorError

    unfinished = path.with_name(f"{UNFINISHED}{uuid.uuid4().hex[:8]}-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield unfinished
        entries = (*unfinished.rglob("*"), unfinished)
        _set_usual_mode([entry for entry in entries if entry.suffix == ".safetensors"], path.parent)
        for entry in entries:
            _flush(entry)
        os.replace(unfinished, path)
        _flush(path.parent)
    except (OSError, SafetensorError) as error:
        _remove(unfinished)
        raise CheckpointError(
            f"{path} could not be written: {error_reason(error)}. The previous content is untouched; make room or "
            "choose another folder"
        ) from error
    except BaseException:
        _remove(unfinished)
        raise


def _set_usual_mode(files: Sequence[Path], folder: Path) -> None:
    """Give files the permissions of any new file in ``folder``: safetensors lets only the owner read what it writes.

    They are those of a file created for this, because the umask cannot be read without changing it for all threads.
    """
    if not files:
        return
    new = folder / f"{UNFINISHED}{uuid.uuid4().hex[:8]}-mode"
    try:
        new.touch(exist_ok=False)
        mode = stat.S_IMODE(new.stat().st_mode)
    finally:
        new.unlink(missing_ok=True)
    for file in files:
        file.chmod(mode)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink()


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open folders; it writes names at once
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
