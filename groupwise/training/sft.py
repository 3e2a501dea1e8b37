"""A supervised warm-up: some steps on a task's examples, so that the model knows what an answer looks like. With
train.steps = 0 it is the whole run: supervised fine-tuning, for comparison."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from groupwise.core.losses import aggregation_weights
from groupwise.data import Order
from groupwise.errors import ConfigError
from groupwise.model.logprobs import each_pack
from groupwise.model.precision import MasterWeights
from groupwise.training.components import RunComponents
from groupwise.training.errors import NotFiniteError, OutOfMemoryError
from groupwise.training.monitor.log_prob_mismatch import has_dropout
from groupwise.training.rollout.collector import derive_seed

if TYPE_CHECKING:
    from groupwise.training.trainer import Trainer

Progress = Callable[[int, dict[str, float]], None]
"""Called after each step with its number, from 1, and its metrics."""


def run_sft(trainer: Trainer) -> int:
    """The supervised steps of a run, if it has any. Where they are the whole run, they are recorded as its steps.

    How many were done; 0 if somebody asked for the end before the last one, as the warm-up is not saved by halves.
    """
    own = trainer.sft
    if own is None:
        return 0

    def tell(step: int, metrics: dict[str, float]) -> None:
        trainer.display.stage(f"warm-up {step} of {own.steps}")
        if trainer.supervised and trainer.records is not None:
            trainer.records.step(step, metrics)

    trainer.display.stage("warm-up")
    done = own.run(trainer.masters, trainer.updater.token_budget, tell, lambda: bool(trainer.stopping))
    if done < own.steps:
        trainer.say(f"stopped after {done} of {own.steps} steps of the warm-up, which is not saved and begins anew")
        return 0
    return done


class SupervisedFineTuning:
    """The examples of a task as token ids, and how many steps the recipe makes of them."""

    def __init__(self, components: RunComponents) -> None:
        self.components, self.how = components, components.recipe.sft
        column = components.recipe.data.prompt
        prompts = components.builder.build([{column: prompt} for prompt, _ in components.task.examples], column)
        texts = [components.task.examples[number][1] for number in components.builder.kept]
        end = components.tokenizer.eos_token_id
        self.prompts = [prompt.ids for prompt in prompts]
        self.answers = [[*ids, end] for ids in components.tokenizer(texts, add_special_tokens=False)["input_ids"]]
        self.steps = self.how.steps
        if self.how.epochs is not None:
            self.steps = math.ceil(len(self.prompts) * self.how.epochs / self.how.batch_size)
        self._check_window()

    def run(
        self,
        masters: MasterWeights,
        token_budget: int,
        progress: Progress = lambda step, metrics: None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> int:
        """Train on the answers, each followed by the end of text; how many steps were done before it was stopped.

        No pass holds more than ``token_budget`` tokens, or the longest example.
        """
        optimizer = torch.optim.AdamW(masters.parameters(), lr=self.how.learning_rate, weight_decay=0.0)
        draw = self._draw()
        for step in range(self.steps):
            if stopping():
                return step
            rate = self.how.learning_rate * (1 - step / self.steps)
            if has_dropout(self.components.recipe):
                torch.manual_seed(derive_seed(self.components.recipe.train.seed, 3, -1, step))
            try:
                loss = self._gradient(draw(), token_budget)
            except torch.OutOfMemoryError as error:
                raise OutOfMemoryError(
                    f"memory ran out in the warm-up, in passes of {token_budget:,} tokens; lower train.token_budget, "
                    "or use model.gradient_checkpointing = true or [model.lora]"
                ) from error
            norm = float(torch.nn.utils.clip_grad_norm_(list(masters.parameters()), 1.0))
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise NotFiniteError(
                    f"in step {step + 1} of the warm-up the loss is {loss:g} and the gradient's norm {norm:g}; the "
                    "weights have not moved. Lower sft.learning_rate"
                )
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            masters.sync_to_model()
            optimizer.zero_grad(set_to_none=True)
            progress(step + 1, {"loss": loss, "learning_rate": rate})
        return self.steps

    def _check_window(self) -> None:
        longest = max(len(prompt) + len(answer) for prompt, answer in zip(self.prompts, self.answers, strict=True))
        window = self.components.handle.window
        if window is not None and longest > window:
            raise ConfigError(
                f"the longest example of the warm-up has {longest} tokens, more than the model's window of {window}; "
                "lower data.max_prompt_length, or shorten the answers of the task's examples"
            )

    def _draw(self) -> Callable[[], list[int]]:
        """The examples of one step after another: any at random, or with epochs each as often as every other."""
        seed, size = derive_seed(self.components.recipe.train.seed, 1), self.how.batch_size
        if self.how.epochs is not None:
            order = Order(len(self.prompts), seed=seed)
            return lambda: order.take(size)
        generator = torch.Generator().manual_seed(seed)
        return lambda: torch.randint(len(self.prompts), (size,), generator=generator).tolist()

    def _gradient(self, chosen: list[int], token_budget: int) -> float:
        """Add up the gradients of these examples' mean loss per token; the loss."""
        prompts, answers = [self.prompts[i] for i in chosen], [[self.answers[i]] for i in chosen]
        longest = max(len(prompt) + len(own[0]) for prompt, own in zip(prompts, answers, strict=True))
        total = sum(len(own[0]) for own in answers)
        value = 0.0
        for _, found in each_pack(self.components.handle, prompts, answers, token_budget=max(token_budget, longest)):
            weights = aggregation_weights(found.mask, "token_mean", total_tokens=total)
            loss = -(found.logps * weights).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            value += float(loss.detach())
        return value
