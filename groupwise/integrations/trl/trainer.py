"""`GRPOTrainer` with TRL 1.16's arguments, methods, callbacks and metrics, as a translation to a recipe and the one
trainer. ``__init__`` loads and checks everything; `train` and `evaluate` use `groupwise.training`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from signal import SIGINT
from typing import Any

import torch
from transformers import TrainerCallback, set_seed
from transformers.trainer_utils import TrainOutput

from groupwise.errors import ArgumentTypeError, ConfigError
from groupwise.generate.registry import make_generator
from groupwise.integrations.trl.callbacks import SAVED_AS, RowBatches
from groupwise.integrations.trl.config import GRPOConfig
from groupwise.integrations.trl.conversations import ConversationArguments
from groupwise.integrations.trl.datasets import evaluation_rows
from groupwise.integrations.trl.evaluation import evaluate_sampled, evaluation_batches, held_out_row, reference_model
from groupwise.integrations.trl.flow import TrainingFlow
from groupwise.integrations.trl.folder import clear_for_new_run, find_checkpoint, prepare_resume
from groupwise.integrations.trl.logs import speed, warn_unscored
from groupwise.integrations.trl.optimizer import follow_scheduler
from groupwise.integrations.trl.rewards import reward_errors_as_in_trl, reward_name
from groupwise.integrations.trl.run import Notices, TrlRun
from groupwise.integrations.trl.saving import make_repository, save_into, upload, write_card
from groupwise.integrations.trl.setup import check_arguments, default_arguments, prepare_training
from groupwise.text import Say, excerpt
from groupwise.training.trainer import Callback, Trainer

# Fields of the config that TRL's trainer also has as attributes, for callbacks and subclasses that read them.
SHOWN_FIELDS = (
    *("num_generations", "max_completion_length", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("beta", "loss_type", "num_iterations", "scale_rewards", "importance_sampling_level", "top_entropy_quantile"),
    *("multi_objective_aggregation", "mask_truncated_completions", "off_policy_mask_threshold", "entropy_coef"),
    *("shuffle_dataset", "log_completions", "num_completions_to_print", "use_vllm", "vllm_mode"),
)


class GRPOTrainer(TrainingFlow):
    """Trains a language model with GRPO; a drop-in for TRL's trainer of this name. docs/trl.md has the differences."""

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:
        quantized = quantization_config if isinstance(model, str) else None  # as in TRL
        check_arguments(type(self), quantization_config=quantized)
        args = default_arguments(args, model)
        set_seed(args.seed)
        self._display = Notices() if args.process_index == 0 else None
        self._say: Say = (lambda text: None) if self._display is None else self._display.say
        setup = prepare_training(
            args,
            model,
            reward_funcs,
            train_dataset,
            eval_dataset,
            processing_class,
            reward_processing_classes,
            peft_config,
            ConversationArguments(tools, environment_factory, self._rollout_function(rollout_func)),
            self._say,
        )
        self.train_dataset = setup.components.task.train if train_dataset is None else train_dataset
        self.eval_dataset = eval_dataset
        self.recipe = setup.recipe
        self.reward_funcs, self.reward_processing_classes = setup.reward_funcs, setup.reward_tokenizers
        self.reward_func_names = [reward_name(reward) for reward in setup.reward_funcs]
        for name in SHOWN_FIELDS:
            setattr(self, name, getattr(args, name))
        self.num_generations_eval = args.num_generations_eval or args.num_generations
        self.epsilon_low = args.epsilon
        self.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
        self.chat_template_kwargs = args.chat_template_kwargs or {}
        self.rollout_func = rollout_func
        self._generator: Any = None  # of an evaluation before training
        super().__init__(args, setup, callbacks, optimizers)
        self.hub_model_id: str | None = None  # the complete name, owner/name
        if args.push_to_hub:
            self.init_hf_repo()

    def _rollout_function(self, function: Any) -> Callable[[list[Any]], Any] | None:
        """A user's function of prompts and this trainer, as one of prompts."""
        if function is not None and not callable(function):
            raise ArgumentTypeError(f"rollout_func is {excerpt(function)}; give a function of prompts and the trainer")
        return None if function is None else lambda prompts: function(prompts, self)

    # -- training ----------------------------------------------------------------------------------------------------

    @reward_errors_as_in_trl()
    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> TrainOutput:
        """Train to the end, and return the number of updates, their mean loss, and the metrics of the run.

        resume_from_checkpoint: True for the newest checkpoint in ``output_dir``, or the path of one. The run then
        continues to the bit. A signal saves a checkpoint and ends the process.
        """
        if trial is not None:
            raise ConfigError("trial: a hyperparameter search is not supported; make a GRPOTrainer for each trial")
        run = self._run = self._open_run(resume_from_checkpoint or False)
        self.is_in_train = True
        try:
            with run.stopping_on_signals():
                for report in run.steps():
                    if not self._after_step(report):
                        break
                if run.stopping:
                    self._write_checkpoint()
            if (request := run.stopping.signal) is not None:
                self._say(f"stopped by {request.name}; resume with train(resume_from_checkpoint=True)")
                raise KeyboardInterrupt if request is SIGINT else SystemExit(run.stopping.exit_status)
            return self._finish_training(run)
        finally:
            self._scheduled.close()
            self.is_in_train = False
            for part in (run.recorder, run.collector, run.run_dir):
                if part is not None:
                    part.close()

    def _open_run(self, resume: str | bool) -> TrlRun:
        if self._run is not None:
            self._run.masters.close()
            self._run.generator.close()
        if self._generator is not None:
            self._generator.close()
            self._generator = None
        folder = Path(self.args.output_dir)
        checkpoint = find_checkpoint(folder, resume) if resume else None

        def prepare() -> None:
            if checkpoint is None:
                clear_for_new_run(folder, self._say)
            else:
                prepare_resume(folder, checkpoint, self._say)

        self._ranks.on_main("preparing output_dir", prepare)
        self._reset_state()
        run = TrlRun(
            self.recipe,
            components=self._setup.components,
            model=self.model,
            callbacks=[_StartEvent(self)],
            display=self._display,
            folder=folder,
            resume=checkpoint is not None,
            optimizer=self._user_optimizers[0],
            lr_scheduler=self._user_optimizers[1],
        )
        self._scheduled = follow_scheduler(
            run,
            self.args,
            self._user_optimizers,
            self._say,
            before=self._before_optimizer_step,
            after=self._after_optimizer_step,
        )
        self.lr_scheduler = self._scheduled.scheduler
        run.state_for_rewards = self.state
        run.checkpointer.file_parts = {**run.checkpointer.file_parts, SAVED_AS: self._saved}
        return run

    # -- evaluation --------------------------------------------------------------------------------------------------

    @reward_errors_as_in_trl()
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, Any]:
        """Sample completions of the evaluation rows, score them, and return the metrics, with a prefix.

        eval_dataset: other rows, a dict of such, or the name of one of the trainer's evaluation sets.
        """
        if eval_dataset is None:
            sets = self._setup.evaluation_sets
            if not sets:
                raise ConfigError("there is nothing to evaluate on: give eval_dataset, here or to GRPOTrainer")
        elif isinstance(eval_dataset, str):
            if eval_dataset not in self._setup.evaluation_sets:
                known = ", ".join(map(repr, self._setup.evaluation_sets)) or "none"
                raise ConfigError(f"there is no evaluation set {eval_dataset!r} (there are: {known})")
            sets = {"": self._setup.evaluation_sets[eval_dataset]}
        else:
            sets = evaluation_rows(eval_dataset, remove_unused_columns=bool(self.args.remove_unused_columns))
        metrics: dict[str, Any] = {}
        recorded: dict[str, float] = {}
        for name, rows in sets.items():
            prefix = f"{metric_key_prefix}_{name}" if name else metric_key_prefix
            own, measured = self._evaluate_rows(rows, prefix)
            metrics |= own
            recorded |= held_out_row(measured, name)
        if self.is_in_train and eval_dataset is None:
            self._record(recorded)
        return metrics

    def _evaluate_rows(self, rows: Sequence[Any], prefix: str) -> tuple[dict[str, Any], dict[str, float]]:
        """The metrics of an evaluation set as TRL returns them, and without prefix and times."""
        started = time.time()
        batches = evaluation_batches(len(rows), self.args)
        self.callback_handler.eval_dataloader = RowBatches(rows, self.args.per_device_eval_batch_size, len(batches))
        evaluation = evaluate_sampled(
            self._setup.components,
            self._sampler(),
            rows,
            self.args,
            reference=None if self._run is None else self._run.reference,
            trainer_state=self.state,
            batches=batches,
            after_batch=partial(self._event, "on_prediction_step"),
        )
        measured = evaluation.metrics
        if self.is_world_process_zero():
            warn_unscored(evaluation.batch)
        metrics: dict[str, Any] = {f"{prefix}_loss": measured["loss"]}
        rows_at_once = self.args.per_device_eval_batch_size * self.args.world_size  # transformers counts rows here
        metrics |= speed(prefix, started, len(rows), math.ceil(len(rows) / rows_at_once))
        own = {"num_tokens": self.state.num_input_tokens_seen, **measured}
        for place in dict.fromkeys((prefix, "eval")):  # TRL's prefix is eval, whatever the set
            metrics |= {f"{place}_{name}": value for name, value in own.items() if name != "loss"}
        if self._completions is not None:
            self._completions.keep(evaluation.batch, evaluation.advantages)
        self._evaluating = True
        try:
            self.log(metrics)
        finally:
            self._evaluating = False
        self._event("on_evaluate", metrics=metrics)
        return metrics, measured

    def _sampler(self) -> Any:
        """The generator of the run, with its current weights; one of its own before training."""
        if self._run is not None:
            self._run.update_generator()
            return self._run.generator
        if self._generator is None:
            self._generator = make_generator(self.recipe, self._setup.components.handle, self._ranks)
            self._generator.update_weights(0)
        return self._generator

    def _record(self, metrics: Mapping[str, float]) -> None:
        """Add an evaluation to the records of the run."""
        run = self._active_run()

        def write() -> None:  # only the first process has a recorder
            if run.recorder is not None:
                run.recorder.evaluation(run.state.step, dict(metrics), None)

        self._ranks.on_main("recording the evaluation", write)

    @property
    def reward_weights(self) -> torch.Tensor:
        """A factor for each reward function; changed values hold from the next rollout on."""
        return self._setup.reward_weights.tensor

    @reward_weights.setter
    def reward_weights(self, values: Any) -> None:
        self._setup.reward_weights.tensor = values

    # -- models ------------------------------------------------------------------------------------------------------

    @property
    def ref_model(self) -> Any:
        """A copy of the reference model; None with beta 0 or an adapter, as in TRL."""
        if not self.args.beta or self.recipe.model.lora is not None:
            return None
        return reference_model(self.model, None if self._run is None else self._run.reference)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, or its adapter, with the tokenizer: ``from_pretrained`` loads the folder."""
        masters = None if self._run is None else self._run.masters
        folder = Path(output_dir or self.args.output_dir)
        save_into(folder, self.model, self.processing_class, masters, self._setup.saved_dtype, self._ranks)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write a model card, README.md, into ``output_dir``."""
        if not self.is_world_process_zero():
            return
        folder = Path(self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        write_card(
            folder,
            self.model,
            model_name=model_name,
            dataset_name=dataset_name,
            tags=tags,
            reward_names=self.reward_func_names,
            log_history=self.state.log_history,
        )

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **card: Any,
    ) -> Any:
        """Save the model in ``output_dir`` and upload it to ``args.hub_model_id``; ``card`` is for the model card."""
        self._event("on_push_begin")
        token = token or self.args.hub_token
        if self.hub_model_id is None:  # without args.push_to_hub
            self.init_hf_repo(token)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self.create_model_card(**{"model_name": Path(self.args.hub_model_id or self.args.output_dir).name, **card})
        options: dict[str, Any] = {"token": token, "blocking": blocking, "revision": revision or self.args.hub_revision}
        folder, message = Path(self.args.output_dir), commit_message or "Upload"
        return upload(folder, str(self.hub_model_id), commit_message=message, **options)

    def init_hf_repo(self, token: str | None = None) -> None:
        """Make the repository on the hub that `push_to_hub` uploads to, ``hub_model_id``."""
        if self.is_world_process_zero():
            self.hub_model_id = make_repository(self.args, token)

    def end(self) -> None:
        """Finish the trackers of ``report_to`` and the group of processes, at the end of a script."""
        self.accelerator.end_training()

    def get_num_trainable_parameters(self) -> int:
        """How many parameters are trained."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def get_learning_rates(self) -> list[float]:
        """The learning rate of each parameter group of the optimizer, which exists once training has begun."""
        if self.optimizer is None:
            raise ConfigError("get_learning_rates: the optimizer is made when train() begins")
        return [group["lr"] for group in self.optimizer.param_groups]

    @property
    def accelerator(self) -> Any:
        """accelerate's object for scripts that ask it for processes; training does not use it."""
        from accelerate import Accelerator

        return Accelerator()


class _StartEvent(Callback):
    """Tells a trainer that its run begins."""

    def __init__(self, owner: GRPOTrainer) -> None:
        self.owner = owner

    def on_start(self, trainer: Trainer) -> None:
        self.owner.begin_training(trainer)
