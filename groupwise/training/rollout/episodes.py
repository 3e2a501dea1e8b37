"""The batch of a step whose completions are conversations, and what is reported of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from groupwise.conversations import OUTCOMES, Episode, EpisodeStart, share_prompt
from groupwise.core.filters import KeptSets
from groupwise.core.ragged import Ragged
from groupwise.data import Prompt, PromptBuilder
from groupwise.errors import UserCodeError
from groupwise.tasks.base import TaskRow
from groupwise.text import plural
from groupwise.training.environments import REWARD_COLUMNS
from groupwise.training.rollout.batch import Batch


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
        raise UserCodeError(
            f"the environment failed in {'the only group' if len(groups) == 1 else f'all {len(groups)} groups'} of this "
            f"step, again after a fresh start: {failures[0]}"
        )
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
    for episodes in groups:
        share_prompt(episodes)
    episodes = [episode for members in groups for episode in members]
    ids, logps = [episode.joined("ids") for episode in episodes], [episode.joined("logps") for episode in episodes]
    filtered = [episode.joined("filtered_logps") for episode in episodes]
    sets = [kept for episode in episodes for kept in episode.kept]
    return Batch(
        rows=list(rows),
        row_numbers=list(row_numbers),
        prompts=[_prompt(tokenizer, prompt, members[0]) for prompt, members in zip(prompts, groups, strict=True)],
        samples=samples,
        ids=Ragged.of(ids),
        texts=[episode.text for episode in episodes],
        stop_reasons=[episode.stop_reason for episode in episodes],
        sampler_logps=Ragged.of(filtered if keep_sets else logps),
        versions=Ragged.of([episode.joined("versions") for episode in episodes]),
        kept=KeptSets.join(sets) if keep_sets else None,
        rewards=torch.zeros(len(episodes), 0, dtype=torch.float64),
        dropped=torch.zeros(len(episodes), dtype=torch.bool),
        filtered_probability=_removed(logps, filtered) if keep_sets else None,
        episodes=list(episodes),
        extra=_columns(episodes),
    )


def _prompt(tokenizer: Any, prompt: Prompt, episode: Episode) -> Prompt:
    """The prompt as the conversations have it: an environment may have added messages."""
    if tuple(episode.prompt) == prompt.ids:
        return prompt
    text = tokenizer.decode(episode.prompt, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return Prompt(tuple(episode.prompt), text)


def _removed(logps: Sequence[torch.Tensor], filtered: Sequence[torch.Tensor]) -> torch.Tensor:
    """The probability that the sampling filters removed, summed over the tokens of each conversation."""
    left = [(a.double() - b.double()).exp() for a, b in zip(logps, filtered, strict=True)]
    return torch.stack([(1 - share).clamp(min=0.0).sum() for share in left])


def _columns(episodes: Sequence[Episode]) -> dict[str, list[Any]]:
    """Columns of the rollout file."""
    return {
        "conversation": [json.dumps(episode.messages, ensure_ascii=False) for episode in episodes],
        "outcome": [episode.outcome for episode in episodes],
        "turns": [len(episode.turns) for episode in episodes],
    }


def reward_columns(episode: Episode) -> dict[str, Any]:
    """What reward functions get of a conversation beside the columns of its row."""
    values = (episode.reward, episode.messages, len(episode.turns))
    return dict(zip(REWARD_COLUMNS, values, strict=True))


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


def failure_notes(failures: Sequence[str], groups: int) -> list[str]:
    """What the run's output says of groups that were left out."""
    if not failures:
        return []
    return [f"{plural(len(failures), 'group')} of {groups} left out, because the environment failed: {failures[0]}"]
