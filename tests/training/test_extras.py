"""What a recipe needs beyond the base dependencies is asked for before anything is read or loaded."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from groupwise.cli import main
from groupwise.config import make_recipe
from groupwise.errors import MissingExtraError
from groupwise.model import weights
from groupwise.training import extras
from groupwise.training.evaluation import evaluate_recipe
from groupwise.training.extras import check_extras, model_needs, recipe_needs
from groupwise.training.trainer import Trainer

EXTRAS = {
    "peft": "lora",
    "gguf": "gguf",
    "accelerate": "gguf",
    "datasets": "hub",
    "sentence_transformers": "embed",
    "ray": "ray",
    "openai": "judge",
    "math_verify": "math",
    "wandb": "wandb",
}


@pytest.fixture
def hide(monkeypatch):
    """A function that hides packages, as if they were not installed."""
    real = importlib.util.find_spec

    def hide(*packages):
        for package in packages:
            monkeypatch.delitem(sys.modules, package, raising=False)
        monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name in packages else real(name, *a))

    return hide


@pytest.fixture
def base_only(hide, tmp_path, monkeypatch):
    """No optional package, no fetched model, and a working directory without files."""
    hide(*EXTRAS)
    monkeypatch.setenv("GROUPWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


# a recipe's table, and the extras it needs
NEEDS = [
    ({}, []),
    ({"model": {"lora": {"rank": 4}}}, ["lora"]),
    ({"model": {"source": "smollm2-135m"}}, ["gguf"]),
    ({"model": {"source": "owner/name"}}, []),
    ({"data": {"train": "owner/name"}}, ["hub"]),
    ({"data": {"train": ["rows.jsonl", "owner/name"]}}, ["hub"]),
    ({"data": {"held_out": "owner/name"}}, ["hub"]),
    ({"data": {"train": "rows.jsonl", "held_out": "./owner/name"}}, []),
    ({"preference": {"pairs": "data", "weight": 1.0, "train": "owner/name"}}, ["hub"]),
    ({"algorithm": "similarity_group_grpo", "grouping": {"embedder": "minilm"}}, ["embed"]),
    ({"algorithm": "similarity_group_grpo", "grouping": {"embedder": "owner/name"}}, ["embed"]),
    ({"algorithm": "similarity_group_grpo", "grouping": {"embedder": "wordllama"}}, []),
    ({"grouping": {"embedder": "minilm", "workers": 2}}, []),  # not used
    ({"grouping": {"embedder": "wordllama", "workers": 2, "log_diversity": True}}, ["ray"]),
    ({"algorithm": "similarity_group_grpo", "grouping": {"embedder": "wordllama", "workers": 0}}, []),
    ({"rewards": [{"function": "judge", "options": {"model": "m"}}]}, ["judge"]),
    ({"rewards": [{"function": "math_equal"}]}, ["math"]),
    ({"rewards": [{"function": "length_band"}]}, []),
    ({"run": {"wandb": "project"}}, ["wandb"]),
]


@pytest.mark.parametrize(("table", "needed"), NEEDS, ids=lambda value: json.dumps(value)[:60])
@pytest.mark.usefixtures("base_only")
def test_what_a_recipe_needs(table, needed):
    recipe = make_recipe(table)
    assert sorted({need.extra for need in recipe_needs(recipe)}) == needed
    if not needed:
        check_extras(recipe)
        return
    with pytest.raises(MissingExtraError, match=rf"pip install 'groupwise\[{needed[0]}\]'$"):
        check_extras(recipe)


def test_every_extra_of_the_list_is_tested():
    assert {extra for _, needed in NEEDS for extra in needed} == set(EXTRAS.values())


@pytest.mark.usefixtures("base_only")
def test_all_missing_extras_are_one_command():
    table = {
        "model": {"source": "smollm2-135m", "lora": {}},
        "data": {"train": "a/b", "held_out": "a/b"},
        "run": {"wandb": "p"},
    }
    with pytest.raises(MissingExtraError) as error:
        check_extras(make_recipe(table))
    message = str(error.value)
    assert message.endswith("pip install 'groupwise[gguf,lora,hub,wandb]'")
    for words in ("smollm2-135m", "model.lora", "a/b (data.train)", "run.wandb"):
        assert message.count(words) == 1


def test_only_what_is_missing_is_asked_for(hide, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hide("datasets")
    recipe = make_recipe({"model": {"lora": {}}, "data": {"train": "a/b"}})
    with pytest.raises(MissingExtraError, match=r"pip install 'groupwise\[hub\]'$"):
        check_extras(recipe)


def test_a_second_package_of_an_extra(hide, tmp_path):
    hide("accelerate")
    (tmp_path / "m.gguf").touch()
    with pytest.raises(MissingExtraError, match=r"m.gguf needs the package 'accelerate'.*\[gguf\]"):
        check_extras(make_recipe({"model": {"source": str(tmp_path / "m.gguf")}}))


@pytest.mark.usefixtures("base_only")
def test_a_fetched_model_needs_no_extra(monkeypatch, tmp_path):
    monkeypatch.setattr(extras, "cached", lambda entry: tmp_path)
    check_extras(make_recipe({"model": {"source": "smollm2-135m"}}))
    assert {need.extra for need in model_needs("smollm2-135m", fetched=False)} == {"gguf"}


@pytest.mark.usefixtures("base_only")
def test_an_evaluation_needs_less():
    table = {
        "algorithm": "similarity_group_grpo",
        "grouping": {"embedder": "minilm", "workers": 2},
        "run": {"wandb": "project"},
    }
    check_extras(make_recipe(table), training=False)
    with pytest.raises(MissingExtraError, match=r"\[embed,ray,wandb\]"):
        check_extras(make_recipe(table))


def test_a_saved_adapter(base_only):
    (base_only / "adapter").mkdir()
    config = base_only / "adapter" / "adapter_config.json"
    config.write_text(json.dumps({"base_model_name_or_path": "smollm2-135m"}))
    assert [need.extra for need in model_needs("adapter")] == ["lora", "gguf", "gguf"]
    config.write_text(json.dumps({"base_model_name_or_path": str(base_only / "adapter")}))
    assert [need.extra for need in model_needs("adapter")] == ["lora"]
    config.write_text("{")
    assert [need.extra for need in model_needs("adapter")] == ["lora"]
    (base_only / "adapter" / "config.json").write_text("{}")  # a complete model
    assert model_needs("adapter") == []


@pytest.mark.usefixtures("base_only")
def test_an_unknown_embedder_is_reported_elsewhere():
    check_extras(make_recipe({"algorithm": "similarity_group_grpo", "grouping": {"embedder": "minilmm"}}))


@pytest.mark.usefixtures("base_only")
def test_rows_and_a_model_given_in_python():
    recipe = make_recipe({"model": {"source": "smollm2-135m"}, "data": {"train": "a/b"}})
    with pytest.raises(MissingExtraError, match=r"\[hub\]"):
        check_extras(recipe, loads_model=False)
    check_extras(recipe, loads_model=False, reads_rows=False)


def no_reading(*_, **__):
    raise AssertionError("rows were read or a model was loaded before the extras were checked")


@pytest.fixture
def nothing_is_read(base_only, monkeypatch):
    for name in ("trainer.load_inputs", "preflight.load_inputs", "inputs.load_task", "components._load_model"):
        monkeypatch.setattr(f"groupwise.training.{name}", no_reading)
    monkeypatch.setattr(weights, "fetch", no_reading)
    return base_only


@pytest.mark.parametrize("command", ["train", "check", "eval"])
def test_the_commands_ask_before_anything_is_read(nothing_is_read, capsys, command):
    (nothing_is_read / "r.toml").write_text('[model]\nsource = "smollm2-135m"\n[data]\ntrain = "owner/name"\n')
    assert main([command, "r.toml", "--model.lora.rank", "4"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith("pip install 'groupwise[gguf,lora,hub]'")
    assert not (nothing_is_read / "runs").exists()


@pytest.mark.usefixtures("nothing_is_read")
def test_sample_asks_before_the_model_is_fetched(capsys):
    assert main(["sample", "smollm2-135m", "Hello"]) == 2
    assert capsys.readouterr().err.rstrip().endswith("pip install 'groupwise[gguf]'")


@pytest.mark.usefixtures("nothing_is_read")
def test_python_asks_before_anything_is_read():
    recipe = make_recipe({"model": {"source": "smollm2-135m"}})
    with pytest.raises(MissingExtraError, match=r"\[gguf\]"):
        Trainer(recipe)
    with pytest.raises(MissingExtraError, match=r"\[gguf\]"):
        evaluate_recipe(recipe)
    with pytest.raises(MissingExtraError, match=r"\[gguf\]"):
        Trainer.from_rows([{"prompt": "a"}], len, model="smollm2-135m")


@pytest.mark.usefixtures("nothing_is_read")
def test_a_medical_report_asks_too():
    from groupwise.usmle.evaluation import exam_of_recipe

    with pytest.raises(MissingExtraError, match=r"\[gguf\]"):
        exam_of_recipe(make_recipe({"task": "usmle", "model": {"source": "smollm2-135m"}}))


@pytest.mark.slow
def test_the_quiz_loads_no_optional_package(tmp_path):
    """With everything optional made unimportable, a short run of the quiz ends with its model and its picture."""
    hidden = [*EXTRAS, "tensorboardX", "gymnasium", "imageio", "sklearn", "scipy", "trl", "stable_baselines3"]
    code = f"""
import sys
sys.modules.update(dict.fromkeys({hidden!r}))
from groupwise.cli import main
settings = "train.steps=2 sft.steps=2 evaluate.every=0 data.held_out_rows=8 train.batch_size=4 run.folder=run".split()
sys.exit(main(["train", "quiz", *(f"--{{setting}}" for setting in settings)]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
