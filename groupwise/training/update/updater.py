"""One update: forward and backward over packs of samples, checks, clipping, AdamW.

Nothing that contributes nothing is computed. The gradient does not depend on how samples are packed; where memory runs
out, the packs are made half as large and the update is done again. Weights move only once everything is known to be
finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from groupwise.config import Recipe
from groupwise.core.losses import Loss
from groupwise.model.handle import ModelHandle, without_dropout
from groupwise.model.logprobs import TokenLogps, completion_logps, each_pack
from groupwise.model.precision import MasterWeights
from groupwise.training.errors import SMALLEST_BUDGET, NotFiniteError, OutOfMemoryError, out_of_memory
from groupwise.training.preference.packing import PairIndex, PairLayout, plan_pair_layout
from groupwise.training.preference.reference_cache import pair_logps
from groupwise.training.update.exact_kl import FACTOR_OF, ExactKL
from groupwise.training.update.minibatch import CompletionBatch, MiniBatch, MiniBatchPairs, longest
from groupwise.training.update.objective import MicroBatch, Objective, PackedPairs, PairGradients
from groupwise.training.update.policy_masks import build_policy_mask
from groupwise.training.update.reference import Reference
from groupwise.training.update.result import LogProbMismatch, UpdateResult, gradient_statistics


class Updater:
    """Moves the weights. ``token_budget`` is what one forward and backward pass may hold; it is lowered for good
    where memory runs out."""

    def __init__(
        self,
        handle: ModelHandle,
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
        self.handle, self.masters, self.optimizer, self.reference = handle, masters, optimizer, reference
        self.token_budget, self.loss, self.dropout = token_budget, loss, dropout
        self.release, self.say = release, say

    def precompute_logps(self, minibatch: MiniBatch, now: Recipe, *, old: bool) -> None:
        """Add what must be known before the first update of a batch: old log-probs (if it is used more than once), the
        reference's, and the importance correction."""
        if len(minibatch):
            self._precompute_sample_logps(minibatch, now, old)
        if minibatch.pairs is not None and self.reference is not None:
            minibatch.pairs.reference = self._reference_of_pairs(minibatch, minibatch.pairs, now, self.reference)

    def _precompute_sample_logps(self, minibatch: MiniBatch, now: Recipe, old: bool) -> None:
        old = old and bool(now.loss.policy_coef or now.loss.kl_coef)
        if old or now.loss.importance_cap is not None:
            minibatch.old_logps = self._logps(minibatch, now).logps.cpu()
        if now.loss.importance_cap is not None and minibatch.old_logps is not None:
            ratio = torch.where(minibatch.mask, minibatch.old_logps - minibatch.sampler_logps, 0.0).exp()
            minibatch.weights = ratio.clamp(max=now.loss.importance_cap)
            if not old:
                minibatch.old_logps = None
        estimated = now.loss.kl_coef and now.loss.kl not in FACTOR_OF
        if self.reference is not None and (estimated or now.masks.off_policy == "reference_drift"):
            with self._as_reference(self.reference):
                minibatch.ref_logps = self._logps(minibatch, now).logps.cpu()

    @contextmanager
    def _as_reference(self, reference: Reference) -> Iterator[None]:
        with reference.in_place(), without_dropout(self.handle.model) if self.dropout else nullcontext():
            yield

    def _reference_of_pairs(
        self, minibatch: MiniBatch, pairs: MiniBatchPairs, now: Recipe, reference: Reference
    ) -> Tensor:
        """The reference's summed log-probs ``(n, 2)`` of all pairs; what is known of them is not computed again."""
        with self._as_reference(reference):
            if minibatch.ref_logps is not None:
                sampled = minibatch.ref_logps.double().sum(1)[pairs.rows].view(-1, 2)
            else:
                sampled = self._sums_of_samples(minibatch, pairs, now)
            fixed = self._sums_of_fixed(pairs) if pairs.fixed.reference is None else pairs.fixed.reference
        return torch.cat([sampled, fixed])

    def _sums_of_samples(self, minibatch: MiniBatch, pairs: MiniBatchPairs, now: Recipe) -> Tensor:
        """Summed log-probs ``(g, 2)`` of the samples that are in pairs, under the model as it is; no gradient."""
        members = torch.zeros(len(minibatch), dtype=torch.bool)
        members[pairs.rows.flatten()] = True
        sums = torch.zeros(len(minibatch), dtype=torch.float64)
        if bool(members.any()):
            sums[members] = self._logps(minibatch.answers_of(members), now).logps.double().sum(1).cpu()
        return sums[pairs.rows].view(-1, 2)

    def _sums_of_pairs(self, minibatch: MiniBatch, now: Recipe) -> Tensor:
        """The same ``(n, 2)`` of all pairs of a mini-batch."""
        if minibatch.pairs is None:
            return torch.zeros(0, 2, dtype=torch.float64)
        return torch.cat([self._sums_of_samples(minibatch, minibatch.pairs, now), self._sums_of_fixed(minibatch.pairs)])

    def _sums_of_fixed(self, pairs: MiniBatchPairs) -> Tensor:
        """The same ``(f, 2)`` of a data set's pairs."""
        return pair_logps(self.handle, pairs.fixed.pairs, token_budget=self.token_budget)

    def update(
        self, minibatch: MiniBatch, now: Recipe, *, check: bool = False, compare_terms: bool = False
    ) -> UpdateResult:
        """Forward, backward, one move of the optimizer. ``check`` compares with the sampler's log-probs."""
        while True:
            try:
                found = self._gradient(minibatch, now, check, compare_terms)
                found.values = {name: float(value) for name, value in found.values.items()}
                found.statistics = {name: float(value) for name, value in found.statistics.items()}
                break
            except (torch.OutOfMemoryError, RuntimeError) as error:
                self._make_room(error, minibatch)
        norm = self._norm(now)
        if not (math.isfinite(norm) and all(math.isfinite(value) for value in found.values.values())):
            self.optimizer.zero_grad(set_to_none=True)
            if now.train.on_non_finite == "stop":
                named = ", ".join(f"{name} {value:g}" for name, value in found.values.items())
                raise NotFiniteError(
                    f"the gradient's norm is {norm:g} (terms: {named}); the weights have not moved. Lower "
                    "optimizer.learning_rate, look at the rewards of this step, or skip such updates with "
                    "train.on_non_finite = 'skip'"
                )
            found.skipped = True
            return found
        found.grad_norm = norm
        self._move()
        self.masters.sync_to_model()
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

    def _gradient(self, minibatch: MiniBatch, now: Recipe, check: bool, compare_terms: bool) -> UpdateResult:
        self.optimizer.zero_grad(set_to_none=True)
        found = UpdateResult(mismatch=LogProbMismatch() if check else None)
        policy_mask, totals = build_policy_mask(minibatch, now, found, self._logps)
        objective = Objective(now, self.loss, totals)
        plan = plan_pair_layout(
            self.handle, minibatch, now, self._budget(minibatch), lambda: self._sums_of_pairs(minibatch, now)
        )
        if not compare_terms:
            self._backward(minibatch, now, objective, policy_mask, plan, found)
            return found
        gradients: dict[str, list[Tensor]] = {}
        for name in [name for name, active in _active_terms(now, minibatch).items() if active]:
            self._backward(minibatch, now, objective, policy_mask, plan, found, only=name, watch=not gradients)
            gradients[name] = [
                torch.zeros_like(master) if master.grad is None else master.grad for master in self.masters.parameters()
            ]
            self.optimizer.zero_grad(set_to_none=True)
        found.terms = gradient_statistics(gradients)
        for master, *shares in zip(self.masters.parameters() if gradients else (), *gradients.values(), strict=True):
            master.grad = torch.stack(shares).sum(0)
        return found

    def _backward(
        self,
        minibatch: MiniBatch,
        now: Recipe,
        objective: Objective,
        policy_mask: Tensor | None,
        plan: PairLayout | None,
        found: UpdateResult,
        *,
        only: str | None = None,
        watch: bool = True,
    ) -> None:
        """One pass over all packs, of all terms or of one; ``watch`` also takes the statistics, once per update."""
        for part, rows in self._parts(minibatch, now, policy_mask, plan, fixed=watch or only == "preference"):
            values, statistics = objective.terms(part)
            if only is not None:
                values = {name: value for name, value in values.items() if name == only}
            learned = [value for value in values.values() if value.requires_grad]  # entropy may be only watched
            if learned:
                torch.stack(learned).sum().backward()  # type: ignore[no-untyped-call]
            self._note(found, values, statistics if watch else {})
            if found.mismatch is not None and watch and rows is not None:
                found.mismatch.add(part.logps, _rows(minibatch.sampler_logps, rows, part.logps), part.mask)

    def _parts(
        self, minibatch: MiniBatch, now: Recipe, policy_mask: Tensor | None, plan: PairLayout | None, *, fixed: bool
    ) -> Iterator[tuple[MicroBatch, Tensor | None]]:
        """Pack after pack: of the samples with the rows that they are, then of a data set's pairs."""
        if len(minibatch):
            yield from self._sampled_parts(minibatch, now, policy_mask, None if plan is None else plan.sampled)
        if fixed and minibatch.pairs is not None and plan is not None and plan.fixed is not None:
            prompts, completions, _ = minibatch.pairs.fixed_answers
            for rows, found in each_pack(self.handle, prompts, completions, token_budget=self._budget(minibatch)):
                yield MicroBatch(found.logps, found.mask, pairs=_on(plan.fixed.part(rows), found.logps)), None

    def _sampled_parts(
        self, minibatch: MiniBatch, now: Recipe, policy_mask: Tensor | None, pairs: PairIndex | None
    ) -> Iterator[tuple[MicroBatch, Tensor]]:
        exact = self._exact_kl(minibatch, now)
        packs = each_pack(
            self.handle,
            minibatch.prompts,
            minibatch.completions,
            temperature=now.sampling.temperature,
            kept=minibatch.kept,
            with_entropy=True,
            with_states=exact is not None,
            token_budget=self._budget(minibatch),
        )
        for rows, found in packs:
            states = found.states
            yield (
                MicroBatch(
                    logps=found.logps,
                    mask=found.mask,
                    advantages=minibatch.advantages[rows].to(found.logps.device),
                    policy_mask=_optional_rows(policy_mask, rows, found.logps),
                    old_logps=_optional_rows(minibatch.old_logps, rows, found.logps),
                    ref_logps=_optional_rows(minibatch.ref_logps, rows, found.logps) if now.loss.kl_coef else None,
                    entropy=found.entropy,
                    exact_kl=None if exact is None or states is None else exact.next(states, found.mask),
                    pairs=None if pairs is None else _on(pairs.part(rows), found.logps),
                ),
                rows,
            )

    def _exact_kl(self, minibatch: MiniBatch, now: Recipe) -> ExactKL | None:
        if self.reference is None or not now.loss.kl_coef or now.loss.kl not in FACTOR_OF:
            return None
        return ExactKL(
            self.handle,
            self.reference,
            minibatch.prompts,
            minibatch.completions,
            form=now.loss.kl,
            temperature=now.sampling.temperature,
            token_budget=self._budget(minibatch),
            dropout=self.dropout,
        )

    @torch.no_grad()
    def _logps(self, minibatch: MiniBatch | CompletionBatch, now: Recipe, *, with_entropy: bool = False) -> TokenLogps:
        while True:
            try:
                return completion_logps(
                    self.handle,
                    minibatch.prompts,
                    minibatch.completions,
                    temperature=now.sampling.temperature,
                    kept=minibatch.kept,
                    with_entropy=with_entropy,
                    token_budget=self._budget(minibatch),
                )
            except (torch.OutOfMemoryError, RuntimeError) as error:
                self._make_room(error, minibatch)

    def _budget(self, minibatch: MiniBatch | CompletionBatch) -> int:
        """The token budget, or the longest sample where that is more."""
        return max(self.token_budget, longest(minibatch))

    def _make_room(self, error: Exception, minibatch: MiniBatch | CompletionBatch) -> None:
        """After running out of memory: give back what generation holds and halve the packs; else raise again."""
        if not out_of_memory(error):
            raise error
        self.optimizer.zero_grad(set_to_none=True)
        if self.token_budget <= max(SMALLEST_BUDGET, longest(minibatch)):
            raise OutOfMemoryError(
                f"memory ran out with a single sample of {longest(minibatch)} tokens; use a smaller model, "
                "model.gradient_checkpointing = true, [model.lora], or shorter answers (sampling.max_new_tokens)"
            ) from error
        self._release()
        self.token_budget = max(SMALLEST_BUDGET, self.token_budget // 2)
        self.say(f"memory ran out: the step is done again with a token budget of {self.token_budget:,}; same result")

    def _release(self) -> None:
        """Give back what generation holds, and what the allocator keeps."""
        self.release()
        if self.handle.device.type == "cuda":
            torch.cuda.empty_cache()

    def _norm(self, now: Recipe) -> float:
        gradients = [master.grad for master in self.masters.parameters() if master.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if now.optimizer.max_grad_norm is not None and bool(norm.isfinite()):
            torch.nn.utils.clip_grads_with_norm_(list(self.masters.parameters()), now.optimizer.max_grad_norm, norm)
        return float(norm)

    @staticmethod
    def _note(found: UpdateResult, values: dict[str, Tensor], statistics: dict[str, Tensor]) -> None:
        """Add a part's shares, still on the device: a number asked for now would make the GPU wait."""
        for sums, more in ((found.values, values), (found.statistics, statistics)):
            for name, value in more.items():
                sums[name] = sums.get(name, 0.0) + value.detach()


def _active_terms(now: Recipe, minibatch: MiniBatch) -> dict[str, bool]:
    how = now.loss
    weights = {"policy": how.policy_coef, "kl": how.kl_coef, "entropy": how.entropy_coef}
    return {**{name: bool(weight) for name, weight in weights.items()}, "preference": minibatch.pairs is not None}


def _rows(values: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """These rows of ``(n, T)``, cut to the width of a part and on its device."""
    return values[rows][:, : like.shape[1]].to(like.device)


def _on(pairs: PackedPairs | PairGradients | None, like: Tensor) -> PackedPairs | PairGradients | None:
    """A part's pairs on its device."""
    if isinstance(pairs, PairGradients):
        return replace(pairs, slopes=pairs.slopes.to(like.device))
    if pairs is None:
        return None
    device = like.device
    return PackedPairs(pairs.chosen.to(device), pairs.rejected.to(device), pairs.reference.to(device))


def _optional_rows(values: Tensor | None, rows: Tensor, like: Tensor) -> Tensor | None:
    return None if values is None else _rows(values, rows, like)
