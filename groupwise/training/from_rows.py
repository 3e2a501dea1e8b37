"""The arguments of `Trainer.from_rows`: Python objects in place of a recipe file's settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from groupwise.config import Recipe, make_recipe
from groupwise.errors import ConfigError
from groupwise.rewards import RewardFunction, split_rewards
from groupwise.tasks.base import Task
from groupwise.tasks.rows import task_of_tables


class TrainerArguments(NamedTuple):
    """Arguments of `Trainer`."""

    recipe: Recipe
    task: Task | None  # None to read the recipe's files
    rewards: list[RewardFunction]
    model: Any  # a loaded one, or None


def trainer_arguments(
    rows: Any,
    rewards: Any,
    model: Any,
    tokenizer: Any,
    held_out: Any,
    algorithm: str,
    sections: Mapping[str, Mapping[str, Any]],
) -> TrainerArguments:
    """Names and paths become settings of a recipe; tables, functions and a loaded model go to the trainer."""
    data, tables = dict(sections.get("data", {})), {"train": rows, "held_out": held_out}
    for name, table in list(tables.items()):
        if table is not None and data.get(name) is not None:
            raise ConfigError(f"the {name} rows are given twice, as an argument and as data.{name}; leave one out")
        if isinstance(table, (str, Path)):
            data[name] = str(tables.pop(name))
    section = dict(model) if isinstance(model, Mapping) else {"source": model}
    source, loaded = section.get("source", "tiny"), None
    if not isinstance(source, (str, Path)):
        loaded, source = source, getattr(source, "name_or_path", "") or "loaded"
        if source == "loaded" and tokenizer is None:
            raise ConfigError("the tokenizer of a loaded model without name_or_path is not known: pass tokenizer=")
    functions, entries = split_rewards(rewards)
    settings: dict[str, Any] = {**sections, "algorithm": algorithm, "data": data, "rewards": entries}
    settings["model"] = {**section, "source": str(source)}
    recipe = make_recipe(settings, where="from_rows")
    in_python = any(table is not None for table in tables.values())
    task = task_of_tables(recipe, tables.get("train"), tables.get("held_out")) if in_python else None
    return TrainerArguments(recipe, task, functions, loaded)
