"""Conversations that begin alike are computed as a tree, with the log-probs and gradients of the plain computation."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core.filters import KeptSets
from groupwise.core.sequences import TokenSequence, join_segments
from groupwise.errors import InputError
from groupwise.model.handle import prepare
from groupwise.model.logprobs import completion_logps, iter_packs
from groupwise.model.packing import split_into_packs
from groupwise.model.tree import build_tree, plan_tree_packs, sort_contexts
from groupwise.model.tree_attention import TreeLayout
from tests.model.models import ARCHITECTURES, VOCABULARY, quick, tiny
from tests.model.test_logprobs import assert_equal_gradients, gradients, some_loss


def conversation(*parts: tuple[str, list[int]]) -> TokenSequence:
    return join_segments([(ids, kind == "sampled") for kind, ids in parts])


def random_conversations(seed: int, groups: int = 3) -> tuple[list[torch.Tensor], list[list[TokenSequence]]]:
    """Groups whose members share whole turns, parts of turns, or nothing, with given tokens in the middle."""
    chance = random.Random(seed)

    def ids(low: int, high: int) -> list[int]:
        return [chance.randrange(3, VOCABULARY) for _ in range(chance.randint(low, high))]

    prompts, sequences = [], []
    for _ in range(groups):
        first, answer, second = ids(1, 5), ids(1, 7), ids(2, 4)
        members = [
            conversation(("sampled", first), ("given", answer), ("sampled", ids(1, 6))),
            conversation(("sampled", first), ("given", answer), ("sampled", second), ("given", ids(1, 3))),
            conversation(("sampled", first), ("given", answer), ("sampled", second), ("given", [5]), ("sampled", [4])),
            conversation(("sampled", first[:1]), ("given", ids(1, 3)), ("sampled", ids(1, 2))),
            conversation(("sampled", ids(1, 9))),
            conversation(("given", ids(1, 3)), ("sampled", ids(1, 2))),
        ]
        members.append(members[chance.randrange(len(members))])  # two alike
        chance.shuffle(members)
        prompts.append(torch.tensor(ids(1, 9)))
        sequences.append(members[: chance.randint(2, len(members))])
    return prompts, sequences


def literal_logps(model, prompts, sequences, temperature=1.0):
    """Each conversation by itself through transformers' forward, padded with zeros, ``(B, T)``."""
    rows = []
    for prompt, members in zip(prompts, sequences, strict=True):
        for sequence in members:
            ids = torch.cat([prompt, sequence.ids])
            logps = (model(ids[None], use_cache=False).logits[0] / temperature).log_softmax(-1)
            places = len(prompt) + sequence.sampled.nonzero().squeeze(1)
            rows.append(logps[places - 1, ids[places]])
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


@pytest.mark.parametrize("name", quick(ARCHITECTURES, "llama", "qwen2_windows", "gemma2"))
def test_a_tree_equals_each_conversation_by_itself(name):
    model = tiny(name)
    handle = prepare(model)
    assert handle.fallback_reason is None
    prompts, sequences = random_conversations(seed=1)
    packed = completion_logps(handle, prompts, sequences, temperature=0.8)
    literal = literal_logps(model, prompts, sequences, temperature=0.8)
    torch.testing.assert_close(packed.logps, literal, rtol=1e-9, atol=1e-12)
    wanted = gradients(model, some_loss(packed._replace(logps=literal)))
    assert_equal_gradients(gradients(model, some_loss(packed)), wanted, 1e-9)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("budget", [None, 40, 64])
