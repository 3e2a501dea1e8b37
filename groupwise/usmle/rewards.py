"""Rewards and grades of multiple-choice answers: the right letter, optionally with a bonus and a penalty.

Medical words in an answer do not make it right, so their bonus is small beside the reward for the right letter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from groupwise.rewards import text_of
from groupwise.tasks.base import TaskRow
from groupwise.usmle.answers import extract_answer
from groupwise.usmle.medical_words import medical_terms

LogExtra = Callable[[str, list[Any]], None]
LogMetric = Callable[[str, float], None]


@dataclass(frozen=True)
class EnhancedReward:
    """A reward and its parts: total = correctness + term_bonus + short_penalty + clamped."""

    total: float
    correctness: float  # 1 or 0
    term_bonus: float
    short_penalty: float  # 0 or below
    clamped: float  # what clamping to the limits added or subtracted


def enhanced_reward(
    correct: bool,
    text: str,
    *,
    term_bonus: float = 0.05,
    short_penalty: float = 0.1,
    short_length: int = 50,
    bonus_when: Literal["always", "right"] = "always",
    vocabulary: frozenset[str] | None = None,
) -> EnhancedReward:
    """1 for a right answer, a bonus for medical words, a penalty for a text of fewer than ``short_length`` characters.

    With ``bonus_when="always"`` wrong answers get the bonus too, and the sum is clamped to [0, 1]. So the clamp removes
    the bonus from a long right answer (1) and leaves it to a long wrong one (0.05): medical words are reinforced by
    wrong answers. With ``"right"`` only right answers get it, the upper limit is 1 + ``term_bonus``, and all wrong ones
    have the same reward.
    """
    has_bonus = (bonus_when == "always" or correct) and any(medical_terms(text, vocabulary))
    correctness = 1.0 if correct else 0.0
    bonus = term_bonus if has_bonus else 0.0
    penalty = 0.0 - short_penalty if len(text) < short_length else 0.0
    added = correctness + bonus + penalty
    limit = 1.0 if bonus_when == "always" else 1.0 + term_bonus
    total = min(max(added, 0.0), limit)
    return EnhancedReward(total, correctness, bonus, penalty, clamped=total - added)


def compute_reward(row: TaskRow, text: str, *, strict: bool = False) -> tuple[float, dict[str, Any]]:
    """1 for the right letter, 0 for any other and for none; and what was read, by which rule."""
    choice = extract_answer(text, row["options"], strict=strict)
    correct = choice.letter == row["answer"]
    return float(correct), {
        "predicted": choice.letter,
        "ground_truth": row["answer"],
        "correct": correct,
        "has_valid_answer": choice.letter is not None,
        "response_length": len(text),
        "rule": choice.rule,
    }


def correct_letter(
    completions: Sequence[Any],
    options: Sequence[Mapping[str, str]],
    answer: Sequence[str],
    log_extra: LogExtra,
    log_metric: LogMetric,
    *,
    strict: bool = False,
) -> list[float]:
    """`compute_reward` of each completion; what was read is logged."""
    scored = [
        compute_reward({"options": letters, "answer": right}, text_of(completion), strict=strict)
        for completion, letters, right in zip(completions, options, answer, strict=True)
    ]
    for name in scored[0][1]:
        log_extra(name, [info[name] for _, info in scored])
    # The accuracy of guessing, and each letter's share of the predicted and of the right answers.
    log_metric("chance", sum(1 / len(letters) for letters in options) / len(options))
    answered = [info["predicted"] for _, info in scored if info["has_valid_answer"]]
    for letter in sorted({letter for letters in options for letter in letters}):
        log_metric(f"letters/{letter}", answered.count(letter) / max(len(answered), 1))
        log_metric(f"letters_right/{letter}", list(answer).count(letter) / len(answer))
    return [reward for reward, _ in scored]


def enhanced(
    completions: Sequence[Any],
    options: Sequence[Mapping[str, str]],
    answer: Sequence[str],
    log_extra: LogExtra,
    log_metric: LogMetric,
    *,
    strict: bool = False,
    score: Callable[[bool, str], EnhancedReward] = enhanced_reward,
) -> list[float]:
    """`enhanced_reward` of each completion; its parts are logged."""
    correct = correct_letter(completions, options, answer, log_extra, log_metric, strict=strict)
    parts = [score(bool(right), text_of(completion)) for right, completion in zip(correct, completions, strict=True)]
    for name in ("correctness", "term_bonus", "short_penalty", "clamped"):
        values = [getattr(part, name) for part in parts]
        log_extra(f"enhanced/{name}", values)
        log_metric(f"enhanced/{name}", sum(values) / len(values))
    return [part.total for part in parts]


def grade(row: TaskRow, answer: str, *, strict: bool) -> bool | None:
    """Right in the form that was asked for or, unless ``strict``, in any form that a careful reader understands."""
    letter = extract_answer(answer, row["options"], strict=strict).letter
    return None if letter is None else letter == row["answer"]
