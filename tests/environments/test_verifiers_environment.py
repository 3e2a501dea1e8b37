"""Environments of verifiers 0.1: objects of the same form, and the library itself where it is installed.

The development environment does not have it. There its few classes that the adapter uses are replaced by ones of the
same form.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from groupwise.environments import AssistantTurn, EnvironmentFailed, ToolCall, VerifiersEnvironment, watched
from groupwise.errors import ConfigError, MissingExtraError

HAS_LIBRARY = importlib.util.find_spec("verifiers") is not None
PROMPT = [{"role": "system", "content": "Guess."}, {"role": "user", "content": "A number from 1 to 9"}]


class Part(dict):
    """A message or a call, with its fields as keys and as attributes."""

    __getattr__ = dict.get


class State(dict):
    """Gives the fields of the row as its own, as the one of verifiers."""

    def __getitem__(self, key):
        return super().__getitem__("input")[key] if key in super().get("input", {}) else super().__getitem__(key)

    def get(self, key, default=None):
        try:
            return self[key]
        except KeyError:
            return default

    def __setitem__(self, key, value):
        if key in super().get("input", {}):
            super().__getitem__("input")[key] = value
        else:
            super().__setitem__(key, value)


class Rubric:
    def __init__(self, score):
        self.score = score

    async def score_rollout(self, state):
        reward = self.score(completion=state["completion"], answer=state.get("answer", ""), state=state)
        state["reward"], state["metrics"] = reward, {"score": reward}

    async def cleanup(self, state):
        state["rubric_cleaned"] = True


class MultiTurn:
    """The form of verifiers' MultiTurnEnv."""

    def __init__(self, score, max_turns=-1, tool_defs=()):
        self.rubric, self.max_turns, self.tool_defs = Rubric(score), max_turns, list(tool_defs)

    async def is_completed(self, state):
        return len(state["trajectory"]) >= self.max_turns > 0

    async def add_trajectory_step(self, state, step):
        state["trajectory"].append(step)

    async def cleanup(self, state):
        state["completion"] = [message for step in state["trajectory"] for message in step["completion"]]


