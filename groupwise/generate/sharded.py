"""A generator whose prompts are divided among the ranks of a run.

A token's random number belongs to the seed, its prompt's key, the sample and the place, so the samples are those of one
process. If the weights are sharded, each rank gathers all of them while it samples. A generator outside the ranks
(``remote``) is called by rank 0 alone, which sends its samples to the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from groupwise.core.filters import KeptSets
from groupwise.distributed.fsdp import ShardedWeights
from groupwise.distributed.ranks import Ranks
from groupwise.distributed.split import split_by_cost
from groupwise.generate.types import Generator, Progress, Rollout, Sampling, Stop

TENSORS = ("ids", "lengths", "logps", "filtered_logps", "versions")
PADDED = ("ids", "logps", "filtered_logps", "versions")  # (B, T)


class ShardedGenerator:
    """`generate` and `update_weights` are called on all ranks; each gets the complete rollout."""

    def __init__(self, inner: Generator, ranks: Ranks, weights: ShardedWeights | None = None) -> None:
        self.inner, self.ranks, self.weights = inner, ranks, weights
        self.remote, self.version = inner.remote, inner.version
        self.progress: Progress | None = None

    @property
    def max_num_seqs(self) -> int:
        """Of each rank."""
        return self.inner.max_num_seqs

    @max_num_seqs.setter
    def max_num_seqs(self, number: int) -> None:
        self.inner.max_num_seqs = number

    def update_weights(self, version: int) -> None:
        self.inner.update_weights(version)
        self.version = version

    def check_health(self) -> None:
        self.inner.check_health()

    def release(self) -> None:
        self.inner.release()

    def close(self) -> None:
        self.inner.close()

    def generate(
        self,
        prompts: Sequence[Sequence[int] | Tensor],
        samples: int | Sequence[int],
        sampling: Sampling,
        *,
        stop: Stop | None = None,
        keys: Sequence[int] | None = None,
    ) -> Rollout:
        counts = [samples] * len(prompts) if isinstance(samples, int) else list(samples)
        keys = range(len(prompts)) if keys is None else keys
        new = sampling.max_new_tokens
        shares = self.shares([len(ids) + count * new for ids, count in zip(prompts, counts, strict=True)])
        share = shares[self.ranks.rank]
        report, factor = self.progress, sum(counts) / max(1, sum(counts[i] for i in share))
        self.inner.progress = None if report is None else scaled(report, factor)
        rollout: Rollout | None = None
        with self.own() as generator:
            if share:
                rollout = generator.generate(
                    [prompts[i] for i in share],
                    [counts[i] for i in share],
                    sampling,
                    stop=stop,
                    keys=[keys[i] for i in share],
                )
        parts = self.ranks.gather(None if rollout is None else _message(rollout))
        return _joined([part for part in parts if part is not None], [share for share in shares if share], counts)

    def shares(self, costs: Sequence[float]) -> list[list[int]]:
        """The numbers of the prompts that each rank samples."""
        if self.remote:
            return [list(range(len(costs))), *([] for _ in range(self.ranks.size - 1))]
        return split_by_cost(costs, self.ranks.size)

    @contextmanager
    def own(self) -> Iterator[Generator]:
        """A stage in which each rank samples with its own generator."""
        gathered = nullcontext() if self.weights is None or self.remote else self.weights.gathered()
        with gathered, self.ranks.stage("sampling"):
            yield self.inner


def scaled(report: Progress, factor: float) -> Progress:
    """Reports a rank's progress as if the other ranks had come as far with their shares."""
    return lambda done, total, tokens: report(done * factor, round(total * factor), round(tokens * factor))


def _message(rollout: Rollout) -> dict[str, Any]:
    kept = rollout.kept
    return {
        **{name: getattr(rollout, name) for name in TENSORS},
        "stop_reasons": rollout.stop_reasons,
        "kept": None if kept is None else {"ids": kept.ids, "offsets": kept.offsets},
        "stats": {name: value for name, value in rollout.stats.items() if isinstance(value, (int, float))},
    }


def _joined(parts: Sequence[dict[str, Any]], shares: Sequence[Sequence[int]], counts: Sequence[int]) -> Rollout:
    """The rollout of all prompts, in order, from those of each share."""
    firsts = torch.tensor([0, *counts]).cumsum(0).tolist()
    samples = torch.tensor([sample for share in shares for i in share for sample in range(firsts[i], firsts[i + 1])])
    order, width = samples.argsort(), max(part["ids"].shape[1] for part in parts)
    joined = {}
    for name in TENSORS:
        pieces = [part[name] for part in parts]
        if name in PADDED:
            pieces = [pad(piece, (0, width - piece.shape[1])) for piece in pieces]
        joined[name] = torch.cat(pieces)[order]
    kept = None
    if parts[0]["kept"] is not None:
        sets = KeptSets.join([KeptSets(**part["kept"]) for part in parts])
        lengths = torch.cat([part["lengths"] for part in parts])
        ends = lengths.cumsum(0)
        tokens = [torch.arange(int(ends[row] - lengths[row]), int(ends[row])) for row in order.tolist()]
        kept = sets.select(torch.cat(tokens))
    reasons = [reason for part in parts for reason in part["stop_reasons"]]
    return Rollout(
        **joined,
        stop_reasons=tuple(reasons[row] for row in order.tolist()),
        groups=torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)),
        kept=kept,
        stats={name: sum(part["stats"].get(name, 0) for part in parts) for name in parts[0]["stats"]},
    )
