"""The data of a `GRPOTrainer` as rows: `Dataset`, `IterableDataset`, dicts of evaluation sets, or lists of dicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from groupwise.data.tables import as_rows
from groupwise.errors import ArgumentTypeError, ConfigError, DataError
from groupwise.tasks.base import TaskRow

PROMPT = "prompt"
IMAGES = ("image", "images")


class MissingPromptError(DataError, KeyError):
    """A data set has no column ``prompt``; TRL has a KeyError for that."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # a KeyError quotes its message


def training_rows(dataset: Any, *, limit: int | None, remove_unused_columns: bool) -> list[TaskRow]:
    """The rows to train on. Of a stream the first ``limit``, which is the number that the run uses."""
    if dataset is None:
        raise ConfigError("train_dataset is missing: give a Dataset with a column 'prompt', or an environment_factory")
    if isinstance(dataset, Mapping):
        raise ArgumentTypeError(
            f"train_dataset is a {type(dataset).__name__}; choose one of its splits ({', '.join(map(str, dataset))})"
        )
    if is_stream(dataset) and limit is None:
        raise ConfigError(
            "train_dataset is a stream (IterableDataset), whose length is not known; set max_steps in GRPOConfig"
        )
    return _read(dataset, "train_dataset", remove_unused_columns, limit if is_stream(dataset) else None)


def evaluation_rows(dataset: Any, *, remove_unused_columns: bool) -> dict[str, list[TaskRow]]:
    """The rows of each evaluation set by its name; "" is the name of a single one."""
    if dataset is None:
        return {}
    if not isinstance(dataset, Mapping):
        return {"": _read(dataset, "eval_dataset", remove_unused_columns)}
    if not dataset:
        raise ConfigError("eval_dataset is an empty dict; give a Dataset by its name, or leave it out")
    return {str(name): _read(part, f"eval_dataset[{name!r}]", remove_unused_columns) for name, part in dataset.items()}


def is_stream(dataset: Any) -> bool:
    """Whether rows can only be read one after another: an `IterableDataset`, a generator."""
    return not hasattr(dataset, "__len__")


def _read(dataset: Any, name: str, remove_unused_columns: bool, limit: int | None = None) -> list[TaskRow]:
    is_table = isinstance(dataset, Iterable) or hasattr(dataset, "to_pylist")
    if isinstance(dataset, (str, bytes)) or not is_table:
        hint = "; load_dataset reads one from files or from the hub" if isinstance(dataset, str) else ""
        raise ArgumentTypeError(f"{name} is a {type(dataset).__name__}; give a Dataset or an IterableDataset{hint}")
    try:
        rows: Sequence[TaskRow] = as_rows(dataset, limit)
    except DataError as error:
        raise DataError(f"{name}: {error}") from error
    first = rows[0]
    if PROMPT not in first:
        raise MissingPromptError(
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
