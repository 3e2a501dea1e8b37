"""A run's own checkpoints: all that its next step depends on, written down and taken up again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from groupwise.errors import ConfigError
from groupwise.training.store import checkpoint
from groupwise.training.store.recorder import rewind

if TYPE_CHECKING:
    from groupwise.training.trainer import Trainer


def state_of(trainer: Trainer) -> dict[str, Any]:
    """All that the next step depends on, beside weights: what a checkpoint's ``state.json`` holds."""
    return {
        "tokens": trainer.tokens,
        "order": trainer.order.state(),
        "pairs": trainer.pairs.state(),
        "schedule": trainer.schedule.state(),
        "token_budget": trainer.updater.token_budget,
        "max_num_seqs": trainer.engine.max_num_seqs,
        "threads": torch.get_num_threads(),
        "refreshes": trainer.reference.refreshes if trainer.reference is not None else 0,
        "best": trainer.best,
        "worse": trainer.worse,
        "first": trainer.first,
        "last": trainer.last,
        "evaluated_at": trainer.evaluated_at,
        "checks": trainer.checks.state(),
        "questions": trainer.questions.state(),
        "supervised": trainer.supervised,
    }


def save_run(trainer: Trainer) -> Path:
    """Write a checkpoint of the last finished step, unless that has been done and nothing has happened since."""
    state = state_of(trainer)
    if trainer.saved == (trainer.step, state):
        return trainer.run_dir.path / checkpoint.checkpoint_name(trainer.step)
    trainer.display.stage("saving")
    folder = checkpoint.save_checkpoint(
        trainer.run_dir,
        trainer.step,
        state,
        masters=trainer.masters,
        optimizer=trainer.optimizer,
        reference=trainer.reference,
        tokenizer=trainer.components.tokenizer,
        dtype=trainer.recipe.run.export_dtype,
        resumable=trainer.recipe.run.resumable,
    )
    if trainer.best is not None:
        trainer.run_dir.write_json(
            checkpoint.BEST,
            {"checkpoint": trainer.best_name, "metric": trainer.metric, **trainer.best},
        )
    checkpoint.prune(trainer.run_dir, trainer.recipe.run.keep_checkpoints, trainer.best_name)
    trainer.questions.write(trainer.run_dir.path)
    trainer.saved = (trainer.step, copy.deepcopy(state))
    trainer.call("on_checkpoint", folder)
    return folder


def resume_run(trainer: Trainer, folder: Path) -> None:
    """Go on from a checkpoint: what came after it is taken back."""
    saved = checkpoint.read_state(folder)
    if bool(saved.get("supervised")) != trainer.supervised:
        raise ConfigError(
            "a run that is supervised alone (train.steps = 0) cannot go on as another, nor another as that; start "
            f"a new one from --model.source {folder / checkpoint.POLICY}"
        )
    if trainer.supervised and int(saved["step"]) < trainer.total_steps:
        raise ConfigError(
            f"this supervised run has ended, and {trainer.total_steps} steps of warm-up are more than it had; put back "
            "[sft], or start a new run"
        )
    state = checkpoint.load_checkpoint(
        folder, masters=trainer.masters, optimizer=trainer.optimizer, reference=trainer.reference
    )
    trainer.step = int(state["step"])
    trainer.tokens = int(state["tokens"])
    trainer.order.load_state(state["order"])
    trainer.pairs.load_state(state.get("pairs"))
    trainer.schedule.load_state(state["schedule"])
    trainer.updater.token_budget = trainer.recipe.train.token_budget or int(state["token_budget"])
    trainer.engine.max_num_seqs = trainer.recipe.sampling.max_num_seqs or int(state["max_num_seqs"])
    trainer.best, trainer.worse = state["best"], int(state["worse"])
    trainer.first, trainer.last, trainer.evaluated_at = state["first"], state["last"], int(state["evaluated_at"])
    trainer.checks.load_state(state.get("checks", trainer.checks.state()))
    trainer.questions.load_state(state.get("questions", {}))
    trainer.questions.write(trainer.run_dir.path)
    if torch.get_num_threads() != state["threads"]:
        trainer.say(f"the run was begun with {state['threads']} threads; that many are used again, for the same bits")
        torch.set_num_threads(int(state["threads"]))
    rewind(trainer.run_dir, trainer.step)
    for name in checkpoint.rewind(trainer.run_dir, trainer.step, trainer.best_name):
        trainer.say(f"{name} is damaged and was removed: its steps are done again")
    trainer.say(f"going on after step {trainer.step}, from {folder.name}")
