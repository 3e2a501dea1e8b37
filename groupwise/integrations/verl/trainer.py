"""verl's trainers with similarity groups."""

from __future__ import annotations

import logging
import time
from typing import Any

from groupwise.grouping.embed import check_embedder
from groupwise.grouping.labels import LABELS
from groupwise.grouping.workers import SimilarityGrouper
from groupwise.integrations.verl.batch import Sessions, decode_answers, find_groups, read_sessions
from groupwise.integrations.verl.estimator import use_groups
from groupwise.integrations.verl.placement import verl_grouper
from groupwise.integrations.verl.settings import read_settings

log = logging.getLogger("groupwise")

Trainer: Any = object  # `similarity_trainer` adds the trainer of verl


class SimilarityGrouping(Trainer):  # type: ignore[misc]
    """Groups the answers of a batch by similarity before verl computes their advantages."""

    base_mode = ""  # verl's name of the base class

    def __init__(self, config: Any) -> None:
        self._settings = read_settings(config)
        check_embedder(self._settings.embedder)  # before verl loads its models
        self._grouper: SimilarityGrouper | None = None
        # verl compares the mode by name in many places.
        config.trainer.v1.trainer_mode = self.base_mode
        super().__init__(config)

    def init(self) -> None:
        """Start verl, then the similarity workers, which share its reserved GPUs."""
        super().init()
        self._ready_grouper()

    def fit(self, agent_loop_manager: Any) -> None:
        """Train, and always stop the similarity workers."""
        try:
            super().fit(agent_loop_manager)
        finally:
            if self._grouper is not None:
                self._grouper.close()

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        start = time.perf_counter()
        sessions = read_sessions(batch.keys, batch.tags)
        labels, group_metrics = self._find_groups(batch, sessions)
        metrics.update(group_metrics)
        metrics["similarity_groups/seconds"] = time.perf_counter() - start
        with use_groups(labels, sessions):
            return super()._compute_advantage(batch, metrics)

    def _ready_grouper(self) -> SimilarityGrouper:
        if self._grouper is None:
            self._grouper = verl_grouper(self._settings, self.resource_pool_manager, log.warning)
        return self._grouper

    def _find_groups(self, batch: Any, sessions: Sessions) -> tuple[list[str], dict[str, float]]:
        import transfer_queue
        from verl.utils.tensordict_utils import get_tensordict

        places = [place for members in sessions.answers.values() for place in members]
        texts: dict[int, str] = {}
        if places:
            data = transfer_queue.kv_batch_get(
                keys=[batch.keys[sessions.last[place]] for place in places],
                partition_id=batch.partition_id,
                select_fields=["responses", "response_mask"],
            )
            answers = decode_answers(
                self.tokenizer, data["responses"].unbind(), data["response_mask"].unbind(), self._settings.text_after
            )
            texts = dict(zip(places, answers, strict=True))
        labels, metrics = find_groups(sessions, texts, self._ready_grouper())
        transfer_queue.kv_batch_put(
            keys=batch.keys, partition_id=batch.partition_id, fields=get_tensordict({LABELS: labels})
        )
        return labels, metrics


def similarity_trainer(base: type[Any], base_mode: str) -> type[Any]:
    """A subclass of a verl trainer, with similarity groups; ``base_mode`` is the mode of ``base`` in verl."""
    return type(
        f"Similarity{base.__name__}", (SimilarityGrouping, base), {"base_mode": base_mode, "__module__": __name__}
    )
