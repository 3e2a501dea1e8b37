"""The objective that a step minimises: a sum of named terms, each in `TERMS`.

A term computes its share of the mini-batch's value from one micro-batch. Denominators come from the mini-batch's
`Totals`, so the shares add up to the same value however the samples are packed. To add a term, put an `ObjectiveTerm`
into `TERMS` before the run is created.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from groupwise.config import Recipe
from groupwise.core import DivergenceLimit, PromptTotals, kl_estimate, policy_loss, preference_loss, sampled_reverse_kl
from groupwise.core.aggregation import aggregation_weights
from groupwise.core.losses import LOSSES, Loss, LossSettings, Tokens, TokenTerm
from groupwise.errors import ConfigError, is_out_of_memory
from groupwise.model.device import float64_device
from groupwise.training.update.exact_kl import EXACT_KL_FACTORS
from groupwise.user_code import failures_named, load_function


@dataclass(frozen=True)
class Totals:
    """The denominators of a mini-batch, the same for all of its micro-batches."""

    tokens: int  # of all completions of the mini-batch, computed or not
    sequences: int
    policy_tokens: int  # the policy term's denominator: the same, or what the masks leave ("policy_mask")
    policy_sequences: int
    computed_tokens: int  # of the completions that are computed: only these have a ratio and an entropy
    computed_sequences: int
    pairs: int = 0  # preference pairs
    prompts: int = 0  # with a completion in the mini-batch, computed or not
    token_scale: float = 1.0  # of means over tokens, if all mini-batches of a batch divide by the same number of tokens


@dataclass(frozen=True)
class PackedPairs:
    """Pairs with both completions in a micro-batch: their rows, and their summed log-probs under the reference."""

    rows: Tensor  # (n, 2), chosen first
    reference: Tensor  # (n, 2)


@dataclass(frozen=True)
class PairGradients:
    """A pair loss that was computed beforehand, because pairs are split over micro-batches or the loss couples them.
    Value and statistics are given to one micro-batch only."""

    grads: Tensor  # (b,) with respect to each row's summed log-prob
    value: float = 0.0
    statistics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class MicroBatch:
    """Some samples of a mini-batch on the model's device, ``(b, T)``. A data set's pairs have logps, mask and pairs."""

    logps: Tensor  # of the policy, with gradient
    mask: Tensor
    advantages: Tensor | None = None  # (b,), or (b, T) if turns have their own
    prompt_tokens: Tensor | None = None  # (b,) of all completions of each row's prompt in the mini-batch
    policy_mask: Tensor | None = None  # bool, or importance weights
    sampler_logps: Tensor | None = None
    old_logps: Tensor | None = None  # None: the batch is used once
    ref_logps: Tensor | None = None
    entropy: Tensor | None = None
    local_lengths: Tensor | None = None  # (b,) mean length of the completions of each row's local batch
    exact_kl: tuple[Tensor, Tensor] | None = None  # penalty and KL over the full vocabulary, if loss.kl asks for it
    pairs: PackedPairs | PairGradients | None = None
    teacher_logps: Tensor | None = None
    teacher_kl: tuple[Tensor, Tensor] | None = None  # over the vocabulary, and whether both prefer the same token
    rows: Tensor | None = None  # (b,) of the mini-batch


@dataclass(frozen=True)
class Objective:
    """The settings and denominators of one update."""

    recipe: Recipe
    loss: Loss
    totals: Totals

    def terms(self, micro_batch: MicroBatch) -> tuple[dict[str, Tensor], Statistics]:
        """The micro-batch's share of each term, by name, and detached statistics that add up in the same way."""
        values: dict[str, Tensor] = {}
        statistics: Statistics = {}
        for name, term in TERMS.items():
            if micro_batch.advantages is None and not term.from_pairs:
                continue  # pairs of a data set
            share = term.compute(self, micro_batch, term.weight_in(self.recipe))
            if share is not None:
                values[name], term_statistics = share
                statistics |= term_statistics
        return values, statistics

    @property
    def aggregation(self) -> str:
        """How the policy loss averages tokens: the recipe's choice, or the loss's own way."""
        return self.recipe.loss.aggregation or self.loss.aggregation

    def prompt_totals(self, micro_batch: MicroBatch) -> PromptTotals | None:
        """The denominators of a mean over prompts."""
        tokens = micro_batch.prompt_tokens
        return None if tokens is None else PromptTotals(tokens, self.totals.prompts)

    def token_weights(self, micro_batch: MicroBatch, aggregation: str | None = None) -> Tensor:
        """The weight of each token ``(b, T)`` in a mean over the mini-batch, by default the policy loss's mean."""
        weights = aggregation_weights(
            micro_batch.mask,
            aggregation or self.aggregation,
            max_length=self.recipe.sampling.max_new_tokens,
            total_tokens=self.totals.tokens,
            total_sequences=self.totals.sequences,
            prompts=self.prompt_totals(micro_batch),
            local_lengths=self.local_lengths(micro_batch, self.totals.tokens, self.totals.sequences),
            dtype=micro_batch.logps.dtype,
        )
        return weights if aggregation is not None else weights * self.token_scale

    @property
    def token_scale(self) -> float:
        """The factor of the policy loss's mean, if that is one over tokens."""
        return self.totals.token_scale if self.aggregation == "token_mean" else 1.0

    def local_lengths(self, micro_batch: MicroBatch, tokens: int, sequences: int) -> Tensor:
        """The mean completion length ``(b,)`` of each row's local batch; without any, that of the mini-batch."""
        if micro_batch.local_lengths is not None:
            return micro_batch.local_lengths
        return micro_batch.logps.new_full(micro_batch.mask.shape[:1], tokens / max(1, sequences))


