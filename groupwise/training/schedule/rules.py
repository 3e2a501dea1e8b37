"""The parts of a schedule, validated when they are created: `Phase`, `Ramp` and `Rule`."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from groupwise.config.sections import OWN_LENGTHS
from groupwise.errors import ConfigError, check_choice, check_integer

SHAPES = ("linear", "cosine", "exponential", "constant")
UNITS = ("steps", "tokens")  # of ramps
LENGTHS = (*OWN_LENGTHS, "share")  # of phases
HUGE = 1e300  # the largest number allowed; infinite metrics are clipped to it, because JSON has no infinity


@dataclass(frozen=True)
class Phase:
    """A part of the run with its own settings.

    Its length is a number of steps, of sampled tokens, of epochs (passes over the rows), or a share of the run. The
    last phase may have no length and then lasts to the end of the run. If a run goes on after a last phase with a
    length, the recipe's settings apply again. A phase counted in tokens ends with the step that reaches them; every
    phase lasts at least one step.
    """

    name: str
    steps: int | None = None
    tokens: int | None = None
    epochs: float | None = None
    share: float | None = None
    set: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"a phase's name must be a non-empty string, got {self.name!r}")
        where = f"phase {self.name!r}"
        given = [unit for unit in LENGTHS if getattr(self, unit) is not None]
        if len(given) > 1:
            raise ConfigError(f"{where} has both {' and '.join(given)}; keep one of them")
        for unit in given:
            length = getattr(self, unit)
            if unit in UNITS:
                check_integer(f"{where}: {unit}", length, 1, ConfigError)
            else:
                check_number(f"{where}: {unit}", length)
                if length <= 0 or (unit == "share" and length > 1):
                    limit = "above 0 and at most 1" if unit == "share" else "above 0"
                    raise ConfigError(f"{where}: {unit} must be {limit}, got {length!r}")
        if not self.set:
            raise ConfigError(f"{where} changes no setting; add one, such as temperature = 0.7, or remove the phase")
        for name, value in self.set.items():
            check_number(f"{where}: {name}", value)

    @property
    def has_length(self) -> bool:
        return any(getattr(self, unit) is not None for unit in LENGTHS)


@dataclass(frozen=True)
class Ramp:
    """Interpolates a setting between ``points`` (position, value); positions are steps or tokens since the start.

    ``shape`` is the interpolation; "constant" is a staircase. The value is constant before the first point and after
    the last.
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
            raise ConfigError(f"{where} has no points; add at least one, such as [0, 1.0]")
        for position, value in self.points:
            check_integer(f"{where}: the position of a point", position, 0, ConfigError)
            check_number(f"{where}: the value at {position}", value)
            if self.shape == "exponential" and value <= 0:
                raise ConfigError(f"{where} is exponential, which needs values above 0, but at {position} is {value}")
        for (before, _), (after, _) in pairwise(self.points):
            if after <= before:
                raise ConfigError(f"{where}: its points must be in increasing order, but {after} comes after {before}")

    def value(self, position: int) -> float:
        """The value at ``position``, in the ramp's unit."""
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
        return min(max(value, min(first, last)), max(first, last))  # rounding must not leave the interval


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Changes ``setting`` when the mean of ``metric`` over the last ``over`` steps is ``below`` or ``above`` a number.

    One of ``below`` and ``above`` and one of ``multiply``, ``set`` and ``add`` must be set.
    Only steps that report the metric count, for ``over`` and for ``cooldown``: the number of steps before the rule may
    fire again (default: ``over``, so no step is used twice). It fires at most ``times`` times. ``at_least`` and
    ``at_most`` bound the rule's change, but do not clip a value that a phase or ramp put outside them. A rule that
    would change nothing does not fire. ``inclusive`` makes the comparison ≤ or ≥. A rule with ``during`` only sees the
    steps of that phase; its changes by * or + remain afterwards.
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
        for name, count, least in (("over", self.over, 1), ("cooldown", self.cooldown, 0), ("times", self.times, 1)):
            if count is not None:
                check_integer(f"{where}: {name}", count, least, ConfigError)
        for name in ("below", "above", "multiply", "set", "add", "at_least", "at_most"):
            if getattr(self, name) is not None:
                check_number(f"{where}: {name}", getattr(self, name))
        if self._low() > self._high():
            raise ConfigError(f"{where}: at_least = {self.at_least} is above at_most = {self.at_most}; swap them")
        if self.set is not None and not self._low() <= self.set <= self._high():
            raise ConfigError(f"{where}: set = {self.set} is outside its limits; change the limits or the value")

    def change(self, value: float) -> float:
        """``value`` after the rule fired once."""
        if self.set is not None:
            return self.set
        after = value * self.multiply if self.multiply is not None else value + (self.add or 0.0)
        if not math.isfinite(after):
            return value
        return min(max(after, min(value, self._low())), max(value, self._high()))

    def holds(self, mean: float) -> bool:
        """Whether the rule fires for this mean of the metric."""
        beyond = mean < self.threshold if self.above is None else mean > self.threshold
        return beyond or (self.inclusive and mean == self.threshold)

    @property
    def threshold(self) -> float:
        return self.above if self.above is not None else self.below if self.below is not None else math.nan

    def _low(self) -> float:
        return -math.inf if self.at_least is None else self.at_least

    def _high(self) -> float:
        return math.inf if self.at_most is None else self.at_most


def check_number(what: str, value: Any) -> None:
    """Raise an error unless the value is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= HUGE:
        raise ConfigError(f"{what} must be a finite number, got {value!r}")
