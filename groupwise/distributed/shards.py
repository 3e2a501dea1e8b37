"""Tensors of which each rank has a slice, written and read by PyTorch's distributed checkpoint (DCP).

Each rank writes its slices into files of its own, and any number of ranks can read them again, each what it needs.
Nothing is pickled: DCP's usual format has its index in a pickle, and reading that can run any code, so the files are
DCP's safetensors, each with the places of its slices in its header. Slices of different ranks never overlap, so each
rank plans its files alone; DCP would send the plans between ranks as pickles.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.distributed.fsdp import is_sharded, local
from groupwise.errors import CheckpointError
from groupwise.text import error_reason

EARLIER = "use an earlier checkpoint"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
SHARDING_INFO, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"  # DCP's names in the header of a file


def write_shards(folder: Path, tensors: Mapping[str, Tensor], rank: int) -> None:
    """Write this rank's slices of ``tensors``; those that are not sharded are written by rank 0.

    Names are ``kind/name``; each kind is written to a file of its own, so that only one of them is in memory twice.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    class OwnPlanner(DefaultSavePlanner):
        """Plans without the other ranks."""

        def create_global_plan(self, all_plans: Any) -> Any:
            self.global_plan, self.metadata = create_default_global_save_plan(all_plans)
            return self.global_plan, self.metadata

    class OwnWriter(HuggingFaceStorageWriter):
        """Puts the rank's number into the names of its files."""

        def prepare_global_plan(self, plans: Any) -> Any:
            return [
                replace(plan, storage_data={**plan.storage_data, "shard_index": rank + 1})
                for plan in super().prepare_global_plan(plans)
            ]

    own = {
        name: tensor
        for name, tensor in tensors.items()
        if (local(tensor).numel() > 0 if is_sharded(tensor) else rank == 0)
    }
    kinds = {kind: number for number, kind in enumerate(sorted(set(map(_kind, tensors))), start=1)}
    files = {name: kinds[_kind(name)] for name in tensors}
    try:
        folder.mkdir(exist_ok=True)
        writer = OwnWriter(str(folder), files, save_distributed=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            save(dict(own), storage_writer=writer, planner=OwnPlanner(False, False), no_dist=True)
    except (CheckpointException, OSError) as error:
        raise CheckpointError(f"{folder} could not be written: {_reason(error)}") from error


def read_shards(folder: Path, targets: Mapping[str, Tensor]) -> None:
    """Fill ``targets``, complete tensors or slices, with the values of their names, whichever ranks wrote them."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    shapes = shard_shapes(folder)
    for name, target in targets.items():
        if shapes.get(name) != tuple(target.shape):
            found = f"has the shape {shapes[name]}, not {tuple(target.shape)}" if name in shapes else "is not there"
            raise CheckpointError(f"{folder} does not fit the model: {name} {found}")
    wanted = {name: tensor for name, tensor in targets.items() if not is_sharded(tensor) or local(tensor).numel()}
    reader = HuggingFaceStorageReader(str(folder))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(dict(wanted), storage_reader=reader, planner=DefaultLoadPlanner(False, False), no_dist=True)
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder} cannot be read: {_reason(error)}; {EARLIER}") from error


def read_complete(folder: Path, kind: str | None = None) -> dict[str, Tensor]:
    """The complete tensors, of one kind or of all, by their names in the files."""
    targets = {
        name: torch.empty(shape, dtype=DTYPES[dtype])
        for name, (shape, dtype) in _entries(folder).items()
        if kind is None or _kind(name) == kind
    }
    read_shards(folder, targets)
    return targets


def shard_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each complete tensor; a CheckpointError if a slice of one is missing."""
    return {name: shape for name, (shape, _) in _entries(folder).items()}


def _entries(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """The shape of each complete tensor, and its dtype as safetensors names it."""
    from safetensors import SafetensorError, safe_open

    slices: dict[str, list[tuple[list[int], list[int]]]] = {}
    dtypes: dict[str, str] = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                places = json.loads(tensors.metadata()[SHARDING_INFO])
                for name in tensors.keys():  # noqa: SIM118  (it is no dict)
                    part = tensors.get_slice(name)
                    slices.setdefault(name, []).append((places[name][OFFSETS], part.get_shape()))
                    dtypes[name] = part.get_dtype()
                    if dtypes[name] not in DTYPES:
                        raise ValueError(f"{name} is {dtypes[name]}")
        ends = {
            name: [[start + size for start, size in zip(*part, strict=True)] for part in parts]
            for name, parts in slices.items()
        }
    except (OSError, SafetensorError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error_reason(error)}; {EARLIER}") from error
    entries = {}
    for name, parts in slices.items():
        shape = tuple(map(max, zip(*ends[name], strict=True)))
        if sum(math.prod(size) for _, size in parts) != math.prod(shape):
            raise CheckpointError(f"{folder} is damaged: a part of {name} is missing; {EARLIER}")
        entries[name] = (shape, dtypes[name])
    return entries


def _kind(name: str) -> str:
    return name.partition("/")[0]


def _reason(error: BaseException) -> str:
    """Why something failed; DCP's own error names only ranks, and holds the original."""
    inner = [wrapped[0] for wrapped in getattr(error, "failures", {}).values()]
    cause = inner[0] if inner and isinstance(inner[0], BaseException) else error
    return error_reason(cause)
