"""The task of one's own: rows from files or the hub, rewards from the recipe or from Python."""

from __future__ import annotations

from pathlib import Path

from groupwise.config import Recipe
from groupwise.data import read_rows
from groupwise.errors import ConfigError
from groupwise.tasks.base import Row, Task


def rows_task(recipe: Recipe) -> Task:
    """The rows that ``[data]`` names, as they are."""
    train, held_out = read_both(recipe)
    return Task("rows", train, held_out)


def read_both(recipe: Recipe) -> tuple[list[Row], list[Row]]:
    """The training and the held-out rows of a recipe; the former may be missing where a model is only measured."""
    data = recipe.data
    if data.train is None and data.held_out is not None:
        return [], _read(data.held_out, data.held_out_split, data.subset, data.held_out_rows)
    if data.train is None:
        raise ConfigError(
            f"the task {recipe.task!r} needs rows: set data.train to a .jsonl, .json, .parquet or .csv file, or "
            "to a hub data set owner/name"
        )
    source = data.train
    if data.held_out is None and data.held_out_split is None:
        return _read(source, data.train_split, data.subset, data.train_rows), []
    held_out_source = source if data.held_out is None else data.held_out
    # A subset is the hub's: it does not concern a file beside which it is needed for the other rows.
    on_hub = [each for each in (source, held_out_source) if not _exists(each)]
    subset_of = {each: data.subset if each in on_hub or not on_hub else None for each in (source, held_out_source)}
    return (
        _read(source, data.train_split, subset_of[source], data.train_rows),
        _read(held_out_source, data.held_out_split, subset_of[held_out_source], data.held_out_rows),
    )


def _read(source: str, split: str | None, subset: str | None, limit: int | None) -> list[Row]:
    return list(read_rows(source, split=split, subset=subset, limit=limit))


def _exists(source: str) -> bool:
    return Path(source).expanduser().exists()
