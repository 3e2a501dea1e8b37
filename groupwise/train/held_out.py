"""Evaluation of a recipe's held-out rows: during a run, and by itself (`groupwise eval`)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from groupwise.config import Recipe
from groupwise.errors import ConfigError
from groupwise.evaluate import REWARD, Evaluation, evaluate
from groupwise.evaluate.choice import Given, Report
from groupwise.evaluate.exam import Candidate, examine
from groupwise.evaluate.exam import Progress as ExamProgress
from groupwise.generate import Engine, Sampling
from groupwise.model.logprobs import default_token_budget
from groupwise.train.doubt import has_dropout
from groupwise.train.pair_source import likelier_answers
from groupwise.train.records import LIKELIER, PREFERRED
from groupwise.train.rollout import chance
from groupwise.train.setup import Parts, Say, load_parts

if TYPE_CHECKING:
    from groupwise.train.trainer import Trainer

Progress = Callable[[int, int], None]
# What a reward that looks at ``trainer_state`` sees where nothing is trained.
NO_STEPS = SimpleNamespace(global_step=0, max_steps=0, epoch=0.0, num_input_tokens_seen=0)


def metric_of(parts: Parts) -> str | None:
    """What the best checkpoint is chosen by; None where nothing is held out."""
    known = (list(parts.task.grades) or [REWARD]) if len(parts.held_out) else []
    known += [PREFERRED] if parts.pairs.held_out else []
    if not known:
        return None
    name = parts.recipe.evaluate.metric or (parts.task.metric if len(parts.held_out) else None) or known[0]
    if name not in known:
        raise ConfigError(f"evaluate.metric {name!r} is not measured by this task (there are: {', '.join(known)})")
    return name


def evaluate_held_out(
    parts: Parts, engine: Engine, progress: Progress = lambda done, total: None, trainer_state: Any = NO_STEPS
) -> Evaluation:
    """Answer and grade the held-out rows as the recipe's [evaluate] says."""
    how = parts.recipe.evaluate
    return evaluate(
        engine,
        parts.tokenizer,
        parts.held_out.rows,
        parts.held_out.prompts,
        grades=parts.task.grades,
        scorer=None if parts.task.grades else parts.scorer,
        sampling=Sampling(
            max_new_tokens=how.max_new_tokens or parts.recipe.sampling.max_new_tokens,
            temperature=how.temperature or 1.0,
            greedy=how.temperature == 0,
            seed=chance(parts.recipe.train.seed, 2),
        ),
        samples=how.samples,
        stop=parts.stop,
        prompt_column=parts.recipe.data.prompt,
        trainer_state=trainer_state,
        progress=progress,
    )


def measure_held_out(trainer: Trainer) -> Evaluation:
    """All that a run holds out: its questions, and its pairs of answers."""
    parts, found = trainer.parts, Evaluation({})
    if len(parts.held_out):
        found = evaluate_held_out(
            parts,
            trainer.engine,
            lambda done, total: trainer.display.stage(f"evaluating: {done} of {total}"),
            trainer.state_for_rewards(),
        )
    if trainer.reference is not None:
        budget, dropout = default_token_budget(parts.prepared), has_dropout(trainer.recipe)  # as for the reference
        found.metrics.update(
            trainer.pairs.measure(parts.prepared, trainer.reference, trainer.now(), budget, dropout=dropout)
        )
    return found


def examine_recipe(
    recipe: Recipe,
    progress: ExamProgress = lambda what, done, total: None,
    say: Say = lambda text: None,
    like: Report | None = None,
) -> tuple[Report, list[Given]]:
    """Load a recipe's model and held-out questions of multiple choice, and have it sit the exam.

    ``like``: an earlier report that the new one is to be compared with.
    """
    parts = load_parts(recipe, say=say)
    how = recipe.evaluate
    candidate = Candidate(
        parts.prepared,
        Engine(parts.prepared, max_rows=recipe.sampling.max_rows),
        parts.tokenizer,
        parts.builder,
        recipe.data.prompt,
        parts.stop,
    )
    return examine(
        candidate,
        parts.task,
        parts.held_out.rows,
        max_new_tokens=how.max_new_tokens or recipe.sampling.max_new_tokens,
        samples=how.samples,
        temperature=how.temperature or recipe.sampling.temperature,
        seed=chance(recipe.train.seed, 2),
        like=like,
        progress=progress,
    )


def evaluate_recipe(recipe: Recipe, say: Say = lambda text: None) -> tuple[Evaluation, str | None]:
    """Load a recipe's model and held-out rows, and measure; also the name of the metric that counts."""
    parts = load_parts(recipe, say=say)
    metric, found = metric_of(parts), Evaluation({})
    if metric is None:
        raise ConfigError("there is nothing to evaluate on: set data.held_out, or preference.held_out for pairs")
    if len(parts.held_out):
        found = evaluate_held_out(parts, Engine(parts.prepared, max_rows=recipe.sampling.max_rows))
    found.metrics.update(likelier_answers(parts))
    return found, LIKELIER if metric == PREFERRED else metric
