"""What each field of `GRPOConfig` does here: the table behind the translation, docs/trl.md and `groupwise from-trl`.

Every field is in it once. It is translated to settings of a recipe (`translate.py`), acted on by `GRPOTrainer` itself,
without effect, or refused if it has another value than its default. An example is a value and what it changes; the
tests run every one of them, so that what the table says is so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Kind = Literal["translated", "trainer", "no effect", "refused"]
TRAINER_TESTS = "tests/integrations/trl/test_trainer_fields.py"


class FieldExample(NamedTuple):
    """A value of a field, and the settings that it changes, where the other fields are ``given``."""

    value: Any
    settings: Mapping[str, Any] = {}
    given: Mapping[str, Any] = {}


class ConfigField(NamedTuple):
    """What a field does. ``settings`` are those that it may change; ``test`` is the test of a field of the trainer."""

    kind: Kind
    meaning: str
    settings: tuple[str, ...] = ()
    examples: tuple[FieldExample, ...] = ()
    only_with: str = ""  # a refused field matters only if this field is true
    accepted: Any = None  # a value of a refused field besides its default
    test: str = ""


def _to(settings: str, meaning: str, *examples: tuple[Any, ...]) -> ConfigField:
    """A translated field; ``settings`` are separated by spaces. An example is a value, what it sets, and other fields.

    Of a single setting with the same value, the value alone is enough.
    """
    names = tuple(settings.split())
    return ConfigField("translated", meaning, names, tuple(_example(names, *example) for example in examples))


def _example(
    names: tuple[str, ...], value: Any, changes: Any = None, given: Mapping[str, Any] | None = None
) -> FieldExample:
    if not isinstance(changes, Mapping):
        changes = {names[0]: value if changes is None else changes}
    return FieldExample(value, changes, given or {})


def _trainer(meaning: str, test: str) -> ConfigField:
    return ConfigField("trainer", meaning, test=f"{TRAINER_TESTS}::{test}")


def _none(why: str, value: Any, **given: Any) -> ConfigField:
    return ConfigField("no effect", why, examples=(FieldExample(value, {}, given),))


def _refused(instead: str, value: Any, only_with: str = "", accepted: Any = None, **given: Any) -> ConfigField:
    example = FieldExample(value, {}, given)
    return ConfigField("refused", instead, examples=(example,), only_with=only_with, accepted=accepted)


_AS_IN_TRL = "as in TRL, GRPO does not use it"
_IN_MEMORY = "rows are in memory, and there is no data loader"
_OWN_ENGINE = "groupwise's own engine generates, so there is nothing to set"
_NO_DDP = "gradients are summed without DistributedDataParallel"
_SERVER_OPTION = "an option of the vLLM server"
_EXPERTS = "mixture-of-experts models are trained without their load-balancing loss; 0.0 says so"
_SHARDED = (
    "several processes divide masters and optimizer state by themselves; leave it out, or train a recipe with "
    'model.sharding = "weights"'
)
_ADAPTIVE = {"use_adaptive_entropy": True}
_VLLM = {"use_vllm": True}
_SERVER = {"use_vllm": True, "vllm_mode": "server"}
_FAR = {**_SERVER, "vllm_server_base_url": "http://gpu-2:8000"}
_VLLM_ON = {
    "sampling.generator": "vllm",
    "sampling.order": "vllm",
    "loss.importance_sampling": "sequence_mask",
    "loss.importance_cap": 3.0,
}
_KL = {"beta": 0.04}
_SYNC = {"beta": 0.04, "sync_ref_model": True}

# The titles are headings of docs/trl.md.
GROUPS: dict[str, dict[str, ConfigField]] = {
    "Batches and length": {
        "per_device_train_batch_size": _to(
            "train.batch_size train.local_batch_size train.steps",
            "completions of a micro-batch on each process; a rollout has steps_per_generation of them, divided by "
            "num_generations prompts",
            (16, {"train.batch_size": 2, "train.local_batch_size": 16, "train.steps": 96}),
        ),
        "gradient_accumulation_steps": _to(
            "train.batch_size train.accumulation train.mini_batches train.steps",
            "micro-batches of an update",
            (4, {"train.batch_size": 4, "train.steps": 48}),
            (2, {"train.mini_batches": 2, "train.steps": 96}, {"steps_per_generation": 4}),
            (4, {"train.accumulation": 4}, {"steps_per_generation": 1, "max_steps": 9}),
        ),
        "steps_per_generation": _to(
            "train.batch_size train.accumulation train.mini_batches train.steps",
            "micro-batches of a rollout; an update takes gradient_accumulation_steps of them",
            (4, {"train.batch_size": 4, "train.mini_batches": 4}),
        ),
        "generation_batch_size": _to(
            "train.batch_size train.accumulation train.mini_batches train.steps",
            "completions of a rollout",
            (32, {"train.batch_size": 4, "train.mini_batches": 4}),
        ),
        "num_generations": _to(
            "sampling.samples_per_prompt train.batch_size evaluate.samples train.steps",
            "completions of each prompt",
            (4, {"sampling.samples_per_prompt": 4, "train.batch_size": 2, "evaluate.samples": 4, "train.steps": 96}),
        ),
        "num_iterations": _to(
            "train.iterations train.steps",
            "passes over a rollout",
            (2, {"train.iterations": 2, "train.steps": 384}),
        ),
        "max_steps": _to("train.steps", "updates; −1 is num_train_epochs", (100,)),
        "num_train_epochs": _to(
            "train.steps train.epochs",
            "passes over the training rows, as a number of updates once the number of rows is known",
            (1, {"train.steps": 64}),
        ),
        "average_tokens_across_devices": _none("the loss counts the tokens of all processes", False),
        "auto_find_batch_size": _refused(
            "lower per_device_train_batch_size; memory is managed by train.token_budget", True
        ),
        "seed": _to("train.seed", "seed of the row order and of sampling; the samples are not those of TRL", (7,)),
        "data_seed": _none(f"{_AS_IN_TRL}: the order of rows depends on seed", 7),
        "full_determinism": _refused(
            "a run on a CPU repeats to the bit without it; on a GPU call torch.use_deterministic_algorithms yourself",
            True,
        ),
    },
    "Generation": {
        "max_completion_length": _to("sampling.max_new_tokens", "in tokens; None is refused", (64,)),
        "temperature": _to(
            "sampling.temperature evaluate.temperature",
            "in sampling, in training and in evaluation",
            (0.7, {"sampling.temperature": 0.7, "evaluate.temperature": 0.7}),
        ),
        "top_p": _to("sampling.top_p", "", (0.9,)),
        "top_k": _to("sampling.top_k", "0 is off, and so is -1", (40,)),
        "min_p": _to("sampling.min_p", "", (0.1,)),
        "repetition_penalty": _to("sampling.repetition_penalty", "in sampling only, as in TRL", (1.1,)),
        "generation_kwargs": _to(
            "sampling.max_new_tokens sampling.min_new_tokens sampling.top_k sampling.top_p sampling.min_p "
            "sampling.repetition_penalty sampling.stop",
            "the arguments that are settings here; others are refused by name",
            ({"min_new_tokens": 4}, {"sampling.min_new_tokens": 4}),
            ({"top_k": 5, "stop_strings": ["</a>"]}, {"sampling.top_k": 5, "sampling.stop": ["</a>"]}),
        ),
        "chat_template_kwargs": _to("data.chat_template_kwargs", "", ({"enable_thinking": False},)),
        "cache_implementation": _none(_OWN_ENGINE, "static"),
        "use_transformers_continuous_batching": _none(_OWN_ENGINE, True),
        "transformers_continuous_batching_config": _none(_OWN_ENGINE, {"block_size": 16}),
        "use_transformers_paged": _none(f"deprecated; {_OWN_ENGINE}", True),
        "ds3_gather_for_generation": _none("it is of DeepSpeed", False),
        "pad_to_multiple_of": _none("completions are packed, not padded", 8),
        "max_tool_calling_iterations": _to(
            "environment.max_turns", "turns with calls; the model has one more for its answer", (3, 4)
        ),
    },
    "vLLM": {
        "use_vllm": _to(
            "sampling.generator sampling.order loss.importance_sampling loss.importance_cap "
            "vllm.gpu_memory_utilization vllm.sleep",
            "vLLM samples; needs the extra `vllm`, or servers",
            (True, {**_VLLM_ON, "vllm.gpu_memory_utilization": 0.3, "vllm.sleep": False}),
        ),
        "vllm_mode": _to(
            "vllm.servers vllm.wait vllm.gpu_memory_utilization vllm.sleep",
            '"server" or "colocate"',
            (
                "server",
                {
                    "vllm.servers": ["http://0.0.0.0:8000"],
                    "vllm.wait": 240.0,
                    "vllm.gpu_memory_utilization": None,
                    "vllm.sleep": None,
                },
                _VLLM,
            ),
        ),
        "vllm_server_base_url": _to(
            "vllm.servers vllm.weights vllm.nccl_port",
            "a server on another machine gets the weights by NCCL, one on this machine as files",
            ("http://localhost:9000", {"vllm.servers": ["http://localhost:9000"]}, _SERVER),
        ),
        "vllm_server_host": _to(
            "vllm.servers vllm.weights vllm.nccl_port",
            "",
            ("127.0.0.1", {"vllm.servers": ["http://127.0.0.1:8000"]}, _SERVER),
        ),
        "vllm_server_port": _to("vllm.servers", "", (9000, {"vllm.servers": ["http://0.0.0.0:9000"]}, _SERVER)),
        "vllm_server_timeout": _to("vllm.wait", "seconds", (60.0, None, _SERVER)),
        "vllm_group_port": _to("vllm.nccl_port", "of a server on another machine", (29700, None, _FAR)),
        "vllm_gpu_memory_utilization": _to("vllm.gpu_memory_utilization", "", (0.5, None, _VLLM)),
        "vllm_enable_sleep_mode": _to("vllm.sleep", "", (True, None, _VLLM)),
        "vllm_max_model_length": _none("it follows from the longest prompt and max_completion_length", 2048),
        "vllm_tensor_parallel_size": _refused("start a server with --tensor-parallel-size", 2, "use_vllm"),
        "vllm_model_impl": _refused(_SERVER_OPTION, "transformers", "use_vllm"),
        "vllm_structured_outputs_regex": _refused("give a reward for the format", "[0-9]+", "use_vllm"),
        "vllm_importance_sampling_correction": _to(
            "loss.importance_sampling loss.importance_cap loss.importance_floor",
            "weights by the log-probs of sampler and trainer; only with vLLM, as in TRL",
            (False, {"loss.importance_sampling": None, "loss.importance_cap": None}, _VLLM),
        ),
        "vllm_importance_sampling_mode": _to("loss.importance_sampling", "", ("token_truncate", None, _VLLM)),
        "vllm_importance_sampling_clip_max": _to("loss.importance_cap", "", (5.0, None, _VLLM)),
        "vllm_importance_sampling_clip_min": _to("loss.importance_floor", "", (0.5, None, _VLLM)),
        "vllm_importance_sampling_cap": _to(
            "loss.importance_cap", "deprecated: vllm_importance_sampling_clip_max", (2.0, None, _VLLM)
        ),
    },
    "Rewards and advantages": {
        "reward_weights": _trainer("a factor for each reward function", "test_reward_weights"),
        "multi_objective_aggregation": _to("advantages.combine", "", ("normalize_then_sum",)),
        "scale_rewards": _to(
            "advantages.scale",
            "True is group, False is none; also mean, that of TRL after 1.16 (MaxRL)",
            ("batch",),
            (False, "none"),
            ("none",),
            ("mean",),
        ),
    },
    "Loss": {
        "loss_type": _to(
            "loss.name loss.clip_high", "", ("grpo",), ("cispo", {"loss.name": "cispo", "loss.clip_high": 0.2})
        ),
        "importance_sampling_level": _to("loss.ratio", "", ("sequence",)),
        "epsilon": _to("loss.clip_low loss.clip_high", "", (0.1,)),
        "epsilon_high": _to("loss.clip_high", "for cispo the upper bound itself", (0.28,)),
        "delta": _to("loss.dual_clip", "for the losses that clip", (4.0,), (4.0, {}, {"loss_type": "cispo"})),
        "sapo_temperature_pos": _to("loss.sapo_temperatures", "", (1.5, [1.5, 1.05], {"loss_type": "sapo"})),
        "sapo_temperature_neg": _to("loss.sapo_temperatures", "", (1.5, [1.0, 1.5], {"loss_type": "sapo"})),
        "vespo_k_pos": _to("loss.vespo_positive", "", (1.5, [1.5, 3.0], {"loss_type": "vespo"})),
        "vespo_lambda_pos": _to("loss.vespo_positive", "", (1.5, [2.0, 1.5], {"loss_type": "vespo"})),
        "vespo_k_neg": _to("loss.vespo_negative", "", (1.5, [1.5, 2.0], {"loss_type": "vespo"})),
        "vespo_lambda_neg": _to("loss.vespo_negative", "", (1.5, [3.0, 1.5], {"loss_type": "vespo"})),
        "beta": _to("loss.kl_coef", "0 has no reference", (0.04,)),
        "use_bias_correction_kl": _to("loss.kl", "True is unbiased, False is k3", (False, "k3", _KL)),
        "mask_truncated_completions": _to(
            "masks.drop_truncated",
            "also from the KL, the entropy and the numbers of tokens",
            (True,),
        ),
        "off_policy_mask_threshold": _to(
            "masks.off_policy masks.off_policy_threshold",
            "",
            (0.5, {"masks.off_policy": "v3.2", "masks.off_policy_threshold": 0.5}),
        ),
        "top_entropy_quantile": _to("masks.high_entropy", "1.0 is off", (0.2,)),
        "entropy_coef": _to("loss.entropy_coef", "", (0.01,)),
        "use_adaptive_entropy": _to(
            "loss.entropy_target loss.entropy_step loss.entropy_coef_min loss.entropy_coef_max",
            "entropy_coef adapts to entropy_target",
            (
                True,
                {
                    "loss.entropy_target": 0.2,
                    "loss.entropy_step": 0.005,
                    "loss.entropy_coef_min": 0.0,
                    "loss.entropy_coef_max": 1.0,
                },
            ),
        ),
        "entropy_target": _to("loss.entropy_target", "with use_adaptive_entropy", (1.5, None, _ADAPTIVE)),
        "entropy_coef_delta": _to("loss.entropy_step", "with use_adaptive_entropy", (0.01, None, _ADAPTIVE)),
        "entropy_coef_min": _to("loss.entropy_coef_min", "with use_adaptive_entropy", (0.001, None, _ADAPTIVE)),
        "entropy_coef_max": _to("loss.entropy_coef_max", "with use_adaptive_entropy", (0.1, None, _ADAPTIVE)),
        "sync_ref_model": _to(
            "reference.refresh_every reference.mix",
            "",
            (True, {"reference.refresh_every": 512, "reference.mix": 0.6}, _KL),
        ),
        "ref_model_sync_steps": _to("reference.refresh_every", "updates; with sync_ref_model", (64, None, _SYNC)),
        "ref_model_mixup_alpha": _to("reference.mix", "with sync_ref_model", (0.9, None, _SYNC)),
        "router_aux_loss_coef": _refused(_EXPERTS, 0.001),
        "label_smoothing_factor": _none(_AS_IN_TRL, 0.1),
        "neftune_noise_alpha": _refused("noise on the embeddings is not supported; leave it out", 5.0),
    },
    "Optimizer": {
        "learning_rate": _to("optimizer.learning_rate", "", (5e-6,)),
        "lr_scheduler_type": _to(
            "optimizer.lr_schedule",
            "reduce_lr_on_plateau and greedy are refused",
            ("cosine",),
            ("constant_with_warmup", "constant"),
        ),
        "lr_scheduler_kwargs": _to(
            "optimizer.lr_schedule_options",
            "",
            ({"num_cycles": 2}, None, {"lr_scheduler_type": "cosine_with_restarts"}),
        ),
        "warmup_steps": _to(
            "optimizer.warmup_steps optimizer.warmup_from_zero",
            "below 1 a share of all updates; the schedule constant has none, as in transformers",
            (10, {"optimizer.warmup_steps": 10, "optimizer.warmup_from_zero": True}),
            (0.1, {"optimizer.warmup_steps": 20, "optimizer.warmup_from_zero": True}),
            (10, {}, {"lr_scheduler_type": "constant"}),
        ),
        "optim": _to(
            "optimizer.name",
            "adamw_torch and adamw_torch_fused (adamw); those of 8 bits or paged are adamw with a float32 state; sgd, "
            "adagrad, rmsprop, adafactor; others are refused",
            ("sgd",),
            ("adamw_torch", {}),
            ("adamw_8bit", {}),
        ),
        "optim_args": _to(
            "optimizer.options",
            "of sgd, adagrad and rmsprop, as in transformers",
            (
                "momentum=0.9,nesterov=true",
                {"optimizer.options": {"momentum": 0.9, "nesterov": True}},
                {"optim": "sgd"},
            ),
        ),
        "optim_target_modules": _refused(
            "GaLore and APOLLO are not supported; peft_config trains with less memory", ["q_proj"]
        ),
        "weight_decay": _to("optimizer.weight_decay", "of matrices", (0.01,)),
        "adam_beta1": _to("optimizer.beta1", "", (0.8,)),
        "adam_beta2": _to("optimizer.beta2", "", (0.95,)),
        "adam_epsilon": _to("optimizer.eps", "", (1e-6,)),
        "max_grad_norm": _to("optimizer.max_grad_norm", "0 is off", (0.5,), (0, {"optimizer.max_grad_norm": None})),
    },
    "Model and memory": {
        "model_init_kwargs": _to(
            "model.revision model.dtype",
            "of a model given by its name: revision, and without bf16 and fp16 dtype. What chooses kernels or devices "
            "has no effect; other arguments are refused by name",
            ({"revision": "main", "attn_implementation": "sdpa"}, {"model.revision": "main"}),
            ({"dtype": "float64"}, {"model.dtype": "float64"}, {"bf16": False}),
        ),
        "trust_remote_code": _to("model.trust_remote_code", "", (True,)),
        "bf16": _to(
            "model.dtype",
            "bfloat16 copies of float32 masters, where TRL has autocast",
            (False, {"model.dtype": "float32"}),
        ),
        "fp16": _to("model.dtype", "float16 copies of float32 masters, without a loss scale", (True, "float16")),
        "bf16_full_eval": _refused("evaluation has the dtype of training: set bf16", True, "", bf16=False),
        "fp16_full_eval": _refused("evaluation has the dtype of training: set fp16", True),
        "tf32": _none("transformers sets it for the process when the config is made", False),
        "cast_lm_head_to_fp32": _to("model.float32_head", "also with tied embeddings", (True,)),
        "disable_dropout": _none("the model's dropout is always off", True),
        "gradient_checkpointing": _to("model.gradient_checkpointing", "", (False,)),
        "gradient_checkpointing_kwargs": _none(
            "how activations are recomputed changes no result", {"use_reentrant": True}
        ),
        "torch_compile": _to("model.compile", "False leaves the choice to groupwise", (True,)),
        "torch_compile_backend": _refused(
            "torch.compile is used with inductor; leave it out", "eager", accepted="inductor"
        ),
        "torch_compile_mode": _refused("torch.compile is used in its default mode; leave it out", "max-autotune"),
        "use_liger_kernel": _none("groupwise has its own memory-saving log-probs; only speed and memory differ", True),
        "liger_kernel_config": _none("it is of Liger kernels", {"rope": True}),
        "use_cache": _none("training has no cache of keys and values", True),
        "torch_empty_cache_steps": _none("it changes no result; memory is managed by train.token_budget", 4),
        "use_cpu": _to("model.device", "False takes the GPU if there is one", (True, "cpu")),
        "fsdp": _refused(_SHARDED, "full_shard"),
        "fsdp_config": _none("it is of fsdp", {"min_num_params": 1}),
        "deepspeed": _refused(_SHARDED, "zero3.json"),
        "parallelism_config": _refused(_SHARDED, object()),
        "accelerator_config": _none("accelerate is not used; split_batches is refused", {"even_batches": False}),
        "ddp_find_unused_parameters": _none(_NO_DDP, True),
        "ddp_bucket_cap_mb": _none(_NO_DDP, 25),
        "ddp_broadcast_buffers": _none(_NO_DDP, True),
        "ddp_static_graph": _none(_NO_DDP, True),
        "ddp_backend": _none("NCCL on GPUs, gloo on CPUs", "gloo"),
        "ddp_timeout": _to("train.timeout", "seconds", (600, 600.0)),
        "local_rank": _none("the launcher sets it", 0),
    },
    "Data": {
        "shuffle_dataset": _to("data.shuffle", "", (False,)),
        "remove_unused_columns": _trainer("True hides all columns but prompt from rewards", "test_columns"),
        "dataloader_drop_last": _none("a rollout always has all of its prompts, as in TRL", True),
        "dataloader_num_workers": _none(_IN_MEMORY, 2),
        "dataloader_pin_memory": _none(_IN_MEMORY, False),
        "dataloader_persistent_workers": _none(_IN_MEMORY, True),
        "dataloader_prefetch_factor": _none(_IN_MEMORY, 2, dataloader_num_workers=2),
        "dataloader_multiprocessing_context": _none(_IN_MEMORY, "spawn"),
        "dataloader_in_order": _none(_IN_MEMORY, False),
        "label_names": _none(_AS_IN_TRL, ["labels"]),
        "train_sampling_strategy": _none(f"{_AS_IN_TRL}: shuffle_dataset decides", "sequential"),
        "length_column_name": _none(_AS_IN_TRL, "n"),
        "ignore_data_skip": _none("a resumed run knows its row; nothing is read again", True),
    },
    "Logging": {
        "output_dir": _to("run.folder", "", ("runs/a",)),
        "logging_steps": _to("run.log_every", "updates; below 1 a share of all", (5,)),
        "logging_strategy": _to("run.log_every", "steps, epoch or no", ("epoch", 64)),
        "logging_first_step": _trainer("the first update is logged too", "test_logging"),
        "report_to": _to(
            "run.tensorboard run.wandb",
            "transformers' own callbacks report; a recipe has tensorboard and wandb",
            ("tensorboard", {"run.tensorboard": True}),
            (["wandb"], {"run.wandb": "huggingface"}),
        ),
        "run_name": _to("run.name", "", ("first",)),
        "project": _to("run.wandb", "with report_to wandb", ("quiz", {"run.wandb": "quiz"}, {"report_to": "wandb"})),
        "trackio_space_id": _trainer("for Trackio's callback, with report_to", "test_report_to"),
        "trackio_bucket_id": _trainer("for Trackio's callback, with report_to", "test_report_to"),
        "trackio_static_space_id": _trainer("for Trackio's callback, with report_to", "test_report_to"),
        "log_completions": _to(
            "run.show_samples",
            "printed and saved with every log, in completions/; all are in rollouts/ in any case",
            (True, 8),
        ),
        "num_completions_to_print": _to(
            "run.show_samples", "with log_completions", (3, None, {"log_completions": True})
        ),
        "log_unique_prompts": _trainer("each prompt once, in tables for report_to", "test_log_completions"),
        "log_multimodal": _none("there are no images", False),
        "log_completions_hub_repo": _refused("upload the folder rollouts/ of output_dir", "me/runs"),
        "log_level": _none("groupwise's own messages are few; warnings are always shown", "error"),
        "log_level_replica": _none("only the first process writes", "error"),
        "log_on_each_node": _none("only the first process writes", False),
        "logging_nan_inf_filter": _none("NaN and inf stop the run before the weights change", False),
        "include_num_input_tokens_seen": _trainer("num_input_tokens_seen is logged", "test_logging"),
        "disable_tqdm": _trainer("logs are printed as lines instead of below a progress bar", "test_progress"),
        "debug": _none("NaN and inf stop the run, with the term that they come from", "underflow_overflow"),
        "skip_memory_metrics": _none("the peak of memory is always recorded", False),
    },
    "Evaluation": {
        "eval_strategy": _to(
            "evaluate.every",
            "steps, epoch or no",
            ("steps", {"evaluate.every": 10}),
            ("epoch", {"evaluate.every": 64}),
        ),
        "eval_steps": _to("evaluate.every", "updates; below 1 a share of all", (7, None, {"eval_strategy": "steps"})),
        "eval_on_start": _to("evaluate.before_training", "", (True,)),
        "eval_delay": _trainer("no evaluation before this update or epoch", "test_evaluation"),
        "num_generations_eval": _to("evaluate.samples", "", (2,)),
        "per_device_eval_batch_size": _none("how many are sampled at once follows from memory", 16),
        "prediction_loss_only": _none(_AS_IN_TRL, True),
        "eval_accumulation_steps": _none(_AS_IN_TRL, 2),
        "eval_do_concat_batches": _none(_AS_IN_TRL, False),
        "eval_use_gather_object": _none(_AS_IN_TRL, True),
        "include_for_metrics": _none(_AS_IN_TRL, ["loss"]),
        "batch_eval_metrics": _none(_AS_IN_TRL, True),
        "load_best_model_at_end": _trainer("the best checkpoint is loaded after training", "test_best"),
        "metric_for_best_model": _trainer("the metric that decides which is best", "test_best"),
        "greater_is_better": _trainer("whether a larger value is better", "test_best"),
        "do_train": _none("it is for scripts that read it", True),
        "do_eval": _none("it is for scripts that read it; eval_strategy decides", True),
        "do_predict": _none("it is for scripts that read it", True),
    },
    "Saving": {
        "save_strategy": _to("run.checkpoint_every", "steps, epoch or no", ("epoch", 64), ("no", 0)),
        "save_steps": _to("run.checkpoint_every", "updates; below 1 a share of all", (20,), (0.25, 48)),
        "save_total_limit": _to("run.keep_checkpoints", "None keeps all", (3,)),
        "save_only_model": _to("run.resumable", "", (True, False)),
        "save_on_each_node": _refused("output_dir must be on a disk that all machines share", True),
        "enable_jit_checkpoint": _none("SIGTERM and SIGINT always save a checkpoint", True),
        "resume_from_checkpoint": _none(f"{_AS_IN_TRL}: pass it to train()", "runs/a/checkpoint-5"),
        "restore_callback_states_from_checkpoint": _trainer(
            "callbacks with a state get it back on resume", "test_callback_states"
        ),
        "push_to_hub": _to(
            "run.push_to_hub",
            "save_model() and push_to_hub() push the model",
            (True, "out"),
            (True, "me/m", {"hub_model_id": "me/m"}),
        ),
        "hub_model_id": _to("run.push_to_hub", "with push_to_hub", ("me/m", None, {"push_to_hub": True})),
        "hub_token": _trainer("the token that pushes", "test_push"),
        "hub_private_repo": _trainer("whether a new repository is private", "test_push"),
        "hub_strategy": _none("save_model() and push_to_hub() push; checkpoints are not pushed", "end"),
        "hub_always_push": _none("save_model() and push_to_hub() push; checkpoints are not pushed", True),
        "hub_revision": _trainer("the branch that is pushed to", "test_push"),
    },
}

FIELDS: dict[str, ConfigField] = {name: field for group in GROUPS.values() for name, field in group.items()}

# Names that scripts for other versions of TRL and transformers have, and what to write for TRL 1.16.
FORMER_FIELDS = {
    "max_prompt_length": "prompts have no maximum length; leave it out, or filter the dataset",
    "warmup_ratio": "write warmup_steps, which is a share of all updates below 1",
    "evaluation_strategy": "write eval_strategy",
    "logging_dir": "leave it out; TensorBoard's files are in output_dir",
    "overwrite_output_dir": "leave it out; files of an earlier run are moved aside",
    "no_cuda": "write use_cpu",
    "use_liger_loss": "leave it out; the log-probs are computed without keeping logits",
    "group_by_length": "leave it out; completions are packed by length",
    "vllm_guided_decoding_regex": "write vllm_structured_outputs_regex",
    "vllm_max_model_len": "write vllm_max_model_length",
    "wandb_log_unique_prompts": "write log_unique_prompts",
    "push_to_hub_model_id": "write hub_model_id",
    "push_to_hub_token": "write hub_token",
    "save_safetensors": "leave it out; weights are always saved as safetensors",
    "vllm_device": "leave it out; vLLM runs on the GPU that trains, or as a server",
    "torch_dtype": "write model_init_kwargs={'dtype': …}",
}
