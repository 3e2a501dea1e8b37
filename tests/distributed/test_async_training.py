"""Asynchronous rollouts with several processes: rank 0 collects from a remote generator, and all ranks learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise import plugins
from groupwise.rewards import named
from groupwise.training.store.arrivals import read_arrivals
from tests.distributed.forks import drive, fork_ranks, values
from tests.training.rollout.test_async_collector import SecondModel
from tests.training.runs import metrics_of, small_trainer
from tests.weights import wordllama

pytestmark = pytest.mark.slow

HERE = "tests.distributed.test_async_training"
STEPS = 4
AHEAD: dict[str, Any] = {
    "model": {"dtype": "float64"},
    "train": {"steps": STEPS, "max_staleness": 2},
    "sampling": {"generator": "second"},
    "run": {"checkpoint_every": 1},
}


def make_second(recipe: Any, handle: Any, ranks: Any) -> SecondModel:
    return SecondModel(handle)


def reward(completion_ids: list[list[int]], log_extra: Any, **_: Any) -> list[float]:
    log_extra("ids", [list(ids) for ids in completion_ids])  # which a message cannot hold
    return [sum(ids) % 97 / 97 for ids in completion_ids]


def failing(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
    if trainer_state.global_step:  # of the step in which the row was drawn
        raise ValueError("the endpoint is gone")
    return reward(completion_ids, lambda name, values: None)


def train(folder: Path, function: Any, *changes: dict[str, Any], **options: Any) -> Any:
    plugins.BUILTIN_GENERATORS["second"] = f"{HERE}:make_second"
    trainer = small_trainer(folder, AHEAD, *changes, rewards=[named(function, name="reward")], **options)
    trainer.run()
    weights = torch.cat([weight.detach().double().flatten() for weight in trainer.components.model.parameters()])
    return [trainer.step, trainer.order.state(), float(weights.sum()), float(weights.square().sum())]


def run_cases(root: str) -> Any:
    folder, broken, similar = Path(root) / "run", Path(root) / "failing", Path(root) / "similar"
    groups = {"algorithm": "similarity_group_grpo", "grouping": {"embedder": "wordllama", "workers": 0}}
    shares = {"solved_pass_rate": 0.5, "solved_share": 0.0, "unsolved_pass_rate": 0.49, "unsolved_share": 0.0}
    groups |= {"data": {"sampling": "pass_rate", **shares}, "train": {"max_staleness": 1, "batch_size": 5}}
    first = values(fork_ranks(2, lambda: train(folder, reward, {"train": {"steps": 2}})))
    more = values(fork_ranks(3, lambda: train(folder, reward, resume=True)))
    seldom = {"run": {"checkpoint_every": 0}, "evaluate": {"every": 0}}
    failed = [[ended.status, ended.error] for ended in fork_ranks(2, lambda: train(broken, failing, seldom))]
    clustered = values(fork_ranks(2, lambda: train(similar, reward, groups)))
    local = {"sampling": {"generator": "engine"}}
    refused = [ended.error for ended in fork_ranks(2, lambda: train(Path(root) / "local", reward, local))]
    return {"first": first, "more": more, "failed": failed, "clustered": clustered, "refused": refused}


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    wordllama()
    root = tmp_path_factory.mktemp("runs")
    return root, drive(f"{HERE}:run_cases", str(root))


@pytest.mark.parametrize("name", ["first", "more", "clustered"])
def test_all_ranks_have_the_same_state(cases, name):
    results = cases[1][name]
    assert all(result == results[0] for result in results)
    assert results[0][0] == (2 if name == "first" else STEPS)
    if name == "clustered":
        assert sum(row.get("pass_rate/skipped", 0.0) for row in metrics_of(cases[0] / "similar")) > 0


def test_every_group_is_learned_once_even_if_the_run_goes_on_with_more_processes(cases):
    lines = read_arrivals(cases[0] / "run").values()
    drawn = [group for line in lines for draw in line.drawn for group, _ in draw]
    taken = [group for line in lines for group in line.taken]
    assert len(drawn) == len(set(drawn))
    assert len(taken) == len(set(taken)) == STEPS * 3
    steps = [row for row in metrics_of(cases[0] / "run") if "async/staleness_max" in row]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert max(row["async/staleness_max"] for row in steps) <= 2


def test_a_reward_that_fails_ends_all_ranks_and_the_finished_step_is_saved(cases):
    (first, error), (second, other) = cases[1]["failed"]
    assert (first, second) == (2, 2)
    assert error.startswith("RewardError")
    assert other.startswith("RankError: rank 0 failed while waiting for completions and rewards: ")
    assert all("the endpoint is gone" in sentence for sentence in (error, other))
    assert any((cases[0] / "failing").glob("checkpoint-[123]"))


def test_processes_that_sample_together_cannot_sample_ahead(cases):
    assert any("sample on vLLM servers" in error for error in cases[1]["refused"])
