"""Temperature, top-k, top-p and min-p, and log-probs over the set of tokens that survived them.

Each filter sees what the one before it left, so the orders keep different sets. ``"transformers"``: temperature,
top-k, top-p, min-p. ``"vllm"``: temperature, min-p, top-k, top-p. ``"mlx_lm"``: top-k, min-p, top-p on probabilities
that are not renormalised in between, then temperature. Where mlx-lm's order would leave no token (top-p after a top-k
with little mass), the most likely tokens stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.core._checks import check_share, check_temperature, check_tensors, working
from groupwise.errors import InputError, check_choice, check_integer

ORDERS = {
    "transformers": ("temperature", "top_k", "top_p", "min_p"),
    "vllm": ("temperature", "min_p", "top_k", "top_p"),
    "mlx_lm": ("top_k", "min_p", "top_p", "temperature"),
}


def filter_logits(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float | None = None,
    min_tokens_to_keep: int = 1,
    order: str = "transformers",
) -> Tensor:
    """Logits ``(…, V)`` divided by the temperature, −inf where a filter removed a token.

    top_k: keep the k most likely tokens, and ties with the last of them; None, 0 or k ≥ V: no filter.
    top_p: keep the smallest set of most likely tokens with more than this mass, and ties with the last of them; 1: no
    filter.
    min_p: keep tokens with at least this fraction of the highest probability; None or 0: no filter.
    A row that is all −inf is returned as it is.
    """
    check_choice("order", order, ORDERS)
    check_sampling(temperature, top_k, top_p, min_p, min_tokens_to_keep)
    check_tensors(logits=logits)
    if logits.dim() < 1 or not logits.shape[-1]:
        raise InputError(f"logits has shape {tuple(logits.shape)}; expected (…, V) with V at least 1")
    scores = working(logits)
    total = scores.logsumexp(-1, keepdim=True) if order == "mlx_lm" else None
    keep = min(min_tokens_to_keep, logits.shape[-1])
    for step in ORDERS[order]:
        if step == "temperature" and temperature != 1.0:
            scores = scores / temperature
        elif step == "top_k" and top_k:
            scores = _top_k(scores, max(top_k, keep))
        elif step == "top_p" and top_p < 1.0:
            scores = _top_p(scores, top_p, keep, total)
        elif step == "min_p" and min_p:
            scores = _min_p(scores, min_p, keep)
    return scores


def check_sampling(
    temperature: float, top_k: int | None, top_p: float, min_p: float | None, min_tokens_to_keep: int = 1
) -> None:
    """Raise an error unless these are valid sampling settings."""
    check_temperature(temperature)
    if top_k is not None:
        check_integer("top_k", top_k, 0)
    check_share("top_p", top_p, "(0, 1]")
    if min_p is not None:
        check_share("min_p", min_p, "[0, 1]")
    check_integer("min_tokens_to_keep", min_tokens_to_keep, 1)


def _top_k(scores: Tensor, k: int) -> Tensor:
    if k >= scores.shape[-1]:
        return scores
    last = scores.topk(k, dim=-1).values[..., -1:]
    return scores.masked_fill(scores < last, -math.inf)


def _top_p(scores: Tensor, top_p: float, keep: int, log_total: Tensor | None) -> Tensor:
    ascending = scores.sort(dim=-1).values
    if log_total is None:
        log_total = ascending.logsumexp(-1, keepdim=True)
    mass = (ascending - log_total).exp().cumsum(-1)
    remove = mass <= 1 - top_p
    remove[..., -keep:] = False
    last = ascending.masked_fill(remove, math.inf).amin(-1, keepdim=True)
    return scores.masked_fill(scores < last, -math.inf)


def _min_p(scores: Tensor, min_p: float, keep: int) -> Tensor:
    best = scores.topk(keep, dim=-1)
    remove = scores < best.values[..., :1] + math.log(min_p)
    return scores.masked_fill(remove.scatter(-1, best.indices, False), -math.inf)


@dataclass(frozen=True)
class KeptSets:
    """The tokens that survived the filters at each of N positions, ragged.

    Position i kept ``ids[offsets[i]:offsets[i + 1]]``. An empty set means that nothing was filtered there.
    """

    ids: Tensor  # (M,) int32
    offsets: Tensor  # (N + 1,) int64

    def __post_init__(self) -> None:
        if self.ids.dim() != 1 or self.offsets.dim() != 1 or not len(self.offsets):
            shapes = f"{tuple(self.ids.shape)} and {tuple(self.offsets.shape)}"
            raise InputError(f"kept sets need ids (M,) and offsets (N + 1,), got {shapes}")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def from_logits(cls, filtered: Tensor) -> KeptSets:
        """The sets that `filter_logits` left, for logits ``(…, V)``, positions in row-major order."""
        rows = filtered.detach().reshape(-1, filtered.shape[-1])
        kept = rows > -math.inf
        kept &= ~kept.all(-1, keepdim=True)
        offsets = torch.zeros(len(rows) + 1, dtype=torch.int64, device=rows.device)
        offsets[1:] = kept.sum(-1).cumsum(0)
        return cls(kept.nonzero()[:, 1].to(torch.int32), offsets)

    def select(self, positions: Tensor) -> KeptSets:
        """The sets of these positions ``(n,)``, in their order."""
        starts, counts = self.offsets[:-1][positions], self.offsets.diff()[positions]
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        within = torch.arange(int(offsets[-1]), device=counts.device) - offsets[:-1].repeat_interleave(counts)
        return KeptSets(self.ids[starts.repeat_interleave(counts) + within], offsets)

    @classmethod
    def join(cls, sets: Sequence[KeptSets]) -> KeptSets:
        """The sets of several, one after the other, on the CPU."""
        counts = torch.cat([kept.offsets.diff().cpu() for kept in sets])
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return cls(torch.cat([kept.ids.cpu() for kept in sets]), offsets)

    def to(self, device: torch.device | str) -> KeptSets:
        return KeptSets(self.ids.to(device), self.offsets.to(device))

    def mask(self, start: int, stop: int, vocabulary: int) -> Tensor:
        """Which tokens positions start..stop kept, as booleans ``(stop − start, V)``."""
        offsets = self.offsets[start : stop + 1]
        counts = offsets.diff()
        first, last = int(offsets[0]), int(offsets[-1])
        row = torch.repeat_interleave(
            torch.arange(stop - start, device=self.ids.device), counts, output_size=last - first
        )
        kept = (counts == 0).unsqueeze(1).repeat(1, vocabulary)
        kept[row, self.ids[first:last].long()] = True
        return kept


def kept_mask(kept: Tensor) -> Tensor:
    """A mask ``(…, V)`` as booleans; as in `KeptSets`, a row that is empty means that nothing was filtered there."""
    mask = kept != 0
    return mask | ~mask.any(-1, keepdim=True)


def keep_sampling_mask(logits: Tensor, kept: Tensor | KeptSets) -> Tensor:
    """Log-probs ``(…, V)`` renormalised over the kept set, −inf outside it (DeepSeek-V3.2's 'keep sampling mask').

    The policy that is trained is then the one that was sampled from. ``logits`` already have the temperature applied;
    ``kept`` is a mask ``(…, V)`` or `KeptSets` with one set per position. For hidden states, see `selective_logps`.
    """
    if isinstance(kept, KeptSets):
        positions = logits.shape[:-1].numel()
        if len(kept) != positions:
            raise InputError(f"{len(kept)} kept sets were given for {positions} positions")
        kept = kept.mask(0, positions, logits.shape[-1]).view(logits.shape)
    elif kept.shape != logits.shape:
        raise InputError(f"kept has shape {tuple(kept.shape)} but logits has {tuple(logits.shape)}; they must be equal")
    return working(logits).masked_fill(~kept_mask(kept), -math.inf).log_softmax(-1)
