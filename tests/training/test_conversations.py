"""Runs whose completions are conversations with tools and environments."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch

from groupwise.analysis.replay import rescore
from groupwise.analysis.run_reader import RunReader
from groupwise.config import make_recipe
from groupwise.environments import AssistantTurn, Environment, Reply
from groupwise.errors import CheckpointError, ConfigError, UserCodeError
from groupwise.rewards import named
from groupwise.tasks import Task
from groupwise.tasks.game import Game, game_task
from groupwise.training.evaluation import evaluate_rows
from groupwise.training.preflight import describe_run
from groupwise.training.store.rollout_files import read_rollouts
from tests.training.runs import (
    ROWS,
    TOOL_TEMPLATE,
    check_same,
    metrics_of,
    run_steps,
    small_recipe,
    small_trainer,
)

GAME = {
    "task": "game",
    "data": {"train_rows": 12, "held_out_rows": 4},
    "sampling": {"max_new_tokens": 1, "samples_per_prompt": 8},
    "evaluate": {"max_new_tokens": 1},
    "sft": {"steps": 25, "learning_rate": 2e-3},
}
CHAT = {"data": {"chat": True}}
SERVER = {"servers": ["http://127.0.0.1:9"]}


def share_of_even(text: str) -> float:
    return sum(ord(letter) % 2 == 0 for letter in text) / 6


class Counting(Environment):
    """Answers twice with the number of letters so far; the reward is the share of even letters in the last turn."""

    def __init__(self) -> None:
        self.turns: list[str] = []
        self.row: dict[str, Any] = {}

    async def start(self, row, seed):
        self.turns, self.row = [], row
        return

    async def respond(self, turn: AssistantTurn) -> Reply:
        self.turns.append(turn.text)
        if self.row.get("fails") or (self.row["prompt"] == FAILING and len(self.turns) == 2):
            raise RuntimeError("the dice are lost")
        if len(self.turns) == 3:
            return Reply(done=True)
        return Reply([{"role": "user", "content": f"{sum(map(len, self.turns))} letters"}])

    async def reward(self) -> float:
        return share_of_even(self.turns[-1]) if self.turns else 0.0


FAILING = "Say number 3: "


def game_trainer(folder, *changes, **options):
    recipe = small_recipe(GAME, *changes)
    return small_trainer(folder, GAME, *changes, task=game_task(recipe), rewards=[], **options)


def conversations(folder) -> list[list[dict[str, Any]]]:
    return [json.loads(text) for text in read_rollouts(folder).column("conversation").to_pylist()]


def test_a_game_is_played_trained_and_recorded(tmp_path):
    with game_trainer(tmp_path / "run") as trainer:
        trainer.run()
    rows = [row for row in metrics_of(tmp_path / "run") if "reward" in row]
    assert len(rows) == 4
    assert all(0 < row["episodes/turns"] <= 6 for row in rows)
    assert all(0 < row["episodes/reused_share"] < 1 for row in rows)
    differences = [row["sampler/logp_difference_max"] for row in rows if row["updates"]]
    assert max(differences) < 1e-4  # trained on what was sampled
    table = read_rollouts(tmp_path / "run")
    turns, tokens = (table.column(name).to_pylist() for name in ("turns", "completion_tokens"))
    assert tokens == turns  # one token per move; boards are not counted
    assert set(table.column("outcome").to_pylist()) == {"done"}
    for messages, count in zip(conversations(tmp_path / "run"), turns, strict=True):
        assert [message["role"] for message in messages] == (["assistant", "user"] * int(count))[:-1]
    assert table.column("reward/environment").to_pylist() == table.column("reward").to_pylist()


def test_what_was_sampled_and_what_was_given_is_recorded(tmp_path):
    changes = {"run": {"save_tokens_every": 1}, "train": {"steps": 2}, "advantages": {"turn_weight": 1.0}}
    with game_trainer(tmp_path / "run", changes) as trainer:
        trainer.run()
        decode = trainer.components.tokenizer.decode
    reader = RunReader(tmp_path / "run")
    rollouts = {(row["prompt_number"], row["sample"]): row for row in reader.rollouts(2)}
    tokens = reader.tokens(2)
    assert len(tokens) == 2 * 8
    for row in tokens:
        recorded = rollouts[row.prompt_number, row.sample]
        messages, split = json.loads(recorded["conversation"]), list(zip(row.all_ids, row.sampled, strict=True))
        assert [token for token, sampled in split if sampled] == row.ids
        assert (
            "".join(row.texts)
            == decode(row.ids, skip_special_tokens=True)
            == "".join(message["content"] for message in messages if message["role"] == "assistant")
        )
        given = [token for token, sampled in split if not sampled]
        assert decode(given) == "".join(message["content"] for message in messages if message["role"] == "user")
    for row in rollouts.values():
        turns = json.loads(row["turn_details"])
        assert [turn["tokens"] for turn in turns] == [1] * int(row["turns"])
        assert turns[0]["state"] == 0  # the games of a group start alike
        assert {*turns[0]} == {"tokens", "reward", "state", "advantage"}
    assert any(len({turn["advantage"] for turn in json.loads(row["turn_details"])}) > 1 for row in rollouts.values())


def test_recorded_conversations_are_scored_again(tmp_path):
    changes = {"advantages": {"turn_weight": 1.0}, "train": {"steps": 2}, "scoring": {"overlong_buffer": 2}}
    with game_trainer(tmp_path / "run", changes) as trainer:
        trainer.run()
        task = trainer.components.task
    again = rescore(tmp_path / "run", task=task, settings={"advantages.turn_weight": 0.0})
    assert again.self_check.passed
    assert again.total.groups_with_signal.after <= again.total.groups_with_signal.before
    assert any("advantages.turn_weight" in note for note in again.notes)
    harder = {"scoring.overlong_buffer": 8, "scoring.overlong_weight": 2.0}
    changed = {reward.name: reward for reward in rescore(tmp_path / "run", task=task, settings=harder).rewards}
    lengths = [row["completion_tokens"] for step in (1, 2) for row in RunReader(tmp_path / "run").rollouts(step)]
    penalties = [2.0 * -max(0, length - 2) / 8 for length in lengths]  # of 10 turns of a token
    assert changed["overlong"].mean == pytest.approx(sum(penalties) / len(penalties))
    for column, words in (
        ({"turn_details": ["no json"]}, "conversations cannot be read"),
        ({}, "has not recorded any"),
    ):
        rewrite_column(tmp_path / "run" / "rollouts" / "step-000001.parquet", "turn_details", column)
        with pytest.raises((CheckpointError, ConfigError), match=words):
            rescore(tmp_path / "run", task=task)


def test_rewards_of_recorded_conversations_are_called_again(tmp_path):
    """With what they got in the run: messages, the environment's reward and the number of turns."""

    def talk(
        completions: Sequence[Any],
        environment_reward: Sequence[float],
        conversation: Sequence[Any],
        turns: Sequence[int],
        **_: Any,
    ) -> list[float]:
        assert list(completions) == list(conversation)
        letters = [sum(len(message["content"]) for message in messages) for messages in conversation]
        return [
            reward + count / 10 + turn for reward, count, turn in zip(environment_reward, letters, turns, strict=True)
        ]

    task = Task("chats", [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS[4:]])
    changes = {"train": {"steps": 1}, "data": {"chat": None}}
    options = {"task": task, "environment": Counting, "rewards": [talk]}
    with small_trainer(tmp_path / "run", changes, **options) as trainer:
        trainer.run()
    wanted = [row["reward/talk"] for row in RunReader(tmp_path / "run").rollouts(1)]
    again = rescore(tmp_path / "run", task=task, rewards=[("environment", 0.0), named(talk, name="again")])
    assert {reward.name: reward.mean for reward in again.rewards}["again"] == pytest.approx(sum(wanted) / len(wanted))
    assert len(set(wanted)) > 2


