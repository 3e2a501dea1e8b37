"""From the prompts of rows to the token ids that the model is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.data.read import reason_of
from groupwise.data.rows import check_prompts, has_half_a_character, text_of, where_of
from groupwise.errors import ConfigError, DataError, check_choice

Message = dict[str, Any]

TOO_LONG = ("error", "drop", "cut")
# Arguments of apply_chat_template that decide what it returns, which is not a user's to choose here.
RESERVED = (
    "add_generation_prompt",
    "continue_final_message",
    "conversation",
    "max_length",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "truncation",
)
CHUNK = 1000  # prompts that go through the tokenizer at once


@dataclass(frozen=True)
class Prompt:
    """What the model is given: its ids, these ids as text, and the messages they were rendered from, if any."""

    ids: tuple[int, ...]
    text: str
    messages: list[Message] | None


class PromptBuilder:
    """Turns the prompts of rows into token ids.

    A list of messages goes through the tokenizer's chat template. A text is wrapped as one message of the user with
    ``chat=True``, used as it is with ``chat=False``; by default it is wrapped if the tokenizer has a template.

    system_prompt: put in front as a system message, unless the row's messages begin with one of their own.
    chat_template_kwargs: handed on to the chat template, such as ``{"enable_thinking": False}``.
    max_prompt_length, on_too_long: a prompt of more tokens is an ``"error"``, left out (``"drop"``), or ``"cut"`` to its
        last tokens, which only a text without a template bears. After `build`, ``dropped`` is how many were left out,
        and ``kept`` are the numbers of the rows that were not.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        system_prompt: str | None = None,
        chat: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_prompt_length: int | None = None,
        on_too_long: str = "error",
    ) -> None:
        check_choice("on_too_long", on_too_long, TOO_LONG, ConfigError)
        check_length("max_prompt_length", max_prompt_length)
        if system_prompt is not None and (not isinstance(system_prompt, str) or has_half_a_character(system_prompt)):
            raise ConfigError(f"system_prompt must be a text of whole characters, or None, got {system_prompt!r}")
        self.template_kwargs = dict(chat_template_kwargs or {})
        taken = [name for name in RESERVED if name in self.template_kwargs]
        if taken:
            raise ConfigError(f"chat_template_kwargs may not set {', '.join(taken)}: that is decided here; remove it")
        self.tokenizer = tokenizer
        self.has_template = bool(self.template_kwargs.get("chat_template") or getattr(tokenizer, "chat_template", None))
        if chat and not self.has_template:
            raise ConfigError(
                "chat=True, but the tokenizer has no chat template; use chat=False to give the model the texts as "
                "they are, or choose a model with a template"
            )
        self.chat = self.has_template if chat is None else chat
        self.system_prompt = system_prompt
        self.max_prompt_length = max_prompt_length
        self.on_too_long = on_too_long
        self.dropped = 0
        self.kept: tuple[int, ...] = ()

    def build(self, rows: Sequence[Mapping[str, Any]], column: str = "prompt") -> list[Prompt]:
        """The prompts of ``rows``, in their order, without those that are dropped."""
        check_prompts(rows, column)
        places = [where_of(row, number) for number, row in enumerate(rows)]
        values = [row[column] for row in rows]
        ids: list[list[int]] = []
        chats: list[list[Message]] | None = None
        if conversational(values[0]) or self.chat:
            self.check_template(column)
            self._check_cut()
            chats = [self.messages(value) for value in values]
            for start in range(0, len(chats), CHUNK):
                ids += self.render(chats[start : start + CHUNK], places[start : start + CHUNK])
            self.check_system_prompt(chats, ids)
        else:
            self.check_plain()
            for start in range(0, len(values), CHUNK):
                ids += self.tokenizer(values[start : start + CHUNK])["input_ids"]
        for where, tokens in zip(places, ids, strict=True):
            check_tokens(tokens, where, column)
        kept = self._fit(ids, places, column)
        texts = self._decode([ids[number] for number in kept])
        self.dropped, self.kept = len(rows) - len(kept), tuple(kept)
        return [
            Prompt(tuple(ids[number]), text, chats[number] if chats is not None else None)
            for number, text in zip(kept, texts, strict=True)
        ]

    def check_template(self, column: str) -> None:
        """Raise if there is no template for the messages in a column."""
        if not self.has_template:
            raise DataError(
                f"the column {column!r} holds messages, but the tokenizer has no chat template to render them with; "
                "give texts as prompts, or choose a model with a template"
            )

    def _check_cut(self) -> None:
        if self.on_too_long == "cut" and self.max_prompt_length is not None:
            raise ConfigError(
                "on_too_long='cut' would cut a chat prompt's opening tokens off, and the model would not understand the "
                "rest; use 'drop' or 'error', or a larger max_prompt_length"
            )

    def check_plain(self) -> None:
        """Raise if texts cannot be given to the model as they are, for want of a place for the system prompt."""
        if self.system_prompt is None:
            return
        remedy = "use chat=True" if self.has_template else "choose a model with a chat template"
        raise ConfigError(
            "a system_prompt is a chat message, but these prompts are given to the model as plain texts; "
            f"{remedy}, or write it into the prompts and leave system_prompt out"
        )

    def messages(self, value: Any) -> list[Message]:
        """The messages to render for a prompt, the system prompt among them."""
        messages = as_messages(value)
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, self._system_message())
        return messages

    def render(self, chats: list[list[Message]], places: list[str], *, to_answer: bool = True) -> list[list[int]]:
        """The ids of conversations; ``to_answer`` has the template open the turn of the assistant behind them."""
        try:
            return self._apply(chats, to_answer)
        except Exception:  # a template is somebody else's program, and may raise whatever it likes
            return [self._render_one(chat, where, to_answer) for chat, where in zip(chats, places, strict=True)]

    def _render_one(self, chat: list[Message], where: str, to_answer: bool) -> list[int]:
        try:
            return self._apply([chat], to_answer)[0]
        except Exception as error:
            reason = reason_of(error)
            if self._without_system_prompt(chat, to_answer) is not None:
                raise ConfigError(
                    f"the tokenizer's chat template does not take a system message ({reason}); leave system_prompt "
                    "out, or write it into the prompts"
                ) from error
            raise DataError(f"{where}: the tokenizer's chat template does not take these messages: {reason}") from error

    def check_system_prompt(self, chats: list[list[Message]], ids: list[list[int]]) -> None:
        """Raise if the template passes over the system prompt: nobody would notice that the model never saw it."""
        number = next((number for number, chat in enumerate(chats) if chat[0] == self._system_message()), None)
        if self.system_prompt is None or number is None or self._without_system_prompt(chats[number]) != ids[number]:
            return
        # A template with a default system message renders the two alike if the system prompt is that very text.
        if self.system_prompt.strip() not in self._decode([ids[number]])[0]:
            raise ConfigError(
                "the tokenizer's chat template leaves system messages out, so the model would never see system_prompt; "
                "write it into the prompts instead"
            )

    def _without_system_prompt(self, chat: list[Message], to_answer: bool = True) -> list[int] | None:
        """The ids without the system prompt that was put in front; None if there is none, or no doing without it."""
        if self.system_prompt is None or chat[0] != self._system_message():
            return None
        try:
            return self._apply([chat[1:]], to_answer)[0]
        except Exception:  # as above
            return None

    def _system_message(self) -> Message:
        return {"role": "system", "content": self.system_prompt}

    def _apply(self, chats: list[list[Message]], to_answer: bool) -> list[list[int]]:
        rendered = self.tokenizer.apply_chat_template(
            chats, add_generation_prompt=to_answer, return_dict=True, **self.template_kwargs
        )
        ids: list[list[int]] = rendered["input_ids"]
        return ids

    def _decode(self, ids: list[list[int]]) -> list[str]:
        texts: list[str] = self.tokenizer.batch_decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return texts

    def _fit(self, ids: list[list[int]], places: list[str], column: str) -> list[int]:
        """The numbers of the prompts that stay; those that are to be cut are cut in place."""
        limit = self.max_prompt_length
        everyone = list(range(len(ids)))
        if limit is None:
            return everyone
        if self.on_too_long == "cut":
            for number, tokens in enumerate(ids):
                ids[number] = tokens[-limit:]
            return everyone
        long = [number for number in everyone if len(ids[number]) > limit]
        if not long:
            return everyone
        lengths = [len(ids[number]) for number in long]
        if self.on_too_long == "error":
            others = f" ({len(long)} prompts are too long, the longest has {max(lengths)})" if len(long) > 1 else ""
            raise DataError(
                f"{places[long[0]]}: the {column} has {lengths[0]} tokens, more than max_prompt_length={limit}{others}"
                "; raise max_prompt_length, or leave such prompts out with on_too_long='drop'"
            )
        if len(long) == len(ids):
            raise DataError(
                f"every {column} has more than max_prompt_length={limit} tokens (the shortest has {min(lengths)}), so "
                "none is left; raise max_prompt_length"
            )
        gone = set(long)
        return [number for number in everyone if number not in gone]


def as_messages(value: Any) -> list[Message]:
    """A prompt as messages. Contents become texts, for many templates know nothing else; Arrow's nulls go."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return [
        {key: text_of(entry) if key == "content" else entry for key, entry in message.items() if entry is not None}
        for message in value
    ]


def check_length(name: str, length: Any) -> None:
    """Raise a ConfigError unless this is None or a number of tokens."""
    whole = isinstance(length, int) and not isinstance(length, bool)
    if length is not None and (not whole or length < 1):
        raise ConfigError(f"{name} must be a number of tokens from 1, or None, got {length!r}")


def check_tokens(ids: Sequence[int], where: str, column: str) -> None:
    """Raise a DataError that names the place if nothing came out of the tokenizer."""
    if not ids:
        raise DataError(f"{where}: the {column} comes out of the tokenizer as no tokens at all; remove the row")


def conversational(prompt: Any) -> bool:
    """Whether the prompt of a row is a list of chat messages rather than a text."""
    return isinstance(prompt, (list, tuple))


def completion_for_reward(prompt: Any, text: str) -> Any:
    """A completion in the form that rewards expect: the kind that the row's prompt has, a message or a text."""
    return [{"role": "assistant", "content": text}] if conversational(prompt) else text
