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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.errors import CheckpointError, RunDirError
from groupwise.paths import FILE, FOLDER, MEGABYTE, kind_of, read_file
from groupwise.text import error_reason, excerpt, printable

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
UNFINISHED = ".unfinished-"
NOT_IN_PLACE = (
    "was deleted, moved or replaced during the run, so the run stops; restore the folder and continue with --resume, "
    "or start a new run"
)
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}  # as JSON holds them: in strings
FORMULA = tuple("=+-@\t\r\n＝＋－＠")  # a text that begins with one of these may be computed by a spreadsheet
LATER_STATE = "state_after_evaluation.json"  # added to a checkpoint that is finished, with a hash of its own
LOADED = (".safetensors", ".json", ".jinja", ".model", ".tiktoken")  # endings of files that a program reads
SHOWN = 10  # problems of a folder in an error message
LARGEST_JSON = 1024 * MEGABYTE


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write ``data`` to the file at ``path``, atomically."""
    with _publishing(Path(path)) as unfinished:
        unfinished.write_bytes(data)


def write_json(path: str | Path, value: Any) -> None:
    """Write ``value`` as JSON. NaN and infinities become strings, see `as_json`; they never prevent a checkpoint."""
    try:
        content = json_bytes(as_json(value), indent=2)
    except (TypeError, ValueError, RuntimeError) as error:  # a RecursionError too: it holds itself
        raise CheckpointError(f"{path} cannot be written as JSON: {error}") from error
    write_bytes(path, content + b"\n")


def json_bytes(value: Any, **options: Any) -> bytes:
    """A value as JSON in UTF-8. A lone surrogate, which UTF-8 does not have, becomes a JSON escape."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, **options).encode("utf-8", "backslashreplace")


def as_json(value: Any) -> Any:
    """The value with each number as JSON can hold it: NaN and infinities as the strings of `NOT_FINITE`, which
    ``float`` reads, and numbers of NumPy and tensors of one number as Python's."""
    if isinstance(value, (str, bool)) or value is None or (type(value) is float and math.isfinite(value)):
        return value  # most values, and the test for a mapping is slow
    if isinstance(value, Mapping):
        return {key: as_json(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(entry) for entry in value]
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
        return json.loads(read_file(path, CheckpointError, limit=LARGEST_JSON))
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise CheckpointError(f"{path} is damaged, it holds no valid JSON: {reason}") from error


def read_object(path: str | Path, **kinds: type) -> dict[str, Any]:
    """The object in a JSON file; a CheckpointError unless its values of these names have these types."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is damaged: it holds {type(value).__name__}, not an object")
    for name, kind in kinds.items():
        if not isinstance(value.get(name), kind) or (kind is int and isinstance(value[name], bool)):
            raise CheckpointError(f"{path} is damaged: its {name!r} is missing or not of type {kind.__name__}")
    return value


def set_aside(path: Path) -> Path:
    """Rename a damaged file, so that its name is free and nothing of it is lost; the new path."""
    number = 1
    while (other := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    try:
        return path.rename(other)
    except OSError as error:
        raise RunDirError(f"{path} is damaged and cannot be renamed: {error_reason(error)}") from error


def write_csv(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as CSV, with a column for every name in order of appearance; missing and None are empty cells.

    A text that a spreadsheet would compute, such as ``=1+1``, gets an apostrophe in front, and control characters are
    escaped; numbers stay as they are.
    """
    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_without_formula, names))
    writer.writerows([_without_formula(row.get(name)) for name in names] for row in rows)
    write_bytes(path, text.getvalue().encode("utf-8", "backslashreplace"))


def _without_formula(cell: Any) -> Any:
    if not isinstance(cell, str) or _is_number(cell):
        return cell
    return f"'{printable(cell)}" if cell.startswith(FORMULA) else printable(cell)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text == text.strip()  # float() ignores white space, such as a line break


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
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST and not path.name.startswith(UNFINISHED)
    }
    write_json(folder / MANIFEST, {"version": MANIFEST_VERSION, "files": files})


def verify_manifest(folder: str | Path, *, required: Iterable[str] = ()) -> dict[str, Any]:
    """Check that every file in the manifest of ``folder`` exists with the right size and hash; return the manifest.

    Otherwise a CheckpointError lists what is missing or damaged. A manifest must list the ``required`` files and every
    file that a program would load, as an omitted one could not be trusted, and may not name files outside the folder.
    """
    folder = Path(folder)
    if kind_of(folder / MANIFEST, CheckpointError) is None:
        raise CheckpointError(f"{folder} has no {MANIFEST}: it is not a finished checkpoint")
    manifest = read_json(folder / MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("version") != MANIFEST_VERSION:
        raise CheckpointError(
            f"{folder / MANIFEST} does not have version {MANIFEST_VERSION}, which this groupwise needs"
        )
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise CheckpointError(f"{folder / MANIFEST} is damaged: it has no table of files. Use an earlier checkpoint")
    problems = [f"{MANIFEST} does not list {name}" for name in required if name not in files]
    try:
        problems += [f"{MANIFEST} does not list {name}" for name in _loaded_files(folder, {*files, *required})]
        problems += filter(None, (_problem(folder, name, facts) for name, facts in files.items()))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error_reason(error)}") from error
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise CheckpointError(f"{folder} is damaged: {'; '.join(problems[:SHOWN])}{more}. Use an earlier checkpoint")
    return manifest


def _loaded_files(folder: Path, known: Collection[str]) -> list[str]:
    """The files below ``folder`` that a program would load, except the ``known`` ones and manifests."""
    found = (path for path in sorted(folder.rglob("*")) if path.suffix in LOADED and not path.is_dir())
    names = [path.relative_to(folder).as_posix() for path in found if not path.name.startswith(UNFINISHED)]
    return [name for name in names if name not in known and Path(name).name not in (MANIFEST, LATER_STATE)]


def _problem(folder: Path, name: str, facts: Any) -> str | None:
    """What is wrong with a file of a manifest; None if nothing is."""
    size, digest = (facts.get("bytes"), facts.get("sha256")) if isinstance(facts, dict) else (None, None)
    shown = name if len(name) <= 200 else excerpt(name, 200)
    if type(size) is not int or not isinstance(digest, str):
        return f"the size or the SHA-256 of {shown} is missing in {MANIFEST}"
    if not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        return f"{MANIFEST} names {shown}, which is not inside the folder"
    path = folder / name
    if not path.is_file():
        return f"{shown} is missing"
    if not path.resolve().is_relative_to(folder.resolve()):
        return f"{shown} is a link to a file outside the folder"
    if path.stat().st_size != size:
        return f"{shown} has {path.stat().st_size} bytes instead of {size}"
    if file_sha256(path) != digest:
        return f"{shown} has been changed (its SHA-256 differs)"
    return None


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """A folder to fill. At the end it appears at ``path`` with its manifest; after an error nothing is left of it."""
    path = Path(path)
    if path.exists():
        raise RunDirError(f"{path} exists already; a finished folder is never overwritten")
    with _publishing(path) as unfinished:
        unfinished.mkdir()
        with same_folder(unfinished) as is_same:
            yield unfinished
            if not is_same():  # a library may have created it again
                _remove(unfinished)
                with suppress(OSError):  # it is not empty
                    path.parent.rmdir()
                raise RunDirError(f"{path.parent} was deleted or moved while {path.name} was written to it")
        write_manifest(unfinished)


@contextmanager
def same_folder(path: Path) -> Iterator[Callable[[], bool]]:
    """A function that tells whether ``path`` is still the folder that it is now.

    The folder is kept open, because the number of a deleted one may be given to the next. Windows, where folders cannot
    be opened, lets no one delete a folder with open files.
    """
    if os.name == "nt":
        yield lambda: True
        return
    descriptor = os.open(path, os.O_RDONLY)

    try:
        yield lambda: is_still(descriptor, path)
    finally:
        os.close(descriptor)


def is_still(file: int | os.stat_result, path: Path) -> bool:
    """Whether an open file or folder (its descriptor), or one of this state, is still at ``path``: neither deleted nor
    moved nor replaced."""
    try:
        return os.path.samestat(os.fstat(file) if isinstance(file, int) else file, os.stat(path))
    except OSError:
        return False


def delete_folder(folder: Path) -> None:
    """Delete a folder. It is renamed first, so that readers and an interrupted deletion find no half under its name."""
    renamed = folder.with_name(f"{UNFINISHED}old-{folder.name}")
    try:
        folder.rename(renamed)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be deleted: {error_reason(error)}; delete it yourself") from error
    _remove(renamed)


def remove_leftovers(folder: str | Path) -> None:
    """Delete unfinished files and folders of a killed process. Only the process that holds the lock may call this."""
    for path in list(Path(folder).rglob(f"{UNFINISHED}*")):
        _remove(path)


@contextmanager
def _publishing(path: Path) -> Iterator[Path]:
    """A temporary path to write a file or a folder to. At the end it becomes ``path``; after an error it is removed."""
    from safetensors import SafetensorError

    kind = kind_of(path, CheckpointError)
    if kind not in (FILE, FOLDER, None):
        raise CheckpointError(f"{path} is a {kind}, which would be replaced; name a file")
    unfinished = path.with_name(f"{UNFINISHED}{uuid.uuid4().hex[:8]}-{path.name}")
    try:
        for parent in path.parents:
            if parent.name.startswith(UNFINISHED):
                os.stat(parent)  # if it was deleted, it is not created again
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


def file_sha256(path: Path) -> str:
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
