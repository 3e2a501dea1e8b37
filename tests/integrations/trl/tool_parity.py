"""The same conversations with tools in TRL's trainer and in the drop-in, in float64. Import it late: TRL takes seconds
to load."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import trl.trainer.grpo_trainer
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

import groupwise.integrations.trl.trainer
import groupwise.training.trainer
from groupwise.generate.local import LocalGenerator
from groupwise.generate.types import Rollout
from groupwise.integrations.trl.trainer import GRPOTrainer as DropIn
from groupwise.model.logprobs import completion_logps
from groupwise.seeds import derive_seed
from groupwise.trl import GRPOConfig as DropInConfig
from tests.integrations.trl.fixtures import tool_tokenizer
from tests.integrations.trl.log_parity import parity_reward, without_times
from tests.integrations.trl.parity import SETTINGS, in_float64, length_reward, trained
from tests.model.models import SIZE

LONGEST = 256
TOKENIZER = tool_tokenizer()
CHANGES = {"max_completion_length": LONGEST, "max_steps": 3, "logging_steps": 1}
ROWS = [{"prompt": [{"role": "user", "content": f"What is {n} times 3?"}], "number": n} for n in range(6)]


def make_model() -> LlamaForCausalLM:
    special = {"pad_token_id": TOKENIZER.pad_token_id, "bos_token_id": None, "eos_token_id": TOKENIZER.eos_token_id}
    config = LlamaConfig(**{**SIZE, **special, "vocab_size": len(TOKENIZER), "num_hidden_layers": 2})
    config.max_position_embeddings = 2048
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, mean=float(weight.dim() == 1), std=0.2)
    return model.to(torch.float64)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def forced_turn(context: Sequence[int], number: int) -> list[int]:
    """The turn of sample ``number`` after these tokens: a call, two calls, an answer, or one that has no end."""
    seed = derive_seed("turn", *context, number)
    digit, kind = seed % 7, seed // 7 % 6
    said = {
        0: f"It is {seed % 30}.",
        1: call("multiply", a=digit, b=3),
        2: call("multiply", a=digit, b=2),
        3: f"{call('multiply', a=1, b=digit)}\n{call('look', place='Paris')}",
        4: f"{seed} " * 60,  # often cut off
        5: call("look", place="Rome"),  # its result is too long
    }
    answered = list(context).count(TOKENIZER.convert_tokens_to_ids("<tool_response>"))
    if (answered >= 1 and kind == 3) or (answered >= 2 and kind != 4):
        kind = 0  # a call that is cut off is shown in another way
    turn: list[int] = TOKENIZER(said[kind] + "<|im_end|>")["input_ids"]
    return turn


def multiply(a: int, b: int) -> str:
    """Multiplies two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return f"{a * b}"


async def look(place: str) -> str:
    """Looks at a place.

    Args:
        place: The place.
    """
    return f"{place} is far away." * (100 if place == "Rome" else 1)


class Till:
    """Adds up what was multiplied."""

    def reset(self, number: int, **_: Any) -> str:
        self.number, self.sum = number, 0
        return f" You may pay {number} euros."

    def multiply(self, a: int, b: int) -> str:
        """Multiplies two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        self.sum += a * b
        return f"{a * b}, in all {self.sum}"

    async def look(self, place: str) -> str:
        """Looks at a place.

        Args:
            place: The place.
        """
        self.sum += 1
        return f"{place} is far away." * (100 if place == "Rome" else 1)

    def get_reward(self) -> float:
        return self.sum % 64 / 64


class Counter:
    """Has no reward and says nothing at the start."""

    def reset(self, **_: Any) -> None:
        self.sum = 0

    def multiply(self, a: int, b: int) -> str:
        """Multiplies two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        self.sum += 1
        return f"{a * b}"


