"""examples/verl with the real verl: the script's configuration, the converted rows, and the reward."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module
from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
from verl.protocol import DataProto
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.trainer.ppo.utils import create_rl_dataset, need_critic, need_reference_policy
from verl.utils.config import validate_config
from verl.utils.dataset.rl_dataset import collate_fn

from groupwise.config import GroupingSection
from groupwise.integrations.verl.settings import read_settings
from groupwise.model.tiny import tiny_tokenizer
from tests.verl.common import ROOT

FOLDER = ROOT / "examples" / "verl"
# In place of Python: runs the converter, and prints the arguments of verl instead of training.
STAND_IN = """#!{python}
import json, os, sys
if sys.argv[1:3] == ["-m", "verl.trainer.main_ppo"]:
    print(json.dumps(sys.argv[3:]))
else:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
"""


def overrides(folder, *arguments, **environment):
    """The settings that the script passes to verl, after it has converted the sample."""
    stand_in = folder / "python"
    stand_in.write_text(STAND_IN.format(python=sys.executable))
    stand_in.chmod(0o755)
    done = subprocess.run(
        [FOLDER / "run_qwen3-8b.sh", *arguments],
        env={**os.environ, "PYTHON": str(stand_in), **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def validated(settings):
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=settings)
    validate_config(config, need_reference_policy(config), need_critic(config))
    return config


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("example")
    return validated(overrides(folder))


def test_configuration_is_the_designs(config):
    assert config.algorithm.adv_estimator == "similarity_group_grpo"
    assert read_settings(config) == GroupingSection(
        embedder="BAAI/bge-m3", method="ward_rows", max_groups=7, min_silhouette=0.1, workers=8
    )
    assert config.actor_rollout_ref.model.path == "Qwen/Qwen3-8B"
    assert config.actor_rollout_ref.rollout.n == 8
    assert config.trainer.n_gpus_per_node == 8
    assert need_reference_policy(config)
    assert not need_critic(config)


def test_variables_and_arguments_of_the_script(tmp_path):
    judge = {"JUDGE_ENDPOINT": "http://judge:8000/v1", "JUDGE_MODEL": "Qwen/Qwen3-32B", "JUDGE_KEY_ENV": "MY_KEY"}
    data = {"PROMPTS": str(FOLDER / "prompts.jsonl"), "DATA": str(tmp_path / "mine"), "BATCH": "8", "GPUS": "2"}
    config = validated(overrides(tmp_path, "trainer.total_training_steps=2", **judge, **data))
    assert config.trainer.total_training_steps == 2
    assert config.data.train_files == str(tmp_path / "mine" / "train.parquet")
    assert config.data.train_batch_size == 8
    assert read_settings(config).workers == 2
    kwargs = config.reward.custom_reward_function.reward_kwargs
    assert kwargs == {
        "judge_endpoint": judge["JUDGE_ENDPOINT"],
        "judge_model": "Qwen/Qwen3-32B",
        "judge_key_env": "MY_KEY",
    }


def test_verl_reads_the_rows_and_calls_the_reward(config):
    tokenizer = tiny_tokenizer()
    dataset = create_rl_dataset(config.data.train_files, config.data, tokenizer, None)
    assert len(dataset) == 20
    row = DataProto.from_single_dict(collate_fn([dataset[0]]))
    prompt = row.non_tensor_batch["raw_prompt"][0][0]["content"]
    assert prompt == json.loads((FOLDER / "prompts.jsonl").read_text().splitlines()[0])["prompt"]

    async def scored():  # verl's manager belongs to the loop in which it is created
        return await get_reward_manager_cls("naive")(config, tokenizer, get_custom_reward_fn(config)).run_single(data)

    responses = torch.tensor([tokenizer.encode("let me see</think>the radio station at night<|end|>")])
    data = DataProto.from_dict(
        tensors={"responses": responses, "attention_mask": torch.ones_like(responses)},
        non_tensors={
            name: np.array([row.non_tensor_batch[name][0]], dtype=object)
            for name in ("data_source", "reward_model", "extra_info")
        },
    )
    result = asyncio.run(scored())
    parts = result["reward_extra_info"]
    assert result["reward_score"] == parts["score"]
    assert parts["keywords"] > 0
    assert parts["repetition"] == 1.0
    assert parts["length"] == pytest.approx(5 / 150)
    assert parts["score"] == pytest.approx((parts["keywords"] + 1.0 + 0.5 * 5 / 150) / 2.5)
