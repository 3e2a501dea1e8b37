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
    out, lse, rng, unused, _ = _forward(
        query, key, value, q_ends, k_ends, longest_q, longest_k, 0.0, causal, False, scale=scale, **_sides(window)
    )
    return out, lse, rng, unused


def _sides(window: int | None) -> dict[str, int]:
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


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
    _merge_prompts(
        out, lse, query, key[:prompt_tokens], value[:prompt_tokens], group_ends, prompt_ends, longest_group,
        longest_prompt, scale,
    )  # fmt: skip
    return out, lse, rng, unused


def _merge_prompts(
    out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, group_ends: Tensor, prompt_ends: Tensor,
    longest_group: int, longest_prompt: int, scale: float,
) -> None:  # fmt: skip
    """Merge into ``out`` and ``lse`` the attention of what follows the prompts to these ``key`` and ``value``."""
    n = len(key)
    if n == len(query):
        return
    part_out, part_lse, _, _ = _flash(
        query[n:], key, value, group_ends, prompt_ends, longest_group, longest_prompt, causal=False, scale=scale
    )
    joint = torch.logaddexp(lse[:, n:], part_lse)
    share = (part_lse - joint).exp_().T.unsqueeze(-1)  # the prompt's part of the probability, (rows, H, 1)
    out[n:] = torch.lerp(out[n:].float(), part_out.float(), share)
    lse[:, n:] = joint


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
    n = prompt_tokens
    if n < len(query):
        prefix_grads = _prompts_backward(
            grad, query, key[:n], value[:n], out, lse, rng, unused, group_ends, prompt_ends, longest_group,
            longest_prompt, scale,
        )  # fmt: skip
        grads[0][n:] += prefix_grads[0]
        grads[1][:n] += prefix_grads[1]
        grads[2][:n] += prefix_grads[2]
    return grads[0], grads[1], grads[2]


def _prompts_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, rng: Tensor, unused: Tensor,
    group_ends: Tensor, prompt_ends: Tensor, longest_group: int, longest_prompt: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of `_merge_prompts`: of the queries behind the prompts, and of the prompts' keys and values."""
    n = len(key)
    grads: tuple[Tensor, Tensor, Tensor] = _backward(
        grad[n:], query[n:], key, value, out[n:], lse[:, n:].contiguous(), group_ends, prompt_ends,
        longest_group, longest_prompt, 0.0, False, rng, unused, scale=scale,
    )  # fmt: skip
    return grads


def _shared_grad(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return *_shared_backward(grad, *ctx.saved_tensors, *ctx.numbers), *[None] * 8


shared_flash.register_fake(_forward_shapes)
_shared_backward.register_fake(_backward_shapes)
shared_flash.register_autograd(_shared_grad, setup_context=_save_inputs)


@torch.library.custom_op("groupwise::tree_flash", mutates_args=())
def tree_flash(
    query: Tensor, key: Tensor, value: Tensor, own_key: Tensor, own_value: Tensor, segment_ends: Tensor,
    own_ends: Tensor, group_ends: Tensor, prompt_ends: Tensor,
    longest_segment: int, longest_own: int, longest_group: int, longest_prompt: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As `shared_flash`, but each segment has its own keys: copies of the nodes above it, then itself.

    ``key`` and ``value`` are the prompts'. The segments are aligned with their own keys at their ends.
    """
    out, lse, rng, unused = _flash(
        query, own_key, own_value, segment_ends, own_ends, longest_segment, longest_own, causal=True, scale=scale
    )
    _merge_prompts(out, lse, query, key, value, group_ends, prompt_ends, longest_group, longest_prompt, scale)
    return out, lse, rng, unused


@torch.library.custom_op("groupwise::tree_flash_backward", mutates_args=())
def _tree_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, own_key: Tensor, own_value: Tensor, out: Tensor,
    lse: Tensor, rng: Tensor, unused: Tensor, segment_ends: Tensor, own_ends: Tensor, group_ends: Tensor,
    prompt_ends: Tensor, longest_segment: int, longest_own: int, longest_group: int, longest_prompt: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    grad = grad.contiguous()
    query_grad, own_key_grad, own_value_grad = _backward(
        grad, query, own_key, own_value, out, lse, segment_ends, own_ends, longest_segment, longest_own, 0.0, True,
        rng, unused, scale=scale,
    )  # fmt: skip
    key_grad, value_grad = torch.zeros_like(key), torch.zeros_like(value)
    if len(key) < len(query):
        prefix_grads = _prompts_backward(
            grad, query, key, value, out, lse, rng, unused, group_ends, prompt_ends, longest_group, longest_prompt,
            scale,
        )  # fmt: skip
        query_grad[len(key) :] += prefix_grads[0]
        key_grad, value_grad = prefix_grads[1], prefix_grads[2]
    return query_grad, key_grad, value_grad, own_key_grad, own_value_grad


def _save_tree_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.numbers = inputs[9:]
    ctx.save_for_backward(*inputs[:5], *output, *inputs[5:9])


def _tree_grad(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return *_tree_backward(grad, *ctx.saved_tensors, *ctx.numbers), *[None] * 9


def _tree_backward_shapes(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, own_key: Tensor, own_value: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    tensors = (query, key, value, own_key, own_value)
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors)


tree_flash.register_fake(_forward_shapes)
_tree_backward.register_fake(_tree_backward_shapes)
tree_flash.register_autograd(_tree_grad, setup_context=_save_tree_inputs)


@torch.library.custom_op("groupwise::varlen_flash", mutates_args=())
def varlen_flash(
    query: Tensor, key: Tensor, value: Tensor, q_ends: Tensor, k_ends: Tensor, longest_q: int, longest_k: int,
    scale: float, window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Causal attention of each query segment to its key segment, aligned at their ends, within any window."""
    return _flash(query, key, value, q_ends, k_ends, longest_q, longest_k, causal=True, scale=scale, window=window)


@torch.library.custom_op("groupwise::varlen_flash_backward", mutates_args=())
def _varlen_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, rng: Tensor, unused: Tensor,
    q_ends: Tensor, k_ends: Tensor, longest_q: int, longest_k: int, scale: float, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grads: tuple[Tensor, Tensor, Tensor] = _backward(
        grad.contiguous(), query, key, value, out, lse, q_ends, k_ends, longest_q, longest_k, 0.0, True, rng, unused,
        scale=scale, **_sides(window),
    )  # fmt: skip
    return grads


def _varlen_grad(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return *_varlen_backward(grad, *ctx.saved_tensors, *ctx.numbers), *[None] * 6


varlen_flash.register_fake(_forward_shapes)
_varlen_backward.register_fake(_backward_shapes)
varlen_flash.register_autograd(_varlen_grad, setup_context=_save_inputs)
