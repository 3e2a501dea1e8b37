"""The prompts of rows as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.chat_template import TemplateError, chat_ids
from groupwise.data.rows import check_prompts, columns_of, content_text, has_lone_surrogate, where_of
from groupwise.errors import ConfigError, DataError

Message = dict[str, Any]

# Arguments of apply_chat_template that PromptBuilder sets itself.
RESERVED = """
    add_generation_prompt continue_final_message conversation max_length padding return_assistant_tokens_mask
    return_dict return_tensors sanitize_control_tokens tokenize tokenizer_kwargs truncation
"""
CHUNK = 1000  # prompts per call of the tokenizer


@dataclass(frozen=True)
class Prompt:
    """The model's input."""

    ids: tuple[int, ...]
    text: str
    teacher_ids: tuple[int, ...] | None = None  # of a teacher that is shown more (distillation.show)


class PromptBuilder:
    """Turns the prompts of rows into token ids.

    The chat template is applied to lists of messages. A text becomes one user message with ``chat=True`` and is used as
    it is with ``chat=False``; by default it becomes a message if the tokenizer has a template.

    system_prompt: a system message put first, unless the row's messages begin with one.
    assistant_last: messages may end with one of the assistant's, after which the answer is another one.
    may_be_empty: the last message may be blank, because an environment says what follows it.
    chat_template_kwargs: arguments of the chat template, such as ``{"enable_thinking": False}``.
    max_prompt_length, on_too_long: a longer prompt is an ``"error"``, is left out (``"drop"``), or keeps only its last
        tokens (``"truncate"``, for texts without a template). After `build`, ``dropped`` is the number of prompts left
        out, and ``kept`` are the numbers of the other rows.
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
        assistant_last: bool = False,
        may_be_empty: bool = False,
    ) -> None:
        if system_prompt is not None and (not isinstance(system_prompt, str) or has_lone_surrogate(system_prompt)):
            raise ConfigError(f"system_prompt must be a text without lone surrogates, or None, got {system_prompt!r}")
        self.template_kwargs = dict(chat_template_kwargs or {})
        reserved = [name for name in RESERVED.split() if name in self.template_kwargs]
        if reserved:
            raise ConfigError(f"chat_template_kwargs may not set {', '.join(reserved)}; remove it")
        self.tokenizer = tokenizer
        self.has_template = bool(self.template_kwargs.get("chat_template") or getattr(tokenizer, "chat_template", None))
        if chat and not self.has_template:
            raise ConfigError("chat=True, but the tokenizer has no chat template; use chat=False, or another model")
        self.chat = self.has_template if chat is None else chat
        self.system_prompt = system_prompt
        self.assistant_last, self.may_be_empty = assistant_last, may_be_empty
        self.max_prompt_length = max_prompt_length
        self.on_too_long = on_too_long
        self.dropped = 0
        self.kept: tuple[int, ...] = ()

    def build(self, rows: Sequence[Mapping[str, Any]], column: str = "prompt") -> list[Prompt]:
        """The prompts of ``rows``, in order, without dropped ones."""
        check_prompts(rows, column, assistant_last=self.assistant_last, may_be_empty=self.may_be_empty)
        places = [where_of(row, number) for number, row in enumerate(rows)]
        values = [row[column] for row in rows]
        ids: list[list[int]] = []
        if self.chat or not isinstance(values[0], str):
            self.check_template(column)
            if self.on_too_long == "truncate" and self.max_prompt_length is not None:
                reason = "on_too_long='truncate' would remove the first tokens of a chat prompt"
                raise ConfigError(f"{reason}; use 'drop' or 'error', or a larger max_prompt_length")
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
        return [Prompt(tuple(ids[number]), text) for number, text in zip(kept, texts, strict=True)]

    def check_template(self, column: str) -> None:
        if not self.has_template:
            reason = f"the column {column!r} holds messages, but the tokenizer has no chat template"
            raise DataError(f"{reason}; use texts as prompts, or choose a model with a template")

    def check_plain(self) -> None:
        """Raise a ConfigError if there is a system prompt, which plain texts have no place for."""
        if self.system_prompt is None:
            return
        remedy = "use chat=True" if self.has_template else "choose a model with a chat template"
        reason = "system_prompt is a chat message, but these prompts are plain texts"
        raise ConfigError(f"{reason}; {remedy}, or write it into the prompts")

    def messages(self, value: Any) -> list[Message]:
        """The messages of a prompt, with the system prompt."""
        messages = as_messages(value)
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, self._system_message())
        return messages

    def render(self, chats: list[list[Message]], places: list[str], *, open_answer: bool = True) -> list[list[int]]:
        """The ids of conversations; with ``open_answer`` followed by the beginning of the assistant's turn."""
        try:
            return self._apply(chats, open_answer)
        except TemplateError as error:
            where = places[error.row]
            if error.is_limit:
                raise DataError(
                    f"{where}: the model's chat template {error}, so it was stopped; use another model, or its prompts "
                    "as plain texts (data.chat = false)"
                ) from error
            if self._without_system_prompt(chats[error.row], open_answer) is not None:
                problem = f"the tokenizer's chat template rejects system messages ({error})"
                raise ConfigError(f"{problem}; leave system_prompt out, or write it into the prompts") from error
            raise DataError(f"{where}: the tokenizer's chat template rejects these messages: {error}") from error

    def check_system_prompt(self, chats: list[list[Message]], ids: list[list[int]]) -> None:
        """Raise a ConfigError if the template silently ignores the system prompt."""
        number = next((number for number, chat in enumerate(chats) if chat[0] == self._system_message()), None)
        if self.system_prompt is None or number is None or self._without_system_prompt(chats[number]) != ids[number]:
            return
        # The two are also equal if the template has a default system message and the system prompt is the same text.
        if self.system_prompt.strip() not in self._decode([ids[number]])[0]:
            reason = "the tokenizer's chat template ignores system messages"
            raise ConfigError(f"{reason}, so the model would never see system_prompt; write it into the prompts")

    def _without_system_prompt(self, chat: list[Message], open_answer: bool = True) -> list[int] | None:
        """The ids without the added system prompt; None if there is none, or if the template fails without it."""
        if self.system_prompt is None or chat[0] != self._system_message():
            return None
        try:
            return self._apply([chat[1:]], open_answer)[0]
        except TemplateError:
            return None

    def _system_message(self) -> Message:
        return {"role": "system", "content": self.system_prompt}

    def _apply(self, chats: list[list[Message]], open_answer: bool) -> list[list[int]]:
        return chat_ids(self.tokenizer, chats, add_generation_prompt=open_answer, **self.template_kwargs)

    def _decode(self, ids: list[list[int]]) -> list[str]:
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        texts: list[str] = self.tokenizer.batch_decode(ids, **options)
        return texts

    def _fit(self, ids: list[list[int]], places: list[str], column: str) -> list[int]:
        """The numbers of the prompts to keep; prompts are truncated in place."""
        limit = self.max_prompt_length
        if limit is not None and self.on_too_long == "truncate":
            ids[:] = [tokens[-limit:] for tokens in ids]
        long = [number for number, tokens in enumerate(ids) if limit is not None and len(tokens) > limit]
        lengths = [len(ids[number]) for number in long]
        if long and self.on_too_long == "error":
            others = f" ({len(long)} prompts are too long, the longest has {max(lengths)})" if len(long) > 1 else ""
            reason = f"the {column} has {lengths[0]} tokens, more than max_prompt_length={limit}{others}"
            raise DataError(f"{places[long[0]]}: {reason}; raise max_prompt_length, or use on_too_long='drop'")
        if len(long) == len(ids):
            reason = f"every {column} has more than max_prompt_length={limit} tokens (the shortest has {min(lengths)})"
            raise DataError(f"{reason}; raise max_prompt_length")
        return [number for number, tokens in enumerate(ids) if limit is None or len(tokens) <= limit]


