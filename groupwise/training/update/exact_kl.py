"""The exact KL to the reference over the full vocabulary, computed pack by pack beside the policy's log-probs.

An estimator needs one log-prob per token, the exact KL both distributions. So the reference's hidden states of a pack
are computed right after the policy's and live as long as the pack; the distributions are computed in chunks
(`core.full_kl_from_hidden`). They use the sampling temperature and the full vocabulary: tokens removed by top-k, top-p
and min-p count here, even if masks.keep_sampling_mask renormalises the log-probs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from groupwise.core import full_kl, full_kl_from_hidden
from groupwise.model.handle import ModelHandle, eval_mode
from groupwise.model.logprobs import flat_to_rows
from groupwise.training.update.reference import Reference

EXACT_KL_FACTORS = {"full": "none", "full_ratio_weighted": "mean_ratio"}
"""The values of ``loss.kl`` that need full distributions, and the factor that `core.full_kl` applies for each."""


@dataclass
class ExactKL:
    """The exact KL of the samples of `iter_packs`; call `next` for its packs in order."""

    handle: ModelHandle
    reference: Reference
    ref_states: Iterator[tuple[Tensor, Tensor]]  # `iter_pack_states` of the same samples; computed by `next`
    form: str  # in `EXACT_KL_FACTORS`
    temperature: float
    dropout: bool

    def next(self, states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The penalty, with gradient, and KL(π_θ ‖ π_ref) itself ``(b, T)`` of the next pack; states: the policy's."""
        model = self.handle.model
        with torch.no_grad(), self.reference.in_place(), eval_mode(model) if self.dropout else nullcontext():
            _, ref_states = next(self.ref_states)
        factor, head = EXACT_KL_FACTORS[self.form], self.handle.head
        ref_head = None if head is None else (self._reference_of(head.weight), self._reference_of(head.bias))
        penalty = self.handle.run(partial(self._kl, states, ref_states, ref_head, factor))
        plain = penalty.detach()
        if factor != "none":
            with torch.no_grad():
                plain = self.handle.run(partial(self._kl, states, ref_states, ref_head, "none"))
        return flat_to_rows(penalty, mask), flat_to_rows(plain, mask)

    def _reference_of(self, parameter: Tensor | None) -> Tensor | None:
        return None if parameter is None else self.reference.weight_of(parameter).detach()

    def _kl(self, states: Tensor, ref_states: Tensor, ref_head: Any, factor: str) -> Tensor:
        head = self.handle.head
        if head is None:  # the states are logits
            dtype = torch.promote_types(states.dtype, torch.float32)
            return full_kl(states.to(dtype) / self.temperature, ref_states.to(dtype) / self.temperature, factor=factor)
        return full_kl_from_hidden(
            states,
            head.weight,
            ref_states,
            ref_head[0],
            bias=head.bias,
            ref_bias=ref_head[1],
            softcap=head.softcap,
            scale=head.scale,
            temperature=self.temperature,
            factor=factor,
            float32=head.float32,
        )
