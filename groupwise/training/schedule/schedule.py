"""Settings that change while a run goes on: by phases, along ramps, and by rules on metrics.

A setting is a dotted name ("sampling.temperature") and a number; what it means is not known here. Its value is, in this
order: what the recipe says; what the phase in force says; what its ramp says, where it has one; and on that, one after
another, the changes of every rule that has fired. A rule's ``*`` and ``+`` go on acting while phases and ramps move the
value underneath; its ``=`` holds until the phase changes.

The schedule remembers when each phase began, which rule fired when, and the metrics that the rules still look back on.
That record is plain JSON; loaded again, the run goes on as if it had never stopped.
"""

from __future__ import annotations

import difflib
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from groupwise.errors import CheckpointError, ConfigError, InputError, check_choice
from groupwise.training.schedule.rules import HUGE, Phase, Ramp, Rule, check_number, check_phases, check_whole

DECAYS = ("constant", "linear", "cosine")
PATIENCE = 50  # steps after which a metric that never came is worth a word


class Schedule:
    """The settings of a run, step by step.

    ``base`` holds the recipe's values; a setting whose base is an int is a whole number and stays one. Ask ``values``
    at the start of every step and tell ``observe`` after it: phases that are counted in tokens begin where they were
    first asked about, so to look ahead use a second schedule.
    """

    def __init__(
        self,
        base: Mapping[str, float | int],
        *,
        phases: Sequence[Phase] = (),
        ramps: Sequence[Ramp] = (),
        rules: Sequence[Rule] = (),
    ) -> None:
        check_phases(phases)
        self._phases, self._rules = tuple(phases), tuple(rules)
        self._ramps = {ramp.setting: ramp for ramp in ramps}
        if len(self._ramps) < len(ramps):
            settings = [ramp.setting for ramp in ramps]
            double = next(name for name in settings if settings.count(name) > 1)
            raise ConfigError(f"{double} is driven by two ramps; put their points into one, with at = [[…], …]")
        given: list[tuple[str, str, float | None]] = []
        given += [(f"phase {phase.name!r}", name, value) for phase in phases for name, value in phase.set.items()]
        given += [(f"the ramp of {ramp.setting}", ramp.setting, value) for ramp in ramps for _, value in ramp.points]
        for rule in rules:
            self._check_during(rule)
            numbers = (rule.set, rule.at_least, rule.at_most)
            given += [(f"the rule on {rule.metric!r}", rule.setting, value) for value in numbers]
        for where, name, value in given:
            check_choice(f"setting in {where}:", name, base, ConfigError)
            check_number(f"{name}, which {where} changes,", base[name])
            if isinstance(base[name], int) and value is not None and value != int(value):
                raise ConfigError(f"{where}: {name} is a whole number, got {value}; write {round(value)}")
        self._base = {name: base[name] for _, name, _ in given}
        self._begun = [(0, 0)]  # (step, tokens) at which each phase began, and after the last the time without one
        self._fired: list[tuple[int, int]] = []  # (rule, step)
        self._windows: list[list[tuple[int, float]]] = [[] for _ in rules]  # (step, value of the metric)
        self._waits = [0 for _ in rules]
        self._known: set[str] = set()  # metrics that have been observed
        self._observed = 0
        self._last: int | None = None
        self._tokens = 0

    @property
    def driven(self) -> tuple[str, ...]:
        """The settings that this schedule drives."""
        return tuple(self._base)

    def values(self, step: int, tokens: int) -> dict[str, float | int]:
        """Every setting that this schedule drives, at the start of ``step`` (from 0), after ``tokens`` sampled ones."""
        self._advance(step, tokens)
        return {name: self._value(name, step, tokens, before=step) for name in self._base}

    def phase(self, step: int, tokens: int) -> str | None:
        """The name of the phase in force, None where there is none."""
        self._advance(step, tokens)
        return self._name(self._phase_at(step))

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Take in a finished step's metrics; a sentence for each rule that fired and each metric that never came.

        NaN counts as missing. A step may be observed in several parts, such as training and then evaluation.
        """
        if self._last is not None and step < self._last:
            raise InputError(f"step {step} was observed after step {self._last}; load the state that was saved then")
        new = step != self._last
        self._observed, self._last = self._observed + new, step
        numbers = {name: number for name, value in metrics.items() if (number := _metric(value)) is not None}
        self._known.update(numbers)
        said = [
            self._consider(index, step, numbers[rule.metric])
            for index, rule in enumerate(self._rules)
            if rule.metric in numbers and rule.during in (None, self._name(self._phase_at(step)))
        ]
        if new and self._observed == PATIENCE + 1:  # not a step earlier: the 50th may have an evaluation still to come
            said += [self._never(metric) for metric in dict.fromkeys(rule.metric for rule in self._rules)]
        return [sentence for sentence in said if sentence]

    def state(self) -> dict[str, Any]:
        """All that is remembered, as JSON."""
        return {
            "phases": [[self._name(index), *begun] for index, begun in enumerate(self._begun)],
            "rules": [
                {"rule": _saved(rule), "window": [list(pair) for pair in window], "wait": wait}
                for rule, window, wait in zip(self._rules, self._windows, self._waits, strict=True)
            ],
            "fired": [list(pair) for pair in self._fired],
            "known": sorted(self._known),
            "observed": self._observed,
            "last": self._last,
            "tokens": self._tokens,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` gave. The phases begun so far and the rules must be the same as then."""
        try:
            names = [name for name, _, _ in state["phases"]]
            rules = [saved["rule"] for saved in state["rules"]]
            begun = [(int(step), int(tokens)) for _, step, tokens in state["phases"]]
            windows = [[(int(step), float(value)) for step, value in saved["window"]] for saved in state["rules"]]
            waits = [int(saved["wait"]) for saved in state["rules"]]
            fired = [(int(index), int(step)) for index, step in state["fired"]]
            known, observed, tokens = set(map(str, state["known"])), int(state["observed"]), int(state["tokens"])
            last = None if state["last"] is None else int(state["last"])
            if not {index for index, _ in fired} <= set(range(len(rules))):
                raise ValueError("a rule fired that is not there")
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the saved schedule is damaged ({type(error).__name__}: {error}); resume from another checkpoint"
            ) from error
        expected = [self._name(index) for index in range(len(self._phases) + 1)]
        if not names or names != expected[: len(names)]:
            raise ConfigError(
                f"the saved run had gone through the phases {names}, the recipe has {expected[:-1]}; "
                "put back the phases that have begun, or start a new run"
            )
        if rules != [_saved(rule) for rule in self._rules]:
            raise ConfigError("the recipe's rules are not those of the saved run; put them back or start a new run")
        self._begun, self._windows, self._waits, self._fired = begun, windows, waits, fired
        self._known, self._observed, self._last, self._tokens = known, observed, last, tokens

    def _check_during(self, rule: Rule) -> None:
        names = [phase.name for phase in self._phases]
        if rule.during is not None and not names:
            raise ConfigError(
                f"the rule on {rule.metric!r} is for the phase {rule.during!r}, but there are no phases; add "
                "[[phases]] or leave 'during' out"
            )
        if rule.during is not None:
            check_choice(f"phase in the rule on {rule.metric!r}: during =", rule.during, names, ConfigError)

    def _advance(self, step: int, tokens: int) -> None:
        self._tokens = max(self._tokens, tokens)
        while len(self._begun) <= len(self._phases):
            phase, (first_step, first_token) = self._phases[len(self._begun) - 1], self._begun[-1]
            if phase.steps is not None and step >= first_step + phase.steps:
                self._begun.append((first_step + phase.steps, tokens))
            elif phase.tokens is not None and tokens >= first_token + phase.tokens:
                self._begun.append((step, tokens))
            else:
                break

    def _phase_at(self, step: int) -> int:
        return max(0, bisect_right(self._begun, step, key=lambda begun: begun[0]) - 1)

    def _name(self, index: int) -> str | None:
        return self._phases[index].name if index < len(self._phases) else None

    def _value(self, name: str, step: int, tokens: int, *, before: int) -> float | int:
        value = self._exact(name, step, tokens, before=before)
        return round(value) if isinstance(self._base[name], int) else float(value)

    def _exact(self, name: str, step: int, tokens: int, *, before: int) -> float:
        """The value at a step, not rounded, with the changes of the rules that fired ``before`` a step."""
        index = self._phase_at(step)
        value = self._base[name]
        if index < len(self._phases):
            value = self._phases[index].set.get(name, value)
        if name in self._ramps:
            ramp = self._ramps[name]
            value = ramp.value(step if ramp.over == "steps" else tokens)
        for number, fired in self._fired:
            rule = self._rules[number]
            if rule.setting == name and fired < before and (rule.set is None or self._phase_at(fired) == index):
                value = rule.change(value)
        return value

    def _consider(self, index: int, step: int, number: float) -> str | None:
        """Let a rule see a value of its metric; the sentence about what it did, if it fired."""
        rule, window = self._rules[index], self._windows[index]
        window.append((step, number))
        del window[: -rule.over]
        self._waits[index] = max(0, self._waits[index] - 1)
        used_up = rule.times is not None and sum(fired == index for fired, _ in self._fired) >= rule.times
        mean = math.fsum(value for _, value in window) / len(window)
        if len(window) < rule.over or self._waits[index] or used_up or not rule.holds(mean):
            return None
        before = self._exact(rule.setting, step, self._tokens, before=step + 1)
        if rule.change(before) == before:
            return None
        self._fired.append((index, step))
        self._waits[index] = rule.over if rule.cooldown is None else rule.cooldown
        gaps = "" if window[0][0] == step - rule.over + 1 else " that reported it"
        average = f"on average over the last {rule.over} steps{gaps}" if rule.over > 1 else f"at step {step}"
        side = ("at or " if rule.inclusive else "") + ("below" if rule.above is None else "above")
        sign, amount = ("×", rule.multiply) if rule.multiply is not None else ("=", rule.set)
        if rule.add is not None:
            sign, amount = "−" if rule.add < 0 else "+", abs(rule.add)
        now = self._value(rule.setting, step, self._tokens, before=step + 1)
        return (
            f"{rule.metric} was {mean:.6g} {average}, {side} {rule.limit():.6g}: "
            f"{rule.setting} {sign} {amount:.6g}, now {now if isinstance(now, int) else format(now, '.6g')}"
        )

    def _never(self, metric: str) -> str | None:
        if metric in self._known:
            return None
        nearest = difflib.get_close_matches(metric, sorted(self._known), n=1, cutoff=0.0)
        hint = f"; the nearest that came is {nearest[0]!r}" if nearest else ""
        return (
            f"a rule waits for the metric {metric!r}, but none of {PATIENCE} steps reported a number of that name{hint}"
        )


