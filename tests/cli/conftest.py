"""Commands run in a temporary working directory."""

from __future__ import annotations

import pytest

from groupwise.cli import main


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


@pytest.fixture
def output_of(capsys):
    """Run a command that succeeds; its standard output."""

    def run(*words):
        capsys.readouterr()
        assert main(list(words)) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def error_of(capsys):
    """Run a command that is refused; its error, the last line on standard error."""

    def run(*words):
        capsys.readouterr()
        assert main(list(words)) == 2
        *progress, error = capsys.readouterr().err.splitlines()
        assert all(line.startswith("tiny: ") for line in progress)
        assert error.startswith("groupwise: ")
        return error.removeprefix("groupwise: ")

    return run
