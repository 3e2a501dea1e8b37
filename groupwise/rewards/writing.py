"""Cheap measures of a text as rewards: how long it is, how much it repeats itself, whether it keeps to its subject.

None of them says that a text is good. They keep a run honest whose main reward, a judge or a reward model, can be won
by writing much, by saying the same thing again, or by writing about something else.
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

from groupwise.errors import ConfigError, GroupwiseError, InputError, check_choice
from groupwise.rewards.text import excerpt, text_of

Reward = Callable[..., list[float | None]]

UNITS = ("words", "characters")
THINKING_ENDS = "</think>"
KEY_LETTERS = 4  # words with fewer letters say little of what a text is about

# Frequent English words of four letters and more, and those that ask for a text rather than say what it is about.
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
_JOINERS = dict.fromkeys(map(ord, "\u00ad\u200c\u200d\u2060"))  # they stand inside words and are not seen
_APOSTROPHES = str.maketrans("’ʼ", "''")


def words_of(text: str) -> list[str]:
    """The words of a text in any script: letters, digits and the marks on them, without regard to case.

    An apostrophe inside a word belongs to it; a hyphen parts two words. Chinese and Japanese are written without
    spaces, so each of their characters is a word; Thai, Lao and Khmer are too, but there a phrase counts as one.
    """
    plain = unicodedata.normalize("NFKC", text).casefold().translate(_JOINERS).translate(_APOSTROPHES)
    spaced = "".join(letter if _in_word(letter) else " " for letter in _SPACELESS.sub(r" \1 ", plain))
    return [word for part in spaced.split() if (word := part.strip("'"))]


def distinct_n(texts: Sequence[str], n: int) -> float:
    """The share of distinct n-grams of words among all n-grams of the texts: 1 if none comes twice.

    It is a measure of how much several texts differ in their words (distinct-n). Texts that are too short to have an
    n-gram repeat nothing, so without any the share is 1.
    """
    _check_count("n", n, 1, InputError)
    if isinstance(texts, str):
        raise InputError(f"distinct_n takes a list of texts, got the single text {excerpt(texts)}")
    grams = [gram for text in texts for gram in _ngrams(words_of(text), n)]
    return len(set(grams)) / len(grams) if grams else 1.0


def length_band(
    *, low: int, high: int, soft: int | None = None, unit: str = "words", after: str | None = THINKING_ENDS
) -> Reward:
    """A reward for the length of an answer: 1 from ``low`` to ``high``, both included, and falling evenly outside.

    It reaches 0 at ``soft`` words (or characters, as ``unit`` says) below or above; by default that is the width of the
    band. With 0 there is no slope. Only what follows the last ``after`` is measured, if that is in the answer.
    """
    _check_count("low", low, 0)
    _check_count("high", high, 0)
    if high < low:
        raise ConfigError(f"high is {high}, which is less than low, {low}")
    slope = high - low if soft is None else soft
    _check_count("soft", slope, 0)
    check_choice("unit", unit, UNITS, ConfigError)
    check_mark(after)

    def length_band(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float | None]:
        texts = [answer_of(completion, after) for completion in completions]
        return [_within(len(words_of(text)) if unit == "words" else len(text), low, high, slope) for text in texts]

    return length_band


def repetition(*, n: int = 3, most: float = 1.0, after: str | None = THINKING_ENDS) -> Reward:
    """A reward for not repeating oneself: 1 less the share of an answer's n-grams of words that were there before.

    ``most`` is the share at which nothing is left of it: 0.25 gives 0 to an answer in which a quarter of the n-grams
    are repeated, and 0.5 to one in which an eighth is. It is a reward from 0 to 1, not a penalty; as a penalty of at
    most w, give it the weight w, which differs by a constant that no group of answers notices. An answer of less than
    n words repeats nothing and gets 1, an empty one too: `length_band` is there for these.
    """
    _check_count("n", n, 1)
    _check_share("most", most)
    check_mark(after)

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
) -> Reward:
    """A reward for keeping to the subject: the share of the key words that an answer uses; 1 from ``least`` of them on.

    The key words come from a ``column`` of the data, from the list ``words``, or by default from the prompt itself
    (what the user says in it). A list has words and phrases, and a phrase has to be there as a whole. Of a text the
    content words count: those of at least four letters that are not among the most frequent English ones. Words are
    compared by their stems, so that "dragons" is a use of "dragon"; the endings that are cut off are English ones.
    Each counts once, however often it is used. A row without key words is not scored.

    A policy soon finds out that saying the prompt again uses all of its words. So a word does not count where it stands
    in ``copied`` or more words that follow one another in the prompt too; with None copying counts.
    """
    if column is not None and words is not None:
        raise ConfigError("the key words come from a column or from words; give one of them, not both")
    _check_share("least", least)
    if copied is not None:
        _check_count("copied", copied, 2)
    check_mark(after)
    if column is not None and (not isinstance(column, str) or not column):
        raise ConfigError(f"column must be the name of a column of the data, got {excerpt(column)}")
    own = None if words is None else key_words(words, "words")
    if own is not None and not own:
        raise ConfigError(f"words has no key words: {excerpt(words)}; a text needs words of at least {KEY_LETTERS} "
                          "letters, and a list at least one entry")  # fmt: skip

    def keys_of(row: int, prompts: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> set[tuple[str, ...]]:
        if own is not None:
            return own
        if column is None:
            said = (message["content"] for message in prompt_messages(prompts[row]) if message["role"] == "user")
            return key_words("\n".join(said))
        if column not in columns:
            there = ", ".join(map(repr, columns)) or "none"
            raise InputError(f"the data has no column {column!r} (there are: {there})")
        return key_words(columns[column][row], f"the column {column!r}")

    def keywords(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        scores: list[float | None] = []
        for row, completion in enumerate(completions):
            keys = keys_of(row, prompts, columns)
            asked = "\n".join(message["content"] for message in prompt_messages(prompts[row])) if copied else ""
            own_words = _not_copied(words_of(answer_of(completion, after)), words_of(asked), copied or 0)
            share = _share_used(keys, own_words) if keys else None
            scores.append(None if share is None else min(1.0, share / least))
        return scores

    if column is not None and column.isidentifier() and not iskeyword(column):
        # What a signature names is looked for before the run, so that a column that is missing is noticed then.
        names = dict.fromkeys(("prompts", "completions", column))
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        keywords.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return keywords


def key_words(given: Any, what: str = "a text of key words") -> set[tuple[str, ...]]:
    """The stems of key words and phrases: a list's entries, a text's content words; None has none."""
    if given is None:
        return set()
    if isinstance(given, str):
        long = {stem(word) for word in words_of(given) if sum(map(str.isalpha, word)) >= KEY_LETTERS}
        return {(word,) for word in long - _stop_stems()}
    if not isinstance(given, Sequence) or not all(isinstance(entry, str) for entry in given):
        raise InputError(f"{what} must be a text or a list of texts, got {excerpt(given)}")
    return {key for entry in given if (key := tuple(map(stem, words_of(entry))))}


def stem(word: str) -> str:
    """A word without its commonest English endings: a cheap way to see that two words are forms of one.

    The result need not be a word: "make", "makes" and "making" all become "mak", "story" and "stories" become "stori".
    """
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


def answer_of(completion: Any, after: str | None = THINKING_ENDS) -> str:
    """What a completion says after the last mark, such as the end of its thinking; all of it where there is no mark."""
    text = text_of(completion)
    return (text.rpartition(after)[2] if after else text).strip()


def prompt_messages(prompt: Any) -> list[dict[str, str]]:
    """A prompt as chat messages, each with a role and a text; a prompt that is a text is the user's message."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    messages = [prompt] if isinstance(prompt, Mapping) else prompt
    if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
        raise InputError(f"a prompt must be a text or a list of messages, got {excerpt(prompt)}")
    return [
        {"role": str(message.get("role", "user")), "content": text_of({**message, "role": "assistant"})}
        for message in messages
    ]


