"""The advantage estimator, as verl calls it: by keyword, with rewards, a mask, the prompt of each row and its settings.

verl hands an estimator nothing else of the batch, so the trainer says beside the call who is compared with whom.
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

_COMBINED = re.compile(r".*_\d+", re.DOTALL)


@dataclass(frozen=True)
class Compared:
    """Who is compared with whom in a batch of B rows.

    An agent may leave several rows in one session, all with the session's reward. As in verl's own GRPO only the last
    of them is compared, and the others get what it got.
    """

    labels: Sequence[str]  # (B,) "{uid}_{sim_group}"
    last: Sequence[int]  # (N,) the row that stands for each of N sessions
    session: Sequence[int]  # (B,) the session of each row, 0..N-1


_compared: ContextVar[Compared | None] = ContextVar("compared", default=None)


@contextmanager
def compared(how: Compared) -> Iterator[None]:
    """Inside, the estimator compares rows as ``how`` says, whatever prompts it is given."""
    token = _compared.set(how)
    try:
        yield
    finally:
        _compared.reset(token)


def similarity_group_grpo(
    token_level_rewards: Tensor, response_mask: Tensor, index: Any = None, config: Any = None, **unused: Any
) -> tuple[Tensor, Tensor]:
    """Advantages and returns ``(B, T)`` of B rows, each compared with those of its similarity group.

    Without a trainer that says who is compared, ``index`` must hold combined labels, ``"{uid}_{sim_group}"``. Bare
    uids are refused: the answers would be compared with all others to their prompt, which is not what was asked for.
    """
    how = _compared.get()
    if how is None:
        names = [str(name) for name in ([] if index is None else list(index))]
        if not names or not all(map(_COMBINED.fullmatch, names)):
            raise ConfigError(
                f"algorithm.adv_estimator is {ESTIMATOR}, but nobody has put the answers into similarity groups; set "
                f"trainer.v1.trainer_mode to one of {', '.join(MODES)} (and leave trainer.use_v1 true)"
            )
        return compute_similarity_group_grpo_outcome_advantage(
            token_level_rewards=token_level_rewards, response_mask=response_mask, index=names, config=config
        )
    if len(how.labels) != len(token_level_rewards):
        raise InputError(f"{len(how.labels)} rows were put into groups, and {len(token_level_rewards)} have rewards")
    rows = torch.tensor(how.last, dtype=torch.long, device=token_level_rewards.device)
    labels = [how.labels[row] for row in how.last]
    rewards = token_level_rewards[rows]
    each, _ = compute_similarity_group_grpo_outcome_advantage(
        token_level_rewards=rewards, response_mask=torch.ones_like(rewards), index=labels, config=config
    )
    advantages = each[:, :1][torch.tensor(how.session, dtype=torch.long, device=each.device)] * response_mask
    return advantages, advantages.clone()
