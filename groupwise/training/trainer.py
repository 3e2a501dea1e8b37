"""The loop: sample, score, compare, learn, record; resumable to the bit.

`Trainer` is built from a recipe and read from top to bottom: `steps` is the run, `_step` is one step of GRPO. What
each line of it does in detail stands in the module of that name beside this one. Every random choice of a step comes
from (seed, step), so a run that stops after step k and goes on is the run that never stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import torch

from groupwise.algorithms import find_algorithm
from groupwise.config import Recipe, make_recipe, samples_answers
from groupwise.data import Order
from groupwise.errors import ConfigError
from groupwise.evaluate import REWARD, Evaluation
from groupwise.generate import Engine
from groupwise.grouping.workers import make_grouper
from groupwise.model.logprobs import default_token_budget
from groupwise.model.precision import MasterWeights
from groupwise.rundir import RunDir, read_metrics
from groupwise.rundir.signals import StopRequest, stop_on_signals
from groupwise.tasks.base import Row, Task
from groupwise.training.callbacks import Callback, RunResult, StepReport
from groupwise.training.components import (
    RunComponents,
    check_embedder_of,
    check_rows,
    compares_texts,
    count_steps,
    load_components,
    make_optimizer,
    make_schedule,
    set_learning_rate,
)
from groupwise.training.display.base import Display, LineDisplay, RunFacts
from groupwise.training.evaluation import evaluate_run, metric_of
from groupwise.training.monitor.health_checks import HealthChecks
from groupwise.training.monitor.log_prob_mismatch import has_dropout, mismatch_warning
from groupwise.training.monitor.metrics import rollout_table, step_metrics, with_aliases
from groupwise.training.monitor.question_log import QuestionLog
from groupwise.training.monitor.timer import StepTimer
from groupwise.training.preference.dataset_pairs import PairSampler, load_reference_logps
from groupwise.training.rollout.advantages import compare, find_advantage, find_grouping
from groupwise.training.rollout.batch import Batch, GroupAdvantages, empty_batch
from groupwise.training.rollout.collector import RolloutCollector, RolloutResult, derive_seed
from groupwise.training.sft import SupervisedFineTuning, run_sft
from groupwise.training.store import checkpoint
from groupwise.training.store.export import finish_run, open_run, write_recipe
from groupwise.training.store.recorder import PREFERRED, Recorder, rewind
from groupwise.training.store.run_state import resume_run, save_run
from groupwise.training.update.minibatch import MiniBatch, build_minibatch
from groupwise.training.update.reference import Reference
from groupwise.training.update.result import UpdateResult
from groupwise.training.update.updater import Updater


class Trainer:
    """A run of GRPO. ``run()`` does it all; ``for report in trainer.steps()`` leaves the loop to you.

    task: in place of the one that the recipe names. rewards: functions beside the task's and the recipe's.
    folder, resume, overwrite: where the run is kept, and whether to go on with one or to begin it anew.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        task: Task | None = None,
        rewards: Sequence[Callable[..., Any]] = (),
        callbacks: Sequence[Callback] = (),
        display: Display | None = None,
        folder: str | Path | None = None,
        resume: bool = False,
        overwrite: bool = False,
    ) -> None:
        self.recipe, self.callbacks = recipe, list(callbacks)
        self.display = display or LineDisplay(sys.stdout)
        self.say = self.display.say
        check_embedder_of(recipe)
        self.components: RunComponents = load_components(recipe, task=task, rewards=rewards, say=self.say)
        self.samples = self.components.samples  # else there are pairs of a data set alone
        check_rows(self.components)
        self.advantage = find_advantage(recipe.advantages.function)
        self.grouping = find_grouping(recipe.advantages.grouping)
        self.metric = metric_of(self.components)
        self.aliases = find_algorithm(recipe.algorithm).metrics
        self.sft = SupervisedFineTuning(self.components) if recipe.sft.steps or recipe.sft.epochs else None
        self.supervised = recipe.train.steps == 0  # the warm-up is the run, and its steps are the run's
        self.grouper = make_grouper(recipe.grouping, self.say) if compares_texts(recipe) else None
        self.run_dir: RunDir = open_run(recipe, folder, resume=resume, overwrite=overwrite)
        self.resuming = resume

        handle = self.components.handle
        self._prepare_model()
        self.masters = MasterWeights(self.components.model)
        self.optimizer = make_optimizer(recipe, self.components.model, self.masters, self.say)
        self.schedule = make_schedule(recipe)
        self.engine = Engine(handle, max_num_seqs=recipe.sampling.max_num_seqs)
        self.order = Order(max(1, len(self.components.train)), shuffle=recipe.data.shuffle, seed=recipe.train.seed)
        self.pairs = PairSampler(self.components.pairs, recipe)
        self.sampler = RolloutCollector(
            self.engine,
            self.components.tokenizer,
            self.components.train.rows,
            self.components.train.prompts,
            self.components.scorer,
            self.order,
            self.compare,
            prompt_column=recipe.data.prompt,
            seed=recipe.train.seed,
            stop=self.components.stop,
            overlong=recipe.scoring.overlong_buffer > 0,
            grouper=self.grouper,
            say=self.say,
        )
        self.reference: Reference | None = None
        self.updater = Updater(
            handle,
            self.masters,
            self.optimizer,
            None,
            recipe.train.token_budget or default_token_budget(handle),
            self.components.loss,
            dropout=has_dropout(recipe),
            release=self.engine.release,
            say=self.say,
        )
        self.timer = StepTimer(handle.device)
        self.records: Recorder | None = None
        self.stopping = StopRequest()
        self.step = 0  # steps done
        self.tokens = 0  # tokens sampled
        self.best: dict[str, Any] | None = None  # {"step": …, "value": …, "metrics": {…}}
        self.worse = 0  # evaluations since the best one
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.evaluated_at = -1
        self.saved: tuple[int, dict[str, Any]] | None = None  # the last checkpoint's step and state
        self.warned = False
        self.checks = HealthChecks(self.components.task.metric)
        self.questions = QuestionLog(self.components.train.rows, self.components.task.metric)
        self.total_steps = count_steps(self.components)
        if self.supervised and self.sft is not None:
            self.total_steps = self.sft.steps

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Row],
        rewards: Callable[..., Any] | Sequence[Callable[..., Any]],
        *,
        model: str = "tiny",
        held_out: Sequence[Row] = (),
        algorithm: str = "dapo",
        callbacks: Sequence[Callback] = (),
        folder: str | Path | None = None,
        resume: bool = False,
        **sections: Mapping[str, Any],
    ) -> Trainer:
        """A trainer without a recipe file: rows with a ``prompt``, a reward or several, and any section as a keyword.

        ``Trainer.from_rows(rows, reward, model="smollm2-135m", train={"steps": 50}, loss={"kl_coef": 0.01})``
        """
        table: dict[str, Any] = {**sections, "algorithm": algorithm}
        table["model"] = {"source": model, **sections.get("model", {})}
        return cls(
            make_recipe(table, where="from_rows"),
            task=Task("rows", list(rows), list(held_out)),
            rewards=[rewards] if callable(rewards) else list(rewards),
            callbacks=callbacks,
            folder=folder,
            resume=resume,
        )

    # --- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> RunResult:
        """Train to the end, or until Ctrl-C or SIGTERM; then the finished step is saved and `RunResult` says so."""
        with self.display, stop_on_signals(self.say) as self.stopping:
            try:
                for _ in self.steps():
                    pass
                return self.finish()
            finally:
                self.close()

    def steps(self) -> Iterator[StepReport]:
        """One `StepReport` after another, up to the last step. Call `finish` behind the loop for the model, and `close`."""
        self._begin()
        while self.step < self.total_steps and not self.stopping and not self._out_of_patience():
            report = self._step()
            self._after(report)
            yield report

    def finish(self) -> RunResult:
        """Evaluate and save what has not been yet, and export the model, unless somebody asked for the end."""
        if not self.stopping and self.evaluated_at != self.step:
            self.evaluate()
        if self.step:
            self.save()
        return finish_run(self)

    def close(self) -> None:
        if self.records is not None:
            self.records.close()
        self.masters.close()
        self.engine.release()
        if self.grouper is not None:
            self.grouper.close()
        self.run_dir.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- one step ----------------------------------------------------------------------------------------------------

    def _step(self) -> StepReport:
        now = self.now()
        if samples_answers(now):
            sampled = self.sampler.sample(self.step, now, self.state_for_rewards(), self.timer)
        else:
            sampled = RolloutResult(empty_batch(len(self.sampler.names)))
        batch = sampled.batch
        group_advantages = self.compare(batch, now)
        if len(batch):
            self.call("on_rollout", batch, group_advantages)
        with self.timer("train"):
            minibatches, updates = self._learn(batch, group_advantages, now)
        self.step += 1
        self.tokens += sampled.tokens
        if self.reference is not None and now.reference.refresh_every and self.step % now.reference.refresh_every == 0:
            self.reference.refresh(now.reference.mix)
        self.questions.observe(batch, group_advantages)
        for others in sampled.left_out:
            self.questions.observe(others, self.compare(others, now))
        metrics = step_metrics(sampled, group_advantages, self.sampler.names, minibatches, updates, now)
        metrics |= {
            "learning_rate": self.optimizer.param_groups[0]["lr"],  # the embeddings' group, if any, is the last
            "temperature": now.sampling.temperature,
            "samples_per_prompt": now.sampling.samples_per_prompt,
            "kl_coef": now.loss.kl_coef,
            "num_tokens": self.tokens,
            "epoch": self.order.epoch if self.samples else self.pairs.epoch,
            "token_budget": self.updater.token_budget,
        }
        if self.reference is not None:
            metrics["reference_refreshes"] = self.reference.refreshes
        timing = self.timer.take()
        metrics |= {"tokens_per_second": sampled.tokens / timing["step_time"], **timing}
        metrics = with_aliases(metrics, self.aliases)
        self._warn_about(metrics, now, sampled)
        return StepReport(self.step, metrics, batch, group_advantages)

    def compare(self, batch: Batch, now: Recipe) -> GroupAdvantages:
        """Who is better than whom, and who may teach, by the recipe of this step."""
        return compare(
            batch,
            now,
            self.sampler.weights,
            advantage=self.advantage,
            grouping=self.grouping,
            grades=self.components.task.grades,
            metric=self.components.task.metric,
            ranked_by=None if now.preference.reward is None else self.sampler.names.index(now.preference.reward),
        )

    def _learn(
        self, batch: Batch, group_advantages: GroupAdvantages, now: Recipe
    ) -> tuple[list[MiniBatch], list[UpdateResult]]:
        """μ passes over the batch, each cut into mini-batches of whole prompts, and a data set's pairs beside them."""
        prompts, components = len(batch.prompts), now.train.mini_batches
        order = list(range(prompts)) if components == 1 else self._shuffled(prompts)
        cuts = [order[prompts * part // components : prompts * (part + 1) // components] for part in range(components)]
        fixed = self.pairs.take(now)
        minibatches = [
            build_minibatch(batch, group_advantages, cut, now, fixed.part(at, components))
            for at, cut in enumerate(cuts)
        ]
        used_again = now.train.iterations * components > 1
        self._seed_dropout(0, -1)  # these log-probs have dropout too, and a resumed run must draw the same
        for minibatch in minibatches:
            self.updater.precompute_logps(minibatch, now, old=used_again)
        updates: list[UpdateResult] = []
        set_learning_rate(self.optimizer, now, self.step, self.total_steps)
        every = self.recipe.train.log_term_gradients_every
        for iteration in range(now.train.iterations):
            for minibatch in minibatches:
                if minibatch.empty:
                    continue  # nothing in it contributes: no update, and the weights stay
                self._seed_dropout(len(updates), iteration)
                updates.append(
                    self.updater.update(
                        minibatch, now, check=not updates, compare_terms=bool(every) and self.step % every == 0
                    )
                )
        return minibatches, updates

    def _after(self, report: StepReport) -> None:
        """Record the step, let the schedule see it, evaluate and save where it is time to."""
        records = self._records()
        if self.recipe.run.save_rollouts and len(report.batch):
            with self.timer("record"):
                records.rollouts(
                    self.step, rollout_table(self.step, report.batch, report.group_advantages, self.sampler.names)
                )
        records.step(self.step, report.metrics)
        self.display.step(self.step, report.metrics)
        self._tell_schedule(report.metrics)
        self.call("on_step", report)
        last = self.step >= self.total_steps
        every = self.recipe.evaluate.every
        if last or (every and self.step % every == 0):
            self.evaluate()
        every = self.recipe.run.checkpoint_every
        if last or self.stopping or (every and self.step % every == 0):
            self.save()
        self.timer.restart()

    # --- beginning and going on --------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self.records is not None:
            return  # somebody iterates for a second time: go on
        found = checkpoint.newest(self.run_dir) if self.resuming else None
        if found is None and self.resuming:
            self.say("there is no finished checkpoint in this run: it begins anew")
            rewind(self.run_dir, -1)
        if found is None and not self.supervised:
            run_sft(self)
        if self.components.uses_reference:
            self.reference = Reference(
                self.masters, mixes="reference.mix" in self.components.driven or self.recipe.reference.mix < 1
            )
            self.updater.reference = self.reference
        if found is not None:
            resume_run(self, found)
        load_reference_logps(self)
        write_recipe(self)
        self.records = Recorder(
            self.run_dir,
            rollouts=self.recipe.run.save_rollouts,
            tensorboard=self.recipe.run.tensorboard,
            wandb=self.recipe.run.wandb,
            settings=self.recipe.model_dump(),
            resumed_at=self.step if self.resuming else None,
            say=self.say,
        )
        self.display.start(
            RunFacts(
                name=self.run_dir.path.name,
                model=self.recipe.model.source,
                parameters=sum(weight.numel() for weight in self.components.model.parameters()),
                device=str(self.components.handle.device),
                algorithm=self.recipe.algorithm,
                steps=self.total_steps,
                metric=self.metric,
                folder=str(self.run_dir.path),
                goal=self.goal,
                log_every=self.recipe.run.log_every,
            ),
            first_step=self.step,
            past=read_metrics(self.run_dir.path / "metrics.jsonl"),
        )
        self.call("on_start")
        if found is None and self.recipe.evaluate.before_training and not self.stopping:
            self.evaluate()
        if found is None and self.supervised:
            self.step = run_sft(self)
        self.timer.restart()

    def save(self) -> Path:
        """Write a checkpoint of the last finished step, unless that has been done and nothing has happened since."""
        return save_run(self)

    # --- evaluation --------------------------------------------------------------------------------------------------

    def evaluate(self) -> Evaluation | None:
        """Measure the policy on the held-out rows; remember the best. None if there are no such rows."""
        if self.metric is None:
            return None
        self.display.stage("evaluating")
        found = evaluate_run(self)
        self.evaluated_at, self.last = self.step, found.metrics
        self.first = self.first or found.metrics
        value, better = found.metrics[self.metric or REWARD], False
        if self.step:
            self._tell_schedule({f"eval/{name}": number for name, number in found.metrics.items()})
            better = self.best is None or value > self.best["value"]
            if better:
                self.best, self.worse = {"step": self.step, "value": value, "metrics": found.metrics}, 0
            else:
                self.worse += 1
        self._records().evaluation(self.step, found.metrics)
        self.display.evaluation(self.step, found.metrics)
        self.call("on_evaluation", found)
        if better:
            self.save()  # after the record: a run that goes on from this checkpoint does not evaluate again
        return found

    def _out_of_patience(self) -> bool:
        patience = self.recipe.evaluate.patience
        if patience is None or self.worse < patience or self.step >= self.total_steps:
            return False
        self.say(f"stopped early: {self.worse} evaluations without a better {self.metric}")
        return True

    def _tell_schedule(self, metrics: dict[str, float]) -> None:
        """Let the schedule's rules see what was measured after the last step."""
        for sentence in self.schedule.observe(self.step - 1, metrics):
            self.say(sentence)

    @property
    def goal(self) -> float | None:
        """The task's goal, which is none for pairs."""
        return None if self.metric == PREFERRED else self.components.task.goal

    @property
    def best_name(self) -> str | None:
        """The folder of the best checkpoint."""
        return None if self.best is None else checkpoint.checkpoint_name(int(self.best["step"]))

    # --- small things ------------------------------------------------------------------------------------------------

    def now(self) -> Recipe:
        """The recipe of the next step: the run's, with what the schedule says."""
        values = self.schedule.values(self.step, self.tokens)
        return self.recipe.with_settings(values) if values else self.recipe

    def _prepare_model(self) -> None:
        model = self.components.handle.model
        if self.recipe.model.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train(self.recipe.model.gradient_checkpointing or has_dropout(self.recipe))

    def _seed_dropout(self, update: int, iteration: int) -> None:
        if has_dropout(self.recipe):
            torch.manual_seed(derive_seed(self.recipe.train.seed, 3, self.step, update, iteration))

    def _shuffled(self, number: int) -> list[int]:
        generator = torch.Generator().manual_seed(derive_seed(self.recipe.train.seed, 4, self.step))
        return torch.randperm(number, generator=generator).tolist()

    def state_for_rewards(self) -> SimpleNamespace:
        """What a reward function written for TRL may look at as ``trainer_state``."""
        return SimpleNamespace(
            global_step=self.step, max_steps=self.total_steps, epoch=self.order.epoch, num_input_tokens_seen=self.tokens
        )

    def _records(self) -> Recorder:
        if self.records is None:
            raise ConfigError("the run has not begun yet: iterate over steps() first")
        return self.records

    def _warn_about(self, metrics: dict[str, float], now: Recipe, sampled: RolloutResult) -> None:
        if sampled.failures:
            self.say(f"step {self.step}: {len(sampled.failures)} rewards failed; the first: {sampled.failures[0]}")
        if not self.warned and (sentence := mismatch_warning(metrics, now, self.components)):
            self.warned = True
            self.say(f"step {self.step}: {sentence}")
        for warning in self.checks.observe(self.step, metrics, now):
            metrics[f"warnings/{warning.name}"] = 1.0
            self.say(f"step {self.step}: warning {warning.name}: {warning.sentence}")

    def call(self, name: str, *arguments: Any) -> None:
        """Tell the callbacks."""
        for callback in self.callbacks:
            getattr(callback, name)(self, *arguments)
