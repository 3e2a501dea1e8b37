"""What settings of TRL, PEFT, transformers, verl and of papers are called here, for the hint in an error message.

A name that is the same here (`temperature`, `weight_decay`, …) is found without this table, unless its meaning or its
unit differs. camelCase is looked up as snake_case: `numGenerations` as `num_generations`.
"""

from __future__ import annotations

from typing import NamedTuple


class Hint(NamedTuple):
    """The settings that a name of another library stands for, the value if the name implies one, and a remark.

    ``same_value``: the value that was given is also that of the setting, and is shown with it.
    """

    settings: tuple[str, ...] = ()
    value: str | bool | None = None
    note: str = ""
    same_value: bool = False


def _hint(*settings: str, value: str | bool | None = None, note: str = "", same_value: bool = False) -> Hint:
    return Hint(settings, value, note, same_value)


_STEP = "a step has train.batch_size × train.accumulation prompts"
_PROMPTS = f"it counts prompts, where TRL counts completions: divide by num_generations; {_STEP}"
_TOKENS = "a number of tokens"
_PER_PROMPT = "a number of completions of each prompt"
_ENGINE = _hint(note="groupwise samples with its own engine, so there is nothing to set")
_SERVER = _hint("vllm.servers", note="it is an option of vLLM's server")
_NONE = _hint(note="groupwise has no such setting")
_BEST = "the best checkpoint by this metric is exported at the end"

