"""The recipe's tables ``[[phases]]``, ``[ramps]`` and ``[[rules]]``, read into the schedule's parts."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from groupwise.errors import ConfigError, check_choice
from groupwise.training.schedule.rules import UNITS, Phase, Ramp, Rule, check_phases, check_whole

Resolve = Callable[[str], str]


def parse_phases(tables: Any, resolve: Resolve) -> tuple[Phase, ...]:
    """The recipe's ``[[phases]]``: name, steps or tokens, and settings by any name that ``resolve`` knows."""
    phases = []
    for where, table in _tables("phases", tables):
        if "name" not in table:
            raise ConfigError(f'{where} has no name; add one, such as name = "warm-up"')
        own = {key: table[key] for key in ("name", "steps", "tokens") if key in table}
        changes: dict[str, float] = {}
        for name, value in _flat({key: table[key] for key in table if key not in own}, lambda _: False):
            setting = _resolved(resolve, name, where, ("name", "steps", "tokens"))
            if setting in changes:
                raise ConfigError(f"{where} sets {setting} twice, the second time as {name!r}; keep one")
            changes[setting] = value
        phases.append(Phase(**own, set=changes))
    check_phases(phases)
    return tuple(phases)


def parse_ramps(table: Any, resolve: Resolve) -> tuple[Ramp, ...]:
    """The recipe's ``[ramps]``: ``{from, to, steps or tokens, start, shape}`` or ``{at = [[position, value], …]}``."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"ramps must be one table, written [ramps], got {table!r}")
    ramps: dict[str, Ramp] = {}
    for name, entry in _flat(table, lambda inner: not all(isinstance(value, Mapping) for value in inner.values())):
        where = f"[ramps] {name}"
        setting = _resolved(resolve, name, where)
        if setting in ramps:
            raise ConfigError(
                f"{where}: {setting} is driven by two ramps; put their points into one, with at = [[…], …]"
            )
        ramps[setting] = _ramp(setting, entry, where)
    return tuple(ramps.values())


def _ramp(setting: str, entry: Any, where: str) -> Ramp:
    usage = "write { from = 1.0, to = 0.7, steps = 200 } or { at = [[0, 1.0], [200, 0.7]] }"
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} must be a table, got {entry!r}; {usage}")
    for key in entry:
        check_choice(
            f"key in {where}:", key, ("from", "to", "steps", "tokens", "start", "shape", "at", "over"), ConfigError
        )
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
    start = check_whole(f"{where}: start", entry.get("start", 0), 0)
    end = start + check_whole(f"{where}: {units[0]}", entry[units[0]], 1)
    return Ramp(setting, ((start, entry["from"]), (end, entry["to"])), over=units[0], shape=shape)


def parse_rules(tables: Any, resolve: Resolve) -> tuple[Rule, ...]:
    """The recipe's ``[[rules]]``: when = "accuracy < 0.15", over = 10, then = "learning_rate * 0.5", and limits.

    ``during`` names the phase that a rule is for.
    """
    rules = []
    limits = ("at_least", "at_most", "cooldown", "times", "during")
    for where, table in _tables("rules", tables):
        for key in table:
            check_choice(f"key in {where}:", key, ("when", "over", "then", *limits), ConfigError)
        for key, example in (("when", '"accuracy < 0.15"'), ("over", "10"), ("then", '"learning_rate * 0.5"')):
            if key not in table:
                raise ConfigError(f"{where} has no {key!r}; add it, such as {key} = {example}")
        metric, sign, number = _split(where, "when", table["when"], r"<=|>=|<|>", "accuracy < 0.15")
        name, operator, amount = _split(where, "then", table["then"], r"[*/=+-]", "learning_rate * 0.5")
        if operator == "/" and amount == 0:
            raise ConfigError(f"{where}: then = {table['then']!r} divides by zero")
        change = {"*": "multiply", "/": "multiply", "=": "set", "+": "add", "-": "add"}[operator]
        if operator in "/-":
            amount = 1 / amount if operator == "/" else -amount
        fields: dict[str, Any] = {key: table[key] for key in ("over", *limits) if key in table}
        fields |= {"below" if "<" in sign else "above": number, "inclusive": "=" in sign, change: amount}
        rules.append(Rule(metric=metric, setting=_resolved(resolve, name, where), **fields))
    return tuple(rules)


def _split(where: str, key: str, text: Any, signs: str, example: str) -> tuple[str, str, float]:
    """A name, a sign and a number."""
    components = (
        re.fullmatch(rf"\s*([^\s<>=*+]+?)\s*({signs})\s*([^\s<>=*/]+)\s*", text) if isinstance(text, str) else None
    )
    try:
        number = float(components[3]) if components else math.nan
    except ValueError:
        number = math.nan
    if components is None or not math.isfinite(number):
        raise ConfigError(f"{where}: {key} = {text!r} cannot be read; write a name, a sign and a number: {example!r}")
    return components[1], components[2], number


def _tables(what: str, tables: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not isinstance(tables, list | tuple) or not all(isinstance(table, Mapping) for table in tables):
        raise ConfigError(f"{what} must be a list of tables, each under its own [[{what}]], got {tables!r}")
    for number, table in enumerate(tables, start=1):
        yield f"[[{what}]] number {number}", table


def _flat(table: Mapping[str, Any], leaf: Callable[[Any], bool], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Entries under dotted names: TOML reads ``sampling.temperature = 1`` as a table within a table."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value and not leaf(value):
            yield from _flat(value, leaf, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _resolved(resolve: Resolve, name: str, where: str, own: Sequence[str] = ()) -> str:
    try:
        return resolve(name)
    except ConfigError as error:
        nearest = difflib.get_close_matches(name, own, n=1)
        hint = f"; or did you mean {nearest[0]!r}?" if nearest else ""
        raise ConfigError(f"{where}: {error}{hint}") from error
