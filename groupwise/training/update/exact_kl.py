"""The KL to the reference over the whole vocabulary, pack by pack beside the policy's log-probs.

An estimator needs one log-prob of a token; the exact KL needs both distributions. So the reference's states of a pack
are computed right behind the policy's and live as long as the pack does; distributions are made of them a chunk at a
time (`core.full_kl_from_hidden`). They are those of the sampling temperature, and whole: what top-k, top-p and min-p
cut away counts here, also where masks.keep_sampling_mask renormalises the log-probs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from groupwise.core import full_kl, full_kl_from_hidden
from groupwise.model.handle import ModelHandle, without_dropout
from groupwise.model.logprobs import Ids, each_states, in_rows
from groupwise.training.update.reference import Reference

FACTOR_OF = {"full": "none", "full_ratio_weighted": "mean_ratio"}
"""The forms of ``loss.kl`` that need whole distributions, and what `core.full_kl` multiplies each by."""


class ExactKLTerm(NamedTuple):
    """The exact KL of a pack's tokens ``(b, T)``: what is penalised, with its gradient, and the KL itself."""

    penalised: Tensor
    kl: Tensor


class ExactKL:
    """The exact KL of the samples of `each_pack`, asked for one pack after another, in its order."""

    def __init__(
        self,
        handle: ModelHandle,
        reference: Reference,
        prompts: Sequence[Ids],
        completions: Sequence[Sequence[Ids]],
        *,
        form: str,
        temperature: float,
        token_budget: int,
        dropout: bool = False,
    ) -> None:
        self.handle, self.reference, self.dropout = handle, reference, dropout
        self.factor, self.temperature = FACTOR_OF[form], temperature
        self._states: Iterator[Tensor] = each_states(handle, prompts, completions, token_budget=token_budget)

    def next(self, states: Tensor, mask: Tensor) -> ExactKLTerm:
        """KL(π_θ ‖ π_ref) of the next pack's tokens, from the policy's states ``(tokens, …)``."""
        model = self.handle.model
        with torch.no_grad(), self.reference.in_place(), without_dropout(model) if self.dropout else nullcontext():
            theirs = next(self._states)
        penalised = self._kl(states, theirs, self.factor)
        with torch.no_grad():
            plain = penalised.detach() if self.factor == "none" else self._kl(states, theirs, "none")
        return ExactKLTerm(in_rows(penalised, mask), in_rows(plain, mask))

    def _kl(self, states: Tensor, theirs: Tensor, factor: str) -> Tensor:
        head = self.handle.head
        if head is None:  # on the plain path the states are logits
            return full_kl(self._tempered(states), self._tempered(theirs), factor=factor)
        return full_kl_from_hidden(
            states,
            head.weight,
            theirs,
            self.reference.own(head.weight).detach(),
            bias=head.bias,
            ref_bias=None if head.bias is None else self.reference.own(head.bias).detach(),
            softcap=head.softcap,
            scale=head.scale,
            temperature=self.temperature,
            factor=factor,
        )

    def _tempered(self, logits: Tensor) -> Tensor:
        return logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature
