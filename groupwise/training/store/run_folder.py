"""The folder of a training run: finding or creating it; the recipe, inputs and versions that are kept in it.

Importing this does not load PyTorch: the command line looks for the folder first.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.config import Recipe
from groupwise.config.sections import OWN_LENGTHS
from groupwise.errors import CheckpointError, ConfigError, RunDirError
from groupwise.rundir import RunDir, new_run_path, package_versions, read_json, read_metrics
from groupwise.rundir.run import MARKER, METRICS, check_is_run, holds_run
from groupwise.text import Say, plural

if TYPE_CHECKING:
    from groupwise.training.components import RunComponents

RUNS = Path("runs")
# Settings that decide how many steps a run has, and those that are used after its last step.
NUMBER_OF_STEPS = (
    "train.steps", "train.epochs", "train.batch_size", "train.accumulation", "phases", "evaluate.patience",
)  # fmt: skip
AFTER_THE_END = ("run.export_dtype", "run.plot", "run.push_to_hub")
RECIPE, INPUTS, VERSIONS, FINISHED = "recipe.json", "inputs.json", "versions.json", "finished.json"
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "peft", "trl")


def open_run(
    recipe: Recipe,
    folder: str | Path | None,
    *,
    name: str,
    recipe_file: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> RunDir:
    """The run's folder, locked: a new one, the one to resume, or one that may be overwritten.

    To resume without a folder, the newest run of the recipe's file is taken, or for a recipe without a file the newest
    run of that name.
    """
    if resume:
        return RunDir.resume(find_run(recipe, folder, recipe_file, name=name))
    chosen = folder or recipe.run.folder
    path = Path(chosen) if chosen else new_run_path(RUNS, recipe.run.name or name)
    if overwrite and holds_run(path):
        return RunDir.resume(path)  # the caller clears it once the new run can start
    return RunDir.create(path)


def find_run(recipe: Recipe, folder: str | Path | None, recipe_file: str | None, *, name: str = "") -> Path:
    """The folder of the run that `open_run` resumes; nothing is opened."""
    path = Path(folder or recipe.run.folder or _latest(recipe.run.name or name, recipe_file))
    check_is_run(path)
    return path


def _latest(name: str, recipe_file: str | None) -> Path:
    stamped = re.compile(rf"\d{{8}}-\d{{6}}-{re.escape(name)}(-\d+)?")
    recipe_files = () if recipe_file is None else (recipe_file, Path(recipe_file).name)  # 0.1.0 kept only the last part
    runs: list[tuple[str, int, Path]] = []
    for marker in RUNS.glob(f"*/{MARKER}"):
        path = marker.parent
        if _recipe_file(path) in recipe_files if recipe_file else stamped.fullmatch(path.name):
            runs.append((_created(path), marker.stat().st_mtime_ns, path))
    if not runs:
        what = f"of the recipe {recipe_file}" if recipe_file else f"called {name!r}"
        raise RunDirError(f"there is no run {what} below {RUNS}/ to resume; name its folder with --run.folder")
    # A run that failed before its first step has nothing to resume; it is taken only if there is no other.
    return max([run for run in runs if _has_steps(run[2])] or runs)[2]


def _has_steps(path: Path) -> bool:
    try:
        return bool(checkpoints_in(path)) or any(row["step"] for row in read_metrics(path / METRICS))
    except RunDirError:
        return False  # no metrics, or damaged ones


def mark_finished(run: RunDir, step: int, total_steps: int) -> None:
    """Note that the run has come to its end, by its number of steps or by early stopping."""
    run.write_json(FINISHED, {"step": step, "total_steps": total_steps})


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """A run's checkpoints by step, intact or not, oldest first. A copy under another name is the user's."""
    matches = ((re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in folder.glob("checkpoint-*"))
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def nothing_to_resume(recipe: Recipe, path: Path) -> str | None:
    """A sentence if the run in ``path`` is finished and the recipe asks for nothing new. Nothing is written."""
    if not (path / FINISHED).exists() or not (path / RECIPE).exists():
        return None  # not finished
    end = read_json(path / FINISHED)
    step, total = int(end["step"]), int(end["total_steps"])
    if max(checkpoints_in(path), default=None) != step:
        return None  # it was continued since, and stopped
    changed = {name for name, *_ in differences(read_json(path / RECIPE), recipe.model_dump())}
    steps = recipe.train.steps
    if changed & set(AFTER_THE_END) or ((steps is None or steps > step) and changed & set(NUMBER_OF_STEPS)):
        return None
    ignored = sorted(changed - set(NUMBER_OF_STEPS))
    if step < total:
        state = f"stopped early after {plural(step, 'step')} of {total:,}"
        more = f"raise evaluate.patience (--evaluate.patience {2 * (recipe.evaluate.patience or 1)})"
    else:
        state = f"has finished its {plural(step, 'step')}"
        more = f"raise train.steps (--train.steps {2 * step})"
        if recipe.ends_with_phases:
            last = recipe.phases[-1]
            unit = next(unit for unit in OWN_LENGTHS if last.get(unit) is not None)
            more = f"make a phase longer (--phases.{len(recipe.phases) - 1}.{unit} {2 * last[unit]:g})"
        elif steps is None:
            more = f"raise train.epochs (--train.epochs {2 * (recipe.train.epochs or 1):g})"
    anew = "leave out --resume" + (" and choose another --run.folder" if recipe.run.folder else "")
    # A supervised run has no more steps.
    remedy = f"To continue, {more}; for a new run, {anew}" if steps != 0 else f"For a new run, {anew}"
    unused = f" ({', '.join(ignored)} would change nothing)" if ignored else ""
    return f"the run in {path} {state}; there is nothing to resume{unused}. {remedy}"


def _created(path: Path) -> str:
    try:
        return str(read_json(path / MARKER)["created"])
    except (CheckpointError, KeyError, TypeError):
        return ""


def _recipe_file(path: Path) -> str | None:
    try:
        return str(read_json(path / INPUTS)["recipe"])
    except (CheckpointError, KeyError, TypeError):
        return None


def check_inputs(run: RunDir, inputs: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise an error if a run to be resumed was started with other rows, rewards or another model."""
    if not (run.path / INPUTS).exists():
        raise RunDirError(f"{run.path} has no {INPUTS}: an earlier version of groupwise wrote it; start a new run")
    if changed := changed_inputs(run.path, inputs):
        shown = "; ".join(f"{name} (before: {before}, now: {now})" for name, (before, now) in changed.items())
        if seeds := _drawn_by_another_seed(run, recipe):
            shown += f"; the held-out rows are drawn by train.seed, {seeds}"
        raise ConfigError(
            f"{run.path} was started with other inputs: {shown}. Resume it with the same ones, add --allow-changes, or "
            "start a new run"
        )


