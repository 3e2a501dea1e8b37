"""Summed log-probs of preference pairs, and a disk cache of the reference's.

The reference's log-probs are the same in every epoch and run, so they are computed once and kept on disk, in blocks of
consecutive pairs:

    <folder>/<key of the reference>/<key of the block>.safetensors

The keys are hashes of everything that a block's numbers depend on, down to the last bit. A run that finds a block and
one that computes it continue with the same bits, and a killed run loses at most one block.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from groupwise.distributed.fsdp import full
from groupwise.distributed.ranks import Ranks
from groupwise.errors import CheckpointError, InputError
from groupwise.model.handle import ModelHandle, eval_mode
from groupwise.model.logprobs import completion_logps
from groupwise.model.weights import cache_folder
from groupwise.rundir.files import write_safetensors
from groupwise.text import Say, error_reason
from groupwise.training.errors import SMALLEST_BUDGET, halve_budget, retry_with_less_memory
from groupwise.training.update.reference import Reference

FORMAT = 1  # of the files and keys; a change makes existing files unused
BLOCK = 256  # pairs in a file
KEY_LENGTH = 32  # hexadecimal digits
WITHOUT_EFFECT = {"_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"}  # in a model's config


class TokenPair(NamedTuple):
    """Two completions of one prompt, the better one first."""

    prompt: tuple[int, ...]
    chosen: Tensor  # (t,) int64, on the CPU
    rejected: Tensor

    @property
    def longest(self) -> int:
        """Tokens of the prompt and the longer completion."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


def pair_completions(pairs: Sequence[TokenPair]) -> tuple[list[tuple[int, ...]], list[list[Tensor]]]:
    """The prompts, and the two completions of each."""
    return [pair.prompt for pair in pairs], [[pair.chosen, pair.rejected] for pair in pairs]


def pair_lengths(pairs: Sequence[TokenPair]) -> Tensor:
    """Tokens of the completions, ``(n, 2)``, chosen first."""
    return torch.tensor([[len(pair.chosen), len(pair.rejected)] for pair in pairs], dtype=torch.long).view(-1, 2)


def pair_logps(
    handle: ModelHandle,
    pairs: Sequence[TokenPair],
    *,
    token_budget: int,
    ranks: Ranks | None = None,
    folder: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    say: Say = lambda text: None,
) -> Tensor:
    """Log-probs ``(n, 2)`` of the chosen and the rejected completions, summed over tokens, under the current model.

    They are at temperature 1, without gradient, on the CPU, in float64. A forward pass holds at most ``token_budget``
    tokens, or the longest completion with its prompt; if memory runs out, the budget is halved for the blocks to come.
    ranks: divide the blocks of pairs among them, or the pairs of each block if the weights are sharded.
    folder: a block that has a file here is read, the others are written. progress: called after each block.
    say: told if memory runs out or a file cannot be written; neither ends the run.
    """
    ranks = ranks or Ranks()
    block_size = BLOCK if folder is not None else min(BLOCK, max(1, math.ceil(len(pairs) / ranks.size)))
    blocks = [pairs[first : first + block_size] for first in range(0, len(pairs), block_size)]
    say_once = cache(say)  # that the folder cannot be written is said for the first block

    def shrink() -> None:
        nonlocal token_budget
        torch.cuda.empty_cache()
        token_budget = halve_budget(token_budget)
        say(f"memory ran out: the log-probs of pairs are computed with a token budget of {token_budget:,}")

    def fit(number: int) -> Tensor:
        block, first = blocks[number], number * block_size
        longest = max(pair.longest for pair in block)
        return retry_with_less_memory(
            lambda: _load_or_compute(handle, block, first, max(token_budget, longest), folder, say_once, ranks),
            can_shrink=lambda: token_budget > max(SMALLEST_BUDGET, longest),
            shrink=shrink,
            too_large=lambda: (
                f"memory ran out with a single completion of a pair, {longest} tokens with its prompt; use a smaller "
                "model, or leave out long pairs"
            ),
        )

    def work(numbers: list[int]) -> Iterator[Tensor]:
        for done, number in enumerate(numbers, start=1):
            yield fit(number)
            progress(min(round(done / len(numbers) * len(blocks)) * block_size, len(pairs)), len(pairs))

    if handle.sharded is not None:  # then all ranks compute each block
        return torch.cat([torch.zeros(0, 2, dtype=torch.float64), *work(list(range(len(blocks))))])
    costs = [sum(pair.longest for pair in block) for block in blocks]
    results = ranks.divide("computing log-probs of pairs", costs, work)
    return torch.cat([torch.zeros(0, 2, dtype=torch.float64), *results])


def reference_logps(
    handle: ModelHandle,
    reference: Reference,
    pairs: Sequence[TokenPair],
    *,
    folder: Path | None = None,
    dropout: bool = False,
    **options: Any,
) -> Tensor:
    """`pair_logps` of the reference, with its ``options``; each reference has its folder.

    folder: by default ``reference-logps`` in the model cache.
    dropout: whether the model trains with dropout, which is switched off for the reference.
    """
    root = cache_folder() / "reference-logps" if folder is None else Path(folder)
    with reference.in_place(), eval_mode(handle.model) if dropout else nullcontext():
        return pair_logps(handle, pairs, folder=root / _reference_key(handle), **options)


