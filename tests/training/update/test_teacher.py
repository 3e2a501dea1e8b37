"""The distillation term equals the naive computation: whatever the teacher is, and however samples are packed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from groupwise.config import with_settings
from groupwise.core import distillation, logps
from groupwise.core.aggregation import aggregate
from groupwise.core.ragged import Ragged, RaggedGroups
from groupwise.core.sequences import Turns, join_segments
from groupwise.data import Prompt
from groupwise.errors import ConfigError
from groupwise.model import LoraSettings
from groupwise.model.handle import prepare
from groupwise.model.lora import add_lora
from groupwise.training.rollout.advantages import compute_group_advantages
from groupwise.training.update.minibatch import build_minibatch
from groupwise.training.update.objective import find_loss
from groupwise.training.update.teacher import ServerLogps, Teacher, ask_server
from tests.model.models import SIZE, exact
from tests.training.factories import (
    BUDGETS,
    PROMPTS,
    VOCABULARY,
    assert_same,
    check_update,
    last_gradient,
    make_batch,
    make_updater,
    naive_terms,
    perturb,
    short_recipe,
    small_llama,
)

WEIGHT, TEMPERATURE = 0.4, 0.8
BASE = {"distillation.weight": WEIGHT, "distillation.teacher": "other", "sampling.temperature": TEMPERATURE}


def other_llama(**sizes):
    """A wider and deeper model with the same vocabulary."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = LlamaForCausalLM(LlamaConfig(**{**SIZE, "num_hidden_layers": 2, "hidden_size": 40, **sizes}))
        for parameter in model.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.2)
    model = model.double().eval()
    exact(model)
    return model.requires_grad_(False)


def shown_batch(shown):
    """A batch; ``shown``: its teacher sees other, longer prompts."""
    batch = make_batch()
    if not shown:
        return batch
    longer = [Prompt(p.ids, p.text, (*p.ids, *range(7 + n), *p.ids)) for n, p in enumerate(batch.prompts)]
    return replace(batch, prompts=longer)


def conversation_batch():
    """A batch of conversations: given tokens before, within and after the sampled ones, some of them alike."""
    batch = make_batch()
    generator = torch.Generator().manual_seed(7)
    sequences = []
    for number, ids in enumerate(batch.ids):
        cut, opening = len(ids) // 2, 2 * (number % 3 == 0)
        parts = [(torch.arange(opening), False), (ids[:cut], True)]
        parts.append((torch.randint(VOCABULARY, (1 + number % 3,), generator=generator), False))
        sequences.append(join_segments([*parts, (ids[cut:], True), (torch.arange(number % 2), False)]))
    return replace(batch, turns=Turns.of(sequences))


def naive_logits(model, batch, *, teacher):
    """Each sample on its own through the unmodified model: the logits of its sampled tokens, stacked."""
    rows = []
    turns = None if batch.turns is None else list(batch.turns)
    for prompt in PROMPTS:
        own = batch.prompts[prompt]
        ids = torch.tensor((own.teacher_ids or own.ids) if teacher else own.ids)
        for sample in range(prompt * batch.samples, (prompt + 1) * batch.samples):
            completion = batch.ids[sample] if turns is None else turns[sample].ids
            sampled = torch.ones(len(completion), dtype=torch.bool) if turns is None else turns[sample].sampled
            logits = model(input_ids=torch.cat([ids, completion])[None]).logits[0]
            rows.append(logits[len(ids) - 1 : -1][sampled] / TEMPERATURE)
    return torch.cat(rows)


def tokens_of(batch):
    samples = [prompt * batch.samples + sample for prompt in PROMPTS for sample in range(batch.samples)]
    return [batch.ids[sample] for sample in samples]


def in_rows(values, batch):
    return torch.nn.utils.rnn.pad_sequence(torch.split(values, list(map(len, tokens_of(batch)))), batch_first=True)