def test_the_token_budget_changes_nothing(seed, budget):
    model = tiny("llama")
    handle = prepare(model)
    prompts, sequences = random_conversations(seed, groups=4)
    packs = list(iter_packs(handle, prompts, sequences, token_budget=budget, with_entropy=True))
    assert len(packs) > 1 if budget else len(packs) == 1
    packed = completion_logps(handle, prompts, sequences, token_budget=budget, with_entropy=True)
    torch.testing.assert_close(packed.logps, literal_logps(model, prompts, sequences), rtol=1e-9, atol=1e-12)
    plain = completion_logps(prepare(tiny("llama"), plain=True), prompts, sequences, with_entropy=True)
    torch.testing.assert_close(packed.entropy, plain.entropy, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(packed.logps, plain.logps, rtol=1e-9, atol=1e-12)
    assert torch.equal(packed.mask, plain.mask)


def test_gradient_checkpointing_changes_nothing():
    model = tiny("llama")
    handle = prepare(model)
    prompts, sequences = random_conversations(seed=3)
    wanted = gradients(model, some_loss(completion_logps(handle, prompts, sequences)))
    model.train()
    model.gradient_checkpointing_enable()
    got = gradients(model, some_loss(completion_logps(handle, prompts, sequences)))
    assert_equal_gradients(got, wanted, 1e-9)


def test_kept_sets_belong_to_sampled_tokens_only():
    model = tiny("llama")
    prompts, sequences = random_conversations(seed=4)
    flat = [sequence for members in sequences for sequence in members]
    tokens = torch.cat([sequence.completion for sequence in flat])
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(len(tokens), VOCABULARY, generator=generator) < 0.4
    mask[torch.arange(len(tokens)), tokens] = True
    kept = KeptSets.from_logits(torch.where(mask, 0.0, -torch.inf))
    got = completion_logps(prepare(model), prompts, sequences, kept=kept, token_budget=48)
    prompt_of = [prompt for prompt, members in zip(prompts, sequences, strict=True) for _ in members]
    first = 0
    for row, (prompt, sequence) in enumerate(zip(prompt_of, flat, strict=True)):
        ids = torch.cat([prompt, sequence.ids])
        places = len(prompt) + sequence.places
        logits = model(ids[None], use_cache=False).logits[0, places - 1]
        logps = logits.masked_fill(~mask[first : first + len(places)], -torch.inf).log_softmax(-1)
        wanted = logps[torch.arange(len(places)), ids[places]]
        torch.testing.assert_close(got.logps[row, : len(places)], wanted, rtol=1e-9, atol=1e-12)
        first += len(places)
    with pytest.raises(InputError, match="kept sets"):
        completion_logps(prepare(model), prompts, sequences, kept=KeptSets.from_logits(torch.zeros(3, VOCABULARY)))


def test_given_tokens_get_no_log_prob():
    handle = prepare(tiny("llama"))
    sequence = conversation(("sampled", [5, 6]), ("given", [7, 8, 9]), ("sampled", [4]), ("given", [11]))
    result = completion_logps(handle, [torch.tensor([3])], [[sequence]])
    assert result.logps.shape == (1, 3)
    assert result.mask.all()


def test_given_tokens_are_seen():
    handle = prepare(tiny("llama"))
    one, other = (conversation(("sampled", [5]), ("given", [token]), ("sampled", [4])) for token in (7, 8))
    result = completion_logps(handle, [torch.tensor([3])], [[one, other]])
    assert result.logps[0, 0] == result.logps[1, 0]
    assert abs(result.logps[0, 1] - result.logps[1, 1]) > 1e-6


def test_completions_may_stand_among_conversations():
    handle = prepare(tiny("llama"))
    prompt, ids = torch.tensor([3, 9]), [5, 6, 7]
    two_turns = conversation(("sampled", [5]), ("given", [6]), ("sampled", [4]))
    mixed = completion_logps(handle, [prompt], [[ids, two_turns]])
    torch.testing.assert_close(mixed.logps[:1], completion_logps(handle, [prompt], [[ids]]).logps)


def test_one_turn_is_a_completion():
    model = tiny("llama")
    handle = prepare(model)
    chance = random.Random(5)
    completions = [[[chance.randrange(3, VOCABULARY) for _ in range(4)] for _ in range(3)] for _ in range(2)]
    prompts = [torch.tensor([3, 4, 5]), torch.tensor([6])]
    sequences = [[join_segments([(ids, True)]) for ids in members] for members in completions]
    one, other = (completion_logps(handle, prompts, given) for given in (completions, sequences))
    torch.testing.assert_close(one.logps, other.logps, rtol=1e-9, atol=1e-12)


conversations = st.lists(
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 2), min_size=1, max_size=4)), min_size=1, max_size=4)
    .filter(lambda parts: any(sampled for sampled, _ in parts))
    .map(lambda parts: join_segments([(ids, sampled) for sampled, ids in parts])),
    min_size=1,
    max_size=7,
)


@given(conversations)
def test_the_tree_holds_each_distinct_beginning_once(sequences):
    order, lengths, shared = sort_contexts(sequences)
    assert sorted(order) == list(range(len(sequences)))
    chosen = [sequences[i] for i in order]
    assert lengths == [len(sequence.context) for sequence in chosen]
    tree = build_tree(chosen)
    contexts = [sequence.context.tolist() for sequence in chosen]
    beginnings = {tuple(ids[: n + 1]) for ids in contexts for n in range(len(ids))}
    assert len(tree.ids) == len(beginnings) == sum(lengths) - sum(shared) == sum(tree.lengths)
    assert all(tree.lengths)
    starts = [0, *torch.tensor(tree.lengths).cumsum(0).tolist()]

    def beginning(place: int) -> list[int]:
        """All tokens up to this place of the tree."""
        if place < 0:
            return []
        node = next(node for node, (a, b) in enumerate(pairwise(starts)) if a <= place < b)
        before = tree.parents[node]
        above = beginning(starts[before + 1] - 1) if before >= 0 else []
        return above + tree.ids[starts[node] : place + 1].tolist()

    for sequence, sources in zip(chosen, tree.sources, strict=True):
        for place, source in zip(sequence.places.tolist(), sources.tolist(), strict=True):
            assert beginning(source) == sequence.ids[:place].tolist()
    for node, parent in enumerate(tree.parents):  # descendants follow their node
        assert -1 <= parent < node
        assert parent == node - 1 or parent < 0 or all(p >= parent for p in tree.parents[parent + 1 : node])


