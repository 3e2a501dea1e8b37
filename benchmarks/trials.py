"""Many small runs of a recipe with different settings and seeds, each in a separate process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SMOOTH = 10  # steps
RECIPES = Path(__file__).parents[1] / "recipes"
# On a CPU, with nothing in the folder but what a benchmark reads.
QUIET = {
    "model.device": "cpu",
    "run.checkpoint_every": 0,
    "run.resumable": "false",
    "run.save_tokens_every": 0,
    "run.tensorboard": "false",
    "run.plot": "false",
}


def add_run_arguments(parser: Any) -> None:
    """The options that say how several runs are run."""
    parser.add_argument("--at-once", type=int, default=1, help="runs in parallel; on a CPU each uses one core")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder; finished ones are not repeated")
    parser.add_argument("--set", nargs="*", default=[], metavar="SETTING=VALUE", help="other settings of all runs")


def given(words: Sequence[str]) -> dict[str, str]:
    """Settings as SETTING=VALUE."""
    return dict(word.split("=", 1) for word in words)


def folder_of(root: Path, *names: object) -> Path:
    """The folder of a run: its names, with dashes for special characters."""
    return root / "-".join("".join(letter if letter.isalnum() else "-" for letter in str(name)) for name in names)


def smooth(values: np.ndarray) -> np.ndarray:
    """Running means over the last `SMOOTH` steps."""
    return np.array([values[max(0, end - SMOOTH) : end].mean() for end in range(1, len(values) + 1)])


def as_options(settings: Mapping[str, object]) -> list[str]:
    """Settings as words of a command line."""
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def train(recipe: str, settings: Mapping[str, object], folder: Path) -> None:
    """Run a recipe, unless the folder has a finished run."""
    if (folder / "model").exists():
        return
    options = as_options({**settings, "run.folder": folder})
    command = [sys.executable, "-m", "groupwise", "train", str(RECIPES / recipe), "--overwrite", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{folder.name}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    print(f"{folder.name}: done", flush=True)
