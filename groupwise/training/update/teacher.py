"""The teacher of a run, and the reverse KL to it over the vocabulary, computed pack by pack.

A teacher is another model, a server, or the policy's own weights: as they are now, as the reference, or below a LoRA
adapter; the last three take no second copy. It may be shown another prompt than the student; the completions are the
same. As with `exact_kl`, the teacher's hidden states of a pack live as long as the pack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from groupwise.core.distillation import NextTokens, reverse_kl, top_k_reverse_kl
from groupwise.core.ragged import Ragged, RaggedGroups
from groupwise.core.sequences import TurnGroups
from groupwise.distributed.fsdp import full
from groupwise.distributed.ranks import Ranks
from groupwise.errors import ConfigError
from groupwise.model.handle import ModelHandle, eval_mode
from groupwise.model.logprobs import flat_to_rows, iter_pack_states
from groupwise.model.lora import adapter_off
from groupwise.training.update.reference import Reference


class ServerLogps(NamedTuple):
    """The teacher's log-probs of one completion's tokens ``(t,)``, and of its most likely tokens ``(t, K)``."""

    logps: Tensor
    top_ids: Tensor  # most likely first; −1 is no token
    top_logps: Tensor


class TeacherServer(Protocol):
    """A teacher that is asked over the network.

    model: the name of its model. context_length: how many tokens it can be asked about at once, if it says that.
    """

    model: str
    context_length: int | None

    def score(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[Tensor]], top_k: int
    ) -> list[list[ServerLogps]]:
        """The log-probs of each prompt's completions, with those of the ``top_k`` most likely tokens."""
        ...


@dataclass(frozen=True)
class TeacherLogps:
    """What a teacher said about the ``n`` samples of a mini-batch before its first update."""

    logps: Tensor  # (n, T)
    top_ids: Tensor | None = None  # (n, T, K)
    top_logps: Tensor | None = None  # (n, T, K)

    def take(self, rows: Tensor) -> TeacherLogps:
        top = (None if part is None else part[rows] for part in (self.top_ids, self.top_logps))
        return TeacherLogps(self.logps[rows], *top)


@dataclass(frozen=True)
class Teacher:
    """Where the teacher's distributions come from: a model of its own, a server, or the policy's weights.

    weights: "own", "policy", "reference", or "base", those of ``adapted`` without its adapter.
    """

    name: str
    weights: str
    handle: ModelHandle | None = None  # of its own model
    adapted: Any = None
    server: TeacherServer | None = None

    @property
    def context_length(self) -> int | None:
        """The tokens that it can read at once; None if that is not known, or the policy's."""
        source = self.server or self.handle
        return None if source is None else source.context_length

    @contextmanager
    def in_place(self, model: Any, reference: Reference | None, dropout: bool) -> Iterator[None]:
        """Within this block the model that computes is the teacher. Do not take gradients through it."""
        with ExitStack() as stack:
            if self.weights == "reference":
                if reference is None:
                    raise ConfigError("distillation.teacher is 'reference', but this run has no reference")
                stack.enter_context(reference.in_place())
            if self.weights == "base":
                stack.enter_context(adapter_off(self.adapted))
            if dropout and self.weights != "own":
                stack.enter_context(eval_mode(model))
            yield

    def next_tokens(self, handle: ModelHandle, states: Tensor, reference: Reference | None) -> NextTokens:
        """The teacher's distributions, from the states that ``handle`` gave while it was in place."""
        head = handle.head
        if head is None:  # the states are logits
            return NextTokens(states)

        def value(parameter: Tensor | None) -> Tensor | None:
            if parameter is None:
                return None
            if self.weights == "reference" and reference is not None:
                return reference.weight_of(parameter).detach()
            return full(parameter).to(handle.dtype)

        return NextTokens(states, value(head.weight), value(head.bias), head.softcap, head.scale)


