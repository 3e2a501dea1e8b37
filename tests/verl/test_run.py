"""A training run of two steps by ``python -m verl.trainer.main_ppo`` on a CPU.

Everything is verl's, except a platform (cpu_platform.py) and a sampling server (cpu_rollout.py) in place of a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from groupwise.config import GroupingSection
from groupwise.core import group_advantages
from groupwise.grouping.embed import load_embedder
from groupwise.grouping.grouper import group_texts
from groupwise.model.tiny import tiny_model, tiny_tokenizer
from tests.verl.common import ROOT, SIMILARITY
from tests.weights import wordllama

PROMPTS, SAMPLES, STEPS = 2, 6, 2
REWARD = "def compute_score(data_source, solution_str, ground_truth, **_):\n    return float(len(solution_str) % 7)\n"


def overrides(folder, use_v1):
    files, model = folder / "rows.parquet", folder / "model"
    return [
        *SIMILARITY,
        f"trainer.use_v1={use_v1}",
        *(f"data.{kind}_files={files}" for kind in ("train", "val")),
        f"data.train_batch_size={PROMPTS}",
        "data.shuffle=false",
        "data.max_prompt_length=64",
        "data.max_response_length=16",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.use_remove_padding=false",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        "actor_rollout_ref.actor.strategy=fsdp2",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.actor.use_torch_compile=false",
        "actor_rollout_ref.actor.optim.lr=0.01",
        "actor_rollout_ref.rollout.name=cpu",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
        "ray_kwargs.ray_init.num_cpus=16",
        "+ray_kwargs.ray_init.num_gpus=1",
        "+ray_kwargs.ray_init.include_dashboard=false",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        f"trainer.total_training_steps={STEPS}",
        "trainer.logger=[file]",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        f"trainer.rollout_data_dir={folder / 'rollouts'}",
        f"hydra.run.dir={folder / 'hydra'}",
    ]


@pytest.fixture(scope="module", params=["true", "false"], ids=["v1", "classic"])
def run(request, tmp_path_factory):
    """The metrics and the answers of each step, and the output, of both trainers; only the estimator selects groups."""
    wordllama()
    folder = tmp_path_factory.mktemp("run")
    tiny_model().save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    rows = [
        {
            "data_source": "toy",
            "prompt": [{"role": "user", "content": f"Write {number}"}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": number},
        }
        for number in range(4)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    (folder / "reward.py").write_text(REWARD)
    environment = {
        "PYTHONPATH": str(ROOT),
        "VERL_USE_EXTERNAL_MODULES": "tests.verl.cpu_platform",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # run the engine for GPUs
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(folder, request.param)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        cwd=folder,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    metrics = [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    answers = [
        [json.loads(line) for line in (folder / "rollouts" / f"{step}.jsonl").read_text().splitlines()]
        for step in range(1, STEPS + 1)
    ]
    return metrics, answers, said


def expected(answers):
    """Advantages, labels and silhouette of a step's answers, computed without verl."""
    prompts = {}
    for row in answers:
        prompts.setdefault(row["input"], []).append(row)
    settings = GroupingSection(embedder="wordllama")
    result = group_texts(
        load_embedder("wordllama"), [[row["output"] for row in rows] for rows in prompts.values()], settings
    )
    labels = [(uid, int(label)) for uid, row in zip(prompts, result.labels[..., 0], strict=True) for label in row]
    rewards = torch.tensor([row["score"] for rows in prompts.values() for row in rows])
    return group_advantages(rewards, labels, eps=1e-6), labels, float(result.scores.mean())


def test_metrics_and_advantages_of_a_run(run):
    metrics, answers, said = run
    assert len(metrics) == STEPS
    assert "[RayPPOTrainer] Creating 1 similarity grouper workers..." in said
    assert "[SimilarityGrouperWorker] Loading model: wordllama" in said
    for logged, rows in zip(metrics, answers, strict=True):
        assert len(rows) == PROMPTS * SAMPLES
        advantages, labels, silhouette = expected(rows)
        assert logged["similarity_groups/avg_groups_per_prompt"] == len(set(labels)) / PROMPTS
        alone = sum(labels.count(label) == 1 for label in labels)
        assert logged["similarity_groups/n_single_member_groups"] == alone
        assert logged["similarity_groups/avg_silhouette_score"] == pytest.approx(silhouette, abs=1e-5)
        assert logged["critic/advantages/max"] == pytest.approx(float(advantages.max()), abs=1e-4)
        assert logged["critic/advantages/min"] == pytest.approx(float(advantages.min()), abs=1e-4)
    assert max(logged["actor/grad_norm"] for logged in metrics) > 0


def test_plain_grpo_would_differ(run):
    """So the test above can fail."""
    metrics, answers, _ = run
    prompts = [row["input"] for row in answers[0]]
    plain = group_advantages(torch.tensor([row["score"] for row in answers[0]]), prompts, eps=1e-6)
    assert metrics[0]["critic/advantages/max"] != pytest.approx(float(plain.max()), abs=1e-3)
