"""Log-probs of pairs, two answers to one prompt, as a preference loss needs them: summed over an answer's tokens.

The reference's are the same in every epoch and in every run, so they are computed once and kept on the disk, in blocks
of consecutive pairs:

    <folder>/<key of the reference>/<key of the block>.safetensors

The keys are hashes of all that a block's numbers depend on, last bits included. A run that finds a block and one that
computes it go on with the same bits, and a killed run loses one block at most.
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
from groupwise.model.handle import ModelHandle, without_dropout
from groupwise.model.logprobs import check_ids, completion_logps
from groupwise.model.weights import cache_folder
from groupwise.rundir.files import reason_of, write_safetensors
from groupwise.training.errors import SMALLEST_BUDGET, OutOfMemoryError, out_of_memory
from groupwise.training.update.reference import Reference

FORMAT = 1  # of the files and keys; another number finds nothing that this one has written
BLOCK = 256
KEY_LENGTH = 32  # hexadecimal digits
WITHOUT_EFFECT = {"_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"}  # in a model's config


class TokenPair(NamedTuple):
    """A pair as tensors: two answers to one prompt, the better one first."""

    prompt: tuple[int, ...]
    chosen: Tensor  # (t,) int64, on the CPU
    rejected: Tensor

    @property
    def longest(self) -> int:
        """Tokens of the prompt and the longer answer."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


def pair_lengths(pairs: Sequence[TokenPair]) -> Tensor:
    """Tokens of the answers, ``(n, 2)``, the chosen ones first."""
    return torch.tensor([[len(pair.chosen), len(pair.rejected)] for pair in pairs], dtype=torch.long).view(-1, 2)


def pair_logps(handle: ModelHandle, pairs: Sequence[TokenPair], *, token_budget: int) -> Tensor:
    """Log-probs ``(n, 2)`` of the chosen and the rejected answers, summed over their tokens, under the model as it is.

    They are at temperature 1, without gradient, on the CPU, in float64. No pass holds more than ``token_budget``
    tokens, or the longest answer with its prompt; where memory runs out, half as many.
    """
    return _all_blocks(handle, _checked(handle, pairs), token_budget)


def reference_logps(
    handle: ModelHandle,
    reference: Reference,
    pairs: Sequence[TokenPair],
    *,
    folder: Path | None = None,
    token_budget: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    say: Callable[[str], None] = lambda text: None,
    dropout: bool = False,
) -> Tensor:
    """The same ``(n, 2)`` under the reference: read from the disk, or computed and kept there for the next time.

    folder: where they are kept; by default ``reference-logps`` in the cache of models.
    progress: called after each block with the pairs done and the pairs in all.
    say: gets a sentence where memory runs out, or where nothing can be kept; neither ends the run.
    dropout: whether the model has any while it is trained; the reference has none.
    """
    checked = _checked(handle, pairs)
    with reference.in_place(), without_dropout(handle.model) if dropout else nullcontext():
        place = cache_folder() / "reference-logps" if folder is None else Path(folder)
        files = _Files(place / _reference_key(handle), say)
        return _all_blocks(handle, checked, token_budget, files, progress, say)


class _Ids(NamedTuple):
    """A pair of which all is known to be token ids."""

    prompt: Tensor
    chosen: Tensor
    rejected: Tensor

    def longest(self) -> int:
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


def _checked(handle: ModelHandle, pairs: Sequence[TokenPair]) -> list[_Ids]:
    """All pairs at once, so that a bad one is known before the first is computed."""
    checked = []
    for number, pair in enumerate(pairs):
        ids = _Ids(
            check_ids(pair.prompt, handle, f"the prompt of {_named(number)}"),
            check_ids(pair.chosen, handle, f"the chosen answer of {_named(number)}"),
            check_ids(pair.rejected, handle, f"the rejected answer of {_named(number)}"),
        )
        if handle.window is not None and ids.longest() > handle.window:
            raise InputError(
                f"the prompt and the longer answer of {_named(number)} have {ids.longest()} tokens; the model's window "
                f"is {handle.window}"
            )
        checked.append(ids)
    return checked


def _named(number: int) -> str:
    return f"pair {number} (counted from 0)"


