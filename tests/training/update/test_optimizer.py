"""The optimizer of a run: which weights have which learning rate, its warm-up and its decay."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.model.precision import MasterWeights
from groupwise.training.schedule.learning_rate import warmup_decay
from groupwise.training.update.optimizer import make_optimizer
from tests.training.factories import make_trainer, short_recipe, small_llama

RATE = {"optimizer.embedding_learning_rate": 0.5, "optimizer.learning_rate": 0.1}


def tied_llama():
    model = small_llama()
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def with_own_rate(model, settings):
    """The weights that have the embeddings' rate, and what was said."""
    masters, said = MasterWeights(model), []
    optimizer = make_optimizer(short_recipe(settings), model, masters, said.append)
    own = {id(weight) for group in optimizer.param_groups if group["embedding"] for weight in group["params"]}
    everything = [weight for group in optimizer.param_groups for weight in group["params"]]
    assert sorted(map(id, everything)) == sorted(map(id, masters.parameters()))
    return {name for name, weight in masters.named_parameters() if id(weight) in own}, said


def test_only_the_input_embeddings_have_it():
    assert with_own_rate(small_llama(), RATE) == ({"model.embed_tokens.weight"}, [])


def test_a_head_that_is_the_embeddings_keeps_the_plain_one_and_that_is_said():
    own, said = with_own_rate(tied_llama(), RATE)
    assert own == set()
    assert said == [
        "optimizer.embedding_learning_rate 0.5 is not applied: the embeddings are also the head "
        "(optimizer.tied_embedding_rate = true applies it)"
    ]
    assert with_own_rate(tied_llama(), {})[1] == []


def test_unless_it_is_told_to():
    settings = {**RATE, "optimizer.tied_embedding_rate": True}
    assert with_own_rate(tied_llama(), settings) == ({"model.embed_tokens.weight"}, [])
    assert with_own_rate(small_llama(), settings) == ({"model.embed_tokens.weight"}, [])


def test_embeddings_that_are_not_trained():
    model = small_llama()
    model.model.embed_tokens.weight.requires_grad_(False)
    own, said = with_own_rate(model, RATE)
    assert own == set()
    assert said == ["optimizer.embedding_learning_rate 0.5 is not applied: the embeddings are not trained"]


@pytest.mark.parametrize("tied", [False, True])
def test_in_a_run_of_the_tiny_model(tmp_path, tied):
    """Its head is its embeddings: their rate moves them only where that is asked for."""
    settings = {"optimizer.embedding_learning_rate": 0.0, "optimizer.tied_embedding_rate": tied, "train.steps": 1}
    with make_trainer(tmp_path, settings) as trainer:
        before = trainer.masters.state_dict()["model.embed_tokens.weight"].clone()
        assert len(list(trainer.steps())) == 1
        moved = not before.equal(trainer.masters.state_dict()["model.embed_tokens.weight"])
        said = [text for text in trainer.display.said if "is not applied" in text]
    assert moved is not tied
    assert len(said) == (0 if tied else 1)


def test_the_learning_rate_that_is_told_is_the_plain_one(tmp_path):
    settings = {**RATE, "optimizer.tied_embedding_rate": True, "optimizer.learning_rate": 1e-4, "train.steps": 1}
    with make_trainer(tmp_path, settings) as trainer:
        (report,) = trainer.steps()
    assert report.metrics["learning_rate"] == 1e-4


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("constant", {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0, 8: 1.0, 12: 1.0, 99: 1.0}),
        ("linear", {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0, 6: 0.8, 8: 0.6, 12: 0.2, 99: 0.2}),
        ("cosine", {0: 0.25, 3: 1.0, 4: 1.0, 6: 0.6 + 0.4 * math.sqrt(0.5), 8: 0.6, 12: 0.2, 99: 0.2}),
    ],
)
def test_warmup_and_decay_by_hand(shape, expected):
    for step, factor in expected.items():
        result = warmup_decay(step, warmup_steps=4, total_steps=12, shape=shape, final=0.2)
        assert result == pytest.approx(factor, rel=1e-12), step


def test_no_warmup_and_a_warmup_longer_than_the_run():
    assert warmup_decay(0, warmup_steps=0, total_steps=10, shape="linear", final=0.0) == 1.0
    assert warmup_decay(5, warmup_steps=0, total_steps=10, shape="linear", final=0.0) == 0.5
    assert warmup_decay(0, warmup_steps=1, total_steps=10, shape="constant", final=0.0) == 1.0
    assert warmup_decay(4, warmup_steps=10, total_steps=5, shape="cosine", final=0.1) == 0.5
    assert warmup_decay(10, warmup_steps=10, total_steps=10, shape="cosine", final=0.1) == 0.1


@given(
    step=st.integers(0, 60),
    warmup=st.integers(0, 20),
    total=st.integers(1, 50),
    shape=st.sampled_from(["constant", "linear", "cosine"]),
    final=st.floats(0, 1),
)
def test_the_factor_never_rises_after_the_warmup(step, warmup, total, shape, final):
    factor, later = (
        warmup_decay(s, warmup_steps=warmup, total_steps=total, shape=shape, final=final) for s in (step, step + 1)
    )
    assert 0 <= factor <= 1
    if step >= warmup:
        assert final - 1e-12 <= later <= factor
