"""Mini-batches as tensors and JSON, for a checkpoint between two updates of a rollout: ``updates.safetensors``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.core.filters import KeptSets
from groupwise.core.ragged import Ragged, RaggedGroups
from groupwise.errors import CheckpointError
from groupwise.rundir import write_safetensors
from groupwise.text import excerpt
from groupwise.training.preference.reference_cache import TokenPair
from groupwise.training.update.minibatch import DatasetPairs, MiniBatch, MiniBatchPairs
from groupwise.training.update.objective import Totals
from groupwise.training.update.teacher import TeacherLogps

TENSORS = "updates.safetensors"
# Fields that are no tensors.
OTHERS = ("samples", "prompts", "teacher_prompts", "completions", "kept", "pairs", "totals", "teacher", "correction")


def write_minibatches(folder: Path, minibatches: Sequence[MiniBatch]) -> None:
    """Write mini-batches, with the log-probs that were computed for them, into a checkpoint's folder."""
    tensors: dict[str, Tensor] = {}
    for number, minibatch in enumerate(minibatches):
        # Clones, because a file cannot hold tensors that share memory.
        tensors |= {f"{number}/{name}": tensor.clone().contiguous() for name, tensor in _parts(minibatch).items()}
    write_safetensors(folder / TENSORS, tensors)


def totals_of(minibatches: Sequence[MiniBatch]) -> list[dict[str, Any]]:
    """The denominators of mini-batches, as JSON."""
    return [asdict(minibatch.totals) for minibatch in minibatches]


def read_minibatches(folder: Path, totals: Sequence[Mapping[str, Any]]) -> list[MiniBatch]:
    """The mini-batches in a checkpoint; a CheckpointError if its file does not fit them."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = folder / TENSORS
    try:
        tensors = load_file(file)
        return [_restore(number, tensors, Totals(**entry)) for number, entry in enumerate(totals)]
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
        raise CheckpointError(f"the mini-batches in {file} cannot be restored: {excerpt(error, 200)}") from error


def _parts(minibatch: MiniBatch) -> dict[str, Tensor]:
    pairs, dataset = minibatch.pairs, minibatch.pairs.dataset
    parts: dict[str, Tensor | None] = {
        "samples": torch.tensor(minibatch.samples, dtype=torch.long),
        **_sequences("prompt", minibatch.prompts),
        **_sequences("teacher_prompt", minibatch.teacher_prompts),
        **_sequences("completion", minibatch.completions.rows),
        "members": minibatch.completions.sizes,
        "pair_rows": pairs.rows,
        "pair_reference": pairs.reference,
        "dataset_reference": dataset.reference,
        **_sequences("dataset_prompt", Ragged.of([pair.prompt for pair in dataset.pairs])),
        **_sequences("dataset_chosen", Ragged.of([pair.chosen for pair in dataset.pairs])),
        **_sequences("dataset_rejected", Ragged.of([pair.rejected for pair in dataset.pairs])),
        **{field.name: getattr(minibatch, field.name) for field in fields(minibatch) if field.name not in OTHERS},
    }
    if minibatch.kept is not None:
        parts |= {"kept_ids": minibatch.kept.ids.cpu(), "kept_offsets": minibatch.kept.offsets.cpu()}
    if minibatch.teacher is not None:
        parts |= {f"teacher_{field.name}": getattr(minibatch.teacher, field.name) for field in fields(TeacherLogps)}
    return {name: tensor for name, tensor in parts.items() if tensor is not None}


def _restore(number: int, tensors: Mapping[str, Tensor], totals: Totals) -> MiniBatch:
    """A mini-batch from its tensors; any error means that they are damaged."""
    prefix = f"{number}/"
    parts = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    samples = parts["samples"].tolist()
    completions = RaggedGroups(_rows(parts, "completion"), parts["members"])
    named = {field.name: parts.get(field.name) for field in fields(MiniBatch) if field.name not in OTHERS}
    rows = {name: len(tensor) for name, tensor in named.items() if tensor is not None}
    if {len(samples), len(completions.rows), *rows.values()} != {len(samples)}:
        count = len(completions.rows)
        raise ValueError(f"mini-batch {number} has {len(samples)} samples, but {count} completions, {rows}")
    pairs = [
        TokenPair(tuple(prompt.tolist()), chosen, rejected)
        for prompt, chosen, rejected in zip(
            *(_rows(parts, f"dataset_{name}") for name in ("prompt", "chosen", "rejected")), strict=True
        )
    ]
    dataset = DatasetPairs(pairs, parts.get("dataset_reference"))
    teacher = None
    if "teacher_logps" in parts:
        teacher = TeacherLogps(parts["teacher_logps"], parts.get("teacher_top_ids"), parts.get("teacher_top_logps"))
    return MiniBatch(
        samples=samples,
        prompts=_rows(parts, "prompt"),
        teacher_prompts=_rows(parts, "teacher_prompt"),
        completions=completions,
        kept=KeptSets(parts["kept_ids"], parts["kept_offsets"]) if "kept_ids" in parts else None,
        pairs=MiniBatchPairs(parts["pair_rows"], dataset, parts.get("pair_reference")),
        totals=totals,
        teacher=teacher,
        **named,  # type: ignore[arg-type]
    )


def _sequences(name: str, rows: Ragged) -> dict[str, Tensor]:
    return {f"{name}_ids": rows.values, f"{name}_lengths": rows.lengths}


def _rows(parts: Mapping[str, Tensor], name: str) -> Ragged:
    return Ragged(parts[f"{name}_ids"], parts[f"{name}_lengths"])
