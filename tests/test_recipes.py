"""The shipped recipes: each parses, its header has a result and commands that work, and its first step runs."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from groupwise.cli import _parse, main
from groupwise.cli.settings import TABLES, parse_settings
from groupwise.config import load_recipe
from groupwise.rundir import read_metrics
from groupwise.tasks import TASKS
from tests.weights import wordllama

FOLDER = Path(__file__).parents[1] / "recipes"
RECIPES = sorted(path.name for path in FOLDER.glob("*.toml"))
EMBEDDER = ("creative.toml", "modes.toml")  # need real weights of an embedder
SLOW = (*EMBEDDER, "usmle.toml")  # tests/cli/test_usmle.py runs two steps of the last
FIRST_STEPS = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in RECIPES]

# Small enough for a second.
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
    "run.plot": "false",
}

# Rows in the format of a task's files.
ROWS = {
    "gsm8k": [{"question": f"What is {n} + {n}?", "answer": f"Twice {n}.\n#### {2 * n}"} for n in range(10)],
    "rows": [{"prompt": f"Say {n}: ", "answer": str(n)} for n in range(10)],
}
PAIRS = [{"prompt": f"Say {n}: ", "chosen": f"{n}.", "rejected": f"{n + 1}."} for n in range(10)]


def header_of(path: Path) -> str:
    """The comment at the top of a recipe."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" "))
    return "\n".join(lines)


def test_there_are_recipes():
    assert "gsm8k.toml" in RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_parse(name):
    recipe = load_recipe(FOLDER / name)
    assert recipe.task in TASKS or ":" in recipe.task
    tables = tomllib.loads((FOLDER / name).read_text(encoding="utf-8"))
    for section, table in tables.items():
        if section in TABLES:
            continue
        for key, value in table.items() if isinstance(table, dict) else [("", table)]:
            if not isinstance(value, dict):
                actual = recipe.get(f"{section}.{key}".strip("."))
                assert actual == (str(FOLDER / value) if isinstance(value, str) and ".py:" in value else value)


@pytest.mark.parametrize("name", RECIPES)
def test_headers_have_a_result_and_a_command(name):
    header = header_of(FOLDER / name)
    assert len(header.split()) >= 15
    assert re.search(r"\d\s?%|docs/[\w-]+\.md", header)
    assert re.search(rf"groupwise train recipes/{re.escape(name)}|make train", header)


@pytest.mark.parametrize("name", RECIPES)
def test_commands_in_headers_parse(name):
    for line in header_of(FOLDER / name).splitlines():
        typed = re.search(r"groupwise (train|eval) ([^()#]+)|(--[^()#]+)", line)
        if typed is not None:
            words = shlex.split(typed[2] or f"recipes/{name} {typed[3]}")
            arguments = _parse([typed[1] or "train", *words])
            assert arguments.recipe == Path(f"recipes/{name}")
            assert load_recipe(FOLDER / name, parse_settings(arguments.settings)).task


@pytest.mark.parametrize("name", FIRST_STEPS)
def test_the_first_step_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(FOLDER / name)
    if recipe.preference.train is not None:
        monkeypatch.setenv("GROUPWISE_CACHE", str(tmp_path / "cache"))  # for the reference log-probs
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
    output = capsys.readouterr()
    assert (status, output.err) == (0, "")
    assert "step 1/1" in output.out
    steps = [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "learning_rate" in row]
    assert steps == [1]
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
