"""Plots: what is drawn, the files, and what is refused."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from groupwise.errors import InputError
from groupwise.plots import plot_curves
from groupwise.stats import bootstrap_interval


def curves():
    rng = np.random.default_rng(0)
    x = np.arange(20)
    return {
        "five runs": (x, x + rng.normal(size=(5, 20))),
        "one run": (x, 20 - x),
    }


@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_writes_the_format_of_the_suffix(tmp_path, ending, start):
    path = tmp_path / f"curve.{ending}"
    plot_curves(path, curves(), title="a title", goal=15.0)
    assert path.read_bytes().startswith(start)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_draws_the_mean_and_its_interval(tmp_path, monkeypatch):
    from groupwise import plots

    drawn = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: drawn.append(figure))
    plot_curves(tmp_path / "x.png", curves(), y_label="reward", goal=15.0)
    axes = drawn[0].axes[0]
    many = curves()["five runs"]
    expected = bootstrap_interval(many[1])
    np.testing.assert_allclose(axes.lines[0].get_ydata(), expected.estimate)
    assert len(axes.collections) == 1  # a band for the five runs, none for the single one
    corners = axes.collections[0].get_paths()[0].get_extents()
    assert corners.y0 == pytest.approx(expected.low.min())
    assert corners.y1 == pytest.approx(expected.high.max())
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["five runs (5 runs)", "one run", "goal: 15"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "reward")


@pytest.mark.parametrize(("values", "limits"), [([0.25, 0.25], (0.196, 0.304)), ([0.0, 0.0], (-1.08, 1.08))])
def test_a_constant_curve_has_a_readable_axis(tmp_path, monkeypatch, values, limits):
    from groupwise import plots

    drawn = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: drawn.append(figure))
    plot_curves(tmp_path / "x.png", {"one run": ([0, 1], [values])})
    assert drawn[0].axes[0].get_ylim() == pytest.approx(limits)


@pytest.mark.parametrize(
    ("name", "drawn", "message"),
    [
        ("x.png", {}, "no curve to draw"),
        ("x.gif", {"a": ([0], [0])}, r"must end in .png, .svg or .pdf, got 'x.gif'"),
        ("x.png", {"a": ([0, 1], [[1, 2, 3]])}, "curve 'a' needs x"),
        ("x.png", {"a": ([0, 1], [[1, np.nan]])}, "NaN or infinite"),
    ],
)
def test_refused(tmp_path, name, drawn, message):
    with pytest.raises(InputError, match=message):
        plot_curves(tmp_path / name, drawn)
    assert not list(tmp_path.iterdir())


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="matplotlib"):
        plot_curves(tmp_path / "x.png", curves())
    assert not list(tmp_path.iterdir())
