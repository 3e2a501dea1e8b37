"""Small runs of the tiny model for tests, and comparison of their results."""

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
from groupwise.training.display import Display
from groupwise.training.monitor.timing_names import is_timing
from groupwise.training.store.rollout_files import read_rollouts, read_rows, step_files
from groupwise.training.store.token_files import EVALUATIONS, TOKENS
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
    "run": {"checkpoint_every": 1, "keep_checkpoints": 20, "tensorboard": False, "plot": False},
}

# A template of the tiny model's special tokens that shows tools; its own has none.
TOOL_TEMPLATE = (
    "{%- if tools -%}{{- '<|start|>system\\n' -}}{%- for tool in tools -%}{{- tool | tojson -}}{%- endfor -%}"
    "{{- '<|end|>' -}}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|start|>' + message['role'] + '\\n' + message['content'] -}}"
    "{%- for call in message.tool_calls or [] -%}"
    "{{- '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|start|>assistant\\n' -}}{%- endif -%}"
)


def vowels(completions: Sequence[str], **_: Any) -> list[float]:
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in completions]


def even(completions: Sequence[str], **_: Any) -> list[float]:
    """Differs for most answers."""
    return [sum(ord(letter) % 2 == 0 for letter in text) / max(1, len(text)) for text in completions]


class RecordingDisplay(Display):
    """A display that keeps its calls."""

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
    """Nested tables merged; later ones win."""
    result: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
            result[key] = merged(result[key], value) if both else copy.deepcopy(value)
    return result


def small_recipe(*changes: Mapping[str, Any]) -> Recipe:
    return make_recipe(merged(SMALL, *changes))


def small_trainer(folder: Path, *changes: Mapping[str, Any], **options: Any) -> Trainer:
    if "rewards" not in options and not (options.get("task") and options["task"].rewards):
        options["rewards"] = [even]
    return Trainer(small_recipe(*changes), folder=folder, **{"task": TASK, "display": RecordingDisplay(), **options})


def graded_trainer(folder: Path, rights: Sequence[int], *changes: Mapping[str, Any], held_out: int = 4) -> Trainer:
    """A run in which ``rights[step]`` of the held-out answers are "right" after each step, and all of them "ever"."""
    trainers: list[Trainer] = []

    def grade(row: Mapping[str, Any], answer: str) -> bool:
        return ROWS.index(dict(row)) < rights[min(trainers[0].step, len(rights) - 1)]

    grades = {"right": grade, "ever": lambda *_: True}
    task = Task("graded", ROWS, ROWS[:held_out], grades=grades, metric="right")
    trainers.append(small_trainer(folder, *changes, task=task))
    return trainers[0]


def run_steps(trainer: Trainer, steps: int) -> Trainer:
    """Run some steps, then close the trainer as if the loop had been interrupted."""
    with trainer:
        for count, _ in enumerate(trainer.steps(), start=1):
            if count == steps:
                break
    return trainer


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The run's metrics without timings."""
    rows = read_metrics(folder / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not is_timing(name)} for row in rows]


def checkpoint_of(folder: Path, step: int) -> dict[str, Any]:
    """All tensors and the state of a checkpoint, whose manifest is verified."""
    place = folder / f"checkpoint-{step}"
    verify_manifest(place)
    contents: dict[str, Any] = {"state": read_json(place / "state.json")}
    for name in ("masters", "optimizer", "reference"):
        if (place / f"{name}.safetensors").exists():
            for key, value in load_file(place / f"{name}.safetensors").items():
                contents[f"{name}/{key}"] = value
    return contents


def check_same(one: Path, other: Path, step: int) -> None:
    """Check that two runs have the same checkpoint, metrics, rollouts, tokens and evaluations, bit for bit."""
    first, second = checkpoint_of(one, step), checkpoint_of(other, step)
    assert first.keys() == second.keys()
    assert sum(name.startswith("optimizer/exp_avg/") for name in first) > 0
    different = [
        name
        for name, value in first.items()
        if not (torch.equal(value, second[name]) if isinstance(value, torch.Tensor) else value == second[name])
    ]
    assert different == []
    rows, other_rows = metrics_of(one), metrics_of(other)
    assert [row["step"] for row in rows] == [row["step"] for row in other_rows]
    for before, after in zip(rows, other_rows, strict=True):
        # repr, because NaN is not equal to itself
        assert {name: repr(value) for name, value in before.items()} == {
            name: repr(value) for name, value in after.items()
        }
    assert read_rollouts(one).equals(read_rollouts(other))
    for kind in (TOKENS, EVALUATIONS):
        files, other_files = step_files(one / kind), step_files(other / kind)
        assert files.keys() == other_files.keys()
        assert all(read_rows(path) == read_rows(other_files[number]) for number, path in files.items())
