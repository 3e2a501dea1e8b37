"""Shared-prefix attention on a GPU with PyTorch's variable-length flash kernels.

The kernels are wrapped as custom operators, so that torch.compile keeps a layer in one graph. The formula is in
`groupwise.model.attention`. Tensors are (N, H, d) and (N, Hkv, d); ``*_ends`` are cumulative lengths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FLASH_DTYPES = (torch.bfloat16, torch.float16)

_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward


def _flash(
    query: Tensor, key: Tensor, value: Tensor, q_ends: Tensor, k_ends: Tensor, longest_q: int, longest_k: int,
    causal: bool, scale: float, window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    sides: dict[str, Any] = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    out, lse, rng, unused, _ = _forward(
        query, key, value, q_ends, k_ends, longest_q, longest_k, 0.0, causal, False, scale=scale, **sides
    )
    return out, lse, rng, unused


def _forward_shapes(query: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kernel's results without running it: output, log-sum-exps, and two tensors that only dropout uses."""
    rows, heads, _ = query.shape
    return (
        torch.empty_like(query, memory_format=torch.contiguous_format),
        query.new_empty(heads, rows, dtype=torch.float32),
        query.new_empty(2, dtype=torch.uint64),
        query.new_empty(0, dtype=torch.uint64),
    )


def _backward_shapes(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))
    return query, key, value


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save what a backward operator takes after the gradient: query, key, value, results, ends and numbers."""
    ends = [x for x in inputs[3:] if isinstance(x, Tensor)]
    ctx.numbers = inputs[3 + len(ends) :]
    ctx.save_for_backward(*inputs[:3], *output, *ends)


@torch.library.custom_op("groupwise::shared_flash", mutates_args=())
def shared_flash(
    query: Tensor, key: Tensor, value: Tensor, segment_ends: Tensor, group_ends: Tensor, prompt_ends: Tensor,
    prompt_tokens: int, longest_segment: int, longest_group: int, longest_prompt: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Causal attention of each segment of ``segment_ends`` to itself, merged with that of each group to its prompt."""
    out, lse, rng, unused = _flash(
        query, key, value, segment_ends, segment_ends, longest_segment, longest_segment, causal=True, scale=scale
    )
    if prompt_tokens < len(query):
        part_out, part_lse, _, _ = _flash(
            query[prompt_tokens:], key[:prompt_tokens], value[:prompt_tokens], group_ends, prompt_ends,
            longest_group, longest_prompt, causal=False, scale=scale,
        )  # fmt: skip
        segment_lse = lse[:, prompt_tokens:]
        joint = torch.logaddexp(segment_lse, part_lse)
        share = (part_lse - joint).exp_().T.unsqueeze(-1)  # the prompt's part of the probability, (n, H, 1)
        out[prompt_tokens:] = torch.lerp(out[prompt_tokens:].float(), part_out.float(), share)
        lse[:, prompt_tokens:] = joint
    return out, lse, rng, unused


@torch.library.custom_op("groupwise::shared_flash_backward", mutates_args=())
def _shared_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, rng: Tensor, unused: Tensor,
    segment_ends: Tensor, group_ends: Tensor, prompt_ends: Tensor,
    prompt_tokens: int, longest_segment: int, longest_group: int, longest_prompt: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grad = grad.contiguous()
    grads = _backward(
        grad, query, key, value, out, lse, segment_ends, segment_ends, longest_segment, longest_segment, 0.0, True,
        rng, unused, scale=scale,
    )  # fmt: skip
    if prompt_tokens < len(query):
        n = prompt_tokens
        prefix_grads = _backward(
            grad[n:], query[n:], key[:n], value[:n], out[n:], lse[:, n:].contiguous(), group_ends, prompt_ends,
            longest_group, longest_prompt, 0.0, False, rng, unused, scale=scale,
        )  # fmt: skip
        grads[0][n:] += prefix_grads[0]
        grads[1][:n] += prefix_grads[1]
        grads[2][:n] += prefix_grads[2]
    return grads[0], grads[1], grads[2]


def _shared_grad(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return *_shared_backward(grad, *ctx.saved_tensors, *ctx.numbers), *[None] * 8


shared_flash.register_fake(_forward_shapes)
_shared_backward.register_fake(_backward_shapes)
shared_flash.register_autograd(_shared_grad, setup_context=_save_inputs)


@torch.library.custom_op("groupwise::varlen_flash", mutates_args=())
def varlen_flash(
    query: Tensor, key: Tensor, value: Tensor, q_ends: Tensor, k_ends: Tensor, longest_q: int, longest_k: int,
    scale: float, window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Causal attention of each query segment to its key segment, aligned at their ends, within a window."""
    return _flash(query, key, value, q_ends, k_ends, longest_q, longest_k, causal=True, scale=scale, window=window)


@torch.library.custom_op("groupwise::varlen_flash_backward", mutates_args=())
def _varlen_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, rng: Tensor, unused: Tensor,
    q_ends: Tensor, k_ends: Tensor, longest_q: int, longest_k: int, scale: float, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grads: tuple[Tensor, Tensor, Tensor] = _backward(
        grad.contiguous(), query, key, value, out, lse, q_ends, k_ends, longest_q, longest_k, 0.0, True, rng, unused,
        scale=scale, window_size_left=window - 1, window_size_right=0,
    )  # fmt: skip
    return grads


def _varlen_grad(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return *_varlen_backward(grad, *ctx.saved_tensors, *ctx.numbers), *[None] * 6


varlen_flash.register_fake(_forward_shapes)
_varlen_backward.register_fake(_backward_shapes)
varlen_flash.register_autograd(_varlen_grad, setup_context=_save_inputs)
