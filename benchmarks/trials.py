"""Many small runs of a recipe with different settings and seeds, each in a separate process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

SMOOTH = 10  # steps
RECIPES = Path(__file__).parents[1] / "recipes"


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
