"""Many small runs of one recipe, with other settings and seeds, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

SMOOTH = 10  # steps
RECIPES = Path(__file__).parents[1] / "recipes"


def folder_of(root: Path, *names: object) -> Path:
    """Where a run is kept: its names in a row, with dashes for what a file's name should not have."""
    return root / "-".join("".join(letter if letter.isalnum() else "-" for letter in str(name)) for name in names)


def smooth(values: np.ndarray) -> np.ndarray:
    """Means over the last few steps: a batch has few answers."""
    return np.array([values[max(0, end - SMOOTH) : end].mean() for end in range(1, len(values) + 1)])


def train(recipe: str, settings: Mapping[str, object], folder: Path) -> None:
    """One run of a recipe; one that is there already is left alone."""
    if (folder / "model").exists():
        return
    whole = {**settings, "run.folder": folder}
    words = [word for key, value in whole.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "groupwise", "train", str(RECIPES / recipe), "--overwrite", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{folder.name}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    print(f"{folder.name}: done", flush=True)
