"""Sample episodes: the generator takes the model's turns, environments answer between them.

In each round the generator samples a turn of every conversation whose environment has answered, while slower
environments go on. Between rounds it may keep what it has computed. An environment that fails is started afresh with
the same row and seed; if it fails again, its episode's outcome is "failed".

The random numbers of a turn depend on the seed, the prompt's key, the sample's number, the attempt and the turn, and on
nothing else. A conversation that is only a prompt yet is sampled together with the others of its group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from groupwise.conversations.episodes import Episode, EpisodeLimits, EpisodeTurn, SampledTokens
from groupwise.conversations.event_loop import EventLoop
from groupwise.conversations.formats import TurnFormat
from groupwise.conversations.rollout_function import RolloutConversation, RolloutEnd, RolloutFunction, TurnRequest
from groupwise.conversations.sharded import divide_episodes
from groupwise.data.pair_formats import common_length
from groupwise.environments import (
    EnvironmentFactory,
    EnvironmentFailed,
    Message,
    Reply,
    watched,
    with_opening,
)
from groupwise.environments.watch import WatchedEnvironment
from groupwise.errors import InputError
from groupwise.generate.sharded import ShardedGenerator, scaled
from groupwise.generate.types import Generator, Progress, Rollout, Sampling, Stop, keeping
from groupwise.seeds import derive_seed

Partner = WatchedEnvironment | RolloutConversation
"""The other side of a conversation."""

Generate = Callable[..., Rollout]
"""Called with a generator and the arguments of its method: contexts, the number of samples of each, the sampling and
``keys``."""


@dataclass
class EpisodeStart:
    """What the episodes of a group have in common: a row, and its prompt as tokens and as messages."""

    row: dict[str, Any]
    prompt_ids: Sequence[int]
    messages: Sequence[Message]
    key: int  # identifies the prompt for the random numbers of its turns
    seed: int  # of the environments


@dataclass
class _Running:
    """An episode that goes on, and its environment."""

    group: int
    number: int  # in its group
    environment: Partner
    episode: Episode
    format: TurnFormat
    attempt: int = 0
    max_tokens: int | None = None  # of the next turn, if a rollout function said so


class EpisodeSampler:
    """Holds conversations of the model with environments that ``factory`` makes, or with a rollout function.

    An environment that did not fail is used again for later conversations; `close` closes all of them.
    """

    def __init__(
        self, factory: EnvironmentFactory | RolloutFunction, turn_format: TurnFormat, limits: EpisodeLimits
    ) -> None:
        self.factory, self.format, self.limits = factory, turn_format, limits
        self._loop: EventLoop | None = None
        self._idle: list[Partner] = []

    def limit_context(self, length: int) -> None:
        """End conversations at this number of tokens with the prompt, if there is no smaller limit."""
        smallest = min(length, self.limits.context_length or length)
        self.limits = replace(self.limits, context_length=smallest)

    @property
    def loop(self) -> EventLoop:
        """The event loop of the conversations, which starts with the first one."""
        if self._loop is None:
            self._loop = EventLoop()
        return self._loop

    def take_environment(self) -> Partner:
        """An environment that is in no conversation."""
        if self._idle:
            return self._idle.pop()
        made = self.factory()
        return made if isinstance(made, RolloutConversation) else watched(made, self.limits.environment)

    def give_back(self, environment: Partner) -> None:
        """Keep an environment whose conversation has ended."""
        self._idle.append(environment)

    def close(self) -> None:
        """Close the environments, and end the event loop."""
        idle, self._idle = self._idle, []
        try:
            if idle:
                self.loop.advance([(None, _outcome(environment.close())) for environment in idle])
        finally:
            if self._loop is not None:
                self._loop.close()
                self._loop = None

    def sample(
        self,
        generator: Generator,
        starts: Sequence[EpisodeStart],
        samples: int,
        sampling: Sampling,
        *,
        stop: Stop | None = None,
        generate: Generate | None = None,
        progress: Progress = lambda done, total, tokens: None,
    ) -> list[list[Episode]]:
        """``samples`` episodes of each start. ``generate`` replaces the generator's method, to do more around it.

        ``progress`` is called after each round with the episodes that are done, their total, and the sampled tokens.
        With a generator of several ranks, the starts are divided among them, and all of them call this.
        """
        if samples < 1:
            raise InputError(f"samples must be at least 1, got {samples}")
        if isinstance(generator, ShardedGenerator):

            def sample(inner: Generator, numbers: list[int]) -> list[list[Episode]]:
                report = scaled(progress, len(starts) / len(numbers))
                options: dict[str, Any] = {"stop": stop, "generate": generate, "progress": report}
                return self.sample(inner, [starts[number] for number in numbers], samples, sampling, **options)

            costs = [len(start.prompt_ids) + samples * sampling.max_new_tokens for start in starts]
            return divide_episodes(generator, costs, sample)
        if self.format.stop_ids is not None and sampling.eos_ids is None:
            sampling = replace(sampling, eos_ids=self.format.stop_ids)
        sample_turns = partial(generator.generate, stop=stop) if generate is None else partial(generate, generator)
        session = _Session(self, sample_turns, starts, samples, sampling)
        try:
            with keeping(generator):
                return session.run(progress)
        except BaseException:
            session.abandon()
            raise
        finally:
            for environment in session.used:
                self.give_back(environment)


class _Session:
    """The episodes of one call of `EpisodeSampler.sample`."""

    def __init__(
        self,
        sampler: EpisodeSampler,
        sample_turns: Callable[..., Rollout],
        starts: Sequence[EpisodeStart],
        samples: int,
        sampling: Sampling,
    ) -> None:
        self.limits, self.format, self.sampler = sampler.limits, sampler.format, sampler
        self.sample_turns, self.starts, self.samples, self.sampling = sample_turns, starts, samples, sampling
        self.finished: list[list[Episode | None]] = [[None] * samples for _ in starts]
        self.unstarted = [samples] * len(starts)  # first attempts that have not started yet, by group
        self.openings: list[list[_Running]] = [[] for _ in starts]  # first attempts that wait for these
        self.open: list[Partner] = []  # environments in a conversation
        self.used: list[Partner] = []  # environments whose conversation has ended
        self.done = self.tokens = 0

    def abandon(self) -> None:
        """After an error or an interrupt: close the environments, in a few seconds at most."""
        self.sampler.loop.cancel()
        closing = [(None, _outcome(environment.close())) for environment in self.open]
        self.open = []
        self.sampler.loop.advance(closing)
        self.sampler.loop.cancel()

    def run(self, progress: Progress) -> list[list[Episode]]:
        total = len(self.starts) * self.samples
        started = [self._start(group, number) for group in range(len(self.starts)) for number in range(self.samples)]
        while answers := self.sampler.loop.advance(started):
            speaking: list[_Running] = []
            started = []
            for running, answer in answers:
                if running is None:  # an environment was closed
                    continue
                is_opening = not running.episode.turns and not running.attempt
                if isinstance(answer, EnvironmentFailed):
                    started += self._failed(running, answer)
                elif running.episode.outcome is not None:
                    self._finish(running, answer)
                elif isinstance(goes_on := self._take(running, answer), EnvironmentFailed):
                    started += self._failed(running, goes_on)
                elif not goes_on:
                    started.append((running, self._reward(running)))
                elif is_opening:
                    self.openings[running.group].append(running)
                else:
                    speaking.append(running)
                if is_opening:
                    self.unstarted[running.group] -= 1
                    if not self.unstarted[running.group]:
                        speaking += self.openings[running.group]
            started += self._speak(speaking)
            progress(self.done, total, self.tokens)
        return [[episode for episode in episodes if episode is not None] for episodes in self.finished]

    def _start(self, group: int, number: int, attempt: int = 0) -> tuple[_Running, Any]:
        start = self.starts[group]
        environment = self.sampler.take_environment()
        self.open.append(environment)
        episode = Episode(list(start.prompt_ids), attempts=attempt + 1)
        running = _Running(group, number, environment, episode, self.format, attempt)
        if isinstance(environment, RolloutConversation):
            return running, _outcome(environment.start(dict(start.row), start.seed, episode))
        return running, _outcome(environment.start(dict(start.row), start.seed))

    def _take(
        self, running: _Running, answer: list[Message] | Reply | TurnRequest | RolloutEnd | None
    ) -> EnvironmentFailed | bool:
        """Append what the environment said; whether the episode goes on, or what is wrong with the answer."""
        episode, start = running.episode, self.starts[running.group]
        try:
            if isinstance(answer, TurnRequest):
                answer.add_to(episode)
                running.format, running.max_tokens = answer.format, answer.max_tokens
            elif isinstance(answer, RolloutEnd):
                episode.outcome = answer.outcome
            elif isinstance(answer, Reply):
                self._reply(episode, answer)
            elif answer:
                episode.greeting = answer
                episode.prompt = self.format.prompt(with_opening(start.messages, answer))
        except InputError as error:  # the chat template takes no such messages
            return EnvironmentFailed(
                f"gave messages that cannot be shown to the model: {error}", running.environment.name
            )
        if episode.outcome is None and self.limits.room(episode) < 1:
            episode.outcome = "token_limit"
        return episode.outcome is None

    def _reply(self, episode: Episode, reply: Reply) -> None:
        """Note the reply to the last turn."""
        turn = episode.turns[-1]
        turn.reward = reply.reward
        turn.calls = len(reply.results)
        turn.failed_calls = sum(not result.ok for result in reply.results)
        turn.messages = list(reply.messages)
        if reply.done:
            episode.outcome = "done"
        elif len(episode.turns) == self.limits.max_turns:
            episode.outcome = "turn_limit"
        else:
            given = self.format.given_after(reply.messages, turn.sampled.ids.tolist())
            if len(given) < self.limits.room(episode):
                turn.given = given
            else:  # the model could not answer any more
                episode.outcome = "token_limit"

    def _speak(self, speaking: Sequence[_Running]) -> list[tuple[_Running, Any]]:
        """Sample a turn of each of these conversations, and start the environments' answers."""
        by_limit: dict[int, list[_Running]] = defaultdict(list)
        for running in speaking:
            limits = (self.sampling.max_new_tokens, self.limits.room(running.episode), running.max_tokens)
            by_limit[min(limit for limit in limits if limit is not None)].append(running)
        started = []
        for limit, members in sorted(by_limit.items(), reverse=True):
            for running, sampled in zip(members, self._sample_turns(members, limit), strict=True):
                started.append(self._said(running, sampled, limit))
        return started

    def _sample_turns(self, members: Sequence[_Running], limit: int) -> list[SampledTokens]:
        """The next turn of each member, of at most ``limit`` tokens."""
        least = min(self.sampling.min_new_tokens, limit)
        sampling = replace(self.sampling, max_new_tokens=limit, min_new_tokens=least)
        contexts = [running.episode.context for running in members]
        keys, requests = [], {}
        for running, context in zip(members, contexts, strict=True):
            together = self._speaks_with_group(running)
            own = () if together else (running.number, running.attempt, len(running.episode.turns))
            key = derive_seed("turn", self.starts[running.group].key, *own)
            # Samples of one context, of which a few may not be used: those of members that failed.
            requests[key] = (context, self.samples if together else 1)
            keys.append((key, running.number if together else 0))
        rows = dict(zip(requests, accumulate([0, *(count for _, count in requests.values())]), strict=False))
        ids, counts = zip(*requests.values(), strict=True)
        rollout = self.sample_turns(ids, counts, sampling, keys=list(requests))
        ends, turns = rollout.lengths.cumsum(0).tolist(), []
        for key, number in keys:
            row = rows[key] + number
            length = int(rollout.lengths[row])
            kept = None if rollout.kept is None else rollout.kept.select(torch.arange(ends[row] - length, ends[row]))
            turns.append(
                SampledTokens(
                    rollout.ids[row, :length],
                    rollout.logps[row, :length],
                    rollout.filtered_logps[row, :length],
                    rollout.versions[row, :length],
                    kept,
                    rollout.stop_reasons[row],
                )
            )
        self.tokens += sum(len(turn.ids) for turn in turns)
        return turns

    def _speaks_with_group(self, running: _Running) -> bool:
        """Whether all of its group are at the same prompt, so that they are samples of one context."""
        if running.episode.turns or running.attempt:
            return False
        return all(other.episode.prompt == running.episode.prompt for other in self.openings[running.group])

    def _said(self, running: _Running, sampled: SampledTokens, limit: int) -> tuple[_Running, Any]:
        """Append a sampled turn of at most ``limit`` tokens; what the environment does next."""
        episode = running.episode
        before = episode.turns[-1].given if episode.turns else episode.prompt
        calls = sum(len(turn.said.calls) for turn in episode.turns)
        said = running.format.parse(sampled.ids.tolist(), before, calls)
        environment = running.environment
        is_cut = sampled.stop_reason == "length"
        is_cut = is_cut and not (running.format.keeps_cut_turns and limit == self.sampling.max_new_tokens)
        if isinstance(environment, RolloutConversation):
            episode.turns.append(EpisodeTurn(sampled, said, calls=len(said.calls)))
            return running, _outcome(environment.hear(is_cut))
        episode.turns.append(EpisodeTurn(sampled, said, environment.state_key()))
        if is_cut:
            episode.outcome = "token_limit"
            return running, self._reward(running)
        return running, _outcome(environment.respond(said))

    async def _reward(self, running: _Running) -> Any:
        result = await _outcome(running.environment.reward())
        running.episode.counts = dict(running.environment.counts)
        return result

    def _finish(self, running: _Running, reward: Any) -> None:
        episode = running.episode
        if isinstance(reward, dict):
            episode.rewards = {name: value for name, value in reward.items() if value is not None}
            reward = sum(episode.rewards.values()) if episode.rewards else None
        episode.reward = reward
        if isinstance(running.environment, WatchedEnvironment):
            episode.environment = running.environment.environment
        self.finished[running.group][running.number] = episode
        self.done += 1
        self.open.remove(running.environment)
        self.used.append(running.environment)

    def _failed(self, running: _Running, failure: EnvironmentFailed) -> list[tuple[Any, Any]]:
        """Start the episode again, or give it up."""
        self.open.remove(running.environment)
        close = (None, _outcome(running.environment.close()))
        if running.attempt < self.limits.retries:
            return [close, self._start(running.group, running.number, running.attempt + 1)]
        running.episode.outcome, running.episode.failure = "failed", str(failure)
        self.finished[running.group][running.number] = running.episode
        self.done += 1
        return [close]


async def _outcome(awaitable: Any) -> Any:
    """The result, or the failure as a value."""
    try:
        return await awaitable
    except EnvironmentFailed as failure:
        return failure


def share_prompt(episodes: Sequence[Episode]) -> None:
    """Give the episodes of a group the same prompt: what differs becomes given tokens behind it."""
    first, last = min(episode.prompt for episode in episodes), max(episode.prompt for episode in episodes)
    common = first[: common_length(first, last)]  # what the first and the last in order share, all share
    if not common:
        raise InputError("the conversations of a group must start with the same token")
    for episode in episodes:
        episode.opening = episode.prompt[len(common) :] + episode.opening
        episode.prompt = common
