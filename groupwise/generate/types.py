"""The inputs and outputs of a generator."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from groupwise.core.filters import ORDERS, KeptSets, check_sampling
from groupwise.errors import InputError, check_choice, check_integer

STOP_REASONS = ("eos", "stop_string", "length")

Stop = Callable[[Sequence[int]], bool]
"""Called with a completion's ids after each new token; true ends the completion."""

Progress = Callable[[float, int, int], None]
"""Called with the completions done, their number, and the tokens sampled so far.

A completion that is not finished counts as its share of the maximal length.
"""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters.

    temperature, top_k, top_p, min_p, order: as in `core.filter_logits`.
    repetition_penalty: divides the positive logits, and multiplies the negative ones, of tokens in the prompt or the
    completion so far. It comes first, and only changes what is sampled, not the log-probs under the full distribution.
    greedy: always take the most likely token; temperature and filters are ignored.
    min_new_tokens: EOS is not sampled before. eos_ids: None for the model's.
    seed: a token's random number depends on this, the prompt's key, the sample's number in its group and the token's
    index, and on nothing else.
    keep_sets: also return, for each token, the set of tokens that passed the filters; raises above ``kept_bytes``.
    """

    max_new_tokens: int = 256
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    order: str = "transformers"
    greedy: bool = False
    eos_ids: tuple[int, ...] | None = None
    seed: int = 0
    keep_sets: bool = False
    kept_bytes: int = 2**30

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_k, self.top_p, self.min_p)
        check_choice("order", self.order, ORDERS)
        if not 0 < self.repetition_penalty < math.inf:
            raise InputError(f"repetition_penalty must be a number above 0, got {self.repetition_penalty!r}")
        for name, least in (("max_new_tokens", 1), ("min_new_tokens", 0), ("seed", 0), ("kept_bytes", 1)):
            check_integer(name, getattr(self, name), least)
        if self.min_new_tokens > self.max_new_tokens:
            raise InputError(f"min_new_tokens {self.min_new_tokens} is more than max_new_tokens {self.max_new_tokens}")
        if self.eos_ids is not None and not all(isinstance(number, int) for number in self.eos_ids):
            raise InputError(f"eos_ids must be token ids, got {self.eos_ids!r}")

    @property
    def filters(self) -> bool:
        """Whether any token may be filtered out."""
        return bool(self.top_k) or self.top_p < 1.0 or bool(self.min_p)


@dataclass(frozen=True)
class Rollout:
    """``B`` samples, prompt after prompt; rows are padded with 0.

    logps: log-prob of each sampled token under the full distribution, after the temperature.
    filtered_logps: log-prob after the filters. Use it as the old log-prob only together with ``kept``, when training
    renormalises over the same sets.
    kept: with ``Sampling.keep_sets``, one set per token of each completion, in order.
    versions: the version of the weights that sampled each token.
    """

    ids: Tensor  # (B, T) int64
    lengths: Tensor  # (B,)
    logps: Tensor  # (B, T) float32
    filtered_logps: Tensor  # (B, T) float32
    stop_reasons: tuple[str, ...]  # (B,) of STOP_REASONS
    groups: Tensor  # (B,) the index of each sample's prompt
    versions: Tensor  # (B, T) int32
    kept: KeptSets | None = None
    stats: dict[str, Any] = field(default_factory=dict)  # prefilled tokens, decode steps, …

    @property
    def mask(self) -> Tensor:
        """True where there is a token, ``(B, T)``."""
        return torch.arange(self.ids.shape[1]) < self.lengths[:, None]

    def completions(self) -> list[list[Tensor]]:
        """The ids of each prompt's completions without padding, as `model.completion_logps` takes them."""
        rows: list[list[Tensor]] = [[] for _ in range(int(self.groups.max()) + 1)]
        for row, length, group in zip(self.ids, self.lengths.tolist(), self.groups.tolist(), strict=True):
            rows[group].append(row[:length])
        return rows


def keeping(generator: Generator) -> AbstractContextManager[None]:
    """The block within which a generator reuses what it has computed in earlier calls, see `Generator`."""
    keep: Callable[[], AbstractContextManager[None]] = getattr(generator, "keeping", nullcontext)
    return keep()


class Generator(Protocol):
    """Samples completions: `Engine`, `PlainGenerator`, or another library behind the same methods.

    A generator may also have a method ``keeping()``. It returns a context manager within which the generator may keep
    keys and values for later calls, as long as its samples stay the same and the weights do not change.

    max_num_seqs: the maximal number of completions at once; the trainer lowers it if memory runs out.
    remote: it samples outside of this process, with a copy of the weights; so it may sample while the model is updated.
    version: of the weights that it samples with, as given to `update_weights`.
    progress: called while it samples, if it can tell.
    """

    max_num_seqs: int
    remote: bool
    version: int
    progress: Progress | None

    def generate(
        self,
        prompts: Sequence[Sequence[int] | Tensor],
        samples: int | Sequence[int],
        sampling: Sampling,
        *,
        stop: Stop | None = None,
        keys: Sequence[int] | None = None,
    ) -> Rollout:
        """``samples`` completions of each prompt. ``keys`` identify prompts for the seed; by default their indices."""

    def update_weights(self, version: int) -> None:
        """From now on, sample with the current weights of the model that is trained, and call them ``version``."""

    def check_health(self) -> None:
        """Raise a GroupwiseError, with what to do, if it cannot sample now."""

    def release(self) -> None:
        """Free the memory that only sampling needs; the next call allocates it again."""

    def close(self) -> None:
        """End everything that was started for it."""
