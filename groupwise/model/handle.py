"""A look at a model, once: can its prompts be shared, and where are its trunk and its head?

Nothing about a model is assumed. A short forward pass through transformers' own code records which attention modules
are reached and with what; a second one, packed, must give the plain one's log-probs. Whatever does not pass, a model
with recurrent layers, with attention that is not looked up by name, with an unusual head, takes the plain path, with
a notice that says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from groupwise.core.logps import finish_logits
from groupwise.errors import InputError
from groupwise.model.attention import IMPLEMENTATION, LAYOUT, Call, PackedLayout, no_mask
from groupwise.model.flash import FLASH_DTYPES
from groupwise.model.small_batch_linear import few_rows_product

RECOMPILE_LIMIT = 64  # compiled versions of a layer
OF_WRONG = 0.07  # of the difference that a wrong pass makes, may be rounding


class Head(NamedTuple):
    """The last step of a model: logits = softcap · tanh(scale · (hidden · weightᵀ + bias) / softcap)."""

    weight: Tensor  # (V, D)
    bias: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``(…, V)`` in float32, or float64 where the model is."""
        raw = few_rows_product(hidden, self.weight.to(hidden.dtype))
        return finish_logits(raw, self.bias, self.scale, self.softcap, 1.0)


class LayerShape(NamedTuple):
    """What one attention layer keeps for a token: keys and values of ``heads`` × ``width``."""

    heads: int
    width: int


@dataclass(frozen=True)
class ModelHandle:
    """A model and how to run it. `fallback_reason` is None when its prompts can be shared, and otherwise says why not."""

    model: PreTrainedModel
    trunk: nn.Module
    head: Head | None
    attentions: tuple[nn.Module, ...]
    shapes: tuple[LayerShape, ...]
    vocabulary: int
    window: int | None  # the longest text that the model is made for
    fallback_reason: str | None = None
    compiled: CompiledLayers | None = None
    windows: tuple[int, ...] = ()  # of its sliding layers

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def fingerprint(self) -> tuple[Any, ...]:
        """Changes whenever a recorded computation would be out of date: other tensors, or another adapter at work.

        New values in the same tensors, which is what an optimizer makes, do not count.
        """
        layers: list[Any] = [module for module in self.model.modules() if hasattr(module, "merged_adapters")]
        adapters = [
            (bool(layer.disable_adapters), tuple(layer.active_adapters), tuple(layer.merged_adapters))
            for layer in layers
        ]
        return (tuple(parameter.data_ptr() for parameter in self.model.parameters()), tuple(adapters))

    def hidden(self, ids: Tensor, positions: Tensor, layout: Any) -> Tensor:
        """The trunk's last hidden states for ids ``(rows, L)``, with attention as the layout says."""
        config: Any = self.trunk.config
        if config._attn_implementation != IMPLEMENTATION:
            # Somebody has set another one since; it would not look at the layout, and nobody would notice.
            self.model.set_attn_implementation(IMPLEMENTATION)

        def run() -> Tensor:
            out = self.trunk(
                input_ids=ids,
                position_ids=positions,
                attention_mask=no_mask(ids),
                use_cache=False,
                **{LAYOUT: layout},
            )
            hidden: Tensor = out.last_hidden_state
            return hidden

        if self.compiled is None:
            return run()
        if isinstance(layout, PackedLayout):
            layout.gather(self.windows)
        return self.compiled.run(run, self.model)


class CompiledLayers:
    """A model's layers compiled, for calls through here only: the model itself stays as it is.

    With gradient checkpointing they stay in place, for the backward pass.

    One compilation serves all layers of a kind, and any number of tokens. Where it fails (no Triton, no C compiler, a
    layer that cannot be traced), the layers run as they are from then on, with a warning.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.calls = [(layer, _compile(layer._call_impl)) for layer in layers]
        self.stay = False

    def run(self, function: Callable[[], Tensor], model: PreTrainedModel) -> Tensor:
        if not self.calls:
            return function()
        if model.is_gradient_checkpointing and model.training and torch.is_grad_enabled():
            self.stay = True  # the backward pass computes the layers again, and must do it in the same way
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


def prepare(
    model: Any, *, plain: bool = False, compile: bool | None = None, notice: Callable[[str], None] | None = None
) -> ModelHandle:
    """Look at a causal language model of transformers, or PEFT's around one. With ``plain``, use the plain path.

    compile: whether torch.compile fuses the layers; by default on a GPU, in half precision. The first calls then take
    some seconds more.
    notice: gets the sentence that says why a model takes the plain path; by default it becomes a warning.
    """
    if isinstance(model, ModelHandle):
        return model
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inner, PreTrainedModel) or _output_of(inner) is None:
        raise InputError(f"a causal language model of transformers is needed, got {type(model).__name__}")
    config = inner.config.get_text_config()
    facts: dict[str, Any] = {
        "model": inner,
        "trunk": inner.base_model,
        "vocabulary": config.vocab_size,
        "window": getattr(config, "max_position_embeddings", None),
    }
    if getattr(config, "attn_logit_softcapping", None) and config._attn_implementation == "sdpa":
        inner.set_attn_implementation("eager")  # PyTorch's function knows no softcap, and not every version says so
    before = config._attn_implementation
    training = inner.training
    try:
        inner.train(False)
        reason, found = ("the plain path was asked for", {}) if plain else _look(inner, facts)
    finally:
        inner.train(training)
    if reason is not None:
        if config._attn_implementation != before:
            inner.set_attn_implementation(before)
        if not plain:
            text = (
                f"{type(inner).__name__} takes the plain path, which computes a prompt once per sample and is slower: "
                f"{reason}"
            )
            notice(text) if notice else warnings.warn(text, stacklevel=2)
        return ModelHandle(**facts, head=None, attentions=(), shapes=(), fallback_reason=reason)
    if compile is None:
        compile = inner.device.type == "cuda" and inner.dtype in FLASH_DTYPES
    layers = [module for module in inner.modules() if type(module).__name__ in (inner._no_split_modules or ())]
    return ModelHandle(**facts, **found, compiled=CompiledLayers(layers) if compile and layers else None)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Within this block the model computes as it is, whatever it does while it is trained."""
    training = model.training
    model.train(False)
    try:
        yield
    finally:
        model.train(training)


