"""Grouping in Ray workers that share the GPUs reserved by verl.

verl reserves all GPUs of its pool, one bundle each, and uses only part of each bundle. Workers must therefore ask for a
share of such a bundle; a request for another GPU would wait forever.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from groupwise.config import GroupingSection
from groupwise.grouping.workers import (
    LOADING,
    MAX_DEFAULT_WORKERS,
    GroupingActor,
    LocalGrouper,
    RayGrouper,
    SimilarityGrouper,
    make_grouper,
)
from groupwise.text import Say

POOL = "global_pool"  # verl's name for the GPUs that train
SHARE = 0.1  # of a GPU in Ray's accounting; verl has at most two processes per GPU, a third each


def gpu_bundles(manager: Any) -> list[tuple[Any, int]]:
    """Placement group and index of each GPU bundle that verl reserved for training."""
    pool = manager.resource_pool_dict.get(POOL)
    groups = (pool.pgs or []) if pool is not None and pool.use_gpu else []
    return [
        (group, number)
        for group in groups
        for number, bundle in enumerate(group.bundle_specs)
        if bundle.get("GPU", 0) >= 1
    ]


def verl_grouper(settings: GroupingSection, manager: Any, say: Say) -> SimilarityGrouper:
    """One worker per GPU of verl, at most 8, unless ``settings`` has another number or the CPU."""
    bundles = gpu_bundles(manager)
    if not bundles or settings.device == "cpu" or settings.workers == 0:
        grouper = make_grouper(settings, say)
        if isinstance(grouper, LocalGrouper):
            say(LOADING.format(settings.embedder))
        return grouper
    return BundleGrouper(settings, settings.workers or min(len(bundles), MAX_DEFAULT_WORKERS), bundles, say)


class BundleGrouper(RayGrouper):
    """Groups in Ray actors that are placed in these bundles, in turn."""

    def __init__(self, settings: GroupingSection, workers: int, bundles: Sequence[tuple[Any, int]], say: Say) -> None:
        self._bundles = bundles
        super().__init__(settings, workers, say)

    def actor_factory(self, workers: int) -> Callable[[], Any]:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        part = SHARE / math.ceil(workers / len(self._bundles))
        # A worker sees only its own device.
        device = "cuda" if self.settings.device.startswith("cuda") else self.settings.device
        settings = self.settings.model_copy(update={"device": device})
        options = {"num_cpus": 0, "num_gpus": math.ceil(part * 1e4) / 1e4, "max_restarts": 0, "max_task_retries": 0}
        actor, places = ray.remote(GroupingActor), itertools.cycle(self._bundles)

        def make() -> Any:
            group, number = next(places)
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            return actor.options(scheduling_strategy=strategy, **options).remote(settings, None)

        return make
