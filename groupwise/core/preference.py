"""Losses over preference pairs: DPO (arXiv 2305.18290) and its variants.

``L = −log σ(β · ((log π_θ(y_w) − log π_ref(y_w)) − (log π_θ(y_l) − log π_ref(y_l))))``, and the other loss types of
TRL 1.16's DPOTrainer that need no further model. Log-probs are sums over a completion's tokens; ``ipo`` and
``sigmoid_norm`` divide by its length, as TRL does.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from groupwise.core._checks import check_above, check_same_shape, check_share, is_number, not_none, working
from groupwise.errors import InputError, check_choice, check_integer


class Pairs(NamedTuple):
    """N pairs, all ``(N,)``: log-ratios to the reference, and the further inputs of some kinds."""

    chosen: Tensor  # log π_θ(y_w) − log π_ref(y_w)
    rejected: Tensor
    policy_chosen: Tensor
    policy_rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_lengths: Tensor | None
    rejected_lengths: Tensor | None
    beta: float
    label_smoothing: float
    discopop_tau: float

    @property
    def logits(self) -> Tensor:
        """β times the margin: the argument of DPO's sigmoid."""
        return self.beta * (self.chosen - self.rejected)

    def per_token_margin(self, kind: str) -> Tensor:
        """The difference of the two log-ratios, each a mean over its tokens."""
        if self.chosen_lengths is None or self.rejected_lengths is None:
            raise InputError(f"the kind {kind!r} needs chosen_lengths and rejected_lengths, in tokens")
        return self.chosen / self.chosen_lengths.clamp(min=1) - self.rejected / self.rejected_lengths.clamp(min=1)


def _exo_pair(p: Pairs) -> Tensor:
    win, lose = logsigmoid(p.logits), logsigmoid(-p.logits)
    return win.exp() * (win - math.log1p(-p.label_smoothing)) + lose.exp() * (lose - math.log(p.label_smoothing))


def _nca_pair(p: Pairs) -> Tensor:
    chosen, rejected = p.beta * p.chosen, p.beta * p.rejected
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def _robust(p: Pairs) -> Tensor:
    flip = p.label_smoothing
    return (-(1 - flip) * logsigmoid(p.logits) + flip * logsigmoid(-p.logits)) / (1 - 2 * flip)


def _aot(p: Pairs) -> Tensor:
    policy, reference = p.policy_chosen - p.policy_rejected, p.ref_chosen - p.ref_rejected
    return _smoothed(p, policy.sort().values - reference.sort().values)


def _smoothed(p: Pairs, delta: Tensor) -> Tensor:
    flip = p.label_smoothing
    return -(1 - flip) * logsigmoid(p.beta * delta) - flip * logsigmoid(-p.beta * delta)


def _discopop(p: Pairs) -> Tensor:
    gate = torch.sigmoid(p.logits / p.discopop_tau)
    return -logsigmoid(p.logits) * (1 - gate) + torch.exp(-p.logits) * gate


def _sft(p: Pairs) -> Tensor:
    """Per pair, such that the mean over pairs is the mean negative log-prob of the chosen answers' tokens."""
    if p.chosen_lengths is None:
        raise InputError("the kind 'sft' needs chosen_lengths, in tokens")
    return -p.policy_chosen * len(p.chosen) / p.chosen_lengths.sum().clamp(min=1)


KINDS: dict[str, Callable[[Pairs], Tensor]] = {
    "sigmoid": lambda p: -logsigmoid(p.logits),
    "hinge": lambda p: torch.relu(1 - p.logits),
    "ipo": lambda p: (p.per_token_margin("ipo") - 1 / (2 * p.beta)).square(),
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "robust": _robust,
    "bco_pair": lambda p: -logsigmoid(p.beta * p.chosen) - logsigmoid(-p.beta * p.rejected),
    "sppo_hard": lambda p: (p.chosen - 0.5 / p.beta).square() + (p.rejected + 0.5 / p.beta).square(),
    "aot": _aot,
    "aot_unpaired": lambda p: _smoothed(p, p.chosen.sort().values - p.rejected.sort().values),
    "apo_zero": lambda p: 1 - torch.sigmoid(p.beta * p.chosen) + torch.sigmoid(p.beta * p.rejected),
    "apo_down": lambda p: torch.sigmoid(p.beta * p.chosen) + 1 - torch.sigmoid(p.logits),
    "discopop": _discopop,
    "sft": _sft,
    "sigmoid_norm": lambda p: -logsigmoid(p.beta * p.per_token_margin("sigmoid_norm")),
}
SMOOTHED_KINDS = frozenset({"exo_pair", "robust", "aot", "aot_unpaired"})
BATCH_KINDS = frozenset({"aot", "aot_unpaired", "sft"})


