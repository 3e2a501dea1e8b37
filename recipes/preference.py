"""The quiz with a noisy reward, and clean preference pairs.

``noisy_quiz`` is the quiz with a reward that is flipped for 40 % of the answers; grades stay correct. ``write_pairs``
writes pairs about other questions of the same kind: the right letter is preferred to a wrong one.

    groupwise recipes copy preference .
    python preference.py pairs.jsonl --pairs 256
    groupwise train preference --task preference.py:noisy_quiz --preference.pairs data --preference.train pairs.jsonl
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

FLIPPED = 0.4  # share of flipped rewards


class Noisy:
    """The quiz's reward, flipped at random; the flips depend on the seed and the step only."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(
        self, completions: Sequence[Any], answer_idx: Sequence[str], trainer_state: Any, **_: Any
    ) -> list[float]:
        rng = random.Random(f"flips {self.seed} {trainer_state.global_step}")
        right = correct_letter(completions, answer_idx)
        return [1.0 - reward if rng.random() < FLIPPED else reward for reward in right]


def noisy_quiz(recipe: Recipe) -> Task:
    """The quiz with a noisy reward and correct grades. The reward ``correct`` has weight 0, but can rank the answers of
    a group (``preference.reward = "correct"``)."""
    rewards = (RewardFunction("noisy", Noisy(recipe.train.seed)), RewardFunction("correct", correct_letter, 0.0))
    return replace(quiz_task(recipe), rewards=rewards)


def write_pairs(path: Path, number: int, seed: int = 0) -> None:
    """Write this many pairs, about questions from another seed than those of training."""
    rng = random.Random(f"pairs {seed}")
    with path.open("w", encoding="utf-8") as file:
        for row in islice(questions("train", seed + 1_000_000), number):
            wrong = rng.choice([letter for letter in LETTERS if letter != row["answer_idx"]])
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