def naive_value(model, teacher_logits, batch, recipe, old=None):
    """The weighted term and the KL per token, from the formulas."""
    logits = naive_logits(model, batch, teacher=False)
    prob, other = logits.softmax(-1), teacher_logits.softmax(-1)
    if recipe.distillation.kl == "full":
        per_token = (prob * (prob.log() - other.log())).sum(-1)
    else:
        at = torch.arange(len(logits)), torch.cat(tokens_of(batch))
        logps = prob.log()[at]
        ratio = (logps - (logps.detach() if old is None else old)).exp()
        per_token = ratio * (logps - other.log()[at]).detach()
    mask = in_rows(torch.ones(len(logits)), batch) > 0
    aggregation = find_loss(recipe.loss.name).aggregation
    length = recipe.sampling.max_new_tokens
    return WEIGHT * aggregate(in_rows(per_token, batch), mask, aggregation, max_length=length), per_token.detach()


def check_against_naive(
    settings, teacher, teacher_model=None, *, shown=False, batch=None, budgets=(40,), used_again=False, **options
):
    """``teacher_model``: gives the teacher's logits, by default the policy before it moved."""
    recipe, batch = short_recipe({**BASE, **settings}), batch or shown_batch(shown)
    updater = make_updater(recipe, reference=True, teacher=teacher, **options)
    model = updater.handle.model
    group_advantages = compute_group_advantages(batch, recipe, [1.0])
    minibatch = build_minibatch(batch, group_advantages, PROMPTS, recipe)
    with torch.no_grad():
        before = naive_logits(model, batch, teacher=True)
        if teacher_model is None:
            perturb(model, seed=2)
        at = torch.arange(len(before)), torch.cat(tokens_of(batch))
        old = naive_logits(model, batch, teacher=False).log_softmax(-1)[at] if used_again else None
        teacher_logits = before if teacher_model is None else naive_logits(teacher_model(model), batch, teacher=True)
    updater.precompute_logps(minibatch, recipe, old=used_again)
    if used_again:
        perturb(model, seed=3)
    value, per_token = naive_value(model, teacher_logits, batch, recipe, old)
    terms = {"distillation": value}
    if recipe.loss.policy_coef:
        inputs = {"old": None if old is None else in_rows(old, batch)}
        terms |= naive_terms(updater.handle, batch, group_advantages, PROMPTS, recipe, **inputs)
    for result in check_update(updater, minibatch, recipe, terms, budgets):
        assert result.statistics["distillation/kl"] == pytest.approx(float(per_token.mean()), rel=1e-8)
        assert abs(result.statistics["distillation/kl"]) > 1e-4
        if recipe.distillation.kl == "full":
            same = naive_logits(model, batch, teacher=False).argmax(-1) == teacher_logits.argmax(-1)
            assert result.statistics["distillation/agreement"] == pytest.approx(float(same.double().mean()))


def own_teacher(model):
    return Teacher("other", "own", handle=prepare(model))


KL = pytest.mark.parametrize("kl", ["full", "sampled"])


