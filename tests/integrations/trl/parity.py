"""The same run in TRL and here, on a tiny float64 Llama with the same samples. Importing it takes seconds: import it
late."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl.trainer.grpo_trainer
import trl.trainer.utils
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding
from trl import GRPOConfig, GRPOTrainer

import groupwise.training.trainer
from groupwise.generate.local import LocalGenerator
from groupwise.generate.types import Rollout
from groupwise.integrations.trl.translate import translate
from groupwise.model.logprobs import completion_logps
from groupwise.model.tiny import tiny_tokenizer
from groupwise.rewards import named
from groupwise.seeds import derive_seed
from groupwise.tasks import Task
from groupwise.training.trainer import Callback, Trainer
from tests.model.models import SIZE
from tests.training.runs import RecordingDisplay

STEPS, LONGEST = 6, 6
EOS = 258
ROWS = [{"prompt": "Count" + "!" * (number % 5)} for number in range(24)]
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "max_completion_length": LONGEST,
    "max_steps": STEPS,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "constant",
    "shuffle_dataset": False,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}
LORA = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj", "down_proj"]}


@dataclass
class Run:
    """The weights at the start and after each step, and the loss of each step."""

    start: dict[str, Tensor]
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def trained(model: Any) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}


def forced_samples(rollout: int, count: int) -> list[list[int]]:
    """The completions of a rollout: random tokens, most of them with an EOS at the end."""
    generator = torch.Generator().manual_seed(100 + rollout)
    completions = []
    for _ in range(count):
        length = int(torch.randint(1, LONGEST + 1, (), generator=generator))
        ids = torch.randint(256, (length,), generator=generator).tolist()
        completions.append(ids if length == LONGEST and ids[0] % 2 else [*ids[:-1], EOS])
    return completions


def reward(completions: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """In 64ths, which float32 holds exactly; now and then all completions of a prompt have the same."""
    return [sum(ids[:2]) % 64 / 64 for ids in completion_ids]


def length_reward(completions: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    return [len(ids) / 8 for ids in completion_ids]


REWARDS = [reward, length_reward]


def make_model() -> LlamaForCausalLM:
    special = {"pad_token_id": 256, "bos_token_id": 257, "eos_token_id": EOS}
    config = LlamaConfig(**{**SIZE, **special, "vocab_size": 259, "num_hidden_layers": 2})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, mean=float(weight.dim() == 1), std=0.2)  # norms are about 1
    return model.to(torch.float64)


@contextmanager
def in_float64() -> Iterator[None]:
    """Within this block everything is computed in float64: what both libraries keep in float32 (advantages), norms,
    positions, and TRL's log-probs."""

    def norm(self: Any, states: Tensor) -> Tensor:
        return self.weight * states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.variance_epsilon)

    def rotary(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[:, :, None].double() * self.inv_freq.double()
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()

    def logps(
        hidden: Tensor, weight: Tensor, bias: None, targets: Tensor, temperature: float, *_: Any
    ) -> tuple[Tensor | None, ...]:
        table = (hidden @ weight.T / temperature).log_softmax(-1)
        values = table.gather(1, targets[:, None])[:, 0]
        nothing = torch.zeros_like(values)
        return values, -(table.exp() * table).sum(-1), None, nothing, nothing.bool()

    before = torch.get_default_dtype()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaRMSNorm, "forward", norm)
        patch.setattr(LlamaRotaryEmbedding, "forward", rotary)
        patch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", SimpleNamespace(apply=logps))
        patch.setattr(Tensor, "float", Tensor.double)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


# --- TRL --------------------------------------------------------------------------------------------------------------


class ForcedGRPOTrainer(GRPOTrainer):
    """Takes the forced samples and records its losses."""

    rollouts = 0

    def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        self.rollouts += 1
        return forced_samples(self.rollouts - 1, len(prompt_ids)), None

    def compute_loss(self, *arguments: Any, **options: Any) -> Tensor:
        loss = super().compute_loss(*arguments, **options)
        self.recorder.loss += loss.item()
        return loss


class StepRecorder(TrainerCallback):
    loss = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.run = Run(trained(model))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.run.weights.append(trained(model))
        self.run.losses.append(self.loss)
        self.loss = 0.0


def config_of(folder: Path, changes: Mapping[str, Any]) -> GRPOConfig:
    return GRPOConfig(output_dir=str(folder), **{**SETTINGS, **changes})


