"""Supervised fine-tuning on a task's examples before the first GRPO step, so that the model knows the answer's format.

With train.steps = 0 it is the complete run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from groupwise.conversations.examples import example_tokens
from groupwise.core.aggregation import aggregation_weights
from groupwise.core.sequences import TokenSequence
from groupwise.data import Order
from groupwise.distributed.ranks import Ranks
from groupwise.distributed.split import split_by_cost
from groupwise.errors import ConfigError, InputError, NotFiniteError
from groupwise.model.logprobs import TokenLogps, iter_packs
from groupwise.model.packing import Completion
from groupwise.model.precision import MasterWeights
from groupwise.seeds import derive_seed
from groupwise.training.components import RunComponents
from groupwise.training.errors import retry_with_less_memory


class SupervisedFineTuning:
    """A task's examples as token ids, and the number of steps that the recipe asks for."""

    def __init__(self, components: RunComponents) -> None:
        self.components, self.settings = components, components.recipe.sft
        column = components.recipe.data.prompt
        prompts = components.builder.build([{column: prompt} for prompt, _ in components.task.examples], column)
        self.prompts = [prompt.ids for prompt in prompts]
        self.completions = self._encode(components.builder.kept)
        self.steps = self.settings.steps
        if self.settings.epochs is not None:
            self.steps = math.ceil(len(self.prompts) * self.settings.epochs / self.settings.batch_size)
        pairs = zip(self.prompts, self.completions, strict=True)
        longest, window = max(len(prompt) + len(ids) for prompt, ids in pairs), components.handle.context_length
        if window is not None and longest > window:
            raise ConfigError(
                f"the longest example of SFT has {longest} tokens, more than the model's window of {window}; lower "
                "data.max_prompt_length, or shorten the completions of the task's examples"
            )

    def _encode(self, numbers: Sequence[int]) -> list[Completion]:
        """The tokens of the completions of these examples: texts, each with its end, and conversations."""
        components = self.components
        examples = [components.task.examples[number] for number in numbers]
        texts = [completion if isinstance(completion, str) else "" for _, completion in examples]
        completions: list[Completion] = [
            [*ids, components.tokenizer.eos_token_id]
            for ids in components.tokenizer(texts, add_special_tokens=False)["input_ids"]
        ]
        for place, (prompt, completion) in enumerate(examples):
            if isinstance(completion, str):
                continue
            name = f"example {numbers[place] + 1} of the task {components.task.name!r}"
            if components.episodes is None:
                raise ConfigError(f"{name} is a conversation; set environment.tools, or sft.steps = 0")
            try:
                messages = components.builder.messages(prompt)
                completions[place] = example_tokens(components.episodes.format, messages, completion)
            except InputError as error:
                raise ConfigError(f"{name} cannot be learned: {error}") from error
        return completions

    def run(
        self,
        masters: MasterWeights,
        token_budget: int,
        ranks: Ranks | None = None,
        progress: Callable[[int, dict[str, float]], None] = lambda step, metrics: None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> int:
        """Train on the completions, each followed by the end of text; the number of steps done before it was stopped.

        A forward pass holds at most ``token_budget`` tokens, or the longest example. ``progress`` is called after each
        step with its number (from 1) and its metrics.
        """
        ranks = ranks or Ranks()
        optimizer = torch.optim.AdamW(masters.parameters(), lr=self.settings.learning_rate, weight_decay=0.0)
        next_examples = self._example_order()
        for step in range(self.steps):
            if stopping():
                return step
            if self.components.has_dropout:
                torch.manual_seed(derive_seed("sft dropout", self.components.recipe.train.seed, step))
            examples = next_examples()
            loss = retry_with_less_memory(
                lambda examples=examples: self._backward(examples, token_budget, ranks),  # type: ignore[misc]
                too_large=lambda: (
                    f"memory ran out in SFT, in passes of {token_budget:,} tokens; lower train.token_budget, or use "
                    "model.gradient_checkpointing = true or [model.lora]"
                ),
            )
            masters.reduce_gradients()
            norm = masters.clip_gradient(1.0)
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise NotFiniteError(
                    f"in step {step + 1} of SFT the loss is {loss:g} and the gradient's norm {norm:g}; the weights "
                    "have not changed. Lower sft.learning_rate"
                )
            rate = self.settings.learning_rate * (1 - step / self.steps)
            for group in optimizer.param_groups:
                group["lr"] = rate
            with ranks.stage("stepping the optimizer of SFT"):
                optimizer.step()
            masters.check_finite(f"step {step + 1} of SFT", f"Lower sft.learning_rate (now {rate:g})")
            masters.sync_to_model()
            masters.zero_grad()
            progress(step + 1, {"loss": loss, "learning_rate": rate})
        return self.steps

    def _example_order(self) -> Callable[[], list[int]]:
        """The examples of one step after another: drawn at random, or with epochs each equally often."""
        seed, size = derive_seed("sft order", self.components.recipe.train.seed), self.settings.batch_size
        if self.settings.epochs is not None:
            order = Order(len(self.prompts), seed=seed)
            return lambda: order.take(size)
        generator = torch.Generator().manual_seed(seed)
        return lambda: torch.randint(len(self.prompts), (size,), generator=generator).tolist()

    def _backward(self, examples: list[int], token_budget: int, ranks: Ranks) -> float:
        """Accumulate the gradients of a rank's share of these examples' mean loss per token; the loss of all."""
        lengths = [len(self.prompts[i]) + len(self.completions[i]) for i in examples]
        total = sum(sampled_tokens(self.completions[i]) for i in examples)
        own = [examples[place] for place in split_by_cost(lengths, ranks.size)[ranks.rank]]
        prompts, completions = [self.prompts[i] for i in own], [[self.completions[i]] for i in own]
        value = 0.0
        with ranks.stage("SFT", exchanges=self.components.handle.sharded is not None):
            for _, tokens in self._packs(prompts, completions, max(token_budget, *lengths)):
                weights = aggregation_weights(tokens.mask, "token_mean", total_tokens=total)
                loss = -(tokens.logps * weights).sum()
                loss.backward()  # type: ignore[no-untyped-call]
                value += float(loss.detach())
        return float(sum(ranks.gather(value)))

    def _packs(
        self, prompts: list[tuple[int, ...]], completions: list[list[Completion]], token_budget: int
    ) -> Iterator[tuple[Tensor, TokenLogps]]:
        handle = self.components.handle
        if prompts or handle.sharded is not None:  # a rank may have no example
            yield from iter_packs(handle, prompts, completions, token_budget=token_budget)


def sampled_tokens(completion: Completion) -> int:
    """The number of tokens that are learned."""
    return len(completion.completion) if isinstance(completion, TokenSequence) else len(completion)
