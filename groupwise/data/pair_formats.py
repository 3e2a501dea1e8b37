"""Reads rows with a chosen and a rejected answer in the common formats.

The format is detected for each row from its columns and their values: texts; chat messages; without a prompt, whose
text is then the common beginning of both answers; dialogues ``Human: … Assistant: …`` (Anthropic's HH); ShareGPT
(``conversations``); LLMBar (``input``, ``output_1``, ``output_2``, ``label``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from groupwise.data.prompts import Message, as_messages
from groupwise.data.rows import check_column, check_message, check_prompt, check_text, describe_type
from groupwise.errors import DataError, check_choice, did_you_mean

SAME_ANSWER, NO_ANSWER = "same_answer", "no_answer"
CONVERSATIONS = "conversations"  # the prompt column of ShareGPT
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
LLMBAR = ("input", "output_1", "output_2", "label")
TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")  # in the dialogues of Anthropic's HH


class Preference(NamedTuple):
    """A prompt with its two answers: three texts, or three lists of messages."""

    prompt: Any
    chosen: Any
    rejected: Any


class Turn(NamedTuple):
    """A turn of a dialogue, and where its words begin in the dialogue's text."""

    role: str
    words: str
    start: int


@dataclass(frozen=True)
class PreferenceReader:
    """Reads rows with these column names; with ``chat``, texts become user and assistant messages."""

    prompt: str
    chosen: str
    rejected: str
    chat: bool

    def read(self, row: Mapping[str, Any], where: str) -> Preference | str:
        """The preference, or ``"no_answer"`` or ``"same_answer"`` if the row has none."""
        names = self._columns(row, where)
        prompt = row.get(names[0])
        if prompt is not None:
            prompt = _with_roles(prompt, where, names[0])
        chosen, rejected = (_answer(row[name], where, name) for name in names[1:])
        if not chosen or not rejected:
            return NO_ANSWER
        if isinstance(chosen, str) and isinstance(rejected, str) and not isinstance(prompt, (list, tuple)):
            return self._texts(row, where, names[0], chosen, rejected)
        answers = [_messages_of(answer) for answer in (chosen, rejected)]
        prompt_in_answers = all(answer[0]["role"] != "assistant" for answer in answers)
        if prompt is None or (isinstance(prompt, str) and prompt_in_answers):
            return self._split_messages(row, where, *answers)
        check_prompt(prompt, where, names[0])
        for answer, name in zip(answers, names[1:], strict=True):
            if answer[0]["role"] != "assistant":
                reason = f"begins with a message of the {answer[0]['role']}, but must begin with the assistant's"
                remedy = f"leave the prompt out of the answers, or leave the column {names[0]!r} out"
                raise DataError(f"{where}: the {name} {reason}; {remedy}")
            _check_end(answer, where, name)
        return Preference(as_messages(prompt), *answers) if all(map(_has_words, answers)) else NO_ANSWER

    def column_of_messages(self, row: Mapping[str, Any]) -> str:
        """The first column of a row that holds messages, for an error."""
        names = (self.prompt, CONVERSATIONS, self.chosen, self.rejected)
        return next((name for name in names if isinstance(row.get(name), (Mapping, list, tuple))), self.chosen)

    def _columns(self, row: Mapping[str, Any], where: str) -> tuple[str, str, str]:
        prompt, first, second, label = LLMBAR
        if row.get(self.chosen) is None and first in row and second in row:
            for name in (prompt, label):
                check_column(row, name, where)
            check_prompt(row[prompt], where, prompt)
            # In a .csv file the label is a text.
            orders = {"1": (prompt, first, second), "2": (prompt, second, first)}
            if str(row[label]) not in orders:
                value = f"{where}: the {label} is {row[label]!r}"
                raise DataError(f"{value}; it must be 1 or 2, the number of the better output")
            return orders[str(row[label])]
        for name in (self.chosen, self.rejected):
            check_column(row, name, where)
        is_sharegpt = row.get(self.prompt) is None and row.get(CONVERSATIONS) is not None
        return CONVERSATIONS if is_sharegpt else self.prompt, self.chosen, self.rejected

    def _texts(self, row: Mapping[str, Any], where: str, column: str, chosen: str, rejected: str) -> Preference | str:
        prompt = row.get(column)
        if prompt is not None:
            check_prompt(prompt, where, column)
        if not (_has_words(chosen) and _has_words(rejected)):
            return NO_ANSWER
        if prompt is None:
            if chosen == rejected:
                return SAME_ANSWER
            dialogues = [_turns(chosen), _turns(rejected)]
            if all(dialogues):
                return self._dialogue(row, where, (chosen, rejected), dialogues)
            split = _split_point(chosen, rejected)
            prompt, chosen, rejected = chosen[:split], chosen[split:], rejected[split:]
            if not prompt.strip():
                raise self._no_prompt(row, where, "complete word")
            if not (_has_words(chosen) and _has_words(rejected)):
                return NO_ANSWER
            if self.chat:  # the space in between belongs to neither message
                prompt, chosen, rejected = prompt.rstrip(), chosen.lstrip(), rejected.lstrip()
        if not self.chat:
            return Preference(prompt, chosen, rejected)
        return Preference(as_messages(prompt), _messages_of(chosen), _messages_of(rejected))

    def _dialogue(
        self, row: Mapping[str, Any], where: str, texts: tuple[str, str], dialogues: list[list[Turn]]
    ) -> Preference | str:
        both = [[{"role": turn.role, "content": turn.words} for turn in turns] for turns in dialogues]
        preference = self._split_messages(row, where, *both)
        if self.chat or isinstance(preference, str):
            return preference
        # As texts, the prompt ends with "Assistant:".
        starts = [turns[len(preference.prompt)].start for turns in dialogues]
        return Preference(texts[0][: starts[0]], *(text[start:] for text, start in zip(texts, starts, strict=True)))

    def _split_messages(
        self, row: Mapping[str, Any], where: str, chosen: list[Message], rejected: list[Message]
    ) -> Preference | str:
        """The prompt is the common beginning, without the last message of the shorter one, up to the last place where
        both continue with the assistant."""
        if chosen == rejected:
            return SAME_ANSWER
        for answer, name in ((chosen, self.chosen), (rejected, self.rejected)):
            _check_end(answer, where, name)
        most = min(len(chosen), len(rejected)) - 1
        number = common_length(chosen[:most], rejected[:most])
        while number and not chosen[number]["role"] == rejected[number]["role"] == "assistant":
            number -= 1
        if not number:
            raise self._no_prompt(row, where, "message before the assistant's")
        answers = chosen[number:], rejected[number:]
        return Preference(chosen[:number], *answers) if all(map(_has_words, answers)) else NO_ANSWER

    def _no_prompt(self, row: Mapping[str, Any], where: str, what: str) -> DataError:
        hint = did_you_mean(self.prompt, map(str, row)) if self.prompt not in row else ""
        return DataError(
            f"{where}: the {self.chosen} and the {self.rejected} do not begin with a common {what} that could be the "
            f"prompt; put the prompt into the column {self.prompt!r}{hint}"
        )


