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
from groupwise.seeds import derive_seed
from groupwise.text import plural
from groupwise.training.components import RunComponents
from groupwise.training.evaluation import NO_STEPS
from groupwise.training.rollout.episodes import episode_starts, reward_columns


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
    tokens = sum(len(episode.joined("ids")) for episode in episodes)
    outcomes = ", ".join(f"{number} {name}" for name, number in Counter(e.outcome for e in episodes).most_common())
    yield (
        f"{plural(count, 'conversation')} about the first row: {turns:.1f} turns each, {plural(tokens, 'token')} in "
        f"all, {seconds:.1f} s; how they ended: {outcomes}"
    )
    if scorer is None:
        return
    scores = scorer.score(
        *reward_inputs(
            [{**row, **reward_columns(episode)} for episode in episodes],
            [episode.text for episode in episodes],
            recipe.data.prompt,
            [episode.messages for episode in episodes],
        ),
        completion_ids=[episode.joined("ids").tolist() for episode in episodes],
        trainer_state=NO_STEPS,
    )
    for failure in scores.failures[:1]:
        yield f"reward {failure.function} failed on {len(scores.failures)} of {count} conversations: {failure.reason}"
    for function, values in zip(scorer.functions, scores.rewards.T.tolist(), strict=True):
        yield f"reward {function.name}: {min(values):.3g} to {max(values):.3g}"
