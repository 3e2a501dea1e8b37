"""Recipes: layers, error messages, overrides, renamed settings, and what a schedule may change."""

from __future__ import annotations

import ast
import importlib.util
import json
import pickle
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from groupwise.algorithms import ALGORITHMS
from groupwise.cli import main
from groupwise.cli.settings import parse_settings
from groupwise.config import (
    Recipe,
    load_recipe,
    make_recipe,
    parse_override,
    resolve_scheduled,
    scheduled_names,
    setting_names,
    with_settings,
)
from groupwise.config import names as names_module
from groupwise.config.fields import choices_of, section_of, types_of
from groupwise.config.layers import nested, read_options
from groupwise.config.names import OTHER_LIBRARIES, RENAMED, RENAMED_VALUES
from groupwise.config.sections import LOSS_NAMES, PREFERENCE_KINDS, LoraSection
from groupwise.core.advantages import BASELINES, COMBINATIONS, SCALES
from groupwise.core.aggregation import AGGREGATIONS
from groupwise.core.filters import ORDERS
from groupwise.core.importance import IMPORTANCE_MODES, REJECTIONS
from groupwise.core.kl import ESTIMATORS
from groupwise.core.losses import DENOMINATORS, LOSSES, RATIOS
from groupwise.core.masks import DIVERGENCES, OFF_POLICY_RULES
from groupwise.core.preference import KINDS
from groupwise.errors import ConfigError, RecipeErrors
from groupwise.training.from_rows import trainer_arguments

NAMES = dict(setting_names())


def refused(table, **options):
    """The message of the error that a recipe raises."""
    with pytest.raises(ConfigError) as caught:
        make_recipe(table, **options)
    return str(caught.value)


# --- the layers ------------------------------------------------------------------------------------------------------


def test_an_empty_recipe_is_the_default_preset():
    assert make_recipe() == make_recipe({}) == make_recipe({"algorithm": "dapo"}) == Recipe()


def test_layers_are_merged_key_by_key(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text('algorithm = "enhanced_grpo"\n[sampling]\ntop_k = 20\n[optimizer]\nlearning_rate = 3e-6\n')
    recipe = load_recipe(path, {"sampling.top_k": 5, "train.steps": 7})
    assert recipe.sampling.top_k == 5  # set in all three layers
    assert recipe.optimizer.learning_rate == 3e-6  # preset and file
    assert recipe.sampling.samples_per_prompt == 16  # only in the preset
    assert recipe.train.steps == 7  # only overridden
    assert recipe.optimizer.beta2 == 0.999  # the default
    assert load_recipe(path).sampling.top_k == 20


def test_the_algorithm_can_be_overridden(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text('algorithm = "gspo"\n')
    recipe = load_recipe(path, {"algorithm": "dr_grpo"})
    assert (recipe.algorithm, recipe.loss.name, recipe.advantages.scale) == ("dr_grpo", "dr_grpo", "none")
    assert recipe.loss.clip_low == 0.2  # nothing of the file's preset is left


def test_an_optional_section_can_be_switched_on_and_off(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text("[model.lora]\nrank = 4\n")
    assert load_recipe(path).model.lora.rank == 4
    assert load_recipe(path, {"model.lora.alpha": 8.0}).model.lora.model_dump() == {
        **LoraSection().model_dump(),
        "rank": 4,
        "alpha": 8.0,
    }
    assert load_recipe(path, {"model.lora": None}).model.lora is None
    assert make_recipe(overrides={"model.lora.rank": 2}).model.lora.rank == 2
    with pytest.raises(ConfigError, match=r"'model.lora.rank' cannot be set: 'lora' is not a section"):
        make_recipe(overrides={"model.lora": None, "model.lora.rank": 2})


def test_tables_with_free_keys_are_replaced():
    below = make_recipe({"data": {"chat_template_kwargs": {"a": 1}}, "ramps": {"temperature": {"at": [[0, 1.0]]}}})
    above = with_settings(below, {"data.chat_template_kwargs": {"b": 2}, "ramps": {"kl_coef": {"at": [[0, 1.0]]}}})
    assert above.data.chat_template_kwargs == {"b": 2}
    assert list(above.ramps) == ["kl_coef"]


def test_recipes_are_immutable():
    recipe = make_recipe()
    with pytest.raises(ValidationError):
        recipe.train.steps = 5
    with pytest.raises(ValidationError):
        recipe.algorithm = "grpo"
    other = with_settings(recipe, {"sampling.temperature": 0.5})
    assert (recipe.sampling.temperature, other.sampling.temperature) == (1.0, 0.5)
    assert with_settings(other, {"sampling.temperature": 1.0}) == recipe
    with pytest.raises(ConfigError, match=r"the recipe: sampling.temperature = -1 cannot be used; it should"):
        with_settings(recipe, {"sampling.temperature": -1})


def test_with_settings_keeps_what_differs_from_the_preset():
    recipe = make_recipe({"algorithm": "gspo", "loss": {"clip_low": 0.1}, "rewards": [{"function": "a:b"}]})
    other = with_settings(recipe, {"loss.kl_coef": 0.5})
    assert other.loss.clip_low == 0.1
    assert other.rewards == recipe.rewards


def test_get():
    assert make_recipe().get("sampling.temperature") == 1.0
    assert make_recipe().get("task") == "rows"
    assert make_recipe().get("model.lora.rank") is None
    assert make_recipe({"model": {"lora": {}}}).get("model.lora.rank") == 16


# --- a run's recipe.json ---------------------------------------------------------------------------------------------


def test_recipe_json_round_trip(tmp_path):
    recipe = make_recipe(
        {
            "algorithm": "enhanced_grpo",
            "model": {"lora": {"targets": ["q_proj"]}},
            "sampling": {"top_k": None, "stop": ["\n"]},
            "masks": {"keep_sampling_mask": False},
            "rewards": [{"function": "a:b", "weight": 2}],
            "phases": [{"name": "one", "steps": 3, "temperature": 0.7}],
        }
    )
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(recipe.model_dump()))
    assert load_recipe(path) == recipe
    assert load_recipe(path).sampling.top_k is None  # no preset beneath, whose 40 would come back otherwise
    assert load_recipe(path, {"train.steps": 3}).train.steps == 3
    assert load_recipe(path, {"algorithm": "enhanced_grpo"}) == recipe


def test_recipe_json_has_no_preset_below(tmp_path):
    path = tmp_path / "recipe.json"
    path.write_text('{"algorithm": "enhanced_grpo"}')
    assert load_recipe(path).model_dump() == {**Recipe().model_dump(), "algorithm": "enhanced_grpo"}
    with pytest.raises(ConfigError, match="holds every setting of a run with 'enhanced_grpo', so the preset 'grpo'"):
        load_recipe(path, {"algorithm": "grpo"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"train": {\n  "steps": }', r"recipe.json is not valid JSON: Expecting value \(at line 2, column 12\)"),
        ("[]", "recipe.json is not a recipe"),
        ('{"trian": {}}', r"recipe.json: unknown section or key 'trian'; did you mean 'train'\?"),
    ],
)
def test_damaged_recipe_json(tmp_path, text, message):
    path = tmp_path / "recipe.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_recipe(path)


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_missing_recipe_suggests_the_nearest_file(tmp_path):
    (tmp_path / "quiz.toml").write_text("")
    with pytest.raises(ConfigError, match=rf"there is no recipe {tmp_path}/quizz.toml; did you mean .*quiz.toml\?"):
        load_recipe(tmp_path / "quizz.toml")
    with pytest.raises(
        ConfigError, match=r"there is no recipe .*nowhere.toml: there is no folder .*far \(packaged recipes: "
    ):
        load_recipe(tmp_path / "far" / "nowhere.toml")


def test_a_recipe_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"is a folder, not a recipe"):
        load_recipe(tmp_path)
    path = tmp_path / "r.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"the recipe .*r.toml cannot be read: .*utf-8"):
        load_recipe(path)
    path.write_text("[train]\nsteps = 3\nbatch_size = four\n")
    with pytest.raises(ConfigError, match=r"r.toml is not valid TOML: .*\(at line 3, column 14\)"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("source = tiny", '; a text needs quotes: source = "tiny"'),
        ("source = ./a/b # c", '; a text needs quotes: source = "./a/b"'),
        ("source = 3..4", ""),
        ("source =", ""),
    ],
)
def test_a_text_without_quotes(tmp_path, line, hint):
    path = tmp_path / "r.toml"
    path.write_text(f"[model]\n{line}\n")
    with pytest.raises(ConfigError) as error:
        load_recipe(path)
    assert re.search(r"\(at line 2, column \d+\)(.*)$", str(error.value))[1] == hint


