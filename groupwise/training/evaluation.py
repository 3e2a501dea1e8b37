"""Evaluation of a recipe's held-out rows: during a run, and by itself (`groupwise eval`)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from groupwise.config import Recipe
from groupwise.errors import ConfigError
from groupwise.evaluate import REWARD, Evaluation, evaluate
from groupwise.generate import Engine, Sampling
from groupwise.model.logprobs import default_token_budget
from groupwise.training.components import RunComponents, Say, load_components
from groupwise.training.monitor.log_prob_mismatch import has_dropout
from groupwise.training.preference.dataset_pairs import likelier_answers
from groupwise.training.rollout.collector import derive_seed
from groupwise.training.store.recorder import LIKELIER, PREFERRED
from groupwise.usmle.analysis import ExamReport, ModelAnswer
from groupwise.usmle.exam import ModelUnderTest, run_exam
from groupwise.usmle.exam import Progress as ExamProgress

if TYPE_CHECKING:
    from groupwise.training.trainer import Trainer

Progress = Callable[[int, int], None]
# What a reward that looks at ``trainer_state`` sees where nothing is trained.
NO_STEPS = SimpleNamespace(global_step=0, max_steps=0, epoch=0.0, num_input_tokens_seen=0)


def metric_of(components: RunComponents) -> str | None:
    """What the best checkpoint is chosen by; None where nothing is held out."""
    known = (list(components.task.grades) or [REWARD]) if len(components.held_out) else []
    known += [PREFERRED] if components.pairs.held_out else []
    if not known:
        return None
    name = (
        components.recipe.evaluate.metric or (components.task.metric if len(components.held_out) else None) or known[0]
    )
    if name not in known:
        raise ConfigError(f"evaluate.metric {name!r} is not measured by this task (there are: {', '.join(known)})")
    return name


def evaluate_held_out(
    components: RunComponents,
    engine: Engine,
    progress: Progress = lambda done, total: None,
    trainer_state: Any = NO_STEPS,
) -> Evaluation:
    """Answer and grade the held-out rows as the recipe's [evaluate] says."""
    how = components.recipe.evaluate
    return evaluate(
        engine,
        components.tokenizer,
        components.held_out.rows,
        components.held_out.prompts,
        grades=components.task.grades,
        scorer=None if components.task.grades else components.scorer,
        sampling=Sampling(
            max_new_tokens=how.max_new_tokens or components.recipe.sampling.max_new_tokens,
            temperature=how.temperature or 1.0,
            greedy=how.temperature == 0,
            seed=derive_seed(components.recipe.train.seed, 2),
        ),
        samples=how.samples,
        stop=components.stop,
        prompt_column=components.recipe.data.prompt,
        trainer_state=trainer_state,
        progress=progress,
    )


def evaluate_run(trainer: Trainer) -> Evaluation:
    """All that a run holds out: its questions, and its pairs of answers."""
    components, found = trainer.components, Evaluation({})
    if len(components.held_out):
        found = evaluate_held_out(
            components,
            trainer.engine,
            lambda done, total: trainer.display.stage(f"evaluating: {done} of {total}"),
            trainer.state_for_rewards(),
        )
    if trainer.reference is not None:
        budget, dropout = default_token_budget(components.handle), has_dropout(trainer.recipe)  # as for the reference
        found.metrics.update(
            trainer.pairs.measure(components.handle, trainer.reference, trainer.now(), budget, dropout=dropout)
        )
    return found


def run_exam_of_recipe(
    recipe: Recipe,
    progress: ExamProgress = lambda what, done, total: None,
    say: Say = lambda text: None,
    like: ExamReport | None = None,
) -> tuple[ExamReport, list[ModelAnswer]]:
    """Load a recipe's model and held-out questions of multiple choice, and have it sit the exam.

    ``like``: an earlier report that the new one is to be compared with.
    """
    components = load_components(recipe, say=say)
    how = recipe.evaluate
    candidate = ModelUnderTest(
        components.handle,
        Engine(components.handle, max_num_seqs=recipe.sampling.max_num_seqs),
        components.tokenizer,
        components.builder,
        recipe.data.prompt,
        components.stop,
    )
    return run_exam(
        candidate,
        components.task,
        components.held_out.rows,
        max_new_tokens=how.max_new_tokens or recipe.sampling.max_new_tokens,
        samples=how.samples,
        temperature=how.temperature or recipe.sampling.temperature,
        seed=derive_seed(recipe.train.seed, 2),
        like=like,
        progress=progress,
    )


def evaluate_recipe(recipe: Recipe, say: Say = lambda text: None) -> tuple[Evaluation, str | None]:
    """Load a recipe's model and held-out rows, and measure; also the name of the metric that counts."""
    components = load_components(recipe, say=say)
    metric, found = metric_of(components), Evaluation({})
    if metric is None:
        raise ConfigError("there is nothing to evaluate on: set data.held_out, or preference.held_out for pairs")
    if len(components.held_out):
        found = evaluate_held_out(components, Engine(components.handle, max_num_seqs=recipe.sampling.max_num_seqs))
    found.metrics.update(likelier_answers(components))
    return found, LIKELIER if metric == PREFERRED else metric
