"""Comparisons: curves and tests against slow reference versions, and tables by hand."""

from __future__ import annotations

import csv
import itertools
import math
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.control.comparison import plot, write
from groupwise.control.comparison.formatting import number, short, signed
from groupwise.control.comparison.page import comparison_page
from groupwise.control.comparison.pairwise_tests import final_return_tests, speed_tests
from groupwise.control.comparison.runs import MAX_POINTS, ComparedRun, group_runs, mean_curve
from groupwise.control.comparison.write import plot_file_name, write_comparison
from groupwise.stats import bootstrap_interval

NEVER = "not solved by 60k steps"


def row(env_steps=60_000, cpu_seconds=30.0, greedy_return=400.0, sampled_return=300.0, **diagnostics):
    measured = {"env_steps": env_steps, "cpu_seconds": cpu_seconds, "greedy_return": greedy_return}
    return measured | {"sampled_return": sampled_return} | diagnostics


def run(
    algorithm="grpo-fast", seed=0, rows=None, *, environment="CartPole-v1", budget=60_000, threshold=475.0, solved=None
):
    return ComparedRun(environment, algorithm, seed, [row()] if rows is None else rows, budget, threshold, solved)


def ended(algorithm, *returns, **rest):
    """A run for each of these final greedy returns, with seeds from 0."""
    return [run(algorithm, seed, [row(greedy_return=value)], **rest) for seed, value in enumerate(returns)]


def solved_after(algorithm, *steps):
    return [run(algorithm, seed, solved=(at, at / 1000) if at else None) for seed, at in enumerate(steps)]


def page_of(runs, starts=20):
    groups = group_runs(runs)
    return comparison_page(groups, {name: plot_file_name(name) for name in groups}, starts)


def tables(text):
    """Each table of a page: its rows as lists of cells, the line of dashes left out."""
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    cells = [[re.split(r"(?<!\\)\|", line)[1:-1] for line in block] for block in blocks]
    return [[[cell.strip() for cell in line] for line in [block[0], *block[2:]]] for block in cells]


def table(text, heading):
    """The one below a heading, as a dictionary for each row."""
    header, *rows = tables(text.split(f"## {heading}\n\n")[1])[0]
    return [dict(zip(header, cells, strict=True)) for cells in rows]


def pairs(runs):
    return table(page_of(runs), "Final greedy return, pair by pair")


# Curves


@st.composite
def several_runs(draw):
    runs = []
    for seed in range(draw(st.integers(1, 5))):
        times = sorted(draw(st.lists(st.integers(0, 12), min_size=1, max_size=6)))
        values = [draw(st.integers(-9, 9)) for _ in times]
        rows = [row(time, time / 4, value, -value) for time, value in zip(times, values, strict=True)]
        runs.append(run(seed=seed, rows=rows))
    return runs


def reference_curve(runs, axis, measure):
    """The curve by loops over times and runs."""

    def value(one, time):
        return [entry[measure] for entry in one.rows if entry[axis] <= time][-1]

    times = sorted({entry[axis] for one in runs for entry in one.rows})
    begun = [time for time in times if all(one.rows[0][axis] <= time for one in runs)]
    going = [time for time in begun if 2 * sum(one.rows[-1][axis] < time for one in runs) < len(runs)]
    grid = going or begun[:1]
    return grid, [[value(one, time) for time in grid] for one in runs]


@given(
    runs=several_runs(),
    axis=st.sampled_from(["env_steps", "cpu_seconds"]),
    measure=st.sampled_from(["greedy_return", "sampled_return"]),
)
def test_mean_curve_is_the_reference(runs, axis, measure):
    grid, values = reference_curve(runs, axis, measure)
    curve = mean_curve(runs, axis, measure)
    expected = bootstrap_interval(values)
    np.testing.assert_array_equal(curve.x, grid)
    np.testing.assert_allclose(curve.mean.estimate, np.mean(values, axis=0))
    np.testing.assert_array_equal(curve.mean.low, expected.low)
    np.testing.assert_array_equal(curve.mean.high, expected.high)


