"""A run folder with chosen numbers and texts, written by the trainer's own writers without training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from groupwise.config import make_recipe
from groupwise.rundir import RunDir
from groupwise.training.store.recorder import Recorder
from groupwise.training.store.run_folder import mark_finished, write_inputs, write_recipe

Sample = Mapping[str, Any]


def sample(prompt_number: int, number: int, reward: float | None, **more: Any) -> dict[str, Any]:
    """A row of a rollout file."""
    return {
        "prompt_number": prompt_number,
        "row": prompt_number,
        "sample": number,
        "group": prompt_number,
        "prompt": f"prompt {prompt_number}",
        "completion": f"answer {prompt_number}.{number}",
        "reward": reward,
        "reward/correct": reward,
        "advantage": 0.0,
        "contributes": True,
        "masked_out": None,
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "stop_reason": "eos",
        **more,
    }


def table_of(step: int, rows: Sequence[Sample]) -> dict[str, list[Any]]:
    return {"step": [step] * len(rows), **{name: [row.get(name) for row in rows] for name in rows[0]}}


def write_run(
    folder: Path,
    *,
    settings: Mapping[str, Any] | None = None,
    steps: Iterable[Mapping[str, Any]] = (),
    rollouts: Mapping[int, Sequence[Sample]] | None = None,
    evaluations: Mapping[int, Mapping[str, float]] | None = None,
    answers: Mapping[int, Sequence[Sample]] | None = None,
    finished: bool = True,
) -> Path:
    """``steps`` are the metrics of the steps from 1 on, ``answers`` the held-out completions of evaluations."""
    metrics = list(steps)
    recipe = make_recipe({"task": "quiz", "train": {"steps": max(1, len(metrics))}, **(settings or {})})
    inputs = {
        "model": recipe.model.source,
        "task": "quiz",
        "rewards": ["correct"],
        "training rows": "16, 0",
        "held-out rows": "4, 0",
    }
    with RunDir.create(folder) as run:
        write_recipe(run, recipe, print, resuming=False)
        write_inputs(run, inputs, "quiz.toml")
        recorder = Recorder(run, say=print, tensorboard=False)
        for step in range(len(metrics) + 1):
            if step:
                recorder.step(step, metrics[step - 1])
            if rows := (rollouts or {}).get(step):
                recorder.rollouts(step, table_of(step, rows))
            if step in (evaluations or {}):
                held_out = (answers or {}).get(step)
                recorder.evaluation(step, evaluations[step], table_of(step, held_out) if held_out else None)
        recorder.close()
        if finished:
            mark_finished(run, len(metrics), len(metrics))
    return folder
