"""The text of prompts and completions, and rewards for its format and its length."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from groupwise.errors import InputError
from groupwise.text import excerpt

THINKING_ENDS = "</think>"


def text_of(completion: Any) -> str:
    """The model's text: the completion itself, or the messages of the assistant (or without a role), one per line.

    A message's content may be a text, a list of parts (those with a text are used) or None.
    """
    if isinstance(completion, str):
        return completion
    messages = _check_messages("completion", completion)
    by_assistant = [message for message in messages if message.get("role", "assistant") == "assistant"]
    if messages and not by_assistant:
        roles = ", ".join(sorted({repr(message["role"]) for message in messages}))
        raise InputError(f"none of the completion's messages is the assistant's (their roles: {roles})")
    return "\n".join(text for text in map(_content, by_assistant) if text)


def completion_excerpt(completion: Any) -> str:
    """The beginning of a completion's text, for an error."""
    try:
        return excerpt(text_of(completion))
    except InputError:
        return excerpt(completion)


def _check_messages(what: str, value: Any) -> Sequence[Mapping[str, Any]]:
    messages = [value] if isinstance(value, Mapping) else value
    if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
        raise InputError(f"a {what} must be a text or a list of messages, got {excerpt(value)}")
    return messages


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Sequence) and all(isinstance(part, Mapping) for part in content):
        return "".join(part["text"] for part in content if isinstance(part.get("text"), str))
    raise InputError(f"a message's content must be a text, a list of parts or None, got {excerpt(content)}")


def answer_of(completion: Any, after: str | None = THINKING_ENDS) -> str:
    """The completion's text after the last ``after``, or all of it if that does not occur."""
    text = text_of(completion)
    return (text.rpartition(after)[2] if after else text).strip()


def prompt_messages(prompt: Any) -> list[dict[str, str]]:
    """A prompt as chat messages, each with a role and a text; a text is a message of the user."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    messages = _check_messages("prompt", prompt)
    return [{"role": str(message.get("role", "user")), "content": _content(message)} for message in messages]


def prompt_text(prompt: Any) -> str:
    """A prompt as one text: a single message as it is, several with their roles before them."""
    messages = prompt_messages(prompt)
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def column_of(columns: Mapping[str, Sequence[Any]], name: str) -> Sequence[Any]:
    """A column of the data, or an `InputError` if there is none of that name."""
    if name not in columns:
        raise InputError(f"the data has no column {name!r} (there are: {', '.join(map(repr, columns)) or 'none'})")
    return columns[name]


def overlong_penalty(length: int, limit: int, buffer: int) -> float:
    """The soft penalty for overlong answers of DAPO (2503.14476): 0 up to ``limit − buffer``, then linear down to −1.

    An answer of exactly ``limit`` tokens gets −1; with a buffer of 0 it gets 0, since it may have ended in time.
    """
    over = length - (limit - buffer)
    if over <= 0:
        return 0.0
    return -1.0 if length > limit else -over / buffer


def format_reward(pattern: str) -> Callable[..., list[float]]:
    """A reward of 1.0 for each completion that matches the regular expression, else 0.0.

    The complete text has to match, except for white space around it. ``.`` also matches line breaks.
    """
    try:
        expression = re.compile(pattern, re.DOTALL)
    except (re.error, TypeError) as error:
        raise InputError(f"{pattern!r} is not a regular expression: {error}") from error

    def format_reward(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        return [float(expression.fullmatch(text_of(completion).strip()) is not None) for completion in completions]

    return format_reward
