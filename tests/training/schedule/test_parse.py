"""Parsing the recipe's [[phases]], [ramps] and [[rules]], and what is refused."""

from __future__ import annotations

import math
import tomllib

import pytest

from groupwise.errors import ConfigError, check_choice
from groupwise.training.schedule.parse import parse_phases, parse_ramps, parse_rules
from groupwise.training.schedule.rules import Phase, Ramp, Rule

T, KL, LR, G = "sampling.temperature", "loss.kl_coef", "optimizer.learning_rate", "sampling.samples_per_prompt"


def resolve(name: str) -> str:
    """As a recipe does it: the last part of a name is enough."""
    short = {dotted.split(".")[-1]: dotted for dotted in (T, KL, LR, G)}
    if name in short.values():
        return name
    check_choice("setting", name, short, ConfigError)
    return short[name]


RECIPE = """
[[phases]]
name = "warm-up"
steps = 100
temperature = 0.7
kl_coef = 0.02
sampling.samples_per_prompt = 8

[[phases]]
name = "main"
tokens = 50_000_000
temperature = 1

[[phases]]
name = "half"
epochs = 0.5
kl_coef = 0.1

[[phases]]
name = "third"
share = 0.3
kl_coef = 0.2

[[phases]]
name = "rest"
kl_coef = 0

[ramps]
temperature = { from = 1.0, to = 0.7, steps = 200 }
sampling.samples_per_prompt = { from = 8, to = 16, tokens = 1_000_000, start = 50, shape = "constant" }
kl_coef = { at = [[0, 0.02], [100, 0.01], [400, 0.0]], over = "tokens", shape = "cosine" }
learning_rate = { at = [[3, 1e-6]] }

[[rules]]
when = "accuracy < 0.15"
over = 10
then = "learning_rate * 0.5"
at_least = 1e-7

[[rules]]
when = "eval/kl-mean>=-2e-1"
over = 1
then = "sampling.temperature-1e-1"
at_most = 2
cooldown = 3
times = 4
"""


def test_the_tables_of_a_recipe():
    recipe = tomllib.loads(RECIPE)
    assert parse_phases(recipe["phases"], resolve) == (
        Phase("warm-up", steps=100, set={T: 0.7, KL: 0.02, G: 8}),
        Phase("main", tokens=50_000_000, set={T: 1}),
        Phase("half", epochs=0.5, set={KL: 0.1}),
        Phase("third", share=0.3, set={KL: 0.2}),
        Phase("rest", set={KL: 0}),
    )
    assert parse_ramps(recipe["ramps"], resolve) == (
        Ramp(T, ((0, 1.0), (200, 0.7))),
        Ramp(G, ((50, 8), (1_000_050, 16)), over="tokens", shape="constant"),
        Ramp(KL, ((0, 0.02), (100, 0.01), (400, 0.0)), over="tokens", shape="cosine"),
        Ramp(LR, ((3, 1e-6),)),
    )
    assert parse_rules(recipe["rules"], resolve) == (
        Rule(metric="accuracy", below=0.15, over=10, setting=LR, multiply=0.5, at_least=1e-7),
        Rule(
            metric="eval/kl-mean", above=-0.2, inclusive=True, over=1, setting=T, add=-0.1,
            at_most=2, cooldown=3, times=4,
        ),
    )  # fmt: skip
    assert parse_phases([], resolve) == parse_ramps({}, resolve) == parse_rules([], resolve) == ()


@pytest.mark.parametrize(
    ("then", "change"),
    [
        ("temperature * 0.5", {"multiply": 0.5}),
        (" temperature*2 ", {"multiply": 2.0}),
        ("temperature / 4", {"multiply": 0.25}),
        ("temperature = 0.7", {"set": 0.7}),
        ("temperature=-1", {"set": -1.0}),
        ("temperature + 0.1", {"add": 0.1}),
        ("temperature - 1e-1", {"add": -0.1}),
        ("temperature * -1", {"multiply": -1.0}),
    ],
)
def test_rule_actions(then, change):
    [rule] = parse_rules([{"when": "r > 1_000", "over": 2, "then": then}], resolve)
    assert rule == Rule(metric="r", above=1000.0, over=2, setting=T, **change)


@pytest.mark.parametrize("sign", ["<", "<=", ">", ">="])
def test_rule_conditions(sign):
    [rule] = parse_rules([{"when": f"r {sign} 1", "over": 2, "then": "temperature * 2"}], resolve)
    assert (rule.below, rule.above) == ((1.0, None) if "<" in sign else (None, 1.0))
    assert rule.inclusive is ("=" in sign)


