"""The tokens of a few completions of a step: log-probs under sampler, policy and reference, and the entropy.

They are computed by a pass without gradient before the update, in which no random number is drawn, so a run's weights
and metrics are the same with it and without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate
from statistics import pstdev
from typing import Any

import torch
from torch import Tensor

from groupwise.config import Recipe
from groupwise.errors import is_out_of_memory
from groupwise.generate.stop import REPLACEMENT
from groupwise.model.handle import eval_mode
from groupwise.model.logprobs import TokenLogps, completion_logps
from groupwise.text import Say
from groupwise.training.errors import SMALLEST_BUDGET, halve_budget, retry_with_less_memory
from groupwise.training.rollout.batch import Batch, GroupAdvantages
from groupwise.training.store.token_files import TokenRow
from groupwise.training.update.updater import Updater

LONGEST_PENDING = 16  # tokens without a complete character, after which their bytes are taken for invalid


class TokenDetails:
    """Computes the details of ``run.save_tokens_prompts`` prompts every ``run.save_tokens_every`` steps."""

    def __init__(self, updater: Updater, tokenizer: Any, say: Say) -> None:
        self.updater, self.tokenizer, self.say = updater, tokenizer, say
        self._said = False

    def compute(
        self, step: int, batch: Batch, group_advantages: GroupAdvantages, step_recipe: Recipe
    ) -> list[TokenRow]:
        """The rows of ``step``, which is about to be taken; none if it is not due, or on ranks that need not compute.

        If memory runs out even with small packs, the step has none, and the first time a message says so.
        """
        settings, updater = step_recipe.run, self.updater
        every = settings.save_tokens_every
        if not settings.save_rollouts or not every or (step - 1) % every or not len(batch):
            return []
        if updater.handle.sharded is None and not updater.ranks.is_main:
            return []  # a pass of sharded weights needs all ranks
        prompts = choose_prompts(group_advantages.rewards, batch.samples, settings.save_tokens_prompts)
        try:
            with self._all_ranks():
                return self._rows(step, batch.take(prompts), prompts, step_recipe)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        if not self._said:
            self._said = True
            self.say(
                f"step {step}: memory ran out for the details of single tokens, so this step has none; the run is not "
                "changed by that. run.save_tokens_every = 0 computes none"
            )
        return []

    def _all_ranks(self) -> AbstractContextManager[None]:
        """A pass of sharded weights is a collective: a rank that fails in it must not leave the others waiting."""
        if self.updater.handle.sharded is None:
            return nullcontext()
        return self.updater.ranks.stage("computing the details of single tokens", exchanges=True)

    def _rows(self, step: int, batch: Batch, prompts: Sequence[int], step_recipe: Recipe) -> list[TokenRow]:
        policy, reference = self._policy_and_reference(batch, step_recipe)
        if policy.entropy is None:
            raise ValueError("the pass over the policy has no entropy")
        rows = []
        turns = [None] * len(batch) if batch.turns is None else list(batch.turns)
        for number, (ids, text, sequence) in enumerate(zip(batch.ids, batch.texts, turns, strict=True)):
            length = len(ids)
            text = text if sequence is None else _decode(self.tokenizer, ids.tolist())
            rows.append(
                TokenRow(
                    step=step,
                    prompt_number=prompts[number // batch.samples],
                    row=batch.row_numbers[number // batch.samples],
                    sample=number % batch.samples,
                    completion=text,
                    ids=ids.tolist(),
                    ends=token_ends(self.tokenizer, ids.tolist(), text),
                    sampler_logps=_numbers(batch.sampler_logps[number]),
                    policy_logps=_numbers(policy.logps[number, :length]),
                    entropy=_numbers(policy.entropy[number, :length]),
                    ref_logps=None if reference is None else _numbers(reference.logps[number, :length]),
                    all_ids=None if sequence is None else sequence.ids.tolist(),
                    sampled=None if sequence is None else sequence.sampled.tolist(),
                )
            )
        return rows

    @torch.no_grad()
    def _policy_and_reference(self, batch: Batch, step_recipe: Recipe) -> tuple[TokenLogps, TokenLogps | None]:
        # Not compiled: a pass without gradient would be compiled separately, for a minute that few tokens do not earn.
        handle, updater, completions = replace(self.updater.handle, compiled=None), self.updater, batch.completions
        longest = int((batch.prompt_ids.lengths + completions.longest).max())
        # Ranks that share weights cannot repeat a pass, so theirs is small: the update needs many times its memory.
        budget = updater.token_budget // (1 if handle.sharded is None else 4)

        def shrink() -> None:
            nonlocal budget
            budget = halve_budget(budget)
            torch.cuda.empty_cache()

        def compute(with_entropy: bool) -> TokenLogps:
            return completion_logps(
                handle,
                batch.prompt_ids,
                completions,
                temperature=step_recipe.sampling.temperature,
                kept=batch.kept,
                with_entropy=with_entropy,
                token_budget=max(budget, longest),
            )

        def retried(with_entropy: bool) -> TokenLogps:
            return retry_with_less_memory(
                partial(compute, with_entropy),
                can_shrink=lambda: handle.sharded is None and budget > max(SMALLEST_BUDGET, longest),
                shrink=shrink,
            )

        with ExitStack() as stack:
            if updater.dropout:
                stack.enter_context(eval_mode(handle.model))
            policy, reference = retried(True), None
            if updater.reference is not None:
                stack.enter_context(updater.reference.in_place())
                reference = retried(False)
        return policy, reference


def choose_prompts(rewards: Tensor, samples: int, count: int) -> list[int]:
    """The ``count`` prompts with the largest spread of rewards ``(B,)``, in order; of equal ones the first."""
    groups = rewards.view(-1, samples).tolist()
    scored = [[value for value in group if math.isfinite(value)] for group in groups]
    spreads = [pstdev(group) if len(group) > 1 else -1.0 for group in scored]
    return sorted(sorted(range(len(groups)), key=lambda prompt: -spreads[prompt])[:count])


def token_ends(tokenizer: Any, ids: Sequence[int], text: str) -> list[int]:
    """Where each token's text ends in ``text``, to which ``ids`` decode, without special tokens; in characters.

    A character that is split over several tokens ends at the last of them.
    """
    ends = _ends_by_window(tokenizer, ids, text)
    return _ends_by_prefix(tokenizer, ids, text) if ends is None else ends


def _ends_by_window(tokenizer: Any, ids: Sequence[int], text: str) -> list[int] | None:
    """In linear time: a token is decoded with those before it that may change its text. None if that is not enough."""
    ends: list[int] = []
    start = 0  # the first token of the window, whose text up to the last known end is the same as in the text of all
    for number in range(len(ids)):
        known = len(ends)
        before, after = (_decode(tokenizer, ids[start:stop]) for stop in (known, number + 1))
        is_complete = after != before and not after.endswith(REPLACEMENT)
        if not is_complete and number - known < LONGEST_PENDING and number + 1 < len(ids):
            continue
        shown = ends[-1] if ends else 0
        if not after.startswith(before) or not text.startswith(after[len(before) :], shown):
            return None
        for stop in range(known + 1, number + 1):
            ends.append(shown - len(before) + max(len(before), _shared(_decode(tokenizer, ids[start:stop]), after)))
        ends.append(shown + len(after) - len(before))
        start = known
    return ends if not ends or ends[-1] == len(text) else None


def _ends_by_prefix(tokenizer: Any, ids: Sequence[int], text: str) -> list[int]:
    """For any tokenizer, in quadratic time: as far as the text of the first tokens agrees with that of all."""
    ends = [_shared(_decode(tokenizer, ids[:number]), text) for number in range(1, len(ids))]
    return list(accumulate([*ends, len(text)], max)) if ids else []


def _shared(one: str, other: str) -> int:
    """The number of characters with which both begin."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True) if ids else ""
    return text


def _numbers(values: Tensor) -> list[Any]:
    """Numbers for a file; None where the sampler gave no log-prob."""
    return [None if math.isnan(value) else value for value in values.float().tolist()]