def test_a_curve_by_hand():
    """It starts with the later run and ends with the second of four; the first to end keeps its last value."""
    slow = [row(10, greedy_return=1), row(20, greedy_return=2), row(40, greedy_return=3)]
    quick = [row(15, greedy_return=10), row(30, greedy_return=20)]
    curve = mean_curve([run(rows=quick), run(rows=slow), run(rows=slow), run(rows=slow)], "env_steps", "greedy_return")
    assert curve.x.tolist() == [15, 20, 30, 40]
    assert curve.mean.estimate.tolist() == [13 / 4, 16 / 4, 26 / 4, 29 / 4]
    two = mean_curve([run(rows=quick), run(rows=slow)], "env_steps", "greedy_return")
    assert two.x.tolist() == [15, 20, 30]  # half of two runs have ended at 30


def test_a_long_curve_is_thinned_out_and_keeps_both_ends():
    rows = [row(step, greedy_return=step * step) for step in range(1000)]
    curve = mean_curve([run(rows=rows)], "env_steps", "greedy_return")
    assert len(curve.x) == MAX_POINTS
    assert (curve.x[0], curve.x[-1]) == (0, 999)
    np.testing.assert_array_equal(curve.mean.estimate, curve.x**2)
    assert np.diff(curve.x).max() <= 6


# The page


def test_outcomes_by_hand():
    runs = [
        run("grpo", 0, [row(sampled_return=100.0)], solved=(1000, 1.5)),
        run("grpo", 1, [row(sampled_return=200.0)], solved=(26_624, 3.0)),
        run("grpo", 2, [row(sampled_return=300.0)]),
        run("ppo", 0, [row(greedy_return=-86.44, cpu_seconds=0.0)]),
    ]
    assert table(page_of(runs), "CartPole-v1") == [
        {
            "algorithm": "grpo",
            "seeds": "3",
            "solved": "2 of 3 [21 %, 94 %]",
            "steps to 475": f"26.6k [1k, {NEVER}]",
            "CPU seconds to 475": f"3 [1.5, {NEVER}]",
            "final greedy return": "400",
            "final sampled return": "200 [100, 300]",
            "steps per CPU second": "2k",
        },
        {
            "algorithm": "ppo",
            "seeds": "1",
            "solved": "0 of 1 [0 %, 79 %]",
            "steps to 475": NEVER,
            "CPU seconds to 475": NEVER,
            "final greedy return": "−86.4",
            "final sampled return": "300",
            "steps per CPU second": "–",
        },
    ]


def test_a_median_between_solved_and_not_solved_is_not_solved():
    (cells,) = table(page_of(solved_after("grpo", 1000, 2000, None, None)), "CartPole-v1")
    assert cells["steps to 475"].startswith(f"{NEVER} [1k, ")


def test_an_environment_without_a_threshold_is_never_solved(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "plot_environment", lambda *arguments, **options: None)
    runs = [run(name, seed, threshold=None) for name in ("a", "b") for seed in range(2)]
    text = write_comparison(tmp_path, runs, starts=20)
    assert "solve" not in text.split("\n", 3)[3]
    assert "solved" not in table(text, "CartPole-v1")[0]
    assert [line["solved"] for line in read(tmp_path / "runs.csv")] == [""] * 4


def test_the_first_line_says_what_was_compared():
    runs = [run("grpo", seed) for seed in range(3)] + [run("ppo", 0, environment="Acrobot-v1", budget=1_000_000)]
    assert page_of(runs, starts=32).splitlines()[0] == (
        "A comparison of 2 algorithms (grpo, ppo) on 2 environments: CartPole-v1 (60,000 environment steps per run), "
        "Acrobot-v1 (1,000,000 environment steps per run); seeds 0 to 2; returns measured on 32 held-out starts."
    )
    assert "(60,000 environment steps per run); seed 7; returns" in page_of([run(seed=7)]).splitlines()[0]
    assert "; seeds 1, 3, 4; " in page_of([run(seed=seed) for seed in (4, 1, 3)])


def test_one_algorithm_has_no_pairs():
    assert "pair" not in page_of([run(seed=0), run(seed=1)])


