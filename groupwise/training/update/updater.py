"""One update: forward and backward over packs of samples, a finite check, gradient clipping, the optimizer step.

Samples without a learning signal are not computed. The gradient does not depend on how samples are packed: if memory
runs out, the packs are halved and the update is repeated. The weights change only after all values are known to be
finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from groupwise.config import Recipe
from groupwise.core.losses import Loss
from groupwise.distributed.ranks import Ranks
from groupwise.errors import MAX_GRADIENT_NORM, NotFiniteError
from groupwise.model.device import float64_device
from groupwise.model.handle import ModelHandle, eval_mode
from groupwise.model.logprobs import TokenLogps, completion_logps, iter_pack_states, iter_packs
from groupwise.model.precision import MasterWeights, name_not_finite
from groupwise.text import Say
from groupwise.training.errors import SMALLEST_BUDGET, OutOfMemoryError, halve_budget, retry_with_less_memory
from groupwise.training.preference.packing import PairIndex, PairLayout, plan_pair_layout
from groupwise.training.preference.reference_cache import pair_completions, pair_logps
from groupwise.training.update.correction import correct_sampler, corrects_sampler, weights_by_sampler
from groupwise.training.update.entropy import EntropyController
from groupwise.training.update.exact_kl import EXACT_KL_FACTORS, ExactKL
from groupwise.training.update.local_statistics import local_statistics, sample_statistics
from groupwise.training.update.minibatch import CompletionBatch, MiniBatch, longest_sequence
from groupwise.training.update.objective import (
    MicroBatch,
    Objective,
    ObjectiveTerm,
    active_terms,
    needs_old_logps,
    needs_ref_logps,
)
from groupwise.training.update.policy_masks import build_policy_mask
from groupwise.training.update.reference import Reference
from groupwise.training.update.result import LogProbMismatch, UpdateResult, gradient_statistics
from groupwise.training.update.shares import divide_logps, share_of
from groupwise.training.update.teacher import Teacher, TeacherKL, TeacherLogps, ask_server

_Result = TypeVar("_Result")

LARGE_WEIGHT = 1e9  # of a term or an advantage, which is then the likely reason of a loss that is not finite


class Updater:
    """Updates the weights. ``token_budget``, of one forward and backward pass, stays lower once memory ran out."""

    def __init__(
        self,
        handle: ModelHandle,
        masters: MasterWeights,
        optimizer: torch.optim.Optimizer,
        reference: Reference | None,
        token_budget: int,
        loss: Loss,
        *,
        teacher: Teacher | None = None,
        ranks: Ranks | None = None,
        dropout: bool = False,
        release: Callable[[], None] = lambda: None,
        say: Say = lambda text: None,
    ) -> None:
        self.ranks = ranks or Ranks()
        self.handle, self.masters, self.optimizer, self.reference = handle, masters, optimizer, reference
        self.token_budget, self.loss, self.teacher, self.dropout = token_budget, loss, teacher, dropout
        self.full_budget = token_budget  # before memory ran out
        self.release, self.say = release, say
        self.entropy = EntropyController()
        self.optimizer_steps = 0  # begun by this process: until the next one, the weights are the same
        self.progress: Callable[[int, int], None] | None = None  # called with the completions done, and their number

    def precompute_logps(self, minibatch: MiniBatch, step_recipe: Recipe, *, old: bool) -> None:
        """Add the log-probs that must be known before the first update of a batch: ``old`` ones if the batch is used
        more than once, the reference's, a teacher's, and importance weights.

        With asynchronous rollouts, older weights have sampled: the ratio is π_θ / π_sampler, as in TRL and prime-rl, or
        with importance weights between the sampler and the current policy, π_θ / π_old (decoupled PPO, AReaL). The
        ratio of DPPO (masks.divergence) is also that to the sampler."""
        needs_old = needs_old_logps(step_recipe)
        corrected, pairs = corrects_sampler(step_recipe), minibatch.pairs
        old = old and needs_old
        to_sampler = step_recipe.train.max_staleness or step_recipe.masks.divergence is not None
        if needs_old and to_sampler and not weights_by_sampler(step_recipe):
            old, minibatch.old_logps = False, minibatch.sampler_logps
        if len(minibatch) and (old or corrected):
            logps = self._logps(minibatch, step_recipe).logps.cpu()
            minibatch.old_logps = logps if old else minibatch.old_logps
            if corrected:
                minibatch.weights, minibatch.correction = correct_sampler(
                    logps, minibatch.sampler_logps, minibatch.mask, step_recipe
                )
        if len(minibatch) and self.teacher is not None and step_recipe.distillation.weight:
            minibatch.teacher = self._teacher_logps(self.teacher, minibatch, step_recipe)
        if self.reference is None:
            return
        with self.reference.in_place(), eval_mode(self.handle.model) if self.dropout else nullcontext():
            if len(minibatch) and needs_ref_logps(step_recipe):
                minibatch.ref_logps = self._logps(minibatch, step_recipe).logps.cpu()
            if len(pairs):
                if minibatch.ref_logps is not None:
                    sampled = minibatch.ref_logps.double().sum(1)[pairs.rows]
                else:
                    sampled = self._sampled_pair_logps(minibatch, step_recipe)
                dataset = pairs.dataset.reference
                if dataset is None:
                    dataset = self._dataset_pair_logps(minibatch)
                pairs.reference = torch.cat([sampled, dataset])

    def _teacher_logps(self, teacher: Teacher, minibatch: MiniBatch, step_recipe: Recipe) -> TeacherLogps | None:
        """What is asked of the teacher once; its distributions over the vocabulary are computed with each pack."""
        settings, prompts, completions = step_recipe.distillation, minibatch.teacher_prompts, minibatch.completions
        if teacher.server is not None:
            top_k = settings.top_k if settings.kl == "full" else 0
            return ask_server(teacher.server, prompts, completions, top_k, self.ranks)
        if settings.kl == "full":
            return None
        with teacher.in_place(self.handle.model, self.reference, self.dropout):
            batch = CompletionBatch(prompts, completions, minibatch.kept)
            return TeacherLogps(self._logps(batch, step_recipe, handle=teacher.handle).logps.cpu())

    def _all_pair_logps(self, minibatch: MiniBatch, step_recipe: Recipe) -> Tensor:
        """Summed log-probs ``(n, 2)`` of all pairs under the model in place, without gradient."""
        return torch.cat([self._sampled_pair_logps(minibatch, step_recipe), self._dataset_pair_logps(minibatch)])

    def _sampled_pair_logps(self, minibatch: MiniBatch, step_recipe: Recipe) -> Tensor:
        members = torch.zeros(len(minibatch), dtype=torch.bool)
        members[minibatch.pairs.rows.flatten()] = True
        sums = torch.zeros(len(minibatch), dtype=torch.float64)
        if bool(members.any()):
            logps = self._logps(minibatch.select(members), step_recipe).logps
            sums[members] = logps.to(float64_device(logps.device)).double().sum(1).cpu()
        return sums[minibatch.pairs.rows]

    def _dataset_pair_logps(self, minibatch: MiniBatch) -> Tensor:
        pairs = minibatch.pairs.dataset.pairs
        return pair_logps(self.handle, pairs, token_budget=self.token_budget, ranks=self.ranks)

    @torch.no_grad()
    def _logps(
        self,
        batch: MiniBatch | CompletionBatch,
        step_recipe: Recipe,
        with_entropy: bool = False,
        *,
        handle: ModelHandle | None = None,
    ) -> TokenLogps:
        """Log-probs under the model in place, or under that of another ``handle``."""
        model = handle or self.handle

        def compute(part: MiniBatch | CompletionBatch) -> TokenLogps:
            return completion_logps(
                model,
                part.prompts,
                part.completions,
                temperature=step_recipe.sampling.temperature,
                kept=part.kept,
                with_entropy=with_entropy,
                token_budget=self._budget(batch),
            )

        sharded = model.sharded is not None
        return self._retry_with_smaller_packs(lambda: divide_logps(self.ranks, batch, compute, sharded=sharded), batch)

    def update(
        self, minibatch: MiniBatch, step_recipe: Recipe, *, check: bool = False, log_term_gradients: bool = False
    ) -> UpdateResult:
        """Forward, backward, one optimizer step.

        check: measure the mismatch with the sampler's log-probs.
        log_term_gradients: compute each term's gradient separately, to report norms and cosines.
        """
        if minibatch.empty:
            result = self._zero_gradient()
        else:
            applied = self.entropy.apply(step_recipe)
            result = self._retry_with_smaller_packs(
                lambda: self._gradient(minibatch, applied, check, log_term_gradients), minibatch
            )
        norm = self.masters.clip_gradient(step_recipe.optimizer.max_grad_norm)
        limit = math.inf if step_recipe.optimizer.max_grad_norm is None else step_recipe.optimizer.max_grad_norm
        values = [norm, *result.values.values()]
        if not all(map(math.isfinite, values)) or min(norm, limit) > MAX_GRADIENT_NORM:
            self.masters.zero_grad()
            if step_recipe.train.on_non_finite == "stop":
                raise NotFiniteError(self._reason_not_finite(minibatch, step_recipe, result, norm))
            result.skipped = True
            return result
        result.grad_norm = norm
        self.optimizer_steps += 1
        with self.ranks.stage("stepping the optimizer"):
            self._optimizer_step()
        rates = ", ".join(f"{rate:g}" for rate in sorted({group["lr"] for group in self.optimizer.param_groups}))
        self.masters.check_finite("the update", f"Lower optimizer.learning_rate (now {rates})")
        self.masters.sync_to_model()
        self.masters.zero_grad()
        self.entropy.observe(float(result.statistics.get("entropy", math.nan)), step_recipe)
        result.statistics |= local_statistics(minibatch, result.samples, step_recipe, self.loss)
        return result

    def _zero_gradient(self) -> UpdateResult:
        for master in self.masters.parameters():
            master.grad = torch.zeros_like(master)
        return UpdateResult()

    def _gradient(
        self, minibatch: MiniBatch, step_recipe: Recipe, check: bool, log_term_gradients: bool
    ) -> UpdateResult:
        self.masters.zero_grad()
        result = UpdateResult(mismatch=LogProbMismatch() if check else None)
        policy_mask, totals = build_policy_mask(minibatch, step_recipe, result, self._logps)
        objective = Objective(step_recipe, self.loss, totals)
        share, budget = share_of(minibatch, self.ranks), self._budget(minibatch)
        layout = plan_pair_layout(self.handle, minibatch, share, step_recipe, budget, self._all_pair_logps, self.ranks)
        if policy_mask is not None:
            policy_mask = policy_mask[share.rows]
        if not log_term_gradients:
            self._backward(share.minibatch, objective, policy_mask, layout, result)
        # Otherwise each term's gradient needs a pass over all packs; their sum is the gradient of the objective.
        gradients: dict[str, list[Tensor]] = {}
        for term in active_terms(step_recipe) if log_term_gradients else ():
            if term.from_pairs and not len(minibatch.pairs):
                continue
            self._backward(share.minibatch, objective, policy_mask, layout, result, only=term, record=not gradients)
            gradients[term.name] = [
                torch.zeros_like(master) if master.grad is None else master.grad for master in self.masters.parameters()
            ]
            self.masters.zero_grad()
        result.term_gradients = gradient_statistics(gradients, self.masters)
        for master, *shares in zip(self.masters.parameters() if gradients else (), *gradients.values(), strict=True):
            master.grad = torch.stack(shares).sum(0)
        result.add_up(self.ranks, share.rows, len(minibatch))
        return result

    def _backward(
        self,
        minibatch: MiniBatch,
        objective: Objective,
        policy_mask: Tensor | None,
        layout: PairLayout,
        result: UpdateResult,
        *,
        only: ObjectiveTerm | None = None,
        record: bool = True,
    ) -> None:
        """One pass over all packs, of all terms or of one. ``record``: also record statistics, once per update."""
        with self.ranks.stage("updating", exchanges=self.handle.sharded is not None):
            self._run_packs(minibatch, objective, policy_mask, layout, result, only, record)
        self.masters.reduce_gradients()

    def _run_packs(
        self,
        minibatch: MiniBatch,
        objective: Objective,
        policy_mask: Tensor | None,
        layout: PairLayout,
        result: UpdateResult,
        only: ObjectiveTerm | None,
        record: bool,
    ) -> None:
        with_dataset, done = record or (only is not None and only.from_pairs), 0
        for micro_batch in self._micro_batches(minibatch, objective.recipe, policy_mask, layout, with_dataset):
            if not len(micro_batch.logps):  # all ranks run as many passes, some of them without samples
                micro_batch.logps.sum().backward()  # type: ignore[no-untyped-call]
                continue
            values, statistics = objective.terms(micro_batch)
            if only is not None:
                values = {name: value for name, value in values.items() if name == only.name}
            trained = [value for value in values.values() if value.requires_grad]
            if not trained and self.handle.sharded is not None:  # other ranks run the backward pass of their packs
                trained = [micro_batch.logps[:0].sum()]
            if trained:
                torch.stack(trained).sum().backward()  # type: ignore[no-untyped-call]
            # Sums stay on the device: reading a number here would make the CPU wait for the GPU.
            for sums, shares in ((result.values, values), (result.statistics, statistics if record else {})):
                for name, value in shares.items():
                    sums[name] = sums.get(name, 0.0) + value.detach()
            if record and micro_batch.rows is not None and minibatch.local_batch is not None:
                result.add_samples(sample_statistics(objective, micro_batch), micro_batch.rows, len(minibatch))
            if result.mismatch is not None and record and micro_batch.sampler_logps is not None:
                result.mismatch.add(micro_batch.logps, micro_batch.sampler_logps, micro_batch.mask)
            if self.progress is not None and micro_batch.advantages is not None:
                done += len(micro_batch.advantages)
                self.progress(done, len(minibatch))

    def _micro_batches(
        self,
        minibatch: MiniBatch,
        step_recipe: Recipe,
        policy_mask: Tensor | None,
        layout: PairLayout,
        with_dataset: bool,
    ) -> Iterator[MicroBatch]:
        """Pack after pack: the samples, then the pairs of a data set."""
        sampled, dataset = layout
        if self._any(minibatch.prompts):
            yield from self._sample_micro_batches(minibatch, step_recipe, policy_mask, sampled)
        if with_dataset and self._any(minibatch.pairs.dataset.pairs):
            prompts, completions = pair_completions(minibatch.pairs.dataset.pairs)
            for rows, pack in iter_packs(self.handle, prompts, completions, token_budget=self._budget(minibatch)):
                yield MicroBatch(pack.logps, pack.mask, pairs=dataset.for_pack(rows, float64_device(pack.logps.device)))

    def _sample_micro_batches(
        self, minibatch: MiniBatch, step_recipe: Recipe, policy_mask: Tensor | None, pairs: PairIndex
    ) -> Iterator[MicroBatch]:
        exact_kl, teacher_kl = self._exact_kl(minibatch, step_recipe), self._teacher_kl(minibatch, step_recipe)
        teacher_logps = None if minibatch.teacher is None or teacher_kl is not None else minibatch.teacher.logps
        packs = iter_packs(
            self.handle,
            minibatch.prompts,
            minibatch.completions,
            temperature=step_recipe.sampling.temperature,
            kept=minibatch.kept,
            with_entropy=True,
            with_states=exact_kl is not None or teacher_kl is not None,
            token_budget=self._budget(minibatch),
        )
        for rows, pack in packs:
            yield MicroBatch(
                logps=pack.logps,
                mask=pack.mask,
                advantages=minibatch.advantages[rows].to(pack.logps)
                if minibatch.token_advantages is None
                else minibatch.token_advantages[rows][:, : pack.logps.shape[1]].to(pack.logps),
                prompt_tokens=minibatch.prompt_tokens[rows].to(pack.logps.device),
                policy_mask=_rows(policy_mask, rows, pack.logps),
                sampler_logps=_rows(minibatch.sampler_logps, rows, pack.logps),
                old_logps=_rows(minibatch.old_logps, rows, pack.logps),
                ref_logps=_rows(minibatch.ref_logps, rows, pack.logps),
                entropy=pack.entropy,
                local_lengths=None if minibatch.local_lengths is None else minibatch.local_lengths[rows].to(pack.logps),
                exact_kl=None if exact_kl is None or pack.states is None else exact_kl.next(pack.states, pack.mask),
                pairs=pairs.for_pack(rows, float64_device(pack.logps.device)),
                teacher_logps=_rows(teacher_logps, rows, pack.logps),
                teacher_kl=None
                if teacher_kl is None or pack.states is None
                else teacher_kl.of(rows, pack.states, pack.mask),
                rows=rows,
            )

    def _any(self, share: Sequence[Any]) -> bool:
        """Whether there is something to compute: on this rank, or on any if the weights are sharded."""
        return bool(share) if self.handle.sharded is None else self.handle.sharded.most(len(share)) > 0

    def _exact_kl(self, minibatch: MiniBatch, step_recipe: Recipe) -> ExactKL | None:
        loss = step_recipe.loss
        if self.reference is None or not loss.kl_coef or loss.kl not in EXACT_KL_FACTORS:
            return None
        ref_states = iter_pack_states(
            self.handle, minibatch.prompts, minibatch.completions, token_budget=self._budget(minibatch)
        )
        temperature = step_recipe.sampling.temperature
        return ExactKL(self.handle, self.reference, ref_states, loss.kl, temperature, self.dropout)

    def _teacher_kl(self, minibatch: MiniBatch, step_recipe: Recipe) -> TeacherKL | None:
        if self.teacher is None or not step_recipe.distillation.weight or step_recipe.distillation.kl != "full":
            return None
        batch = CompletionBatch(minibatch.teacher_prompts, minibatch.completions, None)
        return TeacherKL(
            self.teacher,
            self.handle,
            self.reference,
            batch.prompts,
            batch.completions,
            minibatch.teacher,
            step_recipe.sampling.temperature,
            self._budget(batch),
            self.dropout,
        )

    def _reason_not_finite(self, minibatch: MiniBatch, step_recipe: Recipe, result: UpdateResult, norm: float) -> str:
        terms = ", ".join(f"{name} {value:g}" for name, value in result.values.items())
        start = f"the gradient's norm is {norm:g} (terms: {terms}); the weights have not changed."
        weights = [(term.weight, term.weight_in(step_recipe)) for term in active_terms(step_recipe)]
        if step_recipe.preference.weight:
            weights.append(("preference.beta", step_recipe.preference.beta))
        large = [f"{setting} = {weight:g}" for setting, weight in weights if abs(weight) > LARGE_WEIGHT]
        custom = step_recipe.loss.name
        advantage = float(minibatch.advantages.abs().max()) if len(minibatch) else 0.0
        if (name := name_not_finite(self.handle.model)) is not None:
            return f"{start} The weight {name} of the model holds NaN or an infinity: load another copy of it"
        if large:
            return f"{start} Lower {', '.join(large)}"
        if ":" in custom and not math.isfinite(result.values.get("policy", 0.0)):
            return f"{start} The loss {custom} returned NaN or an infinity for a token: mend it"
        if advantage > LARGE_WEIGHT:
            return (
                f"{start} The largest advantage is {advantage:g}: scale the rewards, or use advantages.scale = 'group'"
            )
        return (
            f"{start} Lower optimizer.learning_rate, look at the rewards of this step, or skip such updates with "
            "train.on_non_finite = 'skip'"
        )

    def _optimizer_step(self) -> None:
        """Step each parameter group on its own: a group that was stepped must not be stepped again if a later one runs
        out of memory. Other optimizers than AdamW may need all groups at once."""
        groups = self.optimizer.param_groups
        if not isinstance(self.optimizer, torch.optim.AdamW):
            return self._step_group()
        try:
            for group in groups:
                self.optimizer.param_groups = [group]
                self._step_group()
        finally:
            self.optimizer.param_groups = groups

    def _step_group(self) -> None:
        """The first step allocates two numbers per weight: if they do not fit, generation's memory is released."""
        before = set(self.optimizer.state)
        try:
            self.optimizer.step()
        except torch.OutOfMemoryError:
            for weight in self.optimizer.state.keys() - before:
                del self.optimizer.state[weight]  # perhaps half initialised
            self._release_memory()
            try:
                self.optimizer.step()
            except torch.OutOfMemoryError as error:
                raise OutOfMemoryError(
                    "memory ran out for the optimizer, which keeps 8 bytes for every trained weight; use a smaller "
                    "model or [model.lora], or give the GPU to this run alone"
                ) from error

    def _budget(self, batch: MiniBatch | CompletionBatch) -> int:
        """The token budget, or the longest sequence if that is more."""
        return max(self.token_budget, longest_sequence(batch))

    def _retry_with_smaller_packs(self, compute: Callable[[], _Result], batch: MiniBatch | CompletionBatch) -> _Result:
        """``compute()``, repeated with half the token budget whenever memory runs out."""
        longest = longest_sequence(batch)

        def shrink() -> None:
            self.masters.zero_grad()
            self._release_memory()
            self.token_budget = halve_budget(self.token_budget)
            self.say(f"memory ran out: the step is repeated with a token budget of {self.token_budget:,}; same result")

        try:
            return retry_with_less_memory(
                compute,
                can_shrink=lambda: self.token_budget > max(SMALLEST_BUDGET, longest),
                shrink=shrink,
                too_large=lambda: (
                    f"memory ran out with a single sample of {longest} tokens; use a smaller model, [model.lora], "
                    "model.gradient_checkpointing = true, or shorter completions (sampling.max_new_tokens)"
                ),
            )
        except OutOfMemoryError:
            self.masters.zero_grad()
            raise

    def _release_memory(self) -> None:
        """Release what generation holds, and the allocator's cache."""
        self.release()
        torch.cuda.empty_cache()


def _rows(values: Tensor | None, rows: Tensor, like: Tensor) -> Tensor | None:
    """These rows of ``(n, T)``, cut to the width of ``like`` and on its device."""
    return None if values is None else values[rows][:, : like.shape[1]].to(like.device)
