"""Runs a function of a test in several real processes, which torchrun's variables connect."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Done:
    """What a process returned, or its error, and its exit status."""

    def __init__(self, status: int, output: str, value: Any) -> None:
        self.status, self.output, self.value = status, output, value


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def start(function: str, size: int, *arguments: Any, **environment: str) -> list[subprocess.Popen[str]]:
    """Start ``module:function`` in each of ``size`` processes."""
    port = str(free_port())
    processes = []
    for rank in range(size):
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        variables |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.distributed.processes", function, json.dumps(arguments)],
                cwd=ROOT,
                env={**os.environ, **variables, **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return processes


def finish(processes: list[subprocess.Popen[str]], timeout: float = 300.0) -> list[Done]:
    results = []
    for process in processes:
        out, error = process.communicate(timeout=timeout)
        lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
        value = json.loads(lines[-1].removeprefix("RESULT ")) if lines else None
        results.append(Done(process.returncode, out + error, value))
    return results


def run(function: str, size: int, *arguments: Any, **environment: str) -> list[Any]:
    """What the function returned in each process; a failure is an error."""
    results = finish(start(function, size, *arguments, **environment))
    for rank, done in enumerate(results):
        assert done.status == 0, f"rank {rank}:\n{done.output}"
    return [done.value for done in results]


def main() -> None:
    module, _, name = sys.argv[1].partition(":")
    value = getattr(importlib.import_module(module), name)(*json.loads(sys.argv[2]))
    sys.stdout.write(f"RESULT {json.dumps(value)}\n")


if __name__ == "__main__":
    main()