def _load_or_compute(
    handle: ModelHandle,
    block: Sequence[TokenPair],
    first: int,
    token_budget: int,
    folder: Path | None,
    say: Say,
    ranks: Ranks,
) -> Tensor:
    """A block's log-probs ``(n, 2)``, all finite; ``first`` is the number of its first pair."""
    path = None if folder is None else folder / f"{_block_key(block, token_budget)}.safetensors"
    saved = None if path is None else _read_block(path, len(block))
    if handle.sharded is not None and not all(ranks.gather(saved is not None)):
        saved = None  # a rank that computes it needs the others
    if saved is not None:
        return saved

    def compute(pairs: Sequence[TokenPair]) -> Tensor:
        with torch.no_grad():
            tokens = completion_logps(handle, *pair_completions(pairs), token_budget=token_budget).logps
        # In float64: a float32 sum over a long completion would lose the effect of a small update.
        return tokens.cpu().double().sum(1).view(-1, 2)

    if handle.sharded is None:
        logps = compute(block)
    else:
        costs = [pair.longest for pair in block]
        work = lambda numbers: compute([block[number] for number in numbers]).unbind()  # noqa: E731
        logps = torch.stack(ranks.divide("computing log-probs of pairs", costs, work, exchanges=True))
    for number, (chosen, rejected) in enumerate(logps.tolist(), start=first):
        if not (math.isfinite(chosen) and math.isfinite(rejected)):
            raise InputError(
                f"the log-probs of pair {number} (counted from 0) are {chosen:g} for the chosen and {rejected:g} for "
                "the rejected completion; look for NaN in the model's weights, or for float16, whose range is small "
                "(use bfloat16 or float32)"
            )
    if path is not None:
        _write_block(path, logps, say)
    return logps


def _read_block(path: Path, pairs: int) -> Tensor | None:
    """The log-probs of a block; None if its file does not exist or is damaged."""
    try:
        # Not memory-mapped: another process may truncate the file while it is read.
        tensors = load(path.read_bytes())
        logps, digest = tensors["logps"], tensors["digest"]
    except (OSError, SafetensorError, LookupError, ValueError, RuntimeError):
        return None
    if logps.shape != (pairs, 2) or logps.dtype != torch.float64 or not bool(logps.isfinite().all()):
        return None
    return logps if torch.equal(digest, _digest(path.stem, logps)) else None


def _write_block(path: Path, logps: Tensor, say: Say) -> None:
    try:
        write_safetensors(path, {"logps": logps, "digest": _digest(path.stem, logps)})
    except CheckpointError as error:
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        say(
            f"the reference's log-probs cannot be written to {path.parent}, so the next run will compute them again: "
            f"{error_reason(cause)}"
        )


def _digest(name: str, logps: Tensor) -> Tensor:
    digest = hashlib.sha256(name.encode())
    digest.update(_memory(logps))
    return torch.tensor(list(digest.digest()), dtype=torch.uint8)


def _reference_key(handle: ModelHandle) -> str:
    """A hash of everything in the current model that log-probs depend on.

    Buffers that are not saved follow from the configuration, except their dtype; a forward pass may change some.
    """
    model = handle.model
    saved = model.state_dict().keys()
    buffers = list(model.named_buffers())
    facts = {
        "format": FORMAT,
        "config": _with_effect(json.loads(model.config.to_json_string(use_diff=False))),
        "dtype": str(handle.dtype),
        "computed": _computed_by(handle),
        "adapters": _adapters(model),
        "derived": [[name, str(buffer.dtype)] for name, buffer in buffers if name not in saved],
    }
    digest = hashlib.sha256(_json(facts))
    for name, tensor in [*model.named_parameters(), *(item for item in buffers if item[0] in saved)]:
        values = tensor if handle.sharded is None else full(tensor).to(handle.dtype)
        digest.update(_json([name, list(values.shape), str(values.dtype)]))
        digest.update(_memory(values))
    return digest.hexdigest()[:KEY_LENGTH]


def _computed_by(handle: ModelHandle) -> dict[str, Any]:
    """The software and the device, which determine the last bits."""
    device = handle.device
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "float32": backend.matmul.fp32_precision,
        "compiled": handle.compiled is not None,
        "plain": handle.model.config._attn_implementation if handle.fallback_reason else None,
        **({"float32_head": True} if handle.head is not None and handle.head.float32 else {}),
    }


def _adapters(model: Any) -> list[Any]:
    """The settings of adapters: which are active or merged, and their scaling, alpha / rank."""
    return [
        [
            name,
            type(module).__name__,
            bool(module.disable_adapters),
            list(module.active_adapters),
            list(module.merged_adapters),
            dict(getattr(module, "scaling", {})),
        ]
        for name, module in model.named_modules()
        if hasattr(module, "merged_adapters")
    ]


def _with_effect(config: Any) -> Any:
    """A configuration without the keys that do not affect log-probs, nested ones included."""
    if not isinstance(config, dict):
        return config
    return {name: _with_effect(value) for name, value in config.items() if name not in WITHOUT_EFFECT}


def _block_key(block: Sequence[TokenPair], token_budget: int) -> str:
    """A hash of the pairs' ids, and of the budget, which determines what is packed together."""
    lengths = [[len(ids) for ids in pair] for pair in block]
    digest = hashlib.sha256(_json([token_budget, lengths]))
    digest.update(_memory(torch.cat([torch.as_tensor(ids) for pair in block for ids in pair])))
    return digest.hexdigest()[:KEY_LENGTH]


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _memory(tensor: Tensor) -> memoryview:
    """A tensor's bytes as they are in memory; copied only if the tensor is on another device."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
