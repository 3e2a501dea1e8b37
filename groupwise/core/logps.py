"""Log-probs of chosen tokens straight from hidden states, without logits for all positions in memory.

``log softmax(head(hidden))[id]`` needs (N, V) numbers if written plainly: 12 GiB in float32 for a batch of 65,536
tokens and a vocabulary of 49,152, and as much again for the gradient. Here the head is applied to a chunk of rows at a
time, in the forward pass and again in the backward pass; only one number per row is kept in between. (On a CPU, where
matrix products are slow, logits of small batches are kept.) The result is exact, not an approximation.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from groupwise.core._checks import check_above, check_temperature, check_tensors, not_none, working
from groupwise.core.filters import KeptSets, kept_mask
from groupwise.errors import InputError, check_integer

CHUNK_BYTES = {"cpu": 32 * 2**20, "cuda": 512 * 2**20}
KEPT_BYTES = 512 * 2**20  # of logits that a CPU keeps for the backward pass rather than recompute
COMPILE_FROM = 2**26  # logits, on a GPU: from here on torch.compile is worth its time

Numbers = tuple[float, float | None, float]
"""Scale, softcap and temperature of a head."""


def logps_from_logits(logits: Tensor, ids: Tensor, *, temperature: float = 1.0, with_entropy: bool = False) -> Any:
    """For small vocabularies and control: log-probs ``(…)`` of ids ``(…)`` from logits ``(…, V)``.

    With ``with_entropy``, a pair: log-probs and entropies.
    """
    check_tensors(logits=logits, ids=ids)
    check_temperature(temperature)
    if logits.shape[:-1] != ids.shape:
        raise InputError(f"ids has shape {tuple(ids.shape)}; expected logits' {tuple(logits.shape)} without the last")
    logps = (working(logits) / temperature).log_softmax(-1)
    chosen = logps.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    if not with_entropy:
        return chosen
    prob = logps.exp()
    return chosen, -(prob * torch.where(prob > 0, logps, 0.0)).sum(-1)


def selective_logps(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    temperature: float = 1.0,
    kept: Tensor | KeptSets | None = None,
    with_entropy: bool = False,
    chunk_size: int | None = None,
    float32: bool = False,
) -> Any:
    """Log-probs ``(…)`` of ``ids`` ``(…)`` under a head applied to ``hidden`` ``(…, D)``.

    With ``with_entropy``, a pair: log-probs and entropies. Both are differentiable.

    logits = softcap · tanh(scale · (hidden · weightᵀ + bias) / softcap) / temperature, without the tanh if no softcap.
    weight: ``(V, D)``; cast to hidden's dtype. Its gradient is summed in float32 and returned in weight's dtype.
    Under autocast both are cast to autocast's dtype.
    kept: the tokens to normalise over, as `KeptSets` with one set per position or a mask ``(…, V)``. A chosen token
    outside its set has log-prob −inf and no gradient.
    chunk_size: rows per chunk; by default as many as fit into 32 MiB of logits (512 MiB on a GPU).
    float32: do not round hidden · weightᵀ to hidden's dtype, see `float32_product`. The gradient of the logits is still
    rounded to hidden's dtype before it is multiplied.
    """
    vocabulary, width = _check_head(hidden, weight, ids, bias)
    check_temperature(temperature)
    for name, number in not_none(scale=scale, softcap=softcap).items():
        check_above(name, number, 0.0)
    if chunk_size is not None:
        check_integer("chunk_size", chunk_size, 1)
    rows = ids.numel()
    if isinstance(kept, KeptSets):
        if len(kept) != rows:
            raise InputError(f"{len(kept)} kept sets were given for {rows} positions")
    elif kept is not None:
        if kept.shape != (*ids.shape, vocabulary):
            raise InputError(f"kept has shape {tuple(kept.shape)}; expected ids' {tuple(ids.shape)} and the vocabulary")
        kept = kept_mask(kept).reshape(rows, vocabulary)
    head = _Head(
        (scale, softcap, temperature),
        kept,
        with_entropy,
        chunk_size or rows_per_chunk(vocabulary, hidden.device),
        float32,
    )
    flat = hidden.reshape(rows, width)
    if torch.is_autocast_enabled(hidden.device.type):
        flat = flat.to(torch.get_autocast_dtype(hidden.device.type))
    with torch.autocast(hidden.device.type, enabled=False):
        logps, entropy = _SelectiveLogps.apply(  # type: ignore[no-untyped-call]
            flat, weight, bias, ids.reshape(rows).long(), head
        )
    return (logps.view(ids.shape), entropy.view(ids.shape)) if with_entropy else logps.view(ids.shape)


def head_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
    temperature: float,
    float32: bool = False,
) -> Tensor:
    """A head's logits ``(N, V)`` as the sampler sees them. Everything after the product is in float32.

    float32: the product as well, see `float32_product`.
    """
    raw = _Float32Product.apply(hidden, weight) if float32 else hidden @ weight.to(hidden.dtype).T  # type: ignore[no-untyped-call]
    return finish_logits(raw, bias, scale, softcap, temperature)


def float32_product(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden ``(n, D)`` · weightᵀ ``(D, V)`` in float32, not rounded to half precision; float64 stays float64.

    A product of two bfloat16 or float16 numbers is exact in float32, and GPUs add such products up in float32 anyway:
    there only the result has another dtype. Elsewhere both are cast.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    if hidden.is_cuda and hidden.dtype == weight.dtype != dtype:
        return torch.mm(hidden, weight.T, out_dtype=dtype)
    return hidden.to(dtype) @ weight.to(dtype).T


class _Float32Product(torch.autograd.Function):
    """`float32_product` with the gradient of the rounded product."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return float32_product(hidden, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        grad = grad.to(hidden.dtype)
        grad_hidden = grad @ weight.to(hidden.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = (grad.T @ hidden).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return grad_hidden, grad_weight


def finish_logits(raw: Tensor, bias: Tensor | None, scale: float, softcap: float | None, temperature: float) -> Tensor:
    """Logits from the product of hidden states and weights, in float32 or better."""
    logits = working(raw)
    if bias is not None:
        logits = logits + bias
    if scale != 1.0:
        logits = logits * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return logits if temperature == 1.0 else logits / temperature


def rows_per_chunk(vocabulary: int, device: torch.device) -> int:
    """Rows of float32 logits per chunk, a multiple of 64 where possible."""
    rows = CHUNK_BYTES.get(device.type, CHUNK_BYTES["cuda"]) // (4 * vocabulary)
    return max(1, rows // 64 * 64 or rows)


class _Head(NamedTuple):
    """The settings of a head and of its chunks; the weights are passed separately."""

    numbers: Numbers
    kept: Tensor | KeptSets | None
    with_entropy: bool
    chunk: int
    float32: bool = False

    def product(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """The raw logits ``(n, V)`` of some rows; ``weight`` has hidden's dtype, unless the product is in float32."""
        return float32_product(hidden, weight) if self.float32 else hidden @ weight.T

    def weight(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """What `product` is called with: cast once for all chunks, if that is needed."""
        if not self.float32:
            return weight.to(hidden.dtype)
        return weight if hidden.is_cuda else weight.to(torch.promote_types(hidden.dtype, torch.float32))

    def kept_rows(self, start: int, stop: int, vocabulary: int) -> Tensor | None:
        if isinstance(self.kept, KeptSets):
            return self.kept.mask(start, min(stop, len(self.kept)), vocabulary)
        return None if self.kept is None else self.kept[start:stop]


class _SelectiveLogps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, head: _Head
    ) -> tuple[Tensor, Tensor | None]:
        used = head.weight(hidden, weight)
        logps = hidden.new_empty(len(ids), dtype=working(hidden[:0]).dtype)
        entropy = torch.empty_like(logps) if head.with_entropy else None
        normaliser = torch.empty_like(logps)
        forward = _chunk_functions(hidden, weight)[0]
        itemsize = logps.itemsize if head.float32 else hidden.itemsize
        few = hidden.device.type == "cpu" and len(ids) * len(weight) * itemsize <= KEPT_BYTES
        ctx.products = [] if few and any(ctx.needs_input_grad[:3]) else None
        for start in range(0, len(ids), head.chunk):
            part = slice(start, start + head.chunk)
            kept = head.kept_rows(part.start, part.stop, len(weight))
            product = head.product(hidden[part], used)
            if ctx.products is not None:
                ctx.products.append(product)
            logps[part], normaliser[part], chunk_entropy = forward(
                product, bias, kept, ids[part, None], head.numbers, head.with_entropy
            )
            if entropy is not None:
                entropy[part] = chunk_entropy
        ctx.save_for_backward(hidden, weight, bias, ids, logps, normaliser, entropy)
        ctx.head = head
        ctx.set_materialize_grads(False)
        return logps, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logps: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        # Inside autocast the backward pass must still use the dtype of the forward pass.
        with torch.autocast(ctx.saved_tensors[0].device.type, enabled=False):
            return _backward(ctx, grad_logps, grad_entropy)


def _backward(ctx: Any, grad_logps: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
    hidden, weight, bias, ids, logps, normaliser, entropy = ctx.saved_tensors
    head: _Head = ctx.head
    used = weight.to(hidden.dtype)
    wide = head.weight(hidden, weight) if head.float32 and ctx.products is None else used
    grad_logps = torch.zeros_like(logps) if grad_logps is None else torch.where(logps > -math.inf, grad_logps, 0.0)
    entropy = None if entropy is None else entropy.detach()
    needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    grad_hidden = torch.empty_like(hidden) if needs_hidden else None
    grad_weight = torch.zeros_like(weight, dtype=logps.dtype) if needs_weight else None
    grad_bias = torch.zeros_like(bias, dtype=logps.dtype) if needs_bias else None
    backward = _chunk_functions(hidden, weight)[1]
    for number, start in enumerate(range(0, len(ids), head.chunk)):
        part = slice(start, start + head.chunk)
        product = head.product(hidden[part], wide) if ctx.products is None else ctx.products[number]
        kept = head.kept_rows(part.start, part.stop, len(weight))
        rows = [None if x is None else x[part, None] for x in (normaliser, grad_logps, grad_entropy, entropy)]
        grad = backward(product, bias, kept, ids[part, None], head.numbers, *rows, hidden.dtype)
        if grad_bias is not None:
            grad_bias += grad.sum(0, dtype=grad_bias.dtype)
        grad = grad.to(hidden.dtype)
        if grad_hidden is not None:
            torch.mm(grad, used, out=grad_hidden[part])
        if grad_weight is not None:
            _add_product(grad_weight, grad.T, hidden[part])
    if grad_weight is not None:
        grad_weight = grad_weight.to(weight.dtype)
    if grad_bias is not None:
        grad_bias = grad_bias.to(bias.dtype)
    return grad_hidden, grad_weight, grad_bias, None, None


# One chunk: raw products (n, V) in, numbers per row or the gradient of the raw products out.
#
# With z the logits and p their softmax: d log p[id] / dz = 1[id] − p, and dH / dz = −p (log p + H). Two versions:
# plain PyTorch, and one for torch.compile, which fuses each function into one pass over memory on a GPU.


def _forward_in_steps(
    raw: Tensor, bias: Tensor | None, kept: Tensor | None, ids: Tensor, numbers: Numbers, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probs of the ids, log of the softmax's denominator, and entropies, each ``(n,)``."""
    logits = finish_logits(raw, bias, *numbers)
    if kept is not None:
        logits = logits.masked_fill(~kept, -math.inf)
    largest = logits.amax(-1, keepdim=True)
    shifted = logits - largest
    weights = shifted.exp()
    total = weights.sum(-1, keepdim=True)
    normaliser = largest + total.log()
    entropy = None
    if with_entropy:  # log Z − Σ p z
        if kept is not None:
            shifted.masked_fill_(~kept, 0.0)  # 0 · −inf
        entropy = (total.log() - torch.linalg.vecdot(weights, shifted)[:, None] / total).squeeze(1)
    return (logits.gather(1, ids) - normaliser).squeeze(1), normaliser.squeeze(1), entropy


def _backward_in_steps(
    raw: Tensor,
    bias: Tensor | None,
    kept: Tensor | None,
    ids: Tensor,
    numbers: Numbers,
    normaliser: Tensor,
    grad_logps: Tensor,
    grad_entropy: Tensor | None,
    entropy: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    logits = finish_logits(raw, bias, *numbers)
    slope = _slope(logits, numbers)
    prob = (logits - normaliser).exp_()
    if kept is not None:
        prob.masked_fill_(~kept, 0.0)
    if grad_entropy is None or entropy is None:
        grad = prob.mul_(-grad_logps)
    else:
        grad = torch.special.entr(prob).mul_(grad_entropy)
        grad -= prob.mul_(grad_logps + grad_entropy * entropy)
    grad.scatter_add_(1, ids, grad_logps)
    return grad if isinstance(slope, float) and slope == 1.0 else grad.mul_(slope)


def _slope(logits: Tensor, numbers: Numbers) -> Tensor | float:
    """d logits / d raw: with a softcap 1 − tanh², and the tanh can be read off the logits."""
    scale, softcap, temperature = numbers
    if softcap is None:
        return scale / temperature
    return (1 - (logits * (temperature / softcap)).square()) * (scale / temperature)


def _forward_in_one_pass(
    raw: Tensor, bias: Tensor | None, kept: Tensor | None, ids: Tensor, numbers: Numbers, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    logits = finish_logits(raw, bias, *numbers)
    if kept is not None:
        logits = torch.where(kept, logits, -math.inf)
    largest = logits.amax(-1, keepdim=True)
    shifted = logits - largest
    total = shifted.exp().sum(-1, keepdim=True)
    normaliser = largest + total.log()
    entropy = None
    if with_entropy:
        terms = shifted.exp() * (shifted if kept is None else torch.where(kept, shifted, 0.0))
        entropy = (total.log() - terms.sum(-1, keepdim=True) / total).squeeze(1)
    return (logits.gather(1, ids) - normaliser).squeeze(1), normaliser.squeeze(1), entropy


def _backward_in_one_pass(
    raw: Tensor,
    bias: Tensor | None,
    kept: Tensor | None,
    ids: Tensor,
    numbers: Numbers,
    normaliser: Tensor,
    grad_logps: Tensor,
    grad_entropy: Tensor | None,
    entropy: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """``dtype``: what the result is rounded to in the same pass, unless it is needed for the gradient of the bias."""
    logits = finish_logits(raw, bias, *numbers)
    log_prob = logits - normaliser
    up = grad_logps
    if grad_entropy is not None and entropy is not None:
        up = up + (log_prob + entropy) * grad_entropy
    grad = -log_prob.exp() * up
    if kept is not None:
        grad = torch.where(kept, grad, 0.0)
    chosen = torch.arange(raw.shape[1], device=raw.device) == ids
    grad = (grad + torch.where(chosen, grad_logps, 0.0)) * _slope(logits, numbers)
    return grad.to(dtype if bias is None else grad.dtype)


ChunkFunctions = tuple[Callable[..., Any], Callable[..., Any]]
_IN_STEPS: ChunkFunctions = (_forward_in_steps, _backward_in_steps)
_compiled: ChunkFunctions | None = None


def _chunk_functions(hidden: Tensor, weight: Tensor) -> ChunkFunctions:
    """The forward and backward functions of a chunk: compiled for large inputs on a GPU."""
    global _compiled
    if hidden.device.type != "cuda" or len(hidden) * len(weight) < COMPILE_FROM:
        return _IN_STEPS
    if _compiled is None:
        forward, backward = (
            torch.compile(function, backend=_inductor) for function in (_forward_in_one_pass, _backward_in_one_pass)
        )
        _compiled = _or_in_steps(forward, _forward_in_steps), _or_in_steps(backward, _backward_in_steps)
    return _compiled


def _inductor(graph: Any, inputs: Any) -> Any:
    """torch.compile's default backend, without its note that online softmax is not used."""
    from torch._inductor.compile_fx import compile_fx

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*Online softmax is disabled on the fly")
        return compile_fx(graph, inputs)


def _or_in_steps(fast: Callable[..., Any], slow: Callable[..., Any]) -> Callable[..., Any]:
    """``fast``, or ``slow`` once ``fast`` could not be compiled (no Triton, no C compiler)."""

    def call(*args: Any) -> Any:
        global _compiled
        try:
            return fast(*args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            _compiled = _IN_STEPS
            reason = str(error).partition("\n")[0]
            warnings.warn(f"torch.compile does not work here, so log-probs are slower: {reason}", stacklevel=2)
            return slow(*args)

    return call


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a · b without first rounding the product to half precision; over many chunks the error would add up."""
    if a.dtype != total.dtype and total.device.type == "cuda":
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _check_head(hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None) -> tuple[int, int]:
    check_tensors(hidden=hidden, weight=weight, ids=ids, **not_none(bias=bias))
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise InputError(
            f"hidden has shape {tuple(hidden.shape)} and weight {tuple(weight.shape)}; expected (…, D) and (V, D)"
        )
    vocabulary, width = weight.shape
    if ids.shape != hidden.shape[:-1]:
        raise InputError(f"ids has shape {tuple(ids.shape)}; expected hidden's {tuple(hidden.shape)} without the last")
    if bias is not None and bias.shape != (vocabulary,):
        raise InputError(f"bias has shape {tuple(bias.shape)}; expected the vocabulary, ({vocabulary},)")
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise InputError(f"ids must be integers, got {ids.dtype}")
    if ids.device.type == "cpu" and ids.numel():  # on a GPU this would synchronise; the kernels check there
        low, high = ids.aminmax()
        if low < 0 or high >= vocabulary:
            outside = int(low) if low < 0 else int(high)
            raise InputError(f"id {outside} is outside the vocabulary of {vocabulary}")
    return vocabulary, width