def rewrite_column(path: Path, name: str, values: dict[str, list[str]]) -> None:
    """The file with this column of the same value in each row, or without it."""
    table = pyarrow.parquet.read_table(path).drop_columns(name)
    for column, (value,) in values.items():
        table = table.append_column(column, pyarrow.array([value] * len(table)))
    pyarrow.parquet.write_table(table, path)


@pytest.mark.parametrize(
    ("stop", "changes"),
    [
        (1, {}),
        (2, {"advantages": {"turn_weight": 1.0}, "train": {"mini_batches": 2, "update_per_step": True}}),
        pytest.param(3, {}, marks=pytest.mark.slow),
    ],
    ids=["first step", "turns compared", "third step"],
)
def test_a_stopped_game_goes_on_as_if_it_had_not_been_stopped(tmp_path, stop, changes):
    with game_trainer(tmp_path / "a", changes) as trainer:
        trainer.run()
    run_steps(game_trainer(tmp_path / "b", changes), stop)
    with game_trainer(tmp_path / "b", changes, resume=True) as trainer:
        trainer.run()
    check_same(tmp_path / "a", tmp_path / "b", 4)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"masks": {"keep_sampling_mask": True}, "sampling": {"top_k": 20}},
        {"train": {"mini_batches": 2, "iterations": 2, "update_per_step": True}},
        {"loss": {"kl_coef": 0.1, "aggregation": "token_mean"}, "advantages": {"scale": "none"}},
        {"train": {"token_budget": 16}},
    ],
    ids=["plain", "kept sets", "several updates", "with a reference", "small packs"],
)
def test_an_environment_of_ones_own(tmp_path, changes):
    with small_trainer(tmp_path / "run", changes, environment=Counting, rewards=[]) as trainer:
        trainer.run()
    for messages in conversations(tmp_path / "run"):
        assert len(messages) == 5
        assert all(message["content"].endswith("letters") for message in messages if message["role"] == "user")
    rows = [row for row in metrics_of(tmp_path / "run") if "reward" in row]
    differences = [row["sampler/logp_difference_max"] for row in rows if row["updates"]]
    assert max(differences) < 1e-4


