"""A supervised warm-up: a few steps on a task's examples, so that the model knows what an answer looks like."""

from __future__ import annotations

from collections.abc import Callable

import torch

from groupwise.core.losses import aggregation_weights
from groupwise.model.logprobs import completion_logps
from groupwise.model.precision import MasterWeights
from groupwise.train.rollout import chance
from groupwise.train.setup import Parts


def warm_up(parts: Parts, masters: MasterWeights, progress: Callable[[int, int], None]) -> float:
    """Train on the examples' answers, each followed by the end of text; the last step's loss per token."""
    how = parts.recipe.warm_up
    column = parts.recipe.data.prompt
    prompts = parts.builder.build([{column: prompt} for prompt, _ in parts.task.examples], column)
    texts = [parts.task.examples[number][1] for number in parts.builder.kept]
    end = parts.tokenizer.eos_token_id
    answers = [[*ids, end] for ids in parts.tokenizer(texts, add_special_tokens=False)["input_ids"]]
    optimizer = torch.optim.AdamW(masters.parameters(), lr=how.learning_rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(chance(parts.recipe.train.seed, 1))
    value = 0.0
    for step in range(how.steps):
        chosen = torch.randint(len(prompts), (how.batch_size,), generator=generator).tolist()
        found = completion_logps(
            parts.prepared, [prompts[i].ids for i in chosen], [[answers[i]] for i in chosen], token_budget=None
        )
        loss = -(found.logps * aggregation_weights(found.mask, "token_mean")).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(list(masters.parameters()), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = how.learning_rate * (1 - step / how.steps)
        optimizer.step()
        masters.publish()
        optimizer.zero_grad(set_to_none=True)
        value = float(loss.detach())
        progress(step + 1, how.steps)
    return value
