"""The data of a `GRPOTrainer` as rows: `Dataset`, `IterableDataset`, dicts of evaluation sets, or lists of dicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.data.tables import as_rows
from groupwise.errors import ConfigError, DataError
from groupwise.tasks.base import TaskRow

PROMPT = "prompt"
IMAGES = ("image", "images")


def training_rows(dataset: Any, *, limit: int | None, remove_unused_columns: bool) -> list[TaskRow]:
    """The rows to train on. Of a stream the first ``limit``, which is the number that the run uses."""
    if dataset is None:
        raise ConfigError("train_dataset is missing: give a Dataset with a column 'prompt'")
    if isinstance(dataset, Mapping):
        raise ConfigError(
            f"train_dataset is a {type(dataset).__name__}; choose one of its splits ({', '.join(map(str, dataset))})"
        )
    if is_stream(dataset) and limit is None:
        raise ConfigError(
            "train_dataset is a stream (IterableDataset), whose length is not known; set max_steps in GRPOConfig"
        )
    rows = as_rows(dataset, limit if is_stream(dataset) else None)
    return _checked(rows, "train_dataset", remove_unused_columns)


def evaluation_rows(dataset: Any, *, remove_unused_columns: bool) -> dict[str, list[TaskRow]]:
    """The rows of each evaluation set by its name; "" is the name of a single one."""
    if dataset is None:
        return {}
    if not isinstance(dataset, Mapping):
        return {"": _checked(as_rows(dataset), "eval_dataset", remove_unused_columns)}
    if not dataset:
        raise ConfigError("eval_dataset is an empty dict; give a Dataset by its name, or leave it out")
    return {
        str(name): _checked(as_rows(part), f"eval_dataset[{name!r}]", remove_unused_columns)
        for name, part in dataset.items()
    }


def is_stream(dataset: Any) -> bool:
    """Whether rows can only be read one after another: an `IterableDataset`, a generator."""
    return not hasattr(dataset, "__len__")


def _checked(rows: Sequence[TaskRow], name: str, remove_unused_columns: bool) -> list[TaskRow]:
    first = rows[0]
    if PROMPT not in first:
        raise DataError(
            f"{name} has no column 'prompt' (its columns are {', '.join(map(repr, first))}); rename one: "
            "dataset.rename_column('question', 'prompt')"
        )
    for column in IMAGES:
        if first.get(column) is not None:
            raise DataError(
                f"{name} has a column {column!r}: images are not supported, only text models can be trained"
            )
    if remove_unused_columns:
        for row in rows:
            for column in [column for column in row if column != PROMPT]:
                del row[column]
    return list(rows)
