"""One update: forward and backward over packs of samples, checks, clipping, AdamW.

Nothing that teaches nothing is computed. The gradient does not depend on how samples are packed; where memory runs
out, the packs are made half as large and the update is done again. Weights move only once everything is known to be
finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from groupwise.config import Recipe
from groupwise.core.losses import Loss
from groupwise.core.masks import high_entropy_mask, off_policy_sequence_mask
from groupwise.errors import GroupwiseError
from groupwise.model.logprobs import TokenLogps, completion_logps, each_pack
from groupwise.model.precision import MasterWeights
from groupwise.model.prepared import Prepared, without_dropout
from groupwise.train.exact_kl import FACTOR_OF, ExactKL
from groupwise.train.objective import Objective, Part, Totals
from groupwise.train.reference import Reference
from groupwise.train.update import Gap, Update, compare_gradients
from groupwise.train.work import Answers, Work, longest

SMALLEST_BUDGET = 64


class NotFiniteError(GroupwiseError, ArithmeticError):
    """A loss or gradient is NaN or infinite; the weights have not moved."""


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
            logps, entropy = self._current(work, now)
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
            if masks.high_entropy is not None:
                # Chosen among tokens that could teach, so that skipping the others changes nothing.
                could = teaching & (work.advantages != 0)[:, None]
                teaching = high_entropy_mask(entropy, could, top_fraction=masks.high_entropy)
                if now.loss.denominator == "policy_mask":
                    totals = replace(
                        totals,
                        policy_tokens=int(teaching.sum()),
                        policy_sequences=int(teaching.any(1).sum()),
                    )
        if work.weights is not None:
            return teaching * work.weights, totals
        return (None if bool((teaching == work.mask).all()) else teaching), totals

    def _current(self, work: Work, now: Recipe) -> tuple[Tensor, Tensor]:
        """Log-probs and entropy under the policy as it is now ``(n, T)``, of the samples that a mask may take.

        V3.2's looks at what did worse than its group alone, and entropy counts where something teaches; the others keep
        the sampler's log-probs, which no mask takes.
        """
        masks = now.masks
        chosen = work.allowed & (work.advantages < 0 if masks.off_policy == "v3.2" else masks.off_policy is not None)
        if masks.high_entropy is not None:
            chosen = chosen | (work.allowed & (work.advantages != 0))
        logps, entropy = work.sampler_logps.clone(), torch.zeros(work.mask.shape)
        if bool(chosen.any()):
            answers = work.answers_of(chosen)
            found = self._logps(answers, now, with_entropy=masks.high_entropy is not None)
            at = (chosen.nonzero(), torch.arange(found.logps.shape[1]))
            logps = logps.to(found.logps.dtype)
            logps[at] = found.logps.cpu()
            if found.entropy is not None:
                entropy = entropy.to(found.entropy.dtype)
                entropy[at] = found.entropy.cpu()
        return logps, entropy

    def _near(self, work: Work, now: Recipe, logps: Tensor) -> Tensor:
        """Which samples the off-policy mask keeps ``(n,)``."""
        rule, threshold = now.masks.off_policy or "v3.2", now.masks.off_policy_threshold
        other = work.sampler_logps if rule == "v3.2" or work.ref_logps is None else work.ref_logps
        return off_policy_sequence_mask(logps, other, work.advantages, work.mask, threshold=threshold, rule=rule)

    @torch.no_grad()
    def _logps(self, work: Work | Answers, now: Recipe, *, with_entropy: bool = False) -> TokenLogps:
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

    def _budget(self, work: Work | Answers) -> int:
        """The token budget, or the longest sample where that is more."""
        return max(self.token_budget, longest(work))

    def _make_room(self, error: Exception, work: Work | Answers) -> None:
        """After running out of memory: give back what generation holds and halve the packs; else raise again."""
        if isinstance(error, GroupwiseError) or not _out_of_memory(error):
            raise error
        self.optimizer.zero_grad(set_to_none=True)
        if self.token_budget <= max(SMALLEST_BUDGET, longest(work)):
            raise OutOfMemoryError(
                f"memory ran out with a single sample of {longest(work)} tokens; use a smaller model, "
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


def _rows(values: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """These rows of ``(n, T)``, cut to the width of a part and on its device."""
    return values[rows][:, : like.shape[1]].to(like.device)


def _optional_rows(values: Tensor | None, rows: Tensor, like: Tensor) -> Tensor | None:
    return None if values is None else _rows(values, rows, like)
