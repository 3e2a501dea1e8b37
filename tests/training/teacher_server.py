"""A process with vLLM's completions API around a real model: log-probs of prompts, by ids or by OpenAI's echo.

It listens at a port for each kind of server: "vllm", "echo" (without prompt_logprobs), "plain" (no log-probs of
prompts), "flaky" (every third request fails with 503), "locked" (needs the key "secret"), "short" (room for 8 tokens),
"odd" (another tokenizer), "renamed" (its model has another name) and "dies N" (the process ends without an answer at
request N).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KINDS = ("vllm", "echo", "plain", "flaky", "locked", "short", "odd", "renamed")


class TeacherProcess:
    """The servers, in a process of their own; ``urls`` has the address of each kind."""

    def __init__(self, model: Path, kinds: Sequence[str] = KINDS) -> None:
        command = [sys.executable, "-m", "tests.training.teacher_server", str(model), *kinds]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline() if self.process.stdout is not None else ""
        if not line:
            raise RuntimeError(f"the servers ended with status {self.process.wait()}")
        self.urls: dict[str, str] = json.loads(line)

    def requests(self, kind: str) -> int:
        """How many completions a server was asked for."""
        with urllib.request.urlopen(f"{self.urls[kind]}/requests") as reply:
            return int(json.loads(reply.read()))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> TeacherProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def start(model: Any, tokenizer: Any, kind: str) -> str:
    """Start a server in a thread; its address."""
    import torch

    lock, asked = threading.Lock(), [0]

    def text(token: int) -> str:
        return tokenizer.decode([token + 1 if kind == "odd" and token < 200 else token])

    @torch.no_grad()
    def complete(body: dict[str, Any]) -> dict[str, Any]:
        ids = body["prompt"]
        with lock:
            logps = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        own = [None, *(float(logps[place, token]) for place, token in enumerate(ids[1:]))]
        choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": "length", "logprobs": None}
        if kind != "plain" and body.get("echo"):
            choice["logprobs"] = {"tokens": [*map(text, ids), "!"], "token_logprobs": [*own, -1.0]}
        if kind not in ("plain", "echo") and body.get("prompt_logprobs") is not None:
            entries: list[Any] = [None]
            for place, token in enumerate(ids[1:]):
                top = logps[place].topk(body["prompt_logprobs"]).indices.tolist() if body["prompt_logprobs"] else []
                entries.append(
                    {
                        str(t): {"logprob": float(logps[place, t]), "rank": 1, "decoded_token": text(t)}
                        for t in {*top, token}
                    }
                )
            choice["prompt_logprobs"] = entries
        return {"choices": [choice]}

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None: ...

        def answer(self, status: int, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            if self.path == "/requests":
                return self.answer(200, asked[0])
            room = 8 if kind == "short" else 512
            return self.answer(
                200, {"data": [{"id": "other" if kind == "renamed" else "teacher", "max_model_len": room}]}
            )

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                asked[0] += 1
                number = asked[0]
            if kind.startswith("dies") and number >= int(kind.split()[1]):
                os._exit(1)
            if kind == "locked" and self.headers["Authorization"] != "Bearer secret":
                return self.answer(401, {"error": {"message": "Unauthorized"}})
            if kind == "flaky" and number % 3 == 0:
                return self.answer(503, {"error": {"message": "overloaded"}})
            return self.answer(200, complete(body))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever).start()
    return f"http://127.0.0.1:{server.server_port}"


def main(folder: str, kinds: Sequence[str]) -> None:
    import torch

    from groupwise.model import load_model_and_tokenizer

    torch.set_num_threads(1)
    loaded = load_model_and_tokenizer(folder, dtype="float32", device="cpu")
    sys.stdout.write(json.dumps({kind: start(*loaded, kind) for kind in kinds}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
