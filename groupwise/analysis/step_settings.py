"""The settings of every step of a run: its recipe, what was changed on a resume, and the values of its schedule.

The schedule is not recorded. It follows from the recipe and from what was measured, so it is computed again from
``metrics.jsonl``: phases and ramps by step and tokens, rules by the metrics that they saw.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from groupwise.analysis.run_reader import RunReader
from groupwise.config import Recipe, make_recipe, resolve_scheduled, scheduled_names, with_settings
from groupwise.config.names import section_names
from groupwise.errors import CheckpointError, ConfigError
from groupwise.training.schedule.lengths import RunLength
from groupwise.training.schedule.parse import parse_ramps, parse_rules
from groupwise.training.schedule.schedule import Schedule
from groupwise.training.store.run_folder import RECIPE

MakeSchedule = Callable[[Recipe, RunLength | None], Schedule]


def run_recipe(reader: RunReader, step: int | None = None) -> Recipe:
    """The recipe with which a run took ``step``, without the values of its schedule; by default the last one."""
    table: dict[str, Any] = copy.deepcopy(dict(reader.recipe))
    if not table:
        raise CheckpointError(
            f"{reader.path / RECIPE} is missing or damaged, so the settings of the run are not known"
            f"{''.join(f' ({problem})' for problem in reader.problems[:1])}; restore it from a copy"
        )
    for entry in reversed(reader.changes if step is not None else []):
        if step is None or entry["step"] < step:
            break  # this step was taken after that change
        for name, values in entry["changed"].items():
            if is_setting(name, values):
                _restore(table, name.split("."), values[0])
    return make_recipe({}, where=str(reader.path / RECIPE), base=table)


def is_setting(name: str, values: Sequence[Any]) -> bool:
    """Whether a change on a resume is one of the recipe; inputs are not, though some have the name of a section."""
    if name == "rewards":  # the recipe's tables, or the names of all rewards
        return all(isinstance(entry, dict) for value in values for entry in value or ())
    return name.split(".")[0] in Recipe.model_fields and name not in section_names()


def _restore(table: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """Set a setting to the value that it had."""
    *sections, key = keys
    inner: Any = table
    for section in sections:
        inner = inner.get(section) if isinstance(inner, dict) else None
    if not isinstance(inner, dict):
        return
    if value is None and sections and sections[0] == "ramps":
        inner.pop(key, None)  # it was added on the resume
    else:
        inner[key] = value


def plain_schedule(recipe: Recipe, length: RunLength | None) -> Schedule:
    """A schedule without checks of its values; importing what checks them would load PyTorch."""
    resolve = partial(resolve_scheduled, recipe)
    return Schedule(
        scheduled_names(recipe),
        phases=() if length is None else length.phases,
        ramps=parse_ramps(recipe.ramps, resolve),
        rules=parse_rules(recipe.rules, resolve),
        ends=recipe.ends_with_phases,
    )


class StepSettings:
    """Call `at` before each step and `observe` after it, in the order of the run: rules depend on the metrics.

    Without ``strict``, settings that this version of groupwise refuses are left as the recipe has them.
    """

    def __init__(self, reader: RunReader, *, strict: bool, make_schedule: MakeSchedule = plain_schedule) -> None:
        self._reader, self._strict, self._make_schedule = reader, strict, make_schedule
        self._resumes = [entry["step"] for entry in reader.changes]
        self._number: int | None = None  # of the resumes with changes before the step
        self._recipe: Recipe | None = None
        self._schedule: Schedule | None = None
        self._known: dict[tuple[Any, ...], Recipe] = {}

    def at(self, step: int, tokens: int) -> Recipe:
        """The recipe of a step (counted from 1), after ``tokens`` sampled tokens."""
        number = sum(last < step for last in self._resumes)
        if self._recipe is None or number != self._number:
            self._number, self._recipe = number, self._recipe_at(step)
            self._schedule = self._next_schedule(self._recipe)
            self._known.clear()
        values = {} if self._schedule is None or step < 1 else self._schedule.values(step - 1, tokens)
        key = tuple(values.items())
        if key not in self._known:
            self._known[key] = self._with(self._recipe, values)
        return self._known[key]

    def observe(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Let the rules see what was measured after a step."""
        if self._schedule is not None and step >= 1:
            self._schedule.observe(step - 1, metrics)

    def _recipe_at(self, step: int) -> Recipe:
        try:
            return run_recipe(self._reader, step)
        except ConfigError:
            recipe = self._reader.parsed_recipe()
            if self._strict or recipe is None:
                raise
            return recipe

    def _with(self, recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
        try:
            return with_settings(recipe, values) if values else recipe
        except ConfigError:
            if self._strict:
                raise
            return recipe

    def _next_schedule(self, recipe: Recipe) -> Schedule | None:
        """The schedule of a recipe, in the state of that of the steps before; None if nothing is scheduled."""
        if not (recipe.phases or recipe.ramps or recipe.rules):
            return None
        try:
            schedule = self._make_schedule(recipe, self._reader.length_of(recipe))
        except ConfigError:
            if self._strict:
                raise
            return None
        if self._schedule is not None:
            schedule.load_state(self._schedule.state())
        return schedule


def step_recipes(
    reader: RunReader, steps: Collection[int], make_schedule: MakeSchedule = plain_schedule
) -> dict[int, Recipe]:
    """The recipe of each of these steps, with the values of the schedule, as the trainer had them."""
    settings = StepSettings(reader, strict=True, make_schedule=make_schedule)
    rows: dict[int, list[dict[str, Any]]] = {step: [] for step in steps}
    for row in [*reader.training_rows, *reader.evaluations]:
        rows.setdefault(row["step"], []).append(row)
    recipes: dict[int, Recipe] = {}
    tokens, last = 0, max(steps, default=0)
    for step in sorted(rows):
        if 0 < step <= last:
            recipes[step] = settings.at(step, tokens)
            for row in rows[step]:
                settings.observe(step, {name: value for name, value in row.items() if name != "step"})
                tokens = int(row.get("num_tokens") or tokens)
    return {step: recipes[step] for step in steps}
