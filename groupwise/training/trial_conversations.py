"""`groupwise check` for a run with an environment: one group of conversations, held and scored before training."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing

from groupwise.conversations import EpisodeSampler
from groupwise.data import reward_inputs
from groupwise.errors import UserCodeError
from groupwise.generate import Sampling
from groupwise.generate.registry import make_generator
from groupwise.rewards import Scorer
from groupwise.rewards.contract import Scores
from groupwise.seeds import derive_seed
from groupwise.text import plural
from groupwise.training.components import RunComponents
from groupwise.training.evaluation import NO_STEPS, answers_of
from groupwise.training.rollout.episodes import episode_starts


def try_conversations(components: RunComponents, sampler: EpisodeSampler) -> Iterator[str]:
    """What happened in the conversations about the first row, and their rewards; an error if the environment failed."""
    recipe, scorer = components.recipe, components.scorer
    row, prompt, settings = components.train.rows[0], components.train.prompts[0], recipe.sampling
    seed = derive_seed("environment", recipe.train.seed, 0)
    starts = episode_starts(components.builder, [row], [prompt], recipe.data.prompt, [seed])
    sampling = Sampling(max_new_tokens=settings.max_new_tokens, temperature=settings.temperature)
    start = time.perf_counter()
    with closing(sampler), closing(make_generator(recipe, components.handle)) as generator:
        generator.update_weights(0)
        (episodes,) = sampler.sample(generator, starts, settings.samples_per_prompt, sampling, stop=components.stop)
    seconds = time.perf_counter() - start
    for episode in episodes:
        if episode.failure is not None:
            raise UserCodeError(episode.failure)
    count = len(episodes)
    turns = sum(len(episode.turns) for episode in episodes) / count
    answers = answers_of([row], [episodes])
    tokens = sum(map(len, answers.ids))
    outcomes = ", ".join(f"{number} {name}" for name, number in Counter(e.outcome for e in episodes).most_common())
    yield (
        f"{plural(count, 'conversation')} about the first row: {turns:.1f} turns each, {plural(tokens, 'token')} in "
        f"all, {seconds:.1f} s; how they ended: {outcomes}"
    )
    if scorer is None:
        return
    scores = scorer.score(
        *reward_inputs(answers.rows, answers.texts, recipe.data.prompt, answers.conversations),
        completion_ids=answers.ids,
        trainer_state=NO_STEPS,
    )
    yield from score_lines(scorer, scores, "conversations")


def score_lines(scorer: Scorer, scores: Scores, unit: str, of: str = "") -> Iterator[str]:
    """What the rewards gave: the first failure, which is only counted if scoring.on_error is "drop", and the ranges."""
    for failure in scores.failures[:1]:
        count = f"{len(scores.failures)} of {len(scores.rewards)}"
        yield f"reward {failure.function} failed on {count} {unit}: {failure.reason}"
    for function, values in zip(scorer.functions, scores.rewards.T.tolist(), strict=True):
        yield f"reward {function.name}{of}: {min(values):.3g} to {max(values):.3g}"
