"""Saves and restores the complete state of a run: weights, optimizer, reference, and the state of each part."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from groupwise.errors import ConfigError
from groupwise.generate import Engine
from groupwise.rundir import RunDir
from groupwise.text import Say
from groupwise.training.components import RunComponents
from groupwise.training.monitor.question_log import QuestionLog
from groupwise.training.state import Stateful, TrainState
from groupwise.training.store import checkpoint
from groupwise.training.store.recorder import rewind
from groupwise.training.update.reference import Reference
from groupwise.training.update.updater import Updater


class Checkpointer:
    """Writes checkpoints into the run folder, prunes old ones, and restores one. ``parts`` are saved by name."""

    def __init__(
        self,
        run_dir: RunDir,
        components: RunComponents,
        state: TrainState,
        parts: Mapping[str, Stateful],
        question_log: QuestionLog,
        updater: Updater,
        engine: Engine,
        say: Say,
    ) -> None:
        self.run_dir, self.components, self.state, self.parts = run_dir, components, state, parts
        self.question_log, self.updater, self.engine, self.say = question_log, updater, engine, say
        self._saved: dict[str, Any] | None = None  # the state of the last checkpoint
        self._verified: Path | None = None  # the last checkpoint written or restored, which is known to be intact

    def newest(self) -> Path | None:
        """The newest intact checkpoint; without one, the records of earlier steps are deleted."""
        folder = checkpoint.newest(self.run_dir)
        if folder is None:
            self.say("this run has no finished checkpoint: it starts from the beginning")
            rewind(self.run_dir, -1)
        return folder

    @property
    def is_saved(self) -> bool:
        """Whether the last checkpoint has the current state."""
        return self._saved == self._state()

    def save(self, reference: Reference | None) -> Path:
        """Write a checkpoint of the last finished step."""
        recipe, step, state = self.components.recipe, self.state.step, self._state()
        folder = checkpoint.save_checkpoint(
            self.run_dir,
            step,
            state,
            masters=self.updater.masters,
            optimizer=self.updater.optimizer,
            reference=reference,
            tokenizer=self.components.tokenizer,
            dtype=recipe.run.export_dtype,
            resumable=recipe.run.resumable,
            verified=self._verified == self.run_dir.path / checkpoint.checkpoint_name(step),
        )
        self._verified = folder
        if self.state.best is not None:
            entry = {"checkpoint": self._best, "metric": self.components.metric, **self.state.best}
            self.run_dir.write_json(checkpoint.BEST, entry)
        checkpoint.prune(self.run_dir, recipe.run.keep_checkpoints, self._best)
        self.question_log.write(self.run_dir.path)
        self._saved = copy.deepcopy(state)
        return folder

    def resume(self, folder: Path, reference: Reference | None, total_steps: int) -> None:
        """Restore a checkpoint; records and checkpoints of later steps are deleted."""
        recipe, supervised = self.components.recipe, self.components.supervised
        saved = checkpoint.read_state(folder)
        if bool(saved["supervised"]) != supervised:
            raise ConfigError(
                "a run of SFT alone (train.steps = 0) cannot be resumed as another run, nor another as that; start a "
                f"new one from --model.source {folder / checkpoint.POLICY}"
            )
        if supervised and int(saved["step"]) < total_steps:
            raise ConfigError(
                f"this supervised run is finished, and {total_steps} steps of SFT are more than it had; restore [sft], "
                "or start a new run"
            )
        saved = checkpoint.load_checkpoint(
            folder,
            masters=self.updater.masters,
            optimizer=self.updater.optimizer,
            reference=reference,
            verified=True,
        )
        self._verified = folder
        self.state.load_json(saved["train"])
        for name, part in self.parts.items():
            part.load_state(saved[name])
        self.updater.token_budget = recipe.train.token_budget or int(saved["token_budget"])
        self.engine.max_num_seqs = recipe.sampling.max_num_seqs or int(saved["max_num_seqs"])
        if torch.get_num_threads() != saved["threads"]:
            self.say(f"the run was started with {saved['threads']} threads; it goes on with as many, for the same bits")
            torch.set_num_threads(int(saved["threads"]))
        self.question_log.write(self.run_dir.path)
        rewind(self.run_dir, self.state.step, evaluated=self.state.evaluated_at == self.state.step)
        for name in checkpoint.rewind(self.run_dir, self.state.step, self._best):
            self.say(f"{name} is damaged and was removed: its steps are done again")
        self.say(f"resuming after step {self.state.step}, from {folder.name}")

    def _state(self) -> dict[str, Any]:
        """Everything that the next step depends on, besides weights, as JSON."""
        return {
            "train": asdict(self.state),
            **{name: part.state() for name, part in self.parts.items()},
            "token_budget": self.updater.token_budget,
            "max_num_seqs": self.engine.max_num_seqs,
            "threads": torch.get_num_threads(),
            "supervised": self.components.supervised,
        }

    @property
    def _best(self) -> str | None:
        return None if self.state.best is None else checkpoint.checkpoint_name(int(self.state.best["step"]))