def _all_blocks(
    handle: ModelHandle,
    pairs: Sequence[_Ids],
    token_budget: int,
    files: _Files | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    say: Callable[[str], None] = lambda text: None,
) -> Tensor:
    """Block by block. A budget that was too large for one of them is too large for those after it."""
    blocks = [torch.zeros(0, 2, dtype=torch.float64)]
    for first in range(0, len(pairs), BLOCK):
        block = pairs[first : first + BLOCK]
        while (found := _find(handle, block, first, token_budget, files)) is None:
            token_budget = max(SMALLEST_BUDGET, token_budget // 2)
            say(f"memory ran out: the log-probs of pairs are computed with a token budget of {token_budget:,}")
        blocks.append(found)
        progress(first + len(block), len(pairs))
    return torch.cat(blocks)


def _find(
    handle: ModelHandle, block: Sequence[_Ids], first: int, token_budget: int, files: _Files | None
) -> Tensor | None:
    """A block's log-probs ``(n, 2)``, from the disk or computed; None where memory ran out with this budget."""
    if files is None:
        return _compute(handle, block, first, token_budget)
    name = _block_key(block, _budget(block, token_budget))
    found = files.read(name, len(block))
    if found is None:
        found = _compute(handle, block, first, token_budget)
        if found is not None:
            files.write(name, found)
    return found


def _budget(block: Sequence[_Ids], token_budget: int) -> int:
    """The token budget, or the longest answer of this block with its prompt where that is more."""
    return max(token_budget, *(ids.longest() for ids in block))


def _compute(handle: ModelHandle, block: Sequence[_Ids], first: int, token_budget: int) -> Tensor | None:
    """A block's log-probs, all finite; None where memory ran out, and a smaller budget would need less."""
    prompts, answers = [ids.prompt for ids in block], [[ids.chosen, ids.rejected] for ids in block]
    try:
        with torch.no_grad():
            tokens = completion_logps(handle, prompts, answers, token_budget=_budget(block, token_budget)).logps
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        longest = max(ids.longest() for ids in block)
        if token_budget <= max(SMALLEST_BUDGET, longest):
            raise OutOfMemoryError(
                f"memory ran out with a single answer of a pair, {longest} tokens with its prompt; use a smaller "
                "model, or leave out long pairs"
            ) from error
    else:
        # In float64: a float32 sum over a long answer would lose what a small step of the policy changes.
        sums = tokens.cpu().double().sum(1).view(-1, 2)
        _check_finite(sums, first)
        return sums
    # Only now, without the error, is what the failed pass held free.
    if handle.device.type == "cuda":
        torch.cuda.empty_cache()
    return None


def _check_finite(sums: Tensor, first: int) -> None:
    bad = (~sums.isfinite()).any(1).nonzero().flatten().tolist()
    if bad:
        chosen, rejected = sums[bad[0]].tolist()
        raise InputError(
            f"the log-probs of {_named(first + bad[0])} are {chosen:g} for the chosen and {rejected:g} for the "
            "rejected answer, which no loss can use; look for NaN in the model's weights, or for float16, whose range "
            "is small (use bfloat16 or float32)"
        )


class _Files:
    """The finished blocks of one reference, each with a digest, so that damaged and foreign files are found out."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder, self.say = folder, say
        self.told = False

    def read(self, name: str, pairs: int) -> Tensor | None:
        """The log-probs of a block; None where its file is not there or not whole."""
        try:
            # Not mapped into memory: somebody may cut the file short while it is read.
            found = load(self._path(name).read_bytes())
            logps, digest = found["logps"], found["digest"]
        except (OSError, SafetensorError, LookupError, ValueError, RuntimeError):
            return None
        if logps.shape != (pairs, 2) or logps.dtype != torch.float64 or not bool(logps.isfinite().all()):
            return None
        return logps if torch.equal(digest, _digest(name, logps)) else None

    def write(self, name: str, logps: Tensor) -> None:
        try:
            write_safetensors(self._path(name), {"logps": logps, "digest": _digest(name, logps)})
        except CheckpointError as error:
            if not self.told:
                cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
                self.say(
                    f"the reference's log-probs cannot be kept in {self.folder}, so the next run will compute them "
                    f"again: {reason_of(cause)}"
                )
            self.told = True

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


def _digest(name: str, logps: Tensor) -> Tensor:
    found = hashlib.sha256(name.encode())
    found.update(_memory(logps))
    return torch.tensor(list(found.digest()), dtype=torch.uint8)


def _reference_key(handle: ModelHandle) -> str:
    """A hash of all that the numbers of any pair depend on, of the model as it is now.

    Buffers that are not saved follow from the configuration, but for their type; some are changed by a pass.
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
    found = hashlib.sha256(_json(facts))
    for name, tensor in [*model.named_parameters(), *(own for own in buffers if own[0] in saved)]:
        found.update(_json([name, list(tensor.shape), str(tensor.dtype)]))
        found.update(_memory(tensor))
    return found.hexdigest()[:KEY_LENGTH]


def _computed_by(handle: ModelHandle) -> dict[str, Any]:
    """The code and the device, which decide the last bits."""
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
    """What adapters do besides having weights: which are at work, and how loudly they speak."""
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
    """A configuration, and those within it, without what has no effect on log-probs."""
    if not isinstance(config, dict):
        return config
    return {name: _with_effect(value) for name, value in config.items() if name not in WITHOUT_EFFECT}


def _block_key(block: Sequence[_Ids], token_budget: int) -> str:
    """A hash of the pairs' ids, and of the budget, which decides what is computed together."""
    lengths = [[len(ids) for ids in pair] for pair in block]
    found = hashlib.sha256(_json([token_budget, lengths]))
    found.update(_memory(torch.cat([ids for pair in block for ids in pair])))
    return found.hexdigest()[:KEY_LENGTH]


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _memory(tensor: Tensor) -> memoryview:
    """A tensor's bytes, as they lie in memory; of this one tensor there is a copy, if it is on another device."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
