"""The settings of runs beside their defaults, and beside each other."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from groupwise.algorithms import ALGORITHMS
from groupwise.analysis.run_reader import RunReader, flat_settings
from groupwise.config import Recipe, make_recipe
from groupwise.config.fields import fields_of

ELSEWHERE = ("run.folder", "run.name")  # they say where a run is, not what it does


class RunSetting(NamedTuple):
    """A setting of a run. ``default`` is that of the run's algorithm; ``about`` is the line of the reference."""

    name: str
    value: Any
    default: Any
    changed: bool
    about: str


class SettingRow(NamedTuple):
    """A setting, a version or an input of several runs, one value for each; None where a run has none."""

    name: str
    values: list[Any]
    differs: bool


@functools.cache
def default_settings(algorithm: Any) -> Mapping[str, Any]:
    """Every setting of a recipe that says nothing but its algorithm, by dotted name."""
    known = {"algorithm": algorithm} if algorithm in ALGORITHMS else {}
    return dict(flat_settings(make_recipe(known).recorded()))


@functools.cache
def _descriptions() -> Mapping[str, str]:
    return {name: field.description or "" for name, field in fields_of(Recipe)}


def run_settings(reader: RunReader) -> list[RunSetting]:
    """A run's settings, in the order of its recipe."""
    settings = reader.settings
    defaults, about = default_settings(str(settings.get("algorithm"))), _descriptions()
    return [
        RunSetting(
            name,
            value,
            defaults.get(name),
            name not in ("task", "algorithm", "model.source", *ELSEWHERE) and value != defaults.get(name),
            about.get(name, ""),
        )
        for name, value in settings.items()
    ]


def side_by_side(tables: Sequence[Mapping[str, Any]]) -> list[SettingRow]:
    """Flat tables of several runs, row by row; those in which they differ are marked."""
    names = dict.fromkeys(name for table in tables for name in table)
    rows = []
    for name in names:
        values = [table.get(name) for table in tables]
        differs = any(value != values[0] for value in values) and name not in ELSEWHERE
        rows.append(SettingRow(name, values, differs))
    return rows
