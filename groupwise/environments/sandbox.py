"""Running Python code that a model wrote, in a process that may do little.

On Linux the process gets namespaces of its own: no network, no other processes, a file system with only Python, the
system's libraries and an empty ``/tmp`` in memory. It has limits of time, memory, processes, files and output, an empty
environment and no input, and it ends together with all processes that it starts. Where the system does not give that,
a `Sandbox` refuses to be made unless what is missing is allowed by name.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from groupwise.environments.contract import EnvironmentFailed
from groupwise.errors import ConfigError, InputError, check_integer
from groupwise.text import error_reason, excerpt

RUNNER = Path(__file__).with_name("sandbox_runner.py")
MEGABYTE = 2**20
START_SECONDS = 60.0  # for the process to set itself up, on a machine that is busy with other things
END_SECONDS = 10.0  # for it to end
LONGEST_CODE = 2**20  # characters
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
PROBE, PROBE_STATUS = "raise SystemExit(7)", 7


@dataclass(frozen=True)
class SandboxResult:
    """What the code wrote and how it ended.

    ``exit_code`` is negative for a signal, and None if the code was stopped; ``stopped`` says by which limit: "time",
    "output" or "processes".
    """

    stdout: str
    stderr: str
    exit_code: int | None
    stopped: str | None
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether the code ran to its end without an error."""
        return self.exit_code == 0

    @property
    def error(self) -> str | None:
        """The error in one line: the last one of a traceback, or the limit that stopped the code. None if it is ok."""
        if self.ok:
            return None
        if self.stopped is not None:
            return _STOPPED[self.stopped]
        lines = [line for line in self.stderr.splitlines() if line.strip()]
        if self.exit_code is not None and self.exit_code < 0:
            with suppress(ValueError):
                return f"the code was ended by the signal {signal.Signals(-self.exit_code).name}"
        return lines[-1].strip() if lines else f"the code ended with exit status {self.exit_code}"


_STOPPED = {
    "time": "the code took too long and was stopped",
    "output": "the code wrote too much and was stopped",
    "processes": "the code started too many processes and was stopped",
}


