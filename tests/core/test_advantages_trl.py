"""Advantages against those of a tiny TRL GRPOTrainer, whose reward method is replaced by one with given rewards."""

from __future__ import annotations

import warnings

import pytest
import torch

from groupwise.core import group_advantages

from .trl_code import float64_by_default, make_grpo_trainer

pytestmark = pytest.mark.slow

SIZE, GROUP = 12, 6


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return make_grpo_trainer(tmp_path_factory.mktemp("trl"), size=SIZE, group=GROUP, length=1)


def trl_advantages(trainer, rewards, weights, scale, combine):
    trainer.scale_rewards = scale
    trainer.multi_objective_aggregation = combine
    trainer.reward_weights = torch.tensor(weights, dtype=rewards.dtype)
    trainer._calculate_rewards = lambda *_: rewards.clone()
    with warnings.catch_warnings(), float64_by_default(), torch.no_grad():
        warnings.simplefilter("ignore")
        return trainer._generate_and_score_completions([{"prompt": "a b"}] * SIZE)["advantages"]


def random_rewards(seed, missing):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(SIZE, 2, generator=generator, dtype=torch.float64)
    if seed % 3 == 0:  # binary rewards, as verifiable tasks give
        rewards = (rewards > 0).double()
    if missing:
        rewards[torch.rand(SIZE, 2, generator=generator) < 0.3] = torch.nan
    # Equal rewards in a group are the one known difference, tested below; avoid them here.
    return rewards + torch.arange(SIZE, dtype=torch.float64).unsqueeze(1) * 0.01


@pytest.mark.parametrize("missing", [False, True], ids=["all_scored", "some_unscored"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_sum_then_normalize(trainer, scale, missing):
    for seed in range(40):
        rewards = random_rewards(seed, missing)
        theirs = trl_advantages(trainer, rewards, [1.0, 0.5], scale, "sum_then_normalize")
        ours = group_advantages(rewards, GROUP, scale=scale, weights=[1.0, 0.5])
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("missing", [False, True], ids=["all_scored", "some_unscored"])
def test_normalize_then_sum(trainer, missing):
    for seed in range(40):
        rewards = random_rewards(seed, missing)
        theirs = trl_advantages(trainer, rewards, [1.0, 0.5], "group", "normalize_then_sum")
        ours = group_advantages(rewards, GROUP, weights=[1.0, 0.5], combine="normalize_then_sum")
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_known_difference_equal_rewards(trainer):
    """For a group of equal rewards TRL divides round-off by eps, up to 3e-4 in float32; ours is exactly 0."""
    rewards = torch.full((SIZE, 1), 0.3).expand(SIZE, 2).contiguous()
    rewards[:, 1] = torch.nan
    rewards[0, 0] = 0.2  # the first group has a learning signal
    theirs = trl_advantages(trainer, rewards, [1.0, 1.0], "group", "sum_then_normalize")
    ours = group_advantages(rewards, GROUP)
    assert 0 < theirs[GROUP:].abs().max() < 1e-3
    assert torch.equal(ours[GROUP:], torch.zeros(SIZE - GROUP))
    torch.testing.assert_close(ours[:GROUP], theirs[:GROUP].to(ours.dtype), rtol=1e-5, atol=1e-5)
