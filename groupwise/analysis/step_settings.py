"""The settings of each step of a recorded run: those of its recipe at that time, changed by the schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from groupwise.analysis.run_reader import RunReader
from groupwise.config import Recipe, resolve_scheduled, scheduled_names, setting_names, with_settings
from groupwise.errors import ConfigError
from groupwise.training.schedule.parse import parse_phases, parse_ramps, parse_rules
from groupwise.training.schedule.rules import Phase
from groupwise.training.schedule.schedule import Schedule


class StepSettings:
    """Call `at` before each step and `observe` after it, in the order of the run: rules depend on the metrics.

    The phases are those that have begun so far.
    """

    def __init__(self, reader: RunReader, recipe: Recipe) -> None:
        self._recipes = _recipes_before_changes(reader, recipe)
        self._schedule = _schedule(reader, recipe)
        self._cache: dict[Any, Recipe] = {}

    def at(self, step: int, tokens: int) -> Recipe:
        """The recipe of a step (counted from 1), after ``tokens`` sampled tokens."""
        last, recipe = next(entry for entry in self._recipes if entry[0] is None or step <= entry[0])
        if self._schedule is None or step < 1:
            return recipe
        values = self._schedule.values(step - 1, tokens)
        key = (last, *values.items())
        if key not in self._cache:
            self._cache[key] = _changed(recipe, values)
        return self._cache[key]

    def observe(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Let the rules see what was measured after a step."""
        if self._schedule is not None and step >= 1:
            self._schedule.observe(step - 1, metrics)


def _recipes_before_changes(reader: RunReader, recipe: Recipe) -> list[tuple[int | None, Recipe]]:
    """The recipes of the run, each with its last step: the run may have been resumed with other settings."""
    names = {name for name, _ in setting_names()}
    recipes: list[tuple[int | None, Recipe]] = [(None, recipe)]
    for entry in reversed(reader.changes):
        pairs = {name: pair for name, pair in entry["changed"].items() if name in names and isinstance(pair, list)}
        recipe = _changed(recipe, {name: pair[0] for name, pair in pairs.items() if pair})
        recipes.insert(0, (entry["step"], recipe))
    return recipes


def _changed(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    try:
        return with_settings(recipe, values) if values else recipe
    except ConfigError:  # a combination that this version refuses; the checks need only some of the settings
        return recipe


def _schedule(reader: RunReader, recipe: Recipe) -> Schedule | None:
    if not (recipe.phases or recipe.ramps or recipe.rules):
        return None

    def resolve(name: str) -> str:
        return resolve_scheduled(recipe, name)

    try:
        changes = {phase.name: phase.set for phase in parse_phases(recipe.phases, resolve)}
        phases = [Phase(p.name, steps=p.last - p.first + 1, set=changes[p.name]) for p in reader.phases]
        return Schedule(
            scheduled_names(recipe),
            phases=phases,
            ramps=parse_ramps(recipe.ramps, resolve),
            rules=parse_rules(recipe.rules, resolve),
        )
    except ConfigError:  # of another version
        return None