def test_an_unknown_setting_names_the_command():
    with pytest.raises(ConfigError, match="`groupwise eval --help all` lists all"):
        parse_settings([("zzz", "1")], "eval")


@pytest.mark.parametrize("name", ["nothere.jsonl", "rows.parquet", "rows.CSV"])
@pytest.mark.parametrize("exists", [False, True])
def test_rows_are_no_recipe(tmp_path, name, exists):
    (tmp_path / "nothere.toml").write_text("")
    if exists:
        (tmp_path / name).write_text('{"prompt": "a"}')
    with pytest.raises(ConfigError) as caught:
        load_recipe(tmp_path / name)
    message = str(caught.value)
    assert ("does not exist" in message) is not exists
    for part in ("a recipe is a TOML file", "groupwise init", f"--data.train {tmp_path / name}"):
        assert part in message
    assert "did you mean" not in message


# --- unknown names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"trian": {"steps": 3}}, "the recipe: unknown section or key 'trian'; did you mean 'train'?"),
        ({"train": {"stps": 3}}, "the recipe: unknown key 'train.stps'; did you mean 'steps'?"),
        ({"model": {"lora": {"rnak": 3}}}, "the recipe: unknown key 'model.lora.rnak'; did you mean 'rank'?"),
        ({"train": {"temperature": 1.0}}, "the recipe: unknown key 'train.temperature'; did you mean "
                                          "'sampling.temperature' or 'evaluate.temperature'?"),
        ({"seed": 3}, "the recipe: unknown section or key 'seed'; did you mean 'train.seed'?"),
        ({"rewards": [{"function": "a:b"}, {"function": "c:d", "wieght": 1}]},
         "the recipe: unknown key 'wieght' in [[rewards]] number 2; did you mean 'weight'?"),
        ({"reference": {"zzz": 1}}, "the recipe: unknown key 'reference.zzz' (there are: refresh_every, mix)"),
        ({"algorithm": "grop"}, "the recipe: unknown algorithm 'grop'; did you mean 'grpo'? (allowed: "
                                f"{', '.join(map(repr, ALGORITHMS))})"),
        ({"algorithm": 5}, f"the recipe: unknown algorithm 5 (allowed: {', '.join(map(repr, ALGORITHMS))})"),
        ({"loss": {"name": "dapoo"}}, "the recipe: unknown loss 'dapoo'; did you mean 'dapo'? (allowed: grpo, bnpo, "
                                      "dr_grpo, dapo, gspo, luspo, cispo, sapo, vespo, reinforce, or module:function)"),
        ({"advantages": {"scale": "grup"}}, "the recipe: advantages.scale cannot be 'grup'; did you mean 'group'? "
                                            "(allowed: group, batch, batch_advantages, mean, none)"),
        ({"masks": {"off_policy": 3}}, "the recipe: masks.off_policy cannot be 3 (allowed: v3.2, reference_drift)"),
        ({"sampling": {"order": "mlx"}}, "the recipe: sampling.order cannot be 'mlx'; did you mean 'mlx_lm'? (allowed: "
                                         "transformers, vllm, mlx_lm)"),
        ({"model": {"dtype": "bf16"}}, "the recipe: model.dtype cannot be 'bf16'; did you mean 'bfloat16'? (allowed: "
                                       "auto, float32, bfloat16, float16, float64)"),
    ],
)  # fmt: skip
def test_a_wrong_name_suggests_the_nearest(table, sentence):
    assert refused(table) == sentence


def hint_of(name):
    """The hint in the error of an unknown setting on the command line, after its name."""
    with pytest.raises(ConfigError) as caught:
        parse_override(name, "1")
    message = str(caught.value)
    start, end = f"unknown setting --{name}", " (`groupwise train --help all` lists all)"
    assert message.startswith(start)
    assert message.endswith(end)
    return message.removeprefix(start).removesuffix(end)


def test_names_of_other_libraries_are_settings_with_valid_values():
    for theirs, hint in OTHER_LIBRARIES.items():
        assert hint.settings or hint.note, theirs
        for name in hint.settings:
            value = hint.value if hint.value is not None else "1"
            parse_override(name, str(value).lower())  # it exists
            if hint.value is not None and not name.startswith("rewards."):
                assert make_recipe(nested({name: hint.value})).get(name) == hint.value
            assert name in hint_of(theirs)
        if "." not in theirs:
            assert hint.note in hint_of(theirs)
            assert refused({theirs: 1}).startswith(f"the recipe: unknown section or key '{theirs}'; ")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("lr", "; did you mean 'optimizer.learning_rate'?"),
        ("use_unbiased_kl", "; did you mean `--loss.kl unbiased`?"),
        ("embedding_lr", "; did you mean 'optimizer.embedding_learning_rate'?"),
        ("beta", "; did you mean 'loss.kl_coef' or 'preference.beta'? (GRPO's β, the weight of the KL; DPO's β)"),
        ("loss.beta", "; did you mean 'loss.kl_coef'?"),
        ("preferance.beta", "; did you mean 'preference.beta'?"),  # only the section is misspelt
        ("trian.batch_size", "; did you mean 'train.batch_size'?"),
        ("use_vllm", "; did you mean `--sampling.generator vllm`? (groupwise's own engine is the default)"),
        ("cache_implementation", "; groupwise samples with its own engine, so there is nothing to set"),
        ("save_only_model", "; did you mean `--run.resumable false`?"),
        ("steps", "; did you mean 'train.steps' or 'sft.steps'?"),  # the usual one first
        ("report_to", "; did you mean 'run.tensorboard' or 'run.wandb'?"),
        ("train.foo", ""),
        ("data.zeal", ""),
        ("local_rank", ""),
        ("log_on_each_node", ""),
    ],
)  # fmt: skip
def test_hints(name, hint):
    assert hint_of(name) == hint


