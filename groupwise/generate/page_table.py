"""Which pages of the cache hold the keys and values of the sample in each slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class PageTable:
    """A row per slot: its sample's pages in order, then the spare page. On the host."""

    def __init__(self, slots: int, columns: int, page_tokens: int, spare: int) -> None:
        self.page_tokens, self.spare = page_tokens, spare
        self._pages = np.full((slots, columns), spare, np.int64)
        self._counts = np.zeros(slots, np.int64)

    def assign(self, slot: int, pages: Sequence[int]) -> None:
        """The pages of a slot's sample, instead of those before."""
        self._pages[slot] = self.spare
        self._pages[slot, : len(pages)] = pages
        self._counts[slot] = len(pages)

    def append(self, slot: int, page: int) -> None:
        """One more page for a slot's sample."""
        self._pages[slot, self._counts[slot]] = page
        self._counts[slot] += 1

    def rows(self, slots: np.ndarray) -> np.ndarray:
        """All pages of these slots, ``(rows, n)``, where n is the most that one of them has."""
        rows: np.ndarray = self._pages[slots, : self._counts[slots].max()]
        return rows

    def page_at(self, slots: np.ndarray, places: np.ndarray) -> np.ndarray:
        """The page ``(rows,)`` that has the token at each row's place in its completion."""
        pages: np.ndarray = self._pages[slots, places // self.page_tokens]
        return pages
