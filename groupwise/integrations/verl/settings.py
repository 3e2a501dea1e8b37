"""A run's grouping section, from verl's configuration.

verl's configuration is closed, but Hydra adds to it with a plus: ``+algorithm.similarity.embedder=minilm``. The keys
are those of the section [grouping] in a recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from groupwise.config import GroupingSection, make_recipe
from groupwise.errors import ConfigError
from groupwise.integrations.verl import ESTIMATOR, SETTINGS

WHERE = f"algorithm.{SETTINGS}"
NOT_HERE = {
    "skip_single_members": "verl computes rewards while answers are sampled, before they can be put into groups",
    "log_diversity": "this trainer mode always puts answers into groups",
    "ray_address": "verl's own Ray is used",
    "ray_host": "verl's own Ray is used",
}


def read_settings(config: Any) -> GroupingSection:
    """The grouping section that ``algorithm.similarity`` holds, or the default one."""
    from omegaconf import OmegaConf

    if config.algorithm.adv_estimator != ESTIMATOR:
        raise ConfigError(
            f"the trainer mode {config.trainer.v1.trainer_mode} puts answers into similarity groups, but "
            f"algorithm.adv_estimator is {config.algorithm.adv_estimator}, which does not use them; set it to "
            f"{ESTIMATOR}, or use verl's own trainer modes"
        )
    given = config.algorithm.get(SETTINGS)
    table = OmegaConf.to_container(given, resolve=True) if OmegaConf.is_config(given) else given
    if table is None:
        return GroupingSection()
    if not isinstance(table, Mapping):
        raise ConfigError(f"{WHERE} is {table!r}; set its keys, as in +{WHERE}.embedder=minilm")
    for key, reason in NOT_HERE.items():
        if key in table:
            raise ConfigError(f"{WHERE}.{key} means nothing here: {reason}; leave it out")
    return make_recipe({"grouping": dict(table)}, where=WHERE).grouping
