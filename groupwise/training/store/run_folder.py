"""The folder of a training run: finding or creating it; the recipe, inputs and versions that are kept in it.

Importing this does not load PyTorch: the command line looks for the folder first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.config import Recipe
from groupwise.config.sections import OWN_LENGTHS
from groupwise.errors import CheckpointError, ConfigError, RunDirError
from groupwise.rundir import RunDir, new_run_path, package_versions, read_json, read_metrics
from groupwise.rundir.files import read_object
from groupwise.rundir.run import MARKER, METRICS, RunView, check_is_run, holds_run
from groupwise.text import Say, plural

if TYPE_CHECKING:
    from groupwise.distributed.ranks import Ranks

RUNS = Path("runs")
# Settings that decide how many steps a run has, and those that are used after its last step.
NUMBER_OF_STEPS = (
    "train.steps", "train.epochs", "train.batch_size", "train.accumulation", "phases", "evaluate.patience",
)  # fmt: skip
AFTER_THE_END = ("run.export_dtype", "run.plot", "run.push_to_hub")
RECIPE, INPUTS, VERSIONS, FINISHED = "recipe.json", "inputs.json", "versions.json", "finished.json"
FROZEN, NONE = "frozen weights", "none"  # among the inputs
SOURCES = "sources"  # among the inputs: the source files of each function, and a hash of each
TRAINING_ROWS, TRAINING_PAIRS = "training rows", "training pairs"
REQUIRED_INPUTS = {"model": str, "task": str, "rewards": list, TRAINING_ROWS: str, "held-out rows": str}
REMEDY = "Restore it from a copy, or delete it and resume with --allow-changed: what it says is then not compared"
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "peft", "trl")


def open_run(
    recipe: Recipe,
    folder: str | Path | None,
    *,
    name: str,
    recipe_file: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    beside_other_files: bool = False,
) -> RunDir:
    """The run's folder, locked: a new one, the one to resume, or one that may be overwritten.

    beside_other_files: a new one may hold other files, but no run.

    To resume without a folder, the newest run of the recipe's file is taken, or for a recipe without a file the newest
    run of that name.
    """
    if resume:
        return RunDir.resume(find_run(recipe, folder, recipe_file, name=name))
    chosen = folder or recipe.run.folder
    path = Path(chosen) if chosen else new_run_path(RUNS, recipe.run.name or name)
    if overwrite and holds_run(path):
        return RunDir.resume(path)  # the caller clears it once the new run can start
    return RunDir.create(path, beside_other_files=beside_other_files)


def open_shared_run(ranks: Ranks, recipe: Recipe, folder: str | Path | None, **options: Any) -> RunDir:
    """`open_run` with its options on rank 0; the other ranks only see the folder."""
    run = ranks.on_main("opening the run's folder", lambda: open_run(recipe, folder, **options))
    path = ranks.from_main(None if run is None else str(run.path))
    return RunView(Path(path)) if run is None else run


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
    matches = ((re.fullmatch(r"checkpoint-(0|[1-9][0-9]*)", path.name), path) for path in folder.glob("checkpoint-*"))
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def nothing_to_resume(recipe: Recipe, path: Path) -> str | None:
    """A sentence if the run in ``path`` is finished and the recipe asks for nothing new. Nothing is written."""
    if not (path / FINISHED).exists() or not (path / RECIPE).exists():
        return None  # not finished
    try:
        end = read_object(path / FINISHED, step=int, total_steps=int)
    except CheckpointError:
        return None  # it is written again
    step, total = end["step"], end["total_steps"]
    if max(checkpoints_in(path), default=None) != step:
        return None  # it was continued since, and stopped
    changed = {name for name, *_ in differences(read_kept(path / RECIPE), recipe.recorded())}
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


def check_inputs(
    run: RunDir, inputs: Mapping[str, Any], recipe: Recipe, *, allow_changed: bool = False
) -> dict[str, list[Any]]:
    """The inputs that changed since a run was started, as in `changed_inputs`; an error unless that is allowed."""
    if not (run.path / INPUTS).exists():
        if allow_changed:
            return {}
        raise RunDirError(
            f"{run.path} has no {INPUTS}: an earlier version of groupwise wrote it, or it was deleted; start a new "
            "run, or add --allow-changed to resume without comparing inputs"
        )
    read_kept(run.path / INPUTS, **REQUIRED_INPUTS)
    changed = changed_inputs(run.path, inputs)
    if changed and not allow_changed:
        shown = "; ".join(f"{name} (before: {before}, now: {now})" for name, (before, now) in changed.items())
        if seeds := _drawn_by_another_seed(run, recipe):
            shown += f"; the held-out rows are drawn by train.seed, {seeds}"
        raise ConfigError(
            f"{run.path} was started with other inputs: {shown}. Resume it with the same ones, add --allow-changed (in "
            "Python allow_changed=True), or start a new run"
        )
    return changed


def changed_inputs(path: Path, inputs: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The inputs that differ from those kept in a run's folder, each before and now.

    What an earlier version of groupwise did not keep is not compared.
    """
    before = read_kept(path / INPUTS)
    names = [name for name in inputs if name in before and name != SOURCES]
    changed = {name: [before[name], inputs[name]] for name in names if inputs[name] != before[name]}
    if NONE in changed.get(FROZEN, ()):
        del changed[FROZEN]  # LoRA was added or removed: the checkpoint's weights do not fit, which is said then
    sources: Any = before.get(SOURCES)
    for role, new in inputs.get(SOURCES, {}).items():
        old: Any = sources.get(role) if isinstance(sources, dict) else None
        for file in dict.fromkeys([*old, *new]) if isinstance(old, dict) else ():
            one, other = old.get(file), new.get(file)
            if one != other:
                changed[f"{file}, source of {role}"] = [one or "not used", other or "not used"]
    return changed


