"""Everything that a `GRPOTrainer` loads and checks before it trains: arguments, data, model, rewards and recipe."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from groupwise.config import Recipe
from groupwise.distributed.ranks import Ranks
from groupwise.errors import ArgumentTypeError, ConfigError
from groupwise.integrations.trl.config import GRPOConfig
from groupwise.integrations.trl.conversations import ConversationArguments
from groupwise.integrations.trl.datasets import evaluation_rows, is_stream, training_rows
from groupwise.integrations.trl.peft import INITIALISED_BY_PEFT, add_by_peft, lora_settings
from groupwise.integrations.trl.rewards import RewardWeights, load_reward_models, make_rewards, reward_errors_as_in_trl
from groupwise.integrations.trl.run import RunEpochs
from groupwise.integrations.trl.translate import ALL, text_of, translate
from groupwise.model import load_model, load_tokenizer
from groupwise.model.device import resolve_device
from groupwise.rewards import RewardFunction
from groupwise.tasks.base import Task, TaskRow
from groupwise.text import Say, excerpt
from groupwise.training.components import RunComponents, load_components
from groupwise.training.inputs import check_training_inputs, load_inputs
from groupwise.training.ranks import start_ranks

NOT_SUPPORTED = {
    "quantization_config": "quantised models cannot be trained; leave it out, and use peft_config to save memory",
}
# Methods of TRL's trainer that a subclass may replace there. They do not exist here, so the run would not call them.
NOT_CALLED = (
    *("compute_loss", "_compute_loss", "training_step", "prediction_step", "_prepare_inputs", "_calculate_rewards"),
    *("_generate", "_generate_and_score_completions", "_get_per_token_logps_and_entropies", "get_train_dataloader"),
    *("_get_train_sampler", "create_optimizer", "create_scheduler", "create_optimizer_and_scheduler"),
    *("_tokenize_prompts", "_generate_single_turn", "get_high_entropy_mask", "get_off_policy_mask"),
    *("get_gamma_weights", "get_eval_dataloader", "_get_eval_sampler", "evaluation_loop", "_evaluate", "_run_epoch"),
    *("_inner_training_loop", "_maybe_log_save_evaluate", "get_batch_samples", "_clip_grad_norm"),
    *("_save", "_save_checkpoint"),
    *("get_optimizer_cls_and_kwargs", "get_decay_parameter_names", "_determine_best_metric", "_load_best_model"),
)
# What the drop-in does in place of the recipe: transformers' callbacks report, and `output_dir` is theirs, too.
OWN_SETTINGS = {
    "run.tensorboard": False,
    "run.wandb": None,
    "run.push_to_hub": None,
    "run.keep_checkpoints": ALL,
    "run.show_samples": 0,
    "evaluate.before_training": False,
    "data.assistant_last": True,
    "scoring.timeout": None,
}
EXPORTED = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
LOADED = {**EXPORTED, torch.float64: "float64"}


@dataclass(frozen=True)
class TrainingSetup:
    """What a `GRPOTrainer` is made of."""

    recipe: Recipe
    components: RunComponents
    ranks: Ranks
    epochs: RunEpochs
    evaluation_sets: dict[str, list[TaskRow]]
    reward_funcs: list[Any]
    reward_tokenizers: list[Any]
    rewards: list[RewardFunction]
    reward_weights: RewardWeights
    saved_dtype: torch.dtype  # of models that are saved


@reward_errors_as_in_trl()
def prepare_training(
    args: Any,
    model: Any,
    reward_funcs: Any,
    train_dataset: Any,
    eval_dataset: Any,
    processing_class: Any,
    reward_processing_classes: Any,
    peft_config: Any,
    conversations: ConversationArguments,
    say: Say,
) -> TrainingSetup:
    """Load the model, the rows and the rewards, and translate the arguments to a recipe; every error is raised here."""
    hides_columns = bool(args.remove_unused_columns)
    if train_dataset is None:
        train_dataset = conversations.rows_without_prompts(args)
    rows = training_rows(
        train_dataset,
        limit=_rows_of_stream(args) if is_stream(train_dataset) else None,
        remove_unused_columns=hides_columns,
    )
    evaluation_sets = evaluation_rows(eval_dataset, remove_unused_columns=hides_columns)
    if args.eval_strategy != "no" and not evaluation_sets:
        raise ConfigError(
            f"eval_strategy is {text_of(args.eval_strategy)!r}, but there is no "
            "eval_dataset: give one to GRPOTrainer, or set eval_strategy to 'no'"
        )
    for name, part in {"train_dataset": rows, **evaluation_sets}.items():
        conversations.check_prompts(part, name or "eval_dataset")
    _check_model(model)
    translation = translate(args, rows=None if is_stream(train_dataset) else len(rows))
    for note in translation.notes:
        say(note)
    settings: dict[str, Any] = {**OWN_SETTINGS, **conversations.settings(args), "model.source": _source_of(model)}
    if is_stream(train_dataset):
        settings["data.shuffle"] = False
    if os.path.isdir(settings["model.source"]):  # a folder has no versions; transformers ignores the revision, too
        settings["model.revision"] = None
    if not isinstance(model, str) and not (args.bf16 or args.fp16):
        settings["model.dtype"] = LOADED.get(model.dtype, "float32")
    recipe = translation.recipe(settings)
    device = resolve_device(recipe.model.device)
    processing_class = processing_class or _load_tokenizer(recipe, model)
    saved_dtype = _dtype_of(args, model)
    if isinstance(model, str):
        options: dict[str, Any] = {"dtype": recipe.model.dtype, "device": device, "revision": recipe.model.revision}
        model = load_model(model, trust_remote_code=recipe.model.trust_remote_code, **options)
    saved_dtype = saved_dtype or model.dtype
    _set_padding(processing_class, model)
    _check_end_tokens(args, processing_class, model)
    settings["model.lora"] = lora_settings(model, peft_config)
    if peft_config is not None and peft_config.init_lora_weights in INITIALISED_BY_PEFT:
        model = add_by_peft(model, peft_config, settings["model.lora"], beta=args.beta)
        settings["model.lora"] = lora_settings(model, None)
    settings["run.export_dtype"] = EXPORTED.get(saved_dtype)
    recipe = translation.recipe(settings)

    own_reward = conversations.reward()
    functions, tokenizers = load_reward_models(
        reward_funcs, reward_processing_classes, args, device, needed=own_reward is None
    )
    weights = RewardWeights(args.reward_weights, len(functions), environments=int(own_reward is not None))
    if own_reward is not None:
        functions, tokenizers = [*functions, own_reward], [*tokenizers, None]
    rewards = make_rewards(functions, tokenizers, weights, dict(args.chat_template_kwargs or {}))
    ranks = start_ranks(recipe)
    held_out = [row for part in evaluation_sets.values() for row in part]
    task = Task("rows", rows, held_out, tuple(rewards))
    end_ids = _end_tokens(processing_class, model) | {processing_class.pad_token_id}
    environment = conversations.environment(recipe, model, end_ids)
    if environment is not None and ranks.size > 1:
        raise ConfigError(
            "GRPOTrainer holds conversations with tools, environments or rollout_func in one process only; start it "
            "without torchrun or accelerate, or train a recipe with [environment]"
        )
    inputs = load_inputs(recipe, task=task, environment=environment, say=say, ranks=ranks)
    check_training_inputs(recipe, inputs)
    components = load_components(recipe, inputs, say, model=model, tokenizer=processing_class, ranks=ranks)
    epochs = RunEpochs.of(args, translation, train_dataset, len(rows))
    return TrainingSetup(
        recipe, components, ranks, epochs, evaluation_sets, functions, tokenizers, rewards, weights, saved_dtype
    )


def check_arguments(kind: type, **given: Any) -> None:
    """Refuse arguments that are not supported, and subclasses that replace a part of TRL's loop."""
    for name, value in given.items():
        if value:
            raise ConfigError(f"{name}: {NOT_SUPPORTED[name]}")
    for name in NOT_CALLED:
        if hasattr(kind, name):
            raise ConfigError(
                f"{kind.__name__} has a method {name}, which is a part of TRL's own loop and is not called here; use a "
                "reward function, a callback or a setting in its place, or train this class with TRL"
            )


