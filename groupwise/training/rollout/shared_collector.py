"""Asynchronous rollouts of a run of several processes: rank 0 collects them, and all ranks get each batch."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from groupwise.config import Recipe
from groupwise.core.filters import KeptSets
from groupwise.core.ragged import Ragged
from groupwise.distributed.ranks import Ranks
from groupwise.grouping.grouper import GroupingResult
from groupwise.rewards.sharded import plain_value
from groupwise.training.rollout.async_collector import AsyncCollector, RolloutsStopped
from groupwise.training.rollout.batch import TOKEN_ROWS, Batch
from groupwise.training.rollout.collector import RolloutResult, Timer

NUMBERS = ("tokens", "prompts", "rounds", "replaced", "failures", "metrics", "skipped", "queue")  # of a result
AS_IT_IS = ("row_numbers", "samples", "texts", "stop_reasons", "rewards", "dropped", "filtered_probability")


class SharedCollector(AsyncCollector):
    """An `AsyncCollector` that works on rank 0; its generator, scorer and grouper are not divided among the ranks."""

    def __init__(self, *arguments: Any, ranks: Ranks, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.ranks = ranks

    def collect(self, step: int, step_recipe: Recipe, trainer_state: Any, timer: Timer) -> RolloutResult:
        result: RolloutResult | None = None
        sent: dict[str, Any] = {}
        with self.ranks.stage("waiting for completions and rewards"):
            if self.ranks.is_main:
                try:
                    result = super().collect(step, step_recipe, trainer_state, timer)
                    sent = {"result": result_message(result), "order": self.order.state()}
                except RolloutsStopped:
                    sent = {"stopped": True}
        sent = self.ranks.from_main(sent)
        if "stopped" in sent:
            raise RolloutsStopped
        if result is None:
            self.order.load_state(sent["order"])
            result = self._result(sent["result"])
        return result

    def _result(self, message: dict[str, Any]) -> RolloutResult:
        numbers = {name: message[name] for name in NUMBERS}
        left_out = [self._batch(part) for part in message["left_out"]]
        return RolloutResult(self._batch(message["batch"]), left_out=left_out, **numbers)

    def _batch(self, message: dict[str, Any]) -> Batch:
        rows, lengths = message["row_numbers"], message["lengths"]
        kept, similarity = message["kept"], message["similarity"]
        columns: dict[str, Any] = {name: Ragged(message[name], lengths) for name in TOKEN_ROWS}
        columns |= {name: message[name] for name in AS_IT_IS}
        return Batch(
            rows=[self.rows[row] for row in rows],
            prompts=[self.prompts[row] for row in rows],
            kept=None if kept is None else KeptSets(**kept),
            similarity=None if similarity is None else GroupingResult(**similarity),
            extra=message["extra"],
            **columns,
        )


def result_message(result: RolloutResult) -> dict[str, Any]:
    """A result as a message to the other ranks."""
    message = {name: getattr(result, name) for name in NUMBERS}
    return message | {"batch": _batch_message(result.batch), "left_out": [_batch_message(b) for b in result.left_out]}


def _batch_message(batch: Batch) -> dict[str, Any]:
    kept, similarity = batch.kept, batch.similarity
    return {
        "lengths": batch.lengths.tolist(),
        **{name: getattr(batch, name).values for name in TOKEN_ROWS},
        **{name: getattr(batch, name) for name in AS_IT_IS},
        "extra": {name: [plain_value(value) for value in values] for name, values in batch.extra.items()},
        "kept": None if kept is None else {"ids": kept.ids, "offsets": kept.offsets},
        "similarity": None if similarity is None else {f.name: getattr(similarity, f.name) for f in fields(similarity)},
    }
