"""Corrections of the sampler's log-probs against those of a tiny TRL GRPOTrainer, which is given the log-probs.

TRL computes the weights in `_generate_and_score_completions` and multiplies the loss by them in `_compute_loss`.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from itertools import pairwise

import pytest
import torch

from groupwise.config import make_recipe
from groupwise.core import IMPORTANCE_MODES, importance_weights, policy_loss
from groupwise.training.update.correction import correct_sampler, correction_metrics

from .trl_code import float64_by_default, make_grpo_trainer

pytestmark = pytest.mark.slow

SIZE, GROUP, LENGTH = 8, 4, 6
LENGTHS = (6, 1, 3, 2, 5, 6, 4, 1)
MASK = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
BOUNDS = [(None, 1.2), (0.8, None), (0.8, 1.2), (0.5, 5.0)]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    trainer = make_grpo_trainer(tmp_path_factory.mktemp("trl"), size=SIZE, group=GROUP, length=LENGTH)
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def random_logps(seed, unknown):
    generator = torch.Generator().manual_seed(seed)
    sampler = -3 * torch.rand(SIZE, LENGTH, generator=generator, dtype=torch.float64)
    old = sampler + 0.3 * torch.randn(SIZE, LENGTH, generator=generator, dtype=torch.float64)
    rewards = torch.rand(SIZE, 2, generator=generator, dtype=torch.float64)
    if unknown:
        sampler[torch.rand(SIZE, LENGTH, generator=generator) < 0.2] = math.nan
    return old, sampler, rewards


def trl_correction(trainer, old, sampler, rewards, mode, low, high):
    """TRL's batch with its weights, and what it logs."""
    trainer.vllm_importance_sampling_mode = mode
    trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max = low, high
    ids = [[3] * (length - 1) + [1] for length in LENGTHS]
    given = [row[:length].tolist() for row, length in zip(sampler, LENGTHS, strict=True)]
    trainer._generate_single_turn = lambda *_, **__: (ids, given)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (old.clone(), None, None)
    trainer._calculate_rewards = lambda *_: rewards.clone()
    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    with warnings.catch_warnings(), float64_by_default(), torch.no_grad():
        warnings.simplefilter("ignore")
        return trainer._generate_and_score_completions([{"prompt": "a b"}] * SIZE), trainer._metrics["train"]


@pytest.mark.parametrize("unknown", [False, True], ids=["all_known", "some_unknown"])
@pytest.mark.parametrize("mode", IMPORTANCE_MODES)
def test_weights_loss_and_gradient_are_those_of_trl(trainer, mode, unknown):
    changed = 0
    for seed in range(8):
        for low, high in BOUNDS:
            old, sampler, rewards = random_logps(seed, unknown)
            batch, _ = trl_correction(trainer, old, sampler, rewards, mode, low, high)
            weights = importance_weights(old, sampler, MASK, mode=mode, low=low, high=high)
            theirs = batch["importance_sampling_ratio"].expand_as(weights)
            torch.testing.assert_close(weights[MASK], theirs[MASK], rtol=1e-12, atol=1e-12)
            unbounded = importance_weights(old, sampler, MASK, mode=mode)
            changed += int((weights != unbounded)[MASK].sum())

            noise = torch.randn(SIZE, LENGTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            logps = (old + 0.2 * noise).requires_grad_()
            trainer._get_per_token_logps_and_entropies = lambda *_, found=logps, **__: (
                found,
                torch.zeros_like(found),
                None,
            )
            with float64_by_default():
                expected = trainer._compute_loss(trainer.model, batch)
            tokens = int(batch["num_items_in_batch"])
            value, _ = policy_loss(
                logps, old, batch["advantages"], MASK, policy_mask=weights, total_tokens=tokens, loss="dapo"
            )
            torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)
            gradients = [torch.autograd.grad(loss, logps)[0] for loss in (value, expected)]
            torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)
    assert changed > 50


@pytest.mark.parametrize("mode", IMPORTANCE_MODES)
def test_the_mean_weight_is_the_one_that_trl_logs(trainer, mode):
    """Over all tokens, or with a mode of sequences over sequences; mini-batches of any size add up to it."""
    recipe = make_recipe(
        {"loss": {"importance_sampling": mode, "importance_floor": 0.8, "importance_cap": 1.2}},
    )
    for seed in range(8):
        old, sampler, rewards = random_logps(seed, unknown=False)
        _, logged = trl_correction(trainer, old, sampler, rewards, mode, 0.8, 1.2)
        (expected,) = logged["sampling/importance_sampling_ratio/mean"]
        for cuts in ([0, SIZE], [0, 1, 4, SIZE]):
            counts = [
                correct_sampler(old[start:stop], sampler[start:stop], MASK[start:stop], recipe)[1]
                for start, stop in pairwise(cuts)
            ]
            metrics = correction_metrics(counts, recipe)
            assert metrics["sampler/importance_mean"] == pytest.approx(expected, rel=1e-6)
