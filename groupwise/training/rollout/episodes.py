"""The batch of a step whose completions are conversations, and what is reported of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from groupwise.conversations import OUTCOMES, Episode, EpisodeSampler, EpisodeStart, share_prompt
from groupwise.conversations.episodes import state_numbers
from groupwise.conversations.sampler import Generate
from groupwise.core.filters import KeptSets
from groupwise.core.ragged import Ragged
from groupwise.core.sequences import Turns
from groupwise.data import Prompt, PromptBuilder
from groupwise.data.pair_formats import common_length
from groupwise.environments import Message
from groupwise.errors import ConfigError, UserCodeError
from groupwise.generate.types import Generator, Progress, Rollout, Sampling
from groupwise.model.tree import sort_contexts
from groupwise.seeds import derive_seed
from groupwise.tasks.base import TaskRow
from groupwise.training.environments import REWARD_COLUMNS
from groupwise.training.rollout.batch import Batch, TurnFacts, filtered_probability

TOOL_COLUMNS = ("tool_calls", "failed_tool_calls", "unreadable_calls")
COLUMNS = ("opening", "conversation", "outcome", "turns", "prompt_tokens", *TOOL_COLUMNS)


class ConversationFacts(NamedTuple):
    """What reward functions get of a conversation."""

    messages: list[Message]  # the completion, if the prompt consists of messages, too
    ids: list[int]  # as ``completion_ids``
    columns: dict[str, Any]  # beside those of the row, or in their place


class SampledConversations(NamedTuple):
    """A batch without rewards."""

    batch: Batch
    facts: list[ConversationFacts]
    failures: list[str]  # why groups were left out
    metrics: dict[str, float]


class ConversationSampler:
    """Samples the conversations of a step: rows in, a batch out."""

    def __init__(self, sampler: EpisodeSampler, builder: PromptBuilder, column: str, seed: int) -> None:
        self.sampler, self.builder, self.column, self.seed = sampler, builder, column, seed

    def close(self) -> None:
        """End the environments."""
        self.sampler.close()

    def hold(
        self,
        generator: Generator,
        starts: Sequence[EpisodeStart],
        samples: int,
        sampling: Sampling,
        generate: Generate,
        progress: Progress,
    ) -> list[list[Episode]]:
        """The conversations of each start, without rewards."""
        return self.sampler.sample(generator, starts, samples, sampling, generate=generate, progress=progress)

    def finish_batch(self, batch: Batch, episodes: Sequence[Episode]) -> Batch:
        """The batch of these conversations; for subclasses that see their texts or their ends in another way."""
        return batch

    def facts_of(self, row: TaskRow, episode: Episode) -> ConversationFacts:
        """What reward functions get of a conversation about this row."""
        return ConversationFacts(episode.messages, episode.joined("ids").tolist(), reward_columns(episode))

    def sample(
        self,
        generator: Generator,
        rows: Sequence[TaskRow],
        row_numbers: Sequence[int],
        prompts: Sequence[Prompt],
        samples: int,
        sampling: Sampling,
        generate: Generate,
        progress: Progress,
    ) -> SampledConversations:
        """The batch of these rows, without groups in which an environment failed."""
        seeds = [derive_seed("environment", self.seed, number) for number in row_numbers]
        starts = episode_starts(self.builder, rows, prompts, self.column, seeds)
        counts: Counter[str] = Counter()

        def counted(*args: Any, **settings: Any) -> Rollout:
            rollout = generate(*args, **settings)
            counts.update({name: rollout.stats.get(name, 0) for name in ("prefilled_tokens", "reused_tokens")})
            return rollout

        groups = self.hold(generator, starts, samples, sampling, counted, progress)
        kept, failures = without_failed(groups)
        chosen = [groups[place] for place in kept]
        batch = batch_of_episodes(
            self.builder.tokenizer,
            [rows[place] for place in kept],
            [row_numbers[place] for place in kept],
            [prompts[place] for place in kept],
            chosen,
            samples,
            keep_sets=sampling.keep_sets,
        )
        batch = self.finish_batch(batch, [episode for members in chosen for episode in members])
        facts = [self.facts_of(rows[place], episode) for place in kept for episode in groups[place]]
        metrics = episode_metrics(chosen, failures)
        if shown := counts.total():
            metrics["episodes/reused_share"] = counts["reused_tokens"] / shown
        return SampledConversations(batch, facts, failures, metrics)


def episode_starts(
    builder: PromptBuilder,
    rows: Sequence[TaskRow],
    prompts: Sequence[Prompt],
    column: str,
    seeds: Sequence[int],
    keys: Sequence[int] | None = None,
) -> list[EpisodeStart]:
    """How the conversations of these rows start; ``seeds`` are their environments'."""
    keys = range(len(rows)) if keys is None else keys
    return [
        EpisodeStart(row, prompt.ids, builder.messages(row[column]), key, seed)
        for row, prompt, key, seed in zip(rows, prompts, keys, seeds, strict=True)
    ]


