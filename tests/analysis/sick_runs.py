"""Short real runs of the tiny model, each made sick in one way."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from string import ascii_letters, digits
from typing import Any

import torch

from groupwise.tasks import Task
from groupwise.training.trainer import Trainer
from tests.training.runs import ROWS, TASK, even, small_trainer, vowels
from tests.weights import wordllama

# Completions of a fixed length, so that being cut off is no problem of these runs, and no evaluations.
SHORT: dict[str, Any] = {
    "train": {"steps": 12},
    "sampling": {"max_new_tokens": 4, "min_new_tokens": 4},
    "evaluate": {"every": 0, "before_training": False},
    "run": {"checkpoint_every": 0},
}


def run(folder: Path, changes: Mapping[str, Any] | None = None, **options: Any) -> Trainer:
    return small_trainer(folder, SHORT, changes or {}, **options)


def healthy(folder: Path) -> Trainer:
    return run(folder)


def truncated(folder: Path) -> Trainer:
    return run(folder, {"sampling": {"min_new_tokens": 0}})


def no_answer(folder: Path) -> Trainer:
    """The grade reads letters that the model hardly ever writes."""
    grades = {"right": lambda row, answer: True if answer.startswith("Answer: ") else None}
    return run(folder, task=replace(TASK, grades=grades, metric="right"))


def answers_longer(folder: Path) -> Trainer:
    """The reward pays for length, and an answer ends with its first letter or digit."""
    changes = {
        "sampling": {
            "min_new_tokens": 0,
            "max_new_tokens": 12,
            "stop": [*ascii_letters, *digits],
            "samples_per_prompt": 8,
        },
        "optimizer": {"learning_rate": 0.004, "warmup_steps": 12},
        "train": {"steps": 22, "batch_size": 6},
    }
    return run(folder, changes, rewards=[length])


def length(completions: Sequence[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def answers_identical(folder: Path) -> Trainer:
    return run(folder, {"sampling": {"temperature": 0.01}})


def kl_high(folder: Path) -> Trainer:
    return run(folder, {"loss": {"kl_coef": 0.001}, "optimizer": {"learning_rate": 0.05}})


def kl_low(folder: Path) -> Trainer:
    """The policy hardly moves, and the reference is computed at every step."""
    changes = {"loss": {"kl_coef": 0.01}, "optimizer": {"learning_rate": 1e-6}, "train": {"steps": 52}}
    return run(folder, changes)


def entropy_collapsed(folder: Path) -> Trainer:
    changes = {"optimizer": {"learning_rate": 0.02}, "train": {"steps": 18}, "sampling": {"samples_per_prompt": 8}}
    return run(folder, changes, rewards=[vowels])


def entropy_exploded(folder: Path) -> Trainer:
    """Supervised to be certain, then pushed to be uncertain by a large entropy bonus."""
    task = replace(TASK, examples=[(row["prompt"], "abcd") for row in ROWS])
    changes = {
        "sft": {"steps": 30, "batch_size": 4, "learning_rate": 0.01},
        "loss": {"entropy_coef": 1.0},
        "optimizer": {"learning_rate": 0.003},
        "train": {"steps": 30},
    }
    return run(folder, changes, task=task)


def log_prob_mismatch(folder: Path) -> Trainer:
    lora = {"rank": 4, "alpha": 64.0, "dropout": 0.9}
    return run(folder, {"model": {"lora": lora}, "optimizer": {"learning_rate": 0.05}})


def weights_unchanged(folder: Path) -> Trainer:
    return run(folder, {"optimizer": {"learning_rate": 1e-12}})


def no_learning_signal(folder: Path) -> Trainer:
    """The reward depends on the prompt alone."""
    return run(folder, rewards=[by_prompt])


def by_prompt(completions: Sequence[str], prompts: Sequence[str], **_: Any) -> list[float]:
    return [float(len(prompt) + ord(prompt[-3]) % 7) for prompt in prompts]


def zero_spread(folder: Path) -> Trainer:
    """Two of three prompts get the same reward for every completion."""
    return run(folder, rewards=[for_some_prompts])


def for_some_prompts(completions: Sequence[str], prompts: Sequence[str], **_: Any) -> list[float]:
    scores = even(completions)
    return [score if int(p.split()[-1][:-1]) % 3 == 0 else 0.0 for score, p in zip(scores, prompts, strict=True)]


def reward_constant(folder: Path) -> Trainer:
    return run(folder, rewards=[even, constant])


def constant(completions: Sequence[str], **_: Any) -> list[float]:
    return [0.25] * len(completions)


def reward_dominates(folder: Path) -> Trainer:
    return run(folder, rewards=[vowels, hundredfold])


def hundredfold(completions: Sequence[str], **_: Any) -> list[float]:
    return [100 * value for value in even(completions)]


def rewards_failed(folder: Path) -> Trainer:
    return run(folder, {"scoring": {"on_error": "drop"}}, rewards=[failing])


def failing(completions: Sequence[str], **_: Any) -> list[float]:
    scores = even(completions)
    return [float("nan") if ord(text[0]) % 4 == 0 else s for text, s in zip(completions, scores, strict=True)]


def not_finite(folder: Path) -> Trainer:
    changes = {
        "train": {"on_non_finite": "skip"},
        "advantages": {"scale": "none"},
        "optimizer": {"max_grad_norm": None},
    }
    return run(folder, changes, rewards=[enormous])


def enormous(completions: Sequence[str], **_: Any) -> list[float]:
    return [1e37 * value for value in even(completions)]


def masked(folder: Path) -> Trainer:
    changes = {"masks": {"validity": True, "min_length": 6}, "sampling": {"max_new_tokens": 4}}
    return run(folder, changes)


def stale(folder: Path) -> Trainer:
    changes = {"train": {"max_staleness": 2}, "optimizer": {"learning_rate": 0.05}}
    return run(folder, changes)


def teacher_far(folder: Path) -> Trainer:
    """A learning rate at which the student hardly moves towards a teacher with other weights."""
    changes = {
        "loss": {"policy_coef": 0.0},
        "distillation": {"weight": 1.0, "teacher": "tiny:5"},
        "optimizer": {"learning_rate": 1e-6},
        "train": {"steps": 21},
    }
    return run(folder, changes, rewards=[])


def memory(folder: Path) -> Trainer:
    """Passes of more than 128 tokens do not fit, as on a GPU that is too small."""
    trainer = run(folder, {"train": {"token_budget": 512}})
    update, updater = trainer.updater._gradient, trainer.updater

    def gradient(*arguments: Any) -> Any:
        if updater.token_budget > 128:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return update(*arguments)

    updater._gradient = gradient  # type: ignore[method-assign]
    return trainer


def overfitting(folder: Path) -> Trainer:
    """The reward pays for vowels, and answers with many vowels are wrong."""
    grades = {"right": lambda row, answer: sum(letter in "aeiou" for letter in answer) < 2}
    task = Task("hacked", ROWS, ROWS, grades=grades, metric="right")
    changes = {
        "evaluate": {"every": 5, "before_training": True, "max_new_tokens": 4},
        "optimizer": {"learning_rate": 0.02},
        "train": {"steps": 20},
        "sampling": {"samples_per_prompt": 8},
    }
    return run(folder, changes, task=task, rewards=[vowels])


def in_clusters(folder: Path, grouping: Mapping[str, Any] | None = None, **changes: Any) -> Trainer:
    """A run with clusters of similar completions."""
    wordllama()
    settings = {"embedder": "wordllama", "workers": 0, **(grouping or {})}
    return run(folder, {"algorithm": "similarity_group_grpo", "grouping": settings, **changes})


def answers_alike(folder: Path) -> Trainer:
    return in_clusters(folder, sampling={"temperature": 0.01})


def answers_unrelated(folder: Path) -> Trainer:
    """Only clusters that are far from each other would count."""
    return in_clusters(folder, {"min_silhouette": 0.95})


def answers_scattered(folder: Path) -> Trainer:
    """Only nearly equal texts are similar."""
    return in_clusters(folder, {"method": "threshold", "threshold": 0.95})


def pairs_file(folder: Path, pairs: Sequence[tuple[str, str, str]]) -> dict[str, Any]:
    """The settings of [preference] for these prompts with their chosen and rejected answers."""
    file = folder.with_name("pairs.jsonl")
    rows = (dict(zip(("prompt", "chosen", "rejected"), pair, strict=True)) for pair in pairs)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"train": str(file), "batch_size": 4, "cache_ref_logps": False}


def no_pairs(folder: Path) -> Trainer:
    """The rewards of a group differ by less than the margin that a pair must have."""
    return run(folder, {"preference": {"weight": 0.1, "min_margin": 5.0}})


def preference_opposed(folder: Path) -> Trainer:
    """The model answers a or b; the reward is for a, and the pairs prefer b."""
    task = replace(TASK, examples=[(row["prompt"], 4 * letter) for row in ROWS for letter in "ab"])
    pairs = pairs_file(folder, [(row["prompt"], "bbbb", "aaaa") for row in ROWS])
    changes = {
        "algorithm": "pg_grpo",
        "loss": {"kl_coef": 0.0},
        "sft": {"steps": 30, "batch_size": 10, "learning_rate": 0.01},
        "preference": {"pairs": "data", "weight": 0.5, **pairs},
        "optimizer": {"learning_rate": 1e-5},
        "train": {"log_term_gradients_every": 1},
        "sampling": {"samples_per_prompt": 8},
    }
    return run(folder, changes, task=task, rewards=[vowels])


def chosen_unlikely(folder: Path) -> Trainer:
    """A huge learning rate makes the chosen answers of pairs unlikely too."""
    pairs = pairs_file(folder, [(f"Say {number}: ", f"{number} a b c", f"{number} d") for number in range(4)])
    changes = {"algorithm": "dpo", "preference": pairs, "optimizer": {"learning_rate": 0.3}}
    return run(folder, changes, task=None)


SICK: dict[str, Callable[[Path], Trainer]] = {
    make.__name__: make
    for make in (
        truncated, no_answer, answers_longer, answers_identical, kl_high, kl_low, entropy_collapsed, entropy_exploded,
        log_prob_mismatch, weights_unchanged, no_learning_signal, zero_spread, reward_constant, reward_dominates,
        rewards_failed, not_finite, masked, stale, teacher_far, memory, overfitting, answers_alike, answers_unrelated,
        answers_scattered, no_pairs, preference_opposed, chosen_unlikely,
    )
}  # fmt: skip
