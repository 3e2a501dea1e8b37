"""The lines of a run: the numbers are there, and missing or odd metrics break nothing."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace

import pytest
import torch

from groupwise.training.display import Display, LineDisplay, RunFacts
from groupwise.training.display.base import SampleCompletion
from tests.training.display.samples import DPO, FACTS, METRICS, OFFLINE, ManualClock, evaluation


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def stream():
    return io.StringIO()


@pytest.fixture
def lines(stream, clock):
    display = LineDisplay(stream, clock)
    display.start(FACTS)
    stream.truncate(0)
    stream.seek(0)
    return display


def test_the_first_lines_describe_the_run(stream, clock):
    LineDisplay(stream, clock).start(FACTS, first_step=40)
    assert stream.getvalue() == (
        "quiz [bold]x[/] · smollm2-135m (135 M weights) on cpu · dapo · 300 steps · runs/quiz\n"
    )


def test_a_line_has_the_numbers(lines, stream, clock):
    lines.evaluation(10, evaluation(0.451))
    for step in range(1, 13):
        clock.time += 2
        lines.step(step, METRICS)
    assert stream.getvalue().splitlines()[-1] == (
        "step  12/300 · reward  0.412 ±0.31 · held-out accuracy 45.1 % (step 10) · equal groups  12 % · "
        "length 1205.3 ·   1,830 tokens/s ·   0.9 s/step · run: 24 s, about 9 min 36 s left"
    )
    assert len(stream.getvalue().splitlines()) == 13


def test_a_reward_and_a_held_out_reward_are_told_apart(stream, clock):
    display = LineDisplay(stream, clock)
    display.start(replace(FACTS, metric="reward"))
    display.evaluation(0, {"reward": 0.25})
    display.step(1, {"reward": 0.5})
    clock.time += 2
    display.evaluation(1, {"reward": 0.75})
    display.step(2, {"reward": 0.625})
    rows = [line for line in stream.getvalue().splitlines() if "/300 · reward" in line]
    assert [row.split(" · ")[1:3] for row in rows] == [
        ["reward  0.500", "held out  0.250 (before training)"],
        ["reward  0.625", "held out  0.750 (step 1)"],
    ]


def test_the_step_that_runs_is_named(lines, stream, clock):
    for step in (1, 2):
        lines.begin_step(step)
        lines.stage("sampling")
        clock.time += 30
        lines.stage("updating")
        lines.step(step, {})
        clock.time += 30
        lines.stage("saving")
    shown = [tuple(line.split(" · ")[:2]) for line in stream.getvalue().splitlines() if "run:" not in line]
    assert shown == [
        ("step   1/300", "updating"),
        ("step   1/300", "saving"),
        ("step   2/300", "updating"),
        ("step   2/300", "saving"),
    ]


def test_lines_are_aligned(lines, stream, clock):
    for step, reward, speed in ((1, 0.5, 9.0), (99, -0.125, 12_345.0), (100, 1.0, 700.0)):
        clock.time += 2
        lines.step(step, {**METRICS, "reward": reward, "tokens_per_second": speed})
    places = {tuple(match.start() for match in re.finditer("·", line)) for line in stream.getvalue().splitlines()}
    assert len(places) == 1


def test_missing_metrics_are_left_out(lines, stream, clock):
    lines.step(1, {})
    clock.time += 2.5
    lines.step(2, {"reward": math.nan, "reward_std": None, "kl": "x", "tokens_per_second": torch.ones(2)})
    assert stream.getvalue().splitlines() == [
        "step   1/300 · run: 0 s, about 0 s left",
        "step   2/300 · reward    nan · run: 2 s, about 6 min 12 s left",
    ]


def test_a_step_with_pairs(lines, stream, clock):
    clock.time += 2
    lines.step(1, {**METRICS, "preference/pairs": 64.0, "preference/margin": -0.5, "preference/accuracy": 1.0})
    assert stream.getvalue().splitlines()[-1] == (
        "step   1/300 · reward  0.412 ±0.31 · equal groups  12 % · length 1205.3 · pairs  64 · margin -0.500 · "
        "preferred 100 % ·   1,830 tokens/s ·   0.9 s/step · run: 2 s, about 9 min 58 s left"
    )


def test_a_step_without_sampling_has_no_reward_and_no_speed(stream, clock):
    display = LineDisplay(stream, clock)
    display.start(DPO)
    display.evaluation(0, {"preference_accuracy": 0.5, "preference_accuracy_low": 0.5, "preference_accuracy_high": 0.5})
    for step in (1, 2):
        clock.time += 2
        display.step(step, {**OFFLINE, "preference/margin": OFFLINE["preference/margin"] * (step - 1)})
    assert stream.getvalue().splitlines()[1:] == [
        "before training · held out: preference_accuracy 50.0 % (50.0 % to 50.0 %)",
        "step  1/36 · held-out preference_accuracy 50.0 % (before training) · pairs  16 · margin  0.000 · "
        "preferred  71 % ·   1.5 s/step · run: 2 s, about 1 min 10 s left",
        "step  2/36 · held-out preference_accuracy 50.0 % (before training) · pairs  16 · margin  0.523 · "
        "preferred  71 % ·   1.5 s/step · run: 4 s, about 1 min 08 s left",
    ]


def test_held_out_pairs_are_shown_beside_the_tasks_metric(lines, stream):
    lines.evaluation(1, {**evaluation(0.25), "preference_accuracy": 0.625})
    lines.evaluation(2, {"accuracy": 0.5, "preference_accuracy": 0.75})
    assert stream.getvalue().splitlines() == [
        "step   1/300 · held out: accuracy 25.0 % (21.0 % to 29.0 %); preferred 62.5 %",
        "step   2/300 · held out: accuracy 50.0 %, +25.0 points since the first; preferred 75.0 %",
    ]


def test_quick_steps_share_a_line(lines, stream, clock):
    for step in range(1, 301):
        clock.time += 0.125
        lines.step(step, {"reward": 1.0})
    steps = [int(line.split("/")[0].split()[1]) for line in stream.getvalue().splitlines()]
    assert steps == [*range(1, 300, 8), 300]
    assert " left" not in stream.getvalue().splitlines()[-1]


def test_log_every(stream, clock):
    """Slow steps get a line each, so that the run does not look dead."""
    display = LineDisplay(stream, clock)
    display.start(replace(FACTS, log_every=10))
    for step in range(1, 26):
        clock.time += 2.0 if step <= 20 else 30.0
        display.step(step, METRICS)
    steps = [int(line.split("/")[0].split()[1]) for line in stream.getvalue().splitlines()[1:]]
    assert steps == [1, 10, 20, 21, 22, 23, 24, 25]


def test_evaluations_are_always_shown(lines, stream, clock):
    lines.step(1, {"reward": 1.0})
    lines.evaluation(1, evaluation(0.25))
    lines.evaluation(2, {"accuracy": 0.5})
    lines.evaluation(3, {"other": 1.5})
    lines.evaluation(4, {})
    clock.time += 0.5
    lines.step(5, {"reward": 1.0})
    assert stream.getvalue().splitlines()[1:] == [
        "step   1/300 · held out: accuracy 25.0 % (21.0 % to 29.0 %)",
        "step   2/300 · held out: accuracy 50.0 %, +25.0 points since the first",
        "step   3/300 · held out: other 1.5",
        "step   4/300 · held out: nothing measured",
    ]


def test_evaluations_do_not_delay_the_lines_of_steps(lines, stream, clock):
    for step in range(1, 5):
        clock.time += 0.5
        lines.evaluation(step, evaluation(0.5))
        lines.step(step, {"reward": 1.0})
    assert sum("reward" in line for line in stream.getvalue().splitlines()) == 2


def test_a_metric_that_is_not_a_share_is_shown_as_a_number(stream, clock):
    display = LineDisplay(stream, clock)
    display.start(RunFacts("a", "b", 1, "cpu", "grpo", 5, "score", "c"))
    display.evaluation(0, {"score": 0.5})
    display.evaluation(1, {"score": 0.25})
    assert stream.getvalue().endswith("held out: score 0.250, -0.250 since the first\n")
    display = LineDisplay(stream, clock)
    display.start(FACTS)
    display.evaluation(0, {"accuracy": 45.0})  # a custom metric, already in percent
    assert stream.getvalue().endswith("held out: accuracy 45.000\n")


def test_the_last_step_of_a_run_that_ends_early_is_shown(lines, stream, clock):
    lines.step(1, {"reward": 1.0})
    clock.time += 0.1
    with lines:
        lines.step(2, {"reward": 2.0})
    lines.close()
    assert [line.split(" · ")[0] for line in stream.getvalue().splitlines()] == ["step   1/300", "step   2/300"]


def test_notices_stages_and_the_end(stream, clock):
    display = LineDisplay(stream, clock)
    display.stage("warm-up 1 of 9")
    display.stage("warm-up 2 of 9")
    clock.time += 30
    display.stage("warm-up 8 of 9")
    display.start(FACTS)
    display.stage("evaluating")
    clock.time += 30
    display.stage("evaluating: 512 of 9000")
    display.say("the reward [b]fails[/b]")
    display.finish(["done", ("before", "1 %"), ("afterwards", "20 %", "good")])
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["warm-up 1 of 9", "warm-up 8 of 9"]
    assert lines[3:] == [
        "before training · evaluating: 512 of 9000",
        "the reward [b]fails[/b]",
        "done",
        "before      1 %",
        "afterwards  20 %  good",
    ]


def test_the_activities_of_a_start_and_of_slow_steps_get_a_line(stream, clock):
    display = LineDisplay(stream, clock)
    for text in ("loading PyTorch", "loading transformers", "reading rows"):
        display.stage(text)
        clock.time += 3
    display.stage("reading rows")
    display.start(FACTS)
    clock.time += 1
    for seconds in (60, 0.2, 0.2):
        display.stage("sampling")
        clock.time += seconds
        display.stage("scoring: judge")
        clock.time += seconds
        display.step(display._step + 1, {})
    texts = [line.split(" · ")[-1] for line in stream.getvalue().splitlines()]
    assert texts[:3] == ["loading PyTorch", "loading transformers", "reading rows"]
    assert texts[4:6] == ["sampling", "scoring: judge"]
    assert len(texts) == 7  # the quick steps that follow within a second have none


def test_a_long_activity_tells_its_progress(lines, stream, clock):
    lines.step(1, {})
    clock.time += 1
    for done in range(0, 100, 10):
        lines.progress("evaluating", done, 100, "rows")
        clock.time += 5
    assert stream.getvalue().splitlines()[1:] == [
        "step   1/300 · evaluating · 40 of 100 rows · stage: 20 s, about 30 s left",
        "step   1/300 · evaluating · 80 of 100 rows · stage: 40 s, about 10 s left",
    ]


def test_activities_may_be_left_out(stream, clock):
    display = LineDisplay(stream, clock, activities=False)
    display.stage("loading PyTorch")
    display.progress("evaluating", 1, 2)
    display.say("a notice")
    assert stream.getvalue() == "a notice\n"


def test_completions_are_printed_with_evaluations(lines, stream):
    lines.evaluation(0, evaluation(0.25))
    lines.samples([SampleCompletion("x" * 99, "y\n\x1b" * 99, 1.0), SampleCompletion("Which?", "", -0.5)])
    lines.step(1, METRICS)
    lines.evaluation(1, evaluation(0.5))
    shown = stream.getvalue().splitlines()
    assert len(shown) == 5
    assert shown[-2].startswith("  sample · reward  1.000 · …xxx")
    assert shown[-2].endswith("x → " + "y \\x1b" * 11 + "y \\x1…")
    assert shown[-1] == "  sample · reward -0.500 · Which? → (empty)"


def test_an_ascii_stream_and_a_closed_stream_do_not_stop_a_run(clock):
    raw = io.BytesIO()
    ascii_only = io.TextIOWrapper(raw, encoding="ascii")
    display = LineDisplay(ascii_only, clock)
    display.start(FACTS)
    display.step(1, METRICS)
    assert b"step   1/300 - reward  0.412 +/-0.31" in raw.getvalue()
    ascii_only.close()
    display.step(2, METRICS)
    display.finish(["done"])


def test_time_left_is_estimated_from_recent_steps(lines, clock):
    assert lines.seconds_left() is None
    for step in range(1, 101):
        clock.time += 10
        lines.step(step, {})
    for step in range(101, 121):
        clock.time += 0.5
        lines.step(step, {})
    assert lines.seconds_left() == pytest.approx(0.5 * 180)
    lines.step(300, {})
    assert lines.seconds_left() == 0
    assert Display().seconds_left() is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.0, "59 s"),
        (99.0, "1 min 39 s"),
        (720, "12 min"),
        (3600, "1 h 00 min"),
        (7185, "2 h 00 min"),
        (90_060, "25 h 01 min"),
    ],
)
def test_durations(lines, stream, clock, seconds, text):
    clock.time += seconds
    lines.step(150, {})
    assert stream.getvalue().endswith(f", about {text} left\n")
