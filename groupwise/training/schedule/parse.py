"""Parses the recipe's ``[[phases]]``, ``[ramps]`` and ``[[rules]]``."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from groupwise.errors import ConfigError, check_choice, check_integer, did_you_mean
from groupwise.training.schedule.rules import LENGTHS, UNITS, Phase, Ramp, Rule

ResolveName = Callable[[str], str]
"""A setting's full dotted name, from any name the recipe accepts."""

PHASE_FIELDS = ("name", *LENGTHS)
RAMP_FIELDS = ("from", "to", "steps", "tokens", "start", "shape", "at", "over")
RULE_LIMITS = ("at_least", "at_most", "cooldown", "times", "during")


def parse_phases(tables: Sequence[Mapping[str, Any]], resolve: ResolveName) -> tuple[Phase, ...]:
    """Parse ``[[phases]]``: a name, a length (steps, tokens, epochs or share), and settings."""
    phases = []
    for number, table in enumerate(tables, start=1):
        where = f"[[phases]] number {number}"
        if "name" not in table:
            raise ConfigError(f'{where} has no name; add one, such as name = "warm-up"')
        fields = {key: table[key] for key in PHASE_FIELDS if key in table}
        changes: dict[str, float] = {}
        for name, value in _flatten({key: table[key] for key in table if key not in fields}, lambda _: False):
            setting = _resolve(resolve, name, where, PHASE_FIELDS)
            if setting in changes:
                raise ConfigError(f"{where} sets {setting} twice, the second time as {name!r}; keep one")
            changes[setting] = value
        phases.append(Phase(**fields, set=changes))
    for phase in phases[:-1]:
        if not phase.has_length:
            raise ConfigError(
                f"phase {phase.name!r} has no length, so the next would never begin; add {', '.join(LENGTHS[:-1])} or "
                f"{LENGTHS[-1]}"
            )
    shares = math.fsum(phase.share or 0.0 for phase in phases)
    if shares > 1 + 1e-9:  # 0.7 + 0.2 + 0.1 is not exactly 1
        raise ConfigError(f"the shares of the phases add up to {shares:g}, more than the run; lower them to 1 in all")
    for name, count in Counter(phase.name for phase in phases).items():
        if count > 1:
            raise ConfigError(f"two phases are called {name!r}; names must be unique")
    return tuple(phases)


def parse_ramps(table: Mapping[str, Any], resolve: ResolveName) -> tuple[Ramp, ...]:
    """Parse ``[ramps]``: ``{from, to, steps or tokens, start, shape}`` or ``{at = [[position, value], …]}``."""
    ramps: dict[str, Ramp] = {}
    for name, entry in _flatten(table, lambda inner: not all(isinstance(value, Mapping) for value in inner.values())):
        where = f"[ramps] {name}"
        setting = _resolve(resolve, name, where)
        if setting in ramps:
            raise ConfigError(f"{where}: {setting} has two ramps; merge their points into one, with at = [[…], …]")
        ramps[setting] = _parse_ramp(setting, entry, where)
    return tuple(ramps.values())


def _parse_ramp(setting: str, entry: Mapping[str, Any], where: str) -> Ramp:
    usage = "write { from = 1.0, to = 0.7, steps = 200 } or { at = [[0, 1.0], [200, 0.7]] }"
    for key in entry:
        check_choice(f"key in {where}:", key, RAMP_FIELDS, ConfigError)
    shape = entry.get("shape", "linear")
    if "at" in entry:
        if mixed := sorted(set(entry) - {"at", "over", "shape"}):
            raise ConfigError(f"{where} has 'at' and also {', '.join(map(repr, mixed))}; {usage}")
        points = entry["at"]
        if not isinstance(points, list | tuple) or not all(isinstance(p, list | tuple) and len(p) == 2 for p in points):
            raise ConfigError(f"{where}: 'at' must be a list of [position, value], got {points!r}")
        return Ramp(setting, tuple((p[0], p[1]) for p in points), over=entry.get("over", "steps"), shape=shape)
    units = [unit for unit in UNITS if unit in entry]
    if "from" not in entry or "to" not in entry or len(units) != 1 or "over" in entry:
        raise ConfigError(f"{where} needs from, to, and one of steps and tokens ('over' goes with 'at'); {usage}")
    start = check_integer(f"{where}: start", entry.get("start", 0), 0, ConfigError)
    end = start + check_integer(f"{where}: {units[0]}", entry[units[0]], 1, ConfigError)
    return Ramp(setting, ((start, entry["from"]), (end, entry["to"])), over=units[0], shape=shape)


def parse_rules(tables: Sequence[Mapping[str, Any]], resolve: ResolveName) -> tuple[Rule, ...]:
    """Parse ``[[rules]]``: when = "accuracy < 0.15", over = 10, then = "learning_rate * 0.5", and the limits."""
    rules = []
    for position, table in enumerate(tables, start=1):
        where = f"[[rules]] number {position}"
        for key in table:
            check_choice(f"key in {where}:", key, ("when", "over", "then", *RULE_LIMITS), ConfigError)
        for key, example in (("when", '"accuracy < 0.15"'), ("over", "10"), ("then", '"learning_rate * 0.5"')):
            if key not in table:
                raise ConfigError(f"{where} has no {key!r}; add it, such as {key} = {example}")
        metric, sign, number = _parse_expression(where, "when", table["when"], r"<=|>=|<|>", "accuracy < 0.15")
        name, operator, amount = _parse_expression(where, "then", table["then"], r"[*/=+-]", "learning_rate * 0.5")
        if operator == "/" and amount == 0:
            raise ConfigError(f"{where}: then = {table['then']!r} divides by zero")
        change = {"*": "multiply", "/": "multiply", "=": "set", "+": "add", "-": "add"}[operator]
        if operator in "/-":
            amount = 1 / amount if operator == "/" else -amount
        fields: dict[str, Any] = {key: table[key] for key in ("over", *RULE_LIMITS) if key in table}
        fields |= {"below" if "<" in sign else "above": number, "inclusive": "=" in sign, change: amount}
        rules.append(Rule(metric=metric, setting=_resolve(resolve, name, where), **fields))
    return tuple(rules)


def _parse_expression(where: str, key: str, text: Any, signs: str, example: str) -> tuple[str, str, float]:
    """The name, sign and number of ``text``."""
    pattern = rf"\s*([^\s<>=*+]+?)\s*({signs})\s*([^\s<>=*/]+)\s*"
    match = re.fullmatch(pattern, text) if isinstance(text, str) else None
    try:
        number = float(match[3]) if match else math.nan
    except ValueError:
        number = math.nan
    if match is None or not math.isfinite(number):
        raise ConfigError(f"{where}: {key} = {text!r} is invalid; write a name, a sign and a number: {example!r}")
    return match[1], match[2], number


def _flatten(table: Mapping[str, Any], leaf: Callable[[Any], bool], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Entries by dotted name: TOML reads ``sampling.temperature = 1`` as a nested table."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value and not leaf(value):
            yield from _flatten(value, leaf, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _resolve(resolve: ResolveName, name: str, where: str, fields: Sequence[str] = ()) -> str:
    try:
        return resolve(name)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}{did_you_mean(name, fields)}") from error