@pytest.fixture
def base(monkeypatch):
    """The class that environments inherit from."""
    if HAS_LIBRARY:
        import verifiers
        from datasets import Dataset

        rows = Dataset.from_list([{"prompt": PROMPT, "answer": "7", "example_id": 0}])

        class Real(verifiers.MultiTurnEnv):
            def __init__(self, score, max_turns=-1, tool_defs=()):
                tools = [verifiers.types.Tool(**tool) for tool in tool_defs]
                rubric = verifiers.Rubric(funcs=[score])
                super().__init__(dataset=rows, rubric=rubric, max_turns=max_turns, tool_defs=tools)

        return Real
    types = ModuleType("verifiers.types")
    types.State, types.RolloutTiming = State, SimpleNamespace
    types.AssistantMessage = lambda **fields: Part(role="assistant", **fields)
    types.ToolCall = Part
    utils = ModuleType("verifiers.utils.message_utils")
    utils.normalize_messages = lambda messages: [Part(message) for message in messages]
    for name, module in (
        ("verifiers", ModuleType("verifiers")),
        ("verifiers.types", types),
        ("verifiers.utils", ModuleType("verifiers.utils")),
        ("verifiers.utils.message_utils", utils),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    return MultiTurn


def score(completion, answer, state):
    last = completion[-1]["content"] if completion else ""
    return 1.0 if answer in last else 0.25 * len(state["trajectory"])


@pytest.fixture
def guessing(base):
    class Guessing(base):
        async def setup_state(self, state):
            state["guesses"] = []
            state["secret"] = state["answer"]

        async def env_response(self, messages, state, **options):
            guess = messages[-1]["content"]
            state["guesses"].append(guess)
            state["seen"] = [message["role"] for message in messages]
            if guess == state["secret"]:
                state["final_env_response"] = [{"role": "user", "content": "right"}]
            return [{"role": "user", "content": "right" if guess == state["secret"] else "wrong"}]

    return Guessing


ROW = {"prompt": PROMPT, "answer": "7", "info": '{"level": 1}', "example_id": 0}


def play(environment, *turns, row=None):
    async def run():
        guarded = watched(environment)
        opening = await guarded.start(row or ROW, 0)
        replies = [await guarded.respond(turn) for turn in turns]
        reward = await guarded.reward()
        await guarded.close()
        return opening, replies, reward

    return asyncio.run(run())


def test_a_conversation_until_the_last_response(guessing):
    environment = VerifiersEnvironment(guessing(score))
    opening, replies, reward = play(environment, AssistantTurn("3"), AssistantTurn("7"))
    assert opening is None
    assert [reply.messages for reply in replies] == [
        [{"role": "user", "content": "wrong"}],
        [{"role": "user", "content": "right"}],
    ]
    assert [reply.done for reply in replies] == [False, True]
    assert environment._state["guesses"] == ["3", "7"]
    assert environment._state["seen"] == ["system", "user", "assistant", "user", "assistant"]
    assert environment._state["info"] == {"level": 1}
    assert environment._state["completion"] is not None
    assert environment.counts["score"] == reward


def test_a_condition_ends_the_conversation(guessing):
    environment = VerifiersEnvironment(guessing(score, max_turns=2))
    _, replies, reward = play(environment, AssistantTurn("3"), AssistantTurn("4"))
    assert [reply.done for reply in replies] == [False, True]
    assert replies[1].messages == []
    assert reward == 0.5


def test_an_environment_serves_several_conversations(guessing):
    shared = guessing(score)
    first, second = VerifiersEnvironment(shared), VerifiersEnvironment(shared)
    play(first, AssistantTurn("1"))
    play(second, AssistantTurn("2"), AssistantTurn("3"))
    assert (first._state["guesses"], second._state["guesses"]) == (["1"], ["2", "3"])
    assert ROW["info"] == '{"level": 1}'
    play(first, AssistantTurn("4"))
    assert first._state["guesses"] == ["4"]


@pytest.fixture
def adding(base):
    class Adding(base):
        async def setup_state(self, state):
            state["calls"] = 0

        async def env_response(self, messages, state, **options):
            answers = []
            for call in messages[-1].tool_calls:
                state["calls"] += 1
                arguments = json.loads(call.arguments)
                content = str(arguments["a"] + arguments["b"])
                answers.append({"role": "tool", "content": content, "tool_call_id": call.id})
            return answers

    tool = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
    return Adding(score, tool_defs=[tool])


def test_tools_of_verifiers(adding):
    environment = VerifiersEnvironment(adding)
    assert environment.schemas == (
        {
            "type": "function",
            "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
        },
    )
    call = ToolCall("add", {"a": 1, "b": 2}, "c1")
    _, (unparsed, answered), _ = play(
        environment,
        AssistantTurn("", (call,), problems=("it is not JSON",)),
        AssistantTurn("", (call, ToolCall("add", {"a": 3, "b": 4}))),
    )
    assert "it is not JSON" in unparsed.messages[0]["content"]
    assert "No call of this turn was made" in unparsed.messages[0]["content"]
    assert answered.messages == [
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "tool", "content": "7", "tool_call_id": "call_1"},
    ]
    assert environment._state["calls"] == 2
    assert environment.counts["unparsed_calls"] == 1


def test_what_goes_wrong_is_named(guessing):
    with pytest.raises(EnvironmentFailed, match=r"needs a row with a prompt \(its columns: answer\)"):
        play(VerifiersEnvironment(guessing(score)), row={"answer": "7"})
    with pytest.raises(ConfigError, match=r"no MultiTurnEnv of verifiers 0\.1, as it has no setup_state"):
        VerifiersEnvironment(object())

    class Broken(guessing):
        async def env_response(self, messages, state, **options):
            raise KeyError("secret")

    with pytest.raises(EnvironmentFailed, match=r"respond raised KeyError: 'secret' \(test_verifiers"):
        play(VerifiersEnvironment(Broken(score)), AssistantTurn("1"))

    class Pictures(guessing):
        async def env_response(self, messages, state, **options):
            part = {"type": "image_url", "image_url": {"url": "data:,"}}
            return [{"role": "user", "content": [{"type": "text", "text": "look"}, part]}]

    with pytest.raises(EnvironmentFailed, match="only parts of the type 'text'"):
        play(VerifiersEnvironment(Pictures(score)), AssistantTurn("1"))


def test_rewards_of_a_group_are_refused(guessing):
    class Compared(guessing):
        requires_group_rollouts = True

    with pytest.raises(ConfigError, match="compares the conversations of a group"):
        VerifiersEnvironment(Compared(score))


def test_the_package_is_needed(monkeypatch):
    monkeypatch.setattr("groupwise.environments.verifiers_environment.is_installed", lambda name: False)
    with pytest.raises(MissingExtraError, match=r"groupwise\[verifiers\]"):
        VerifiersEnvironment(object())
