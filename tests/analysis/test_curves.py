"""Curves, settings beside their defaults, and where the time went: by hand-made run folders."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.algorithms import ALGORITHMS
from groupwise.analysis.curves import RunAxes, chart_sections, curve, thin
from groupwise.analysis.run_reader import RunReader
from groupwise.analysis.settings import default_settings, run_settings, side_by_side
from groupwise.analysis.step_times import step_times
from groupwise.config import make_recipe


def reader_of(folder: Path, rows: list[dict[str, Any]], recipe: dict[str, Any] | None = None) -> RunReader:
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"format": 1, "created": "2026-11-18T09:54:39+0000"}))
    (folder / "recipe.json").write_text(json.dumps(recipe or {"algorithm": "grpo"}))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return RunReader(folder)


NUMBERS = st.floats(allow_nan=True, allow_infinity=True, width=32)


@given(st.lists(NUMBERS, max_size=300), st.integers(10, 60))
def test_thinning_keeps_the_ends_and_the_extremes(values, points):
    kept = thin(values, points)
    assert kept == sorted(set(kept))
    if len(values) <= points:
        assert kept == list(range(len(values)))
        return
    assert len(kept) <= points
    assert (kept[0], kept[-1]) == (0, len(values) - 1)
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        shown = [values[place] for place in kept if math.isfinite(values[place])]
        assert (min(shown), max(shown)) == (min(finite), max(finite))


def test_a_curve_by_step_tokens_and_seconds(tmp_path):
    rows = [
        {"step": 0, "eval/accuracy": 0.1},
        {"step": 1, "reward": 0.5, "num_tokens": 10, "step_time": 1.5},
        {"step": 2, "reward": "NaN", "step_time": 0.5},  # a step without completions
        {"step": 4, "reward": 0.7, "num_tokens": 30, "step_time": 2.0},
        {"step": 4, "eval/accuracy": 0.3},
    ]
    reader = reader_of(tmp_path / "a", rows)
    axes = RunAxes(reader)
    assert curve(reader, axes, "reward") == {
        "steps": [1, 2, 4], "tokens": [10, 10, 30], "seconds": [1.5, 2.0, 4.0], "values": [0.5, None, 0.7],
    }  # fmt: skip
    assert curve(reader, axes, "eval/accuracy")["seconds"] == [0, 4.0]
    assert axes.at(3) == (10, 2.0)
    assert curve(reader, axes, "unknown")["steps"] == []


def test_charts_by_section(tmp_path):
    ends = {"eval/accuracy_low": 0.0, "eval/accuracy_high": 1.0}
    rows = [{"step": 0, "eval/accuracy": 0.1, **ends}]
    for step in range(1, 5):
        row = {"reward": step, "accuracy": step / 9, "accuracy_no_answer": step / 10, "kl_coef": 0.3, "mine": step}
        rows.append({"step": step, **row, "rewards/correct/mean": step, "letters/A": step, "loss/policy": 0.0})
    rows.append({"step": 4, "eval/accuracy": 0.2, **ends})
    sections = {section.title: section for section in chart_sections([reader_of(tmp_path / "a", rows)])}
    titles = list(sections)
    assert (titles[0], titles[-1]) == ("Main", "Others")
    main = sections["Main"].charts
    assert [chart.lines for chart in main] == [["accuracy", "eval/accuracy"], ["reward"]]
    assert main[0].bands == {"eval/accuracy": ("eval/accuracy_low", "eval/accuracy_high")}
    assert [chart.title for chart in sections["Rewards and grades"].charts] == [
        "reward", "accuracy", "accuracy_no_answer", "rewards/correct/mean",
    ]  # fmt: skip
    assert sections["Progress and settings"].constant[0][:2] == ("kl_coef", 0.3)
    assert [chart.title for chart in sections["Evaluation"].charts] == ["eval/accuracy"]  # its interval is its band
    assert [chart.title for chart in sections["Others"].charts] == ["mine"]
    assert "mean reward" in sections["Rewards and grades"].charts[0].about


def test_a_run_that_has_just_begun_has_charts(tmp_path):
    assert chart_sections([reader_of(tmp_path / "empty", [])]) == []
    (main, rewards) = chart_sections([reader_of(tmp_path / "a", [{"step": 1, "reward": 0.0}])])
    assert (main.title, [chart.title for chart in rewards.charts]) == ("Main", ["reward"])


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "of another version"])
def test_settings_that_differ_from_the_defaults_of_the_algorithm(tmp_path, algorithm):
    known = {"algorithm": algorithm} if algorithm in ALGORITHMS else {}
    recipe = make_recipe(known).recorded() | {"algorithm": algorithm}
    recipe["loss"]["kl_coef"] = 0.123
    recipe["run"]["folder"] = "elsewhere"
    settings = run_settings(reader_of(tmp_path / "a", [], recipe))
    assert [(one.name, one.value) for one in settings if one.changed] == [("loss.kl_coef", 0.123)]
    (changed,) = [one for one in settings if one.changed]
    assert changed.default == default_settings(algorithm)["loss.kl_coef"]
    assert "KL" in changed.about


def test_tables_side_by_side():
    rows = side_by_side([{"a": 1, "b": [1], "run.folder": "x"}, {"a": 1, "b": [2], "c": 3, "run.folder": "y"}])
    assert [(row.name, row.values, row.differs) for row in rows] == [
        ("a", [1, 1], False),
        ("b", [[1], [2]], True),
        ("run.folder", ["x", "y"], False),
        ("c", [None, 3], True),
    ]


def timed(step: int, seconds: float, memory: float = 1.0, speed: float = 1.0, **stages: float) -> dict[str, Any]:
    times = {f"time/{stage}": time for stage, time in stages.items()}
    row = {"step": step, "num_tokens": 50 * step, "step_time": seconds, **times}
    return {**row, "memory/train": memory, "tokens_per_second": speed}


def test_seconds_and_memory_by_stage(tmp_path):
    rows = [
        timed(1, 4.0, generate=1.0, train=2.0, memory=3.0, speed=10),
        timed(2, 2.0, generate=1.5, train=1.0, memory=2.0, speed=30),
        {"step": 3, "reward": 1.0},  # its time was not recorded
    ]
    answer = step_times(reader_of(tmp_path / "a", rows))
    assert answer["stages"] == ["generate", "train", "other"]
    assert answer["totals"] == {
        "generate": 2.5,
        "train": 3.0,
        "other": 1.0,
    }  # 2.5 s of stages in a step of 2 s: no less than 0
    assert (answer["steps"], answer["seconds"], answer["tokens"]) == (2, 6.0, 100)
    assert answer["peak_memory"] == {"train": 3.0}
    assert answer["stretches"][0]["seconds"] == {"generate": 1.0, "train": 2.0, "other": 1.0}
    (stretch,) = step_times(reader_of(tmp_path / "a", rows), stretches=1)["stretches"]
    assert (stretch["first"], stretch["last"], stretch["tokens_per_second"]) == (1, 2, 20)
    assert stretch["seconds"] == {"generate": 1.25, "train": 1.5, "other": 0.5}
    assert answer["remaining"] is None
    assert step_times(reader_of(tmp_path / "b", []))["stretches"] == []


def test_the_time_that_is_left(tmp_path):
    recipe = make_recipe({"train": {"steps": 10}}).recorded()
    reader_of(tmp_path / "a", [timed(step, 3.0) for step in (1, 2)], recipe)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": stamp}
    (tmp_path / "a" / ".holder.json").write_text(json.dumps(holder))
    reader = RunReader(tmp_path / "a")
    assert reader.status == "running"
    assert step_times(reader)["remaining"] == pytest.approx(8 * 3.0)
