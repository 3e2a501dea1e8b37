"""verl's own loader finds the plugin through the entry point, in a process that has never heard of groupwise."""

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
OWN = ["colocate_async", "separate_async", "sync"]
MODES = sorted([*OWN, *(f"similarity_{name}" for name in OWN)])


def test_the_entry_point_registers_an_estimator_and_a_mode_for_each_of_verls():
    found, _ = in_fresh_process(NAMES)
    assert found == {"loaded": True, "early": [], "estimator": True, "modes": MODES, "left": []}


def test_without_plugins_verl_has_only_its_own():
    found, _ = in_fresh_process(NAMES, VERL_USE_EXTERNAL_PLUGINS="none")
    assert found == {"loaded": False, "early": [], "estimator": False, "modes": OWN, "left": []}


def test_the_plugin_can_be_named_where_there_is_no_entry_point():
    found, _ = in_fresh_process(
        NAMES, VERL_USE_EXTERNAL_PLUGINS="none", VERL_USE_EXTERNAL_MODULES="groupwise.integrations.verl.plugin"
    )
    assert found["modes"] == MODES


def test_a_broken_plugin_is_a_warning_and_leaves_verl_whole():
    broken = "import sys\nsys.modules['groupwise.integrations.verl.trainer'] = None\n" + NAMES
    found, said = in_fresh_process(broken)
    assert found["modes"] == OWN
    assert found["estimator"]
    assert "groupwise could not add itself to verl (ModuleNotFoundError" in said
    assert "python -m groupwise.integrations.verl says more" in said


def test_registering_twice_is_registering_once():
    from verl.trainer.ppo.v1 import get_trainer_cls

    from groupwise.integrations.verl.plugin import register_estimator, register_trainers

    before = get_trainer_cls("similarity_sync")
    register_estimator()
    register_trainers()
    assert get_trainer_cls("similarity_sync") is before
