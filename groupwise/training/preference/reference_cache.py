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
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from groupwise.errors import CheckpointError, InputError
from groupwise.model.handle import ModelHandle, eval_mode
from groupwise.model.logprobs import completion_logps
from groupwise.model.packing import check_ids
from groupwise.model.weights import cache_folder
from groupwise.rundir.files import write_safetensors
from groupwise.text import Say, error_reason
from groupwise.training.errors import SMALLEST_BUDGET, halve_budget, retry_with_less_memory
from groupwise.training.update.reference import Reference

FORMAT = 1  # of the files and keys; a change makes existing files unused
BLOCK = 256  # pairs in a file
KEY_LENGTH = 32  # hexadecimal digits
WITHOUT_EFFECT = {"_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"}  # in a model's config

PairProgress = Callable[[int, int], None]
"""Called with the number of pairs done and their total."""


class TokenPair(NamedTuple):
    """Two completions of one prompt, the better one first."""

    prompt: tuple[int, ...]
    chosen: Tensor  # (t,) int64, on the CPU
    rejected: Tensor

    @property
    def longest(self) -> int:
        """Tokens of the prompt and the longer completion."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


def pair_lengths(pairs: Sequence[TokenPair]) -> Tensor:
    """Tokens of the completions, ``(n, 2)``, chosen first."""
    return torch.tensor([[len(pair.chosen), len(pair.rejected)] for pair in pairs], dtype=torch.long).view(-1, 2)


def pair_logps(handle: ModelHandle, pairs: Sequence[TokenPair], *, token_budget: int) -> Tensor:
    """Log-probs ``(n, 2)`` of the chosen and the rejected completions, summed over tokens, under the current model.

    They are at temperature 1, without gradient, on the CPU, in float64. A forward pass holds at most ``token_budget``
    tokens, or the longest completion with its prompt; if memory runs out, the budget is halved.
    """
    return _all_blocks(handle, _check_pairs(handle, pairs), token_budget)


def reference_logps(
    handle: ModelHandle,
    reference: Reference,
    pairs: Sequence[TokenPair],
    *,
    folder: Path | None = None,
    token_budget: int,
    progress: PairProgress = lambda done, total: None,
    say: Say = lambda text: None,
    dropout: bool = False,
) -> Tensor:
    """`pair_logps` of the reference, read from disk, or computed and written there for the next run.

    folder: by default ``reference-logps`` in the model cache.
    progress: called after each block.
    say: told if memory runs out or a file cannot be written; neither ends the run.
    dropout: whether the model trains with dropout, which is switched off for the reference.
    """
    checked = _check_pairs(handle, pairs)
    with reference.in_place(), eval_mode(handle.model) if dropout else nullcontext():
        root = cache_folder() / "reference-logps" if folder is None else Path(folder)
        files = _BlockFiles(root / _reference_key(handle), say)
        return _all_blocks(handle, checked, token_budget, files, progress, say)


class _CheckedPair(NamedTuple):
    """A pair whose ids are known to be valid."""

    prompt: Tensor
    chosen: Tensor
    rejected: Tensor

    def longest(self) -> int:
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


def _check_pairs(handle: ModelHandle, pairs: Sequence[TokenPair]) -> list[_CheckedPair]:
    """Check all pairs, so that a bad one is reported before the first is computed."""
    checked = []
    for number, pair in enumerate(pairs):
        ids = _CheckedPair(
            check_ids(pair.prompt, handle, f"the prompt of {_pair_name(number)}"),
            check_ids(pair.chosen, handle, f"the chosen completion of {_pair_name(number)}"),
            check_ids(pair.rejected, handle, f"the rejected completion of {_pair_name(number)}"),
        )
        if handle.context_length is not None and ids.longest() > handle.context_length:
            raise InputError(
                f"the prompt and the longer completion of {_pair_name(number)} have {ids.longest()} tokens; the "
                f"model's window is {handle.context_length}"
            )
        checked.append(ids)
    return checked


def _pair_name(number: int) -> str:
    return f"pair {number} (counted from 0)"


def _all_blocks(
    handle: ModelHandle,
    pairs: Sequence[_CheckedPair],
    token_budget: int,
    files: _BlockFiles | None = None,
    progress: PairProgress = lambda done, total: None,
    say: Say = lambda text: None,
) -> Tensor:
    """The log-probs of all pairs, block by block. A budget that is halved for one block stays so for the next ones."""
    blocks = [torch.zeros(0, 2, dtype=torch.float64)]
    for first in range(0, len(pairs), BLOCK):
        block = pairs[first : first + BLOCK]
        logps, token_budget = _fit_block(handle, block, first, token_budget, files, say)
        blocks.append(logps)
        progress(first + len(block), len(pairs))
    return torch.cat(blocks)


def _fit_block(
    handle: ModelHandle,
    block: Sequence[_CheckedPair],
    first: int,
    token_budget: int,
    files: _BlockFiles | None,
    say: Say,
) -> tuple[Tensor, int]:
    """A block's log-probs ``(n, 2)``, and the token budget, halved if memory ran out."""
    longest = max(pair.longest() for pair in block)

    def shrink() -> None:
        nonlocal token_budget
        if handle.device.type == "cuda":
            torch.cuda.empty_cache()
        token_budget = halve_budget(token_budget)
        say(f"memory ran out: the log-probs of pairs are computed with a token budget of {token_budget:,}")

    logps = retry_with_less_memory(
        lambda: _load_or_compute(handle, block, first, max(token_budget, longest), files),
        can_shrink=lambda: token_budget > max(SMALLEST_BUDGET, longest),
        shrink=shrink,
        too_large=lambda: (
            f"memory ran out with a single completion of a pair, {longest} tokens with its prompt; use a smaller "
            "model, or leave out long pairs"
        ),
    )
    return logps, token_budget


