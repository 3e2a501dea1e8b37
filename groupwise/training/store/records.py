"""The start of a run's records: what it is made with, and its recorder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from groupwise.config import Recipe
from groupwise.rundir import RunDir
from groupwise.text import Say
from groupwise.training.store.changes import record_changes
from groupwise.training.store.recorder import Recorder
from groupwise.training.store.run_folder import write_inputs, write_recipe


def start_records(
    run: RunDir, recipe: Recipe, inputs: Mapping[str, Any], say: Say, *, resumed_at: int | None
) -> Recorder:
    """Write the recipe and the inputs, and open the recorder; ``resumed_at`` is the step that a run goes on after."""
    if resumed_at is not None:
        record_changes(run, recipe, inputs, resumed_at)
        write_inputs(run, inputs, None)  # once it is certain that the run can be resumed with them
    write_recipe(run, recipe, say, resuming=resumed_at is not None)
    return Recorder(
        run,
        tensorboard=recipe.run.tensorboard,
        wandb=recipe.run.wandb,
        settings=recipe.recorded(),
        resumed_at=resumed_at,
        say=say,
    )
