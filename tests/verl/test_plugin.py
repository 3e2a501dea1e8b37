"""verl finds the plugin through its entry point, in a process that does not import groupwise."""

from __future__ import annotations

from tests.verl.common import in_fresh_process

NAMES = """
import json, sys
import verl
early = [name for name in ("verl.trainer.ppo.core_algos", "groupwise.grouping") if name in sys.modules]
loaded = "groupwise.integrations.verl.plugin" in sys.modules
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
print(json.dumps({
    "loaded": loaded,
    "early": early,
    "estimator": "similarity_group_grpo" in ADV_ESTIMATOR_REGISTRY,
    "modes": sorted(TRAINER_REGISTRY),
    "left": [type(finder).__name__ for finder in sys.meta_path if "groupwise" in type(finder).__module__],
}))
"""
VERL_MODES = ["colocate_async", "separate_async", "sync"]
MODES = sorted([*VERL_MODES, *(f"similarity_{name}" for name in VERL_MODES)])


def test_entry_point_registers_estimator_and_modes():
    result, _ = in_fresh_process(NAMES)
    assert result == {"loaded": True, "early": [], "estimator": True, "modes": MODES, "left": []}


def test_disabled_plugins():
    result, _ = in_fresh_process(NAMES, VERL_USE_EXTERNAL_PLUGINS="none")
    assert result == {"loaded": False, "early": [], "estimator": False, "modes": VERL_MODES, "left": []}


def test_plugin_as_external_module():
    result, _ = in_fresh_process(
        NAMES, VERL_USE_EXTERNAL_PLUGINS="none", VERL_USE_EXTERNAL_MODULES="groupwise.integrations.verl.plugin"
    )
    assert result["modes"] == MODES


def test_broken_plugin_is_only_a_warning():
    broken = "import sys\nsys.modules['groupwise.integrations.verl.trainer'] = None\n" + NAMES
    result, said = in_fresh_process(broken)
    assert result["modes"] == VERL_MODES
    assert result["estimator"]
    assert "groupwise could not register in verl (ModuleNotFoundError" in said
    assert "run python -m groupwise.integrations.verl" in said


def test_registering_twice():
    from verl.trainer.ppo.v1 import get_trainer_cls

    from groupwise.integrations.verl.plugin import register_estimator, register_trainers

    before = get_trainer_cls("similarity_sync")
    register_estimator()
    register_trainers()
    assert get_trainer_cls("similarity_sync") is before
