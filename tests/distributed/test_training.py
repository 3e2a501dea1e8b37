"""Runs of 1, 2 and 3 processes in float64: the same samples, and the same losses and weights to 1e-10."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise.tasks import Task
from groupwise.training.store.rollout_files import read_rollouts, read_rows, step_files
from groupwise.training.store.token_files import EVALUATIONS, TOKENS
from tests.distributed.forks import drive, fork_ranks, values
from tests.training.runs import checkpoint_of, metrics_of, small_trainer
from tests.weights import wordllama

pytestmark = pytest.mark.slow

HERE = "tests.distributed.test_training"
ROWS = [{"prompt": f"Say {'very ' * (number % 4)}clearly number {number}: ", "number": number} for number in range(12)]
STEPS = 2
BASE: dict[str, Any] = {
    "model": {"dtype": "float64"},
    "train": {"steps": STEPS, "batch_size": 5},
    "sampling": {"samples_per_prompt": 4, "max_new_tokens": 5},
    "evaluate": {"every": 1, "max_new_tokens": 2},
}
PAIRS = {"preference": {"pairs": "both", "weight": 0.5, "batch_size": 5, "held_out_from_train": 4}}
CASES: dict[str, dict[str, Any]] = {
    # With 3 processes, some have nothing to do.
    "refill": {"train": {"resample_rounds": 2, "log_term_gradients_every": 1}},
    "kl": {
        "loss": {"kl_coef": 0.1, "aggregation": "prompt_mean"},
        "reference": {"refresh_every": 1, "mix": 0.5},
        "train": {"accumulation": 2},
        "scoring": {"length_penalty": 0.2},
    },
    "exact_kl": {"loss": {"kl_coef": 0.1, "kl": "full"}, "train": {"log_term_gradients_every": 1}},
    "pairs": {"algorithm": "pg_grpo", **PAIRS},
    "coupled_pairs": {"algorithm": "pg_grpo", "preference": {**PAIRS["preference"], "kind": "aot"}},
    "split_pairs": {"algorithm": "pg_grpo", **PAIRS, "train": {"token_budget": 64}, "sampling": {"max_new_tokens": 30}},
    "kept": {
        "masks": {"keep_sampling_mask": True, "off_policy": "v3.2", "high_entropy": 0.5},
        "sampling": {"top_k": 30, "top_p": 0.9},
        "loss": {"importance_cap": 2.0},
        "train": {"iterations": 2, "mini_batches": 2, "batch_size": 4},
    },
    "updates": {
        "train": {
            "update_per_step": True,
            "mini_batches": 2,
            "mini_batch_by": "samples",
            "local_batch_size": 5,
            "batch_size": 4,
        },
        "loss": {"name": "bnpo", "entropy_coef": 0.01},
        "masks": {"high_entropy": 0.5},
    },
    "lora": {"model": {"lora": {"rank": 4}}, "sft": {"steps": 3, "batch_size": 4}, "optimizer": {"weight_decay": 0.1}},
    "adaptive": {
        "data": {"sampling": "pass_rate", "solved_pass_rate": 0.5, "solved_share": 0.2, "unsolved_pass_rate": 0.4},
        "loss": {"entropy_target": 10.0, "entropy_step": 0.1},
        "train": {"batch_size": 10, "iterations": 2},
    },
    "similarity": {"algorithm": "similarity_group_grpo", "grouping": {"embedder": "wordllama", "workers": 0}},
    "scalerl": {"algorithm": "scalerl", "train": {"batch_size": 5, "mini_batches": 2}},
}


def reward(completions: list[str], completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
    """Two of three prompts have a learning signal."""
    return [0.5 if row % 3 == 0 else sum(ids) % 97 / 97 for ids, row in zip(completion_ids, number, strict=True)]


def logging_reward(
    completions: list[str], number: list[int], log_extra: Any, log_metric: Any, **_: Any
) -> list[float | None]:
    """Skips some prompts, and logs a value that a message cannot hold."""
    log_extra("letters", [len(text) for text in completions])
    log_extra("table", [{"text": text} for text in completions])
    for text in completions:
        log_metric("first_letter", float(ord(text[0])) if text else 0.0)
    return [None if row % 2 else 0.25 for row in number]


def make_trainer(case: str, folder: Path, *changes: dict[str, Any], **options: Any) -> Any:
    more: dict[str, Any] = {}
    if "preference" in CASES[case]:
        file = folder.parent / "pairs.jsonl"
        more = {"preference": {"train": str(file)}}
    examples = [(row["prompt"], "aeiou"[: 1 + row["number"] % 4]) for row in ROWS]
    task = Task("try", ROWS, ROWS[:5], examples=examples)
    return small_trainer(
        folder, BASE, CASES[case], more, *changes, task=task, rewards=[reward, logging_reward], **options
    )


def train(case: str, folder: Path, *changes: dict[str, Any], **options: Any) -> Any:
    result = make_trainer(case, folder, *changes, **options).run()
    return [result.steps, str(result.model), result.exit_status]


SIZES = {case: [1, 2, 3] if case in ("refill", "pairs") else [1, 2 + number % 2] for number, case in enumerate(CASES)}


def run_cases(root: str) -> list[Any]:
    pairs = [
        {"prompt": f"Say {n}: ", "chosen": "aei"[n % 3] * (2 + n), "rejected": "xyz"[n % 3] * 3} for n in range(14)
    ]
    results = []
    for case, sizes in SIZES.items():
        for size in sizes:
            folder = Path(root) / f"{case}-{size}" / "run"
            folder.parent.mkdir()
            (folder.parent / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
            results.append(values(fork_ranks(size, lambda case=case, folder=folder: train(case, folder))))
    return results


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    wordllama()
    root = tmp_path_factory.mktemp("runs")
    for results in drive(f"{HERE}:run_cases", str(root)):
        assert all(result == results[0] for result in results)
        assert results[0][0] == STEPS
    return root


def check_records(one: Path, other: Path) -> None:
    """The same held-out completions, and tokens with the same log-probs; rank 0 alone has written them."""
    for kind in (TOKENS, EVALUATIONS):
        files, other_files = step_files(one / kind), step_files(other / kind)
        assert sorted(files) == sorted(other_files) != []
        for step, path in files.items():
            for row, other_row in zip(read_rows(path), read_rows(other_files[step]), strict=True):
                for name, value in row.items():
                    close = isinstance(value, list)
                    assert value == (pytest.approx(other_row[name], abs=1e-6) if close else other_row[name]), name


def check_metrics(one: Path, other: Path) -> None:
    for row, other_row in zip(metrics_of(one), metrics_of(other), strict=True):
        assert row.keys() == other_row.keys()
        # Where the policy is the reference, rounding decides which answer is preferred.
        rounding = ("preference/accuracy", "rewards/accuracies") if abs(row.get("preference/margin", 1)) < 1e-10 else ()
        # What a process keeps between turns are its own conversations.
        for name in row.keys() - {*rounding, "episodes/reused_share"}:
            limit = 0.05 if name == "weights_changed" else 1e-10  # it is of a sample of rank 0's weights
            assert row[name] == pytest.approx(other_row[name], rel=limit, abs=limit, nan_ok=True), name


def check_close(one: Path, other: Path, step: int) -> None:
    """The same samples and rewards; metrics, weights and optimizer state within 1e-10."""
    rollouts, others = (read_rollouts(folder).to_pydict() for folder in (one, other))
    assert rollouts.keys() == others.keys()
    for name, column in rollouts.items():
        rounded = name in ("advantage", "map_x", "map_y")
        assert column == (pytest.approx(others[name], abs=1e-6) if rounded else others[name]), name
    check_records(one, other)
    check_metrics(one, other)
    first, second = checkpoint_of(one, step), checkpoint_of(other, step)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        if isinstance(tensor, torch.Tensor):
            # Where a gradient is 0 but for rounding, AdamW's first steps are of the size of the learning rate.
            torch.testing.assert_close(tensor, second[name], rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize(("case", "size"), [(case, size) for case, sizes in SIZES.items() for size in sizes[1:]])
def test_the_result_is_that_of_one_process(runs, case, size):
    check_close(runs / f"{case}-1" / "run", runs / f"{case}-{size}" / "run", STEPS)


def test_the_cases_are_what_they_say(runs):
    def metric(case: str, name: str) -> float:
        return sum(row.get(name, 0.0) for row in metrics_of(runs / f"{case}-1" / "run"))

    assert metric("refill", "resample/replaced") > 0
    assert metric("refill", "first_letter") > 0
    assert metric("kl", "reference_refreshes") > 0
    assert metric("pairs", "preference/pairs_group") * metric("pairs", "preference/pairs_data") > 0
    assert metric("kept", "masks/keep_sampling_mask") > 0
    assert metric("adaptive", "pass_rate/skipped") > 0
    assert metric("adaptive", "entropy_coef") == pytest.approx(0.2 + 0.4)
    assert metric("scalerl", "masks/equal_rewards") > 0
    assert metric("similarity", "similarity_groups/avg_groups_per_prompt") > STEPS
    rows = read_rollouts(runs / "refill-2" / "run").to_pydict()
    assert rows["table"][0] == str({"text": rows["completion"][0]})
