"""Phases, ramps and rules from any table, and any metric that the rules see: values in their limits, or a sentence."""

from __future__ import annotations

import json
import math
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from groupwise.config import make_recipe, resolve_scheduled
from groupwise.rundir import as_json
from groupwise.training.inputs import make_schedule
from groupwise.training.schedule.lengths import run_length
from groupwise.training.schedule.parse import parse_phases
from tests.fuzz import accepted, many, tried

NUMBERS = st.one_of(
    st.floats(),
    st.integers(-3, 300),
    st.sampled_from([0.5, 1.0, 1e-300, 1e300, 1.7e308, math.nan, math.inf, 10**400, True, None, "1", [], {}]),
)
NAMES = st.sampled_from(["temperature", "sampling.temperature", "learning_rate", "loss.kl_coef", "batch_size", "x", ""])
TEXTS = st.one_of(
    st.builds(
        "{} {} {}".format,
        st.sampled_from(["reward", "learning_rate", "sampling.temperature", "accuracy", "loss.kl_coef", "é", ""]),
        st.sampled_from(["<", ">", "<=", ">=", "*", "/", "+", "-", "=", "**", ""]),
        st.one_of(st.floats().map(repr), st.sampled_from(["0", "0.5", "-1", "nan", "1e999", "٣", "1_0", "0x1", ""])),
    ),
    st.text(max_size=12),
    NUMBERS,
)
PHASE = st.fixed_dictionaries(
    {},
    optional={
        "name": st.one_of(st.sampled_from(["a", "b"]), st.text(max_size=3), NUMBERS),
        "steps": NUMBERS,
        "tokens": NUMBERS,
        "epochs": NUMBERS,
        "share": NUMBERS,
        "temperature": NUMBERS,
        "learning_rate": NUMBERS,
        "loss": st.one_of(NUMBERS, st.dictionaries(st.sampled_from(["kl_coef", "clip_low"]), NUMBERS, max_size=2)),
    },
)
RAMP = st.one_of(
    st.fixed_dictionaries(
        {},
        optional={
            "from": NUMBERS,
            "to": NUMBERS,
            "steps": NUMBERS,
            "tokens": NUMBERS,
            "start": NUMBERS,
            "shape": st.one_of(st.sampled_from(["linear", "cosine", "exponential", "constant"]), NUMBERS),
            "at": st.lists(st.lists(NUMBERS, max_size=3), max_size=3),
            "over": st.sampled_from(["steps", "tokens", "x"]),
        },
    ),
    st.builds(
        lambda start, end, steps, shape: {"from": start, "to": end, "steps": steps, "shape": shape},
        st.floats(1e-6, 1e6),
        st.floats(1e-6, 1e6),
        st.integers(1, 9),
        st.sampled_from(["linear", "cosine", "exponential", "constant"]),
    ),
)
RULE = st.fixed_dictionaries(
    {"when": TEXTS, "over": st.one_of(st.integers(1, 3), NUMBERS), "then": TEXTS},
    optional={
        name: NUMBERS if name != "during" else st.sampled_from(["a", "b", 5])
        for name in ("at_least", "at_most", "cooldown", "times", "during", "x")
    },
)
TABLES = st.fixed_dictionaries(
    {},
    optional={
        "phases": st.lists(PHASE, max_size=3),
        "ramps": st.dictionaries(NAMES, RAMP, max_size=2),
        "rules": st.lists(RULE, max_size=2),
    },
)
METRICS = st.dictionaries(
    st.sampled_from(["reward", "accuracy", "é"]),
    st.one_of(st.floats(), st.sampled_from([10**400, math.nan, "x", None, 1j])),
    max_size=3,
)


def schedule_of(table):
    recipe = make_recipe({"train": {"steps": 12}, **table})
    make_schedule(recipe)
    phases = parse_phases(recipe.phases, partial(resolve_scheduled, recipe))
    length = run_length(recipe, phases, 40, samples=True)
    return recipe, make_schedule(recipe, length), length


@many(6)
@given(TABLES, st.lists(METRICS, min_size=3, max_size=12))
def test_any_schedule_and_any_metric(table, metrics):
    made = accepted("schedules", lambda: schedule_of(table))
    if made is None:
        return
    recipe, schedule, length = made
    resumed = make_schedule(recipe, length)
    for step, measured in enumerate(metrics):
        values = accepted("schedules", lambda step=step: schedule.values(step, 10 * step))
        if values is None:
            return
        assert all(math.isfinite(value) for value in values.values())
        tried("metrics of rules")
        assert all(isinstance(message, str) for message in schedule.observe(step, measured))
        state = json.loads(json.dumps(as_json(schedule.state()), allow_nan=False))
        resumed.load_state(state)
        assert resumed.values(step + 1, 10 * step) == schedule.values(step + 1, 10 * step)
