"""Conversations with environments in 1, 2 and 3 processes in float64: the same turns, losses and weights to 1e-10."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise.conversations import Episode, EpisodeTurn, SampledTokens
from groupwise.conversations.sharded import _episodes, _message
from groupwise.core.filters import KeptSets
from groupwise.distributed.message import decode, encode
from groupwise.environments import AssistantTurn, Environment, Reply, ToolCall
from groupwise.tasks import Task
from groupwise.training.store.rollout_files import read_rollouts
from tests.distributed.forks import Ended, drive, fork_ranks, values
from tests.distributed.test_sharded_training import check_close as check_sharded_close
from tests.distributed.test_training import check_close
from tests.training.runs import metrics_of, small_trainer

HERE = "tests.distributed.test_conversations"
STEPS = 3
ROWS = [{"prompt": f"Walk {'far ' * (number % 4)}from {number}: ", "number": number} for number in range(15)]
# In the first step only one group is left, in the third none fails.
FAILING = (0, 1, 2, 4, 7)
BASE: dict[str, Any] = {
    "model": {"dtype": "float64"},
    "train": {"steps": STEPS, "batch_size": 5},
    "data": {"shuffle": False},
    "sampling": {"samples_per_prompt": 4, "max_new_tokens": 3},
    "environment": {"max_turns": 3},
    "evaluate": {"every": 1, "max_new_tokens": 2},
}
CASES: dict[str, dict[str, Any]] = {
    "turns": {"advantages": {"turn_weight": 1.0, "turn_discount": 0.9, "scale": "batch"}},
    "kept": {
        "masks": {"keep_sampling_mask": True, "off_policy": "v3.2"},
        "sampling": {"top_k": 30},
        "loss": {"kl_coef": 0.1, "aggregation": "token_mean"},
        "train": {"mini_batches": 2, "iterations": 2, "resample_rounds": 1},
    },
    "sharded": {"train": {"token_budget": 64}},  # the ranks have different numbers of packs
    "taught": {"model": {"lora": {"rank": 4}}, "distillation": {"weight": 1.0, "teacher": "tiny"}},
    "pairs": {"algorithm": "pg_grpo", "preference": {"weight": 0.5}},
    "rollout": {"data": {"chat": True, "max_prompt_length": 2000}},
}
SIZES = {"turns": (2, 3), "kept": (3,), "sharded": (2,), "taught": (2,), "pairs": (3,), "rollout": (2,)}


class Place:
    """A state that only its own process can compare."""

    def __init__(self, turn: int, side: str) -> None:
        self.key = (turn, side)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


class Walk(Environment):
    """Goes left or right with each turn; some rows fail in the second one."""

    failing: tuple[int, ...] = FAILING

    async def start(self, row, seed):
        self.number, self.turns, self.side, self.even = row["number"], 0, "start", 0.0
        self.counts = {"left": 0.0}
        return [{"role": "user", "content": f"{seed % 7}. "}]

    async def respond(self, turn: AssistantTurn) -> Reply:
        self.turns += 1
        if self.turns == 2 and self.number in self.failing:
            raise RuntimeError(f"the bridge at {self.number} is down")
        letters = [ord(letter) for letter in turn.text]
        self.side = "left" if sum(letters) % 2 else "right"
        self.even += sum(letter % 2 == 0 for letter in letters) / 4
        self.counts = {"left": self.counts["left"] + (self.side == "left")}
        return Reply([{"role": "user", "content": f" {self.side}, "}], reward=float(len(set(letters))))

    async def reward(self) -> dict[str, float | None]:
        return {"even": self.even, "far": None if self.side == "left" else 1.0}

    def state_key(self) -> Place:
        return Place(self.turns, self.side)


def doubtful() -> Environment:
    """The environment of a package that is missing on one machine, found when it is first used."""
    doubtful.made += 1  # type: ignore[attr-defined]
    if doubtful.made > 3 and os.environ.get("RANK") == "1":  # type: ignore[attr-defined]
        raise OSError("no map on this machine")
    return Walk()


doubtful.made = 0  # type: ignore[attr-defined]


class LateFailure(Walk):
    """Fails on every board of the second step."""

    failing = tuple(range(5, 10))


async def stroll(model: Any, row: dict[str, Any]) -> float:
    """A loop of its own, one turn longer for every other row; some rows fail."""
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    for turn in range(2 + row["number"] % 2):
        if turn == 1 and row["number"] in FAILING:
            raise RuntimeError(f"the bridge at {row['number']} is down")
        messages += [await model.chat(messages), {"role": "user", "content": f"{turn}?"}]
    return float(sum(map(ord, messages[-2]["content"])) % 7)


def train(folder: Path, *changes: dict[str, Any], environment: Any = Walk, **options: Any) -> Any:
    task = Task("walk", ROWS, ROWS[8:12])
    if CASES["rollout"] in changes:
        options |= {"rollout": stroll}
    else:
        options |= {"environment": environment}
    return small_trainer(folder, BASE, *changes, task=task, rewards=[], **options).run().steps


def run_all(root: str) -> dict[str, list[Ended]]:
    folder = Path(root)
    for case, sizes in SIZES.items():
        values(fork_ranks(1, lambda case=case: train(folder / f"{case}-1", CASES[case])))
        for size in sizes:
            more = {"model": {"sharding": "weights"}} if case == "sharded" else {}
            values(fork_ranks(size, lambda case=case, s=size, m=more: train(folder / f"{case}-{s}", CASES[case], m)))
    shorter = {"train": {"steps": 1}}
    values(fork_ranks(2, lambda: train(folder / "resumed", CASES["turns"], shorter)))
    shutil.rmtree(folder / "resumed" / "model")
    values(fork_ranks(3, lambda: train(folder / "resumed", CASES["turns"], resume=True)))
    seldom = {"run": {"checkpoint_every": 0}, "evaluate": {"every": 0, "before_training": False}}
    return {
        "all": fork_ranks(2, lambda: train(folder / "all", seldom, environment=LateFailure)),
        "one": fork_ranks(2, lambda: train(folder / "one", environment=doubtful)),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, dict[str, list[Any]]]:
    root = tmp_path_factory.mktemp("runs")
    return root, drive(f"{HERE}:run_all", str(root))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "size"), [(case, size) for case, sizes in SIZES.items() for size in sizes])
def test_the_result_is_that_of_one_process(runs, case, size):
    root, _ = runs
    check = check_sharded_close if case == "sharded" else check_close
    check(root / f"{case}-1", root / f"{case}-{size}", STEPS)


@pytest.mark.slow
def test_the_cases_are_what_they_say(runs):
    root, _ = runs
    rows = [row for row in metrics_of(root / "turns-3") if "reward" in row]
    assert [row["episodes/groups_failed"] for row in rows] == [4, 1, 0]
    assert all(row["updates"] for row in rows)
    advantages = read_rollouts(root / "turns-1").column("advantage").to_pylist()
    without = read_rollouts(root / "kept-1").column("advantage").to_pylist()
    assert advantages[:4] != without[:4]  # of the same conversations
    rows = [row for row in metrics_of(root / "rollout-2") if "reward" in row]
    assert [row["episodes/groups_failed"] for row in rows] == [4, 1, 0]
    assert all(2 <= row["episodes/turns"] <= 3 for row in rows)


@pytest.mark.slow
def test_a_run_of_two_goes_on_with_three(runs):
    root, _ = runs
    check_close(root / "turns-1", root / "resumed", STEPS)


@pytest.mark.slow
def test_all_ranks_end_with_the_error_of_a_step_in_which_every_group_fails(runs):
    root, ended = runs
    for status, _, error in ended["all"]:
        assert status == 2
        assert error.startswith("UserCodeError: the environment failed in every group of this step (5)")
        assert "the bridge at 5 is down" in error
    assert (root / "all" / "checkpoint-1").is_dir()


@pytest.mark.slow
def test_an_error_of_user_code_on_one_rank_ends_all(runs):
    first, second = runs[1]["one"]
    assert [first[0], second[0]] == [2, 2]
    assert first[2].startswith("RankError: rank 1 failed while sampling")
    assert "no map on this machine" in first[2]
    assert second[2].startswith("UserCodeError")


def test_a_conversation_arrives_as_it_was_sent():
    def turn(tokens: list[int], said: AssistantTurn, **more: Any) -> EpisodeTurn:
        logps = -torch.tensor(tokens, dtype=torch.float64)
        kept = KeptSets(torch.tensor([*tokens, *tokens]), torch.arange(0, 2 * len(tokens) + 1, 2))
        versions = torch.full((len(tokens),), 3, dtype=torch.int32)
        sampled = SampledTokens(torch.tensor(tokens), logps, logps / 2, versions, kept, "eos")
        return EpisodeTurn(sampled, said, **more)

    call = ToolCall("look", {"__tensor__": "0", "where": ["left", None]}, "call_1")
    first = Episode(
        prompt=[1, 2],
        turns=[
            turn(
                [5, 6, 7],
                AssistantTurn("I look", (call,), ("a comma is missing",), "hm"),
                state=Place(0, "start"),
                messages=[{"role": "tool", "content": "\ud800 nothing", "tool_call_id": "call_1"}],
                given=[8, 9],
                reward=0.5,
                calls=1,
                failed_calls=1,
            ),
            turn([4], AssistantTurn("left"), state=None),
        ],
        opening=[3],
        outcome="done",
        reward=float("inf"),
        rewards={"even": 1.0},
        counts={"left": 2.0},
        attempts=2,
    )
    second = Episode([1, 2], [turn([6], AssistantTurn(""), state=Place(0, "start"))], outcome="turn_limit")
    third = Episode([1, 2], outcome="failed", failure="the bridge is down")
    arrived = _episodes(decode(encode(_message([first, second, third]))))
    assert [turn.state for episode in arrived for turn in episode.turns] == [0, None, 0]
    for sent, got in zip([first, second, third], arrived, strict=True):
        for name in ("prompt", "opening", "outcome", "reward", "rewards", "counts", "failure", "attempts", "messages"):
            assert getattr(got, name) == getattr(sent, name), name
        assert [entry.said for entry in got.turns] == [entry.said for entry in sent.turns]
        assert got.context == sent.context
        for one, other in zip(got.turns, sent.turns, strict=True):
            assert (one.reward, one.calls, one.failed_calls) == (other.reward, other.calls, other.failed_calls)
            assert one.sampled.stop_reason == other.sampled.stop_reason
            for name in ("ids", "logps", "filtered_logps", "versions"):
                torch.testing.assert_close(getattr(one.sampled, name), getattr(other.sampled, name), rtol=0, atol=0)
            assert one.sampled.kept is not None
            assert other.sampled.kept is not None
            assert one.sampled.kept.ids.tolist() == other.sampled.kept.ids.tolist()
            assert one.sampled.kept.offsets.tolist() == other.sampled.kept.offsets.tolist()
    assert _episodes(decode(encode(_message([third])))) == [third]
