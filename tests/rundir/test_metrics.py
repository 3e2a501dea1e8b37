"""The metrics recorder: rows are read back as they were recorded, also after a crash and after a rewind."""

from __future__ import annotations

import json
import math
from contextlib import closing

import numpy as np
import pytest
import torch

from groupwise.errors import InputError, RunDirError
from groupwise.rundir import metric_column, read_metrics
from groupwise.rundir.metrics import MetricsRecorder


def test_rows_round_trip(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    with closing(MetricsRecorder(path)) as metrics:
        metrics.record(1, {"reward": torch.tensor(0.5), "n": np.int64(3), "ok": True, "note": "a\nb", "none": None})
        metrics.record(1, {"eval/accuracy": np.float32(0.25)})
        metrics.record(2, {"loss": math.nan, "high": math.inf, "low": torch.tensor(-math.inf)})
        rows = read_metrics(path)  # each row is on the disk at once
    assert rows[:2] == [
        {"step": 1, "reward": 0.5, "n": 3, "ok": True, "note": "a\nb", "none": None},
        {"step": 1, "eval/accuracy": 0.25},
    ]
    assert math.isnan(rows[2]["loss"])
    assert (rows[2]["high"], rows[2]["low"]) == (math.inf, -math.inf)
    assert metric_column(rows, "reward") == ([1], [0.5])
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_continues_an_existing_file(tmp_path):
    path = tmp_path / "m.jsonl"
    with closing(MetricsRecorder(path)) as metrics:
        metrics.record(1, {"x": 1})
    with closing(MetricsRecorder(path)) as metrics:
        assert metrics.last_step == 1
        metrics.record(2, {"x": 2})
    assert metric_column(read_metrics(path), "x") == ([1, 2], [1, 2])


def test_an_unfinished_last_line_is_dropped(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "x": 1}\n{"step": 2, "x"')
    assert read_metrics(path) == [{"step": 1, "x": 1}]
    with closing(MetricsRecorder(path)) as metrics:
        metrics.record(2, {"x": 5})
    assert read_metrics(path) == [{"step": 1, "x": 1}, {"step": 2, "x": 5}]


def test_damage_in_the_middle_is_an_error_with_its_line_number(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(RunDirError, match="line 2 is damaged"):
        read_metrics(path)
    path.write_text('{"x": 1}\n')
    with pytest.raises(RunDirError, match="line 1 is damaged: 'step'"):
        MetricsRecorder(path)
    assert path.read_text() == '{"x": 1}\n'


def test_rewind(tmp_path):
    path = tmp_path / "m.jsonl"
    with closing(MetricsRecorder(path)) as metrics:
        for step in range(1, 6):
            metrics.record(step, {"x": step / 3})
        before = path.read_bytes()
        metrics.rewind(3)
        assert metrics.last_step == 3
        assert len(read_metrics(path)) == 3
        assert before.startswith(path.read_bytes())
        with pytest.raises(InputError, match="step 2 comes after step 3"):
            metrics.record(2, {})
        metrics.record(4, {"x": 4 / 3})
        metrics.record(5, {"x": 5 / 3})
        assert path.read_bytes() == before
        metrics.rewind(0)
        assert metrics.last_step is None
        assert read_metrics(path) == []
        metrics.record(0, {})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"x": torch.ones(2)}, "'x' must be one number"),
        ({"x": np.ones(2)}, "'x' must be one number"),
        ({"x": [1]}, "'x' must be a number, a string or None, got list"),
        ({"step": 1}, "another name"),
    ],
)
def test_refused(tmp_path, values, message):
    with closing(MetricsRecorder(tmp_path / "m.jsonl")) as metrics:
        with pytest.raises(InputError, match=message):
            metrics.record(1, values)
        metrics.record(1, {"x": 1})
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 1, "x": 1}]


def test_reading_a_missing_file(tmp_path):
    with pytest.raises(RunDirError, match="does not exist"):
        read_metrics(tmp_path / "m.jsonl")


def test_an_impossible_path(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunDirError, match=r"m.jsonl cannot be opened: .*file is a file, not a folder"):
        MetricsRecorder(tmp_path / "file" / "m.jsonl")
