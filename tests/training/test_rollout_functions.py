"""Runs whose conversations are led by a function of the user's own."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from groupwise.config import make_recipe
from groupwise.errors import ConfigError, UserCodeError
from groupwise.tasks import Task
from groupwise.training.evaluation import evaluate_rows
from groupwise.training.preflight import describe_run
from groupwise.training.store.rollout_files import read_rollouts
from tests.training.runs import ROWS, check_same, metrics_of, run_steps, small_trainer

CHAT = {"data": {"chat": True}, "sampling": {"max_new_tokens": 6}}
FAILING = ROWS[3]["prompt"]


def share_of_even(text: str) -> float:
    return sum(ord(letter) % 2 == 0 for letter in text) / max(1, len(text))


async def agent(model, row):
    """Three turns; the reward is the share of even letters in the last one."""
    if row["prompt"] == FAILING:
        raise ConnectionError("the shop is closed")
    messages = [{"role": "user", "content": row["prompt"]}]
    for turn in range(3):
        messages.append(await model.chat(messages))
        messages.append({"role": "user", "content": f"{len(messages[-1]['content'])} letters, turn {turn}"})
    return share_of_even(messages[-2]["content"])


def http_agent(model, row):
    """The same by HTTP, from a thread."""
    if row["prompt"] == FAILING:
        raise ConnectionError("the shop is closed")
    messages = [{"role": "user", "content": row["prompt"]}]
    for turn in range(3):
        request = urllib.request.Request(
            f"{model.base_url}/chat/completions",
            json.dumps({"model": model.name, "messages": messages}).encode(),
            {"Authorization": f"Bearer {model.api_key}"},
        )
        with urllib.request.urlopen(request) as response:
            messages.append(json.load(response)["choices"][0]["message"])
        messages.append({"role": "user", "content": f"{len(messages[-1]['content'])} letters, turn {turn}"})
    return share_of_even(messages[-2]["content"])


def rollout_trainer(folder: Path, *changes: Any, **options: Any) -> Any:
    return small_trainer(folder, CHAT, *changes, **{"rollout": agent, "rewards": [], **options})


def test_a_run_trains_what_a_function_led(tmp_path):
    with rollout_trainer(tmp_path / "run") as trainer:
        trainer.run()
        assert trainer.display.heard("the shop is closed")
    rows = [row for row in metrics_of(tmp_path / "run") if "reward" in row]
    assert len(rows) == 4
    assert max(row["sampler/logp_difference_max"] for row in rows if row["updates"]) < 1e-4  # on what was sampled
    assert {row["episodes/turns"] for row in rows} == {3.0}
    assert sum(row["episodes/groups_failed"] for row in rows) == 1
    table = read_rollouts(tmp_path / "run")
    assert len(table) == (4 * 3 - 1) * 4
    said = [json.loads(text) for text in table.column("conversation").to_pylist()]
    assert all(
        [message["role"] for message in messages] == ["assistant", "user"] * 2 + ["assistant"] for messages in said
    )
    rewards = [share_of_even(messages[-1]["content"]) for messages in said]
    assert table.column("reward/environment").to_pylist() == pytest.approx(rewards)
    assert table.column("reward").to_pylist() == pytest.approx(rewards)


def test_the_endpoint_gives_the_same_run(tmp_path):
    for name, function in (("direct", agent), ("http", http_agent)):
        with rollout_trainer(tmp_path / name, {"train": {"steps": 2}}, rollout=function) as trainer:
            trainer.run()
    check_same(tmp_path / "direct", tmp_path / "http", 2)


def test_a_stopped_run_goes_on_as_if_it_had_not_been_stopped(tmp_path):
    with rollout_trainer(tmp_path / "a") as trainer:
        trainer.run()
    run_steps(rollout_trainer(tmp_path / "b"), 2)
    with rollout_trainer(tmp_path / "b", resume=True) as trainer:
        trainer.run()
    check_same(tmp_path / "a", tmp_path / "b", 4)


def test_another_function_is_noticed_when_a_run_resumes(tmp_path):
    run_steps(rollout_trainer(tmp_path / "run"), 1)
    file = tmp_path / "other.py"
    file.write_text("async def agent(model, row):\n    return 1.0\n")
    with pytest.raises(Exception, match="rollout"):
        rollout_trainer(tmp_path / "run", {"environment": {"rollout": f"{file}:agent"}}, rollout=None, resume=True)


def test_reward_functions_may_decide(tmp_path):
    async def unrewarded(model, row):
        await agent(model, {"prompt": "Hello"})

    def turns_of(turns, environment_reward, **_):
        assert set(environment_reward) == {None}
        return [float(count) for count in turns]

    with rollout_trainer(tmp_path / "run", {"train": {"steps": 1}}, rollout=unrewarded, rewards=[turns_of]) as trainer:
        trainer.run()
    assert set(read_rollouts(tmp_path / "run").column("reward").to_pylist()) == {3.0}


def test_without_any_reward_the_run_ends_with_a_reason(tmp_path):
    async def unrewarded(model, row):
        await agent(model, {"prompt": "Hello"})

    with (
        pytest.raises(UserCodeError, match="no reward functions"),
        rollout_trainer(tmp_path / "run", rollout=unrewarded) as trainer,
    ):
        trainer.run()


def test_the_prompt_is_what_the_function_sent(tmp_path):
    async def polite(model, row):
        await model.chat([{"role": "system", "content": "Be kind."}, {"role": "user", "content": row["prompt"] * 2}])
        return 1.0

    with rollout_trainer(tmp_path / "run", {"train": {"steps": 1}}, rollout=polite) as trainer:
        trainer.run()
    for prompt in read_rollouts(tmp_path / "run").column("prompt").to_pylist():
        assert "Be kind." in prompt
        assert prompt.count("Say number") == 2


def test_held_out_rows_are_led_too(tmp_path):
    with rollout_trainer(tmp_path / "run") as trainer:
        evaluation = evaluate_rows(trainer.components, trainer.generator)
    assert 0 <= evaluation.metrics["reward"] <= 1
    assert [answer["tokens"] <= 3 * 3 for answer in evaluation.answers] == [True] * 2


FILE = """
async def agent(model, row):
    reply = await model.chat([{"role": "user", "content": row["prompt"]}])
    return float(len(reply["content"]))


