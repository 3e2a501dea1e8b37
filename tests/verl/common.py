"""Helpers of the verl tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SIMILARITY = [
    "algorithm.adv_estimator=similarity_group_grpo",
    "+algorithm.similarity.embedder=wordllama",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
]


def compose(*overrides):
    """verl's configuration with similarity groups and these overrides."""
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[*SIMILARITY, *overrides])


def in_fresh_process(code, **environment):
    """The last line of a program's output, as JSON, and its stderr."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr
