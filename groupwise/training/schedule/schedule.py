"""Settings that change during a run: by phases, along ramps, and by rules on metrics.

A setting is a dotted name ("sampling.temperature") with a number. Its value is the recipe's, replaced by that of the
current phase, replaced by that of its ramp, then changed by every rule that has fired, in order. A rule's ``*`` and
``+`` keep acting while phases and ramps move the value; its ``=`` holds until the phase changes.

The state (when each phase began, which rule fired when, the metrics in the rules' windows) is plain JSON; a resumed run
continues exactly.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from groupwise.errors import CheckpointError, ConfigError, InputError, check_choice, did_you_mean
from groupwise.training.schedule.rules import HUGE, Phase, Ramp, Rule, check_number

PATIENCE = 50  # steps after which a warning is given about a metric that was never reported


class Schedule:
    """The scheduled settings of a run.

    ``base`` holds the recipe's values; a setting whose base is an int stays an int. Call `values` at the start of every
    step and `observe` after it. Phases counted in tokens begin at the step where `values` first sees enough tokens, so
    use a second schedule to look ahead.

    phases: their lengths are steps or tokens (`groupwise.training.schedule.lengths` resolves the others).
    ends: the run ends with the last phase, so its settings apply until the end, also in the last evaluation.
    refusal: says why the recipe cannot have these values, or None. A rule's change that it refuses is left out.
    """

    def __init__(
        self,
        base: Mapping[str, float | int],
        *,
        phases: Sequence[Phase] = (),
        ramps: Sequence[Ramp] = (),
        rules: Sequence[Rule] = (),
        ends: bool = False,
        refusal: Callable[[dict[str, float | int]], str | None] = lambda values: None,
    ) -> None:
        self._refusal = refusal
        self._phases, self._rules, self._ends = tuple(phases), tuple(rules), ends
        self._ramps = {ramp.setting: ramp for ramp in ramps}
        changes: list[tuple[str, str, float | None]] = []  # (where, setting, value)
        changes += [(f"phase {phase.name!r}", name, value) for phase in phases for name, value in phase.set.items()]
        changes += [(f"the ramp of {ramp.setting}", ramp.setting, value) for ramp in ramps for _, value in ramp.points]
        for rule in rules:
            where = f"the rule on {rule.metric!r}"
            if rule.during is not None:
                names = [phase.name for phase in phases]
                check_choice(f"phase in {where}: during =", rule.during, names, ConfigError)
            changes += [(where, rule.setting, value) for value in (rule.set, rule.at_least, rule.at_most)]
        for where, name, value in changes:
            check_number(f"{name}, which {where} changes,", base[name])
            if isinstance(base[name], int) and value is not None and value != int(value):
                raise ConfigError(f"{where}: {name} must be an integer, got {value}; write {round(value)}")
        self._base = {name: base[name] for _, name, _ in changes}
        self._begun = [(0, 0)]  # (step, tokens) at which each phase began, and at which the last one ended
        self._fired: list[tuple[int, int]] = []  # (rule, step)
        self._windows: list[list[tuple[int, float]]] = [[] for _ in rules]  # (step, value of the metric)
        self._waits = [0 for _ in rules]
        self._reported: set[str] = set()  # names of metrics
        self._observed = 0  # steps
        self._last: int | None = None
        self._tokens = 0

    @property
    def driven(self) -> tuple[str, ...]:
        """The settings that this schedule changes."""
        return tuple(self._base)

    def values(self, step: int, tokens: int) -> dict[str, float | int]:
        """Every scheduled setting at the start of ``step`` (from 0), after ``tokens`` sampled tokens."""
        self._advance(step, tokens)
        fired = [(index, fired_at) for index, fired_at in self._fired if fired_at < step]
        values = self._values(step, tokens, fired)
        while fired and self._refusal(values) is not None:
            # A phase or a ramp has moved the value under a rule's change: leave the latest change out.
            fired.pop()
            values = self._values(step, tokens, fired)
        return values

    def phase(self, step: int, tokens: int) -> str | None:
        """The name of the current phase, None if there is none."""
        self._advance(step, tokens)
        return self._name(self._phase_at(step))

    def steps_left(self, step: int, tokens: int, tokens_per_step: float) -> int:
        """The steps until the last phase ends; of a phase counted in tokens, as many as this rate of tokens takes.

        All phases must have a length. The result is 0 exactly if the last phase is over.
        """
        self._advance(step, tokens)
        current = len(self._begun) - 1
        begun_step, begun_tokens = self._begun[-1]
        done = {"steps": step - begun_step, "tokens": tokens - begun_tokens}
        left = 0
        for number, phase in enumerate(self._phases[current:]):
            if phase.tokens is not None:
                left += max(0, math.ceil((phase.tokens - (0 if number else done["tokens"])) / tokens_per_step))
            elif phase.steps is not None:
                left += max(0, phase.steps - (0 if number else done["steps"]))
        return left

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Apply the rules to a finished step's metrics; returns messages: rules that fired, metrics never reported.

        NaN counts as missing. A step may be observed more than once, such as for training and then for evaluation.
        """
        if self._last is not None and step < self._last:
            raise InputError(f"step {step} was observed after step {self._last}; load the state saved at that step")
        new = step != self._last
        self._observed, self._last = self._observed + new, step
        numbers = {name: number for name, value in metrics.items() if (number := _number(value)) is not None}
        self._reported.update(numbers)
        messages = [
            self._apply(index, step, numbers[rule.metric])
            for index, rule in enumerate(self._rules)
            if rule.metric in numbers and rule.during in (None, self._name(self._phase_at(step)))
        ]
        if new and self._observed == PATIENCE + 1:  # the evaluation of the 50th step comes after its training metrics
            messages += [
                f"a rule needs the metric {metric!r}, but no step of the first {PATIENCE} reported it"
                + did_you_mean(metric, sorted(self._reported))
                for metric in dict.fromkeys(rule.metric for rule in self._rules)
                if metric not in self._reported
            ]
        return [message for message in messages if message]

    def state(self) -> dict[str, Any]:
        """The state as JSON."""
        return {
            "phases": [[self._name(index), *begun] for index, begun in enumerate(self._begun)],
            "rules": [
                {"rule": _as_json(rule), "window": [list(pair) for pair in window], "wait": wait}
                for rule, window, wait in zip(self._rules, self._windows, self._waits, strict=True)
            ],
            "fired": [list(pair) for pair in self._fired],
            "known": sorted(self._reported),
            "observed": self._observed,
            "last": self._last,
            "tokens": self._tokens,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`. The phases begun so far and the rules must not have changed."""
        try:
            names = [name for name, _, _ in state["phases"]]
            rules = [saved["rule"] for saved in state["rules"]]
            begun = [(int(step), int(tokens)) for _, step, tokens in state["phases"]]
            windows = [[(int(step), float(value)) for step, value in saved["window"]] for saved in state["rules"]]
            waits = [int(saved["wait"]) for saved in state["rules"]]
            fired = [(int(index), int(step)) for index, step in state["fired"]]
            reported, observed, tokens = set(map(str, state["known"])), int(state["observed"]), int(state["tokens"])
            last = None if state["last"] is None else int(state["last"])
            if not {index for index, _ in fired} <= set(range(len(rules))):
                raise ValueError("a rule fired that does not exist")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(
                f"the saved schedule is damaged ({type(error).__name__}: {error}); resume from another checkpoint"
            ) from error
        expected = [self._name(index) for index in range(len(self._phases) + 1)]
        if not names or names != expected[: len(names)]:
            raise ConfigError(
                f"the saved run went through the phases {names}, but the recipe has {expected[:-1]}; "
                "restore the phases that have begun, or start a new run"
            )
        if rules != [_as_json(rule) for rule in self._rules]:
            raise ConfigError("the recipe's rules differ from those of the saved run; restore them or start a new run")
        if self._ends:  # the saved run went on after its last phase, or was cut there by train.steps
            del begun[len(self._phases) :]
        self._begun, self._windows, self._waits, self._fired = begun, windows, waits, fired
        self._reported, self._observed, self._last, self._tokens = reported, observed, last, tokens

    def _advance(self, step: int, tokens: int) -> None:
        self._tokens = max(self._tokens, tokens)
        while len(self._begun) < len(self._phases) + (not self._ends):
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

    def _values(self, step: int, tokens: int, fired: Sequence[tuple[int, int]]) -> dict[str, float | int]:
        values = {name: self._exact(name, step, tokens, fired) for name in self._base}
        return {
            name: round(value) if isinstance(self._base[name], int) else float(value) for name, value in values.items()
        }

    def _exact(self, name: str, step: int, tokens: int, fired: Sequence[tuple[int, int]]) -> float:
        """The value at ``step``, not rounded, with the changes of the rules that ``fired``, as (rule, step)."""
        index = self._phase_at(step)
        value = self._base[name]
        if index < len(self._phases):
            value = self._phases[index].set.get(name, value)
        if name in self._ramps:
            ramp = self._ramps[name]
            value = ramp.value(step if ramp.over == "steps" else tokens)
        for number, fired_at in fired:
            rule = self._rules[number]
            if rule.setting == name and (rule.set is None or self._phase_at(fired_at) == index):
                value = rule.change(value)
        return value

    def _apply(self, index: int, step: int, number: float) -> str | None:
        """Give a rule a new value of its metric; returns a message if it fired."""
        rule, window = self._rules[index], self._windows[index]
        window.append((step, number))
        del window[: -rule.over]
        self._waits[index] = max(0, self._waits[index] - 1)
        used_up = rule.times is not None and sum(fired == index for fired, _ in self._fired) >= rule.times
        mean = math.fsum(value for _, value in window) / len(window)
        if len(window) < rule.over or self._waits[index] or used_up or not rule.holds(mean):
            return None
        before = self._exact(rule.setting, step, self._tokens, self._fired)
        if rule.change(before) == before:
            return None
        self._waits[index] = rule.over if rule.cooldown is None else rule.cooldown
        some = "" if window[0][0] == step - rule.over + 1 else " that reported it"
        average = f"on average over the last {rule.over} steps{some}" if rule.over > 1 else f"at step {step}"
        side = ("at or " if rule.inclusive else "") + ("below" if rule.above is None else "above")
        sign, amount = ("×", rule.multiply) if rule.multiply is not None else ("=", rule.set)
        if rule.add is not None:
            sign, amount = "−" if rule.add < 0 else "+", abs(rule.add)
        because = f"{rule.metric} was {mean:.6g} {average}, {side} {rule.threshold:.6g}"
        change = f"{rule.setting} {sign} {amount:.6g}"
        fired = [*self._fired, (index, step)]
        values = self._values(step, self._tokens, fired)
        reason = self._refusal(values)
        if reason is not None:
            value = self._values(step, self._tokens, self._fired)[rule.setting]
            return f"{because}, but {change} is left out, it stays at {_shown(value)}: {reason}"
        self._fired = fired
        return f"{because}: {change}, now {_shown(values[rule.setting])}"


def _shown(value: float | int) -> str:
    return str(value) if isinstance(value, int) else format(value, ".6g")


def _as_json(rule: Rule) -> dict[str, Any]:
    """The rule's fields. ``during`` is omitted if None, as in checkpoints older than that field."""
    return {name: value for name, value in asdict(rule).items() if name != "during" or value is not None}


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if math.isnan(number) else min(max(number, -HUGE), HUGE)
