"""The part of a checkpoint that each rank writes: its slices of a sharded model's masters, optimizer and reference.

The files of the folder ``shards`` hold slices of ``masters/NAME``, ``exp_avg/NAME``, ``reference/NAME`` and so on, see
`groupwise.distributed.shards`. They are read by any number of processes, with sharded weights or without.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.distributed.shards import read_complete, read_shards, shard_shapes, write_shards
from groupwise.errors import CheckpointError
from groupwise.model.sharded_masters import FsdpMasters
from groupwise.training.update.reference import FsdpReference
from groupwise.training.update.updater import Updater

SHARDS = "shards"
MASTERS, REFERENCE = "masters", "reference"  # the other kinds are AdamW's


def write_slices(folder: Path, updater: Updater, masters: FsdpMasters) -> None:
    """Write this rank's slices into a checkpoint's folder, which all ranks must see."""
    if not folder.is_dir():
        raise CheckpointError(
            f"rank {masters.ranks.rank} does not see {folder.parent}: run.folder must be on a file system that all "
            "machines of the run share"
        )
    tensors = {f"{MASTERS}/{name}": masters.sharded(name, master) for name, master in masters.named_parameters()}
    for name, master in masters.named_parameters():
        for key, value in updater.optimizer.state.get(master, {}).items():
            value = torch.as_tensor(value)
            tensors[f"{key}/{name}"] = masters.sharded(name, value) if value.dim() else value
    if isinstance(updater.reference, FsdpReference):
        for name, value in updater.reference.slices().items():
            tensors[f"{REFERENCE}/{name}"] = masters.sharded(name, value)
    write_shards(folder / SHARDS, tensors, masters.ranks.rank)


def read_slices(folder: Path, updater: Updater, masters: FsdpMasters) -> None:
    """Restore this rank's slices, whichever ranks have written them."""
    shapes = _by_kind(shard_shapes(folder / SHARDS))
    weights = dict(masters.named_parameters())
    if strange := sorted(shapes[MASTERS].keys() ^ weights.keys()):
        raise CheckpointError(f"{folder / SHARDS} does not fit the model: {strange[0]} is only in one of them")
    fused = any(group.get("fused") for group in updater.optimizer.param_groups)  # then the step count is on the GPU too
    targets = {f"{MASTERS}/{name}": masters.sharded(name, master.detach()) for name, master in weights.items()}
    updater.optimizer.state.clear()
    for key in sorted(shapes.keys() - {MASTERS, REFERENCE}):
        for name, shape in shapes[key].items():
            master = weights[name]
            device = master.device if shape or fused else torch.device("cpu")
            value = torch.zeros_like(master) if shape else torch.zeros((), device=device)
            updater.optimizer.state[master][key] = value
            targets[f"{key}/{name}"] = masters.sharded(name, value) if shape else value
    if isinstance(updater.reference, FsdpReference):
        for name, value in updater.reference.slices().items():
            targets[f"{REFERENCE}/{name}"] = masters.sharded(name, value)
    read_shards(folder / SHARDS, targets)


def read_all(folder: Path) -> dict[str, dict[str, Tensor]]:
    """The complete masters, optimizer state and reference, for a run that does not shard its weights."""
    kinds = _by_kind(read_complete(folder / SHARDS))
    masters, reference = kinds.pop(MASTERS), kinds.pop(REFERENCE, {})
    optimizer = {f"{key}/{name}": value for key, values in kinds.items() for name, value in values.items()}
    return {"masters": masters, "optimizer": optimizer, "reference": reference}


def saved_shapes(folder: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]:
    """The shapes of the masters, of the optimizer's state by ``key/name``, and of the reference, None without one."""
    kinds = _by_kind(shard_shapes(folder / SHARDS))
    masters, reference = kinds.pop(MASTERS, {}), kinds.pop(REFERENCE, None)
    return masters, {f"{key}/{name}": shape for key, named in kinds.items() for name, shape in named.items()}, reference


def _by_kind(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    kinds: dict[str, dict[str, Any]] = {}
    for full_name, value in values.items():
        kind, _, name = full_name.partition("/")
        kinds.setdefault(kind, {})[name] = value
    return kinds
