"""JSON over HTTP to one vLLM server. Every failure is a `ServerError` with the server's address."""

from __future__ import annotations

import http.client
import json
import ssl
from typing import Any
from urllib.parse import urlsplit

from groupwise.integrations.vllm.errors import ServerError, ServerSetupError
from groupwise.text import error_reason, excerpt

MAX_REPLY = 2**30  # bytes
SHORT = 30.0  # seconds for a question that a server answers at once
BUSY = (408, 429)  # statuses below 500 that another try may not get


class ServerClient:
    """The address of a server, and how to talk to it. It keeps no connection open, so threads may share it.

    Requests go to the server's own address only: proxies of the environment and redirects are not followed.
    section: of the settings that name the server.
    """

    def __init__(self, url: str, key: str | None, timeout: float, *, section: str = "vllm") -> None:
        parts = urlsplit(url)
        self.section = section
        self.url, self.timeout = url.rstrip("/"), timeout
        self._host, self._port, self._secure = parts.hostname or "", parts.port, parts.scheme == "https"
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def get(self, path: str) -> Any:
        return self._json(self._request("GET", path, None, min(SHORT, self.timeout)), path)

    def get_text(self, path: str) -> str:
        return self._request("GET", path, None, min(SHORT, self.timeout)).decode("utf-8", "replace")

    def post(self, path: str, body: Any = None, timeout: float | None = None) -> Any:
        data = b"" if body is None else json.dumps(body, allow_nan=False).encode()
        reply = self._request("POST", path, data, timeout or self.timeout)
        return self._json(reply, path) if reply else None

    def _request(self, method: str, path: str, data: bytes | None, timeout: float) -> bytes:
        connection: http.client.HTTPConnection
        if self._secure:
            connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=timeout, context=ssl.create_default_context()
            )
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout)
        try:
            connection.request(method, path, data, self._headers)
            response = connection.getresponse()
            reply = response.read(MAX_REPLY + 1)
        except TimeoutError as error:
            raise ServerError(f"{self.url}{path} did not answer within {timeout:g} seconds") from error
        except ConnectionRefusedError as error:
            raise ServerError(f"no server answers at {self.url} (connection refused)") from error
        except (OSError, http.client.HTTPException) as error:
            reason = error_reason(error) or type(error).__name__
            raise ServerError(f"the connection to {self.url} failed: {reason}") from error
        finally:
            connection.close()
        if len(reply) > MAX_REPLY:
            raise ServerError(f"{self.url}{path} answered with more than {MAX_REPLY:,} bytes")
        if not 200 <= response.status < 300:
            self._refuse(response.status, path, reply)
        return reply

    def _refuse(self, status: int, path: str, reply: bytes) -> None:
        text = reply.decode("utf-8", "replace")
        try:
            found = json.loads(text)
            error = found.get("error", found.get("detail", text))
            reason = error.get("message", text) if isinstance(error, dict) else str(error)
        except (ValueError, AttributeError):
            reason = text
        sentence = f"{self.url}{path} answered {status}: {excerpt(reason, 300)}"
        if status == 401:
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
        except ValueError as error:
            start = excerpt(reply[:200].decode("utf-8", "replace"), 100)
            raise ServerError(f"{self.url}{path} did not answer with JSON, but with {start}") from error
