"""Rewards that look at a completion as text: its words, its form, its length."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from groupwise.errors import InputError


def text_of(completion: Any) -> str:
    """What the model said: a text as it is, or the texts of the assistant's messages, one below the other.

    Messages of tools and users that a conversation may hold are not the model's words and are left out. A message
    without a role is the assistant's; content may be a text, a list of parts of which those with a text count, or None.
    """
    if isinstance(completion, str):
        return completion
    messages = [completion] if isinstance(completion, Mapping) else completion
    if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
        raise InputError(
            f"a completion must be a text or a list of messages such as {{'role': 'assistant', 'content': '…'}}, "
            f"got {excerpt(completion)}"
        )
    own = [message for message in messages if message.get("role", "assistant") == "assistant"]
    if messages and not own:
        roles = ", ".join(sorted({repr(message["role"]) for message in messages}))
        raise InputError(f"none of the completion's messages is the assistant's (their roles: {roles})")
    return "\n".join(text for text in map(_content, own) if text)


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(isinstance(part, Mapping) for part in content):
        return "".join(part["text"] for part in content if isinstance(part.get("text"), str))
    raise InputError(f"a message's content must be a text, a list of parts or None, got {excerpt(content)}")


def excerpt(value: Any, length: int = 60) -> str:
    """The value as it is written in Python, cut to about ``length`` characters: fit for an error message."""
    if isinstance(value, str):
        value = value if len(value) <= length else value[: length - 1] + "…"
        return repr(value)
    written = repr(value)
    return written if len(written) <= length else written[: length - 1] + "…"


def overlong_penalty(length: int, limit: int, buffer: int) -> float:
    """DAPO's soft punishment of overlong answers: 0 up to ``limit − buffer`` tokens, then evenly down to −1.

    Beyond the limit it is −1. With a buffer an answer of exactly ``limit`` tokens gets −1, as in the paper's formula.
    Without one there is no slope: up to and with the limit it is 0, since an answer of that length may have ended in
    time. Whether it did is not seen from its length; answers that were cut off can be masked instead.
    """
    for name, value, least in (("length", length, 0), ("limit", limit, 1), ("buffer", buffer, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"{name} must be a whole number of tokens of at least {least}, got {value!r}")
    if buffer > limit:
        raise InputError(f"the buffer of {buffer} tokens is longer than the limit of {limit}")
    over = length - (limit - buffer)
    if over <= 0:
        return 0.0
    return -1.0 if length > limit else -over / buffer


def format_reward(pattern: str) -> Callable[..., list[float]]:
    """A reward of 1.0 for each completion that has the form of the regular expression, and 0.0 for the others.

    The whole text has to match, but for white space around it; ``.`` matches line breaks too, so ``.*####.*`` looks for
    a mark anywhere.
    """
    try:
        form = re.compile(pattern, re.DOTALL)
    except (re.error, TypeError) as error:
        raise InputError(f"{pattern!r} is not a regular expression: {error}") from error

    def format_reward(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        return [float(form.fullmatch(text_of(completion).strip()) is not None) for completion in completions]

    return format_reward