def common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """The length of the common beginning of two sequences."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((number for number, (one, other) in pairs if one != other), min(len(first), len(second)))


def _with_roles(value: Any, where: str, column: str) -> Any:
    """ShareGPT messages as messages with role and content; other values unchanged."""
    if not isinstance(value, (list, tuple)):
        return value
    messages = []
    for number, message in enumerate(value, start=1):
        if isinstance(message, Mapping) and message.get("role") is None and "from" in message:
            what = f"{where}: message {number} of the {column}"
            if "value" not in message:
                raise DataError(f"{what} has no 'value' (it has: {', '.join(map(repr, message))})")
            try:
                check_choice("speaker", message["from"], SPEAKERS, DataError)
            except DataError as error:
                raise DataError(f"{what}: {error}") from None
            message = {"role": SPEAKERS[message["from"]], "content": message["value"]}
        messages.append(message)
    return messages


def _answer(value: Any, where: str, column: str) -> str | list[Message]:
    """The checked value of an answer's column: a text, or messages."""
    if isinstance(value, str):
        check_text(value, f"{where}: the {column}", may_be_empty=True)
        return value
    if not isinstance(value, (Mapping, list, tuple)):
        expected = 'a text, a message or a list of messages such as [{"role": "assistant", "content": "…"}]'
        raise DataError(f"{where}: the {column} is {describe_type(value)}; it must be {expected}")
    messages = _with_roles([value] if isinstance(value, Mapping) else value, where, column)
    for number, message in enumerate(messages, start=1):
        what = f"{where}: message {number} of the {column}"
        check_text(check_message(message, what), what, may_be_empty=True)
    return as_messages(messages)


def _messages_of(answer: str | list[Message]) -> list[Message]:
    return [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer


def _has_words(answer: str | list[Message]) -> bool:
    if isinstance(answer, str):
        return bool(answer.strip())
    return any(message["content"].strip() for message in answer if message["role"] == "assistant")


def _check_end(answer: list[Message], where: str, column: str) -> None:
    if answer[-1]["role"] != "assistant":
        reason = f"ends with a message of the {answer[-1]['role']}, but must end with the assistant's"
        raise DataError(f"{where}: the {column} {reason}; remove what follows it, or the row")


def _split_point(chosen: str, rejected: str) -> int:
    """Where two texts diverge: after the last common word, and before a space, as in TRL."""
    split = common_length(chosen, rejected)
    if split == min(len(chosen), len(rejected)):
        split -= 1  # one text begins with the other; the shorter one needs an answer too
    while split and not (chosen[split - 1].isspace() or (chosen[split].isspace() and rejected[split].isspace())):
        split -= 1
    return split - 1 if split and chosen[split - 1] == " " else split


def _turns(text: str) -> list[Turn]:
    """The turns of a dialogue between Human and Assistant; empty if the text is something else."""
    marks = list(TURN.finditer(text))
    if not marks or text[: marks[0].start()].strip():
        return []
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    turns: list[Turn] = []
    for mark, end in zip(marks, ends, strict=True):
        role = "user" if mark[1] == "Human" else "assistant"
        turn = Turn(role, text[mark.end() : end].strip(), mark.end())
        if turns and turns[-1].role == role:  # templates may require alternating roles
            before = turns.pop()
            turn = Turn(role, f"{before.words}\n\n{turn.words}".strip(), before.start)
        turns.append(turn)
    return turns if len(turns) > 1 else []