def default_arguments(args: Any, model: Any) -> Any:
    """The arguments, or those of TRL for a model if there are none."""
    if args is None:
        source = model if isinstance(model, str) else str(getattr(model.config, "_name_or_path", ""))
        return GRPOConfig(f"{source.rstrip('/').split('/')[-1] or 'model'}-GRPO")
    missing = [name for name in ("num_generations", "generation_batch_size", "beta") if not hasattr(args, name)]
    if missing:
        raise ConfigError(f"args is a {type(args).__name__} without {missing[0]}; give a groupwise.trl.GRPOConfig")
    return args


def _rows_of_stream(args: Any) -> int | None:
    """How many rows of a stream a run uses; None if its length is not set."""
    if args.max_steps <= 0:
        return None
    micro_batches = args.max_steps * args.gradient_accumulation_steps
    rollouts = -(-micro_batches // max(args.num_iterations * args.steps_per_generation, 1))
    return int(rollouts * args.generation_batch_size // args.num_generations)


def _check_model(model: Any) -> None:
    if not isinstance(model, (str, torch.nn.Module)):
        hint = f"; write str({model!r:.100})" if isinstance(model, os.PathLike) else ""
        raise ArgumentTypeError(
            f"model is a {type(model).__name__}; give a name on the hub, a folder, or a loaded PreTrainedModel or "
            f"PeftModel{hint}"
        )
    if not isinstance(model, str) and not hasattr(model, "config"):
        raise ArgumentTypeError(
            f"model is a {type(model).__name__}, which is not a causal language model of transformers; load one with "
            "AutoModelForCausalLM.from_pretrained"
        )


def _source_of(model: Any) -> str:
    if isinstance(model, str):
        return model
    return str(getattr(getattr(model, "config", None), "_name_or_path", "") or "loaded")


def _load_tokenizer(recipe: Any, model: Any) -> Any:
    if not isinstance(model, str) and recipe.model.source == "loaded":
        raise ConfigError("processing_class is missing: the model has no name by which its tokenizer could be loaded")
    hub = {"trust_remote_code": recipe.model.trust_remote_code, "revision": recipe.model.revision}
    tokenizer = load_tokenizer(recipe.model.source, **hub)
    tokenizer.padding_side = tokenizer.truncation_side = "left"  # as TRL loads it, for what a script does with it
    return tokenizer


def _set_padding(tokenizer: Any, model: Any) -> None:
    """Set the padding token as TRL does, and refuse processors of images."""
    if not hasattr(tokenizer, "get_vocab") or hasattr(tokenizer, "image_processor"):
        raise ArgumentTypeError(f"processing_class is a {type(tokenizer).__name__}; give the tokenizer of a text model")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id


def _check_end_tokens(args: Any, tokenizer: Any, model: Any) -> None:
    """Refuse an ``eos_token_id`` in ``generation_kwargs`` that is not where completions end: at those of the model and
    of the tokenizer, as TRL counts them."""
    given = (args.generation_kwargs or {}).get("eos_token_id")
    if given is None:
        return
    known = _end_tokens(tokenizer, model)
    if not set(given if isinstance(given, (list, tuple)) else [given]) <= known:
        raise ConfigError(
            f"generation_kwargs: eos_token_id={excerpt(given)} is not among those of the model and the tokenizer "
            f"({', '.join(map(str, sorted(known)))}); set model.generation_config.eos_token_id, so that the loss and "
            "the metrics know it, too"
        )


def _end_tokens(tokenizer: Any, model: Any) -> set[int]:
    configured = getattr(model.generation_config, "eos_token_id", None)
    return {tokenizer.eos_token_id, *(configured if isinstance(configured, (list, tuple)) else [configured])} - {None}


def _dtype_of(args: Any, model: Any) -> torch.dtype | None:
    """The dtype that TRL saves: that of a loaded model, or the one it is loaded in; None: that of the model's files."""
    if not isinstance(model, str):
        return model.dtype  # type: ignore[no-any-return]
    loading = args.model_init_kwargs or {}
    chosen = loading.get("dtype") or loading.get("torch_dtype") or "float32"
    chosen = getattr(torch, chosen, None) if isinstance(chosen, str) else chosen
    return chosen if isinstance(chosen, torch.dtype) else None
