"""What a run was resumed with that it was not started with, kept in the run folder as ``resumed.json``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groupwise.config import Recipe
from groupwise.errors import CheckpointError
from groupwise.rundir import RunDir
from groupwise.text import excerpt
from groupwise.training.components import RunComponents
from groupwise.training.state import TrainState
from groupwise.training.store.run_folder import INPUTS, RECIPE, REMEDY, changed_inputs, differences, read_kept

RESUMED = "resumed.json"
# Settings and inputs that the figures of an evaluation depend on; [evaluate] but for these, and these of [data].
WHEN_TO_EVALUATE = ("evaluate.every", "evaluate.before_training", "evaluate.metric", "evaluate.patience")
PROMPTS = ("prompt", "system_prompt", "chat", "chat_template_kwargs", "max_prompt_length", "on_too_long")
INPUTS_OF_EVALUATION = ("task", "held-out rows", "held-out pairs", "tokenizer", "frozen weights")


def record_changes(run: RunDir, recipe: Recipe, inputs: Mapping[str, Any], step: int) -> None:
    """Note how the settings and inputs differ from those before, for a run that is resumed after ``step``."""
    path, earlier = run.path, _read(run.path)  # damage of that file is an error now, not at the end of the run
    changed: dict[str, list[Any]] = {}
    if (path / RECIPE).exists():
        before, after = read_kept(path / RECIPE), recipe.recorded()
        changed = {name: [one, other] for name, one, other in differences(before, after)}
    if (path / INPUTS).exists():
        changed |= changed_inputs(path, inputs)
    if changed:
        run.write_json(RESUMED, {"resumed": [*earlier, {"step": step, "changed": changed}]})


def changed_evaluation(folder: Path, components: RunComponents, state: TrainState) -> list[str]:
    """The settings that differ between the first evaluation of a run and the one that its result is from."""
    last = state.evaluated_at if state.best is None else int(state.best["step"])
    values: dict[str, list[Any]] = {}  # the first and the last value of each setting between the two evaluations
    for entry in _read(folder):
        if state.first_evaluated_at <= int(entry["step"]) < last:
            for name, (before, after) in entry["changed"].items():
                values[name] = [values.get(name, [before])[0], after]
    return [name for name, (first, now) in values.items() if first != now and _matters(name, components)]


def _matters(name: str, components: RunComponents) -> bool:
    """Whether the figures of an evaluation depend on a setting or an input."""
    section, _, key = name.partition(".")
    if name == "sampling.max_new_tokens":
        return components.recipe.evaluate.max_new_tokens is None
    role = name.partition(", source of ")[2]
    if name in ("rewards", "reward models") or role.startswith("reward"):
        return not components.task.grades
    return (
        role.startswith(("task", "grade"))
        or (section == "evaluate" and name not in WHEN_TO_EVALUATE)
        or (section == "data" and key in PROMPTS)
        or name in (*INPUTS_OF_EVALUATION, "sampling.stop")
    )


def _read(folder: Path) -> list[dict[str, Any]]:
    path = folder / RESUMED
    entries: list[dict[str, Any]] = read_kept(path, resumed=list)["resumed"] if path.exists() else []
    for entry in entries:
        changed = entry.get("changed") if isinstance(entry, dict) else None
        pairs = changed.values() if isinstance(changed, dict) else [None]
        is_complete = all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)
        if not is_complete or type(entry.get("step")) is not int:
            raise CheckpointError(f"{path} is damaged: {excerpt(entry)} is no change. {REMEDY}")
    return entries
