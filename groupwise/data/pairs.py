"""From rows with a better and a worse answer to pairs of token ids.

The ids are those of TRL's DPOTrainer: prompt and answer go through the tokenizer together, and the answer is what
follows the ids of the prompt. Where the last of these change when an answer follows, they are left out of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from groupwise.data.preferences import NO_ANSWER, SAME_ANSWER, Preference, PreferenceReader, common_length
from groupwise.data.prompts import CHUNK, TOO_LONG, PromptBuilder, check_length, check_tokens
from groupwise.data.rows import where_of
from groupwise.errors import ConfigError, DataError, check_choice

REFUSALS = {SAME_ANSWER: "two answers alike", NO_ANSWER: "an answer without text", "too_long": "too many tokens"}


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt as token ids; the first is the better one."""

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]


class _Ids(NamedTuple):
    """The ids of a prompt alone, and with each answer behind it."""

    prompt: list[int]
    with_chosen: list[int]
    with_rejected: list[int]


class PairBuilder:
    """Turns rows with a better and a worse answer into pairs of token ids.

    prompts: renders them; its tokenizer, system prompt and treatment of texts hold for pairs too, its limit on the
        length of a prompt does not.
    prompt, chosen, rejected: the columns. An answer is a text, a message or a list of messages. Where there is no
        prompt it is what both answers begin with: messages, the turns of a dialogue ``Human: … Assistant: …``, or
        whole words. Rows of ShareGPT (``conversations``) and of LLMBar (``input``, ``output_1``, ``output_2``,
        ``label``) are read as well.
    max_length, on_too_long: a pair whose prompt and longer answer have more tokens is an ``"error"``, left out
        (``"drop"``), or has the ends of its answers ``"cut"`` off, unless the prompt alone leaves them no room.

    After `build`, ``refused`` counts the rows that were left out, by reason (``same_answer``, ``no_answer``,
    ``on_too_long``), ``kept`` are the numbers of the others, and in ``retokenised`` pairs the prompt lost its end.
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
        """The pairs of ``rows``, in their order, without those that are left out."""
        if not rows:
            raise DataError("there are no rows, so there are no pairs")
        places = [where_of(row, number) for number, row in enumerate(rows)]
        read = [self._reader.read(row, where) for row, where in zip(rows, places, strict=True)]
        found: dict[int, Pair | str] = {number: each for number, each in enumerate(read) if isinstance(each, str)}
        whole: dict[int, int] = {}  # the length of each prompt before it lost its end, if it did
        preferences = {number: each for number, each in enumerate(read) if isinstance(each, Preference)}
        for number, ids in self._tokenised(preferences, rows, places):
            found[number], whole[number] = self._parted(ids, places[number]), len(ids.prompt)
        self._check_lengths(found, places)
        pairs: dict[int, Pair] = {}
        refused = dict.fromkeys(REFUSALS, 0)
        for number in range(len(rows)):
            fitted = self._fitted(found[number])
            if isinstance(fitted, str):
                refused[fitted] += 1
            else:
                pairs[number] = fitted
        if not pairs:
            raise self._none_left(refused)
        self.refused, self.kept = refused, tuple(pairs)
        self.retokenised = sum(len(pair.prompt) < whole[number] for number, pair in pairs.items())
        return list(pairs.values())

    def _tokenised(
        self, preferences: Mapping[int, Preference], rows: Sequence[Mapping[str, Any]], places: Sequence[str]
    ) -> Iterator[tuple[int, _Ids]]:
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

    def _chat_ids(self, preferences: list[Preference], places: list[str]) -> list[_Ids]:
        asked = [self.prompts.messages(preference.prompt) for preference in preferences]
        ids = self.prompts.render(asked, places)
        self.prompts.check_system_prompt(asked, ids)
        chosen = [chat + preference.chosen for chat, preference in zip(asked, preferences, strict=True)]
        rejected = [chat + preference.rejected for chat, preference in zip(asked, preferences, strict=True)]
        with_chosen = self.prompts.render(chosen, places, to_answer=False)
        with_rejected = self.prompts.render(rejected, places, to_answer=False)
        return list(map(_Ids, ids, with_chosen, with_rejected))

    def _text_ids(self, preferences: list[Preference], places: list[str]) -> list[_Ids]:
        end = self.prompts.tokenizer.eos_token
        texts = [
            (prompt, *(prompt + answer.removesuffix(end) + end for answer in answers))
            for prompt, *answers in preferences
        ]
        columns = (self.prompts.tokenizer(list(column))["input_ids"] for column in zip(*texts, strict=True))
        return list(map(_Ids, *columns))

    def _check_plain(self) -> None:
        self.prompts.check_plain()
        if self.prompts.tokenizer.eos_token is None:
            raise ConfigError(
                "the tokenizer has no EOS token, so answers that are plain texts would have no end; choose a model "
                "whose tokenizer has one, or one with a chat template"
            )

    def _parted(self, ids: _Ids, where: str) -> Pair | str:
        """The pair, unless it is none."""
        length = min(common_length(ids.prompt, ids.with_chosen), common_length(ids.prompt, ids.with_rejected))
        prompt, chosen, rejected = ids.prompt[:length], ids.with_chosen[length:], ids.with_rejected[length:]
        if not chosen or not rejected:
            return NO_ANSWER
        if chosen == rejected:
            return SAME_ANSWER
        check_tokens(ids.prompt, where, "prompt")
        if not prompt:
            raise DataError(
                f"{where}: all tokens of the prompt change when an answer follows it, so nothing of it is left; end "
                "it with a whole word, or remove the row"
            )
        return Pair(tuple(prompt), tuple(chosen), tuple(rejected))

    def _check_lengths(self, found: Mapping[int, Pair | str], places: Sequence[str]) -> None:
        limit = self.max_length
        if limit is None or self.on_too_long != "error":
            return
        lengths = {number: _length(found[number]) for number in sorted(found)}
        long = [number for number, length in lengths.items() if length > limit]
        if long:
            most = max(lengths.values())
            others = f" ({len(long)} pairs are too long, the longest has {most})" if len(long) > 1 else ""
            raise DataError(
                f"{places[long[0]]}: the prompt and the longer answer have {lengths[long[0]]} tokens, more than "
                f"max_length={limit}{others}; raise max_length, leave such pairs out with on_too_long='drop', or shorten "
                "their answers with 'cut'"
            )

    def _fitted(self, pair: Pair | str) -> Pair | str:
        """The pair, shortened if it must be; or why there is none."""
        limit = self.max_length
        if isinstance(pair, str) or limit is None or _length(pair) <= limit:
            return pair
        room = limit - len(pair.prompt)
        if self.on_too_long == "drop" or room < 1:
            return "too_long"
        cut = Pair(pair.prompt, pair.chosen[:room], pair.rejected[:room])
        return SAME_ANSWER if cut.chosen == cut.rejected else cut

    def _none_left(self, refused: Mapping[str, int]) -> DataError:
        reasons = ", ".join(f"{count} with {REFUSALS[reason]}" for reason, count in refused.items() if count)
        remedy = f"; raise max_length, which is {self.max_length}" if refused["too_long"] else ""
        return DataError(f"no pair is left of {sum(refused.values())} rows: {reasons}{remedy}")


def _length(pair: Pair | str) -> int:
    """The tokens of the prompt and the longer answer."""
    return 0 if isinstance(pair, str) else len(pair.prompt) + max(len(pair.chosen), len(pair.rejected))