@KL
@pytest.mark.parametrize("shown", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("loss", ["dapo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_another_model_is_the_teacher_beside_grpo(kl, shown, loss):
    model = other_llama()
    settings = {"distillation.kl": kl, "loss.name": loss}
    check_against_naive(settings, own_teacher(model), lambda _: model, shown=shown, budgets=BUDGETS)


@pytest.mark.slow
@KL
def test_distillation_alone_used_again(kl):
    model = other_llama()
    settings = {"distillation.kl": kl, "loss.policy_coef": 0.0}
    check_against_naive(settings, own_teacher(model), lambda _: model, used_again=True)


@KL
@pytest.mark.parametrize("plain", [None, "student", pytest.param("teacher", marks=pytest.mark.slow)])
def test_conversations(kl, plain):
    """Only sampled tokens are in the term; the given ones are the teacher's context, too."""
    model = other_llama()
    teacher = Teacher("other", "own", handle=prepare(model, plain=plain == "teacher"))
    settings = {"distillation.kl": kl, "loss.policy_coef": 0.0}
    options = {"model": prepare(small_llama(), plain=True)} if plain == "student" else {}
    check_against_naive(
        settings, teacher, lambda _: model, batch=conversation_batch(), budgets=BUDGETS, used_again=True, **options
    )


@pytest.mark.slow
@KL
def test_the_reference_shown_more_is_the_teacher(kl):
    settings = {"distillation.kl": kl, "distillation.teacher": "reference", "distillation.show": "x"}
    check_against_naive(settings, Teacher("reference", "reference"), shown=True, budgets=BUDGETS)


@KL
def test_the_policy_shown_more_is_the_teacher(kl):
    """Its logits are a constant: no gradient flows through the teacher."""
    settings = {"distillation.kl": kl, "distillation.teacher": "policy", "distillation.show": "x"}
    check_against_naive(settings, Teacher("policy", "policy"), lambda model: model, shown=True)


@pytest.mark.slow
@KL
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_model_below_an_adapter_is_the_teacher(kl, checkpointing):
    base = small_llama()
    adapted = add_lora(small_llama(), LoraSettings(rank=2))
    perturb(adapted, size=0.2)
    inner = adapted.get_base_model()
    if checkpointing:
        inner.train()
        inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    before = {name: weight.clone() for name, weight in adapted.named_parameters()}
    settings = {"distillation.kl": kl, "loss.policy_coef": 0.0}
    check_against_naive(settings, Teacher("base", "base", adapted=adapted), lambda _: base, model=inner)
    trained = [name for name, weight in adapted.named_parameters() if weight.requires_grad]
    assert trained
    assert all("lora" in name for name in trained)
    assert all(torch.equal(before[name], weight) for name, weight in adapted.named_parameters())


@pytest.mark.slow
@KL
@pytest.mark.parametrize("plain", ["student", "teacher"])
def test_models_without_packing(kl, plain):
    model = other_llama()
    teacher = Teacher("other", "own", handle=prepare(model, plain=plain == "teacher"))
    options = {"model": prepare(small_llama(), plain=True)} if plain == "student" else {}
    check_against_naive({"distillation.kl": kl}, teacher, lambda _: model, shown=True, **options)


def test_kept_sets_restrict_the_teacher_of_sampled_tokens_as_they_do_the_policy():
    recipe = short_recipe({**BASE, "distillation.kl": "sampled", "masks.keep_sampling_mask": True, "sampling.top_k": 5})
    batch, model = make_batch(kept=True), other_llama()
    updater = make_updater(recipe, teacher=own_teacher(model))
    minibatch = build_minibatch(batch, compute_group_advantages(batch, recipe, [1.0]), PROMPTS, recipe)
    updater.precompute_logps(minibatch, recipe, old=False)
    alike = make_updater(recipe, model=model.requires_grad_(True))
    alike.precompute_logps(minibatch, with_settings(recipe, {"distillation.weight": 0.0}), old=True)
    assert torch.equal(minibatch.teacher.logps, minibatch.old_logps)


def test_every_sample_is_computed_and_the_terms_gradients_add_up():
    """Also of groups with equal rewards, which have no advantage."""
    recipe, batch = short_recipe({**BASE, "distillation.kl": "full"}), make_batch()
    updater = make_updater(recipe, teacher=own_teacher(other_llama()))
    minibatch = build_minibatch(batch, compute_group_advantages(batch, recipe, [1.0]), PROMPTS, recipe)
    assert len(minibatch) == len(PROMPTS) * batch.samples
    updater.update(minibatch, recipe)
    together = last_gradient(updater)
    result = updater.update(minibatch, recipe, log_term_gradients=True)
    assert_same(last_gradient(updater), together, 1e-12)
    assert result.term_gradients["grad_norm/distillation"] > 0


def test_alone_every_sample_has_a_learning_signal():
    batch = make_batch(dropped=[2])
    alone = compute_group_advantages(batch, short_recipe({**BASE, "loss.policy_coef": 0.0}), [1.0])
    assert bool(alone.contributes.all())
    assert set(alone.skip_reasons()) == {None}
    beside = compute_group_advantages(batch, short_recipe(BASE), [1.0])
    assert not bool(beside.contributes.all())


def test_without_a_reference_the_reference_cannot_teach():
    recipe, batch = short_recipe({**BASE, "distillation.teacher": "reference", "distillation.show": "x"}), make_batch()
    updater = make_updater(recipe, teacher=Teacher("reference", "reference"))
    minibatch = build_minibatch(batch, compute_group_advantages(batch, recipe, [1.0]), PROMPTS, recipe)
    with pytest.raises(ConfigError, match="no reference"):
        updater.update(minibatch, recipe)


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("teacher", ["own", "reference", "base"])
def test_an_update_keeps_no_logits(teacher, monkeypatch):
    """With a vocabulary that outweighs everything else, neither model's logits of all tokens are kept or ever exist."""
    vocabulary, chunk = 4000, 3
    for module in (distillation, logps):
        monkeypatch.setattr(module, "rows_per_chunk", lambda *_, **__: chunk)
    name = "other" if teacher == "own" else "reference"
    recipe = short_recipe({**BASE, "distillation.teacher": name, "distillation.show": "x", "loss.policy_coef": 0.0})
    narrow = {"vocab_size": vocabulary, "hidden_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = other_llama(**narrow)
    model.requires_grad_(True)
    options = {"reference": True} if teacher == "reference" else {}
    if teacher == "base":
        adapted = add_lora(model, LoraSettings(rank=2))
        perturb(adapted, size=0.2)
        teaching = Teacher("base", "base", adapted=adapted)
    else:
        teaching = own_teacher(other_llama(**narrow)) if teacher == "own" else Teacher("reference", "reference")
    batch = shown_batch(True)
    updater = make_updater(recipe, teacher=teaching, model=model, budget=10_000, **options)
    minibatch = build_minibatch(batch, compute_group_advantages(batch, recipe, [1.0]), PROMPTS, recipe)
    updater.precompute_logps(minibatch, recipe, old=False)
    tokens = sum(map(len, tokens_of(batch)))
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept, widest = [0], [0]

    def note(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept.append(tensor.numel())
        return tensor

    class Rows(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and leaf.dim() > 1 and leaf.shape[-1] == vocabulary:
                    widest.append(leaf.numel() // vocabulary)
            return result

    with Rows(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        updater.update(minibatch, recipe)
    assert tokens > 4 * 8 > 8 > chunk
    assert max(widest) <= 8  # a chunk of tokens, or the gradient of the head's weight (8 rows, transposed)
    assert max(kept) < 8 * vocabulary
    assert len(kept) > 1


# --- a server's answers -----------------------------------------------------------------------------------------------


class ModelServer:
    """A model in this process that answers as a server does."""

    context_length = None

    def __init__(self, model):
        self.model = model

    def score(self, prompts, completions, top_k):
        return [
            [self._score(prompt, ids, top_k) for ids in members]
            for prompt, members in zip(prompts, completions, strict=True)
        ]

    @torch.no_grad()
    def _score(self, prompt, ids, top_k):
        logits = self.model(input_ids=torch.cat([torch.tensor(prompt), ids])[None]).logits[0, len(prompt) - 1 : -1]
        logps = logits.log_softmax(-1)
        top, numbers = logps.topk(top_k + 1)
        return ServerLogps(logps.gather(1, ids[:, None])[:, 0], numbers, top)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [shown_batch(False), shown_batch(True), conversation_batch()])
def test_the_log_probs_of_a_server(batch):
    """All tokens but one, so that the rest is that token: the exact KL."""
    model = other_llama()
    teacher = Teacher("http://x", "own", server=ModelServer(model))
    server = {"distillation.teacher": None, "distillation.server": "http://x", "sampling.temperature": 1.0}
    for kl in ("full", "sampled"):
        recipe = short_recipe({**BASE, **server, "distillation.kl": kl, "distillation.top_k": SIZE["vocab_size"] - 2})
        updater = make_updater(recipe, teacher=teacher, budget=40)
        minibatch = build_minibatch(batch, compute_group_advantages(batch, recipe, [1.0]), PROMPTS, recipe)
        updater.precompute_logps(minibatch, recipe, old=False)
        got = updater.update(minibatch, recipe)
        local = make_updater(recipe, teacher=own_teacher(model), budget=40)
        again = build_minibatch(batch, compute_group_advantages(batch, recipe, [1.0]), PROMPTS, recipe)
        local.precompute_logps(again, recipe, old=False)
        wanted = local.update(again, recipe)
        assert got.statistics == pytest.approx(wanted.statistics, rel=1e-6)
        assert_same(last_gradient(updater), last_gradient(local), 1e-5)


def test_answers_of_a_server_are_padded():
    answers = ask_server(
        ModelServer(other_llama()),
        Ragged.of([(1, 2), (3,)]),
        RaggedGroups.of([[[4, 5, 6]], [[7]]]),
        2,
        make_updater(short_recipe({})).ranks,
    )
    assert answers.logps.shape == (2, 3)
    assert answers.top_ids.shape == answers.top_logps.shape == (2, 3, 3)
    assert answers.top_ids[1, 1:].tolist() == [[-1] * 3] * 2
