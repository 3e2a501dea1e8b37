"""What a schedule is made of: phases, ramps and rules, each of which is sound once it exists."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from groupwise.errors import ConfigError, check_choice

SHAPES = ("linear", "cosine", "exponential", "constant")
UNITS = ("steps", "tokens")
HUGE = 1e300  # the largest number; an infinite metric counts as this, as the record is JSON, which has no infinity


@dataclass(frozen=True)
class Phase:
    """A stretch of the run with settings of its own, so many steps or sampled tokens long.

    The last phase may be without a length: it lasts till the end. After a last phase with a length the settings are
    the recipe's again. A phase of tokens ends with the step that reaches them, so each phase lasts at least one step.
    """

    name: str
    steps: int | None = None
    tokens: int | None = None
    set: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"a phase's name must be a word or two of text, got {self.name!r}")
        where = f"phase {self.name!r}"
        if self.steps is not None and self.tokens is not None:
            raise ConfigError(f"{where} has both steps and tokens; a phase has one length, so keep one of them")
        for unit, length in (("steps", self.steps), ("tokens", self.tokens)):
            if length is not None:
                check_whole(f"{where}: {unit}", length, 1)
        if not self.set:
            raise ConfigError(f"{where} changes no setting; give it one, such as temperature = 0.7, or remove it")
        for name, value in self.set.items():
            check_number(f"{where}: {name}", value)


@dataclass(frozen=True)
class Ramp:
    """A setting's way through ``points`` (position, value), counted in steps or tokens from the start of the run.

    Between two points the value follows ``shape`` ("constant" is a staircase: it jumps at each point); before the
    first point and after the last it is held.
    """

    setting: str
    points: tuple[tuple[int, float], ...]
    over: str = "steps"
    shape: str = "linear"

    def __post_init__(self) -> None:
        where = f"the ramp of {self.setting}"
        check_choice(f"unit ('over') of {where}", self.over, UNITS, ConfigError)
        check_choice(f"shape of {where}", self.shape, SHAPES, ConfigError)
        if not self.points:
            raise ConfigError(f"{where} has no points; give it at least one, such as [0, 1.0]")
        for position, value in self.points:
            check_whole(f"{where}: the position of a point", position, 0)
            check_number(f"{where}: the value at {position}", value)
            if self.shape == "exponential" and value <= 0:
                raise ConfigError(
                    f"{where} is exponential, which needs values above 0, but at {position} it is {value}; "
                    "raise that value or take the shape 'linear' or 'cosine'"
                )
        for (before, _), (after, _) in zip(self.points, self.points[1:], strict=False):
            if after <= before:
                raise ConfigError(f"{where}: its points must go forward, but {after} comes after {before}; sort them")

    def value(self, position: int) -> float:
        """The value at a position, counted in the ramp's unit."""
        index = bisect_right([at for at, _ in self.points], position)
        if index == 0:
            return self.points[0][1]
        start, first = self.points[index - 1]
        if position == start or index == len(self.points) or self.shape == "constant":
            return first
        end, last = self.points[index]
        share = (position - start) / (end - start)
        if self.shape == "exponential":
            value = math.exp((1 - share) * math.log(first) + share * math.log(last))
        else:
            if self.shape == "cosine":
                share = (1 - math.cos(math.pi * share)) / 2
            value = (1 - share) * first + share * last
        return min(max(value, min(first, last)), max(first, last))  # round-off must not leave the span


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Changes ``setting`` when the mean of ``metric`` over the last ``over`` steps is ``below`` or ``above`` a number.

    Steps that do not report the metric do not count, neither for ``over`` nor for ``cooldown``, the steps until the
    rule may fire again (``over`` if not given, so that a window is never used twice); it fires ``times`` times at most.
    ``at_least`` and ``at_most`` stop the rule's change there; they do not pull back what a phase or a ramp has put
    outside them. A rule that would change nothing does not fire. ``inclusive`` makes the comparison ≤ or ≥. A rule
    ``during`` a phase sees the steps of that phase alone; what it changed by * or + stays changed afterwards.
    """

    metric: str
    over: int
    setting: str
    below: float | None = None
    above: float | None = None
    inclusive: bool = False
    multiply: float | None = None
    set: float | None = None
    add: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    cooldown: int | None = None
    times: int | None = None
    during: str | None = None

    def __post_init__(self) -> None:
        where = f"the rule on {self.metric!r} for {self.setting}"
        check_whole(f"{where}: over", self.over, 1)
        for name, count, least in (("cooldown", self.cooldown, 0), ("times", self.times, 1)):
            if count is not None:
                check_whole(f"{where}: {name}", count, least)
        for name in ("below", "above", "multiply", "set", "add", "at_least", "at_most"):
            if getattr(self, name) is not None:
                check_number(f"{where}: {name}", getattr(self, name))
        if (self.below is None) == (self.above is None):
            raise ConfigError(f"{where} needs exactly one of below and above")
        if [self.multiply, self.set, self.add].count(None) != 2:
            raise ConfigError(f"{where} needs exactly one of multiply, set and add")
        if self._low() > self._high():
            raise ConfigError(f"{where}: at_least = {self.at_least} is above at_most = {self.at_most}; exchange them")
        if self.set is not None and not self._low() <= self.set <= self._high():
            raise ConfigError(f"{where}: set = {self.set} is outside its own limits; widen them or set another value")

    def change(self, value: float) -> float:
        """The value after the rule has fired once."""
        if self.set is not None:
            return self.set
        after = value * self.multiply if self.multiply is not None else value + (self.add or 0.0)
        if not math.isfinite(after):
            return value
        return min(max(after, min(value, self._low())), max(value, self._high()))

    def holds(self, mean: float) -> bool:
        """Whether a mean of the metric is on the side that makes the rule fire."""
        limit = self.limit()
        return (mean < limit if self.above is None else mean > limit) or (self.inclusive and mean == limit)

    def limit(self) -> float:
        """What the mean is compared with."""
        return self.above if self.above is not None else self.below if self.below is not None else math.nan

    def _low(self) -> float:
        return -math.inf if self.at_least is None else self.at_least

    def _high(self) -> float:
        return math.inf if self.at_most is None else self.at_most


def check_phases(phases: Sequence[Phase]) -> None:
    """Every phase but the last ends, and no two have one name."""
    for phase in phases[:-1]:
        if phase.steps is None and phase.tokens is None:
            raise ConfigError(
                f"phase {phase.name!r} has no length, so the next would never begin; give it steps or tokens"
            )
    names = [phase.name for phase in phases]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two phases are called {name!r}; give each a name of its own")


def check_number(what: str, value: Any) -> None:
    """A sentence if the value is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= HUGE:
        raise ConfigError(f"{what} must be a finite number, got {value!r}")


def check_whole(what: str, value: Any, least: int) -> int:
    """The value, or a sentence if it is no whole number or too small."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{what} must be a whole number of at least {least}, got {value!r}")
    return value