@dataclass
class Seen:
    """What rewards were called with, and what was logged."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    logs: list[dict[str, Any]] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)

    def reward(self, prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        sums = [entry.sum for entry in columns.get("environments", ())]
        rolled_out = {name: columns[name] for name in ("score", "world", "env_mask") if name in columns}
        messages = [
            completion if isinstance(completion, str) else [_without_id(message) for message in completion]
            for completion in completions
        ]
        own = {"ids": completion_ids, "sums": sums, **rolled_out}
        self.calls.append({"prompts": prompts, "completions": messages, **own})
        return parity_reward(completion_ids)


class Rollouts:
    """A ``rollout_func`` of random tokens, of which an environment gave some; each call has others."""

    def __init__(self) -> None:
        self.prompts: list[Any] = []

    def __call__(self, prompts: Any, trainer: Any) -> dict[str, Any]:
        ids, output = trainer.processing_class, {"prompt_ids": [], "completion_ids": [], "env_mask": [], "score": []}
        generator = torch.Generator().manual_seed(len(self.prompts))
        self.prompts.append(prompts)
        for number, prompt in enumerate(prompts):
            text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
            length = int(torch.randint(4, 20, (), generator=generator))
            completion = torch.randint(250, (length,), generator=generator).tolist()
            mask = [1, *torch.randint(2, (length - 1,), generator=generator).tolist()]
            if number % 3 == 0:
                mask = [0, *mask[:-1]]  # the environment begins
            output["prompt_ids"].append(ids(text + "!" * (number % 2))["input_ids"])
            output["completion_ids"].append(completion if number % 4 else [*completion[:-1], ids.eos_token_id])
            output["env_mask"].append(mask)
            output["score"].append(number / 16)
        return {**output, "logprobs": [[-1.0] * len(mask) for mask in output["env_mask"]], "world": "flat"}


def _without_id(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "tool_call_id"}  # TRL's tool messages have none


class ForcedTurns(LocalGenerator):
    """Returns the forced turns, with the log-probs of the current policy."""

    def __init__(self, handle: Any) -> None:
        super().__init__(64)
        self.handle = handle

    def generate(self, prompts: Any, samples: Any, sampling: Any, **_: Any) -> Rollout:
        counts = [samples] * len(prompts) if isinstance(samples, int) else list(samples)
        groups = [
            [torch.tensor(forced_turn(prompt, number)[: sampling.max_new_tokens]) for number in range(count)]
            for prompt, count in zip(prompts, counts, strict=True)
        ]
        completions = [completion for members in groups for completion in members]
        with torch.no_grad():
            logps = completion_logps(self.handle, prompts, groups, temperature=sampling.temperature).logps.float()
        ids = torch.nn.utils.rnn.pad_sequence(completions, batch_first=True)
        end = TOKENIZER.eos_token_id
        return Rollout(
            ids=ids,
            lengths=torch.tensor([len(completion) for completion in completions]),
            logps=logps,
            filtered_logps=logps,
            stop_reasons=tuple("eos" if completion[-1] == end else "length" for completion in completions),
            groups=torch.arange(len(prompts)).repeat_interleave(torch.tensor(counts)),
            versions=torch.zeros(ids.shape, dtype=torch.int32),
        )


class ForcedTrainer(GRPOTrainer):
    def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
        first, samples = prompt_ids[0][-40:], self.num_generations if self.model.training else self.num_generations_eval
        is_first = all(ids == prompt_ids[place - place % samples] for place, ids in enumerate(prompt_ids))
        is_first = is_first and len(prompt_ids) % samples == 0 and first == prompt_ids[samples - 1][-40:]
        numbers = [place % samples if is_first else 0 for place in range(len(prompt_ids))]
        turns = [forced_turn(ids, number) for ids, number in zip(prompt_ids, numbers, strict=True)]
        return [turn[: self.max_completion_length] for turn in turns], None


def run_trl(folder: Path, changes: dict[str, Any], **options: Any) -> Seen:
    config, rollout = GRPOConfig(output_dir=str(folder), **{**SETTINGS, **CHANGES, **changes}), 0

    def shuffle(batch: dict[str, Any]) -> dict[str, Any]:
        nonlocal rollout
        generator = torch.Generator().manual_seed(derive_seed("mini-batches", config.seed, rollout))
        order = torch.randperm(len(batch["prompt_ids"]), generator=generator)
        rollout += 1
        return {name: value if value is None or not value.dim() else value[order] for name, value in batch.items()}

    with in_float64(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(trl.trainer.grpo_trainer, "shuffle_sequence_dict", shuffle)
        patch.setattr(trl.trainer.grpo_trainer, "create_model_from_path", lambda *_, **__: make_model())
        return train(ForcedTrainer, config, **options)


def run_drop_in(folder: Path, changes: dict[str, Any], **options: Any) -> Seen:
    loading = {"model_init_kwargs": {"dtype": "float64"}}
    config = DropInConfig(output_dir=str(folder), **{**SETTINGS, **CHANGES, **changes, **loading})
    with in_float64(), pytest.MonkeyPatch.context() as patch:
        for module in (groupwise.training.trainer, groupwise.integrations.trl.trainer):
            patch.setattr(module, "make_generator", lambda recipe, handle, ranks: ForcedTurns(handle))
        return train(DropIn, config, **options)


def train(kind: Any, config: Any, **options: Any) -> Seen:
    seen = Seen()
    evaluated = Dataset.from_list(ROWS[:2]) if config.eval_strategy != "no" else None
    arguments = {"args": config, "train_dataset": Dataset.from_list(ROWS), "eval_dataset": evaluated}
    rewards = [seen.reward, length_reward][: len(config.reward_weights or [1])]
    trainer = kind(make_model(), rewards, processing_class=tool_tokenizer(), **{**arguments, **options})
    trainer.train()
    seen.logs = [without_times(entry) for entry in trainer.state.log_history]
    seen.weights = trained(trainer.model)
    return seen
