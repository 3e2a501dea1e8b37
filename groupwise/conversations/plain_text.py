"""Conversations for models without a chat template: a line per turn, as ``User: …`` and ``Assistant: …``.

A turn of the assistant ends where the model begins a line of the user's, so the model needs a stop string
(`generate.StopStrings` with ``stop``). Methods and attributes are those of `TurnTemplate`. There are no special tokens
between the turns, so each piece is encoded by itself; the tokens of the text as one piece may differ where pieces meet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.conversations.special_tokens import SpecialTokens
from groupwise.data.prompts import as_messages
from groupwise.data.rows import check_message, check_prompt
from groupwise.errors import ConfigError, InputError

NAMES = {"user": "User", "assistant": "Assistant", "tool": "Tool"}


class PlainTextTemplate:
    """Conversations as lines of text.

    names: what stands before the text of each role; a system message stands alone, before all others.
    stop: ends a turn of the assistant; by default a new line with the user's name.

    In what users, tools and environments say, a line that begins with one of the names is indented by a space, so
    that nobody speaks for another.
    """

    chat_template: str | None = None
    replaced: str | None = None
    opens_thinking = False
    has_tool_role = True
    trims = True
    end_of_turn: tuple[int, ...] = ()

    def __init__(self, tokenizer: Any, names: Mapping[str, str] | None = None, stop: str | None = None) -> None:
        self.names = {**NAMES, **(names or {})}
        unknown = sorted(set(self.names) - set(NAMES))
        if unknown or not all(isinstance(name, str) and name.strip() for name in self.names.values()):
            raise ConfigError(f"names gives a text to each of {', '.join(NAMES)}, got {names!r:.200}")
        self.stop = f"\n{self.names['user']}:" if stop is None else stop
        if not isinstance(self.stop, str) or not self.stop:
            raise ConfigError(f"stop must be a text that is not empty, got {self.stop!r:.200}")
        self.tokenizer = tokenizer
        self._special = SpecialTokens(tokenizer, "")
        self._speaker = re.compile(rf"^(?=(?:{'|'.join(map(re.escape, self.names.values()))}):)", re.MULTILINE)
        end_of_text = getattr(tokenizer, "eos_token_id", None)
        self.stop_ids: tuple[int, ...] = () if end_of_text is None else (end_of_text,)

    def prompt(self, messages: str | Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids of a conversation, with the beginning of the assistant's turn."""
        check_prompt(messages, "the conversation", "prompt")
        begin = getattr(self.tokenizer, "bos_token_id", None) if self._begins_with_bos() else None
        text = self._lines(as_messages(messages)) + self._next()
        return [*([] if begin is None else [begin]), *self._special.encode(text)]

    def given_after(self, reply_messages: Sequence[Mapping[str, Any]], ended_with_eos: bool) -> list[int]:
        """The ids between a sampled turn and the next one.

        ended_with_eos: the sample ends with the stop string, so its line of the user's has begun.
        """
        if isinstance(reply_messages, (str, Mapping)) or not reply_messages:
            raise InputError('replies must be messages such as [{"role": "user", "content": "…"}], at least one')
        for number, reply in enumerate(reply_messages, start=1):
            check_message(reply, f"message {number} after the turn")
            if reply["role"] not in ("user", "tool"):
                raise InputError(f"message {number} after the turn has the role {reply['role']!r}, not user or tool")
        text = "\n" + self._lines(as_messages(reply_messages), all_tokens=True) + self._next()
        if ended_with_eos:
            # The stop string is there already. Where the user speaks first it is the beginning of this line.
            text = text.removeprefix(self.stop) if text.startswith(self.stop) else text
        return self._special.encode(text)

    def ended(self, ids: Sequence[int]) -> bool:
        """Whether a sample ends with the stop string, perhaps in the middle of its last token."""
        return self.stop in self._decode(ids)

    def turn_text(self, ids: Sequence[int]) -> str:
        """The text of a sampled turn, without what ended it."""
        ids = list(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)
        return self._decode(ids).partition(self.stop)[0].strip()

    def turn_message(self, ids: Sequence[int]) -> dict[str, str]:
        """A sampled turn as a message."""
        return {"role": "assistant", "content": self.turn_text(ids)}

    def _lines(self, messages: Sequence[Mapping[str, Any]], *, all_tokens: bool = False) -> str:
        lines = []
        for number, message in enumerate(messages):
            role, content = message["role"], message["content"].strip()
            if role == "system" and number:
                raise InputError("a system message can only come first in a conversation without a chat template")
            content = self._special.hide(self._speaker.sub(" ", content), all_tokens=all_tokens or role == "tool")
            lines.append(f"{content}\n" if role == "system" else f"{self.names[role]}: {content}")
        return "\n".join(lines)

    def _next(self) -> str:
        return f"\n{self.names['assistant']}:"

    def _begins_with_bos(self) -> bool:
        """Whether the tokenizer puts a special token before a text."""
        begin = getattr(self.tokenizer, "bos_token_id", None)
        return begin is not None and list(self.tokenizer("a")["input_ids"])[:1] == [begin]

    def _decode(self, ids: Sequence[int]) -> str:
        if not ids:
            return ""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text
