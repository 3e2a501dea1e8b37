"""Log-probs of completions, each prompt computed once per group.

A group's prompt and its completions stand in one packed row (`groupwise.model.attention`); only the positions that
predict a completion's token reach the head (`core.selective_logps`). A completion's last token predicts nothing and
is not computed at all. The result, and its gradient, are those of the plain computation, which is here too: the
literal `padded_logps`, for models that cannot share their prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from groupwise.core.filters import KeptSets, keep_sampling_mask
from groupwise.core.logps import logps_from_logits, selective_logps
from groupwise.errors import InputError
from groupwise.model.attention import PackedLayout, to_device
from groupwise.model.handle import ModelHandle, prepare

CPU_TOKENS, MOST_TOKENS = 4096, 65536
SHARE_OF_MEMORY = 0.35  # of a GPU, for what the backward pass needs of one pack

Ids = Sequence[int] | Tensor
_P = TypeVar("_P")
_C = TypeVar("_C")


class TokenLogps(NamedTuple):
    """For ``b`` samples and their ``T`` longest: zero where the mask is false."""

    logps: Tensor  # (b, T)
    mask: Tensor  # (b, T), bool
    entropy: Tensor | None  # (b, T)
    states: Tensor | None = None  # (tokens, D) or (tokens, V), see `each_states`


@dataclass(frozen=True)
class Pack:
    """Some samples, with the prompts of their groups, that are computed together."""

    samples: Tensor  # (b,) which samples of the batch
    groups: tuple[int, ...]  # which prompts
    per_group: tuple[int, ...]  # how many samples of each
    tokens: int  # in the packed row


def plan_packs(
    prompt_lengths: Sequence[int], completion_lengths: Sequence[Sequence[int]], token_budget: int | None = None
) -> list[Pack]:
    """Divide the samples among packed rows of at most ``token_budget`` tokens, groups kept together where they fit.

    Samples are numbered through, group after group. A group that is longer than the budget is divided, and its prompt
    computed once in each part. Without a budget everything is one row.
    """
    packs: list[Pack] = []
    open_: dict[int, list[int]] = {}
    used = first = 0

    def close() -> None:
        nonlocal used
        if open_:
            samples = torch.tensor([sample for members in open_.values() for sample in members])
            sizes = tuple(len(members) for members in open_.values())
            packs.append(Pack(samples, tuple(open_), sizes, used))
        open_.clear()
        used = 0

    for group, (prompt, lengths) in enumerate(zip(prompt_lengths, completion_lengths, strict=True)):
        costs = [max(length - 1, 0) for length in lengths]
        whole = prompt + sum(costs)
        if (
            token_budget is not None
            and used + whole > token_budget
            and (whole <= token_budget or used + prompt > token_budget)
        ):
            close()
        for number, cost in enumerate(costs):
            if token_budget is not None:
                if prompt + cost > token_budget:
                    raise InputError(
                        f"sample {first + number} takes {prompt + cost} tokens with its prompt, more than token_budget "
                        f"{token_budget}; raise token_budget"
                    )
                if used + cost + (0 if group in open_ else prompt) > token_budget:
                    close()
            used += cost + (0 if group in open_ else prompt)
            open_.setdefault(group, []).append(first + number)
        first += len(lengths)
    close()
    return packs


def default_token_budget(handle: ModelHandle) -> int:
    """4,096 on a CPU; on a GPU what a third of its memory holds, at most 65,536.

    It depends on the GPU and the model alone, not on what happens to be free: packs decide in which order gradients
    are added, and a run must be repeatable. A layer keeps about seven hidden widths and three of the MLP's for a token.
    """
    if handle.device.type != "cuda":
        return CPU_TOKENS
    each = activation_bytes(handle)
    memory = torch.cuda.get_device_properties(handle.device).total_memory
    return max(1024, min(MOST_TOKENS, int(memory * SHARE_OF_MEMORY / each) // 1024 * 1024))


def activation_bytes(handle: ModelHandle, *, checkpointing: bool = False) -> int:
    """About what the backward pass keeps of one token; with gradient checkpointing the inputs of layers alone."""
    config = handle.model.config.get_text_config()
    mlp = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    widths = config.hidden_size if checkpointing else 7 * config.hidden_size + 3 * mlp
    return int(config.num_hidden_layers * widths * handle.dtype.itemsize)


def completion_logps(
    model: Any,
    prompts: Sequence[Ids],
    completions: Sequence[Sequence[Ids]],
    *,
    temperature: float = 1.0,
    kept: KeptSets | None = None,
    with_entropy: bool = False,
    token_budget: int | None = None,
) -> TokenLogps:
    """Log-probs ``(B, T)`` of all completions, in their order; ``completions[i]`` belong to ``prompts[i]``.

    ``model`` is best what `prepare` made of it, once: a model as it is is looked at anew in every call.
    Call it under torch.no_grad() for old log-probs or a reference's. With gradients the memory of all packs is held
    until the backward pass; a training loop goes through `each_pack` instead.
    """
    parts = list(
        each_pack(
            model,
            prompts,
            completions,
            temperature=temperature,
            kept=kept,
            with_entropy=with_entropy,
            token_budget=token_budget,
        )
    )
    order = torch.cat([samples for samples, _ in parts]).argsort()
    width = max(found.logps.shape[1] for _, found in parts)

    def joined(pieces: list[Tensor]) -> Tensor:
        wide = [torch.nn.functional.pad(piece, (0, width - piece.shape[1])) for piece in pieces]
        return torch.cat(wide)[order.to(wide[0].device)]

    return TokenLogps(
        joined([found.logps for _, found in parts]),
        joined([found.mask for _, found in parts]),
        joined([found.entropy for _, found in parts if found.entropy is not None]) if with_entropy else None,
    )


def each_pack(
    model: Any,
    prompts: Sequence[Ids],
    completions: Sequence[Sequence[Ids]],
    *,
    temperature: float = 1.0,
    kept: KeptSets | None = None,
    with_entropy: bool = False,
    with_states: bool = False,
    token_budget: int | None = None,
) -> Iterator[tuple[Tensor, TokenLogps]]:
    """One pack after another: which samples ``(b,)``, and their log-probs ``(b, T)``; on request also their states.

    Take the loss of a part and its backward pass before the next part is asked for: memory is then that of one pack,
    at most ``token_budget`` tokens (by default `default_token_budget`, or the longest sample).
    ``kept`` holds a set for every token of every completion, in their order.
    """
    handle = prepare(model)
    run = padded_logps if handle.fallback_reason else _packed_logps
    for part in _cut(handle, prompts, completions, kept, token_budget):
        found = run(
            handle,
            part.prompts,
            part.completions,
            temperature=temperature,
            kept=part.kept,
            with_entropy=with_entropy,
            with_states=with_states,
        )
        yield part.samples, found


def each_states(
    model: Any, prompts: Sequence[Ids], completions: Sequence[Sequence[Ids]], *, token_budget: int | None = None
) -> Iterator[Tensor]:
    """For each pack, cut as `each_pack` cuts them, what predicts its tokens, one sample after another: the hidden
    states that the head is applied to ``(tokens, D)``, or on the plain path the logits ``(tokens, V)``."""
    handle = prepare(model)
    run = _plain_logits if handle.fallback_reason else _packed_states
    for part in _cut(handle, prompts, completions, None, token_budget):
        yield run(handle, part.prompts, part.completions)


def samples_together(
    handle: ModelHandle, prompts: Sequence[Ids], completions: Sequence[Sequence[Ids]], token_budget: int
) -> list[list[int]]:
    """Which samples `each_pack` computes together, with this budget."""
    lengths = [[len(ids) for ids in members] for members in completions]
    packed = _as_packed(handle, [len(prompt) for prompt in prompts], lengths)
    return [pack.samples.tolist() for pack in plan_packs(*packed, token_budget)]


def _as_packed(handle: ModelHandle, prompts: list[_P], completions: list[list[_C]]) -> tuple[list[_P], list[list[_C]]]:
    """What shares a prompt: on the plain path nothing does, and every sample counts with a prompt of its own."""
    if not handle.fallback_reason:
        return prompts, completions
    each = [prompt for prompt, members in zip(prompts, completions, strict=True) for _ in members]
    return each, [[own] for members in completions for own in members]


class _Part(NamedTuple):
    """What a pack computes."""

    samples: Tensor  # (b,)
    prompts: list[Tensor]
    completions: list[list[Tensor]]  # by prompt
    kept: KeptSets | None


def _cut(
    handle: ModelHandle,
    prompts: Sequence[Ids],
    completions: Sequence[Sequence[Ids]],
    kept: KeptSets | None,
    token_budget: int | None,
) -> Iterator[_Part]:
    """The samples, checked, pack by pack."""
    prompt_ids, completion_ids = _as_packed(handle, *_tensors(handle, prompts, completions))
    prompt_lengths, lengths = [len(ids) for ids in prompt_ids], _lengths(completion_ids)
    if token_budget is None:
        longest = max(prompt + max(members) for prompt, members in zip(prompt_lengths, lengths, strict=True))
        token_budget = max(default_token_budget(handle), longest)
    flat = [ids for members in completion_ids for ids in members]
    if kept is not None:
        ends = [0, *accumulate(length for members in lengths for length in members)]
        if len(kept) != ends[-1]:
            raise InputError(f"{len(kept)} kept sets were given for {ends[-1]} completion tokens")
    for pack in plan_packs(prompt_lengths, lengths, token_budget):
        members = iter([flat[i] for i in pack.samples.tolist()])
        chosen = [[next(members) for _ in range(size)] for size in pack.per_group]
        sets = None
        if kept is not None:
            tokens = [torch.arange(ends[i], ends[i + 1]) for i in pack.samples.tolist()]
            sets = kept.select(torch.cat(tokens)).to(handle.device)
        yield _Part(pack.samples, [prompt_ids[group] for group in pack.groups], chosen, sets)


def _packed_logps(
    handle: ModelHandle,
    prompts: Sequence[Tensor],
    completions: Sequence[Sequence[Tensor]],
    *,
    temperature: float,
    kept: KeptSets | None,
    with_entropy: bool,
    with_states: bool,
) -> TokenLogps:
    head = handle.head
    if head is None:
        raise InputError(f"this model's prompts cannot be shared: {handle.fallback_reason}")
    states = _packed_states(handle, prompts, completions)
    found = selective_logps(
        states,
        head.weight,
        to_device(torch.cat([ids for members in completions for ids in members]), handle.device),
        bias=head.bias,
        softcap=head.softcap,
        scale=head.scale,
        temperature=temperature,
        kept=kept,
        with_entropy=with_entropy,
    )
    lengths = np.array([length for members in _lengths(completions) for length in members])
    return _token_logps(found, lengths, with_entropy, states if with_states else None)


def _packed_states(handle: ModelHandle, prompts: Sequence[Tensor], completions: Sequence[Sequence[Tensor]]) -> Tensor:
    device = handle.device
    prompt_lengths, by_prompt = [len(ids) for ids in prompts], _lengths(completions)
    layout = PackedLayout(prompt_lengths, [[length - 1 for length in members] for members in by_prompt], device)
    lengths = np.array([length for members in by_prompt for length in members])
    chosen = torch.cat([ids for members in completions for ids in members])
    computed = torch.ones(len(chosen), dtype=torch.bool)
    computed[torch.from_numpy(lengths.cumsum() - 1)] = False  # the last of each predicts nothing
    row = to_device(torch.cat([*prompts, chosen[computed]]), device)
    hidden = handle.hidden(row[None], layout.positions[None], layout)[0]
    sources = _sources(np.array(prompt_lengths), np.array([len(members) for members in by_prompt]), lengths)
    return _at(hidden, to_device(sources, device))


def _at(hidden: Tensor, positions: Tensor) -> Tensor:
    """The hidden states at ``positions``, some of which occur more than once, by a way whose gradient is repeatable.

    Gradients of one position are added in the order of the list: on a CPU by index_select, whose backward pass goes
    through it from front to back (indexing adds in parallel, in any order); on a GPU by indexing, which sorts first.
    """
    return hidden[positions] if hidden.is_cuda else hidden.index_select(0, positions)


def _sources(prompt_lengths: np.ndarray, sizes: np.ndarray, lengths: np.ndarray) -> Tensor:
    """Which position of the packed row predicts each completion token; ``sizes`` are the groups'.

    A completion's first token is predicted by its prompt's last, every other by the one before it.
    """
    prompt_ends = prompt_lengths.cumsum()
    ends, row_ends = lengths.cumsum(), (lengths - 1).cumsum()
    within = np.arange(ends[-1]) - (ends - lengths).repeat(lengths)
    own = (prompt_ends[-1] + row_ends - lengths).repeat(lengths) + within
    return torch.from_numpy(np.where(within == 0, (prompt_ends.repeat(sizes) - 1).repeat(lengths), own))


def padded_logps(
    handle: ModelHandle,
    prompts: Sequence[Tensor],
    completions: Sequence[Sequence[Tensor]],
    *,
    temperature: float = 1.0,
    kept: KeptSets | None = None,
    with_entropy: bool = False,
    with_states: bool = False,
) -> TokenLogps:
    """The same the plain way: each sample is a row with its prompt, padded at its end, through the model's own code.

    Causal models never look ahead, so what stands in the padding does not matter.
    """
    logits = _plain_logits(handle, prompts, completions)
    flat = [ids for members in completions for ids in members]
    found = _logps_of_logits(logits, torch.cat(flat).to(logits.device), temperature, kept, with_entropy)
    lengths = np.array([len(ids) for ids in flat])
    return _token_logps(found, lengths, with_entropy, logits if with_states else None)


def _plain_logits(handle: ModelHandle, prompts: Sequence[Tensor], completions: Sequence[Sequence[Tensor]]) -> Tensor:
    device = handle.device
    pairs = [(prompt, ids) for prompt, members in zip(prompts, completions, strict=True) for ids in members]
    width = max(len(prompt) + len(ids) for prompt, ids in pairs)
    rows = torch.zeros(len(pairs), width, dtype=torch.long)
    seen = torch.zeros_like(rows)
    for row, (prompt, ids) in enumerate(pairs):
        rows[row, : len(prompt) + len(ids)] = torch.cat([prompt, ids])
        seen[row, : len(prompt) + len(ids)] = 1
    logits = handle.model(input_ids=rows.to(device), attention_mask=seen.to(device), use_cache=False).logits
    predicting = [logits[row, len(prompt) - 1 : len(prompt) + len(ids) - 1] for row, (prompt, ids) in enumerate(pairs)]
    return torch.cat(predicting)


def _logps_of_logits(logits: Tensor, ids: Tensor, temperature: float, kept: KeptSets | None, with_entropy: bool) -> Any:
    if kept is None:
        return logps_from_logits(logits, ids, temperature=temperature, with_entropy=with_entropy)
    logps = keep_sampling_mask(logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, kept)
    chosen = logps.gather(-1, ids[:, None]).squeeze(-1)
    if not with_entropy:
        return chosen
    prob = logps.exp()
    return chosen, -(prob * torch.where(prob > 0, logps, 0.0)).sum(-1)


def _lengths(completions: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    return [[ids.shape[0] for ids in members] for members in completions]


def _token_logps(found: Any, lengths: np.ndarray, with_entropy: bool, states: Tensor | None) -> TokenLogps:
    logps, entropy = found if with_entropy else (found, None)
    mask = torch.arange(int(lengths.max())) < torch.from_numpy(lengths)[:, None]
    mask = mask.to(logps.device)
    return TokenLogps(in_rows(logps, mask), mask, None if entropy is None else in_rows(entropy, mask), states)


def in_rows(flat: Tensor, mask: Tensor) -> Tensor:
    """Numbers of all tokens, one sample after another, as rows ``(n, T)``; zero where the mask is false."""
    return flat.new_zeros(mask.shape).masked_scatter(mask, flat)


def _tensors(
    handle: ModelHandle, prompts: Sequence[Ids], completions: Sequence[Sequence[Ids]]
) -> tuple[list[Tensor], list[list[Tensor]]]:
    if len(prompts) != len(completions) or not len(prompts):
        raise InputError(
            f"{len(prompts)} prompts but completions for {len(completions)}; give each prompt its list of completions"
        )
    for number, members in enumerate(completions):
        if not len(members):
            raise InputError(f"prompt {number} has no completion; leave it out")
    checked = [check_ids(ids, handle, f"prompt {number}") for number, ids in enumerate(prompts)]
    if _surely_ids([ids for members in completions for ids in members], handle):
        answers: list[list[Tensor]] = [list(members) for members in completions]  # type: ignore[arg-type]
    else:
        answers = [
            [check_ids(ids, handle, f"completion {i} of prompt {number}") for i, ids in enumerate(members)]
            for number, members in enumerate(completions)
        ]
    for number, (prompt, lengths) in enumerate(zip(checked, _lengths(answers), strict=True)):
        longest = len(prompt) + max(lengths)
        if handle.window is not None and longest > handle.window:
            raise InputError(
                f"prompt {number} and its longest completion have {longest} tokens; the model's window is "
                f"{handle.window}"
            )
    return checked, answers


def _surely_ids(completions: Sequence[Ids], handle: ModelHandle) -> bool:
    """Whether all are what `check_ids` makes of them, asked of all at once: thousands of short ones take long."""
    for ids in completions:
        if not isinstance(ids, Tensor) or ids.dtype != torch.long or ids.is_cuda or ids.dim() != 1 or not ids.shape[0]:
            return False
    low, high = torch.cat(list(completions)).aminmax()  # type: ignore[arg-type]
    return int(low) >= 0 and int(high) < handle.vocabulary


def check_ids(ids: Ids, handle: ModelHandle, what: str) -> Tensor:
    """Token ids as a tensor on the CPU, once they are whole numbers, at least one, and in the vocabulary."""
    try:
        tensor = torch.as_tensor(ids).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{what} is no list of token ids: {error}") from error
    if tensor.dim() != 1 or (len(tensor) and (tensor.is_floating_point() or tensor.dtype == torch.bool)):
        raise InputError(f"{what} must be a list of whole numbers, got {tensor.dtype} of shape {tuple(tensor.shape)}")
    if not len(tensor):
        raise InputError(f"{what} is empty; give it at least one token (the model's BOS, where there is nothing else)")
    low, high = int(tensor.min()), int(tensor.max())
    if low < 0 or high >= handle.vocabulary:
        raise InputError(
            f"{what} holds the id {low if low < 0 else high}, outside the vocabulary of {handle.vocabulary}"
        )
    if handle.window is not None and len(tensor) > handle.window:
        raise InputError(f"{what} has {len(tensor)} tokens; the model's window is {handle.window}")
    return tensor.long()
