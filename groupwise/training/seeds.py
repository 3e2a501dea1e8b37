"""Seeds that depend on nothing but their numbers, so that a resumed run draws the same ones."""

from __future__ import annotations

import hashlib


def derive_seed(*numbers: int) -> int:
    """One seed below 2**48 from several numbers, the same on every machine."""
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:6], "big")