@dataclass
class TeacherKL:
    """The reverse KL to the teacher of samples by prompt, for the packs of `iter_packs`, in any order."""

    teacher: Teacher
    handle: ModelHandle  # the policy's
    reference: Reference | None
    prompts: Ragged  # the teacher's
    completions: RaggedGroups  # by prompt
    server_logps: TeacherLogps | None
    temperature: float
    token_budget: int
    dropout: bool

    def of(self, rows: Tensor, states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The KL, with gradient, and whether both prefer the same token ``(b, T)``; states: the policy's."""
        if self.server_logps is not None:
            said = self.server_logps.take(rows)
            if said.top_ids is None or said.top_logps is None:
                raise ConfigError("the server was not asked for its most likely tokens")
            width = mask.shape[1]
            at = mask.cpu()
            ids, logps = (values[:, :width][at].to(states.device) for values in (said.top_ids, said.top_logps))
            ids = torch.where(ids < self._student(states).vocabulary, ids, -1)  # a server's may be padded to more
            compute = partial(self._top_k_kl, states, ids, logps)
        else:
            compute = partial(self._full_kl, states, self._teacher_tokens(rows))
        kl, same = self.handle.run(compute)
        return flat_to_rows(kl, mask), flat_to_rows(same, mask)

    def _teacher_tokens(self, rows: Tensor) -> NextTokens:
        handle = self.teacher.handle or self.handle
        groups, sizes = torch.unique_consecutive(self.completions.group_of[rows], return_counts=True)
        prompts, completions = self.prompts.take(groups), self.completions.choose(rows, sizes)
        with torch.no_grad(), self.teacher.in_place(self.handle.model, self.reference, self.dropout):
            packs = iter_pack_states(handle, prompts, completions, token_budget=self.token_budget)
            samples, parts = zip(*packs, strict=True)
            states, order = torch.cat(parts), torch.cat(samples)
            if bool((order.diff() < 0).any()):  # conversations are packed in an order of their own
                places = Ragged(torch.arange(len(states)), completions.rows.lengths[order])
                states = states[places.take(order.argsort()).values.to(states.device)]
            return self.teacher.next_tokens(handle, states, self.reference)

    def _full_kl(self, states: Tensor, teacher: NextTokens) -> tuple[Tensor, Tensor]:
        return reverse_kl(self._student(states), teacher, temperature=self.temperature)

    def _top_k_kl(self, states: Tensor, ids: Tensor, logps: Tensor) -> tuple[Tensor, Tensor]:
        return top_k_reverse_kl(self._student(states), ids, logps, temperature=self.temperature)

    def _student(self, states: Tensor) -> NextTokens:
        head = self.handle.head
        return (
            NextTokens(states) if head is None else NextTokens(states, head.weight, head.bias, head.softcap, head.scale)
        )


def ask_server(
    server: TeacherServer,
    prompts: Ragged,
    completions: RaggedGroups,
    top_k: int,
    ranks: Ranks,
) -> TeacherLogps:
    """What the server says about all completions, on every rank; each asks for its share of the prompts."""

    def work(numbers: list[int]) -> list[list[list[Tensor]]]:
        asked, part = prompts.take(numbers).tolist(), completions.take(numbers)
        if not isinstance(part, TurnGroups):
            return [[list(answer) for answer in members] for members in server.score(asked, part, top_k)]
        groups = part.sequences
        answers = server.score(asked, [[sequence.to_last_sampled for sequence in members] for members in groups], top_k)
        return [
            [[values[sequence.places] for values in answer] for sequence, answer in zip(*pair, strict=True)]
            for pair in zip(groups, answers, strict=True)
        ]

    costs = (prompts.lengths * completions.sizes + completions.totals).tolist()
    answers = ranks.divide("asking the teacher", costs, work)
    logps, ids, top = zip(*(answer for members in answers for answer in members), strict=True)
    return TeacherLogps(
        pad_sequence(list(logps), batch_first=True),
        pad_sequence(list(ids), batch_first=True, padding_value=-1),
        pad_sequence(list(top), batch_first=True),
    )
