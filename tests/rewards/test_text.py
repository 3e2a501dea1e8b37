"""The text of prompts and completions, their format and length."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.errors import InputError
from groupwise.rewards import format_reward, overlong_penalty, text_of
from groupwise.rewards.text import answer_of, prompt_messages, prompt_text
from groupwise.text import excerpt


def test_text_of():
    assert text_of("as it is ") == "as it is "
    assert text_of([]) == ""
    assert text_of([{"role": "assistant", "content": "a"}]) == "a"
    assert text_of({"role": "assistant", "content": "a"}) == "a"
    assert text_of([{"content": "a"}]) == "a"
    conversation = [
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": "#### 17"},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": [{"type": "text", "text": "c"}, {"type": "image"}, {"text": "d"}]},
    ]
    assert text_of(conversation) == "b\ncd"


@pytest.mark.parametrize("completion", [None, 3, ["a"], [None], {"a"}])
def test_invalid_completions(completion):
    with pytest.raises(InputError, match="must be a text or a list of messages"):
        text_of(completion)


def test_invalid_messages():
    with pytest.raises(
        InputError, match=r"none of the completion's messages is the assistant's \(their roles: 'model'"
    ):
        text_of([{"role": "model", "content": "18"}])
    with pytest.raises(InputError, match="a message's content must be a text, a list of parts or None, got 18"):
        text_of([{"role": "assistant", "content": 18}])


def test_the_answer_follows_the_last_mark():
    assert answer_of("<think>a</think> b </think>\n c \n") == "c"
    assert answer_of(" no mark ") == "no mark"
    assert answer_of("a </think>") == ""
    assert answer_of("a </think> b", after=None) == answer_of("a </think> b", after="") == "a </think> b"
    assert answer_of([{"role": "assistant", "content": "x ### y"}], after="###") == "y"


def test_a_prompt_as_messages_and_as_a_text():
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert prompt_messages("Hi") == [{"role": "user", "content": "Hi"}]
    assert prompt_messages(chat) == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    assert prompt_text(chat) == "system: Be kind.\n\nuser: Hi"
    assert prompt_text("Hi") == prompt_text(chat[1:]) == "Hi"
    with pytest.raises(InputError, match="a prompt must be a text or a list of messages, got 5"):
        prompt_messages(5)


def test_excerpt():
    assert excerpt("short\n") == "'short\\n'"
    assert excerpt("x" * 100) == "'" + "x" * 59 + "…'"
    assert excerpt(list(range(100)), 10) == "[0, 1, 2,…"
    assert excerpt([1, 2]) == "[1, 2]"


@pytest.mark.parametrize(
    ("length", "limit", "buffer", "penalty"),
    [
        (0, 100, 20, 0.0),
        (80, 100, 20, 0.0),
        (81, 100, 20, -0.05),
        (85, 100, 20, -0.25),
        (90, 100, 20, -0.5),
        (100, 100, 20, -1.0),
        (101, 100, 20, -1.0),
        (1, 100, 100, -0.01),
        (99, 100, 0, 0.0),
        (100, 100, 0, 0.0),
        (101, 100, 0, -1.0),
        (100, 100, 1, -1.0),
        (99, 100, 1, 0.0),
    ],
)
def test_overlong_penalty(length, limit, buffer, penalty):
    assert overlong_penalty(length, limit, buffer) == pytest.approx(penalty)


@given(st.integers(0, 300), st.integers(1, 200), st.data())
def test_overlong_penalty_never_rises(length, limit, data):
    buffer = data.draw(st.integers(0, limit))
    shorter, longer = overlong_penalty(length, limit, buffer), overlong_penalty(length + 1, limit, buffer)
    assert -1.0 <= longer <= shorter <= 0.0


def test_format_reward():
    reward = format_reward(r"<think>.*</think>\d+")
    completions = [
        "\n<think>a\nb</think>18\n",
        "x <think>a</think>18",
        "<think>a</think>18 eggs",
        [{"content": "<think></think>1"}],
    ]
    assert reward(prompts=[""] * 4, completions=completions, answer=[""] * 4) == [1.0, 0.0, 0.0, 1.0]
    assert reward.__name__ == "format_reward"
    assert format_reward(".*####.*")([""], ["a\n#### b\nc"]) == [1.0]


def test_a_broken_pattern():
    with pytest.raises(InputError, match=r"'\(a' is not a regular expression: missing \), unterminated subpattern"):
        format_reward("(a")
    with pytest.raises(InputError, match="3 is not a regular expression"):
        format_reward(3)
