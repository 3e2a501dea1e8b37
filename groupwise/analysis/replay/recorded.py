"""A recorded step as the trainer had it: its batch out of the rollout file, with the rows of the run's task.

A rollout file holds texts, not token ids, so the batch has as many tokens as were sampled, but not which: two samples
have equal ids if their texts and lengths are equal. Log-probs are not recorded either and are 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from groupwise.analysis.run_reader import RunReader
from groupwise.config import Recipe
from groupwise.core.ragged import Ragged
from groupwise.data import Prompt, PromptBuilder
from groupwise.errors import CheckpointError, ConfigError, GroupwiseError
from groupwise.grouping.grouper import GroupingResult
from groupwise.grouping.labels import LABELS
from groupwise.redaction import resolve_secrets
from groupwise.tasks import Task, load_task
from groupwise.tasks.base import TaskRow
from groupwise.text import error_reason
from groupwise.training.environments import REWARD as ENVIRONMENT
from groupwise.training.environments import REWARD_COLUMNS
from groupwise.training.rollout.batch import TURN_DETAILS, Batch, TurnFacts
from groupwise.training.rollout.penalties import PENALTIES
from groupwise.training.store.inputs import hash_rows
from groupwise.training.store.rollout_files import COLUMNS, ROLLOUTS
from groupwise.training.store.run_folder import TRAINING_ROWS

REWARD, GRADE = "reward/", "grade/"
MOST_STEPS = 100  # that are read to find the weights of rewards
NEEDED = ("prompt_number", "row", "sample", "completion", "reward", "advantage", "contributes", "completion_tokens")


@dataclass(frozen=True)
class RecordedStep:
    """The batch of a step, and what the run made of it."""

    step: int
    batch: Batch  # its rows are empty; `RunSource.rows` has them
    names: list[str]  # of the rewards, penalties on length included
    rewards: Tensor  # (B,) float64: the weighted sums
    advantages: Tensor  # (B,)
    contributes: Tensor  # (B,) bool
    groups: Tensor  # (B,)
    masked_out: list[str | None]  # why a sample does not contribute
    pairs: list[str | None]  # "chosen", "rejected" or None
    graded: dict[str, list[bool | None]]  # as far as they are recorded
    facts: list[dict[str, Any]] | None = None  # what reward functions get of each conversation beside its row


def read_step(reader: RunReader, step: int) -> RecordedStep:
    """The samples of a step, ordered by prompt; an error if the file is damaged or incomplete."""
    path = reader.path / ROLLOUTS
    samples = sorted(reader.rollouts(step), key=lambda sample: (sample["prompt_number"], sample["sample"]))
    missing = [name for name in NEEDED if not samples or name not in samples[0]]
    prompts = len({sample["prompt_number"] for sample in samples})
    per_prompt = len(samples) // max(1, prompts)
    expected = [(number // per_prompt, number % per_prompt) for number in range(len(samples))] if per_prompt else []
    if missing or [(sample["prompt_number"], sample["sample"]) for sample in samples] != expected:
        what = f"it has no column {missing[0]!r}" if missing else "samples of some prompts are missing, or there twice"
        raise CheckpointError(
            f"the rollouts of step {step} in {path} are damaged: {what}. Restore the file from a copy, or leave this "
            "step out"
        )

    def column(name: str) -> list[Any]:
        return [sample.get(name) for sample in samples]

    turn_facts = facts = None
    if TURN_DETAILS in samples[0]:
        try:
            turn_facts = [TurnFacts.from_json(text) for text in column(TURN_DETAILS)]
            facts = [_facts(sample) for sample in samples]
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"the rollouts of step {step} in {path} are damaged: their conversations cannot be read "
                f"({error_reason(error)}). Restore the file from a copy, or leave this step out"
            ) from error
    names = [name.removeprefix(REWARD) for name in samples[0] if name.startswith(REWARD)]
    lengths, texts = column("completion_tokens"), column("completion")
    numbers: dict[tuple[str, int], int] = {}
    answers = [numbers.setdefault(key, len(numbers)) for key in zip(texts, lengths, strict=True)]
    ids = torch.tensor(answers).repeat_interleave(torch.tensor(lengths))
    fixed = {*COLUMNS, "pair", TURN_DETAILS, *(name for name in samples[0] if name.startswith((REWARD, GRADE)))}
    extra = {name: column(name) for name in samples[0] if name not in fixed}
    firsts = samples[::per_prompt]
    batch = Batch(
        rows=[{} for _ in firsts],
        row_numbers=[sample["row"] for sample in firsts],
        prompts=[Prompt((0,) * int(sample.get("prompt_tokens") or 0), sample.get("prompt") or "") for sample in firsts],
        samples=per_prompt,
        ids=Ragged(ids, lengths),
        texts=texts,
        stop_reasons=[reason or "" for reason in column("stop_reason")],
        sampler_logps=Ragged(torch.zeros(len(ids)), lengths),
        versions=Ragged(torch.zeros(len(ids), dtype=torch.int32), lengths),
        kept=None,
        rewards=torch.stack([_numbers(column(f"{REWARD}{name}")) for name in names], dim=1)
        if names
        else torch.zeros(len(samples), 0, dtype=torch.float64),
        dropped=torch.tensor([reason == "dropped" for reason in column("masked_out")]),
        extra=extra,
        turn_facts=turn_facts,
        similarity=_similarity(extra[LABELS], per_prompt) if LABELS in extra else None,
    )
    return RecordedStep(
        step=step,
        batch=batch,
        names=names,
        rewards=_numbers(column("reward")),
        advantages=_numbers(column("advantage")).float(),
        contributes=torch.tensor([bool(value) for value in column("contributes")]),
        groups=torch.tensor([int(value or 0) for value in column("group")]),
        masked_out=column("masked_out"),
        pairs=column("pair"),
        graded={
            name.removeprefix(GRADE): column(name) for name in samples[0] if name.startswith(GRADE)
        },
        facts=facts,
    )  # fmt: skip


def _facts(sample: Mapping[str, Any]) -> dict[str, Any]:
    """What reward functions get of a recorded conversation."""
    values = (sample.get(f"{REWARD}{ENVIRONMENT}"), json.loads(sample["conversation"]), int(sample["turns"]))
    return dict(zip(REWARD_COLUMNS, values, strict=True))


def _numbers(values: Sequence[float | None]) -> Tensor:
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)


def _similarity(labels: Sequence[str], samples: int) -> GroupingResult | None:
    """The clusters that the labels name, without the statistics of their embeddings, which are not recorded."""
    try:
        paths = [[int(part) for part in label.split("_")[1:]] for label in labels]
        clusters = torch.tensor(paths, dtype=torch.long).view(-1, samples, len(paths[0]))
    except (AttributeError, ValueError, RuntimeError):
        return None  # a column of the same name that a reward has logged
    nothing = torch.full((len(clusters),), math.nan, dtype=torch.float64)
    positions = nothing[:, None, None].expand(-1, samples, 2)
    return GroupingResult(clusters, nothing, nothing, nothing[:, None], positions)


class RunSource:
    """The task of a run, loaded by the names in its recipe when it is needed, or given; without the model."""

    def __init__(self, reader: RunReader, recipe: Recipe, task: Task | None = None) -> None:
        self.reader, self.recipe, self._given = reader, recipe, task

    @cached_property
    def task(self) -> Task:
        return self._given or load_task(self.recipe)

    @cached_property
    def problem(self) -> str | None:
        """Why the task cannot be loaded; None if it can."""
        try:
            _ = self.task
        except GroupwiseError as error:
            return str(error)
        return None

    @cached_property
    def rows(self) -> Sequence[TaskRow]:
        """The training rows by the numbers that the rollouts have; an error if they are others than the run's."""
        if self.problem is not None:
            raise ConfigError(
                f"the rows of {self.reader.path} cannot be loaded by the names in its recipe: {self.problem}. If the "
                "run was started from Python, pass its task: groupwise.analysis.replay.rescore(…, task=…)"
            )
        rows: Sequence[TaskRow] = self.task.train
        recorded = self.reader.inputs.get(TRAINING_ROWS)
        if recorded is None or hash_rows(rows) == recorded:
            return rows
        if self.recipe.data.on_too_long == "drop":
            rows = self._without_long_prompts(rows)
            if hash_rows(rows) == recorded:
                return rows
        raise ConfigError(
            f"the training rows are not those of {self.reader.path} (before: {recorded}, now: {hash_rows(rows)}), so "
            "its completions cannot be scored again; restore the data"
        )

    def _without_long_prompts(self, rows: Sequence[TaskRow]) -> list[TaskRow]:
        from groupwise.model import load_tokenizer

        data, model = self.recipe.data, self.recipe.model
        builder = PromptBuilder(
            load_tokenizer(model.source, trust_remote_code=model.trust_remote_code, revision=model.revision),
            system_prompt=data.system_prompt if data.system_prompt is not None else self.task.system_prompt,
            chat=data.chat,
            chat_template_kwargs=resolve_secrets(data.chat_template_kwargs, "data.chat_template_kwargs"),
            max_prompt_length=data.max_prompt_length,
            on_too_long=data.on_too_long,
        )
        builder.build(rows, data.prompt)
        return [rows[number] for number in builder.kept]