Statistics = dict[str, Tensor]
TermShare = tuple[Tensor, Statistics] | None
TermFunction = Callable[[Objective, MicroBatch, float], TermShare]
"""A micro-batch's share of a term, times the weight, and detached statistics; None if there is nothing to add.

It is also called with weight 0, so that a term can report statistics without being trained on."""


@dataclass(frozen=True)
class ObjectiveTerm:
    """A term of the objective and what it needs. A term whose weight is 0 needs nothing."""

    name: str
    compute: TermFunction
    weight: str | float  # a dotted setting, or a constant
    needs_reference: bool = False  # fills `MicroBatch.ref_logps`, or the reference of the pairs
    needs_old_logps: bool = False  # fills `MicroBatch.old_logps` if the batch is used more than once
    needs_all_samples: bool = False  # else samples without a learning signal are not computed
    is_regularizer: bool = False  # a run with nothing but regularizers learns nothing, and is refused
    from_pairs: bool = False  # a function of preference pairs, which may come from a data set without any sampling
    statistics: Mapping[str, float] = field(default_factory=dict)  # values for a step that computes nothing
    is_always_reported: bool = False  # also if its weight is 0
    tag: str | None = None  # in the model card

    def weight_in(self, recipe: Recipe) -> float:
        return float(recipe.get(self.weight)) if isinstance(self.weight, str) else self.weight


def active_terms(recipe: Recipe, driven: Collection[str] = ()) -> list[ObjectiveTerm]:
    """The terms with a weight: of a step, or with the ``driven`` settings of its schedule, of a run."""
    return [term for term in TERMS.values() if term.weight_in(recipe) or term.weight in driven]


def reported_terms(recipe: Recipe) -> list[ObjectiveTerm]:
    """The terms that a step reports, whether or not it has anything to compute."""
    samples, active = samples_completions(recipe), active_terms(recipe)
    shown = (term for term in TERMS.values() if term in active or term.is_always_reported)
    return [term for term in shown if term.from_pairs or samples]


def samples_completions(recipe: Recipe, driven: Collection[str] = ()) -> bool:
    """Whether a step (or run) samples completions: unless it only learns from the pairs of a data set."""
    return any(not term.from_pairs or recipe.preference.pairs != "data" for term in active_terms(recipe, driven))


