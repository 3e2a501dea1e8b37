"""`GRPOConfig` against TRL's own: the same fields, defaults, derived values and refusals."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import HfArgumentParser, TrainingArguments

from groupwise.errors import MissingExtraError
from groupwise.integrations.trl.config import GRPOConfig

CPU = {"use_cpu": True}


@pytest.fixture(scope="module")
def peer() -> type:
    pytest.importorskip("trl")
    from trl import GRPOConfig as PeerConfig

    return PeerConfig


def default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def values_of(config: Any) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def outcome(make: type, arguments: dict[str, Any]) -> tuple[str, Any]:
    """The values of a config, or the type of the error that refuses it."""
    try:
        config = make(**arguments)
    except Exception as error:
        return "refused", type(error)
    values = values_of(config)
    values["accelerator_config"] = str(values["accelerator_config"])
    return "made", values


def test_fields_defaults_and_order_are_those_of_trl(peer):
    ours, theirs = dataclasses.fields(GRPOConfig), dataclasses.fields(peer)
    assert [field.name for field in ours] == [field.name for field in theirs]  # also by position
    assert {f.name: default_of(f) for f in ours} == {f.name: default_of(f) for f in theirs}
    assert {f.name: f.type for f in ours} == {f.name: f.type for f in theirs}
    assert set(GRPOConfig._VALID_DICT_FIELDS) == set(peer._VALID_DICT_FIELDS)


def test_every_field_of_the_command_line_has_a_help_text():
    own = {field.name for field in dataclasses.fields(TrainingArguments)}
    for field in dataclasses.fields(GRPOConfig):
        assert field.name in own or field.metadata["help"]
    assert "--num_generations" in HfArgumentParser(GRPOConfig).format_help()


# Values of which some combinations are valid and others are refused.
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "per_device_train_batch_size": st.sampled_from([1, 2, 4, 6, 8, 16]),
        "gradient_accumulation_steps": st.sampled_from([1, 2, 3, 4, 8]),
        "generation_batch_size": st.sampled_from([None, 4, 8, 12, 16, 64]),
        "steps_per_generation": st.sampled_from([None, None, 1, 2, 4, 8]),
        "num_generations": st.sampled_from([1, 2, 4, 8]),
        "num_generations_eval": st.sampled_from([None, 1, 2, 3]),
        "per_device_eval_batch_size": st.sampled_from([2, 4, 8]),
        "eval_strategy": st.sampled_from(["no", "steps", "epoch"]),
        "do_eval": st.booleans(),
        "eval_steps": st.sampled_from([None, 5, 0.5]),
        "bf16": st.sampled_from([None, True, False]),
        "fp16": st.booleans(),
        "scale_rewards": st.sampled_from([True, False, "group", "batch", "none", "other"]),
        "pad_to_multiple_of": st.sampled_from(["auto", None, 8, "16", "none"]),
        "vllm_importance_sampling_mode": st.sampled_from(["token_truncate", "token_mask", "sequence_mask"]),
        "vllm_importance_sampling_clip_max": st.sampled_from([None, 2.0, 3.0]),
        "vllm_importance_sampling_clip_min": st.sampled_from([None, 0.5, 2.5]),
        "vllm_importance_sampling_correction": st.booleans(),
        "log_completions": st.booleans(),
        "log_completions_hub_repo": st.sampled_from([None, None, "me/runs"]),
        "auto_find_batch_size": st.sampled_from([False, False, False, True]),
        "report_to": st.sampled_from(["none", "tensorboard", ["wandb"]]),
        "logging_steps": st.sampled_from([1, 5, 0.2, 0]),
        "generation_kwargs": st.sampled_from([None, {"top_k": 5}, '{"top_k": 5}']),
        "output_dir": st.sampled_from([None, "out", "~/out"]),
    },
)


@settings(max_examples=100, deadline=None)
@given(arguments=ARGUMENTS)
def test_a_config_is_made_or_refused_as_in_trl(peer, arguments):
    assert outcome(GRPOConfig, arguments | CPU) == outcome(peer, arguments | CPU)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"generation_batch_size": 12}, r"generation_batch_size \(12\).*divisible"),
        ({"generation_batch_size": 8, "steps_per_generation": 1}, "cannot both be set"),
        ({"per_device_train_batch_size": 6}, r"divisible by num_generations \(8\)"),
        ({"num_generations": 1}, "at least 2"),
        ({"generation_batch_size": 8, "steps_per_generation": 0}, "steps_per_generation is 0"),
        ({"eval_strategy": "steps", "per_device_eval_batch_size": 4}, "num_generations_eval"),
        ({"auto_find_batch_size": True}, "lower per_device_train_batch_size"),
        ({"log_completions_hub_repo": "me/runs"}, "log_completions is False"),
        ({"vllm_importance_sampling_clip_min": 4.0}, "must be below"),
        (
            {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": None},
            "needs a bound",
        ),
    ],
)
def test_a_refusal_says_what_to_do(peer, arguments, words):
    with pytest.raises(ValueError, match=words):
        GRPOConfig(**arguments, **CPU)
    assert outcome(peer, arguments | CPU) == ("refused", ValueError)


def test_sequence_parallelism_is_refused_as_in_trl(peer):
    from accelerate.parallelism_config import ParallelismConfig

    for make in (GRPOConfig, peer):
        with pytest.raises(ValueError, match="cp_size"):
            make(parallelism_config=ParallelismConfig(cp_size=2), **CPU)


@pytest.mark.parametrize(
    ("old", "value", "new"),
    [
        ("use_transformers_paged", True, "use_transformers_continuous_batching"),
        ("vllm_importance_sampling_cap", 2.0, "vllm_importance_sampling_clip_max"),
    ],
)
def test_deprecated_names_warn_and_set_the_present_ones(peer, old, value, new):
    for make in (GRPOConfig, peer):
        with pytest.warns(FutureWarning, match=f"{old}.*deprecated") as caught:
            config = make(**{old: value}, **CPU)
        assert getattr(config, new) == value
    with pytest.warns(FutureWarning, match=old) as caught:
        GRPOConfig(**{old: value}, **CPU)
    assert caught[0].filename == __file__  # the line that made the config


def test_a_config_as_dict_and_json_is_that_of_trl(peer):
    arguments = {"output_dir": "out", "scale_rewards": False, "hub_token": "secret", **CPU}
    ours, theirs = GRPOConfig(**arguments), peer(**arguments)
    assert ours.to_dict() == theirs.to_dict()
    assert ours.to_dict()["hub_token"] == "<HUB_TOKEN>"
    assert json.loads(ours.to_json_string()) == json.loads(theirs.to_json_string())
    assert ours.to_sanitized_dict() == theirs.to_sanitized_dict()


def test_a_config_from_the_command_line_is_that_of_trl(peer):
    words = "--output_dir out --use_cpu --num_generations 4 --scale_rewards batch --top_k 5 --reward_weights 1.0 0.5"
    words += " --no_use_bias_correction_kl --bf16 False --pad_to_multiple_of 8"
    line = [*words.split(), "--model_init_kwargs", '{"dtype": "float32"}']
    (ours,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses(line)
    (theirs,) = HfArgumentParser(peer).parse_args_into_dataclasses(line)
    assert ours.to_dict() == theirs.to_dict()
    assert ours.reward_weights == [1.0, 0.5]
    assert ours.model_init_kwargs == {"dtype": "float32"}
    assert not ours.use_bias_correction_kl


def test_the_folder_is_the_first_argument():
    assert GRPOConfig("runs/a", **CPU).output_dir == "runs/a"
    assert GRPOConfig("runs/a", 16, **CPU).generation_batch_size == 16


def test_a_field_that_does_not_exist_is_refused():
    with pytest.raises(TypeError, match="num_generation"):
        GRPOConfig(num_generation=4, **CPU)


def test_without_accelerate_the_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "groupwise.trl", raising=False)
    monkeypatch.setattr("groupwise.errors.is_installed", lambda package: package != "accelerate")
    with pytest.raises(MissingExtraError, match=r"groupwise\[trl\]"):
        import groupwise.trl  # noqa: F401


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        (
            "max_prompt_length",
            "GRPOConfig has no field max_prompt_length: prompts have no maximum length",
        ),
        ("warmup_ratio", "GRPOConfig has no field warmup_ratio: write warmup_steps"),
        ("num_generation", "GRPOConfig has no field num_generation; did you mean 'num_generations'[?]"),
    ],
)
def test_an_unknown_field_says_what_to_write(peer, tmp_path, name, hint):
    for make in (GRPOConfig, peer):
        with pytest.raises(TypeError, match=hint if make is GRPOConfig else name):
            make(output_dir=str(tmp_path), **CPU, **{name: 1})


def test_a_class_with_its_own_constructor_takes_its_own_arguments(tmp_path):
    class Config(GRPOConfig):
        def __init__(self, name: str, max_prompt_length: int, **fields: Any) -> None:
            super().__init__(output_dir=name, **CPU, **fields)
            self.limit = max_prompt_length

    assert Config(str(tmp_path), max_prompt_length=8, top_k=5).limit == 8
    assert copy.deepcopy(Config(str(tmp_path), max_prompt_length=8, top_k=5)).top_k == 5


@pytest.mark.parametrize(
    "name", ["per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_generations"]
)
@pytest.mark.parametrize("value", [0, -4])
def test_a_batch_without_completions_is_refused_by_its_field(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        GRPOConfig(**{name: value}, **CPU)


def test_a_config_is_copied_and_written_as_that_of_trl(peer, tmp_path):
    arguments = {
        "output_dir": "out",
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "optim": "adamw_torch",
        "eval_strategy": "steps",
        "eval_steps": 0.5,
        "logging_steps": 0.25,
        "report_to": ["none"],
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        **CPU,
    }
    for change in ({}, {"beta": 0.1}, {"num_train_epochs": 1.5}):
        made = [
            dataclasses.replace(make(**arguments), steps_per_generation=None, **change) for make in (GRPOConfig, peer)
        ]
        assert made[0].to_dict() == made[1].to_dict()
        written = [dataclasses.asdict(config) for config in made]
        for values in written:
            values.pop("accelerator_config")
        assert written[0] == written[1]
    (tmp_path / "a.yaml").write_text(json.dumps(arguments))
    ours, theirs = (HfArgumentParser(kind).parse_yaml_file(tmp_path / "a.yaml")[0] for kind in (GRPOConfig, peer))
    assert ours.to_dict() == theirs.to_dict()


def test_trls_parser_takes_the_config(peer, tmp_path):
    from trl import ModelConfig, ScriptArguments, TrlParser

    values = {"num_generations": 4, "beta": 0.04, "dataset_name": "a/b", "model_name_or_path": "m", "use_cpu": True}
    (tmp_path / "a.yaml").write_text(json.dumps(values | {"learning_rate": 1e-5}))
    line = ["--config", str(tmp_path / "a.yaml"), "--beta", "0.1", "--output_dir", "out"]
    made = [
        TrlParser((ScriptArguments, kind, ModelConfig)).parse_args_and_config(line)[1] for kind in (GRPOConfig, peer)
    ]
    assert made[0].to_dict() == made[1].to_dict()
    assert (made[0].beta, made[0].num_generations) == (0.1, 4)