def without_failed(groups: Sequence[Sequence[Episode]]) -> tuple[list[int], list[str]]:
    """The groups in which no environment failed, and a reason for each of the others."""
    reasons = [next((episode.failure for episode in episodes if episode.failure), None) for episodes in groups]
    kept = [number for number, reason in enumerate(reasons) if reason is None]
    failures = [reason for reason in reasons if reason is not None]
    if groups and not kept:
        error = UserCodeError(
            f"the environment failed in every group of this step ({len(groups)}), and in each again after a fresh "
            f"start: {failures[0]}"
        )
        error.on_all_ranks = True  # they have the same groups
        raise error
    return kept, failures


def batch_of_episodes(
    tokenizer: Any,
    rows: Sequence[TaskRow],
    row_numbers: Sequence[int],
    prompts: Sequence[Prompt],
    groups: Sequence[Sequence[Episode]],
    samples: int,
    *,
    keep_sets: bool,
) -> Batch:
    """The batch of these groups of conversations, without rewards."""
    episodes = [episode for members in groups for episode in members]
    columns = _columns(episodes)
    for members in groups:
        share_prompt(members)
    names = ("ids", "logps", "filtered_logps", "versions")
    ids, logps, filtered, versions = (Ragged.of([episode.joined(name) for episode in episodes]) for name in names)
    sets = [kept for episode in episodes for kept in episode.kept]
    return Batch(
        rows=list(rows),
        row_numbers=list(row_numbers),
        prompts=[_prompt(tokenizer, prompt, members[0]) for prompt, members in zip(prompts, groups, strict=True)],
        samples=samples,
        ids=ids,
        texts=[episode.text for episode in episodes],
        stop_reasons=[episode.stop_reason for episode in episodes],
        sampler_logps=filtered if keep_sets else logps,
        versions=versions,
        kept=KeptSets.join(sets) if keep_sets else None,
        rewards=torch.zeros(len(episodes), 0, dtype=torch.float64),
        dropped=torch.zeros(len(episodes), dtype=torch.bool),
        filtered_probability=filtered_probability(logps.padded(), filtered.padded(), ids.mask) if keep_sets else None,
        turns=Turns.of([episode.sequence for episode in episodes]),
        turn_facts=[facts for members in groups for facts in _turn_facts(members)],
        extra=columns,
    )


def _turn_facts(episodes: Sequence[Episode]) -> list[TurnFacts]:
    """The turns of a group's conversations."""
    return [
        TurnFacts(
            tuple(len(turn.sampled.ids) for turn in episode.turns),
            tuple(turn.reward or 0.0 for turn in episode.turns),
            tuple(states),
        )
        for episode, states in zip(episodes, state_numbers(episodes), strict=True)
    ]