def prompt_text(prompt: Any) -> str:
    """A prompt as one text: a lone message as it is, several with their roles before them."""
    messages = prompt_messages(prompt)
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def check_mark(after: object) -> None:
    """Raise a `ConfigError` unless ``after`` can mark where an answer begins."""
    if after is not None and not isinstance(after, str):
        raise ConfigError(f"after must be the text that an answer follows, or '' for none, got {excerpt(after)}")


def _in_word(letter: str) -> bool:
    return letter.isalnum() or letter == "'" or unicodedata.category(letter)[0] == "M"


def _ngrams(words: Sequence[str], n: int) -> Iterator[tuple[str, ...]]:
    return zip(*(islice(words, start, None) for start in range(n)), strict=False)


def _within(length: int, low: int, high: int, soft: int) -> float:
    outside = max(low - length, length - high, 0)
    if not outside:
        return 1.0
    return max(0.0, 1 - outside / soft) if soft else 0.0


def _not_copied(words: list[str], asked: list[str], run: int) -> list[str]:
    """The words of an answer, with nothing in the place of those that stand in ``run`` words taken from ``asked``."""
    there = set(_ngrams(asked, run)) if run else set()
    taken = {start + k for start, gram in enumerate(_ngrams(words, run)) if gram in there for k in range(run)}
    return ["" if place in taken else word for place, word in enumerate(words)]


def _share_used(keys: set[tuple[str, ...]], words: list[str]) -> float:
    stems = list(map(stem, words))
    there = {gram for n in {len(key) for key in keys} for gram in _ngrams(stems, n)}
    return len(keys & there) / len(keys)


def _check_count(name: str, value: object, least: int, error: type[GroupwiseError] = ConfigError) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise error(f"{name} must be a whole number of at least {least}, got {excerpt(value)}")


def _check_share(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ConfigError(f"{name} must be a share above 0 and up to 1, got {excerpt(value)}")
