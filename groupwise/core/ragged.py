"""Rows of different lengths in one tensor: prompts, completions and what belongs to their tokens.

A list of a thousand short tensors costs a thousand small operations wherever it is used. Here the rows are the slices
of one flat tensor, and taking, joining, splitting and padding them are a few operations on that tensor, however many
rows there are. Both classes are sequences, so that a loop over rows reads as it does over a list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any, overload

import torch
from torch import Tensor

from groupwise.errors import InputError

Rows = Sequence[int] | Tensor
"""Numbers of rows, or for a bool tensor ``(n,)`` whether to take each row."""


class Ragged(Sequence[Tensor]):
    """``n`` rows of one-dimensional ``values``, row after row; ``lengths`` ``(n,)`` are on the CPU.

    A row is a view of ``values``.
    """

    def __init__(self, values: Tensor, lengths: Tensor | Sequence[int]) -> None:
        self.values = values
        self.lengths = torch.as_tensor(lengths, dtype=torch.long)
        if values.dim() != 1 or self.lengths.dim() != 1:
            shapes = f"{tuple(values.shape)} and {tuple(self.lengths.shape)}"
            raise InputError(f"values and lengths of ragged rows must have one dimension, got {shapes}")
        if int(self.lengths.sum()) != len(values) or (len(self.lengths) and int(self.lengths.min()) < 0):
            raise InputError(f"the lengths of ragged rows must sum to their {len(values)} values, got {self.sizes}")

    @classmethod
    def of(cls, rows: Sequence[Tensor | Sequence[Any]]) -> Ragged:
        """These rows, copied into one tensor; rows that are ragged already are returned as they are."""
        if isinstance(rows, Ragged):
            return rows
        lengths = [len(row) for row in rows]
        if any(isinstance(row, Tensor) for row in rows):
            values = torch.cat([torch.as_tensor(row) for row in rows])
        else:
            numbers = list(chain.from_iterable(rows))
            values = torch.tensor(numbers, dtype=None if numbers else torch.long)
        return cls(values, lengths)

    @classmethod
    def from_padded(cls, padded: Tensor, lengths: Tensor) -> Ragged:
        """The first ``lengths`` ``(n,)`` values of each row of ``padded`` ``(n, T)``."""
        return cls(padded[torch.arange(padded.shape[1]) < lengths[:, None]], lengths)

    @classmethod
    def join(cls, parts: Sequence[Ragged]) -> Ragged:
        """The rows of all parts, in order."""
        if not parts:
            return cls(torch.zeros(0, dtype=torch.long), [])
        return cls(torch.cat([part.values for part in parts]), torch.cat([part.lengths for part in parts]))

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, place: int) -> Tensor: ...
    @overload
    def __getitem__(self, place: slice) -> Ragged: ...
    def __getitem__(self, place: int | slice) -> Tensor | Ragged:
        if isinstance(place, slice):
            first, last, step = place.indices(len(self))
            if step != 1:
                return self.take(range(first, last, step))
            last = max(first, last)
            return Ragged(self.values[self._bounds[first] : self._bounds[last]], self.lengths[first:last])
        number = range(len(self))[place]  # negative ones count from the end; an IndexError beyond
        return self.values[self._bounds[number] : self._bounds[number + 1]]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.split(self.values, self.sizes) if len(self) else ())

    def __repr__(self) -> str:
        return f"Ragged({len(self)} rows, {len(self.values)} values of {self.values.dtype})"

    @cached_property
    def sizes(self) -> list[int]:
        """The lengths as Python numbers."""
        sizes: list[int] = self.lengths.tolist()
        return sizes

    @cached_property
    def _bounds(self) -> list[int]:
        return [0, *accumulate(self.sizes)]

    @property
    def longest(self) -> int:
        """The length of the longest row; 0 without rows."""
        return max(self.sizes, default=0)

    @property
    def mask(self) -> Tensor:
        """Which places of the padded rows have a value, ``(n, longest)``."""
        return torch.arange(self.longest) < self.lengths[:, None]

    def positions(self, rows: Rows) -> Tensor:
        """Where the values of these rows are in ``values``."""
        rows, ends = _index(rows), self.lengths.cumsum(0)
        lengths = self.lengths[rows]
        shift = ends[rows] - lengths.cumsum(0)
        return torch.arange(int(lengths.sum())) + shift.repeat_interleave(lengths)

    def take(self, rows: Rows) -> Ragged:
        """These rows, in this order."""
        rows = _index(rows)
        return Ragged(self.values[self.positions(rows)], self.lengths[rows])

    def split(self, counts: Sequence[int]) -> list[Ragged]:
        """Consecutive parts of so many rows each; they share the values."""
        ends = [0, *accumulate(counts)]
        if ends[-1] != len(self):
            raise InputError(f"{len(self)} rows cannot be split into parts of {list(counts)}")
        return [self[first:last] for first, last in pairwise(ends)]

    def padded(self) -> Tensor:
        """The rows as ``(n, longest)``, filled up with zeros."""
        mask = self.mask.to(self.values.device)
        return self.values.new_zeros(mask.shape).masked_scatter(mask, self.values)

    def tolist(self) -> list[list[Any]]:
        """The rows as lists of Python numbers."""
        values = self.values.tolist()
        return [values[first:last] for first, last in pairwise(self._bounds)]


class RaggedGroups(Sequence[Ragged]):
    """Ragged rows in consecutive groups of ``sizes`` ``(g,)`` rows, such as the completions of each prompt."""

    def __init__(self, rows: Ragged, sizes: Tensor | Sequence[int]) -> None:
        self.rows = rows
        self.sizes = torch.as_tensor(sizes, dtype=torch.long)
        if int(self.sizes.sum()) != len(rows) or (len(self.sizes) and int(self.sizes.min()) < 0):
            raise InputError(f"the sizes of groups must sum to their {len(rows)} rows, got {self.sizes.tolist()}")

    @classmethod
    def of(cls, groups: Sequence[Sequence[Tensor | Sequence[Any]]]) -> RaggedGroups:
        """These groups of rows, copied into one tensor; groups that are ragged already are returned as they are."""
        if isinstance(groups, RaggedGroups):
            return groups
        if groups and all(isinstance(group, Ragged) for group in groups):
            rows = Ragged.join([Ragged.of(group) for group in groups])
        else:
            rows = Ragged.of([row for group in groups for row in group])
        return cls(rows, [len(group) for group in groups])

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, place: int) -> Ragged: ...
    @overload
    def __getitem__(self, place: slice) -> RaggedGroups: ...
    def __getitem__(self, place: int | slice) -> Ragged | RaggedGroups:
        if isinstance(place, slice):
            first, last, step = place.indices(len(self))
            if step != 1:
                return self.take(range(first, last, step))
            last = max(first, last)
            return RaggedGroups(self.rows[self._bounds[first] : self._bounds[last]], self.sizes[first:last])
        number = range(len(self))[place]
        return self.rows[self._bounds[number] : self._bounds[number + 1]]

    def __iter__(self) -> Iterator[Ragged]:
        return iter(self.rows.split(self.sizes.tolist()))

    def __repr__(self) -> str:
        return f"RaggedGroups({len(self)} groups, {len(self.rows)} rows)"

    @cached_property
    def _bounds(self) -> list[int]:
        return [0, *accumulate(self.sizes.tolist())]

    @cached_property
    def group_of(self) -> Tensor:
        """The group of each row, ``(n,)``."""
        return torch.arange(len(self)).repeat_interleave(self.sizes)

    @property
    def totals(self) -> Tensor:
        """The values of all rows of each group, counted, ``(g,)``."""
        return self.sum(self.rows.lengths)

    @property
    def longest(self) -> Tensor:
        """The length of each group's longest row, ``(g,)``; 0 for a group without rows."""
        return torch.zeros(len(self), dtype=torch.long).scatter_reduce(0, self.group_of, self.rows.lengths, "amax")

    @classmethod
    def by_row(cls, rows: Ragged, group_of: Tensor) -> tuple[Tensor, RaggedGroups]:
        """Rows whose groups are ``group_of`` ``(n,)``, adjacent where equal: the groups, and their rows."""
        groups, sizes = torch.unique_consecutive(group_of, return_counts=True)
        return groups, cls(rows, sizes)

    def sum(self, values: Tensor) -> Tensor:
        """A number of each row ``(n,)``, summed by group, ``(g,)``; true counts 1."""
        values = values.long() if values.dtype == torch.bool else values
        return values.new_zeros(len(self)).index_add_(0, self.group_of, values)

    def row_numbers(self, groups: Rows) -> Tensor:
        """The numbers of all rows of these groups."""
        return Ragged(torch.arange(len(self.rows)), self.sizes).take(groups).values

    def take(self, groups: Rows) -> RaggedGroups:
        """These groups, in this order."""
        groups = _index(groups)
        return RaggedGroups(self.rows.take(self.row_numbers(groups)), self.sizes[groups])

    def regroup(self, sizes: Tensor | Sequence[int]) -> RaggedGroups:
        """The same rows in groups of other sizes."""
        return RaggedGroups(self.rows, sizes)

    def tolist(self) -> list[list[list[Any]]]:
        rows = self.rows.tolist()
        return [rows[first:last] for first, last in pairwise(self._bounds)]


def _index(rows: Rows) -> Tensor:
    index = torch.as_tensor(rows if isinstance(rows, Tensor) else list(rows))
    return index.nonzero().squeeze(1) if index.dtype == torch.bool else index.long()
