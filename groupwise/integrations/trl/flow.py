"""A run step by step as transformers' callbacks see it: events, logs, evaluations, checkpoints, and the end.

The order of events and of what follows from them is that of transformers' Trainer. What callbacks ask for is done on
groupwise's own run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerControl, TrainerState
from transformers.trainer_pt_utils import log_metrics, metrics_format, save_metrics, save_state
from transformers.trainer_utils import TrainOutput

from groupwise.errors import ConfigError
from groupwise.integrations.trl.callbacks import RowBatches, SavedCallbacks, make_handler, new_state
from groupwise.integrations.trl.folder import COMPLETIONS
from groupwise.integrations.trl.logs import (
    CompletionTable,
    MetricAverages,
    batch_metrics,
    batch_tokens,
    logged_by_rewards,
    speed,
    tool_metrics,
    update_metrics,
    warn_unscored,
)
from groupwise.integrations.trl.run import Epoch, TrlRun
from groupwise.integrations.trl.setup import TrainingSetup
from groupwise.rundir.files import delete_folder
from groupwise.training.results import StepReport
from groupwise.training.store.checkpoint import checkpoint_name, load_checkpoint
from groupwise.training.store.run_folder import checkpoints_in, mark_finished
from groupwise.training.trainer import Trainer

FLAGS = ("should_log", "should_evaluate", "should_save", "should_training_stop", "should_epoch_stop")


class TrainingFlow:
    """The part of a `GRPOTrainer` that follows a run; ``_run`` is None until one is opened."""

    train_dataset: Any

    def __init__(self, args: Any, setup: TrainingSetup, callbacks: Any, optimizers: tuple[Any, Any]) -> None:
        self.args, self._setup, self._ranks = args, setup, setup.ranks
        self.model, self.processing_class = setup.components.model, setup.components.tokenizer
        self.optimizer, self.lr_scheduler = self._user_optimizers = optimizers
        self.callback_handler = make_handler(args, callbacks, self.model, self.processing_class, *optimizers)
        self._averages, self._epoch = MetricAverages(), Epoch(setup.epochs)
        self._saved = SavedCallbacks(
            self.callback_handler,
            TrainerControl(),
            self._averages,
            self._epoch,
            restore_callbacks=args.restore_callback_states_from_checkpoint,
        )
        self._run: TrlRun | None = None
        self.is_in_train = False
        self._evaluating = False
        self._completions: CompletionTable | None = None
        if args.log_completions:
            names = [reward.name for reward in setup.rewards]
            folder, shown = Path(args.output_dir) / COMPLETIONS, args.num_completions_to_print
            self._completions = CompletionTable(folder, shown, names, args.log_unique_prompts)
        self._start_tokens = 0  # of this session
        self._grad_norm: float | None = None  # of the last update of this epoch
        self._learning_rate = 0.0  # of the last update
        self._reset_state()
        self._event("on_init_end")

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, Any]:
        raise NotImplementedError

    def create_model_card(self, model_name: str | None = None) -> None:
        raise NotImplementedError

    def is_world_process_zero(self) -> bool:
        """Whether this process is the first of all."""
        return bool(self.args.process_index == 0)

    def is_local_process_zero(self) -> bool:
        """Whether this process is the first of its machine."""
        return bool(self.args.local_process_index == 0)

    def _reset_state(self) -> None:
        self.state = new_state(self.callback_handler, self.control, self.is_world_process_zero())
        self._averages.load_state({})
        self._epoch.load_state({"number": 0, "begun_at": 0})
        self._saved.skips_epoch = False

    def begin_training(self, run: Trainer) -> None:
        """Called when a run is restored and its first step is about to begin."""
        state: Any = self.state
        handler = self.callback_handler
        state.train_batch_size = self.args.per_device_train_batch_size
        state.compute_steps(self.args, self._setup.epochs.updates)
        state.max_steps, state.num_train_epochs = self._setup.epochs.updates, self._setup.epochs.number
        self.optimizer = run.optimizer
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, self.optimizer, self.lr_scheduler
        micro_batches = self._setup.epochs.micro_batches
        handler.train_dataloader = RowBatches(self.train_dataset, self.args.per_device_train_batch_size, micro_batches)
        self._started_at, self._start_step, self._total_loss = time.time(), state.global_step, 0.0
        self._start_tokens = state.num_input_tokens_seen
        if self._saved.skips_epoch or self._epoch.ends_at(state.global_step):
            self._begin_next_epoch(skip=self._saved.skips_epoch)
        self._grad_norm, self._learning_rate = None, self.lr_scheduler.get_last_lr()[0]
        self._event("on_train_begin")
        if self.args.eval_on_start and state.global_step == 0:
            self.evaluate()
        if not self._active_run().over:
            self._event("on_epoch_begin")
            self._active_run().over = not self._begin_step()

    def _begin_step(self) -> bool:
        """The events before an update; whether there is one. Asked to end the run or the epoch here, transformers makes
        one more micro-batch, so it makes the update only if that has no others."""
        self._active_run().timer.take()  # what is not part of a step
        self._event("on_step_begin")
        while self.args.gradient_accumulation_steps > 1 and self._asked_to_end():
            self._event("on_substep_end")
            if not self._end_epoch():
                return False
            self._event("on_step_begin")
        return True

    def _agree_on_flags(self) -> None:
        """With several processes the flags of the first one count."""
        values = self._ranks.from_main([getattr(self.control, flag) for flag in FLAGS])
        for name, value in zip(FLAGS, values, strict=True):
            setattr(self.control, name, value)

    def _asked_to_end(self) -> bool:
        self._agree_on_flags()
        return self.control.should_training_stop or self.control.should_epoch_stop

    def _end_epoch(self) -> bool:
        """The events at the end of an epoch, and at the beginning of the next one; whether there is one."""
        self._event("on_epoch_end")
        self._log_evaluate_save()
        self._agree_on_flags()
        if self.control.should_training_stop or not self._begin_next_epoch(skip=self.control.should_epoch_stop):
            return False
        self._grad_norm, self._learning_rate = None, self.lr_scheduler.get_last_lr()[0]
        self._event("on_epoch_begin")
        return True

    def _begin_next_epoch(self, *, skip: bool) -> bool:
        """End the epoch, ``skip`` what is left of it, and begin the next one; whether there is one."""
        run = self._active_run()
        if skip:
            run.skip_epoch()
        run.over = not self._epoch.begin_next(self.state.global_step)
        return not run.over

    def _before_optimizer_step(self) -> None:
        for _ in range(self.args.gradient_accumulation_steps - 1):
            self._event("on_substep_end")
        self._event("on_pre_optimizer_step")

    def _after_optimizer_step(self, stepped: bool) -> None:
        if stepped:
            self._event("on_optimizer_step")
        self._learning_rate = self.lr_scheduler.get_last_lr()[0]

    def _after_step(self, report: StepReport) -> bool:
        """The events after an update, and those before the next one; whether there is a next one."""
        state, self._grad_norm = self.state, report.metrics["grad_norm"]
        state.global_step, state.epoch = report.step, self._epoch.at(report.step)
        self._add_metrics(report)
        self._event("on_step_end")
        self._log_evaluate_save()
        if (self._epoch.ends_at(report.step) or self._asked_to_end()) and not self._end_epoch():
            return False
        return self._begin_step()

    def _add_metrics(self, report: StepReport) -> None:
        batch = report.batch
        if len(batch):
            self.state.num_input_tokens_seen += batch_tokens(batch)
            self._averages.replace("num_tokens", self.state.num_input_tokens_seen)
            self._averages.add(batch_metrics(batch, self._setup.rewards, self.args))
            self._averages.add(tool_metrics(batch, self._setup.components.environment))
            self._averages.add(logged_by_rewards(report.metrics))
            if self.is_world_process_zero():
                warn_unscored(batch)
            if self._completions is not None:
                self._completions.keep(batch, report.group_advantages.advantages)
        self._averages.add(update_metrics(report.metrics, self.args, self.args.gradient_accumulation_steps))
        self._averages.add({"step_time": report.metrics["step_time"]})
        self._averages.loss += report.metrics["loss"]
        self._total_loss += report.metrics["loss"]

    def _log_evaluate_save(self) -> None:
        """What callbacks asked for."""
        self._agree_on_flags()
        control, step = self.control, self.state.global_step
        if control.should_log and step > self._averages.logged_at:
            logs = {"loss": self._averages.take_loss(step)}
            logs |= {} if self._grad_norm is None else {"grad_norm": self._grad_norm}
            logs["learning_rate"] = self._learning_rate
            self.log(logs, self._started_at)
        if self.control.should_evaluate:
            is_best = self._is_best(self.evaluate())
            if self.args.save_strategy == "best":
                self.control.should_save = is_best
        if self.control.should_save:
            self._write_checkpoint()
            self._event("on_save")

    def _is_best(self, metrics: Mapping[str, Any]) -> bool:
        """Whether an evaluation is the best so far by ``metric_for_best_model``; it is then remembered."""
        name, state = self.args.metric_for_best_model, self.state
        if name is None:
            return False
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in metrics:
            raise ConfigError(f"metric_for_best_model: the evaluation has no {name} (it has: {', '.join(metrics)})")
        greater = self.args.greater_is_better
        if state.best_metric is None:
            state.best_metric = -math.inf if greater else math.inf
        value, best = metrics[name], state.best_metric
        if value is None or not (value > best if greater else value < best):  # NaN is not better than anything
            return False
        state.best_metric = value
        if self.args.save_strategy != "no":
            state.best_global_step = state.global_step
        return True

    def _write_checkpoint(self) -> None:
        run, state = self._active_run(), self.state
        folder = run.run_dir.path
        if state.best_global_step is not None:
            best = folder / checkpoint_name(state.best_global_step)
            if state.best_global_step == state.global_step or best.is_dir():
                state.best_model_checkpoint = str(best)
        self._saved.trainer_state = state
        self.create_model_card(Path(self.args.hub_model_id or self.args.output_dir).name)
        run.save()
        limit = self.args.save_total_limit
        if limit is not None and limit > 0:
            self._ranks.on_main("deleting old checkpoints", partial(self._rotate, folder, limit))

    def _rotate(self, folder: Path, limit: int) -> None:
        """Delete the oldest checkpoints, but neither the best nor the last one."""
        saved = list(checkpoints_in(folder).values())
        best = self.state.best_model_checkpoint
        kept = [path for path in saved if best is not None and path.name == Path(best).name]
        limit = 2 if limit == 1 and kept and kept[0] != saved[-1] else limit
        others = [path for path in saved if path not in kept]
        for path in others[: max(0, len(saved) - limit)]:
            delete_folder(path)

    def _finish_training(self, run: TrlRun) -> TrainOutput:
        state = self.state
        steps = state.global_step - self._start_step
        metrics = speed("train", self._started_at, self._samples_of(steps, run), steps)
        loss = self._total_loss / max(steps, 0.001)
        metrics |= {"total_flos": 0.0, "train_loss": loss}
        self.log(metrics)
        if self.args.load_best_model_at_end and state.best_model_checkpoint is not None:
            load_checkpoint(Path(state.best_model_checkpoint), run.updater)
            run.masters.sync_to_model()
            run.generator.update_weights(state.global_step)
        if state.best_model_checkpoint is not None and self.args.save_total_limit == 1:
            for path in checkpoints_in(run.run_dir.path).values():
                if path.name != Path(state.best_model_checkpoint).name:
                    self._ranks.on_main("deleting old checkpoints", partial(delete_folder, path))
        self._ranks.on_main("finishing the run", partial(mark_finished, run.run_dir, run.state.step, run.total_steps))
        self._event("on_train_end")
        return TrainOutput(state.global_step, loss, metrics)

    def _samples_of(self, steps: int, run: TrlRun) -> float:
        """What transformers counts as the samples of these updates: completions, or of a run by epochs its rows."""
        args = self.args
        if args.max_steps > 0:
            return float(steps * args.per_device_train_batch_size * args.gradient_accumulation_steps * run.ranks.size)
        rows = len(self._setup.components.task.train)
        return float(rows * args.num_train_epochs * steps / max(run.total_steps, 1))

    def _active_run(self) -> TrlRun:
        if self._run is None or not self.is_in_train:
            raise ConfigError("there is no training to save a checkpoint of; save_model saves the model")
        return self._run

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Add an entry to ``state.log_history`` and call ``on_log``; in training with the metrics since the last."""
        if not self._evaluating:
            logs |= self._averages.take()
        logs["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen not in (False, "no"):
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
            if start_time is not None:
                logs |= speed("train", start_time, tokens=self.state.num_input_tokens_seen - self._start_tokens)
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._event("on_log", logs=logs)
        if self._completions is not None and self.is_world_process_zero():
            self._completions.write(self.state.global_step, self.args.report_to or ())

    log_metrics, metrics_format = log_metrics, metrics_format
    save_metrics, save_state = save_metrics, save_state

    @property
    def control(self) -> TrainerControl:
        return self._saved.control

    @property
    def state(self) -> TrainerState:
        return self._saved.trainer_state

    @state.setter
    def state(self, state: TrainerState) -> None:
        self._saved.trainer_state = state

    def _event(self, name: str, **details: Any) -> None:
        self._saved.control = getattr(self.callback_handler, name)(self.args, self.state, self.control, **details)

    def add_callback(self, callback: Any) -> None:
        """Add a `TrainerCallback`, or a class of one."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, by itself or by its class, and return it; None if there is none."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, by itself or by its class."""
        self.callback_handler.remove_callback(callback)
