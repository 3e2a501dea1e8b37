"""Conversations as texts, rendered by a model's chat template in a watched process.

A chat template is a program that comes with a model. transformers runs it in a sandbox, which keeps it from files and
from Python, but not from looping for ever or from filling the memory. Here transformers runs it in a process of its own
(`template_worker`) with limits of time, memory and output. The process is started once and serves all templates. The
templates of groupwise's own models are known, and are rendered in this process.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from groupwise.errors import GroupwiseError
from groupwise.text import error_reason

SECONDS = 3.0  # of CPU time for a conversation; the usual template needs a thousandth of a second
PATIENCE = 300.0  # seconds for an answer of the process, on a machine that is busy with other things
EXTRA_CHARACTERS = 2**18  # of a rendered text, beyond what its messages and the template's variables have
GROWTH = 4  # times as long as these; JSON with spaces and escaped letters is longer than its values
BATCH = 200  # conversations in a request

# SHA-256 of templates that end: those of tiny, smollm2-135m and qwen2.5-coder-1.5b.
KNOWN = frozenset(
    (
        "66e4ea7c5fb3f5fba2988921abaaab010884405159bed4f38030ca0d8d2d3ba1",
        "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788",
        "d5495a1e5db0611132a97e46a65dbb64a642a499421228b9c8b93229097fa9a4",
    )
)

Chat = Sequence[Mapping[str, Any]]
"""A conversation: messages with "role" and "content"."""


class TemplateError(GroupwiseError, ValueError):
    """A chat template refuses a conversation (number ``row``), or takes too much time or memory (``is_limit``)."""

    def __init__(self, reason: str, row: int = 0, *, is_limit: bool = False) -> None:
        super().__init__(reason)
        self.row, self.is_limit = row, is_limit


def chat_ids(tokenizer: Any, chats: Sequence[Chat], **options: Any) -> list[list[int]]:
    """The token ids of conversations; ``options`` are those of transformers' `apply_chat_template` for the template."""
    if _renders_itself(tokenizer):
        return _in_this_process(tokenizer, chats, {**options, "return_dict": True})["input_ids"]  # type: ignore[no-any-return]
    ids: list[list[int]] = tokenizer(render_chats(tokenizer, chats, **options), add_special_tokens=False)["input_ids"]
    return ids


def render_chats(tokenizer: Any, chats: Sequence[Chat], **options: Any) -> list[str]:
    """The texts of conversations; ``options`` as in `chat_ids`."""
    try:
        template = tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
        known = hashlib.sha256(template.encode()).hexdigest() in KNOWN
        if options.get("tools") is not None:
            options["tools"] = [_schema(tool) for tool in options["tools"]]
    except Exception as error:  # several templates without a default, one that is no text, or tools that are none
        raise TemplateError(error_reason(error)) from error
    if known or _renders_itself(tokenizer) or not hasattr(signal, "setitimer"):  # on Windows there are no limits
        return list(_in_this_process(tokenizer, chats, {**options, "tokenize": False}))
    variables = {**tokenizer.special_tokens_map, **options}
    variables.pop("chat_template", None)
    texts: list[str] = []
    for start in range(0, len(chats), BATCH):
        texts += _render(template, chats[start : start + BATCH], variables, start)
    return texts


def _schema(tool: Any) -> Any:
    """The description of a tool; one that is a Python function is described by its signature and docstring."""
    from transformers.utils.chat_template_utils import get_json_schema

    return tool if isinstance(tool, Mapping) else get_json_schema(tool)


def _renders_itself(tokenizer: Any) -> bool:
    """Whether a tokenizer has code of its own in place of a template, as Mistral's has."""
    from transformers import PreTrainedTokenizerBase

    return getattr(type(tokenizer), "apply_chat_template", None) is not PreTrainedTokenizerBase.apply_chat_template


def _in_this_process(tokenizer: Any, chats: Sequence[Chat], options: Mapping[str, Any]) -> Any:
    try:
        return tokenizer.apply_chat_template(list(chats), **options)
    except Exception:  # a template may raise anything; find the conversation
        for row, chat in enumerate(chats):
            try:
                tokenizer.apply_chat_template([chat], **options)
            except Exception as error:
                raise TemplateError(error_reason(error), row) from error
        raise


def _render(template: str, chats: Sequence[Chat], variables: Mapping[str, Any], first: int) -> list[str]:
    """The texts of one request; ``first`` is the number of its first conversation, for errors."""
    lines = [json.dumps(chat, default=_plain) for chat in chats]
    others = json.dumps(variables, default=_plain)
    longest = [EXTRA_CHARACTERS + GROWTH * (len(line) + len(others)) for line in lines]
    request = f'{{"template": {json.dumps(template)}, "variables": {others}, "chats": [{", ".join(lines)}], '
    request += f'"longest": {json.dumps(longest)}, "seconds": {SECONDS}}}\n'
    with _WORKER as worker:
        replies = worker.ask(request, len(chats))
    *_, last = replies
    if "text" not in last:
        problem = last.get("limit")
        raise TemplateError(problem or last["error"], first + len(replies) - 1, is_limit=problem is not None)
    return [reply["text"] for reply in replies]


def _plain(value: Any) -> Any:
    """What a template sees of a value that JSON does not have, as in transformers: a number of NumPy, or its type."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else f"<{type(value).__name__}>"


class _Worker:
    """The process. It is started by the first request, and again after it was ended."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process: Any = None  # typed as Popen its pipes may be None
        self._owner = 0  # a forked process must not use its parent's pipes
        atexit.register(self.end)

    def __enter__(self) -> _Worker:
        self._lock.acquire()
        if self._owner != os.getpid():
            self._process, self._owner = None, os.getpid()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:  # Ctrl-C: there may be replies that nobody has read
            self.end()
        self._lock.release()

    def ask(self, request: str, most: int) -> list[dict[str, str]]:
        """The replies to a request: ``most`` of them, or fewer, and the last one is not a text."""
        if self._process is None:
            self._start()
        process = self._process
        timer = threading.Timer(PATIENCE, process.kill)
        timer.daemon = True
        timer.start()
        replies: list[dict[str, str]] = []
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(request)
                process.stdin.flush()
            while len(replies) < most and (not replies or "text" in replies[-1]):
                line = process.stdout.readline()
                replies.append(json.loads(line) if line else {"limit": self._reason()})
        finally:
            timer.cancel()
        return replies

    def end(self) -> None:
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.communicate()
        self._process = None

    def _start(self) -> None:
        command = [sys.executable, "-P", str(Path(__file__).with_name("template_worker.py"))]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        # One thread: each of OpenBLAS takes address space. A process group of its own: Ctrl-C is for the parent.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, encoding="utf-8", env=environment, process_group=0, **pipes)
        if not self._process.stdout.readline():
            self.end()
            raise TemplateError("the process that renders chat templates did not start; is there enough memory?")

    def _reason(self) -> str:
        """Why the process ended in the middle of a conversation."""
        status = self._process.wait()
        self.end()
        if status == -signal.SIGPROF:
            return f"needs more than {SECONDS:g} s of CPU time"
        if status == -signal.SIGKILL:
            return f"gave no text for {PATIENCE:g} s, or its process was killed"
        return f"ended its process (exit status {status}), perhaps out of memory"


_WORKER = _Worker()
