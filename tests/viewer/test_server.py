"""The server over real HTTP: what it answers, and what it refuses."""

from __future__ import annotations

import functools
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from groupwise.cli import main
from groupwise.errors import ConfigError, MissingExtraError
from groupwise.viewer import page
from groupwise.viewer.api import Api
from groupwise.viewer.runs import ServedRuns
from groupwise.viewer.server import bind, is_loopback, make_app
from tests.viewer.conftest import environment, groupwise
from tests.viewer.test_api import ROWS, make_run

Ask = Callable[..., tuple[int, dict[str, str], bytes]]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Ask]]:
    """Serve a folder with the run "a"; returns a function that sends a request."""
    import uvicorn

    folder = tmp_path_factory.mktemp("served")
    make_run(folder / "a", ROWS)
    servers = []

    @functools.cache
    def begin(**options: Any) -> Ask:
        listener = bind("127.0.0.1", 0)
        port = listener.getsockname()[1]
        app = make_app(Api(ServedRuns([folder])), port=port, **options)
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        servers.append((server, thread))

        def ask(path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            try:
                connection.putrequest(method, path, skip_host="host" in headers)
                for name, value in headers.items():
                    connection.putheader(name.replace("_", "-"), value)
                connection.endheaders()
                answer = connection.getresponse()
                return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
            finally:
                connection.close()

        return ask

    yield begin
    for server, thread in servers:
        server.should_exit = True
        thread.join(20)


def test_the_page_and_its_files(start):
    ask = start()
    status, headers, body = ask("/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    for name in [*page.scripts(), *page.styles()]:
        assert f'"static/{name}"' in body.decode()
        status, headers, content = ask(f"/static/{name}")
        assert status == 200
        assert content == (page.STATIC / name).read_bytes()
        assert headers["content-type"].split(";")[0] in ("text/javascript", "text/css", "application/javascript")
    assert ask(f"/static/{name}", if_none_match=headers["etag"])[0] == 304
    assert ask("/static/icon.svg")[1]["content-type"].startswith("image/svg+xml")
    assert ask("/", "HEAD")[2] == b""


def test_no_script_or_style_is_inline_and_every_answer_has_the_headers(start):
    ask = start()
    body = ask("/")[2].decode()
    assert "<style" not in body
    assert "onclick" not in body
    assert body.count("<script") == body.count('<script src="static/')
    for path in ("/", "/static/app.js", "/static/none", "/api/runs", "/api/none", "/none"):
        headers = ask(path)[1]
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers


def test_answers_and_errors_are_json(start):
    ask = start()
    status, headers, body = ask("/api/run/a/metrics?names=reward")
    assert (status, headers["content-type"]) == (200, "application/json")
    assert json.loads(body)["columns"]["reward"]["values"] == [0.1, 0.2, 0.3]
    status, _, body = ask("/api/run/zebra")
    assert status == 404
    assert "zebra" in json.loads(body)["error"]
    status, _, body = ask("/api/run/a/metrics?points=x")
    assert status == 400
    assert "points" in json.loads(body)["error"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed(start, method):
    status, headers, _ = start()("/api/runs", method)
    assert (status, headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/%2e%2e/server.py",
        "/static/..%2fserver.py",
        "/static//etc/passwd",
        "/static/%2fetc%2fpasswd",
        "/static/views",
        "/static/",
        "/static/vendor/echarts.LICENSE%00.js",
        "/api/run/..%2f..%2fetc",
        "/api/run/%2e%2e/state",
        "/../../etc/passwd",
    ],
)
def test_a_path_leads_nowhere_else(start, path):
    status, _, body = start()(path)
    assert status == 404
    assert b"import" not in body
    assert b"root:" not in body


def test_other_hosts_are_refused(start):
    ask = start()
    for host in ("evil.example", "evil.example:8765", "127.0.0.1.evil.example", "localhost.evil.example", "", "8.8.8.8",
                 "[2001:db8::1]:80", "user@localhost"):  # fmt: skip
        assert ask("/api/runs", host=host)[0] == 421, host
    for host in ("localhost", "localhost:9000", "127.0.0.1:1", "127.0.0.1", "[::1]:8765", "LOCALHOST:80"):
        assert ask("/api/runs", host=host)[0] == 200, host


def test_requests_of_other_sites_are_refused(start):
    ask = start()
    assert ask("/api/runs", sec_fetch_site="cross-site")[0] == 403
    assert ask("/api/runs", sec_fetch_site="same-origin")[0] == 200
    assert ask("/", sec_fetch_site="cross-site")[0] == 200  # a link to the page is no harm


def test_elsewhere_a_token_is_needed(start):
    ask = start(token="right-token")
    for path in ("/", "/static/app.js", "/api/runs", "/?t=wrong", "/?t=", "/?t=right-token2"):
        status, _, body = ask(path)
        assert status == 403, path
        assert b"token" in body
    assert ask("/", cookie="groupwise-1=right-token")[0] == 403  # of another server
    status, headers, _ = ask("/?t=right-token")
    assert (status, headers["location"]) == (303, "/")
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    name = cookie.split(";")[0]
    assert ask("/api/runs", cookie=name)[0] == 200
    assert ask("/", cookie=f"other=1; {name}")[0] == 200
    assert ask("/api/runs", cookie=f"{name}x")[0] == 403
    assert ask("/api/runs", cookie=name, host="evil.example")[0] == 421
    assert ask("/api/runs", cookie=name, host="192.168.1.7:80")[0] == 200


def test_loopback_addresses():
    assert [is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "192.168.0.1", "example.org", "localhost.org")] == [
        False
    ] * 5


def test_a_port_in_use_is_an_error_and_the_next_free_one_is_taken():
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}.*choose another --port"):
            bind("127.0.0.1", port)
    with bind("127.0.0.1", None) as one, bind("127.0.0.1", None) as other:
        assert one.getsockname()[1] < other.getsockname()[1] < 8765 + 100
    with pytest.raises(ConfigError, match="--host no-such-host"):
        bind("no-such-host.invalid", 0)
    with pytest.raises(ConfigError, match="cannot listen"):
        bind("192.0.2.1", 0)
    with pytest.raises(ConfigError, match="got 99999"):
        bind("127.0.0.1", 99999)


