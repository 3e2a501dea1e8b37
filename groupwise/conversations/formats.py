"""How the turns of a conversation become tokens: by a chat template, or as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from groupwise.conversations.call_formats import CALL_FORMATS
from groupwise.conversations.parsed_turn import parse_turn
from groupwise.conversations.template import TurnTemplate
from groupwise.environments import AssistantTurn, Message
from groupwise.errors import ConfigError, check_choice


class TurnFormat(Protocol):
    """stop_ids: tokens that end a turn; None for the model's.
    keeps_cut_turns: a turn that reached its maximal length is a turn like any other. Otherwise it ends the
    conversation, because its end is missing.
    """

    stop_ids: tuple[int, ...] | None
    keeps_cut_turns: bool

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of these messages, up to where the model speaks."""

    def given_after(self, replies: Sequence[Message], turn: Sequence[int]) -> list[int]:
        """The tokens between a sampled turn and the next one."""

    def turn(self, message: Message, before: Sequence[Message], context: Sequence[int]) -> list[int]:
        """The tokens of an assistant's message after these messages and their tokens, as if they had been sampled."""

    def parse(self, turn: Sequence[int], before: Sequence[int], calls: int) -> AssistantTurn:
        """What the model said in these tokens, after the prompt or given tokens ``before``.

        ``calls`` is the number of calls of tools that the conversation had already.
        """


class ChatFormat:
    """Turns of a chat template.

    is_strict: as clients of OpenAI's API expect it: without tools nothing is a call, and a turn whose only calls cannot
    be read is text.
    """

    keeps_cut_turns = False

    def __init__(self, template: TurnTemplate, call_format: str | None = None, *, is_strict: bool = False) -> None:
        self.template, self.is_strict = template, is_strict
        self.call_format = template.family.call_format if call_format is None else call_format
        check_choice("environment.call_format:", self.call_format, CALL_FORMATS, ConfigError)
        self.stop_ids: tuple[int, ...] | None = template.stop_ids

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        return self.template.prompt(self._shown(messages))

    def given_after(self, replies: Sequence[Message], turn: Sequence[int]) -> list[int]:
        return self.template.given_after(self._shown(replies), self.template.ended(turn))

    def turn(self, message: Message, before: Sequence[Message], context: Sequence[int]) -> list[int]:
        return self.template.turn_ids(message, self._shown(before), context)

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with roles that the template has."""
        if self.template.has_tool_role:
            return list(messages)
        return [{**message, "role": "user"} if message["role"] == "tool" else message for message in messages]

    def parse(self, turn: Sequence[int], before: Sequence[int], calls: int) -> AssistantTurn:
        text, opens_thinking = self.template.turn_text(turn), self.template.opens_thinking_after(before)
        tools = self.template.tools
        call_format = None if self.is_strict and not tools else self.call_format
        parsed = parse_turn(text, call_format, opens_thinking=opens_thinking, tools=tools, first_call=calls)
        content = parsed.content
        if self.is_strict and not parsed.calls:
            content = parse_turn(text, None, opens_thinking=opens_thinking).content
        return AssistantTurn(content, parsed.calls, parsed.problems, parsed.thinking or None)


class PlainFormat:
    """Text without a chat template: the contents of messages follow each other as they are.

    What looks like a special token in a message is encoded as ordinary text.
    """

    stop_ids: tuple[int, ...] | None = None
    keeps_cut_turns = True

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        if any(message["role"] == "system" for message in messages):
            raise ConfigError(
                "a system message needs a chat template; set data.chat = true, or write it into the prompts"
            )
        ids: list[int] = self.tokenizer(_text(messages), split_special_tokens=True)["input_ids"]
        return ids

    def given_after(self, replies: Sequence[Message], turn: Sequence[int]) -> list[int]:
        options = {"add_special_tokens": False, "split_special_tokens": True}
        ids: list[int] = self.tokenizer(_text(replies), **options)["input_ids"]
        return ids

    def turn(self, message: Message, before: Sequence[Message], context: Sequence[int]) -> list[int]:
        ids: list[int] = self.tokenizer(_text([message]), add_special_tokens=False)["input_ids"]
        return ids

    def parse(self, turn: Sequence[int], before: Sequence[int], calls: int) -> AssistantTurn:
        text = self.tokenizer.decode(turn, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return AssistantTurn(text)


def _text(messages: Sequence[Message]) -> str:
    return "".join(message["content"] for message in messages)