OTHER_LIBRARIES: dict[str, Hint] = {
    # sampling
    "num_generations": _hint("sampling.samples_per_prompt", note=_PER_PROMPT),
    "num_generations_eval": _hint("evaluate.samples"),
    "num_samples_per_prompt": _hint("sampling.samples_per_prompt", note=_PER_PROMPT),
    "num_samples": _hint("sampling.samples_per_prompt", note=_PER_PROMPT),
    "num_return_sequences": _hint("sampling.samples_per_prompt", note=_PER_PROMPT),
    "group_size": _hint("sampling.samples_per_prompt", note=_PER_PROMPT),
    "n": _hint("sampling.samples_per_prompt"),
    "max_completion_length": _hint("sampling.max_new_tokens", note=_TOKENS),
    "temp": _hint("sampling.temperature"),
    "min_tokens_to_keep": _hint(note="at least one token is always kept; there is nothing to set"),
    "max_response_length": _hint("sampling.max_new_tokens"),
    "max_tokens": _hint("sampling.max_new_tokens"),
    "stop_strings": _hint("sampling.stop"),
    "generation_kwargs": _hint(note="each argument is a setting of [sampling]"),
    "use_vllm": _hint("sampling.generator", value="vllm", note="groupwise's own engine is the default"),
    "vllm_mode": _hint("vllm.servers", note="their addresses; without any, vLLM runs in the same process"),
    "vllm_model_impl": _SERVER,
    "vllm_enable_sleep_mode": _hint("vllm.sleep"),
    "vllm_gpu_memory_utilization": _hint("vllm.gpu_memory_utilization"),
    "vllm_max_model_length": _SERVER,
    "vllm_tensor_parallel_size": _SERVER,
    "vllm_server_base_url": _hint("vllm.servers", note="a list of addresses"),
    "vllm_server_host": _hint("vllm.servers", note="a list of addresses"),
    "vllm_server_port": _hint("vllm.servers", note="a list of addresses"),
    "vllm_server_timeout": _hint("vllm.wait"),
    "vllm_group_port": _hint("vllm.nccl_port"),
    "use_transformers_continuous_batching": _ENGINE,
    "transformers_continuous_batching_config": _ENGINE,
    "use_transformers_paged": _ENGINE,
    "cache_implementation": _ENGINE,
    "vllm_importance_sampling_correction": _hint("loss.importance_cap"),
    "vllm_importance_sampling_cap": _hint("loss.importance_cap"),
    "vllm_importance_sampling_clip_max": _hint("loss.importance_cap"),
    "vllm_importance_sampling_clip_min": _hint("loss.importance_floor"),
    "vllm_importance_sampling_mode": _hint("loss.importance_sampling", same_value=True),
    "rollout_is": _hint("loss.importance_sampling", note='verl\'s "token" is "token_truncate"'),
    "rollout_is_threshold": _hint("loss.importance_cap"),
    "rollout_is_batch_normalize": _hint("loss.importance_normalize", same_value=True),
    "rollout_rs": _hint(
        "loss.rejection",
        note='verl\'s "seq_mean_k1" is "geometric", "seq_sum_k1" "product", "seq_mean_k3" "k3"; together with '
        "loss.rejection_low and loss.rejection_high",
    ),
    "rollout_token_veto_threshold": _hint("loss.rejection_low", note='together with loss.rejection = "any_token"'),
    "geo_mask_low": _hint("loss.rejection_low"),
    "geo_mask_high": _hint("loss.rejection_high"),
    "rollout_rs_threshold": _hint("loss.rejection_high"),
    "rollout_rs_threshold_lower": _hint("loss.rejection_low"),
    "tis_imp_ratio_cap": _hint("loss.importance_cap"),
    # loss
    "beta": _hint("loss.kl_coef", "preference.beta", note="GRPO's β, the weight of the KL; DPO's β"),
    "w1": _hint("loss.kl_coef", note="w₁, the weight of the KL"),
    "w_1": _hint("loss.kl_coef", note="w₁, the weight of the KL"),
    "w2": _hint("preference.weight", note="w₂, the weight of the preference loss"),
    "w_2": _hint("preference.weight", note="w₂, the weight of the preference loss"),
    "kl_beta": _hint("loss.kl_coef"),
    "kl_loss_coef": _hint("loss.kl_coef"),
    "kl_loss_type": _hint("loss.kl"),
    "use_bias_correction_kl": _hint("loss.kl", value="unbiased"),
    "use_unbiased_kl": _hint("loss.kl", value="unbiased"),
    "epsilon": _hint("loss.clip_low"),
    "epsilon_low": _hint("loss.clip_low"),
    "clip_epsilon": _hint("loss.clip_low"),
    "clip_range": _hint("loss.clip_low"),
    "clip_ratio": _hint("loss.clip_low"),
    "clip_ratio_low": _hint("loss.clip_low"),
    "epsilon_high": _hint("loss.clip_high"),
    "clip_ratio_high": _hint("loss.clip_high"),
    "delta": _hint("loss.dual_clip"),
    "clip_ratio_c": _hint("loss.dual_clip"),
    "loss_type": _hint(
        "loss.name",
        "preference.kind",
        same_value=True,
        note='loss.name is the loss of GRPO, preference.kind that of DPO; several are a list: ["sigmoid", "sft"]',
    ),
    "loss_agg_mode": _hint("loss.aggregation", "loss.name", note='verl\'s "token-mean" is "token_mean"'),
    "importance_sampling_level": _hint("loss.ratio"),
    "entropy_coeff": _hint("loss.entropy_coef"),
    "use_adaptive_entropy": _hint(
        "loss.entropy_target", note="the entropy per token to adapt to; TRL's default is 0.2"
    ),
    "entropy_coef_delta": _hint("loss.entropy_step"),
    "cast_lm_head_to_fp32": _hint("model.float32_head"),
    "loss_weights": _hint(
        "preference.kind_weights",
        same_value=True,
        note="a list, such as [0.8, 0.2], one for each preference.kind; the terms' weights are loss.policy_coef, "
        "loss.kl_coef and preference.weight",
    ),
    "num_items_in_batch": _hint(note="the tokens of a mini-batch are counted, so there is nothing to set"),
    # masks
    "mask_truncated_completions": _hint("masks.drop_truncated"),
    "top_entropy_quantile": _hint("masks.high_entropy", note="the same share: 0.2 keeps a fifth of the tokens"),
    "off_policy_mask_threshold": _hint("masks.off_policy_threshold", note="together with --masks.off_policy v3.2"),
    "use_off_policy_masking": _hint(
        "masks.off_policy", value="v3.2", note="DeepSeek-V3.2's rule; reference_drift compares with the reference"
    ),
    "divergence_type": _hint("masks.divergence", note='"tv" or "kl"'),
    "dppo_mask_low": _hint("masks.divergence_threshold", note="one for both directions"),
    "dppo_mask_high": _hint("masks.divergence_threshold", note="one for both directions"),
    "threshold": _hint("masks.off_policy_threshold", "grouping.threshold"),
    # advantages and rewards
    "scale_rewards": _hint("advantages.scale"),
    "normalize_advantages": _hint("advantages.scale", note="group divides by the group's deviation, none does not"),
    "advantage_norm": _hint("advantages.scale", note="group divides by the group's deviation, none does not"),
    "norm_adv_by_std_in_grpo": _hint("advantages.scale", note="group divides by the group's deviation, none does not"),
    "use_baseline": _hint("advantages.baseline", note="mean subtracts the group's mean, none nothing"),
    "multi_objective_aggregation": _hint("advantages.combine"),
    "adv_estimator": _hint("algorithm"),
    "reward_weights": _hint("rewards.0.weight", note="one for each [[rewards]], numbered from 0"),
    "reward_funcs": _hint("rewards.0.function", note="one for each [[rewards]], numbered from 0"),
    "reward_model": _hint("rewards.0.function", value="reward_model"),
    "reward_model_name_or_path": _hint("rewards.0.function", value="reward_model"),
    # reference
    "sync_ref_model": _hint("reference.refresh_every"),
    "ref_model_sync_steps": _hint("reference.refresh_every"),
    "update_reference_every": _hint("reference.refresh_every", note="in steps"),
    "ref_model_mixup_alpha": _hint("reference.mix"),
    # preference
    "precompute_ref_log_probs": _hint("preference.cache_ref_logps"),
    "truncation_mode": _hint("preference.on_too_long"),
    # losses
    "sapo_temperature_pos": _hint("loss.sapo_temperatures", note="of positive and of negative advantages"),
    "sapo_temperature_neg": _hint("loss.sapo_temperatures", note="of positive and of negative advantages"),
    **{
        f"vespo_{name}_{sign}": _hint(f"loss.vespo_{long}", note="k and λ")
        for name in ("k", "lambda")
        for sign, long in {"pos": "positive", "neg": "negative"}.items()
    },
    # batches and steps
    "num_iterations": _hint("train.iterations"),
    "ppo_epochs": _hint("train.iterations"),
    "num_train_epochs": _hint("train.epochs"),
    "num_epochs": _hint("train.epochs"),
    "total_epochs": _hint("train.epochs"),
    "max_steps": _hint("train.steps"),
    "num_steps": _hint("train.steps"),
    "total_training_steps": _hint("train.steps"),
    "batch_size": _hint("train.batch_size", note=_PROMPTS),
    "per_device_train_batch_size": _hint("train.batch_size", note=_PROMPTS),
    "train_batch_size": _hint("train.batch_size", note=f"both count prompts; {_STEP}"),
    "generation_batch_size": _hint("train.batch_size", note=_PROMPTS),
    "prompts_per_step": _hint("train.batch_size", note=f"both count prompts; {_STEP}"),
    "gradient_accumulation_steps": _hint("train.accumulation", note=_STEP),
    "update_frequency": _hint("train.batch_size", note=f"in prompts; {_STEP}"),
    "final_steps": _hint("train.steps", note="or `steps` of the last of the [[phases]]"),
    "steps_per_generation": _hint("train.mini_batches", note="the updates of one rollout"),
    "ppo_mini_batch_size": _hint("train.mini_batches", note="their number, not their size"),
    "data_seed": _hint("train.seed"),
    "per_device_eval_batch_size": _hint("sampling.max_num_seqs", note="completions at once, in evaluation too"),
    # optimizer
    "lr": _hint("optimizer.learning_rate"),
    "embedding_lr": _hint("optimizer.embedding_learning_rate"),
    "adam_beta1": _hint("optimizer.beta1"),
    "adam_beta2": _hint("optimizer.beta2"),
    "adam_epsilon": _hint("optimizer.eps"),
    "optim": _hint("optimizer.name"),
    "optim_args": _hint("optimizer.options", note="a table"),
    "grad_clip": _hint("optimizer.max_grad_norm"),
    "lr_scheduler_type": _hint("optimizer.lr_schedule"),
    "lr_scheduler": _hint("optimizer.lr_schedule"),
    "lr_scheduler_kwargs": _hint("optimizer.lr_schedule_options"),
    "warmup_ratio": _hint("optimizer.warmup_steps", note="a number of steps"),
    "lr_warmup_steps": _hint("optimizer.warmup_steps"),
    # model
    "model_name": _hint("model.source", "grouping.embedder", note="the model; the embedder of similarity groups"),
    "model_id": _hint("model.source"),
    "model_path": _hint("model.source"),
    "model_name_or_path": _hint("model.source"),
    "base_model_name_or_path": _hint("model.source"),
    "attn_implementation": _hint(note="the attention function is chosen for the device; there is nothing to set"),
    "model_init_kwargs": _hint(note="each argument is a setting of [model]"),
    "model_revision": _hint("model.revision"),
    "bf16": _hint("model.dtype", value="bfloat16"),
    "fp16": _hint("model.dtype", value="float16"),
    "torch_dtype": _hint("model.dtype"),
    "use_cpu": _hint("model.device", value="cpu"),
    "no_cuda": _hint("model.device", value="cpu"),
    "torch_compile": _hint("model.compile"),
    "use_peft": _hint("model.lora.rank"),
    "lora": _hint("model.lora.rank"),
    "lora_r": _hint("model.lora.rank"),
    "lora_rank": _hint("model.lora.rank"),
    "r": _hint("model.lora.rank"),
    "lora_alpha": _hint("model.lora.alpha"),
    "lora_dropout": _hint("model.lora.dropout"),
    "lora_target_modules": _hint("model.lora.targets"),
    "target_modules": _hint("model.lora.targets"),
    "use_rslora": _hint("model.lora.rslora"),
    # data
    "dataset": _hint("data.train"),
    "dataset_name": _hint("data.train"),
    "train_file": _hint("data.train"),
    "train_files": _hint("data.train"),
    "train_dataset": _hint("data.train"),
    "eval_dataset": _hint("data.held_out"),
    "val_files": _hint("data.held_out"),
    "dataset_config": _hint("data.subset"),
    "dataset_train_split": _hint("data.train_split"),
    "dataset_test_split": _hint("data.held_out_split"),
    "prompt_key": _hint("data.prompt"),
    "shuffle_dataset": _hint("data.shuffle"),
    "truncation": _hint("data.on_too_long"),
    # similarity groups
    "n_similarity_workers": _hint("grouping.workers", note="a number of processes"),
    "n_groups": _hint("grouping.max_groups"),
    # evaluation
    "eval_steps": _hint("evaluate.every"),
    "eval_strategy": _hint("evaluate.every"),
    "test_freq": _hint("evaluate.every"),
    "eval_on_start": _hint("evaluate.before_training"),
    "val_before_train": _hint("evaluate.before_training"),
    "metric_for_best_model": _hint("evaluate.metric"),
    "load_best_model_at_end": _hint("evaluate.metric", note=_BEST),
    "early_stopping_patience": _hint("evaluate.patience"),
    # the run
    "output_dir": _hint("run.folder"),
    "default_local_dir": _hint("run.folder"),
    "overwrite_output_dir": _hint(note="use the option --overwrite"),
    "resume_from_checkpoint": _hint(note="use the option --resume"),
    "resume_mode": _hint(note="use the option --resume"),
    "run_name": _hint("run.name"),
    "experiment_name": _hint("run.name"),
    "save_steps": _hint("run.checkpoint_every"),
    "save_strategy": _hint("run.checkpoint_every"),
    "save_freq": _hint("run.checkpoint_every"),
    "save_total_limit": _hint("run.keep_checkpoints"),
    "save_only_model": _hint("run.resumable", value=False),
    "logging_steps": _hint("run.log_every"),
    "logging_strategy": _hint("run.log_every"),
    "log_completions": _hint("run.save_rollouts"),
    "num_completions_to_print": _hint("run.show_samples"),
    "report_to": _hint("run.tensorboard", "run.wandb"),
    "project": _hint("run.wandb"),
    "project_name": _hint("run.wandb"),
    "wandb_project": _hint("run.wandb"),
    "hub_model_id": _hint("run.push_to_hub"),
    # similar to a setting by letters only, or without an equivalent
    **dict.fromkeys(("label_smoothing_factor", "ld_alpha", "log_level", "hub_revision", "ddp_timeout"), _NONE),
    "do_train": _hint(note="`groupwise train` trains; there is nothing to set"),
    "do_eval": _hint("evaluate.every"),
    # with a section
    "loss.beta": _hint("loss.kl_coef"),
    "loss.type": _hint("loss.name"),
    "grouping.model_name": _hint("grouping.embedder"),
    "evaluate.steps": _hint("evaluate.every"),
    "data.file": _hint("data.train"),
    "data.path": _hint("data.train"),
    "run.dir": _hint("run.folder"),
    "run.output_dir": _hint("run.folder"),
    "gradient_checkpointing_kwargs": _hint("model.gradient_checkpointing"),
    "repetition_penalty": _hint("sampling.repetition_penalty"),
}
