"""The grouping section, from verl's configuration.

Hydra adds keys to it with a plus: ``+algorithm.similarity.embedder=minilm``. The keys are those of [grouping] in a
recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from groupwise.config import GroupingSection, make_recipe
from groupwise.errors import ConfigError
from groupwise.integrations.verl import ESTIMATOR

WHERE = "algorithm.similarity"
UNSUPPORTED = {
    "skip_single_members": "verl computes rewards during sampling, before the answers are grouped",
    "log_diversity": "this trainer mode always groups answers",
    "ray_address": "verl's Ray is used",
    "ray_host": "verl's Ray is used",
}


def read_settings(config: Any) -> GroupingSection:
    """The grouping section in ``algorithm.similarity``, or the default one."""
    from omegaconf import OmegaConf

    if config.algorithm.adv_estimator != ESTIMATOR:
        raise ConfigError(
            f"the trainer mode {config.trainer.v1.trainer_mode} groups answers by similarity, but "
            f"algorithm.adv_estimator is {config.algorithm.adv_estimator}, which does not use them; set it to "
            f"{ESTIMATOR}, or use verl's trainer modes"
        )
    section = config.algorithm.get("similarity")
    table = OmegaConf.to_container(section, resolve=True) if OmegaConf.is_config(section) else section
    if table is None:
        return GroupingSection()
    if not isinstance(table, Mapping):
        raise ConfigError(f"{WHERE} is {table!r}; set its keys, as in +{WHERE}.embedder=minilm")
    for key, reason in UNSUPPORTED.items():
        if key in table:
            raise ConfigError(f"{WHERE}.{key} is not supported in verl: {reason}; remove it")
    return make_recipe({"grouping": dict(table)}, where=WHERE).grouping
