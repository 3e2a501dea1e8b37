"""The plot of a run's metrics."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from groupwise.rundir import RunDir
from groupwise.training.display.base import is_share
from groupwise.training.display.curves import draw_curves


@pytest.fixture
def run(tmp_path):
    with RunDir.create(tmp_path / "run") as run:
        yield run


@pytest.fixture
def drawn(monkeypatch):
    figures = []
    monkeypatch.setattr("groupwise.plots.save_figure", lambda figure, path: figures.append(figure))
    return figures


def record(run, rows):
    for step, values in rows:
        run.metrics.record(step, values)


def title(axes):
    return axes.get_title(loc="left")


OTHERS = {"entropy": 1.0, "kl": 0.1, "completions/mean_length": 20.0, "completions/clipped_ratio": 0.25}


def test_every_panel_is_drawn(run, drawn):
    record(run, [(0, {"eval/accuracy": 0.25, "eval/accuracy_low": 0.2, "eval/accuracy_high": 0.4})])
    record(run, [(step, {"reward": float(step), **OTHERS}) for step in range(1, 41)])
    record(run, [(40, {"eval/accuracy": 0.5})])
    assert draw_curves(run.path, metric="accuracy", goal=0.8) == run.path / "curves.png"
    panels = {title(axes): axes for axes in drawn[0].axes}
    assert list(panels) == [
        "reward while training",
        "right on held-out questions",
        "entropy",
        "KL to the reference",
        "tokens in an answer",
        "answers cut off",
    ]
    raw, smooth = panels["reward while training"].lines
    np.testing.assert_array_equal(raw.get_ydata(), np.arange(1, 41))
    # 40 points, so 2 on each side: the mean of five in the middle, of fewer at the ends.
    np.testing.assert_allclose(smooth.get_ydata()[[0, 1, 2, 20, 38, 39]], [2, 2.5, 3, 21, 38.5, 39])
    assert raw.get_alpha() < 1
    held_out = panels["right on held-out questions"]
    assert held_out.lines[0].get_xdata().tolist() == [0, 40]
    assert held_out.lines[0].get_ydata().tolist() == [0.25, 0.5]
    assert held_out.lines[0].get_marker() == "o"
    assert held_out.lines[1].get_ydata() == [0.8, 0.8]
    assert held_out.texts[0].get_text() == "goal 80 %"
    band = held_out.collections[0].get_paths()[0].get_extents()
    assert (band.y0, band.y1) == (0.2, 0.4)  # only one evaluation has an interval
    for name, shown in (("answers cut off", "30 %"), ("right on held-out questions", "30 %"), ("entropy", "0.30")):
        formatter = panels[name].yaxis.get_major_formatter()
        formatter.set_locs([0.25, 0.3])
        assert formatter(0.3) == shown


@pytest.mark.parametrize(
    ("values", "metric", "titles", "columns"),
    [
        ({"reward": 1.0}, "accuracy", ["reward while training"], 1),
        ({"reward": 1.0, "kl": 0.5}, "accuracy", ["reward while training", "KL to the reference"], 2),
        ({"reward": 1.0, "eval/score": 70.0}, "score", ["reward while training", "score, held out"], 2),
        ({"reward": 1.0, "eval/score": 70.0}, None, ["reward while training"], 1),
        (
            {"reward": math.nan, "entropy": None, "kl": "x", "completions/clipped_ratio": 0.0},
            "a",
            ["answers cut off"],
            1,
        ),
    ],
)
def test_metrics_that_were_not_recorded_are_left_out(run, drawn, values, metric, titles, columns):
    record(run, [(1, values), (2, values)])
    assert draw_curves(run.path, metric=metric) is not None
    assert [title(axes) for axes in drawn[0].axes] == titles
    assert drawn[0].axes[0].get_gridspec().ncols == columns


def test_an_accuracy_that_is_already_in_percent(run, drawn):
    record(run, [(1, {"eval/accuracy": 40.0}), (2, {"eval/accuracy": 50.0})])
    draw_curves(run.path, metric="accuracy", goal=60)
    (axes,) = drawn[0].axes
    assert axes.texts[0].get_text() == "goal 60"
    axes.yaxis.get_major_formatter().set_locs([40, 50])
    assert axes.yaxis.get_major_formatter()(40) == "40"


def test_a_single_last_panel_is_as_wide_as_two(run, drawn):
    record(run, [(step, {"reward": 1.0, "eval/accuracy": 0.5, "entropy": 1.0}) for step in (1, 2)])
    draw_curves(run.path, metric="accuracy")
    spans = [axes.get_subplotspec() for axes in drawn[0].axes]
    assert [(span.colspan.start, span.colspan.stop) for span in spans] == [(0, 1), (1, 2), (0, 2)]
    assert [(span.rowspan.start, span.rowspan.stop) for span in spans] == [(0, 2), (0, 2), (2, 4)]


def test_constant_metrics_have_readable_axes(run, drawn):
    values = {"reward": 0.25, "entropy": 1.0, "kl": 0.0, "completions/clipped_ratio": 0.0}
    record(run, [(step, {**values, "reward": 0.25 + 1e-17 * step}) for step in range(1, 9)])
    record(run, [(8, {"eval/accuracy": 1.0})])
    draw_curves(run.path, metric="accuracy")
    limits = {title(axes): axes.get_ylim() for axes in drawn[0].axes}
    assert limits["reward while training"] == pytest.approx((0.196, 0.304))
    assert limits["KL to the reference"] == pytest.approx((-1.08, 1.08))
    assert limits["answers cut off"] == pytest.approx((-0.04, 1.04))
    assert limits["right on held-out questions"] == pytest.approx((0.792, 1.008))


def test_an_interval_keeps_the_axis_of_a_constant_metric(run, drawn):
    row = {"eval/accuracy": 0.25, "eval/accuracy_low": 0.2, "eval/accuracy_high": 0.3}
    record(run, [(0, row), (9, row)])
    draw_curves(run.path, metric="accuracy")
    low, high = drawn[0].axes[0].get_ylim()
    assert (low, high) == pytest.approx((0.2, 0.3), abs=0.02)


def test_all_panels_have_the_same_steps(run, drawn):
    record(run, [(0, {"eval/accuracy": 0.25}), (5, {"reward": 1.0}), (100, {"reward": 2.0, **OTHERS})])
    draw_curves(run.path, metric="accuracy")
    assert {axes.get_xlim() for axes in drawn[0].axes} == {(-1.0, 101.0)}


def test_one_step(run, drawn):
    record(run, [(7, {"reward": 1.0, **OTHERS})])
    draw_curves(run.path, metric="accuracy")
    (point,) = drawn[0].axes[0].lines
    assert point.get_marker() == "o"  # a line of one point would be invisible
    assert drawn[0].axes[0].get_xlim() == (6.0, 8.0)


@pytest.mark.parametrize(("evaluations", "marker"), [(1, "o"), (40, "o"), (41, "None")])
def test_many_evaluations_have_no_markers(run, drawn, evaluations, marker):
    record(run, [(step, {"eval/accuracy": 1 / step}) for step in range(1, evaluations + 1)])
    draw_curves(run.path, metric="accuracy")
    assert drawn[0].axes[0].lines[0].get_marker() == marker


def test_the_file_is_a_complete_png(run):
    record(run, [(step, {"reward": 1.0 / step, "eval/accuracy": 1.0, **OTHERS}) for step in range(1, 30)])
    path = draw_curves(run.path, metric="accuracy", goal=0.5)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.read_bytes().endswith(b"IEND\xaeB`\x82")


def test_nothing_to_draw(run):
    assert draw_curves(run.path, metric="accuracy") is None
    record(run, [(1, {"loss": 1.0})])
    assert draw_curves(run.path, metric="accuracy") is None
    assert not (run.path / "curves.png").exists()


def test_without_matplotlib_there_is_no_plot(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    record(run, [(1, {"reward": 1.0})])
    assert draw_curves(run.path, metric=None) is None
    assert capsys.readouterr() == ("", "")


def test_shares():
    shares = ["accuracy", "eval/accuracy_lenient", "pass@1", "completions/clipped_ratio", "right"]
    others = ["reward", "generated", "brightness", "length", "", "passenger"]
    assert [name for name in [*shares, *others] if is_share(name)] == shares