@pytest.mark.parametrize(
    ("first", "second", "p_value", "verdict"),
    [
        ([9] * 5, [1, 2, 3, 4, 5], "0.062", "no verdict: 5 seeds, 6 are needed"),
        ([9] * 6, [1, 2, 3, 4, 5, 6], "0.031", "first ends higher"),
        ([1, 2, 3, 4, 5, 6], [9] * 6, "0.031", "second ends higher"),
        ([9] * 6, [1, 2, 3, 4, 5, 9], "0.062", "not distinguishable"),
        ([9], [1], "1.000", "no verdict: 1 seed, 6 are needed"),
        (range(20, 40), range(20), "< 0.001", "first ends higher"),
    ],
    ids=["five seeds", "six seeds", "six the other way", "six with a tie", "one seed", "twenty seeds"],
)
def test_a_verdict_needs_six_seeds_that_agree(first, second, p_value, verdict):
    (cells,) = pairs([*ended("first", *first), *ended("second", *second)])
    assert (cells["p"], cells["verdict"]) == (p_value, verdict)
    assert cells["shared seeds"] == str(len(first))


def test_only_shared_seeds_are_paired():
    """Seeds 0 to 2 against 2 to 4: all nine pairs count for the probability, only seed 2 for the difference."""
    runs = [*ended("a", 5, 5, 8), *(run("b", seed, [row(greedy_return=5.5)]) for seed in (2, 3, 4))]
    (cells,) = pairs(runs)
    assert cells["first ends higher"].startswith("33 % [")
    assert (cells["first − second"], cells["shared seeds"]) == ("+2.5", "1")
    (cells,) = pairs([run("a", 0), run("b", 1)])
    assert (cells["first − second"], cells["p"]) == ("–", "–")
    assert cells["verdict"] == "no verdict: 0 seeds, 6 are needed"


def test_every_pair_of_every_environment_is_compared():
    runs = [run(name, environment=place) for place in ("X", "Y") for name in "abc"] + [run("a", environment="Z")]
    compared = [(test.environment, test.first + test.second) for test in final_return_tests(group_runs(runs))]
    assert compared == [(place, pair) for place in ("X", "Y") for pair in ("ab", "ac", "bc")]


def test_with_many_algorithms_the_first_is_compared_with_each_of_the_others():
    names = ["base", "b", "c", "d", "e", "f"]
    tests = final_return_tests(group_runs([run(name) for name in names]))
    assert [(test.first, test.second) for test in tests] == [("base", name) for name in names[1:]]


def test_speed_when_some_runs_are_not_solved():
    quick, slow = [1000, 2000, 3000, 4000, 5000, 6000], [7000, 8000, None, None, None, None]
    text = page_of([*solved_after("quick", *quick), *solved_after("slow", *slow)])
    (cells,) = table(text, "Steps to the threshold, pair by pair")
    assert cells["first solves sooner"] == "100 %"
    assert (cells["p"], cells["verdict"]) == ("0.031", "quick solves sooner")
    (test,) = speed_tests(group_runs([*solved_after("a", None, 5), *solved_after("b", None, None)]))
    assert test.probability.estimate == (0.5 + 0.5 + 1 + 1) / 4  # neither, neither, a, a
    assert speed_tests(group_runs([*solved_after("a", None), *solved_after("b", None)])) == []


steps_to_solve = st.lists(st.sampled_from([10, 20, 30, 40, 50, None]), min_size=3, max_size=3)


@given(a=steps_to_solve, b=steps_to_solve, lone=st.sampled_from([15, 35, None]))
def test_the_speed_test_is_a_permutation_test_of_the_probability(a, b, lone):
    """The permutations swap the two runs of some seeds. The first algorithm has one more seed, without a partner."""

    def sooner(first, second):
        times = [[at or math.inf for at in side] for side in (first, second)]
        return np.mean([(x < y) + (x == y) / 2 for x, y in itertools.product(*times)])

    swapped = [
        [(y, x) if swap else (x, y) for x, y, swap in zip(a, b, swaps, strict=True)]
        for swaps in itertools.product((False, True), repeat=len(a))
    ]
    observed = sooner([*a, lone], b)
    tests = speed_tests(group_runs([*solved_after("a", *a, lone), *solved_after("b", *b)]))
    if not any((*a, *b, lone)):
        assert tests == []
        return
    (test,) = tests
    assert test.probability.estimate == pytest.approx(observed)
    permuted = [sooner([*(x for x, _ in pairs), lone], [y for _, y in pairs]) for pairs in swapped]
    centre = np.mean(permuted)
    extreme = [abs(probability - centre) >= abs(observed - centre) - 1e-9 for probability in permuted]
    assert test.test.p_value == pytest.approx(np.mean(extreme))


