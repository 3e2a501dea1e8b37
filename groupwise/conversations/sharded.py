"""Episodes that are divided among the ranks of a run: each holds all conversations of its prompts, with environments of
its own, and every rank gets all of them.

Their random numbers belong to the prompts, so the episodes are those of one process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from groupwise.conversations.episodes import Episode, EpisodeTurn, SampledTokens, state_numbers
from groupwise.core.filters import KeptSets
from groupwise.environments import AssistantTurn, ToolCall
from groupwise.generate.sharded import ShardedGenerator
from groupwise.generate.types import Generator

TENSORS = ("ids", "logps", "filtered_logps", "versions")  # of `SampledTokens`
TURN = ("messages", "given", "reward", "calls", "failed_calls")  # what is sent of a turn as it is
# And of an episode. Its environment stays on its rank.
EPISODE = ("prompt", "opening", "outcome", "reward", "rewards", "counts", "failure", "attempts", "greeting")


def divide_episodes(
    generator: ShardedGenerator,
    costs: Sequence[float],
    sample: Callable[[Generator, list[int]], list[list[Episode]]],
) -> list[list[Episode]]:
    """The episodes of each prompt; ``sample`` gets a rank's own generator and the numbers of its prompts."""
    shares = generator.shares(costs)
    own = shares[generator.ranks.rank]
    with generator.own() as inner:
        groups = sample(inner, own) if own else []
    results: dict[int, list[Episode]] = {}
    parts = generator.ranks.gather([_message(episodes) for episodes in groups])
    for share, messages in zip(shares, parts, strict=True):
        results |= dict(zip(share, map(_episodes, messages), strict=True))
    return [results[number] for number in range(len(costs))]


def _message(episodes: Sequence[Episode]) -> dict[str, Any]:
    """The episodes of a prompt. States, which may be any objects, become numbers, and the rest of the text JSON."""
    sampled = [turn.sampled for episode in episodes for turn in episode.turns]
    tensors: dict[str, Tensor] = {}
    if sampled:
        tensors = {name: torch.cat([getattr(turn, name) for turn in sampled]) for name in TENSORS}
    sets = [turn.kept for turn in sampled if turn.kept is not None]
    if sets:
        kept = KeptSets.join(sets)
        tensors |= {"kept_ids": kept.ids, "kept_offsets": kept.offsets}
    entries = [
        {name: getattr(episode, name) for name in EPISODE}
        | {"turns": [_turn_entry(turn, state) for turn, state in zip(episode.turns, states, strict=True)]}
        for episode, states in zip(episodes, state_numbers(episodes), strict=True)
    ]
    return {"tensors": tensors, "episodes": json.dumps(entries)}


def _turn_entry(turn: EpisodeTurn, state: int | None) -> dict[str, Any]:
    return {name: getattr(turn, name) for name in TURN} | {
        "tokens": len(turn.sampled.ids),
        "stop_reason": turn.sampled.stop_reason,
        "said": asdict(turn.said),
        "state": state,
    }


def _episodes(message: dict[str, Any]) -> list[Episode]:
    """The episodes of a `_message`."""
    tensors: dict[str, Tensor] = message["tensors"]
    kept = KeptSets(tensors["kept_ids"], tensors["kept_offsets"]) if "kept_ids" in tensors else None
    episodes, first = [], 0
    for entry in json.loads(message["episodes"]):
        turns = []
        for turn in entry.pop("turns"):
            count = turn.pop("tokens")
            tokens = slice(first, first + count)
            first += count
            sampled = SampledTokens(
                **{name: tensors[name][tokens] for name in TENSORS},
                kept=None if kept is None else kept.select(torch.arange(tokens.start, tokens.stop)),
                stop_reason=turn.pop("stop_reason"),
            )
            turns.append(EpisodeTurn(sampled, _turn_said(turn.pop("said")), **turn))
        episodes.append(Episode(**entry, turns=turns))
    return episodes


def _turn_said(said: dict[str, Any]) -> AssistantTurn:
    calls = tuple(ToolCall(**call) for call in said["calls"])
    return AssistantTurn(said["text"], calls, tuple(said["problems"]), said["thinking"])
