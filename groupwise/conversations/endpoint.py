"""A local HTTP server with OpenAI's chat completions API, for clients in rollout functions.

It listens on the loopback interface while there are conversations. The API key of a request says of which conversation
it is, so nobody else can ask. A connection serves one request.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol

from groupwise.conversations.chat_requests import MODEL, RequestRefused, error_body, stream_chunks
from groupwise.paths import MEGABYTE
from groupwise.text import excerpt

HOST = "127.0.0.1"
LARGEST_HEAD = 2**16  # bytes of the request line and the headers
LARGEST_BODY = 64 * MEGABYTE
REQUEST_SECONDS = 60.0  # in which a request must have arrived
LINGER_SECONDS = 2.0  # in which a client whose request was refused may go on sending it
COMPLETIONS = "/v1/chat/completions"
MODELS = "/v1/models"


class AnswersRequests(Protocol):
    """A conversation that answers requests."""

    async def ask(self, body: Any) -> dict[str, Any]: ...


class HttpRequest(NamedTuple):
    """``headers`` by their names in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class ChatEndpoint:
    """The server, and the conversations by their keys."""

    def __init__(self) -> None:
        self._conversations: dict[str, AnswersRequests] = {}
        self._server: asyncio.Future[asyncio.Server] | None = None
        self._base_url = ""

    async def add(self, conversation: AnswersRequests) -> tuple[str, str]:
        """The address for a conversation, and its key."""
        key = secrets.token_urlsafe(24)
        if self._server is None:
            listener = socket.create_server((HOST, 0), backlog=1024)
            self._base_url = f"http://{HOST}:{listener.getsockname()[1]}/v1"
            self._server = asyncio.ensure_future(asyncio.start_server(self._serve, sock=listener, limit=LARGEST_HEAD))
        self._conversations[key] = conversation
        await asyncio.shield(self._server)
        return self._base_url, key

    def remove(self, key: str) -> None:
        """End a key. Without conversations the server ends."""
        self._conversations.pop(key, None)
        if not self._conversations and self._server is not None:
            self._server.add_done_callback(lambda server: server.result().close())
            self._server = None

    async def ask(self, key: str, body: Any) -> dict[str, Any]:
        """The answer to a request of the conversation with this key; raises RequestRefused."""
        return await self._conversation(key).ask(body)

    def _conversation(self, key: str) -> AnswersRequests:
        if key not in self._conversations:
            what = "the API key is of no conversation that goes on; use model.api_key of the rollout function's model"
            raise RequestRefused(what, "invalid_api_key", 401)
        return self._conversations[key]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, whatever it is."""
        try:
            try:
                async with asyncio.timeout(REQUEST_SECONDS):
                    request = await read_request(reader)
                writer.write(await self._respond(request, reader))
                await writer.drain()
            except RequestRefused as refused:
                writer.write(_json_response(error_body(refused), refused.status))
                writer.write_eof()
                async with asyncio.timeout(LINGER_SECONDS):  # to close with unread bytes would take the response back
                    while await reader.read(LARGEST_HEAD):
                        pass
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):  # the client is gone or too slow; or the end
            pass
        finally:
            writer.close()

    async def _respond(self, request: HttpRequest, reader: asyncio.StreamReader) -> bytes:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        conversation = self._conversation(key.strip() if scheme.lower() == "bearer" else "")
        if (request.method, request.path) == ("GET", MODELS):
            entry = {"id": MODEL, "object": "model", "created": 0, "owned_by": "groupwise"}
            return _json_response({"object": "list", "data": [entry]})
        if (request.method, request.path) != ("POST", COMPLETIONS):
            raise RequestRefused(
                f"there is no {excerpt(request.method)} {excerpt(request.path)} here, but POST {COMPLETIONS} and "
                f"GET {MODELS}; use the chat completions API of the client",
                "not_found",
                404,
            )
        body = read_json_body(request.body)
        answer = await _while_connected(asyncio.ensure_future(conversation.ask(body)), reader)
        return _stream_response(body, answer) if body.get("stream") is True else _json_response(answer)


async def _while_connected(answer: asyncio.Future[dict[str, Any]], reader: asyncio.StreamReader) -> dict[str, Any]:
    """The answer, unless the client leaves before."""
    left = asyncio.ensure_future(reader.read(1))  # nothing comes on this connection any more, except its end
    waiting: set[asyncio.Future[Any]] = {answer, left}
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if answer.cancelled():
            raise RequestRefused("the conversation has ended", "conversation_ended", 410)
        if not answer.done():
            raise EOFError("the client has left")
        return answer.result()
    finally:
        answer.cancel()
        left.cancel()
        await asyncio.wait({left})  # a second reader would be an error


async def read_request(reader: asyncio.StreamReader) -> HttpRequest:
    """Read a request with all that it may have here; raises RequestRefused, or EOFError where the client has left."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.LimitOverrunError:
        raise _bad("its headers are too long", 431) from None
    first, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
    method, path, version = first.split(" ") if first.count(" ") == 2 else ("", "", "")
    if version not in ("HTTP/1.1", "HTTP/1.0"):
        raise _bad(f"it begins with {excerpt(first)}")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip() or name.lower() in headers:
            raise _bad(f"it has the header {excerpt(line)}")
        headers[name.lower()] = value.strip()
    if "transfer-encoding" in headers:
        raise _bad("it has a Transfer-Encoding; send the body with a Content-Length", 411)
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit() and len(length) < 20):
        raise _bad(f"it has the Content-Length {excerpt(length)}")
    if int(length) > LARGEST_BODY:
        raise _bad(f"its body has more than {LARGEST_BODY // MEGABYTE} MB", 413)
    return HttpRequest(method, path.partition("?")[0], headers, await reader.readexactly(int(length)))


def read_json_body(body: bytes) -> Mapping[str, Any]:
    """The JSON object of a body; raises RequestRefused."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):  # no UTF-8, too
        raise RequestRefused(f"the body is not JSON: {excerpt(body)}") from None
    if not isinstance(value, dict):
        raise RequestRefused(f"the body of a request is a JSON object, got {excerpt(value)}")
    return value


def _bad(reason: str, status: int = 400) -> RequestRefused:
    return RequestRefused(f"this HTTP request cannot be read: {reason}", "bad_request", status)


def _json_response(value: Any, status: int = 200) -> bytes:
    return _response(json.dumps(value).encode(), "application/json", status)


def _stream_response(request: Mapping[str, Any], answer: Mapping[str, Any]) -> bytes:
    """Server-sent events. A turn is sampled as a whole, so they come at once."""
    events = [json.dumps(chunk) for chunk in stream_chunks(request, answer)]
    return _response("".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode(), "text/event-stream")


def _response(body: bytes, kind: str, status: int = 200) -> bytes:
    head = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    return "\r\n".join([*head, "", ""]).encode() + body
