"""What displays share: the time left, the current activity, and the completions that are shown."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from rich.cells import cell_len

from groupwise.plots import axis_range
from groupwise.training.display.base import Activity, Display, format_elapsed, shorten_start
from groupwise.training.display.samples import choose_samples
from tests.training.display.samples import FACTS, ManualClock, evaluation


def spend(display, clock, step, seconds, evaluated=None):
    """A step of some seconds, and perhaps an evaluation."""
    clock.time += seconds
    display.step(step, {})
    if evaluated is not None:
        clock.time += evaluated
        display.evaluation(step, evaluation(0.5))


def test_the_time_left_includes_evaluations():
    clock = ManualClock()
    display = Display(clock)
    display.start(replace(FACTS, steps=25, evaluate_every=10))
    clock.time += 100
    display.evaluation(0, evaluation(0.25))
    for step in range(1, 10):
        spend(display, clock, step, 2)
    assert display.seconds_left() == pytest.approx(16 * 2 + 3 * 100)  # after steps 10, 20 and 25
    clock.time += 2
    display.step(10, {})
    assert display.seconds_left() == pytest.approx(15 * 2 + 3 * 100)
    clock.time += 60  # the evaluation is running
    assert display.seconds_left() == pytest.approx(15 * 2 + 3 * 100 - 60)
    clock.time += 540  # much longer than the first one
    assert display.seconds_left() == pytest.approx(15 * 2 + 2 * 100)
    display.evaluation(10, evaluation(0.5))
    assert display.seconds_left() == pytest.approx(15 * 2 + 2 * 350)
    for step in range(11, 26):
        spend(display, clock, step, 2)
    assert display.seconds_left() == pytest.approx(350)  # the last evaluation
    display.evaluation(25, evaluation(0.5))
    assert display.seconds_left() == 0


def test_the_time_of_a_run_includes_what_precedes_its_start():
    """Such as SFT. A trainer may be made long before it runs."""
    clock = ManualClock()
    display = Display(clock)
    clock.time += 1000
    with display:
        clock.time += 60
        display.start(FACTS)
        assert clock.time - display._began == 60
        assert display._mark == clock.time
    alone = Display(clock)
    clock.time += 1000
    alone.start(FACTS)
    assert alone._began == clock.time


def test_the_time_left_without_evaluations():
    clock = ManualClock()
    display = Display(clock)
    display.start(replace(FACTS, steps=10, metric=None, evaluate_every=2))
    spend(display, clock, 1, 3)
    spend(display, clock, 2, 5)
    assert display.seconds_left() == pytest.approx(8 * 4)
    clock.time += 1
    assert display.seconds_left() == pytest.approx(8 * 4 - 1)
    clock.time += 100
    assert display.seconds_left() == pytest.approx(7 * 4)  # a slow step does not eat up the others


TIMES = " · stage: 6 s, about 18 s left"


@pytest.mark.parametrize(
    ("activity", "seconds", "text"),
    [
        (Activity("saving"), 0, "saving"),
        (Activity("saving"), 61, "saving · stage: 1 min 01 s"),
        (Activity("evaluating", 0, 256, 512, "rows"), 1, "evaluating · 256 of 512 rows"),
        (Activity("x", 0, 128, 512, "rows"), 12, "x · 128 of 512 rows · stage: 12 s, about 36 s left"),
        (Activity("evaluating", 0, 0, 5120, "rows"), 12, "evaluating · 0 of 5,120 rows · stage: 12 s"),
        (Activity("sampling", 0, 1, 4, "completions", False), 12, "sampling · 1 of 4 completions · stage: 12 s"),
        (Activity("x", 0, 1.999, 8, "rows", detail="9 tokens"), 6, "x · 24 % of 8 rows, 9 tokens" + TIMES),
        (Activity("evaluating", 0, 8.0, 8, "rows", detail="9 tokens"), 0, "evaluating · 100 % of 8 rows, 9 tokens"),
        (Activity("downloading x", 0, 15_400_000, 145_000_000, "bytes"), 1, "downloading x · 15 of 145 MB"),
    ],
)  # fmt: skip
def test_activities(activity, seconds, text):
    assert activity.describe(float(seconds)) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0 s"),
        (59.9, "59 s"),
        (60, "1 min 00 s"),
        (80, "1 min 20 s"),
        (3599, "59 min 59 s"),
        (11_100, "3 h 05 min"),
    ],
)
def test_elapsed_times(seconds, text):
    assert format_elapsed(seconds) == text


@pytest.mark.parametrize(
    ("text", "width"), [("short", 5), ("a long prompt", 6), ("日本語のプロンプト", 7), ("é" * 9, 1)]
)
def test_the_end_of_a_text(text, width):
    end = shorten_start(text, width)
    assert cell_len(end) <= width
    assert text.endswith(end.removeprefix("…"))
    assert (end == text) == (cell_len(text) <= width)


# --- the completions that are shown ---


def test_the_best_and_the_worst_of_the_most_telling_group():
    prompts = ["one", [{"role": "system", "content": "be short"}, {"role": "user", "content": "two"}], "three"]
    texts = [f"{prompt}.{sample}" for prompt in range(3) for sample in range(4)]
    rewards = [0.5, 0.5, 0.5, 0.5, 0.25, math.nan, 1.0, 0.0, 0.0, 0.5, 0.5, 0.0]
    chosen = choose_samples(prompts, texts, rewards, 2)
    assert [tuple(sample) for sample in chosen] == [("two", "1.2", 1.0), ("two", "1.3", 0.0)]
    assert [sample.completion for sample in choose_samples(prompts, texts, rewards, 3)] == ["1.2", "1.0", "1.3"]
    assert [sample.completion for sample in choose_samples(prompts, texts, rewards, 9)] == ["1.2", "1.0", "1.3"]
    assert [sample.completion for sample in choose_samples(prompts, texts, rewards, 1)] == ["1.2"]
    assert choose_samples(prompts, texts, rewards, 0) == []


@pytest.mark.parametrize("rewards", [[], [math.nan] * 4])
def test_no_completion_has_a_reward(rewards):
    assert choose_samples(["a", "b"] if rewards else [], ["x"] * len(rewards), rewards, 2) == []


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ([{"content": [{"type": "text", "text": "part"}, {"type": "text", "text": "s"}]}], "parts"),
        ([{"content": [{"type": "text", "text": "part"}, {"type": "image"}, "odd"]}], ""),
        ([{"role": "user", "content": None}], ""),
        ({"content": "one message"}, "one message"),
        ([], ""),
        (7, ""),
    ],
)
def test_prompts_of_any_shape(prompt, text):
    (sample,) = choose_samples([prompt], ["x"], [1.0], 2)
    assert sample.prompt == text


# --- axes ---


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ((0.25, 0.25), False, (0.2, 0.3)),
        ((0.25, 0.25 + 1e-16), True, (0.2, 0.3)),
        ((0.0, 0.0), True, (0.0, 1.0)),
        ((-1e-17, 1e-17), False, (-1.0, 1.0)),
        ((1.0, 1.0), True, (0.8, 1.0)),
        ((-40.0, -40.0), False, (-48.0, -32.0)),
        ((100.0, 100.01), False, (100.0, 100.01)),
        ((0.2, 0.3), True, (0.2, 0.3)),
    ],
)
def test_a_constant_gets_a_readable_axis(values, share, expected):
    assert axis_range(*values, share) == pytest.approx(expected)
