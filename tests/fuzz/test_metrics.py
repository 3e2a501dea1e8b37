"""Any metric through the recorder, the display, the checks and a checkpoint: recorded, or refused with a sentence."""

from __future__ import annotations

import io
import json
import math
from contextlib import ExitStack, closing
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.config import Recipe
from groupwise.rundir import as_json, from_json, read_json, read_metrics, write_csv, write_json
from groupwise.rundir.metrics import MetricsRecorder
from groupwise.training.display import LineDisplay
from groupwise.training.display.base import RunFacts
from groupwise.training.display.curves import draw_curves
from groupwise.training.monitor.health_checks import HealthChecks
from groupwise.training.state import TrainState
from groupwise.training.store.checkpoint import digest
from tests.fuzz import accepted, many, tried

FLOATS = st.one_of(
    st.floats(), st.sampled_from([math.nan, math.inf, -math.inf, 1.7e308, -1.7e308, 5e-324, -0.0, 1e30, 1e31])
)
VALUES = st.one_of(
    FLOATS,
    st.integers(),
    st.just(5000).map(lambda digits: -(10**digits)),  # not a constant: Python refuses to show it
    st.sampled_from([10**400, True, None, "NaN", "text", Fraction(1, 3), Fraction(10**400)]),
    st.sampled_from([np.float32(1.5), np.float16("inf"), np.longdouble("1e4000"), np.int64(3), np.array([1.0, 2.0])]),
    st.sampled_from([torch.tensor(math.nan), torch.tensor(2.0), torch.tensor([1.0]), torch.ones(2), torch.tensor(1j)]),
    st.sampled_from([1j, b"x", [], {}, object(), lambda: 1]),
)
NAMES = st.sampled_from(["reward", "loss", "eval/reward", "kl", "entropy", "x", "step", "preference/margin", "ü\ud800"])


def same(one: Any, other: Any) -> bool:
    """Equal, with NaN equal to NaN."""
    return repr(one) == repr(other)


@many(6)
@given(st.lists(st.dictionaries(NAMES, VALUES, max_size=4), min_size=1, max_size=4))
def test_the_recorder(rows):
    with TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder) / "metrics.jsonl"
        kept = 0
        recorder = stack.enter_context(closing(MetricsRecorder(path)))
        for step, row in enumerate(rows):
            before = path.read_bytes()
            done = accepted("metrics", lambda step=step, row=row: recorder.record(step, row) or True)
            kept += bool(done)
            if not done:
                assert path.read_bytes() == before  # a refused row leaves nothing
        read = read_metrics(path)
        assert len(read) == kept
        for row in read:
            for name, value in rows[row["step"]].items():
                if type(value) is float:
                    assert same(row[name], value)


@many(6)
@given(st.dictionaries(st.sampled_from(["right", "x"]), FLOATS, min_size=1), st.lists(FLOATS, min_size=1, max_size=4))
def test_the_state_of_a_run(metrics, values):
    tried("checkpoint states")
    state = TrainState()
    for state.step, value in enumerate(values, start=1):
        state.add_evaluation({**metrics, "reward": value}, "reward")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "state.json"
        write_json(path, asdict(state))
        saved = read_json(path)
        json.dumps(saved, allow_nan=False)
        loaded = TrainState()
        loaded.load_json(saved)
    assert same(asdict(loaded), asdict(state))
    assert digest(asdict(loaded)) == digest(asdict(state)) == digest(saved)
    numbers = [value for value in values if not math.isnan(value)]  # NaN is never the best
    assert (None if state.best is None else state.best["value"]) == max(numbers, default=None)


@many(3)
@given(st.recursive(VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner)))
def test_any_json(value):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "x.json"
        if accepted("checkpoint states", lambda: write_json(path, value) or True):
            read = read_json(path)
            assert same(as_json(read), read)
            if type(value) is float:
                assert same(float(read), value)
                assert same(from_json(read), value)
        else:
            assert not path.exists()


@many(3)
@given(st.lists(st.dictionaries(NAMES.filter(lambda name: name != "step"), VALUES), min_size=1, max_size=12))
def test_displays_and_checks(rows):
    tried("metrics")
    out = io.StringIO()
    display, checks = LineDisplay(out), HealthChecks("right")
    display.start(RunFacts("run", "tiny", 1, "cpu", "dapo", len(rows), "reward", "run"))
    for step, row in enumerate(rows, start=1):
        display.step(step, row)
        display.evaluation(step, row)
        numbers = {name: value for name, value in row.items() if isinstance(value, float)}
        checks.observe(step, numbers, Recipe())
    display.finish([])
    assert max(map(len, out.getvalue().splitlines()), default=0) < 400
    json.dumps(checks.state(), allow_nan=False)


@settings(max_examples=4 + settings().max_examples // 6)  # each draws a picture
@given(st.lists(st.dictionaries(NAMES.filter(lambda name: name != "step"), FLOATS), min_size=1, max_size=4))
def test_curves_and_tables(rows):
    tried("metrics")
    with TemporaryDirectory() as folder, closing(MetricsRecorder(Path(folder) / "metrics.jsonl")) as recorder:
        for step, row in enumerate(rows):
            accepted("metrics", lambda step=step, row=row: recorder.record(step, row))
        draw_curves(Path(folder), metric="reward", goal=0.5)
        write_csv(Path(folder) / "progress.csv", rows)