class Sandbox:
    """A place where code is run; one sandbox may run several codes at the same time, each in a process of its own.

    Args:
        seconds: the time that the code may take.
        memory_mb: the address space of each process.
        processes: how many processes and threads it may have at a time.
        file_mb: the size of ``/tmp`` and of each file.
        output_bytes: how much it may write to standard output, and as much to standard error.
        readable: further paths that the code may read, such as a folder of modules. For a process of root the code
            runs as another user, so every user must be allowed to read them.
        allow_network: run code also where the system cannot take the network away, and do not take it away.
        allow_files: run code also where the system cannot hide the files of this user, which the code may then change.
        python: the interpreter, by default that of this process with its packages.

    ``isolation`` tells what was possible: "namespaces"; "filter", a filter of system calls that takes the network away,
    but hides no files; or "plain", only limits of resources.
    """

    def __init__(
        self,
        *,
        seconds: float = 10.0,
        memory_mb: int = 1024,
        processes: int = 32,
        file_mb: int = 64,
        output_bytes: int = 1_000_000,
        readable: Sequence[str | os.PathLike[str]] = (),
        allow_network: bool = False,
        allow_files: bool = False,
        python: str | None = None,
    ) -> None:
        is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not is_number or not (math.isfinite(seconds) and 0 < seconds < 1e6):
            raise InputError(f"seconds must be a number above 0, got {excerpt(seconds)}")
        check_integer("memory_mb", memory_mb, 64)
        check_integer("processes", processes, 1)
        check_integer("file_mb", file_mb, 1)
        check_integer("output_bytes", output_bytes, 100)
        self.seconds, self.memory_mb, self.processes = seconds, memory_mb, processes
        self.file_mb, self.output_bytes = file_mb, output_bytes
        self.allow_network, self.allow_files = allow_network, allow_files
        self.python = python or sys.executable
        paths = [os.path.abspath(path) for path in readable]
        for path in paths:
            if not os.path.exists(path):
                raise InputError(f"there is no {excerpt(path)}, which `readable` names")
        homes = [os.path.dirname(os.path.abspath(self.python)), os.path.dirname(os.path.realpath(self.python))]
        prefixes = [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix] if python is None else []
        self._readable = list(dict.fromkeys([*prefixes, *map(os.path.dirname, homes), *paths]))
        self.isolation = _isolation(allow_network, allow_files, self.python, tuple(self._readable))

    def run(self, code: str, files: Mapping[str, str] | None = None) -> SandboxResult:
        """Run code in a new process, with ``files`` by name beside it, and wait until it has ended."""
        texts = {**(files or {}), "main.py": code}
        for name, text in texts.items():
            if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
                raise InputError(f"a file in the sandbox has a plain name without folders, got {excerpt(name)}")
            if not isinstance(text, str) or len(text) > LONGEST_CODE:
                what = f"{len(text):,} characters" if isinstance(text, str) else type(text).__name__
                raise InputError(f"{name} must be a text of at most {LONGEST_CODE:,} characters, got {what}")
        if files and "main.py" in files:
            raise InputError("main.py is the code itself; give the file another name")
        try:
            result, problem = self._run(texts, self.isolation)
        except OSError as error:  # no memory, no process, no room on the disk
            raise EnvironmentFailed(f"could not start: {error_reason(error)}", "sandbox") from error
        if result is None:
            raise EnvironmentFailed(f"could not start: {problem}", "sandbox")
        return result

    def _run(self, texts: Mapping[str, str], mode: str) -> tuple[SandboxResult | None, str]:
        """The result, or None with the reason why the code was not started."""
        with tempfile.TemporaryDirectory(prefix="groupwise-sandbox-", ignore_cleanup_errors=True) as folder:
            reader, writer = os.pipe()
            with _Run(self, reader) as run:
                try:
                    request = self._request(texts, mode, folder, writer)
                    run.start(json.dumps(request).encode() + b"\n", writer)
                finally:
                    os.close(writer)
                result, problem = run.wait()
        if result is None:
            return None, problem
        # The folder has another name each time; the same code shall write the same text.
        stdout, stderr = (text.replace(folder, "/tmp") for text in (result.stdout, result.stderr))
        return replace(result, stdout=stdout, stderr=stderr), ""

    def _request(self, texts: Mapping[str, str], mode: str, folder: str, status: int) -> dict[str, Any]:
        clean = {name: text.encode("utf-8", "replace").decode() for name, text in texts.items()}
        home = "/tmp" if mode == "namespaces" else folder
        environment = {
            "HOME": home, "TMPDIR": home, "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8",
            "PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8:backslashreplace", "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **_libraries(),
        }  # fmt: skip
        limits = {
            "RLIMIT_AS": self.memory_mb * MEGABYTE,
            "RLIMIT_CPU": math.ceil(self.seconds),
            "RLIMIT_FSIZE": self.file_mb * MEGABYTE,
            "RLIMIT_CORE": 0,
            "RLIMIT_NOFILE": 256,
        }
        if mode == "namespaces":  # elsewhere it would count all processes of this user; the runner counts itself
            limits["RLIMIT_NPROC"] = self.processes
        return {
            "mode": mode, "texts": clean, "folder": folder, "status": status, "network": self.allow_network,
            "readable": self._readable, "files": self.file_mb * MEGABYTE, "processes": self.processes,
            "limits": limits, "environment": environment, "command": [self.python, "-s", "main.py"],
        }  # fmt: skip


