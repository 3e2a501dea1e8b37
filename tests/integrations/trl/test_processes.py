"""A script in several processes, as torchrun and accelerate start them: the run of one process with the same batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integrations.trl.fixtures import POLICY, models, workplace

__all__ = ["models", "workplace"]

pytestmark = pytest.mark.slow
SCRIPT = f"""
import json, sys
from pathlib import Path
from datasets import Dataset
from transformers import TrainerCallback
from groupwise.trl import GRPOConfig, GRPOTrainer

output_dir, batch_size, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dataset = Dataset.from_list([{{"prompt": f"Say number {{number}}: "}} for number in range(16)])


def letters(completions, **kwargs):
    return [len(set(completion)) for completion in completions]


class Remember(TrainerCallback):
    losses = []

    def on_log(self, args, state, control, logs, **kwargs):
        self.losses += [logs["loss"]] if "loss" in logs else []


args = GRPOConfig(
    output_dir=output_dir,
    model_init_kwargs={{"dtype": "float64"}},
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    beta=0.04,
    per_device_train_batch_size=batch_size,
    num_generations=4,
    max_completion_length=6,
    max_steps=steps,
    logging_steps=1,
    save_steps=2,
    eval_strategy="steps",
    eval_steps=2,
    bf16=False,
    use_cpu=True,
    report_to="none",
)
trainer = GRPOTrainer("{POLICY}", letters, args, dataset, dataset.select(range(4)), callbacks=[Remember()])
result = trainer.train(resume_from_checkpoint=len(sys.argv) > 4)
trainer.save_model(output_dir + "/last")
said = {{
    "processes": args.world_size,
    "first": trainer.is_world_process_zero(),
    "losses": Remember.losses,
    "train_loss": result.training_loss,
    "eval_reward": trainer.evaluate()["eval_reward"],
}}
Path(f"{{output_dir}}-{{args.process_index}}.json").write_text(json.dumps(said))
"""
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# Without MPI accelerate starts several processes only with this option; the script asks for CPUs.
ACCELERATE = ("accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--num_processes", "2")
ACCELERATE += ("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0")


@pytest.fixture
def run(workplace: Path):
    (workplace / "script.py").write_text(SCRIPT)

    def start(launcher: tuple[str, ...], name: str, *arguments: object) -> tuple[list[dict], dict[str, torch.Tensor]]:
        """What each process said, and the weights that were saved."""
        path = os.pathsep.join(entry for entry in sys.path if entry)
        variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        module = ("-m", *launcher) if launcher else ()
        command = [sys.executable, *module, "script.py", name, *map(str, arguments)]
        result = subprocess.run(command, env=variables, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
        said = [json.loads(file.read_text()) for file in sorted(workplace.glob(f"{name}-?.json"))]
        return said, load_file(workplace / name / "last" / "model.safetensors")

    return start


def test_two_processes_are_one_with_the_same_batch(run) -> None:
    (one,), weights = run((), "one", 8, 4)
    for name, launcher in (("torchrun", TORCHRUN), ("accelerate", ACCELERATE)):
        said, others = run(launcher, name, 4, 4)  # completions of each process
        assert [(entry["processes"], entry["first"]) for entry in said] == [(2, True), (2, False)]
        for entry in said:
            assert entry["losses"] == pytest.approx(one["losses"], abs=1e-10)
            assert entry["train_loss"] == pytest.approx(one["train_loss"], abs=1e-10)
            assert entry["eval_reward"] == one["eval_reward"]
        for key, weight in weights.items():
            torch.testing.assert_close(others[key], weight, rtol=0, atol=1e-10)


def test_a_checkpoint_of_two_processes_goes_on_in_one(run) -> None:
    (_, straight) = run((), "straight", 8, 4)
    run(TORCHRUN, "parts", 4, 2)
    ((*_,), resumed) = run((), "parts", 8, 4, "resume")
    for key, weight in straight.items():
        torch.testing.assert_close(resumed[key], weight, rtol=0, atol=1e-10)
