"""Paths that a user gives: what the system refuses, what is no file, and what has no end becomes one sentence."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from groupwise.config import load_recipe
from groupwise.data import read_rows
from groupwise.errors import CheckpointError, ConfigError, DataError, GroupwiseError, InputError, RunDirError
from groupwise.paths import check_writable, is_folder, kind_of, open_file, read_file, show_path, user_path
from groupwise.rundir import RunDir, read_json, write_bytes
from groupwise.rundir.run import check_is_run, check_unused
from groupwise.user_code import load_function

ROOT = Path(__file__).parents[1]
LONG = "n" * 300
DEEP = "/".join(["d" * 200] * 25)


def test_the_kinds_of_things(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "nothing").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(tmp_path / "socket"))
        assert kind_of(tmp_path / "socket") == "socket"
    names = ("file", "link", "nothing", "pipe", "", "missing")
    assert [kind_of(tmp_path / name) for name in names] == ["file", "file", None, "named pipe", "folder", None]
    assert kind_of("/dev/zero") == "device"
    assert kind_of(tmp_path / "file" / "inside") is None
    assert is_folder(tmp_path)


@pytest.mark.parametrize("name", [LONG, DEEP, "a\0b", "loop", "loop/x", "a\ud800b"])
def test_a_name_that_cannot_be_looked_up_is_an_error_with_its_reason(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    reasons = "File name too long|NUL character|Too many levels of symbolic links|not valid Unicode"
    with pytest.raises(DataError, match=rf"cannot be used: .*({reasons})") as error:
        kind_of(name, DataError)
    assert len(str(error.value)) < 500
    assert "\0" not in str(error.value)


READERS = {
    "data": lambda path: read_rows(path),
    "recipe": lambda path: load_recipe(path),
    "function": lambda path: load_function(f"{path}:f"),
    "json": lambda path: read_json(path),
    "bytes": lambda path: read_file(path),
    "run": lambda path: check_unused(Path(path)),
    "new run": lambda path: RunDir.create(path).close(),
    "resume": lambda path: check_is_run(Path(path)),
    "write": lambda path: check_writable(path),
}
ENDINGS = {"data": ".jsonl", "recipe": ".toml", "function": ".py"}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "strange", ["loop", "pipe", "zero", "socket", "null", LONG, DEEP, "a\0b", "a\ud800b", "~nouser/x/y/\0"]
)
def test_every_reader_refuses_strange_things(tmp_path, monkeypatch, reader, strange):
    monkeypatch.chdir(tmp_path)
    name = f"{strange}{ENDINGS.get(reader, '')}"
    server = socket.socket(socket.AF_UNIX)
    {
        "loop": lambda: Path(name).symlink_to(name),
        "pipe": lambda: os.mkfifo(name),
        "zero": lambda: Path(name).symlink_to("/dev/zero"),
        "null": lambda: Path(name).symlink_to("/dev/null"),
        "socket": lambda: server.bind(name),
    }.get(strange, lambda: None)()
    with pytest.raises(GroupwiseError) as error:
        READERS[reader](name)
    assert len(str(error.value)) < 1000
    server.close()


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("holes.jsonl", read_rows),
        ("holes.json", read_rows),
        ("holes.csv", read_rows),
        ("holes.parquet", read_rows),
        ("holes.toml", load_recipe),
        ("holes.py", lambda path: load_function(f"{path}:f")),
    ],
)
def test_a_file_of_a_terabyte_of_zeros_does_not_fill_the_memory(tmp_path, monkeypatch, name, read):
    monkeypatch.setattr("groupwise.data.text_files.LONGEST_LINE", 1_000_000)
    monkeypatch.setattr("groupwise.data.text_files.LARGEST_JSON", 1_000_000)
    with open(tmp_path / name, "wb") as file:
        file.truncate(2**40)
    with pytest.raises((DataError, ConfigError), match=r"more than 1 ?0? ?MB|has more than 10 MB|not a parquet file"):
        read(tmp_path / name)


def test_a_recipe_may_come_from_a_pipe_of_the_shell():
    recipe = ROOT / "recipes" / "quiz.toml"
    code = "from groupwise.config import load_recipe; print(load_recipe('/dev/stdin').task)"
    done = subprocess.run(
        [sys.executable, "-c", code], input=recipe.read_text(), capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout == "quiz\n", done.stderr


def test_files_are_read_up_to_a_limit(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 2_000_001)
    assert len(read_file(tmp_path / "file", limit=2_000_001)) == 2_000_001
    with pytest.raises(InputError, match="has more than 2 MB"):
        read_file(tmp_path / "file", limit=2_000_000)
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_file(tmp_path / "missing", CheckpointError)
    with pytest.raises(InputError, match="is a folder, not a file"):
        open_file(tmp_path)


def test_a_device_is_never_replaced_by_a_file(tmp_path):
    (tmp_path / "null").symlink_to("/dev/null")
    os.mkfifo(tmp_path / "pipe")
    for name in ("null", "pipe"):
        with pytest.raises(CheckpointError, match="would be replaced"):
            write_bytes(tmp_path / name, b"x")
    assert (tmp_path / "null").is_symlink()
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_what_can_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "nothing").symlink_to("nowhere")
    for path in (tmp_path / "file", tmp_path / "new", tmp_path / "new" / "deep" / "er", tmp_path):
        check_writable(path)
    for path in (tmp_path / "file" / "x", tmp_path / "nothing" / "x", "/dev/null", tmp_path / LONG):
        with pytest.raises(InputError, match=r"cannot be (written|used)"):
            check_writable(path)


def test_paths_in_messages():
    assert show_path("runs/a b") == "runs/a b"
    assert show_path("a\x1b[31m") == r"'a\x1b[31m'"
    assert show_path("") == "''"
    assert len(show_path("x" * 5000)) < 250
    assert user_path("~nouser/x") == Path("~nouser/x")


@pytest.fixture
def folder_with_locks(tmp_path):
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked" / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "locked" / "recipe.toml").write_text("[train]\nsteps = 1\n")
    (tmp_path / "locked" / "rewards.py").write_text("def f(completions, **_): return [0.0] * len(completions)\n")
    (tmp_path / "unreadable.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "unreadable.jsonl").chmod(0)
    (tmp_path / "locked").chmod(0)
    yield tmp_path
    (tmp_path / "locked").chmod(0o700)


def without_privileges() -> list[str]:
    """How to start a command that may not read everything: root may, unless it gives up two capabilities."""
    if os.getuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root may search every folder, and there is no setpriv to give that up")
    return ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]


LOCKED_CODE = """
import sys
from pathlib import Path
from groupwise.config import load_recipe
from groupwise.cli import main
from groupwise.data import read_rows
from groupwise.data.read import is_hub_id
from groupwise.errors import GroupwiseError
from groupwise.model.source import check_source
from groupwise.rundir import RunDir, read_json, write_bytes
from groupwise.rundir.run import check_is_run, check_unused
from groupwise.user_code import load_function
from groupwise.usmle.medical_words import load_medical_vocabulary