A = {"name": "a", "steps": 3, "temperature": 0.7}
E = {"name": "a", "temperature": 0.7}


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([{"steps": 3, "temperature": 1}], r"\[\[phases\]\] number 1 has no name"),
        ([A | {"name": ""}], "phase's name .* got ''"),
        ([A | {"name": 3}], "phase's name .* got 3"),
        (
            [A, A | {"name": "b", "temprature": 1}],
            r"\[\[phases\]\] number 2: .*'temprature'; did you mean 'temperature'",
        ),
        ([A | {"step": 1}], r"\[\[phases\]\] number 1: unknown setting 'step'.*; did you mean 'steps'\?"),
        ([A | {"sampling": {"temp": 1}}], r"\[\[phases\]\] number 1: unknown setting 'sampling.temp'"),
        ([A | {"sampling": {}}], r"\[\[phases\]\] number 1: unknown setting 'sampling'"),
        ([A | {"tokens": 5}], "phase 'a' has both steps and tokens"),
        ([A | {"epochs": 5}], "phase 'a' has both steps and epochs"),
        ([A | {"share": 0.5, "epochs": 1}], "phase 'a' has both steps and epochs and share"),
        ([E | {"epochs": 0}], "phase 'a': epochs must be above 0, got 0"),
        ([E | {"epochs": -0.5}], "phase 'a': epochs must be above 0, got -0.5"),
        ([E | {"epochs": math.inf}], "phase 'a': epochs must be a finite number, got inf"),
        ([E | {"epochs": "two"}], "phase 'a': epochs must be a finite number, got 'two'"),
        ([E | {"share": 0.0}], "phase 'a': share must be above 0 and at most 1, got 0.0"),
        ([E | {"share": 1.1}], "phase 'a': share must be above 0 and at most 1, got 1.1"),
        ([E | {"share": True}], "phase 'a': share must be a finite number, got True"),
        (
            [E | {"share": 0.6}, E | {"share": 0.6, "name": "b"}],
            "shares of the phases add up to 1.2, more",
        ),
        ([{"name": "a", "steps": 3}], "phase 'a' changes no setting"),
        ([{"name": "a", "kl_coef": 1}, A | {"name": "b"}], "phase 'a' has no length"),
        ([A, A], "two phases are called 'a'"),
        ([A | {T: 0.5}], r"\[\[phases\]\] number 1 sets sampling.temperature twice, the second time as 'sampling"),
        ([A | {"steps": 0}], "phase 'a': steps must be .* at least 1, got 0"),
        ([A | {"steps": 1.0}], "phase 'a': steps must be .* at least 1, got 1.0"),
        ([A | {"steps": True}], "phase 'a': steps must be .* at least 1, got True"),
        ([{"name": "a", "tokens": -1, "kl_coef": 1}], "phase 'a': tokens must be .* at least 1, got -1"),
        ([A | {"temperature": "hot"}], "phase 'a': sampling.temperature must be a finite number, got 'hot'"),
        ([A | {"temperature": True}], "phase 'a': sampling.temperature must be a finite number, got True"),
        ([A | {"temperature": math.nan}], "phase 'a': sampling.temperature must be a finite number, got nan"),
        ([A | {"temperature": math.inf}], "phase 'a': sampling.temperature must be a finite number, got inf"),
        ([A | {"temperature": 10**400}], "phase 'a': sampling.temperature must be a finite number, got 1000"),
    ],
)
def test_invalid_phases(tables, message):
    with pytest.raises(ConfigError, match=message):
        parse_phases(tables, resolve)


