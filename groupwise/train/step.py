"""One update: forward and backward over packs of samples, checks, clipping, AdamW.

Nothing that teaches nothing is computed. The gradient does not depend on how samples are packed; where memory runs
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
from groupwise.model.logprobs import TokenLogps, completion_logps, each_pack
from groupwise.model.precision import MasterWeights
from groupwise.model.prepared import Prepared, without_dropout
from groupwise.train.exact_kl import FACTOR_OF, ExactKL
from groupwise.train.failures import SMALLEST_BUDGET, NotFiniteError, OutOfMemoryError, out_of_memory
from groupwise.train.objective import Objective, PairSlopes, Part, WholePairs
from groupwise.train.pair_logps import pair_logps
from groupwise.train.pair_plan import PairPlan, PairRows, plan_pairs
from groupwise.train.reference import Reference
from groupwise.train.teaching import what_teaches
from groupwise.train.update import Gap, Update, compare_gradients
from groupwise.train.work import Answers, Work, WorkPairs, longest


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
        if len(work):
            self._know_samples(work, now, old)
        if work.pairs is not None and self.reference is not None:
            work.pairs.reference = self._reference_of_pairs(work, work.pairs, now, self.reference)

    def _know_samples(self, work: Work, now: Recipe, old: bool) -> None:
        old = old and bool(now.loss.policy_coef or now.loss.kl_coef)
        if old or now.loss.importance_cap is not None:
            work.old_logps = self._logps(work, now).logps.cpu()
        if now.loss.importance_cap is not None and work.old_logps is not None:
            ratio = torch.where(work.mask, work.old_logps - work.sampler_logps, 0.0).exp()
            work.weights = ratio.clamp(max=now.loss.importance_cap)
            if not old:
                work.old_logps = None
        estimated = now.loss.kl_coef and now.loss.kl not in FACTOR_OF
        if self.reference is not None and (estimated or now.masks.off_policy == "document"):
            with self._as_reference(self.reference):
                work.ref_logps = self._logps(work, now).logps.cpu()

    @contextmanager
    def _as_reference(self, reference: Reference) -> Iterator[None]:
        with reference.in_place(), without_dropout(self.prepared.model) if self.dropout else nullcontext():
            yield

    def _reference_of_pairs(self, work: Work, pairs: WorkPairs, now: Recipe, reference: Reference) -> Tensor:
        """The reference's summed log-probs ``(n, 2)`` of all pairs; what is known of them is not computed again."""
        with self._as_reference(reference):
            if work.ref_logps is not None:
                sampled = work.ref_logps.double().sum(1)[pairs.rows].view(-1, 2)
            else:
                sampled = self._sums_of_samples(work, pairs, now)
            fixed = self._sums_of_fixed(pairs) if pairs.fixed.reference is None else pairs.fixed.reference
        return torch.cat([sampled, fixed])

    def _sums_of_samples(self, work: Work, pairs: WorkPairs, now: Recipe) -> Tensor:
        """Summed log-probs ``(g, 2)`` of the samples that are in pairs, under the model as it is; no gradient."""
        members = torch.zeros(len(work), dtype=torch.bool)
        members[pairs.rows.flatten()] = True
        sums = torch.zeros(len(work), dtype=torch.float64)
        if bool(members.any()):
            sums[members] = self._logps(work.answers_of(members), now).logps.double().sum(1).cpu()
        return sums[pairs.rows].view(-1, 2)

    def _sums_of_pairs(self, work: Work, now: Recipe) -> Tensor:
        """The same ``(n, 2)`` of all pairs of a mini-batch."""
        if work.pairs is None:
            return torch.zeros(0, 2, dtype=torch.float64)
        return torch.cat([self._sums_of_samples(work, work.pairs, now), self._sums_of_fixed(work.pairs)])

    def _sums_of_fixed(self, pairs: WorkPairs) -> Tensor:
        """The same ``(f, 2)`` of a data set's pairs."""
        return pair_logps(self.prepared, pairs.fixed.pairs, token_budget=self.token_budget)

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
        policy_mask, totals = what_teaches(work, now, found, self._logps)
        objective = Objective(now, self.loss, totals)
        plan = plan_pairs(self.prepared, work, now, self._budget(work), lambda: self._sums_of_pairs(work, now))
        if not compare_terms:
            self._backward(work, now, objective, policy_mask, plan, found)
            return found
        gradients: dict[str, list[Tensor]] = {}
        for name in [name for name, active in _active_terms(now, work).items() if active]:
            self._backward(work, now, objective, policy_mask, plan, found, only=name, watch=not gradients)
            gradients[name] = [
                torch.zeros_like(master) if master.grad is None else master.grad for master in self.masters.parameters()
            ]
            self.optimizer.zero_grad(set_to_none=True)
        found.terms = compare_gradients(gradients)
        for master, *shares in zip(self.masters.parameters() if gradients else (), *gradients.values(), strict=True):
            master.grad = torch.stack(shares).sum(0)
        return found

    def _backward(
        self,
        work: Work,
        now: Recipe,
        objective: Objective,
        policy_mask: Tensor | None,
        plan: PairPlan | None,
        found: Update,
        *,
        only: str | None = None,
        watch: bool = True,
    ) -> None:
        """One pass over all packs, of all terms or of one; ``watch`` also takes the statistics, once per update."""
        for part, rows in self._parts(work, now, policy_mask, plan, fixed=watch or only == "preference"):
            values, statistics = objective.terms(part)
            if only is not None:
                values = {name: value for name, value in values.items() if name == only}
            learned = [value for value in values.values() if value.requires_grad]  # entropy may be only watched
            if learned:
                torch.stack(learned).sum().backward()  # type: ignore[no-untyped-call]
            self._note(found, values, statistics if watch else {})
            if found.gap is not None and watch and rows is not None:
                found.gap.add(part.logps, _rows(work.sampler_logps, rows, part.logps), part.mask)

    def _parts(
        self, work: Work, now: Recipe, policy_mask: Tensor | None, plan: PairPlan | None, *, fixed: bool
    ) -> Iterator[tuple[Part, Tensor | None]]:
        """Pack after pack: of the samples with the rows that they are, then of a data set's pairs."""
        if len(work):
            yield from self._sampled_parts(work, now, policy_mask, None if plan is None else plan.sampled)
        if fixed and work.pairs is not None and plan is not None and plan.fixed is not None:
            prompts, completions, _ = work.pairs.fixed_answers
            for rows, found in each_pack(self.prepared, prompts, completions, token_budget=self._budget(work)):
                yield Part(found.logps, found.mask, pairs=_on(plan.fixed.part(rows), found.logps)), None

    def _sampled_parts(
        self, work: Work, now: Recipe, policy_mask: Tensor | None, pairs: PairRows | None
    ) -> Iterator[tuple[Part, Tensor]]:
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
                    pairs=None if pairs is None else _on(pairs.part(rows), found.logps),
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
        if not out_of_memory(error):
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


def _active_terms(now: Recipe, work: Work) -> dict[str, bool]:
    how = now.loss
    weights = {"policy": how.policy_coef, "kl": how.kl_coef, "entropy": how.entropy_coef}
    return {**{name: bool(weight) for name, weight in weights.items()}, "preference": work.pairs is not None}


def _rows(values: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """These rows of ``(n, T)``, cut to the width of a part and on its device."""
    return values[rows][:, : like.shape[1]].to(like.device)


def _on(pairs: WholePairs | PairSlopes | None, like: Tensor) -> WholePairs | PairSlopes | None:
    """A part's pairs on its device."""
    if isinstance(pairs, PairSlopes):
        return replace(pairs, slopes=pairs.slopes.to(like.device))
    if pairs is None:
        return None
    device = like.device
    return WholePairs(pairs.chosen.to(device), pairs.rejected.to(device), pairs.reference.to(device))


def _optional_rows(values: Tensor | None, rows: Tensor, like: Tensor) -> Tensor | None:
    return None if values is None else _rows(values, rows, like)
