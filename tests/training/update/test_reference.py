"""The reference policy: it replaces the model's weights within a block only, and can be refreshed and saved."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from groupwise.errors import CheckpointError, InputError
from groupwise.model import LoraSettings, load_model
from groupwise.model.logprobs import completion_logps
from groupwise.model.precision import MasterWeights
from groupwise.training.update.minibatch import build_minibatch
from groupwise.training.update.reference import Reference
from tests.training.factories import make_trainer, perturb, small_llama
from tests.training.runs import small_trainer

PROMPTS, COMPLETIONS = [[5, 6, 7]], [[[1, 2, 3], [4, 5]]]


def copies(weights):
    return {name: weight.detach().clone() for name, weight in weights}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def logps(model):
    with torch.no_grad():
        return completion_logps(model, PROMPTS, COMPLETIONS).logps


@pytest.fixture
def masters():
    with closing(MasterWeights(small_llama(torch.float32))) as masters:
        yield masters


# --- in place of the policy -------------------------------------------------------------------------------------------


def test_within_the_block_the_model_is_the_reference(masters):
    model = masters.model
    first, before = copies(model.named_parameters()), logps(model)
    reference = Reference(masters)
    perturb(model)
    moved, after = copies(model.named_parameters()), logps(model)
    with reference.in_place():
        assert same(copies(model.named_parameters()), first)
        assert torch.equal(logps(model), before)
    assert same(copies(model.named_parameters()), moved)
    assert torch.equal(logps(model), after)
    assert not torch.equal(before, after)


def test_the_policy_is_restored_after_an_exception(masters):
    model = masters.model
    reference = Reference(masters)
    perturb(model)
    moved = copies(model.named_parameters())
    original = {name: (id(weight), weight.data_ptr()) for name, weight in model.named_parameters()}
    with pytest.raises(KeyError, match="in the middle"), reference.in_place():
        raise KeyError("in the middle")
    assert same(copies(model.named_parameters()), moved)
    assert {name: (id(weight), weight.data_ptr()) for name, weight in model.named_parameters()} == original


def test_an_optimizer_step_does_not_change_the_reference(masters):
    model = masters.model
    reference = Reference(masters)
    first = copies(reference.state_dict().items())
    optimizer = torch.optim.AdamW(masters.parameters(), lr=0.1)
    completion_logps(model, PROMPTS, COMPLETIONS).logps.sum().backward()
    with reference.in_place():
        optimizer.zero_grad(set_to_none=False)
    completion_logps(model, PROMPTS, COMPLETIONS).logps.sum().backward()
    optimizer.step()
    assert same(copies(reference.state_dict().items()), first)
    assert not torch.equal(model.lm_head.weight, first["lm_head.weight"])


def test_a_model_with_tied_embeddings():
    model = load_model("tiny", dtype="float32", device="cpu")
    before = logps(model)
    with closing(MasterWeights(model)) as masters:
        reference = Reference(masters)
        perturb(model)
        with reference.in_place():
            assert torch.equal(logps(model), before)
        assert not torch.equal(logps(model), before)


# --- refreshes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixes", [False, True])
def test_a_refresh_copies_the_policy(masters, mixes):
    reference = Reference(masters, mixes=mixes)
    assert reference.refreshes == 0
    perturb(masters.model)
    moved = copies(masters.model.named_parameters())
    reference.refresh()
    assert reference.refreshes == 1
    perturb(masters.model, seed=2)
    with reference.in_place():
        assert same(copies(masters.model.named_parameters()), moved)


def test_a_mix_moves_part_of_the_way(masters):
    reference = Reference(masters, mixes=True)
    first = copies(masters.model.named_parameters())
    perturb(masters.model)
    moved = copies(masters.model.named_parameters())
    reference.refresh(0.25)
    reference.refresh(0.5)
    assert reference.refreshes == 2
    with reference.in_place():
        for name, weight in masters.model.named_parameters():
            wanted = first[name] + (1 - 0.75 * 0.5) * (moved[name] - first[name])
            torch.testing.assert_close(weight.detach(), wanted, rtol=1e-5, atol=1e-6)


def test_small_mixes_add_up_in_bfloat16():
    """One moves a weight by less than bfloat16 resolves; a thousand of them arrive."""
    model = small_llama(torch.bfloat16)
    with closing(MasterWeights(model)) as masters:
        reference = Reference(masters, mixes=True)
        first = copies(model.named_parameters())
        with torch.no_grad():
            for master in masters.parameters():
                master.mul_(1.05)
        masters.sync_to_model()
        reference.refresh(0.01)
        with reference.in_place():
            assert same(copies(model.named_parameters()), first)
        for _ in range(999):
            reference.refresh(0.01)
        with reference.in_place():
            got = copies(model.named_parameters())
        assert all(weight.dtype == torch.float32 for weight in reference.state_dict().values())
        assert all(weight.dtype == torch.bfloat16 for weight in got.values())
        for name, master in masters.state_dict().items():
            torch.testing.assert_close(reference.state_dict()[name], master, rtol=1e-4, atol=1e-6)
            assert torch.equal(got[name], reference.state_dict()[name].bfloat16())
        assert not same(got, first)


def test_a_partial_refresh_needs_mixes(masters):
    reference = Reference(masters)
    first = copies(reference.state_dict().items())
    perturb(masters.model)
    with pytest.raises(InputError, match=r"0\.5 of the way.*mixes=True"):
        reference.refresh(0.5)
    assert same(copies(reference.state_dict().items()), first)
    assert reference.refreshes == 0


def test_with_lora_the_reference_is_an_adapter():
    model = load_model("tiny", dtype="float32", device="cpu", lora=LoraSettings(rank=2))
    with closing(MasterWeights(model)) as masters:
        reference = Reference(masters)
        names = set(reference.state_dict())
        assert names == {name for name, weight in model.named_parameters() if weight.requires_grad}
        assert names
        assert all("lora" in name for name in names)
        before = logps(model)
        with torch.no_grad():
            for master in masters.parameters():
                master.add_(0.1)
        assert not torch.equal(logps(model), before)
        with reference.in_place():
            assert torch.equal(logps(model), before)
        reference.refresh()
        with reference.in_place():
            assert not torch.equal(logps(model), before)


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixes", [False, True])
def test_a_reference_is_loaded_bit_for_bit(masters, mixes):
    reference = Reference(masters, mixes=mixes)
    perturb(masters.model)
    reference.refresh(0.3 if mixes else 1.0)
    saved = copies(reference.state_dict().items())
    perturb(masters.model, seed=2)
    other = Reference(masters, mixes=mixes)
    assert not same(copies(other.state_dict().items()), saved)
    other.load(saved, 7)
    assert other.refreshes == 7
    assert same(copies(other.state_dict().items()), saved)
    with other.in_place():
        assert same(copies(masters.model.named_parameters()), saved)


@pytest.mark.parametrize("fault", ["missing", "more", "dtype", "shape"])
def test_a_reference_that_does_not_fit(masters, fault):
    reference = Reference(masters)
    original = copies(reference.state_dict().items())
    saved = copies(original.items())
    if fault == "missing":
        del saved["lm_head.weight"]
    elif fault == "more":
        saved["other.weight"] = torch.zeros(1)
    elif fault == "dtype":
        saved["lm_head.weight"] = saved["lm_head.weight"].bfloat16()
    else:
        saved["lm_head.weight"] = saved["lm_head.weight"][:, :1].clone()
    name = "other.weight" if fault == "more" else "lm_head.weight"
    with pytest.raises(CheckpointError, match=f"does not fit the model: {name}"):
        reference.load(saved, 3)
    assert same(copies(reference.state_dict().items()), original)
    assert reference.refreshes == 0


def test_a_run_with_partial_refreshes(tmp_path):
    """The KL is not 0 after a partial refresh."""
    settings = {
        "loss.kl_coef": 0.1,
        "train.steps": 3,
        "optimizer.learning_rate": 1e-2,
        "reference.refresh_every": 1,
        "reference.mix": 0.5,
    }
    with make_trainer(tmp_path, settings) as trainer:
        kls = [report.metrics["kl"] for report in trainer.steps()]
    assert kls[0] == pytest.approx(0.0, abs=1e-9)
    assert min(kls[1:]) > 1e-7


def test_the_reference_has_no_dropout(tmp_path):
    """The policy's log-probs differ from pass to pass, the reference's do not."""
    changes = {
        "model": {"lora": {"rank": 4, "dropout": 0.5}},
        "loss": {"kl_coef": 0.1},
        "reference": {"refresh_every": 1},
    }
    with small_trainer(tmp_path / "run", changes) as trainer:
        report = next(trainer.steps())
        recipe, minibatches = trainer.step_recipe(), []
        for _ in range(2):
            minibatch = build_minibatch(report.batch, report.group_advantages, range(3), recipe)
            trainer.updater.precompute_logps(minibatch, recipe, old=True)
            minibatches.append(minibatch)
        assert torch.equal(minibatches[0].ref_logps, minibatches[1].ref_logps)
        assert not torch.equal(minibatches[0].old_logps, minibatches[1].old_logps)
        assert trainer.components.handle.model.training
