"""Packs: which samples are computed together in one packed row, and the checks of their token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from groupwise.core.filters import KeptSets
from groupwise.core.ragged import Ragged, RaggedGroups
from groupwise.core.sequences import TokenSequence, TurnGroups
from groupwise.errors import InputError
from groupwise.model.handle import ModelHandle
from groupwise.model.tree import plan_tree_packs, sort_contexts

CPU_TOKENS, MAX_TOKENS = 4096, 40960
MEMORY_SHARE = 0.35  # of a GPU, for the activations of one pack

Ids = Sequence[int] | Tensor
Completion = Ids | TokenSequence


class PackInputs(NamedTuple):
    """The token ids and kept sets of a pack."""

    samples: Tensor  # (b,); none in a pack that is only run so that all ranks run as many
    prompts: Ragged
    completions: RaggedGroups  # by prompt
    kept: KeptSets | None
    sequences: list[list[TokenSequence]] | None = None  # by prompt and sorted, if these are conversations


class Pack(NamedTuple):
    """Consecutive groups and samples that are computed together; of the first and the last group perhaps a part."""

    groups: range
    samples: range
    sizes: list[int]  # samples of each group in this pack


def plan_packs(
    prompt_lengths: Sequence[int], sizes: Sequence[int], completion_lengths: Sequence[int], token_budget: int
) -> list[Pack]:
    """Divide the samples into packed rows of at most ``token_budget`` tokens, keeping groups together where they fit.

    ``sizes`` are the samples of each group, at least one; samples are numbered group after group. A group that exceeds
    the budget is split, and its prompt computed once in each part.
    """
    prompts, counts, lengths = (np.asarray(x, np.int64) for x in (prompt_lengths, sizes, completion_lengths))
    costs = np.maximum(lengths - 1, 0)
    alone = prompts.repeat(counts) + costs
    if (alone > token_budget).any():
        sample = int((alone > token_budget).argmax())
        raise InputError(
            f"sample {sample} takes {alone[sample]} tokens with its prompt, more than token_budget {token_budget}; "
            "raise token_budget"
        )
    ends, sums = np.append(0, counts.cumsum()), np.append(0, costs.cumsum())
    totals = (prompts + sums[ends[1:]] - sums[ends[:-1]]).tolist()
    parts: list[list[tuple[int, int]]] = [[]]  # pack by pack, the groups and how many samples of them
    used = 0
    for group, (prompt, total) in enumerate(zip(prompts.tolist(), totals, strict=True)):
        if used + total > token_budget and (total <= token_budget or used + prompt > token_budget):
            parts.append([])
            used = 0
        first, end = int(ends[group]), int(ends[group + 1])
        while used + total > token_budget:  # as many samples as fit, then a new pack for the others
            room = token_budget - used - prompt
            count = int(np.searchsorted(sums[first + 1 : end + 1], sums[first] + room, "right")) if room >= 0 else 0
            if count:
                parts[-1].append((group, count))
            parts.append([])
            used, first = 0, first + count
            total = prompt + int(sums[end] - sums[first])
        if end > first:
            parts[-1].append((group, end - first))
            used += total
    packs, done = [], 0
    for part in filter(None, parts):
        numbers = [count for _, count in part]
        packs.append(Pack(range(part[0][0], part[-1][0] + 1), range(done, done + sum(numbers)), numbers))
        done += sum(numbers)
    return packs


def default_token_budget(handle: ModelHandle) -> int:
    """4,096 tokens on a CPU; on a GPU what a third of its memory holds, at most 40,960.

    It depends on the GPU and the model only, not on the free memory: packs decide in which order gradients are summed,
    and a run must be repeatable.
    """
    if handle.device.type != "cuda":
        return CPU_TOKENS
    memory = torch.cuda.get_device_properties(handle.device).total_memory
    return max(1024, min(MAX_TOKENS, int(memory * MEMORY_SHARE / activation_bytes(handle)) // 1024 * 1024))


def activation_bytes(handle: ModelHandle, *, checkpointing: bool = False) -> int:
    """Approximate bytes of activations per token: per layer, seven hidden widths and three of the MLP's.

    With gradient checkpointing only the inputs of the layers are kept.
    """
    config = handle.model.config.get_text_config()
    mlp = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    widths = config.hidden_size if checkpointing else 7 * config.hidden_size + 3 * mlp
    return int(config.num_hidden_layers * widths * handle.dtype.itemsize)


def pack_members(
    handle: ModelHandle, prompts: Sequence[Ids], completions: Sequence[Sequence[Completion]], token_budget: int
) -> list[list[int]]:
    """Which samples are computed together with this budget, pack by pack."""
    if has_conversations(completions):
        return _plan_trees(handle, prompts, completions, token_budget).samples
    groups = RaggedGroups.of(cast("Sequence[Sequence[Ids]]", completions))
    prompt_ids, sizes = _as_groups(handle, Ragged.of(prompts), groups)
    return [list(pack.samples) for pack in plan_packs(prompt_ids.sizes, sizes, groups.rows.sizes, token_budget)]


def split_into_packs(
    handle: ModelHandle,
    prompts: Sequence[Ids],
    completions: Sequence[Sequence[Completion]],
    kept: KeptSets | None,
    token_budget: int | None,
) -> Iterator[PackInputs]:
    """Check the samples and divide them into packs; the default budget fits at least the longest sample.

    If the weights are sharded, every rank gets as many packs: the last of some have no samples, only a token to
    compute. Then, a rank may have no prompt at all.
    """
    if handle.sharded is not None and not len(prompts):
        yield from [_without_samples()] * handle.sharded.most(0)
        return
    if has_conversations(completions):
        yield from _split_conversations(handle, prompts, completions, kept, token_budget)
        return
    prompt_ids, groups = _checked(handle, prompts, cast("Sequence[Sequence[Ids]]", completions))
    rows = groups.rows
    if token_budget is None:
        token_budget = max(default_token_budget(handle), int((prompt_ids.lengths + groups.longest).max()))
    if kept is not None and len(kept) != len(rows.values):
        raise InputError(f"{len(kept)} kept sets were given for {len(rows.values)} completion tokens")
    prompt_ids, sizes = _as_groups(handle, prompt_ids, groups)
    plan = plan_packs(prompt_ids.sizes, sizes, rows.sizes, token_budget)
    more = 0 if handle.sharded is None else handle.sharded.most(len(plan)) - len(plan)
    for pack in plan:
        samples = torch.arange(pack.samples.start, pack.samples.stop)
        members = rows[pack.samples.start : pack.samples.stop]
        sets = None if kept is None else kept.select(rows.positions(samples)).to(handle.device)
        shared = prompt_ids[pack.groups.start : pack.groups.stop]
        yield PackInputs(samples, shared, RaggedGroups(members, pack.sizes), sets)
    yield from [_without_samples()] * more


def has_conversations(completions: Sequence[Sequence[Completion]]) -> bool:
    """Whether any of these has given tokens."""
    if isinstance(completions, RaggedGroups):
        return isinstance(completions, TurnGroups)
    return any(isinstance(ids, TokenSequence) for members in completions for ids in members)


def _split_conversations(
    handle: ModelHandle,
    prompts: Sequence[Ids],
    completions: Sequence[Sequence[Completion]],
    kept: KeptSets | None,
    token_budget: int | None,
) -> Iterator[PackInputs]:
    """`split_into_packs` for conversations: what members of a group begin with in common counts once."""
    trees = _plan_trees(handle, prompts, completions, token_budget)
    sampled = Ragged.of([sequence.completion for members in trees.sequences for sequence in members])
    if kept is not None and len(kept) != len(sampled.values):
        raise InputError(f"{len(kept)} kept sets were given for {len(sampled.values)} sampled tokens")
    more = 0 if handle.sharded is None else handle.sharded.most(len(trees.packs)) - len(trees.packs)
    for pack, numbers in zip(trees.packs, trees.samples, strict=True):
        samples = torch.tensor(numbers)
        chosen = [[trees.sequences[group][member] for member in members] for group, members in pack.items()]
        completion_ids = RaggedGroups(sampled.take(samples), [len(members) for members in chosen])
        sets = None if kept is None else kept.select(sampled.positions(samples)).to(handle.device)
        yield PackInputs(samples, trees.prompts.take(list(pack)), completion_ids, sets, chosen)
    yield from [_without_samples()] * more


class _TreePlan(NamedTuple):
    """Conversations divided into packs."""

    prompts: Ragged
    sequences: list[list[TokenSequence]]  # by prompt
    packs: list[dict[int, list[int]]]  # by prompt, the members that are computed together

    @property
    def samples(self) -> list[list[int]]:
        """The members of each pack, numbered through all prompts."""
        starts = [0, *accumulate(map(len, self.sequences))]
        return [
            [starts[group] + member for group, members in pack.items() for member in members] for pack in self.packs
        ]


def _plan_trees(
    handle: ModelHandle,
    prompts: Sequence[Ids],
    completions: Sequence[Sequence[Completion]],
    token_budget: int | None,
) -> _TreePlan:
    if isinstance(completions, TurnGroups):
        sequences = completions.sequences
    else:
        sequences = [[_as_sequence(ids) for ids in members] for members in completions]
    prompt_ids, all_ids = _checked(handle, prompts, [[sequence.ids for sequence in members] for members in sequences])
    if token_budget is None:
        token_budget = max(default_token_budget(handle), int((prompt_ids.lengths + all_ids.longest).max()))
    if handle.fallback_reason:  # every sample is a group of its own
        prompt_ids = prompt_ids.take(all_ids.group_of)
        sequences = [[sequence] for members in sequences for sequence in members]
    packs = plan_tree_packs(prompt_ids.sizes, [sort_contexts(members) for members in sequences], token_budget)
    return _TreePlan(prompt_ids, sequences, packs)


def _as_sequence(ids: Completion) -> TokenSequence:
    if isinstance(ids, TokenSequence):
        return ids
    tokens = torch.as_tensor(ids)
    return TokenSequence(tokens, torch.ones(len(tokens), dtype=torch.bool))


def _without_samples() -> PackInputs:
    token = torch.zeros(1, dtype=torch.long)
    row = Ragged(token, [1])
    return PackInputs(token[:0], row, RaggedGroups(row, [1]), None)


def _as_groups(handle: ModelHandle, prompts: Ragged, completions: RaggedGroups) -> tuple[Ragged, list[int]]:
    """The prompts and sizes of the groups that share a prompt. On the plain path every sample is a group of its own."""
    if not handle.fallback_reason:
        sizes: list[int] = completions.sizes.tolist()
        return prompts, sizes
    return prompts.take(completions.group_of), [1] * len(completions.rows)


def _checked(
    handle: ModelHandle, prompts: Sequence[Ids], completions: Sequence[Sequence[Ids]]
) -> tuple[Ragged, RaggedGroups]:
    if len(prompts) != len(completions) or not len(prompts):
        raise InputError(
            f"{len(prompts)} prompts but completions for {len(completions)}; give each prompt its list of completions"
        )
    sizes = completions.sizes.tolist() if isinstance(completions, RaggedGroups) else list(map(len, completions))
    if not all(sizes):
        raise InputError(f"prompt {sizes.index(0)} has no completion; leave it out")
    prompt_ids = check_rows(prompts, handle, lambda number: f"prompt {number}")
    if isinstance(completions, RaggedGroups):
        rows: Sequence[Ids] = completions.rows
    else:
        rows = [ids for members in completions for ids in members]

    def name(number: int) -> str:
        group = next(group for group, end in enumerate(accumulate(sizes)) if number < end)
        return f"completion {number - sum(sizes[:group])} of prompt {group}"

    completion_ids = RaggedGroups(check_rows(rows, handle, name), sizes)
    longest = prompt_ids.lengths + completion_ids.longest
    if handle.context_length is not None and int(longest.max()) > handle.context_length:
        number = int((longest > handle.context_length).nonzero()[0])
        raise InputError(
            f"prompt {number} and its longest completion have {int(longest[number])} tokens; the model's context "
            f"length is {handle.context_length}"
        )
    return prompt_ids, completion_ids


def check_rows(rows: Sequence[Ids], handle: ModelHandle, name: Callable[[int], str]) -> Ragged:
    """`check_ids` of each row; ``name`` gives a row's name for an error.

    Tensors are tested all at once: thousands of short calls are slow.
    """
    if isinstance(rows, Ragged) or all(_is_plain(ids) for ids in rows):
        ragged = Ragged.of(rows)
        if _are_valid(ragged, handle):
            return ragged
    return Ragged.of([check_ids(ids, handle, name(number)) for number, ids in enumerate(rows)])


def _is_plain(ids: Ids) -> bool:
    return isinstance(ids, Tensor) and ids.dtype == torch.long and ids.device.type == "cpu" and ids.dim() == 1


def _are_valid(rows: Ragged, handle: ModelHandle) -> bool:
    """Whether `check_ids` would return all of them unchanged."""
    if not _is_plain(rows.values) or not len(rows) or not all(rows.sizes):
        return False
    low, high = rows.values.aminmax()
    fits = handle.context_length is None or rows.longest <= handle.context_length
    return fits and int(low) >= 0 and int(high) < handle.vocabulary


def check_ids(ids: Ids, handle: ModelHandle, name: str) -> Tensor:
    """Token ids as a CPU tensor; raises unless they are integers, at least one, and in the vocabulary."""
    try:
        tensor = torch.as_tensor(ids).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name} is not a list of token ids: {error}") from error
    if tensor.dim() != 1 or (len(tensor) and (tensor.is_floating_point() or tensor.dtype == torch.bool)):
        raise InputError(f"{name} must be a list of integers, got {tensor.dtype} of shape {tuple(tensor.shape)}")
    if not len(tensor):
        raise InputError(f"{name} is empty; give it at least one token, for example the model's BOS token")
    low, high = (int(end) for end in tensor.aminmax())
    if low < 0 or high >= handle.vocabulary:
        raise InputError(
            f"{name} holds the id {low if low < 0 else high}, outside the vocabulary of {handle.vocabulary}"
        )
    if handle.context_length is not None and len(tensor) > handle.context_length:
        raise InputError(f"{name} has {len(tensor)} tokens; the model's context length is {handle.context_length}")
    return tensor.long()
