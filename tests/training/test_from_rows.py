"""`Trainer.from_rows`: what it takes as rows and as a model, and what a run returns."""

from __future__ import annotations

import json
import math

import pandas
import pytest
import torch

import groupwise
from groupwise import Trainer
from groupwise.errors import ConfigError, DataError, InputError
from groupwise.model import LoraSettings, load_model, load_model_and_tokenizer
from groupwise.training.update.objective import TERMS
from tests.training.runs import RecordingDisplay, even

ROWS = [{"prompt": f"Say number {number}: ", "number": number} for number in range(8)]
SETTINGS = {
    "train": {"steps": 1, "batch_size": 2, "accumulation": 1},
    "sampling": {"max_new_tokens": 4, "samples_per_prompt": 4},
    "run": {"tensorboard": False, "plot": False},
}


def trainer_of(folder, rows=ROWS, reward=even, **options):
    settings = {**SETTINGS, **{name: options.pop(name) for name in list(options) if isinstance(options[name], dict)}}
    return Trainer.from_rows(rows, reward, folder=folder, display=RecordingDisplay(), **{**settings, **options})


def test_rows_from_a_file_a_list_a_frame_and_a_dataset_train_alike(tmp_path):
    datasets = pytest.importorskip("datasets")
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    tables = {"path": file, "text": str(file), "list": ROWS, "frame": pandas.DataFrame(ROWS)}
    tables["dataset"] = datasets.Dataset.from_list(ROWS)
    rewards = {}
    for name, rows in tables.items():
        with trainer_of(tmp_path / name, rows, data={"held_out_from_train": 2}) as trainer:
            assert trainer.components.task.name == "rows"
            assert [len(trainer.components.train), len(trainer.components.held_out)] == [6, 2]
            (report,) = trainer.steps()
        rewards[name] = report.metrics["reward"]
    assert len(set(rewards.values())) == 1