class _Recorder:
    """A layout that notes which module asks, with what."""

    def __init__(self, layout: PackedLayout) -> None:
        self.layout = layout
        self.seen: list[tuple[nn.Module, LayerShape, int | None]] = []

    def attend(self, call: Call) -> Tensor:
        self.seen.append((call.module, LayerShape(call.key.shape[1], call.key.shape[3]), call.window))
        if call.value.shape != call.key.shape or len(call.query) != 1 or call.query.shape[1] % call.key.shape[1]:
            raise _CannotShare("its attention has keys and values of different shapes")
        return self.layout.attend(call)


class _CannotShare(Exception):
    pass


def _look(model: PreTrainedModel, facts: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Why the model's prompts cannot be shared, or None and what else there is to know about it."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"it has layers of the kind {', '.join(sorted(kinds))}", {}
    if getattr(config, "is_encoder_decoder", False) or not getattr(config, "is_causal", True):
        return "it is no decoder-only model", {}
    head = _head_of(model, config)
    if isinstance(head, str):
        return head, {}
    ids = torch.arange(7, device=model.device) * 7919 % facts["vocabulary"]
    prompt, completions = ids[:3], (ids[3:7], ids[[6, 4]])
    with torch.no_grad():
        plain = [
            model(input_ids=torch.cat([prompt, c])[None], use_cache=False).logits[0, 2:].float() for c in completions
        ]
        mixed = None
        if model.dtype in FLASH_DTYPES:  # what comes of a completion that sees its sibling
            row = model(input_ids=torch.cat([prompt, *completions])[None], use_cache=False).logits[0].float()
            mixed = [row[[2, 3, 4, 5, 6]], row[[2, 7, 8]]]
        try:
            if config._attn_implementation != IMPLEMENTATION:
                model.set_attn_implementation(IMPLEMENTATION)
            if config._attn_implementation != IMPLEMENTATION:
                return "its attention cannot be replaced by name", {}
            layout = PackedLayout([3], [[4, 2]], model.device)
            recorder = _Recorder(layout)
            partly = ModelHandle(**facts, head=head, attentions=(), shapes=())
            hidden = partly.hidden(torch.cat([prompt, *completions])[None], layout.positions[None], recorder)[0]
        except _CannotShare as error:
            return str(error), {}
        except (TypeError, ValueError, RuntimeError, KeyError, AttributeError) as error:
            return f"a packed pass fails ({type(error).__name__}: {str(error).splitlines()[0]})", {}
        attentions = tuple(module for module, _, _ in recorder.seen)
        if len(attentions) != config.num_hidden_layers or len(set(attentions)) != len(attentions):
            return f"{len(set(attentions))} of its {config.num_hidden_layers} layers use the attention function", {}
        wrong = _wrong_window(config, [window for _, _, window in recorder.seen])
        if wrong:
            return wrong, {}
        packed = [head.logits(hidden[[2, *range(a, b)]]).float() for a, b in ((3, 7), (7, 9))]
        if (off := _too_far(packed, plain, mixed)) is not None:
            return f"packed and plain log-probs differ by {off:.2g}", {}
    shapes = tuple(shape for _, shape, _ in recorder.seen)
    windows = tuple(sorted({window for _, _, window in recorder.seen if window is not None}))
    return None, {"head": head, "attentions": attentions, "shapes": shapes, "windows": windows}


def _too_far(packed: list[Tensor], plain: list[Tensor], mixed: list[Tensor] | None) -> float | None:
    """The largest difference between packed and plain log-probs, if it is more than rounding; else None.

    In half precision, rounding alone moves unlikely tokens of a real model by half a unit and more. There the mean
    difference is held against that of ``mixed``, a pass which is wrong: one in which a completion sees its sibling.
    """

    def differences(other: list[Tensor]) -> Tensor:
        return (torch.cat(other).log_softmax(-1) - torch.cat(plain).log_softmax(-1)).abs()

    off = differences(packed)
    largest = off.max().item()
    if mixed is None:
        return None if largest <= 1e-2 else largest
    rounding = off.mean(-1).max().item() <= OF_WRONG * differences(mixed).mean(-1).max().item()
    return None if largest <= 0.25 or rounding else largest


def _output_of(model: PreTrainedModel) -> Any:
    return model.get_output_embeddings()  # type: ignore[no-untyped-call]


def _head_of(model: PreTrainedModel, config: Any) -> Head | str:
    out = _output_of(model)
    if type(out) is not nn.Linear:
        return f"its head is a {type(out).__name__}, not a plain linear layer"
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return Head(out.weight, out.bias, getattr(config, "final_logit_softcapping", None), scale)


def _wrong_window(config: Any, seen: list[int | None]) -> str | None:
    """A window that hides something only in long texts would not show in a short pass: ask the configuration."""
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * len(seen)
    wanted = [window if kind == "sliding_attention" else None for kind in kinds]
    return None if seen == wanted else f"its sliding windows {wanted} do not reach the attention function ({seen})"
