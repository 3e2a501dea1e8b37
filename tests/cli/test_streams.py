"""Standard streams that are closed, full or read by nobody, and errors that no command expects."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from groupwise import cli
from groupwise.cli import main

OUTPUT = ("--help", "train --help", "train --help data", "", "recipes", "recipes show quiz", "control play --help")
ERRORS = ("nosuch", "train gone.toml", "models path nosuch")


def shell(line: str, unbuffered: str = "") -> subprocess.CompletedProcess[str]:
    """Run a line of the shell, in which ``groupwise`` is this one."""
    function = f'groupwise() {{ "{sys.executable}" -m groupwise "$@"; }}'
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    command = ["bash", "-c", f"{function}\n{line}"]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("words", ["--version", *(pytest.param(words, marks=pytest.mark.slow) for words in OUTPUT)])
def test_a_full_disk_is_an_error(words):
    """Also where the output waits in Python's buffer until the end of the process."""
    done = shell(f"groupwise {words} > /dev/full")
    assert (done.returncode, done.stderr) == (2, "groupwise: the output cannot be written: No space left on device\n")


@pytest.mark.slow
@pytest.mark.parametrize("words", OUTPUT)
def test_output_without_a_reader_or_a_stream(words):
    done = shell(f"groupwise {words} | true; exit ${{PIPESTATUS[0]}}", unbuffered="1")
    assert (done.returncode, done.stderr) == (141, "")
    for closed in ("2>&-", "2> /dev/full"):
        done = shell(f"groupwise {words} {closed}")
        assert (done.returncode, done.stderr) == (0, ""), closed
    done = shell(f"groupwise {words} >&-")
    assert (done.returncode, done.stderr) == (2, "groupwise: the output cannot be written: it is closed\n")
    done = shell(f"groupwise {words} <&- >&- 2>&-")
    assert (done.returncode, done.stderr) == (2, "")


@pytest.mark.slow
@pytest.mark.parametrize("output", [">&-", "<&- >&- 2>&-", "> /dev/full"])
def test_a_run_without_an_output_is_trained_to_its_end(output, tmp_path):
    """The status says that the output was lost; the run is whole."""
    command = f"groupwise train quiz --train.steps 1 --sft.steps 0 --run.folder {tmp_path / 'run'}"
    done = shell(f"{command} {output}")
    assert done.returncode == 2
    assert done.stderr.count("the output cannot be written") == ("2>&-" not in output)
    assert "nothing to resume" in shell(f"{command} --resume").stdout


@pytest.mark.slow
@pytest.mark.parametrize("words", ERRORS)
def test_an_error_without_a_reader_or_a_stream(words):
    for closed in ("2>&-", "<&- >&- 2>&-", "2> /dev/full", "> /dev/full"):
        done = shell(f"groupwise {words} {closed}")
        assert done.returncode == 2, closed
        assert done.stderr.count("\n") == (closed == "> /dev/full"), closed


@pytest.mark.slow
def test_a_current_folder_that_was_deleted():
    place = 'cd "$(mktemp -d)" && rmdir "$PWD"'
    assert shell(f"{place} && groupwise --version").returncode == 0
    for words in ("init x", "check quiz --quick", "train quiz", "recipes copy quiz", "check gone.toml"):
        done = shell(f"{place} && PYTHONPATH={Path(cli.__file__).parents[2]} groupwise {words}")
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("\n") == 1
        assert "Traceback" not in done.stderr


def test_a_character_that_the_output_cannot_encode(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "groupwise", "init", str(tmp_path / "é")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert r"\xe9" in done.stdout


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError(13, "Permission denied", "runs/x"), "runs/x cannot be used: Permission denied"),
        (OSError(24, "Too many open files", b"a\xff"), "too many files are open"),
        (OSError(28, "No space left on device"), "the output cannot be written: No space left on device"),
        (OSError(5, "Input/output error"), "the output cannot be written: Input/output error"),
        (OSError(12, "Cannot allocate memory"), "the system refused a call: Cannot allocate memory"),
        (ValueError("embedded null byte"), "NUL character"),
        (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"), "not valid Unicode"),
        (RecursionError("maximum recursion depth exceeded"), "nested too deeply"),
        (MemoryError(), "memory ran out"),
    ],
)
def test_what_the_system_refuses_is_one_line(monkeypatch, capsys, error, words):
    def fail(*_):
        raise error

    monkeypatch.setattr("groupwise.cli.recipes.packaged_recipe", fail)
    assert main(["recipes", "show", "quiz"]) == 2
    captured = capsys.readouterr().err
    assert words in captured
    assert captured.startswith("groupwise: ")
    assert captured.count("\n") == 1


def test_an_error_of_groupwise_itself_keeps_its_traceback(monkeypatch, capsys):
    monkeypatch.setattr("groupwise.cli.recipes.packaged_recipe", lambda name: {}[name])
    assert main(["recipes", "show", "quiz"]) == 1
    captured = capsys.readouterr().err
    assert "KeyError: 'quiz'" in captured
    assert captured.splitlines()[-1].startswith("groupwise: this is an error of groupwise itself; please report it")


def test_a_word_that_is_not_utf8(capsys):
    assert main(["sample", "tiny", "\udcff"]) == 2
    assert "argument 3" in capsys.readouterr().err


@pytest.mark.slow
def test_too_many_open_files():
    """How many files a check opens at once depends on the machine."""
    runs = (shell(f"ulimit -n {limit}; exec {sys.executable} -m groupwise check quiz --quick") for limit in (20, 10, 5))
    done = next(run for run in runs if run.returncode)
    assert done.returncode == 2
    assert "groupwise: " in done.stderr
    assert "Traceback" not in done.stderr
