"""Dividing work among ranks by its cost, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence


def split_by_cost(costs: Sequence[float], parts: int) -> list[list[int]]:
    """The numbers of the items of each part, in order, so that the most expensive part costs little more than the mean.

    The items are given out from the most expensive to the cheapest, each to the part that has the least so far. Such a
    split is at most 4/3 as expensive as the best one.
    """
    shares: list[list[int]] = [[] for _ in range(parts)]
    totals = [0.0] * parts
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        part = min(range(parts), key=lambda part: (totals[part], len(shares[part]), part))
        shares[part].append(item)
        totals[part] += costs[item]
    return [sorted(share) for share in shares]
