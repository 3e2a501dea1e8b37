"""The plain path: any causal model of transformers through its own `generate`, one prompt at a time.

Slow, and never wrong: no padding, no cache of ours, no packed rows. The tokens are drawn by this package's sampler,
so settings, seeds, log-probs and kept sets mean the same as in the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from groupwise.generate.request import OutputBuffer, RandomStream, Request
from groupwise.generate.runner import Rows, read_drawn
from groupwise.generate.sampling import draw, eos_mask
from groupwise.generate.types import Rollout, Sampling, Stop
from groupwise.model.handle import ModelHandle, prepare
from groupwise.model.logprobs import Ids


class PlainGenerator:
    """A `Generator` for models that cannot share their prompts, and for comparison."""

    def __init__(self, model: Any) -> None:
        self.handle: ModelHandle = prepare(model, plain=True)

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Ids],
        samples: int | Sequence[int],
        sampling: Sampling,
        *,
        stop: Stop | None = None,
        keys: Sequence[int] | None = None,
    ) -> Rollout:
        """``samples`` completions of each prompt; see `Sampling` and `Rollout`."""
        request = Request(self.handle, prompts, samples, sampling, keys)
        record = OutputBuffer(request, stop)
        for number, ids in enumerate(request.prompts):
            members = np.flatnonzero(request.prompt_of == number)
            drawing = _Drawing(request, record, members, self.handle)
            rows = ids.repeat(len(members), 1).to(self.handle.device)
            generate: Any = self.handle.model.generate
            generate(
                rows,
                attention_mask=torch.ones_like(rows),  # or a token that happens to be the padding's would be hidden
                # An EOS of None would become the model's own; this one never comes.
                generation_config=GenerationConfig(  # type: ignore[no-untyped-call]
                    max_new_tokens=int(request.limits[members[0]]),
                    do_sample=False,
                    pad_token_id=0,
                    eos_token_id=self.handle.vocabulary,
                ),
                logits_processor=LogitsProcessorList([drawing]),
                stopping_criteria=StoppingCriteriaList([drawing.ended]),
            )
        prefilled = sum(length * count for length, count in zip(request.prompt_lengths, request.counts, strict=True))
        return record.rollout({"prefilled_tokens": prefilled, "plain": True})


class _Drawing(LogitsProcessor):
    """Draws the next tokens itself, and leaves `generate` no other choice."""

    def __init__(self, request: Request, record: OutputBuffer, members: np.ndarray, handle: ModelHandle) -> None:
        self.request, self.record, self.members = request, record, members
        self.eos = eos_mask(request.eos, handle)
        self.index = 0
        self.chance = RandomStream(request, len(members))
        self.chance.enter(members.tolist(), range(len(members)))
        self.ended = _Ended(record, members)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        index = np.full(len(self.members), self.index)
        rows = Rows(self.members, index, np.arange(len(index)), index, [])
        sampling = self.request.sampling
        banned = torch.full((len(index),), True, device=scores.device) if self.index < sampling.min_new_tokens else None
        uniform = torch.from_numpy(self.chance.of(rows)).to(scores.device)
        drawn = draw(scores[:, : len(self.eos)], uniform, banned, self.eos, sampling)
        self.record.take(rows, read_drawn(drawn, sampling.keep_sets))
        self.index += 1
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn.ids[:, None], 0.0)


class _Ended(StoppingCriteria):
    def __init__(self, record: OutputBuffer, members: np.ndarray) -> None:
        self.record, self.members = record, members

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.from_numpy(self.record.reasons[self.members] != "").to(input_ids.device)
