"""The grouping section, from verl's configuration, and the checks before a run.

Hydra adds keys to it with a plus: ``+algorithm.similarity.embedder=minilm``. The keys are those of [grouping] in a
recipe.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from groupwise.config import GroupingSection, make_recipe
from groupwise.errors import ConfigError
from groupwise.grouping.embed import check_embedder
from groupwise.integrations.verl import ESTIMATOR

WHERE = "algorithm.similarity"
UNSUPPORTED = {
    "skip_single_members": "verl computes the reward of an answer when it is sampled, before the answers are grouped",
    "log_diversity": f"{ESTIMATOR} always groups answers",
    "ray_address": "verl's Ray is used",
    "ray_host": "verl's Ray is used",
}


def check_config(config: Any) -> None:
    """Raise an error if verl cannot train with this configuration and similarity groups; called before Ray starts."""
    if uses_similarity(config):
        with verl_names():
            check_embedder(read_settings(config).embedder)
        if (answers := config.actor_rollout_ref.rollout.n) < 2:
            raise ConfigError(
                f"actor_rollout_ref.rollout.n is {answers}, so every answer would be alone in its group, with an "
                f"advantage of 0; set it to 2 or more for {ESTIMATOR} (8 is usual)"
            )
    elif config.algorithm.get("similarity") is not None:
        raise ConfigError(
            f"{WHERE} is set, but algorithm.adv_estimator is {config.algorithm.adv_estimator}, which does not use it; "
            f"set algorithm.adv_estimator={ESTIMATOR}, or remove {WHERE}"
        )


def uses_similarity(config: Any) -> bool:
    """Whether this configuration of verl selects the estimator."""
    return bool(config.algorithm.adv_estimator == ESTIMATOR)


def read_settings(config: Any) -> GroupingSection:
    """The grouping section in ``algorithm.similarity``, or the default one."""
    from omegaconf import OmegaConf

    section = config.algorithm.get("similarity")
    table = OmegaConf.to_container(section, resolve=True) if OmegaConf.is_config(section) else section
    if table is None:
        return GroupingSection()
    if not isinstance(table, Mapping):
        raise ConfigError(f"{WHERE} is {table!r}; set its keys, as in +{WHERE}.embedder=minilm")
    for key, reason in UNSUPPORTED.items():
        if key in table:
            raise ConfigError(f"{WHERE}.{key} is not supported in verl: {reason}; remove it")
    with verl_names():
        return make_recipe({"grouping": dict(table)}, where=WHERE).grouping


@contextmanager
def verl_names() -> Iterator[None]:
    """Inside, errors name settings as verl does: ``algorithm.similarity.KEY`` instead of ``grouping.KEY``."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(re.sub(r"\bgrouping\.(?=[a-z_])", f"{WHERE}.", str(error))) from None
