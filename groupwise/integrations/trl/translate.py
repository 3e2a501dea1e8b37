"""From a `GRPOConfig` to the settings of a recipe that trains as TRL would.

TRL counts completions and updates; a recipe with ``train.update_per_step`` counts prompts and updates. A rollout has
``generation_batch_size`` completions, in ``steps_per_generation`` micro-batches, and an update takes
``gradient_accumulation_steps`` of them. What cannot be translated is refused by the field's name (`fields.py`).
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from groupwise.config import Recipe, make_recipe
from groupwise.config.layers import nested
from groupwise.errors import ConfigError, RecipeErrors, did_you_mean
from groupwise.integrations.trl.config import repository_of
from groupwise.integrations.trl.fields import FIELDS
from groupwise.integrations.trl.limits import CHOICES, CLIPPED_LOSSES, COUNT, TOKEN_LOSSES, bounds_of, to_number
from groupwise.redaction import without_secrets

if TYPE_CHECKING:
    from groupwise.integrations.trl.config import GRPOConfig

WHERE = "GRPOConfig"
# AdamW with a state that takes less memory, of bitsandbytes and torchao; here the state is float32.
SMALL_ADAMW = (
    *("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit"),
    *("adamw_torch_8bit", "adamw_torch_4bit"),
)
OPTIMIZERS = dict.fromkeys(("adamw_torch", "adamw_torch_fused", *SMALL_ADAMW), "adamw") | {
    name: name for name in ("sgd", "adagrad", "rmsprop", "adafactor")
}
OPTIMIZER_ARGUMENTS = {  # that transformers passes on
    "sgd": ("momentum", "dampening", "nesterov"),
    "adagrad": ("lr_decay", "eps"),
    "rmsprop": ("momentum", "alpha", "eps", "centered"),
}
SCHEDULES_WITHOUT_EQUAL = ("reduce_lr_on_plateau", "greedy")
GENERATION = {  # arguments of generation that are settings
    "max_new_tokens": "sampling.max_new_tokens",
    "max_tokens": "sampling.max_new_tokens",
    "min_new_tokens": "sampling.min_new_tokens",
    "min_tokens": "sampling.min_new_tokens",
    "top_k": "sampling.top_k",
    "top_p": "sampling.top_p",
    "min_p": "sampling.min_p",
    "repetition_penalty": "sampling.repetition_penalty",
    "stop_strings": "sampling.stop",
    "stop": "sampling.stop",
}
GENERATION_NEUTRAL = {  # with which sampling is what it is here; so it is with None
    "do_sample": True,
    "num_beams": 1,
    "n": 1,
    "best_of": 1,
    "num_return_sequences": 1,
    "num_beam_groups": 1,
    **dict.fromkeys(("min_length", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(("diversity_penalty", "epsilon_cutoff", "eta_cutoff", "presence_penalty", "frequency_penalty"), 0),
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty", "guidance_scale"), 1),
    **dict.fromkeys(("renormalize_logits", "remove_invalid_values", "token_healing", "ignore_eos"), False),
}
GENERATION_UNUSED = (  # of beams, caches, padding, and of what `generate` returns besides tokens
    *("length_penalty", "early_stopping", "use_cache", "cache_implementation", "cache_config", "pad_token_id"),
    *("bos_token_id", "output_scores", "output_logits", "output_attentions", "output_hidden_states"),
    *("return_dict_in_generate", "disable_compile", "compile_config", "low_memory", "logprobs"),
    "eos_token_id",  # compared with those of the model in setup.py
)
LOADING_NEUTRAL = ("attn_implementation", "device_map", "low_cpu_mem_usage", "use_cache", "use_kernels")
LOADING_DEFAULTS = {"use_safetensors": True, "force_download": False, "local_files_only": False}
LOADING_HINTS = dict.fromkeys(
    ("quantization_config", "load_in_4bit", "load_in_8bit"), "quantized models are not supported; use peft_config"
) | {
    "token": "log in with `hf auth login`, or set HF_TOKEN",
    "cache_dir": "set HF_HOME",
    "local_files_only": "set HF_HUB_OFFLINE=1",
    "use_safetensors": "pickles are not read; save the model again with save_pretrained",
}
DTYPES = ("float32", "float64", "bfloat16", "float16", "auto")
ALL = 2**31 - 1  # checkpoints
LOCAL_HOSTS = ("0.0.0.0", "127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Translation:
    """The dotted settings of a recipe, and what a user of TRL should know about them."""

    settings: dict[str, Any]
    notes: list[str]
    updates_per_epoch: int | None  # None: the number of rows is not known
    updates: int | None

    def recipe(self, more: Mapping[str, Any] | None = None) -> Recipe:
        """The recipe with ``more`` dotted settings; an error names the fields behind the settings in it."""
        try:
            return make_recipe(nested({**self.settings, **(more or {})}), where=WHERE)
        except RecipeErrors as error:
            raise RecipeErrors([(source, with_fields(sentence)) for source, sentence in error.errors]) from None
        except ConfigError as error:
            raise ConfigError(with_fields(str(error))) from None


def with_fields(sentence: str) -> str:
    """A sentence about settings, with the fields that they come from."""
    names = {
        name: None
        for name, entry in FIELDS.items()
        if entry.kind == "translated" and any(setting in sentence for setting in entry.settings)
    }
    return f"{sentence} (from {', '.join(names)} of {WHERE})" if names else sentence


def to_recipe(args: GRPOConfig, *, rows: int | None = None, more: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe of a run with these arguments and ``rows`` training rows, and ``more`` dotted settings on top."""
    return translate(args, rows=rows).recipe(more)


