"""Inspect a model once: can its completions share a prompt, and where are its trunk and its head?

A short packed forward pass records which attention modules are called and with what, and must give the log-probs of
transformers' own forward. A model that fails this check (recurrent layers, attention that is not looked up by name, an
unusual head) takes the plain path, with a notice that says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from groupwise.core.logps import finish_logits, float32_product
from groupwise.distributed.fsdp import ShardedWeights
from groupwise.errors import InputError
from groupwise.model.attention import IMPLEMENTATION, LAYOUT, AttentionInputs, PackedLayout
from groupwise.model.flash import FLASH_DTYPES
from groupwise.model.small_batch_linear import small_batch_matmul

_Result = TypeVar("_Result")

RECOMPILE_LIMIT = 64  # compiled versions of a layer
ROUNDING_SHARE = 0.07  # rounding may be this share of the difference that a wrong pass makes


class Head(NamedTuple):
    """The output layer: logits = softcap · tanh(scale · (hidden · weightᵀ + bias) / softcap)."""

    layer: nn.Linear
    softcap: float | None = None
    scale: float = 1.0
    float32: bool = False  # the product is not rounded to half precision

    @property
    def weight(self) -> Tensor:  # (V, D); looked up each time, because a sharded model's changes
        return self.layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.layer.bias

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``(…, V)`` in float32, or in float64 for a float64 model."""
        return self._finish(self._product(hidden))

    def rounded_logits(self, hidden: Tensor) -> Tensor:
        """The same numbers in half precision where the product has it and nothing follows: half as much to read."""
        raw = self._product(hidden)
        plain = self.bias is None and self.scale == 1.0 and self.softcap is None
        return raw if plain else self._finish(raw)

    def _product(self, hidden: Tensor) -> Tensor:
        if self.float32 and hidden.is_cuda:
            return float32_product(hidden, self.weight)
        dtype = torch.promote_types(hidden.dtype, torch.float32) if self.float32 else hidden.dtype
        return small_batch_matmul(hidden.to(dtype), self.weight.to(dtype))

    def _finish(self, raw: Tensor) -> Tensor:
        return finish_logits(raw, self.bias, self.scale, self.softcap, 1.0)


class KVShape(NamedTuple):
    """The keys, and values, that one attention layer caches for a token: ``heads`` × ``head_dim``."""

    heads: int
    head_dim: int


@dataclass(frozen=True)
class ModelHandle:
    """A model and how to run it. ``fallback_reason`` says why its prompts cannot be shared; None if they can."""

    model: PreTrainedModel
    trunk: nn.Module
    vocabulary: int
    context_length: int | None  # the longest text the model supports
    head: Head | None = None
    attentions: tuple[nn.Module, ...] = ()
    shapes: tuple[KVShape, ...] = ()
    fallback_reason: str | None = None
    compiled: CompiledLayers | None = None
    windows: tuple[int, ...] = ()  # of its sliding-window layers
    sharded: ShardedWeights | None = None  # if each rank holds only a part of the weights

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return self.model.dtype if self.sharded is None else self.sharded.dtype

    def run(self, function: Callable[[], _Result]) -> _Result:
        """The result of ``function``, which runs `hidden`, the head or the model with gradients or without."""
        return function() if self.sharded is None else self.sharded.run(function)

    def fingerprint(self) -> tuple[Any, ...]:
        """Changes whenever a captured CUDA graph is out of date: other tensors, or another active adapter.

        New values in the same tensors, as an optimizer writes them, leave it unchanged.
        """
        layers: list[Any] = [module for module in self.model.modules() if hasattr(module, "merged_adapters")]
        adapters = [
            (bool(layer.disable_adapters), tuple(layer.active_adapters), tuple(layer.merged_adapters))
            for layer in layers
        ]
        return (tuple(parameter.data_ptr() for parameter in self.model.parameters()), tuple(adapters))

    def weight_state(self) -> tuple[Any, ...]:
        """Changes with the fingerprint, and whenever PyTorch counts a change of a weight in place.

        It counts none of a fused optimizer and none through ``.data``.
        """
        counts = (0 if weight.is_inference() else weight._version for weight in self.model.parameters())
        return (*self.fingerprint(), tuple(counts))

    def hidden(self, ids: Tensor, positions: Tensor, layout: Any) -> Tensor:
        """The trunk's last hidden states for ids ``(rows, L)``, with the layout's attention."""
        config: Any = self.trunk.config
        if config._attn_implementation != IMPLEMENTATION:
            # It was changed since; the other implementation would silently ignore the layout.
            self.model.set_attn_implementation(IMPLEMENTATION)
        # transformers passes a four-dimensional mask on as it is, instead of building one that is not used.
        mask = ids.new_zeros(1, 1, 1, 1, dtype=torch.bool)

        def run() -> Tensor:
            out = self.trunk(
                input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False, **{LAYOUT: layout}
            )
            hidden: Tensor = out.last_hidden_state
            return hidden

        if self.compiled is None:
            return run()
        if isinstance(layout, PackedLayout):
            layout.prepare_windows(self.windows)
        return self.compiled.run(run, self.model)


