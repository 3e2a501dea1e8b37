"""The task ``rows``: rows from files or the hub, rewards from the recipe or from Python."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from groupwise.config import Recipe, SourcesSection
from groupwise.data import read_rows
from groupwise.data.read import is_local
from groupwise.data.tables import as_rows
from groupwise.errors import ConfigError, DataError
from groupwise.tasks.base import Task, TaskRow
from groupwise.text import plural

ReadRows = Callable[..., list[dict[str, Any]]]
"""A function with the arguments of `groupwise.data.read_rows`."""


def rows_task(recipe: Recipe) -> Task:
    """The rows of ``[data]``, unchanged."""
    return Task("rows", *read_both(recipe))


def task_of_tables(recipe: Recipe, train: Any = None, held_out: Any = None) -> Task:
    """The same with tables from Python (`data.tables`) in place of data.train, data.held_out, or both."""
    data = recipe.data
    if data.held_out_from_train and held_out is not None:
        raise ConfigError("data.held_out_from_train cannot be combined with held_out; leave one out")
    has_files = data.train is not None or data.held_out is not None
    for name in () if has_files else ("subset", "train_split", "held_out_split"):
        if getattr(data, name) is not None:
            raise ConfigError(f"data.{name} is for hub datasets, but the rows are given in Python; leave it out")
    train_rows, held_out_rows = read_section(recipe, "data") if has_files else ([], [])
    if train is not None:
        train_rows = list(as_rows(train, data.train_rows))
        if data.held_out_from_train:
            train_rows, held_out_rows = hold_out(train_rows, data.held_out_from_train, recipe.train.seed)
    if held_out is not None:
        held_out_rows = list(as_rows(held_out))
    return Task("rows", train_rows, held_out_rows[: data.held_out_rows])


def read_both(recipe: Recipe, read: ReadRows | None = None) -> tuple[list[TaskRow], list[TaskRow]]:
    """The training and the held-out rows of a recipe; either may be empty. ``read`` replaces `data.read_rows`."""
    if recipe.data.train is None and recipe.data.held_out is None:
        raise ConfigError(
            f"the task {recipe.task!r} needs rows: set data.train to a .jsonl, .json, .parquet or .csv file, or "
            "to a hub data set owner/name, and data.held_out to evaluate (a run from Python rows does not keep them)"
        )
    return read_section(recipe, "data", read)


def read_section(recipe: Recipe, section: str, read: ReadRows | None = None) -> tuple[list[TaskRow], list[TaskRow]]:
    """The training and the held-out rows of a section: ``data``, or ``preference`` for pairs."""
    data: SourcesSection = getattr(recipe, section)
    held_out_key = next((name for name in ("held_out", "held_out_split") if getattr(data, name) is not None), None)
    if data.held_out_from_train and held_out_key is not None:
        both = f"{section}.held_out_from_train cannot be combined with {section}.{held_out_key}"
        raise ConfigError(f"{both}; leave one out")
    train_sources = listed(data.train)
    # A hub data set may hold its rows out as a second split.
    held_out_sources = listed(data.held_out) or (train_sources if data.held_out_split is not None else [])
    # Beside a hub data set, subset and split do not apply to files.
    on_hub = [source for source in (*train_sources, *held_out_sources) if not is_local(source)]

    def read_each(sources: Sequence[str], split_key: str, limit: int | None) -> list[list[TaskRow]]:
        parts: list[list[TaskRow]] = []
        split = getattr(data, split_key)
        for source in sources:
            subset = data.subset if source in on_hub or not on_hub else None
            source_split = split if source in on_hub or not set(sources) & set(on_hub) else None
            if source not in on_hub:
                _check_local(source, {f"{section}.{split_key}": source_split, f"{section}.subset": subset})
            left = None if limit is None else limit - sum(map(len, parts))
            if left is None or left > 0:
                parts.append((read or read_rows)(source, split=source_split, subset=subset, limit=left))
        return parts

    train = read_each(train_sources, "train_split", data.train_rows)
    if data.held_out_from_train:
        # The first source is the one to evaluate on; the others are additional training data.
        first, *others = train or [[]]
        first, drawn = hold_out(first, data.held_out_from_train, recipe.train.seed, section)
        return list(chain(first, *others)), drawn[: data.held_out_rows]
    held_out = read_each(held_out_sources, "held_out_split", data.held_out_rows)
    return list(chain(*train)), list(chain(*held_out))


def _check_local(source: str, settings: Mapping[str, str | None]) -> None:
    """Raise a DataError for a setting of hub data sets, as the source is a file or folder."""
    for name, value in settings.items():
        if value is not None:
            raise DataError(f"{name} = {value!r} is for hub datasets, but {source} is local; leave it out")


def hold_out(
    rows: Sequence[TaskRow], number: int, seed: int, section: str = "data"
) -> tuple[list[TaskRow], list[TaskRow]]:
    """Split off ``number`` rows, drawn by the seed: the rows to train on and those to evaluate on, in order."""
    if number >= len(rows):
        there = f"there {'is' if len(rows) == 1 else 'are'} {plural(len(rows), 'row')}"
        limit = f"{section}.held_out_from_train is {number}, but {there}"
        raise ConfigError(f"{limit}, and some must remain to train on")
    chosen = set(random.Random(f"held out {seed}").sample(range(len(rows)), number))
    left = [row for place, row in enumerate(rows) if place not in chosen]
    return left, [rows[place] for place in sorted(chosen)]


def listed(sources: str | list[str] | None) -> list[str]:
    """One source or several, as a list."""
    return [] if sources is None else [sources] if isinstance(sources, str) else list(sources)
