"""`groupwise init`: a starter that trains, and errors that leave everything as it is."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from groupwise.cli.init import FILES, STARTER, TINY_ONLY, TINY_ONLY_README
from groupwise.config import load_recipe
from groupwise.errors import RewardError
from groupwise.rewards import make_reward
from groupwise.rundir import read_metrics
from groupwise.tasks.rows import hold_out


def test_the_files_and_the_next_command(folder, output_of):
    output = output_of("init", "my run")
    assert output.splitlines() == [
        *(f"wrote my run/{name}" for name in FILES),
        "next: groupwise train 'my run/recipe.toml'",
    ]
    assert sorted(path.name for path in (folder / "my run").iterdir()) == sorted(FILES)
    assert {path.name for path in STARTER.iterdir()} - {"__pycache__"} == set(FILES)


def test_the_recipe(folder, output_of):
    output_of("init", "my run")
    recipe = load_recipe("my run/recipe.toml")
    assert (recipe.model.source, recipe.task, recipe.run.name) == ("tiny", "rows", "my-run")
    assert recipe.data.train == "my run/rows.jsonl"
    assert recipe.run.resumable
    header = (folder / "my run" / "recipe.toml").read_text()
    for words in ("--model.source HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m", "groupwise[gguf]"):
        assert words in header


def test_the_readme_has_the_three_commands(folder, output_of):
    output_of("init", "x")
    text = (folder / "x" / "README.md").read_text()
    for command in (
        "groupwise check recipe.toml",
        "groupwise train recipe.toml",
        "groupwise train recipe.toml --resume",
    ):
        assert f"\n{command} " in text
    assert all(name in text for name in FILES if name != "README.md")


def test_the_reward_uses_a_column_of_the_rows(folder, output_of):
    output_of("init", "x")
    rows = [json.loads(line) for line in (folder / "x" / "rows.jsonl").read_text().splitlines()]
    assert {tuple(row) for row in rows} == {("prompt", "characters")}
    reward = make_reward(load_recipe("x/recipe.toml").rewards[0].function)
    assert reward(completions=["123a", "", "abc"], prompts=["p"] * 3, characters=["0123", "0", "abc"]) == [
        0.75,
        0.0,
        1.0,
    ]
    with pytest.raises((TypeError, RewardError)):
        reward(completions=["a"])


def test_another_model(folder, output_of):
    output_of("init", "x", "--model", "HuggingFaceTB/SmolLM2-135M-Instruct")
    recipe = load_recipe("x/recipe.toml")
    assert recipe.model.source == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert recipe.model.threads is None
    assert recipe.optimizer.learning_rate == 2e-5
    for name, changes in {"recipe.toml": TINY_ONLY, "README.md": TINY_ONLY_README}.items():
        text = (STARTER / name).read_text()
        assert all(text.count(line) == 1 for line in changes)
        written = (folder / "x" / name).read_text()
        assert "2e-5" in written
        assert "2e-3" not in written
        assert "tiny" not in written


def test_the_held_out_rows_are_of_both_kinds(folder, output_of):
    output_of("init", "x")
    recipe = load_recipe("x/recipe.toml")
    rows = [json.loads(line) for line in (folder / "x" / "rows.jsonl").read_text().splitlines()]
    trained, held_out = hold_out(rows, recipe.data.held_out_from_train, recipe.train.seed)
    for part in (trained, held_out):
        assert sum("digits" in row["prompt"] for row in part) == len(part) / 2


def test_a_model_in_a_folder_is_found_from_everywhere(folder, output_of):
    (folder / 'a "model"').mkdir()
    output_of("init", "x", "--model", 'a "model"')
    assert load_recipe("x/recipe.toml").model.source == str(folder / 'a "model"')


def test_a_model_that_needs_an_extra(folder, output_of, monkeypatch):
    monkeypatch.setenv("GROUPWISE_CACHE", str(folder / "cache"))
    real = importlib.util.find_spec
    monkeypatch.delitem(importlib.import_module("sys").modules, "gguf", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == "gguf" else real(name, *a))
    lines = output_of("init", "x", "--model", "smollm2-135m").splitlines()
    assert lines[-2:] == [
        "smollm2-135m needs: pip install 'groupwise[gguf]'",
        "next: groupwise train x/recipe.toml",
    ]


@pytest.mark.parametrize("model", ["smollm2-135", "minilm", "./nowhere", "a/b/c", ""])
def test_a_model_that_does_not_exist(folder, error_of, model):
    error = error_of("init", "x", f"--model={model}")
    assert f"--model {model!r} is not a folder" in error
    assert ("did you mean 'smollm2-135m'?" in error) == (model == "smollm2-135")
    assert list(folder.iterdir()) == []


def test_a_folder_that_is_not_empty(folder, error_of):
    (folder / "x").mkdir()
    (folder / "x" / "rewards.py").write_text("mine")
    assert error_of("init", "x") == "x is not empty (it has rewards.py); name a new folder"
    assert (folder / "x" / "rewards.py").read_text() == "mine"
    assert [path.name for path in (folder / "x").iterdir()] == ["rewards.py"]


def test_an_empty_folder_and_a_fresh_repository(folder, output_of):
    (folder / "x" / ".git").mkdir(parents=True)
    output_of("init", "x")
    assert (folder / "x" / "recipe.toml").exists()
    (folder / "here").mkdir()
    output_of("init", "here/.")
    assert load_recipe("here/recipe.toml").run.name == "here"


def test_a_file_in_the_place_of_the_folder(folder, error_of):
    (folder / "file").write_text("mine")
    for target in ("file", "file/x"):
        assert "file is a file, not a folder" in error_of("init", target)
    assert (folder / "file").read_text() == "mine"


def test_a_folder_that_cannot_be_written(folder, error_of, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert error_of("init", "new") == "new/recipe.toml cannot be written: Permission denied"


def test_it_trains(folder, output_of):
    output_of("init", "x")
    output_of("train", "x/recipe.toml", "--train.steps=1", "--data.train_rows=12", "--run.plot=false")
    (run,) = (folder / "runs").iterdir()
    assert run.name.endswith("-x")
    assert (run / "model" / "model.safetensors").exists()


@pytest.mark.slow
def test_it_learns(folder, output_of):
    """The starter as it is: the reward on held-out rows rises from about a tenth to nearly 1."""
    output_of("init", "x")
    output_of("train", "x/recipe.toml")
    (run,) = (folder / "runs").iterdir()
    rewards = [row["eval/reward"] for row in read_metrics(run / "metrics.jsonl") if "eval/reward" in row]
    assert rewards[0] < 0.15
    assert rewards[-1] > 0.9
    assert (run / "curves.png").exists()
