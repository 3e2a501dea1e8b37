"""What is shown of a run: the numbers are there, every line fits the terminal, and odd metrics break nothing."""

from __future__ import annotations

import io
import math
import os
import pty
import re
import select
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from groupwise.training.display.base import Display, LineDisplay, RunFacts, make_display
from groupwise.training.display.chart import Chart
from groupwise.training.display.live import LiveDisplay

FACTS = RunFacts(
    name="quiz [bold]x[/]",
    model="smollm2-135m",
    parameters=134_515_008,
    device="cpu",
    algorithm="dapo",
    steps=300,
    metric="accuracy",
    folder="runs/quiz",
    goal=0.8,
)

METRICS = {
    "reward": 0.4123,
    "reward_std": 0.31,
    "entropy": 1.234,
    "kl": 0.0004,
    "clip_ratio/region_mean": 0.0123,
    "frac_reward_zero_std": 0.125,
    "completions/mean_length": 1205.34,
    "completions/clipped_ratio": 0.0712,
    "grad_norm": 0.77,
    "learning_rate": 1e-6,
    "tokens_per_second": 1830.4,
    "memory/sample": 3.0,
    "memory/train": 61.25,
    "step_time": 0.9,
}


OFFLINE = {  # what a step of DPO on a data set reports: nothing was sampled
    "preference/weight": 1.0,
    "preference/pairs": 16.0,
    "preference/margin": 0.5231,
    "preference/accuracy": 0.71,
    "grad_norm": 6.2,
    "learning_rate": 1e-6,
    "tokens_per_second": 0.0,
    "num_tokens": 0.0,
    "step_time": 1.5,
}
DPO = replace(FACTS, algorithm="dpo", steps=36, metric="preference_accuracy", goal=None)