def _drawn_by_another_seed(run: RunDir, recipe: Recipe) -> str | None:
    """The two seeds, if they draw other held-out rows."""
    if not (recipe.data.held_out_from_train or recipe.preference.held_out_from_train):
        return None
    train = read_kept(run.path / RECIPE).get("train") if (run.path / RECIPE).exists() else None
    seed = train.get("seed", recipe.train.seed) if isinstance(train, dict) else recipe.train.seed
    return None if seed == recipe.train.seed else f"which was {seed} and is now {recipe.train.seed}"


def read_kept(path: Path, **kinds: type) -> dict[str, Any]:
    """A file that a run keeps about itself; if it is damaged, the error says how to go on without it."""
    try:
        return read_object(path, **kinds)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {REMEDY}") from error


def write_inputs(run: RunDir, inputs: Mapping[str, Any], recipe_file: str | None) -> None:
    """Keep the inputs, and the recipe's file: that of the start, as a run may be resumed by its own recipe.json."""
    started_by = read_kept(run.path / INPUTS).get("recipe") if (run.path / INPUTS).exists() else recipe_file
    run.write_json(INPUTS, {"recipe": started_by, **inputs})


def write_recipe(run: RunDir, recipe: Recipe, say: Say, *, resuming: bool) -> None:
    """Keep every setting and the versions; report what differs from the run that is resumed."""
    settings, versions = recipe.recorded(), package_versions(PACKAGES)
    if resuming and (run.path / RECIPE).exists():
        for name, before, after in differences(read_kept(run.path / RECIPE), settings):
            say(f"resumed with another {name}: {before!r} before, {after!r} now")
    if resuming and (run.path / VERSIONS).exists() and (changed := _changed_versions(run.path / VERSIONS, versions)):
        say(f"warning: resumed with other versions, so the numbers may differ in the last digits: {changed}")
    run.write_json(RECIPE, settings)
    run.write_json(VERSIONS, versions)


def _changed_versions(path: Path, versions: Mapping[str, str]) -> str:
    try:
        before = read_object(path)
    except CheckpointError as error:
        return f"it is not known which ({error})"
    names = [name for name in dict.fromkeys([*before, *versions]) if before.get(name) != versions.get(name)]
    return ", ".join(f"{name} {before.get(name)} before and {versions.get(name)} now" for name in names)


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
