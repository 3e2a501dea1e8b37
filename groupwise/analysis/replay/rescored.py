"""What changes if rollouts are scored again: by step, by reward function, by reason, and sample by sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from groupwise.analysis.replay.changes import SettingChange
from groupwise.analysis.replay.recorded import RecordedStep
from groupwise.rewards import RewardFunction
from groupwise.training.rollout.batch import GroupAdvantages

RTOL, ATOL = 1e-5, 1e-6  # float32 rounding of an advantage


class BeforeAfter(NamedTuple):
    """A number in the run, and under the changed settings."""

    before: float
    after: float


@dataclass(frozen=True)
class StepChange:
    """How the signs of a step's advantages differ. A sample that contributes nothing counts as 0."""

    step: int | None  # None: all steps together
    samples: int
    reinforced: BeforeAfter  # samples with an advantage above 0
    discouraged: BeforeAfter  # below 0
    sign_changes: int  # samples that are among other ones of these three
    groups: BeforeAfter
    groups_with_signal: BeforeAfter
    pairs: BeforeAfter
    correlation: float  # of the advantages before and after; NaN if one of them is constant
    weighted_correlation: float  # the same of advantages × weights in the policy loss
    reinforced_tokens: BeforeAfter  # mean length of what is reinforced, by advantage × weight; NaN if nothing is


@dataclass(frozen=True)
class RewardChange:
    """A reward function: its weight, its mean over the samples, and how much the advantages follow it."""

    name: str
    weight: BeforeAfter  # NaN where it is not used
    mean: float
    correlation: BeforeAfter  # with the advantage


@dataclass(frozen=True)
class SampleChange:
    """A sample whose advantage changed."""

    step: int
    prompt_number: int
    sample: int
    row: int
    prompt: str
    completion: str
    reward: BeforeAfter
    advantage: BeforeAfter  # 0 where the sample is masked
    reason: tuple[str | None, str | None]  # why it has no learning signal, before and after


@dataclass(frozen=True)
class SelfCheck:
    """Whether the recorded settings give the recorded advantages back."""

    samples: int
    different: int
    largest: float  # difference of an advantage
    first: str = ""  # where the first one is

    @property
    def passed(self) -> bool:
        return not self.different


@dataclass(frozen=True)
class Rescoring:
    """The rollouts of a run under other settings."""

    run: str
    changed: list[SettingChange]
    not_shown: list[SettingChange]  # settings of the preset that a replay of rollouts cannot show
    self_check: SelfCheck
    steps: list[StepChange]
    total: StepChange
    rewards: list[RewardChange]
    reasons: dict[str, BeforeAfter]  # samples without a learning signal, by reason
    most_changed: list[SampleChange]
    notes: list[str] = field(default_factory=list)


class RewardColumn(NamedTuple):
    """A reward under the changed settings: its recorded column, or the function that is called."""

    name: str
    weight: float
    function: RewardFunction | None = None


@dataclass(frozen=True)
class RescoredStep:
    """A step under the changed settings."""

    group_advantages: GroupAdvantages
    columns: list[RewardColumn]
    rewards: Tensor  # (B, K)
    weights: tuple[Tensor, Tensor]  # (B,) of the samples in the policy loss, before and after
    own_weights: list[float]  # of the run's rewards
    uses_advantages: bool  # before