class Time:
    """A clock that is set by hand."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def evaluation(value, width=0.04):
    return {"accuracy": value, "accuracy_low": value - width, "accuracy_high": value + width, "length": 5}


# --- lines ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def timer():
    return Time()


@pytest.fixture
def stream():
    return io.StringIO()


@pytest.fixture
def lines(stream, timer):
    display = LineDisplay(stream, timer)
    display.start(FACTS)
    stream.truncate(0)
    stream.seek(0)
    return display


def test_the_first_lines_say_what_is_run(stream, timer):
    LineDisplay(stream, timer).start(FACTS, first_step=40)
    assert stream.getvalue() == (
        "quiz [bold]x[/] · smollm2-135m (135 M weights) on cpu · dapo · 300 steps · runs/quiz\ngoing on after step 40\n"
    )


def test_a_line_has_the_numbers(lines, stream, timer):
    lines.evaluation(10, evaluation(0.451))
    for step in range(1, 13):
        timer.now += 2
        lines.step(step, METRICS)
    assert stream.getvalue().splitlines()[-1] == (
        "step  12/300 · reward  0.412 ±0.31 · accuracy 45.1 % (held out, step 10) · equal groups  12 % · "
        "length 1205.3 ·   1,830 tokens/s ·   0.9 s · left 10 min"
    )
    assert len(stream.getvalue().splitlines()) == 13


def test_lines_are_aligned(lines, stream, timer):
    for step, reward, speed in ((1, 0.5, 9.0), (99, -0.125, 12_345.0), (100, 1.0, 700.0)):
        timer.now += 2
        lines.step(step, {**METRICS, "reward": reward, "tokens_per_second": speed})
    places = {tuple(match.start() for match in re.finditer("·", line)) for line in stream.getvalue().splitlines()}
    assert len(places) == 1


def test_what_is_missing_is_left_out(lines, stream, timer):
    lines.step(1, {})
    timer.now += 2.5
    lines.step(2, {"reward": math.nan, "reward_std": None, "kl": "x", "tokens_per_second": torch.ones(2)})
    assert stream.getvalue().splitlines() == [
        "step   1/300 ·   0.0 s",
        "step   2/300 · reward    nan ·   2.5 s · left 6 min",
    ]


def test_a_step_with_pairs_tells_of_them(lines, stream, timer):
    timer.now += 2
    lines.step(1, {**METRICS, "preference/pairs": 64.0, "preference/margin": -0.5, "preference/accuracy": 1.0})
    assert stream.getvalue().splitlines()[-1] == (
        "step   1/300 · reward  0.412 ±0.31 · equal groups  12 % · length 1205.3 · pairs  64 · margin -0.500 · "
        "preferred 100 % ·   1,830 tokens/s ·   0.9 s · left 10 min"
    )


def test_a_step_without_answers_has_no_reward_and_no_speed(stream, timer):
    display = LineDisplay(stream, timer)
    display.start(DPO)
    display.evaluation(0, {"preference_accuracy": 0.5, "preference_accuracy_low": 0.5, "preference_accuracy_high": 0.5})
    for step in (1, 2):
        timer.now += 2
        display.step(step, {**OFFLINE, "preference/margin": OFFLINE["preference/margin"] * (step - 1)})
    assert stream.getvalue().splitlines()[1:] == [
        "step  0/36 · held out: preference_accuracy 50.0 % (50.0 % to 50.0 %)",
        "step  1/36 · preference_accuracy 50.0 % (held out, step 0) · pairs  16 · margin  0.000 · preferred  71 % · "
        "  1.5 s · left 70 s",
        "step  2/36 · preference_accuracy 50.0 % (held out, step 0) · pairs  16 · margin  0.523 · preferred  71 % · "
        "  1.5 s · left 68 s",
    ]


def test_held_out_pairs_are_told_beside_the_tasks_own_metric(lines, stream):
    lines.evaluation(1, {**evaluation(0.25), "preference_accuracy": 0.625})
    lines.evaluation(2, {"eval/accuracy": 0.5, "eval/preference_accuracy": 0.75})
    assert stream.getvalue().splitlines() == [
        "step   1/300 · held out: accuracy 25.0 % (21.0 % to 29.0 %); preferred 62.5 %",
        "step   2/300 · held out: accuracy 50.0 %, +25.0 points since the first; preferred 75.0 %",
    ]


def test_quick_steps_share_a_line(lines, stream, timer):
    for step in range(1, 301):
        timer.now += 0.125
        lines.step(step, {"reward": 1.0})
    steps = [int(line.split("/")[0].split()[1]) for line in stream.getvalue().splitlines()]
    assert steps == [*range(1, 300, 8), 300]
    assert "left" not in stream.getvalue().splitlines()[-1]


def test_a_line_every_so_many_steps(stream, timer):
    """Not by the second then, unless the steps are so slow that somebody might think the run has died."""
    display = LineDisplay(stream, timer)
    display.start(replace(FACTS, log_every=10))
    for step in range(1, 26):
        timer.now += 2.0 if step <= 20 else 30.0
        display.step(step, METRICS)
    told = [int(line.split("/")[0].split()[1]) for line in stream.getvalue().splitlines()[1:]]
    assert told == [1, 10, 20, 21, 22, 23, 24, 25]


def test_evaluations_are_always_told(lines, stream, timer):
    lines.step(1, {"reward": 1.0})
    lines.evaluation(1, evaluation(0.25))
    lines.evaluation(2, {"eval/accuracy": 0.5})
    lines.evaluation(3, {"eval/other": 1.5})
    lines.evaluation(4, {})
    timer.now += 0.5
    lines.step(5, {"reward": 1.0})
    assert stream.getvalue().splitlines()[1:] == [
        "step   1/300 · held out: accuracy 25.0 % (21.0 % to 29.0 %)",
        "step   2/300 · held out: accuracy 50.0 %, +25.0 points since the first",
        "step   3/300 · held out: other 1.5",
        "step   4/300 · held out: nothing measured",
    ]


def test_evaluations_do_not_keep_steps_from_being_told(lines, stream, timer):
    for step in range(1, 5):
        timer.now += 0.5
        lines.evaluation(step, evaluation(0.5))
        lines.step(step, {"reward": 1.0})
    assert sum("reward" in line for line in stream.getvalue().splitlines()) == 2


def test_a_metric_that_is_no_share_is_written_as_a_number(stream, timer):
    display = LineDisplay(stream, timer)
    display.start(RunFacts("a", "b", 1, "cpu", "grpo", 5, "score", "c"))
    display.evaluation(0, {"score": 0.5})
    display.evaluation(1, {"score": 0.25})
    assert stream.getvalue().endswith("held out: score 0.250, -0.250 since the first\n")
    display = LineDisplay(stream, timer)
    display.start(FACTS)
    display.evaluation(0, {"accuracy": 45.0})  # somebody's own, in percent already
    assert stream.getvalue().endswith("held out: accuracy 45.000\n")


def test_the_last_step_of_a_run_that_ends_early_is_told(lines, stream, timer):
    lines.step(1, {"reward": 1.0})
    timer.now += 0.1
    with lines:
        lines.step(2, {"reward": 2.0})
    lines.close()
    assert [line.split(" · ")[0] for line in stream.getvalue().splitlines()] == ["step   1/300", "step   2/300"]


def test_notices_stages_and_the_end(stream, timer):
    display = LineDisplay(stream, timer)
    display.stage("warm-up 1 of 9")
    display.stage("warm-up 2 of 9")
    timer.now += 30
    display.stage("warm-up 8 of 9")
    display.start(FACTS)
    display.stage("evaluating")
    timer.now += 30
    display.stage("evaluating: 512 of 9000")
    display.say("the reward [b]fails[/b]")
    display.finish(["done", ("before", "1 %"), ("afterwards", "20 %", "good")])
    told = stream.getvalue().splitlines()
    assert told[:2] == ["warm-up 1 of 9", "warm-up 8 of 9"]
    assert told[3:] == [
        "step   0/300 · evaluating: 512 of 9000",
        "the reward [b]fails[/b]",
        "done",
        "before      1 %",
        "afterwards  20 %  good",
    ]


def test_a_stream_that_cannot_write_letters_or_is_gone_does_not_stop_a_run(timer):
    raw = io.BytesIO()
    ascii_only = io.TextIOWrapper(raw, encoding="ascii")
    display = LineDisplay(ascii_only, timer)
    display.start(FACTS)
    display.step(1, METRICS)
    assert b"step   1/300 ? reward  0.412 ?0.31" in raw.getvalue()
    ascii_only.close()
    display.step(2, METRICS)
    display.finish(["done"])


def test_lines_go_to_the_standard_output_by_default(capsys):
    LineDisplay().say("here")
    assert capsys.readouterr().out == "here\n"


def test_time_left_is_told_from_recent_steps(lines, timer):
    assert lines.seconds_left() is None
    for step in range(1, 101):
        timer.now += 10
        lines.step(step, {})
    for step in range(101, 121):
        timer.now += 0.5
        lines.step(step, {})
    assert lines.seconds_left() == pytest.approx(0.5 * 180)
    lines.step(300, {})
    assert lines.seconds_left() == 0
    assert Display().seconds_left() is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (99.0, "99 s"), (100, "2 min"), (3600, "60 min"), (7185, "2 h 00 min"), (90_060, "25 h 01 min")],
)
def test_durations(lines, stream, timer, seconds, text):
    timer.now += seconds
    lines.step(150, {})
    assert stream.getvalue().endswith(f" · left {text}\n")


# --- the panel --------------------------------------------------------------------------------------------------------


def run_of(display, timer, steps=120, every=20):
    rng = np.random.default_rng(0)
    for step in range(steps + 1):
        if step % every == 0:
            display.evaluation(step, evaluation(0.25 + 0.5 * step / 300))
        if step:
            timer.now += 0.9
            display.step(step, {**METRICS, "reward": 0.4123 if step == steps else step / 300 + rng.normal() / 20})


def picture(display, width, height=24, **options):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height, **options)
    console.print(display)
    return console.file.getvalue()


def live(width=80, height=24, timer=None):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height)
    return LiveDisplay(console, timer or Time())


@pytest.fixture
def panel(timer):
    with live(timer=timer) as display:
        display.start(FACTS)
        yield display


@pytest.mark.parametrize(("width", "height"), [(80, 24), (140, 24), (140, 50), (74, 24), (73, 40), (40, 60), (200, 18)])
def test_the_panel_fits_and_holds_the_numbers(panel, timer, width, height):
    run_of(panel, timer)
    panel.stage("saving")
    panel.say("a warning that is very long " * 10)
    shown = picture(panel, width, height, color_system=None)
    lines = shown.splitlines()
    assert {cell_len(line) for line in lines} == {width}
    assert len(lines) < height
    expected = ["quiz [bold]x[/]", "step 120 of 300", "reward  0.412 ±0.310", "entropy", "1.234", "0.0004", "1.2 %"]
    expected += ["12 %", "1,205.3", "7.1 %", "0.770", "1.0e-06", "1,830", "61.2 GiB", "saving", "step 120: a warning"]
    expected += ["left 3 min", "45.0 %", "2 min"]
    expected += ["accuracy, held out  45.0 % +20.0", " 120 │"] if width >= 74 else []
    expected += ["smollm2-135m (135 M) · dapo", "cpu · runs/quiz"] if width >= 73 else []
    for text in expected:
        assert text in shown, text


def test_the_curves_are_drawn(panel, timer):
    run_of(panel, timer)
    lines = picture(panel, 80, color_system=None).splitlines()
    chart = [line for line in lines if re.search("[│┤].*[│┤].*[│┤]", line)]
    assert len(chart) == 8
    assert sum(line.count("●") for line in chart) == 7  # evaluations
    left = [line[line.index("┤" if "┤" in line else "│", 2) : 38] for line in chart]
    right_half = [bool(re.search("[\u2801-\u28ff]", line[16:])) for line in left]
    assert right_half[:3] == [True] * 3  # it rises to the right
    assert not any(right_half[6:])
    assert "81 % ┤" in chart[0]  # the goal is in the picture
    assert "20 % ┤" in chart[-1]  # and so is the lowest interval


def test_colours_are_used_and_markup_is_not(panel, timer):
    run_of(panel, timer)
    panel.say("[red]not red[/]")
    above = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", panel.console.file.getvalue()).splitlines()
    assert "[red]not red[/]" in [line.strip() for line in above]
    shown = picture(panel, 100)
    assert "\x1b[36m" in shown
    assert "[red]not red[/]" in shown
    assert "[bold]x[/]" in shown


def test_without_an_evaluation_the_reward_has_the_whole_width(timer):
    display = live(timer=timer)
    display.start(RunFacts("a", "b", 1, "cpu", "grpo", 5, None, "c"))
    for step in range(1, 5):
        display.step(step, {"reward": step})
    display.evaluation(4, {"accuracy": 0.5})
    shown = picture(display, 80, color_system=None)
    assert "held out" not in shown
    (axis,) = [line for line in shown.splitlines() if "└" in line]
    assert axis.count("─") > 60
    display.close()


def test_before_and_after_the_first_step(panel, timer):
    shown = picture(panel, 80, color_system=None)
    assert "comes with the first step" in shown
    assert "comes with the first evaluation" in shown
    assert "⠋ training" in shown or "training" in shown
    panel.step(1, METRICS)
    panel.evaluation(1, evaluation(0.5))
    assert "comes with" not in picture(panel, 80, color_system=None)


def test_numbers_that_were_not_measured_have_no_place(panel):
    panel.step(1, {"reward": 1.0, "entropy": 2.0})
    shown = picture(panel, 80, color_system=None)
    assert "entropy" in shown
    for label in ("KL", "clipped", "memory", "tokens/s", "learning rate"):
        assert label not in shown


@pytest.mark.parametrize(("width", "height"), [(80, 24), (74, 24), (140, 50), (50, 40)])
def test_a_run_on_pairs_alone_shows_their_margin_in_place_of_a_reward(timer, width, height):
    display = live(width, height, timer=timer)
    display.start(DPO)
    assert "reward" not in picture(display, width, height, color_system=None)
    for step in range(1, 31):
        timer.now += 1
        display.step(step, {**OFFLINE, "preference/margin": OFFLINE["preference/margin"] * step / 30})
        if step % 10 == 0:
            display.evaluation(step, {"preference_accuracy": step / 40})
    shown = picture(display, width, height, color_system=None)
    lines = shown.splitlines()
    assert {cell_len(line) for line in lines} == {width}
    assert len(lines) < height
    for text in ("margin of pairs  0.523", "└ 1 ─", "pairs", "16", "preferred", "71 %", "6.200", "1.0e-06", "75.0 %"):
        assert text in shown, text
    assert re.search("[\u2801-\u28ff]", shown)  # a curve
    for text in ("reward", "tokens/s", "comes with", "grad cosine"):
        assert text not in shown, text
    if width >= 74:
        assert "preferred, held out  75.0 % +50.0" in shown
    else:
        assert re.search("held out +pairs +preferred", shown)
    display.close()


def test_a_run_with_rewards_and_pairs_has_numbers_for_both(panel, timer):
    """The gradients are compared in some steps only: what they said last stays, also when the run is resumed."""
    pairs = {name: value for name, value in OFFLINE.items() if name.startswith("preference/")}
    run_of(panel, timer, steps=4)
    panel.step(5, {**METRICS, **pairs, "grad_cosine/grpo_preference": -0.251})
    panel.step(6, {**METRICS, **pairs})
    shown = picture(panel, 80, color_system=None)
    assert "reward  0.412 ±0.310" in shown
    assert "margin of pairs" not in shown
    assert re.search(r"pairs +margin .*\n.* 16 +0\.523 ", shown)
    assert re.search(r"preferred +grad cosine .*\n.* 71 % +-0\.25 ", shown)
    assert "1,830" in shown
    resumed = live(timer=timer)
    resumed.start(FACTS, first_step=5, past=[{"step": 5, "reward": 0.1, "grad_cosine/grpo_preference": 0.5}])
    resumed.step(6, METRICS)
    assert "+0.50" in picture(resumed, 80, color_system=None)
    resumed.close()


def test_a_resumed_run_shows_its_past(timer):
    past = [{"step": 0, "eval/accuracy": 0.25}, *({"step": step, "reward": 0.1} for step in range(1, 41))]
    display = live(timer=timer)
    display.start(FACTS, first_step=40, past=past)
    timer.now += 2
    display.step(41, {"reward": 0.5})
    display.evaluation(41, {"accuracy": 0.5})
    shown = picture(display, 80, color_system=None)
    assert "50.0 % +25.0" in shown
    assert "└ 1 ──" in shown
    assert "step 41 of 300" in shown
    assert display.seconds_left() == pytest.approx(2 * 259)
    display.close()


def test_a_reward_is_smoothed_with_all_that_came_before_at_first(panel):
    for step, reward in enumerate((1.0, 2.0, 6.0), start=1):
        panel.step(step, {"reward": reward})
    assert [smooth for _, _, smooth in panel._rewards] == pytest.approx([1.0, 1.5, 3.0])
    for step in range(4, 12):
        panel.step(step, {"reward": 3.0})
    panel.step(12, {"reward": 13.0})
    assert panel._rewards[-1][2] == pytest.approx(4.0)  # from now on a tenth is new


def test_a_long_run_keeps_a_bounded_curve(panel):
    for step in range(1, 20_001):
        panel.step(step, {"reward": step})
    assert 2000 <= len(panel._rewards) <= 4001
    assert panel._rewards[0][0] == 1
    assert picture(panel, 80, color_system=None).count(" 20000 ") == 1


odd = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.integers(-(10**400), 10**400),
    st.none(),
    st.text(max_size=3),
    st.booleans(),
    st.just(torch.ones(2)),
    st.sampled_from([0.0, 1e-320, -1e-320, 1e30, -1e30, 1e300, 5.0, 5.0 + 1e-12]),
)
odd_names = [*METRICS, *OFFLINE, "grad_cosine/grpo_preference", "accuracy", "accuracy_low", "accuracy_high"]
odd_metrics = st.dictionaries(st.sampled_from([*odd_names, "preference_accuracy"]), odd)


@settings(max_examples=60)
@given(st.lists(odd_metrics, max_size=6), st.integers(20, 150), st.integers(1, 40), odd, st.sampled_from([0, 3, 300]))
def test_odd_metrics_break_nothing(rows, width, height, goal, steps):
    goal = float(goal) if isinstance(goal, float) else None
    facts = RunFacts("a\nb", "m", 0, "", "", steps, "accuracy", "", goal)
    timer = Time()
    for display in (live(width, height, timer), LineDisplay(io.StringIO(), timer)):
        with display:
            display.start(facts)
            for step, row in enumerate(rows):
                display.evaluation(step, row)
                timer.now += 1
                display.step(step, row)
                if isinstance(display, LiveDisplay):
                    shown = picture(display, width, height, color_system=None)
                    assert all(cell_len(line) <= width for line in shown.splitlines())
            display.say("")
            display.finish([])


def test_numbers_beyond_all_measure_are_told_but_not_drawn(panel):
    for step, value in enumerate((0.25, 1.7e308, -1.7e308, math.inf, 0.75), start=1):
        panel.step(step, {"reward": value, "grad_norm": 1.7e308})
        panel.evaluation(step, {"accuracy": value})
    shown = picture(panel, 80, color_system=None)
    assert "1.7e+308" in shown
    assert "accuracy, held out  75.0 % +50.0" in shown
    assert [step for step, _, _ in panel._rewards] == [1, 5]


def test_a_chart_of_known_points():
    from rich.text import Text

    chart = Chart(10, 2, np.array([0, 7]), [0.0, 7.0], share=False)
    assert (chart.low, chart.high) == pytest.approx((-0.1, 7.1))
    chart.low, chart.high = 0.0, 7.0  # eight dots across and eight down: a step and a unit each
    chart.line(np.array([0, 7]), np.array([0.0, 7.0]), "cyan")
    chart.marks(np.array([7]), np.array([0.0]), "bold")
    lines = chart.text(Text("head")).plain.splitlines()
    assert lines == ["head", " 7.1 ┤  ⣠⠞", "-0.1 ┤⣠⠞⠁●", "     └ 0  "]


def test_a_jump_in_a_chart_is_joined():
    from rich.text import Text

    chart = Chart(10, 2, np.array([0, 7]), [0.0, 7.0], share=False)
    chart.low, chart.high = 0.0, 7.0
    chart.level(3.0, "yellow")
    chart.intervals(np.array([4]), np.array([1.0]), np.array([2.0]), "dim")
    chart.line(np.array([0, 1, 7]), np.array([0.0, 7.0, 7.0]), "cyan")
    drawn = chart.text(Text())
    assert drawn.plain.splitlines()[1:3] == [" 7.1 ┤⢸⠉⠉⠉", "-0.1 ┤⣸⠈⠆⠁"]
    styles = {drawn.plain[span.start : span.end]: span.style for span in drawn.spans}
    assert (styles["⠈"], styles["⠆"], styles["⣸"]) == ("yellow", "dim", "cyan")  # the last layer has a character


# --- on a terminal ----------------------------------------------------------------------------------------------------


def test_a_pipe_gets_lines(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert isinstance(make_display(io.StringIO()), LineDisplay)
    assert isinstance(make_display(), LineDisplay)


@pytest.mark.parametrize(
    ("environment", "kind"),
    [
        ({"TERM": "xterm-256color"}, "LiveDisplay"),
        ({"TERM": "dumb"}, "LineDisplay"),
        ({"TERM": "xterm", "PYTHONIOENCODING": "ascii"}, "LineDisplay"),
    ],
)
def test_what_a_terminal_gets(environment, kind):
    shown = on_a_terminal(
        "from groupwise.training.display.base import make_display; print(type(make_display()))", environment
    )
    assert kind in shown


RUN = """
import sys, time
from groupwise.training.display.base import *
with make_display() as display:
    display.stage("warm-up 3 of 5")
    time.sleep(0.3)
    display.start(RunFacts("quiz", "tiny", 4000, "cpu", "dapo", 40, "accuracy", "runs/quiz"))
    for step in range(1, 41):
        display.step(step, {"reward": step / 40})
        if step == 20:
            print("a reward printed [this]")
            print("and that on stderr", file=sys.stderr)
            display.say("a notice")
            time.sleep(0.3)
    display.evaluation(40, {"accuracy": 0.5})
    display.finish([("accuracy", "50 %"), "done"])