class _Run:
    """One process of a sandbox: what it wrote so far, and its end."""

    def __init__(self, sandbox: Sandbox, status: int) -> None:
        self._sandbox = sandbox
        self._status = status
        self._process: Any = None  # typed as Popen its pipes may be None
        self._started: float | None = None
        self._facts: dict[str, Any] = {}

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._status)
        if self._process is not None:
            self._end()
            self._process.stdout.close()
            self._process.stderr.close()

    def start(self, request: bytes, status: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(RUNNER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(status,),
            env=_libraries(),
            cwd="/",
            start_new_session=True,
        )
        with suppress(BrokenPipeError):
            self._process.stdin.write(request)
            self._process.stdin.flush()

    def wait(self) -> tuple[SandboxResult | None, str]:
        """Read what the code writes until it has ended or a limit is reached."""
        begin = time.monotonic()
        pipes = {self._process.stdout.fileno(): bytearray(), self._process.stderr.fileno(): bytearray()}
        lines = bytearray()
        stopped = None
        with selectors.DefaultSelector() as selector:
            for pipe in (*pipes, self._status):
                selector.register(pipe, selectors.EVENT_READ)
            while selector.get_map() and stopped is None:
                deadline = begin + START_SECONDS if self._started is None else self._started + self._sandbox.seconds
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                for key, _ in ready:
                    part = os.read(key.fd, 1 << 16)
                    if not part:
                        selector.unregister(key.fd)
                    elif key.fd == self._status:
                        lines += part
                        self._read_facts(lines)
                    else:
                        pipes[key.fd] += part
                        if len(pipes[key.fd]) > self._sandbox.output_bytes:
                            stopped = "output"
                if not ready and time.monotonic() >= deadline:
                    stopped = "time"
        self._end()
        seconds = time.monotonic() - (self._started or begin)
        stdout, stderr = (bytes(text[: self._sandbox.output_bytes]) for text in pipes.values())
        if "error" in self._facts or self._started is None:
            reason = self._facts.get("error") or stderr.decode("utf-8", "replace").strip()[-500:]
            return None, reason or f"its process did not start within {START_SECONDS:g} s"
        stopped = self._facts.get("stopped", stopped)
        code = self._facts.get("exit")
        if code == -signal.SIGXCPU:
            stopped = stopped or "time"
        code = None if stopped else code if code is not None else -int(signal.SIGKILL)
        texts = [text.decode("utf-8", "replace") for text in (stdout, stderr)]
        return SandboxResult(texts[0], texts[1], code, stopped, seconds), ""

    def _read_facts(self, lines: bytearray) -> None:
        while (end := lines.find(b"\n")) >= 0:
            self._facts.update(json.loads(bytes(lines[:end])))
            del lines[: end + 1]
        if self._started is None and "started" in self._facts:
            self._started = time.monotonic()

    def _end(self) -> None:
        """End the process and all that come from it, and wait for that."""
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _libraries() -> dict[str, str]:
    """What an interpreter may need to find its own libraries; nothing else of this process is passed on."""
    return {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}


@functools.cache
def _isolation(allow_network: bool, allow_files: bool, python: str, readable: tuple[str, ...]) -> str:
    """The strongest isolation that this system gives, or a `ConfigError` if that is less than is asked for."""
    if os.name != "posix":
        raise ConfigError("code is run only on Linux and macOS, as there are no limits of resources elsewhere")
    modes = []
    if sys.platform == "linux":
        modes = ["namespaces", *(["filter"] if allow_files else [])]
    if allow_network and allow_files:
        modes.append("plain")
    reasons = []
    for mode in modes:
        probe = object.__new__(Sandbox)
        probe.seconds, probe.memory_mb, probe.processes, probe.file_mb = START_SECONDS, 1024, 32, 1
        probe.output_bytes, probe.allow_network, probe.allow_files = 10_000, allow_network, allow_files
        probe.python, probe._readable = python, list(readable)
        result, problem = probe._run({"main.py": PROBE}, mode)
        if result is not None and result.exit_code == PROBE_STATUS:
            return mode
        reasons.append(problem or f"the interpreter {python} does not start in it: {result and result.error}")
    missing = "take the network away" if not allow_network else "hide your files"
    settings = [name for name, is_set in (("allow_network", allow_network), ("allow_files", allow_files)) if not is_set]
    raise ConfigError(
        f"this system cannot {missing} from code that a model wrote ({'; '.join(reasons) or sys.platform}). Run it "
        "where user namespaces (unshare) are allowed, such as a virtual machine, or, if the code may do what you may, "
        f"set {' and '.join(f'{name}=True' for name in settings)}"
    )
