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


def test_a_resumed_run_sets_damaged_lines_aside(tmp_path):
    """The other rows stay, in order and without repetitions; the damaged file is kept beside them."""
    path = tmp_path / "m.jsonl"
    lines = [
        '{"step": 2, "x": 1}',
        "nonsense",
        "",
        '{"step": 1, "x": 1}',
        '{"step": 2, "eval/x": 1}',
        "[1]",
        '{"step": -1}',
    ]
    lines += ['{"step": true}', '{"step": 1.5}', '{"step": 3, "x": [1]}', '{"step": 2, "x": 1}', "[" * 100_000]
    content = "\r\n".join(lines) + "\n" + '{"step": 4'
    path.write_text(content, newline="")
    with pytest.raises(RunDirError, match="line 2 is damaged: it is not JSON"):
        read_metrics(path)
    with closing(MetricsRecorder(path, resume=True)) as metrics:
        assert metrics.last_step == 2
        note = metrics.rewind(2)
        metrics.record(3, {"x": 2})
    assert "7 damaged lines (the first is line 2)" in note
    assert "m.jsonl.damaged-1" in note
    assert [(row["step"], *row.keys() - {"step"}) for row in read_metrics(path)] == [
        (1, "x"),
        (2, "x"),
        (2, "eval/x"),
        (3, "x"),
    ]
    assert (tmp_path / "m.jsonl.damaged-1").read_text().startswith(lines[0])
    with closing(MetricsRecorder(path, resume=True)) as metrics:
        assert metrics.rewind(1) is None


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_lines_are_numbered_as_in_an_editor(tmp_path, ending):
    """Blank lines count; other line separators, which stand within texts, do not."""
    path = tmp_path / "m.jsonl"
    rows = ['{"step": 1, "x": "a\u2028b\x85c"}', "", '{"step": 2}', "{", ""]
    path.write_text(ending.join(rows), encoding="utf-8", newline="")
    with pytest.raises(RunDirError, match="line 4 is damaged"):
        read_metrics(path)


def test_a_file_that_is_deleted_or_replaced_gets_no_rows(tmp_path):
    path = tmp_path / "m.jsonl"
    with closing(MetricsRecorder(path)) as metrics:
        metrics.record(1, {})
        path.unlink()
        with pytest.raises(RunDirError, match=r"m\.jsonl was deleted, moved or replaced"):
            metrics.record(2, {})
        path.write_text("")
        with pytest.raises(RunDirError, match=r"m\.jsonl was deleted, moved or replaced"):
            metrics.record(2, {})


def test_a_folder_in_place_of_the_file(tmp_path):
    (tmp_path / "m.jsonl").mkdir()
    with pytest.raises(RunDirError, match=r"m\.jsonl is a folder"):
        read_metrics(tmp_path / "m.jsonl")
