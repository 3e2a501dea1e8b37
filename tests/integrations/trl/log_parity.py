"""The same run in TRL's trainer and in the drop-in: what callbacks see, and what is logged. Import it late: TRL takes
seconds to load."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import trl.trainer.grpo_trainer
from datasets import Dataset
from transformers import TrainerCallback, TrainerState
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import RepeatSampler

import groupwise.integrations.trl.trainer
import groupwise.training.trainer
from groupwise.integrations.trl.trainer import GRPOTrainer as DropIn
from groupwise.model.tiny import tiny_tokenizer
from groupwise.seeds import derive_seed
from groupwise.trl import GRPOConfig as DropInConfig
from tests.integrations.trl.parity import EOS, LONGEST, ROWS, SETTINGS, ForcedGenerator, in_float64, make_model

EVALUATED = 6  # rows
TIMES = ("runtime", "per_second", "step_time", "preparation_time", "total_flos")


@dataclass
class Forced:
    """Completions in the order in which they are asked for, and whether those are for an evaluation."""

    asked: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})
    evaluating: bool = False

    def take(self, count: int) -> list[list[int]]:
        first = self.asked[self.evaluating]
        self.asked[self.evaluating] += count
        return [self.completion(10**6 * self.evaluating + number) for number in range(first, first + count)]

    def completion(self, number: int) -> list[int]:
        """Random tokens, in most cases with an EOS at the end."""
        generator = torch.Generator().manual_seed(number)
        length = int(torch.randint(1, LONGEST + 1, (), generator=generator))
        ids = torch.randint(256, (length,), generator=generator).tolist()
        return ids if length == LONGEST and ids[0] % 2 else [*ids[:-1], EOS]


def parity_reward(completion_ids: Any, **_: Any) -> list[float]:
    """In 1024ths, which float32 holds exactly. It is never the mean of a group: all completions have a signal."""
    return [sum(37 * place * token for place, token in enumerate(ids, 1)) % 1021 / 1024 for ids in completion_ids]


@dataclass
class Seen:
    """What a callback saw: events, and at the end the state."""

    events: list[Any] = field(default_factory=list)
    state: Any = None
    output: Any = None
    weights: dict[str, Any] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    saved: list[Any] = field(default_factory=list)

    @property
    def logs(self) -> list[dict[str, Any]]:
        return [without_times(entry) for entry in self.state.log_history]


def without_times(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if not any(part in name for part in TIMES)}


def counts(entry: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of samples and steps in a log, which has them as rates."""
    found = {}
    for name, rate in entry.items():
        if name.endswith(("_samples_per_second", "_steps_per_second")):
            found[name] = rate * entry[f"{name.split('_')[0]}_runtime"]
    return found


class Watcher(TrainerCallback):
    """Notes every event with the state, the flags and the keyword arguments, and sets flags on demand: ``ask`` maps
    (event, step) to names of flags."""

    def __init__(self, ask: Mapping[tuple[str, int], Any]) -> None:
        self.seen, self.ask = Seen(), ask

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def note(args: Any, state: Any, control: Any, **details: Any) -> Any:
            flags = sorted(flag for flag, value in vars(control).items() if value)
            given = sorted(key for key, value in details.items() if value is not None)
            rates = None
            if details.get("lr_scheduler") is not None and "step" in name:
                rates = details["lr_scheduler"].get_last_lr()
            shown = (state.epoch, state.max_steps, state.num_train_epochs, len(state.log_history), state.best_metric)
            logs = sorted(without_times(details.get("logs") or details.get("metrics") or {}))
            self.seen.events.append((name, state.global_step, shown, flags, given, rates, logs))
            for flag in self.ask.get((name, state.global_step), ()):
                if callable(flag):
                    flag(details)
                else:
                    setattr(control, flag, True)
            return control

        return note


