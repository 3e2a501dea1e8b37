"""Which tokens may teach in an update: by the batch's own masks, and by those that need the policy's log-probs now."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from groupwise.config import Recipe
from groupwise.core.masks import high_entropy_mask, off_policy_sequence_mask
from groupwise.model.logprobs import TokenLogps
from groupwise.training.update.minibatch import CompletionBatch, MiniBatch
from groupwise.training.update.objective import Totals
from groupwise.training.update.result import UpdateResult


class LogpsOf(Protocol):
    """Log-probs under the policy as it is, without a gradient."""

    def __call__(
        self, minibatch: MiniBatch | CompletionBatch, now: Recipe, *, with_entropy: bool = False
    ) -> TokenLogps: ...


def build_policy_mask(
    minibatch: MiniBatch, now: Recipe, found: UpdateResult, logps_of: LogpsOf
) -> tuple[Tensor | None, Totals]:
    """What may teach, ``(n, T)``: the batch's own masks, and those that need the policy's log-probs now."""
    masks, totals = now.masks, minibatch.totals
    if not len(minibatch) or not now.loss.policy_coef:
        return None, totals
    teaching = minibatch.allowed[:, None] & minibatch.mask
    if masks.off_policy is not None or masks.high_entropy is not None:
        logps, entropy = _current(minibatch, now, logps_of)
        if masks.off_policy is not None:
            close = near(minibatch, now, logps)
            gone = minibatch.allowed & ~close
            found.masked_out["off_policy"] = [minibatch.samples[row] for row in gone.nonzero().flatten().tolist()]
            if now.loss.denominator == "policy_mask":
                totals = replace(
                    totals,
                    policy_tokens=totals.policy_tokens - int(minibatch.mask[gone].sum()),
                    policy_sequences=totals.policy_sequences - int(gone.sum()),
                )
            teaching = teaching & close[:, None]
        if masks.high_entropy is not None:
            # Chosen among tokens that could teach, so that skipping the others changes nothing.
            could = teaching & (minibatch.advantages != 0)[:, None]
            teaching = high_entropy_mask(entropy, could, top_fraction=masks.high_entropy)
            if now.loss.denominator == "policy_mask":
                totals = replace(
                    totals,
                    policy_tokens=int(teaching.sum()),
                    policy_sequences=int(teaching.any(1).sum()),
                )
    if minibatch.weights is not None:
        return teaching * minibatch.weights, totals
    return (None if bool((teaching == minibatch.mask).all()) else teaching), totals


def _current(minibatch: MiniBatch, now: Recipe, logps_of: LogpsOf) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy under the policy as it is now ``(n, T)``, of the samples that a mask may take.

    V3.2's looks at what did worse than its group alone, and entropy counts where something contributes; the others keep
    the sampler's log-probs, which no mask takes.
    """
    masks = now.masks
    chosen = minibatch.allowed & (
        minibatch.advantages < 0 if masks.off_policy == "v3.2" else masks.off_policy is not None
    )
    if masks.high_entropy is not None:
        chosen = chosen | (minibatch.allowed & (minibatch.advantages != 0))
    logps, entropy = minibatch.sampler_logps.clone(), torch.zeros(minibatch.mask.shape)
    if bool(chosen.any()):
        answers = minibatch.answers_of(chosen)
        found = logps_of(answers, now, with_entropy=masks.high_entropy is not None)
        at = (chosen.nonzero(), torch.arange(found.logps.shape[1]))
        logps = logps.to(found.logps.dtype)
        logps[at] = found.logps.cpu()
        if found.entropy is not None:
            entropy = entropy.to(found.entropy.dtype)
            entropy[at] = found.entropy.cpu()
    return logps, entropy


def near(minibatch: MiniBatch, now: Recipe, logps: Tensor) -> Tensor:
    """Which samples the off-policy mask keeps ``(n,)``."""
    rule, threshold = now.masks.off_policy or "v3.2", now.masks.off_policy_threshold
    other = minibatch.sampler_logps if rule == "v3.2" or minibatch.ref_logps is None else minibatch.ref_logps
    return off_policy_sequence_mask(logps, other, minibatch.advantages, minibatch.mask, threshold=threshold, rule=rule)
