"""`groupwise view`: runs as a page in a browser, read-only and without any request to the outside."""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import sys

from groupwise.cli.common import Commands, add, say
from groupwise.errors import check_installed
from groupwise.paths import user_path
from groupwise.rundir.signals import SignalInterrupt
from groupwise.text import plural


def add_view(commands: Commands) -> None:
    summary = "show runs in a browser, also while they train: curves, answers, tokens, settings, time"
    examples = (
        "groupwise view                             all runs in runs/",
        "groupwise view runs/20261118-095439-quiz   one run",
        "groupwise view --no-open --port 9000       then, from your computer: ssh -L 9000:localhost:9000 MACHINE",
    )
    view = add(commands, "view", _view, summary, examples=examples)
    view.add_argument("runs", nargs="*", metavar="RUN", help="run folders, or folders with runs (default: runs/)")
    view.add_argument("--port", type=int, help="port to listen on (default: the first free one from 8765 on)")
    view.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine)")
    view.add_argument("--token", action="store_true", help="ask for a token on this machine, too: others may use it")
    view.add_argument(
        "--open",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="open a browser (default: if there is a display)",
    )


def _view(arguments: argparse.Namespace) -> int:
    from groupwise.viewer.server import NEEDS, bind, is_loopback, serve

    check_installed(NEEDS)
    from groupwise.training.store.run_folder import RUNS
    from groupwise.viewer.api import Api
    from groupwise.viewer.runs import ServedRuns

    served = ServedRuns([user_path(name) for name in arguments.runs or [RUNS]])
    api = Api(served)
    host = arguments.host
    token = secrets.token_urlsafe(24) if arguments.token or not is_loopback(host) else None
    with bind(host, arguments.port) as listener:
        address = _address(host, listener.getsockname()[1], token)
        say(f"{plural(len(served.scan()), 'run')}, at {address}")
        if not is_loopback(host):
            say(
                "Warning: everyone who can reach this machine and has this address can read these runs, prompts and "
                "answers, and the connection is not encrypted"
            )
        say("Ctrl-C ends it; runs that train go on")
        if arguments.open or (arguments.open is None and _has_display()):
            import webbrowser

            webbrowser.open(address)
        try:
            serve(api, listener, host=host, token=token)
        except SignalInterrupt:
            raise
        except KeyboardInterrupt:
            say("")
    return 0


def _address(host: str, port: int, token: str | None) -> str:
    """The URL to open; a server on all addresses is reached on this machine by its name."""
    from groupwise.viewer.server import PARAMETER

    name = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    name = f"[{name}]" if ":" in name else name
    return f"http://{name}:{port}/" + (f"?{PARAMETER}={token}" if token else "")


def _has_display() -> bool:
    """Whether a browser would appear in front of who typed the command."""
    if not sys.stdout.isatty() or "SSH_CONNECTION" in os.environ:
        return False
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
