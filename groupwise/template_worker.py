"""The process in which chat templates are rendered: a request is a line of JSON, its reply a line per conversation.

A request has the template, the conversations, the template's other variables, and limits: of CPU seconds and of
characters for each conversation. The first conversation that fails is the last one of its request. A template that
needs more CPU time ends the process, which `chat_template` reports.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

MEMORY = 2**30  # bytes, beyond what the process has when it is ready


def main() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to this process, too
    answer({"text": ""})
    _limit_memory()
    for line in sys.stdin:
        request = json.loads(line)
        for chat, longest in zip(request["chats"], request["longest"], strict=True):
            signal.setitimer(signal.ITIMER_PROF, request["seconds"])
            reply = _render(render_jinja_template, request["template"], chat, request["variables"], longest)
            signal.setitimer(signal.ITIMER_PROF, 0)
            answer(reply)
            if "text" not in reply:
                break


def _render(
    render: Callable[..., Any], template: str, chat: list[Any], variables: dict[str, Any], longest: int
) -> dict[str, str]:
    try:
        (text,), _ = render([chat], chat_template=template, **variables)
        if len(text) > longest:
            return {"limit": f"makes a text of {len(text):,} characters from these messages"}
        return {"text": text}
    except MemoryError:
        return {"limit": f"needs more than {MEMORY / 2**30:g} GiB of memory"}
    except RecursionError:
        return {"limit": "calls itself without end, or is nested too deeply"}
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return {"error": lines[0][:1000].rstrip(".")}


def answer(reply: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


def _limit_memory() -> None:
    import resource

    used = 0
    with suppress(OSError), open("/proc/self/statm") as sizes:  # Linux
        used = int(sizes.read().split()[0]) * resource.getpagesize()
    with suppress(ValueError, OSError):  # a lower limit may be set already
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


if __name__ == "__main__":
    main()
