"""The collector of a run, and the order of its rows, from their parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from groupwise.config import Recipe
from groupwise.data import DrawShares, Order, PassRateOrder, PassRates
from groupwise.distributed.ranks import Ranks
from groupwise.errors import ConfigError
from groupwise.generate.sharded import ShardedGenerator
from groupwise.generate.types import Generator
from groupwise.grouping.grouper import SimilarityGrouper
from groupwise.grouping.sharded import ShardedGrouper
from groupwise.rewards import Scorer
from groupwise.text import Say
from groupwise.training.components import RunComponents
from groupwise.training.display.base import Display
from groupwise.training.rollout.async_collector import AsyncCollector
from groupwise.training.rollout.batch import Batch, GroupAdvantages
from groupwise.training.rollout.collector import RolloutCollector
from groupwise.training.rollout.episodes import ConversationSampler
from groupwise.training.rollout.penalties import PENALTIES, penalty_names
from groupwise.training.rollout.shared_collector import SharedCollector


def make_order(recipe: Recipe, rows: int) -> tuple[Order, PassRates | None]:
    """The order of a run's training rows, and the pass rates that it depends on, if it does."""
    data, seed = recipe.data, recipe.train.seed
    if data.sampling == "uniform":
        return Order(rows, shuffle=data.shuffle, seed=seed), None
    rates = PassRates(rows, data.pass_rate_memory)
    shares = DrawShares(data.solved_pass_rate, data.solved_share, data.unsolved_pass_rate, data.unsolved_share)
    return PassRateOrder(rates, shares, rows, shuffle=data.shuffle, seed=seed), rates


def make_collector(
    components: RunComponents,
    generator: Generator,
    order: Order,
    compute_advantages: Callable[[Batch, Recipe], GroupAdvantages],
    *,
    grouper: SimilarityGrouper | None,
    display: Display,
    say: Say,
    folder: Path,
    stopped: Callable[[], bool],
    ranks: Ranks,
) -> RolloutCollector:
    """The collector of a run: asynchronous if ``train.max_staleness`` is above 0."""
    recipe, scorer = components.recipe, components.scorer
    penalties = penalty_names(recipe, components.driven)
    for function in () if scorer is None else scorer.functions:
        if function.name in penalties:
            raise ConfigError(
                f"the reward {function.name!r} has the name of the penalty that {PENALTIES[function.name]} adds; give "
                "it another one (name in [[rewards]])"
            )
    if recipe.train.max_staleness and isinstance(generator, ShardedGenerator):  # rank 0 uses them alone
        if not generator.remote:
            raise ConfigError(
                f"train.max_staleness {recipe.train.max_staleness} samples ahead, which the generator "
                f"{recipe.sampling.generator!r} of several processes cannot do; set it to 0"
            )
        generator = generator.inner
        grouper = grouper.inner if isinstance(grouper, ShardedGrouper) else grouper
        if scorer is not None:
            scorer = Scorer(scorer.functions, timeout=scorer.timeout, on_error=scorer.on_error)
    inputs = (components.tokenizer, components.train.rows, components.train.prompts, scorer, order, compute_advantages)
    settings: dict[str, Any] = {
        "prompt_column": recipe.data.prompt,
        "seed": recipe.train.seed,
        "stop": components.stop,
        "penalties": penalties,
        "grouper": grouper,
        "conversations": make_conversations(components, recipe.train.seed),
        "say": say,
        "display": display,
    }
    if not recipe.train.max_staleness:
        return RolloutCollector(generator, *inputs, **settings)
    settings |= {"recipe": recipe, "folder": folder, "stopped": stopped}
    if ranks.size == 1:
        return AsyncCollector(generator, *inputs, **settings)
    return SharedCollector(generator, *inputs, **settings, ranks=ranks)


def make_conversations(components: RunComponents, seed: int) -> ConversationSampler | None:
    """What samples conversations; None if completions are none."""
    if components.environment is None:
        return None
    make: Callable[..., ConversationSampler] = components.environment.sampler or ConversationSampler
    return make(components.episodes, components.builder, components.recipe.data.prompt, seed)
