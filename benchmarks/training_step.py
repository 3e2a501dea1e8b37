"""A training step alone: forward and backward passes over given completions, gradient clipping, AdamW."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from common import peak_memory, synchronize

from groupwise.config import make_recipe
from groupwise.core.losses import LOSSES
from groupwise.data import Prompt
from groupwise.model import MasterWeights
from groupwise.model.handle import ModelHandle
from groupwise.model.packing import default_token_budget
from groupwise.training.rollout.batch import Batch, GroupAdvantages
from groupwise.training.update.minibatch import build_minibatch
from groupwise.training.update.optimizer import make_optimizer
from groupwise.training.update.updater import Updater


class TrainingStep:
    """Steps of the updater with random completions and advantages: DAPO's loss, no KL, prompts computed once."""

    def __init__(self, handle: ModelHandle, clock: Callable[[], float] = time.perf_counter) -> None:
        self.handle, self.device, self.clock = handle, handle.device.type, clock
        settings = {
            "model": {"source": "none", "gradient_checkpointing": False},
            "optimizer": {"learning_rate": 1e-6},
            "loss": {"name": "dapo"},
        }
        self.recipe = make_recipe(settings)
        masters = MasterWeights(handle.model)
        self.updater = Updater(
            handle,
            masters,
            make_optimizer(self.recipe, handle.model, masters),
            None,
            default_token_budget(handle),
            LOSSES["dapo"],
        )

    def run(self, prompts: list[torch.Tensor], samples: int, lengths: list[int]) -> dict[str, Any]:
        """Seconds and peak memory of one update. ``lengths``: of all completions, prompt after prompt."""
        generator = torch.Generator().manual_seed(2)
        count, vocabulary = len(lengths), self.handle.vocabulary
        rewards = torch.rand(count, generator=generator, dtype=torch.float64)
        batch = Batch(
            rows=[{} for _ in prompts],
            row_numbers=list(range(len(prompts))),
            prompts=[Prompt(tuple(ids.tolist()), "") for ids in prompts],
            samples=samples,
            ids=[torch.randint(10, vocabulary, (length,), generator=generator) for length in lengths],
            texts=[""] * count,
            stop_reasons=["length"] * count,
            sampler_logps=[torch.zeros(length) for length in lengths],
            versions=[torch.zeros(length, dtype=torch.int32) for length in lengths],
            kept=None,
            rewards=rewards[:, None],
            dropped=torch.zeros(count, dtype=torch.bool),
        )
        none = torch.zeros(count, dtype=torch.bool)
        advantages = GroupAdvantages(rewards, batch.prompt_of, (rewards - 0.5).float(), {}, none)
        minibatch = build_minibatch(batch, advantages, range(len(prompts)), self.recipe)
        seconds: list[float] = []

        def step() -> None:
            synchronize(self.device)
            start = self.clock()
            self.updater.update(minibatch, self.recipe)
            synchronize(self.device)
            seconds.append(self.clock() - start)

        peak = peak_memory(self.device, step)
        return {"seconds": seconds[0], "peak": peak, "tokens": sum(map(len, prompts)) + sum(lengths)}
