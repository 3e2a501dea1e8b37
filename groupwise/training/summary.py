"""What a run shows at its start, and the lines that it prints at its end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from groupwise.text import plural
from groupwise.training.components import RunComponents
from groupwise.training.display.base import RunFacts
from groupwise.training.monitor.question_log import QuestionLog, summarise
from groupwise.training.results import RunResult
from groupwise.training.state import TrainState
from groupwise.training.store.changes import changed_evaluation
from groupwise.training.store.checkpoint import POLICY, checkpoint_name
from groupwise.training.store.model_card import held_out_rows

SummaryLines = list[str | tuple[str, ...]]


def run_facts(components: RunComponents, folder: Path, steps: int) -> RunFacts:
    """The description of a run for its display."""
    recipe = components.recipe
    return RunFacts(
        name=folder.name,
        model=recipe.model.source,
        parameters=sum(weight.numel() for weight in components.model.parameters()),
        device=str(components.handle.device),
        algorithm=recipe.algorithm,
        steps=steps,
        metric=components.metric,
        folder=str(folder),
        goal=components.goal,
        log_every=recipe.run.log_every,
        evaluate_every=recipe.evaluate.every,
        show_samples=recipe.run.show_samples,
    )


def run_summary(
    components: RunComponents,
    state: TrainState,
    result: RunResult,
    question_log: QuestionLog,
    total_steps: int,
    *,
    picture: Path | None,
    warned: Sequence[str] = (),
) -> SummaryLines:
    """Text lines and table rows: held-out metrics, questions, and where everything is."""
    lines: SummaryLines = []
    if state.first and state.last and components.metric is not None:
        # A run that was evaluated once has one column.
        columns = slice(None) if state.evaluated_at != state.first_evaluated_at else slice(2)
        lines.append((_held_out(components), state.first_label, state.measured_label)[columns])
        lines += [row[columns] for row in held_out_rows(components, state)]
        if components.goal is not None:
            goal = f"{components.goal:.0%}" if components.task.grades else f"{components.goal:g}"
            reached = state.best is not None and state.best["value"] >= components.goal
            lines.append(("goal", goal, "reached" if reached else "not reached"))
        changed = changed_evaluation(result.folder, components, state) if result.folder is not None else []
        if changed:
            lines.append(f"do not compare the two columns: the run was resumed with another {', '.join(changed)}")
    if components.task.grades and components.samples and not components.supervised:
        lines.append(summarise(question_log.table()))
    if result.exit_status:
        done = f"after step {state.step} of {total_steps}" if state.step else "before the first step"
        lines.append(f"stopped {done}; {_next(components, state, result)}")
    if result.model is not None and result.best_step is not None and result.best_step != state.step:
        lines.append(f"the policy of step {result.best_step} is exported, the best of {state.evaluations} evaluations")
    if warned and result.folder is not None:
        lines.append(f"there were warnings ({', '.join(warned)}): groupwise doctor {_relative(result.folder)}")
    places = {"model": result.model, "picture": picture, "run": result.folder}
    return [*lines, *(f"{name}: {_relative(path)}" for name, path in places.items() if path is not None)]


def _next(components: RunComponents, state: TrainState, result: RunResult) -> str:
    """What can be done with a run that was stopped."""
    if components.recipe.run.resumable:
        return "go on with --resume" if state.step else "--resume starts from the beginning"
    policy = (result.folder or Path()) / checkpoint_name(state.step) / POLICY
    start = f"; its policy is a model: --model.source {_relative(policy)}" if policy.exists() else ""
    return f"it cannot be resumed, because run.resumable is false{start}"


def _held_out(components: RunComponents) -> str:
    rows, pairs = len(components.held_out), len(components.pairs.held_out)
    if not rows:
        return plural(pairs, "held-out pair")
    return plural(rows, "held-out row") + (f", {plural(pairs, 'pair')}" if pairs else "")


def _relative(path: Path) -> str:
    """A path as a user would type it."""
    try:
        return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
    except (ValueError, OSError):  # on another drive; the working folder was deleted
        return str(path)
