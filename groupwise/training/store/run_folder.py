"""The folder of a training run: finding or creating it, and the recipe and versions that are kept in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groupwise.config import Recipe
from groupwise.errors import RunDirError
from groupwise.rundir import RunDir, new_run_path, package_versions, read_json
from groupwise.rundir.run import MARKER
from groupwise.text import Say

RUNS = Path("runs")
RECIPE, VERSIONS = "recipe.json", "versions.json"
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "peft", "trl")


def open_run(recipe: Recipe, folder: str | Path | None, *, name: str, resume: bool, overwrite: bool) -> RunDir:
    """The run's folder, locked: a new one, the one to resume, or one that may be overwritten."""
    name = recipe.run.name or name
    chosen = folder or recipe.run.folder
    if resume:
        return RunDir.resume(Path(chosen) if chosen else _latest(name))
    path = Path(chosen) if chosen else new_run_path(RUNS, name)
    return RunDir.create(path, overwrite=overwrite)


def _latest(name: str) -> Path:
    """The newest run of that name."""
    folders = sorted(path for path in RUNS.glob(f"*-{name}*") if (path / MARKER).exists())
    if not folders:
        raise RunDirError(f"there is no run called {name!r} below {RUNS}/ to resume; name its folder with --run.folder")
    return folders[-1]


def write_recipe(run: RunDir, recipe: Recipe, say: Say, *, resuming: bool) -> None:
    """Keep every setting and the versions; report what differs from the run that is resumed."""
    settings = recipe.model_dump()
    if resuming and (run.path / RECIPE).exists():
        for name, before, after in differences(read_json(run.path / RECIPE), settings):
            say(f"resumed with another {name}: {before!r} before, {after!r} now")
    run.write_json(RECIPE, settings)
    run.write_json(VERSIONS, versions())


def versions() -> dict[str, str]:
    return package_versions(PACKAGES)


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