def test_held_out_rows_may_be_of_another_kind_than_the_training_rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, rows, held_out in (("a", file, ROWS[:3]), ("b", pandas.DataFrame(ROWS), file)):
        with trainer_of(
            tmp_path / name, rows, held_out=held_out, data={"held_out_rows": 2, "train_rows": 5}
        ) as trainer:
            assert [len(trainer.components.train), len(trainer.components.held_out)] == [5, 2]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"data": {"train": "other.jsonl"}}, ConfigError, "given twice.*data.train"),
        ({"data": {"held_out_from_train": 2}, "held_out": ROWS}, ConfigError, "cannot be combined"),
        ({"data": {"train_split": "test"}}, ConfigError, "data.train_split is for hub datasets"),
        ({"rows": ["only a text"]}, DataError, "row 1"),
        ({"rows": "missing.jsonl"}, DataError, "no file or folder 'missing.jsonl'"),
        ({"model": 3}, ConfigError, "pass tokenizer="),
        ({"model": torch.nn.Linear(2, 2), "tokenizer": object()}, InputError, "of type Linear"),
    ],
)
def test_what_cannot_be_used_is_refused_before_a_folder_is_left(tmp_path, options, error, words):
    with pytest.raises(error, match=words):
        trainer_of(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("lora", [False, True])
def test_a_loaded_model_trains_like_a_named_one(tmp_path, lora):
    settings = {"dtype": "float32", "gradient_checkpointing": False, **({"lora": {"rank": 2}} if lora else {})}
    with trainer_of(tmp_path / "named", model={"source": "tiny", **settings}) as trainer:
        (named,) = trainer.steps()
    model, tokenizer = load_model_and_tokenizer("tiny", dtype="float32")
    model.train()
    with trainer_of(tmp_path / "loaded", model={"source": model, **settings}, tokenizer=tokenizer) as trainer:
        (loaded,) = trainer.steps()
        assert trainer.recipe.model.source == "tiny:0"
        assert lora or trainer.components.model is model
    assert loaded.metrics["grad_norm"] == named.metrics["grad_norm"] > 0
    assert loaded.batch.texts == named.batch.texts


def test_a_loaded_model_brings_its_tokenizer_by_name(tmp_path):
    with trainer_of(tmp_path / "run", model=load_model("tiny", dtype="float32")) as trainer:
        assert ROWS[0]["prompt"] in trainer.components.tokenizer.decode(trainer.components.train.prompts[0].ids)


def test_a_loaded_adapter_is_trained_and_gets_no_second_one(tmp_path):
    pytest.importorskip("peft")
    adapted = load_model("tiny", dtype="float32", lora=LoraSettings(rank=2))
    with trainer_of(tmp_path / "run", model=adapted) as trainer:
        (report,) = trainer.steps()
        assert report.metrics["grad_norm"] > 0
        assert {name for name, _ in trainer.masters.named_parameters()} == {
            name for name, weight in adapted.named_parameters() if weight.requires_grad
        }
    with pytest.raises(InputError, match="has a LoRA adapter already"):
        trainer_of(tmp_path / "again", model={"source": adapted, "lora": {"rank": 2}})


def test_a_quantised_model_and_one_on_several_devices_are_refused(tmp_path):
    model = load_model("tiny")
    model.hf_device_map = {"model": 0, "lm_head": 1}
    with pytest.raises(InputError, match="2 devices"):
        trainer_of(tmp_path / "run", model=model)
    del model.hf_device_map
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    with pytest.raises(InputError, match="quantised"):
        trainer_of(tmp_path / "run", model=model)


def test_rewards_may_be_functions_with_weights_names_and_tables(tmp_path):
    (tmp_path / "mine.py").write_text("def ones(completions, **_):\n    return [1.0] * len(completions)\n")
    name = f"{tmp_path / 'mine.py'}:ones"
    table = {"function": name, "weight": 0.25, "name": "quarter"}
    weights = {}
    for number, rewards in enumerate([even, (even, 0.5), name, [(even, 0.5), name, table]]):
        with trainer_of(tmp_path / str(number), reward=rewards) as trainer:
            functions = trainer.components.scorer.functions
            weights[number] = {function.name: function.weight for function in functions}
    assert list(weights.values()) == [
        {"even": 1.0},
        {"even": 0.5},
        {"ones": 1.0},
        {"ones": 1.0, "quarter": 0.25, "even": 0.5},
    ]


def test_the_result_has_the_metrics_of_training_and_of_the_held_out_rows(tmp_path):
    trainer = trainer_of(tmp_path / "run", held_out=ROWS[:2], train={"steps": 2, "batch_size": 2, "accumulation": 1})
    result = trainer.run()
    assert isinstance(result, groupwise.RunResult)
    assert (result.steps, result.exit_status, result.folder) == (2, 0, tmp_path / "run")
    assert result.train["num_tokens"] == 2 * 2 * 4 * 4
    assert {"reward", "loss", "grad_norm"} <= set(result.train)
    assert set(result.held_out) == set(result.first_held_out) >= {"reward", "reward_low", "reward_high"}
    assert (result.model / "config.json").exists()


def test_a_resumed_run_that_is_finished_still_has_the_last_metrics(tmp_path):
    first = trainer_of(tmp_path / "run", held_out=ROWS[:2]).run()
    with trainer_of(tmp_path / "run", held_out=ROWS[:2], resume=True) as trainer:
        list(trainer.steps())
        again = trainer.finish()
    assert again.train == first.train


@pytest.mark.parametrize("algorithm", ["dapo", "gspo", "dr_grpo", "pg_grpo", "enhanced_grpo"])
def test_a_step_without_a_learning_signal_reports_every_usual_metric(tmp_path, algorithm):
    reports = {}
    for name, most in (("equal", 1), ("different", 2)):

        def by_place(completions, most=most, **_):
            return [float(place % most) for place in range(len(completions))]

        with trainer_of(tmp_path / name, reward=by_place, algorithm=algorithm, masks={"validity": False}) as trainer:
            (reports[name],) = (report.metrics for report in trainer.steps())
    assert set(reports["equal"]) == set(reports["different"])
    different = reports["different"]
    assert all(math.isfinite(value) for value in different.values())
    if algorithm in ("dapo", "gspo", "dr_grpo"):  # without a KL nothing is computed
        equal = reports["equal"]
        assert (equal["updates"], equal["loss"], equal["grad_norm"], equal["clip_ratio/region_mean"]) == (0, 0, 0, 0)
        assert math.isnan(equal["entropy"])
        assert math.isnan(equal["sampler/logp_difference_mean"])


def test_the_statistics_that_the_terms_declare_are_those_that_they_report(tmp_path):
    teacher = {"weight": 0.5, "teacher": "reference", "show": "{prompt}!"}
    options = {"loss": {"kl_coef": 0.1}, "distillation": teacher}
    with trainer_of(tmp_path / "run", algorithm="pg_grpo", **options) as trainer:
        (report,) = trainer.steps()
    renamed = {"clip_fraction_low": "clip_ratio/low_mean", "clip_fraction_high": "clip_ratio/high_mean"}
    declared = {renamed.get(name, name) for term in TERMS.values() for name in term.statistics}
    assert declared <= set(report.metrics)
    assert all(math.isfinite(report.metrics[name]) for name in declared)


def test_the_usual_names_are_at_the_top():
    for name in groupwise.__all__:
        assert getattr(groupwise, name) is not None
    assert groupwise.Trainer is Trainer
    assert set(groupwise._SUBMODULES) <= set(groupwise.__all__)
