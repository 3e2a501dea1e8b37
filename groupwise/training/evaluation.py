"""Evaluation on held-out rows and pairs: during a run, and by itself (`groupwise eval`)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from groupwise.config import Recipe
from groupwise.errors import ConfigError
from groupwise.evaluate import Evaluation, evaluate
from groupwise.generate import Engine, Sampling
from groupwise.generate.engine import watched
from groupwise.model.packing import default_token_budget
from groupwise.text import Say
from groupwise.training.components import RunComponents, load_components
from groupwise.training.display.base import Display
from groupwise.training.extras import check_extras
from groupwise.training.preference import LOGP_ACCURACY, PREFERENCE_ACCURACY
from groupwise.training.preference.dataset_pairs import PairSampler, logp_accuracy
from groupwise.training.seeds import derive_seed
from groupwise.training.update.reference import Reference

RowProgress = Callable[[int, int], None]
"""Called with the number of rows done and their total."""

# The ``trainer_state`` of reward functions when nothing is trained.
NO_STEPS = SimpleNamespace(global_step=0, max_steps=0, epoch=0.0, num_input_tokens_seen=0)


def evaluate_rows(
    components: RunComponents,
    engine: Engine,
    progress: RowProgress = lambda done, total: None,
    trainer_state: Any = NO_STEPS,
) -> Evaluation:
    """Sample and grade completions of the held-out rows as [evaluate] says."""
    finished, total, samples = 0, len(components.held_out), components.recipe.evaluate.samples

    def chunk_finished(done: int, _: int) -> None:
        nonlocal finished
        finished = done
        progress(done, total)

    def sampled(done: int, _: int) -> None:
        progress(min(total, finished + done // samples), total)

    with watched(engine, sampled):
        return _evaluate_rows(components, engine, chunk_finished, trainer_state)


def _evaluate_rows(components: RunComponents, engine: Engine, progress: RowProgress, trainer_state: Any) -> Evaluation:
    settings, recipe = components.recipe.evaluate, components.recipe
    return evaluate(
        engine,
        components.tokenizer,
        components.held_out.rows,
        components.held_out.prompts,
        grades=components.task.grades,
        scorer=None if components.task.grades else components.scorer,
        sampling=Sampling(
            max_new_tokens=settings.max_new_tokens or recipe.sampling.max_new_tokens,
            temperature=settings.temperature or 1.0,
            greedy=settings.temperature == 0,
            seed=derive_seed("evaluation", recipe.train.seed),
        ),
        samples=settings.samples,
        stop=components.stop,
        prompt_column=recipe.data.prompt,
        score_batch=recipe.train.batch_size * recipe.train.accumulation * recipe.sampling.samples_per_prompt,
        trainer_state=trainer_state,
        progress=progress,
    )


def evaluate_policy(
    components: RunComponents,
    engine: Engine,
    pairs: PairSampler,
    reference: Reference | None,
    step_recipe: Recipe,
    *,
    progress: RowProgress,
    trainer_state: Any,
) -> Evaluation:
    """Everything that a run holds out: its rows, and its preference pairs relative to the reference."""
    evaluation = Evaluation({})
    if len(components.held_out):
        evaluation = evaluate_rows(components, engine, progress, trainer_state)
    if reference is not None:
        budget = default_token_budget(components.handle)  # the one that the reference's log-probs were computed with
        evaluation.metrics.update(
            pairs.measure(components.handle, reference, step_recipe, budget, dropout=components.has_dropout)
        )
    return evaluation


def evaluate_recipe(
    recipe: Recipe, say: Say = lambda text: None, display: Display | None = None
) -> tuple[Evaluation, str | None]:
    """Load a recipe's model and held-out rows, and evaluate; also the name of the main metric."""
    check_extras(recipe, training=False)
    display = display or Display()
    components = load_components(recipe, say=say, display=display)
    metric, evaluation = components.metric, Evaluation({})
    if metric is None:
        raise ConfigError("there is nothing to evaluate on: set data.held_out, or preference.held_out for pairs")
    if len(components.held_out):
        engine = Engine(components.handle, max_num_seqs=recipe.sampling.max_num_seqs)
        evaluation = evaluate_rows(
            components, engine, lambda done, total: display.progress("evaluating", done, total, "rows")
        )
    evaluation.metrics.update(logp_accuracy(components.handle, components.pairs.held_out))
    return evaluation, LOGP_ACCURACY if metric == PREFERENCE_ACCURACY else metric