def changed_inputs(path: Path, inputs: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The inputs that differ from those kept in a run's folder, each before and now."""
    before = read_json(path / INPUTS)
    return {name: [before.get(name), now] for name, now in inputs.items() if now != before.get(name)}


def _drawn_by_another_seed(run: RunDir, recipe: Recipe) -> str | None:
    """The two seeds, if they draw other held-out rows."""
    if not (recipe.data.held_out_from_train or recipe.preference.held_out_from_train):
        return None
    settings = read_json(run.path / RECIPE) if (run.path / RECIPE).exists() else {}
    seed = settings.get("train", {}).get("seed", recipe.train.seed)
    return None if seed == recipe.train.seed else f"which was {seed} and is now {recipe.train.seed}"


def write_inputs(run: RunDir, inputs: Mapping[str, Any], recipe_file: str | None) -> None:
    """Keep the inputs, and the recipe's file: that of the start, as a run may be resumed by its own recipe.json."""
    started_by = read_json(run.path / INPUTS).get("recipe") if (run.path / INPUTS).exists() else recipe_file
    run.write_json(INPUTS, {"recipe": started_by, **inputs})


def describe_inputs(components: RunComponents) -> dict[str, Any]:
    """The model, the task, the rewards, and hashes of rows and pairs."""
    recipe, pairs = components.recipe, components.pairs
    functions = () if components.scorer is None else components.scorer.functions
    return {
        "model": recipe.model.source,
        "task": components.task.name,
        "rewards": [function.name for function in functions],
        "training rows": _hash(components.train.rows),
        "held-out rows": _hash(components.held_out.rows),
        "training pairs": _hash([pair.prompt, *map(list, pair[1:])] for pair in pairs.train),
        "held-out pairs": _hash([pair.prompt, *map(list, pair[1:])] for pair in pairs.held_out),
    }


def _hash(rows: Iterable[Any]) -> str:
    """A hash of rows; objects that are not JSON count by their type, as their text may differ from run to run."""
    digest, count = hashlib.sha256(), 0
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=lambda value: type(value).__name__).encode() + b"\n")
        count += 1
    return f"{count}, {digest.hexdigest()[:16]}" if count else "none"


def write_recipe(run: RunDir, recipe: Recipe, say: Say, *, resuming: bool) -> None:
    """Keep every setting and the versions; report what differs from the run that is resumed."""
    settings = recipe.model_dump()
    if resuming and (run.path / RECIPE).exists():
        for name, before, after in differences(read_json(run.path / RECIPE), settings):
            say(f"resumed with another {name}: {before!r} before, {after!r} now")
    run.write_json(RECIPE, settings)
    run.write_json(VERSIONS, package_versions(PACKAGES))


def differences(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    """The settings in which two recipes differ: dotted name and both values. `run.folder` is ignored."""
    changed: list[tuple[str, Any, Any]] = []
    for key in dict.fromkeys([*before, *after]):
        name, one, other = f"{prefix}{key}", before.get(key), after.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            changed += differences(one, other, f"{name}.")
        elif one != other and name != "run.folder":
            changed.append((name, one, other))
    return changed