def test_a_hint_with_a_value_in_a_recipe():
    assert refused({"loss": {"use_unbiased_kl": True}}) == (
        "the recipe: unknown key 'loss.use_unbiased_kl'; did you mean `loss.kl = \"unbiased\"`?"
    )
    assert refused({"save_only_model": True}).endswith("did you mean `run.resumable = false`?")


PROMPTS = "it counts prompts, where TRL counts completions: divide by num_generations"
PER_PROMPT = "a number of completions of each prompt"
STEP = "a step has train.batch_size × train.accumulation prompts"
NAMES_OF_DESIGNS = {
    "enhanced GRPO": {
        "num_samples_per_prompt": ("sampling.samples_per_prompt", PER_PROMPT),
        "temperature": ("sampling.temperature", ""),
        "top_k": ("sampling.top_k", ""),
        "max_new_tokens": ("sampling.max_new_tokens", ""),
        "prompts_per_step": ("train.batch_size", f"both count prompts; {STEP}"),
        "learning_rate": ("optimizer.learning_rate", ""),
        "embedding_lr": ("optimizer.embedding_learning_rate", ""),
        "num_epochs": ("train.epochs", ""),
        "kl_coef": ("loss.kl_coef", ""),
        "use_baseline": ("advantages.baseline", "mean subtracts the group's mean"),
        "normalize_advantages": ("advantages.scale", "group divides by the group's deviation"),
        "use_unbiased_kl": ("loss.kl", "unbiased"),
        "use_off_policy_masking": ("masks.off_policy", "v3.2"),
        "off_policy_threshold": ("masks.off_policy_threshold", ""),
        "max_grad_norm": ("optimizer.max_grad_norm", ""),
        "update_reference_every": ("reference.refresh_every", "in steps"),
        "batch_size": ("train.batch_size", PROMPTS),
        "num_return_sequences": ("sampling.samples_per_prompt", PER_PROMPT),
        "threshold": ("masks.off_policy_threshold", ""),
        "min_length": ("masks.min_length", ""),
        "final_steps": ("train.steps", "`steps` of the last of the [[phases]]"),
    },
    "GRPO reference": {
        "learningRate": ("optimizer.learning_rate", ""),
        "numEpochs": ("train.epochs", ""),
        "batchSize": ("train.batch_size", PROMPTS),
        "per_device_train_batch_size": ("train.batch_size", PROMPTS),
        "gradientAccumulationSteps": ("train.accumulation", STEP),
        "gradient_accumulation_steps": ("train.accumulation", STEP),
        "numGenerations": ("sampling.samples_per_prompt", PER_PROMPT),
        "num_generations": ("sampling.samples_per_prompt", PER_PROMPT),
        "clipEpsilon": ("loss.clip_low", ""),
        "epsilon": ("loss.clip_low", ""),
        "epsilon_high": ("loss.clip_high", ""),
        "klCoef": ("loss.kl_coef", ""),
        "beta": ("loss.kl_coef", "GRPO's β"),
        "scaleRewards": ("advantages.scale", ""),
        "scale_rewards": ("advantages.scale", ""),
        "lossType": ("loss.name", "the loss of GRPO"),
        "loss_type": ("loss.name", "the loss of GRPO"),
        "importanceSamplingLevel": ("loss.ratio", ""),
        "importance_sampling_level": ("loss.ratio", ""),
        "maxNewTokens": ("sampling.max_new_tokens", ""),
        "max_completion_length": ("sampling.max_new_tokens", "a number of tokens"),
        "temperature": ("sampling.temperature", ""),
        "temp": ("sampling.temperature", ""),
        "topP": ("sampling.top_p", ""),
        "top_p": ("sampling.top_p", ""),
        "topK": ("sampling.top_k", ""),
        "top_k": ("sampling.top_k", ""),
        "minP": ("sampling.min_p", ""),
        "min_p": ("sampling.min_p", ""),
        "maxPromptLength": ("data.max_prompt_length", ""),
        "shuffleDataset": ("data.shuffle", ""),
        "gradientCheckpointing": ("model.gradient_checkpointing", ""),
        "bf16": ("model.dtype", "bfloat16"),
        "num_items_in_batch": ("", "the tokens of a mini-batch are counted"),
        "min_tokens_to_keep": ("", "at least one token is always kept"),
        "use_vllm": ("sampling.generator", "own engine is the default"),
    },
    "similarity groups": {
        "adv_estimator": ("algorithm", ""),
        "n_similarity_workers": ("grouping.workers", "a number of processes"),
        "model_name": ("grouping.embedder", "the embedder of similarity groups"),
        "MIN_SILHOUETTE": ("grouping.min_silhouette", ""),
        "n_groups": ("grouping.max_groups", ""),
    },
    "preference-guided GRPO": {
        "epsilon_low": ("loss.clip_low", ""),
        "epsilon_high": ("loss.clip_high", ""),
        "beta": ("preference.beta", "DPO's β"),
        "loss_type": ("preference.kind", "a list"),
        "loss_weights": ("preference.kind_weights", "one for each preference.kind"),
        "w1": ("loss.kl_coef", "the weight of the KL"),
        "w_1": ("loss.kl_coef", "the weight of the KL"),
        "w2": ("preference.weight", "the weight of the preference loss"),
        "w_2": ("preference.weight", "the weight of the preference loss"),
    },
    "control": {
        "lr": ("optimizer.learning_rate", ""),
        "group_size": ("sampling.samples_per_prompt", PER_PROMPT),
        "clip_range": ("loss.clip_low", ""),
        "kl_coef": ("loss.kl_coef", ""),
        "optimizer": ("optimizer", ""),
        "update_frequency": ("train.batch_size", f"in prompts; {STEP}"),
        "advantage_norm": ("advantages.scale", "group divides"),
    },
}


@pytest.mark.parametrize(
    ("key", "setting", "note"),
    [
        pytest.param(key, *expected, id=f"{design}-{key}")
        for design, keys in NAMES_OF_DESIGNS.items()
        for key, expected in keys.items()
        if key != "optimizer"  # a section here
    ],
)
def test_every_name_of_the_designs_is_answered_with_ours_and_its_unit(key, setting, note):
    """At the top of a recipe, in a wrong section, on the command line, and as an argument in Python."""
    with pytest.raises(ConfigError) as python:
        trainer_arguments([], [], "tiny", None, None, "dapo", {key: 1})
    messages = [refused({key: 1}), refused({"scoring": {key: 1}}), f"--{key}{hint_of(key)}", str(python.value)]
    for message in messages:
        assert setting in message
        assert note in message
    if setting not in ("", "algorithm"):
        assert setting in NAMES


@pytest.mark.parametrize(
    ("option", "setting"),
    [
        *(
            ("--learning-rate", "lr"),
            ("--learning_rate", "lr"),
            ("--group-size", "group_size"),
            ("--kl-coef", "kl_coef"),
        ),
        *(("--clip-range", "clip"), ("--epsilon", "clip"), ("--beta", "kl_coef")),
    ],
)
def test_names_of_hyperparameters_of_control(capsys, option, setting):
    assert main(["control", "train", option, "0.1"]) == 2
    assert re.search(rf"has no option {option}; .*--algo [\w-]+:{setting}=VALUE", capsys.readouterr().err)


