"""A written conversation as tokens, in which the assistant's turns are to be learned."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from groupwise.conversations.formats import TurnFormat
from groupwise.conversations.tool_calls import call_id
from groupwise.core.sequences import TokenSequence, join_segments
from groupwise.environments import AssistantTurn, Message
from groupwise.errors import InputError


def example_tokens(
    turn_format: TurnFormat, prompt: Sequence[Message], conversation: Sequence[Message]
) -> TokenSequence:
    """The tokens after the prompt, as they would be after sampling: turns of the assistant, and what is given between.

    The conversation begins and ends with a turn of the assistant. Calls of tools get ids where they have none.
    """
    conversation = _with_call_ids(conversation)
    parts = [
        (is_turn, list(messages)) for is_turn, messages in groupby(conversation, lambda m: m.get("role") == "assistant")
    ]
    turns = [messages for is_turn, messages in parts if is_turn]
    if not turns or len(parts) != 2 * len(turns) - 1 or any(len(messages) > 1 for messages in turns):
        raise InputError(
            "a conversation as an example begins and ends with a message of the assistant, and has messages of tools "
            "or the user between two of them"
        )
    before, last = list(prompt), turn_format.prompt(prompt)
    context, segments = list(last), list[tuple[list[int], bool]]()
    for is_turn, messages in parts:
        if is_turn:
            ids = turn_format.turn(messages[0], before, context)
            _check_calls(messages[0], turn_format.parse(ids, last, 0))
        else:
            ids = turn_format.given_after(messages, last)
        segments.append((ids, is_turn))
        before, context, last = [*before, *messages], [*context, *ids], ids
    return join_segments(segments)


def _check_calls(message: Message, said: AssistantTurn) -> None:
    """Raise an error unless the tokens of a message are read as the calls that it has."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    if [(call.name, call.arguments) for call in said.calls] != calls:
        raise InputError(
            f"the chat template does not write the calls of a message as environment.call_format reads them: {calls} "
            f"became {[(call.name, call.arguments) for call in said.calls]}"
        )


def _with_call_ids(conversation: Sequence[Message]) -> list[Message]:
    """The conversation with an id for each call and for the message that answers it."""
    messages: list[Message] = []
    made, open_ids = 0, list[str]()
    for message in conversation:
        if message.get("tool_calls"):
            calls = [{"id": call_id(made + place), **call} for place, call in enumerate(message["tool_calls"])]
            made, open_ids = made + len(calls), [call["id"] for call in calls]
            message = {**message, "tool_calls": calls}
        elif message.get("role") == "tool" and open_ids:
            message = {"tool_call_id": open_ids.pop(0), **message}
        messages.append(message)
    return messages
