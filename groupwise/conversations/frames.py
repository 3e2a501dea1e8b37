"""What a chat template writes around the turns, found by comparing its outputs.

A template is a program; nothing says where its turns begin and end. So a conversation is rendered with a marker as the
assistant's text, once with and once without the messages that follow. What stands behind the marker in both is the end
of a turn; what only the second has is what is given to the model before its next turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from groupwise.chat_template import TemplateError
from groupwise.conversations.tool_calls import call_id

Message = Mapping[str, Any]

# Texts that no template writes by itself. They have letters only, because some templates trim or parse a text; and no
# two messages of a user are the same, because some templates compare messages.
USER, LATER, ANSWER, REASONING = "QuestionZQX", "LaterZQX", "AnswerZQX", "ReasoningZQX"


class Render(Protocol):
    """Renders conversations, with the beginning of the assistant's next turn or without; a TemplateError if the
    template refuses one."""

    def __call__(self, chats: Sequence[Sequence[Message]], *, add_generation_prompt: bool = True) -> list[str]: ...


class Find(Protocol):
    """Where the first special token that the template wrote is, after ``start``."""

    def __call__(self, text: str, start: int = 0) -> tuple[int, int] | None: ...


class TurnFrame(NamedTuple):
    """The texts around an assistant's turn.

    opening: the end of the generation prompt, which belongs to the turn when it is written as a message (``<think>``).
    lead: what comes between generation prompt and message, which the model has to write itself (Mistral: a space).
    end: the end of the turn, with its last token; end_token: that token's text.
    """

    opening: str
    lead: str
    end: str
    end_token: str


class FrameError(Exception):
    """A reason why a template cannot be used turn by turn."""


def turn_frame(render: Render, find: Find) -> TurnFrame:
    """The texts around a turn after one user message."""
    asked, answered = render([[_user(USER)], [_user(USER), _assistant(ANSWER)]])
    place = answered.find(ANSWER)
    if place < 0:
        raise FrameError("it does not write what the assistant said")
    header = answered[:place]
    if asked.startswith(header):
        opening, lead = asked[len(header) :], ""
    elif header.startswith(asked):
        opening, lead = "", header[len(asked) :]
    else:
        raise FrameError("the beginning of a turn in its generation prompt is not how it writes the assistant's turns")
    (complete,) = render([[_user(USER), _assistant(ANSWER)]], add_generation_prompt=False)
    rest = complete[len(header) + len(ANSWER) :]
    first = find(rest)
    if first is None:
        raise FrameError("it writes no special token at the end of an assistant's turn")
    return TurnFrame(opening, lead, rest[: first[1]], rest[first[0] : first[1]])


def contexts(replies: Sequence[Message]) -> list[list[Message]]:
    """Conversations that may come before ``replies``, the likeliest first; each ends with a turn of the assistant.

    Tool messages answer calls. Templates differ in how many calls a turn may have, and in what they want beside them.
    """
    tools = [reply for reply in replies if reply.get("role") == "tool"]
    plain = [_user(USER), _assistant(ANSWER)]
    if not tools:
        return [plain]
    calls = [
        {
            "id": reply.get("tool_call_id") or call_id(number),
            "type": "function",
            "function": {"name": reply.get("name") or "tool", "arguments": {"text": ANSWER}},
        }
        for number, reply in enumerate(tools)
    ]
    calling = [
        {"role": "assistant", "content": content, "tool_calls": made}
        for made in (calls, calls[:1])
        for content in (None, "")
    ]
    return [*([_user(USER), turn] for turn in calling), plain]


def text_after(render: Render, ends: Sequence[str], context: Sequence[Message], replies: Sequence[Message]) -> str:
    """What the template writes from the end of the last turn in ``context`` on, when ``replies`` follow.

    ``ends``: tokens that end a turn; the text begins with one of them.
    """
    before, after = render([context, [*context, *replies]])
    place = before.rfind(ANSWER)
    places = [(start, end) for end in ends if (start := before.find(end, place)) >= 0] if place >= 0 else []
    if not places:
        raise FrameError("it does not write an assistant's turn that calls a tool, or does not end it")
    start, end = min(places)
    stop = start + len(end)
    if after[:stop] != before[:stop]:
        raise FrameError("it changes earlier messages when others follow")
    return after[start:]


def prefix_problem(render: Render, frame: TurnFrame, *, thinks: bool) -> str | None:
    """Why a template changes what it wrote before when messages follow; None if it does not."""
    answers = [ANSWER]
    if thinks and "</think>" not in frame.opening:
        thinking = f"{REASONING}\n</think>\n\n{ANSWER}"
        answers.append(thinking if is_open(frame.opening) else f"<think>\n{thinking}")
    for answer in answers:
        turn = _assistant(frame.opening + answer)
        asked, answered, continued = render([[_user(USER)], [_user(USER), turn], [_user(USER), turn, _user(LATER)]])
        written = asked + frame.lead + answer + frame.end
        first = asked.rfind(USER) + len(USER)
        if continued[:first] != asked[:first]:
            return "it moves the tools, or something else before the first turn, when messages follow"
        if REASONING in answer and not (answered.startswith(written) and continued.startswith(written)):
            return "it leaves out what the assistant thought in earlier turns"
        if not answered.startswith(written):
            return "it changes what the assistant said"
        if not continued.startswith(written):
            return "it writes an assistant's turn differently when messages follow"
    system = [{"role": "system", "content": REASONING}, _user(USER)]
    turn = _assistant(frame.opening + ANSWER)
    try:
        asked, continued = render([system, [*system, turn, _user(LATER)]])
    except TemplateError:  # a template without system messages
        return None
    return None if continued.startswith(asked) else "it moves the system message when messages follow"


def is_open(text: str) -> bool:
    """Whether a text ends inside of a block of thinking."""
    return text.rfind("<think>") > text.rfind("</think>")


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}
