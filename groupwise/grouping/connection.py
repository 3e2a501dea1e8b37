"""The connection to Ray: a local instance started for the workers, or an existing cluster.

A local instance listens on the loopback address only (unless ``grouping.ray_host`` is set), sends no usage statistics,
uses a private temporary folder, and leaves the process's signal handlers unchanged.
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
from collections.abc import Iterator
from typing import Any

from groupwise.config import GroupingSection
from groupwise.errors import ConfigError
from groupwise.model.source import first_line
from groupwise.text import Say

LOOPBACK = "127.0.0.1"
STORE_BYTES = 100_000_000  # texts are small; by default Ray takes a third of the memory
NEVER = 10**6  # seconds


class NoRayError(Exception):
    """Ray is not installed, or could not be started."""


class RayConnection:
    """The Ray of this process, the cluster at ``grouping.ray_address``, or a local instance that ends with it."""

    def __init__(self) -> None:
        try:
            import ray
        except ImportError as error:
            raise NoRayError("Ray is not installed (pip install 'groupwise[ray]')") from error
        self.ray: Any = ray
        self.started = self._joined = False
        self._folder: str | None = None

    def open(self, settings: GroupingSection, workers: int, say: Say) -> None:
        if self.ray.is_initialized():
            return
        with _signal_handler_kept():
            if settings.ray_address in (None, "local"):
                self._start(_local_address(settings.ray_host), workers, say)
            else:
                self._join(str(settings.ray_address))

    def gpus(self) -> float:
        """The free GPUs; if none is free, all of them: workers then wait for others to finish."""
        free = float(self.ray.available_resources().get("GPU", 0))
        return free if free >= 1 else float(self.ray.cluster_resources().get("GPU", 0))

    def is_alive(self) -> bool:
        """Whether Ray is running. A local instance's processes are checked, since calls to a dead one may hang."""
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
                f"cannot connect to a Ray cluster at {address}: {first_line(error)}; set grouping.ray_address to the "
                "host:port of a running one, or leave it out to start one on this machine"
            ) from error
        self._joined = True

    def _start(self, host: str, workers: int, say: Say) -> None:
        if host != LOOPBACK:
            say(f"grouping.ray_host is {host}: Ray listens on every network of this machine")
        prepare_environment()
        self._joined = True  # close() must clean up even if init fails
        # Short, since a socket path has at most 107 characters; Ray's default folder is shared by all users.
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
                    # By default Ray kills a process that has lost its instance for a minute.
                    _system_config={"gcs_rpc_server_reconnect_timeout_s": NEVER},
                )
                self._dead_processes = self.ray._private.worker._global_node.dead_processes
        except Exception as error:
            raise NoRayError(f"Ray could not be started ({first_line(error)})") from error
        if (address := context.address_info["node_ip_address"]) != host:
            raise NoRayError(f"this version of Ray listens on {address} instead of {host}")
        self.started = True


def prepare_environment() -> None:
    """Disable usage statistics, and set a random auth token if Ray needs one and none is configured."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    needs_token = os.environ.get("RAY_AUTH_MODE", "token").lower() == "token"
    configured = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    if needs_token and not configured and not os.path.exists(os.path.expanduser("~/.ray/auth_token")):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


@contextlib.contextmanager
def loopback_only(enabled: bool) -> Iterator[None]:
    """Make Ray listen on 127.0.0.1; it replaces that by the network address unless clusters are disabled."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = before and not enabled
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def _signal_handler_kept() -> Iterator[None]:
    """Restore the SIGTERM handler, which saves after the current step; Ray replaces it by its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _local_address(host: str) -> str:
    """The IP address of ``grouping.ray_host``, which must belong to this machine."""
    try:
        address = ipaddress.ip_address(socket.gethostbyname(host))
        with socket.socket() as probe:
            probe.bind((str(address), 0))
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"grouping.ray_host is {host!r}, which is not an address of this machine; use {LOOPBACK} or one of its own"
        ) from error
    if address.is_unspecified:
        raise ConfigError(f"grouping.ray_host is {host!r}; set the address at which other machines reach this one")
    return LOOPBACK if address.is_loopback else str(address)


def _check_reachable(address: str, node_address: str) -> None:
    """Fail early, where Ray would retry for minutes. Ray reads a loopback address as the node's network address."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if colon and port.isdecimal():
        host = node_address if host in (LOOPBACK, "localhost", "[::1]") else host.strip("[]")
        socket.create_connection((host, int(port)), timeout=10.0).close()
