"""The optimizer on the master weights: separate groups for embeddings and for what weight decay applies to."""

from __future__ import annotations

from typing import Any

import torch

from groupwise.config import Recipe
from groupwise.errors import ConfigError
from groupwise.model.precision import MasterWeights
from groupwise.model.sharded_masters import FsdpMasters, ShardedMasters
from groupwise.redaction import resolve_secrets
from groupwise.text import Say
from groupwise.training.schedule.learning_rate import learning_rate_factor
from groupwise.user_code import load_function

# These compute each number by itself, so that several processes can divide the weights among them.
ELEMENTWISE = (torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop)  # AdamW is an Adam


def make_optimizer(
    recipe: Recipe, model: Any, masters: MasterWeights, say: Say = lambda text: None
) -> torch.optim.Optimizer:
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
    kind, arguments = _kind(recipe, on_gpu=next(masters.parameters()).is_cuda)
    weights = [
        {"params": members, "embedding": is_embedding, "decays": decays}
        for (is_embedding, decays), members in sorted(groups.items())
    ]
    arguments = {"lr": settings.learning_rate, **arguments, **resolve_secrets(settings.options, "optimizer.options")}
    try:
        optimizer: torch.optim.Optimizer = kind(weights, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"optimizer.name {settings.name!r} with options {settings.options}: {error}") from error
    check_optimizer(optimizer, masters, f"optimizer.name {settings.name!r}")
    return optimizer


def _kind(recipe: Recipe, *, on_gpu: bool) -> tuple[Any, dict[str, Any]]:
    """The optimizer's class, and its arguments besides the rate and the recipe's options."""
    settings = recipe.optimizer
    if settings.name == "adamw":
        betas = (settings.beta1, settings.beta2)
        return torch.optim.AdamW, {"betas": betas, "eps": settings.eps, "weight_decay": 0.0, "fused": on_gpu}
    if settings.name == "adafactor":  # with the learning rate of the recipe, as transformers' Trainer uses it
        from transformers.optimization import Adafactor

        return Adafactor, {"scale_parameter": False, "relative_step": False}
    torch_optimizers = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop}
    return torch_optimizers.get(settings.name) or load_function(settings.name, what="optimizer"), {}


def check_optimizer(optimizer: Any, masters: MasterWeights, name: str) -> None:
    """Raise an error for an optimizer that a run cannot use."""
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(f"{name} is not a torch optimizer that takes one gradient per step; use another")
    if isinstance(masters, (ShardedMasters, FsdpMasters)) and not isinstance(optimizer, ELEMENTWISE):
        kinds = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise ConfigError(
            f"{name}: several processes divide the weights among them, which {type(optimizer).__name__} may not "
            f"support; use one process, or AdamW, {kinds}"
        )


def set_learning_rate(optimizer: torch.optim.Optimizer, step_recipe: Recipe, step: int, total_steps: int) -> None:
    """Set the rate of each group for a step (from 0), and the weight decay of the groups of `make_optimizer`."""
    settings = step_recipe.optimizer
    factor = learning_rate_factor(settings, step, total_steps)
    for group in optimizer.param_groups:
        if "embedding" not in group:  # of a `UserOptimizer`
            group["lr"] = factor * group["initial_lr"]
            continue
        rate = settings.embedding_learning_rate if group["embedding"] else None
        group["lr"] = factor * (settings.learning_rate if rate is None else rate)
        group["weight_decay"] = settings.weight_decay if group["decays"] else 0.0
