"""Health checks for multiple choice: worse than guessing, and one letter for most questions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from groupwise.training.monitor.checks import RecentSteps

MAX_ONE_LETTER = 0.6


def below_chance(recent: RecentSteps) -> str | None:
    """The accuracy is more than two standard errors below guessing."""
    chance, accuracy = recent.mean("chance"), recent.mean(recent.metric or "")
    if chance is None or accuracy is None:
        return None
    # Answers to one question are correlated, so the sample size is the number of questions.
    error = math.sqrt(max(chance * (1 - chance), 0.0) / recent.prompts)
    if accuracy >= chance - 2 * error:
        return None
    return (
        f"{recent.metric} is {accuracy:.1%}, below the {chance:.1%} of guessing; check that the data's answer letters "
        f"match the options, or lower optimizer.learning_rate, now {recent.recipe.optimizer.learning_rate:g}"
    )


def one_letter(recent: RecentSteps) -> str | None:
    """Most answers are the same letter, and more than twice as many as would be right."""
    shares = recent.means("letters/", missing_as_zero=True)
    right = recent.means("letters_right/", missing_as_zero=True)
    letter = max(shares, key=lambda name: shares[name], default=None)
    if letter is None or shares[letter] <= max(MAX_ONE_LETTER, 2 * right.get(letter, 0.0)):
        return None
    loss, sampling = recent.recipe.loss, recent.recipe.sampling
    return (
        f"{shares[letter]:.0%} of the answers are {letter}; raise loss.entropy_coef, now {loss.entropy_coef:g}, "
        f"sampling.temperature, now {sampling.temperature:g}, or loss.kl_coef, now {loss.kl_coef:g}, or shuffle the "
        "options"
    )


HEALTH_CHECKS = {"below_chance": below_chance, "one_letter": one_letter}
