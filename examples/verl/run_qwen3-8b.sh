#!/usr/bin/env bash
# Similarity-group GRPO for creative writing with verl: Qwen3-8B on one machine with 8 GPUs.
#
#   ./run_qwen3-8b.sh                                  # the sample prompts, rules only
#   JUDGE_ENDPOINT=http://127.0.0.1:8000/v1 JUDGE_MODEL=Qwen/Qwen3-32B ./run_qwen3-8b.sh
#   ./run_qwen3-8b.sh trainer.total_training_steps=2   # arguments are further settings of verl
#
# algorithm.adv_estimator alone turns on similarity groups; +algorithm.similarity.* are their settings.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

PYTHON="${PYTHON:-python3}"
MODEL="${MODEL:-Qwen/Qwen3-8B}"
EMBEDDER="${EMBEDDER:-BAAI/bge-m3}"
PROMPTS="${PROMPTS:-$here/prompts.jsonl}"
DATA="${DATA:-$PWD/data}"
GPUS="${GPUS:-8}"
BATCH="${BATCH:-16}" # prompts per step; the sample has 20, a real run has thousands and 128

[ -e "$DATA/train.parquet" ] || "$PYTHON" "$here/to_parquet.py" "$PROMPTS" "$DATA" --held-out 4

judge=()
if [ -n "${JUDGE_ENDPOINT:-}" ]; then
    kwargs=+reward.custom_reward_function.reward_kwargs
    judge=("$kwargs.judge_endpoint=$JUDGE_ENDPOINT"
        "$kwargs.judge_model=${JUDGE_MODEL:?set JUDGE_MODEL to the name of the model at JUDGE_ENDPOINT}")
    if [ -n "${JUDGE_KEY_ENV:-}" ]; then judge+=("$kwargs.judge_key_env=$JUDGE_KEY_ENV"); fi
fi

exec "$PYTHON" -m verl.trainer.main_ppo \
    algorithm.adv_estimator=similarity_group_grpo \
    +algorithm.similarity.embedder="$EMBEDDER" \
    +algorithm.similarity.method=ward_rows \
    +algorithm.similarity.max_groups=7 \
    +algorithm.similarity.min_silhouette=0.1 \
    +algorithm.similarity.workers="$GPUS" \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/held_out.parquet" \
    data.train_batch_size="$BATCH" \
    data.max_prompt_length=1024 \
    data.max_response_length=4096 \
    data.filter_overlong_prompts=true \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.model.enable_gradient_checkpointing=true \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size="$BATCH" \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \
    actor_rollout_ref.actor.use_kl_loss=true \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.ref.fsdp_config.param_offload=true \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 \
    reward.custom_reward_function.path="$here/reward.py" \
    reward.custom_reward_function.name=score \
    "${judge[@]}" \
    trainer.n_gpus_per_node="$GPUS" \
    trainer.nnodes=1 \
    trainer.total_epochs=15 \
    trainer.save_freq=50 \
    trainer.test_freq=10 \
    trainer.project_name=creative_writing \
    trainer.experiment_name=qwen3-8b_similarity_groups \
    'trainer.logger=["console","wandb"]' \
    "$@"
