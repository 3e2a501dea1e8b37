"""The packaged recipes: each parses, its header is true and its commands work, and it starts in an empty folder."""

from __future__ import annotations

import json
import re
import shlex
import statistics
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from groupwise.cli import _parse, main
from groupwise.cli.settings import TABLES, parse_settings
from groupwise.config import load_recipe
from groupwise.data import read_rows
from groupwise.packaged import packaged_recipes, recipes_folder
from groupwise.rundir import read_metrics
from groupwise.tasks import TASKS, find_task, load_task
from groupwise.training.rollout.advantages import find_grouping
from tests.cli.test_recipes_command import NAMES
from tests.weights import smollm2, wordllama

FOLDER = Path(__file__).parents[1] / "recipes"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.toml"))
HUB = "gsm8k"  # the recipe that reads a hub data set
EMBEDDER = ("creative", "modes")  # need real weights of an embedder
SLOW = (*EMBEDDER, "usmle", "usmle-short")  # tests/cli/test_usmle.py runs two steps of the first
STARTS = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in RECIPES]
LARGE = 1_000_000_000  # weights; 16 bytes of each are in a checkpoint that can be resumed

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

# Own data of the project, and real data that it must not copy from.
PROMPTS, PAIRS = FOLDER / "data" / "writing_prompts.jsonl", FOLDER / "data" / "preference_pairs.jsonl"
REAL_DATA = FOLDER.parent.parent / "shared" / "data"
REAL_TEXTS = ("creative_prompts.jsonl", "hh_harmless_base_test.jsonl.gz", "llamafactory_dpo_en_demo.json",
              "llmbar_LLMBar_Natural.json")  # fmt: skip
KINDS = {"helpfulness", "honesty", "harmlessness", "format", "brevity"}


def header_of(name: str) -> str:
    """The comment at the top of a recipe."""
    lines = []
    for line in (FOLDER / f"{name}.toml").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" "))
    return "\n".join(lines)


