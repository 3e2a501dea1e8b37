"""What is reported of a step's conversations."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from groupwise.conversations.episodes import Episode, EpisodeTurn, SampledTokens
from groupwise.environments import AssistantTurn
from groupwise.training.rollout.episodes import computed_share


def episode(prompt: Sequence[int], *turns: tuple[Sequence[int], Sequence[int]]) -> Episode:
    """A conversation of these turns: sampled tokens, and the given ones that follow."""
    result = Episode(list(prompt))
    for ids, given in turns:
        zeros = torch.zeros(len(ids))
        sampled = SampledTokens(torch.tensor(ids), zeros, zeros, zeros, None, "eos")
        result.turns.append(EpisodeTurn(sampled, AssistantTurn(""), given=list(given)))
    return result


def distinct_beginnings(groups: Sequence[Sequence[Episode]]) -> int:
    """The nodes of all tries, token by token: each beginning of a context is a node."""
    nodes = set()
    for number, members in enumerate(groups):
        for member in members:
            ids = [*member.prompt, *member.sequence.context.tolist()]
            nodes |= {(number, *ids[:end]) for end in range(1, len(ids) + 1)}
    return len(nodes)


def test_computed_share_of_conversations_that_begin_alike():
    first = episode([1, 2], ([3, 4], [9]), ([5], []))  # context: 1 2 3 4 9
    second = episode([1, 2], ([3, 4], [9]), ([6, 7], []))  # 1 2 3 4 9 6
    other = episode([1], ([8], []))  # 1
    assert computed_share([[first, second], [other]]) == pytest.approx(7 / (3 * (2 + 5)))


def test_computed_share_equals_counting_tries():
    generator = torch.Generator().manual_seed(0)

    def ids(least: int, most: int) -> list[int]:
        size = int(torch.randint(least, most + 1, (), generator=generator))
        return torch.randint(2, (size,), generator=generator).tolist()

    for _ in range(20):
        groups = []
        for _ in range(3):
            prompt = ids(1, 3)
            groups.append([episode(prompt, *((ids(1, 3), ids(0, 2)) for _ in range(2))) for _ in range(4)])
        episodes = [member for members in groups for member in members]
        longest = max(len(member.prompt) for member in episodes), max(len(member.sequence) for member in episodes)
        assert computed_share(groups) == pytest.approx(distinct_beginnings(groups) / (12 * sum(longest)))


def test_computed_share_of_no_conversation():
    assert computed_share([]) == 1.0
