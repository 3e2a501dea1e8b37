"""Evaluation on held-out rows and pairs: during a run, and by itself (`groupwise eval`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from groupwise.config import Recipe
from groupwise.conversations import Episode
from groupwise.data import Prompt
from groupwise.distributed.ranks import Ranks
from groupwise.errors import ConfigError, UserCodeError
from groupwise.evaluate import Evaluation, evaluate
from groupwise.evaluate.answers import REWARD, SampledAnswers
from groupwise.generate import Generator, Sampling
from groupwise.generate.engine import watched
from groupwise.generate.registry import make_generator
from groupwise.model.packing import default_token_budget
from groupwise.rewards import Scorer
from groupwise.seeds import derive_seed
from groupwise.tasks import TaskRow
from groupwise.text import Say, plural
from groupwise.training.components import PromptSet, RunComponents, load_components
from groupwise.training.display.base import Display
from groupwise.training.extras import check_extras
from groupwise.training.preference import LOGP_ACCURACY, PREFERENCE_ACCURACY
from groupwise.training.preference.dataset_pairs import PairSampler, logp_accuracy
from groupwise.training.rollout.episodes import episode_starts, reward_columns
from groupwise.training.update.reference import Reference

RowProgress = Callable[[float, int, int], None]
"""Called with the number of rows done, their total, and the tokens sampled so far.