def _prompt(tokenizer: Any, prompt: Prompt, episode: Episode) -> Prompt:
    """The prompt as the conversations have it: an environment may have added messages."""
    if tuple(episode.prompt) == prompt.ids:
        return prompt
    text = tokenizer.decode(episode.prompt, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return Prompt(tuple(episode.prompt), text, _teacher_ids(prompt, episode))


def _teacher_ids(prompt: Prompt, episode: Episode) -> tuple[int, ...] | None:
    """A teacher's prompt with what the environment added to the student's.

    Both prompts end alike, as a chat template ends them; what differs is before. So the end of the teacher's becomes
    what the student's became.
    """
    if prompt.teacher_ids is None:
        return None
    start = common_length(prompt.ids, episode.prompt)
    end = prompt.ids[start:]
    if prompt.teacher_ids[len(prompt.teacher_ids) - len(end) :] != end:
        raise ConfigError(
            "distillation.show changes the end of the prompt, where the environment adds its messages, so the teacher "
            "cannot be shown both; show it in an earlier place, or let the environment put its messages into the row"
        )
    return (*prompt.teacher_ids[: len(prompt.teacher_ids) - len(end)], *episode.prompt[start:])


def _columns(episodes: Sequence[Episode]) -> dict[str, list[Any]]:
    """Columns of the rollout file: `COLUMNS`."""
    return {
        "opening": [json.dumps(episode.greeting, ensure_ascii=False) for episode in episodes],
        "conversation": [json.dumps(episode.messages, ensure_ascii=False) for episode in episodes],
        "outcome": [episode.outcome for episode in episodes],
        "turns": [len(episode.turns) for episode in episodes],
        "prompt_tokens": [len(episode.prompt) for episode in episodes],
        "tool_calls": [sum(turn.calls for turn in episode.turns) for episode in episodes],
        "failed_tool_calls": [sum(turn.failed_calls for turn in episode.turns) for episode in episodes],
        "unreadable_calls": [sum(len(turn.said.problems) for turn in episode.turns) for episode in episodes],
    }


def reward_columns(episode: Episode) -> dict[str, Any]:
    """What reward functions get of a conversation beside the columns of its row."""
    values = (episode.reward, episode.messages, len(episode.turns))
    return dict(zip(REWARD_COLUMNS, values, strict=True))


def computed_share(groups: Sequence[Sequence[Episode]]) -> float:
    """The tokens of these conversations as trees, as a share of a padded batch with a row for each of them."""
    episodes = [episode for members in groups for episode in members]
    if not episodes:
        return 1.0
    computed = 0
    for members in groups:
        contexts = sort_contexts([episode.sequence for episode in members])
        computed += len(members[0].prompt) + sum(contexts.lengths) - sum(contexts.shared)
    prompt = max(len(episode.prompt) for episode in episodes)
    completion = max(episode.length - len(episode.prompt) for episode in episodes)
    return computed / (len(episodes) * (prompt + completion))


def episode_metrics(groups: Sequence[Sequence[Episode]], failures: Sequence[str]) -> dict[str, float]:
    """Means over the conversations of a step; of the failed ones only their number."""
    episodes = [episode for members in groups for episode in members]
    count = max(len(episodes), 1)
    turns = [turn for episode in episodes for turn in episode.turns]
    outcomes = Counter(episode.outcome for episode in episodes)
    sampled = sum(len(turn.sampled.ids) for turn in turns)
    given = sum(len(turn.given) for turn in turns) + sum(len(episode.opening) for episode in episodes)
    metrics = {
        "episodes/turns": len(turns) / count,
        "episodes/given_share": given / max(given + sampled, 1),
        "episodes/computed_share": computed_share(groups),
        "episodes/tool_calls": sum(turn.calls for turn in turns) / count,
        "episodes/failed_tool_calls": sum(turn.failed_calls for turn in turns) / count,
        "episodes/unreadable_calls": sum(len(turn.said.problems) for turn in turns) / count,
        "episodes/retried": sum(episode.attempts > 1 for episode in episodes) / count,
        "episodes/groups_failed": float(len(failures)),
        **{f"episodes/{name}": outcomes[name] / count for name in OUTCOMES if name != "failed"},
    }
    for name in sorted({name for episode in episodes for name in episode.counts}):
        metrics[f"environment/{name}"] = sum(episode.counts.get(name, 0.0) for episode in episodes) / count
    for name in sorted({name for episode in episodes for name in episode.rewards}):
        values = [episode.rewards[name] for episode in episodes if name in episode.rewards]
        metrics[f"environment/reward/{name}"] = sum(values) / len(values)
    return metrics
