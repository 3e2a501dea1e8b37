"""Packs: which samples are computed together in one packed row, and the checks of their token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from groupwise.core.filters import KeptSets
from groupwise.core.sequences import TokenSequence
from groupwise.errors import InputError
from groupwise.model.handle import ModelHandle
from groupwise.model.tree import plan_tree_packs, sort_contexts

CPU_TOKENS, MAX_TOKENS = 4096, 65536
MEMORY_SHARE = 0.35  # of a GPU, for the activations of one pack

Ids = Sequence[int] | Tensor | TokenSequence


class PackInputs(NamedTuple):
    """The token ids and kept sets of a pack."""

    samples: Tensor  # (b,); none in a pack that is only run so that all ranks run as many
    prompts: list[Tensor]
    completions: list[list[Tensor]]  # by prompt
    kept: KeptSets | None
    sequences: list[list[TokenSequence]] | None = None  # by prompt, if these are conversations


def plan_packs(
    prompt_lengths: Sequence[int], completion_lengths: Sequence[Sequence[int]], token_budget: int
) -> list[dict[int, list[int]]]:
    """Divide the samples into packed rows of at most ``token_budget`` tokens, keeping groups together where they fit.

    A pack is the samples of each of its groups. Samples are numbered group after group. A group that exceeds the budget
    is split, and its prompt computed once in each part.
    """
    packs: list[dict[int, list[int]]] = [{}]
    used = first = 0
    for group, (prompt, lengths) in enumerate(zip(prompt_lengths, completion_lengths, strict=True)):
        costs = [max(length - 1, 0) for length in lengths]
        total = prompt + sum(costs)
        if used + total > token_budget and (total <= token_budget or used + prompt > token_budget):
            packs.append({})
            used = 0
        for sample, cost in enumerate(costs, start=first):
            if prompt + cost > token_budget:
                raise InputError(
                    f"sample {sample} takes {prompt + cost} tokens with its prompt, more than token_budget "
                    f"{token_budget}; raise token_budget"
                )
            added = cost if group in packs[-1] else prompt + cost
            if used + added > token_budget:
                packs.append({})
                used, added = 0, prompt + cost
            used += added
            packs[-1].setdefault(group, []).append(sample)
        first += len(lengths)
    return [pack for pack in packs if pack]


def default_token_budget(handle: ModelHandle) -> int:
    """4,096 tokens on a CPU; on a GPU what a third of its memory holds, at most 65,536.

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
    handle: ModelHandle, prompts: Sequence[Ids], completions: Sequence[Sequence[Ids]], token_budget: int
) -> list[list[int]]:
    """Which samples are computed together with this budget, pack by pack."""
    lengths = [[len(ids) for ids in members] for members in completions]
    groups = _as_groups(handle, [len(prompt) for prompt in prompts], lengths)
    return [[sample for members in pack.values() for sample in members] for pack in plan_packs(*groups, token_budget)]


