"""The table of fields: every field of `GRPOConfig` once, and each example of it is what the translation does."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from groupwise.config import Recipe, setting_names
from groupwise.errors import ConfigError, RecipeErrors
from groupwise.integrations.trl.config import GRPOConfig
from groupwise.integrations.trl.fields import FIELDS, GROUPS, FieldExample
from groupwise.integrations.trl.translate import Translation, to_recipe, translate

ROWS = 64
REPOSITORY = Path(__file__).parents[3]


def config(**arguments: Any) -> GRPOConfig:
    return GRPOConfig(**{"output_dir": "out", "use_cpu": True, **arguments})


def translated(**arguments: Any) -> Translation:
    return translate(config(**arguments), rows=ROWS)


def examples(*kinds: str) -> list[Any]:
    return [
        pytest.param(name, example, id=f"{name}={example.value!r}".split(" object at ")[0][:60])
        for name, field in FIELDS.items()
        if field.kind in kinds
        for example in field.examples
    ]


def test_every_field_is_in_the_table_once():
    pytest.importorskip("trl")
    from trl import GRPOConfig as PeerConfig

    listed = [name for group in GROUPS.values() for name in group]
    assert len(listed) == len(set(listed))
    for kind in (GRPOConfig, PeerConfig):
        assert {field.name for field in dataclasses.fields(kind)} == set(listed)


def test_every_entry_says_what_it_does_and_has_an_example_or_a_test():
    settings = {name for name, _ in setting_names()}
    for name, field in FIELDS.items():
        assert set(field.settings) <= settings, name
        assert field.meaning or field.kind == "translated", name
        assert field.examples or field.kind == "trainer", name
        if field.kind == "trainer":
            file, _, function = field.test.partition("::")
            assert f"def {function}(" in (REPOSITORY / file).read_text(encoding="utf-8"), name


@pytest.mark.parametrize(("name", "example"), examples("translated"))
@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_a_translated_field_changes_the_recipe_as_the_table_says(name, example: FieldExample):
    given = dict(example.given)
    before, after = translated(**given).settings, translated(**given, **{name: example.value}).settings
    if name == "use_cpu":  # a config without it cannot be made on a CPU
        before = before | {"model.device": "auto"}
    changed = {key: after.get(key) for key in [*after, *before] if after.get(key) != before.get(key)}
    assert changed == example.settings
    assert set(changed) <= set(FIELDS[name].settings)


@pytest.mark.parametrize(("name", "example"), examples("no effect"))
@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_a_field_without_effect_changes_nothing(name, example: FieldExample):
    before = translated(**example.given).settings
    if name == "ddp_backend":  # would start a process group
        args = config(ddp_backend=None)
        args.ddp_backend = example.value
    else:
        args = config(**example.given, **{name: example.value})
    assert translate(args, rows=ROWS).settings == before


@pytest.mark.parametrize(("name", "example"), examples("refused"))
def test_a_refused_field_is_named_with_what_to_do(name, example: FieldExample):
    field = FIELDS[name]
    args = config(**example.given)
    translate(args, rows=ROWS)
    setattr(args, name, example.value)  # some would be refused by transformers, or need DeepSpeed
    if field.only_with:
        translate(args, rows=ROWS)
        setattr(args, field.only_with, True)
    with pytest.raises(ConfigError, match=f"GRPOConfig: {name}: .* is not supported; .") as caught:
        translate(args, rows=ROWS)
    assert field.meaning in str(caught.value)


def test_the_default_config_is_a_recipe():
    recipe = to_recipe(config(), rows=ROWS)
    assert isinstance(recipe, Recipe)
    assert recipe.train.update_per_step
    assert (recipe.train.steps, recipe.train.batch_size, recipe.sampling.samples_per_prompt) == (192, 1, 8)
    assert (recipe.optimizer.lr_schedule, recipe.loss.name, recipe.data.chat) == ("linear", "dapo", False)


@pytest.mark.parametrize(
    ("arguments", "name", "words"),
    [
        ({"loss_type": "dapoo"}, "loss_type", "did you mean 'dapo'"),
        ({"scale_rewards": "sometimes"}, "scale_rewards", "group, batch, mean, none"),
        ({"max_completion_length": None}, "max_completion_length", "number of tokens"),
        ({"max_steps": 1.5}, "max_steps", "not an integer"),
        ({"num_iterations": 0}, "num_iterations", "integer of at least 1"),
        ({"learning_rate": "fast"}, "learning_rate", "finite number of at least 0"),
        ({"learning_rate": float("nan")}, "learning_rate", "finite number"),
        ({"beta": -0.1}, "beta", "of at least 0"),
        ({"epsilon_high": float("nan")}, "epsilon_high", "of at least 0, or None"),
        ({"temperature": 0.0}, "temperature", "above 0"),
        ({"top_p": 1.5}, "top_p", "above 0 and at most 1"),
        ({"max_completion_length": "64"}, "max_completion_length", "an integer"),
        ({"max_grad_norm": "high"}, "max_grad_norm", "0 is off"),
        ({"sapo_temperature_pos": 0}, "sapo_temperature_pos", "above 0"),
        ({"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 0}, "ref_model_sync_steps", "at least 1"),
        ({"output_dir": ""}, "output_dir", "give a folder"),
        ({"generation_kwargs": {"seed": 1}}, "generation_kwargs", "seed=1"),
        ({"model_init_kwargs": {"use_safetensors": False}}, "model_init_kwargs", "pickles are not read"),
        ({"num_train_epochs": 0}, "num_train_epochs", "trains nothing"),
        ({"per_device_train_batch_size": 1024}, "per_device_train_batch_size", "128 prompts.*64 training rows"),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 3}, "gradient_accumulation_steps", "multiple"),
        (
            {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "num_iterations": 2},
            "gradient_accumulation_steps",
            "num_iterations above 1",
        ),
        ({"generation_kwargs": {"num_beams": 4}}, "generation_kwargs", "num_beams=4"),
        ({"generation_kwargs": {"temperature": 0.5}}, "generation_kwargs", "set the field temperature"),
        ({"model_init_kwargs": {"subfolder": "a"}}, "model_init_kwargs", "subfolder='a'"),
        ({"model_init_kwargs": {"dtype": "int8"}}, "model_init_kwargs", "int8"),
        ({"model_init_kwargs": {"load_in_4bit": True}}, "model_init_kwargs", "quantized models are not supported"),
        ({"model_init_kwargs": {"token": "hf_abc"}}, "model_init_kwargs", r"token='\*\*\*' has no setting"),
        ({"delta": 0.5}, "delta", "above 1"),
        ({"top_entropy_quantile": 0.0}, "top_entropy_quantile", "above 0"),
        ({"top_entropy_quantile": -1}, "top_entropy_quantile", "above 0"),
        ({"sync_ref_model": True}, "sync_ref_model", "beta"),
        ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, "importance_sampling_level", "'token'"),
        ({"loss_type": "vespo", "use_vllm": True}, "vllm_importance_sampling_correction", "set it to False"),
        ({"optim": "lion_8bit"}, "optim", "optimizers="),
        ({"optim": "sgd", "optim_args": "speed=3"}, "optim_args", "momentum"),
        ({"optim": "sgd", "optim_args": "momentum=high"}, "optim_args", "not a number"),
        ({"lr_scheduler_type": "greedy", "eval_strategy": "steps"}, "lr_scheduler_type", "optimizers="),
        ({"accelerator_config": {"split_batches": True}}, "accelerator_config", "split_batches"),
    ],
)
def test_a_value_that_cannot_be_translated_is_refused_by_its_field(arguments, name, words):
    with pytest.raises(ConfigError, match=f"GRPOConfig: {name}: .*{words}"):
        translated(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_steps": 0},  # as -1: num_train_epochs counts
        {"max_grad_norm": 1.0, "temperature": 1, "top_p": None, "repetition_penalty": None, "min_p": None},
        {"top_k": -1},
        {"learning_rate": "1e-6", "epsilon": "0.2"},  # YAML reads 1e-6 as a text
        {"generation_kwargs": {}},
        {"generation_kwargs": "{}"},
        {"generation_kwargs": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "min_p": 0}},
        {
            "generation_kwargs": {
                "num_return_sequences": 1,
                "num_beams": 1,
                "length_penalty": 2.0,
                "no_repeat_ngram_size": 0,
            }
        },
        {"generation_kwargs": {"suppress_tokens": None, "typical_p": 1.0, "pad_token_id": 0, "output_scores": True}},
        {"model_init_kwargs": {}},
        {"model_init_kwargs": {"use_safetensors": True, "force_download": False, "device_map": "auto", "token": None}},
    ],
)
def test_a_neutral_value_changes_nothing(arguments):
    assert translated(**arguments).settings == translated().settings


def test_no_clipping_of_gradients_in_every_way():
    for value in (0, 0.0, -1, None, float("inf")):
        assert translated(max_grad_norm=value).settings["optimizer.max_grad_norm"] is None


def test_all_refusals_are_listed_at_once():
    with pytest.raises(RecipeErrors) as caught:
        translated(full_determinism=True, neftune_noise_alpha=5.0, optim="lion_32bit")
    assert [sentence.partition(":")[0] for _, sentence in caught.value.errors] == [
        "neftune_noise_alpha",
        "full_determinism",
        "optim",
    ]


def test_an_error_of_the_recipe_names_the_fields():
    with pytest.raises(ConfigError, match=r"run\.log_every.*from logging_steps.* of GRPOConfig"):
        to_recipe(config(logging_steps=-1), rows=ROWS)
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate.*from learning_rate"):
        to_recipe(config(learning_rate=3.0), rows=ROWS)


def test_a_field_of_a_newer_transformers_is_refused_unless_it_is_at_its_default():
    """One that transformers itself sets, such as from None to an object, is at its default."""

    @dataclasses.dataclass
    class Newer(GRPOConfig):
        new_field: int = 3
        other_field: Any = None

        def __post_init__(self):
            super().__post_init__()
            self.other_field = self.other_field or ("made",)

    own = translate(Newer("out", use_cpu=True, new_field=4))  # a script's own class: the field is for the script
    assert own.settings == translate(config()).settings
    Newer.__module__ = "transformers.training_args"
    newer = Newer
    assert translate(newer("out", use_cpu=True)).settings == translate(config()).settings
    with pytest.raises(ConfigError, match="new_field: groupwise does not know this field"):
        translate(newer("out", use_cpu=True, new_field=4))
    with pytest.raises(ConfigError, match="other_field"):
        translate(newer("out", use_cpu=True, other_field=("own",)))


def test_without_the_number_of_rows_epochs_stay_epochs():
    translation = translate(config(warmup_steps=0.1, save_strategy="epoch", num_train_epochs=2))
    assert translation.settings["train.epochs"] == 2.0
    assert not {"train.steps", "optimizer.warmup_steps", "run.checkpoint_every"} & set(translation.settings)
    assert [note for note in translation.notes if "number of training rows" in note] == [
        "warmup_steps 0.1 depends on the number of training rows, and is left out here",
        "save_strategy 'epoch' depends on the number of training rows, and is left out here",
    ]
    assert translate(config(warmup_steps=0.1, max_steps=50)).settings["optimizer.warmup_steps"] == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"num_train_epochs": 1.5},
        {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2},
        {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "num_iterations": 2},
        {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
        {"per_device_train_batch_size": 2, "generation_batch_size": 16, "num_generations": 4},
    ],
)
@pytest.mark.parametrize("rows", [3, 10, 64])
def test_updates_are_counted_as_by_transformers(arguments, rows):
    """Against the sampler of TRL and the trainer's own count."""
    pytest.importorskip("trl")
    from transformers import Trainer
    from trl.trainer.utils import RepeatSampler

    args = config(**arguments)
    prompts = args.generation_batch_size // args.num_generations
    repeats = args.num_iterations * args.steps_per_generation
    sampler = RepeatSampler(range(rows), args.num_generations, prompts, repeats)
    batches = len(sampler) // args.generation_batch_size
    if not batches:
        with pytest.raises(ConfigError, match="training rows"):
            translate(args, rows=rows)
        return
    trainer = Trainer.__new__(Trainer)
    trainer.args = args
    trainer.get_total_train_batch_size = lambda args: 0
    trainer.get_sp_size = lambda: 1
    trainer.num_examples = lambda loader: rows
    translation = translate(args, rows=rows)
    _, per_epoch, *_, steps = trainer.set_initial_training_values(args, [None] * batches)
    assert (translation.updates_per_epoch, translation.updates) == (per_epoch, steps)
