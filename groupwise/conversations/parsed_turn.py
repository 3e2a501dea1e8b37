"""What the model said in a turn: its thinking, what it called, and the rest."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from groupwise.conversations.call_formats import CALL_FORMATS
from groupwise.conversations.tool_calls import parameters_of
from groupwise.environments import ToolCall
from groupwise.errors import check_choice, did_you_mean
from groupwise.text import excerpt

MAX_PROBLEMS = 5  # different ones; a turn may repeat them thousands of times
_THINKING = {"<think>": "</think>", "[THINK]": "[/THINK]"}
_OPEN = re.compile("|".join(map(re.escape, _THINKING)))


class ParsedTurn(NamedTuple):
    """A turn in parts. ``problems``: a sentence for each call that could not be read, with what to write instead."""

    content: str
    calls: tuple[ToolCall, ...]
    problems: tuple[str, ...]
    thinking: str


def parse_turn(
    text: str,
    format: str | None = "hermes",
    *,
    opens_thinking: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
    first_call: int = 0,
) -> ParsedTurn:
    """Read a turn, without the token that ended it, in one of `CALL_FORMATS`; with None, nothing in it is a call.

    opens_thinking: the text begins inside a block of thinking, which the prompt opened.
    tools: schemas of the tools. A call of another one is a problem, and they give types to arguments that have none.
    first_call: the number of the first call, for its id: how many calls the conversation had before.
    """
    if format is None:
        thinking, rest, _ = _split_thinking(text, None, opens_thinking)
        return ParsedTurn(rest.strip(), (), (), thinking)
    check_choice("format of tool calls", format, CALL_FORMATS)
    call_format = CALL_FORMATS[format]
    thinking, rest, is_closed = _split_thinking(text, call_format.tags, opens_thinking)
    parameters = parameters_of(tools)
    content, calls, problems = call_format.find(rest, first_call, parameters)
    if not is_closed:
        problems = [*problems, "The thinking was not ended. Write </think> before an answer or a tool call."]
    if tools:
        problems = [*problems, *(_unknown_tool(call.name, parameters) for call in calls if call.name not in parameters)]
        calls = [call for call in calls if call.name in parameters]
    return ParsedTurn(content, tuple(calls), tuple(list(dict.fromkeys(problems))[:MAX_PROBLEMS]), thinking)


def _unknown_tool(name: str, tools: Collection[str]) -> str:
    near = did_you_mean(name, tools)
    return f"There is no tool {excerpt(name)}{near or '.'} The tools are: {', '.join(tools)}."


def _split_thinking(text: str, tags: tuple[str, str | None] | None, opens: bool) -> tuple[str, str, bool]:
    """The thinking, the rest, and whether all thinking was closed. A tag inside of a call is part of the call."""
    thoughts: list[str] = []
    rest, at = "", 0
    close: str | None = "</think>" if opens else None
    while True:
        if close is None:
            opened = _OPEN.search(text, at)
            if opened is None:
                return _joined(thoughts), rest + text[at:], True
            call = -1 if tags is None else text.find(tags[0], at)
            if tags is not None and 0 <= call < opened.start():
                end = -1 if tags[1] is None else text.find(tags[1], call + len(tags[0]))
                if end < 0:
                    return _joined(thoughts), rest + text[at:], True
                end += len(tags[1] or "")
                rest, at = rest + text[at:end], end
                continue
            rest, at, close = rest + text[at : opened.start()], opened.end(), _THINKING[opened[0]]
        end = text.find(close, at)
        if end < 0:
            return _joined([*thoughts, text[at:]]), rest, False
        thoughts.append(text[at:end])
        at, close = end + len(close), None


def _joined(thoughts: Sequence[str]) -> str:
    return "\n\n".join(stripped for thought in thoughts if (stripped := thought.strip()))
