"""Small runs for tests: a task that the tiny model can try in a second, and what a run has left on the disk."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from groupwise.config import Recipe, make_recipe
from groupwise.rundir import read_json, read_metrics, verify_manifest
from groupwise.tasks import Task
from groupwise.training.display.base import Display
from groupwise.training.monitor.timer import is_timing
from groupwise.training.store.rollout_files import read_rollouts
from groupwise.training.trainer import Trainer

ROWS = [{"prompt": f"Say number {number}: "} for number in range(10)]
TASK = Task("try", ROWS, ROWS[:2])
SMALL: dict[str, Any] = {
    "train": {"steps": 4, "batch_size": 3, "accumulation": 1},
    "sampling": {"samples_per_prompt": 4, "max_new_tokens": 6},
    "optimizer": {"learning_rate": 1e-3},
    "model": {"gradient_checkpointing": False},
    "data": {"chat": False},
    "evaluate": {"every": 2, "max_new_tokens": 3},
    "run": {"checkpoint_every": 1, "keep_checkpoints": 20, "tensorboard": False, "picture": False},
}


def vowels(completions: Sequence[str], **_: Any) -> list[float]:
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in completions]


def even(completions: Sequence[str], **_: Any) -> list[float]:
    """Something that hardly two answers have in common."""
    return [sum(ord(letter) % 2 == 0 for letter in text) / max(1, len(text)) for text in completions]


class RecordingDisplay(Display):
    """A display that only keeps what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self.steps: list[int] = []
        self.summary: list[Any] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        super().step(step, metrics)
        self.steps.append(step)

    def finish(self, lines: Sequence[Any]) -> None:
        self.summary = list(lines)
        super().finish(lines)

    def heard(self, part: str) -> bool:
        return any(part in text for text in self.said)


def merged(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables on top of one another."""
    found: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            both = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
            found[key] = merged(found[key], value) if both else copy.deepcopy(value)
    return found


def small_recipe(*changes: Mapping[str, Any]) -> Recipe:
    return make_recipe(merged(SMALL, *changes))


def small_trainer(folder: Path, *changes: Mapping[str, Any], **options: Any) -> Trainer:
    if "rewards" not in options and not (options.get("task") and options["task"].rewards):
        options["rewards"] = [even]
    return Trainer(small_recipe(*changes), folder=folder, **{"task": TASK, "display": RecordingDisplay(), **options})


def go(trainer: Trainer, steps: int) -> Trainer:
    """Do so many steps and leave the run as a loop does that was broken off."""
    with trainer:
        for count, _ in enumerate(trainer.steps(), start=1):
            if count == steps:
                break
    return trainer


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The run's rows of metrics, without what no two runs share."""
    rows = read_metrics(folder / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not is_timing(name)} for row in rows]


def checkpoint_of(folder: Path, step: int) -> dict[str, Any]:
    """All tensors and the state of a checkpoint, which must be whole."""
    place = folder / f"checkpoint-{step}"
    verify_manifest(place)
    found: dict[str, Any] = {"state": read_json(place / "state.json")}
    for name in ("masters", "optimizer", "reference"):
        if (place / f"{name}.safetensors").exists():
            for key, value in load_file(place / f"{name}.safetensors").items():
                found[f"{name}/{key}"] = value
    return found


def check_same(one: Path, other: Path, step: int) -> None:
    """Two runs have ended in the same place by the same way, to the bit."""
    first, second = checkpoint_of(one, step), checkpoint_of(other, step)
    assert first.keys() == second.keys()
    assert sum(name.startswith("optimizer/exp_avg/") for name in first) > 0
    different = [
        name
        for name, value in first.items()
        if not (torch.equal(value, second[name]) if isinstance(value, torch.Tensor) else value == second[name])
    ]
    assert different == []
    mine, theirs = metrics_of(one), metrics_of(other)
    assert [row["step"] for row in mine] == [row["step"] for row in theirs]
    for before, after in zip(mine, theirs, strict=True):
        # NaN is no number that equals itself; written out it does.
        assert {name: repr(value) for name, value in before.items()} == {
            name: repr(value) for name, value in after.items()
        }
    assert read_rollouts(one).equals(read_rollouts(other))
