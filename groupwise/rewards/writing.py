"""Cheap rewards for writing: length, repetition, and key words of the subject.

None of them measures quality. They complement a judge or a reward model, which a policy may exploit by writing more, by
repeating itself, or by writing about something else.
"""

from __future__ import annotations

import functools
import inspect
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from keyword import iskeyword
from typing import Any

from groupwise.errors import ConfigError, InputError, check_choice, check_integer
from groupwise.rewards.options import check_after, check_share, check_text
from groupwise.rewards.text import THINKING_ENDS, answer_of, column_of, prompt_messages
from groupwise.text import excerpt

UNITS = ("words", "characters")
KEY_LETTERS = 4  # shorter words say little about the subject

# Frequent English words of four letters and more, and words that ask for a text ("describe") without a subject.
STOP_WORDS = """
    about above after again against also although always among another answer anything around because been before being
    below between both cannot compose could create describe does doing done down during each either else ever every
    explain following from further generate give given have having here herself himself however include including
    instead into itself just keep kind least less like made make makes many might more most much must myself neither
    never none nothing only other others ought ourselves over please provide rather same shall should show since some
    something still such take tell than that their theirs them themselves then there these they thing things this those
    though through thus together toward towards under until upon using very want well were what whatever when where
    whether which while whole whom whose will with within without would write writing your yours yourself
"""

_SPACELESS = re.compile("([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af])")
_JOINERS = dict.fromkeys(map(ord, "\u00ad\u200c\u200d\u2060"))  # invisible characters inside words
_APOSTROPHES = str.maketrans("’ʼ", "''")


def words_of(text: str) -> list[str]:
    """The lower-cased words of a text in any script: letters, digits and their combining marks.

    An apostrophe inside a word belongs to it; a hyphen separates words. Every Chinese or Japanese character is a word.
    Thai, Lao and Khmer have no spaces between words either; there a phrase counts as one word.
    """
    plain = unicodedata.normalize("NFKC", text).casefold().translate(_JOINERS).translate(_APOSTROPHES)
    spaced = "".join(
        letter if letter.isalnum() or letter == "'" or unicodedata.category(letter)[0] == "M" else " "
        for letter in _SPACELESS.sub(r" \1 ", plain)
    )
    return [word for part in spaced.split() if (word := part.strip("'"))]


def distinct_n(texts: Sequence[str], n: int) -> float:
    """The share of distinct n-grams of words among all n-grams of the texts (distinct-n); 1 if there are none."""
    check_integer("n", n, 1)
    grams = [gram for text in texts for gram in _ngrams(words_of(text), n)]
    return len(set(grams)) / len(grams) if grams else 1.0


def length_band(
    *, low: int, high: int, soft: int | None = None, unit: str = "words", after: str | None = THINKING_ENDS
) -> Callable[..., list[float | None]]:
    """A reward for the length of an answer: 1 from ``low`` to ``high`` (inclusive), and linear down to 0 outside.

    It reaches 0 at ``soft`` words (or characters, see ``unit``) below or above; the default is the width of the band.
    """
    check_integer("low", low, 0, ConfigError)
    check_integer("high", high, 0, ConfigError)
    if high < low:
        raise ConfigError(f"high is {high}, which is less than low, {low}")
    slope = check_integer("soft", high - low if soft is None else soft, 0, ConfigError)
    check_choice("unit", unit, UNITS, ConfigError)
    check_after(after)

    def length_band(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float | None]:
        texts = [answer_of(completion, after) for completion in completions]
        lengths = [len(words_of(text)) if unit == "words" else len(text) for text in texts]
        outside = [max(low - length, length - high, 0) for length in lengths]
        return [max(0.0, 1 - number / slope) if slope else float(not number) for number in outside]

    return length_band


def repetition(
    *, n: int = 3, most: float = 1.0, after: str | None = THINKING_ENDS
) -> Callable[..., list[float | None]]:
    """A reward against repetition: 1 minus the share of an answer's n-grams of words that occurred before.

    ``most`` is the share at which the reward is 0: with 0.25, an answer gets 0 if a quarter of its n-grams are repeated
    and 0.5 if an eighth is. An answer of fewer than n words gets 1; use `length_band` against short answers.
    """
    check_integer("n", n, 1, ConfigError)
    check_share("most", most)
    check_after(after)

    def repetition(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float | None]:
        shares = [1 - distinct_n([answer_of(completion, after)], n) for completion in completions]
        return [max(0.0, 1 - share / most) for share in shares]

    return repetition


