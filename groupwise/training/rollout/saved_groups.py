"""Finished groups as tensors and JSON, for a checkpoint: ``rollouts.safetensors`` and ``rollouts.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from groupwise.core.filters import KeptSets
from groupwise.core.ragged import Ragged
from groupwise.data import Prompt
from groupwise.errors import CheckpointError
from groupwise.generate.types import STOP_REASONS
from groupwise.grouping.grouper import GroupingResult
from groupwise.rundir import write_bytes, write_safetensors
from groupwise.rundir.files import read_json
from groupwise.tasks.base import TaskRow
from groupwise.text import excerpt
from groupwise.training.rollout.batch import Batch
from groupwise.training.rollout.collector import RolloutResult

TENSORS, DETAILS = "rollouts.safetensors", "rollouts.json"
SIMILARITY = tuple(field.name for field in fields(GroupingResult))

Count = Annotated[int, Field(ge=0, lt=2**53)]


class _Details(BaseModel):
    """A group without its tensors."""

    model_config = ConfigDict(strict=True)

    number: Count
    row: Count
    lengths: list[Count]
    stop_reasons: list[str]
    extra: dict[str, list[Any]]
    failures: list[str]
    metrics: dict[str, float]
    skipped: Count


@dataclass(frozen=True)
class GroupSource:
    """What is needed to restore groups besides their files."""

    rows: Sequence[TaskRow]
    prompts: Sequence[Prompt]
    tokenizer: Any
    rewards: int  # reward functions


def write_groups(folder: Path, groups: Mapping[int, RolloutResult]) -> None:
    """Write finished groups, by their numbers, into a checkpoint's folder."""
    tensors: dict[str, Tensor] = {}
    details: list[dict[str, Any]] = []
    for number, result in groups.items():
        batch = result.batch
        parts = {
            "ids": batch.ids.values,
            "sampler_logps": batch.sampler_logps.values,
            "versions": batch.versions.values,
            "rewards": batch.rewards,
            "dropped": batch.dropped,
        }
        if batch.kept is not None:
            parts |= {"kept_ids": batch.kept.ids.cpu(), "kept_offsets": batch.kept.offsets.cpu()}
        if batch.filtered_probability is not None:
            parts["filtered_probability"] = batch.filtered_probability
        if batch.similarity is not None:
            parts |= {f"similarity_{name}": getattr(batch.similarity, name) for name in SIMILARITY}
        # Clones, because a file cannot hold tensors that share memory.
        tensors |= {f"{number}/{name}": tensor.clone() for name, tensor in parts.items()}
        details.append(
            {
                "number": number,
                "row": batch.row_numbers[0],
                "lengths": batch.lengths.tolist(),
                "stop_reasons": batch.stop_reasons,
                "extra": batch.extra,
                "failures": result.failures,
                "metrics": result.metrics,
                "skipped": result.skipped,
            }
        )
    write_safetensors(folder / TENSORS, tensors)
    # What rewards log may be anything: numbers stay the same, NaN too, and what JSON does not have becomes its text.
    write_bytes(folder / DETAILS, json.dumps(details, default=_plain).encode())


def read_groups(folder: Path, source: GroupSource) -> dict[int, RolloutResult]:
    """The groups in a checkpoint, by their numbers; a CheckpointError if their files do not fit each other."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = folder / TENSORS
    try:
        tensors = load_file(file)
        entries = [_Details.model_validate(entry) for entry in read_json(folder / DETAILS)]
        return {entry.number: _restore(entry, tensors, source) for entry in entries}
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{folder / DETAILS} is damaged: {place}: {first['msg']}") from error
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
        raise CheckpointError(f"the groups in {file} cannot be restored: {excerpt(error, 200)}") from error


def _restore(entry: _Details, tensors: Mapping[str, Tensor], source: GroupSource) -> RolloutResult:
    """A group from its tensors and details; any error means that they are damaged."""
    prefix = f"{entry.number}/"
    parts = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    lengths, samples = entry.lengths, len(entry.lengths)
    shapes = {
        "ids": ((sum(lengths),), torch.int64),
        "sampler_logps": ((sum(lengths),), torch.float32),
        "versions": ((sum(lengths),), torch.int32),
        "rewards": ((samples, source.rewards), torch.float64),
        "dropped": ((samples,), torch.bool),
    }
    for name, (shape, dtype) in shapes.items():
        if tuple(parts[name].shape) != shape or parts[name].dtype != dtype:
            raise ValueError(f"{prefix}{name} is {tuple(parts[name].shape)} {parts[name].dtype}, not {shape} {dtype}")
    columns = [entry.stop_reasons, *entry.extra.values()]
    if not samples or any(len(column) != samples for column in columns):
        raise ValueError(f"group {entry.number} has columns of other lengths than its {samples} completions")
    if not set(entry.stop_reasons) <= set(STOP_REASONS):
        raise ValueError(f"group {entry.number} has unknown stop reasons")
    ids = Ragged(parts["ids"], lengths)
    kept = KeptSets(parts["kept_ids"], parts["kept_offsets"]) if "kept_ids" in parts else None
    if kept is not None and len(kept) != sum(lengths):
        raise ValueError(f"group {entry.number} has {len(kept)} sets of kept tokens for {sum(lengths)} tokens")
    similarity = None
    if "similarity_labels" in parts:
        similarity = GroupingResult(*(parts[f"similarity_{name}"] for name in SIMILARITY))
    batch = Batch(
        rows=[source.rows[entry.row]],
        row_numbers=[entry.row],
        prompts=[source.prompts[entry.row]],
        samples=samples,
        ids=ids,
        texts=source.tokenizer.batch_decode(ids.tolist(), skip_special_tokens=True),
        stop_reasons=entry.stop_reasons,
        sampler_logps=Ragged(parts["sampler_logps"], lengths),
        versions=Ragged(parts["versions"], lengths),
        kept=kept,
        rewards=parts["rewards"],
        dropped=parts["dropped"],
        extra=entry.extra,
        filtered_probability=parts.get("filtered_probability"),
        similarity=similarity,
    )
    return RolloutResult(
        batch,
        tokens=sum(lengths),
        prompts=1,
        failures=entry.failures,
        metrics=entry.metrics,
        skipped=entry.skipped,
    )


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