def split_into_packs(
    handle: ModelHandle,
    prompts: Sequence[Ids],
    completions: Sequence[Sequence[Ids]],
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
    if any(isinstance(ids, TokenSequence) for members in completions for ids in members):
        yield from _split_conversations(handle, prompts, completions, kept, token_budget)
        return
    prompt_ids, completion_ids = _as_groups(handle, *_checked(handle, prompts, completions))
    prompt_lengths, lengths = [len(ids) for ids in prompt_ids], lengths_of(completion_ids)
    if token_budget is None:
        longest = max(prompt + max(members) for prompt, members in zip(prompt_lengths, lengths, strict=True))
        token_budget = max(default_token_budget(handle), longest)
    flat = [ids for members in completion_ids for ids in members]
    ends = [0, *accumulate(len(ids) for ids in flat)]
    if kept is not None and len(kept) != ends[-1]:
        raise InputError(f"{len(kept)} kept sets were given for {ends[-1]} completion tokens")
    plan = plan_packs(prompt_lengths, lengths, token_budget)
    more = 0 if handle.sharded is None else handle.sharded.most(len(plan)) - len(plan)
    for pack in plan:
        samples = [sample for members in pack.values() for sample in members]
        sets = None
        if kept is not None:
            tokens = [torch.arange(ends[sample], ends[sample + 1]) for sample in samples]
            sets = kept.select(torch.cat(tokens)).to(handle.device)
        chosen = [[flat[sample] for sample in members] for members in pack.values()]
        yield PackInputs(torch.tensor(samples), [prompt_ids[group] for group in pack], chosen, sets)
    yield from [_without_samples()] * more


def _split_conversations(
    handle: ModelHandle,
    prompts: Sequence[Ids],
    sequences: Sequence[Sequence[Ids]],
    kept: KeptSets | None,
    token_budget: int | None,
) -> Iterator[PackInputs]:
    """`split_into_packs` for conversations: what members of a group begin with in common counts once."""
    prompt_ids, groups = _as_groups(handle, *_checked_conversations(handle, prompts, sequences))
    contexts = [sort_contexts(members) for members in groups]
    if token_budget is None:
        longest = max(len(ids) + max(order.lengths) for ids, order in zip(prompt_ids, contexts, strict=True))
        token_budget = max(default_token_budget(handle), longest)
    flat = [sequence for members in groups for sequence in members]
    ends = [0, *accumulate(int(sequence.sampled.sum()) for sequence in flat)]
    if kept is not None and len(kept) != ends[-1]:
        raise InputError(f"{len(kept)} kept sets were given for {ends[-1]} sampled tokens")
    starts = [0, *accumulate(len(members) for members in groups)]
    plan = plan_tree_packs([len(ids) for ids in prompt_ids], contexts, token_budget)
    for pack in plan:
        samples = [starts[group] + member for group, members in pack.items() for member in members]
        chosen = [[groups[group][member] for member in members] for group, members in pack.items()]
        sets = None
        if kept is not None:
            tokens = [torch.arange(ends[sample], ends[sample + 1]) for sample in samples]
            sets = kept.select(torch.cat(tokens)).to(handle.device)
        completions = [[sequence.completion for sequence in members] for members in chosen]
        yield PackInputs(torch.tensor(samples), [prompt_ids[group] for group in pack], completions, sets, chosen)
    yield from [_without_samples()] * (0 if handle.sharded is None else handle.sharded.most(len(plan)) - len(plan))


def _checked_conversations(
    handle: ModelHandle, prompts: Sequence[Ids], sequences: Sequence[Sequence[Ids]]
) -> tuple[list[Tensor], list[list[TokenSequence]]]:
    prompt_ids, _ = _checked(handle, prompts, [[_all_ids(ids) for ids in members] for members in sequences])
    conversations = [
        [
            ids if isinstance(ids, TokenSequence) else TokenSequence(torch.as_tensor(ids), torch.ones(len(ids)).bool())
            for ids in members
        ]
        for members in sequences
    ]
    return prompt_ids, conversations


def _all_ids(ids: Ids) -> Ids:
    return ids.ids if isinstance(ids, TokenSequence) else ids


def _without_samples() -> PackInputs:
    token = torch.zeros(1, dtype=torch.long)
    return PackInputs(token[:0], [token], [[token]], None)


def _as_groups(
    handle: ModelHandle, prompts: list[Any], completions: list[list[Any]]
) -> tuple[list[Any], list[list[Any]]]:
    """The groups that share a prompt. On the plain path every sample is a group of its own."""
    if not handle.fallback_reason:
        return prompts, completions
    repeated = [prompt for prompt, members in zip(prompts, completions, strict=True) for _ in members]
    return repeated, [[completion] for members in completions for completion in members]


def lengths_of(completions: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    return [[ids.shape[0] for ids in members] for members in completions]


def _checked(
    handle: ModelHandle, prompts: Sequence[Ids], completions: Sequence[Sequence[Ids]]
) -> tuple[list[Tensor], list[list[Tensor]]]:
    if len(prompts) != len(completions) or not len(prompts):
        raise InputError(
            f"{len(prompts)} prompts but completions for {len(completions)}; give each prompt its list of completions"
        )
    for number, members in enumerate(completions):
        if not len(members):
            raise InputError(f"prompt {number} has no completion; leave it out")
    prompt_ids = [check_ids(ids, handle, f"prompt {number}") for number, ids in enumerate(prompts)]
    if _are_valid_tensors([ids for members in completions for ids in members], handle):
        completion_ids: list[list[Tensor]] = [list(members) for members in completions]  # type: ignore[arg-type]
    else:
        completion_ids = [
            [check_ids(ids, handle, f"completion {i} of prompt {number}") for i, ids in enumerate(members)]
            for number, members in enumerate(completions)
        ]
    for number, (prompt, lengths) in enumerate(zip(prompt_ids, lengths_of(completion_ids), strict=True)):
        longest = len(prompt) + max(lengths)
        if handle.context_length is not None and longest > handle.context_length:
            raise InputError(
                f"prompt {number} and its longest completion have {longest} tokens; the model's context length is "
                f"{handle.context_length}"
            )
    return prompt_ids, completion_ids


def _are_valid_tensors(completions: Sequence[Ids], handle: ModelHandle) -> bool:
    """Whether `check_ids` would return all of them unchanged, tested at once: thousands of short calls are slow."""
    for ids in completions:
        if not isinstance(ids, Tensor) or ids.dtype != torch.long or ids.is_cuda or ids.dim() != 1 or not ids.shape[0]:
            return False
    low, high = torch.cat(list(completions)).aminmax()  # type: ignore[arg-type]
    return int(low) >= 0 and int(high) < handle.vocabulary


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
