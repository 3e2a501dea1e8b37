"""Which tokens may teach in an update: by the batch's own masks, and by those that need the policy's log-probs now."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from groupwise.config import Recipe
from groupwise.core.masks import high_entropy_mask, off_policy_sequence_mask
from groupwise.model.logprobs import TokenLogps
from groupwise.train.objective import Totals
from groupwise.train.update import Update
from groupwise.train.work import Answers, Work


class LogpsOf(Protocol):
    """Log-probs under the policy as it is, without a gradient."""

    def __call__(self, work: Work | Answers, now: Recipe, *, with_entropy: bool = False) -> TokenLogps: ...


def what_teaches(work: Work, now: Recipe, found: Update, logps_of: LogpsOf) -> tuple[Tensor | None, Totals]:
    """What may teach, ``(n, T)``: the batch's own masks, and those that need the policy's log-probs now."""
    masks, totals = now.masks, work.totals
    if not len(work) or not now.loss.policy_coef:
        return None, totals
    teaching = work.allowed[:, None] & work.mask
    if masks.off_policy is not None or masks.high_entropy is not None:
        logps, entropy = _current(work, now, logps_of)
        if masks.off_policy is not None:
            close = near(work, now, logps)
            gone = work.allowed & ~close
            found.silenced["off_policy"] = [work.samples[row] for row in gone.nonzero().flatten().tolist()]
            if now.loss.denominator == "policy_mask":
                totals = replace(
                    totals,
                    policy_tokens=totals.policy_tokens - int(work.mask[gone].sum()),
                    policy_sequences=totals.policy_sequences - int(gone.sum()),
                )
            teaching = teaching & close[:, None]
        if masks.high_entropy is not None:
            # Chosen among tokens that could teach, so that skipping the others changes nothing.
            could = teaching & (work.advantages != 0)[:, None]
            teaching = high_entropy_mask(entropy, could, top_fraction=masks.high_entropy)
            if now.loss.denominator == "policy_mask":
                totals = replace(
                    totals,
                    policy_tokens=int(teaching.sum()),
                    policy_sequences=int(teaching.any(1).sum()),
                )
    if work.weights is not None:
        return teaching * work.weights, totals
    return (None if bool((teaching == work.mask).all()) else teaching), totals


def _current(work: Work, now: Recipe, logps_of: LogpsOf) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy under the policy as it is now ``(n, T)``, of the samples that a mask may take.

    V3.2's looks at what did worse than its group alone, and entropy counts where something teaches; the others keep
    the sampler's log-probs, which no mask takes.
    """
    masks = now.masks
    chosen = work.allowed & (work.advantages < 0 if masks.off_policy == "v3.2" else masks.off_policy is not None)
    if masks.high_entropy is not None:
        chosen = chosen | (work.allowed & (work.advantages != 0))
    logps, entropy = work.sampler_logps.clone(), torch.zeros(work.mask.shape)
    if bool(chosen.any()):
        answers = work.answers_of(chosen)
        found = logps_of(answers, now, with_entropy=masks.high_entropy is not None)
        at = (chosen.nonzero(), torch.arange(found.logps.shape[1]))
        logps = logps.to(found.logps.dtype)
        logps[at] = found.logps.cpu()
        if found.entropy is not None:
            entropy = entropy.to(found.entropy.dtype)
            entropy[at] = found.entropy.cpu()
    return logps, entropy


def near(work: Work, now: Recipe, logps: Tensor) -> Tensor:
    """Which samples the off-policy mask keeps ``(n,)``."""
    rule, threshold = now.masks.off_policy or "v3.2", now.masks.off_policy_threshold
    other = work.sampler_logps if rule == "v3.2" or work.ref_logps is None else work.ref_logps
    return off_policy_sequence_mask(logps, other, work.advantages, work.mask, threshold=threshold, rule=rule)
