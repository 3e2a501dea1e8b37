"""AdamW on the master weights: separate groups for embeddings and for what weight decay applies to."""

from __future__ import annotations

from typing import Any

import torch

from groupwise.config import Recipe
from groupwise.model.precision import MasterWeights
from groupwise.text import Say
from groupwise.training.schedule.learning_rate import warmup_decay


def make_optimizer(
    recipe: Recipe, model: Any, masters: MasterWeights, say: Say = lambda text: None
) -> torch.optim.AdamW:
    """Input embeddings may have their own learning rate, and only matrices have weight decay.

    The head never has the embeddings' rate. If head and embeddings are the same matrix, it has the ordinary rate,
    unless optimizer.tied_embedding_rate is set; a rate that is not applied is reported.
    """
    settings = recipe.optimizer
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    tied = outputs is not None and outputs.weight is inputs.weight
    embeddings = {name for name, parameter in model.named_parameters() if parameter is inputs.weight}
    if tied and not settings.tied_embedding_rate:
        embeddings = set()
    trained = {name for name, _ in masters.named_parameters()}
    rate = settings.embedding_learning_rate
    if rate not in (None, settings.learning_rate) and not embeddings & trained:
        why = "are not trained" if embeddings else "are also the head (optimizer.tied_embedding_rate = true applies it)"
        say(f"optimizer.embedding_learning_rate {rate:g} is not applied: the embeddings {why}")
    matrices = {name for name, parameter in model.named_parameters() if parameter.dim() > 1}  # a master may be a slice
    groups: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {}
    for name, master in masters.named_parameters():
        groups.setdefault((name in embeddings, name in matrices), []).append(master)
    return torch.optim.AdamW(
        [
            {"params": members, "embedding": is_embedding, "decays": decays}
            for (is_embedding, decays), members in sorted(groups.items())
        ],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=0.0,
        fused=next(masters.parameters()).is_cuda,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, step_recipe: Recipe, step: int, total_steps: int) -> None:
    """Set the rate and weight decay of each group of `make_optimizer` for a step (from 0)."""
    settings = step_recipe.optimizer
    factor = warmup_decay(
        step,
        warmup_steps=settings.warmup_steps,
        total_steps=total_steps,
        shape=settings.lr_schedule,
        final=settings.final_lr_ratio,
    )
    for group in optimizer.param_groups:
        rate = settings.embedding_learning_rate if group["embedding"] else None
        group["lr"] = factor * (settings.learning_rate if rate is None else rate)
        group["weight_decay"] = settings.weight_decay if group["decays"] else 0.0