class CompiledLayers:
    """A model's layers compiled for calls through `run`; other calls of the model are not compiled.

    With gradient checkpointing the compiled layers stay installed, because the backward pass recomputes them.

    One compilation serves all layers of a kind and any number of tokens. Where it fails (no Triton, no C compiler, a
    layer that cannot be traced), the layers run uncompiled from then on, with a warning.
    """

    def __init__(self, layers: Sequence[nn.Module], model: PreTrainedModel) -> None:
        self.calls = [(layer, _compile(layer._call_impl)) for layer in layers]
        # Asking transformers whether they checkpoint would walk through all modules in every pass.
        self.checkpointing: list[Any] = [part for part in model.modules() if hasattr(part, "gradient_checkpointing")]
        self.stay = False

    def run(self, function: Callable[[], Tensor], model: PreTrainedModel) -> Tensor:
        if not self.calls:
            return function()
        if (
            torch.is_grad_enabled()
            and model.training
            and any(part.gradient_checkpointing for part in self.checkpointing)
        ):
            self.stay = True  # the backward pass must recompute the layers in the same way
        try:
            self._install([call for _, call in self.calls])
            return function()
        except (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError) as error:
            reason = str(error).partition("\n")[0]
            warnings.warn(f"torch.compile does not work here, so the model's layers are slower: {reason}", stacklevel=2)
            self._install([None] * len(self.calls))
            self.calls = []
            return function()
        finally:
            if not self.stay:
                self._install([None] * len(self.calls))

    def _install(self, calls: Sequence[Any]) -> None:
        for (layer, _), call in zip(self.calls, calls, strict=True):
            layer._compiled_call_impl = call


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function`` for any number of tokens.

    Training, prefill and decoding, with and without gradients, each need a version, more than dynamo's default limit
    allows. The limit is raised during a call only, also for the backward pass of gradient checkpointing.
    """
    compiled = torch.compile(function, dynamic=True)

    def call(*args: Any, **kwargs: Any) -> Any:
        limit = max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)
        with torch._dynamo.config.patch(recompile_limit=limit):
            return compiled(*args, **kwargs)

    return call


def context_length_of(model: Any) -> int | None:
    """How many tokens a model can read at once; None if its config does not say that."""
    length: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return length


def prepare(
    model: Any,
    *,
    plain: bool = False,
    compile: bool | None = None,
    float32_head: bool = False,
    notice: Callable[[str], None] | None = None,
) -> ModelHandle:
    """Inspect a causal language model of transformers, or a PEFT model around one.

    plain: use the plain path.
    compile: whether to torch.compile the layers; by default on a GPU in half precision. The first calls then take some
    seconds longer.
    float32_head: compute logits in float32, without rounding them to the model's dtype; not on the plain path.
    notice: called with the reason why a model takes the plain path; by default that is a warning.
    """
    if isinstance(model, ModelHandle):
        return model
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inner, PreTrainedModel) or inner.get_output_embeddings() is None:  # type: ignore[no-untyped-call]
        raise InputError(f"prepare needs a causal language model of transformers, got {type(model).__name__}")
    config = inner.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None) and config._attn_implementation == "sdpa":
        inner.set_attn_implementation("eager")  # scaled_dot_product_attention silently ignores it
    before = config._attn_implementation
    handle = ModelHandle(inner, inner.base_model, config.vocab_size, context_length_of(inner))
    if plain:
        return replace(handle, fallback_reason="the plain path was requested")
    with eval_mode(inner):
        inspected = _inspect(handle, config)
    if isinstance(inspected, str):
        if config._attn_implementation != before:
            inner.set_attn_implementation(before)
        text = (
            f"{type(inner).__name__} takes the plain path, which computes a prompt once per sample and is slower: "
            f"{inspected}"
        )
        notice(text) if notice else warnings.warn(text, stacklevel=2)
        return replace(handle, fallback_reason=inspected)
    if compile is None:
        compile = inner.device.type == "cuda" and inner.dtype in FLASH_DTYPES
    layers, head = decoder_layers(inner), inspected.head
    if float32_head and head is not None:
        inspected = replace(inspected, head=head._replace(float32=True))
    return replace(inspected, compiled=CompiledLayers(layers, inner) if compile and layers else None)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode within this block."""
    training = model.training
    model.train(False)
    try:
        yield
    finally:
        model.train(training)


