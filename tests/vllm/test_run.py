"""Whole runs with vLLM: SmolLM2 with a server that is killed in the middle, and vLLM in the process that trains."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow.parquet
import pytest
import torch

from groupwise.generate import Engine, Sampling
from groupwise.rundir import read_metrics
from groupwise.training.trainer import Callback, Trainer
from tests.vllm.servers import ENVIRONMENT, VllmServer
from tests.weights import smollm2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here: make test-vllm"),
]
ROWS = [
    {"prompt": f"Anna has {n} apples and buys {n + 3} more. How many apples has she now? End with: #### number"}
    for n in range(2, 10)
]
GREEDY = Sampling(max_new_tokens=12, greedy=True)


def digits(completions, **_):
    """Spread in every group, so that each step has an update."""
    return [sum(letter.isdigit() for letter in text) + len(text) / 1000 for text in completions]


class Compare(Callback):
    """After each step, the server's greedy answers are those of the trained weights."""

    def __init__(self):
        self.answers = []

    def on_step(self, trainer, report):
        prompts = [prompt.ids for prompt in trainer.components.train.prompts[:2]]
        trainer.update_generator()
        theirs = trainer.generator.generate(prompts, 1, GREEDY)
        assert torch.equal(theirs.ids, Engine(trainer.components.handle).generate(prompts, 1, GREEDY).ids)
        assert theirs.versions[theirs.mask].unique().tolist() == [report.step]
        self.answers.append(theirs.ids)


def test_a_run_of_smollm2_whose_server_is_killed(tmp_path):
    server = VllmServer(smollm2(), length=256, log=tmp_path)
    server.start()
    compare, failures = Compare(), []
    try:
        server.wait()
        with Trainer.from_rows(
            ROWS,
            digits,
            model={"source": str(smollm2()), "dtype": "float32", "device": "cpu"},
            callbacks=[compare],
            folder=tmp_path / "run",
            data={"max_prompt_length": 128},
            sampling={"generator": "vllm", "samples_per_prompt": 4, "max_new_tokens": 24},
            vllm={"servers": [server.url], "timeout": 120.0, "wait": 300.0},
            optimizer={"learning_rate": 2e-4},
            train={"steps": 2, "batch_size": 2, "accumulation": 1},
            run={"checkpoint_every": 0, "resumable": False, "plot": False, "tensorboard": False},
        ) as trainer:

            def kill_in_step_two():
                while len(compare.answers) < 1 or not trainer.generator.servers[0].in_flight:
                    time.sleep(0.01)
                server.kill()
                while not trainer.generator.servers[0].failure:
                    time.sleep(0.01)
                failures.append(trainer.generator.servers[0].failure)
                server.start()

            threading.Thread(target=kill_in_step_two, daemon=True).start()
            for _ in trainer.steps():
                pass
    finally:
        server.kill()
    assert "connection" in failures[0]
    assert len(compare.answers) == 2
    assert not torch.equal(*compare.answers)  # the weights change
    for step in (1, 2):
        (file,) = (tmp_path / "run").rglob(f"step-{step:06d}.parquet")
        table = pyarrow.parquet.read_table(file).to_pydict()
        pairs = list(zip(table["prompt_number"], table["sample"], strict=True))
        assert pairs == [(prompt, sample) for prompt in range(2) for sample in range(4)]  # each exactly once
    for metrics in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        assert metrics["sampler/logp_difference_max"] < 1e-3
        assert metrics["sampler/sequence_ratio_max"] == pytest.approx(1, abs=0.01)


def test_a_run_with_vllm_in_the_same_process(tmp_path):
    recipe = Path(__file__).parents[2] / "recipes" / "quiz.toml"
    command = [sys.executable, "-m", "groupwise", "train", str(recipe), "--sampling.generator", "vllm"]
    command += [
        "--model.device",
        "cpu",
        "--model.dtype",
        "float32",
        "--vllm.enforce_eager",
        "true",
        "--train.steps",
        "3",
    ]
    command += ["--sft.steps", "5", "--sampling.min_new_tokens", "0", "--data.held_out_rows", "4"]
    command += ["--run.folder", str(tmp_path / "run"), "--run.plot", "false"]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    metrics = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert len(metrics) == 3
    assert all(row["sampler/logp_difference_max"] < 1e-3 for row in metrics if row["updates"])
    assert any(row["updates"] for row in metrics)


def test_what_the_nccl_transfer_uses_exists():
    """It cannot be run without two GPUs; the names and arguments of this version of vLLM are those that are used."""
    code = """
import inspect
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine
NCCLTrainerInitInfo(master_address="127.0.0.1", master_port=1, world_size=2, rank=0, packed=True)
assert {"client", "source"} <= set(inspect.signature(WeightTransferTrainerFactory.trainer_init).parameters)
assert WeightSource.__abstractmethods__ == {"metadata", "__iter__"}
assert [field for field in ParamMeta.__dataclass_fields__] == ["name", "dtype", "shape"]
NCCLTrainerWeightTransferEngine.send_weights, NCCLTrainerWeightTransferEngine.shutdown
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **ENVIRONMENT}
    )
    assert done.returncode == 0, done.stderr[-2000:]
