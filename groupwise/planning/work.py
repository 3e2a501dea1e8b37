"""What a step computes, from a recipe: prompts, completions, their lengths, passes."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from groupwise.config import Recipe
from groupwise.errors import ConfigError


class Packs(NamedTuple):
    """A training pass: the number of packs, the tokens of the largest, and of all, with repeated prompts."""

    number: int
    largest: float
    tokens: float


@dataclass(frozen=True)
class StepWork:
    """One step: ``prompts`` of ``prompt_tokens``, each with ``samples`` completions of ``answer_tokens`` on average.

    max_tokens: of a completion. passes: forward and backward over the batch; forwards: forward alone, of a teacher by
    its size. teacher: the weights of a teacher that is loaded beside the policy. cache_share: the size of the KV cache
    relative to one in half precision.
    """

    prompts: int
    prompt_tokens: float
    samples: int
    answer_tokens: float
    max_tokens: int
    max_num_seqs: int = 1024
    passes: int = 1
    forwards: float = 0
    updates: int = 1
    checkpointing: bool = False
    reference: bool = False
    token_budget: int | None = None
    lora_rank: int | None = None
    teacher: int = 0
    cache_share: float = 1.0

    @property
    def mini_batches(self) -> int:
        return self.updates // self.passes

    @property
    def prompts_per_update(self) -> int:
        return math.ceil(self.prompts / self.mini_batches)

    @property
    def completions(self) -> int:
        return self.prompts * self.samples

    @property
    def sampled_tokens(self) -> float:
        return self.completions * self.answer_tokens

    @property
    def packed_tokens(self) -> float:
        """Tokens of a training pass: prompts once per group, completions without their last token."""
        return self.prompts * self.prompt_tokens + self.completions * max(self.answer_tokens - 1, 0)

    def packs(self, budget: float) -> Packs:
        """How `model.packing.plan_packs` divides a training pass, for groups of average size."""
        each = max(self.answer_tokens - 1, 0)
        group = self.prompt_tokens + self.samples * each
        if group <= budget:  # complete groups
            together = min(budget // group, self.prompts)
            return Packs(math.ceil(self.prompts / together), together * group, self.packed_tokens)
        at_once = max(1, (budget - self.prompt_tokens) // max(each, 1))  # completions of a group that is divided
        count = math.ceil(self.completions / at_once)
        parts = max(count, self.prompts)
        return Packs(count, self.prompt_tokens + at_once * each, parts * self.prompt_tokens + self.completions * each)

    @property
    def longest(self) -> float:
        """Tokens of the longest sequence, with a prompt of average length."""
        return self.prompt_tokens + self.max_tokens

    @property
    def decay(self) -> float:
        """λ of the completions' lengths: exponential, cut off at ``max_tokens``, with the given mean. 0: all full."""
        return _decay(self.answer_tokens / self.max_tokens) / self.max_tokens

    @property
    def variance(self) -> float:
        """Of a completion's length."""
        decay, tokens = self.decay, self.max_tokens
        if not decay:
            return 0.0
        second = 2 * (1 - math.exp(-decay * tokens) * (1 + decay * tokens)) / decay**2
        return max(0.0, second - self.answer_tokens**2)

    @property
    def mean_age(self) -> float:
        """Tokens that a running completion has on average, if others take the places of finished ones."""
        return (self.variance / self.answer_tokens + self.answer_tokens) / 2

    def share(self, ranks: int) -> StepWork:
        """The share of the busiest of ``ranks``: whole prompts, as samples and updates are divided."""
        return replace(self, prompts=math.ceil(self.prompts / ranks))


@functools.cache
def _decay(share: float) -> float:
    """The rate of an exponential variable, cut off at 1, whose mean is ``share``; 0 for a mean of 1."""
    if share >= 1:
        return 0.0
    low, high = 0.0, 1.0
    while _mean_share(high) > share:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _mean_share(middle) > share else (low, middle)
    return high


def _mean_share(rate: float) -> float:
    """The mean of an exponential variable of ``rate`` cut off at 1."""
    return (1 - math.exp(-rate)) / rate if rate else 1.0


def work_of(recipe: Recipe, prompt_tokens: float | None = None, answer_tokens: float | None = None) -> StepWork:
    """The work of one step of a recipe; a `ConfigError` if it samples nothing."""
    if recipe.train.steps == 0:
        raise ConfigError("train.steps is 0: a recipe of SFT alone samples nothing, so there is no step to plan")
    loss, preference, sampling = recipe.loss, recipe.preference, recipe.sampling
    teacher = recipe.distillation.weight > 0
    samples = (
        *(loss.policy_coef, loss.kl_coef, loss.entropy_coef, teacher),
        preference.weight and preference.pairs != "data",
    )
    if not any(samples):
        raise ConfigError(
            "this recipe learns from the pairs of a data set and samples nothing; a plan is about steps that sample "
            "(`groupwise check RECIPE` tells its memory and time)"
        )
    if recipe.model.dtype in ("float32", "float64"):
        raise ConfigError(
            f"model.dtype is {recipe.model.dtype}, but the plan's constants were measured in bfloat16; add "
            "--model.dtype bfloat16"
        )
    longest = recipe.data.max_prompt_length
    if prompt_tokens is None:
        prompt_tokens = 256.0 if longest is None else max(1.0, longest / 2)
    mean = float(sampling.max_new_tokens) if answer_tokens is None else answer_tokens
    if mean > sampling.max_new_tokens:
        raise ConfigError(
            f"--answer-tokens {mean:g} is more than sampling.max_new_tokens {sampling.max_new_tokens}; lower it, or "
            "raise the setting"
        )
    updates = recipe.train.iterations * recipe.train.mini_batches
    reference = bool(loss.kl_coef or preference.weight or recipe.masks.off_policy == "reference_drift")
    reference = reference or (teacher and recipe.distillation.teacher == "reference")
    return StepWork(
        prompts=recipe.train.prompts_per_step,
        prompt_tokens=prompt_tokens,
        samples=sampling.samples_per_prompt,
        answer_tokens=mean,
        max_tokens=sampling.max_new_tokens,
        max_num_seqs=sampling.max_num_seqs or StepWork.max_num_seqs,
        passes=recipe.train.iterations,
        forwards=int(updates > 1 or loss.importance_cap is not None) + int(reference),
        updates=updates,
        checkpointing=recipe.model.gradient_checkpointing,
        reference=reference and recipe.model.lora is None,
        token_budget=recipe.train.token_budget,
        lora_rank=None if recipe.model.lora is None else recipe.model.lora.rank,
        cache_share=0.5 if sampling.kv_cache_dtype == "fp8" else 1.0,
    )