class _RecordingLayout:
    """A layout that records which modules call it, with which shapes and windows."""

    def __init__(self, layout: PackedLayout) -> None:
        self.layout = layout
        self.calls: list[tuple[nn.Module, KVShape, int | None]] = []

    def attend(self, inputs: AttentionInputs) -> Tensor:
        query, key, value = inputs.query, inputs.key, inputs.value
        self.calls.append((inputs.module, KVShape(key.shape[1], key.shape[3]), inputs.window))
        if value.shape != key.shape or len(query) != 1 or query.shape[1] % key.shape[1]:
            raise ValueError("its attention has keys and values of different shapes")
        return self.layout.attend(inputs)


def _inspect(handle: ModelHandle, config: Any) -> ModelHandle | str:
    """The handle with its remaining fields, or why the model's prompts cannot be shared."""
    model = handle.model
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"it has layers of the kind {', '.join(sorted(kinds))}"
    if getattr(config, "is_encoder_decoder", False) or not getattr(config, "is_causal", True):
        return "it is not a decoder-only model"
    out = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if type(out) is not nn.Linear:
        return f"its head is a {type(out).__name__}, not a linear layer"
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    head = Head(out, getattr(config, "final_logit_softcapping", None), scale)
    ids = torch.arange(7, device=model.device) * 7919 % handle.vocabulary
    prompt, completions = ids[:3], (ids[3:7], ids[[6, 4]])
    with torch.no_grad():
        plain = [
            model(input_ids=torch.cat([prompt, c])[None], use_cache=False).logits[0, 2:].float() for c in completions
        ]
        mixed = None
        if model.dtype in FLASH_DTYPES:  # a wrong pass, in which a completion sees its sibling
            row = model(input_ids=torch.cat([prompt, *completions])[None], use_cache=False).logits[0].float()
            mixed = [row[[2, 3, 4, 5, 6]], row[[2, 7, 8]]]
        try:
            model.set_attn_implementation(IMPLEMENTATION)
            if config._attn_implementation != IMPLEMENTATION:
                return "its attention cannot be replaced by name"
            layout = PackedLayout([3], [2], [4, 2], model.device)
            recorder = _RecordingLayout(layout)
            hidden = handle.hidden(torch.cat([prompt, *completions])[None], layout.positions[None], recorder)[0]
        except (TypeError, ValueError, RuntimeError, KeyError, AttributeError) as error:
            return f"a packed pass fails ({type(error).__name__}: {str(error).splitlines()[0]})"
        attentions = tuple(module for module, _, _ in recorder.calls)
        if len(attentions) != config.num_hidden_layers or len(set(attentions)) != len(attentions):
            return f"{len(set(attentions))} of its {config.num_hidden_layers} layers use the attention function"
        if mismatch := _window_mismatch(config, [window for _, _, window in recorder.calls]):
            return mismatch
        packed = [head.logits(hidden[[2, *range(a, b)]]).float() for a, b in ((3, 7), (7, 9))]
        if (difference := _excess_difference(packed, plain, mixed)) is not None:
            return f"packed and plain log-probs differ by {difference:.2g}"
    shapes = tuple(shape for _, shape, _ in recorder.calls)
    windows = tuple(sorted({window for _, _, window in recorder.calls if window is not None}))
    return replace(handle, head=head, attentions=attentions, shapes=shapes, windows=windows)


def _excess_difference(packed: list[Tensor], plain: list[Tensor], mixed: list[Tensor] | None) -> float | None:
    """The largest difference between packed and plain log-probs if it is more than rounding, else None.

    In half precision, rounding alone moves unlikely tokens of a real model by 0.5 and more. There the mean difference
    is compared with that of ``mixed``, a wrong pass in which a completion sees its sibling.
    """

    def differences(other: list[Tensor]) -> Tensor:
        return (torch.cat(other).log_softmax(-1) - torch.cat(plain).log_softmax(-1)).abs()

    difference = differences(packed)
    largest = difference.max().item()
    if mixed is None:
        return None if largest <= 1e-2 else largest
    rounding = difference.mean(-1).max().item() <= ROUNDING_SHARE * differences(mixed).mean(-1).max().item()
    return None if largest <= 0.25 or rounding else largest


def _window_mismatch(config: Any, seen: list[int | None]) -> str | None:
    """Compare the windows with the configuration's: a short pass does not show a window that hides nothing in it."""
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * len(seen)
    wanted = [window if kind == "sliding_attention" else None for kind in kinds]
    return None if seen == wanted else f"its sliding windows {wanted} do not reach the attention function ({seen})"