def needs_reference(recipe: Recipe, driven: Collection[str] = ()) -> bool:
    """Whether a step (or run) needs a reference policy for its update."""
    terms = active_terms(recipe, driven)
    teaches = TERMS["distillation"] in terms and recipe.distillation.teacher == "reference"
    return teaches or any(term.needs_reference for term in terms) or recipe.masks.off_policy == "reference_drift"


def needs_ref_logps(recipe: Recipe) -> bool:
    """Whether a step needs the reference's log-prob of each sampled token; the exact KL does not use it."""
    unused = {"kl"} if recipe.loss.kl in EXACT_KL_FACTORS else set()
    names = {term.name for term in active_terms(recipe) if term.needs_reference and not term.from_pairs}
    return bool(names - unused) or recipe.masks.off_policy == "reference_drift"


def needs_old_logps(recipe: Recipe) -> bool:
    """Whether a step needs the log-probs of the policy before its first update, if it has several."""
    unused = {"distillation"} if recipe.distillation.kl == "full" else set()
    return any(term.needs_old_logps and term.name not in unused for term in active_terms(recipe))


def needs_rewards(recipe: Recipe, driven: Collection[str] = ()) -> bool:
    """Whether a run learns from rewards: by advantages, or by pairs that they rank."""
    names = {term.name for term in active_terms(recipe, driven)}
    return "policy" in names or ("preference" in names and recipe.preference.pairs != "data")


def policy_term(objective: Objective, micro_batch: MicroBatch, weight: float) -> TermShare:
    """weight · `core.policy_loss` with the run's settings."""
    if micro_batch.advantages is None or not weight:
        return None
    settings, totals = objective.recipe.loss, objective.totals
    value, statistics = policy_loss(
        micro_batch.logps,
        micro_batch.old_logps,
        micro_batch.advantages,
        micro_batch.mask,
        loss=objective.loss,
        aggregation=objective.aggregation,
        ratio=settings.ratio,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
        sapo_temperatures=(settings.sapo_temperatures[0], settings.sapo_temperatures[1]),
        vespo_positive=(settings.vespo_positive[0], settings.vespo_positive[1]),
        vespo_negative=(settings.vespo_negative[0], settings.vespo_negative[1]),
        max_length=objective.recipe.sampling.max_new_tokens,
        total_tokens=totals.policy_tokens,
        total_sequences=totals.policy_sequences,
        prompts=objective.prompt_totals(micro_batch),
        local_lengths=objective.local_lengths(micro_batch, totals.policy_tokens, totals.policy_sequences),
        policy_mask=micro_batch.policy_mask,
        denominator=settings.denominator,
        divergence=_divergence_limit(objective.recipe, micro_batch),
    )
    return weight * objective.token_scale * value, _rescale(objective, micro_batch, statistics)


def _divergence_limit(recipe: Recipe, micro_batch: MicroBatch) -> DivergenceLimit | None:
    masks = recipe.masks
    if masks.divergence is None or micro_batch.sampler_logps is None:
        return None
    return DivergenceLimit(micro_batch.sampler_logps, masks.divergence, masks.divergence_threshold)


def _rescale(objective: Objective, micro_batch: MicroBatch, statistics: Statistics) -> Statistics:
    """`policy_loss`'s statistics with other denominators, so that those of all micro-batches add up to a mean.

    Clip fractions are shares of all tokens (or sequences), the others means over those that are computed.
    """
    settings, totals = objective.recipe.loss, objective.totals
    if (settings.ratio or objective.loss.ratios[0]) == "token":
        divided_by, everything, computed = totals.policy_tokens, totals.tokens, totals.computed_tokens
    else:
        divided_by, everything, computed = totals.policy_sequences, totals.sequences, totals.computed_sequences
        if settings.denominator == "policy_mask":  # `policy_loss` then returns a mean over the micro-batch
            divided_by = len(micro_batch.mask)
    return {
        name: value * (max(divided_by, 1) / (everything if name.startswith("clip_fraction") else computed))
        for name, value in statistics.items()
    }


