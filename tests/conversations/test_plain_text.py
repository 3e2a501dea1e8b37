"""Conversations without a chat template: lines of text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.conversations import Conversation, PlainTextTemplate
from groupwise.errors import ConfigError, DataError, InputError
from groupwise.generate.stop import StopStrings
from groupwise.model.tiny import tiny_tokenizer
from tests.conversations.families import BY_NAME

TOKENIZER = tiny_tokenizer()
TEMPLATE = PlainTextTemplate(TOKENIZER)


def text_of(ids: list[int]) -> str:
    return TOKENIZER.decode(ids, clean_up_tokenization_spaces=False)


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


def test_a_conversation_by_hand():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " What is 2 + 2? "}]
    conversation = Conversation(TEMPLATE.prompt(messages))
    first = ids_of(" 4\nUser:")
    conversation.add_sampled(first)
    assert TEMPLATE.ended(first)
    assert TEMPLATE.turn_text(first) == "4"
    assert TEMPLATE.turn_message(first) == {"role": "assistant", "content": "4"}
    conversation.add_given(TEMPLATE.given_after([{"role": "user", "content": "And 3 + 3?"}], True))
    second = ids_of(" 6")
    conversation.add_sampled(second)
    assert not TEMPLATE.ended(second)
    replies = [{"role": "tool", "content": "6"}, {"role": "user", "content": "Thanks"}]
    conversation.add_given(TEMPLATE.given_after(replies, False))
    assert text_of(conversation.ids) == (
        "Be brief.\n\nUser: What is 2 + 2?\nAssistant: 4\nUser: And 3 + 3?\nAssistant: 6\n"
        "Tool: 6\nUser: Thanks\nAssistant:"
    )


def test_the_stop_string_ends_a_sample():
    stop = StopStrings(TOKENIZER, TEMPLATE.stop)
    ids = ids_of(" 4\nUser: and more")
    end = next(length for length in range(1, len(ids)) if stop(ids[:length]))
    assert TEMPLATE.ended(ids[:end])
    assert TEMPLATE.turn_text(ids[:end]) == "4"


@given(st.lists(st.sampled_from(["User:", "Assistant:", "Tool:", "\n", " ", "a", "<|end|>", "<|start|>"]), min_size=1))
def test_nobody_speaks_for_another(pieces):
    text = "".join(pieces)
    if not text.strip():
        return
    ids = TEMPLATE.prompt([{"role": "user", "content": text}])
    lines = text_of(ids).split("\n")
    assert [line.split(":")[0] for line in lines if line.startswith(("User:", "Assistant:", "Tool:"))] == [
        "User",
        "Assistant",
    ]
    assert not {257, 258} & set(ids)
    given = TEMPLATE.given_after([{"role": "tool", "content": text}], False)
    lines = text_of(given).split("\n")
    assert sum(line.startswith(("User:", "Assistant:", "Tool:")) for line in lines) == 2
    assert not {257, 258} & set(given)


def test_other_names_and_another_end():
    template = PlainTextTemplate(TOKENIZER, {"user": "Q", "assistant": "A"}, stop="\n\n")
    assert text_of(template.prompt("2 + 2?")) == "Q: 2 + 2?\nA:"
    assert template.turn_text(ids_of(" 4\n\nQ")) == "4"


def test_a_tokenizer_that_begins_every_text_with_a_token():
    from tokenizers.processors import TemplateProcessing

    tokenizer = BY_NAME["mistral"].make()
    assert PlainTextTemplate(tokenizer).prompt("a")[0] != tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    template = PlainTextTemplate(tokenizer)
    assert template.prompt("a")[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in template.given_after([{"role": "user", "content": "a"}], False)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: PlainTextTemplate(TOKENIZER, {"bot": "B"}), "names gives a text"),
        (lambda: PlainTextTemplate(TOKENIZER, {"user": " "}), "names gives a text"),
        (lambda: PlainTextTemplate(TOKENIZER, stop=""), "not empty"),
    ],
)
def test_invalid_settings(make, problem):
    with pytest.raises(ConfigError, match=problem):
        make()


def test_invalid_messages():
    with pytest.raises(DataError, match="empty"):
        TEMPLATE.prompt(" ")
    for replies, problem in (
        ([], "at least one"),
        ([{"role": "assistant", "content": "a"}], "not user or tool"),
        ([{"role": "system", "content": "a"}], "not user or tool"),
    ):
        with pytest.raises(InputError, match=problem):
            TEMPLATE.given_after(replies, True)
    late = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}, {"role": "user", "content": "c"}]
    with pytest.raises(InputError, match="only come first"):
        TEMPLATE.prompt(late)