def commands_of(name: str) -> list[list[str]]:
    """The commands of a header, and its settings as commands that train with them."""
    commands = []
    for line in header_of(name).splitlines():
        typed = re.search(r"groupwise (train|eval) ([^()#;]+)|(--[^()#;]+)", line)
        if typed is not None:
            commands.append([typed[1] or "train", *shlex.split(typed[2] or f"{name} {typed[3]}")])
    return commands


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for GSM8K on the hub; the value lists what was asked for."""
    import datasets

    asked = []

    def load(name, subset=None, *, split):
        asked.append((name, subset, split))
        first = 0 if split == "train" else 100
        rows = [
            {"question": f"What is {n} + {n}?", "answer": f"Twice {n}.\n#### {2 * n}"} for n in range(first, first + 10)
        ]
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr("datasets.load_dataset", load)
    return asked


# --- files and headers ------------------------------------------------------------------------------------------------


def test_there_are_recipes():
    assert NAMES == RECIPES == sorted(packaged_recipes())
    assert recipes_folder() == FOLDER


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_parse(name):
    recipe = load_recipe(name)
    assert recipe.task in TASKS or ":" in recipe.task
    tables = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    for section, table in tables.items():
        if section in TABLES:
            continue
        for key, value in table.items() if isinstance(table, dict) else [("", table)]:
            if not isinstance(value, dict):
                actual = recipe.get(f"{section}.{key}".strip("."))
                is_file = isinstance(value, str) and (FOLDER / value.partition(":")[0]).is_file()
                assert actual == (str(FOLDER / value) if is_file else value)


@pytest.mark.parametrize("name", RECIPES)
def test_the_first_line_is_a_sentence(name):
    """`groupwise recipes` lists it."""
    first, second, *_ = header_of(name).splitlines()
    assert re.fullmatch(r"[A-Z].*\.", first)
    assert len(first) <= 100
    assert second == ""


@pytest.mark.parametrize("name", RECIPES)
def test_headers_have_a_command_a_result_and_the_needs(name):
    header, recipe = header_of(name), load_recipe(name)
    assert f"  groupwise train {name}" in header
    assert re.search(r"docs/[\w-]+\.md", header)
    assert all((FOLDER.parent / page).exists() for page in re.findall(r"docs/[\w-]+\.md", header))
    assert "recipes/" not in header  # a folder that an installed package does not show
    if recipe.model.source == "tiny":
        assert "no GPU" in header.replace("and no GPU", "no GPU")
    else:
        assert f"fetches {recipe.model.source}" in header
        assert re.search(r"pip install 'groupwise\[[^]]*gguf", " ".join(header.split()))


@pytest.mark.parametrize("name", RECIPES)
def test_commands_in_headers_parse(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = commands_of(name)
    assert ["train", name] in commands
    for words in commands:
        arguments = _parse(words)
        assert str(arguments.recipe) == name
        recipe = load_recipe(arguments.recipe, parse_settings(arguments.settings))
        assert find_task(recipe.task)
        find_grouping(recipe.advantages.grouping)


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_can_be_resumed_unless_its_checkpoints_are_huge_and_the_header_says_so(name):
    from groupwise.model.catalogue import CATALOGUE

    recipe, header = load_recipe(name), " ".join(header_of(name).split())
    weights = 0 if recipe.model.source == "tiny" else CATALOGUE[recipe.model.source].parameters
    assert recipe.run.resumable == (weights < LARGE)
    assert ("cannot be resumed" in header) == (not recipe.run.resumable)
    if recipe.run.resumable:
        assert 0 < recipe.run.checkpoint_every < recipe.train.steps
    else:
        assert "--resume " not in f"{header} "
        assert f"{16 * weights / 1e9:.0f} GB" in header
        assert ["train", name, "--run.resumable", "true"] in [words[:4] for words in commands_of(name)]


# --- the start in an empty folder -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STARTS)
def test_starts_on_what_is_packaged(name, tmp_path, monkeypatch, capsys, hub):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    recipe = load_recipe(name)
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
    if recipe.distillation.is_model:
        settings["distillation.teacher"] = "tiny:5"  # in place of a run of another recipe
    if recipe.preference.train is not None:
        settings |= {"preference.train_rows": 8, "preference.held_out_from_train": 2, "preference.batch_size": 2}
    status = main(["train", name, *(f"--{setting}={value}" for setting, value in settings.items())])
    output = capsys.readouterr()
    assert (status, output.err) == (0, "")
    assert "step 1/1" in output.out
    rows = read_metrics(Path("run", "metrics.jsonl"))
    assert [row["step"] for row in rows if "learning_rate" in row] == [1]
    evaluated = [row["step"] for row in rows if any(key.startswith("eval/") for key in row)]
    assert evaluated == ([] if name == "modes" else [0, 1])  # modes holds nothing out
    assert Path("run", "model", "model.safetensors").exists()
    assert hub == ([("openai/gsm8k", "main", split) for split in ("train", "test")] if name == HUB else [])


@pytest.mark.parametrize("command", ["train", "check", "eval"])
def test_without_the_hub_one_sentence_says_what_is_needed(command, tmp_path, monkeypatch, capsys):
    def load(*_, **__):
        pytest.fail("the model is loaded before the rows")

    monkeypatch.chdir(tmp_path)  # tests have no network
    monkeypatch.setenv("GROUPWISE_CACHE", str(tmp_path / "cache"))
    for module in ("trainer", "preflight"):
        monkeypatch.setattr(f"groupwise.training.{module}.load_components", load)
    assert main([command, HUB]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    for part in ("openai/gsm8k", "--data.train FILE --data.held_out FILE", "question and answer", "#### N", "the hub"):
        assert part in line
    assert list(tmp_path.iterdir()) == []


def test_files_replace_the_hub(tmp_path, monkeypatch, hub):
    monkeypatch.chdir(tmp_path)
    row = {"question": "What is 1 + 1?", "answer": "#### 2"}
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text(json.dumps(row) + "\n")
    task = load_task(load_recipe(HUB, {"data.train": "train.jsonl", "data.held_out": "test.jsonl"}))
    assert (len(task.train), len(task.held_out), hub) == (1, 1, [])


@pytest.mark.slow
def test_format_with_real_weights(tmp_path, monkeypatch, capsys):
    """The header promises 97 % after four steps for 32 prompts."""
    smollm2()
    monkeypatch.chdir(tmp_path)
    words = [
        "--train.steps",
        "4",
        "--data.held_out_rows",
        "16",
        "--run.tensorboard",
        "false",
        "--model.dtype",
        "float32",
    ]
    assert main(["train", "format", "--run.folder", "run", *words]) == 0
    assert capsys.readouterr().err == ""
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    before, after = (row["eval/right_form"] for row in rows if "eval/right_form" in row)
    assert before < 0.4
    assert after > 0.7


# --- sample data ------------------------------------------------------------------------------------------------------


def texts_of(row: dict) -> list[str]:
    """All texts in a row, also those of messages."""
    values, texts = [row], []
    while values:
        value = values.pop()
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, (dict, list)):
            values.extend(value.values() if isinstance(value, dict) else value)
    return texts


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


@pytest.mark.parametrize("path", [PROMPTS, PAIRS], ids=lambda path: path.stem)
def test_samples_are_json_lines_with_unique_prompts(path):
    text = path.read_text(encoding="utf-8")
    assert text.endswith("}\n")
    rows = [json.loads(line) for line in text.splitlines()]
    prompts = {" ".join(words_of(row["prompt"])) for row in rows}
    assert len(prompts) == len(rows) >= 72
    assert all(value == value.strip() and value for row in rows for value in row.values())
    assert all(20 <= len(row["prompt"]) <= 200 for row in rows)
    readme = (path.parent / "README.md").read_text(encoding="utf-8")
    assert f"| `{path.name}` | {len(rows)} | {', '.join(f'`{key}`' for key in rows[0])} |" in readme
    assert "CC0-1.0" in readme


def test_writing_prompts_are_varied():
    rows = read_rows(PROMPTS)
    assert all(list(row) == ["prompt", "domain", "subdomain"] for row in rows)
    domains = Counter(row["domain"] for row in rows)
    assert len(domains) >= 12
    assert max(domains.values()) <= len(rows) / 5
    assert len({row["subdomain"] for row in rows}) >= 50


def test_the_preferred_answers_are_not_the_longer_ones():
    rows = read_rows(PAIRS)
    assert all(list(row) == ["prompt", "chosen", "rejected", "kind"] for row in rows)
    assert Counter(row["kind"] for row in rows).keys() == KINDS
    assert min(Counter(row["kind"] for row in rows).values()) >= 12
    assert all(row["chosen"] != row["rejected"] and max(len(row["chosen"]), len(row["rejected"])) < 320 for row in rows)
    chosen, rejected = ([len(row[key]) for row in rows] for key in ("chosen", "rejected"))
    assert abs(statistics.mean(chosen) / statistics.mean(rejected) - 1) < 0.02
    longer = sum(a > b for a, b in zip(chosen, rejected, strict=True))
    assert abs(longer / len(rows) - 0.5) < 0.05
    readme = (PAIRS.parent / "README.md").read_text(encoding="utf-8")
    assert f"{statistics.mean(chosen):.0f} characters each" in readme
    assert f"{longer} of {len(rows)} pairs" in readme


@pytest.mark.parametrize("name", ["creative", "preference-data"])
def test_training_and_held_out_prompts_differ(name):
    task = load_task(load_recipe(name))
    train, held_out = ({row["prompt"] for row in rows} for rows in (task.train, task.held_out))
    assert (len(train), len(held_out)) == (80, 24)
    assert not train & held_out
    assert f"{len(train)} " in header_of(name)
    assert f"{len(held_out)} " in header_of(name).replace("\n", " ")


def test_training_and_held_out_pairs_differ():
    from groupwise.tasks.rows import read_section

    train, held_out = read_section(load_recipe("preference-data"), "preference")
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    assert (len(train), len(held_out)) == (69, 20)
    assert all(f"{count} pairs" in " ".join(header_of("preference-data").split()) for count in (69, 20))


@pytest.mark.parametrize("real", REAL_TEXTS)
def test_samples_are_not_copied(real):
    if not (REAL_DATA / real).exists():
        pytest.skip(f"the data set to compare with is not available: {REAL_DATA / real}")
    length = 8  # words in a row that two texts would not share by chance

    def runs(text: str) -> set[tuple[str, ...]]:
        words = words_of(text)
        return {tuple(words[place : place + length]) for place in range(len(words) - length + 1)}

    known = {run for row in read_rows(REAL_DATA / real) for text in texts_of(row) for run in runs(text)}
    assert known
    own = [text for path in (PROMPTS, PAIRS) for row in read_rows(path) for text in texts_of(row)]
    assert [text for text in own if runs(text) & known] == []