def test_a_list_of_preference_losses_is_answered_with_its_equivalent():
    table = {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.8, 0.2]}
    with pytest.raises(RecipeErrors) as caught:
        make_recipe(table)
    _, kinds, weights = caught.value.lines()
    assert 'did you mean `preference.kind = ["sigmoid", "sft"]`?' in kinds
    assert "did you mean `preference.kind_weights = [0.8, 0.2]`?" in weights
    equivalent = tomllib.loads(
        "\n".join(re.search(r"`(preference[^`]*)`", line)[1] for line in (kinds, weights)),
    )
    recipe = make_recipe(equivalent)
    assert (recipe.preference.kinds, recipe.preference.kind_weights) == (table["loss_type"], table["loss_weights"])
    assert 'did you mean `loss.name = "dr_grpo"`?' in refused({"loss": {"loss_type": "dr_grpo"}})
    with pytest.raises(ConfigError, match=re.escape("""did you mean `--preference.kind_weights '[0.8, 0.2]'`?""")):
        parse_override("loss_weights", "[0.8, 0.2]")
    with pytest.raises(ConfigError, match=re.escape("""did you mean `--preference.kind '["sigmoid", "sft"]'`?""")):
        parse_override("loss_type", '["sigmoid", "sft"]')


# Settings of TRL that have no equivalent here, and no setting of a similar name that would be suggested.
NO_EQUIVALENT = """
    accelerator_config activation_offloading auto_find_batch_size average_tokens_across_devices batch_eval_metrics
    bf16_full_eval dataset_num_proc debug deepspeed disable_dropout disable_tqdm do_predict
    ds3_gather_for_generation enable_jit_checkpoint eval_accumulation_steps eval_delay
    eval_do_concat_batches eval_use_gather_object f_alpha_divergence_coef f_divergence_type fp16_full_eval fsdp
    fsdp_config full_determinism greater_is_better hub_always_push hub_private_repo hub_strategy hub_token
    ignore_data_skip include_for_metrics include_num_input_tokens_seen label_names length_column_name
    liger_kernel_config local_rank log_completions_hub_repo log_level_replica log_multimodal log_on_each_node
    log_unique_prompts logging_first_step logging_nan_inf_filter max_tool_calling_iterations neftune_noise_alpha
    optim_target_modules pad_to_multiple_of pad_token padding_free
    parallelism_config precompute_ref_batch_size prediction_loss_only remove_unused_columns
    restore_callback_states_from_checkpoint router_aux_loss_coef
    save_on_each_node skip_memory_metrics tf32 torch_compile_backend torch_compile_mode torch_empty_cache_steps
    train_sampling_strategy use_cache use_liger_kernel use_weighting
    vllm_structured_outputs_regex use_dora lora_modules_to_save
    lora_target_parameters lora_task_type load_in_8bit load_in_4bit bnb_4bit_quant_type bnb_4bit_quant_storage
    use_bnb_nested_quant
"""


def trl_settings():
    """The names in TRL's configuration classes, read from the files: importing TRL takes half a minute."""
    root = Path(importlib.util.find_spec("trl").origin).parent / "trainer"
    names = {}
    for class_name in ("GRPOConfig", "DPOConfig", "ModelConfig"):
        file = class_name.removesuffix("Config").lower() + "_config"
        tree = ast.parse((root / f"{file}.py").read_text())
        (body,) = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name]
        names |= {node.target.id: class_name for node in body if isinstance(node, ast.AnnAssign)}
    return names


def test_every_setting_of_trl_has_a_hint_or_none():
    names = trl_settings()
    assert {"num_generations", "max_completion_length", "loss_weights", "lora_r"} <= set(names)
    same = {key.rpartition(".")[2] for key in NAMES}
    unknown = set(names) - {*OTHER_LIBRARIES, *same, *NO_EQUIVALENT.split(), "_VALID_DICT_FIELDS"}
    assert unknown == set()


def test_names_without_an_equivalent_have_no_hint():
    assert [(name, hint_of(name)) for name in NO_EQUIVALENT.split() if hint_of(name)] == []


# --- wrong values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("train.batch_size", 4.5, "an integer of at least 1"),
        ("train.batch_size", 4.0, "an integer of at least 1: write 4"),
        ("train.batch_size", 0, "an integer of at least 1"),
        ("train.batch_size", True, "an integer of at least 1"),
        ("train.batch_size", "4", "an integer of at least 1: write 4 without quotes"),
        ("train.batch_size", "many", "an integer of at least 1"),
        ("train.seed", -1, "an integer of at least 0"),
        ("sampling.top_k", "x", "an integer of at least 0"),
        ("sampling.temperature", "hot", "a number of at least 1e-06 and at most 1e+06"),
        ("sampling.temperature", "0.5", "a number of at least 1e-06 and at most 1e+06: write 0.5 without quotes"),
        ("sampling.temperature", 0.0, "a number of at least 1e-06 and at most 1e+06"),
        ("sampling.temperature", 1e-300, "a number of at least 1e-06 and at most 1e+06"),
        ("sampling.temperature", float("nan"), "a number of at least 1e-06 and at most 1e+06, and finite"),
        ("optimizer.learning_rate", 10.0, "a number of at least 0 and at most 1"),
        ("optimizer.learning_rate", 1e39, "a number of at least 0 and at most 1"),
        ("optimizer.eps", 1e-300, "a number of at least 1e-20 and at most 1"),
        ("sft.learning_rate", 1e10, "a number above 0 and at most 1"),
        ("loss.kl_coef", 1e39, "a number of at least 0, and at most 3.4e+38, the largest float32"),
        ("train.batch_size", 2**31, "an integer of at least 1, and below 2,147,483,648"),
        ("sampling.top_p", 1.5, "a number above 0 and at most 1"),
        ("sampling.min_p", -0.5, "a number of at least 0 and at most 1"),
        ("optimizer.beta1", 1.0, "a number of at least 0 and below 1"),
        ("loss.entropy_coef", float("inf"), "a number, and finite"),
        ("loss.dual_clip", float("inf"), "a number above 1, and finite"),
        ("data.shuffle", "yes", "true or false"),
        ("data.shuffle", 1, "true or false"),
        ("model.source", 5, "a string"),
        ("sampling.stop", "x", 'a list of strings, such as ["one", "two"]'),
        ("sampling.stop", ["x", 5], 'a list of strings, such as ["one", "two"]'),
        ("data.chat_template_kwargs", 5, "a table, such as { name = true }"),
        ("model.lora.targets", 5, 'a string or a list of strings, such as ["one", "two"]'),
        ("model.lora.targets", [5, 6], 'a string or a list of strings, such as ["one", "two"]'),
        ("model", "tiny", "a section, written [model]"),
        ("model.lora", True, "a section, written [model.lora]"),
        ("rewards", {"function": "a:b"}, "a list of tables, each under [[rewards]]"),
        ("rewards", [{"function": "a:b"}, 5], "a list of tables, each under [[rewards]]"),
        ("phases", {"steps": 5}, "a list of tables, each under [[phases]]"),
        ("rules", ["x"], "a list of tables, each under [[rules]]"),
        ("ramps", {"temperature": 5}, "a table of tables, such as temperature = { from = 1.0, to = 0.7, steps = 200 } "
                                      "under [ramps]"),
    ],
)  # fmt: skip
def test_wrong_values(name, value, expected):
    sentence = f"{name} = {value!r} cannot be used; it should be {expected}"
    assert refused(nested({name: value}), where="r.toml") == f"r.toml: {sentence}"
    assert refused({}, where="r.toml", overrides={name: value}) == f"on the command line: {sentence}"


