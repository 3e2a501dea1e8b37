"""Seeds of the random choices of a run. Each purpose has a tag, so that no two of them can share a seed."""

from __future__ import annotations

import hashlib


def derive_seed(purpose: str, *numbers: int) -> int:
    """A seed below 2**48 from a purpose and some numbers, the same on every machine and in a resumed run."""
    text = ",".join([purpose, *map(str, numbers)]).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:6], "big")
