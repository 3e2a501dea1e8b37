"""Whether similarity-group GRPO works in the verl that is installed here, in sentences.

verl tells nobody when it cannot load a plugin, so there must be something to ask. Every finding is one of verl as it
is installed, loaded by its own loader; the embedder is loaded and used.
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
from groupwise.integrations.verl import ESTIMATOR, MODES, TRIED_VERSION
from groupwise.model.source import first_line

GROUP, PLUGIN = "verl.plugins", "groupwise.integrations.verl.plugin"
INSTALL = "make an environment of its own for verl and run there: pip install 'groupwise[verl]'"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. A remedy says what to do where it is not as it should be."""

    good: bool
    sentence: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"good: {self.sentence}" if self.good else f"BAD:  {self.sentence}. What to do: {self.remedy}."


def max_logp_mismatch(embedder: str | None = None) -> list[Finding]:
    """What there is to say of verl, the plugin and the embedder, which is that of the defaults if none is named."""
    findings = list(_of_verl())
    name = GroupingSection().embedder if embedder is None else embedder
    return [*findings, _embedder(name)]


def _of_verl() -> Iterator[Finding]:
    """The findings up to the first that makes the next ones meaningless."""
    try:
        version = metadata.version("verl")
    except metadata.PackageNotFoundError:
        yield Finding(False, "verl is not installed", INSTALL)
        return
    tried = "" if version == TRIED_VERSION else f"; this was written for {TRIED_VERSION} and tried with no other"
    yield Finding(True, f"verl {version} is installed{tried}")
    yield _entry_point()
    try:
        importlib.import_module("verl.trainer.ppo.v1")
    except Exception as error:
        yield Finding(
            False,
            f"verl's trainer cannot be imported ({type(error).__name__}: {first_line(error)})",
            f"pip install 'verl[verl-core]=={TRIED_VERSION}'; the extra has the packages that the trainer needs",
        )
        return
    registered = list(_registered())
    yield from registered
    yield _signatures()
    if all(finding.good for finding in registered):
        yield _advantages()


def _entry_point() -> Finding:
    names = [entry.name for entry in metadata.entry_points(group=GROUP) if entry.value == PLUGIN]
    wanted = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    allowed = wanted == "auto" or bool({part.strip() for part in wanted.split(",")} & set(names))
    if PLUGIN in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(","):
        return Finding(True, "verl is told by VERL_USE_EXTERNAL_MODULES to load the plugin")
    if not names:
        return Finding(
            False,
            f"verl finds no entry point {GROUP} of groupwise",
            "install groupwise with pip, since a folder on PYTHONPATH has no entry points; or set "
            f"VERL_USE_EXTERNAL_MODULES={PLUGIN} on every machine",
        )
    if not allowed:
        return Finding(
            False,
            f"VERL_USE_EXTERNAL_PLUGINS is {wanted!r}, which keeps verl from loading the plugin {names[0]}",
            f"unset it, or add {names[0]} to it",
        )
    return Finding(True, f"verl sees the entry point {GROUP} of groupwise, called {names[0]}")


def _registered() -> Iterator[Finding]:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    remedy = "see the other findings; what went wrong is logged as a warning when verl's trainer is imported"
    there = ESTIMATOR in ADV_ESTIMATOR_REGISTRY
    yield Finding(there, f"the estimator {ESTIMATOR} is {'' if there else 'not '}registered in verl", remedy)
    missing = [mode for mode in MODES if mode not in TRAINER_REGISTRY]
    if missing:
        yield Finding(False, f"the trainer modes {', '.join(missing)} are not registered in verl", remedy)
    else:
        yield Finding(True, f"the trainer modes {', '.join(MODES)} are registered in verl")


def _signatures() -> Finding:
    """Everything of verl's that is subclassed or called takes what it is given."""
    import transfer_queue
    from verl.single_controller.ray import ResourcePoolManager
    from verl.trainer.ppo.v1 import PPOTrainer
    from verl.utils.tensordict_utils import get_tensordict

    expected: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
        (PPOTrainer.__init__, (None,), {"config": None}),
        (PPOTrainer.init, (None,), {}),
        (PPOTrainer.fit, (None, None), {}),
        (PPOTrainer._compute_advantage, (None, None), {"metrics": {}}),
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
        return Finding(
            False,
            f"this verl is not as expected: {', '.join(changed)}",
            f"use verl {TRIED_VERSION}, or change groupwise/integrations/verl to fit",
        )
    return Finding(True, f"the {len(expected)} functions and classes of verl that are used take what they are given")


def _advantages() -> Finding:
    """Two answers in one group and one in another, whose reward is the best of all and teaches nothing."""
    import numpy
    import torch
    from verl.protocol import DataProto
    from verl.trainer.ppo.ray_trainer import compute_advantage

    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 9.0]])
    data = DataProto.from_dict(
        tensors={"token_level_rewards": rewards, "response_mask": torch.ones(3, 2)},
        non_tensors={"uid": numpy.array(["a_0", "a_0", "a_1"], dtype=object)},
    )
    expected = [0.707, -0.707, 0.0]
    remedy = f"use verl {TRIED_VERSION}"
    try:
        found = compute_advantage(data, adv_estimator=ESTIMATOR, config={}).batch["advantages"][:, 0].tolist()
    except Exception as error:
        return Finding(False, f"verl cannot use the estimator ({type(error).__name__}: {first_line(error)})", remedy)
    rounded = [round(value, 3) for value in found]
    good = rounded == expected
    return Finding(good, f"rewards 1, 0 and 9, the last alone in its group, become {rounded} through verl", remedy)


def _embedder(name: str) -> Finding:
    from groupwise.grouping.embed import load_embedder

    try:
        vectors = load_embedder(name, device="cpu").encode(["a text", "another text"])
    except GroupwiseError as error:
        return Finding(
            False,
            f"the embedder {name} cannot be had: {str(error).rstrip('.')}",
            "here grouping.embedder is +algorithm.similarity.embedder=NAME; ask again with --embedder NAME",
        )
    return Finding(True, f"the embedder {name} gives vectors of {vectors.shape[1]} numbers")
