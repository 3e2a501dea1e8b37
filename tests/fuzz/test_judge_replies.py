"""Replies of a judge's endpoint, from a real server: every one is a verdict, or a failure with a reason."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.errors import RewardError
from groupwise.rewards import judge
from groupwise.text import printable
from tests.fuzz import tried
from tests.fuzz.texts import broken_text

AT_ONCE = 16
REPLY = {
    "id": "1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Score: 7"}}],
}

values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), broken_text(), st.sampled_from(["stop", "length", REPLY])
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(broken_text(2), inner, max_size=3)),
    max_leaves=6,
)


@st.composite
def replies(draw: st.DrawFn) -> tuple[int, str, bytes]:
    """Status, type and body: a valid reply in which something is dropped or replaced, or whose bytes are changed."""
    reply: Any = json.loads(json.dumps(REPLY))
    place: Any = draw(st.sampled_from([reply, reply["choices"][0], reply["choices"][0]["message"]]))
    key = draw(st.sampled_from(sorted(place)))
    match draw(st.integers(0, 5)):
        case 0:
            del place[key]
        case 1:
            place[key] = draw(values)
        case 2:
            reply["choices"][0]["message"]["content"] = draw(broken_text()) + draw(st.sampled_from(["", "\nScore: 3"]))
        case 3:
            reply = draw(values)
        case 4:
            reply["choices"] *= draw(st.integers(0, 3))
        case 5:
            reply = {"error": {"message": draw(broken_text()), "code": draw(values)}}
    body = json.dumps(reply).encode()
    match draw(st.integers(0, 7)):
        case 0:
            body = body[: draw(st.integers(0, len(body)))]
        case 1:
            at = draw(st.integers(0, len(body) - 1))
            body = body[:at] + bytes([body[at] ^ (1 << draw(st.integers(0, 7)))]) + body[at + 1 :]
        case 2:
            body = draw(st.binary(max_size=40))
        case 3:
            depth = draw(st.sampled_from([10, 1_000, 100_000]))
            body = b'{"choices":' * depth if draw(st.booleans()) else b"[" * depth + b"]" * depth
    status = draw(st.sampled_from([200, 200, 200, 200, 201, 204, 304, 400, 402, 418, 422, 500, 503]))
    kind = draw(
        st.sampled_from(["application/json", "application/json; charset=utf-16", "text/html", "text/event-stream"])
    )
    return status, kind, b"" if status in (204, 304) else body


@pytest.fixture(scope="module")
def endpoint() -> Iterator[tuple[str, list[tuple[int, str, bytes]]]]:
    """The address of a server, and the replies that it gives, one after the other."""
    queue: list[tuple[int, str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            status, kind, body = queue.pop()
            self.send_response(status)
            for name, value in {"Content-Type": kind, "Content-Length": len(body), "x-should-retry": "false"}.items():
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1", queue
        server.shutdown()
        thread.join()


@given(drawn=st.lists(replies(), min_size=1, max_size=AT_ONCE))
def test_every_reply_is_a_verdict_or_a_failure(endpoint, drawn):
    url, queue = endpoint
    queue[:] = drawn
    for _ in drawn:
        tried("judge replies")
    columns: dict[str, list[Any]] = {}
    reward = judge(model="m", endpoint=url, retries=0, concurrency=AT_ONCE)
    prompts, texts = ["p"] * len(drawn), [f"answer {number}" for number in range(len(drawn))]
    scores, failure = [], ""
    try:
        scores = asyncio.run(reward(prompts, texts, log_extra=columns.__setitem__))
    except RewardError as error:  # none of them could be read
        failure = str(error)
    assert failure == printable(failure)
    assert len(failure) < 1000
    assert all(score is None or 0 <= score <= 1 for score in scores)
    assert all(text is None or isinstance(text, str) for text in columns.get("judge/verdict", []))
