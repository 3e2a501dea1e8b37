"""The tokens of some completions, ``tokens/step-000011.parquet``, and what evaluations sampled, ``evaluations/``."""

from __future__ import annotations

from typing import NamedTuple

TOKENS, EVALUATIONS = "tokens", "evaluations"


class TokenRow(NamedTuple):
    """A completion with its tokens; the lists have an entry per token."""

    step: int
    prompt_number: int
    row: int
    sample: int
    completion: str
    ids: list[int]
    ends: list[int]
    """where each token's text ends in ``completion``, in characters; a special token has no text"""
    sampler_logps: list[float] | None
    """as the sampler computed them"""
    policy_logps: list[float]
    """of the policy before the step's update, at the temperature of sampling"""
    entropy: list[float]
    """of the policy's distribution at each token, in nats"""
    ref_logps: list[float] | None
    """of the reference; None without one"""

    @property
    def texts(self) -> list[str]:
        """The text of each token."""
        return [self.completion[start:end] for start, end in zip([0, *self.ends], self.ends, strict=False)]