def test_entries_of_a_list_are_counted_from_one():
    table = {"rewards": [{"function": "a:b"}, {"function": "a:c", "weight": "2"}, {"weight": 1}]}
    assert refused(table) == (
        "the recipe: [[rewards]] number 2, weight = '2' cannot be used; it should be a number: write 2 without quotes; "
        "the recipe: [[rewards]] number 3 has no 'function'"
    )


def test_several_errors_have_a_line_each():
    def lines(**options):
        with pytest.raises(RecipeErrors) as caught:
            make_recipe(**options)
        error = pickle.loads(pickle.dumps(caught.value))
        assert str(error) == str(caught.value)
        assert error.lines() == caught.value.lines()
        return error.lines()

    table = {"train": {"steps": 4.5, "stps": 1}}
    assert lines(table=table, where="r.toml") == [
        "2 errors in r.toml:",
        "train.steps = 4.5 cannot be used; it should be an integer of at least 0",
        "unknown key 'train.stps'; did you mean 'steps'?",
    ]
    assert lines(overrides={"train.steps": -1, "train.seed": -1})[0] == "2 errors on the command line:"
    mixed = lines(table=table, where="r.toml", overrides={"train.seed": -1})
    assert mixed[0] == "3 errors:"
    assert [line.partition(": ")[0] for line in mixed[1:]] == ["r.toml", "on the command line", "r.toml"]
    # Contradictions, too.
    table = {"loss": {"name": "x"}, "masks": {"keep_sampling_mask": True}}
    title, *sentences = lines(table=table)
    assert title == "2 errors in the recipe:"
    assert [sentence.split()[0] for sentence in sentences] == ["unknown", "masks.keep_sampling_mask"]


# --- entries of lists of tables --------------------------------------------------------------------------------------


LISTS = {
    "rewards": [{"function": "a:b"}, {"function": "c:d", "weight": 2.0, "options": {"low": 1, "high": 2}}],
    "phases": [{"name": "one", "steps": 3, "temperature": 0.7}],
    "rules": [{"when": "accuracy < 0.1", "then": "learning_rate * 0.5", "over": 3}],
}


def test_an_entry_of_a_list_is_set_by_its_number():
    overrides = {
        name: parse_override(name, text)
        for name, text in {
            "rewards.1.weight": "1",
            "rewards.0.function": "e:f",
            "rewards.1.options.low": "5",
            "phases.0.temperature": "0.5",
            "phases.0.name": "first",
            "rules.0.over": "7",
        }.items()
    }
    recipe = make_recipe(LISTS, overrides=overrides)
    first, second = recipe.rewards
    assert (first.function, first.weight) == ("e:f", 1.0)
    assert (second.function, second.weight, second.options) == ("c:d", 1.0, {"low": 5, "high": 2})
    assert recipe.phases == [{"name": "first", "steps": 3, "temperature": 0.5}]
    assert recipe.rules[0]["over"] == 7
    assert LISTS["rewards"][0] == {"function": "a:b"}  # the table itself is not changed


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rewards.2.weight", 1.0, "no rewards.2: the recipe has 2 entries of [[rewards]], numbered from 0"),
        ("phases.1.steps", 1, "no phases.1: the recipe has 1 entry of [[phases]], numbered from 0"),
        ("rewards.0.weight", "x", "on the command line: rewards.0.weight = 'x' cannot be used; it should be a number"),
    ],
)
def test_wrong_entries_of_a_list(name, value, message):
    assert message in refused(LISTS, overrides={name: value})


def test_an_entry_of_a_missing_list():
    message = "there is no rewards.0: the recipe has no [[rewards]]"
    assert refused({}, overrides={"rewards.0.weight": 1.0}).endswith(message)
    assert "rewards is not a list" in refused({"rewards": {"a": 1}}, overrides={"rewards.0.weight": 1.0})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rewards.0.wieght", "unknown key 'wieght' in --rewards.0.wieght; did you mean 'weight'?"),
        ("rewards.weight", "give the number of an entry, from 0, and a key, such as --rewards.0.weight"),
        ("rewards.0", "such as --rewards.0.weight"),
        ("rules.-1.over", "such as --rules.0.over"),
        ("train.0.steps", "unknown setting --train.0.steps"),
    ],
)
def test_wrong_names_of_entries(name, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_override(name, "1")


def test_all_errors_are_listed_once():
    message = refused(
        {"train": {"steps": 4.5, "stps": 1}, "model": {"lora": {"targets": 5}}},
        where="r.toml",
        overrides={"train.seed": -1},
    )
    assert message.split("; ") == [
        "r.toml: model.lora.targets = 5 cannot be used",
        'it should be a string or a list of strings, such as ["one", "two"]',
        "r.toml: train.steps = 4.5 cannot be used",
        "it should be an integer of at least 0",
        "on the command line: train.seed = -1 cannot be used",
        "it should be an integer of at least 0",
        "r.toml: unknown key 'train.stps'",
        "did you mean 'steps'?",
    ]


def test_integers_are_accepted_as_floats():
    recipe = make_recipe({"sampling": {"temperature": 1}, "train": {"epochs": 2}})
    assert isinstance(recipe.sampling.temperature, float)
    assert recipe.train.epochs == 2.0


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"loss": {"name": "gspo", "ratio": "token"}}, "the loss 'gspo' has no token ratio; leave loss.ratio out or "
                                                       "use 'sequence'"),
        ({"loss": {"name": "vespo", "ratio": "sequence_product"}}, "the loss 'vespo' has no sequence_product ratio"),
        ({"train": {"epochs": None}}, "set train.steps or train.epochs"),
        ({"sampling": {"min_new_tokens": 300}}, "sampling.min_new_tokens 300 is more than sampling.max_new_tokens 256"),
        ({"sampling": {"samples_per_prompt": 1}}, "sampling.samples_per_prompt is 1, so every advantage is 0"),
        (
            {"masks": {"keep_sampling_mask": True}, "sampling": {"top_k": 5, "repetition_penalty": 1.1}},
            "masks.keep_sampling_mask renormalizes over the tokens that the filters left, but sampling.repetition",
        ),
        ({"masks": {"keep_sampling_mask": True}}, "masks.keep_sampling_mask renormalizes over the tokens"),
        ({"loss": {"aggregation": "prompt_mean", "denominator": "policy_mask"}}, "loss.aggregation 'prompt_mean' "),
        ({"masks": {"drop_equal_rewards": True}, "advantages": {"baseline": "none"}}, "masks.drop_equal_rewards"),
        ({"masks": {"drop_equal_rewards": True}, "train": {"mini_batch_by": "samples"}}, "masks.drop_equal_rewards"),
        (
            {"masks": {"drop_equal_rewards": True}, "distillation": {"weight": 1.0, "teacher": "reference"}},
            "masks.drop_equal_rewards would also drop completions that the teacher",
        ),
        ({"masks": {"divergence_threshold": 0.1}}, "masks.divergence_threshold has no effect"),
        ({"masks": {"divergence": "tv"}, "loss": {"name": "gspo"}}, "masks.divergence limits single tokens, but the "
                                                                    "loss 'gspo'"),
        ({"masks": {"divergence": "kl"}, "loss": {"ratio": "sequence"}}, "masks.divergence limits single tokens, but "
                                                                         "loss.ratio 'sequence'"),
        ({"masks": {"divergence": "tv"}, "loss": {"dual_clip": 3.0}}, "masks.divergence takes the place of the clip"),
        ({"data": {"solved_pass_rate": 0.8}}, "data.solved_pass_rate has no effect without data.sampl"),
        ({"data": {"solved_share": 0.2}}, "data.solved_share has no effect"),
        ({"data": {"unsolved_pass_rate": 0.1}}, "data.unsolved_pass_rate has no effect"),
        ({"data": {"unsolved_share": 0.2, "sampling": "uniform"}}, "data.unsolved_share has no effect"),
        ({"data": {"pass_rate_memory": 0.0}}, "data.pass_rate_memory has no effect"),
        ({"loss": {"importance_normalize": True}}, "loss.importance_normalize has no effect"),
        ({"loss": {"rejection": "product"}}, "loss.rejection 'product' has no effect"),
        ({"loss": {"rejection": "k3", "rejection_low": 0.1}}, "loss.rejection 'k3' is a distance"),
        ({"advantages": {"pass_at_k": 9}}, "advantages.pass_at_k 9 is more than sampling.samples_per_prompt 8"),
        ({"advantages": {"pass_at_k": 2, "scale": "mean"}}, "advantages.pass_at_k 2 has a scale of its own"),
        ({"advantages": {"pass_at_k": 2, "baseline": "none"}}, "advantages.pass_at_k 2 has a baseline of its own"),
        ({"advantages": {"pass_at_k": 2, "combine": "normalize_then_sum"}}, "advantages.pass_at_k 2 is of the sum"),
        ({"advantages": {"pass_at_k": 2, "function": "a:b"}}, "advantages.pass_at_k 2 has no effect"),
        ({"advantages": {"pass_at_k": 2, "shrinkage": 1.0, "grouping": "similarity"}}, "advantages.pass_at_k 2 counts"),
        ({"advantages": {"pass_at_k": 2}, "scoring": {"length_penalty": 0.1}}, "advantages.pass_at_k 2 only asks"),
        ({"advantages": {"scale": "mean"}, "scoring": {"overlong_buffer": 3}}, "advantages.scale 'mean' divides"),
        ({"advantages": {"scale": "mean", "combine": "normalize_then_sum"}}, "advantages.scale 'mean' is of the sum"),
        ({"masks": {"divergence": "tv"}, "sampling": {"generator": "vllm", "top_k": 5}}, "masks.divergence compares"),
    ],
)  # fmt: skip
def test_contradictory_settings(table, message):
    assert refused(table).startswith(f"the recipe: {message}")


@pytest.mark.parametrize(
    "table",
    [
        {"sampling": {"samples_per_prompt": 1}, "advantages": {"baseline": "none"}},
        {"sampling": {"samples_per_prompt": 1}, "advantages": {"grouping": "mine:function"}},
        {"masks": {"keep_sampling_mask": True}, "sampling": {"top_k": 5}},
        {"masks": {"keep_sampling_mask": True}, "sampling": {"top_p": 0.9}},
        {"masks": {"keep_sampling_mask": True}, "sampling": {"min_p": 0.1}},
        {"train": {"epochs": None, "steps": 3}},
        {"loss": {"name": "mine:loss"}},
        *({"loss": {"name": name}} for name in LOSSES),
    ],
)
def test_valid_combinations(table):
    make_recipe(table)


# --- choices ---------------------------------------------------------------------------------------------------------


CHOICES = {
    "advantages.scale": SCALES,
    "advantages.baseline": BASELINES,
    "advantages.combine": COMBINATIONS,
    "loss.kl": (*ESTIMATORS, "full", "full_ratio_weighted"),
    "loss.ratio": RATIOS,
    "loss.denominator": DENOMINATORS,
    "loss.importance_sampling": IMPORTANCE_MODES,
    "loss.aggregation": AGGREGATIONS,
    "loss.rejection": REJECTIONS,
    "masks.divergence": DIVERGENCES,
    "masks.off_policy": OFF_POLICY_RULES,
    "sampling.order": ORDERS,
}


@pytest.mark.parametrize("name", CHOICES)
def test_literals_match_the_choices_of_core(name):
    assert sorted(choices_of(NAMES[name])) == sorted(CHOICES[name])
    for choice in CHOICES[name]:
        if name != "loss.ratio":  # not every loss has both
            needed = {"loss.importance_sampling": "loss.importance_cap", "loss.rejection": "loss.rejection_high"}
            more = {needed[name]: 2.0} if name in needed else {}
            assert make_recipe(nested({name: choice, **more})).get(name) == choice


def test_other_literals_do_not_come_from_core():
    """A new Literal is either in CHOICES, or one that is not the core's."""
    others = {name for name, field in NAMES.items() if choices_of(field)} - set(CHOICES)
    assert others == {"model.dtype", "model.sharding", "data.on_too_long", "scoring.on_error", "optimizer.lr_schedule",
                   "train.mini_batch_by",
                   "data.sampling",
                   "loss.kl_aggregation",
                   "train.on_non_finite", "vllm.weights",
                   "sampling.kv_cache_dtype",
                   "run.export_dtype", "advantages.difficulty", "grouping.method", "grouping.dtype", "preference.pairs",
                   "preference.on_too_long", "distillation.kl", "distillation.dtype"}  # fmt: skip


def test_other_literals_match_the_code_that_uses_them():
    from groupwise.grouping.cluster import METHODS
    from groupwise.rewards.scorer import ON_ERROR
    from groupwise.training.rollout.difficulty import WEIGHTS
    from groupwise.training.update.exact_kl import EXACT_KL_FACTORS

    assert set(choices_of(NAMES["advantages.difficulty"])) == {"none", *WEIGHTS}
    assert set(choices_of(NAMES["loss.kl"])) == {*ESTIMATORS, *EXACT_KL_FACTORS}
    assert choices_of(NAMES["grouping.method"]) == METHODS
    assert set(choices_of(NAMES["scoring.on_error"])) == set(ON_ERROR)


def test_names_of_losses_are_those_of_core():
    """They are written out in the sections, so that help does not load torch."""
    assert tuple(LOSSES) == LOSS_NAMES
    assert tuple(KINDS) == PREFERENCE_KINDS


def test_every_section_has_a_summary():
    sections = {name: section_of(field) for name, field in Recipe.model_fields.items()}
    for name, section in sections.items():
        if section is not None:
            assert section.__doc__, name
            assert len(section.__doc__) < 80
            assert "\n" not in section.__doc__


def test_config_is_imported_without_torch():
    code = "import sys, groupwise.config; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_every_setting_has_a_description():
    for name, field in NAMES.items():
        assert field.description, name
        assert "{" not in field.description.replace("{enable_thinking = false}", ""), name
    assert "vespo" in NAMES["loss.name"].description
    assert all(name in NAMES["algorithm"].description for name in ALGORITHMS)


def test_types():
    assert types_of(NAMES["sampling.top_k"]) == {int, type(None)}
    assert types_of(NAMES["model.lora.targets"]) == {str, list}
    assert types_of(NAMES["loss.ratio"]) == {str, type(None)}
    assert types_of(NAMES["data.chat_template_kwargs"]) == {dict}
    assert types_of(NAMES["train.steps"]) == {int, type(None)}


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("train.steps", "5", 5),
        ("train.steps", "1_000", 1000),
        ("train.steps", "007", 7),
        ("train.steps", "none", None),
        ("train.steps", "Null", None),
        ("train.steps", "4.0", 4.0),
        ("train.steps", "many", "many"),
        ("train.steps", "5\nbatch_size = 3", "5\nbatch_size = 3"),
        ("optimizer.learning_rate", "1", 1.0),
        ("optimizer.learning_rate", "1e-6", 1e-6),
        ("optimizer.learning_rate", ".5", 0.5),
        ("loss.entropy_coef", "-0.01", -0.01),
        ("loss.entropy_coef", "-1e-3", -1e-3),
        ("data.shuffle", "false", False),
        ("data.shuffle", "True", True),
        ("data.shuffle", "yes", "yes"),
        ("sampling.stop", '["a", "b"]', ["a", "b"]),
        ("model.lora.targets", '["q_proj"]', ["q_proj"]),
        ("model.lora.targets", "all-linear", "all-linear"),
        ("data.chat_template_kwargs", "{ enable_thinking = false }", {"enable_thinking": False}),
        ("model.source", "tiny", "tiny"),
        ("model.source", '"tiny"', "tiny"),
        ("data.train", "2024-01-01", "2024-01-01"),
        ("run.name", "5", "5"),
        ("run.name", "True", "True"),
        ("run.name", "none", None),
        ("advantages.scale", "none", "none"),
        ("advantages.baseline", "none", "none"),
        ("loss.ratio", "none", None),
        ("model.lora", "none", None),
        ("rewards", '[{ function = "a:b" }]', [{"function": "a:b"}]),
    ],
)
def test_overrides_are_parsed(name, text, value):
    parsed = parse_override(name, text)
    assert parsed == value
    assert type(parsed) is type(value)


@given(value=st.integers(1, 10**9))
def test_integers_round_trip(value):
    assert parse_override("train.steps", str(value)) == value


@given(value=st.floats(1e-300, 1e300))
def test_floats_round_trip(value):
    assert parse_override("optimizer.learning_rate", repr(value)) == value


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_can_be_a_name(text):
    """What is a text in TOML is that text; "none" is none; everything else is what was typed."""
    parsed = parse_override("run.name", text)
    if text.lower() in ("none", "null"):
        assert parsed is None
        return
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        table = {}
    quoted = table["value"] if len(table) == 1 and isinstance(table["value"], str) else None
    assert parsed == (text if quoted is None else quoted)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("train.setps", "unknown setting --train.setps; did you mean 'train.steps'?"),
        ("trian.steps", "unknown setting --trian.steps; did you mean 'train.steps'? ("),
        ("modle.source", "unknown setting --modle.source; did you mean 'model.source'?"),
        ("temperature", "unknown setting --temperature; did you mean 'sampling.temperature' or "
                        "'evaluate.temperature'?"),
        ("max_new_tokns", "unknown setting --max_new_tokns; did you mean 'sampling.max_new_tokens' or "
                          "'evaluate.max_new_tokens'?"),
        ("zzz", "unknown setting --zzz (`groupwise train --help all` lists all)"),
        ("reference", "--reference is a section and takes no value; its settings are "
                      "--reference.refresh_every, --reference.mix"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("text", ["1", "word", "true"])
def test_unknown_overrides(name, sentence, text):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        parse_override(name, text)


# --- schedules -------------------------------------------------------------------------------------------------------


def test_scheduled_settings_by_bare_and_by_dotted_name():
    recipe = make_recipe()
    for bare, full in (
        ("temperature", "sampling.temperature"),
        ("kl_coef", "loss.kl_coef"),
        ("samples_per_prompt", "sampling.samples_per_prompt"),
        ("learning_rate", "optimizer.learning_rate"),
        ("clip_low", "loss.clip_low"),
        ("eps", "advantages.eps"),  # the optimizer's is fixed
        ("batch_size", "train.batch_size"),  # the warm-up's is fixed
    ):
        assert resolve_scheduled(recipe, bare) == resolve_scheduled(recipe, full) == full


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("seed", "'seed' is fixed for a run and cannot be scheduled"),
        ("model.source", "'model.source' is fixed for a run and cannot be scheduled"),
        ("optimizer.eps", "'optimizer.eps' is fixed for a run"),
        ("shuffle", "'shuffle' is fixed for a run"),
        ("unbiased", "'unbiased' is fixed for a run"),  # no number
        ("tempature", r"unknown setting 'tempature' in a schedule; did you mean 'temperature'\?$"),
        ("loss.klcoef", r"unknown setting 'loss.klcoef' in a schedule; did you mean 'loss.kl_coef'\?$"),
        ("lr", r"unknown setting 'lr' in a schedule; did you mean 'optimizer.learning_rate'\?$"),
        ("bf16", "unknown setting 'bf16' in a schedule$"),  # known elsewhere, but nothing to schedule
    ],
)
def test_settings_that_cannot_be_scheduled(name, message):
    with pytest.raises(ConfigError, match=message):
        resolve_scheduled(make_recipe(), name)


def test_an_ambiguous_bare_name(monkeypatch):
    monkeypatch.setattr(names_module, "NOT_SCHEDULED", set())
    with pytest.raises(ConfigError, match=r"'eps' could be advantages.eps or optimizer.eps; write the full name"):
        resolve_scheduled(make_recipe(), "eps")
    assert resolve_scheduled(make_recipe(), "optimizer.eps") == "optimizer.eps"


def test_scheduled_settings_are_numbers():
    scheduled = scheduled_names(make_recipe({"loss": {"kl_coef": 0.3}}))
    assert scheduled["loss.kl_coef"] == 0.3
    assert scheduled["sampling.top_k"] is None
    assert all(not isinstance(value, (bool, str)) for value in scheduled.values())
    sections = {name.partition(".")[0] for name in scheduled}
    assert sections == {"sampling", "advantages", "loss", "preference", "distillation", "masks", "reference",
                        "optimizer", "scoring", "train"}  # fmt: skip
    assert "train.steps" not in scheduled
    assert "sampling.max_num_seqs" not in scheduled


def test_choices_behind_optional():
    """`choices_of` finds what the annotation says, also behind `| None`."""
    assert choices_of(NAMES["masks.off_policy"]) == ("v3.2", "reference_drift")
    assert choices_of(NAMES["loss.name"]) == ()
    assert get_origin(NAMES["optimizer.lr_schedule"].annotation) is Literal
    assert get_args(NAMES["optimizer.lr_schedule"].annotation) == choices_of(NAMES["optimizer.lr_schedule"])


BESIDE = """
task = "own.py:task"
rewards = [{ function = "own.py:one" }, { function = "groupwise.rewards:length" }, { function = "none.py:two" }]
[data]
train = "rows.jsonl"
held_out = "owner/name"
[loss]
name = "own.py:loss"
[advantages]
function = "own.py:advantage"
grouping = "prompt"
[environment]
tools = ["arithmetic", "own.py:tool", "none.py:tool"]
chat_template = "rows.jsonl"
"""


