"""What a step minimises: named terms over some samples, summed.

Each term looks at the same `Tokens`-like record of one pack and gives its share of the whole mini-batch's value: the
weights come from the mini-batch's totals, so that the shares of all packs add up whatever the packs are. A term that
has nothing to do is left out rather than computed as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from groupwise.config import Recipe
from groupwise.core import kl_estimate, policy_loss, preference_loss
from groupwise.core.losses import LOSSES, Loss, LossSettings, Tokens, TokenTerm, aggregation_weights
from groupwise.errors import ConfigError
from groupwise.rewards import load_function
from groupwise.training.update.exact_kl import ExactKLTerm


@dataclass(frozen=True)
class Totals:
    """What means are divided by, whatever the packs are."""

    tokens: int  # of all answers of the mini-batch, computed or not
    sequences: int
    policy_tokens: int  # what the policy's term is divided by: the same, or what the masks leave ("policy_mask")
    policy_sequences: int
    computed_tokens: int  # of the answers that are computed: a mean ratio or entropy knows only these
    computed_sequences: int
    pairs: int = 0  # of answers, by which a preference is learned


@dataclass(frozen=True)
class PackedPairs:
    """Pairs of which both answers are in a part: their rows in it, and their summed log-probs under the reference."""

    chosen: Tensor  # (n,)
    rejected: Tensor  # (n,)
    reference: Tensor  # (n, 2), the chosen first


@dataclass(frozen=True)
class PairGradients:
    """Pairs that are spread over parts, or a loss that looks across them: it is known already, and by how much it grows
    with the log-prob of each answer of this part. Value and statistics come with one part alone."""

    slopes: Tensor  # (b,)
    value: float = 0.0
    statistics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class MicroBatch:
    """Some samples of a mini-batch, ``(b, T)`` each but the advantages ``(b,)``; all on the model's device.

    Pairs of a data set have nothing but log-probs, a mask and pairs.
    """

    logps: Tensor  # of the policy, with its gradient
    mask: Tensor
    advantages: Tensor | None = None  # (b,)
    policy_mask: Tensor | None = None  # what may teach, and how loudly
    old_logps: Tensor | None = None  # None: the batch is used once
    ref_logps: Tensor | None = None
    entropy: Tensor | None = None
    exact_kl: ExactKLTerm | None = None  # over the whole vocabulary, where loss.kl asks for that
    pairs: PackedPairs | PairGradients | None = None


@dataclass(frozen=True)
class Objective:
    """A step's settings and totals, ready to be applied to parts."""

    now: Recipe
    loss: Loss
    totals: Totals

    def terms(self, part: MicroBatch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The share of each term that this part has, by name, and statistics (detached) that add up likewise."""
        values: dict[str, Tensor] = {}
        statistics: dict[str, Tensor] = {}
        for name, term in TERMS.items():
            found = term(self, part)
            if found is not None:
                values[name], more = found
                statistics |= more
        return values, statistics

    def weights(self, part: MicroBatch, how: str | None = None) -> Tensor:
        """How much each token of a part weighs ``(b, T)``: as in the policy's loss, or a plain mean over tokens."""
        return aggregation_weights(
            part.mask,
            how or self.loss.aggregation,
            max_length=self.now.sampling.max_new_tokens,
            total_tokens=self.totals.tokens,
            total_sequences=self.totals.sequences,
            dtype=part.logps.dtype,
        )


Statistics = dict[str, Tensor]
Found = tuple[Tensor, Statistics] | None
Term = Callable[[Objective, MicroBatch], Found]


def policy_term(objective: Objective, part: MicroBatch) -> Found:
    """The policy's loss: `core.policy_loss` with the run's settings, times its weight."""
    how = objective.now.loss
    if part.advantages is None or not how.policy_coef:
        return None
    value, statistics = policy_loss(
        part.logps,
        part.old_logps,
        part.advantages,
        part.mask,
        loss=objective.loss,
        ratio=how.ratio,
        clip_low=how.clip_low,
        clip_high=how.clip_high,
        dual_clip=how.dual_clip,
        max_length=objective.now.sampling.max_new_tokens,
        total_tokens=objective.totals.policy_tokens,
        total_sequences=objective.totals.policy_sequences,
        policy_mask=part.policy_mask,
        denominator=how.denominator,
    )
    return how.policy_coef * value, _shares(objective, part, statistics)


def _shares(objective: Objective, part: MicroBatch, statistics: dict[str, Tensor]) -> dict[str, Tensor]:
    """`policy_loss`'s statistics, so that those of all parts add up to a mean over what they are known for.

    What is not computed has nothing that could be clipped, but its ratio is not known: it counts in the clip fractions
    alone.
    """
    how, totals = objective.now.loss, objective.totals
    if (how.ratio or objective.loss.ratios[0]) == "token":
        divided_by, everything, computed = totals.policy_tokens, totals.tokens, totals.computed_tokens
    else:
        divided_by, everything, computed = totals.policy_sequences, totals.sequences, totals.computed_sequences
        if how.denominator == "policy_mask":  # then it is a mean over the part
            divided_by = len(part.mask)
    return {
        name: value * (max(divided_by, 1) / (everything if name.startswith("clip_fraction") else computed))
        for name, value in statistics.items()
    }


def kl_term(objective: Objective, part: MicroBatch) -> Found:
    """β · KL(π_θ ‖ π_ref), aggregated as the policy's loss is. Masks that silence the policy do not touch it."""
    how = objective.now.loss
    known = None
    if part.exact_kl is not None:
        per_token, known = part.exact_kl
    elif part.ref_logps is not None:
        per_token = kl_estimate(part.logps, part.ref_logps, estimator=how.kl, old_logps=part.old_logps, mask=part.mask)
    else:
        return None
    mean = ((per_token.detach() if known is None else known) * objective.weights(part, "token_mean")).sum()
    return how.kl_coef * (per_token * objective.weights(part)).sum(), {"kl": mean}


def entropy_term(objective: Objective, part: MicroBatch) -> Found:
    """−coefficient · mean entropy of the policy over tokens."""
    if part.entropy is None:
        return None
    total = torch.where(part.mask, part.entropy, 0.0).sum()
    coefficient = objective.now.loss.entropy_coef
    value = -coefficient * total / objective.totals.tokens if coefficient else total.detach() * 0.0
    return value, {"entropy": total.detach() / objective.totals.computed_tokens}


def preference_term(objective: Objective, part: MicroBatch) -> Found:
    """w₂ · the loss of the pairs: `core.preference_loss` with the run's settings, a mean over the mini-batch's pairs.

    It knows an answer by its log-prob, summed over tokens; the kinds that want a mean divide by its length.
    """
    if part.pairs is None:
        return None
    # In float64: a float32 sum over a long answer would lose what a small step of the policy changes.
    weight, sums = objective.now.preference.weight, part.logps.double().sum(1)
    if isinstance(part.pairs, PairGradients):
        linear = (part.pairs.slopes * sums).sum()
        value = linear - linear.detach() + part.pairs.value
        known = {name: linear.new_tensor(number) for name, number in part.pairs.statistics.items()}
        return (weight * value).to(part.logps.dtype), known
    chosen, rejected = part.pairs.chosen, part.pairs.rejected
    value, statistics = pairs_loss(
        objective.now,
        torch.stack([sums[chosen], sums[rejected]], 1),
        part.pairs.reference,
        torch.stack([part.mask[chosen].sum(1), part.mask[rejected].sum(1)], 1),
        objective.totals.pairs,
    )
    return (weight * value).to(part.logps.dtype), statistics


def pairs_loss(now: Recipe, logps: Tensor, reference: Tensor, lengths: Tensor, total: int) -> tuple[Tensor, Statistics]:
    """The loss of some of ``total`` pairs, without its weight, and statistics; tensors ``(n, 2)``, the chosen first."""
    how = now.preference
    value, found = preference_loss(
        *logps.unbind(1),
        *reference.unbind(1),
        beta=how.beta,
        kind=how.kind,
        weights=how.kind_weights,
        label_smoothing=how.label_smoothing,
        discopop_tau=how.discopop_tau,
        chosen_lengths=lengths[:, 0],
        rejected_lengths=lengths[:, 1],
        total_pairs=total,
    )
    chosen, rejected = (logps.detach().sum(0) / total).unbind()
    named = {"loss": value.detach(), **found, "chosen_logp": chosen, "rejected_logp": rejected}
    return value, {f"preference/{name}": number for name, number in named.items()}


# A new term is a function like these, named here.
TERMS: dict[str, Term] = {
    "policy": policy_term,
    "kl": kl_term,
    "entropy": entropy_term,
    "preference": preference_term,
}


def find_loss(name: str) -> Loss:
    """The record of a loss: a registered one (`core.LOSSES`), or ``module:function``.

    A function of one's own takes `core.Tokens` and `core.LossSettings` and returns the loss per token ``(b, T)``, or a
    `core.TokenTerm`; all tokens weigh the same. For another aggregation, register a `core.Loss` under a name.
    """
    if name in LOSSES:
        return LOSSES[name]
    own = load_function(name, what="loss")

    def token_loss(tokens: Tokens, settings: LossSettings) -> TokenTerm:
        found = own(tokens, settings)
        values = found.values if isinstance(found, TokenTerm) else found
        if not isinstance(values, Tensor) or values.shape != tokens.advantages.shape:
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(found).__name__
            raise ConfigError(
                f"the loss {name} returned {shape}; expected one number per token, {tuple(tokens.advantages.shape)}"
            )
        return found if isinstance(found, TokenTerm) else TokenTerm(values)

    return Loss(token_loss, "token_mean")
