"""Reverse KL to a teacher: literal versions forward and backward in float64, and no logits in memory."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from groupwise.core import NextTokens, reverse_kl, sampled_reverse_kl, top_k_reverse_kl
from groupwise.errors import InputError

TOKENS, VOCABULARY = 11, 23


def random(*shape, seed=0, grad=False):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=grad)


def student_of(grad=True, **options):
    return NextTokens(random(TOKENS, 5, seed=1, grad=grad), random(VOCABULARY, 5, seed=2, grad=grad), **options)


def literal_logits(tokens, temperature):
    """A head's logits, from its formula."""
    logits = tokens.states
    if tokens.weight is not None:
        logits = logits @ tokens.weight.T
    if tokens.bias is not None:
        logits = logits + tokens.bias
    logits = tokens.scale * logits
    if tokens.softcap is not None:
        logits = tokens.softcap * (logits / tokens.softcap).tanh()
    return logits / temperature


def literal_kl(logits, teacher_logits):
    prob, other = logits.softmax(-1), teacher_logits.softmax(-1)
    return (prob * (prob / other).log()).sum(-1)


def gradients(value, *tensors):
    weights = random(*value.shape, seed=9)
    return torch.autograd.grad((value * weights).sum(), tensors, retain_graph=True)


HEADS = {
    "plain": ({}, NextTokens(random(TOKENS, 5, seed=3), random(VOCABULARY, 5, seed=4))),
    "wider": (
        {},
        NextTokens(random(TOKENS, 8, seed=3), random(VOCABULARY, 8, seed=4), bias=random(VOCABULARY, seed=5)),
    ),
    "softcap": (
        {"bias": random(VOCABULARY, seed=6), "softcap": 2.0, "scale": 0.5},
        NextTokens(random(TOKENS, 5, seed=3), random(VOCABULARY, 5, seed=4), None, 3.0, 1.5),
    ),
    "logits": ({}, NextTokens(random(TOKENS, VOCABULARY, seed=3))),
}


@pytest.mark.parametrize("chunk_size", [1, 4, None])
@pytest.mark.parametrize("name", HEADS)
def test_the_exact_kl_is_the_literal_one_with_its_gradient(name, chunk_size):
    options, teacher = HEADS[name]
    student = student_of(**options)
    kl, same = reverse_kl(student, teacher, temperature=0.7, chunk_size=chunk_size)
    mine, other = literal_logits(student, 0.7), literal_logits(teacher, 0.7)
    expected = literal_kl(mine, other)
    torch.testing.assert_close(kl, expected, rtol=1e-12, atol=1e-12)
    trained = (student.states, student.weight)
    for got, wanted in zip(gradients(kl, *trained), gradients(expected, *trained), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
    assert same.tolist() == [float(a == b) for a, b in zip(mine.argmax(-1), other.argmax(-1), strict=True)]
    assert not same.requires_grad


def test_a_student_of_logits_and_gradients_to_the_teacher():
    logits = random(TOKENS, VOCABULARY, seed=1, grad=True)
    teacher = NextTokens(random(TOKENS, 5, seed=3, grad=True), random(VOCABULARY, 5, seed=4, grad=True))
    kl, _ = reverse_kl(NextTokens(logits), teacher)
    expected = literal_kl(logits, literal_logits(teacher, 1.0).detach())
    torch.testing.assert_close(gradients(kl, logits), gradients(expected, logits))
    kl.sum().backward()
    assert teacher.states.grad is None
    assert teacher.weight.grad is None


@pytest.mark.parametrize("extra", [-4, 6])
def test_vocabularies_of_different_sizes(extra):
    """The tokens beyond the smaller one are padding, which no text contains."""
    student = student_of()
    teacher = NextTokens(random(TOKENS, 5, seed=3), random(VOCABULARY + extra, 5, seed=4))
    size = min(VOCABULARY, VOCABULARY + extra)
    expected = literal_kl(literal_logits(student, 1.0)[:, :size], literal_logits(teacher, 1.0)[:, :size])
    torch.testing.assert_close(reverse_kl(student, teacher)[0], expected)


def test_the_kl_to_itself_is_zero_and_so_is_its_gradient():
    student = student_of()
    kl, same = reverse_kl(student, NextTokens(student.states.detach(), student.weight.detach()))
    assert float(kl.detach().abs().max()) < 1e-12
    assert bool(same.all())
    assert max(float(grad.abs().max()) for grad in gradients(kl, student.states, student.weight)) < 1e-12


def test_no_tokens():
    kl, same = reverse_kl(NextTokens(torch.zeros(0, 5), torch.zeros(VOCABULARY, 5)), NextTokens(torch.zeros(0, 7)))
    assert kl.shape == same.shape == (0,)


def test_other_rows_are_refused():
    with pytest.raises(InputError, match="rows of the same tokens"):
        reverse_kl(student_of(), NextTokens(random(TOKENS - 1, VOCABULARY)))
    with pytest.raises(InputError, match="chunk_size"):
        reverse_kl(student_of(), student_of(), chunk_size=0)


# --- the most likely tokens only --------------------------------------------------------------------------------------


def top(logits, k):
    logps, ids = logits.log_softmax(-1).topk(k)
    return ids, logps


@pytest.mark.parametrize("chunk_size", [3, None])
def test_the_kl_over_the_top_tokens_is_that_of_merged_distributions(chunk_size):
    student, teacher = student_of(), literal_logits(HEADS["plain"][1], 1.0)
    ids, logps = top(teacher, 4)
    kl, same = top_k_reverse_kl(student, ids, logps, temperature=0.8, chunk_size=chunk_size)
    mine = literal_logits(student, 0.8)
    prob, other = mine.softmax(-1), teacher.softmax(-1)

    def merged(values):
        kept = values.gather(1, ids)
        return torch.cat([kept, 1 - kept.sum(-1, keepdim=True)], -1)

    expected = (merged(prob) * (merged(prob) / merged(other)).log()).sum(-1)
    torch.testing.assert_close(kl, expected, rtol=1e-9, atol=1e-12)
    trained = (student.states, student.weight)
    for got, wanted in zip(gradients(kl, *trained), gradients(expected, *trained), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-12)
    assert same.tolist() == (mine.argmax(-1) == teacher.argmax(-1)).double().tolist()
    exact = literal_kl(mine, teacher)
    assert bool((kl <= exact + 1e-12).all())  # merging tokens loses information
    assert bool((kl >= 0).all())


def test_all_tokens_give_the_exact_kl_and_missing_ones_count_as_the_rest():
    student, teacher = student_of(), literal_logits(HEADS["plain"][1], 1.0)
    kl, _ = top_k_reverse_kl(student, *top(teacher, VOCABULARY))
    torch.testing.assert_close(kl, literal_kl(literal_logits(student, 1.0), teacher), rtol=1e-6, atol=1e-7)
    ids, logps = top(teacher, 5)
    shorter, _ = top_k_reverse_kl(student, *top(teacher, 3))
    ids[:, 3:], logps[:, 3:] = -1, 0.0
    torch.testing.assert_close(top_k_reverse_kl(student, ids, logps)[0], shorter)


def test_tokens_outside_the_vocabulary_are_refused():
    with pytest.raises(InputError, match="below the student's vocabulary of 23"):
        top_k_reverse_kl(student_of(), torch.full((TOKENS, 2), VOCABULARY), torch.zeros(TOKENS, 2))


# --- the sampled tokens only ------------------------------------------------------------------------------------------


def test_the_sampled_kl_and_its_gradient_by_hand():
    logps = torch.tensor([[-1.0, -2.0, -3.0]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[-0.5, -4.0, 7.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False]])
    value = sampled_reverse_kl(logps, teacher, mask=mask)
    assert value.tolist() == [[-0.5, 2.0, 0.0]]
    (grad,) = torch.autograd.grad(value.sum(), logps)
    assert grad.tolist() == [[-0.5, 2.0, 0.0]]  # the advantage of a token is log π_T − log π_θ


def test_older_samples_are_weighted_by_the_ratio():
    logps, teacher, old = random(3, 4, seed=1, grad=True), random(3, 4, seed=2), random(3, 4, seed=3)
    value = sampled_reverse_kl(logps, teacher, old_logps=old)
    expected = (logps - old).exp() * (logps - teacher).detach()
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradients(value, logps), gradients(expected, logps))