def test_files_in_the_recipes_folder(tmp_path, monkeypatch):
    folder, here = tmp_path / "some recipes", tmp_path / "here"
    folder.mkdir()
    here.mkdir()
    for name in ("own.py", "rows.jsonl", "recipe.toml"):
        (folder / name).write_text(BESIDE)
    (here / "own.py").write_text("")
    monkeypatch.chdir(here)
    recipe = load_recipe("../some recipes/recipe.toml", {"advantages.grouping": "own.py:grouping"})
    beside = "../some recipes"
    assert recipe.task == f"{beside}/own.py:task"
    assert [reward.function for reward in recipe.rewards] == [
        f"{beside}/own.py:one",
        "groupwise.rewards:length",
        "none.py:two",
    ]
    assert (recipe.data.train, recipe.data.held_out) == (f"{beside}/rows.jsonl", "owner/name")
    assert (recipe.loss.name, recipe.advantages.function) == (f"{beside}/own.py:loss", f"{beside}/own.py:advantage")
    assert recipe.advantages.grouping == "own.py:grouping"
    assert recipe.environment.tools == ["arithmetic", f"{beside}/own.py:tool", "none.py:tool"]
    assert recipe.environment.chat_template == f"{beside}/rows.jsonl"
    # A recipe.json keeps the resolved paths; files in its folder are not looked for.
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "own.py").write_text("")
    (tmp_path / "run" / "recipe.json").write_text(json.dumps(recipe.model_dump()))
    assert load_recipe(tmp_path / "run" / "recipe.json") == recipe


@pytest.mark.parametrize("text", ["rewards = 3", "rewards = [3]", "data = 3", "task = 3", "[data]\ntrain = 3"])
def test_wrong_values_where_a_file_may_be_named(tmp_path, text):
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"recipe\.toml: "):
        load_recipe(tmp_path / "recipe.toml")


# --- renamed settings ------------------------------------------------------------------------------------------------


def test_former_names_are_gone_and_present_ones_exist():
    sections = {name.partition(".")[0] for name in NAMES}
    for old, new in RENAMED.items():
        assert old not in {*NAMES, *sections}
        assert new in {*NAMES, *sections}
    for name, values in RENAMED_VALUES.items():
        for old, new in values.items():
            if name == "algorithm":
                assert old not in ALGORITHMS
                assert new in ALGORITHMS
            elif name in NAMES:
                assert old not in choices_of(NAMES[name])
                assert new in choices_of(NAMES[name])


@pytest.mark.parametrize("old", RENAMED)
def test_a_former_name_is_an_error_with_the_present_one(tmp_path, old):
    new = RENAMED[old]
    sentence = f"{old} is now {new}" if "." in old else f"[{old}] is now [{new}]"
    table = nested({old if "." in old else f"{old}.steps": 1})
    assert refused(table, where="r.toml") == f"r.toml: {sentence}"
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(table))
    with pytest.raises(ConfigError, match=re.escape(f"recipe.json: {sentence}")):
        load_recipe(path)
    option = old if "." in old else f"{old}.steps"
    with pytest.raises(ConfigError, match=rf"^--{option} is now --{new if '.' in old else f'{new}.steps'}$"):
        parse_override(option, "1")
    if "." in old:
        assert refused({}, overrides={old: 1}) == f"on the command line: {sentence}"


@pytest.mark.parametrize(
    ("name", "old"), [(name, old) for name, values in RENAMED_VALUES.items() if name in NAMES for old in values]
)
def test_a_former_value_is_an_error_with_the_present_one(tmp_path, name, old):
    sentence = f"{name} {old!r} is now {RENAMED_VALUES[name][old]!r}"
    assert refused(nested({name: old}), where="r.toml") == f"r.toml: {sentence}"
    assert refused({}, overrides={name: parse_override(name, old)}) == f"on the command line: {sentence}"
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(nested({name: old})))
    with pytest.raises(ConfigError, match=re.escape(f"recipe.json: {sentence}")):
        load_recipe(path)


def test_a_former_value_of_a_task_option():
    class Options(BaseModel):
        prompt: Literal["chat", "completion"] = "chat"

    with pytest.raises(ConfigError, match=r"^\[task_options\]: prompt 'document' is now 'completion'$"):
        read_options(Options, {"prompt": "document"}, "[task_options]")


def test_a_former_name_in_a_schedule():
    for name in ("refill", "train.refill"):
        with pytest.raises(ConfigError, match=r"^train.refill is now train.resample_rounds$"):
            resolve_scheduled(make_recipe(), name)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("r.toml", "x = " + "[" * 100_000, "is not valid TOML: its tables or lists are nested too deeply"),
        ("r.toml", "x = " + "{a = " * 100_000, "nested too deeply"),
        ("r.toml", "[data]\n" + ".".join(["a"] * 100_000) + " = 1", "a dotted key has more than 100 parts"),
        ("r.toml", "[" + " . ".join(["'task'"] * 50_000) + "]", "a dotted key has more than 100 parts"),
        ("r.toml", "[task_options]\nx = " + "[" * 150 + "]" * 150, "nested too deeply"),
        ("r.toml", "[train]\nsteps = " + "9" * 5000, "4300 digits"),
        ("r.toml", "[train]\nsteps = 0x" + "f" * 5000, "train.steps' is an integer of more than 64 bits"),
        ("r.toml", "[train]\nsteps = 1\nsteps = 2", "is not valid TOML"),
        ("r.toml", "[train]\nsteps = 2026-01-01", "train.steps = datetime.date"),
        ("r.toml", "train = 5", "train = 5 cannot be used; it should be a section"),
        ("r.json", '{"x": ' + "[" * 100_000, "is not valid JSON: its tables or lists are nested too deeply"),
        ("r.json", '{"train": {"steps": ' + "9" * 5000 + "}}", "4300 digits"),
        ("r.json", '{"task": "\\ud800"}', "is not valid Unicode"),
        ("r.toml", "\xff", "not UTF-8"),
    ],
)
def test_recipe_files_that_readers_crash_on(tmp_path, name, text, problem):
    (tmp_path / name).write_bytes(text.encode("latin-1" if text == "\xff" else "utf-8"))
    with pytest.raises(ConfigError, match=problem) as error:
        load_recipe(tmp_path / name)
    assert len(str(error.value)) < 4000


def test_a_recipe_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "r.toml").write_bytes(b"\xef\xbb\xbf[train]\nsteps = 3\n")
    assert load_recipe(tmp_path / "r.toml").train.steps == 3


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train.steps", "1e999"),
        ("train.steps", "9" * 5000),
        ("train.steps", "0x" + "f" * 5000),
        ("train.steps", "[" * 5000),
        ("rewards." + "9" * 5000 + ".weight", "1"),
        ("rewards.٣.weight", "1"),
        ("rewards.0.options" + ".a" * 500, "1"),
        ("task_options" + ".a" * 500, "1"),
        ("task", "a\udcff"),
        ("a.b.c.d", "1"),
        ("phases.0.x.y", "1"),
    ],
)
def test_settings_of_junk_are_refused(name, text):
    with pytest.raises(ConfigError) as error:
        make_recipe({"rewards": [{"function": "a.py:f"}]}, overrides={name: parse_override(name, text)})
    assert len(str(error.value)) < 4000
