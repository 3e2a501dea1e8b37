"""The counts themselves, and what `accepted` lets through."""

from __future__ import annotations

import pytest

from groupwise.errors import DataError
from tests.fuzz import TRIED, accepted


def test_accepted_counts_and_catches_only_errors_of_groupwise():
    def refuse(error: Exception) -> None:
        raise error

    before = TRIED.copy()
    try:
        assert accepted("test", lambda: 3) == 3
        assert accepted("test", lambda: refuse(DataError("row 1 has no prompt"))) is None
        with pytest.raises(AssertionError, match="without a message"):
            accepted("test", lambda: refuse(DataError(" ")))
        with pytest.raises(KeyError):
            accepted("test", lambda: refuse(KeyError("prompt")))
        assert TRIED["test"] == before["test"] + 4
    finally:
        TRIED.clear()
        TRIED.update(before)
