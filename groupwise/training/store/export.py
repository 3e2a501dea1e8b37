"""The outside of a run: its folder at the start; the model, its card, a picture and a summary at the end."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise import __version__
from groupwise.config import Recipe, samples_answers
from groupwise.errors import CheckpointError, RunDirError
from groupwise.evaluate import REWARD
from groupwise.model.export import export_model
from groupwise.model.lora import ADAPTER_WEIGHTS, is_lora
from groupwise.rundir import (
    RunDir,
    atomic_folder,
    new_run_path,
    package_versions,
    read_json,
    verify_manifest,
    write_bytes,
)
from groupwise.rundir.run import MARKER
from groupwise.training.callbacks import RunResult
from groupwise.training.components import RunComponents, names_rows
from groupwise.training.display.curves import draw_curves
from groupwise.training.monitor.question_log import summarise
from groupwise.training.store import checkpoint
from groupwise.training.store.recorder import LIKELIER, PREFERRED

if TYPE_CHECKING:
    from torch import Tensor

    from groupwise.training.trainer import Trainer

RUNS = Path("runs")
RECIPE, VERSIONS, MODEL, CARD = "recipe.json", "versions.json", "model", "README.md"
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "peft", "trl")


def open_run(recipe: Recipe, folder: str | Path | None, *, resume: bool, overwrite: bool) -> RunDir:
    """The run's folder, locked: a new one, the one to resume, or one that may be written over."""
    name = recipe.run.name or _name_of(recipe)
    given = folder or recipe.run.folder
    if resume:
        return RunDir.resume(Path(given) if given else _latest(name))
    path = Path(given) if given else new_run_path(RUNS, name)
    return RunDir.create(path, overwrite=overwrite)


def _name_of(recipe: Recipe) -> str:
    if not names_rows(recipe) and not samples_answers(recipe):
        return "pairs"
    return recipe.task if ":" not in recipe.task else "run"


def _latest(name: str) -> Path:
    """The newest run of that name."""
    found = sorted(path for path in RUNS.glob(f"*-{name}*") if (path / MARKER).exists())
    if not found:
        raise RunDirError(f"there is no run called {name!r} below {RUNS}/ to resume; name its folder with --run.folder")
    return found[-1]


def write_recipe(trainer: Trainer) -> None:
    """Keep the whole recipe and the versions; say what differs from the run that is resumed."""
    run, recipe = trainer.run_dir, trainer.recipe.model_dump()
    if trainer.resuming and (run.path / RECIPE).exists():
        for name, before, after in differences(read_json(run.path / RECIPE), recipe):
            trainer.say(f"resumed with another {name}: {before!r} before, {after!r} now")
    run.write_json(RECIPE, recipe)
    run.write_json(VERSIONS, versions())


def versions() -> dict[str, str]:
    return package_versions(PACKAGES)


