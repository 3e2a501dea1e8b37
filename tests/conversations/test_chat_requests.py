"""Requests of the chat completions API: what is read of them, what is refused, and the form of the answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from groupwise.conversations import EpisodeTurn, RequestRefused, SampledTokens
from groupwise.conversations.chat_requests import (
    ChatRequest,
    assistant_message,
    completion_body,
    error_body,
    read_message,
    same_message,
    stream_chunks,
)
from groupwise.environments import AssistantTurn, ToolCall
from groupwise.model.tiny import tiny_tokenizer

USER = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
SAMPLING = {"temperature": 0.7, "top_p": 1.0, "top_k": None}


def read(**body: Any) -> ChatRequest:
    return ChatRequest.read({"messages": [USER], **body}, SAMPLING)


def test_what_a_client_usually_sends_is_read():
    request = read(
        model="policy", temperature=0.7, top_p=1, n=1, stop=[], stream=False, logprobs=False, user="me", seed=None,
        max_tokens=9, max_completion_tokens=7, tools=[TOOL], tool_choice="auto", parallel_tool_calls=True,
        frequency_penalty=0.0, response_format={"type": "text"}, metadata={"run": "3"}, store=False,
    )  # fmt: skip
    assert request == ChatRequest([USER], [TOOL], 7, False)
    assert read(tool_choice="none") == read() == ChatRequest([USER], [], None, False)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"temperature": 1.0}, r"temperature must be left out or 0\.7, got 1\.0"),
        ({"top_k": 5}, "top_k must be left out, got 5"),
        ({"n": 2}, "n must be left out or 1, got 2"),
        ({"seed": 1}, "seed must be left out"),
        ({"stop": ["\n"]}, "stop must be left out"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [TOOL], "tool_choice": "none"}, 'tool_choice must be left out or "auto"'),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"best_of": 3}, "no parameter 'best_of'"),
        ({"model": "gpt-5"}, "no model 'gpt-5' here; .* 'policy'"),
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1"),
        ({"max_completion_tokens": True}, "max_completion_tokens"),
        ({"stream": "yes"}, "stream must be true or false"),
        ({"tools": {}}, "tools is of type dict"),
        ({"tools": [{"name": "look"}]}, "tool 1 is"),
        ({"messages": []}, "messages is empty"),
        ({"messages": None}, "messages is missing"),
        ({"messages": "Hello"}, "messages is of type str"),
        ({"messages": ["Hello"]}, "message 1 is of type str"),
        ({"messages": [USER, {"content": "Hello"}]}, "message 2 has the role None"),
        ({"messages": [{"role": "user"}]}, "its content is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "parts of the type 'text'"),
        ({"messages": [{"role": "user", "content": "", "name": 3}]}, "its name is of type int"),
        ({"messages": [{"role": "user", "content": "", "tool_calls": [1]}]}, "only messages of the assistant"),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "a call of a tool is"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}]},
            "are not JSON",
        ),
        ({"messages": [{"role": "assistant", "function_call": {}}]}, "former kind of calls"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_name(body, words):
    with pytest.raises(RequestRefused, match=words):
        read(**body)


@pytest.mark.parametrize("body", [None, [], "Hello", 3])
def test_a_body_is_an_object(body):
    with pytest.raises(RequestRefused, match="JSON object"):
        ChatRequest.read(body, {})


def test_messages_are_read_as_templates_take_them():
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"where": ["a"]}'}, "index": 0}
    message = read_message({"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "x": 1})
    assert message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"where": ["a"]}}}],
    }
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read_message({"role": "developer", "content": parts}) == {"role": "system", "content": "ab"}
    tool = {"role": "tool", "content": "", "tool_call_id": "c1"}
    assert read_message({**tool, "name": None}) == tool


def test_only_the_space_around_what_the_assistant_said_may_differ():
    assert same_message({"role": "assistant", "content": " a\n"}, {"role": "assistant", "content": "a"})
    nan = read_message({"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": '{"b": NaN}'}}]})
    assert same_message(nan, read_message(nan | {"content": None}))
    assert not same_message({"role": "user", "content": " a"}, {"role": "user", "content": "a"})
    assert not same_message({"role": "assistant", "content": "a b"}, {"role": "assistant", "content": "ab"})


SAID = AssistantTurn("I look.", (ToolCall("look", {"where": "ä"}, "call00000"),), thinking="Where?")


def turn(stop_reason: str) -> EpisodeTurn:
    values = torch.tensor([-0.5, -1.5])
    sampled = SampledTokens(torch.tensor([72, 105]), values, values, torch.zeros(2), None, stop_reason)
    return EpisodeTurn(sampled, SAID)


def test_an_answer_has_openais_form():
    body = completion_body(read(logprobs=True), turn("eos"), 11, tiny_tokenizer())
    assert body["id"].startswith("chatcmpl-")
    assert {name: body[name] for name in ("object", "model", "usage")} == {
        "object": "chat.completion",
        "model": "policy",
        "usage": {"prompt_tokens": 11, "completion_tokens": 2, "total_tokens": 13},
    }
    (choice,) = body["choices"]
    call = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": '{"where": "ä"}'}}
    assert choice["message"] == {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Where?",
        "tool_calls": [call],
    }
    assert choice["finish_reason"] == "tool_calls"
    assert choice["logprobs"]["content"] == [
        {"token": "H", "logprob": -0.5, "bytes": [72], "top_logprobs": []},
        {"token": "i", "logprob": -1.5, "bytes": [105], "top_logprobs": []},
    ]
    assert completion_body(read(), turn("length"), 11, None)["choices"][0]["finish_reason"] == "length"
    assert completion_body(read(), turn("length"), 11, None)["choices"][0]["logprobs"] is None
    assert assistant_message(AssistantTurn("", SAID.calls))["content"] is None
    assert assistant_message(AssistantTurn("")) == {"role": "assistant", "content": ""}


def test_a_stream_has_the_message_then_its_end():
    body = completion_body(read(), turn("eos"), 11, None)
    chunks = stream_chunks({"stream_options": {"include_usage": True}}, body)
    assert [chunk["object"] for chunk in chunks] == ["chat.completion.chunk"] * 3
    message, end = (chunk["choices"][0] for chunk in chunks[:2])
    assert message["delta"]["content"] == "I look."
    assert message["delta"]["tool_calls"] == [{"index": 0, **body["choices"][0]["message"]["tool_calls"][0]}]
    assert (message["finish_reason"], end["delta"], end["finish_reason"]) == (None, {}, "tool_calls")
    assert (chunks[2]["choices"], chunks[2]["usage"]) == ([], body["usage"])
    assert len(stream_chunks({}, body)) == 2


def test_errors_have_openais_form():
    assert error_body(RequestRefused("no", "turn_limit")) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": None, "code": "turn_limit"}
    }
