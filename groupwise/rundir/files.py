"""Files that are either whole or not there.

A file is written under another name, flushed to the disk and renamed into place; a folder likewise, with a manifest of
its files' hashes written last. Whoever reads therefore sees the old content or the new, never a part of it, also after
a crash or on a full disk. `verify_manifest` finds what was damaged afterwards.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.errors import CheckpointError, RunDirError

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
UNFINISHED = ".unfinished-"


def write_bytes(path: str | Path, data: bytes) -> None:
    """Put ``data`` into the file at ``path``, all of it or none."""
    path = Path(path)
    with _replacing(path) as unfinished, open(unfinished, "wb") as file:
        file.write(data)


def write_json(path: str | Path, value: Any) -> None:
    """Write ``value`` as JSON. NaN and infinities are refused: they are no JSON, and other readers choke on them."""
    try:
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be written as JSON: {error}") from error
    write_bytes(path, (text + "\n").encode())


def read_json(path: str | Path) -> Any:
    """The value in a JSON file; an error that names the file where it is missing or damaged."""
    try:
        return json.loads(Path(path).read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {reason_of(error)}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged, it holds no valid JSON: {error}") from error


def write_csv(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """A column for every name, in the order in which they appear; what a row has not, or is None, is an empty cell."""
    rows = list(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_bytes(path, text.getvalue().encode())


def write_safetensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write named tensors in the safetensors format, which anyone can load without running code."""
    from safetensors.torch import save_file

    path = Path(path)
    whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with _replacing(path) as unfinished:
        save_file(whole, unfinished, metadata=dict(metadata or {"format": "pt"}))


def write_manifest(folder: str | Path) -> dict[str, Any]:
    """Write the size and SHA-256 of every file below ``folder`` into its ``manifest.json``."""
    folder = Path(folder)
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST and not path.name.startswith(UNFINISHED)
    }
    manifest = {"version": MANIFEST_VERSION, "files": files}
    write_json(folder / MANIFEST, manifest)
    return manifest


def verify_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of ``folder``, once every file in it is there with the right size and hash.

    Anything else is a CheckpointError that lists what is missing or damaged.
    """
    folder = Path(folder)
    if not (folder / MANIFEST).exists():
        raise CheckpointError(f"{folder} has no {MANIFEST}: it is not a finished checkpoint")
    manifest = read_json(folder / MANIFEST)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise CheckpointError(f"{folder / MANIFEST} is damaged: it lists no files")
    if manifest.get("version") != MANIFEST_VERSION:
        raise CheckpointError(
            f"{folder / MANIFEST} has version {manifest.get('version')!r}; this groupwise reads {MANIFEST_VERSION}"
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
        raise CheckpointError(f"{folder} is damaged: {'; '.join(problems)}. Use an earlier checkpoint or write it anew")
    return manifest


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """A folder to fill: at the end it appears at ``path`` with its manifest; after an error nothing is left of it."""
    path = Path(path)
    if path.exists():
        raise RunDirError(f"{path} exists already; a finished folder is never written over")
    unfinished = _unfinished(path)
    try:
        with _reported(path):
            unfinished.mkdir(parents=True)
            yield unfinished
            write_manifest(unfinished)
            for file in unfinished.rglob("*"):
                _flush(file)
            _flush(unfinished)
            os.rename(unfinished, path)
            _flush(path.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def remove_leftovers(folder: str | Path) -> list[str]:
    """Delete what a killed process left half-written below ``folder``; its names. Only its owner may call this."""
    leftovers = [path for path in Path(folder).rglob(f"{UNFINISHED}*") if path.exists()]
    for path in leftovers:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return sorted(path.name for path in leftovers)


def reason_of(error: Exception) -> str:
    """Why the system refused, in words."""
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        path = Path(error.filename)
        in_the_way = next((place for place in (path, *path.parents) if place.is_file()), path)
        return f"{in_the_way} is a file, not a folder"
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    unfinished = _unfinished(path)
    try:
        with _reported(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield unfinished
            _flush(unfinished)
            os.replace(unfinished, path)
            _flush(path.parent)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    """Say in plain words which file could not be written, and that nothing was lost."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} could not be written: {reason_of(error)}. What was there before is untouched; make room or choose "
            "another folder, then go on"
        ) from error


def _unfinished(path: Path) -> Path:
    return path.with_name(f"{UNFINISHED}{uuid.uuid4().hex[:8]}-{path.name}")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open folders; it writes names through
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