F = {"from": 1.0, "to": 0.5, "steps": 10}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({}, r"\[ramps\] temperature needs from, to, and one of steps and tokens"),
        (F | {"step": 3}, r"unknown key in \[ramps\] temperature: 'step'; did you mean 'steps'"),
        (F | {"tokens": 3}, "needs from, to, and one of steps and tokens"),
        (F | {"over": "tokens"}, r"needs .* \('over' goes with 'at'\)"),
        ({"from": 1.0, "steps": 10}, "needs from, to, and one of steps and tokens"),
        ({"to": 1.0, "steps": 10}, "needs from, to, and one of steps and tokens"),
        ({"from": 1.0, "to": 0.5}, "needs from, to, and one of steps and tokens"),
        ({"at": [[0, 1.0]], "to": 3, "from": 2}, r"\[ramps\] temperature has 'at' and also 'from', 'to'; write"),
        ({"at": [0, 1.0]}, r"\[ramps\] temperature: 'at' must be a list of \[position, value\], got \[0, 1.0\]"),
        ({"at": [[0, 1.0, 2]]}, r"'at' must be a list of \[position, value\]"),
        ({"at": 3}, r"'at' must be a list of \[position, value\], got 3"),
        ({"at": []}, "the ramp of sampling.temperature has no points"),
        ({"at": [[0, 1], [5, 2], [5, 3]]}, "5 comes after 5"),
        ({"at": [[7, 1], [5, 2]]}, "the ramp of sampling.temperature: .* 5 comes after 7"),
        ({"at": [[-1, 1]]}, "the position of a point must be .* at least 0, got -1"),
        ({"at": [[0.5, 1]]}, "the position of a point must be .* at least 0, got 0.5"),
        ({"at": [[0, True]]}, "the ramp of sampling.temperature: the value at 0 must be a finite number, got True"),
        (
            {"at": [[0, 1]], "over": "step"},
            r"unknown unit \('over'\) of the ramp of sampling.temperature 'step'; did yo",
        ),
        (
            F | {"shape": "cosinus"},
            "unknown shape of the ramp of sampling.temperature 'cosinus'; did you mean 'cosine'",
        ),
        (F | {"to": 0, "shape": "exponential"}, "exponential, which needs values above 0, .* at 10 is 0"),
        (F | {"from": math.nan}, "the value at 0 must be a finite number, got nan"),
        (F | {"steps": 0}, r"\[ramps\] temperature: steps must be .* at least 1, got 0"),
        (F | {"start": -1}, r"\[ramps\] temperature: start must be .* at least 0, got -1"),
    ],
)
def test_invalid_ramps(entry, message):
    with pytest.raises(ConfigError, match=message):
        parse_ramps({"temperature": entry}, resolve)


def test_two_ramps_of_a_setting_and_unknown_settings():
    with pytest.raises(ConfigError, match=r"\[ramps\] sampling.temperature: sampling.temperature has two ramps"):
        parse_ramps({"temperature": F, "sampling": {"temperature": F}}, resolve)
    with pytest.raises(ConfigError, match=r"\[ramps\] kl: unknown setting 'kl'"):
        parse_ramps({"kl": F}, resolve)


R = {"when": "r < 1", "over": 2, "then": "temperature * 0.5"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"atleast": 1}, r"unknown key in \[\[rules\]\] number 1: 'atleast'; did you mean 'at_least'"),
        ({"when": "r = 1"}, r"\[\[rules\]\] number 1: when = 'r = 1' is invalid; write a name, a sign and a number"),
        ({"when": "r < high"}, "when = 'r < high' is invalid; .*: 'accuracy < 0.15'"),
        ({"when": "r < nan"}, "when = 'r < nan' is invalid"),
        ({"when": "r < 1 < 2"}, "is invalid"),
        ({"when": "< 1"}, "is invalid"),
        ({"when": ""}, "is invalid"),
        ({"when": 3}, "when = 3 is invalid"),
        ({"then": "temperature"}, "then = 'temperature' is invalid; .*: 'learning_rate \\* 0.5'"),
        ({"then": "temperature *= 2"}, "is invalid"),
        ({"then": "temperature ** 2"}, "is invalid"),
        ({"then": "temperature * inf"}, "is invalid"),
        ({"then": "temperature / 0"}, "then = 'temperature / 0' divides by zero"),
        (
            {"then": "temperatur * 2"},
            r"\[\[rules\]\] number 1: unknown setting 'temperatur'; did you mean 'temperature'",
        ),
        ({"over": 0}, "the rule on 'r' for sampling.temperature: over must be .* at least 1, got 0"),
        ({"over": 2.5}, "over must be .* at least 1, got 2.5"),
        ({"cooldown": -1}, "cooldown must be .* at least 0, got -1"),
        ({"times": 0}, "times must be .* at least 1, got 0"),
        ({"at_least": 2, "at_most": 1}, "at_least = 2 is above at_most = 1"),
        ({"at_least": "low"}, "at_least must be a finite number, got 'low'"),
        ({"at_most": False}, "at_most must be a finite number, got False"),
        ({"then": "temperature = 2", "at_most": 1}, "set = 2.0 is outside its limits"),
        ({"then": "temperature = 2", "at_least": 3}, "set = 2.0 is outside its limits"),
    ],
)
def test_invalid_rules(change, message):
    with pytest.raises(ConfigError, match=message):
        parse_rules([R | change], resolve)


def test_incomplete_rules_are_refused():
    for key in R:
        rest = {name: value for name, value in R.items() if name != key}
        with pytest.raises(ConfigError, match=rf"\[\[rules\]\] number 2 has no '{key}'; add it, such as {key} = "):
            parse_rules([R, rest], resolve)
