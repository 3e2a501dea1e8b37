"""The advantage estimator for verl.

verl passes it rewards, a mask, each row's prompt and settings, but no other fields of the batch. So the trainer passes
the groups in a context variable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import ConfigError, InputError
from groupwise.grouping.labels import compute_similarity_group_grpo_outcome_advantage
from groupwise.integrations.verl import ESTIMATOR
from groupwise.integrations.verl.batch import Sessions

_LABEL = re.compile(r".*_\d+", re.DOTALL)
_row_groups: ContextVar[tuple[Sequence[str], Sessions] | None] = ContextVar("row_groups", default=None)


@contextmanager
def use_groups(labels: Sequence[str], sessions: Sessions) -> Iterator[None]:
    """Inside, the estimator uses these labels ``"{uid}_{cluster}"`` of the rows instead of its argument ``index``.

    An agent's session may have several rows, all with the session's reward. As in verl's GRPO, only the last one is
    compared, and the others get its advantage.
    """
    token = _row_groups.set((labels, sessions))
    try:
        yield
    finally:
        _row_groups.reset(token)


def similarity_group_grpo(
    token_level_rewards: Tensor, response_mask: Tensor, index: Any = None, config: Any = None, **unused: Any
) -> tuple[Tensor, Tensor]:
    """Advantages and returns ``(B, T)`` within similarity groups.

    Outside `use_groups`, ``index`` must hold labels ``"{uid}_{cluster}"``. Bare uids are an error: they would compare
    all answers to a prompt, as plain GRPO does.
    """
    groups = _row_groups.get()
    if groups is None:
        labels: Sequence[str] = [str(name) for name in ([] if index is None else list(index))]
        if not labels or not all(map(_LABEL.fullmatch, labels)):
            raise ConfigError(
                f"algorithm.adv_estimator is {ESTIMATOR}, but the answers are not in similarity groups; train with "
                "python -m verl.trainer.main_ppo, or pass labels uid_cluster as index"
            )
        return compute_similarity_group_grpo_outcome_advantage(
            token_level_rewards=token_level_rewards, response_mask=response_mask, index=labels, config=config
        )
    labels, sessions = groups
    if len(labels) != len(token_level_rewards):
        raise InputError(f"{len(labels)} rows have a group, but {len(token_level_rewards)} have rewards")
    rewards = token_level_rewards[sessions.last]
    session_advantages, _ = compute_similarity_group_grpo_outcome_advantage(
        token_level_rewards=rewards,
        response_mask=torch.ones_like(rewards),
        index=[labels[row] for row in sessions.last],
        config=config,
    )
    advantages = session_advantages[:, :1][sessions.session] * response_mask
    return advantages, advantages.clone()
