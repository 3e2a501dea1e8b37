"""The entry point ``verl.plugins``.

Every process of a run loads this module while it imports verl. It registers the estimator, makes the estimator select
trainers that group answers, and adds checks to verl's validation, each once verl has imported the module concerned. An
error must not break verl for users who do not use groupwise: it is logged as a warning.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from groupwise.integrations.verl import ESTIMATOR

log = logging.getLogger("groupwise")


def register_estimator() -> None:
    """Add the advantage estimator to verl's registry."""
    from verl.trainer.ppo.core_algos import register_adv_est

    from groupwise.integrations.verl.estimator import similarity_group_grpo

    register_adv_est(ESTIMATOR)(similarity_group_grpo)


def extend_v1_trainer() -> None:
    """Let the estimator select a trainer with similarity groups, in every mode of verl's V1 trainer."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from groupwise.integrations.verl.trainer import select_by_estimator

    select_by_estimator(PPOTrainer)


def extend_classic_trainer() -> None:
    """The same for verl's classic Ray trainer."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    from groupwise.integrations.verl.trainer import select_by_estimator

    select_by_estimator(RayPPOTrainer)


def extend_validation() -> None:
    """Check the settings of similarity groups where verl checks its own: before it starts Ray and loads models."""
    from verl.utils import config as verl_config

    validate = verl_config.validate_config

    @functools.wraps(validate)
    def validate_config(config: Any, *arguments: Any, **keywords: Any) -> None:
        if config.algorithm.adv_estimator == ESTIMATOR or config.algorithm.get("similarity") is not None:
            from groupwise.integrations.verl.settings import check_config

            check_config(config)
        validate(config, *arguments, **keywords)

    verl_config.validate_config = validate_config


class _AfterImport(MetaPathFinder):
    """Calls a function once a module has been imported, then removes itself."""

    def __init__(self, module: str, function: Callable[[], None]) -> None:
        self._module, self._function = module, function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader = spec.loader if spec is not None else None
        if loader is None:
            return spec
        run = loader.exec_module

        def run_and_call(module: ModuleType) -> None:
            run(module)
            _try(self._function)

        loader.exec_module = run_and_call  # type: ignore[method-assign]
        return spec


def _after_import(module: str, function: Callable[[], None]) -> None:
    if module in sys.modules:
        _try(function)
    else:
        sys.meta_path.insert(0, _AfterImport(module, function))


def _try(function: Callable[[], None]) -> None:
    try:
        function()
    except Exception as error:
        log.warning(
            "groupwise could not register in verl (%s: %s); run python -m groupwise.integrations.verl for details",
            type(error).__name__,
            error,
        )


_after_import("verl.trainer.ppo.core_algos", register_estimator)
_after_import("verl.trainer.ppo.v1.trainer_base", extend_v1_trainer)
_after_import("verl.trainer.ppo.ray_trainer", extend_classic_trainer)
_after_import("verl.utils.config", extend_validation)
