"""The settings of every step of a run: its recipe, what was changed on a resume, and the values of its schedule.

The schedule is not recorded. It follows from the recipe and from what was measured, so it is computed again from
``metrics.jsonl``: phases and ramps by step and tokens, rules by the metrics that they saw.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from groupwise.analysis.run_reader import RunReader
from groupwise.config import Recipe, make_recipe, resolve_scheduled, with_settings
from groupwise.config.names import section_names
from groupwise.errors import CheckpointError
from groupwise.training.components import make_schedule
from groupwise.training.schedule.lengths import run_length
from groupwise.training.schedule.parse import parse_phases
from groupwise.training.schedule.schedule import Schedule
from groupwise.training.store.run_folder import RECIPE, TRAINING_PAIRS, TRAINING_ROWS
from groupwise.training.update.objective import samples_completions


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


def step_recipes(reader: RunReader, steps: Collection[int]) -> dict[int, Recipe]:
    """The recipe of each of these steps, with the values of the schedule, as the trainer had them."""
    recipes: dict[int, Recipe] = {}
    schedule, current, tokens, last = None, None, 0, max(steps, default=0)
    known: dict[tuple[int, ...], Recipe] = {}  # by the number of the changes before the step
    values_of: dict[tuple[Any, ...], Recipe] = {}
    for step, rows in _rows_by_step(reader, steps).items():
        if step > last:
            break
        if step > 0:
            key = tuple(number for number, entry in enumerate(reader.changes) if entry["step"] < step)
            if key not in known:
                known[key] = run_recipe(reader, step)
            recipe = known[key]
            if recipe is not current:
                schedule, current = _next_schedule(reader, recipe, schedule), recipe
                values_of.clear()
            values = {} if schedule is None else schedule.values(step - 1, tokens)
            shown = tuple(values.items())
            if shown not in values_of:
                values_of[shown] = with_settings(recipe, values) if values else recipe
            recipes[step] = values_of[shown]
        for row in rows:
            if step and schedule is not None:
                schedule.observe(step - 1, {name: value for name, value in row.items() if name != "step"})
            tokens = int(row.get("num_tokens") or tokens)
    return {step: recipes[step] for step in steps}


def _rows_by_step(reader: RunReader, steps: Collection[int]) -> dict[int, list[Mapping[str, Any]]]:
    """The rows of each step: first those of training, then its evaluation; none for a step without metrics."""
    rows: dict[int, list[Mapping[str, Any]]] = {step: [] for step in steps}
    for row in [*reader.training_rows, *reader.evaluations]:
        rows.setdefault(row["step"], []).append(row)
    return dict(sorted(rows.items()))


def _next_schedule(reader: RunReader, recipe: Recipe, before: Schedule | None) -> Schedule | None:
    """The schedule of a recipe, in the state of that of the steps before; None if nothing is scheduled."""
    if not (recipe.phases or recipe.ramps or recipe.rules):
        return None
    schedule = make_schedule(recipe)
    samples = samples_completions(recipe, schedule.driven)
    described = str(reader.inputs.get(TRAINING_ROWS if samples else TRAINING_PAIRS, ""))
    rows = described.partition(",")[0]
    phases = parse_phases(recipe.phases, partial(resolve_scheduled, recipe))
    length = run_length(recipe, phases, int(rows) if rows.isdecimal() else 1, samples=samples)
    schedule = make_schedule(recipe, length)
    if before is not None:
        schedule.load_state(before.state())
    return schedule
