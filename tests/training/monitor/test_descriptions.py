"""Every metric that a run logs has a description, and every description is of a metric that a run can log."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from groupwise.control.descriptions import EVALUATION_METRICS, UPDATE_METRICS
from groupwise.environments import Environment, Reply
from groupwise.rundir import read_metrics
from groupwise.training.monitor.checks import CHECKS, EVALUATION_CHECKS
from groupwise.training.monitor.descriptions import SECTIONS, TERM_WEIGHTS, aliases, describe_metric, matches
from groupwise.training.trainer import Trainer
from groupwise.training.update.objective import TERMS
from groupwise.usmle.health_checks import HEALTH_CHECKS
from tests.training.runs import ROWS, TASK, RecordingDisplay, even, small_recipe, small_trainer
from tests.weights import wordllama

FAST: dict[str, Any] = {
    "train": {"steps": 2, "batch_size": 3, "accumulation": 1},
    "sampling": {"samples_per_prompt": 4, "max_new_tokens": 5},
    "evaluate": {"every": 0, "max_new_tokens": 3},
    "run": {"checkpoint_every": 0},
}
GRADED = replace(
    TASK, grades={"right": lambda row, answer: None if "e" in answer else len(answer) % 2 == 0}, metric="right"
)
GRADES = ("right", "accuracy", "accuracy_strict", "accuracy_lenient")


def failing(completions, **_):
    return [float("nan") if len(text) % 3 == 0 else len(text) % 2 for text in completions]


def run_dapo(folder: Path) -> Trainer:
    return small_trainer(folder, FAST)


def run_many_options(folder: Path) -> Trainer:
    """A graded task with most of what adds metrics: masks, KL, entropy, resampling, difficulty, failed rewards."""
    changes = {
        "loss": {"kl_coef": 0.1, "entropy_coef": 0.01, "entropy_target": 10.0},
        "train": {"resample_rounds": 1, "log_term_gradients_every": 1},
        "data": {"sampling": "pass_rate"},
        "advantages": {"difficulty": "hard"},
        "masks": {"truncated": True, "validity": True, "min_length": 1, "off_policy": "v3.2"},
        "scoring": {"on_error": "drop", "overlong_buffer": 2},
    }
    return small_trainer(folder, FAST, changes, task=GRADED, rewards=[even, failing])


def run_enhanced_grpo(folder: Path) -> Trainer:
    return small_trainer(folder, {"algorithm": "enhanced_grpo", "evaluate": {"rewards": True}}, FAST)


def run_similarity_groups(folder: Path) -> Trainer:
    wordllama()
    grouping = {"embedder": "wordllama", "workers": 0, "skip_single_members": True}
    return small_trainer(folder, FAST, {"algorithm": "similarity_group_grpo", "grouping": grouping})


def run_pg_grpo(folder: Path) -> Trainer:
    pairs = [{"prompt": f"Say {n}: ", "chosen": f"{n}.", "rejected": f"{n + 1}."} for n in range(6)]
    file = folder.with_suffix(".jsonl")
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    sources = {"train": str(file), "held_out": str(file), "cache_ref_logps": False}
    changes = {
        "algorithm": "pg_grpo",
        "preference": {"pairs": "both", "batch_size": 2, **sources},
        "loss": {"entropy_coef": 0.01},
        "train": {"log_term_gradients_every": 1},
    }
    return small_trainer(folder, FAST, changes)


def run_usmle(folder: Path) -> Trainer:
    changes = {
        "task": "usmle",
        "algorithm": "enhanced_grpo_literal",
        "task_options": {"reward": "enhanced", "prompt": "direct"},
        "data": {"train_rows": 6, "held_out_rows": 2, "max_prompt_length": 4000},
        "train": {"steps": 1},
    }
    return Trainer(small_recipe(FAST, changes), folder=folder, display=RecordingDisplay())


def run_sft(folder: Path) -> Trainer:
    changes = {"task": "quiz", "train": {"steps": 0}, "sft": {"steps": 2, "batch_size": 2}}
    data = {"data": {"train_rows": 4, "held_out_rows": 2}}
    return Trainer(small_recipe(FAST, changes, data), folder=folder, display=RecordingDisplay())


def slow(completions, **_):
    time.sleep(0.3)
    return [float(len(text) % 2) for text in completions]


def run_ahead(folder: Path) -> Trainer:
    """Asynchronous rollouts that a step waits for, corrected by truncated weights."""
    changes = {"train": {"max_staleness": 1}, "loss": {"importance_cap": 2.0, "rejection_high": 5.0}}
    return small_trainer(folder, FAST, changes, rewards=[slow])


def run_masked_weights(folder: Path) -> Trainer:
    changes = {
        "loss": {"importance_sampling": "token_mask", "importance_cap": 5.0, "importance_floor": 0.5},
        "masks": {"drop_equal_rewards": True},
        "train": {"local_batch_size": 4},
    }
    return small_trainer(folder, FAST, changes)


def run_distillation(folder: Path) -> Trainer:
    """A teacher beside all other terms, and two held-out sets."""
    changes = {
        "algorithm": "pg_grpo",
        "loss": {"kl_coef": 0.1, "entropy_coef": 0.01},
        "distillation": {"weight": 0.5, "teacher": "reference", "show": "{prompt}aeiou"},
        "train": {"log_term_gradients_every": 1},
    }
    task = replace(GRADED, held_out={"first": ROWS[:2], "second": ROWS[2:4]})
    return small_trainer(folder, FAST, changes, task=task)


class Twice(Environment):
    """Two turns; it counts them, and has two rewards."""

    async def start(self, row, seed):
        self.counts = {"turns_seen": 0.0}

    async def respond(self, turn):
        self.counts = {"turns_seen": self.counts["turns_seen"] + 1}
        return Reply([{"role": "user", "content": "again"}], done=self.counts["turns_seen"] == 2)

    async def reward(self):
        return {"seen": self.counts["turns_seen"], "nothing": 0.0}


def run_conversations(folder: Path) -> Trainer:
    return small_trainer(folder, FAST, environment=Twice)


RUNS = [run_dapo, run_many_options, run_enhanced_grpo, run_similarity_groups, run_pg_grpo, run_usmle, run_sft]
RUNS += [run_ahead, run_masked_weights, run_distillation, run_conversations]


def logged(make: Callable[[Path], Trainer], folder: Path) -> set[str]:
    make(folder / make.__name__).run()
    return {name for row in read_metrics(folder / make.__name__ / "metrics.jsonl") for name in row}


@pytest.mark.parametrize("make", RUNS, ids=lambda make: make.__name__)
def test_every_metric_of_a_run_is_described(make, tmp_path):
    names = logged(make, tmp_path)
    assert len(names) > 5
    assert sorted(name for name in names if describe_metric(name, GRADES) is None) == []


# Of rewards that need a server or weights, and of rare events. Their own tests check that they are logged.
NOT_IN_THESE_RUNS = {
    *(name for name in SECTIONS["Warnings"]),
    "time/sampler_idle",  # of a remote generator
    "token_budget_full",  # once memory has run out
    *(name for name in SECTIONS["Logged by built-in rewards"] if name.startswith(("judge/", "reward_", "math_"))),
}


@pytest.mark.slow
def test_every_description_is_of_a_metric_that_runs_log(tmp_path):
    names = {name for make in RUNS for name in logged(make, tmp_path)}
    patterns = [pattern for section in SECTIONS.values() for pattern in section]
    assert len(patterns) == len(set(patterns))
    unseen = [pattern for pattern in patterns if not any(matches(pattern, name, GRADES) for name in names)]
    assert set(unseen) == NOT_IN_THESE_RUNS
    assert {name for name in aliases() if name not in names} == set()


def test_every_warning_is_described_and_exists():
    expected = {f"warnings/{name}" for name in (*CHECKS, *HEALTH_CHECKS)}
    assert set(SECTIONS["Warnings"]) == expected | {f"eval/warnings/{name}" for name in EVALUATION_CHECKS}


def test_the_metrics_of_built_in_rewards_are_in_their_files():
    package = Path(describe_metric.__code__.co_filename).parents[2]
    for name in SECTIONS["Logged by built-in rewards"]:
        family, _, part = name.partition("/")
        files = [*(package / "rewards").glob("*.py"), package / "usmle" / "rewards.py"]
        sources = [file.read_text(encoding="utf-8") for file in files if f'"{family}' in file.read_text()]
        assert any(part.startswith("{") or part in text for text in sources), name


def test_patterns():
    assert describe_metric("rewards/short/mean") == SECTIONS["Rewards and grades"]["rewards/{reward}/mean"]
    assert describe_metric("accuracy") is None  # only a grade of the task
    assert describe_metric("accuracy", ["accuracy"]) == SECTIONS["Rewards and grades"]["{grade}"]
    assert describe_metric("eval/accuracy_low", ["accuracy"]) == SECTIONS["Evaluation"]["eval/{grade}_low"]
    assert describe_metric("rewards/accuracies") == "the same as `preference/accuracy`"
    assert describe_metric("loss/") is None
    assert describe_metric("a_metric_of_a_users_reward") is None


def test_every_term_of_the_objective_is_described():
    for name in TERMS:
        assert describe_metric(f"loss/{name}")
        assert describe_metric(f"grad_norm/{name}")
    for first, second in combinations(TERMS, 2):
        assert describe_metric(f"grad_cosine/{first}_{second}")


@pytest.mark.parametrize("algorithm", ["grpo-fast:kl_coef=0.01", "ppo-fast"])
def test_every_metric_of_a_control_run_is_described(algorithm, tmp_path):
    pytest.importorskip("gymnasium")
    from groupwise.control.main import train
    from groupwise.control.settings import config_of

    train(config_of(algorithm=algorithm, steps=600, starts=2), tmp_path)
    names = {name for row in read_metrics(tmp_path / "metrics.jsonl") for name in row}
    assert sorted(names - UPDATE_METRICS.keys()) == []
    only = {"grpo-fast:kl_coef=0.01": {"kl", "group_spread", "zero_spread_groups"}, "ppo-fast": {"value_loss"}}
    others = set().union(*only.values()) - only[algorithm]
    assert UPDATE_METRICS.keys() - names == others
    header = (tmp_path / "progress.csv").read_text().splitlines()[0].split(",")
    assert set(header) == EVALUATION_METRICS.keys() | (names - {"step"})


def test_the_terms_are_those_of_the_objective():
    assert {name: term.weight for name, term in TERMS.items()} == TERM_WEIGHTS
