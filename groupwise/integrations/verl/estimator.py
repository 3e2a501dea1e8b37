"""The advantage estimator for verl.

verl passes it rewards, a mask, each row's prompt and settings, but no other fields of the batch. So the trainer passes
the groups in a context variable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import ConfigError, InputError
from groupwise.grouping.labels import compute_similarity_group_grpo_outcome_advantage
from groupwise.integrations.verl import ESTIMATOR, MODES

_LABEL = re.compile(r".*_\d+", re.DOTALL)


@dataclass(frozen=True)
class RowGroups:
    """The similarity groups of a batch of B rows.

    An agent's session may have several rows, all with the session's reward. As in verl's GRPO, only the last one is
    compared, and the others get its advantage.
    """

    labels: Sequence[str]  # (B,) "{uid}_{cluster}"
    last: Sequence[int]  # (N,) the last row of each of N sessions
    session: Sequence[int]  # (B,) the session of each row, 0..N-1


_row_groups: ContextVar[RowGroups | None] = ContextVar("row_groups", default=None)


@contextmanager
def use_groups(groups: RowGroups) -> Iterator[None]:
    """Inside, the estimator uses these groups instead of its argument ``index``."""
    token = _row_groups.set(groups)
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
        names = [str(name) for name in ([] if index is None else list(index))]
        if not names or not all(map(_LABEL.fullmatch, names)):
            raise ConfigError(
                f"algorithm.adv_estimator is {ESTIMATOR}, but the answers are not in similarity groups; set "
                f"trainer.v1.trainer_mode to one of {', '.join(MODES)} (and leave trainer.use_v1 true)"
            )
        return compute_similarity_group_grpo_outcome_advantage(
            token_level_rewards=token_level_rewards, response_mask=response_mask, index=names, config=config
        )
    if len(groups.labels) != len(token_level_rewards):
        raise InputError(f"{len(groups.labels)} rows have a group, but {len(token_level_rewards)} have rewards")
    rows = torch.tensor(groups.last, dtype=torch.long, device=token_level_rewards.device)
    labels = [groups.labels[row] for row in groups.last]
    rewards = token_level_rewards[rows]
    session_advantages, _ = compute_similarity_group_grpo_outcome_advantage(
        token_level_rewards=rewards, response_mask=torch.ones_like(rewards), index=labels, config=config
    )
    session = torch.tensor(groups.session, dtype=torch.long, device=session_advantages.device)
    advantages = session_advantages[:, :1][session] * response_mask
    return advantages, advantages.clone()
