"""One update: forward and backward over packs of samples, checks, clipping, AdamW.

Nothing that teaches nothing is computed. The gradient does not depend on how samples are packed; where memory runs
out, the packs are made half as large and the update is done again. Weights move only once everything is known to be
finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from groupwise.config import Recipe
from groupwise.core.filters import KeptSets
from groupwise.core.losses import Loss
from groupwise.core.masks import high_entropy_mask, off_policy_sequence_mask
from groupwise.errors import GroupwiseError
from groupwise.model.logprobs import TokenLogps, completion_logps, each_pack, in_rows
from groupwise.model.precision import MasterWeights
from groupwise.model.prepared import Prepared, without_dropout
from groupwise.train.batch import Batch, Comparison
from groupwise.train.exact_kl import FACTOR_OF, ExactKL
from groupwise.train.objective import Objective, Part, Totals
from groupwise.train.reference import Reference
from groupwise.train.update import Gap, Update, compare_gradients

SMALLEST_BUDGET = 64


class NotFiniteError(GroupwiseError, ArithmeticError):
    """A loss or gradient is NaN or infinite; the weights have not moved."""


@dataclass
class Work:
    """The samples of a mini-batch that have to be computed, and what is known about them. Rows follow ``samples``."""

    samples: list[int]  # which samples of the batch
    prompts: list[tuple[int, ...]]  # of the prompts they belong to
    completions: list[list[Tensor]]  # by prompt
    kept: KeptSets | None
    advantages: Tensor  # (n,)
    allowed: Tensor  # (n,) bool
    sampler_logps: Tensor  # (n, T)
    mask: Tensor  # (n, T)
    totals: Totals
    old_logps: Tensor | None = None  # (n, T)
    ref_logps: Tensor | None = None  # (n, T)
    weights: Tensor | None = None  # (n, T) the importance correction

    def __len__(self) -> int:
        return len(self.samples)


def plan_work(batch: Batch, comparison: Comparison, prompts: Sequence[int], now: Recipe) -> Work:
    """What a mini-batch of these prompts needs computed: what teaches, or everything where a term asks for it."""
    members = [prompt * batch.samples + sample for prompt in prompts for sample in range(batch.samples)]
    everything = bool(now.loss.kl_coef or now.loss.entropy_coef) or not now.train.skip_equal
    if now.loss.denominator == "policy_mask" and now.masks.off_policy == "document":
        everything = True  # this mask may silence any sample, and so be felt in the denominator
    teaches, allowed = comparison.teaches.tolist(), comparison.allowed.tolist()
    chosen = [i for i in members if everything or teaches[i]]
    by_prompt: dict[int, list[int]] = {}
    for sample in chosen:
        by_prompt.setdefault(sample // batch.samples, []).append(sample)
    divided_by = members
    if now.loss.denominator == "policy_mask":
        divided_by = [i for i in members if allowed[i]]
    lengths = batch.lengths
    mask = _mask(lengths[chosen])
    return Work(
        samples=chosen,
        prompts=[batch.prompts[prompt].ids for prompt in by_prompt],
        completions=[[batch.ids[i] for i in own] for own in by_prompt.values()],
        kept=None if batch.kept is None else batch.kept.select(batch.places(chosen)),
        advantages=comparison.advantages[chosen],
        allowed=comparison.allowed[chosen],
        sampler_logps=_padded([batch.sampler_logps[i] for i in chosen], mask),
        mask=mask,
        totals=Totals(
            tokens=int(lengths[members].sum()),
            sequences=len(members),
            policy_tokens=int(lengths[divided_by].sum()),
            policy_sequences=len(divided_by),
            computed_tokens=int(mask.sum()),
            computed_sequences=len(chosen),
        ),
    )


class Updater:
    """Moves the weights. ``token_budget`` is what one forward and backward pass may hold; it is lowered for good
    where memory runs out."""

    def __init__(
        self,
        prepared: Prepared,
        masters: MasterWeights,
        optimizer: torch.optim.Optimizer,
        reference: Reference | None,
        token_budget: int,
        loss: Loss,
        *,
        dropout: bool = False,
        release: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.prepared, self.masters, self.optimizer, self.reference = prepared, masters, optimizer, reference
        self.token_budget, self.loss, self.dropout = token_budget, loss, dropout
        self.release, self.say = release, say

    def know(self, work: Work, now: Recipe, *, old: bool) -> None:
        """Add what must be known before the first update of a batch: old log-probs (if it is used more than once), the
        reference's, and the importance correction."""
        if not len(work):
            return
        if old or now.loss.importance_cap is not None:
            work.old_logps = self._logps(work, now).logps.cpu()
        if now.loss.importance_cap is not None and work.old_logps is not None:
            ratio = torch.where(work.mask, work.old_logps - work.sampler_logps, 0.0).exp()
            work.weights = ratio.clamp(max=now.loss.importance_cap)
            if not old:
                work.old_logps = None
        estimated = now.loss.kl_coef and now.loss.kl not in FACTOR_OF
        if self.reference is not None and (estimated or now.masks.off_policy == "document"):
            with self.reference.in_place(), without_dropout(self.prepared.model) if self.dropout else nullcontext():
                work.ref_logps = self._logps(work, now).logps.cpu()

    def update(self, work: Work, now: Recipe, *, check: bool = False, compare_terms: bool = False) -> Update:
        """Forward, backward, one move of the optimizer. ``check`` compares with the sampler's log-probs."""
        while True:
            try:
                found = self._gradient(work, now, check, compare_terms)
                found.values = {name: float(value) for name, value in found.values.items()}
                found.statistics = {name: float(value) for name, value in found.statistics.items()}
                break
            except (torch.OutOfMemoryError, RuntimeError) as error:
                self._make_room(error, work)
        norm = self._norm(now)
        if not (math.isfinite(norm) and all(math.isfinite(value) for value in found.values.values())):
            self.optimizer.zero_grad(set_to_none=True)
            if now.train.not_finite == "stop":
                named = ", ".join(f"{name} {value:g}" for name, value in found.values.items())
                raise NotFiniteError(
                    f"the gradient's norm is {norm:g} (terms: {named}); the weights have not moved. Lower "
                    "optimizer.learning_rate, look at the rewards of this step, or skip such updates with "
                    "train.not_finite = 'skip'"
                )
            found.skipped = True
            return found
        found.grad_norm = norm
        self._move()
        self.masters.publish()
        self.optimizer.zero_grad(set_to_none=True)
        return found

    def _move(self) -> None:
        """One step of the optimizer, group by group: one that has moved must not move again where the next has no room.

        The first step asks for two more numbers per weight: where they do not fit, what generation holds is given back.
        """
        groups = self.optimizer.param_groups
        try:
            for group in groups:
                self.optimizer.param_groups = [group]
                self._move_group()
        finally:
            self.optimizer.param_groups = groups

    def _move_group(self) -> None:
        try:
            self.optimizer.step()
        except torch.OutOfMemoryError:
            for weight, known in list(self.optimizer.state.items()):
                if "exp_avg_sq" not in known:
                    del self.optimizer.state[weight]  # begun, and not finished
            self._release()
            try:
                self.optimizer.step()
            except torch.OutOfMemoryError as error:
                raise OutOfMemoryError(
                    "memory ran out for the optimizer, which keeps 8 bytes for every trained weight; use a smaller "
                    "model or [model.lora], or give the GPU to this run alone"
                ) from error

    def _gradient(self, work: Work, now: Recipe, check: bool, compare_terms: bool) -> Update:
        self.optimizer.zero_grad(set_to_none=True)
        found = Update(gap=Gap() if check else None)
        policy_mask, work_totals = self._policy_mask(work, now, found)
        objective = Objective(now, self.loss, work_totals)
        if not compare_terms:
            self._backward(work, now, objective, policy_mask, found)
            return found
        gradients: dict[str, list[Tensor]] = {}
        for name in [name for name, active in _active_terms(now).items() if active]:
            self._backward(work, now, objective, policy_mask, found, only=name, watch=not gradients)
            gradients[name] = [
                torch.zeros_like(master) if master.grad is None else master.grad for master in self.masters.parameters()
            ]
            self.optimizer.zero_grad(set_to_none=True)
        found.terms = compare_gradients(gradients)
        for master, *shares in zip(self.masters.parameters(), *gradients.values(), strict=True):
            master.grad = torch.stack(shares).sum(0)
        return found

    def _backward(
        self,
        work: Work,
        now: Recipe,
        objective: Objective,
        policy_mask: Tensor | None,
        found: Update,
        *,
        only: str | None = None,
        watch: bool = True,
    ) -> None:
        """One pass over all packs, of all terms or of one; ``watch`` also takes the statistics, once per update."""
        for part, rows in self._parts(work, now, policy_mask):
            values, statistics = objective.terms(part)
            if only is not None:
                values = {only: values[only]}
            torch.stack(list(values.values())).sum().backward()  # type: ignore[no-untyped-call]
            self._note(found, values, statistics if watch else {})
            if found.gap is not None and watch:
                found.gap.add(part.logps, _rows(work.sampler_logps, rows, part.logps), part.mask)

    def _parts(self, work: Work, now: Recipe, policy_mask: Tensor | None) -> Iterator[tuple[Part, Tensor]]:
        exact = self._exact_kl(work, now)
        packs = each_pack(
            self.prepared,
            work.prompts,
            work.completions,
            temperature=now.sampling.temperature,
            kept=work.kept,
            with_entropy=True,
            with_states=exact is not None,
            token_budget=self._budget(work),
        )
        for rows, found in packs:
            states = found.states
            yield (
                Part(
                    logps=found.logps,
                    mask=found.mask,
                    advantages=work.advantages[rows].to(found.logps.device),
                    policy_mask=_optional_rows(policy_mask, rows, found.logps),
                    old_logps=_optional_rows(work.old_logps, rows, found.logps),
                    ref_logps=_optional_rows(work.ref_logps, rows, found.logps) if now.loss.kl_coef else None,
                    entropy=found.entropy,
                    exact_kl=None if exact is None or states is None else exact.next(states, found.mask),
                ),
                rows,
            )

    def _exact_kl(self, work: Work, now: Recipe) -> ExactKL | None:
        if self.reference is None or not now.loss.kl_coef or now.loss.kl not in FACTOR_OF:
            return None
        return ExactKL(
            self.prepared,
            self.reference,
            work.prompts,
            work.completions,
            form=now.loss.kl,
            temperature=now.sampling.temperature,
            token_budget=self._budget(work),
            dropout=self.dropout,
        )

    def _policy_mask(self, work: Work, now: Recipe, found: Update) -> tuple[Tensor | None, Totals]:
        """What may teach, ``(n, T)``: the batch's own masks, and those that need the policy's log-probs now."""
        masks, totals = now.masks, work.totals
        teaching = work.allowed[:, None] & work.mask
        if masks.off_policy is not None or masks.high_entropy is not None:
            current = self._logps(work, now, with_entropy=masks.high_entropy is not None)
            logps = current.logps.cpu()
            if masks.off_policy is not None:
                near = self._near(work, now, logps)
                gone = work.allowed & ~near
                found.silenced["off_policy"] = [work.samples[row] for row in gone.nonzero().flatten().tolist()]
                if now.loss.denominator == "policy_mask":
                    totals = replace(
                        totals,
                        policy_tokens=totals.policy_tokens - int(work.mask[gone].sum()),
                        policy_sequences=totals.policy_sequences - int(gone.sum()),
                    )
                teaching = teaching & near[:, None]
            if masks.high_entropy is not None and current.entropy is not None:
                # Chosen among tokens that could teach, so that skipping the others changes nothing.
                could = teaching & (work.advantages != 0)[:, None]
                teaching = high_entropy_mask(current.entropy.cpu(), could, top_fraction=masks.high_entropy)
                if now.loss.denominator == "policy_mask":
                    totals = replace(
                        totals,
                        policy_tokens=int(teaching.sum()),
                        policy_sequences=int(teaching.any(1).sum()),
                    )
        if work.weights is not None:
            return teaching * work.weights, totals
        return (None if bool((teaching == work.mask).all()) else teaching), totals

    def _near(self, work: Work, now: Recipe, logps: Tensor) -> Tensor:
        """Which samples the off-policy mask keeps ``(n,)``."""
        rule, threshold = now.masks.off_policy or "v3.2", now.masks.off_policy_threshold
        other = work.sampler_logps if rule == "v3.2" or work.ref_logps is None else work.ref_logps
        return off_policy_sequence_mask(logps, other, work.advantages, work.mask, threshold=threshold, rule=rule)

    @torch.no_grad()
    def _logps(self, work: Work, now: Recipe, *, with_entropy: bool = False) -> TokenLogps:
        while True:
            try:
                return completion_logps(
                    self.prepared,
                    work.prompts,
                    work.completions,
                    temperature=now.sampling.temperature,
                    kept=work.kept,
                    with_entropy=with_entropy,
                    token_budget=self._budget(work),
                )
            except (torch.OutOfMemoryError, RuntimeError) as error:
                self._make_room(error, work)

    def _budget(self, work: Work) -> int:
        """The token budget, or the longest sample where that is more."""
        return max(self.token_budget, _longest(work))

    def _make_room(self, error: Exception, work: Work) -> None:
        """After running out of memory: give back what generation holds and halve the packs; else raise again."""
        if isinstance(error, GroupwiseError) or not _out_of_memory(error):
            raise error
        self.optimizer.zero_grad(set_to_none=True)
        if self.token_budget <= max(SMALLEST_BUDGET, _longest(work)):
            raise OutOfMemoryError(
                f"memory ran out with a single sample of {_longest(work)} tokens; use a smaller model, "
                "model.gradient_checkpointing = true, [model.lora], or shorter answers (sampling.max_new_tokens)"
            ) from error
        self._release()
        self.token_budget = max(SMALLEST_BUDGET, self.token_budget // 2)
        self.say(f"memory ran out: the step is done again with a token budget of {self.token_budget:,}; same result")

    def _release(self) -> None:
        """Give back what generation holds, and what the allocator keeps."""
        self.release()
        if self.prepared.device.type == "cuda":
            torch.cuda.empty_cache()

    def _norm(self, now: Recipe) -> float:
        gradients = [master.grad for master in self.masters.parameters() if master.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if now.optimizer.max_grad_norm is not None and bool(norm.isfinite()):
            torch.nn.utils.clip_grads_with_norm_(list(self.masters.parameters()), now.optimizer.max_grad_norm, norm)
        return float(norm)

    @staticmethod
    def _note(found: Update, values: dict[str, Tensor], statistics: dict[str, Tensor]) -> None:
        """Add a part's shares, still on the device: a number asked for now would make the GPU wait."""
        for sums, more in ((found.values, values), (found.statistics, statistics)):
            for name, value in more.items():
                sums[name] = sums.get(name, 0.0) + value.detach()


class OutOfMemoryError(GroupwiseError, RuntimeError):
    """Not even one sample fits, or what the optimizer remembers does not."""


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _active_terms(now: Recipe) -> dict[str, bool]:
    return {"policy": True, "kl": bool(now.loss.kl_coef), "entropy": bool(now.loss.entropy_coef)}


def _longest(work: Work) -> int:
    return max(
        len(prompt) + max(ids.shape[0] for ids in members)
        for prompt, members in zip(work.prompts, work.completions, strict=True)
    )


def _mask(lengths: Tensor) -> Tensor:
    return torch.arange(int(lengths.max()) if len(lengths) else 0) < lengths[:, None]


def _padded(rows: Sequence[Tensor], mask: Tensor) -> Tensor:
    return in_rows(torch.cat(list(rows)), mask) if rows else torch.zeros(mask.shape)


def _rows(values: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """These rows of ``(n, T)``, cut to the width of a part and on its device."""
    return values[rows][:, : like.shape[1]].to(like.device)


def _optional_rows(values: Tensor | None, rows: Tensor, like: Tensor) -> Tensor | None:
    return None if values is None else _rows(values, rows, like)
