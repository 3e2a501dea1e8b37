"""Medical words in a text.

The packaged list holds the words of ICD-10-CM's descriptions that ordinary English does not use;
tools/medical_words.py makes it.
"""

from __future__ import annotations

import functools
import importlib.resources
import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from groupwise.errors import ConfigError, DataError
from groupwise.rewards.text import excerpt

# Letters with no letter or digit beside them. The possessive quantifier keeps the search linear.
_WORD = re.compile(r"(?<![^\W_])[^\W\d_]++(?![^\W_])")


def load_medical_vocabulary(path: str | Path | None = None) -> frozenset[str]:
    """The packaged medical words, or those of a file, in lower case.

    The file has one word per line; ``#`` starts a comment. A file is cached until it changes.
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
            f"the medical vocabulary {path} cannot be read: {reason}; give a text file with one word per line, or "
            "leave the path out to use the packaged words"
        ) from error


def medical_terms(text: str, vocabulary: frozenset[str] | None = None) -> list[str]:
    """The distinct words of the vocabulary that the text uses, in the order of their first use.

    Case is ignored. A plural in -s or -es counts as its singular if only the singular is in the vocabulary.
    """
    return list(_terms(text, vocabulary))


def uses_medical_terms(text: str, vocabulary: frozenset[str] | None = None, at_least: int = 1) -> bool:
    """Whether the text uses ``at_least`` different medical words."""
    if isinstance(at_least, bool) or not isinstance(at_least, int) or at_least < 1:
        raise ConfigError(f"at_least must be a whole number of at least 1, got {excerpt(at_least)}")
    return sum(1 for _ in islice(_terms(text, vocabulary), at_least)) == at_least


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
    return _parse(file.read_text(encoding="utf-8"), "of the package")


@functools.lru_cache(maxsize=8)
def _from_file(path: Path, modified: int, size: int) -> frozenset[str]:
    """The words of a file; ``modified`` and ``size`` are part of the cache key only."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"the medical vocabulary {path} is not a text in UTF-8; give a text file with one word per line"
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
                f"line {number} of the medical vocabulary {name} is {excerpt(word)}, which is not a single word of "
                "letters; write each word of a phrase on its own line"
            )
        words.add(word.lower())
    if not words:
        raise DataError(f"the medical vocabulary {name} has no words; write one per line")
    return frozenset(words)
