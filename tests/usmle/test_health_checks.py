"""The health checks for multiple choice."""

from __future__ import annotations

import pytest

from groupwise.training.monitor.checks import WINDOW
from groupwise.training.monitor.health_checks import HealthChecks
from groupwise.usmle.health_checks import HEALTH_CHECKS
from tests.training.factories import short_recipe

LETTERS = {"letters/A": 0.7, "letters/B": 0.3}


def warned(rows, settings=None):
    """The messages by the warnings' names."""
    checks, recipe = HealthChecks("accuracy", HEALTH_CHECKS), short_recipe(settings)
    messages = {}
    for step, row in enumerate(rows, 1):
        messages |= checks.observe(step, row, recipe)
    return messages


@pytest.mark.parametrize(
    ("name", "metrics", "parts"),
    [
        # 10 steps of 2 × 1 questions: two standard errors are 2 · √(0.25 · 0.75 / 20) = 0.1936.
        ("below_chance", {"accuracy": 0.05, "chance": 0.25}, ["5.0%", "25.0%", "letters", "learning_rate"]),
        (
            "one_letter",
            LETTERS,
            ["70%", "are A", "loss.entropy_coef, now 0", "sampling.temperature, now 1", "loss.kl_coef, now 0"],
        ),
        ("one_letter", {**LETTERS, "letters_right/A": 0.34}, ["are A"]),
    ],
)
def test_each_warning_says_what_to_change(name, metrics, parts):
    messages = warned([metrics] * WINDOW)
    assert list(messages) == [name]
    for part in parts:
        assert part in messages[name]


@pytest.mark.parametrize(
    ("metrics", "settings"),
    [
        ({"accuracy": 0.06, "chance": 0.25}, {}),
        ({"accuracy": 0.06, "chance": 0.25}, {"sampling.samples_per_prompt": 64}),  # questions count, not answers
        ({"accuracy": 0.0}, {}),
        ({"chance": 0.25}, {}),
        ({"letters/A": 0.6, "letters/B": 0.4}, {}),
        ({**LETTERS, "letters_right/A": 0.36}, {}),
    ],
)
def test_no_warning_without_a_reason(metrics, settings):
    assert warned([metrics] * WINDOW, settings) == {}


def test_a_letter_that_a_step_does_not_report_counts_as_zero():
    assert warned([{"letters/A": 1.0}, {"letters/B": 1.0}] * 5) == {}
