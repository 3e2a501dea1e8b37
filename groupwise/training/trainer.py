"""The training loop: sample, score, compare, update, record; resumable to the bit.

`Trainer` is built from a recipe and read from top to bottom: `steps` is the run, `_step` is one step of GRPO. The
details of each line are in the folders beside this file, in the order of the step: rollout/, update/, store/. Every
random choice of a step comes from (seed, step), so a run that stops after step k and is resumed equals the run that
never stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from groupwise.algorithms import find_algorithm
from groupwise.config import Recipe, with_settings
from groupwise.errors import ConfigError
from groupwise.evaluate import Evaluation
from groupwise.generate.registry import make_generator
from groupwise.grouping.workers import make_grouper
from groupwise.model.packing import default_token_budget
from groupwise.model.sharded_masters import make_masters
from groupwise.rewards import RewardFunction
from groupwise.rundir import RunDir, read_metrics
from groupwise.rundir.run import METRICS
from groupwise.rundir.signals import StopRequest, stop_on_signals
from groupwise.tasks.base import Task
from groupwise.text import plural
from groupwise.training.components import RunComponents, length_of, load_components, shard_components
from groupwise.training.display import Display, LineDisplay
from groupwise.training.display.curves import draw_curves
from groupwise.training.display.samples import samples_of_step
from groupwise.training.evaluation import answers_table, evaluate_policy, show_rows
from groupwise.training.extras import check_extras, groups_by_similarity
from groupwise.training.from_rows import trainer_arguments
from groupwise.training.inputs import check_training_inputs, default_run_name, load_inputs, make_schedule, most_tokens
from groupwise.training.monitor.health_checks import HealthChecks, say_warnings
from groupwise.training.monitor.metrics import rollout_table, settings_metrics, step_metrics, with_aliases
from groupwise.training.monitor.question_log import QuestionLog
from groupwise.training.monitor.timer import StepTimer
from groupwise.training.monitor.token_details import TokenDetails
from groupwise.training.monitor.weight_sample import WeightSample
from groupwise.training.preference.dataset_pairs import PairSampler, load_reference_logps
from groupwise.training.preflight import estimate_memory
from groupwise.training.ranks import FOLDER, AgreedStop, checkpoint_named, restarted_folder, start_ranks
from groupwise.training.results import RunResult, StepReport
from groupwise.training.rollout.advantages import compute_group_advantages
from groupwise.training.rollout.async_collector import AsyncCollector, RolloutsStopped
from groupwise.training.rollout.batch import Batch, GroupAdvantages, empty_batch
from groupwise.training.rollout.collector import RolloutResult
from groupwise.training.rollout.make_collector import make_collector, make_order
from groupwise.training.sft import SupervisedFineTuning
from groupwise.training.state import Stateful, StatefulFiles, TrainState
from groupwise.training.store.checkpoint import checkpoint_name
from groupwise.training.store.checkpointer import Checkpointer
from groupwise.training.store.export import export_policy, push_to_hub
from groupwise.training.store.inputs import describe_inputs
from groupwise.training.store.recorder import Recorder, last_metrics
from groupwise.training.store.records import start_records
from groupwise.training.store.run_folder import check_inputs, mark_finished, open_shared_run, write_inputs
from groupwise.training.store.saved_state import ROLLOUTS, UPDATES
from groupwise.training.summary import run_facts, run_summary
from groupwise.training.update.objective import samples_completions
from groupwise.training.update.optimizer import make_optimizer, set_learning_rate
from groupwise.training.update.policy_masks import masked_in_updates
from groupwise.training.update.reference import Reference, make_reference
from groupwise.training.update.rollout_updates import RolloutUpdates
from groupwise.training.update.updater import Updater
from groupwise.training.update.user_optimizer import user_optimizer


class Callback:
    """Derive from this class and override what you need; the trainer may be inspected freely.

    To sample with ``trainer.generator`` after a step, call ``trainer.update_generator()`` before.
    """

    def on_start(self, trainer: Trainer) -> None: ...
    def on_rollout(self, trainer: Trainer, batch: Batch, group_advantages: GroupAdvantages) -> None: ...
    def on_step(self, trainer: Trainer, report: StepReport) -> None: ...
    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None: ...
    def on_checkpoint(self, trainer: Trainer, folder: Path) -> None: ...
    def on_end(self, trainer: Trainer, result: RunResult) -> None: ...


class Trainer:
    """A run of GRPO. ``run()`` does everything; with ``for report in trainer.steps()`` the loop is yours.

    task: replaces the recipe's. rewards: functions beside those of the task and the recipe.
    tools, environment, rollout: for conversations of several turns: functions that the model may call; a class or
    function that makes an environment; or a function ``rollout(model, row)`` that leads a conversation.
    model, tokenizer: loaded ones, in place of the recipe's. The model itself is trained, not a copy.
    folder, resume, overwrite: where the run is kept, and whether to resume a run there or to delete it first.
    recipe_file: the name of the recipe's file, by which a run is found again. allow_changed: resume even if the rows,
    the model, or the source of rewards, task, loss or grouping are others than the run was started with.
    components: loaded ones, in place of task, rewards, model and tokenizer.
    optimizer, lr_scheduler: of the parameters of ``model``, in place of [optimizer]. The scheduler is stepped once per
    step; without one, the recipe's warm-up and decay apply.
    """

    automatic = True  # save and evaluate as the recipe says; if False, whoever iterates over `steps` does
    beside_other_files = False  # whether the run's folder may hold other files already

    def __init__(
        self,
        recipe: Recipe,
        *,
        task: Task | None = None,
        rewards: Sequence[Callable[..., Any] | RewardFunction] = (),
        tools: Sequence[Callable[..., Any]] = (),
        environment: Any = None,
        rollout: Callable[..., Any] | None = None,
        model: Any = None,
        tokenizer: Any = None,
        callbacks: Sequence[Callback] = (),
        display: Display | None = None,
        folder: str | Path | None = None,
        resume: bool = False,
        overwrite: bool = False,
        recipe_file: str | None = None,
        allow_changed: bool = False,
        components: RunComponents | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: Any = None,
    ) -> None:
        self.ranks = start_ranks(recipe)
        if (restarted := restarted_folder(self.ranks, folder or recipe.run.folder)) is not None:
            folder, resume = restarted, True
        self.recipe, self.callbacks, self.resuming = recipe, list(callbacks), resume
        self.user_optimizer = user_optimizer(optimizer, lr_scheduler, model)
        self.display = (display or LineDisplay(sys.stdout)) if self.ranks.is_main else Display()
        self.say = self.display.say
        with self.ranks.stage("reading the rows"):
            check_extras(recipe, loads_model=model is None, reads_rows=task is None)
            inputs = components or load_inputs(
                recipe,
                task=task,
                rewards=rewards,
                tools=tools,
                environment=environment,
                rollout=rollout,
                say=self.say,
                display=self.display,
                ranks=self.ranks,
            )
            check_training_inputs(recipe, inputs)
        options: dict[str, Any] = {"recipe_file": recipe_file, "resume": resume, "overwrite": overwrite}
        options["beside_other_files"] = self.beside_other_files
        self.run_dir: RunDir = open_shared_run(self.ranks, recipe, folder, name=default_run_name(recipe), **options)
        self.ranks.remember(FOLDER, str(self.run_dir.path.resolve()))
        try:
            with self.ranks.stage("loading the model"):
                options = {"model": model, "tokenizer": tokenizer, "display": self.display, "ranks": self.ranks}
                self.components = components or load_components(recipe, inputs, self.say, **options)
                self._inputs = describe_inputs(self.components)
                changed = (
                    check_inputs(self.run_dir, self._inputs, recipe, allow_changed=allow_changed) if resume else {}
                )
            self.components = shard_components(self.components, self.ranks, self.say)
            self._build(changed)
            if overwrite and not resume:
                self.ranks.on_main("clearing the run's folder", self.run_dir.clear)
            if not resume:
                self.ranks.on_main("opening the run", lambda: write_inputs(self.run_dir, self._inputs, recipe_file))
        except BaseException:
            self.run_dir.discard()  # if it holds nothing yet, so that the next try finds no half of a run
            raise

    def _build(self, changed: Collection[str]) -> None:
        """Make everything that a step needs; ``changed`` are the inputs that differ from those of the resumed run."""
        recipe, components = self.recipe, self.components
        handle, task = components.handle, components.task
        self.metric = components.metric
        self.metric_aliases = find_algorithm(recipe.algorithm).metrics
        self.sft = SupervisedFineTuning(components) if recipe.sft.steps or recipe.sft.epochs else None
        length = length_of(components)
        if length.steps and length.unreached:
            self.say(f"train.steps {length.steps} ends the run before {', '.join(map(repr, length.unreached))}")
        self._steps = self.sft.steps if length.steps == 0 and self.sft is not None else length.steps
        self.grouper = make_grouper(recipe.grouping, self.say, self.ranks) if groups_by_similarity(recipe) else None

        if recipe.model.gradient_checkpointing:
            handle.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        handle.model.train(recipe.model.gradient_checkpointing or components.has_dropout)
        self.masters = make_masters(handle, components.model, self.ranks)
        if self.user_optimizer is not None:
            self.optimizer = self.user_optimizer.move_to(components.model, self.masters)
        else:
            self.optimizer = make_optimizer(recipe, components.model, self.masters, self.say)
        self.reference: Reference | None = None  # the policy after SFT, so not known yet
        self.generator = make_generator(recipe, handle, self.ranks)
        self.updater = Updater(
            handle,
            self.masters,
            self.optimizer,
            None,
            recipe.train.token_budget or default_token_budget(handle),
            components.loss,
            teacher=components.teacher,
            ranks=self.ranks,
            dropout=components.has_dropout,
            release=self.generator.release,
            say=self.say,
        )

        self.state = TrainState()
        self.schedule = make_schedule(recipe, length)
        options: dict[str, Any] = {"driven": self.schedule.driven, "compiles": handle.compiled is not None}
        self.updates = RolloutUpdates(self.updater, recipe, self.display, **options)
        self.order, pass_rates = make_order(recipe, max(1, len(components.train)))
        self.pairs = PairSampler(components.pairs, recipe)
        self.health_checks = HealthChecks(task.metric, task.health_checks, held_out=self.metric)
        self.weight_sample = WeightSample(self.masters)
        self.question_log = QuestionLog(components.train.rows, task.metric, pass_rates)
        self.token_details = TokenDetails(self.updater, components.tokenizer, self.say)
        self.collector = make_collector(
            components,
            self.generator,
            self.order,
            self.compute_advantages,
            grouper=self.grouper,
            display=self.display,
            say=self.say,
            folder=self.run_dir.path,
            stopped=lambda: self.stopping.requested,
            ranks=self.ranks,
        )
        parts: dict[str, Stateful] = {
            "order": self.order,
            "pairs": self.pairs,
            "schedule": self.schedule,
            "health_checks": self.health_checks,
            "questions": self.question_log,
        }
        if self.user_optimizer is not None:
            parts["user_optimizer"] = self.user_optimizer
        file_parts: dict[str, StatefulFiles] = {UPDATES: self.updates} if recipe.train.update_per_step else {}
        if isinstance(self.collector, AsyncCollector):
            file_parts[ROLLOUTS] = self.collector
        self.checkpointer = Checkpointer(
            self.run_dir,
            components,
            self.state,
            parts,
            self.question_log,
            self.updater,
            self.generator,
            self.say,
            changed,
            self.ranks,
            file_parts,
        )
        self.timer = StepTimer(handle.device, estimate_memory(components, self.ranks))
        self.recorder: Recorder | None = None
        self._started = False
        self.stopping = StopRequest()

    @classmethod
    def from_rows(
        cls,
        rows: Any,
        rewards: Any,
        *,
        model: Any = "tiny",
        tokenizer: Any = None,
        held_out: Any = None,
        tools: Sequence[Callable[..., Any]] = (),
        environment: Any = None,
        rollout: Callable[..., Any] | None = None,
        algorithm: str = "dapo",
        callbacks: Sequence[Callback] = (),
        display: Display | None = None,
        folder: str | Path | None = None,
        resume: bool = False,
        overwrite: bool = False,
        allow_changed: bool = False,
        **sections: Mapping[str, Any],
    ) -> Trainer:
        """A trainer without a recipe file: rows with a ``prompt``, one or more rewards, and any section as a keyword.

        rewards: a function, a name as in a recipe ("file.py:function", or a built-in one), a table of [[rewards]], or a
        list of these; (function, weight) gives a function a weight.
        rows, held_out: a list of dicts, a DataFrame, a `datasets.Dataset`, or what data.train takes: a file, a folder
        or a hub dataset.
        model: a source as in [model], the settings of [model], or a loaded model, whose tokenizer is looked up by the
        model's ``name_or_path`` unless ``tokenizer`` is given:
        ``Trainer.from_rows(rows, reward, model={"source": "smollm2-135m", "lora": {"rank": 8}}, train={"steps": 50})``
        """
        recipe, task, functions, loaded = trainer_arguments(
            rows, rewards, model, tokenizer, held_out, algorithm, sections
        )
        return cls(
            recipe,
            task=task,
            rewards=functions,
            tools=tools,
            environment=environment,
            rollout=rollout,
            model=loaded,
            tokenizer=tokenizer,
            callbacks=callbacks,
            display=display,
            folder=folder,
            resume=resume,
            overwrite=overwrite,
            allow_changed=allow_changed,
        )

    @property
    def step(self) -> int:
        """The number of finished steps."""
        return self.state.step

    @property
    def total_steps(self) -> int:
        """The number of steps of the run; an estimate until its last phase is over, if that depends on tokens."""
        if self._steps is not None:
            return self._steps
        step, tokens = self.state.step, self.state.tokens
        rate = tokens / step if tokens else most_tokens(self.recipe)
        return step + self.schedule.steps_left(step, tokens, rate)

    def run(self) -> RunResult:
        """Train to the end, or until Ctrl-C, SIGTERM, SIGHUP or a broken pipe; then the finished step is saved."""
        with self.stopping_on_signals():
            try:
                for _ in self.steps():
                    pass
                return self.finish()
            finally:
                self.close()

    @contextmanager
    def stopping_on_signals(self) -> Iterator[None]:
        """Within this block a signal ends the run after its step, and `stopping` is true."""
        with self.display, stop_on_signals(self.display.interrupted) as self.stopping:
            if self.ranks.size > 1:
                self.stopping = AgreedStop(self.stopping, self.ranks)
            self.display.on_broken_pipe = self.stopping.broken_pipe
            with checkpoint_named(self.run_dir.path):
                yield

    def steps(self) -> Iterator[StepReport]:
        """One `StepReport` per step. Call `finish` after the loop for the model, and `close`."""
        self._start()
        while self.state.step < self.total_steps and not self.stopping and not self._out_of_patience():
            undo = self._undo_point()
            try:
                report = self._step()
            except RolloutsStopped:  # while it waited for rewards; the state is that of the finished steps
                return
            except Exception as error:
                if undo():
                    self._save_finished_steps(error)
                raise
            # Outside of the next block: a step without its record must not be saved.
            self.ranks.on_main("recording the step", partial(self._record, report))
            try:
                self._after_step(report)
            except Exception as error:
                self._save_finished_steps(error)
                raise
            yield report

    def _undo_point(self) -> Callable[[], bool]:
        """A function that undoes what an unfinished step has drawn, if the weights are still those of now."""
        parts = [part.undo_point() for part in (self.collector, self.pairs, self.updates)]
        finished, moves = self.state.step, self.updater.optimizer_steps

        def undo() -> bool:
            if (self.state.step, self.updater.optimizer_steps) != (finished, moves):
                return False
            for undo_part in parts:
                undo_part()
            return True

        return undo

    def _save_finished_steps(self, error: Exception) -> None:
        """Save before an error ends the run, such as that of a judge that does not answer, or of a callback.

        Several processes must save together, so only after an error that all of them raise.
        """
        if not self.state.step or not (self.automatic or self.collector.asynchronous):
            return
        if self.ranks.size > 1 and not getattr(error, "on_all_ranks", False):
            return
        try:
            self.save()
        except Exception as failure:
            self.say(f"step {self.state.step} could not be saved: {failure}")

    def finish(self) -> RunResult:
        """Evaluate and save if that is due, and export the model unless the run was stopped."""
        self.stopping.agree()
        if self.state.step:
            self.save()
        if not self.stopping and self.state.evaluated_at != self.state.step:
            self.evaluate()
            if self.state.step:
                self.save()
        model = None
        if self.state.step and not self.stopping:
            self.display.stage("exporting the model")
            model = export_policy(self.run_dir, self.components, self.state, self.masters, self.ranks)
        folder = self.run_dir.path

        def draw() -> Path | None:
            self.display.stage("drawing the curves")
            return draw_curves(folder, metric=self.metric, goal=self.components.goal)

        picture = self.ranks.on_main("drawing the curves", draw) if self.recipe.run.plot else None
        state, best_step = self.state, None if self.state.best is None else self.state.exported_step
        result = RunResult(
            steps=state.step,
            train=self.ranks.from_main(last_metrics(folder) if self.ranks.is_main else None),
            held_out=state.measured,
            first_held_out=state.first,
            last_held_out=state.last,
            best_step=best_step,
            model=model,
            folder=folder,
            exit_status=self.stopping.exit_status,
        )
        self.ranks.on_main("finishing the run", lambda: self._publish(model))
        notes: dict[str, Any] = {"picture": picture, "warned": self.health_checks.warned}
        self.display.finish(run_summary(self.components, state, result, self.question_log, self.total_steps, **notes))
        self._call("on_end", result)
        return result

    def _publish(self, model: Path | None) -> None:
        if model is not None and self.recipe.run.push_to_hub is not None:
            self.display.stage(f"pushing to {self.recipe.run.push_to_hub}")
            push_to_hub(model, self.recipe.run.push_to_hub, self.say)
        if model is not None and (self.state.step >= self.total_steps or self._patience_is_over):
            mark_finished(self.run_dir, self.state.step, self.total_steps)
        self.run_dir.check_in_place()  # a deleted folder is not a success

    def close(self) -> None:
        if self.recorder is not None:
            self.recorder.close()
        self.collector.close()
        self.masters.close()
        self.generator.close()
        if self.grouper is not None:
            self.grouper.close()
        self.run_dir.close()
        self.ranks.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _step(self) -> StepReport:
        state, step_recipe = self.state, self.step_recipe()
        self.display.begin_step(state.step + 1)
        number, is_new = self.updates.rollout_number(state.step), not self.updates.left
        if is_new and samples_completions(step_recipe):
            self.update_generator()
            rollout = self.collector.collect(number, step_recipe, self.trainer_state(), self.timer)
        else:  # the last rollout is still in use, or the step learns from pairs of a data set
            rollout = RolloutResult(empty_batch(len(self.collector.names)))
        batch = rollout.batch
        group_advantages = self.compute_advantages(batch, step_recipe)
        if len(batch):
            self._call("on_rollout", batch, group_advantages)
        tokens = self.token_details.compute(state.step + 1, batch, group_advantages, step_recipe)
        weights = self.weight_sample.read()
        with self.timer("train"):
            if is_new:
                self.updates.begin(batch, group_advantages, self.pairs.take(step_recipe), step_recipe, number)
            minibatches = self.updates.minibatches if is_new else [self.updates.next]
            if self.user_optimizer is None or not self.user_optimizer.has_schedule:
                set_learning_rate(self.optimizer, step_recipe, state.step, self.total_steps)
            every = self.recipe.train.log_term_gradients_every
            log_terms = bool(every) and state.step % every == 0
            updates = self.updates.run(step_recipe, log_term_gradients=log_terms)
        state.step += 1
        state.tokens += rollout.tokens
        refresh = step_recipe.reference
        if self.reference is not None and refresh.refresh_every and state.step % refresh.refresh_every == 0:
            self.reference.refresh(refresh.mix)
        self.question_log.observe(batch, group_advantages)
        for replaced in rollout.left_out:
            self.question_log.observe(replaced, self.compute_advantages(replaced, step_recipe))
        metrics = step_metrics(
            rollout, group_advantages, self.collector.reward_weights, minibatches, updates, step_recipe
        )
        epoch = self.order.epoch if self.components.samples else self.pairs.epoch
        metrics |= settings_metrics(step_recipe, self.updater, tokens=state.tokens, epoch=epoch)
        metrics |= self.order.take_metrics()
        if self.user_optimizer is not None:
            self.user_optimizer.step()
        timing = self.ranks.from_main({**self.weight_sample.changed_since(weights), **self.timer.take()})  # for rules
        metrics |= {"tokens_per_second": rollout.tokens / timing["step_time"], **timing}
        metrics = with_aliases(metrics, self.metric_aliases)
        self._warn(metrics, step_recipe, rollout)
        masked = masked_in_updates(minibatches, updates)
        return StepReport(state.step, metrics, batch, group_advantages, tokens, masked)

    def step_recipe(self) -> Recipe:
        """The recipe of the next step: the run's, with the values of the schedule."""
        values = self.updates.settings(self.schedule.values(self.state.step, self.state.tokens))
        return with_settings(self.recipe, values) if values else self.recipe

    def compute_advantages(self, batch: Batch, step_recipe: Recipe) -> GroupAdvantages:
        """The advantage of each sample in its group, and whether a mask excludes it."""
        ranking = step_recipe.preference.reward
        return compute_group_advantages(
            batch,
            step_recipe,
            self.collector.weights,
            advantage=self.components.advantage,
            grouping=self.components.grouping,
            grades=self.components.task.grades,
            metric=self.components.task.metric,
            ranked_by=None if ranking is None else self.collector.names.index(ranking),
        )

    def _warn(self, metrics: dict[str, float], step_recipe: Recipe, rollout: RolloutResult) -> None:
        step = self.state.step
        if rollout.failures:
            self.say(f"step {step}: {plural(len(rollout.failures), 'reward')} failed; the first: {rollout.failures[0]}")
        metrics |= say_warnings(self.health_checks.observe(step, metrics, step_recipe), step, self.say)

    def _after_step(self, report: StepReport) -> None:
        """Show the step, let the schedule see it, and evaluate and save if that is due."""
        step = self.state.step
        if self.recipe.run.show_samples and len(report.batch):
            self.display.samples(samples_of_step(report.batch, report.group_advantages, self.recipe))
        self.display.expect(self.total_steps)
        self.display.step(step, report.metrics)
        self._observe_schedule(report.metrics)
        self._call("on_step", report)
        last, stop = step >= self.total_steps, self.stopping.agree()
        save_every = self.recipe.run.checkpoint_every
        save = self.automatic and (last or stop or bool(save_every and step % save_every == 0))
        if save:
            self.save()  # before the evaluation, in which the process may be killed
        if self._evaluation_is_due:
            self.evaluate()
            if save:
                self.save()
        self.timer.take()  # what is not part of a step

    def _record(self, report: StepReport) -> None:
        recorder, step = self._open_recorder(), self.state.step
        if self.recipe.run.save_rollouts and len(report.batch):
            with self.timer("record"):
                data, names = (report.batch, report.group_advantages), self.collector.names
                recorder.rollouts(step, rollout_table(step, *data, names, report.masked), report.tokens)
        recorder.step(step, report.metrics)

    def _start(self) -> None:
        if self._started:
            return  # iterated a second time: continue
        folder = self.checkpointer.newest() if self.resuming else None
        if folder is None and not self.components.supervised:
            self._run_sft()
        if self.components.uses_reference:
            mixes = "reference.mix" in self.components.driven or self.recipe.reference.mix < 1
            self.reference = self.updater.reference = make_reference(self.masters, mixes=mixes)
        if folder is not None:
            self.checkpointer.resume(folder, self.total_steps)
        self.generator.update_weights(self.state.step)
        if self.reference is not None and self.components.has_fixed_reference:
            load_reference_logps(
                self.pairs,
                self.components.handle,
                self.reference,
                learns_from_pairs=self.components.learns_from_pairs,
                dropout=self.components.has_dropout,
                ranks=self.ranks,
                progress=lambda done, total: self.display.progress("reference log-probs", done, total, "pairs"),
                say=self.say,
            )
        self.ranks.on_main("opening the records", self._start_records)
        self._started = True
        self._call("on_start")
        if folder is None and self.recipe.evaluate.before_training and not self.stopping.agree():
            self.evaluate()
        if folder is not None and self._evaluation_is_due and self.state.evaluated_at != self.state.step:
            self.evaluate()  # the run ended between saving and evaluating this step
            self.save()
        if folder is None and self.components.supervised:
            self.state.step = self._run_sft()
            self.generator.update_weights(self.state.step)
        self.timer.take()  # what is not part of a step

    def _start_records(self) -> None:
        resumed_at = self.state.step if self.resuming else None
        self.recorder = start_records(self.run_dir, self.recipe, self._inputs, self.say, resumed_at=resumed_at)
        facts = run_facts(self.components, self.run_dir.path, self.total_steps)
        self.display.start(facts, first_step=self.state.step, past=read_metrics(self.run_dir.path / METRICS))

    def _run_sft(self) -> int:
        """The supervised steps, if there are any; the number done, 0 if the run was stopped before the last one."""
        sft = self.sft
        if sft is None:
            return 0

        def progress(step: int, metrics: dict[str, float]) -> None:
            self.display.progress("SFT", step, sft.steps, "supervised steps")
            if self.components.supervised and self._started:
                self.ranks.on_main("recording the step", lambda: self._open_recorder().step(step, metrics))
                self.display.begin_step(step + 1)

        self.display.progress("SFT", 0, sft.steps, "supervised steps")
        done = sft.run(self.masters, self.updater.token_budget, self.ranks, progress, self.stopping.agree)
        if done < sft.steps:
            self.say(f"stopped after {done} of {sft.steps} steps of SFT; they are not saved, and start over")
            return 0
        return done

    def save(self) -> Path:
        """Write a checkpoint of the last finished step, unless it exists and nothing has changed since."""
        folder = self.run_dir.path / checkpoint_name(self.state.step)
        self.display.stage("saving a checkpoint")
        if self.checkpointer.save():
            self._call("on_checkpoint", folder)
        return folder

    def update_generator(self) -> None:
        """Let the generator sample with the weights of the last finished step."""
        if self.generator.version != self.state.step:
            self.generator.update_weights(self.state.step)

    def evaluate(self) -> Evaluation | None:
        """Measure the policy on what is held out, and remember the best; None if nothing is held out."""
        if self.metric is None:
            return None
        if rows := len(self.components.held_out):
            self.display.progress("evaluating", 0.0, rows, "rows")
        else:
            self.display.stage("evaluating pairs")
        step_recipe = self.step_recipe()
        self.update_generator()
        evaluation = evaluate_policy(
            self.components,
            self.generator,
            self.pairs,
            self.reference,
            step_recipe,
            progress=show_rows(self.display),
            trainer_state=self.trainer_state(),
            ranks=self.ranks,
        )
        metrics, step = evaluation.metrics, self.state.step
        is_best = self.state.add_evaluation(metrics, self.metric)
        if self.state.step:
            self._observe_schedule({f"eval/{name}": value for name, value in metrics.items()})
        warnings = self.health_checks.observe_evaluation(step, metrics, step_recipe)
        row = metrics | say_warnings(warnings, step, self.say)
        answers = answers_table(step, evaluation, self.components) if self.recipe.run.save_rollouts else None
        self.ranks.on_main("recording the evaluation", lambda: self._open_recorder().evaluation(step, row, answers))
        self.display.evaluation(self.state.step, metrics)
        self._call("on_evaluation", evaluation)
        if is_best and self.automatic:
            self.save()  # after the record, so that a run that resumes from here does not evaluate again
        return evaluation

    @property
    def _evaluation_is_due(self) -> bool:
        step, every = self.state.step, self.recipe.evaluate.every
        return self.automatic and (step >= self.total_steps or bool(every and step % every == 0))

    @property
    def _patience_is_over(self) -> bool:
        patience = self.recipe.evaluate.patience
        return patience is not None and self.state.evaluations_since_improvement >= patience

    def _out_of_patience(self) -> bool:
        if not self._patience_is_over or self.state.step >= self.total_steps:
            return False
        count = self.state.evaluations_since_improvement
        self.say(f"stopped early: {plural(count, 'evaluation')} without a better {self.metric}")
        return True

    def trainer_state(self) -> SimpleNamespace:
        """The ``trainer_state`` that a reward function written for TRL may ask for."""
        return SimpleNamespace(
            global_step=self.state.step,
            max_steps=self.total_steps,
            epoch=self.order.epoch,
            num_input_tokens_seen=self.state.tokens,
        )

    def _observe_schedule(self, metrics: dict[str, float]) -> None:
        """Let the schedule's rules see what was measured after the last step."""
        for sentence in self.schedule.observe(self.state.step - 1, metrics):
            self.say(sentence)

    def _open_recorder(self) -> Recorder:
        if self.recorder is None:
            raise ConfigError("the run has not started yet: iterate over steps() first")
        return self.recorder

    def _call(self, name: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, name)(self, *arguments)