display.stage("after the end")
print(type(sys.stdout).__name__)
"""


def on_a_terminal(code, environment=()):
    """What a program writes to a terminal of 80 columns."""
    master, slave = pty.openpty()
    size = {"COLUMNS": "80", "LINES": "24", "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, **size, "TERM": "xterm-256color", **dict(environment)},
    )
    os.close(slave)
    shown, until = b"", time.monotonic() + 60
    while time.monotonic() < until:
        if select.select([master], [], [], 0.2)[0]:
            try:
                shown += os.read(master, 65536)
            except OSError:  # the other end is closed
                break
    os.close(master)
    assert process.wait(10) == 0, shown.decode()
    return shown.decode()


def test_a_whole_run_on_a_terminal():
    shown = on_a_terminal(RUN)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "warm-up 3 of 5" in plain.split("╭")[0]  # before the run is known
    assert plain.count("a reward printed [this]") == 1
    assert plain.count("and that on stderr") == 1
    assert "step 20: a notice" in plain
    assert "step 40 of 40" in plain
    assert "after the end" not in plain
    end = plain[plain.rindex("╰") :].splitlines()[1:]
    assert [line for line in end if line] == ["accuracy  50 %", "done", "TextIOWrapper"]
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is back


def test_the_cursor_comes_back_also_without_close():
    code = RUN.split("    for step")[0].replace("with make_display() as display:", "display = make_display()\nif True:")
    shown = on_a_terminal(code)
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_redrawing_and_training_do_not_wait_for_each_other(monkeypatch, timer):
    monkeypatch.setattr("groupwise.training.display.live.REFRESHES", 500)
    display = live(timer=timer)
    display.start(FACTS)

    def train():
        for step in range(1, 200):
            display.step(step, METRICS)
            display.stage(f"part {step}")
            if step % 50 == 0:
                display.evaluation(step, evaluation(0.5))
                display.say("a notice")

    worker = threading.Thread(target=train, daemon=True)
    worker.start()
    worker.join(20)
    assert not worker.is_alive()
    display.close()
    assert "step 199 of 300" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", display.console.file.getvalue())


def test_a_terminal_that_goes_away_does_not_stop_a_run(timer):
    display = live(timer=timer)
    display.console.file.close()
    display.stage("warm-up")
    display.start(FACTS)
    display.step(1, METRICS)
    display.say("a notice")
    display.finish(["done"])