class RescoringTotals:
    """Collects the changes of all steps."""

    def __init__(self, most_changed: int) -> None:
        self.most_changed = most_changed
        self.steps: list[StepChange] = []
        self.advantages: list[Tensor] = []  # (B, 2) before and after
        self.pushes: list[Tensor] = []  # the same, times the weights in the loss
        self.lengths: list[Tensor] = []
        self.rewards: dict[str, list[Tensor]] = {}  # (B, 3): the reward, and both advantages
        self.weights: dict[str, BeforeAfter] = {}
        self.reasons: dict[str, BeforeAfter] = {}
        self.samples: list[SampleChange] = []
        self.seen, self.different, self.largest, self.first = 0, 0, 0.0, ""

    def add(self, recorded: RecordedStep, check: GroupAdvantages, rescored: RescoredStep) -> None:
        self._check(recorded, check)
        after = rescored.group_advantages
        both = torch.stack(
            [
                recorded.advantages * recorded.contributes * rescored.uses_advantages,
                after.advantages * after.allowed * after.uses_advantages,
            ],
            dim=1,
        )
        pushes = both.double() * torch.stack(rescored.weights, dim=1)
        self.advantages.append(both)
        self.pushes.append(pushes)
        self.lengths.append(recorded.batch.lengths)
        roles = after.pairs.roles(len(both)) if after.pairs is not None else []
        self.steps.append(
            StepChange(
                step=recorded.step,
                samples=len(both),
                **_signs(both),
                groups=BeforeAfter(_count_groups(recorded.groups), _count_groups(after.groups)),
                groups_with_signal=BeforeAfter(
                    _count_groups(recorded.groups[recorded.contributes]),
                    _count_groups(after.groups[after.contributes]),
                ),
                pairs=BeforeAfter(recorded.pairs.count("chosen"), roles.count("chosen")),
                correlation=correlation(both[:, 0], both[:, 1]),
                weighted_correlation=correlation(pushes[:, 0], pushes[:, 1]),
                reinforced_tokens=_pushed_length(pushes, recorded.batch.lengths),
            )
        )
        self._add_rewards(recorded, rescored, both)
        reasons = after.skip_reasons()
        for number, found in enumerate((recorded.masked_out, reasons)):
            for reason in filter(None, found):
                counts = list(self.reasons.get(reason, BeforeAfter(0, 0)))
                counts[number] += 1
                self.reasons[reason] = BeforeAfter(*counts)
        self._add_samples(recorded, after, both, reasons)

    def _check(self, recorded: RecordedStep, check: GroupAdvantages) -> None:
        difference = (check.advantages - recorded.advantages).abs()
        same = torch.isclose(check.advantages, recorded.advantages, rtol=RTOL, atol=ATOL) & (
            check.contributes == recorded.contributes
        )
        same &= torch.isclose(check.rewards, recorded.rewards, equal_nan=True, rtol=RTOL, atol=ATOL)
        self.seen += len(same)
        self.different += int((~same).sum())
        self.largest = max(self.largest, float(difference.nan_to_num().max()) if len(difference) else 0.0)
        if not self.first and not bool(same.all()):
            place = int((~same).nonzero()[0])
            prompt, sample = divmod(place, recorded.batch.samples)
            values = (
                f"{float(recorded.advantages[place]):.6g} is recorded, {float(check.advantages[place]):.6g} computed"
            )
            self.first = f"step {recorded.step}, prompt {prompt}, sample {sample}: {values}"

    def _add_rewards(self, recorded: RecordedStep, rescored: RescoredStep, both: Tensor) -> None:
        columns = {name: recorded.batch.rewards[:, place] for place, name in enumerate(recorded.names)}
        for place, column in enumerate(rescored.columns):
            columns[column.name] = rescored.rewards[:, place]
        own = dict(zip(recorded.names, rescored.own_weights, strict=False))
        changed = {column.name: column.weight for column in rescored.columns}
        for name, values in columns.items():
            self.rewards.setdefault(name, []).append(torch.cat([values[:, None], both.double()], dim=1))
            self.weights[name] = BeforeAfter(own.get(name, math.nan), changed.get(name, math.nan))

    def _add_samples(
        self, recorded: RecordedStep, after: GroupAdvantages, both: Tensor, reasons: Sequence[str | None]
    ) -> None:
        batch = recorded.batch
        differences = (both[:, 1] - both[:, 0]).abs()
        seen: set[tuple[int, str]] = set()  # the same completion of a prompt is shown once
        for place in differences.argsort(descending=True, stable=True).tolist():
            if not differences[place] or len(seen) == self.most_changed:
                break
            prompt, sample = divmod(place, batch.samples)
            if (prompt, batch.texts[place]) in seen:
                continue
            seen.add((prompt, batch.texts[place]))
            change = SampleChange(
                step=recorded.step,
                prompt_number=prompt,
                sample=sample,
                row=batch.row_numbers[prompt],
                prompt=batch.prompts[prompt].text,
                completion=batch.texts[place],
                reward=BeforeAfter(float(recorded.rewards[place]), float(after.rewards[place])),
                advantage=BeforeAfter(*map(float, both[place])),
                reason=(recorded.masked_out[place], reasons[place]),
            )
            self.samples.append(change)
        self.samples.sort(key=lambda change: -abs(change.advantage.after - change.advantage.before))
        del self.samples[self.most_changed :]

    def reward_change(self, replaced: bool) -> list[SettingChange]:
        """The rewards before and after, if they were ``replaced``."""

        def shown(side: int) -> str:
            weights = {name: weight[side] for name, weight in self.weights.items() if not math.isnan(weight[side])}
            return ", ".join(f"{name} × {weight:g}" for name, weight in weights.items())

        return [SettingChange("rewards", shown(0), shown(1))] if replaced else []

    def result(
        self, *, run: str, changed: list[SettingChange], not_shown: list[SettingChange], notes: list[str]
    ) -> Rescoring:
        both, pushes, lengths = torch.cat(self.advantages), torch.cat(self.pushes), torch.cat(self.lengths)
        sums: dict[str, Any] = {
            name: BeforeAfter(*(sum(getattr(step, name)[side] for step in self.steps) for side in (0, 1)))
            for name in ("groups", "groups_with_signal", "pairs")
        }
        total = StepChange(
            step=None,
            samples=len(both),
            **_signs(both),
            **sums,
            correlation=correlation(both[:, 0], both[:, 1]),
            weighted_correlation=correlation(pushes[:, 0], pushes[:, 1]),
            reinforced_tokens=_pushed_length(pushes, lengths),
        )
        rewards = []
        for name, parts in self.rewards.items():
            values = torch.cat(parts)
            scored = values[~values[:, 0].isnan()]
            with_advantages = BeforeAfter(*(correlation(scored[:, 0], scored[:, side]) for side in (1, 2)))
            mean = float(scored[:, 0].mean()) if len(scored) else math.nan
            rewards.append(RewardChange(name, self.weights[name], mean, with_advantages))
        return Rescoring(
            run=run,
            changed=changed,
            not_shown=not_shown,
            self_check=SelfCheck(self.seen, self.different, self.largest, self.first),
            steps=self.steps,
            total=total,
            rewards=rewards,
            reasons=dict(sorted(self.reasons.items())),
            most_changed=self.samples,
            notes=notes,
        )


def _signs(both: Tensor) -> dict[str, Any]:
    signs = both.sign()
    return {
        "reinforced": BeforeAfter(*(signs > 0).sum(0).tolist()),
        "discouraged": BeforeAfter(*(signs < 0).sum(0).tolist()),
        "sign_changes": int((signs[:, 0] != signs[:, 1]).sum()),
    }


def _count_groups(groups: Tensor) -> int:
    return len(set(groups.tolist()))


def _pushed_length(pushes: Tensor, lengths: Tensor) -> BeforeAfter:
    up = pushes.clamp(min=0)
    return BeforeAfter(*((up * lengths[:, None]).sum(0) / up.sum(0)).tolist())


def correlation(one: Tensor, other: Tensor) -> float:
    """Pearson's correlation; NaN if one of them is constant."""
    if len(one) < 2:
        return math.nan
    one, other = one.double() - one.double().mean(), other.double() - other.double().mean()
    size = float(one.norm() * other.norm())
    return max(-1.0, min(1.0, float((one * other).sum()) / size)) if size else math.nan
