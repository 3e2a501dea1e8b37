"""The task of one's own: rows from files or the hub, rewards from the recipe or from Python."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from groupwise.config import Recipe, SourcesSection
from groupwise.data import read_rows
from groupwise.errors import ConfigError
from groupwise.tasks.base import Row, Task

Reader = Callable[..., list[dict[str, Any]]]


def rows_task(recipe: Recipe) -> Task:
    """The rows that ``[data]`` names, as they are."""
    train, held_out = read_both(recipe)
    return Task("rows", train, held_out)


def read_both(recipe: Recipe, read: Reader | None = None) -> tuple[list[Row], list[Row]]:
    """The training and the held-out rows of a recipe; the former may be missing where a model is only measured.

    ``read`` is called in place of `data.read_rows`, for files that are not read as they are.
    """
    if recipe.data.train is None and recipe.data.held_out is None:
        raise ConfigError(
            f"the task {recipe.task!r} needs rows: set data.train to a .jsonl, .json, .parquet or .csv file, or "
            "to a hub data set owner/name"
        )
    return read_section(recipe, "data", read)


def read_section(recipe: Recipe, section: str, read: Reader | None = None) -> tuple[list[Row], list[Row]]:
    """The training and the held-out rows that a section names: ``data``, or ``preference`` for pairs."""
    data: SourcesSection = getattr(recipe, section)
    named = next((name for name in ("held_out", "held_out_split") if getattr(data, name) is not None), None)
    if data.held_out_from_train and named is not None:
        raise ConfigError(
            f"{section}.held_out_from_train is for data without held-out rows, but {section}.{named} is set; drop one"
        )
    train_sources = listed(data.train)
    # One source with two splits is the hub's way to hold rows out.
    held_out_sources = listed(data.held_out) or (train_sources if data.held_out_split is not None else [])
    # Subsets and splits are the hub's: they do not concern a file beside which they are needed for other rows.
    on_hub = [source for source in (*train_sources, *held_out_sources) if not _exists(source)]

    def read_each(sources: Sequence[str], split: str | None, limit: int | None) -> list[list[Row]]:
        found: list[list[Row]] = []
        for source in sources:
            subset = data.subset if source in on_hub or not on_hub else None
            part = split if source in on_hub or not set(sources) & set(on_hub) else None
            left = None if limit is None else limit - sum(map(len, found))
            if left is None or left > 0:
                found.append((read or read_rows)(source, split=part, subset=subset, limit=left))
        return found

    train = read_each(train_sources, data.train_split, data.train_rows)
    if data.held_out_from_train:
        # Out of the first source: that is what is learned for, the others are there to help.
        first, *others = train or [[]]
        first, drawn = hold_out(first, data.held_out_from_train, recipe.train.seed, section)
        return list(chain(first, *others)), drawn[: data.held_out_rows]
    held_out = read_each(held_out_sources, data.held_out_split, data.held_out_rows)
    return list(chain(*train)), list(chain(*held_out))


def hold_out(rows: Sequence[Row], number: int, seed: int, section: str = "data") -> tuple[list[Row], list[Row]]:
    """Rows to train on and ``number`` rows, drawn by the seed, to evaluate on; both in their old order."""
    if number >= len(rows):
        raise ConfigError(
            f"{section}.held_out_from_train is {number}, but there are {len(rows)} rows, and some must be left to "
            "train on"
        )
    chosen = set(random.Random(f"held out {seed}").sample(range(len(rows)), number))
    return (
        [row for place, row in enumerate(rows) if place not in chosen],
        [rows[place] for place in sorted(chosen)],
    )


def listed(sources: str | list[str] | None) -> list[str]:
    """One source or several, as a list."""
    return [] if sources is None else [sources] if isinstance(sources, str) else list(sources)


def _exists(source: str) -> bool:
    return Path(source).expanduser().exists()