def translate(args: GRPOConfig, *, rows: int | None = None) -> Translation:
    """The settings of these arguments; an error lists every field that is refused.

    Without the number of training ``rows``, epochs stay epochs, and what is a share of all updates is left out.
    """
    work = Translator(args, rows)
    if work.problems:
        sentences = [(WHERE, f"{name}: {sentence}") for name, sentence in work.problems]
        raise ConfigError(": ".join(sentences[0])) if len(sentences) == 1 else RecipeErrors(sentences)
    return Translation(work.settings, work.notes, work.updates_per_epoch, work.updates)


@dataclass
class Translator:
    """Translates group by group; ``problems`` are fields and the sentences that refuse them."""

    args: Any
    rows: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for translate_group in (
            *(self._refused, self._choices, self._numbers),
            *(self._batches, self._length, self._sampling, self._vllm, self._loss, self._masks, self._entropy),
            *(self._reference, self._optimizer, self._model, self._data, self._evaluation, self._logging),
            self._saving,
        ):
            translate_group()

    def _refused(self) -> None:
        own = _own_fields(type(self.args))
        for entry in dataclasses.fields(self.args):
            value, known = getattr(self.args, entry.name), FIELDS.get(entry.name)
            if not _differs(value, entry) or (known is None and entry.name in own):
                continue
            if known is None:
                if value != getattr(self._untouched(), entry.name):  # transformers itself may set one
                    self._refuse(entry.name, "groupwise does not know this field of transformers; leave it out")
                continue
            if known.kind != "refused" or value == known.accepted:
                continue
            if not known.only_with or getattr(self.args, known.only_with):
                self._refuse(entry.name, f"{value!r:.100} is not supported; {known.meaning}")

    def _untouched(self) -> Any:
        """A config in which only the folder and the device are set."""
        same = {name: getattr(self.args, name) for name in ("output_dir", "use_cpu", "bf16", "fp16")}
        return type(self.args)(**same)

    def _refuse(self, name: str, sentence: str) -> None:
        self.problems.append((name, sentence))

    def _choices(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self.args, name)
            if value not in allowed:
                near = did_you_mean(value, allowed)
                self._refuse(name, f"{value!r:.100} is not one of {', '.join(allowed)}{near}")

    def _numbers(self) -> None:
        """Refuse values that no run could have; what follows is translated with the default in their place."""
        defaults = {entry.name: entry.default for entry in dataclasses.fields(self.args)}
        valid = copy.copy(self.args)
        for name, allowed in bounds_of(self.args).items():
            value = getattr(self.args, name)
            if name == "max_completion_length" and value is None:
                self._refuse(name, "None has no end; give a number of tokens")
            elif not allowed.allow(value):
                self._refuse(name, f"{value!r:.100} is not {allowed}")
            elif isinstance(value, str) and not allowed.integer:
                setattr(valid, name, float(value))  # "1e-6" of YAML is a text
                continue
            else:
                continue
            setattr(valid, name, 8 if defaults[name] is None and allowed == COUNT else defaults[name])
        if not self.args.output_dir:
            self._refuse("output_dir", "it is empty; give a folder")
        self.args = valid

    # -- batches and length ------------------------------------------------------------------------------------------

    def _batches(self) -> None:
        args = self.args
        slices, accumulated = args.steps_per_generation, args.gradient_accumulation_steps
        mini_batches, rollouts = max(slices // accumulated, 1), 1
        if slices % accumulated:
            rollouts = accumulated // slices
            if accumulated % slices or args.num_iterations > 1:
                self._refuse(
                    "gradient_accumulation_steps",
                    f"{accumulated} does not divide the {slices} micro-batches of a rollout (steps_per_generation), so "
                    "an update would take parts of several rollouts; make one a multiple of the other"
                    + (", and with num_iterations above 1 steps_per_generation the larger" * (args.num_iterations > 1)),
                )
            elif args.loss_type in TOKEN_LOSSES or args.scale_rewards == "batch":
                self.notes.append(
                    f"an update has {rollouts} rollouts, which are one batch here: means over a batch are over all of "
                    "them, where TRL has the mean of their means"
                )
        self.settings |= {
            "sampling.samples_per_prompt": args.num_generations,
            "train.update_per_step": True,
            "train.batch_size": args.generation_batch_size // args.num_generations,
            "train.accumulation": rollouts,
            "train.iterations": args.num_iterations,
            "train.mini_batches": mini_batches,
            "train.mini_batch_by": "samples",
            "train.local_batch_size": args.per_device_train_batch_size,
            "train.seed": args.seed,
            "train.timeout": float(args.ddp_timeout),
        }

    @property
    def updates_per_epoch(self) -> int | None:
        """As transformers counts them: of the rows that do not fill a rollout, none is used."""
        if self.rows is None:
            return None
        args = self.args
        prompts = args.generation_batch_size // args.num_generations
        micro_batches = self.rows // prompts * args.num_iterations * args.steps_per_generation
        return max(math.ceil(int(micro_batches) / int(args.gradient_accumulation_steps)), 1)

    @property
    def updates(self) -> int | None:
        if self.args.max_steps > 0:
            return int(self.args.max_steps)
        per_epoch = self.updates_per_epoch
        return None if per_epoch is None else math.ceil(self.args.num_train_epochs * per_epoch)

    def _length(self) -> None:
        args = self.args
        prompts = args.generation_batch_size // args.num_generations
        if self.rows is not None and self.rows < prompts:
            self._refuse(
                "per_device_train_batch_size",
                f"a rollout has {prompts} prompts, but there are only {self.rows} training rows; lower it, "
                "steps_per_generation or gradient_accumulation_steps",
            )
        if args.max_steps <= 0 and args.num_train_epochs <= 0:
            self._refuse("num_train_epochs", f"{args.num_train_epochs} trains nothing; give a number above 0")
        elif self.updates is not None:
            self.settings["train.steps"] = self.updates
        else:
            self.settings["train.epochs"] = float(args.num_train_epochs)

    def _interval(self, name: str, strategy: Any = "steps") -> int | None:
        """Updates between two events, from a number of updates or a share of all; None if it cannot be known yet."""
        value = getattr(self.args, name)
        needs = None
        if strategy == "epoch":
            needs, count = f"{name.partition('_')[0]}_strategy 'epoch'", self.updates_per_epoch
        elif 0 < value < 1:
            needs, count = f"{name} {value:g}", None if self.updates is None else math.ceil(self.updates * value)
        else:
            count = int(value)
        if needs and count is None:
            self.notes.append(f"{needs} depends on the number of training rows, and is left out here")
        return count

    # -- generation --------------------------------------------------------------------------------------------------

    def _sampling(self) -> None:
        args = self.args
        self.settings |= {
            "sampling.max_new_tokens": args.max_completion_length,
            "sampling.temperature": float(args.temperature),
            "sampling.top_k": args.top_k if (args.top_k or 0) > 0 else None,  # -1 is vLLM's for all
            "sampling.top_p": 1.0 if args.top_p is None else float(args.top_p),
            "sampling.min_p": args.min_p,
            "sampling.repetition_penalty": 1.0 if args.repetition_penalty is None else float(args.repetition_penalty),
        }
        if args.max_tool_calling_iterations is not None:
            self.settings["environment.max_turns"] = args.max_tool_calling_iterations + 1
        for name, value in (args.generation_kwargs or {}).items():
            if value is None or name in GENERATION_UNUSED or (name == "temperature" and value == args.temperature):
                continue
            if name in ("top_k", "min_p") and not value > 0:
                self.settings[GENERATION[name]] = None
            elif name in GENERATION:
                self.settings[GENERATION[name]] = (
                    [value] if name in ("stop", "stop_strings") and isinstance(value, str) else value
                )
            elif name == "temperature":
                self._refuse(
                    "generation_kwargs", "temperature here would not reach the loss; set the field temperature"
                )
            elif name not in GENERATION_NEUTRAL or value != GENERATION_NEUTRAL[name]:
                known = ", ".join(GENERATION)
                self._refuse("generation_kwargs", f"{name}={value!r:.100} has no setting here (there are: {known})")

    def _vllm(self) -> None:
        args = self.args
        if not args.use_vllm:
            return
        self.settings["sampling.generator"] = "vllm"
        self.settings["sampling.order"] = "vllm"
        if args.vllm_mode == "server":
            server = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
            self.settings |= {"vllm.servers": [server], "vllm.wait": float(args.vllm_server_timeout)}
            if urlsplit(server).hostname not in LOCAL_HOSTS:
                self.settings |= {"vllm.weights": "nccl", "vllm.nccl_port": args.vllm_group_port}
        else:
            self.settings["vllm.gpu_memory_utilization"] = args.vllm_gpu_memory_utilization
            self.settings["vllm.sleep"] = args.vllm_enable_sleep_mode
        if args.vllm_importance_sampling_correction:
            if args.loss_type == "vespo":
                self._refuse(
                    "vllm_importance_sampling_correction",
                    "with the loss vespo TRL corrects the ratio inside of its weight φ, which has no setting here; set "
                    "it to False, or use another loss_type",
                )
            self.settings |= {
                "loss.importance_sampling": args.vllm_importance_sampling_mode,
                "loss.importance_cap": args.vllm_importance_sampling_clip_max,
                "loss.importance_floor": args.vllm_importance_sampling_clip_min,
            }

    # -- objective ---------------------------------------------------------------------------------------------------

    def _loss(self) -> None:
        args = self.args
        name, level = args.loss_type, args.importance_sampling_level
        if name == "vespo" and level == "sequence":
            self._refuse("importance_sampling_level", "the loss vespo has ratios of its own; leave it at 'token'")
        high = args.epsilon_high if args.epsilon_high is not None or name != "cispo" else args.epsilon
        self.settings |= {
            "advantages.scale": args.scale_rewards,
            "advantages.combine": args.multi_objective_aggregation,
            "loss.name": name,
            "loss.ratio": level,
            "loss.clip_low": float(args.epsilon),
            "loss.clip_high": high,
            "loss.sapo_temperatures": [float(args.sapo_temperature_pos), float(args.sapo_temperature_neg)],
            "loss.vespo_positive": [float(args.vespo_k_pos), float(args.vespo_lambda_pos)],
            "loss.vespo_negative": [float(args.vespo_k_neg), float(args.vespo_lambda_neg)],
            "loss.kl_coef": float(args.beta),
            "loss.kl": "unbiased" if args.use_bias_correction_kl else "k3",
        }
        if args.delta is not None and name in CLIPPED_LOSSES:
            self.settings["loss.dual_clip"] = float(args.delta)

    def _masks(self) -> None:
        args = self.args
        if args.mask_truncated_completions:
            self.settings["masks.drop_truncated"] = True
        if args.off_policy_mask_threshold is not None:
            self.settings["masks.off_policy"] = "v3.2"
            self.settings["masks.off_policy_threshold"] = float(args.off_policy_mask_threshold)
        if args.top_entropy_quantile < 1:
            self.settings["masks.high_entropy"] = float(args.top_entropy_quantile)

    def _entropy(self) -> None:
        args = self.args
        self.settings["loss.entropy_coef"] = float(args.entropy_coef)
        if (args.entropy_coef or args.use_adaptive_entropy) and args.top_entropy_quantile < 1:
            self.notes.append(
                "the entropy bonus is over all tokens, in TRL over those that top_entropy_quantile leaves"
            )
        if args.use_adaptive_entropy:
            self.settings |= {
                "loss.entropy_target": float(args.entropy_target),
                "loss.entropy_step": float(args.entropy_coef_delta),
                "loss.entropy_coef_min": float(args.entropy_coef_min),
                "loss.entropy_coef_max": float(args.entropy_coef_max),
            }

    def _reference(self) -> None:
        args = self.args
        if args.sync_ref_model:
            if not args.beta:
                self._refuse(
                    "sync_ref_model", "there is no reference with beta 0; set beta, or sync_ref_model to False"
                )
            self.settings["reference.refresh_every"] = args.ref_model_sync_steps
            self.settings["reference.mix"] = float(args.ref_model_mixup_alpha)

    # -- optimizer ---------------------------------------------------------------------------------------------------

    def _optimizer(self) -> None:
        args = self.args
        self.settings |= {
            "optimizer.learning_rate": float(args.learning_rate),
            "optimizer.weight_decay": float(args.weight_decay),
            "optimizer.beta1": args.adam_beta1,
            "optimizer.beta2": args.adam_beta2,
            "optimizer.eps": args.adam_epsilon,
            "optimizer.max_grad_norm": self._max_grad_norm(),
        }
        self._schedule()
        name = text_of(args.optim)
        if name not in OPTIMIZERS:
            self._refuse(
                "optim", f"{name!r} is not supported (there are: {', '.join(OPTIMIZERS)}); or pass optimizers="
            )
            return
        self.settings["optimizer.name"] = OPTIMIZERS[name]
        if name in SMALL_ADAMW:
            self.notes.append(f"optim {name!r}: AdamW's state is float32 here, which takes more memory")
        if args.optim_args and name in OPTIMIZER_ARGUMENTS:
            self.settings["optimizer.options"] = self._optimizer_options(args.optim_args, OPTIMIZER_ARGUMENTS[name])

    def _max_grad_norm(self) -> float | None:
        """As in transformers, a number that is not above 0, None and inf are no clipping."""
        value = self.args.max_grad_norm
        number = 0.0 if value is None else to_number(value)
        if number is None or math.isnan(number):
            self._refuse("max_grad_norm", f"{value!r:.100} is not a number; 0 is off")
            return None
        return number if 0 < number < math.inf else None

    def _optimizer_options(self, text: str, allowed: Iterable[str]) -> dict[str, float | bool]:
        options: dict[str, float | bool] = {}
        for part in text.replace(" ", "").split(","):
            name, _, value = part.partition("=")
            if name not in allowed:
                self._refuse("optim_args", f"{part!r:.100} is not one of {', '.join(allowed)}")
            elif name in ("nesterov", "centered"):
                options[name] = value.lower() in ("true", "1", "yes")
            else:
                try:
                    options[name] = float(value)
                except ValueError:
                    self._refuse("optim_args", f"{part!r:.100}: {value!r:.100} is not a number")
        return options

    def _schedule(self) -> None:
        args = self.args
        name = text_of(args.lr_scheduler_type)
        if name in SCHEDULES_WITHOUT_EQUAL:
            self._refuse("lr_scheduler_type", f"{name!r} is not supported; use another one, or pass optimizers=")
            return
        self.settings["optimizer.lr_schedule"] = "constant" if name == "constant_with_warmup" else name
        if args.lr_scheduler_kwargs:
            self.settings["optimizer.lr_schedule_options"] = dict(args.lr_scheduler_kwargs)
        if args.warmup_steps and name != "constant":  # transformers' constant has no warm-up
            self.settings |= _known({"optimizer.warmup_steps": self._interval("warmup_steps")})
            self.settings["optimizer.warmup_from_zero"] = True

    # -- model and data ----------------------------------------------------------------------------------------------

    def _model(self) -> None:
        args = self.args
        loading = dict(args.model_init_kwargs or {})
        dtype = text_of(loading.pop("dtype", None) or loading.pop("torch_dtype", None) or "float32")
        revision, trust = loading.pop("revision", None), loading.pop("trust_remote_code", args.trust_remote_code)
        for name, value in loading.items():
            if name not in LOADING_NEUTRAL and value is not None and value != LOADING_DEFAULTS.get(name):
                hint = LOADING_HINTS.get(name, "load the model yourself")
                shown = without_secrets(value, name)
                self._refuse("model_init_kwargs", f"{name}={shown!r:.100} has no setting here; {hint}")
        if dtype not in DTYPES:
            self._refuse("model_init_kwargs", f"dtype {dtype!r:.100} is not one of {', '.join(DTYPES)}")
        if args.fp16 or args.bf16:
            dtype = "float16" if args.fp16 else "bfloat16"
        self.settings |= {
            "model.dtype": dtype,
            "model.device": "cpu" if args.use_cpu else "auto",
            "model.gradient_checkpointing": args.gradient_checkpointing,
            "model.trust_remote_code": bool(trust),
            "model.revision": revision,
        }
        if args.torch_compile:
            self.settings["model.compile"] = True
        if args.cast_lm_head_to_fp32:
            self.settings["model.float32_head"] = True
        accelerator = args.accelerator_config
        if (accelerator.get if isinstance(accelerator, dict) else lambda name: getattr(accelerator, name, None))(
            "split_batches"
        ):
            self._refuse(
                "accelerator_config", "split_batches is not supported; per_device_train_batch_size is per process"
            )

    def _data(self) -> None:
        self.settings |= {
            "data.shuffle": bool(self.args.shuffle_dataset),
            "data.chat": False,  # TRL puts only conversations into the chat template
            "data.max_prompt_length": None,
        }
        if self.args.chat_template_kwargs:
            self.settings["data.chat_template_kwargs"] = dict(self.args.chat_template_kwargs)

    # -- evaluation, logging, saving ---------------------------------------------------------------------------------

    def _evaluation(self) -> None:
        args = self.args
        samples = args.num_generations_eval or args.num_generations
        every = 0 if args.eval_strategy == "no" else self._interval("eval_steps", text_of(args.eval_strategy))
        self.settings |= _known({"evaluate.every": every}) | {
            "evaluate.before_training": args.eval_on_start,
            "evaluate.samples": samples,
            "evaluate.temperature": float(args.temperature),
            "evaluate.rewards": True,
        }

    def _logging(self) -> None:
        args = self.args
        every = (
            None if args.logging_strategy == "no" else self._interval("logging_steps", text_of(args.logging_strategy))
        )
        self.settings |= _known({"run.log_every": every})
        self.settings |= {"run.folder": args.output_dir, "run.name": args.run_name}
        shown = args.num_completions_to_print or args.generation_batch_size
        self.settings["run.show_samples"] = shown if args.log_completions else 0
        reports = [args.report_to] if isinstance(args.report_to, str) else list(args.report_to or ())
        self.settings["run.tensorboard"] = "tensorboard" in reports
        self.settings["run.wandb"] = args.project if "wandb" in reports else None

    def _saving(self) -> None:
        args = self.args
        strategy = text_of(args.save_strategy)
        if strategy == "best":
            self.notes.append(
                "save_strategy 'best': GRPOTrainer saves a checkpoint when the metric improves, a recipe with "
                "each evaluation, and keeps the best"
            )
            every = self.settings.get("evaluate.every", 0)
        else:
            every = 0 if strategy == "no" else self._interval("save_steps", strategy)
        self.settings |= _known({"run.checkpoint_every": every}) | {
            "run.keep_checkpoints": args.save_total_limit or ALL,
            "run.resumable": not args.save_only_model,
        }
        if args.push_to_hub:
            self.settings["run.push_to_hub"] = repository_of(args)


def _own_fields(kind: type) -> set[str]:
    """Fields that a script adds in a class of its own, below `GRPOConfig`; only the script reads them."""
    libraries = ("groupwise", "transformers", "trl")
    own = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in libraries]
    return {name for base in own for name in vars(base).get("__annotations__", ())}


def _differs(value: Any, entry: dataclasses.Field[Any]) -> bool:
    """Whether a field has another value than its default, or than nothing at all."""
    default = entry.default_factory() if entry.default_factory is not dataclasses.MISSING else entry.default
    return bool(value != default and value not in (None, "", False, [], {}, 0.0))


def text_of(value: Any) -> str:
    """The text of an enum member of transformers, of a torch dtype, or of a text."""
    return str(getattr(value, "value", value)).removeprefix("torch.")


def _known(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}
