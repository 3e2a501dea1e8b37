"""A script runs where TRL is not installed, with all that it takes from groupwise.trl."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.trl.fixtures import SCRIPTS, models, workplace

__all__ = ["models", "workplace"]

# As in an environment without TRL: it can neither be imported nor found.
WITHOUT_TRL = "import sys; sys.modules['trl'] = None\n"
LOCAL_DATA = """
import datasets
datasets.load_dataset = lambda *_, **__: datasets.Dataset.from_dict({"prompt": [f"Say number {n}: " for n in range(8)]})
"""


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A new process that has not imported TRL."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    variables = {**os.environ, "PYTHONPATH": path, "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", WITHOUT_TRL + code]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)


@pytest.mark.slow
def test_a_script_needs_no_trl(workplace: Path) -> None:
    script = (SCRIPTS / "quick_start.py").read_text()
    assert "from trl import" in script
    script = script.replace("from trl import", "from groupwise.trl import")
    script = script.replace("bf16=False", "bf16=False, report_to='none'")
    result = run(LOCAL_DATA + script + "\nprint(trainer.state.log_history[-1])", workplace)
    assert result.returncode == 0, result.stderr
    assert "train_loss" in result.stdout.splitlines()[-1]


def test_another_name_of_trl_says_what_to_install(tmp_path: Path) -> None:
    result = run("from groupwise.trl import GRPOConfig, GRPOTrainer, ModelConfig", tmp_path)
    assert result.returncode == 1
    assert "ImportError: groupwise.trl has GRPOConfig and GRPOTrainer; ModelConfig is one of TRL's own" in result.stderr
    assert "pip install trl" in result.stderr
