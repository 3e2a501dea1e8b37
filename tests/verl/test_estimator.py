"""The estimator called by verl: by hand, against verl's GRPO, and without groups."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, get_adv_estimator_fn
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from groupwise.errors import ConfigError, InputError
from groupwise.integrations.verl import ESTIMATOR
from groupwise.integrations.verl.batch import read_sessions
from groupwise.integrations.verl.estimator import use_groups


def make_batch(rewards, uids, mask):
    """Rewards on the last token of each answer, as verl's reward loop leaves them."""
    mask = torch.as_tensor(mask)
    last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
    token_level = torch.zeros(mask.shape).index_put((torch.arange(len(mask)), last), torch.tensor(rewards))
    return DataProto.from_dict(
        tensors={"token_level_rewards": token_level, "response_mask": mask},
        non_tensors={"uid": np.array(uids, dtype=object)},
    )


MASK = [[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]]
REWARDS = [1.0, 3.0, 50.0, 2.0, 2.0]
LABELS = ["u_0", "u_0", "u_1", "v_0", "v_0"]
EACH = [-(0.5**0.5), 0.5**0.5, 0.0, 0.0, 0.0]  # the mean 2 and the deviation √2; alone; equal


def test_advantages_by_hand():
    data = compute_advantage(make_batch(REWARDS, LABELS, MASK), adv_estimator=ESTIMATOR, config=OmegaConf.create({}))
    expected = torch.tensor(EACH)[:, None] * torch.tensor(MASK)
    torch.testing.assert_close(data.batch["advantages"], expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(data.batch["returns"], data.batch["advantages"], atol=0, rtol=0)


def test_advantages_without_std():
    config = OmegaConf.create({"norm_adv_by_std_in_grpo": False})
    data = compute_advantage(make_batch(REWARDS, LABELS, MASK), adv_estimator=ESTIMATOR, config=config)
    assert data.batch["advantages"][:, 0].tolist() == [-1.0, 1.0, 0.0, 0.0, 0.0]


def test_equals_verls_grpo_except_for_single_members():
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        size = int(torch.randint(2, 40, (), generator=generator))
        names = [f"p_{number}" for number in torch.randint(0, 8, (size,), generator=generator).tolist()]
        rewards = torch.randn(size, 4, generator=generator)
        mask = torch.randint(0, 2, (size, 4), generator=generator)
        arguments = {"token_level_rewards": rewards, "response_mask": mask, "index": np.array(names, dtype=object)}
        ours, _ = get_adv_estimator_fn(ESTIMATOR)(**arguments, config=None)
        theirs, _ = compute_grpo_outcome_advantage(**arguments)
        counts = Counter(names)
        alone = torch.tensor([counts[name] == 1 for name in names])
        torch.testing.assert_close(ours[~alone], theirs[~alone], atol=1e-4, rtol=1e-4)
        assert not ours[alone].any()


def test_outputs_of_one_session_as_in_verls_grpo():
    """With one group per prompt the advantages are those that verl's GRPO gives to the same rows."""
    keys = ["u_0_0", "u_1_1", "u_0_1", "v_0_0", "u_1_0", "u_2_0", "v_1_0"]
    uids = [key[0] for key in keys]
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0]])
    rewards = [9.0, 2.0, 1.0, 0.5, 7.0, 4.0, 0.25]  # rewards of earlier outputs are ignored
    theirs = compute_advantage_for_multi_trajectories(make_batch(rewards, uids, mask), keys, "grpo")
    sessions = read_sessions(keys, [{}] * len(keys))
    with use_groups([f"{uid}_0" for uid in uids], sessions):
        ours = compute_advantage_for_multi_trajectories(make_batch(rewards, uids, mask), keys, ESTIMATOR)
    torch.testing.assert_close(ours.batch["advantages"], theirs.batch["advantages"], atol=1e-5, rtol=0)
    assert ours.batch["advantages"][0, 0] == ours.batch["advantages"][2, 0] != 0


def test_bare_uids_are_an_error():
    batch = make_batch(REWARDS, ["u", "u", "u", "v", "v"], MASK)
    with pytest.raises(ConfigError, match=r"not in similarity groups; train with python -m verl\.trainer\.main_ppo"):
        compute_advantage(batch, adv_estimator=ESTIMATOR, config=None)
    with pytest.raises(ConfigError, match="not in similarity groups"):
        get_adv_estimator_fn(ESTIMATOR)(torch.ones(1, 1), torch.ones(1, 1))


def test_groups_of_another_batch_are_an_error():
    with (
        use_groups(["u_0"], read_sessions(["u_0_0"], [{}])),
        pytest.raises(InputError, match="1 rows have a group, but 5"),
    ):
        compute_advantage(make_batch(REWARDS, LABELS, MASK), adv_estimator=ESTIMATOR, config=None)
