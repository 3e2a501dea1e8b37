"""Keys and values that stay between calls: contexts and what was sampled after them.

A later call whose context begins like one of them copies its beginning into the pool of the `SharedCache`, and computes
the rest only. Places are of single tokens, so that sequences share exactly what they have in common. Memory grows as it
is needed, up to a limit that each call sets; then what has not been used for longest goes first, but not what the call
is still to read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from groupwise.generate.prefix_tree import PrefixTree, TokenRun
from groupwise.model.attention import to_device
from groupwise.model.cache import LayerCache, SharedCache, bytes_per_token
from groupwise.model.handle import ModelHandle

LayerTensors = Callable[[LayerCache], tuple[Tensor, Tensor]]


class KeptBeginning(NamedTuple):
    """The beginning of a context that is kept; a length of 0 if there is none."""

    run: TokenRun
    length: int


class KeptTokens:
    """The storage, and the tree that says what is in it."""

    def __init__(self, handle: ModelHandle) -> None:
        self.handle, self.limit = handle, 0
        self._weights: tuple[Any, ...] | None = None
        self.clear()

    def clear(self) -> None:
        """Forget everything, and free the memory."""
        self._tree = PrefixTree()
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._capacity = 0
        self._free = np.empty(0, np.int64)  # places
        self._unnamed: dict[int, np.ndarray] = {}  # places of samples whose tokens the host does not know yet

    def mark_stale(self, *_: Any) -> None:
        """Forget everything before the next call. Any thread may say so, as a hook of optimizers."""
        self._weights = None

    @property
    def bytes(self) -> int:
        return self._capacity * bytes_per_token(self.handle.shapes, self.handle.dtype)

    def start(self, contexts: Sequence[Tensor], limit: int) -> list[KeptBeginning]:
        """Before a call: what is kept of its contexts, with ``limit`` tokens from now on.

        The last token of a context is always computed, for its logits. `restore` must be called once for each.
        """
        if self._weights != (weights := self.handle.weight_state()):
            self.clear()
            self._weights = weights
        ids = [context.numpy()[:-1] for context in contexts]
        for context in ids:  # what this call needs goes last
            self._tree.find(context)
        self.limit = limit
        self._shrink()
        beginnings = [KeptBeginning(*self._tree.find(context)) for context in ids]
        for run, _ in beginnings:
            run.readers += 1
        return beginnings

    def restore(self, beginnings: Sequence[KeptBeginning], starts: Sequence[int], cache: SharedCache) -> None:
        """Copy beginnings to where their contexts start in the pool."""
        to = [np.arange(start, start + length) for start, (_, length) in zip(starts, beginnings, strict=True)]
        places = np.concatenate([self._tree.places(run) for run, _ in beginnings])
        for run, _ in beginnings:
            run.readers -= 1
        if len(places):
            at, source = self._on_device(np.concatenate(to)), self._on_device(places)
            for layer, kept in zip(cache.layers, self._layers, strict=True):
                for target, tensor in zip((layer.pool_keys, layer.pool_values), kept, strict=True):
                    target.index_copy_(0, at, tensor.index_select(0, source))

    def keep_contexts(
        self,
        contexts: Sequence[Tensor],
        beginnings: Sequence[KeptBeginning],
        starts: Sequence[int],
        cache: SharedCache,
    ) -> None:
        """Keep the tokens of these contexts after their beginnings, from the pool."""
        sources = [
            np.arange(start + length, start + len(ids))
            for ids, (_, length), start in zip(contexts, beginnings, starts, strict=True)
        ]
        for ids, places in zip(contexts, self._store(sources, cache, _pool), strict=True):
            self._add(ids.numpy(), places)

    def keep_samples(self, samples: Sequence[int], sources: Sequence[np.ndarray], cache: SharedCache) -> None:
        """Keep what samples have in these places of their pages, which others will use; `finish` names the tokens."""
        self._unnamed.update(zip(samples, self._store(sources, cache, _pages), strict=True))

    def finish(self, contexts: Sequence[Tensor], prompt_of: np.ndarray, ids: np.ndarray, lengths: np.ndarray) -> None:
        """After a call: the tokens ``ids`` (samples, T) of all samples and their lengths.

        The last token of a sample was no input, so that it has no key.
        """
        for sample, places in self._unnamed.items():
            own = lengths[sample] - 1
            self._release(places[own:])
            self._add(np.concatenate([contexts[prompt_of[sample]].numpy(), ids[sample, :own]]), places[:own])
        self._unnamed = {}

    def _add(self, ids: np.ndarray, places: np.ndarray) -> None:
        self._release(self._tree.add(ids, places))

    def _store(self, sources: Sequence[np.ndarray], cache: SharedCache, tensors: LayerTensors) -> list[np.ndarray]:
        """Copy these places of the cache's tensors; returns where to, nowhere for what finds no room."""
        targets = [self._reserve(len(source)) for source in sources]
        stored = [source for source, target in zip(sources, targets, strict=True) if len(target)]
        if stored:
            to, at = self._on_device(np.concatenate(targets)), self._on_device(np.concatenate(stored))
            for layer, kept in zip(cache.layers, self._layers, strict=True):
                for target, source in zip(kept, tensors(layer), strict=True):
                    target.index_copy_(0, to, source.index_select(0, at))
        return targets

    def _reserve(self, tokens: int) -> np.ndarray:
        """Places for these tokens, or none if there is no room for all."""
        if len(self._free) < tokens <= self.limit:
            missing = tokens - len(self._free)
            self._grow(min(self.limit, max(2 * self._capacity, self._capacity + missing)))
            if len(self._free) < tokens:
                self._release(self._tree.remove(tokens - len(self._free)))
        taken = tokens if tokens <= len(self._free) else 0
        places, self._free = np.split(self._free, [taken])
        return places

    def _release(self, places: np.ndarray) -> None:
        self._free = np.concatenate([self._free, places])

    def _grow(self, capacity: int) -> None:
        if capacity > self._capacity:
            self._allocate(capacity, np.arange(self._capacity))
            self._release(np.arange(self._capacity, capacity))
            self._capacity = capacity

    def _shrink(self) -> None:
        """Give back what exceeds the limit."""
        if self._capacity <= self.limit:
            return
        used = self._capacity - len(self._free)
        self._tree.remove(used - self.limit)
        runs = list(self._tree.runs())
        places = np.concatenate([np.empty(0, np.int64), *(run.places for run in runs)])
        self._allocate(self.limit, places)
        first = 0
        for run in runs:
            run.places = np.arange(first, first + len(run.places))
            first += len(run.places)
        self._free, self._capacity = np.arange(first, self.limit), self.limit

    def _allocate(self, capacity: int, places: np.ndarray) -> None:
        """Storage of another size, which begins with the tokens of these places."""
        source = self._on_device(places)
        if not self._layers:
            like = partial(torch.empty, dtype=self.handle.dtype, device=self.handle.device)
            self._layers = [(like(0, *shape), like(0, *shape)) for shape in self.handle.shapes]
        for number, layer in enumerate(self._layers):
            keys, values = (tensor.new_empty(capacity, *tensor.shape[1:]) for tensor in layer)
            for new, old in zip((keys, values), layer, strict=True):
                new[: len(places)] = old[source]
            self._layers[number] = keys, values

    def _on_device(self, places: np.ndarray) -> Tensor:
        return to_device(torch.from_numpy(places), self.handle.device)


def _pool(layer: LayerCache) -> tuple[Tensor, Tensor]:
    return layer.pool_keys, layer.pool_values


def _pages(layer: LayerCache) -> tuple[Tensor, Tensor]:
    return layer.page_keys.flatten(0, 1), layer.page_values.flatten(0, 1)
