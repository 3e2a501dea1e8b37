"""The task of one's own: rows from files or the hub, rewards from the recipe or from Python."""

from __future__ import annotations

from pathlib import Path

from groupwise.config import Recipe
from groupwise.data import read_rows
from groupwise.errors import ConfigError
from groupwise.tasks.base import Row, Task


def rows_task(recipe: Recipe, base: Path | None = None) -> Task:
    """The rows that ``[data]`` names, as they are."""
    train, held_out = read_both(recipe, base)
    return Task("rows", train, held_out)


def read_both(recipe: Recipe, base: Path | None) -> tuple[list[Row], list[Row]]:
    """The training and the held-out rows of a recipe; an error where there is nothing to train on."""
    data = recipe.data
    if data.train is None:
        raise ConfigError(
            f"the task {recipe.task!r} needs rows: set data.train to a .jsonl, .json, .parquet or .csv file, or "
            "to a hub data set owner/name"
        )
    train: list[Row] = list(
        read_rows(locate(data.train, base), split=data.train_split, subset=data.subset, limit=data.train_rows)
    )
    if data.held_out is None and data.held_out_split is None:
        return train, []
    source = data.held_out or data.train
    held_out: list[Row] = list(
        read_rows(locate(source, base), split=data.held_out_split, subset=data.subset, limit=data.held_out_rows)
    )
    return train, held_out


def locate(source: str, base: Path | None) -> str:
    """A path beside the recipe, if there is such a file there and none here; otherwise as it was written."""
    if base is not None and not Path(source).expanduser().exists() and (base / source).exists():
        return str(base / source)
    return source
