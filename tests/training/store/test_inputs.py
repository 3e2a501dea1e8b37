"""What a resumed run compares with its start: rows, tokenizer, frozen weights, source files, versions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from groupwise.config import load_recipe, make_recipe
from groupwise.errors import CheckpointError, ConfigError, RunDirError
from groupwise.model import load_model, load_tokenizer
from groupwise.rundir import RunDir, read_json, write_json
from groupwise.tasks import Task
from groupwise.training.components import load_components
from groupwise.training.inputs import load_inputs
from groupwise.training.store.changes import RESUMED, record_changes
from groupwise.training.store.inputs import describe_inputs
from groupwise.training.store.run_folder import INPUTS, changed_inputs, check_inputs, write_inputs, write_recipe
from groupwise.training.trainer import Trainer
from tests.training.runs import ROWS, TOOL_TEMPLATE, RecordingDisplay, merged, run_steps, small_recipe, small_trainer

QUICK = {"train": {"steps": 2, "batch_size": 2}, "sampling": {"max_new_tokens": 3}, "evaluate": {"every": 0}}
FILES = {
    "helper.py": "def even(text):\n    return sum(ord(c) % 2 == 0 for c in text) / max(1, len(text))\n",
    "reward.py": "from helper import even\n\ndef score(completions, **_):\n    return [even(c) for c in completions]\n",
    "loss.py": "def mine(tokens, settings):\n    return -tokens.advantages\n",
    "groups.py": "def by_prompt(batch):\n    return [n // batch.samples for n in range(len(batch.texts))]\n",
    "advantage.py": "def plain(rewards, groups, weights):\n    return rewards.sum(1) - rewards.sum(1).mean()\n",
    "task.py": (
        "from groupwise.tasks import Task\n\ndef make(recipe):\n"
        "    return Task('mine', [{'prompt': f'Say {n}: '} for n in range(4)])\n"
    ),
    "recipe.toml": """
        task = "task.py:make"
        data.chat = false
        loss.name = "loss.py:mine"
        advantages.grouping = "groups.py:by_prompt"
        advantages.function = "advantage.py:plain"
        [[rewards]]
        function = "reward.py:score"
    """,
}
ROLES = {
    "reward.py": "reward 'score'",
    "helper.py": "reward 'score'",
    "loss.py": "loss",
    "groups.py": "advantages.grouping",
    "advantage.py": "advantages.function",
    "task.py": "task",
}


def write_files(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def inputs_of(folder: Path) -> dict:
    recipe = load_recipe(folder / "recipe.toml")
    return describe_inputs(load_components(recipe, load_inputs(recipe)))


def test_every_source_file_is_hashed(tmp_path):
    """Each by its role; a clone elsewhere is the same, and each changed file is named."""
    before = inputs_of(write_files(tmp_path / "a"))
    assert {(file, role) for role, files in before["sources"].items() for file in files} == set(ROLES.items())
    with RunDir.create(tmp_path / "run") as run:
        write_inputs(run, before, "recipe.toml")
        check_inputs(run, inputs_of(write_files(tmp_path / "clone")), make_recipe())
        for file, role in ROLES.items():
            folder = write_files(tmp_path / f"changed {file}")
            (folder / file).write_text(FILES[file] + "# changed\n")
            with pytest.raises(
                ConfigError, match=rf"other inputs: {file}, source of {role} \(before: \w+, now: \w+\)\. "
            ):
                check_inputs(run, inputs_of(folder), make_recipe())


def test_other_code_is_refused_unless_allowed(tmp_path, monkeypatch):
    """By a run of its own, from its recipe; what was allowed is recorded."""
    monkeypatch.chdir(write_files(tmp_path))
    Path("rows.jsonl").write_text('{"prompt": "Say: "}\n')
    reward = {"rewards": [{"function": "reward.py:score"}], "data": {"train": "rows.jsonl"}}

    def trainer(**options):
        return Trainer(small_recipe(QUICK, reward), folder="run", display=RecordingDisplay(), **options)

    run_steps(trainer(), 1)
    Path("reward.py").write_text(FILES["reward.py"].replace("even(c)", "-even(c)"))
    with pytest.raises(
        ConfigError, match=r"reward\.py, source of reward 'score'.*--allow-changed \(in Python allow_ch"
    ):
        trainer(resume=True)
    run_steps(trainer(resume=True, allow_changed=True), 1)
    (entry,) = read_json(Path("run", RESUMED))["resumed"]
    assert entry["step"] == 1
    assert list(entry["changed"]) == ["reward.py, source of reward 'score'"]
    assert trainer(resume=True).run().steps == 2  # from now on these are its inputs


ENVIRONMENTS = {
    "tools": ('tools = ["arithmetic", "own.py:twice"]', "tool 'twice'"),
    "factory": ('factory = "own.py:Echo"', "environment"),
    "rollout": ('rollout = "own.py:ask"', "rollout"),
}
OWN = """
from words import DONE

def twice(number: int) -> int:
    \"\"\"Twice a number.

    Args:
        number: A number.
    \"\"\"
    return 2 * number

class Echo:
    def reset(self, **row):
        return None

    def get_reward(self):
        return float(len(DONE))

async def ask(model, row):
    await model.chat([{"role": "user", "content": DONE}])
    return 1.0
