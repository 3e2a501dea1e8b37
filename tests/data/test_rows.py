"""Checks of prompts, and rows as columns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.data import Row, check_prompts, columns_of
from groupwise.errors import DataError

USER = {"role": "user", "content": "Why?"}
GOOD = [
    "a text",
    "\n.",
    [USER],
    (USER,),
    [{"role": "system", "content": ""}, USER],
    [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": ""}, USER],
    [USER, {"role": "assistant", "content": "", "tool_calls": [{}]}, {"role": "tool", "content": "", "name": "f"}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "extra": None}],
]
SURROGATE = "caf\ud83d"


def refused(value):
    with pytest.raises(DataError) as caught:
        check_prompts([Row({"prompt": value}, "q.jsonl, line 7")])
    return str(caught.value)


def test_valid_prompts():
    for value in GOOD:
        check_prompts([{"prompt": value}, {"prompt": value}])
        check_prompts([{"question": value, "prompt": None}], column="question")


BAD = [
    (None, "the prompt is missing (null); it must be a text or a list of messages such as [{"),
    (5, "the prompt is of type int; it must be"),
    (b"x", "the prompt is of type bytes"),
    ({"role": "user", "content": "x"}, "the prompt is of type dict"),
    ("", "the prompt is empty; fill it in or remove the row"),
    (" \n\t", "the prompt is empty"),
    (SURROGATE, "the prompt contains a lone surrogate"),
    ([], "the prompt is an empty list; it needs at least one message"),
    (["Why?"], "message 1 of the prompt is of type str; a message is an object {"),
    ([USER, None], "message 2 of the prompt is missing (null)"),
    ([{"content": "x"}], "message 1 of the prompt has no 'role' (it has: 'content')"),
    ([{"role": "user", "text": "x"}], "message 1 of the prompt has no 'content' (it has: 'role', 'text')"),
    ([{"role": "usr", "content": "x"}], "message 1 of the prompt: unknown role 'usr'; did you mean 'user'?"),
    ([{"role": None, "content": "x"}], "unknown role None (allowed: 'system', 'user', 'assistant', 'tool')"),
    ([{"role": ["user"], "content": "x"}], "unknown role ['user']"),
    ([{"role": "user", "content": None}], "message 1 of the prompt: its content is missing (null); it must be"),
    ([{"role": "user", "content": 3}], "its content is of type int; it must be a text or a list of text parts"),
    ([{"role": "user", "content": []}], "its content is of type list"),
    ([{"role": "user", "content": [{"type": "image", "text": "x"}]}], "its content is of type list"),
    ([{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}], "its content is of type list"),
    ([{"role": "user", "content": [{"type": "text"}]}], "its content is of type list"),
    ([{"role": "user", "content": " "}], "message 1 of the prompt is empty"),
    ([{"role": "user", "content": [{"type": "text", "text": ""}]}], "message 1 of the prompt is empty"),
    ([{"role": "system", "content": SURROGATE}, USER], "message 1 of the prompt contains a lone surrogate"),
    ([USER, {"role": "assistant", "content": "x"}], "the prompt ends with a message of the assistant"),
    ([USER, {"role": "assistant", "content": ""}], "the prompt ends with a message of the assistant"),
]


def test_invalid_prompts():
    for value, sentence in BAD:
        message = refused(value)
        assert message.startswith("q.jsonl, line 7: "), value
        assert sentence in message, value


def test_a_column_that_is_missing():
    with pytest.raises(
        DataError, match=r"^row 2 has no column 'prompt'; did you mean 'prompts'\? \(it has: 'prompts', 'a'"
    ):
        check_prompts([{"prompt": "x"}, {"prompts": "x", "a": 1}])
    with pytest.raises(DataError, match=r"^row 1 has no column 'prompt' \(it has: none\)"):
        check_prompts([{}])
    with pytest.raises(DataError, match=r"^x.csv, line 2 has no column 'question' \(it has: 'prompt'\)"):
        check_prompts([Row({"prompt": "x"}, "x.csv, line 2")], column="question")


def test_a_column_that_no_row_has():
    rows = [Row({"question": "x", "prompts": "y"}, f"facts.jsonl, line {line}") for line in (2, 3)]
    message = (
        r"^no row of facts.jsonl has a column 'prompt'; did you mean 'prompts'\? \(columns: 'question', 'prompts'\); "
        "set data.prompt"
    )
    with pytest.raises(DataError, match=message):
        check_prompts(rows)
    with pytest.raises(DataError, match=r"^no row has a column 'prompt' \(columns: 'a', 'b'\)"):
        check_prompts([{"a": 1}, {"b": 2}])


def test_texts_and_messages_are_not_mixed():
    text, chat = Row({"prompt": "x"}, "a.jsonl, line 1"), Row({"prompt": [USER]}, "a.jsonl, line 2")
    with pytest.raises(
        DataError, match=r"^a.jsonl, line 2: the prompt is a list of messages, but a.jsonl, line 1 has a text"
    ):
        check_prompts([text, text, chat])
    with pytest.raises(
        DataError, match=r"^a.jsonl, line 1: the prompt is a text, but a.jsonl, line 2 has messages; all"
    ):
        check_prompts([chat, text])


def test_no_rows():
    with pytest.raises(DataError, match="there are no rows"):
        check_prompts([])


def test_columns():
    rows = [Row({"prompt": "a", "answer": 1}, "x"), {"level": None, "prompt": "b"}, {"answer": 3}]
    columns = columns_of(rows)
    assert columns == {"prompt": ["a", "b", None], "answer": [1, None, 3], "level": [None, None, None]}
    assert list(columns) == ["prompt", "answer", "level"]
    assert list(columns_of(rows, without="prompt")) == ["answer", "level"]
    assert columns_of([]) == {}


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers())))
def test_columns_hold_all_values(rows):
    columns = columns_of(rows)
    assert set(columns) == {name for row in rows for name in row}
    for number, row in enumerate(rows):
        assert {name: values[number] for name, values in columns.items() if name in row} == row
        assert all(values[number] is None for name, values in columns.items() if name not in row)