def test_diagnostics_by_hand():
    first = [
        row(entropy=0.6),
        row(entropy=0.5, zero_spread_groups=0.5),
        row(entropy=0.4, zero_spread_groups=math.nan),
        row(entropy=0.3, zero_spread_groups=1.0),
        row(entropy=0.2),
    ]
    second = [row(entropy=0.8, zero_spread_groups=0.25)]
    runs = [run("grpo", 0, first), run("grpo", 1, second), run("ppo", 0, [row(entropy=1234.5)]), run("silent")]
    assert table(page_of(runs), "Diagnostics") == [
        {
            "environment": "CartPole-v1",
            "algorithm": "grpo",
            "zero-spread groups": "50 % (25 % → 25 %)",  # of 0.75 and 0.25; the first run's quarters have no value
            "entropy": "0.6 (0.7 → 0.5)",  # of 0.4 and 0.8, of 0.6 and 0.8, of 0.2 and 0.8
        },
        {
            "environment": "CartPole-v1",
            "algorithm": "ppo",
            "zero-spread groups": "–",
            "entropy": "1,234 (1,234 → 1,234)",
        },
    ]
    early = [row(), *[row(clip_fraction=0.1)] * 3]
    assert table(page_of([run(rows=early)]), "Diagnostics")[0]["clip fraction"] == "0.1 (– → 0.1)"
    assert "Diagnostics" not in page_of([run()])


@pytest.mark.slow
def test_no_label_breaks_a_table():
    labels = ["a\\|b\\", "*a*\n| b |", "a\u2028b\r[a](b)`<b>"]
    runs = [run(label, environment=place, rows=[row(entropy=0.5)]) for label in labels for place in (label, "all")]
    text = page_of([*runs, run("solved", environment="all", solved=(9, 9.0))])
    assert len(text.splitlines()) == text.count("\n")  # no other line break is left
    page = tables(text)
    assert len(page) == len(labels) + 4
    for header, *rows in page:
        assert rows
        assert {len(cells) for cells in rows} == {len(header)}
    shown = [re.sub(r"\\(.)", r"\1", cells[0]) for cells in page[1][1:-1]]
    assert shown[:2] == [" ".join(name.split()) for name in labels[:2]]
    assert shown[2] == r"a\u2028b\r[a](b)`<b>"  # what is no line break in Markdown is shown as an escape


def test_number_formats():
    assert [signed(value) for value in (7e-18, -7e-18, 0.5, -2)] == ["0", "0", "+0.5", "−2"]
    expected = {26_624: "26.6k", 60_000: "60k", 999_600: "1M", 999.7: "1k", 1_500_000: "1.5M", 500: "500", 0.25: "0.25"}
    assert {value: short(value) for value in expected} == expected
    expected = {-86.44: "−86.4", 1234.5: "1,234", 0.00123: "0.00123", 500.0: "500", 4.712: "4.71", -3.0: "−3"}
    assert {value: number(value) for value in expected} == expected


# Files


