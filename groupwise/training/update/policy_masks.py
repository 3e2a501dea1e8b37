"""The policy mask of an update: the batch's masks, and those that need the policy's current log-probs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from groupwise.config import Recipe
from groupwise.core.masks import high_entropy_mask, off_policy_sequence_mask
from groupwise.model.logprobs import TokenLogps
from groupwise.training.update.minibatch import CompletionBatch, MiniBatch
from groupwise.training.update.objective import Totals
from groupwise.training.update.result import UpdateResult

ComputeLogps = Callable[[MiniBatch | CompletionBatch, Recipe, bool], TokenLogps]
"""Log-probs under the current policy, without gradient; the last argument asks for the entropy."""


def build_policy_mask(
    minibatch: MiniBatch, step_recipe: Recipe, result: UpdateResult, compute_logps: ComputeLogps
) -> tuple[Tensor | None, Totals]:
    """The tokens ``(n, T)`` that the policy term learns from, or their weights; None: all of them.

    Also the totals, if the masks change the denominator. Masked samples are noted in ``result``.
    """
    masks, totals = step_recipe.masks, minibatch.totals
    if not len(minibatch) or not step_recipe.loss.policy_coef:
        return None, totals
    policy_mask = minibatch.allowed[:, None] & minibatch.mask
    tokens, sequences = totals.policy_tokens, totals.policy_sequences
    logps, entropy = _current_logps(minibatch, step_recipe, compute_logps)
    if masks.off_policy is not None:
        kept = on_policy_samples(minibatch, step_recipe, logps)
        gone = minibatch.allowed & ~kept
        result.masked_out["off_policy"] = [minibatch.samples[row] for row in gone.nonzero().flatten().tolist()]
        policy_mask = policy_mask & kept[:, None]
        tokens, sequences = tokens - int(minibatch.mask[gone].sum()), sequences - int(gone.sum())
    if masks.high_entropy is not None:
        if minibatch.local_batch is None:
            # Only tokens with an advantage are ranked, so that skipping the others changes nothing.
            candidates = policy_mask & minibatch.has_advantage
            policy_mask = high_entropy_mask(entropy, candidates, top_fraction=masks.high_entropy)
        else:
            for number in set(minibatch.local_batch.tolist()):
                rows = minibatch.local_batch == number
                high = high_entropy_mask(entropy[rows], minibatch.mask[rows], top_fraction=masks.high_entropy)
                policy_mask[rows] &= high
        tokens, sequences = int(policy_mask.sum()), int(policy_mask.any(1).sum())
    if minibatch.weights is not None:
        dropped = policy_mask & (minibatch.weights == 0)
        left = policy_mask & ~dropped
        tokens -= int(dropped.sum())
        sequences -= int((policy_mask.any(1) & ~left.any(1)).sum())
    if step_recipe.loss.denominator == "policy_mask":
        totals = replace(totals, policy_tokens=tokens, policy_sequences=sequences)
    if minibatch.weights is not None:
        return policy_mask * minibatch.weights, totals
    return (None if bool((policy_mask == minibatch.mask).all()) else policy_mask), totals


def on_policy_samples(minibatch: MiniBatch, step_recipe: Recipe, logps: Tensor) -> Tensor:
    """Which samples the off-policy mask keeps ``(n,)``."""
    rule, threshold = step_recipe.masks.off_policy or "v3.2", step_recipe.masks.off_policy_threshold
    other = minibatch.sampler_logps if rule == "v3.2" or minibatch.ref_logps is None else minibatch.ref_logps
    return off_policy_sequence_mask(logps, other, minibatch.advantages, minibatch.mask, threshold=threshold, rule=rule)


def masked_in_updates(minibatches: Sequence[MiniBatch], updates: Sequence[UpdateResult]) -> dict[int, str]:
    """The samples that a mask of current log-probs has dropped in each update that they were in, and its name."""
    passes = len(updates) // max(1, sum(not minibatch.empty for minibatch in minibatches))
    counts = Counter(
        (sample, name) for update in updates for name, samples in update.masked_out.items() for sample in samples
    )
    return {sample: name for (sample, name), count in counts.items() if count >= passes}


def _current_logps(minibatch: MiniBatch, step_recipe: Recipe, compute_logps: ComputeLogps) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy under the current policy ``(n, T)``, computed for the samples that a mask may drop.

    The mask of DeepSeek-V3.2 only drops samples with a negative advantage, and the entropy mask only ranks tokens with
    an advantage. The other samples keep the sampler's log-probs, which no mask drops.
    """
    masks = step_recipe.masks
    chosen = minibatch.allowed & (
        minibatch.advantages < 0 if masks.off_policy == "v3.2" else masks.off_policy is not None
    )
    if masks.high_entropy is not None and minibatch.local_batch is not None:
        chosen = torch.ones_like(chosen)
    elif masks.high_entropy is not None:
        chosen = chosen | (minibatch.allowed & minibatch.has_advantage.any(1))
    logps, entropy = minibatch.sampler_logps.clone(), torch.zeros(minibatch.mask.shape)
    if bool(chosen.any()):
        current = compute_logps(minibatch.select(chosen), step_recipe, masks.high_entropy is not None)
        at = (chosen.nonzero(), torch.arange(current.logps.shape[1]))
        logps = logps.to(current.logps.dtype)
        logps[at] = current.logps.cpu()
        if current.entropy is not None:
            entropy = entropy.to(current.entropy.dtype)
            entropy[at] = current.entropy.cpu()
    return logps, entropy
