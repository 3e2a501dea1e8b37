"""What a step minimises: named terms over some samples, summed.

Each term looks at the same `Tokens`-like record of one pack and gives its share of the whole mini-batch's value: the
weights come from the mini-batch's totals, so that the shares of all packs add up whatever the packs are. A term that
has nothing to do is left out rather than computed as zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.config import Recipe
from groupwise.core import kl_estimate, policy_loss
from groupwise.core.losses import LOSSES, Loss, Settings, Tokens, TokenTerm, aggregation_weights
from groupwise.errors import ConfigError
from groupwise.rewards import load_function
from groupwise.train.exact_kl import ExactPart


@dataclass(frozen=True)
class Totals:
    """What means are divided by, whatever the packs are."""

    tokens: int  # of all answers of the mini-batch, computed or not
    sequences: int
    policy_tokens: int  # what the policy's term is divided by: the same, or what the masks leave ("policy_mask")
    policy_sequences: int
    computed_tokens: int  # of the answers that are computed: a mean ratio or entropy knows only these
    computed_sequences: int


@dataclass(frozen=True)
class Part:
    """Some samples of a mini-batch, ``(b, T)`` each but the advantages ``(b,)``; all on the model's device."""

    logps: Tensor  # of the policy, with its gradient
    mask: Tensor
    advantages: Tensor  # (b,)
    policy_mask: Tensor | None  # what may teach, and how loudly
    old_logps: Tensor | None  # None: the batch is used once
    ref_logps: Tensor | None
    entropy: Tensor | None
    exact_kl: ExactPart | None = None  # over the whole vocabulary, where loss.kl asks for that


@dataclass(frozen=True)
class Objective:
    """A step's settings and totals, ready to be applied to parts."""

    now: Recipe
    loss: Loss
    totals: Totals

    def terms(self, part: Part) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The share of each term that this part has, by name, and statistics (detached) that add up likewise."""
        values: dict[str, Tensor] = {}
        statistics: dict[str, Tensor] = {}
        for name, term in TERMS.items():
            found = term(self, part)
            if found is not None:
                values[name], more = found
                statistics |= more
        return values, statistics

    def weights(self, part: Part, how: str | None = None) -> Tensor:
        """How much each token of a part weighs ``(b, T)``: as in the policy's loss, or a plain mean over tokens."""
        return aggregation_weights(
            part.mask,
            how or self.loss.aggregation,
            max_length=self.now.sampling.max_new_tokens,
            total_tokens=self.totals.tokens,
            total_sequences=self.totals.sequences,
            dtype=part.logps.dtype,
        )


Found = tuple[Tensor, dict[str, Tensor]] | None
Term = Callable[[Objective, Part], Found]


def policy_term(objective: Objective, part: Part) -> Found:
    """The policy's loss: `core.policy_loss` with the run's settings."""
    how = objective.now.loss
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
    return value, _shares(objective, part, statistics)


def _shares(objective: Objective, part: Part, statistics: dict[str, Tensor]) -> dict[str, Tensor]:
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


def kl_term(objective: Objective, part: Part) -> Found:
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


def entropy_term(objective: Objective, part: Part) -> Found:
    """−coefficient · mean entropy of the policy over tokens."""
    if part.entropy is None:
        return None
    total = torch.where(part.mask, part.entropy, 0.0).sum()
    coefficient = objective.now.loss.entropy_coef
    value = -coefficient * total / objective.totals.tokens if coefficient else total.detach() * 0.0
    return value, {"entropy": total.detach() / objective.totals.computed_tokens}


# A new term is a function like these, named here; the preference term of GRPO with DPO will be one.
TERMS: dict[str, Term] = {"policy": policy_term, "kl": kl_term, "entropy": entropy_term}


def find_loss(name: str) -> Loss:
    """The record of a loss: a registered one (`core.LOSSES`), or ``module:function``.

    A function of one's own takes `core.Tokens` and `core.Settings` and returns the loss per token ``(b, T)``, or a
    `core.TokenTerm`; all tokens weigh the same. For another aggregation, register a `core.Loss` under a name.
    """
    if name in LOSSES:
        return LOSSES[name]
    own = load_function(name, what="loss")

    def token_loss(tokens: Tokens, settings: Settings) -> TokenTerm:
        found = own(tokens, settings)
        values = found.values if isinstance(found, TokenTerm) else found
        if not isinstance(values, Tensor) or values.shape != tokens.advantages.shape:
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(found).__name__
            raise ConfigError(
                f"the loss {name} returned {shape}; expected one number per token, {tuple(tokens.advantages.shape)}"
            )
        return found if isinstance(found, TokenTerm) else TokenTerm(values)

    return Loss(token_loss, "token_mean")