def test_long_conversations_are_penalised(tmp_path):
    """All have 3 turns of up to 6 tokens, which is all that the limits allow."""
    changes = {"train": {"steps": 1}, "scoring": {"overlong_buffer": 4}, "environment": {"max_turns": 3}}
    with small_trainer(tmp_path / "run", changes, environment=Counting, rewards=[]) as trainer:
        trainer.run()
    table = read_rollouts(tmp_path / "run")
    lengths, penalties = (table.column(name).to_pylist() for name in ("completion_tokens", "reward/overlong"))
    assert penalties == [-max(0.0, length - 14) / 4 for length in lengths]
    assert min(penalties) < 0


def test_resumed_in_the_middle_of_a_rollout(tmp_path):
    changes = {"train": {"mini_batches": 2, "update_per_step": True}}
    with small_trainer(tmp_path / "a", changes, environment=Counting, rewards=[]) as trainer:
        trainer.run()
    run_steps(small_trainer(tmp_path / "b", changes, environment=Counting, rewards=[]), 1)
    with small_trainer(tmp_path / "b", changes, environment=Counting, rewards=[], resume=True) as trainer:
        trainer.run()
    check_same(tmp_path / "a", tmp_path / "b", 4)


def test_rewards_get_what_happened(tmp_path):
    seen: list[dict[str, Any]] = []

    def record(
        prompts: Sequence[Any],
        completions: Sequence[Any],
        environment_reward: Sequence[float],
        conversation: Sequence[Any],
        turns: Sequence[int],
        **_: Any,
    ) -> list[float]:
        for values in zip(prompts, completions, environment_reward, conversation, turns, strict=True):
            seen.append(dict(zip(("prompt", "completion", "reward", "conversation", "turns"), values, strict=True)))
        return [0.0] * len(prompts)

    with small_trainer(tmp_path / "run", {"train": {"steps": 1}}, environment=Counting, rewards=[record]) as trainer:
        trainer.run()
    assert len(seen) >= 12
    for entry in seen:
        said = [message["content"] for message in entry["conversation"] if message["role"] == "assistant"]
        assert entry["turns"] == len(said)
        assert entry["completion"] == "\n".join(said)  # the prompt is a text
        assert entry["reward"] == share_of_even(said[-1])