def differences(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    """The settings that two recipes do not share, by dotted name, with both values. Where a run is kept counts not."""
    found = []
    for key in dict.fromkeys([*before, *after]):
        one, other = before.get(key), after.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            found += differences(one, other, f"{prefix}{key}.")
        elif one != other and f"{prefix}{key}" != "run.folder":
            found.append((f"{prefix}{key}", one, other))
    return found


def finish_run(trainer: Trainer) -> RunResult:
    """Export the best policy (the last one, if nothing was evaluated), draw the curves, and sum up."""
    stopped = bool(trainer.stopping)
    run = trainer.run_dir
    model = None
    if trainer.step and not stopped:
        trainer.display.stage("exporting the model")
        model = _export(trainer)
    picture = draw_curves(run.path, metric=trainer.metric, goal=trainer.goal) if trainer.recipe.run.picture else None
    result = RunResult(
        step=trainer.step,
        first=trainer.first,
        last=trainer.last,
        best_step=None if trainer.best is None else int(trainer.best["step"]),
        model=model,
        folder=run.path,
        exit_status=trainer.stopping.exit_status,
    )
    if model is not None and trainer.recipe.run.push_to is not None:
        push(trainer, model, trainer.recipe.run.push_to)
    trainer.display.finish(_summary(trainer, result, picture))
    trainer.call("on_end", result)
    return result


def _export(trainer: Trainer) -> Path:
    folder = trainer.run_dir.path / MODEL
    if folder.exists():  # a run that was finished before and has been given more steps
        shutil.rmtree(folder)
    best = trainer.best_name
    last_name = checkpoint.checkpoint_name(trainer.step)
    if best is None or best == last_name:
        _write_model(trainer, folder)
        return folder
    source = trainer.run_dir.path / best
    try:
        verify_manifest(source)
    except CheckpointError as error:
        raise CheckpointError(
            f"the best checkpoint cannot be exported: {error}. The last policy is in "
            f"{source.with_name(last_name) / checkpoint.POLICY}"
        ) from error
    kept = _weights_in(source, trainer)
    if kept is None:
        with atomic_folder(folder) as unfinished:
            shutil.copytree(source / checkpoint.POLICY, unfinished, dirs_exist_ok=True)
        write_bytes(folder / CARD, model_card(trainer).encode())
        return folder
    last = {name: value.clone() for name, value in trainer.masters.state_dict().items()}
    trainer.masters.load_state_dict(kept)
    try:
        _write_model(trainer, folder)
    finally:
        trainer.masters.load_state_dict(last)
    return folder


def _weights_in(source: Path, trainer: Trainer) -> dict[str, Tensor] | None:
    """The trained weights of a checkpoint; None if it holds a whole policy alone, which is what is exported."""
    from safetensors.torch import load_file

    if (source / checkpoint.MASTERS).exists():
        return load_file(source / checkpoint.MASTERS)
    if not is_lora(trainer.components.model):
        return None
    adapter = load_file(source / checkpoint.POLICY / ADAPTER_WEIGHTS)  # PEFT leaves the adapter's own name out
    masters = trainer.masters.state_dict()
    return {name: adapter[name.replace(".default.", ".")].to(master.dtype) for name, master in masters.items()}


def _write_model(trainer: Trainer, folder: Path) -> None:
    export_model(
        trainer.components.model,
        folder,
        tokenizer=trainer.components.tokenizer,
        masters=trainer.masters,
        dtype=trainer.recipe.run.export_dtype or str(trainer.components.handle.dtype).removeprefix("torch."),
    )
    write_bytes(folder / CARD, model_card(trainer).encode())


def model_card(trainer: Trainer) -> str:
    """What this model is, how it was made, and what was measured; in the form that the hub shows."""
    recipe, task = trainer.recipe, trainer.components.task
    step = trainer.step if trainer.best is None else int(trainer.best["step"])
    trained = "supervised steps" if trainer.supervised else f"steps of `{recipe.algorithm}`"
    lines = [
        "---",
        "library_name: transformers",
        "tags:",
        "- groupwise",
        *_tags(trainer),
        "---",
        "",
        f"# {recipe.run.name or task.name}",
        "",
        f"`{recipe.model.source}` after {step} {trained} on {_taught_by(trainer)}, trained with groupwise "
        f"{__version__}.",
        "",
    ]
    if trainer.metric is not None and trainer.last:
        lines += ["| held out | before | after |", "|---|---|---|"]
        lines += [f"| {name} | {before} | {after} |" for name, before, after in _rows_of_metrics(trainer)]
        lines.append("")
    settings = [f"- {name}: {after!r}" for name, _, after in differences(Recipe().model_dump(), recipe.model_dump())]
    lines += ["Settings that differ from the defaults:", "", *settings, ""]
    lines += ["Versions: " + ", ".join(f"{name} {value}" for name, value in versions().items()) + ".", ""]
    return "\n".join(lines)


def _tags(trainer: Trainer) -> list[str]:
    """By what the weights were moved: GRPO's loss, DPO's, or both."""
    weights = {"grpo": "loss.policy_coef", "dpo": "preference.weight"}
    return [f"- {tag}" for tag, name in weights.items() if trainer.components.ever(name)]


def _taught_by(trainer: Trainer) -> str:
    """The task, the pairs of a data set, or both."""
    components, found = trainer.components, []
    if trainer.samples or trainer.supervised:
        found.append(f"the task `{components.task.name}`")
    if components.pairs.train and not trainer.supervised and components.learns_from_pairs:
        found.append(f"{len(components.pairs.train):,} pairs of answers")
    return " and ".join(found)


def _rows_of_metrics(trainer: Trainer) -> list[tuple[str, str, str]]:
    """The grades (or the reward) and what was measured of pairs, before and after, with intervals."""
    components = trainer.components
    names = (list(components.task.grades) or [REWARD]) if len(components.held_out) else []
    names += [PREFERRED, LIKELIER] if components.pairs.held_out else []
    shares = {*names} if components.task.grades else {*names} - {REWARD}

    def shown(metrics: Mapping[str, float], name: str) -> str:
        if name not in metrics:
            return "–"
        value, low, high = (metrics[key] for key in (name, f"{name}_low", f"{name}_high"))
        return f"{value:.1%} [{low:.1%}, {high:.1%}]" if name in shares else f"{value:.3f} [{low:.3f}, {high:.3f}]"

    after = trainer.last if trainer.best is None else trainer.best["metrics"]
    return [(name, shown(trainer.first, name), shown(after, name)) for name in names]


def _summary(trainer: Trainer, result: RunResult, picture: Path | None) -> list[str | tuple[str, ...]]:
    lines: list[str | tuple[str, ...]] = []
    if trainer.first and trainer.last and trainer.metric is not None:
        measured, goal = trainer.best or {"step": trainer.evaluated_at, "value": math.nan}, trainer.goal
        lines.append((_held_out(trainer.components), "before", f"after {measured['step']} steps"))
        lines += _rows_of_metrics(trainer)
        if goal is not None:
            shown = f"{goal:.0%}" if trainer.components.task.grades else f"{goal:g}"
            lines.append(("goal", shown, "reached" if measured["value"] >= goal else "not reached"))
    if trainer.components.task.grades and trainer.samples and not trainer.supervised:
        lines.append(summarise(trainer.questions.table()))
    if trainer.stopping:
        lines.append(f"stopped after step {trainer.step} of {trainer.total_steps}; go on with --resume")
    if result.best_step is not None and result.best_step != trainer.step:
        lines.append(f"the best was step {result.best_step}, which is what is exported")
    if result.model is not None:
        lines.append(f"model: {_shown(result.model)}")
    if picture is not None:
        lines.append(f"picture: {_shown(picture)}")
    lines.append(f"run: {_shown(trainer.run_dir.path)}")
    return lines


def _held_out(components: RunComponents) -> str:
    rows, pairs = len(components.held_out), len(components.pairs.held_out)
    if not rows:
        return f"{pairs:,} held-out pairs"
    return f"{rows:,} held-out rows" + (f", {pairs:,} pairs" if pairs else "")


def _shown(path: Path) -> str:
    """A path as a user would type it."""
    try:
        return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
    except ValueError:
        return str(path)


def push(trainer: Trainer, folder: Path, repository: str) -> None:
    """Push the exported folder to a hub repository; a hub that cannot be reached costs the push, not the run."""
    from huggingface_hub import HfApi

    trainer.display.stage(f"pushing to {repository}")
    try:
        api = HfApi()
        api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=str(folder), commit_message="Trained with groupwise")
        trainer.say(f"pushed to {repository}")
    except Exception as error:  # network, credentials, server: the model is safe on disk
        trainer.say(f"the model could not be pushed to {repository} ({error}); it is in {folder}")