async def broken(model, row):
    await model.chat([{"role": "user", "content": row["prompt"]}], temperature=0.3)
"""


def recipe_of(folder: Path, function: str) -> Any:
    (folder / "agent.py").write_text(FILE)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return make_recipe(
        {
            "model": {"source": "tiny"},
            "data": {"train": str(folder / "rows.jsonl")},
            "sampling": {"samples_per_prompt": 4, "max_new_tokens": 5},
            "environment": {"rollout": f"{folder / 'agent.py'}:{function}"},
        }
    )


def test_check_tries_a_group_of_rollouts(tmp_path):
    lines = list(describe_run(recipe_of(tmp_path, "agent")))
    assert any(re.match(r"4 conversations about the first row: 1\.0 turns each", line) for line in lines)
    assert any(re.match(r"reward environment: [0-9.]+ to [0-9.]+", line) for line in lines)
    with pytest.raises(UserCodeError, match=r"temperature must be left out or 1\.0.*agent\.py, line 8"):
        list(describe_run(recipe_of(tmp_path, "broken")))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rollout": lambda model: 1.0}, r"called as <lambda>\(model, row\), but too many"),
        ({"rollout": lambda model, row, extra: 1.0}, "missing a required argument: 'extra'"),
        ({"rollout": "agent"}, "a rollout function is a function"),
        ({"environment": dict}, "two environments, of environment and of rollout"),
        ({"tools": [share_of_even]}, "two environments, of environment.tools and of rollout"),
    ],
)
def test_what_is_no_rollout_function_is_refused(tmp_path, options, words):
    with pytest.raises(ConfigError, match=words):
        rollout_trainer(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_a_function_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"rollout function .*there is no 'agnet' in .*did you mean 'agent'"):
        list(describe_run(recipe_of(tmp_path, "agnet")))


def test_rows_may_be_texts_without_a_chat_template(tmp_path):
    task = Task("plain", ROWS[4:])
    with rollout_trainer(tmp_path / "run", {"data": {"chat": False}, "train": {"steps": 1}}, task=task) as trainer:
        trainer.run()
    assert set(read_rollouts(tmp_path / "run").column("outcome").to_pylist()) == {"done"}