def test_rewards_get_messages_for_prompts_of_messages(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    seen: list[Any] = []

    def record(completions: Sequence[Any], conversation: Sequence[Any], **_: Any) -> list[float]:
        seen.extend(completions)
        assert list(completions) == list(conversation)
        return [0.0] * len(completions)

    changes = {"train": {"steps": 1}, "data": {"chat": None}}
    with small_trainer(
        tmp_path / "run", changes, task=Task("chats", rows), environment=Counting, rewards=[record]
    ) as trainer:
        trainer.run()
    assert {message["role"] for messages in seen for message in messages} <= {"assistant", "user"}


def test_a_group_whose_environment_fails_is_left_out_and_counted(tmp_path):
    with small_trainer(tmp_path / "run", environment=Counting, rewards=[]) as trainer:
        trainer.run()
        assert trainer.display.heard("the dice are lost")
    rows = [row for row in metrics_of(tmp_path / "run") if "reward" in row]
    failed = [row["episodes/groups_failed"] for row in rows]
    assert sum(failed) == 1  # twelve of the ten rows are drawn in four steps
    table = read_rollouts(tmp_path / "run")
    assert FAILING not in table.column("prompt").to_pylist()
    assert len(table) == (4 * 3 - sum(failed)) * 4


def test_a_step_in_which_every_environment_fails_ends_the_run(tmp_path):
    rows = [{**row, "fails": number >= 3} for number, row in enumerate(ROWS)]
    changes = {"data": {"shuffle": False}}
    task = Task("fails", rows)
    trainer = small_trainer(tmp_path / "run", changes, task=task, environment=Counting, rewards=[])
    with pytest.raises(UserCodeError, match="the dice are lost"), trainer:
        trainer.run()
    assert (tmp_path / "run" / "checkpoint-1").is_dir()  # the finished step is not lost


def double(number: int) -> int:
    """Doubles a number.

    Args:
        number: Any number.
    """
    return 2 * number


def test_tools_are_shown_in_the_prompt(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(TOOL_TEMPLATE)
    changes = {"train": {"steps": 1}, "environment": {"chat_template": str(template), "call_format": "hermes"}}
    with small_trainer(tmp_path / "run", CHAT, changes, tools=[double]) as trainer:
        trainer.run()
    assert all("Doubles a number" in prompt for prompt in read_rollouts(tmp_path / "run").column("prompt").to_pylist())
    with pytest.raises(ConfigError, match="does not show tools"):
        small_trainer(tmp_path / "other", CHAT, tools=[double])


class Methods:
    """In TRL's form."""

    def reset(self, prompt, **_):
        self.prompt = prompt
        return " The number of today is 7."

    def get_reward(self):
        return float(len(self.prompt))

    def _helper(self): ...


def test_an_environment_in_trls_form(tmp_path):
    with small_trainer(tmp_path / "run", {"train": {"steps": 1}}, CHAT, environment=Methods, rewards=[]) as trainer:
        trainer.run()
    table = read_rollouts(tmp_path / "run")
    assert all("The number of today is 7." in prompt for prompt in table.column("prompt").to_pylist())
    assert set(table.column("reward/environment").to_pylist()) == {float(len(ROWS[0]["prompt"]))}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": {"max_staleness": 2}, "sampling": {"generator": "vllm"}, "vllm": SERVER}, "train.max_staleness"),
        ({"advantages": {"grouping": "similarity"}}, "similarity"),
        ({"environment": {"tools": ["calculator"]}}, "none of the built-in tools"),
        ({"environment": {"factory": "nowhere.py:Thing"}}, "two environments"),
    ],
    ids=["stale", "similarity", "unknown tool", "two"],
)
def test_what_does_not_go_together_is_refused(tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        game_trainer(tmp_path / "run", changes)
    assert not (tmp_path / "run").exists()


def test_a_file_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.py"):
        small_trainer(tmp_path / "run", {"environment": {"factory": "nowhere.py:Thing"}})


def test_turns_need_an_environment(tmp_path):
    with pytest.raises(ConfigError, match=r"advantages\.turn_weight"):
        small_trainer(tmp_path / "run", {"advantages": {"turn_weight": 1.0}})


def test_two_environments_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="two environments"):
        game_trainer(tmp_path / "run", environment=Counting)


def test_columns_of_the_conversation_are_not_the_rows(tmp_path):
    task = Task("columns", [{**row, "turns": 3} for row in ROWS])
    with pytest.raises(ConfigError, match="'turns'"):
        small_trainer(tmp_path / "run", task=task, environment=Counting)


def test_what_is_no_environment_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="neither respond"):
        small_trainer(tmp_path / "run", environment=dict)
    with pytest.raises(ConfigError, match="class or a function"):
        small_trainer(tmp_path / "run", environment=3)


def test_held_out_rows_are_conversations_too(tmp_path):
    with game_trainer(tmp_path / "run") as trainer:
        evaluation = evaluate_rows(trainer.components, trainer.generator)
    assert 0 <= evaluation.metrics["reward"] <= 1
    assert [answer["tokens"] <= 6 for answer in evaluation.answers] == [True] * 4


def test_check_tries_a_group_of_conversations():
    recipe = make_recipe(
        {**GAME, "task": "groupwise.tasks.game:game_task", "model": {"source": "tiny"}, "data": {"chat": False}}
    )
    lines = list(describe_run(recipe))
    assert any(re.match(r"8 conversations about the first row: .* turns each", line) for line in lines)
    assert any(re.match(r"reward environment: 0 to [01]", line) for line in lines)


def test_games_are_the_same_for_all_who_play_them():
    """A group's conversations start in the same state."""
    one, other = Game(), Game()
    import asyncio

    row = {"prompt": "*2e2n #1e0n>", "board": "b2 d4 c2"}
    for game in (one, other):
        assert asyncio.run(game.start(row, 1)) is None
    assert one.state_key() == other.state_key()
    torch.testing.assert_close(asyncio.run(one.reward()), 0.0)
