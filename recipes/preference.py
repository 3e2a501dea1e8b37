"""The quiz with a reward that errs, and pairs that do not: what are a few clean preferences worth beside it?

``noisy_quiz`` is the quiz whose reward says the opposite of the truth so many times in a hundred; grades stay as they
are. ``write_pairs`` writes a data set of pairs about other questions of the same kind: the right letter is preferred to
a wrong one.

    python recipes/preference.py pairs.jsonl --pairs 256
    groupwise train recipes/preference.toml --task recipes/preference.py:noisy_quiz --preference.pairs data \
        --preference.train pairs.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from groupwise.config import Recipe
from groupwise.rewards import RewardFunction
from groupwise.tasks import Task
from groupwise.tasks.quiz import LETTERS, correct_letter, questions, quiz_task

FLIPPED = 0.4  # the share of rewards that are the wrong way round


class Noisy:
    """The quiz's reward, now and then the other way round; the same answers of the same step have the same luck."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(
        self, completions: Sequence[Any], answer_idx: Sequence[str], trainer_state: Any, **_: Any
    ) -> list[float]:
        chance = random.Random(f"flips {self.seed} {trainer_state.global_step}")
        right = correct_letter(completions, answer_idx)
        return [1.0 - reward if chance.random() < FLIPPED else reward for reward in right]


def noisy_quiz(recipe: Recipe) -> Task:
    """The quiz with a noisy reward. What the run is judged by is not noisy; nor is the reward ``correct``, which weighs
    nothing, but may put the answers of a group in order (``preference.reward = "correct"``)."""
    rewards = (RewardFunction("noisy", Noisy(recipe.train.seed)), RewardFunction("correct", correct_letter, 0.0))
    return replace(quiz_task(recipe), rewards=rewards)


def write_pairs(path: Path, number: int, seed: int = 0) -> None:
    """Write so many pairs; the questions are made as those of training are, from another seed."""
    chance = random.Random(f"pairs {seed}")
    with path.open("w", encoding="utf-8") as file:
        for row in islice(questions("train", seed + 1_000_000), number):
            wrong = chance.choice([letter for letter in LETTERS if letter != row["answer_idx"]])
            pair = {"prompt": row["prompt"], "chosen": row["answer_idx"], "rejected": wrong}
            file.write(json.dumps(pair) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="write clean pairs about the quiz")
    parser.add_argument("path", type=Path)
    parser.add_argument("--pairs", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_pairs(args.path, args.pairs, args.seed)


if __name__ == "__main__":
    main()
