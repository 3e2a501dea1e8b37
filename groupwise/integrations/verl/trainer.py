"""verl's trainers with similarity groups: the V1 trainer in all its modes, and the classic Ray trainer.

`select_by_estimator` makes verl create them for ``algorithm.adv_estimator=similarity_group_grpo``, whatever else the
configuration has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from groupwise.errors import ConfigError
from groupwise.grouping.embed import embedder_folder
from groupwise.grouping.labels import LABELS
from groupwise.grouping.workers import SimilarityGrouper
from groupwise.integrations.verl import ESTIMATOR
from groupwise.integrations.verl.batch import Sessions, decode_answers, find_groups, read_rows, read_sessions
from groupwise.integrations.verl.estimator import use_groups
from groupwise.integrations.verl.placement import verl_grouper
from groupwise.integrations.verl.settings import check_config, read_settings, uses_similarity, verl_names
from groupwise.terminal import write_text

Trainer: Any = object  # `similarity_trainer` adds the trainer of verl


class SimilarityGrouping(Trainer):  # type: ignore[misc]
    """Groups the answers of a batch by similarity before verl computes their advantages."""

    def __init__(self, config: Any, *arguments: Any, **keywords: Any) -> None:
        check_config(config)
        self._settings = read_settings(config)
        with verl_names():
            embedder_folder(self._settings.embedder)  # downloaded, or refused, before verl loads its models
        self._grouper: SimilarityGrouper | None = None
        super().__init__(config, *arguments, **keywords)

    def fit(self, *arguments: Any) -> None:
        """Train, and always stop the similarity workers."""
        try:
            super().fit(*arguments)
        finally:
            if self._grouper is not None:
                self._grouper.close()

    def _ready_grouper(self) -> SimilarityGrouper:
        if self._grouper is None:
            self._grouper = verl_grouper(self._settings, self.resource_pool_manager, _print)
        return self._grouper

    def _find_groups(
        self, sessions: Sessions, read: Callable[[list[int]], Mapping[str, Any]]
    ) -> tuple[list[str], dict[str, float]]:
        """The label of each row, and metrics; ``read`` returns ``responses`` and ``response_mask`` of some rows."""
        start = time.perf_counter()
        places = [place for members in sessions.answers.values() for place in members]
        texts: dict[int, str] = {}
        if places:
            data = read([sessions.last[place] for place in places])
            answers = decode_answers(
                self.tokenizer, data["responses"].unbind(), data["response_mask"].unbind(), self._settings.text_after
            )
            texts = dict(zip(places, answers, strict=True))
        labels, metrics = find_groups(sessions, texts, self._ready_grouper())
        return labels, metrics | {"similarity_groups/seconds": time.perf_counter() - start}


class V1Grouping(SimilarityGrouping):
    """For verl's V1 trainer, whose batches are in its TransferQueue."""

    def init(self) -> None:
        """Start verl, then the similarity workers, which share its reserved GPUs."""
        super().init()
        self._ready_grouper()

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        import transfer_queue
        from verl.utils.tensordict_utils import get_tensordict

        def read(rows: list[int]) -> Any:
            return transfer_queue.kv_batch_get(
                keys=[batch.keys[row] for row in rows],
                partition_id=batch.partition_id,
                select_fields=["responses", "response_mask"],
            )

        sessions = read_sessions(batch.keys, batch.tags)
        labels, group_metrics = self._find_groups(sessions, read)
        metrics.update(group_metrics)
        transfer_queue.kv_batch_put(
            keys=batch.keys, partition_id=batch.partition_id, fields=get_tensordict({LABELS: labels})
        )
        with use_groups(labels, sessions):
            return super()._compute_advantage(batch, metrics)


class ClassicGrouping(SimilarityGrouping):
    """For verl's classic Ray trainer (``trainer.use_v1=false``).

    Its loop is one function, which calls ``compute_advantage`` of its module; the metrics are logged with those of the
    actor's update.
    """

    def init_workers(self) -> None:
        """Start verl, then the similarity workers, which share its reserved GPUs."""
        super().init_workers()
        self._ready_grouper()

    def fit(self) -> None:
        """Train; meanwhile verl's ``compute_advantage`` gets the groups."""
        import numpy
        from verl.trainer.ppo import ray_trainer

        compute_advantage = ray_trainer.compute_advantage

        def compute_within_groups(data: Any, *arguments: Any, **keywords: Any) -> Any:
            sessions = read_rows(data.non_tensor_batch["uid"])
            fields = {name: data.batch[name] for name in ("responses", "response_mask")}
            labels, self._group_metrics = self._find_groups(
                sessions, lambda rows: {name: field[rows] for name, field in fields.items()}
            )
            data.non_tensor_batch[LABELS] = numpy.array(labels, dtype=object)
            with use_groups(labels, sessions):
                return compute_advantage(data, *arguments, **keywords)

        ray_trainer.compute_advantage = compute_within_groups
        try:
            super().fit()
        finally:
            ray_trainer.compute_advantage = compute_advantage

    def _update_actor(self, batch: Any) -> Any:
        output = super()._update_actor(batch)
        output.meta_info["metrics"].update(self._group_metrics)
        return output


def similarity_trainer(base: type[Any]) -> type[Any]:
    """A subclass of a verl trainer, with similarity groups."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    mixin: type[Any] = V1Grouping
    if issubclass(base, RayPPOTrainer):
        if base.fit is not RayPPOTrainer.fit:
            raise ConfigError(
                f"algorithm.adv_estimator={ESTIMATOR} is not supported by {base.__module__}.{base.__name__}, which has "
                "a training loop of its own; use python -m verl.trainer.main_ppo"
            )
        mixin = ClassicGrouping
    return type(f"Similarity{base.__name__}", (mixin, base), {"__module__": __name__})


def select_by_estimator(trainer: type[Any]) -> None:
    """Make a verl trainer, and its subclasses, create a trainer with similarity groups if the estimator is selected."""

    def new(cls: type[Any], config: Any, *_: Any, **__: Any) -> Any:
        plain = issubclass(cls, SimilarityGrouping) or not uses_similarity(config)
        return object.__new__(cls if plain else similarity_trainer(cls))

    trainer.__new__ = staticmethod(new)  # type: ignore[assignment]


def _print(text: str) -> None:
    """As verl reports: Ray forwards the output of the trainer's process."""
    write_text(f"{text}\n")
