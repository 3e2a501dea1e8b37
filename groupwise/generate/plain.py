"""The plain path: any causal model of transformers through its own `generate`, one prompt at a time.

Slow but always correct: no padding, no shared cache, no packed rows. Tokens are sampled by this package's sampler, so
sampling parameters, seeds, log-probs and kept sets mean the same as in the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

from groupwise.generate.local import LocalGenerator
from groupwise.generate.request import OutputBuffer, RandomStream, Request
from groupwise.generate.runner import StepBatch, to_step_output
from groupwise.generate.sampling import OccurredTokens, draw, eos_mask
from groupwise.generate.types import Rollout, Sampling, Stop
from groupwise.model.handle import ModelHandle, prepare
from groupwise.model.packing import Ids


class PlainGenerator(LocalGenerator):
    """A `Generator` for models that cannot share prompts, and for comparison."""

    def __init__(self, model: Any) -> None:
        super().__init__(max_num_seqs=1)
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
        output = OutputBuffer(request, stop, self.progress)
        for number, ids in enumerate(request.prompts):
            members = np.flatnonzero(request.prompt_of == number)
            sampler = _Sampler(request, output, members, self.handle)
            rows = ids.repeat(len(members), 1).to(self.handle.device)
            generate: Any = self.handle.model.generate
            generate(
                rows,
                attention_mask=torch.ones_like(rows),  # else prompt tokens equal to pad_token_id would be masked
                # None would mean the model's EOS; this id is never sampled.
                generation_config=GenerationConfig(  # type: ignore[no-untyped-call]
                    max_new_tokens=int(request.limits[members[0]]),
                    do_sample=False,
                    pad_token_id=0,
                    eos_token_id=self.handle.vocabulary,
                ),
                logits_processor=LogitsProcessorList([sampler]),
                stopping_criteria=StoppingCriteriaList([sampler.ended]),
            )
        prefilled = sum(length * count for length, count in zip(request.prompt_lengths, request.counts, strict=True))
        return output.rollout(self.version, {"prefilled_tokens": prefilled, "plain": True})


class _Sampler(LogitsProcessor):
    """Samples the next tokens and masks all others, so that `generate` must take them."""

    def __init__(self, request: Request, output: OutputBuffer, members: np.ndarray, handle: ModelHandle) -> None:
        self.request, self.output, self.members = request, output, members
        self.eos = eos_mask(request.eos, handle)
        self.index = 0
        penalizes = request.sampling.repetition_penalty != 1
        self.occurred = OccurredTokens(len(members), handle) if penalizes else None
        self.random_stream = RandomStream(request, len(members))
        self.random_stream.assign(members.tolist(), range(len(members)))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        index = np.full(len(self.members), self.index)
        rows = np.arange(len(index))
        batch = StepBatch(self.members, index, rows, rows[:, None], index, [])
        sampling = self.request.sampling
        banned = torch.full((len(index),), True, device=scores.device) if self.index < sampling.min_new_tokens else None
        uniform = torch.from_numpy(self.random_stream.of(batch)).to(scores.device)
        if self.occurred is not None:
            slots = torch.arange(len(index), device=scores.device)
            if self.index == 0:
                prompts = [self.request.prompts[self.request.prompt_of[member]] for member in self.members]
                self.occurred.start(range(len(index)), prompts)
            else:
                self.occurred.add(slots, input_ids[:, -1])
        occurred = None if self.occurred is None else self.occurred.mask
        drawn = draw(scores[:, : len(self.eos)], uniform, banned, self.eos, sampling, occurred)
        self.output.append(batch, to_step_output(drawn, sampling.keep_sets))
        self.index += 1
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn.ids[:, None], 0.0)

    def ended(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """The samples that have ended, as a stopping criterion."""
        return torch.from_numpy(self.output.reasons[self.members] != "").to(input_ids.device)