def test_a_missing_extra_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["view", str(tmp_path)]) == 2
    assert "pip install 'groupwise[view]'" in capsys.readouterr().err
    with pytest.raises(MissingExtraError):
        make_app(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing"], "missing does not exist"),
        (["empty"], "holds no run"),
        (["file.txt"], "is not a folder"),
        ([], "runs does not exist"),
        (["runs-here", "--port", "x"], "--port must be an integer"),
        (["runs-here", "--prot", "1"], "--port"),
        (["runs-here", "--host", "no-such-host.invalid"], "no-such-host.invalid"),
        (["runs-here", "--port", "70000"], "from 0 (any free one) to 65535"),
    ],
)
def test_bad_command_lines(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("")
    make_run(tmp_path / "runs-here" / "a", ROWS)
    assert main(["view", "--no-open", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_cleanly(tmp_path, number, status):
    make_run(tmp_path / "runs" / "a", ROWS)
    command = groupwise("view", "--no-open", "--port", "0")
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "1 run, at http://127.0.0.1:" in line
    address = urlsplit(line.split()[-1])
    held = socket.create_connection((address.hostname, address.port), 20)  # a connection that stays open
    connection = http.client.HTTPConnection(address.netloc, timeout=20)
    connection.request("GET", "/api/runs")
    assert connection.getresponse().status == 200
    os.kill(process.pid, number)
    out, error = process.communicate(timeout=120)
    assert process.returncode == status, error
    assert "Traceback" not in out + error
    held.close()
    connection.close()


@pytest.mark.slow
def test_on_other_addresses_it_warns_and_prints_a_token(tmp_path, view):
    make_run(tmp_path / "a", ROWS)
    address = urlsplit(view(tmp_path, "--host", "0.0.0.0"))
    assert address.query.startswith("t=")
    assert len(address.query) > 30
    for query, status in ((f"?{address.query}", 303), ("", 403)):
        connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=20)
        connection.request("GET", f"/{query}")
        assert connection.getresponse().status == status
        connection.close()
