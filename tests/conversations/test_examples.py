"""Written conversations as tokens to learn from; tests/conversations/test_template.py compares them with templates."""

from __future__ import annotations

from itertools import groupby

import pytest

from groupwise.conversations import TurnTemplate
from groupwise.conversations.examples import example_tokens
from groupwise.conversations.formats import ChatFormat, PlainFormat
from groupwise.errors import InputError
from groupwise.model import load_model_and_tokenizer
from tests.conversations.families import BY_NAME, SEARCH
from tests.conversations.test_template import template_of

TOKENIZER = load_model_and_tokenizer("tiny")[1]
ASKED = [{"role": "user", "content": "How is the weather?"}]
CALL = {"type": "function", "function": {"name": "search", "arguments": {"query": "weather"}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOLD = {"role": "tool", "name": "search", "content": "sunny"}
SAID = {"role": "assistant", "content": "It is sunny."}


@pytest.mark.parametrize("family", ["qwen2_5", "llama3", "mistral", "mistral_tekken"])
def test_calls_are_written_as_the_model_writes_them(family):
    """What is learned is read as the same calls, although they have no ids."""
    form = ChatFormat(template_of(BY_NAME[family], tools=True))
    assert form.template.tools == [SEARCH]
    tokens = example_tokens(form, ASKED, [CALLING, TOLD, CALLING, TOLD, SAID])
    pairs = groupby(zip(tokens.ids.tolist(), tokens.sampled.tolist(), strict=True), lambda pair: pair[1])
    parts = [[token for token, _ in part] for _, part in pairs]
    before = form.prompt(ASKED)
    said = [form.parse(turn, given, 0) for turn, given in zip(parts[::2], [before, *parts[1::2]], strict=True)]
    assert [[(call.name, call.arguments) for call in turn.calls] for turn in said] == [
        [("search", {"query": "weather"})],
        [("search", {"query": "weather"})],
        [],
    ]
    assert said[-1].text.strip() == "It is sunny."
    assert all("sunny" in form.template.turn_text(given) for given in parts[1::2])


def test_plain_text_by_hand():
    form = PlainFormat(TOKENIZER)
    messages = [
        {"role": role, "content": text} for role, text in (("assistant", "n"), ("user", "ok>"), ("assistant", "e"))
    ]
    tokens = example_tokens(form, [{"role": "user", "content": "go>"}], messages)
    assert TOKENIZER.decode(tokens.ids) == "nok>e"
    assert tokens.sampled.tolist() == [True, False, False, False, True]


@pytest.mark.parametrize(
    "conversation",
    [[], [TOLD, SAID], [CALLING, TOLD], [SAID, SAID], [TOLD]],
    ids=["empty", "given", "end", "twice", "no"],
)
def test_a_conversation_begins_and_ends_with_the_assistant(conversation):
    with pytest.raises(InputError, match="begins and ends with a message of the assistant"):
        example_tokens(PlainFormat(TOKENIZER), ASKED, conversation)


def test_a_turn_that_the_prompt_begins_needs_its_beginning():
    """The generation prompt of this template opens thinking, and this answer has none."""
    form = ChatFormat(template_of(BY_NAME["deepseek_r1"]))
    with pytest.raises(InputError, match="does not write this turn"):
        example_tokens(form, ASKED, [SAID])


def test_calls_that_the_template_does_not_write_are_not_lost():
    """This template shows tools, and writes nothing of a call."""
    form = ChatFormat(TurnTemplate(BY_NAME["qwen2_5"].tokenizer()))
    form.template.chat_template = form.template.chat_template.replace("message.tool_calls", "message.no_calls")
    with pytest.raises(InputError, match="does not write the calls"):
        example_tokens(form, ASKED, [CALLING, TOLD, SAID])
