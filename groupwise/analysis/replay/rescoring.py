"""Recorded rollouts under other settings: which samples would have been reinforced.

The completions stay as they were sampled. Rewards, groups, advantages and masks are computed again by the trainer's own
`compute_group_advantages`, under each step's settings. First the recorded settings must give the recorded advantages
back (`SelfCheck`): if they do not, a file or a function is not what the run had.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from groupwise.analysis.replay.changes import (
    apply_settings,
    changes_of,
    check_settings,
    split_algorithm,
)
from groupwise.analysis.replay.recorded import RecordedStep, RunSource, infer_weights, read_step, recorded_grades
from groupwise.analysis.replay.rescored import RescoredStep, Rescoring, RescoringTotals, RewardColumn
from groupwise.analysis.run_reader import RunReader
from groupwise.analysis.step_settings import run_recipe, step_recipes
from groupwise.config import Recipe, with_settings
from groupwise.core.aggregation import aggregation_weights, prompt_totals
from groupwise.data import reward_inputs, where_of
from groupwise.data.rows import name_completion
from groupwise.errors import ConfigError, RewardError, RunDirError, check_choice
from groupwise.grouping.grouper import LocalGrouper
from groupwise.grouping.labels import LABELS, compute_single_member_mask, similarity_group_labels
from groupwise.rewards import RewardFunction, Scorer, make_reward, named, weighted_total
from groupwise.tasks import Task
from groupwise.text import plural
from groupwise.training.inputs import make_schedule
from groupwise.training.rollout.advantages import compute_group_advantages, find_advantage, find_grouping
from groupwise.training.rollout.batch import Batch, GroupAdvantages
from groupwise.training.rollout.penalties import (
    LENGTH_PENALTY,
    PENALTIES,
    PENALTY_SETTINGS,
    penalty_columns,
    penalty_names,
)
from groupwise.training.update.objective import find_loss

MOST_CHANGED = 10
# Settings of [grouping] that do not change which completions are similar.
NOT_CLUSTERS = {"device", "dtype", "batch_size", "cache", "skip_single_members", "log_diversity", "workers"}
NOT_CLUSTERS |= {"ray_address", "ray_host"}
Progress = Callable[[int, int], None]


def rescore(
    run: str | Path,
    *,
    steps: Iterable[int] | None = None,
    algorithm: str | None = None,
    settings: Mapping[str, Any] | None = None,
    rewards: Sequence[Any] = (),
    task: Task | None = None,
    most_changed: int = MOST_CHANGED,
    progress: Progress = lambda done, total: None,
) -> Rescoring:
    """Score the recorded rollouts of a run again under another preset, other settings or other rewards.

    steps: those to look at; by default all that are recorded.
    rewards: replace the run's: names of its rewards, whose recorded values are used, "file.py:function" or the name of
        a built-in one, functions, or (any of these, weight).
    task: that of the run, if it was given in Python; by default it is loaded by the names in the recipe.
    """
    reader = RunReader(Path(run))
    chosen = _choose_steps(reader, steps)
    settings = dict(settings or {})
    check_settings(settings, rescored=True)
    last = run_recipe(reader, chosen[-1])
    preset, not_shown = split_algorithm(last, algorithm, rescored=True)
    changes = {**preset, **settings}
    changed = apply_settings(last, changes)  # an error now, before the rows are read
    rescorer = Rescorer(RunSource(reader, last, task), changes, rewards)
    totals = RescoringTotals(most_changed)
    recipes = step_recipes(reader, chosen, make_schedule)
    for done, step in enumerate(chosen):
        progress(done, len(chosen))
        recorded = read_step(reader, step)
        check = rescorer.check(recorded, recipes[step])
        totals.add(recorded, check, rescorer.rescore(recorded, recipes[step], check))
    rescorer.close()
    settings_changed = [change for change in changes_of(last, changes) if change.before != change.after]
    return totals.result(
        run=str(reader.path),
        changed=[*settings_changed, *totals.reward_change(bool(rewards))],
        not_shown=not_shown,
        notes=[*rescorer.notes, *_notes(last, changed)],
    )


def _choose_steps(reader: RunReader, steps: Iterable[int] | None) -> list[int]:
    recorded = reader.rollout_steps
    if not recorded:
        saved = reader.settings.get("run.save_rollouts") is not False
        why = "no step that samples is finished" if saved else "run.save_rollouts is false"
        raise RunDirError(f"{reader.path} has no rollouts to score again ({why})")
    if steps is None:
        return recorded
    wanted = set(steps)
    chosen = [step for step in recorded if step in wanted]
    if not chosen:
        raise RunDirError(
            f"{reader.path} has no rollouts of these steps; it has {plural(len(recorded), 'step')} between "
            f"{recorded[0]} and {recorded[-1]}"
        )
    return chosen


def _notes(recipe: Recipe, changed: Recipe) -> list[str]:
    notes = []
    before, after = recipe.loss.name, changed.loss.name
    if before != after and find_loss(before).token_loss is not find_loss(after).token_loss:
        notes.append(f"of the loss {after!r} only the weights of the samples are shown, not its loss per token")
    if recipe.advantages.turn_weight or changed.advantages.turn_weight:
        notes.append(
            "the advantages shown are those of conversations; what advantages.turn_weight adds to them in single turns "
            "only decides here whether a conversation contributes"
        )
    if recipe.train.resample_rounds:
        notes.append("prompts without a learning signal that were replaced (train.resample_rounds) are not recorded")
    if recipe.masks.off_policy or recipe.masks.high_entropy or recipe.masks.divergence:
        names = "masks.off_policy, masks.high_entropy, masks.divergence"
        notes.append(f"masks that depend on the policy ({names}) act later, in the update")
    return notes


class Rescorer:
    """Computes a step's advantages under its own settings and under the changed ones."""

    def __init__(self, source: RunSource, changes: Mapping[str, Any], rewards: Sequence[Any]) -> None:
        self.source, self.changes, self.given = source, changes, list(rewards)
        self.notes: list[str] = []
        self._recipes: dict[int, tuple[Recipe, Recipe]] = {}  # by the recipe of the step: that, and the changed one
        self._weights: dict[tuple[str, ...], list[float]] = {}  # by the names of the rewards
        self._columns: dict[int, list[RewardColumn]] = {}
        self._grouper: LocalGrouper | None = None

    def close(self) -> None:
        if self._grouper is not None:
            self._grouper.close()

    def check(self, recorded: RecordedStep, own: Recipe) -> GroupAdvantages:
        """What the recorded settings give."""
        return self._advantages(recorded, recorded.batch, own, self._own_weights(recorded, own), recorded.names)

    def rescore(self, recorded: RecordedStep, own: Recipe, check: GroupAdvantages) -> RescoredStep:
        changed = self._recipes.setdefault(id(own), (own, apply_settings(own, self.changes)))[1]
        columns = self._columns_of(recorded, own, changed)
        batch = self._regrouped(recorded, own, changed)
        batch = self._with_rewards(batch, recorded, own, changed, columns)
        names, weights = [column.name for column in columns], [column.weight for column in columns]
        result = self._advantages(recorded, batch, changed, weights, names)
        return RescoredStep(
            result,
            columns,
            batch.rewards,
            (sample_weights(batch, check, own), sample_weights(batch, result, changed)),
            self._own_weights(recorded, own),
            bool(own.loss.policy_coef),
        )

    def _advantages(
        self, recorded: RecordedStep, batch: Batch, recipe: Recipe, weights: Sequence[float], names: Sequence[str]
    ) -> GroupAdvantages:
        if recipe.advantages.turn_weight and batch.turn_facts is None:
            raise ConfigError(
                f"advantages.turn_weight needs the turns of conversations, but step {recorded.step} has not recorded "
                "any; leave it out"
            )
        ranking = recipe.preference.reward
        if ranking is not None:
            check_choice("preference.reward:", ranking, names, ConfigError)
        uses_grades = recipe.masks.validity or recipe.advantages.difficulty != "none"
        grouping = find_grouping(recipe.advantages.grouping)
        grades: dict[str, Any] = {}
        metric = None
        if uses_grades:
            known = self.source.problem is None
            metric = self.source.task.metric if known else self.source.reader.grade
            task_grades = self.source.task.grades if known else {}
            grades = recorded_grades(recorded, {name: task_grades[name] for name in task_grades if name == metric})
        if (grades.keys() - recorded.graded.keys()) or recipe.advantages.grouping not in ("prompt", "similarity"):
            batch = self._with_rows(batch)
        return compute_group_advantages(
            batch,
            recipe,
            weights,
            advantage=find_advantage(recipe.advantages.function),
            grouping=grouping,
            grades=grades,
            metric=metric,
            ranked_by=None if ranking is None else list(names).index(ranking),
        )

    def _with_rows(self, batch: Batch) -> Batch:
        rows = self.source.rows
        return replace(batch, rows=[rows[number] for number in batch.row_numbers])

    def _own_weights(self, recorded: RecordedStep, own: Recipe) -> list[float]:
        """The weights of the recorded rewards: the task's, the recipe's, and the penalty's, which is 1."""
        penalty = [1.0 for name in recorded.names if name in PENALTIES]
        if self.source.problem is None:
            weights = [reward.weight for reward in self.source.task.rewards] + [entry.weight for entry in own.rewards]
            if len(weights + penalty) == len(recorded.names):
                return weights + penalty
        names = tuple(recorded.names)
        if names not in self._weights:
            self._weights[names] = infer_weights(self.source.reader, names)
            self._note("the rewards of the run are not known by name; their weights follow from the recorded sums")
        return self._weights[names]

    def _note(self, note: str) -> None:
        self.notes += [] if note in self.notes else [note]

    def _columns_of(self, recorded: RecordedStep, own: Recipe, changed: Recipe) -> list[RewardColumn]:
        if id(own) not in self._columns:
            self._columns[id(own)] = [
                *(self._given_columns(recorded, own) if self.given else self._recipe_columns(recorded, own, changed)),
                *(RewardColumn(name, 1.0) for name in penalty_names(changed)),
            ]
        return self._columns[id(own)]

    def _given_columns(self, recorded: RecordedStep, own: Recipe) -> list[RewardColumn]:
        columns: list[RewardColumn] = []
        for given in self.given:
            reward, weight = given if isinstance(given, tuple) else (given, None)
            if isinstance(reward, str) and reward in recorded.names:
                place = recorded.names.index(reward)
                known = self._own_weights(recorded, own)[place]
                columns.append(RewardColumn(reward, known if weight is None else float(weight)))
                continue
            if isinstance(reward, str):
                reward = self._make(reward, recorded.names)
            function = reward if isinstance(reward, RewardFunction) else named(reward)
            function = replace(function, weight=function.weight if weight is None else float(weight))
            columns.append(RewardColumn(function.name, function.weight, function))
        return columns

    def _make(self, name: str, recorded: Sequence[str]) -> Callable[..., Any]:
        try:
            return make_reward(name)
        except ConfigError as error:
            if ":" in name:
                raise
            raise ConfigError(f"{error}; rewards of this run: {', '.join(recorded)}") from error

    def _recipe_columns(self, recorded: RecordedStep, own: Recipe, changed: Recipe) -> list[RewardColumn]:
        """The run's rewards; those whose function or options were changed are called again."""
        names = [name for name in recorded.names if name not in PENALTIES]
        weights = self._own_weights(recorded, own)
        first = len(self.source.task.rewards) if self.source.problem is None else 0
        columns = [RewardColumn(name, weight) for name, weight in zip(names, weights, strict=False)]
        for number, entry in enumerate(changed.rewards):
            place = first + number
            before = own.rewards[number] if number < len(own.rewards) else None
            if before is not None and (before.function, before.options) == (entry.function, entry.options):
                if place < len(columns):
                    columns[place] = RewardColumn(entry.name or names[place], entry.weight)
                continue
            reward = make_reward(entry.function, entry.options, f"rewards.{number}.options")
            column = RewardColumn(*_named(reward, entry.weight, entry.name))
            columns[place : place + 1] = [column]
        return columns

    def _regrouped(self, recorded: RecordedStep, own: Recipe, changed: Recipe) -> Batch:
        """The batch with the clusters of the changed settings: the recorded ones, or new ones, on the CPU."""
        batch = recorded.batch
        if changed.advantages.grouping != "similarity":
            return batch
        before, after = (recipe.grouping.model_dump(exclude=NOT_CLUSTERS) for recipe in (own, changed))
        if LABELS in batch.extra and before == after:
            return batch
        if self._grouper is None:
            section = with_settings(changed, {"grouping.device": "cpu", "grouping.workers": 0}).grouping
            self._grouper = LocalGrouper(section)
            self._note("the clusters were computed anew, on the CPU")
        samples = batch.samples
        similarity = self._grouper.group([batch.texts[i : i + samples] for i in range(0, len(batch), samples)])
        uids = [f"{recorded.step}.0.{place}" for place in range(len(batch.prompts))]
        labels = similarity_group_labels(uids, similarity.labels)
        return replace(batch, extra={**batch.extra, LABELS: labels}, similarity=similarity)

    def _with_rewards(
        self, batch: Batch, recorded: RecordedStep, own: Recipe, changed: Recipe, columns: Sequence[RewardColumn]
    ) -> Batch:
        values = {name: recorded.batch.rewards[:, place] for place, name in enumerate(recorded.names)}
        dropped = batch.dropped
        called = [column.function for column in columns if column.function is not None]
        if called:
            scores, failed = self._call(called, batch, recorded, changed)
            values |= {function.name: scores[:, place] for place, function in enumerate(called)}
            recorded_ones = any(column.function is None and column.name not in PENALTIES for column in columns)
            dropped = failed | (dropped if recorded_ones else torch.zeros_like(dropped))
        renamed = [name for name in recorded.names if name not in PENALTIES]
        scored = [column for column in columns if column.name not in PENALTIES]
        rewards = torch.stack(
            [
                values[column.name] if column.name in values else values[renamed[place]]
                for place, column in enumerate(scored)
            ],
            dim=1,
        )
        weights = [column.weight for column in scored]
        total = torch.where(dropped, math.nan, weighted_total(rewards, weights))
        known = recorded.names[: len(renamed)] == [column.name for column in scored] and not called
        known = known and weights == self._own_weights(recorded, own)[: len(weights)]
        for name in (column.name for column in columns if column.name in PENALTIES):
            settings = any(own.get(setting) != changed.get(setting) for setting in PENALTY_SETTINGS[name])
            if name not in values or settings or (name == LENGTH_PENALTY and not known):
                conversations = batch.turn_facts is not None
                data = (total, batch.lengths.tolist(), batch.prompt_of.tolist(), changed)
                values[name] = penalty_columns([name], *data, conversations=conversations)[:, 0]
            rewards = torch.cat([rewards, values[name][:, None]], dim=1)
        grouped = changed.advantages.grouping == "similarity"
        if grouped and changed.grouping.skip_single_members:
            rewards = rewards.clone()
            rewards[compute_single_member_mask(batch.extra[LABELS])] = math.nan
        elif own.grouping.skip_single_members and bool(rewards.isnan().all(1).any()):
            self._note("samples alone in their cluster have no recorded reward (grouping.skip_single_members)")
        return replace(batch, rewards=rewards, dropped=dropped)

    def _call(
        self, functions: Sequence[RewardFunction], batch: Batch, recorded: RecordedStep, changed: Recipe
    ) -> tuple[Tensor, Tensor]:
        """The rewards ``(B, K)`` of functions that are called again, and which samples they failed on."""
        batch, facts = self._with_rows(batch), recorded.facts
        rows = [batch.rows[prompt] for prompt in batch.prompt_of.tolist()]
        conversations = None
        if facts is not None:
            rows = [{**row, **more} for row, more in zip(rows, facts, strict=True)]
            conversations = [more["conversation"] for more in facts]
        scorer = Scorer(functions, timeout=changed.scoring.timeout, on_error=changed.scoring.on_error)
        places = [
            name_completion(
                where_of(row, batch.row_numbers[place // batch.samples]), place % batch.samples, batch.samples
            )
            for place, row in enumerate(rows)
        ]
        try:
            scores = scorer.score(
                *reward_inputs(rows, batch.texts, changed.data.prompt, conversations),
                trainer_state=SimpleNamespace(
                    global_step=recorded.step - 1, max_steps=0, epoch=0.0, num_input_tokens_seen=0
                ),
                places=places,
            )
        except RewardError as error:
            if "'completion_ids', which does not exist" in str(error):
                raise RewardError(
                    f"{error}; a run records the texts of its completions, not their token ids, so this reward cannot "
                    "score them again"
                ) from error
            raise
        return scores.rewards, scores.dropped


def _named(function: Callable[..., Any], weight: float, name: str | None) -> tuple[str, float, RewardFunction]:
    reward = named(function, weight, name)
    return reward.name, weight, reward


def sample_weights(batch: Batch, group_advantages: GroupAdvantages, recipe: Recipe) -> Tensor:
    """The weight ``(B,)`` of each sample in the policy loss: the sum of its tokens' weights; 0 if it is masked.

    The batch counts as one mini-batch.
    """
    lengths, allowed = batch.lengths, group_advantages.allowed
    dropped = group_advantages.masked_out.get("equal_rewards", torch.zeros_like(allowed))
    present = (torch.arange(int(lengths.max())) < lengths[:, None]) & ~dropped[:, None]
    counted = allowed if recipe.loss.denominator == "policy_mask" else ~dropped
    weights = aggregation_weights(
        present,
        recipe.loss.aggregation or find_loss(recipe.loss.name).aggregation,
        max_length=recipe.sampling.max_new_tokens,
        total_tokens=int(lengths[counted].sum()),
        total_sequences=int(counted.sum()),
        prompts=prompt_totals(present, batch.prompt_of),
    )
    return weights.sum(1) * allowed * recipe.loss.policy_coef
