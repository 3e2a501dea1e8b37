"""The tree of a group's conversations: tokens that several of them begin with are computed once.

The conversations of a group start with the same prompt. Two of them may also share their first turns: a tool that
answered the same question with the same text, a game that was played alike for some moves. Sorted, neighbours share the
most, and a set of neighbours costs what each adds to the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from groupwise.core.ragged import Ragged
from groupwise.core.sequences import TokenSequence
from groupwise.errors import InputError


class SortedContexts(NamedTuple):
    """Sequences in the order in which neighbours share the most; only tokens that have to be computed count."""

    order: list[int]
    lengths: list[int]  # in this order
    shared: list[int]  # with the sequence before; 0 for the first


class TokenTree(NamedTuple):
    """The distinct tokens of some sequences, in nodes; a node's descendants follow it directly."""

    ids: Tensor  # (n,) node after node
    lengths: list[int]  # of the nodes
    parents: list[int]  # the node before each node, −1 for the prompt
    sources: list[Tensor]  # for each sequence: where in ``ids`` its sampled tokens are predicted, −1 for the prompt


def sort_contexts(sequences: Sequence[TokenSequence]) -> SortedContexts:
    """Sort by token ids and count the tokens that neighbours share."""
    contexts = [sequence.context.numpy() for sequence in sequences]
    keys = [context.astype(">i8").tobytes() for context in contexts]  # bytes are sorted as the ids are
    order = sorted(range(len(contexts)), key=keys.__getitem__)
    pairs = pairwise(contexts[i] for i in order)
    shared = [0, *(_shared_tokens(one, other) for one, other in pairs)]
    return SortedContexts(order, [len(contexts[i]) for i in order], shared[: len(order)])


def _shared_tokens(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


def build_tree(sequences: Sequence[TokenSequence]) -> TokenTree:
    """The tree of sequences that are sorted as by `sort_contexts`."""
    contexts = [sequence.context for sequence in sequences]
    lengths = [len(context) for context in contexts]
    shared = [0, *(_shared_tokens(one.numpy(), other.numpy()) for one, other in pairwise(contexts))]
    nodes: list[tuple[int, int, int]] = []  # a sequence, and the part of it that is the node
    parents: list[int] = []
    paths: list[list[int]] = [[] for _ in contexts]
    pending = [(0, len(contexts), 0, -1)]
    while pending:
        first, last, start, parent = pending.pop()  # these sequences are alike up to ``start``
        stop = min(shared[first + 1 : last], default=lengths[first])
        if stop > start:
            parents.append(parent)
            parent = len(nodes)
            nodes.append((first, start, stop))
            for path in paths[first:last]:
                path.append(parent)
        if last - first > 1:
            cuts = [first, *(i for i in range(first + 1, last) if shared[i] == stop), last]
            pending += [(a, b, stop, parent) for a, b in reversed(list(pairwise(cuts)))]
    sizes = [stop - start for _, start, stop in nodes]
    begins = np.cumsum([0, *sizes])
    empty = torch.zeros(0, dtype=torch.long)
    sources = []
    for sequence, path in zip(sequences, paths, strict=True):
        # Places of the tokens in ``ids``, shifted by one: the first token is predicted by the prompt.
        before = np.concatenate([[-1], *(np.arange(begins[node], begins[node] + sizes[node]) for node in path)])
        sources.append(torch.from_numpy(before)[sequence.places])
    ids = torch.cat([empty, *(contexts[first][start:stop] for first, start, stop in nodes)])
    return TokenTree(ids, sizes, parents, sources)


class PackedTrees(NamedTuple):
    """The trees of several groups behind their prompts, as `TreeLayout` expects them."""

    row: Tensor  # (n,) all prompts, then all trees
    sizes: list[int]  # the nodes of each group, counted
    lengths: list[int]  # of the nodes
    parents: list[int]  # numbered within a group
    sources: Tensor  # (tokens,) where in the row each sampled token is predicted


def pack_trees(prompts: Ragged, groups: Sequence[Sequence[TokenSequence]]) -> PackedTrees:
    """The trees of these groups, whose members are sorted as by `sort_contexts`."""
    trees = [build_tree(sequences) for sequences in groups]
    prompt_ends = prompts.lengths.cumsum(0).tolist()
    sources, at = [], prompt_ends[-1]
    for tree, prompt_end in zip(trees, prompt_ends, strict=True):
        sources += [torch.where(places < 0, prompt_end - 1, at + places) for places in tree.sources]
        at += len(tree.ids)
    return PackedTrees(
        torch.cat([prompts.values, *(tree.ids for tree in trees)]),
        [len(tree.lengths) for tree in trees],
        [length for tree in trees for length in tree.lengths],
        [parent for tree in trees for parent in tree.parents],
        torch.cat(sources),
    )


def plan_tree_packs(
    prompt_lengths: Sequence[int], contexts: Sequence[SortedContexts], token_budget: int
) -> list[dict[int, list[int]]]:
    """Divide conversations into packed rows of at most ``token_budget`` tokens, as `plan_packs` divides completions.

    A pack is the members of each of its groups, in sorted order: what they share is counted once.
    """
    packs: list[dict[int, list[int]]] = [{}]
    used = first = 0
    for group, (prompt, (order, lengths, shared)) in enumerate(zip(prompt_lengths, contexts, strict=True)):
        total = prompt + sum(lengths) - sum(shared)
        if used + total > token_budget and (total <= token_budget or used + prompt > token_budget):
            packs.append({})
            used = 0
        for member, length, common in zip(order, lengths, shared, strict=True):
            if prompt + length > token_budget:
                raise InputError(
                    f"sample {first + member} takes {prompt + length} tokens with its prompt, more than token_budget "
                    f"{token_budget}; raise token_budget"
                )
            added = length - common if group in packs[-1] else prompt + length
            if used + added > token_budget:
                packs.append({})
                used, added = 0, prompt + length
            used += added
            packs[-1].setdefault(group, []).append(member)
        first += len(order)
    return [pack for pack in packs if pack]