def as_messages(value: Any) -> list[Message]:
    """A prompt as messages. Contents become texts, because many templates expect that; nulls from Arrow are removed."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return [
        {key: content_text(entry) if key == "content" else entry for key, entry in message.items() if entry is not None}
        for message in value
    ]


def check_tokens(ids: Sequence[int], where: str, column: str) -> None:
    if not ids:
        raise DataError(f"{where}: the {column} has no tokens; remove the row")


def completion_for_reward(prompt: Any, text: str) -> Any:
    """A completion as rewards expect it: like the prompt, a list of messages or a text."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def reward_inputs(
    rows: Sequence[Mapping[str, Any]],
    texts: Sequence[str],
    prompt_column: str,
    conversations: Sequence[list[Message]] | None = None,
) -> tuple[list[Any], list[Any], dict[str, list[Any]]]:
    """What rewards take for completions of these rows, a text for each: prompts, completions, and the other columns.

    ``conversations``: all messages after the prompt, if completions have several turns; for prompts that are messages.
    """
    prompts = [row[prompt_column] for row in rows]
    completions = [completion_for_reward(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    if conversations is not None:
        completions = [
            text if isinstance(prompt, str) else messages
            for prompt, text, messages in zip(prompts, completions, conversations, strict=True)
        ]
    return prompts, completions, columns_of(rows, without=prompt_column)
