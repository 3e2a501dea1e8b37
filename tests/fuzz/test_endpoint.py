"""Requests to the endpoint of rollout functions: each is read, or refused with a reason in OpenAI's form."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from groupwise.conversations import RequestRefused, TurnTemplate
from groupwise.conversations.chat_requests import ChatRequest, error_body, read_message, same_message
from groupwise.conversations.endpoint import HttpRequest, read_json_body, read_request
from groupwise.errors import GroupwiseError
from groupwise.model.tiny import tiny_tokenizer
from tests.fuzz.strange import changed, json_values

TEMPLATE = TurnTemplate(tiny_tokenizer())
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"where": "here"}'}}
BODY = {
    "model": "policy",
    "messages": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "nothing", "tool_call_id": "c1", "name": "look"},
    ],
    "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
    "temperature": 1.0,
    "max_tokens": 5,
    "stream": False,
    "logprobs": True,
}
HTTP = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\nContent-Length: 2\r\n\r\n{}"
PIECES = (b"\r\n", b"\r\n\r\n", b"\n", b"\r", b" ", b":", b"\0", b"\xff", b"HTTP/1.1", b"Content-Length: 3", b"9" * 30)


def check_refusal(refused: RequestRefused) -> None:
    body = json.loads(json.dumps(error_body(refused)))
    assert body["error"]["message"]
    assert 400 <= refused.status < 500


@given(changed(BODY) | json_values)
def test_a_body_is_a_request_or_refused(body: Any):
    try:
        request = ChatRequest.read(body, {"temperature": 1.0})
    except RequestRefused as refused:
        check_refusal(refused)
        return
    for message in request.messages:
        assert same_message(message, message)
        assert read_message(message) == message
    try:
        ids = TEMPLATE.prompt(request.messages)
    except GroupwiseError:
        return
    assert ids.count(257) == len(request.messages) + 1  # nobody opens a turn but the template
    assert request.max_tokens is None or request.max_tokens >= 1


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """An HTTP request in which bytes are replaced, cut out or put in."""
    data = HTTP
    for _ in range(draw(st.integers(0, 3))):
        start, end = sorted(draw(st.tuples(*[st.integers(0, len(data))] * 2)))
        end = draw(st.sampled_from([start, min(start + 1, len(data)), end]))
        data = data[:start] + draw(st.sampled_from(PIECES) | st.binary(max_size=5)) + data[end:]
    return data


@given(messages())
def test_bytes_are_a_request_or_refused(data: bytes):
    async def read() -> HttpRequest:
        reader = asyncio.StreamReader(limit=2**16)
        reader.feed_data(data)
        reader.feed_eof()
        return await read_request(reader)

    try:
        request = asyncio.run(read())
    except RequestRefused as refused:
        check_refusal(refused)
    except EOFError:  # it ends too early
        return
    else:
        assert request.method
        assert len(request.body) == int(request.headers.get("content-length", "0"))


@given(st.binary(max_size=30) | changed(BODY).map(lambda value: json.dumps(value).encode()))
def test_bytes_are_a_json_object_or_refused(data: bytes):
    try:
        assert isinstance(read_json_body(data), dict)
    except RequestRefused as refused:
        check_refusal(refused)