def trl_run(folder: Path, changes: Mapping[str, Any], adapter: Mapping[str, Tensor] | None = None) -> Run:
    """``adapter``: the initial values of LoRA's weights."""
    lora = LoraConfig(r=LORA["rank"], lora_alpha=LORA["alpha"], target_modules=LORA["targets"], task_type="CAUSAL_LM")
    config = config_of(folder, changes)
    recorder, rollout = StepRecorder(), 0

    def shuffle(batch: dict[str, Any]) -> dict[str, Any]:
        nonlocal rollout
        generator = torch.Generator().manual_seed(derive_seed("mini-batches", config.seed, rollout))
        order = torch.randperm(len(batch["prompt_ids"]), generator=generator)
        rollout += 1
        return {name: value if value is None or not value.dim() else value[order] for name, value in batch.items()}

    with in_float64(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(trl.trainer.grpo_trainer, "shuffle_sequence_dict", shuffle)
        patch.setattr(
            trl.trainer.grpo_trainer, "create_model_from_path", lambda *_, **__: make_model()
        )  # the reference
        trainer = ForcedGRPOTrainer(
            make_model(),
            REWARDS[: len(changes.get("reward_weights") or [1])],
            args=config,
            train_dataset=Dataset.from_list(ROWS),
            processing_class=tiny_tokenizer(),
            callbacks=[recorder],
            peft_config=lora if adapter is not None else None,
        )
        trainer.recorder = recorder
        if adapter is not None:
            trainer.model.load_state_dict(adapter, strict=False)
        trainer.train()
    return recorder.run


# --- groupwise --------------------------------------------------------------------------------------------------------


class ForcedGenerator(LocalGenerator):
    """Returns the completions that ``take`` gives for a number of them, with the log-probs of the current policy."""

    def __init__(self, handle: Any, take: Callable[[int], list[list[int]]]) -> None:
        super().__init__(64)
        self.handle, self.take = handle, take

    def generate(self, prompts: Any, samples: int, sampling: Any, **_: Any) -> Rollout:
        completions = [torch.tensor(ids) for ids in self.take(len(prompts) * samples)]
        groups = [completions[start : start + samples] for start in range(0, len(completions), samples)]
        with torch.no_grad():
            result = completion_logps(self.handle, prompts, groups, temperature=sampling.temperature)
        ids = torch.nn.utils.rnn.pad_sequence(completions, batch_first=True)
        return Rollout(
            ids=ids,
            lengths=torch.tensor([len(completion) for completion in completions]),
            logps=result.logps.to(torch.float32),
            filtered_logps=result.logps.to(torch.float32),
            stop_reasons=tuple("eos" if completion[-1] == EOS else "length" for completion in completions),
            groups=torch.arange(len(prompts)).repeat_interleave(samples),
            versions=torch.zeros(ids.shape, dtype=torch.int32),
        )


class RunRecorder(Callback):
    def on_start(self, trainer: Trainer) -> None:
        self.run = Run(trained(trainer.components.model))

    def on_step(self, trainer: Trainer, report: Any) -> None:
        self.run.losses.append(report.metrics["loss"])
        self.run.weights.append(trained(trainer.components.model))


def our_run(folder: Path, changes: Mapping[str, Any], *, lora: bool = False) -> Run:
    recorder = RunRecorder()
    more = {
        "model.dtype": "float64",
        "run.checkpoint_every": 0,
        "run.plot": False,
        **({"model.lora": LORA} if lora else {}),
    }
    recipe = translate(config_of(folder, changes), rows=len(ROWS)).recipe(more)
    weights = changes.get("reward_weights") or [1.0]
    rewards = [named(function, weight) for function, weight in zip(REWARDS, weights, strict=False)]
    rollouts = itertools.count()
    with in_float64(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            groupwise.training.trainer,
            "make_generator",
            lambda recipe, handle, ranks: ForcedGenerator(handle, lambda count: forced_samples(next(rollouts), count)),
        )
        trainer = Trainer(
            recipe,
            task=Task("forced", ROWS),
            rewards=rewards,
            model=make_model(),
            tokenizer=tiny_tokenizer(),
            callbacks=[recorder],
            display=RecordingDisplay(),
            folder=folder / "run",
        )
        trainer.run()
    return recorder.run