def run_trl(folder: Path, changes: Mapping[str, Any], ask: Mapping[Any, Any] = {}, **options: Any) -> Seen:
    forced = Forced()

    class ForcedTrainer(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            forced.evaluating = not self.model.training
            return forced.take(len(prompt_ids)), None

        def _get_eval_sampler(self, eval_dataset: Any) -> Any:
            return RepeatSampler(eval_dataset, mini_repeat_count=self.num_generations_eval, shuffle=False)

    config, rollout = GRPOConfig(output_dir=str(folder), **{**SETTINGS, **changes}), 0

    def shuffle(batch: dict[str, Any]) -> dict[str, Any]:
        nonlocal rollout
        generator = torch.Generator().manual_seed(derive_seed("mini-batches", config.seed, rollout))
        order = torch.randperm(len(batch["prompt_ids"]), generator=generator)
        rollout += 1
        return {name: value if value is None or not value.dim() else value[order] for name, value in batch.items()}

    with in_float64(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(trl.trainer.grpo_trainer, "shuffle_sequence_dict", shuffle)
        patch.setattr(trl.trainer.grpo_trainer, "create_model_from_path", lambda *_, **__: make_model())
        return watch(ForcedTrainer, config, ask, **options)


def run_drop_in(folder: Path, changes: Mapping[str, Any], ask: Mapping[Any, Any] = {}, **options: Any) -> Seen:
    forced = Forced()

    class ForcedTrainer(DropIn):
        def evaluate(self, *arguments: Any, **details: Any) -> Any:
            forced.evaluating = True
            try:
                return super().evaluate(*arguments, **details)
            finally:
                forced.evaluating = False

    loading = {"model_init_kwargs": {"dtype": "float64"}}
    config = DropInConfig(output_dir=str(folder), **{**SETTINGS, **changes, **loading})
    with in_float64(), pytest.MonkeyPatch.context() as patch:
        for module in (groupwise.training.trainer, groupwise.integrations.trl.trainer):
            patch.setattr(module, "make_generator", lambda recipe, handle, ranks: ForcedGenerator(handle, forced.take))
        return watch(ForcedTrainer, config, ask, **options)


def watch(kind: Any, config: Any, ask: Mapping[Any, Any], make_optimizers: Any = None, **more: Any) -> Seen:
    """Train with a watcher; what it has seen."""
    watcher, model = Watcher(ask), make_model()
    seen = watcher.seen
    trainer = kind(
        model,
        parity_reward,
        args=config,
        train_dataset=Dataset.from_list(more.pop("rows", ROWS)),
        eval_dataset=Dataset.from_list(ROWS[:EVALUATED]) if config.eval_strategy != "no" else None,
        processing_class=tiny_tokenizer(),
        callbacks=[watcher],
        **({} if make_optimizers is None else {"optimizers": make_optimizers(model)}),
    )
    seen.output = trainer.train(**more)
    seen.state = trainer.state
    seen.weights = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    folder = Path(config.output_dir)
    seen.folders = sorted(path.name for path in folder.glob("checkpoint-*"))
    seen.saved = [TrainerState.load_from_json(str(folder / name / "trainer_state.json")) for name in seen.folders]
    return seen


def differences(ours: Any, theirs: Any, place: str = "", tolerance: float = 1e-9) -> list[str]:
    """Where two nested values differ, numbers by more than the tolerance."""
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        missing = [f"{place}: only TRL has {name}" for name in theirs.keys() - ours.keys()]
        missing += [f"{place}: TRL has no {name}" for name in ours.keys() - theirs.keys()]
        common = [name for name in theirs if name in ours]
        return missing + [
            line for name in common for line in differences(ours[name], theirs[name], f"{place}/{name}", tolerance)
        ]
    if isinstance(theirs, (list, tuple)) and isinstance(ours, (list, tuple)):
        if len(ours) != len(theirs):
            return [f"{place}: {len(ours)} entries, in TRL {len(theirs)}: {ours} / {theirs}"]
        return [
            line
            for number, pair in enumerate(zip(ours, theirs, strict=True))
            for line in differences(*pair, f"{place}/{number}", tolerance)
        ]
    numbers = [value for value in (ours, theirs) if isinstance(value, (int, float)) and not isinstance(value, bool)]
    same = math.isclose(*numbers, rel_tol=tolerance, abs_tol=tolerance) if len(numbers) == 2 else ours == theirs
    return [] if same else [f"{place}: {ours!r}, in TRL {theirs!r}"]


def compare(ours: Seen, theirs: Seen) -> list[str]:
    """All differences between two runs, but for times, paths, and the name of the folder."""

    def state(seen: Any) -> dict[str, Any]:
        left_out = ("log_history", "stateful_callbacks", "total_flos")
        values = {name: value for name, value in vars(seen).items() if name not in left_out}
        best = values["best_model_checkpoint"]
        return values | {"best_model_checkpoint": best and Path(best).name}

    theirs_counted = [counts(entry) for entry in theirs.state.log_history]
    found = [
        *differences(ours.events, theirs.events, "events"),
        *differences(ours.logs, theirs.logs, "logs", 1e-7),
        *differences([counts(entry) for entry in ours.state.log_history], theirs_counted, "counts", 0.05),
        *differences(ours.folders, theirs.folders, "folders"),
        *differences(state(ours.state), state(theirs.state), "state"),
        *differences(without_times(ours.output.metrics), without_times(theirs.output.metrics), "metrics", 1e-7),
        *differences(ours.output.training_loss, theirs.output.training_loss, "training_loss", 1e-7),
    ]
    for name, one, other in zip(theirs.folders, ours.saved, theirs.saved, strict=True):
        found += differences(state(one), state(other), name)
        logs = ([without_times(entry) for entry in saved.log_history] for saved in (one, other))
        found += differences(*logs, f"{name}/log_history", 1e-7)
    for name, weight in theirs.weights.items():
        if float((ours.weights[name] - weight).abs().max()) > 1e-7:
            found.append(f"weights of {name} differ")
    return found