def kl_term(objective: Objective, micro_batch: MicroBatch, weight: float) -> TermShare:
    """weight · KL(π_θ ‖ π_ref), aggregated by ``loss.kl_aggregation``. Policy masks do not apply to it."""
    if not weight:
        return None
    settings, mean_weights = objective.recipe.loss, objective.token_weights(micro_batch, "token_mean")
    statistics: Statistics = {}
    if micro_batch.exact_kl is not None:
        per_token, kl = micro_batch.exact_kl
        if settings.kl == "full_ratio_weighted":
            statistics["kl_ratio_weighted"] = (per_token.detach() * mean_weights).sum()
    elif micro_batch.ref_logps is not None:
        per_token = kl_estimate(
            micro_batch.logps,
            micro_batch.ref_logps,
            estimator=settings.kl,
            old_logps=micro_batch.old_logps,
            mask=micro_batch.mask,
            ratio=settings.ratio or objective.loss.ratios[0],
        )
        kl = per_token.detach()
    else:
        return None
    statistics["kl"] = (kl * mean_weights).sum()
    weights = mean_weights if settings.kl_aggregation == "token_mean" else objective.token_weights(micro_batch)
    return weight * (per_token * weights).sum(), statistics


def entropy_term(objective: Objective, micro_batch: MicroBatch, weight: float) -> TermShare:
    """−weight · the policy's mean entropy over tokens, of each local batch. It is reported even if the weight is 0."""
    if micro_batch.entropy is None:
        return None
    entropy = torch.where(micro_batch.mask, micro_batch.entropy, 0.0)
    total = entropy.sum()
    if micro_batch.local_lengths is None:
        value = -weight * total / objective.totals.tokens if weight else total.detach() * 0.0
    else:
        value = -weight * (entropy * objective.token_weights(micro_batch, "local_token_mean")).sum()
    return value, {"entropy": total.detach() / objective.totals.computed_tokens}


def distillation_term(objective: Objective, micro_batch: MicroBatch, weight: float) -> TermShare:
    """weight · KL(π_θ ‖ π_T), aggregated over tokens like the policy loss. Policy masks do not apply to it."""
    if not weight:
        return None
    mean_weights = objective.token_weights(micro_batch, "token_mean")
    statistics: Statistics = {}
    if micro_batch.teacher_kl is not None:
        per_token, same = micro_batch.teacher_kl
        statistics["distillation/agreement"] = (same * mean_weights).sum()
    elif micro_batch.teacher_logps is not None:
        per_token = sampled_reverse_kl(
            micro_batch.logps, micro_batch.teacher_logps, old_logps=micro_batch.old_logps, mask=micro_batch.mask
        )
    else:
        return None
    statistics["distillation/kl"] = (per_token.detach() * mean_weights).sum()
    return weight * (per_token * objective.token_weights(micro_batch)).sum(), statistics


def preference_term(objective: Objective, micro_batch: MicroBatch, weight: float) -> TermShare:
    """weight · `core.preference_loss` with the run's settings, a mean over the mini-batch's pairs."""
    pairs = micro_batch.pairs
    if pairs is None:
        return None
    # In float64: a float32 sum over a long completion would lose the effect of a small update.
    sums = micro_batch.logps.to(float64_device(micro_batch.logps.device)).double().sum(1)
    if isinstance(pairs, PairGradients):
        linear = (pairs.grads * sums).sum()
        value = linear - linear.detach() + pairs.value
        statistics = {name: linear.new_tensor(number) for name, number in pairs.statistics.items()}
    else:
        lengths = micro_batch.mask.sum(1).to(sums.device)[pairs.rows]
        value, statistics = pairs_loss(
            objective.recipe, sums[pairs.rows], pairs.reference, lengths, objective.totals.pairs
        )
    return (weight * value).to(micro_batch.logps), statistics