def test_on_average_its_gradient_is_that_of_the_exact_kl():
    """Over all tokens that could be sampled, each with its probability."""
    logits, teacher = random(VOCABULARY, seed=1, grad=True), random(VOCABULARY, seed=2)
    logps = logits.log_softmax(-1)
    sampled = (logps.detach().exp() * sampled_reverse_kl(logps[None], teacher.log_softmax(-1)[None])[0]).sum()
    exact = literal_kl(logits, teacher)
    assert float(sampled.detach()) == pytest.approx(float(exact.detach()), rel=1e-12)
    torch.testing.assert_close(torch.autograd.grad(sampled, logits), torch.autograd.grad(exact, logits))


def test_a_token_that_the_teacher_never_writes_has_a_bounded_advantage():
    value = sampled_reverse_kl(torch.zeros(1, 1, requires_grad=True), torch.full((1, 1), -torch.inf))
    assert value.item() == 20.0


# --- memory -----------------------------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Records the most numbers that any operation returns."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.numbers = max(self.numbers, *sizes, 0)
        return result


def test_no_logits_of_all_tokens_exist_or_are_kept():
    rows, vocabulary, width, chunk = 64, 500, 8, 4
    student = NextTokens(random(rows, width, grad=True), random(vocabulary, width, seed=1, grad=True))
    teacher = NextTokens(random(rows, width, seed=2), random(vocabulary, width, seed=3))
    ids, logps = top(literal_logits(teacher, 1.0), 10)
    for compute in (
        lambda: reverse_kl(student, teacher, chunk_size=chunk),
        lambda: top_k_reverse_kl(student, ids, logps, chunk_size=chunk),
    ):
        kept = []

        def note(tensor, kept=kept):
            kept.append(tensor.numel())
            return tensor

        with LargestTensor() as largest, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            kl, _ = compute()
            assert max(kept, default=0) < chunk * vocabulary
            kl.sum().backward()
        assert largest.numbers <= max(chunk * vocabulary, vocabulary * width)


# --- the peer ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_exact_kl_is_that_of_trls_gkd(monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.gkd import GKDTrainer

    logits, teacher = random(2, 6, VOCABULARY, seed=1, grad=True), random(2, 6, VOCABULARY, seed=2)
    labels = torch.zeros(2, 6, dtype=torch.long)
    labels[1, 4:] = -100  # padding
    theirs = GKDTrainer.generalized_jsd_loss(logits, teacher, labels=labels, beta=1.0, temperature=0.9)
    present = labels.view(-1) >= 0
    rows = logits.view(-1, VOCABULARY)[present], teacher.view(-1, VOCABULARY)[present]
    ours = reverse_kl(*map(NextTokens, rows), temperature=0.9)[0].mean()
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-10)
    torch.testing.assert_close(torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits))