A completion that is not finished counts as its share of the maximal length.
"""

# The ``trainer_state`` of reward functions when nothing is trained.
NO_STEPS = SimpleNamespace(global_step=0, max_steps=0, epoch=0.0, num_input_tokens_seen=0)


def evaluate_rows(
    components: RunComponents,
    generator: Generator,
    progress: RowProgress = lambda done, total, tokens: None,
    trainer_state: Any = NO_STEPS,
) -> Evaluation:
    """Sample and grade completions of the held-out rows as [evaluate] says."""
    total, samples = len(components.held_out), components.recipe.evaluate.samples
    rows_before = tokens_before = tokens_now = 0  # of the chunks that are finished, and with the current one

    def chunk_finished(rows: int, _: int) -> None:
        nonlocal rows_before, tokens_before
        rows_before, tokens_before = rows, tokens_now
        progress(float(rows), total, tokens_now)

    def sampled(completions: float, _: int, tokens: int) -> None:
        nonlocal tokens_now
        tokens_now = tokens_before + tokens
        progress(rows_before + completions / samples, total, tokens_now)

    held_out, evaluation = components.held_out, Evaluation({})
    with watched(generator, sampled), _scoring_held_out(components.scorer):
        if not held_out.parts:
            return _evaluate_rows(components, held_out, generator, chunk_finished, trainer_state)
        for name, places in held_out.parts.items():
            part = PromptSet([held_out.rows[i] for i in places], [held_out.prompts[i] for i in places])
            finished = _shifted(chunk_finished, places.start)
            result = _evaluate_rows(components, part, generator, finished, trainer_state)
            evaluation.metrics.update({f"{name}/{metric}": value for metric, value in result.metrics.items()})
            evaluation.answers.extend({**answer, "row": answer["row"] + places.start} for answer in result.answers)
    return evaluation


def _shifted(finished: Callable[[int, int], None], start: int) -> Callable[[int, int], None]:
    """``finished`` for rows that come after ``start`` others."""
    return lambda rows, total: finished(start + rows, total)


@contextmanager
def _scoring_held_out(scorer: Scorer | None) -> Iterator[None]:
    """Within this block it is reported that the rewards are those of held-out rows."""
    if scorer is None or scorer.on_call is None:
        yield
        return
    report = scorer.on_call
    scorer.on_call = lambda names: report(f"{names} (held-out rows)")
    try:
        yield
    finally:
        scorer.on_call = report


def show_rows(display: Display) -> RowProgress:
    """Shows the progress of an evaluation."""

    def progress(done: float, total: int, tokens: int) -> None:
        display.progress("evaluating", done, total, "rows", detail=plural(tokens, "token"))

    return progress


def _evaluate_rows(
    components: RunComponents,
    held_out: PromptSet,
    generator: Generator,
    progress: Callable[[int, int], None],
    trainer_state: Any,
) -> Evaluation:
    settings, recipe = components.recipe.evaluate, components.recipe
    sampling = Sampling(
        max_new_tokens=settings.max_new_tokens or recipe.sampling.max_new_tokens,
        temperature=settings.temperature or 1.0,
        greedy=settings.temperature == 0,
        seed=derive_seed("evaluation", recipe.train.seed),
    )
    sample = None if components.episodes is None else partial(_converse, components, generator, sampling)
    return evaluate(
        generator,
        components.tokenizer,
        held_out.rows,
        held_out.prompts,
        grades=components.task.grades,
        scorer=components.scorer if settings.rewards or not components.task.grades else None,
        each_reward=settings.rewards,
        sampling=sampling,
        samples=settings.samples,
        stop=components.stop,
        prompt_column=recipe.data.prompt,
        score_batch=recipe.train.prompts_per_step * recipe.sampling.samples_per_prompt,
        trainer_state=trainer_state,
        progress=progress,
        sample=sample,
    )


def _converse(
    components: RunComponents,
    generator: Generator,
    sampling: Sampling,
    rows: Sequence[TaskRow],
    prompts: Sequence[Prompt],
    keys: Sequence[int],
) -> SampledAnswers:
    """Held-out rows as conversations. One whose environment fails, even afresh, ends where it was, without a reward.

    If all of them fail, that is an error.
    """
    recipe, sampler = components.recipe, components.episodes
    if sampler is None:
        raise ConfigError("these completions are no conversations: the run has no environment")
    seeds = [derive_seed("held-out environment", recipe.train.seed, key) for key in keys]
    starts = episode_starts(components.builder, rows, prompts, recipe.data.prompt, seeds, keys)
    groups = sampler.sample(generator, starts, recipe.evaluate.samples, sampling, stop=components.stop)
    failures = [episode.failure for members in groups for episode in members]
    if all(failures):
        raise UserCodeError(
            f"every conversation about the held-out rows failed, also after a fresh start: {failures[0]}"
        )
    return answers_of(rows, groups)


def answers_of(rows: Sequence[TaskRow], groups: Sequence[Sequence[Episode]]) -> SampledAnswers:
    """The conversations about each row, as they are graded and scored."""
    episodes = [(row, episode) for row, members in zip(rows, groups, strict=True) for episode in members]
    return SampledAnswers(
        texts=[episode.text for _, episode in episodes],
        ids=[episode.joined("ids").tolist() for _, episode in episodes],
        stop_reasons=[episode.stop_reason for _, episode in episodes],
        rows=[{**row, **reward_columns(episode)} for row, episode in episodes],
        conversations=[episode.messages for _, episode in episodes],
    )


def evaluate_policy(
    components: RunComponents,
    generator: Generator,
    pairs: PairSampler,
    reference: Reference | None,
    step_recipe: Recipe,
    *,
    progress: RowProgress,
    trainer_state: Any,
    ranks: Ranks | None = None,
) -> Evaluation:
    """Everything that a run holds out: its rows, and its preference pairs relative to the reference."""
    evaluation = Evaluation({})
    if components.grades_rows:
        evaluation = evaluate_rows(components, generator, progress, trainer_state)
    if reference is not None:
        budget = default_token_budget(components.handle)  # the one that the reference's log-probs were computed with
        dropout = components.has_dropout
        evaluation.metrics.update(
            pairs.measure(components.handle, reference, step_recipe, budget, dropout=dropout, ranks=ranks)
        )
    if ranks is not None:  # a grade may not be repeatable, and all ranks must decide the same by it
        evaluation.metrics.update(ranks.from_main(evaluation.metrics))
    return evaluation


def answers_table(step: int, evaluation: Evaluation, components: RunComponents) -> dict[str, list[Any]]:
    """One row per held-out completion, for the evaluation's Parquet file."""
    answers, prompts = evaluation.answers, components.held_out.prompts
    table: dict[str, list[Any]] = {
        "step": [step] * len(answers),
        "row": [answer["row"] for answer in answers],
        "where": [answer["where"] for answer in answers],
        "sample": [answer["sample"] for answer in answers],
        "prompt": [prompts[answer["row"]].text for answer in answers],
        "completion": [answer["answer"] for answer in answers],
        "completion_tokens": [answer["tokens"] for answer in answers],
        "stop_reason": [answer["stop_reason"] for answer in answers],
    }
    for name in components.task.grades:
        table[f"grade/{name}"] = [answer[name] for answer in answers]
    if answers and REWARD in answers[0]:
        table["reward"] = [answer[REWARD] for answer in answers]
    return table if answers else {}


def evaluate_recipe(
    recipe: Recipe, say: Say = lambda text: None, display: Display | None = None
) -> tuple[Evaluation, str | None]:
    """Load a recipe's model and held-out rows, and evaluate; also the name of the main metric."""
    check_extras(recipe, training=False)
    display = display or Display()
    components = load_components(recipe, say=say, display=display, training=False)
    metric, evaluation = components.metric, Evaluation({})
    if metric is None:
        raise ConfigError(
            "there is nothing to evaluate on: set data.held_out or data.held_out_from_train, or preference.held_out "
            "for pairs"
        )
    if len(components.held_out):
        display.progress("evaluating", 0.0, len(components.held_out), "rows")
        with ExitStack() as stack:
            if components.episodes is not None:
                stack.enter_context(closing(components.episodes))
            generator = stack.enter_context(closing(make_generator(recipe, components.handle)))
            generator.update_weights(0)
            evaluation = evaluate_rows(components, generator, show_rows(display))
    evaluation.metrics.update(logp_accuracy(components.handle, components.pairs.held_out))
    return evaluation, LOGP_ACCURACY if metric == PREFERENCE_ACCURACY else metric
