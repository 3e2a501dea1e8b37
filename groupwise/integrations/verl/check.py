"""Checks whether similarity-group GRPO works in the installed verl.

verl only logs a warning if it cannot load a plugin. These checks use the installed verl and its plugin loader, and load
the embedder.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from groupwise.config import GroupingSection
from groupwise.errors import GroupwiseError
from groupwise.integrations.verl import ESTIMATOR, TESTED_VERSION
from groupwise.model.source import first_line

GROUP, PLUGIN = "verl.plugins", "groupwise.integrations.verl.plugin"


@dataclass(frozen=True)
class InstallationCheck:
    """The result of one check, with a remedy if it failed."""

    good: bool
    sentence: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"good: {self.sentence}" if self.good else f"BAD:  {self.sentence}. What to do: {self.remedy}."


def check_installation(embedder: str | None = None) -> list[InstallationCheck]:
    """Check verl, the plugin and the embedder (by default that of the grouping section)."""
    return [*_check_verl(), _check_embedder(GroupingSection().embedder if embedder is None else embedder)]


def _check_verl() -> Iterator[InstallationCheck]:
    """The findings, up to the first failure that makes later checks impossible."""
    try:
        version = metadata.version("verl")
    except metadata.PackageNotFoundError:
        remedy = "create a separate environment for verl and run there: pip install 'groupwise[verl]'"
        yield InstallationCheck(False, "verl is not installed", remedy)
        return
    untested = "" if version == TESTED_VERSION else f"; only {TESTED_VERSION} is tested"
    yield InstallationCheck(True, f"verl {version} is installed{untested}")
    yield _check_entry_point()
    try:
        importlib.import_module("verl.trainer.ppo.v1")
    except Exception as error:
        yield InstallationCheck(
            False,
            f"verl's trainer cannot be imported ({type(error).__name__}: {first_line(error)})",
            f"pip install 'verl[verl-core]=={TESTED_VERSION}'; the extra installs the packages that the trainer needs",
        )
        return
    registered = list(_check_extensions())
    yield from registered
    yield _check_signatures()
    if all(finding.good for finding in registered):
        yield _check_advantages()


def _check_entry_point() -> InstallationCheck:
    if PLUGIN in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(","):
        return InstallationCheck(True, "VERL_USE_EXTERNAL_MODULES makes verl load the plugin")
    names = [entry.name for entry in metadata.entry_points(group=GROUP) if entry.value == PLUGIN]
    if not names:
        return InstallationCheck(
            False,
            f"verl finds no entry point {GROUP} of groupwise",
            "install groupwise with pip (a folder on PYTHONPATH has no entry points), or set "
            f"VERL_USE_EXTERNAL_MODULES={PLUGIN} on every machine",
        )
    enabled = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    if enabled != "auto" and not {part.strip() for part in enabled.split(",")} & set(names):
        return InstallationCheck(
            False,
            f"VERL_USE_EXTERNAL_PLUGINS is {enabled!r}, which keeps verl from loading the plugin {names[0]}",
            f"unset it, or add {names[0]} to it",
        )
    return InstallationCheck(True, f"verl sees the entry point {GROUP} of groupwise, called {names[0]}")


def _check_extensions() -> Iterator[InstallationCheck]:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.trainer.ppo.v1 import PPOTrainer
    from verl.utils.config import validate_config

    remedy = "see the other findings, and the warning that is logged when verl's trainer is imported"
    present = ESTIMATOR in ADV_ESTIMATOR_REGISTRY
    yield InstallationCheck(
        present, f"the estimator {ESTIMATOR} is {'' if present else 'not '}registered in verl", remedy
    )
    created = all(trainer.__new__ is not object.__new__ for trainer in (PPOTrainer, RayPPOTrainer))
    extended = created and hasattr(validate_config, "__wrapped__")
    sentence = f"the estimator {'selects' if extended else 'does not select'} trainers with similarity groups"
    yield InstallationCheck(extended, sentence, remedy)


def _check_signatures() -> InstallationCheck:
    """The functions and classes of verl that are used accept the arguments they get."""
    import transfer_queue
    from verl.single_controller.ray import ResourcePoolManager
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.trainer.ppo.v1 import PPOTrainer
    from verl.utils.tensordict_utils import get_tensordict

    pools: dict[str, Any] = {"resource_pool_manager": None}
    expected: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
        (PPOTrainer.__init__, (None,), {"config": None}),
        (PPOTrainer.init, (None,), {}),
        (PPOTrainer.fit, (None, None), {}),
        (PPOTrainer._compute_advantage, (None, None), {"metrics": {}}),
        (RayPPOTrainer.__init__, (None,), {"config": None, "tokenizer": 0, "role_worker_mapping": {}, **pools}),
        (RayPPOTrainer.init_workers, (None,), {}),
        (RayPPOTrainer.fit, (None,), {}),
        (RayPPOTrainer._update_actor, (None, None), {}),
        (transfer_queue.kv_batch_get, (), {"keys": [], "partition_id": "", "select_fields": []}),
        (transfer_queue.kv_batch_put, (), {"keys": [], "partition_id": "", "fields": None}),
        (get_tensordict, ({},), {}),
        (ResourcePoolManager, (), {"resource_pool_spec": {}, "mapping": {}, "resource_pool_dict": {}}),
    ]
    changed = []
    for function, arguments, keywords in expected:
        try:
            inspect.signature(function).bind(*arguments, **keywords)
        except TypeError as error:
            changed.append(f"{function.__qualname__} ({error})")
    if changed:
        return InstallationCheck(
            False,
            f"this version of verl differs: {', '.join(changed)}",
            f"use verl {TESTED_VERSION}, or adapt groupwise/integrations/verl",
        )
    return InstallationCheck(
        True, f"the {len(expected)} functions and classes of verl that are used accept their arguments"
    )


def _check_advantages() -> InstallationCheck:
    """Two answers in one group, and one alone in another, whose advantage is 0."""
    import numpy
    import torch
    from verl.protocol import DataProto
    from verl.trainer.ppo.ray_trainer import compute_advantage

    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 9.0]])
    data = DataProto.from_dict(
        tensors={"token_level_rewards": rewards, "response_mask": torch.ones(3, 2)},
        non_tensors={"uid": numpy.array(["a_0", "a_0", "a_1"], dtype=object)},
    )
    remedy = f"use verl {TESTED_VERSION}"
    try:
        advantages = compute_advantage(data, adv_estimator=ESTIMATOR, config={}).batch["advantages"][:, 0].tolist()
    except Exception as error:
        return InstallationCheck(
            False, f"verl cannot use the estimator ({type(error).__name__}: {first_line(error)})", remedy
        )
    rounded = [round(value, 3) for value in advantages]
    good = rounded == [0.707, -0.707, 0.0]
    return InstallationCheck(
        good, f"rewards 1, 0 and 9, the last alone in its group, become {rounded} through verl", remedy
    )


def _check_embedder(name: str) -> InstallationCheck:
    from groupwise.grouping.embed import load_embedder

    try:
        vectors = load_embedder(name, device="cpu").encode(["a text", "another text"])
    except GroupwiseError as error:
        return InstallationCheck(
            False,
            f"the embedder {name} is not available: {str(error).rstrip('.')}",
            "in verl, grouping.embedder is +algorithm.similarity.embedder=NAME; check again with --embedder NAME",
        )
    return InstallationCheck(True, f"the embedder {name} returns vectors of {vectors.shape[1]} numbers")
