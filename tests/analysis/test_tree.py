from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.analysis.tree import Branch, build_tree, group_tree, split_words
from groupwise.training.store.token_files import TokenRow


def sample(number: int, text: str, advantage: float | None = 0.0, reward: float | None = None) -> dict:
    return {"prompt_number": 0, "sample": number, "completion": text, "advantage": advantage, "reward": reward}


def paths(branch: Branch, before: str = "") -> Iterator[tuple[str, Branch]]:
    """The text from the root to each leaf."""
    if not branch.children:
        yield before + branch.text, branch
    for child in branch.children:
        yield from paths(child, before + branch.text)


def branches(branch: Branch) -> Iterator[Branch]:
    yield branch
    for child in branch.children:
        yield from branches(child)


def test_a_group_by_hand():
    texts = ["so it is A", "so it is B", "so it is A.", "no"]
    tree = group_tree(
        [sample(n, text, a) for n, (text, a) in enumerate(zip(texts, [1.0, -1.0, 2.0, -2.0], strict=True))]
    )
    assert (tree.text, tree.pieces, tree.samples, tree.mean_advantage) == ("", 0, [0, 1, 2, 3], 0.0)
    so, no = tree.children  # the branch that paid first
    assert (so.text, so.start, so.pieces, so.samples) == ("so it is", 0, 3, [0, 1, 2])
    assert so.mean_advantage == pytest.approx(2 / 3)
    assert [(child.text, child.samples, child.mean_advantage) for child in so.children] == [
        (" A.", [2], 2.0), (" A", [0], 1.0), (" B", [1], -1.0),
    ]  # fmt: skip
    assert (no.text, no.samples, no.children) == ("no", [3], [])
    assert tree.as_dict()["children"][1]["text"] == "no"


def test_equal_completions_are_one_leaf_and_a_shorter_one_ends_in_between():
    tree = group_tree([sample(0, "yes"), sample(1, "yes"), sample(2, "yes indeed"), sample(3, "yes", None, 0.5)])
    assert (tree.text, tree.pieces) == ("yes", 1)
    assert sorted((child.text, child.samples) for child in tree.children) == [("", [0, 1, 3]), (" indeed", [2])]
    alike = group_tree([sample(0, "a b", None), sample(1, "a b", None)])
    assert (alike.text, alike.children, alike.samples, alike.mean_advantage) == ("a b", [], [0, 1], None)


def token_row(number: int, ids: list[int], texts: list[str]) -> TokenRow:
    ends = [len("".join(texts[: place + 1])) for place in range(len(texts))]
    numbers = [0.0] * len(ids)
    return TokenRow(1, 0, 7, number, "".join(texts), ids, ends, numbers, numbers, numbers, None)


def test_tokens_where_they_were_recorded():
    rows = [token_row(0, [5, 9, 2], ["un", "til", ""]), token_row(1, [5, 8], ["un", "der"])]
    samples = [sample(row.sample, row.completion) for row in rows]
    tree = group_tree(samples, rows)
    assert (tree.text, [child.text for child in tree.children]) == ("un", ["til", "der"])
    assert tree.children[0].pieces == 2  # the end-of-text token has no text
    by_words = group_tree(samples, rows[:1])  # one sample's tokens are missing
    assert (by_words.text, [child.text for child in by_words.children]) == ("", ["until", "under"])


def test_a_token_whose_text_depends_on_what_follows():
    """Half of a character that one sample completes and the other does not."""
    rows = [token_row(0, [1, 2], ["", "é"]), token_row(1, [1, 3], ["\ufffd", "x"])]
    tree = group_tree([sample(row.sample, row.completion) for row in rows], rows)
    assert {text for text, _ in paths(tree)} == {"é", "\ufffdx"}


@given(st.text(alphabet="a \n1中é.", max_size=12))
def test_words_are_the_text(text):
    assert "".join(split_words(text)) == text


def test_words():
    assert split_words(" So 42\n中文 ok ") == [" So", " 4", "2", "\n中", "文", " ok", " "]


pieces = st.lists(st.sampled_from(["a", "b", "ab", ""]), max_size=5)


@given(st.lists(pieces, min_size=1, max_size=7), st.data())
def test_against_a_literal_version(texts, data):
    advantages = data.draw(st.lists(st.integers(-3, 3), min_size=len(texts), max_size=len(texts)))
    keyed = [[(text, text) for text in sample_pieces] for sample_pieces in texts]
    tree = build_tree(keyed, [sample(n, "", a) for n, a in enumerate(advantages)])
    leaves = list(paths(tree))
    for number, sample_pieces in enumerate(texts):  # each sample is in one leaf, and the path to it is its text
        (path,) = [text for text, leaf in leaves if number in leaf.samples]
        assert path == "".join(sample_pieces)
    assert sorted(number for _, leaf in leaves for number in leaf.samples) == list(range(len(texts)))
    for branch in branches(tree):
        first = texts[branch.samples[0]]
        prefix = first[: branch.start + branch.pieces]
        # Literally: the samples of a branch are those that begin with its path, or end exactly there if it is a leaf.
        begins = [n for n, other in enumerate(texts) if other[: len(prefix)] == prefix]
        assert branch.samples == begins or branch.samples == [n for n in begins if texts[n] == prefix]
        assert branch.mean_advantage == pytest.approx(sum(advantages[n] for n in branch.samples) / len(branch.samples))
        assert sorted(n for child in branch.children for n in child.samples) in ([], sorted(branch.samples))
        assert len(branch.children) != 1
        means = [child.mean_advantage for child in branch.children]
        assert means == sorted(means, reverse=True)
        nexts = [texts[child.samples[0]][child.start : child.start + 1] for child in branch.children]
        assert all(child.start == branch.start + branch.pieces for child in branch.children)
        assert len({tuple(one) for one in nexts}) == len(nexts)  # they part here, not later