calls = {
    "rows": lambda: read_rows("locked/rows.jsonl"), "unreadable": lambda: read_rows("unreadable.jsonl"),
    "folder of rows": lambda: read_rows("locked"), "hub id": lambda: is_hub_id("locked/rows"),
    "recipe": lambda: load_recipe("locked/recipe.toml"), "function": lambda: load_function("locked/rewards.py:f"),
    "model": lambda: check_source("locked/model"), "run": lambda: RunDir.create("locked/run"),
    "resume": lambda: check_is_run(Path("locked/run")), "unused": lambda: check_unused(Path("locked/run")),
    "json": lambda: read_json("locked/x.json"), "write": lambda: write_bytes("locked/x", b""),
    "vocabulary": lambda: load_medical_vocabulary("locked/words.txt"),
}
for name, call in calls.items():
    try:
        call()
    except GroupwiseError as error:
        assert "Permission denied" in str(error), (name, str(error))
    else:
        raise SystemExit(f"{name}: no error")
for words in (
    ["init", "locked/x"], ["recipes", "copy", "quiz", "locked/x"], ["check", "locked/recipe.toml"],
    ["train", "quiz", "--run.folder", "locked/x"], ["train", "quiz", "--resume", "--run.folder", "locked/x"],
    ["train", "quiz", "--overwrite", "--run.folder", "locked/x"], ["eval", "quiz", "--answers", "locked/x"],
    ["models", "remove", "minilm", "--cache", "locked/x"], ["init", "new", "--model", "locked/model"],
):
    status = main(words)
    assert status == 2, (words, status)
"""


@pytest.mark.slow
def test_a_folder_that_one_may_not_search(folder_with_locks):
    done = subprocess.run(
        [*without_privileges(), sys.executable, "-c", LOCKED_CODE],
        cwd=folder_with_locks,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("groupwise: ") == done.stderr.count("Permission denied") == 9, done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_folder_with_a_nul_byte(tmp_path):
    with pytest.raises(RunDirError, match="NUL character"):
        RunDir.create(tmp_path / "a\0b")
