"""Real vLLM servers on this machine's CPU, started, killed and started again."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

START_SECONDS = 300

ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


class VllmServer:
    """A server of the model in ``folder``, which writes its log into the folder ``log``."""

    def __init__(self, folder: Path, *, log: Path, length: int = 512) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log / f"vllm-{self.port}.log"
        # vllm-cpu has no metadata of a package "vllm", which `vllm serve` asks for.
        self.command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        self.command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--enforce-eager"]
        self.command += [
            "--max-model-len",
            str(length),
            "--logprobs-mode",
            "processed_logprobs",
            "--max-num-seqs",
            "64",
        ]
        self.command += ["--hf-overrides", json.dumps({"tie_word_embeddings": False}), "--no-enable-chunked-prefill"]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env={**os.environ, **ENVIRONMENT}, start_new_session=True
            )

    def wait(self) -> None:
        """Until it answers."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self.process is None or self.process.poll() is not None:
                break
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                time.sleep(0.5)
            finally:
                connection.close()
        raise RuntimeError(f"vLLM did not start:\n{self.log.read_text(errors='replace')[-3000:]}")

    def kill(self) -> None:
        """End it and all of its processes at once, as a power failure would."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