def _load_or_compute(
    handle: ModelHandle, block: Sequence[_CheckedPair], first: int, token_budget: int, files: _BlockFiles | None
) -> Tensor:
    """A block's log-probs ``(n, 2)``, all finite."""
    name = ""
    if files is not None:
        name = _block_key(block, token_budget)
        logps = files.read(name, len(block))
        if logps is not None:
            return logps
    prompts, completions = [pair.prompt for pair in block], [[pair.chosen, pair.rejected] for pair in block]
    with torch.no_grad():
        tokens = completion_logps(handle, prompts, completions, token_budget=token_budget).logps
    # In float64: a float32 sum over a long completion would lose the effect of a small update.
    logps = tokens.cpu().double().sum(1).view(-1, 2)
    _check_finite(logps, first)
    if files is not None:
        files.write(name, logps)
    return logps


def _check_finite(logps: Tensor, first: int) -> None:
    bad = (~logps.isfinite()).any(1).nonzero().flatten().tolist()
    if bad:
        chosen, rejected = logps[bad[0]].tolist()
        raise InputError(
            f"the log-probs of {_pair_name(first + bad[0])} are {chosen:g} for the chosen and {rejected:g} for the "
            "rejected completion; look for NaN in the model's weights, or for float16, whose range is small (use "
            "bfloat16 or float32)"
        )


class _BlockFiles:
    """The files of one reference, each with a digest, so that damaged and foreign files are recognised."""

    def __init__(self, folder: Path, say: Say) -> None:
        self.folder, self.say = folder, say
        self.warned = False

    def read(self, name: str, pairs: int) -> Tensor | None:
        """The log-probs of a block; None if its file does not exist or is damaged."""
        try:
            # Not memory-mapped: another process may truncate the file while it is read.
            tensors = load(self._path(name).read_bytes())
            logps, digest = tensors["logps"], tensors["digest"]
        except (OSError, SafetensorError, LookupError, ValueError, RuntimeError):
            return None
        if logps.shape != (pairs, 2) or logps.dtype != torch.float64 or not bool(logps.isfinite().all()):
            return None
        return logps if torch.equal(digest, _digest(name, logps)) else None

    def write(self, name: str, logps: Tensor) -> None:
        try:
            write_safetensors(self._path(name), {"logps": logps, "digest": _digest(name, logps)})
        except CheckpointError as error:
            if not self.warned:
                cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
                self.say(
                    f"the reference's log-probs cannot be written to {self.folder}, so the next run will compute them "
                    f"again: {error_reason(cause)}"
                )
            self.warned = True

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


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
        digest.update(_json([name, list(tensor.shape), str(tensor.dtype)]))
        digest.update(_memory(tensor))
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


def _block_key(block: Sequence[_CheckedPair], token_budget: int) -> str:
    """A hash of the pairs' ids, and of the budget, which determines what is packed together."""
    lengths = [[len(ids) for ids in pair] for pair in block]
    digest = hashlib.sha256(_json([token_budget, lengths]))
    digest.update(_memory(torch.cat([ids for pair in block for ids in pair])))
    return digest.hexdigest()[:KEY_LENGTH]


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _memory(tensor: Tensor) -> memoryview:
    """A tensor's bytes as they are in memory; copied only if the tensor is on another device."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
