"""SmolLM2-135M answers questions of general knowledge in one short sentence; a run to look at with `groupwise view`.

    python examples/facts.py [FOLDER] [--model smollm2-135m] [--steps 60]

Two rewards, the truncated completions masked, a KL to the reference and preference pairs from the groups, so that every
tab of the page but Clusters has something to show. Tokens are recorded in every step. The pictures of answers in
docs/view.md are of this run, on one GPU; a CPU takes about a minute per step.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from groupwise.config import make_recipe
from groupwise.rewards import RewardFunction
from groupwise.tasks import Task
from groupwise.training.trainer import Trainer

QUESTIONS = {
    "What is the opposite of hot?": "cold",
    "What is the capital of France?": "Paris",
    "What is the capital of Japan?": "Tokyo",
    "What is the capital of Italy?": "Rome",
    "What is the capital of Egypt?": "Cairo",
    "Which planet is called the red planet?": "Mars",
    "Which planet is the largest in the solar system?": "Jupiter",
    "What colour is the sky on a clear day?": "blue",
    "What colour do blue and yellow make?": "green",
    "How many legs does a spider have?": "eight|8",
    "How many days does a week have?": "seven|7",
    "How many continents are there?": "seven|7",
    "What is 5 plus 3?": "eight|8",
    "What do bees make?": "honey",
    "What is frozen water called?": "ice",
    "Which gas do plants take in?": "carbon dioxide|CO2",
    "Which animal is the largest on earth?": "whale",
    "Which ocean is the largest?": "Pacific",
    "Which metal is liquid at room temperature?": "mercury",
    "Who wrote Romeo and Juliet?": "Shakespeare",
    "What is the first month of the year?": "January",
    "Which organ pumps blood?": "heart",
    "What do you call a baby dog?": "puppy",
    "In which continent is Kenya?": "Africa",
}


def is_right(text: str, answer: str) -> bool:
    return re.search(rf"\b({answer})\b", text, re.IGNORECASE) is not None


def correct(completions, answer, **columns):
    return [float(is_right(text, right)) for text, right in zip(completions, answer, strict=True)]


def short(completions, **columns):
    return [float(len(text.split()) <= 12) for text in completions]


def grade(row, text):
    return is_right(text, row["answer"]) if re.search(r"\w", text) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/facts"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    rows = [
        {"prompt": f"{question} Answer in one short sentence.", "answer": answer}
        for question, answer in QUESTIONS.items()
    ]
    rewards = (RewardFunction("correct", correct), RewardFunction("short", short, weight=0.5))
    task = Task("facts", rows, rows, rewards=rewards, grades={"accuracy": grade}, metric="accuracy")
    recipe = make_recipe(
        {
            "algorithm": "pg_grpo",
            "model": {"source": arguments.model},
            "train": {"steps": arguments.steps, "batch_size": 8, "accumulation": 1},
            "sampling": {"samples_per_prompt": 12, "max_new_tokens": 32},
            "optimizer": {"learning_rate": 3e-6},
            "loss": {"kl_coef": 0.05},
            "preference": {"weight": 0.2},
            "masks": {"truncated": True},
            "evaluate": {"every": 10, "max_new_tokens": 32},
            "run": {"save_tokens_every": 1, "save_tokens_prompts": 8, "checkpoint_every": 0, "plot": False},
        }
    )
    Trainer(recipe, task=task, folder=arguments.folder, overwrite=True).run()


if __name__ == "__main__":
    main()
