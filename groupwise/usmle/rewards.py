"""Medical words in an answer, and a reward that adds a little for them and takes a little from answers that are short.

The words are those of ICD-10-CM's descriptions that ordinary English does not have; tools/medical_words.py makes the
list. That an answer uses them says nothing of its being right, so what they earn is small beside what being right does.
"""

from __future__ import annotations

import functools
import importlib.resources
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, get_args

from groupwise.errors import ConfigError, DataError, check_choice
from groupwise.rewards.text import excerpt

BonusWhen = Literal["always", "right"]

# Letters with no letter or digit beside them; possessive, so that no text makes the search go back over what it read.
_WORD = re.compile(r"(?<![^\W_])[^\W\d_]++(?![^\W_])")


@dataclass(frozen=True)
class EnhancedReward:
    """A reward and what it is made of: total = correctness + term_bonus + short_penalty + clamped."""

    total: float
    correctness: float  # 1 or 0
    term_bonus: float
    short_penalty: float  # 0 or below
    clamped: float  # what the limits took (below 0) or gave (above 0)


def load_medical_vocabulary(path: str | Path | None = None) -> frozenset[str]:
    """The medical words that come with groupwise, or those of a file of one's own, in lower case.

    The file has one word a line; what follows a ``#`` is a comment. It is read again only when it has changed.
    """
    if path is None:
        return _packaged()
    path = Path(os.path.expanduser(path))
    try:
        status = path.stat()
        return _from_file(path, status.st_mtime_ns, status.st_size)
    except OSError as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        raise DataError(
            f"the medical vocabulary {path} cannot be read: {reason}; give a text file with one word a line, or leave "
            "the path out to use the words that come with groupwise"
        ) from error


def medical_terms(text: str, vocabulary: frozenset[str] | None = None) -> list[str]:
    """The distinct words of the vocabulary that the text uses, as the vocabulary has them, in the order of first use.

    Only whole words count, in upper or lower case; a plural in -s or -es counts as its singular if that is what the
    vocabulary has.
    """
    return list(_terms(text, vocabulary))


def uses_medical_terms(text: str, vocabulary: frozenset[str] | None = None, at_least: int = 1) -> bool:
    """Whether the text uses ``at_least`` different medical words."""
    _check_count("at_least", at_least, 1)
    return sum(1 for _ in islice(_terms(text, vocabulary), at_least)) == at_least


def enhanced_reward(
    correct: bool,
    text: str,
    *,
    term_bonus: float = 0.05,
    short_penalty: float = 0.1,
    short_length: int = 50,
    bonus_when: BonusWhen = "always",
    vocabulary: frozenset[str] | None = None,
) -> EnhancedReward:
    """The reward of an answer: 1 if it is right, a bonus for medical words, a penalty for being short.

    Short is a text of less than ``short_length`` characters, white space included. With ``bonus_when="always"`` wrong
    answers get the bonus too, and the sum is clamped to [0, 1]; with ``"right"`` only right ones get it, and the upper
    limit is 1 + ``term_bonus``. With the default weights the total is:

    ====== ============= ===== ======== =======
    answer medical words short "always" "right"
    ====== ============= ===== ======== =======
    right  yes           no    1        1.05
    right  yes           yes   0.95     0.95
    right  no            no    1        1
    right  no            yes   0.9      0.9
    wrong  yes           no    0.05     0
    wrong  yes           yes   0        0
    wrong  no            no    0        0
    wrong  no            yes   0        0
    ====== ============= ===== ======== =======

    So with ``"always"`` the clamp takes the bonus from a right answer of full length, 1.05 becoming 1, and leaves it to
    a wrong one: medical words are learned from wrong answers rather than from right ones. With ``"right"`` it is the
    right ones that they are learned from, and all wrong answers are alike. In both forms a wrong answer without the
    bonus loses nothing by being short.
    """
    _check_weight("term_bonus", term_bonus)
    _check_weight("short_penalty", short_penalty)
    _check_count("short_length", short_length, 0)
    check_choice("bonus_when", bonus_when, get_args(BonusWhen), ConfigError)
    pays = bonus_when == "always" or correct
    correctness = 1.0 if correct else 0.0
    bonus = float(term_bonus) if pays and uses_medical_terms(text, vocabulary) else 0.0
    penalty = 0.0 - short_penalty if len(text) < short_length else 0.0
    added = correctness + bonus + penalty
    limit = 1.0 if bonus_when == "always" else 1.0 + term_bonus
    total = min(max(added, 0.0), limit)
    return EnhancedReward(total, correctness, bonus, penalty, clamped=total - added)


def _terms(text: str, vocabulary: frozenset[str] | None) -> Iterator[str]:
    words = load_medical_vocabulary() if vocabulary is None else vocabulary
    seen = set()
    for match in _WORD.finditer(text):
        term = _term(match[0].lower(), words)
        if term is not None and term not in seen:
            seen.add(term)
            yield term


def _term(word: str, vocabulary: frozenset[str]) -> str | None:
    if word in vocabulary:
        return word
    singulars = (word.removesuffix(ending) for ending in ("s", "es") if word.endswith(ending))
    return next((singular for singular in singulars if singular in vocabulary), None)


@functools.cache
def _packaged() -> frozenset[str]:
    file = importlib.resources.files("groupwise.usmle").joinpath("medical_words.txt")
    return _parse(file.read_text(encoding="utf-8"), "groupwise's own list")


@functools.lru_cache(maxsize=8)
def _from_file(path: Path, modified: int, size: int) -> frozenset[str]:
    """The words of a file; when it was modified and its size are there for the cache to see a change."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"the medical vocabulary {path} is not a text in UTF-8; give a text file with one word a line"
        ) from error
    return _parse(text, str(path))


def _parse(text: str, name: str) -> frozenset[str]:
    words = set()
    for number, line in enumerate(text.splitlines(), start=1):
        word = line.partition("#")[0].strip()
        if not word:
            continue
        if not _WORD.fullmatch(word):
            raise DataError(
                f"line {number} of the medical vocabulary {name} is {excerpt(word)}, but a line is one word of letters "
                "alone, since texts are searched word by word; write each word of a phrase on a line of its own"
            )
        words.add(word.lower())
    if not words:
        raise DataError(f"the medical vocabulary {name} has no words; write one a line")
    return frozenset(words)


def _check_weight(name: str, value: float) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0:
        raise ConfigError(f"{name} must be a finite number of at least 0, got {excerpt(value)}; 0 turns it off")


def _check_count(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, got {excerpt(value)}")
