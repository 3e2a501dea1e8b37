"""Training on a GPU: it resumes, agrees with the CPU, and recovers from a lack of memory."""

from __future__ import annotations

import pytest
import torch

from groupwise.config import make_recipe
from groupwise.model.precision import set_precision
from groupwise.training.rollout.advantages import compute_group_advantages
from groupwise.training.update.minibatch import build_minibatch
from tests.training.factories import SMALL, last_gradient, make_batch, make_updater, perturb, small_llama
from tests.training.runs import checkpoint_of, merged, metrics_of, run_steps, small_trainer

pytestmark = pytest.mark.gpu

MANY = {"sampling": {"samples_per_prompt": 16, "max_new_tokens": 96}, "train": {"steps": 1, "batch_size": 32}}


def masters(folder, step):
    tensors = checkpoint_of(folder, step)
    return {name: value for name, value in tensors.items() if name.startswith("masters/")}


def largest_difference(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stopped_run_resumes(tmp_path, dtype):
    changes = {"model": {"dtype": dtype}, "loss": {"kl_coef": 0.1}, "train": {"iterations": 2}}
    small_trainer(tmp_path / "a", changes).run()
    run_steps(small_trainer(tmp_path / "b", changes), 2)
    trainer = small_trainer(tmp_path / "b", changes, resume=True)
    assert trainer.components.handle.device.type == "cuda"
    trainer.run()
    assert [row["step"] for row in metrics_of(tmp_path / "b") if "reward" in row] == [1, 2, 3, 4]
    unbroken, resumed = masters(tmp_path / "a", 4), masters(tmp_path / "b", 4)
    moved = largest_difference(unbroken, masters(tmp_path / "a", 1))
    assert moved > 1e-3
    assert largest_difference(unbroken, resumed) < 0.02 * moved


def update_of(algorithm, device, dtype):
    """One update of a policy that differs from its reference."""
    masks = {"min_length": 0, "off_policy_threshold": 0.25}  # not 0.5, where rounding would decide for one sample
    recipe = make_recipe(merged(SMALL, {"algorithm": algorithm, "masks": masks, "loss": {"kl_coef": 1.0}}))
    model = small_llama(torch.float32).to(device)
    set_precision(model, dtype)
    updater = make_updater(recipe, model=model, reference=True)
    perturb(model, size=0.02)
    batch = make_batch(kept=recipe.masks.keep_sampling_mask)
    minibatch = build_minibatch(batch, compute_group_advantages(batch, recipe, [1.0]), range(4), recipe)
    updater.precompute_logps(minibatch, recipe, old=False)
    result = updater.update(minibatch, recipe)
    assert all(bool(gradient.isfinite().all()) for gradient in last_gradient(updater).values())
    return result


@pytest.mark.parametrize("algorithm", ["enhanced_grpo", "enhanced_grpo_literal"])
def test_enhanced_grpo_in_bfloat16_is_close_to_float32_on_the_cpu(algorithm):
    """With a KL weight of 1, so that the KL is a large part of the loss."""
    wanted, got = update_of(algorithm, "cpu", torch.float32), update_of(algorithm, "cuda", torch.bfloat16)
    assert got.masked_out == wanted.masked_out
    assert wanted.values["kl"] > 1e-3
    for name, value in wanted.values.items():
        assert got.values[name] == pytest.approx(value, rel=0.1, abs=0.02), name
    assert got.grad_norm == pytest.approx(wanted.grad_norm, rel=0.1)


def test_out_of_memory(tmp_path):
    """The token budget is halved, with a message, and the gradient is the same."""
    changes = merged(MANY, {"model": {"dtype": "float32"}, "train": {"token_budget": 60_000}})
    enough = small_trainer(tmp_path / "a", changes)
    enough.run()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 700e6) / total)
        short = small_trainer(tmp_path / "b", changes)
        short.run()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert not enough.display.heard("memory ran out")
    assert short.display.heard("the step is repeated with a token budget of 30,000")
    (wanted,), (got,) = (
        [row for row in metrics_of(tmp_path / run) if row.get("updates")] for run in ("a", "b")
    )  # gradients are compared, not weights: AdamW also makes a full step of rounding errors
    assert got["token_budget"] < wanted["token_budget"]
    assert wanted["grad_norm"] > 1e-3
    for name in ("grad_norm", "loss", "reward", "entropy"):
        assert got[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), name
