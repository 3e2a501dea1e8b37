"""Command lines of real words and junk: exit status 0 or 2, and never a traceback. Also names of a user's functions.

The commands are real up to the moment at which PyTorch would be loaded; what follows takes seconds.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.cli import main
from groupwise.errors import ConfigError
from groupwise.user_code import load_function
from tests.fuzz import accepted, many, tried
from tests.fuzz.strange import TEXTS, texts

COMMANDS = ("train", "check", "eval", "sample", "recipes", "init", "models", "control", "usmle")
WORDS = (
    "quiz", "format", "gsm8k", "recipe.toml", "nosuch.toml", "rows.jsonl", "list", "show", "copy", "path",
    "--help", "-h", "all", "data", "--version", "--resume", "--overwrite", "--quick", "--model.source", "tiny",
    "--train.steps", "5", "--data.train", "--run.folder", "--rewards.0.weight", "--phases.0.x", "--a.b.c.d",
    "--answers", "--report", "--against", "--cache", "-n", "--seed", "--temperature", "--top-k", "--out",
    "--env", "--algo", "grpo:lr=x", "--seeds", "--threshold", "play", "compare", "ask", "--option",
    "--task_options.x.y", "--", "-", "=", "--=", "--x=", "smollm2-135m", "--system", "--stop", "--form", "chat",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("commands")
    (path / "recipe.toml").write_text('[data]\ntrain = "rows.jsonl"\n[[rewards]]\nfunction = "rewards.py:score"\n')
    (path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (path / "rewards.py").write_text("def score(completions, **columns):\n    return [0.0] * len(completions)\n")
    return path


@pytest.fixture
def without_torch(monkeypatch, folder):
    """Stop each command where it would load PyTorch, a model or an environment."""

    def stop(*_arguments, **_options):
        raise ConfigError("PyTorch is not loaded in this test")

    for name in (
        "cli.train.load_libraries", "cli.evaluate.load_libraries", "cli.sample.load_model_of", "control.main.train",
        "control.comparison.compare.compare", "control.play.play", "model.weights.fetch", "model.weights.remove",
    ):  # fmt: skip
        monkeypatch.setattr(f"groupwise.{name}", stop)
    monkeypatch.chdir(folder)


def check(words: list[str], capsys) -> None:
    tried("command lines")
    try:
        status = main(words)
    except SystemExit as end:  # of --help
        status = end.code or 0
    captured = capsys.readouterr()
    assert status in (0, 2), captured.err
    assert "Traceback" not in captured.err
    if status == 2:
        assert captured.err.startswith("groupwise: ")


@pytest.mark.usefixtures("without_torch")
def test_lines_of_words_and_junk(capsys):
    @many(8)
    @given(
        command=st.sampled_from(COMMANDS) | texts,
        words=st.lists(st.sampled_from(WORDS) | st.sampled_from(WORDS) | texts, max_size=5),
    )
    def run(command, words):
        check([command, *words], capsys)

    run()


@many(6)
@given(
    file=st.sampled_from(["rewards.py", "./rewards.py", "rewards", "json", "os.path", "", "nosuch", "rows.jsonl"])
    | texts,
    function=st.sampled_from(["score", "dumps", "join", "__doc__", "__class__.mro"]) | texts,
    colon=st.sampled_from([":", ":", ":", "", "::", ".py:"]),
)
def test_names_of_functions(folder, file, function, colon):
    prefix = f"{folder}/" if file.startswith("rewards") else ""
    accepted("names of functions", lambda: load_function(f"{prefix}{file}{colon}{function}"))


@pytest.mark.parametrize("value", [None, 3, [], b"rewards.py:score", *TEXTS])
def test_a_name_of_another_type(value):
    assert accepted("names of functions", lambda: load_function(value)) is None
