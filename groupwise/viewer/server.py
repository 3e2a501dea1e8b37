"""The page over HTTP: Starlette and uvicorn around `Api`.

It only reads. By default it listens on the loopback interface; elsewhere each request needs a random token. What a
browser could be tricked into is refused: another site's name in the Host header (DNS rebinding), requests that another
site makes, methods other than GET and HEAD, framing, scripts that are not the page's own. No part of a URL is ever used
as a path: runs are looked up by id, files of the page in a table.
"""

from __future__ import annotations

import hashlib
import ipaddress
import mimetypes
import secrets
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl

from groupwise.errors import ConfigError, GroupwiseError, InputError, check_installed
from groupwise.rundir import json_bytes
from groupwise.text import error_reason
from groupwise.viewer import page
from groupwise.viewer.api import Api

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

PORT = 8765
PORTS_TRIED = 100
LAST_PORT = 65535
PARAMETER = "t"  # of the address, with the token; a name that messages do not hide as a secret
NEEDS = [("the page of a run", "starlette", "view"), ("the page of a run", "uvicorn", "view")]
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that is bound to ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(host: str, port: int | None) -> socket.socket:
    """A listening socket; without a ``port`` the first free one from 8765 on."""
    if port is not None and not 0 <= port <= LAST_PORT:  # the system would take other bits of it
        raise ConfigError(f"--port must be a port from 0 (any free one) to {LAST_PORT}, got {port}")
    ports = [port] if port is not None else range(PORT, PORT + PORTS_TRIED)
    problem = OSError()
    for number in ports:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
        except (socket.gaierror, UnicodeError) as error:
            raise ConfigError(f"--host {host} is not an address of this machine: {error_reason(error)}") from error
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(128)
            return listener
        except OSError as error:
            listener.close()
            problem = error
    free = "choose another --port, or leave it out for the next free one" if port is not None else "give a --port"
    raise ConfigError(f"cannot listen on {host}, port {ports[0]}: {error_reason(problem)}; {free}")


def serve(api: Api, listener: socket.socket, *, host: str, token: str | None) -> None:
    """Answer requests until Ctrl-C or SIGTERM, which raise `KeyboardInterrupt` as usual."""
    import uvicorn

    app = make_app(api, host=host, port=listener.getsockname()[1], token=token)
    options: dict[str, Any] = {"log_level": "error", "access_log": False, "lifespan": "off", "server_header": False}
    uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=1, **options)).run(sockets=[listener])


def make_app(api: Api, *, host: str = "127.0.0.1", port: int = PORT, token: str | None = None) -> App:
    """The ASGI application: the page at ``/``, its files below ``/static/``, answers below ``/api/``."""
    check_installed(NEEDS)
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import Response
    from starlette.routing import Route

    files = {name: page.STATIC / name for name in [*page.scripts(), *page.styles(), "icon.svg"]}
    tags = {name: f'"{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"' for name, path in files.items()}

    async def show_page(_: Any) -> Any:
        return Response(page.index(), media_type="text/html")

    async def show_file(request: Any) -> Any:
        name = request.path_params["name"]
        if name not in files:
            return Response("there is no such file", 404, media_type="text/plain")
        if request.headers.get("if-none-match") == tags[name]:
            return Response(status_code=304, headers={"etag": tags[name]})
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        return Response(files[name].read_bytes(), headers={"etag": tags[name]}, media_type=kind)

    async def answer(request: Any) -> Any:
        return await run_in_threadpool(_answer, api, request.path_params["path"], dict(request.query_params))

    routes = [Route("/", show_page), Route("/static/{name:path}", show_file), Route("/api/{path:path}", answer)]
    return _guarded(Starlette(routes=routes), host=host, cookie=f"groupwise-{port}", token=token)


def _answer(api: Api, path: str, query: dict[str, str]) -> Any:
    from starlette.responses import Response

    status = 200
    try:
        content = api.get(path, query)
    except InputError as error:
        status, content = 400, {"error": str(error)}
    except (GroupwiseError, OSError) as error:  # a file that is damaged, or was deleted meanwhile
        status, content = 404, {"error": str(error)}
    return Response(json_bytes(content, separators=(",", ":")), status, media_type="application/json")


def _guarded(app: App, *, host: str, cookie: str, token: str | None) -> App:
    """The application behind the checks of this module's docstring."""
    from starlette.responses import PlainTextResponse, RedirectResponse

    names = {"localhost", host.lower(), *({socket.gethostname().lower(), socket.getfqdn().lower()} if token else ())}

    async def guarded(scope: Message, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message.get("headers", ())}
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", ()), *(pair for pair in added if pair[0] not in present)]
            await send(message)

        if scope["type"] != "http":
            raise RuntimeError(f"not HTTP: {scope['type']}")  # uvicorn refuses a WebSocket by itself
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        refusal: Any = None
        if scope["method"] not in ("GET", "HEAD"):
            refusal = PlainTextResponse("this page only reads: GET and HEAD are allowed", 405, {"allow": "GET, HEAD"})
        elif not _is_allowed_host(headers.get("host", ""), names, anywhere=token is not None):
            refusal = PlainTextResponse("this Host is not allowed; use the address that `groupwise view` prints", 421)
        elif headers.get("sec-fetch-site") == "cross-site" and scope["path"] != "/":
            refusal = PlainTextResponse("requests of other sites are refused", 403)
        elif token is not None:
            given = dict(parse_qsl(scope["query_string"].decode("latin-1"))).get(PARAMETER)
            if given is not None and _same(given, token):
                refusal = RedirectResponse("/", 303)  # so that the token does not stay in the address
                refusal.set_cookie(cookie, token, httponly=True, samesite="strict")
            elif not _same(_cookie(headers.get("cookie", ""), cookie), token):
                sentence = "the token is missing or wrong; use the address that `groupwise view` prints"
                refusal = PlainTextResponse(sentence, 403)
        await (refusal or app)(scope, receive, send_with_headers)

    return guarded


def _is_allowed_host(header: str, names: set[str], *, anywhere: bool) -> bool:
    """Whether a Host header names this server. An address cannot be rebound, so with a token any one is allowed."""
    host = header.lower()
    host = host[1 : host.find("]")] if host.startswith("[") else host.rpartition(":")[0] if ":" in host else host
    if host in names:
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return anywhere or address.is_loopback


def _same(given: str, token: str) -> bool:
    return secrets.compare_digest(given.encode("utf-8", "replace"), token.encode())


def _cookie(header: str, name: str) -> str:
    try:
        morsel = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return morsel.value if morsel is not None else ""
