"""Medical words in a text.

The packaged list holds the words of ICD-10-CM's descriptions that ordinary English does not use;
tools/medical_words.py makes it.
"""

from __future__ import annotations

import functools
import importlib.resources
import re
from collections.abc import Iterator
from pathlib import Path

from groupwise.errors import DataError, InputError
from groupwise.paths import read_file, user_path
from groupwise.text import excerpt

# Letters with no letter or digit beside them. The possessive quantifier keeps the search linear.
_WORD = re.compile(r"(?<![^\W_])[^\W\d_]++(?![^\W_])")


def load_medical_vocabulary(path: str | Path | None = None) -> frozenset[str]:
    """The packaged medical words, or those of a file with one word per line, in lower case; ``#`` starts a comment."""
    if path is None:
        return _packaged()
    remedy = "give a text file with one word per line, or leave the path out to use the packaged words"
    path = user_path(path)
    try:
        return _parse(read_file(path, InputError).decode("utf-8-sig"), str(path))
    except (InputError, UnicodeDecodeError) as error:
        reason = f"{path} is not a text in UTF-8" if isinstance(error, UnicodeDecodeError) else error
        raise DataError(f"the medical vocabulary cannot be read: {reason}; {remedy}") from error


def medical_terms(text: str, vocabulary: frozenset[str] | None = None) -> Iterator[str]:
    """The words of a text that are in the vocabulary, by default the packaged one.

    Case is ignored. A plural in -s or -es counts as its singular if only the singular is in the vocabulary.
    """
    terms = _packaged() if vocabulary is None else vocabulary
    for match in _WORD.finditer(text):
        word = match[0].lower()
        term = next((form for form in (word, word.removesuffix("s"), word.removesuffix("es")) if form in terms), None)
        if term is not None:
            yield term


@functools.cache
def _packaged() -> frozenset[str]:
    file = importlib.resources.files("groupwise.usmle").joinpath("medical_words.txt")
    return _parse(file.read_text(encoding="utf-8"), "of the package")


def _parse(text: str, name: str) -> frozenset[str]:
    words = set()
    for number, line in enumerate(text.split("\n"), start=1):
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
