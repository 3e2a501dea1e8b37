"""Checkpoints: a folder that is whole or absent, safetensors and JSON only, from which a run goes on bit for bit.

``checkpoint-40/`` holds ``policy/`` (the model as transformers loads it), ``masters.safetensors`` (the float32 weights
that the optimizer moves), ``optimizer.safetensors``, ``reference.safetensors`` where there is a reference, and
``state.json``: everything else that the next step depends on. The manifest, with a hash of every file, is written last;
a folder without one is never chosen.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import CheckpointError
from groupwise.model.export import export_model
from groupwise.model.lora import is_lora
from groupwise.model.precision import MasterWeights
from groupwise.rundir import RunDir, read_json, verify_manifest, write_json, write_safetensors
from groupwise.rundir.files import UNFINISHED
from groupwise.training.update.reference import Reference

FORMAT = 1
POLICY, STATE = "policy", "state.json"
MASTERS, OPTIMIZER, REFERENCE = "masters.safetensors", "optimizer.safetensors", "reference.safetensors"
BEST = "best.json"


def checkpoint_name(step: int) -> str:
    return f"checkpoint-{step}"


def step_of(folder: Path) -> int:
    found = re.fullmatch(r"checkpoint-(\d+)", folder.name)
    if found is None:
        raise CheckpointError(f"{folder} is not named like a checkpoint (checkpoint-STEP)")
    return int(found[1])


def save_checkpoint(
    run: RunDir,
    step: int,
    state: Mapping[str, Any],
    *,
    masters: MasterWeights,
    optimizer: torch.optim.Optimizer,
    reference: Reference | None,
    tokenizer: Any,
    dtype: str | None,
    resumable: bool = True,
) -> Path:
    """Write the checkpoint of a step; the folder. One that is there already is the same and stays.

    Without ``resumable`` it holds the policy and ``state.json`` alone.
    """
    folder = run.path / checkpoint_name(step)
    if folder.exists():
        try:
            verify_manifest(folder)
            return folder
        except CheckpointError:
            _delete(folder)
    with run.folder(checkpoint_name(step)) as unfinished:
        if resumable:
            write_safetensors(unfinished / MASTERS, masters.state_dict())
            write_safetensors(unfinished / OPTIMIZER, _optimizer_tensors(optimizer, masters))
            if reference is not None:
                write_safetensors(unfinished / REFERENCE, reference.state_dict())
        write_json(unfinished / STATE, {"format": FORMAT, "step": step, **state})
        export_model(
            masters.model,
            unfinished / POLICY,
            tokenizer=tokenizer,
            masters=masters,
            dtype=dtype or str(masters.model.dtype).removeprefix("torch."),
            merge=not is_lora(masters.model),
        )
    return folder


def load_checkpoint(
    folder: Path, *, masters: MasterWeights, optimizer: torch.optim.Optimizer, reference: Reference | None
) -> dict[str, Any]:
    """Put a checkpoint's weights and optimizer state in place, bit for bit; its ``state.json``."""
    from safetensors.torch import load_file

    verify_manifest(folder)
    state = read_state(folder)
    if not (folder / MASTERS).exists():
        raise CheckpointError(
            f"{folder} holds the policy alone (run.resumable was false), so the run cannot go on; start a new one from "
            f"--model.source {folder / POLICY}"
        )
    masters.load_state_dict(load_file(folder / MASTERS))
    _load_optimizer(optimizer, masters, load_file(folder / OPTIMIZER))
    if reference is not None:
        if not (folder / REFERENCE).exists():
            raise CheckpointError(
                f"{folder} holds no reference, but this recipe needs one (loss.kl_coef or preference.weight); start "
                "anew"
            )
        reference.load(load_file(folder / REFERENCE), int(state["refreshes"]))
    return state


def read_state(folder: Path) -> dict[str, Any]:
    """What a checkpoint's ``state.json`` says."""
    state = read_json(folder / STATE)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{folder / STATE} is not of format {FORMAT}, the one that this groupwise reads")
    return state


def newest(run: RunDir) -> Path | None:
    """The newest checkpoint that is whole; None if the run has none yet. Where all are damaged, that is an error: to
    begin anew would throw away the run's records."""
    problems = []
    for folder in reversed(_folders(run)):
        try:
            verify_manifest(folder)
            return folder
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(
            f"no checkpoint in {run.path} is whole: {'; '.join(problems)}. Restore one from a copy, or begin anew in "
            "another folder"
        )
    return None


def rewind(run: RunDir, step: int, best: str | None) -> list[str]:
    """Forget the checkpoints after ``step``, which were damaged if the run goes on from there; their names.

    They would count among the last ones that are kept. A ``best.json`` that names another one than ``best`` goes too.
    """
    gone = [folder for folder in _folders(run) if step_of(folder) > step]
    for folder in gone:
        _delete(folder)
    if _named_best(run) != best:
        (run.path / BEST).unlink(missing_ok=True)
    return [folder.name for folder in gone]


def prune(run: RunDir, keep: int, best: str | None) -> None:
    """Delete all but the last ``keep`` checkpoints and the best one."""
    for folder in _folders(run)[:-keep]:
        if folder.name != best:
            _delete(folder)


def _named_best(run: RunDir) -> str | None:
    """The checkpoint that ``best.json`` names; None where there is no such file, or no sense in it."""
    try:
        found = read_json(run.path / BEST)
        return str(found["checkpoint"])
    except (CheckpointError, KeyError, TypeError):
        return None


def _folders(run: RunDir) -> list[Path]:
    """The run's checkpoints, whole or not, oldest first. A copy that somebody made under another name is theirs."""
    named = (path for path in run.path.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name))
    return sorted(named, key=step_of)


def _delete(folder: Path) -> None:
    """Delete a checkpoint; renamed first, so that one that is interrupted leaves no half under its name."""
    gone = folder.with_name(f"{UNFINISHED}old-{folder.name}")
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _optimizer_tensors(optimizer: torch.optim.Optimizer, masters: MasterWeights) -> dict[str, Tensor]:
    """AdamW's state under the names of the weights: ``exp_avg/lm_head.weight`` and so on."""
    found: dict[str, Tensor] = {}
    for name, master in masters.named_parameters():
        for key, value in optimizer.state.get(master, {}).items():
            found[f"{key}/{name}"] = torch.as_tensor(value)
    return found


def _load_optimizer(optimizer: torch.optim.Optimizer, masters: MasterWeights, tensors: Mapping[str, Tensor]) -> None:
    known = dict(masters.named_parameters())
    fused = any(group.get("fused") for group in optimizer.param_groups)  # then even the count of steps is on the GPU
    optimizer.state.clear()
    for full, value in tensors.items():
        key, _, name = full.partition("/")
        if name not in known:
            raise CheckpointError(f"the optimizer's state in the checkpoint names {name}, which the model has not")
        place = torch.device("cpu") if key == "step" and not fused else known[name].device
        optimizer.state[known[name]][key] = value.to(place)
