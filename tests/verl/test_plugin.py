"""verl finds the plugin through its entry point, in a process that does not import groupwise."""

from __future__ import annotations

from tests.verl.common import in_fresh_process

NAMES = """
import json, sys
import verl
early = [name for name in ("verl.trainer.ppo.core_algos", "groupwise.grouping") if name in sys.modules]
loaded = "groupwise.integrations.verl.plugin" in sys.modules
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.v1 import PPOTrainer
from verl.utils.config import validate_config
print(json.dumps({
    "loaded": loaded,
    "early": early,
    "estimator": "similarity_group_grpo" in ADV_ESTIMATOR_REGISTRY,
    "trainers": [trainer.__new__ is not object.__new__ for trainer in (PPOTrainer, RayPPOTrainer)],
    "validation": hasattr(validate_config, "__wrapped__"),
    "left": [type(finder).__name__ for finder in sys.meta_path if "groupwise" in type(finder).__module__],
}))
"""
EXTENDED = {"loaded": True, "early": [], "estimator": True, "trainers": [True, True], "validation": True, "left": []}
PLAIN = {"loaded": False, "early": [], "estimator": False, "trainers": [False, False], "validation": False, "left": []}


def test_entry_point_extends_verl():
    result, _ = in_fresh_process(NAMES)
    assert result == EXTENDED


def test_disabled_plugins():
    result, _ = in_fresh_process(NAMES, VERL_USE_EXTERNAL_PLUGINS="none")
    assert result == PLAIN


def test_plugin_as_external_module():
    result, _ = in_fresh_process(
        NAMES, VERL_USE_EXTERNAL_PLUGINS="none", VERL_USE_EXTERNAL_MODULES="groupwise.integrations.verl.plugin"
    )
    assert result == EXTENDED


def test_broken_plugin_is_only_a_warning():
    broken = "import sys\nsys.modules['groupwise.integrations.verl.trainer'] = None\n" + NAMES
    result, said = in_fresh_process(broken)
    assert result == EXTENDED | {"trainers": [False, False]}
    assert "groupwise could not register in verl (ModuleNotFoundError" in said
    assert "run python -m groupwise.integrations.verl" in said