@given(conversations)
def test_each_token_sees_its_own_beginning_only(sequences):
    """Both forms in which the layout says what is visible: the pairs of the CPU kernel, and the gathered keys."""
    tree = build_tree([sequences[i] for i in sort_contexts(sequences).order])
    prompt = 2
    layout = TreeLayout([prompt], [len(tree.lengths)], tree.lengths, tree.parents, torch.device("cpu"))
    total = prompt + len(tree.ids)
    wanted = torch.zeros(total, total, dtype=torch.bool)
    starts = [prompt, *(prompt + torch.tensor(tree.lengths).cumsum(0)).tolist()] if tree.lengths else [prompt]
    wanted[:prompt, :prompt] = torch.ones(prompt, prompt).tril().bool()
    for node, (a, b) in enumerate(pairwise(starts)):
        wanted[a:b, :prompt] = True
        wanted[a:b, a:b] = torch.ones(b - a, b - a).tril().bool()
        above = tree.parents[node]
        while above >= 0:
            wanted[a:b, starts[above] : starts[above + 1]] = True
            above = tree.parents[above]
    assert (layout.positions == wanted.sum(1) - 1).all()
    pairs = torch.zeros(total, total, dtype=torch.int)
    numbers = torch.arange(total)
    for number, rows, keys, causal in (*layout.calls, *layout.deeper):
        for row, key in zip(numbers[rows].chunk(number), numbers[keys].chunk(number), strict=True):
            block = torch.ones(len(row), len(key), dtype=torch.int)
            pairs[row[:, None], key] += block.tril() if causal else block
    assert torch.equal(pairs, wanted.int())
    for window in (None, 1, 3):
        index, ends, longest = layout._own_keys() if window is None else layout._windowed_keys(window)
        seen = torch.zeros(total, total, dtype=torch.bool)
        for (start, stop), (a, b) in zip(pairwise(layout.segment_ends.tolist()), pairwise(ends.tolist()), strict=True):
            keys = index[a:b]
            assert len(keys) <= longest
            for row in range(start, stop):
                visible = keys[: len(keys) - (stop - row - 1)]  # aligned at their ends
                seen[row, visible if window is None else visible[-window:]] = True
        if window is None:
            seen[prompt:, :prompt] = True
            assert torch.equal(seen, wanted)
        else:
            distance = layout.positions[:, None] - layout.positions[None]
            assert torch.equal(seen, wanted & (distance < window))


@given(conversations, st.integers(1, 4), st.integers(0, 12))
def test_packs_keep_to_their_budget(sequences, prompt, spare):
    contexts = sort_contexts(sequences)
    budget = prompt + max(contexts.lengths) + spare
    packs = plan_tree_packs([prompt, prompt], [contexts, contexts], budget)
    assert sorted((g, i) for pack in packs for g, members in pack.items() for i in members) == [
        (group, member) for group in (0, 1) for member in range(len(sequences))
    ]
    for pack in packs:
        trees = [build_tree([sequences[i] for i in members]) for members in pack.values()]
        assert sum(prompt + len(tree.ids) for tree in trees) <= budget


def test_a_conversation_that_exceeds_the_budget_is_named():
    handle = prepare(tiny("llama"))
    sequence = conversation(("sampled", [5] * 9), ("given", [6]), ("sampled", [7]))
    with pytest.raises(InputError, match="sample 0 takes 13 tokens"):
        completion_logps(handle, [[3, 4, 5]], [[sequence]], token_budget=12)
    completion_logps(handle, [[3, 4, 5]], [[sequence]], token_budget=13)


@pytest.mark.parametrize(("ids", "words"), [([5, VOCABULARY], "outside the vocabulary"), ([5] * 130, "context length")])
def test_bad_ids_are_named(ids, words):
    handle = prepare(tiny("llama"))
    with pytest.raises(InputError, match=words):
        completion_logps(handle, [[3]], [[conversation(("sampled", [5]), ("given", ids), ("sampled", [5]))]])


def test_a_shared_turn_is_computed_once():
    handle = prepare(tiny("llama"))
    alike = [("sampled", [5] * 10), ("given", [6] * 10)]
    members = [conversation(*alike, ("sampled", [number, 7])) for number in range(8)]
    (pack,) = split_into_packs(handle, [[3, 4]], [members], None, None)
    assert pack.sequences is not None
    assert len(build_tree(pack.sequences[0]).ids) == 20 + 8