def infer_weights(reader: RunReader, names: Sequence[str]) -> list[float]:
    """The weights of the rewards by their recorded sums, for a run whose rewards are not known by name.

    Least squares over as many steps as it takes; the sum is linear in them, so they are exact but for a reward that is
    always 0, or always proportional to another. Penalties on length have the weight 1.
    """
    columns = [f"{REWARD}{name}" for name in names]
    values, sums = torch.zeros(0, len(names), dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
    steps = reader.rollout_steps
    for step in steps[:: max(1, len(steps) // MOST_STEPS)]:
        samples = [sample for sample in reader.rollouts(step, ["reward", *columns]) if sample.get("reward") is not None]
        if not samples or [name for name in samples[0] if name != "reward"] != columns:
            continue  # before or after the run was resumed with other rewards
        rows = torch.stack([_numbers([sample[name] for sample in samples]) for name in columns], dim=1).nan_to_num()
        values, sums = torch.cat([values, rows]), torch.cat([sums, _numbers([row["reward"] for row in samples])])
        if int(torch.linalg.matrix_rank(values)) == len(names):
            break
    if not len(values):
        return [1.0] * len(names)
    weights = torch.linalg.lstsq(values, sums[:, None], driver="gelsd").solution.flatten()
    return [1.0 if name in PENALTIES else float(f"{weight:.9g}") for name, weight in zip(names, weights, strict=True)]


def recorded_grades(recorded: RecordedStep, task_grades: Mapping[str, Any]) -> dict[str, Any]:
    """The task's grades, answered by what the step has recorded where it has."""

    def answers(values: list[bool | None]) -> Any:
        following = iter(values)
        return lambda row, text: next(following)  # asked for sample after sample

    return {**task_grades, **{name: answers(values) for name, values in recorded.graded.items()}}