def preference_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    kind: str | Sequence[str] = "sigmoid",
    weights: Sequence[float] | None = None,
    label_smoothing: float = 0.0,
    chosen_lengths: Tensor | None = None,
    rejected_lengths: Tensor | None = None,
    discopop_tau: float = 0.05,
    total_pairs: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss to minimise over N pairs, and its statistics.

    The four tensors ``(N,)`` are log-probs of complete answers, summed over tokens.
    kind: a name in `KINDS`, or several, whose losses are added with ``weights`` (1 each by default).
    label_smoothing: the share of flipped labels in ``robust`` and ``aot``, ε in ``exo_pair``; the others ignore it, as
    in TRL.
    chosen_lengths, rejected_lengths: tokens per answer, for ``ipo``, ``sigmoid_norm`` and ``sft``.
    total_pairs: of the mini-batch, where this is a micro-batch: losses and statistics of the micro-batches then add
    up to the mini-batch's, except for the kinds that compare across pairs (``aot``, ``aot_unpaired``, ``sft``).

    Statistics, detached: ``accuracy`` (share of pairs with a positive margin), ``margin``, ``chosen_reward`` and
    ``rejected_reward`` (β times the log-ratio).
    """
    names, factors = check_kinds(kind, weights, beta=beta, label_smoothing=label_smoothing, discopop_tau=discopop_tau)
    if total_pairs is not None:
        check_integer("total_pairs", total_pairs, 0)
    if label_smoothing and not SMOOTHED_KINDS.intersection(names):
        warnings.warn(
            f"label_smoothing has no effect on {names}; for labels that may be flipped use kind='robust'", stacklevel=2
        )
    check_same_shape(
        policy_chosen=policy_chosen,
        policy_rejected=policy_rejected,
        ref_chosen=ref_chosen,
        ref_rejected=ref_rejected,
        **not_none(chosen_lengths=chosen_lengths, rejected_lengths=rejected_lengths),
    )
    if policy_chosen.dim() != 1 or not len(policy_chosen):
        raise InputError(f"policy_chosen has shape {tuple(policy_chosen.shape)}; expected (N,) with at least one pair")
    chosen, rejected = working(policy_chosen), working(policy_rejected)
    ref_chosen, ref_rejected = working(ref_chosen.detach()), working(ref_rejected.detach())
    pairs = Pairs(
        chosen - ref_chosen,
        rejected - ref_rejected,
        chosen,
        rejected,
        ref_chosen,
        ref_rejected,
        chosen_lengths,
        rejected_lengths,
        beta,
        label_smoothing,
        discopop_tau,
    )
    number = len(chosen) if total_pairs is None else max(total_pairs, 1)
    loss = chosen.new_zeros(())
    for name, factor in zip(names, factors, strict=True):
        loss = loss + factor * KINDS[name](pairs).sum() / number
    chosen_reward, rejected_reward = beta * pairs.chosen.detach(), beta * pairs.rejected.detach()
    margin = chosen_reward - rejected_reward
    return loss, {
        "accuracy": (margin > 0).to(margin.dtype).sum() / number,
        "margin": margin.sum() / number,
        "chosen_reward": chosen_reward.sum() / number,
        "rejected_reward": rejected_reward.sum() / number,
    }


def check_kinds(
    kind: str | Sequence[str],
    weights: Sequence[float] | None = None,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    discopop_tau: float = 0.05,
) -> tuple[list[str], list[float]]:
    """The kinds and their factors; an error if these settings of `preference_loss` are invalid."""
    names = [kind] if isinstance(kind, str) else list(kind)
    if not names:
        raise InputError("give at least one kind of preference loss")
    for name in names:
        check_choice("kind of preference loss", name, KINDS)
    factors = [1.0] * len(names) if weights is None else weights
    if not isinstance(factors, (list, tuple)) or not all(map(is_number, factors)):
        raise InputError(f"weights must be a list with one finite number per kind, got {weights!r}")
    if len(factors) != len(names):
        raise InputError(f"{len(factors)} weights {weights!r} were given for {len(names)} kinds {names}")
    check_above("beta", beta, 0.0)
    check_above("discopop_tau", discopop_tau, 0.0)
    check_share("label_smoothing", label_smoothing, "[0, 1)")
    if "exo_pair" in names and label_smoothing == 0:
        raise InputError("the kind 'exo_pair' needs label_smoothing above 0 (the EXO paper recommends 1e-3)")
    if "robust" in names and label_smoothing >= 0.5:
        raise InputError(
            f"the kind 'robust' needs label_smoothing, the share of flipped labels, below 0.5, got {label_smoothing}"
        )
    return names, list(factors)
