"""Grouping texts: by hand on vectors in the plane, and with a real embedder."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.config import GroupingSection
from groupwise.errors import InputError
from groupwise.grouping.cluster import nested_groups
from groupwise.grouping.embed import Embedder, load_embedder
from groupwise.grouping.grouper import (
    GroupingResult,
    LocalGrouper,
    group_texts,
    join_results,
    map_positions,
    share_texts,
)
from tests.weights import wordllama

ANSWERS = [
    [
        "The cat sleeps on the warm stove.",
        "A galaxy of ten thousand stars turns slowly.",
        "My cat sleeps by the stove, warm and round.",
        "Stars turn in the slow wheel of the galaxy.",
    ],
    [
        "<think>cats or ships?</think> The ship left the harbour at dawn.",
        "The ship left the harbour at dawn.",
        "Bread, butter, and a jar of plum jam.",
        "",
    ],
]


def directions() -> Embedder:
    """Texts such as "2 at 90" are vectors in the plane: a length and an angle."""

    def vectors(texts: list[str]) -> torch.Tensor:
        pairs = [tuple(map(float, text.split(" at "))) for text in texts]
        return torch.tensor([[size * math.cos(math.radians(a)), size * math.sin(math.radians(a))] for size, a in pairs])

    return Embedder("directions", 2, vectors)


def close(ours: torch.Tensor, expected: object) -> None:
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)


def test_by_hand():
    texts = [
        ["1 at 0", "a thought</think> 3 at 0", "2 at 90", "1 at 90"],
        ["1 at 0", "0 at 0", "1 at 180", "5 at 0"],  # the second is the zero vector
    ]
    result = group_texts(directions(), texts, GroupingSection())
    assert result.labels.tolist() == [[[0], [0], [1], [1]], [[0], [1], [2], [0]]]
    # First prompt: two pairs at 0, four at 1. Second: the pair of equals 0, three with the zero vector 1, two at 2.
    close(result.distances, [4 / 6, (0 + 3 * 1 + 2 * 2) / 6])
    close(result.centres, [[0.5, 0.5], [(1 - 1 + 1) / 4, 0.0]])
    # The first prompt's clusters are perfect. In the second, a = 0 and b = 1 for the two equals; the others are alone.
    close(result.scores, [1.0, 0.5])
    assert result.labels.dtype == torch.int64


def test_one_answer_per_prompt():
    result = group_texts(directions(), [["2 at 90"], ["1 at 0"]], GroupingSection(levels=4))
    assert result.labels.tolist() == [[[0, 0, 0]], [[0, 0, 0]]]
    close(result.distances, [0.0, 0.0])
    close(result.centres, [[0.0, 1.0], [1.0, 0.0]])


def test_every_setting_is_used():
    """Four answers at 0, 15, 40 and 100 degrees."""
    texts = [["1 at 0", "1 at 15", "1 at 40", "1 at 100"]]

    def labels(**settings: object) -> list[list[int]]:
        return group_texts(directions(), texts, GroupingSection(**settings)).labels[0].tolist()

    assert labels() == [[0], [0], [0], [1]]
    assert labels(min_silhouette=0.99) == [[0]] * 4
    assert labels(method="threshold", threshold=-1.0) == [[0]] * 4
    assert labels(method="threshold", threshold=0.999) == [[0], [1], [2], [3]]
    assert labels(method="dbscan", threshold=0.9, min_samples=2) == [[0], [0], [0], [1]]
    assert labels(method="dbscan", threshold=0.9, min_samples=4) == [[0], [1], [2], [3]]
    assert labels(levels=3, min_silhouette=-1.0, max_groups=2) == [[0, 0], [0, 0], [0, 1], [1, 0]]
    three = [[f"1 at {angle}" for angle in (0, 1, 90, 91, 180, 181)]]
    for most in (2, 3, 7):
        result = group_texts(directions(), three, GroupingSection(max_groups=most)).labels
        assert len(result.unique()) == min(most, 3)
    marked = [["END 1 at 0", "1 at 90", "2 at 0 END 1 at 90"]]
    assert group_texts(directions(), marked, GroupingSection(text_after="END")).labels[0].tolist() == [[0], [1], [1]]


def test_real_texts():
    embedder = load_embedder(str(wordllama()))
    settings = GroupingSection(levels=3)
    result = group_texts(embedder, ANSWERS, settings)
    assert result.labels[0, :, 0].tolist() == [0, 1, 0, 1]
    assert result.labels[1, :2, 0].tolist() == [0, 0]  # the reasoning before the mark is ignored
    vectors = [[embedder.encode([text.rpartition("</think>")[2].strip()])[0].double() for text in a] for a in ANSWERS]
    labels, scores = nested_groups(torch.stack([torch.stack(row) for row in vectors]), levels=3)
    assert torch.equal(result.labels, labels)
    assert torch.equal(result.scores, scores)
    for prompt, row in enumerate(vectors):
        pairs = list(itertools.combinations(row, 2))
        cosines = [float(a @ b / (a.norm() * b.norm())) if a.norm() and b.norm() else 0.0 for a, b in pairs]
        assert result.distances[prompt] == pytest.approx(sum(1 - cosine for cosine in cosines) / len(pairs), abs=1e-9)
        units = [vector / vector.norm() if vector.norm() else vector for vector in row]
        torch.testing.assert_close(result.centres[prompt], sum(units) / len(units), rtol=0, atol=1e-12)


def test_all_texts_are_embedded_in_one_call():
    calls = []

    def vectors(texts: list[str]) -> torch.Tensor:
        calls.append(texts)
        return torch.eye(len(texts))

    group_texts(Embedder("counted", 5, vectors), [["a", "b", "a"], ["c", " d", "e"]], GroupingSection())
    assert calls == [["a", "b", "c", "d", "e"]]


@given(st.integers(1, 30), st.integers(1, 9))
def test_shares_are_even_and_join_again(prompts, number):
    texts = [[str(prompt)] for prompt in range(prompts)]
    shares = share_texts(texts, number)
    assert [answers for share in shares for answers in share] == texts
    sizes = [len(share) for share in shares]
    assert len(sizes) == min(number, prompts)
    assert max(sizes) - min(sizes) <= 1
    numbers = [torch.tensor([int(text) for (text,) in share]) for share in shares]
    joined = join_results([GroupingResult(*(part + place for place in range(5))) for part in numbers])
    result = torch.stack([joined.labels, joined.scores, joined.distances, joined.centres, joined.positions])
    assert torch.equal(result, torch.arange(prompts) + torch.arange(5).unsqueeze(1))


def test_closed_grouper():
    with LocalGrouper(GroupingSection(embedder=str(wordllama()))) as grouper:
        assert grouper.group(ANSWERS).labels.shape == (2, 4, 1)
        assert grouper.restarts == 0
    grouper.close()
    with pytest.raises(InputError, match="this grouper is closed"):
        grouper.group(ANSWERS)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], r"texts must be one list of answers for each of at least one prompt, got \[\]"),
        ("abc", "for each of at least one prompt, got 'abc'"),
        (["abc"], r"texts\[0\] must be a list of at least one answer, got 'abc'"),
        ([["a"], []], r"texts\[1\] must be a list of at least one answer, got \[\]"),
        ([["a", None]], r"texts\[0\] must be a list of texts, got \['a', None\]"),
        ([["a", "b"], ["c"]], r"texts\[1\] has 1 answers and texts\[0\] has 2"),
    ],
)
def test_invalid_texts(texts, message):
    with pytest.raises(InputError, match=message):
        group_texts(directions(), texts, GroupingSection())


def test_joining_no_results():
    with pytest.raises(InputError, match="no results to join"):
        join_results([])


def test_the_map_of_a_prompts_answers():
    generator = torch.Generator().manual_seed(0)
    vectors = torch.nn.functional.normalize(torch.randn(2, 3, 8, generator=generator, dtype=torch.float64), dim=-1)
    positions = map_positions(vectors)
    # Three points lie in a plane, so the map has their exact distances, as classical scaling does.
    torch.testing.assert_close(torch.cdist(positions, positions), torch.cdist(vectors, vectors))
    torch.testing.assert_close(positions.mean(1), torch.zeros(2, 2, dtype=torch.float64))
    assert bool((positions.square().sum(1)[:, 0] >= positions.square().sum(1)[:, 1]).all())  # the longer axis first
    largest = positions.gather(1, positions.abs().argmax(1, keepdim=True))
    assert bool((largest > 0).all())
    turned = map_positions(vectors[:, [2, 0, 1]])
    torch.testing.assert_close(turned, positions[:, [2, 0, 1]])
    assert torch.equal(map_positions(vectors[:, :1]), torch.zeros(2, 1, 2, dtype=torch.float64))
    assert float(map_positions(vectors[:, [0, 0, 0]]).abs().max()) < 1e-7


def test_a_grouping_has_a_map():
    result = LocalGrouper(GroupingSection(embedder=str(wordllama()))).group(ANSWERS)
    assert result.positions.shape == (2, 4, 2)
    same, other = result.positions[0], result.take([0]).positions[0]
    assert torch.equal(same, other)