def keywords(
    *,
    column: str | None = None,
    words: str | Sequence[str] | None = None,
    least: float = 1.0,
    copied: int | None = 3,
    after: str | None = THINKING_ENDS,
) -> Callable[..., list[float | None]]:
    """A reward for keeping to the subject: the share of the key words in an answer, 1 from a share of ``least`` on.

    The key words come from a ``column`` of the data, from the list ``words``, or by default from the user's messages of
    the prompt. A list has words and phrases; a phrase must occur complete. From a text the content words are used:
    those with at least four letters, without the most frequent English ones. Words are compared by their English stems,
    so "dragons" matches "dragon". Each counts once. A row without key words is not scored.

    A policy could repeat the prompt to use all of its words. So a word does not count inside ``copied`` or more
    consecutive words that the prompt has too; None counts copies as well.
    """
    if column is not None and words is not None:
        raise ConfigError("the key words come from a column or from words; give one of them, not both")
    check_share("least", least)
    if copied is not None:
        check_integer("copied", copied, 2, ConfigError)
    check_after(after)
    if column is not None:
        check_text("column", column)
    listed = None if words is None else key_words(words, "words")
    if listed is not None and not listed:
        raise ConfigError(f"words has no key words: {excerpt(words)}; a text needs words of at least 4 letters")

    def keys_of(row: int, prompts: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> set[tuple[str, ...]]:
        if listed is not None:
            return listed
        if column is None:
            texts = (message["content"] for message in prompt_messages(prompts[row]) if message["role"] == "user")
            return key_words("\n".join(texts))
        return key_words(column_of(columns, column)[row], f"the column {column!r}")

    def keywords(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        scores: list[float | None] = []
        for row, completion in enumerate(completions):
            keys = keys_of(row, prompts, columns)
            prompt = "\n".join(message["content"] for message in prompt_messages(prompts[row])) if copied else ""
            new_words = _without_copies(words_of(answer_of(completion, after)), words_of(prompt), copied or 0)
            scores.append(min(1.0, _share_used(keys, new_words) / least) if keys else None)
        return scores

    if column is not None and column.isidentifier() and not iskeyword(column):
        # The scorer checks signatures before the run, so a missing column is reported then.
        names = dict.fromkeys(("prompts", "completions", column))
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        keywords.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return keywords


def key_words(source: Any, what: str = "a text of key words") -> set[tuple[str, ...]]:
    """The stems of key words and phrases: the entries of a list, or the content words of a text."""
    if source is None:
        return set()
    if isinstance(source, str):
        long = {stem(word) for word in words_of(source) if sum(map(str.isalpha, word)) >= KEY_LETTERS}
        return {(word,) for word in long - _stop_stems()}
    if not isinstance(source, Sequence) or not all(isinstance(entry, str) for entry in source):
        raise InputError(f"{what} must be a text or a list of texts, got {excerpt(source)}")
    return {key for entry in source if (key := tuple(map(stem, words_of(entry))))}


def stem(word: str) -> str:
    """A word without its most common English endings: "make", "makes" and "making" become "mak"."""
    word = word.removesuffix("'s").replace("'", "")
    if word.endswith(("ies", "ied")) and len(word) > 4:
        return word[:-2]
    if word.endswith("s") and not word.endswith(("ss", "us", "is")) and len(word) > 3:
        word = word[:-1]
    for ending in ("ing", "ed"):
        root = word.removesuffix(ending)
        if root != word and len(root) >= 3 and root[-1] != "e" and re.search("[aeiouy]", root):
            word = root[:-1] if root[-1] == root[-2] and root[-1] not in "lsz" else root
            break
    if word.endswith("ly") and len(word) > 5 and word[-3] not in "aeiou":
        word = word[:-2]
    if len(word) > 3 and word.endswith("e"):
        word = word[:-1]
    return word[:-1] + "i" if len(word) > 2 and word.endswith("y") else word


@functools.cache
def _stop_stems() -> frozenset[str]:
    return frozenset(map(stem, STOP_WORDS.split()))


def _ngrams(words: Sequence[str], n: int) -> Iterator[tuple[str, ...]]:
    return zip(*(islice(words, start, None) for start in range(n)), strict=False)


def _without_copies(words: list[str], prompt: list[str], run: int) -> list[str]:
    """The words of an answer; those in ``run`` consecutive words of the prompt are replaced by empty texts."""
    copies = set(_ngrams(prompt, run)) if run else set()
    copied = {start + k for start, gram in enumerate(_ngrams(words, run)) if gram in copies for k in range(run)}
    return ["" if place in copied else word for place, word in enumerate(words)]


def _share_used(keys: set[tuple[str, ...]], words: list[str]) -> float:
    stems = list(map(stem, words))
    used = {gram for n in {len(key) for key in keys} for gram in _ngrams(stems, n)}
    return len(keys & used) / len(keys)
