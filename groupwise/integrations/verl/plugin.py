"""The entry point ``verl.plugins``.

Every process of a run loads this module while it imports verl. It registers the estimator and the trainer modes once
verl has imported its registries. An error must not break verl for users who do not use groupwise: it is logged as a
warning.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from groupwise.integrations.verl import ESTIMATOR, MODES

log = logging.getLogger("groupwise")

ESTIMATORS = "verl.trainer.ppo.core_algos"
TRAINERS = "verl.trainer.ppo.v1"


def register_estimator() -> None:
    """Add the advantage estimator to verl's registry."""
    from verl.trainer.ppo.core_algos import register_adv_est

    from groupwise.integrations.verl.estimator import similarity_group_grpo

    register_adv_est(ESTIMATOR)(similarity_group_grpo)


def register_trainers() -> None:
    """Add the trainer modes to verl's registry, once."""
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, register_trainer

    from groupwise.integrations.verl.trainer import similarity_trainer

    for mode, base_mode in MODES.items():
        if mode not in TRAINER_REGISTRY:
            register_trainer(mode)(similarity_trainer(TRAINER_REGISTRY[base_mode], base_mode))


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


_after_import(ESTIMATORS, register_estimator)
_after_import(TRAINERS, register_trainers)
