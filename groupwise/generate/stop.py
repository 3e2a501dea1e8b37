"""Stop strings: the only part of generation that uses a tokenizer, which the caller passes in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from groupwise.errors import InputError

REPLACEMENT = "\ufffd"  # an incomplete character decodes to this
CACHE_SIZE = 1024  # of decoded endings


class StopStrings:
    """Ends a completion at the token that completes one of ``strings``; pass it as ``stop`` to a generator.

    The text is decoded only if the newest token contains the last character of a stop string, or part of a character.
    """

    def __init__(self, tokenizer: Any, strings: str | Sequence[str]) -> None:
        self.strings = [strings] if isinstance(strings, str) else list(strings)
        if not self.strings or not all(isinstance(text, str) and text for text in self.strings):
            raise InputError(f"stop strings must be one or more non-empty strings, got {strings!r}")
        self.tokenizer = tokenizer
        self._last = {text[-1] for text in self.strings}
        # A character is up to four tokens (its bytes); a few more for tokens that decode to nothing.
        self._tail = 4 * max(map(len, self.strings)) + 8
        self._may_end: dict[int, bool] = {}
        self._contains: dict[int, bool] = {}
        self._ends: dict[tuple[int, ...], bool] = {}

    def __call__(self, ids: Sequence[int]) -> bool:
        """Whether the newest of ``ids`` completes a stop string."""
        newest = ids[-1]
        if not self._token_may_end(newest):
            return False
        if self._completes_alone(newest):
            return True
        tail = tuple(ids[-self._tail :])
        ends = self._ends.get(tail)
        if ends is None:  # short answers repeat
            if len(self._ends) >= CACHE_SIZE:
                self._ends.clear()  # perhaps while another thread looks something up
            text = self._decode(tail)
            ends = self._ends[tail] = any(string in text for string in self.strings)
        return ends

    def may_end(self, newest: np.ndarray) -> np.ndarray:
        """Which of these newest tokens may complete a stop string: for the others there is no need to call this."""
        ids, where = np.unique(newest, return_inverse=True)
        return np.array([self._token_may_end(token) for token in ids.tolist()], bool)[where]

    def _token_may_end(self, token: int) -> bool:
        if token not in self._may_end:
            text = self._decode([token])
            self._may_end[token] = REPLACEMENT in text or any(character in text for character in self._last)
        return self._may_end[token]

    def _completes_alone(self, token: int) -> bool:
        """Whether a token contains a stop string, after any other: its text must not depend on what is before it."""
        if token not in self._contains:
            text = self._decode([token])
            same = REPLACEMENT not in text and self._decode([token, token]).endswith(text)
            self._contains[token] = same and any(string in text for string in self.strings)
        return self._contains[token]

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text
