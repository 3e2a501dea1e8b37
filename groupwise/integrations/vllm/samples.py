"""The samples of a call to generate while they come in: tokens, where each one ends, and the version of its weights."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from groupwise.errors import InputError
from groupwise.generate.request import Request
from groupwise.generate.types import Rollout, Sampling, Stop


@dataclass
class Sample:
    """A completion that is sampled, perhaps in several requests with different weights."""

    prompt: int
    number: int  # in its group
    limit: int  # tokens
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    reason: str = ""  # why it ended; empty while it has not


class SampleTable:
    """All samples of a request, in order. ``stop``: ends a completion; it is applied here, whatever vLLM does."""

    def __init__(self, request: Request, stop: Stop | None) -> None:
        self.request, self.stop = request, stop
        self.eos = frozenset(request.eos)
        self.samples = [
            Sample(int(prompt), int(number), int(limit))
            for prompt, number, limit in zip(request.prompt_of, request.number_of, request.limits, strict=True)
        ]

    def of_prompt(self, prompt: int) -> list[Sample]:
        return [sample for sample in self.samples if sample.prompt == prompt]

    def extend(self, sample: Sample, ids: Sequence[int], logps: Sequence[float], finish: str, version: int) -> None:
        """Append tokens up to the sample's end. ``finish``: vLLM's reason; after "abort" the sample may go on."""
        for token, logp in zip(ids, logps, strict=True):
            sample.ids.append(token)
            sample.logps.append(logp)
            sample.versions.append(version)
            if token in self.eos:
                sample.reason = "eos"
            elif self.stop is not None and self.stop(sample.ids):
                sample.reason = "stop_string"
            elif len(sample.ids) == sample.limit:
                sample.reason = "length"
            if sample.reason:
                return
        if finish == "stop":
            sample.reason = "stop_string"  # vLLM saw it in its text

    @property
    def tokens(self) -> int:
        return sum(len(sample.ids) for sample in self.samples)

    def rollout(self, stats: dict[str, Any]) -> Rollout:
        """The result. vLLM's log-probs are those after its filters, and after EOS was excluded from the first
        ``min_new_tokens``: there the log-probs under the full distribution are not known, and NaN."""
        width = max(len(sample.ids) for sample in self.samples)
        shape = (len(self.samples), width)
        ids, versions = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int32)
        logps = torch.zeros(shape)
        for row, sample in enumerate(self.samples):
            ids[row, : len(sample.ids)] = torch.tensor(sample.ids)
            logps[row, : len(sample.ids)] = torch.tensor(sample.logps)
            versions[row, : len(sample.ids)] = torch.tensor(sample.versions, dtype=torch.int32)
        sampling, full = self.request.sampling, logps.clone()
        if (sampling.filters and not sampling.greedy) or sampling.repetition_penalty != 1:
            full[:] = math.nan
        elif self.eos:
            full[:, : sampling.min_new_tokens] = math.nan
        return Rollout(
            ids=ids,
            lengths=torch.tensor([len(sample.ids) for sample in self.samples]),
            logps=full,
            filtered_logps=logps,
            stop_reasons=tuple(sample.reason for sample in self.samples),
            groups=torch.from_numpy(self.request.prompt_of),
            versions=versions,
            stats=stats,
        )


def check_supported(sampling: Sampling) -> None:
    if sampling.keep_sets:
        raise InputError(
            "vLLM does not return the token sets that top-k, top-p and min-p left; use the engine, or set "
            "masks.keep_sampling_mask to false"
        )


def sampling_fields(sampling: Sampling, eos: Sequence[int], done: int, limit: int, seed: int) -> dict[str, Any]:
    """The sampling parameters by vLLM's names, for a completion that has ``done`` tokens already.

    All are given, because a server takes those that are missing from the model's generation_config.
    """
    return {
        "max_tokens": limit - done,
        "min_tokens": min(max(0, sampling.min_new_tokens - done), limit - done),
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_k": 0 if sampling.greedy else sampling.top_k or 0,
        "top_p": 1.0 if sampling.greedy else sampling.top_p,
        "min_p": 0.0 if sampling.greedy else sampling.min_p or 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": seed,
        "logprobs": 0,
        "ignore_eos": True,  # those of the server's model; ours are
        "stop_token_ids": list(eos),
    }


def derive_seed(*numbers: int) -> int:
    """A seed for vLLM. It adds a sample's number in its group, so there is room below 2**63."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2
