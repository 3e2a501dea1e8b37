"""JSON over HTTP to one vLLM server. Every failure is a `ServerError` with the server's address."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import ssl
import threading
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from groupwise.errors import ConfigError
from groupwise.integrations.vllm.errors import ReplyError, ServerError, ServerSetupError
from groupwise.redaction import remember_secret
from groupwise.text import error_reason, excerpt

MAX_REPLY = 2**30  # bytes
SHORT = 30.0  # seconds for a question that a server answers at once
BUSY = (408, 425, 429)  # statuses below 500 that another try may not get
READ = 2**20  # bytes at once


def read_key(variable: str | None, section: str) -> str | None:
    """The API key in the environment variable that ``section``.api_key_env names. No message shows it."""
    if variable is None:
        return None
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", variable):
        raise ConfigError(  # its value is not repeated, in case it is the key
            f"{section}.api_key_env must be the name of an environment variable, not the key itself; set a variable to "
            "the key, and name that here"
        )
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"{section}.api_key_env: the environment variable {excerpt(variable)[1:-1]} is not set")
    remember_secret(key)
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(
            f"{section}.api_key_env: the value of {variable} cannot be a key: it has spaces or characters that no key "
            "has"
        )
    return key


class ServerClient:
    """The address of a server, and how to talk to it. It keeps no connection open, so threads may share it.

    Requests go to the server's own address only: proxies of the environment and redirects are not followed.
    timeout: of a complete request, however slowly the reply comes. section: of the settings that name the server.
    """

    def __init__(self, url: str, key: str | None, timeout: float, *, section: str = "vllm") -> None:
        parts = urlsplit(url)
        self.section = section
        self.url, self.timeout = url.rstrip("/"), timeout
        self._host, self._port, self._secure = parts.hostname or "", parts.port, parts.scheme == "https"
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._open: set[_Request] = set()  # those under way
        self._lock = threading.Lock()

    def get(self, path: str) -> Any:
        return self._json(self._request("GET", path, None, min(SHORT, self.timeout)), path)

    def get_text(self, path: str) -> str:
        return self._request("GET", path, None, min(SHORT, self.timeout)).decode("utf-8", "replace")

    def post(self, path: str, body: Any = None, timeout: float | None = None, *, limit: int = MAX_REPLY) -> Any:
        """``limit``: of the reply, in bytes."""
        data = b"" if body is None else json.dumps(body, allow_nan=False).encode()
        reply = self._request("POST", path, data, timeout or self.timeout, limit)
        return self._json(reply, path) if reply else None

    def abort(self) -> None:
        """End the requests under way in other threads, which fail."""
        with self._lock:
            for request in self._open:
                request.end()

    def _request(self, method: str, path: str, data: bytes | None, timeout: float, limit: int = MAX_REPLY) -> bytes:
        connection: http.client.HTTPConnection
        if self._secure:
            connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=timeout, context=ssl.create_default_context()
            )
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout)
        request = _Request(connection, timeout)
        with self._lock:
            self._open.add(request)
        late = ServerError(f"{self.url}{path} did not answer within {timeout:g} seconds, or not completely")
        try:
            response, reply = request.send(method, path, data, self._headers, limit)
        except TimeoutError as error:
            raise late from error
        except ConnectionRefusedError as error:
            raise ServerError(f"no server answers at {self.url} (connection refused)") from error
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            if request.expired:
                raise late from error
            reason = error_reason(error) or type(error).__name__
            raise ServerError(f"the connection to {self.url} failed: {reason}") from error
        finally:
            with self._lock:
                self._open.discard(request)
            request.close()
        if request.expired:
            raise late
        if not 200 <= response.status < 300:
            self._refuse(response, path, reply)
        if len(reply) > limit:
            raise ReplyError(f"{self.url}{path} answered with more than {limit:,} bytes")
        return reply

    def _refuse(self, response: http.client.HTTPResponse, path: str, reply: bytes) -> None:
        status, text = response.status, reply.decode("utf-8", "replace")
        if 300 <= status < 400:
            to = excerpt(response.getheader("Location") or "another address", 200)
            setting = "vllm.servers" if self.section == "vllm" else f"{self.section}.server"
            raise ServerSetupError(
                f"{self.url}{path} answered {status}, a redirect to {to}, which is not followed, so that texts and "
                f"keys go nowhere else; set {setting} to the address of the server itself"
            )
        try:
            found = json.loads(text)
            error = found.get("error", found.get("detail", text))
            reason = error.get("message", text) if isinstance(error, dict) else str(error)
        except (ValueError, AttributeError, RecursionError):
            reason = text
        sentence = f"{self.url}{path} answered {status}: {excerpt(reason, 300)}"
        if status in (401, 403):
            raise ServerSetupError(
                f"{sentence}. Put the server's API key into the variable that {self.section}.api_key_env names"
            )
        if status == 404 and self.section == "vllm":
            raise ServerSetupError(
                f"{sentence}. Weights are updated through routes that vLLM only has if it was started with the "
                "environment variable VLLM_SERVER_DEV_MODE=1"
            )
        if 400 <= status < 500 and status not in BUSY:
            raise ServerSetupError(sentence)
        raise ServerError(sentence)

    def _json(self, reply: bytes, path: str) -> Any:
        try:
            return json.loads(reply)
        except (ValueError, RecursionError) as error:
            start = excerpt(reply[:4000].decode("utf-8", "replace"), 100)
            raise ReplyError(f"{self.url}{path} did not answer with JSON, but with {start}") from error


class _Request:
    """One request, which ends after ``timeout`` seconds even if a byte of the reply comes now and then."""

    def __init__(self, connection: http.client.HTTPConnection, timeout: float) -> None:
        self.connection, self.timeout, self.expired = connection, timeout, False
        self._timer: threading.Timer | None = None
        self._response: http.client.HTTPResponse | None = None
        self._socket: socket.socket | None = None  # which the connection forgets once a reply is on its way

    def send(
        self, method: str, path: str, data: bytes | None, headers: dict[str, str], limit: int
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """The response, and its body up to one byte more than ``limit``."""
        deadline = time.monotonic() + self.timeout
        self.connection.connect()
        self._socket = self.connection.sock
        self._timer = threading.Timer(max(0.0, deadline - time.monotonic()), self._expire)
        self._timer.daemon = True
        self._timer.start()
        self.connection.request(method, path, data, headers)
        response = self._response = self.connection.getresponse()
        parts, size = [], 0
        while size <= limit and (part := response.read(min(READ, limit + 1 - size))):
            parts.append(part)
            size += len(part)
        return response, b"".join(parts)

    def _expire(self) -> None:
        self.expired = True
        self.end()

    def end(self) -> None:
        if self._socket is None:
            return
        with suppress(OSError):  # it may be closed already
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # TLS too, while another thread reads

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._response is not None:
            self._response.close()  # one that is not read to its end keeps the socket
        self.connection.close()
