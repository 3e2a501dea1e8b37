"""The local server of the chat completions API, asked by raw sockets: keys, addresses, requests that are no HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from groupwise.conversations import endpoint
from groupwise.conversations.chat_requests import RequestRefused
from groupwise.conversations.endpoint import ChatEndpoint


class Parrot:
    """Answers with what it was asked."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.cancelled = seconds, 0

    async def ask(self, body: Any) -> dict[str, Any]:
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if "refuse" in body:
            raise RequestRefused("I refuse", "turn_limit")
        return {"asked": body}


def serve(use: Callable[[str, int, str], Awaitable[Any]], parrot: Parrot | None = None) -> Any:
    """The result of ``use(host, port, key)`` while the endpoint listens."""

    problems: list[Any] = []

    async def run() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        server = ChatEndpoint()
        base_url, key = await server.add(parrot or Parrot())
        host, port = base_url.removeprefix("http://").removesuffix("/v1").split(":")
        assert host == "127.0.0.1"
        try:
            return await use(host, int(port), key)
        finally:
            server.remove(key)
            await asyncio.sleep(0)

    result = asyncio.run(run())
    assert problems == []
    return result


def request(key: str, body: bytes = b"{}", method: str = "POST", path: str = "/v1/chat/completions") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode("latin-1") + body


async def exchange(host: str, port: int, sent: bytes) -> bytes:
    """All that the server answers to these bytes."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(sent)
        return await asyncio.wait_for(reader.read(), 20)
    finally:
        writer.close()


def ask(make: Callable[[str], bytes], parrot: Parrot | None = None) -> tuple[int, Any]:
    """The status and the JSON of the response to what ``make`` makes of the key."""
    received = serve(lambda host, port, key: exchange(host, port, make(key)), parrot)
    head, _, body = received.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    return int(head.split()[1]), json.loads(body)


def test_a_request_with_the_key_is_answered():
    assert ask(lambda key: request(key, b'{"a": 1}')) == (200, {"asked": {"a": 1}})


def test_the_model_is_listed():
    status, answer = ask(lambda key: request(key, b"", "GET", "/v1/models"))
    assert status == 200
    assert [entry["id"] for entry in answer["data"]] == ["policy"]


@pytest.mark.parametrize(
    ("make", "status", "words"),
    [
        (lambda key: request("guess"), 401, "API key"),
        (lambda key: request(""), 401, "API key"),
        (lambda key: request(key).replace(b"Bearer", b"Basic"), 401, "API key"),
        (lambda key: request(key).replace(b"Authorization", b"X-Key"), 401, "API key"),
        (lambda key: request(key, path="/v1/completions"), 404, "POST /v1/chat/completions"),
        (lambda key: request(key, path="/v1/responses"), 404, "chat completions API"),
        (lambda key: request(key, method="PUT"), 404, "PUT"),
        (lambda key: request(key, b"{"), 400, "not JSON"),
        (lambda key: request(key, b"\xff\xfe"), 400, "not JSON"),
        (lambda key: request(key, b"[" * 200_000), 400, "not JSON"),
        (lambda key: request(key, b"[1]"), 400, "JSON object"),
        (lambda key: request(key, b'{"refuse": 1}'), 400, "I refuse"),
        (lambda key: b"hello\r\n\r\n", 400, "begins with 'hello'"),
        (lambda key: request(key).replace(b"HTTP/1.1", b"HTTP/2"), 400, "HTTP/2"),
        (lambda key: request(key).replace(b"Host: x", b"Host x"), 400, "header 'Host x'"),
        (lambda key: request(key).replace(b"Host: x", b"Host : x"), 400, "header 'Host : x'"),
        (lambda key: request(key).replace(b"Host: x", b"Content-Length: 2"), 400, "header 'Content-Length: 2'"),
        (lambda key: request(key).replace(b"h: 2", b"h: -2"), 400, "Content-Length '-2'"),
        (lambda key: request(key).replace(b"h: 2", b"h: \xb2"), 400, "Content-Length"),
        (lambda key: request(key).replace(b"h: 2", b"h: 99999999999"), 413, "MB"),
        (lambda key: request(key).replace(b"Host: x", b"Transfer-Encoding: chunked"), 411, "Content-Length"),
        (lambda key: b"POST / HTTP/1.1\r\nX: " + b"a" * 200_000, 431, "too long"),
    ],
)
def test_what_cannot_be_answered_is_an_error_in_openais_form(make, status, words):
    got, answer = ask(make)
    assert got == status
    assert words in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


def test_a_stream_is_server_sent_events():
    class Speaks(Parrot):
        async def ask(self, body: Any) -> dict[str, Any]:
            choice = {"index": 0, "message": {"content": "Hi"}, "logprobs": None, "finish_reason": "stop"}
            return {"id": "1", "created": 2, "model": "policy", "choices": [choice]}

    stream = b'{"stream": true}'
    received = serve(lambda host, port, key: exchange(host, port, request(key, stream)), Speaks())
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"Content-Type: text/event-stream" in head
    events = body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"content": "Hi"}, {}]


def test_a_client_that_leaves_is_not_waited_for():
    parrot = Parrot(seconds=60)

    async def use(host: str, port: int, key: str) -> None:
        _, writer = await asyncio.open_connection(host, port)
        writer.write(request(key))
        await asyncio.sleep(0.05)
        writer.close()
        while not parrot.cancelled:
            await asyncio.sleep(0.01)

    serve(use, parrot)


def test_a_client_that_sends_too_slowly_is_left(monkeypatch):
    monkeypatch.setattr(endpoint, "REQUEST_SECONDS", 0.1)

    assert serve(lambda host, port, key: exchange(host, port, request(key)[:-1])) == b""


def test_the_server_ends_with_its_last_conversation():
    async def run() -> None:
        server = ChatEndpoint()
        (base_url, one), (same_url, other) = await asyncio.gather(server.add(Parrot()), server.add(Parrot()))
        assert base_url == same_url
        address = ("127.0.0.1", int(base_url.removesuffix("/v1").rpartition(":")[2]))
        server.remove(one)
        assert (await exchange(*address, request(one))).startswith(b"HTTP/1.1 401 ")
        assert (await exchange(*address, request(other))).startswith(b"HTTP/1.1 200 ")
        server.remove(other)
        await asyncio.sleep(0)
        with pytest.raises(ConnectionRefusedError):
            await exchange(*address, request(other))

    asyncio.run(run())
