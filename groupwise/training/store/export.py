"""The end of a run: the best policy as an ordinary model folder, and its upload to the hub."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from groupwise.distributed.ranks import Ranks
from groupwise.errors import CheckpointError
from groupwise.model.export import export_model
from groupwise.model.lora import ADAPTER_WEIGHTS, is_lora
from groupwise.model.precision import MasterWeights
from groupwise.rundir import RunDir, atomic_folder, write_bytes
from groupwise.text import Say
from groupwise.training.components import RunComponents
from groupwise.training.state import TrainState
from groupwise.training.store.changes import changed_evaluation
from groupwise.training.store.checkpoint import MASTERS, POLICY, checkpoint_name, load_tensors, verify_checkpoint
from groupwise.training.store.model_card import model_card

if TYPE_CHECKING:
    from torch import Tensor

MODEL, CARD = "model", "README.md"


def export_policy(
    run: RunDir, components: RunComponents, state: TrainState, masters: MasterWeights, ranks: Ranks
) -> Path:
    """Write the best policy, from memory or from its checkpoint, into the run's ``model`` folder, with its card.

    All ranks call it, to collect the weights, and rank 0 writes.
    """
    current = masters.state_dict() if state.exported_step == state.step else None
    ranks.on_main("exporting the model", lambda: _write(run, components, state, masters, current))
    return run.path / MODEL


def _write(
    run: RunDir,
    components: RunComponents,
    state: TrainState,
    masters: MasterWeights,
    current: Mapping[str, Tensor] | None,
) -> None:
    run.check_in_place()
    folder = run.path / MODEL
    dtype = components.recipe.run.export_dtype or str(components.handle.dtype).removeprefix("torch.")
    if folder.exists():  # the run was finished before and was given more steps
        shutil.rmtree(folder)

    best = current
    if best is None:
        source = run.path / checkpoint_name(state.exported_step)
        try:
            verify_checkpoint(source)
        except CheckpointError as error:
            raise CheckpointError(
                f"the best checkpoint cannot be exported: {error}. The last policy is in "
                f"{source.with_name(checkpoint_name(state.step)) / POLICY}"
            ) from error
        best = _checkpoint_weights(source, masters)
        if best is None:
            with atomic_folder(folder) as unfinished:
                shutil.copytree(source / POLICY, unfinished, dirs_exist_ok=True)
    if best is not None:
        export_model(masters.model, folder, tokenizer=components.tokenizer, masters=best, dtype=dtype)
    card = model_card(components, state, changed_evaluation(run.path, components, state))
    write_bytes(folder / CARD, card.encode("utf-8", "backslashreplace"))


def _checkpoint_weights(source: Path, masters: MasterWeights) -> dict[str, Tensor] | None:
    """The trained weights in a checkpoint; None if it holds only a complete policy, which can be copied."""
    if (source / MASTERS).exists():
        return load_tensors(source / MASTERS)
    if not is_lora(masters.model):
        return None
    adapter = load_tensors(source / POLICY / ADAPTER_WEIGHTS)  # PEFT saves without the adapter's name
    return {
        name: adapter[name.replace(".default.", ".")].to(master.dtype) for name, master in masters.named_parameters()
    }


def push_to_hub(folder: Path, repository: str, say: Say) -> None:
    """Upload a model folder. A failure is reported and does not end the run: the model is safe on disk."""
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=str(folder), commit_message="Trained with groupwise")
        say(f"pushed to {repository}")
    except Exception as error:
        say(f"the model could not be pushed to {repository} ({error}); it is in {folder}")
