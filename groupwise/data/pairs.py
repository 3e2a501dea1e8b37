"""Preference pairs as token ids.

The ids are those of TRL's DPOTrainer: prompt and completion are tokenized together, and the completion is what follows
the ids of the prompt. If the last prompt tokens change when a completion follows, they belong to the completion.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.data.pair_formats import NO_ANSWER, SAME_ANSWER, Preference, PreferenceReader, common_length
from groupwise.data.prompts import CHUNK, PromptBuilder, check_tokens
from groupwise.data.rows import where_of
from groupwise.errors import ConfigError, DataError

PairIds = tuple[list[int], list[int], list[int]]  # of a prompt, alone and followed by each answer

REFUSALS = {SAME_ANSWER: "equal answers", NO_ANSWER: "an empty answer", "too_long": "too many tokens"}


@dataclass(frozen=True)
class Pair:
    """A prompt with a chosen and a rejected answer, as token ids."""

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]


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
        read = {number: self._reader.read(row, places[number]) for number, row in enumerate(rows)}
        results: dict[int, Pair | str] = {number: item for number, item in read.items() if isinstance(item, str)}
        preferences = {number: item for number, item in read.items() if isinstance(item, Preference)}
        prompt_lengths: dict[int, int] = {}  # before a prompt loses its last tokens
        for number, ids in self._tokenised(preferences, rows, places):
            results[number], prompt_lengths[number] = _split(ids, places[number]), len(ids[0])
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
            reasons = ", ".join(f"{count} with {REFUSALS[reason]}" for reason, count in refused.items() if count)
            remedy = f"; raise max_length, which is {self.max_length}" if refused["too_long"] else ""
            raise DataError(f"no pair is left of {len(rows)} rows: {reasons}{remedy}")
        self.refused, self.kept = refused, tuple(pairs)
        self.retokenised = sum(len(pair.prompt) < prompt_lengths[number] for number, pair in pairs.items())
        return list(pairs.values())

    def _tokenised(
        self, preferences: Mapping[int, Preference], rows: Sequence[Mapping[str, Any]], places: Sequence[str]
    ) -> Iterator[tuple[int, PairIds]]:
        texts = [number for number, preference in preferences.items() if isinstance(preference.prompt, str)]
        chats = [number for number, preference in preferences.items() if not isinstance(preference.prompt, str)]
        if chats:
            self.prompts.check_template(self._reader.column_of_messages(rows[chats[0]]))
        if texts:
            self.prompts.check_plain()
        if texts and self.prompts.tokenizer.eos_token is None:
            raise ConfigError("the tokenizer has no EOS token to end plain texts with; choose a model that has one")
        for numbers, ids_of in ((chats, self._chat_ids), (texts, self._text_ids)):
            for start in range(0, len(numbers), CHUNK):
                chunk = numbers[start : start + CHUNK]
                ids = ids_of([preferences[number] for number in chunk], [places[number] for number in chunk])
                yield from zip(chunk, ids, strict=True)

    def _chat_ids(self, preferences: list[Preference], places: list[str]) -> Iterable[PairIds]:
        prompts = [self.prompts.messages(preference.prompt) for preference in preferences]
        ids = self.prompts.render(prompts, places)
        self.prompts.check_system_prompt(prompts, ids)
        chosen = [chat + preference.chosen for chat, preference in zip(prompts, preferences, strict=True)]
        rejected = [chat + preference.rejected for chat, preference in zip(prompts, preferences, strict=True)]
        with_answers = (self.prompts.render(chats, places, open_answer=False) for chats in (chosen, rejected))
        return zip(ids, *with_answers, strict=True)

    def _text_ids(self, preferences: list[Preference], places: list[str]) -> Iterable[PairIds]:
        end = self.prompts.tokenizer.eos_token
        prompts = [preference.prompt for preference in preferences]
        chosen = [prompt + answer.removesuffix(end) + end for prompt, answer, _ in preferences]
        rejected = [prompt + answer.removesuffix(end) + end for prompt, _, answer in preferences]
        columns = (self.prompts.tokenizer(texts)["input_ids"] for texts in (prompts, chosen, rejected))
        return zip(*columns, strict=True)

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


def _split(ids: PairIds, where: str) -> Pair | str:
    """The pair, or why the row has none."""
    length = min(common_length(ids[0], with_answer) for with_answer in ids[1:])
    prompt, chosen, rejected = ids[0][:length], ids[1][length:], ids[2][length:]
    if not chosen or not rejected:
        return NO_ANSWER
    if chosen == rejected:
        return SAME_ANSWER
    check_tokens(ids[0], where, "prompt")
    if not prompt:
        raise DataError(f"{where}: all tokens of the prompt change when an answer follows; end it with a complete word")
    return Pair(tuple(prompt), tuple(chosen), tuple(rejected))


def _length(pair: Pair | str) -> int:
    """The tokens of the prompt and the longer answer."""
    return 0 if isinstance(pair, str) else len(pair.prompt) + max(len(pair.chosen), len(pair.rejected))
