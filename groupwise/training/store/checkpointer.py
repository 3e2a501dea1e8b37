"""Saves and restores the complete state of a run: weights, optimizer, reference, and the state of each part."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from groupwise.distributed.ranks import Ranks
from groupwise.errors import ConfigError
from groupwise.generate import Generator
from groupwise.rundir import RunDir
from groupwise.text import Say, plural
from groupwise.training.components import RunComponents
from groupwise.training.monitor.question_log import QuestionLog
from groupwise.training.state import Stateful, StatefulFiles, TrainState
from groupwise.training.store import checkpoint
from groupwise.training.store.recorder import rewind
from groupwise.training.store.run_folder import TRAINING_PAIRS, TRAINING_ROWS
from groupwise.training.store.saved_state import ROLLOUTS, UPDATES, check_state
from groupwise.training.update.updater import Updater


class Checkpointer:
    """Writes checkpoints into the run folder, prunes old ones, and restores one. ``parts`` are saved by name.

    changed: inputs that differ from those that the run was started with; what is saved about their rows is not used.
    file_parts: those with files, by name: the groups of an asynchronous run, or the updates of a rollout in use.
    """

    def __init__(
        self,
        run_dir: RunDir,
        components: RunComponents,
        state: TrainState,
        parts: Mapping[str, Stateful],
        question_log: QuestionLog,
        updater: Updater,
        generator: Generator,
        say: Say,
        changed: Collection[str] = (),
        ranks: Ranks | None = None,
        file_parts: Mapping[str, StatefulFiles] | None = None,
    ) -> None:
        self.run_dir, self.components, self.state, self.parts = run_dir, components, state, parts
        self.question_log, self.updater, self.generator, self.say = question_log, updater, generator, say
        self.changed, self.ranks, self.file_parts = changed, ranks or Ranks(), file_parts or {}
        self._saved: str | None = None  # a hash of the state of the last checkpoint
        self._loaded: dict[str, Any] = {}  # the state that the run was resumed with

    def newest(self) -> Path | None:
        """The newest intact checkpoint, whose state is loaded; without one, the records of all steps are deleted."""

        def find() -> str | None:
            folder = checkpoint.newest(self.run_dir, self._load_state, self.say)
            if folder is None:
                self.say("this run has no finished checkpoint: it starts from the beginning")
                rewind(self.run_dir, -1)
            return None if folder is None else folder.name

        name: str | None = self.ranks.from_main(self.ranks.on_main("looking for a checkpoint", find))
        if name is None:
            return None
        folder = self.run_dir.path / name
        with self.ranks.stage("reading a checkpoint"):
            if not self.ranks.is_main:
                self._load_state(folder)
        return folder

    def save(self) -> bool:
        """Write a checkpoint of the last finished step, unless nothing has changed since the last one.

        Whether there is a new one.
        """
        settings, state = self.components.recipe.run, self._state()
        digest = checkpoint.digest(state)
        if self.ranks.from_main(digest == self._saved):
            return False
        self.ranks.on_main("saving a checkpoint", self.run_dir.check_in_place)
        is_new = checkpoint.save_checkpoint(
            self.run_dir,
            self.state.step,
            state,
            self.updater,
            tokenizer=self.components.tokenizer,
            dtype=settings.export_dtype,
            resumable=settings.resumable,
            write_files=self._write_files,
        )

        def finish() -> None:
            checkpoint.prune(self.run_dir, settings.keep_checkpoints, self._write_best())
            self.question_log.write(self.run_dir.path)

        self.ranks.on_main("saving a checkpoint", finish)
        self._saved = digest
        return is_new

    def _write_files(self, folder: Path) -> None:
        for part in self.file_parts.values():
            part.write_files(folder)

    def _load_state(self, folder: Path) -> None:
        """Restore everything but the weights from a checkpoint; a CheckpointError if that is damaged."""
        file = folder / checkpoint.STATE
        saved = check_state(checkpoint.read_state(folder), int(folder.name.rpartition("-")[2]), file)
        if saved["supervised"] != self.components.supervised:
            raise ConfigError(
                "a run of SFT alone (train.steps = 0) cannot be resumed as another run, nor another as that; start a "
                f"new one from --model.source {folder / checkpoint.POLICY}"
            )
        self.state.load_json(saved["train"])
        if TRAINING_ROWS in self.changed:
            order = self._next_epoch(saved["order"], len(self.components.train))
            saved = {**saved, "order": order, "questions": {}, ROLLOUTS: None}
        if TRAINING_PAIRS in self.changed and saved["pairs"] is not None:
            saved = {**saved, "pairs": self._next_epoch(saved["pairs"], len(self.components.pairs.train))}
        for name, part in self.parts.items():
            part.load_state(saved.get(name))
        for name, part in self.file_parts.items():
            part.load_state(saved.get(name))
            part.read_files(folder)
        if saved.get(ROLLOUTS) and ROLLOUTS not in self.file_parts:
            raise ConfigError(
                "this run has asynchronous rollouts, and its checkpoint holds groups that were not learned yet; resume "
                "it with train.max_staleness 1 or more"
            )
        if (saved.get(UPDATES) or {}).get("totals") and UPDATES not in self.file_parts:
            raise ConfigError(
                "the checkpoint is between two updates of one rollout; resume the run with train.update_per_step = true"
            )
        self._loaded = saved

    def _next_epoch(self, order: Mapping[str, Any], rows: int) -> dict[str, Any]:
        """The state of an order over other rows than before, at the start of the next epoch."""
        return {**order, "rows": max(1, rows), "epoch": order["epoch"] + 1, "position": 0, "deferred": []}

    def resume(self, folder: Path, total_steps: int) -> None:
        """Restore the checkpoint that `newest` has found; records and checkpoints of later steps are deleted."""
        recipe, saved = self.components.recipe, self._loaded
        if self.components.supervised and self.state.step < total_steps:
            raise ConfigError(
                f"this supervised run is finished, and {plural(total_steps, 'step')} of SFT are more than it had; "
                "restore [sft], or start a new run"
            )
        checkpoint.load_checkpoint(folder, self.updater)
        self.updater.token_budget = recipe.train.token_budget or saved["token_budget"]
        self.updater.entropy.load_state(saved.get("entropy"))
        self.generator.max_num_seqs = recipe.sampling.max_num_seqs or saved["max_num_seqs"]
        threads = saved["threads"]
        if torch.get_num_threads() != threads:
            before = f"the run was started with {plural(threads, 'thread')}"
            if recipe.model.threads is None:
                self.say(f"{before}; it goes on with as many, for the same bits")
                torch.set_num_threads(threads)
            else:
                self.say(f"{before}; with {recipe.model.threads} its numbers may differ in the last digits")
        self.ranks.on_main("removing later records", self._rewind)
        for name in (name for name in (TRAINING_ROWS, TRAINING_PAIRS) if name in self.changed):
            self.say(f"the {name} changed: a new epoch over them begins")
        self.say(f"resuming after step {self.state.step}, from {folder.name}")

    def _rewind(self) -> None:
        """Delete what was recorded and saved after the step that is resumed."""
        self.question_log.write(self.run_dir.path)
        for note in rewind(self.run_dir, self.state.step, evaluated=self.state.evaluated_at == self.state.step):
            self.say(note)
        self._write_best()
        for name in checkpoint.rewind(self.run_dir, self.state.step):
            self.say(f"{name} is damaged and was removed: its steps are done again")

    def _state(self) -> dict[str, Any]:
        """Everything that the next step depends on, besides weights, as JSON."""
        entropy = self.updater.entropy.state()
        return {
            "train": asdict(self.state),
            **{name: part.state() for name, part in self.parts.items()},
            "token_budget": self.updater.token_budget,
            "max_num_seqs": self.generator.max_num_seqs,
            "threads": torch.get_num_threads(),
            "supervised": self.components.supervised,
            **({} if entropy is None else {"entropy": entropy}),
            **{name: part.state() for name, part in self.file_parts.items()},
        }

    def _write_best(self) -> str | None:
        """Write or delete ``best.json``; the name of the best checkpoint."""
        if self.state.best is None:
            (self.run_dir.path / checkpoint.BEST).unlink(missing_ok=True)
            return None
        name = checkpoint.checkpoint_name(int(self.state.best["step"]))
        entry = {"checkpoint": name, "metric": self.components.metric, **self.state.best}
        self.run_dir.write_json(checkpoint.BEST, entry)
        return name
