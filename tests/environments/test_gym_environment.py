"""Gymnasium environments with texts."""

from __future__ import annotations

import asyncio
import threading

import gymnasium
import pytest
from gymnasium import spaces

from groupwise.environments import AssistantTurn, EnvironmentFailed, GymEnvironment, Limits
from groupwise.errors import ConfigError

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 "


class Corridor(gymnasium.Env):
    """Walk to the end, three places to the right of a start that depends on the seed."""

    observation_space = spaces.Text(100, charset=LETTERS)
    action_space = spaces.Discrete(2, start=1)
    fails = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = (options or {}).get("place", int(self.np_random.integers(100)))
        self.end = self.place + 3
        return f"place {self.place}", {}

    def step(self, action):
        if self.fails is not None:
            return self.fails()
        self.place += {1: -1, 2: 1}[action]
        return f"place {self.place}", -1.0, self.place == self.end, False, {}


class Echo(gymnasium.Env):
    observation_space = spaces.Discrete(5)
    action_space = spaces.Text(5, charset="abc")

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        return len(action), float(len(action)), False, len(action) == 5, {}


def say(environment, *texts, row=None, seed=0):
    async def run():
        opening = await environment.start(row or {}, seed)
        replies = [await environment.respond(AssistantTurn(text)) for text in texts]
        reward = await environment.reward()
        await environment.close()
        return opening, replies, reward

    return asyncio.run(run())


def test_an_episode():
    environment = GymEnvironment(Corridor, actions=["left", "right"], instructions="Walk.")
    row = {"options": {"place": 5}}
    opening, replies, reward = say(environment, "left", "Right!", "I go right", "`RIGHT`.", "right", row=row)
    assert opening == [{"role": "user", "content": "Walk.\n\nplace 5"}]
    assert [reply.messages[0]["content"] for reply in replies] == [f"place {place}" for place in (4, 5, 6, 7, 8)]
    assert [reply.done for reply in replies] == [False] * 4 + [True]
    assert [reply.reward for reply in replies] == [-1.0] * 5
    assert reward == -5.0
    assert environment.counts == {"steps": 5, "invalid_actions": 0, "truncated": 0}
    assert environment.state_key() == "place 8"


@pytest.mark.parametrize("text", ["", "up", "left or right", "leftmost", "3"])
def test_a_turn_without_one_action_takes_no_step(text):
    environment = GymEnvironment(Corridor, actions=["left", "right"])
    _, (reply,), reward = say(environment, text)
    assert not reply.done
    assert reply.reward is None
    assert "left, right" in reply.messages[0]["content"]
    assert environment.counts == {"steps": 0, "invalid_actions": 1, "truncated": 0}
    assert reward == 0


def test_a_seed_gives_a_state():
    openings = [say(GymEnvironment(Corridor), seed=seed)[0][0]["content"] for seed in (1, 1, 2, 3, 4)]
    assert openings[0] == openings[1]
    assert len(set(openings)) > 1


def test_actions_are_numbers_by_default():
    _, replies, _ = say(GymEnvironment(Corridor), "1", "2", "0", row={"options": {"place": 5}})
    assert [reply.messages[0]["content"] for reply in replies[:2]] == ["place 4", "place 5"]
    assert replies[2].messages[0]["content"].endswith("1, 2")


def test_one_name_within_another():
    environment = GymEnvironment(Corridor, actions=["go", "go back"])
    _, replies, _ = say(environment, "I will go back", "I will go", row={"options": {"place": 5}})
    assert [reply.messages[0]["content"] for reply in replies] == ["place 6", "place 5"]


def test_actions_that_are_texts():
    environment = GymEnvironment(Echo, describe=lambda number: f"{number} letters")
    opening, replies, reward = say(environment, " abc \n", "xyz", "abcabc", "aaaaa")
    assert opening[0]["content"] == "0 letters"
    assert [reply.messages[0]["content"][:9] for reply in replies] == [
        "3 letters",
        "Error: th",
        "Error: th",
        "5 letters",
    ]
    assert replies[-1].done
    assert reward == 8.0
    assert environment.counts == {"steps": 2, "invalid_actions": 2, "truncated": 1}


def test_a_parser_of_actions():
    def parse(text):
        return {"west": 1, "east": 2}.get(text)

    environment = GymEnvironment(Corridor, parse_action=parse)
    _, replies, _ = say(environment, "east", "north", row={"options": {"place": 5}})
    assert replies[0].messages[0]["content"] == "place 6"
    assert replies[1].reward is None


def test_a_registered_environment_by_name():
    environment = GymEnvironment(
        "FrozenLake-v1", describe=lambda place: f"place {place}", actions=["west", "south", "east", "north"]
    )
    opening, replies, _ = say(environment, "south", seed=1)
    assert opening[0]["content"] == "place 0"
    assert replies[0].messages[0]["content"].startswith("place ")


def test_what_is_missing_is_said():
    with pytest.raises(ConfigError, match="space Discrete; set describe"):
        GymEnvironment(Echo)
    with pytest.raises(ConfigError, match="2 different names"):
        GymEnvironment(Corridor, actions=["left"])
    with pytest.raises(ConfigError, match="2 different names"):
        GymEnvironment(Corridor, actions=["left", "Left"])
    with pytest.raises(ConfigError, match="leave `actions` out"):
        GymEnvironment(Echo, describe=str, actions=["a"])
    with pytest.raises(ConfigError, match="space Box, not Discrete or Text; set parse_action"):
        GymEnvironment("MountainCarContinuous-v0", describe=str)
    with pytest.raises(ConfigError, match="by its name or a function"):
        GymEnvironment(Corridor())
    with pytest.raises(EnvironmentFailed, match="NoSuchGame"):
        GymEnvironment("NoSuchGame-v0")


@pytest.mark.parametrize(
    ("fails", "word"),
    [
        (lambda: 1 / 0, "step raised ZeroDivisionError"),
        (lambda: ("a", 1.0), "step returned"),
        (lambda: ("a", None, False, False, {}), "the reward None"),
        (lambda: ("a", float("nan"), False, False, {}), "the reward nan"),
        (lambda: (5, 1.0, False, False, {}), "its observation gave 5, which is no text"),
    ],
)
def test_an_environment_that_fails(fails, word):
    with pytest.raises(EnvironmentFailed, match=word):
        say(GymEnvironment(failing(fails)), "1")


def failing(fails):
    class Failing(Corridor):
        pass

    Failing.fails = staticmethod(fails)
    return Failing


def test_a_step_that_hangs():
    limits = Limits(turn_seconds=0.05)
    with pytest.raises(EnvironmentFailed, match=r"did not return within 0\.05 s") as failure:
        say(GymEnvironment(failing(threading.Event().wait), limits=limits), "1")
    assert failure.value.timed_out