def _saved(rule: Rule) -> dict[str, Any]:
    """A rule as JSON. ``during`` is left out where there is none, as in checkpoints from before there was any."""
    return {name: value for name, value in asdict(rule).items() if name != "during" or value is not None}


def warmup_decay(step: int, *, warmup_steps: int, total_steps: int | None, shape: str, final: float) -> float:
    """The factor on the learning rate at ``step`` (from 0).

    Linear warm-up, (step + 1) / warmup_steps, then the decay from 1 to ``final``, a share, at ``total_steps``;
    "constant" stays at 1 and needs no total.
    """
    check_choice("decay of the learning rate", shape, DECAYS, ConfigError)
    check_whole("warmup_steps", warmup_steps, 0)
    check_number("the final share of the learning rate", final)
    if not 0 <= final <= 1:
        raise ConfigError(f"the final share of the learning rate must be between 0 and 1, got {final}")
    if total_steps is not None:
        check_whole("total_steps", total_steps, 1)
    elif shape != "constant":
        raise ConfigError(f"a {shape} decay must know where it ends: set the run's number of steps, or use 'constant'")
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if shape == "constant" or total_steps is None:
        return 1.0
    if step >= total_steps:
        return float(final)
    share = (step - warmup_steps) / (total_steps - warmup_steps)
    if shape == "cosine":
        share = (1 - math.cos(math.pi * share)) / 2
    return 1 + (final - 1) * share


def _metric(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if math.isnan(number) else min(max(number, -HUGE), HUGE)
