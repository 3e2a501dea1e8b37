"""The recipes that are shipped: each parses, says what it promises, and its first step runs."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from groupwise.cli import _parser, main
from groupwise.cli.settings import TABLES, parse_settings, split_settings
from groupwise.config import load_recipe
from groupwise.rundir import read_metrics
from groupwise.tasks import TASKS
from tests.weights import wordllama

FOLDER = Path(__file__).parents[1] / "recipes"
RECIPES = sorted(path.name for path in FOLDER.glob("*.toml"))

# Small enough for a second, whatever the recipe says.
SMALL = {
    "model.source": "tiny",
    "model.device": "cpu",
    "data.train_rows": 8,
    "data.held_out_rows": 2,
    "data.max_prompt_length": 2000,  # the tiny model reads bytes
    "sampling.samples_per_prompt": 4,
    "sampling.max_new_tokens": 6,
    "sampling.min_new_tokens": 0,
    "evaluate.max_new_tokens": 6,
    "train.steps": 1,
    "train.batch_size": 2,
    "train.accumulation": 1,
    "train.mini_batches": 1,
    "run.tensorboard": "false",
    "run.picture": "false",
}

# Rows in the shape that a task expects of its files.
ROWS = {
    "gsm8k": [{"question": f"What is {n} + {n}?", "answer": f"Twice {n}.\n#### {2 * n}"} for n in range(10)],
    "rows": [{"prompt": f"Say {n}: ", "answer": str(n)} for n in range(10)],
}
PAIRS = [{"prompt": f"Say {n}: ", "chosen": f"{n}.", "rejected": f"{n + 1}."} for n in range(10)]


def header_of(path: Path) -> str:
    """The comment that a recipe begins with."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" "))
    return "\n".join(lines)


def test_there_are_recipes():
    assert "gsm8k.toml" in RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_it_parses(name):
    recipe = load_recipe(FOLDER / name)
    assert recipe.task in TASKS or ":" in recipe.task
    given = tomllib.loads((FOLDER / name).read_text(encoding="utf-8"))
    for section, table in given.items():
        if section in TABLES:
            continue
        for key, value in table.items() if isinstance(table, dict) else [("", table)]:
            if not isinstance(value, dict):
                got = recipe.get(f"{section}.{key}".strip("."))
                assert got == (str(FOLDER / value) if isinstance(value, str) and ".py:" in value else value)


@pytest.mark.parametrize("name", RECIPES)
def test_its_header_promises_something(name):
    """A reader learns what should come out, or where that stands, and what to type."""
    header = header_of(FOLDER / name)
    assert len(header.split()) >= 15
    assert re.search(r"\d\s?%|docs/[\w-]+\.md", header)
    assert re.search(rf"groupwise train recipes/{re.escape(name)}|make train", header)


@pytest.mark.parametrize("name", RECIPES)
def test_the_commands_in_its_header_are_commands(name):
    commands = _parser()[1]
    for line in header_of(FOLDER / name).splitlines():
        typed = re.search(r"groupwise (train|eval) ([^()#]+)|(--[^()#]+)", line)
        if typed is None:
            continue
        command = commands[typed[1] or "train"]
        words = shlex.split(typed[2] or f"recipes/{name} {typed[3]}")
        own, settings = split_settings(words, command._option_string_actions)
        assert command.parse_args(own).recipe == Path(f"recipes/{name}")
        assert load_recipe(FOLDER / name, parse_settings(settings)).task


@pytest.mark.parametrize("name", RECIPES)
def test_its_first_step_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(FOLDER / name)
    if recipe.preference.train is not None:
        monkeypatch.setenv("GROUPWISE_CACHE", str(tmp_path / "cache"))  # the reference's log-probs are kept there
    settings = {**SMALL, "run.folder": "run"}
    if recipe.sft.steps:
        settings |= {"sft.steps": 1, "sft.batch_size": 2}
    if recipe.data.held_out_from_train:
        settings["data.held_out_from_train"] = 2
    if recipe.advantages.grouping == "similarity":
        wordllama()
        settings["grouping.embedder"] = "wordllama"
    for key in ("train", "held_out"):
        source = recipe.get(f"data.{key}")
        if source is not None and not (FOLDER / source).exists():
            rows = ROWS[recipe.task]
            (tmp_path / f"{key}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            settings[f"data.{key}"] = f"{key}.jsonl"
    for key in ("train", "held_out"):
        if recipe.get(f"preference.{key}") is not None:
            (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
            settings |= {f"preference.{key}": "pairs.jsonl", "preference.batch_size": 2}
    if recipe.preference.held_out_from_train:
        settings["preference.held_out_from_train"] = 2
    words = [f"--{setting}={value}" for setting, value in settings.items()]
    status = main(["train", str(FOLDER / name), *words])
    said = capsys.readouterr()
    assert (status, said.err) == (0, "")
    assert "step 1/1" in said.out
    steps = [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "learning_rate" in row]
    assert steps == [1]
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
