"""``output_dir`` as the folder of a run: what an earlier run left there, and the checkpoint to resume from."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from groupwise.errors import ConfigError
from groupwise.rundir.files import MANIFEST
from groupwise.rundir.run import MARKER, METRICS, RunDir, holds_run
from groupwise.text import Say
from groupwise.training.display.curves import CURVES
from groupwise.training.monitor.question_log import QUESTIONS
from groupwise.training.store.arrivals import ARRIVALS
from groupwise.training.store.changes import RESUMED
from groupwise.training.store.checkpoint import BEST
from groupwise.training.store.recorder import TENSORBOARD, WANDB
from groupwise.training.store.rollout_files import ROLLOUTS
from groupwise.training.store.run_folder import FINISHED, INPUTS, RECIPE, VERSIONS, checkpoints_in
from groupwise.training.store.token_files import EVALUATIONS, TOKENS

EARLIER = "earlier-run"
COMPLETIONS = "completions"
# What a run writes beside its checkpoints. Models and results that scripts save in output_dir are not among them.
RUN_FILES = (
    *(MARKER, RECIPE, INPUTS, VERSIONS, FINISHED, METRICS, BEST, RESUMED, WANDB, ARRIVALS, QUESTIONS, CURVES),
    *(ROLLOUTS, TOKENS, EVALUATIONS, TENSORBOARD, COMPLETIONS),
)


def clear_for_new_run(folder: Path, say: Say) -> None:
    """Move the checkpoints and records of an earlier run in this folder into ``earlier-run-N``; nothing is deleted."""
    found: list[Path] = []
    if holds_run(folder):
        RunDir.resume(folder).close()  # an error while another process writes to it
        found = [path for name in RUN_FILES if (path := folder / name).exists()]
    found += checkpoints_in(folder).values()
    if found:
        place = _move_away(folder, found)
        say(
            f"{folder} holds an earlier run: its files are now in {place} (resume_from_checkpoint=True continues a run)"
        )


def find_checkpoint(folder: Path, resume: str | Path | Literal[True]) -> Path:
    """The checkpoint that ``train(resume_from_checkpoint=…)`` means: the newest of the folder, or the one named."""
    if resume is True:
        saved = list(checkpoints_in(folder).values())
        if not saved:
            raise ConfigError(
                f"No valid checkpoint found in output directory ({folder}), but resume_from_checkpoint is True; leave "
                "it out for a new run"
            )
        return saved[-1]
    path = Path(resume)
    if not path.is_dir():
        raise ConfigError(f"Can't find a valid checkpoint at {path} (resume_from_checkpoint): there is no such folder")
    if path.resolve() not in [saved.resolve() for saved in checkpoints_in(path.parent).values()]:
        raise ConfigError(
            f"Can't find a valid checkpoint at {path} (resume_from_checkpoint): one is a folder named checkpoint-N"
        )
    return path


def prepare_resume(folder: Path, checkpoint: Path, say: Say) -> None:
    """Make ``checkpoint`` the newest of the run in ``folder``: later ones are moved away; those of a run in another
    folder are copied here with its records."""
    if not (checkpoint / MANIFEST).exists():
        trl = (checkpoint / "trainer_state.json").exists()
        writer = "was written by TRL, whose optimizer state cannot be read" if trl else "is not a complete checkpoint"
        raise ConfigError(
            f"Can't find a valid checkpoint at {checkpoint} (resume_from_checkpoint): it {writer}; start a new run "
            f"with model={str(checkpoint)!r}"
        )
    if checkpoint.parent.resolve() != folder.resolve():
        clear_for_new_run(folder, say)
        folder.mkdir(parents=True, exist_ok=True)
        for path in (*(checkpoint.parent / name for name in RUN_FILES), checkpoint):
            if path.is_dir():
                shutil.copytree(path, folder / path.name)
            elif path.exists():
                shutil.copy2(path, folder / path.name)
        return
    RunDir.resume(folder).close()
    step = int(checkpoint.name.rpartition("-")[2])
    if later := [saved for number, saved in checkpoints_in(folder).items() if number > step]:
        place = _move_away(folder, later)
        say(f"resuming from {checkpoint.name}: {', '.join(path.name for path in later)} moved to {place}")


def _move_away(folder: Path, paths: Iterable[Path]) -> Path:
    number = 1
    while (place := folder / f"{EARLIER}-{number}").exists():
        number += 1
    place.mkdir()
    for path in paths:
        shutil.move(path, place / path.name)
    return place