"""


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_the_files_of_an_environment_are_hashed(kind, tmp_path):
    setting, role = ENVIRONMENTS[kind]

    def write(name: str, word: str) -> Path:
        folder = write_files(tmp_path / name)
        (folder / "own.py").write_text(OWN)
        (folder / "words.py").write_text(f"DONE = {word!r}\n")
        recipe = (folder / "recipe.toml").read_text().replace("data.chat = false", "data.max_prompt_length = 2000")
        (folder / "chat.jinja").write_text(TOOL_TEMPLATE)
        (folder / "recipe.toml").write_text(f'{recipe}\n[environment]\nchat_template = "chat.jinja"\n{setting}\n')
        return folder

    before = inputs_of(write("a", "yes"))
    assert set(before["sources"][role]) == {"own.py", "words.py"}
    with RunDir.create(tmp_path / "run") as run:
        write_inputs(run, before, "recipe.toml")
        with pytest.raises(ConfigError, match=rf"other inputs: words\.py, source of {role} "):
            check_inputs(run, inputs_of(write("b", "no")), make_recipe())


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "model"
    load_model("tiny", device="cpu").save_pretrained(folder)
    load_tokenizer("tiny").save_pretrained(folder)
    return folder


def test_the_base_of_an_adapter(tmp_path, model):
    """A LoRA run reads it again from its folder: other weights of the same names and sizes are another model."""
    settings = {"model": {"source": str(model), "device": "cpu", "lora": {"rank": 2}}}
    run_steps(small_trainer(tmp_path / "run", QUICK, settings), 1)
    weights = load_file(model / "model.safetensors")
    name = next(iter(weights))
    changed = weights[name].clone()
    changed[-1, -1] += 0.5
    save_file(weights | {name: changed}, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"other inputs: frozen weights \(before: \d+ tensors, \w+, now: \d+ tensors, "
    ):
        small_trainer(tmp_path / "run", QUICK, settings, resume=True)
    # A model that is trained as a whole is restored from the checkpoint.
    settings["model"]["lora"] = None
    run_steps(small_trainer(tmp_path / "full", QUICK, settings), 1)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert small_trainer(tmp_path / "full", QUICK, settings, resume=True).run().steps == 2


def test_frozen_weights_in_another_dtype_are_the_same(model):
    """A run may go on on another device, where "auto" is another dtype."""
    settings = {
        "model": {"source": str(model), "device": "cpu", "lora": {"rank": 2}},
        "rewards": [{"function": "repetition"}],
    }
    task = Task("try", ROWS)
    hashes = set()
    for dtype in ("float32", "bfloat16"):
        recipe = small_recipe(merged(settings, {"model": {"dtype": dtype}}))
        components = load_components(recipe, load_inputs(recipe, task=task))
        hashes.add(describe_inputs(components)["frozen weights"])
        assert components.handle.dtype == getattr(torch, dtype)
    assert len(hashes) == 1


def test_a_tokenizer_with_another_template(tmp_path, model):
    settings = {"model": {"source": str(model), "device": "cpu"}}
    run_steps(small_trainer(tmp_path / "run", QUICK, settings), 1)
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = "{{ messages[0].content }}!"
    tokenizer.save_pretrained(model)
    with pytest.raises(ConfigError, match="other inputs: tokenizer"):
        small_trainer(tmp_path / "run", QUICK, settings, resume=True)


def test_another_version_is_a_warning(tmp_path):
    said: list[str] = []
    with RunDir.create(tmp_path / "run") as run:
        write_recipe(run, make_recipe(), said.append, resuming=False)
        write_recipe(run, make_recipe(), said.append, resuming=True)
        assert said == []
        write_json(run.path / "versions.json", {**read_json(run.path / "versions.json"), "torch": "1.0", "trl": "0.1"})
        write_recipe(run, make_recipe(), said.append, resuming=True)
        (warning,) = said
        assert warning.startswith("warning: resumed with other versions")
        assert f"torch 1.0 before and {torch.__version__.split('+')[0]}" in warning
        (run.path / "versions.json").write_text("[")
        write_recipe(run, make_recipe(), said.append, resuming=True)
        assert "not known" in said[-1]


def test_inputs_of_an_earlier_version_or_damaged(tmp_path):
    """What was not kept is not compared. A damaged or missing file is an error with a remedy."""
    inputs = inputs_of(write_files(tmp_path / "a"))
    with RunDir.create(tmp_path / "run") as run:
        old = {name: value for name, value in inputs.items() if name not in ("sources", "tokenizer", "frozen weights")}
        write_inputs(run, old, None)
        assert changed_inputs(run.path, inputs) == {}
        for content in ("[]", '{"model": 3}', "{", "null"):
            (run.path / INPUTS).write_text(content)
            with pytest.raises(
                CheckpointError, match=r"inputs\.json is damaged.*delete it and resume with --allow-changed"
            ):
                check_inputs(run, inputs, make_recipe())
        (run.path / INPUTS).unlink()
        with pytest.raises(RunDirError, match=r"no inputs\.json.*--allow-changed"):
            check_inputs(run, inputs, make_recipe())
        record_changes(run, make_recipe(), inputs, 1)
        write_inputs(run, inputs, None)  # as with --allow-changed
        check_inputs(run, inputs, make_recipe())
        (run.path / RESUMED).write_text('{"resumed": [{"step": 1, "changed": {"a": [1]}}]}')
        with pytest.raises(CheckpointError, match=r"resumed\.json is damaged"):
            record_changes(run, make_recipe(), inputs, 2)
