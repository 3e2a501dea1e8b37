"""What verl loads through its entry point ``verl.plugins``.

Every process of a run loads this, in the middle of verl's own import, so it does next to nothing: it waits until verl
itself imports the module that holds a registry, and adds to it then. Whatever goes wrong must not take verl down with
it for those who have groupwise installed and do not use it; it is a warning, and the name is missing from the registry.
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

    for mode, own in MODES.items():
        if mode not in TRAINER_REGISTRY:
            register_trainer(mode)(similarity_trainer(TRAINER_REGISTRY[own], own))


class _AfterImport(MetaPathFinder):
    """Calls a function when a module has been imported. It looks for the module once and is gone."""

    def __init__(self, module: str, function: Callable[[], None]) -> None:
        self._module = module
        self._function = function

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
            "groupwise could not add itself to verl (%s: %s); python -m groupwise.integrations.verl says more",
            type(error).__name__,
            error,
        )


_after_import(ESTIMATORS, register_estimator)
_after_import(TRAINERS, register_trainers)