def pairs_loss(
    recipe: Recipe, logps: Tensor, reference: Tensor, lengths: Tensor, total: int
) -> tuple[Tensor, Statistics]:
    """The unweighted loss of some of ``total`` pairs, and statistics; tensors are ``(n, 2)``, chosen first."""
    settings = recipe.preference
    value, loss_statistics = preference_loss(
        *logps.unbind(1),
        *reference.unbind(1),
        beta=settings.beta,
        kind=settings.kind,
        weights=settings.kind_weights,
        label_smoothing=settings.label_smoothing,
        discopop_tau=settings.discopop_tau,
        chosen_lengths=lengths[:, 0],
        rejected_lengths=lengths[:, 1],
        total_pairs=total,
    )
    chosen, rejected = (logps.detach().sum(0) / total).unbind()
    statistics = {"loss": value.detach(), **loss_statistics, "chosen_logp": chosen, "rejected_logp": rejected}
    return value, {f"preference/{name}": number for name, number in statistics.items()}


NOT_MEASURED = float("nan")
_PAIR_STATISTICS = ["loss", "accuracy", "margin", "chosen_reward", "rejected_reward", "chosen_logp", "rejected_logp"]

TERMS: dict[str, ObjectiveTerm] = {
    term.name: term
    for term in (
        ObjectiveTerm(
            "policy",
            policy_term,
            "loss.policy_coef",
            needs_old_logps=True,
            statistics={
                "clip_fraction_low": 0.0,
                "clip_fraction_high": 0.0,
                "ratio": NOT_MEASURED,
                "approx_kl": NOT_MEASURED,
            },
            tag="grpo",
        ),
        ObjectiveTerm(
            "kl",
            kl_term,
            "loss.kl_coef",
            needs_reference=True,
            needs_old_logps=True,
            needs_all_samples=True,
            is_regularizer=True,
            statistics={"kl": NOT_MEASURED},
        ),
        ObjectiveTerm(
            "entropy",
            entropy_term,
            "loss.entropy_coef",
            needs_all_samples=True,
            is_regularizer=True,
            statistics={"entropy": NOT_MEASURED},
            is_always_reported=True,
        ),
        ObjectiveTerm(
            "preference",
            preference_term,
            "preference.weight",
            needs_reference=True,
            from_pairs=True,
            statistics={f"preference/{name}": NOT_MEASURED for name in _PAIR_STATISTICS},
            tag="dpo",
        ),
        ObjectiveTerm(
            "distillation",
            distillation_term,
            "distillation.weight",
            needs_old_logps=True,
            needs_all_samples=True,
            statistics={"distillation/kl": NOT_MEASURED},
            tag="on-policy-distillation",
        ),
    )
}


def find_loss(name: str) -> Loss:
    """A policy loss: one of `core.LOSSES`, or ``module:function``.

    A custom function takes `core.Tokens` and `core.LossSettings` and returns the loss per token ``(b, T)``, or a
    `core.TokenTerm`. It is averaged over tokens; for another aggregation, register a `core.Loss` in `core.LOSSES`.
    """
    if name in LOSSES:
        return LOSSES[name]
    function = load_function(name, what="loss")

    def token_loss(tokens: Tokens, settings: LossSettings) -> TokenTerm:
        with failures_named(f"the loss {name}", is_ours=is_out_of_memory):
            result = function(tokens, settings)
        expected = tuple(tokens.advantages.shape)
        term = result if isinstance(result, TokenTerm) else TokenTerm(result)
        values: Any = term.values
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(result).__name__
        if shape != expected:
            raise ConfigError(f"the loss {name} returned {shape}; expected one number per token, {expected}")
        if not values.is_floating_point() or values.device != tokens.logps.device:
            got = f"{values.dtype} on {values.device}"
            raise ConfigError(f"the loss {name} returned {got}; expected floats on {tokens.logps.device}")
        if tokens.logps.requires_grad and not values.requires_grad:
            raise ConfigError(
                f"the loss {name} returned values without a gradient, so nothing would be learned; compute them from "
                "tokens.logps or tokens.log_ratio, without detach() and no_grad()"
            )
        return term._replace(values=values.to(tokens.logps.dtype))

    return Loss(token_loss, "token_mean")
