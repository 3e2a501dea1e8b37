"""Preference pairs as token ids.

The ids are those of TRL's DPOTrainer: prompt and completion are tokenized together, and the completion is what follows
the ids of the prompt. If the last prompt tokens change when a completion follows, they belong to the completion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from groupwise.data.pair_formats import NO_ANSWER, SAME_ANSWER, Preference, PreferenceReader, common_length
from groupwise.data.prompts import CHUNK, TOO_LONG, PromptBuilder, check_length, check_tokens
from groupwise.data.rows import where_of
from groupwise.errors import ConfigError, DataError, check_choice

REFUSALS = {SAME_ANSWER: "equal answers", NO_ANSWER: "an empty answer", "too_long": "too many tokens"}


@dataclass(frozen=True)
class Pair:
    """A prompt with a chosen and a rejected answer, as token ids."""

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]


class _PairIds(NamedTuple):
    """The ids of a prompt, alone and followed by each answer."""

    prompt: list[int]
    with_chosen: list[int]
    with_rejected: list[int]


class PairBuilder:
    """Turns rows with a chosen and a rejected answer into pairs of token ids.

    prompts: renders prompts; its tokenizer, system prompt and ``chat`` apply to pairs too, its length limit does not.
    prompt, chosen, rejected: the columns, in any format that `PreferenceReader` reads.
    max_length, on_too_long: a pair whose prompt and longer answer have more tokens is an ``"error"``, is left out
        (``"drop"``), or has its answers truncated at the end (``"truncate"``); it is left out if the prompt alone is as
        long.

    After `build`, ``refused`` counts the rows that were left out by reason (``same_answer``, ``no_answer``,
    ``too_long``), ``kept`` are the numbers of the others, and ``retokenised`` is the number of pairs whose prompt lost
    its last tokens to the answers.
    """

    def __init__(
        self,
        prompts: PromptBuilder,
        *,
        prompt: str = "prompt",
        chosen: str = "chosen",
        rejected: str = "rejected",
        max_length: int | None = None,
        on_too_long: str = "drop",
    ) -> None:
        check_choice("on_too_long", on_too_long, TOO_LONG, ConfigError)
        check_length("max_length", max_length)
        self.prompts = prompts
        self.max_length = max_length
        self.on_too_long = on_too_long
        self.refused = dict.fromkeys(REFUSALS, 0)
        self.kept: tuple[int, ...] = ()
        self.retokenised = 0
        self._reader = PreferenceReader(prompt, chosen, rejected, prompts.chat)

    def build(self, rows: Sequence[Mapping[str, Any]]) -> list[Pair]:
        """The pairs of ``rows``, in order, without those that are left out."""
        if not rows:
            raise DataError("there are no rows")
        places = [where_of(row, number) for number, row in enumerate(rows)]
        read = [self._reader.read(row, where) for row, where in zip(rows, places, strict=True)]
        results: dict[int, Pair | str] = {number: item for number, item in enumerate(read) if isinstance(item, str)}
        prompt_lengths: dict[int, int] = {}  # before a prompt loses its last tokens
        preferences = {number: item for number, item in enumerate(read) if isinstance(item, Preference)}
        for number, ids in self._tokenised(preferences, rows, places):
            results[number], prompt_lengths[number] = self._split(ids, places[number]), len(ids.prompt)
        self._check_lengths(results, places)
        pairs: dict[int, Pair] = {}
        refused = dict.fromkeys(REFUSALS, 0)
        for number in range(len(rows)):
            result = self._fit(results[number])
            if isinstance(result, str):
                refused[result] += 1
            else:
                pairs[number] = result
        if not pairs:
            raise self._none_left(refused)
        self.refused, self.kept = refused, tuple(pairs)
        self.retokenised = sum(len(pair.prompt) < prompt_lengths[number] for number, pair in pairs.items())
        return list(pairs.values())

    def _tokenised(
        self, preferences: Mapping[int, Preference], rows: Sequence[Mapping[str, Any]], places: Sequence[str]
    ) -> Iterator[tuple[int, _PairIds]]:
        texts = [number for number, preference in preferences.items() if isinstance(preference.prompt, str)]
        chats = [number for number, preference in preferences.items() if not isinstance(preference.prompt, str)]
        if chats:
            self.prompts.check_template(self._reader.column_of_messages(rows[chats[0]]))
        if texts:
            self._check_plain()
        for numbers, ids_of in ((chats, self._chat_ids), (texts, self._text_ids)):
            for start in range(0, len(numbers), CHUNK):
                chunk = numbers[start : start + CHUNK]
                ids = ids_of([preferences[number] for number in chunk], [places[number] for number in chunk])
                yield from zip(chunk, ids, strict=True)

    def _chat_ids(self, preferences: list[Preference], places: list[str]) -> list[_PairIds]:
        prompts = [self.prompts.messages(preference.prompt) for preference in preferences]
        ids = self.prompts.render(prompts, places)
        self.prompts.check_system_prompt(prompts, ids)
        chosen = [chat + preference.chosen for chat, preference in zip(prompts, preferences, strict=True)]
        rejected = [chat + preference.rejected for chat, preference in zip(prompts, preferences, strict=True)]
        with_chosen = self.prompts.render(chosen, places, open_answer=False)
        with_rejected = self.prompts.render(rejected, places, open_answer=False)
        return list(map(_PairIds, ids, with_chosen, with_rejected))

    def _text_ids(self, preferences: list[Preference], places: list[str]) -> list[_PairIds]:
        end = self.prompts.tokenizer.eos_token
        texts = [
            (prompt, *(prompt + answer.removesuffix(end) + end for answer in answers))
            for prompt, *answers in preferences
        ]
        columns = (self.prompts.tokenizer(list(column))["input_ids"] for column in zip(*texts, strict=True))
        return list(map(_PairIds, *columns))

    def _check_plain(self) -> None:
        self.prompts.check_plain()
        if self.prompts.tokenizer.eos_token is None:
            raise ConfigError(
                "the tokenizer has no EOS token to end plain texts with; choose a model whose tokenizer has one, or "
                "one with a chat template"
            )

    def _split(self, ids: _PairIds, where: str) -> Pair | str:
        """The pair, or why the row has none."""
        length = min(common_length(ids.prompt, ids.with_chosen), common_length(ids.prompt, ids.with_rejected))
        prompt, chosen, rejected = ids.prompt[:length], ids.with_chosen[length:], ids.with_rejected[length:]
        if not chosen or not rejected:
            return NO_ANSWER
        if chosen == rejected:
            return SAME_ANSWER
        check_tokens(ids.prompt, where, "prompt")
        if not prompt:
            raise DataError(
                f"{where}: all tokens of the prompt change when an answer follows; end it with a complete word, or "
                "remove the row"
            )
        return Pair(tuple(prompt), tuple(chosen), tuple(rejected))

    def _check_lengths(self, results: Mapping[int, Pair | str], places: Sequence[str]) -> None:
        limit = self.max_length
        if limit is None or self.on_too_long != "error":
            return
        lengths = {number: _length(results[number]) for number in sorted(results)}
        long = [number for number, length in lengths.items() if length > limit]
        if long:
            most = max(lengths.values())
            others = f" ({len(long)} pairs are too long, the longest has {most})" if len(long) > 1 else ""
            raise DataError(
                f"{places[long[0]]}: the prompt and the longer answer have {lengths[long[0]]} tokens, more than "
                f"max_length={limit}{others}; raise max_length, or use on_too_long='drop' or 'truncate'"
            )

    def _fit(self, pair: Pair | str) -> Pair | str:
        """The pair, truncated if necessary, or why it is left out."""
        limit = self.max_length
        if isinstance(pair, str) or limit is None or _length(pair) <= limit:
            return pair
        room = limit - len(pair.prompt)
        if self.on_too_long == "drop" or room < 1:
            return "too_long"
        truncated = Pair(pair.prompt, pair.chosen[:room], pair.rejected[:room])
        return SAME_ANSWER if truncated.chosen == truncated.rejected else truncated

    def _none_left(self, refused: Mapping[str, int]) -> DataError:
        reasons = ", ".join(f"{count} with {REFUSALS[reason]}" for reason, count in refused.items() if count)
        remedy = f"; raise max_length, which is {self.max_length}" if refused["too_long"] else ""
        return DataError(f"no pair is left of {sum(refused.values())} rows: {reasons}{remedy}")


def _length(pair: Pair | str) -> int:
    """The tokens of the prompt and the longer answer."""
    return 0 if isinstance(pair, str) else len(pair.prompt) + max(len(pair.chosen), len(pair.rejected))
