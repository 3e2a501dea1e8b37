"""`GRPOConfig` with the fields, defaults, derived values and refusals of TRL 1.16's, without TRL.

What each field does here is in `fields.py`. This class only has to be constructed as TRL's is: by keyword, from the
command line (`HfArgumentParser`) or from a dict, and to have the same values afterwards. It is a dataclass on
transformers' `TrainingArguments`, whose own fields are those of the installed transformers.
"""

import inspect
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from groupwise.errors import did_you_mean
from groupwise.integrations.trl.fields import FORMER_FIELDS

SCALES = {True: "group", False: "none"}  # scale_rewards as a bool

ROLLOUT_SIZES = ("steps_per_generation", "generation_batch_size", "num_generations")


def _field(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass
class GRPOConfig(TrainingArguments):
    """The arguments of `GRPOTrainer`, as in TRL 1.16. docs/trl.md says for each field what it does here."""

    _VALID_DICT_FIELDS = [
        *TrainingArguments._VALID_DICT_FIELDS,
        "model_init_kwargs",
        "transformers_continuous_batching_config",
        "generation_kwargs",
        "chat_template_kwargs",
    ]

    # fields of TrainingArguments with another default or type
    logging_steps: float = _field(10, "Updates between two logs; below 1, a share of all updates.")
    gradient_checkpointing: bool = _field(True, "Recompute activations in the backward pass to save memory.")
    bf16: bool | None = _field(  # type: ignore[assignment]
        None, "bfloat16 in the forward and backward pass; on unless fp16 is set."
    )
    lr_scheduler_kwargs: dict | str | None = _field(None, "Arguments of the learning-rate schedule.")  # type: ignore[type-arg]
    use_liger_kernel: bool = _field(False, "Liger kernels; without effect here.")
    torch_empty_cache_steps: int | None = _field(None, "Updates between two calls of empty_cache.")
    learning_rate: float = _field(1e-6, "The learning rate after the warm-up.")

    # model and reference
    model_init_kwargs: dict[str, Any] | str | None = _field(None, "Arguments for loading a model given by its name.")
    trust_remote_code: bool = _field(False, "Run the Python code that comes with a model.")
    router_aux_loss_coef: float | None = _field(None, "Weight of the load-balancing loss of mixture-of-experts models.")
    disable_dropout: bool = _field(False, "Switch the model's dropout off.")
    cast_lm_head_to_fp32: bool = _field(False, "Compute the logits in float32.")

    # data
    remove_unused_columns: bool | None = _field(  # type: ignore[assignment]
        False, "Keep only the column 'prompt'; rewards then get no other."
    )
    num_generations: int | None = _field(8, "Completions of each prompt (G).")
    num_generations_eval: int | None = _field(
        None, "Completions of each prompt in evaluation; default: as in training."
    )
    max_completion_length: int | None = _field(512, "Maximum completion length in tokens.")
    ds3_gather_for_generation: bool = _field(True, "With DeepSpeed ZeRO-3: gather the weights for generation.")
    shuffle_dataset: bool | None = _field(True, "Shuffle the training rows in every epoch.")
    pad_to_multiple_of: int | str | None = _field("auto", "Pad prompts and completions to a multiple of this.")

    # generation
    generation_batch_size: int | None = _field(None, "Completions generated at once, over all processes.")
    steps_per_generation: int | None = _field(
        None, "Micro-batches that the generated completions are divided into; default: gradient_accumulation_steps."
    )
    temperature: float = _field(1.0, "Divides the logits, in sampling and in training.")
    top_p: float = _field(1.0, "Sample from the smallest set of tokens with this total probability.")
    top_k: int = _field(0, "Sample from the k most likely tokens; 0 is all.")
    min_p: float | None = _field(None, "Sample from tokens with at least this share of the highest probability.")
    generation_kwargs: dict | str | None = _field(None, "Further arguments of generation.")  # type: ignore[type-arg]
    chat_template_kwargs: dict | str | None = _field(None, "Arguments of the chat template.")  # type: ignore[type-arg]
    repetition_penalty: float = _field(1.0, "Penalty on tokens that occurred before; 1 is none.")
    cache_implementation: str | None = _field(None, "transformers' cache for generation.")

    # vLLM
    use_vllm: bool = _field(False, "Sample with vLLM.")
    vllm_mode: str = _field("colocate", "'server', or 'colocate' for vLLM in the process that trains.")
    vllm_model_impl: str = _field("vllm", "Implementation of the model in vLLM: 'vllm' or 'transformers'.")
    vllm_enable_sleep_mode: bool = _field(False, "Free vLLM's memory while the model is trained.")
    vllm_structured_outputs_regex: str | None = _field(None, "A regular expression that completions must match.")
    vllm_server_base_url: str | None = _field(None, "Address of the vLLM server, such as http://localhost:8000.")
    vllm_server_host: str = _field("0.0.0.0", "Host of the vLLM server, without vllm_server_base_url.")
    vllm_server_port: int = _field(8000, "Port of the vLLM server, without vllm_server_base_url.")
    vllm_server_timeout: float = _field(240.0, "Seconds to wait for the vLLM server.")
    vllm_group_port: int = _field(51216, "Port of the transfer of weights to the vLLM server.")
    vllm_gpu_memory_utilization: float = _field(0.3, "Share of the GPU's memory for vLLM in the same process.")
    vllm_max_model_length: int | None = _field(None, "Context length of vLLM; default: the model's.")
    vllm_tensor_parallel_size: int = _field(1, "GPUs that one vLLM in the same process is divided over.")

    # training
    beta: float = _field(0.0, "Weight of the KL to the reference; 0 has no reference.")
    num_iterations: int = _field(1, "Passes over the generated completions (μ).")
    epsilon: float = _field(0.2, "The ratio is clipped below 1 − ε.")
    delta: float | None = _field(None, "Upper bound of the ratio before it is clipped (two-sided clipping).")
    epsilon_high: float | None = _field(None, "The ratio is clipped above 1 + ε_high; default: epsilon.")
    sapo_temperature_neg: float = _field(1.05, "SAPO's temperature for tokens with an advantage of at most 0.")
    sapo_temperature_pos: float = _field(1.0, "SAPO's temperature for tokens with a positive advantage.")
    vespo_k_pos: float = _field(2.0, "VESPO's exponent k for positive advantages.")
    vespo_lambda_pos: float = _field(3.0, "VESPO's decay λ for positive advantages.")
    vespo_k_neg: float = _field(3.0, "VESPO's exponent k for negative advantages.")
    vespo_lambda_neg: float = _field(2.0, "VESPO's decay λ for negative advantages.")
    importance_sampling_level: str = _field("token", "One ratio per 'token' or per 'sequence' (GSPO).")
    reward_weights: list[float] | None = _field(None, "A weight for each reward function; default: 1.")
    multi_objective_aggregation: str = _field(
        "sum_then_normalize", "Several rewards: 'sum_then_normalize', or 'normalize_then_sum' (GDPO)."
    )
    scale_rewards: str = _field("group", "Divide by the standard deviation of the 'group', the 'batch', or 'none'.")
    loss_type: str = _field("dapo", "grpo, dr_grpo, dapo, bnpo, cispo, sapo, luspo or vespo.")
    mask_truncated_completions: bool = _field(False, "Leave truncated completions out of the loss.")
    sync_ref_model: bool = _field(False, "Update the reference from the policy.")
    ref_model_mixup_alpha: float = _field(0.6, "Share of the policy in the updated reference.")
    ref_model_sync_steps: int = _field(512, "Updates between two updates of the reference.")
    top_entropy_quantile: float = _field(1.0, "Train on this share of tokens, those with the highest entropy.")
    entropy_coef: float = _field(0.0, "Weight of the entropy bonus; with use_adaptive_entropy its first value.")
    use_adaptive_entropy: bool = _field(False, "Adapt entropy_coef to entropy_target (Skywork-OR1).")
    entropy_coef_min: float = _field(0.0, "Least value of the adapted entropy_coef.")
    entropy_coef_max: float = _field(1.0, "Greatest value of the adapted entropy_coef.")
    entropy_coef_delta: float = _field(0.005, "Change of the adapted entropy_coef per update.")
    entropy_target: float = _field(0.2, "The entropy per token below which the bonus acts, in nats.")
    max_tool_calling_iterations: int | None = _field(None, "Maximum number of tool calls.")
    vllm_importance_sampling_correction: bool = _field(True, "With vLLM: correct for the mismatch of log-probs.")
    vllm_importance_sampling_mode: str = _field(
        "sequence_mask", "token_truncate, token_mask, sequence_truncate or sequence_mask."
    )
    vllm_importance_sampling_clip_max: float | None = _field(3.0, "Upper bound of the correction.")
    vllm_importance_sampling_clip_min: float | None = _field(None, "Lower bound of the correction.")
    off_policy_mask_threshold: float | None = _field(
        None, "Mask completions with a negative advantage whose mean log-ratio is above this (DeepSeek-V3.2)."
    )
    use_bias_correction_kl: bool = _field(True, "Multiply the KL by the ratio (DeepSeek-V3.2).")

    # logging
    log_completions: bool = _field(False, "Print and save completions with every log.")
    log_multimodal: bool = _field(True, "Log images with the completions.")
    num_completions_to_print: int | None = _field(None, "Completions to print; default: all.")
    log_unique_prompts: bool = _field(False, "Log each prompt once.")
    log_completions_hub_repo: str | None = _field(None, "The hub dataset to save completions to.")
    use_transformers_continuous_batching: bool = _field(False, "Generate with transformers' continuous batching.")
    transformers_continuous_batching_config: dict | str | None = _field(None, "Arguments of it.")  # type: ignore[type-arg]

    # deprecated in TRL
    use_transformers_paged: bool = _field(False, "Deprecated: use_transformers_continuous_batching.")
    vllm_importance_sampling_cap: float | None = _field(None, "Deprecated: vllm_importance_sampling_clip_max.")

    def __new__(cls, *_: Any, **options: Any) -> "GRPOConfig":
        """Refuse an unknown field, with the TypeError of any class, by saying what to write instead."""
        parameters = inspect.signature(cls.__init__).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            for name in options:
                if name not in parameters:
                    hint = f": {FORMER_FIELDS[name]}" if name in FORMER_FIELDS else did_you_mean(name, parameters)
                    raise TypeError(f"{cls.__name__} has no field {name}{hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.bf16 is None:
            self.bf16 = not self.fp16
        super().__post_init__()  # type: ignore[no-untyped-call]
        self._resolve_padding()
        self._replace_deprecated()
        self.scale_rewards = SCALES.get(self.scale_rewards, self.scale_rewards)  # type: ignore[call-overload]
        self._refuse_unsupported()
        self._derive_batches()
        self._check_correction()

    def _resolve_padding(self) -> None:
        padding = self.pad_to_multiple_of
        if padding == "auto":
            self.pad_to_multiple_of = 128 if self.device.type == "neuron" else None
        elif isinstance(padding, str):  # of the command line
            self.pad_to_multiple_of = None if padding.lower() in ("none", "null") else int(padding)

    def _replace_deprecated(self) -> None:
        if self.use_transformers_paged:
            self.use_transformers_continuous_batching = True
            _warn_deprecated("use_transformers_paged", "use_transformers_continuous_batching")
        if self.vllm_importance_sampling_cap is not None:
            self.vllm_importance_sampling_clip_max = self.vllm_importance_sampling_cap
            _warn_deprecated("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max")

    def _refuse_unsupported(self) -> None:
        parallelism = self.parallelism_config
        if parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled):
            raise ValueError(
                "parallelism_config: GRPO divides no sequence over processes; set cp_size and sp_size to 1, or leave "
                "parallelism_config out"
            )
        if self.log_completions_hub_repo is not None and not self.log_completions:
            raise ValueError("log_completions_hub_repo is set, but log_completions is False; set both or neither")
        if self.auto_find_batch_size:
            raise ValueError(
                "auto_find_batch_size is not supported by GRPO: a smaller batch would no longer hold all "
                "num_generations completions of its prompts. Set it to False and lower per_device_train_batch_size"
            )

    def _derive_batches(self) -> None:
        """Check the batch sizes, and derive those that are not set. All count completions."""
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", *ROLLOUT_SIZES):
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name} is {value}; give a number above 0")
        micro_batch = self.per_device_train_batch_size * self.world_size
        if self.generation_batch_size is not None and self.steps_per_generation is not None:
            raise ValueError("generation_batch_size and steps_per_generation cannot both be set; leave one out")
        if self.generation_batch_size is not None:
            if self.generation_batch_size % micro_batch:
                raise ValueError(
                    f"generation_batch_size ({self.generation_batch_size}) must be divisible by "
                    f"per_device_train_batch_size × processes ({micro_batch})"
                )
            self.steps_per_generation = self.generation_batch_size // micro_batch
        else:
            if self.steps_per_generation is None:
                self.steps_per_generation = self.gradient_accumulation_steps
            self.generation_batch_size = micro_batch * self.steps_per_generation
        if self.do_eval and self.eval_strategy != "no":
            samples, batch = self.num_generations_eval or self.num_generations, self.per_device_eval_batch_size
            if batch * self.world_size % samples:
                raise ValueError(
                    f"per_device_eval_batch_size × processes ({batch} × {self.world_size}) must be divisible by the "
                    f"generations of each prompt in evaluation ({samples}): set num_generations_eval"
                )
        if self.generation_batch_size % self.num_generations:  # type: ignore[operator]
            raise ValueError(
                f"generation_batch_size ({self.generation_batch_size}) must be divisible by num_generations "
                f"({self.num_generations}): it counts completions, and all those of a prompt belong together"
            )
        if self.num_generations < 2:  # type: ignore[operator]
            raise ValueError(
                f"num_generations is {self.num_generations}, but GRPO compares the completions of a prompt: it needs "
                "at least 2"
            )

    def _check_correction(self) -> None:
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if low is not None and high is not None and low >= high:
            raise ValueError(
                f"vllm_importance_sampling_clip_min ({low}) must be below vllm_importance_sampling_clip_max ({high})"
            )
        truncates = self.vllm_importance_sampling_mode in ("token_truncate", "sequence_truncate")
        if self.vllm_importance_sampling_correction and truncates and low is None and high is None:
            raise ValueError(
                f"vllm_importance_sampling_mode {self.vllm_importance_sampling_mode!r} needs a bound: set "
                "vllm_importance_sampling_clip_max or vllm_importance_sampling_clip_min"
            )


def repository_of(args: Any) -> str:
    """The repository on the hub, as transformers names it: ``hub_model_id``, or the last part of ``output_dir``."""
    return str(args.hub_model_id or Path(args.output_dir).absolute().name)


def _warn_deprecated(old: str, new: str) -> None:
    # Above this function: _replace_deprecated, __post_init__, __init__, and the line that makes the config.
    warnings.warn(f"`{old}` is deprecated, as in TRL 1.16; use `{new}`", FutureWarning, stacklevel=5)