def read(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_tables_are_read_back(tmp_path):
    label = 'grpo-fast:groups=2,"x"|y'
    rows = [row(0, 0.0, 20.5, 10.0), row(2048, 0.25, 490.0, 480.0), row(4096, 0.5, 480.0, 470.125)]
    runs = [run(label, 3, rows, solved=(2048, 0.25)), run("ppo", 0, rows), run("ppo", 1, rows[:2])]
    text = write_comparison(tmp_path, [replace(one, environment="ALE/Pong-v5") for one in runs], starts=20)
    assert {path.name for path in tmp_path.iterdir()} == {"ALE-Pong-v5.png", "runs.csv", "curves.csv", "comparison.md"}
    assert (tmp_path / "ALE-Pong-v5.png").read_bytes().startswith(b"\x89PNG")
    assert re.findall(r"\]\((.*)\)", text) == ["ALE-Pong-v5.png"]
    assert plot_file_name("../ALE:Pong-v5") == "ALE-Pong-v5.png"
    assert (tmp_path / "comparison.md").read_text(encoding="utf-8") == text
    first, second, _ = read(tmp_path / "runs.csv")
    assert first == {
        "environment": "ALE/Pong-v5",
        "algorithm": label,
        "seed": "3",
        "final_greedy_return": "480",
        "final_sampled_return": "470.125",
        "best_greedy_return": "490",
        "solved": "yes",
        "steps_to_solve": "2048",
        "cpu_seconds_to_solve": "0.25",
        "env_steps": "4096",
        "cpu_seconds": "0.5",
    }
    assert (second["solved"], second["steps_to_solve"], second["cpu_seconds_to_solve"]) == ("no", "", "")
    lines = read(tmp_path / "curves.csv")
    assert len(lines) == 4 * 3 + 4 * 2  # of two axes and two measures; one of two runs ended after two rows
    chosen = [line for line in lines if line["algorithm"] == label and line["measure"] == "greedy_return"]
    assert [(line["axis"], line["x"], line["mean"], line["low"], line["high"]) for line in chosen] == [
        (axis, x, mean, "", "")  # one run has no interval
        for axis, times in (("env_steps", ("0", "2048", "4096")), ("cpu_seconds", ("0", "0.25", "0.5")))
        for x, mean in zip(times, ("20.5", "490", "480"), strict=True)
    ]
    last = [line for line in lines if line["algorithm"] == "ppo"][-1]
    assert (last["x"], last["mean"], last["low"], last["high"]) == ("0.25", "480", "480", "480")


def test_without_matplotlib_the_tables_are_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="matplotlib"):
        write_comparison(tmp_path, [run()], starts=20)
    assert {path.name for path in tmp_path.iterdir()} == {"runs.csv", "curves.csv", "comparison.md"}


# Plots


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """A function that plots the runs of one environment and returns the figure, laid out."""

    def draw(runs):
        figures = []
        monkeypatch.setattr(plot, "save_figure", lambda figure, path: figures.append(figure))
        write_comparison(tmp_path, runs, starts=20)
        figures[0].draw_without_rendering()
        return figures[0]

    return draw


def curve_rows(seconds, *returns):
    return [row(1000 * place, seconds * place, value, value / 2) for place, value in enumerate(returns)]


def test_a_plot_shows_means_bands_and_the_threshold(drawn):
    runs = [run("grpo", seed, curve_rows(0.1, 20, 100 + seed, 500)) for seed in range(4)]
    runs += [run("ppo", 0, curve_rows(0.2, 20, 400, 500))]
    figure = drawn(runs)
    assert len(figure.axes) == 4
    panels = [
        (axis, measure) for measure in ("greedy_return", "sampled_return") for axis in ("env_steps", "cpu_seconds")
    ]
    for axes, (axis, measure) in zip(figure.axes, panels, strict=True):
        curve = mean_curve(runs[:4], axis, measure)
        np.testing.assert_array_equal(axes.lines[0].get_xdata(), curve.x)
        np.testing.assert_array_equal(axes.lines[0].get_ydata(), curve.mean.estimate)
        assert axes.lines[2].get_ydata() == [475, 475]
        assert len(axes.collections) == 1  # a band for four runs, none for one
        assert axes.get_xscale() == "linear"
    names = [text.get_text().strip() for text in figure.legends[0].get_texts()]
    assert names == ["grpo (4 runs)", "ppo (1 run)", "solved: 475"]
    check_legend(figure)


@pytest.mark.slow
def test_very_different_cpu_seconds_have_a_logarithmic_axis(drawn):
    figure = drawn([run("grpo", 0, curve_rows(0.1, 20, 500)), run("ppo", 0, curve_rows(2.0, 20, 500))])
    assert [axes.get_xscale() for axes in figure.axes] == ["linear", "log"] * 2


LONG_LABELS = ["a" * 150, *(f"b{':c-d=e' * n}" for n in range(20, 25))]


@pytest.mark.slow
def test_a_long_legend(drawn):
    figure = drawn([run(label, rows=curve_rows(1.0, 20, 500)) for label in LONG_LABELS])
    assert len(figure.legends[0].get_texts()) == len(LONG_LABELS) + 1
    check_legend(figure)


def check_legend(figure):
    """It is below the panels and inside the figure."""
    legend = figure.legends[0].get_window_extent()
    assert legend.x0 >= 0
    assert legend.y0 >= 0
    assert legend.x1 <= figure.bbox.width
    assert legend.y1 <= min(axes.get_tightbbox().y0 for axes in figure.axes)
    assert all(axes.get_window_extent().height > 350 for axes in figure.axes)
