"""The Ray that workers run on: started for them on this machine, or one that is there.

A Ray that is started here listens on the loopback address alone unless it is told otherwise, reports nothing to its
makers, has a folder of its own, and leaves the process's signal handlers as they are.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

from groupwise.config import GroupingSection
from groupwise.errors import ConfigError
from groupwise.model.source import first_line

Say = Callable[[str], None]

LOOPBACK = "127.0.0.1"
STORE_BYTES = 100_000_000  # texts are small; Ray would take a third of the memory
NEVER = 10**6  # seconds


class NoRayError(Exception):
    """There is no Ray on this machine, and none could be started."""


class RayConnection:
    """The Ray that is used: the one there is, the one that is named, or one that is started and stopped here."""

    def __init__(self) -> None:
        try:
            import ray
        except ImportError as error:
            raise NoRayError("Ray is not installed (pip install 'groupwise[ray]')") from error
        self.ray: Any = ray
        self.started = self._joined = False
        self._folder: str | None = None

    def open(self, how: GroupingSection, workers: int, say: Say) -> None:
        if self.ray.is_initialized():
            return
        with _signal_handler_kept():
            if how.ray_address in (None, "local"):
                self._start(_own_address(how.ray_host), workers, say)
            else:
                self._join(str(how.ray_address))

    def gpus(self) -> float:
        """Those that nobody else in Ray has, or all where there is none left: then one waits for others to finish."""
        free = float(self.ray.available_resources().get("GPU", 0))
        return free if free >= 1 else float(self.ray.cluster_resources().get("GPU", 0))

    def lives(self) -> bool:
        """Whether Ray is there. One that was started here is looked at: calls to it may wait for ever."""
        if not self.started or not self.ray.is_initialized():
            return bool(self.ray.is_initialized())
        return not {"raylet", "gcs_server"} & {kind for kind, _ in self._dead_processes()}

    def close(self) -> None:
        if self._joined:
            self._joined = self.started = False
            with _signal_handler_kept(), contextlib.suppress(Exception):
                self.ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _join(self, address: str) -> None:
        try:
            _check_reachable(address, self.ray.util.get_node_ip_address())
            self.ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            raise ConfigError(
                f"no Ray cluster can be joined at {address}: {first_line(error)}; set grouping.ray_address to the "
                "host:port of one that runs, or leave it out to have one started on this machine"
            ) from error
        self._joined = True

    def _start(self, host: str, workers: int, say: Say) -> None:
        if host != LOOPBACK:
            say(f"grouping.ray_host is {host}: Ray listens on every network of this machine")
        prepare_environment()
        self._joined = True  # an error may leave processes behind
        # Short, since the name of a socket has at most 107 letters, and not Ray's own, which all users share.
        self._folder = tempfile.mkdtemp(prefix="groupwise-", dir="/tmp" if os.path.isdir("/tmp") else None)
        try:
            with loopback_only(host == LOOPBACK):
                context = self.ray.init(
                    "local",
                    num_cpus=workers,
                    object_store_memory=STORE_BYTES,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _node_ip_address=host,
                    _temp_dir=self._folder,
                    # Otherwise Ray ends a process whose Ray has been gone for a minute.
                    _system_config={"gcs_rpc_server_reconnect_timeout_s": NEVER},
                )
                self._dead_processes = self.ray._private.worker._global_node.dead_processes
        except Exception as error:
            raise NoRayError(f"Ray could not be started ({first_line(error)})") from error
        if (found := context.address_info["node_ip_address"]) != host:
            raise NoRayError(f"this version of Ray listens on {found} where it is told {host}")
        self.started = True


def prepare_environment() -> None:
    """No statistics for Ray's makers; and where Ray wants a token and there is none, one that is kept in no file."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    wanted = os.environ.get("RAY_AUTH_MODE", "token").lower() == "token"
    given = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    if wanted and not given and not os.path.exists(os.path.expanduser("~/.ray/auth_token")):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


@contextlib.contextmanager
def loopback_only(wanted: bool) -> Iterator[None]:
    """Ray takes 127.0.0.1 for the machine's address in its network, except on systems that have no clusters."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = before and not wanted
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def _signal_handler_kept() -> Iterator[None]:
    """Ray puts its own handler for SIGTERM in place of the one that finishes a step and saves."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _own_address(host: str) -> str:
    """The address of this machine that is meant."""
    try:
        address = ipaddress.ip_address(socket.gethostbyname(host))
        with socket.socket() as probe:
            probe.bind((str(address), 0))
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"grouping.ray_host is {host!r}, which is no address of this machine; use {LOOPBACK}, or one of its own"
        ) from error
    if address.is_unspecified:
        raise ConfigError(f"grouping.ray_host is {host!r}; name the address by which other machines reach this one")
    return LOOPBACK if address.is_loopback else str(address)


def _check_reachable(address: str, own: str) -> None:
    """Ray itself would try for minutes. It takes a loopback address for the machine's ``own``."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if colon and port.isdecimal():
        host = own if host in (LOOPBACK, "localhost", "[::1]") else host.strip("[]")
        socket.create_connection((host, int(port)), timeout=10.0).close()
