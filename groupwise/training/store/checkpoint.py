"""Checkpoints: a folder that is complete or absent, safetensors and JSON only, from which a run resumes bit for bit.

``checkpoint-40/`` holds ``policy/`` (the model as transformers loads it), ``masters.safetensors`` (the float32 weights
that the optimizer updates), ``optimizer.safetensors``, ``reference.safetensors`` if there is a reference,
``rollouts.safetensors`` and ``.json`` with the groups that an asynchronous run has not learned yet,
``updates.safetensors`` with the mini-batches of a rollout that is still in use, and ``state.json``:
everything else that the next step depends on (`saved_state`). If the weights are sharded, ``shards/`` holds each rank's
slices of masters, optimizer and reference instead. The manifest, with a hash of every file, is written last; a folder
without one is never used, nor is one whose files do not fit each other. A step is saved before it is evaluated, so that
no failing evaluation loses it; what the evaluation changes in the state is then added as
``state_after_evaluation.json``, with its own hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import CheckpointError
from groupwise.model.checks import tensor_shapes
from groupwise.model.export import collect_weights, export_model
from groupwise.model.lora import is_lora
from groupwise.model.precision import MasterWeights
from groupwise.model.sharded_masters import FsdpMasters
from groupwise.rundir import RunDir, as_json, read_json, verify_manifest, write_json, write_safetensors
from groupwise.rundir.files import LATER_STATE, delete_folder
from groupwise.text import Say, error_reason
from groupwise.training.store.run_folder import checkpoints_in
from groupwise.training.store.sharded import SHARDS, read_all, read_slices, saved_shapes, write_slices
from groupwise.training.update.reference import FsdpReference
from groupwise.training.update.updater import Updater

FORMAT = 2
POLICY, STATE = "policy", "state.json"
MASTERS, OPTIMIZER, REFERENCE = "masters.safetensors", "optimizer.safetensors", "reference.safetensors"
BEST = "best.json"
EARLIER = "use an earlier checkpoint"


def checkpoint_name(step: int) -> str:
    return f"checkpoint-{step}"


def save_checkpoint(
    run: RunDir,
    step: int,
    state: Mapping[str, Any],
    updater: Updater,
    *,
    tokenizer: Any,
    dtype: str | None,
    resumable: bool = True,
    write_files: Callable[[Path], None] = lambda folder: None,
) -> bool:
    """Write the checkpoint of a step, or only the state if it exists. Without ``resumable`` only policy and state.

    All ranks call it, to collect the weights, and rank 0 writes. Whether the checkpoint is new.
    """
    model, reference, ranks = updater.masters.model, updater.reference, updater.ranks
    folder = run.path / checkpoint_name(step)
    refreshes = 0 if reference is None else reference.refreshes
    full_state = {"format": FORMAT, "step": step, "refreshes": refreshes, **state}
    if ranks.from_main(folder.exists()):  # this process wrote it or resumed from it, so it is intact
        later = {"sha256": digest(full_state), "state": full_state}
        ranks.on_main("saving a checkpoint", lambda: write_json(folder / LATER_STATE, later))
        return False
    if isinstance(updater.masters, FsdpMasters):
        _save_sharded(run, full_state, updater, updater.masters, tokenizer, dtype, resumable, write_files)
        return True
    masters = updater.masters.state_dict()
    files = {MASTERS: masters}
    if resumable:
        files[OPTIMIZER] = _optimizer_tensors(updater.optimizer, updater.masters)
        if reference is not None:
            files[REFERENCE] = reference.state_dict()

    def write() -> None:
        with run.folder(checkpoint_name(step)) as unfinished:
            for name, tensors in files.items() if resumable else ():
                write_safetensors(unfinished / name, tensors)
            write_json(unfinished / STATE, full_state)
            export_model(
                model,
                unfinished / POLICY,
                tokenizer=tokenizer,
                masters=masters,
                dtype=dtype or str(model.dtype).removeprefix("torch."),
                merge=not is_lora(model),
            )
            write_files(unfinished)

    ranks.on_main("saving a checkpoint", write)
    return True


def _save_sharded(
    run: RunDir,
    state: Mapping[str, Any],
    updater: Updater,
    masters: FsdpMasters,
    tokenizer: Any,
    dtype: str | None,
    resumable: bool,
    write_files: Callable[[Path], None],
) -> None:
    """Write a checkpoint of a sharded model: each rank its slices, rank 0 the rest and, when all have, the manifest."""
    ranks, name, model = masters.ranks, checkpoint_name(int(state["step"])), masters.model
    chosen = dtype or str(masters.dtype).removeprefix("torch.")
    options: dict[str, Any] = {"tokenizer": tokenizer, "dtype": chosen}
    if is_lora(model):
        options |= {"masters": masters.state_dict(), "merge": False}
    else:
        options["weights"] = collect_weights(model, getattr(torch, chosen), ranks)

    def write(unfinished: Path) -> None:
        write_json(unfinished / STATE, state)
        export_model(model, unfinished / POLICY, **options)
        write_files(unfinished)

    with ExitStack() as finish:  # an error on any rank removes the folder
        place = ranks.on_main("saving a checkpoint", lambda: str(finish.enter_context(run.folder(name))))
        unfinished = Path(ranks.from_main(place))
        if resumable:
            with ranks.stage("saving a checkpoint"):
                write_slices(unfinished, updater, masters)
        ranks.on_main("saving a checkpoint", lambda: write(unfinished))
        ranks.on_main("saving a checkpoint", finish.close)


def load_checkpoint(folder: Path, updater: Updater) -> dict[str, Any]:
    """Restore weights and optimizer state, bit for bit; the saved state. `newest` has checked the hashes."""
    state = read_state(folder)
    if (folder / SHARDS).is_dir():
        _load_sharded(folder, updater, int(state["refreshes"]))
        return state
    if not (folder / MASTERS).exists():
        raise CheckpointError(
            f"{folder} holds only the policy (run.resumable was false), so the run cannot be resumed; start a new one "
            f"from --model.source {folder / POLICY}"
        )
    updater.masters.load_state_dict(load_tensors(folder / MASTERS))
    _load_optimizer(updater.optimizer, updater.masters, load_tensors(folder / OPTIMIZER))
    if updater.reference is not None:
        if not (folder / REFERENCE).exists():
            raise _no_reference(folder)
        updater.reference.load(load_tensors(folder / REFERENCE), int(state["refreshes"]))
    return state


def _load_sharded(folder: Path, updater: Updater, refreshes: int) -> None:
    masters, reference = updater.masters, updater.reference
    if reference is not None and saved_shapes(folder)[2] is None:
        raise _no_reference(folder)
    if isinstance(masters, FsdpMasters):
        read_slices(folder, updater, masters)
        if isinstance(reference, FsdpReference):
            reference.restored(refreshes)
        return
    saved = read_all(folder)
    masters.load_state_dict(saved["masters"])
    _load_optimizer(updater.optimizer, masters, saved["optimizer"])
    if reference is not None:
        reference.load(saved["reference"], refreshes)


def _no_reference(folder: Path) -> CheckpointError:
    return CheckpointError(
        f"{folder} holds no reference, but this recipe needs one (loss.kl_coef or preference.weight); start a new run"
    )


def load_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors in a file, or a CheckpointError if it cannot be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error_reason(error)}; {EARLIER}") from error


def read_state(folder: Path) -> dict[str, Any]:
    """The saved state: as it was after the evaluation of that step, if that was finished, otherwise before it."""
    state = read_json(folder / STATE)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder / STATE} is not of format {FORMAT}: it was written by another version of groupwise, which cannot "
            f"be resumed with this one. Start a new run from --model.source {folder / POLICY}"
        )
    try:
        later = read_json(folder / LATER_STATE)
        return dict(later["state"]) if later["sha256"] == digest(later["state"]) else state
    except (CheckpointError, KeyError, TypeError, ValueError):
        return state  # not there, or damaged: the step is evaluated again


def digest(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(as_json(state), sort_keys=True).encode()).hexdigest()


def verify_checkpoint(folder: Path) -> None:
    """Raise a CheckpointError if files are missing or changed, or do not fit each other."""
    trained = (MASTERS, OPTIMIZER) if (folder / MASTERS).exists() or (folder / OPTIMIZER).exists() else ()
    verify_manifest(folder, required=(STATE, *trained))
    reference: Mapping[str, tuple[int, ...]] | None = None
    if (folder / SHARDS).is_dir():
        masters, optimizer, reference = saved_shapes(folder)
    elif trained:
        masters, optimizer = tensor_shapes(folder / MASTERS, EARLIER), tensor_shapes(folder / OPTIMIZER, EARLIER)
        reference = tensor_shapes(folder / REFERENCE, EARLIER) if (folder / REFERENCE).exists() else None
    else:
        return  # run.resumable was false
    problems = [f"{MASTERS} is empty"] if not masters else []
    keys: dict[str, set[str]] = {}  # of the optimizer's state, by the name of the weight
    for full_name, shape in optimizer.items():
        key, _, name = full_name.partition("/")
        keys.setdefault(name, set()).add(key)
        if name not in masters or shape not in fitting_shapes(masters[name]):
            problems.append(f"{full_name} in {OPTIMIZER} does not fit the weights")
    for dimensions in {len(masters[name]) for name in keys.keys() & masters.keys()}:
        alike = {name: keys[name] for name in keys.keys() & masters.keys() if len(masters[name]) == dimensions}
        complete = set().union(*alike.values())
        problems += [f"{OPTIMIZER} has only a part of the state of {name}" for name in alike if alike[name] != complete]
    if reference is not None and reference != masters:
        problems.append(f"{REFERENCE} does not fit {MASTERS}")
    if problems:
        raise CheckpointError(f"{folder} is damaged: {'; '.join(problems[:3])}; {EARLIER}")


def fitting_shapes(weight: tuple[int, ...]) -> set[tuple[int, ...]]:
    """The shapes that a tensor of an optimizer's state may have: a number's, the weight's, or (Adafactor) a mean's."""
    return {(), weight, weight[:-1], (*weight[:-2], *weight[-1:])}


def newest(
    run: RunDir, check: Callable[[Path], None] = lambda folder: None, say: Say = lambda text: None
) -> Path | None:
    """The newest intact checkpoint; None if the run has none yet. If all are damaged, that is an error: starting again
    would delete the run's records. ``check`` raises a CheckpointError for damage that only its caller can see; ``say``
    is told what is wrong with newer ones."""
    problems: list[str] = []
    for folder in reversed(checkpoints_in(run.path).values()):
        try:
            verify_checkpoint(folder)
            check(folder)
            for problem in problems:
                say(problem)
            return folder
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(
            f"no checkpoint in {run.path} is intact: {'; '.join(problems)}. Restore one from a copy, or start again in "
            "another folder"
        )
    return None


def rewind(run: RunDir, step: int) -> list[str]:
    """Delete the checkpoints after ``step``, which are damaged if the run resumes from there; their names."""
    later = [folder for number, folder in checkpoints_in(run.path).items() if number > step]
    for folder in later:
        delete_folder(folder)
    return [folder.name for folder in later]


def prune(run: RunDir, keep: int, best: str | None) -> None:
    """Delete all but the last ``keep`` checkpoints and the best one."""
    for folder in list(checkpoints_in(run.path).values())[:-keep]:
        if folder.name != best:
            delete_folder(folder)


def _optimizer_tensors(optimizer: torch.optim.Optimizer, masters: MasterWeights) -> dict[str, Tensor]:
    """The optimizer's state under the names of the weights: ``exp_avg/lm_head.weight`` and so on."""
    collected: dict[str, Tensor] = {}
    for name, master in masters.named_parameters():
        for key, value in optimizer.state.get(master, {}).items():
            if value is None:
                continue
            tensor = torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else torch.as_tensor(value)
            # A number, such as the step count, is the same for all parts of a weight.
            complete = {name: tensor} if not tensor.dim() else masters.collect({name: tensor})
            collected |= {f"{key}/{name}": part for part in complete.values()}
    return collected


def _load_optimizer(optimizer: torch.optim.Optimizer, masters: MasterWeights, tensors: Mapping[str, Tensor]) -> None:
    parameters = dict(masters.named_parameters())
    fused = any(group.get("fused") for group in optimizer.param_groups)  # then the step count is on the GPU too
    optimizer.state.clear()
    for full_name, value in tensors.items():
        key, _, name = full_name.partition("/")
        if name not in parameters:
            raise CheckpointError(f"{OPTIMIZER} has the state of {name}, which is not trained here")
        device = torch.device("cpu") if key == "step" and not fused else parameters[name].device
        own = masters.own_part(name, value) if value.dim() else value
        counts = not own.dim() and own.dtype == torch.int64  # a step count that is no tensor, such as Adafactor's
        optimizer.state[parameters[name]][key] = int(own) if counts else own.to(device, copy=True)
