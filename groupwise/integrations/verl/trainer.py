"""verl's trainers, but for who is compared with whom."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from groupwise.grouping.embed import check_embedder
from groupwise.grouping.workers import SimilarityGrouper
from groupwise.integrations.verl import LABELS
from groupwise.integrations.verl.batch import decode_answers, find_groups, read_sessions
from groupwise.integrations.verl.estimator import Compared, compared
from groupwise.integrations.verl.placement import verl_grouper
from groupwise.integrations.verl.settings import read_settings

log = logging.getLogger("groupwise")

if TYPE_CHECKING:

    class _Trainer:
        """What is used of verl's trainer."""

        config: Any
        tokenizer: Any
        resource_pool_manager: Any

        def __init__(self, config: Any) -> None: ...
        def init(self) -> None: ...
        def fit(self, agent_loop_manager: Any) -> None: ...
        def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any: ...

else:
    _Trainer = object


class SimilarityGrouping(_Trainer):
    """Puts the answers of a batch into similarity groups before verl computes their advantages."""

    own_mode = ""  # of verl's, given to each class that is made of this one

    def __init__(self, config: Any) -> None:
        self._how = read_settings(config)
        check_embedder(self._how.embedder)  # before the models are loaded, which takes minutes
        self._grouper: SimilarityGrouper | None = None
        # verl asks for the mode by name in many places: which buffer to sample from, which settings are a mode's own.
        config.trainer.v1.trainer_mode = self.own_mode
        super().__init__(config)

    def init(self) -> None:
        """Start everything, the similarity workers last: they share GPUs that verl must have reserved by then."""
        super().init()
        self._ready_grouper()

    def fit(self, agent_loop_manager: Any) -> None:
        """Train, and give the similarity workers back at the end, whatever it is."""
        try:
            super().fit(agent_loop_manager)
        finally:
            if self._grouper is not None:
                self._grouper.close()

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        start = time.perf_counter()
        how, found = self._find_groups(batch)
        metrics.update(found)
        metrics["similarity_groups/seconds"] = time.perf_counter() - start
        with compared(how):
            return super()._compute_advantage(batch, metrics)

    def _ready_grouper(self) -> SimilarityGrouper:
        if self._grouper is None:
            self._grouper = verl_grouper(self._how, self.resource_pool_manager, log.warning)
        return self._grouper

    def _find_groups(self, batch: Any) -> tuple[Compared, dict[str, float]]:
        import transfer_queue
        from verl.utils.tensordict_utils import get_tensordict

        sessions = read_sessions(batch.keys, batch.tags)
        places = [place for members in sessions.answers.values() for place in members]
        texts: dict[int, str] = {}
        if places:
            data = transfer_queue.kv_batch_get(
                keys=[batch.keys[sessions.last[place]] for place in places],
                partition_id=batch.partition_id,
                select_fields=["responses", "response_mask"],
            )
            answers = decode_answers(
                self.tokenizer, data["responses"].unbind(), data["response_mask"].unbind(), self._how.text_after
            )
            texts = dict(zip(places, answers, strict=True))
        how, metrics = find_groups(sessions, texts, self._ready_grouper())
        transfer_queue.kv_batch_put(
            keys=batch.keys, partition_id=batch.partition_id, fields=get_tensordict({LABELS: list(how.labels)})
        )
        return how, metrics


def similarity_trainer(base: type[Any], own_mode: str) -> type[Any]:
    """A trainer of verl's with similarity groups; ``own_mode`` is the name that verl knows ``base`` by."""
    return type(
        f"Similarity{base.__name__}", (SimilarityGrouping, base), {"own_mode": own_mode, "__module__": __name__}
    )
