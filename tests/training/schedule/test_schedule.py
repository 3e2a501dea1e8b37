"""Schedules: by hand, by what they promise (exact resumption, the span of the points), and every sentence they say."""

from __future__ import annotations

import json
import math
import tomllib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.errors import CheckpointError, ConfigError, InputError, check_choice
from groupwise.training.schedule.parse import parse_phases, parse_ramps, parse_rules
from groupwise.training.schedule.rules import Phase, Ramp, Rule
from groupwise.training.schedule.schedule import Schedule, warmup_decay

T, KL, LR, G = "sampling.temperature", "loss.kl_coef", "optimizer.learning_rate", "sampling.samples_per_prompt"
BASE = {T: 1.0, KL: 0.04, LR: 1e-5, G: 16}
HALVE = {"metric": "accuracy", "below": 0.15, "over": 10, "setting": LR, "multiply": 0.5}


def resolve(name: str) -> str:
    """What a recipe does: the last part of a name is enough."""
    short = {dotted.split(".")[-1]: dotted for dotted in BASE}
    if name in BASE:
        return name
    check_choice("setting", name, short, ConfigError)
    return short[name]


def run(schedule, metrics, tokens_per_step=100, start=0):
    """The values of each step, and what was said after it."""
    values, said = [], []
    for step, row in enumerate(metrics, start=start):
        values.append(schedule.values(step, step * tokens_per_step))
        said.append(schedule.observe(step, row))
    return values, said


def test_nothing_to_drive():
    schedule = Schedule(BASE)
    assert schedule.values(0, 0) == {}
    assert schedule.phase(7, 700) is None
    assert schedule.observe(0, {"accuracy": 0.0}) == []


# Phases


def test_phases_of_steps_by_hand():
    schedule = Schedule(BASE, phases=[Phase("cold", steps=2, set={T: 0.7, G: 8}), Phase("hot", steps=3, set={T: 1.2})])
    seen = [(schedule.phase(step, 0), *schedule.values(step, 0).values()) for step in range(7)]
    cold, hot, after = ("cold", 0.7, 8), ("hot", 1.2, 16), (None, 1.0, 16)
    assert seen == [cold, cold, hot, hot, hot, after, after]
    assert list(schedule.values(0, 0)) == [T, G]  # what is not driven is not there


def test_a_phase_of_tokens_ends_with_the_step_that_reaches_them():
    phases = [
        Phase("a", tokens=250, set={T: 0.5}),
        Phase("b", steps=2, set={T: 0.6}),
        Phase("c", tokens=100, set={T: 2}),
    ]
    schedule = Schedule(BASE, phases=[*phases, Phase("rest", set={T: 0.9})])
    # 100 tokens a step: 250 are reached at the start of step 3; b lasts two steps; c has its 100 after one more.
    assert [schedule.phase(step, 100 * step) for step in range(8)] == [*"aaabbc", "rest", "rest"]
    assert schedule.state()["phases"] == [["a", 0, 0], ["b", 3, 300], ["c", 5, 500], ["rest", 6, 600]]
    assert schedule.values(100, 10**6) == {T: 0.9}
    assert [schedule.phase(step, 100 * step) for step in (0, 2, 3, 5)] == ["a", "a", "b", "c"]  # looking back


def test_tokens_that_are_reached_exactly_end_the_phase_and_each_phase_lasts_a_step():
    schedule = Schedule(BASE, phases=[Phase(name, tokens=10, set={T: 0.5}) for name in "abc"])
    assert schedule.phase(0, 0) == "a"
    assert schedule.phase(1, 9) == "a"
    assert schedule.phase(2, 10) == "b"
    assert schedule.phase(3, 1000) == "c"
    assert schedule.phase(3, 1000) == "c"
    assert schedule.phase(4, 1010) is None


def test_phases_of_steps_do_not_need_to_be_asked_about_at_every_step():
    schedule = Schedule(BASE, phases=[Phase("a", steps=10, set={T: 0.5}), Phase("b", steps=10, set={T: 0.6})])
    assert [schedule.phase(step, 0) for step in (0, 15, 19, 20)] == ["a", "b", "b", None]


# Ramps


@pytest.mark.parametrize(
    ("shape", "at_10", "at_25", "at_40"),
    [
        ("linear", 1.0, 2.5, 4.0),
        ("cosine", 1.0, 2.5, 4.0),
        ("exponential", 1.0, 2.0, 4.0),
        ("constant", 1.0, 1.0, 4.0),
    ],
)
def test_ramp_by_hand(shape, at_10, at_25, at_40):
    ramp = Ramp(T, ((10, 1.0), (40, 4.0)), shape=shape)
    assert ramp.value(0) == ramp.value(9) == ramp.value(10) == at_10
    assert ramp.value(25) == pytest.approx(at_25, rel=1e-12)
    assert ramp.value(40) == ramp.value(10**9) == at_40


def test_the_shapes_differ_off_the_middle():
    at = {shape: Ramp(T, ((0, 1.0), (30, 4.0)), shape=shape).value(10) for shape in ("linear", "cosine", "exponential")}
    assert at["linear"] == pytest.approx(2.0)
    assert at["cosine"] == pytest.approx(1.75)  # (1 − cos 60°) / 2 = a quarter of the way
    assert at["exponential"] == pytest.approx(4 ** (1 / 3))
    assert Ramp(LR, ((0, 8e-6), (30, 1e-6)), shape="exponential").value(10) == pytest.approx(4e-6)


def test_ramp_of_several_points_and_of_one():
    ramp = Ramp(KL, ((0, 0.02), (100, 0.01), (400, 0.0)))
    assert [ramp.value(step) for step in (0, 50, 100, 250, 400)] == pytest.approx([0.02, 0.015, 0.01, 0.005, 0.0])
    assert ramp.value(100) == 0.01
    stairs = Ramp(KL, ramp.points, shape="constant")
    assert [stairs.value(step) for step in (0, 99, 100, 399, 400)] == [0.02, 0.02, 0.01, 0.01, 0.0]
    assert Ramp(KL, ((5, 0.3),)).value(0) == Ramp(KL, ((5, 0.3),)).value(9) == 0.3


def test_a_ramp_counts_its_own_unit_and_stands_above_the_phase():
    ramps = [Ramp(T, ((0, 1.0), (1000, 0.0)), over="tokens"), Ramp(KL, ((0, 0.0), (10, 1.0)))]
    schedule = Schedule(BASE, phases=[Phase("a", steps=100, set={T: 0.3, LR: 1.0})], ramps=ramps)
    assert schedule.values(2, 500) == {T: 0.5, LR: 1.0, KL: pytest.approx(0.2)}


def test_whole_numbers_are_rounded_and_other_numbers_are_floats():
    schedule = Schedule(BASE, phases=[Phase("a", set={T: 1})], ramps=[Ramp(G, ((0, 8), (10, 4.0)))])
    values = [schedule.values(step, 0) for step in range(12)]
    assert [value[G] for value in values] == [8, 8, 7, 7, 6, 6, 6, 5, 5, 4, 4, 4]
    assert {type(value[G]) for value in values} == {int}
    assert {type(value[T]) for value in values} == {float}


points = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 64)), min_size=1, max_size=5, unique_by=lambda point: point[0]
).map(lambda pairs: tuple(sorted(pairs)))


@given(
    points=points,
    scale=st.floats(1e-9, 1e9),
    shape=st.sampled_from(["linear", "cosine", "exponential", "constant"]),
    position=st.integers(0, 70),
)
def test_values_stay_within_the_span_of_the_points(points, scale, shape, position):
    scaled = tuple((at, value * scale) for at, value in points)
    value = Ramp(T, scaled, shape=shape).value(position)
    assert min(y for _, y in scaled) <= value <= max(y for _, y in scaled)
    around = [y for (x, y) in scaled if x <= position][-1:] + [y for (x, y) in scaled if x >= position][:1]
    assert min(around) <= value <= max(around)
    whole = Schedule(BASE, ramps=[Ramp(G, points, shape=shape, over="tokens")]).values(0, position)[G]
    assert type(whole) is int
    assert min(y for _, y in points) <= whole <= max(y for _, y in points)


# Rules


def test_a_rule_fires_when_its_window_is_full_and_then_waits():
    schedule = Schedule(BASE, rules=[Rule(**HALVE)])
    values, said = run(schedule, [{"accuracy": 0.12}] * 31)
    assert [step for step, sentences in enumerate(said) if sentences] == [9, 19, 29]
    assert said[9] == [
        "accuracy was 0.12 on average over the last 10 steps, below 0.15: optimizer.learning_rate × 0.5, now 5e-06"
    ]
    assert [value[LR] for value in values] == [1e-5] * 10 + [5e-6] * 10 + [2.5e-6] * 10 + [1.25e-6]


def test_a_rule_compares_the_mean_of_its_window_alone():
    schedule = Schedule(BASE, rules=[Rule(metric="r", above=2.0, over=2, setting=T, add=0.5)])
    _, said = run(schedule, [{"r": 100.0}, {"r": -100.0}, {"r": 103.0}, {"r": 1.0}, {"r": 3.0}])
    assert said == [
        [],
        [],
        [],
        ["r was 52 on average over the last 2 steps, above 2: sampling.temperature + 0.5, now 1.5"],
        [],
    ]


@pytest.mark.parametrize(
    ("side", "inclusive", "fires"),
    [("below", False, [1]), ("below", True, [1, 2]), ("above", False, [3]), ("above", True, [2, 3])],
)
def test_the_comparison_at_the_limit(side, inclusive, fires):
    rule = Rule(metric="r", **{side: 2.0}, inclusive=inclusive, over=1, setting=T, add=-0.1)
    _, said = run(Schedule(BASE, rules=[rule]), [{}, {"r": 1}, {"r": 2}, {"r": 3}])
    assert [step for step, sentences in enumerate(said) if sentences] == fires
    middle = "at or " if inclusive else ""
    assert said[fires[0]][0].startswith(f"r was {fires[0]} at step {fires[0]}, {middle}{side} 2: {T} − 0.1, now 0.9")


def test_steps_without_the_metric_do_not_count():
    rule = Rule(metric="eval/accuracy", below=0.5, over=2, setting=T, multiply=0.5)
    rows = [{"eval/accuracy": 0.1}, {}, {"eval/accuracy": math.nan}, {"eval/accuracy": None}, {"eval/accuracy": 0.3}]
    _, said = run(Schedule(BASE, rules=[rule]), [*rows, *rows])
    assert [step for step, sentences in enumerate(said) if sentences] == [4, 9]  # step 5 is within the cooldown
    assert said[4][0].startswith("eval/accuracy was 0.2 on average over the last 2 steps that reported it, below 0.5")


def test_cooldown_and_times():
    def fires(**more):
        _, said = run(Schedule(BASE, rules=[Rule(**HALVE | {"over": 2} | more)]), [{"accuracy": 0}] * 10)
        return [step for step, sentences in enumerate(said) if sentences]

    assert fires() == fires(cooldown=2) == [1, 3, 5, 7, 9]
    assert fires(cooldown=0) == fires(cooldown=1) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert fires(cooldown=4) == [1, 5, 9]
    assert fires(times=2) == [1, 3]


# Rules for a phase

TWO = [Phase("warm-up", steps=3, set={T: 0.7}), Phase("main", set={T: 1.0})]


def test_a_rule_for_a_phase_sees_and_does_nothing_in_another():
    rule = Rule(**HALVE | {"over": 2, "during": "warm-up"})
    values, said = run(Schedule(BASE, phases=TWO, rules=[rule]), [{"accuracy": 0.0}] * 8)
    assert [step for step, sentences in enumerate(said) if sentences] == [1]
    assert [value[LR] for value in values] == [1e-5] * 2 + [5e-6] * 6  # what it changed stays
    later = Rule(**HALVE | {"over": 2, "during": "main"})
    schedule = Schedule(BASE, phases=TWO, rules=[later])
    _, said = run(schedule, [{"accuracy": 0.0}] * 5)
    assert [step for step, sentences in enumerate(said) if sentences] == [4]  # steps 3 and 4: step 2 is not looked at
    assert schedule.state()["rules"][0]["window"] == [[3, 0.0], [4, 0.0]]


def test_a_rule_for_a_phase_after_the_last_one():
    """Behind a last phase with a length there is no phase, and no rule for one."""
    phases = [Phase("only", steps=2, set={T: 0.7})]
    _, said = run(
        Schedule(BASE, phases=phases, rules=[Rule(**HALVE | {"over": 3, "during": "only"})]), [{"accuracy": 0}] * 9
    )
    assert said == [[]] * 9


def test_a_rule_for_a_phase_that_is_not_there():
    rule = Rule(**HALVE | {"during": "warmup"})
    with pytest.raises(
        ConfigError, match=r"'accuracy': during = 'warmup'; did you mean 'warm-up'\? \(allowed: 'warm-up', 'main'\)"
    ):
        Schedule(BASE, phases=TWO, rules=[rule])
    with pytest.raises(
        ConfigError, match=r"for the phase 'warmup', but there are no phases; add \[\[phases\]\] or leave"
    ):
        Schedule(BASE, rules=[rule])


def test_a_rule_for_a_phase_is_read_and_saved():
    table = {"when": "accuracy < 0.15", "over": 10, "then": "learning_rate * 0.5"}
    (plain,) = parse_rules([table], resolve)
    (rule,) = parse_rules([{**table, "during": "warm-up"}], resolve)
    assert (plain.during, rule.during) == (None, "warm-up")
    schedule = Schedule(BASE, phases=TWO, rules=[rule])
    run(schedule, [{"accuracy": 0.0}] * 2)
    again = Schedule(BASE, phases=TWO, rules=[rule])
    again.load_state(json.loads(json.dumps(schedule.state())))
    assert again.state() == schedule.state()
    with pytest.raises(ConfigError, match="rules are not those of the saved run"):
        Schedule(BASE, phases=TWO, rules=[plain]).load_state(schedule.state())
    # A checkpoint from before there was such a thing still fits.
    assert "during" not in Schedule(BASE, phases=TWO, rules=[plain]).state()["rules"][0]["rule"]


def test_times_are_counted_for_each_rule():
    often = Rule(metric="r", above=0, over=1, setting=T, add=1)
    once = Rule(metric="r", above=0, over=1, setting=KL, add=1, times=1)
    values, _ = run(Schedule(BASE, rules=[often, once]), [{"r": 1}] * 4)
    assert [value[T] for value in values] == [1, 2, 3, 4]
    assert [value[KL] for value in values] == [0.04, 1.04, 1.04, 1.04]


def test_a_rules_limits_stop_its_change():
    schedule = Schedule(BASE, rules=[Rule(**HALVE | {"over": 1, "at_least": 4e-6})])
    values, said = run(schedule, [{"accuracy": 0}] * 5)
    assert [value[LR] for value in values] == [1e-5, 5e-6, 4e-6, 4e-6, 4e-6]
    assert [len(sentences) for sentences in said] == [1, 1, 0, 0, 0]  # what would change nothing does not fire
    assert len(schedule.state()["fired"]) == 2
    up = Rule(metric="r", above=0, over=1, setting=G, multiply=1.5, at_most=30)
    values, _ = run(Schedule(BASE, rules=[up]), [{"r": 1}] * 4)
    assert [value[G] for value in values] == [16, 24, 30, 30]


def test_limits_may_be_equal_and_a_set_may_lie_on_one():
    assert Rule(**HALVE | {"at_least": 2e-6, "at_most": 2e-6}).change(2e-6) == 2e-6
    for limit in ("at_least", "at_most"):
        assert Rule(metric="r", above=0, over=1, setting=T, set=2.0, **{limit: 2.0}).change(1.0) == 2.0


def test_limits_do_not_pull_back_what_a_phase_has_put_outside():
    rule = Rule(metric="r", above=0, over=1, setting=T, multiply=0.5, at_least=0.4, at_most=3.0)
    phases = [Phase("a", steps=2, set={T: 1.0}), Phase("low", steps=1, set={T: 0.1}), Phase("high", set={T: 16.0})]
    values, said = run(Schedule(BASE, phases=phases, rules=[rule]), [{"r": 1}] * 4)
    assert [value[T] for value in values] == [1.0, 0.5, 0.1, 4.0]
    assert [len(sentences) for sentences in said] == [1, 1, 0, 1]
    assert rule.change(0.1) == 0.1
    assert Rule(metric="r", above=0, over=1, setting=T, add=0.1, at_least=1.0).change(0.0) == 0.1


def test_a_factor_goes_on_acting_while_phase_and_ramp_move_the_value():
    rule = Rule(metric="r", above=0, over=1, setting=LR, multiply=0.5, times=1)
    phases = [Phase("a", steps=2, set={LR: 1.0}), Phase("b", set={LR: 3.0})]
    assert [value[LR] for value in run(Schedule(BASE, phases=phases, rules=[rule]), [{"r": 1}] * 4)[0]] == [
        1.0, 0.5, 1.5, 1.5,
    ]  # fmt: skip
    ramp = Ramp(LR, ((0, 1.0), (4, 5.0)))
    assert [value[LR] for value in run(Schedule(BASE, ramps=[ramp], rules=[rule]), [{"r": 1}] * 4)[0]] == [
        1.0, 1.0, 1.5, 2.0,
    ]  # fmt: skip


def test_set_holds_until_the_phase_changes_and_factors_outlast_it():
    freeze = Rule(metric="stop", above=0, over=1, setting=T, set=0.2)
    double = Rule(metric="double", above=0, over=1, setting=T, multiply=2.0)
    phases = [Phase("a", steps=4, set={T: 1.0}), Phase("b", set={T: 5.0})]
    schedule = Schedule(BASE, phases=phases, ramps=[Ramp(KL, ((0, 0.0),))], rules=[freeze, double])
    values, said = run(schedule, [{"double": 1}, {"stop": 1}, {"stop": 1, "double": 1}, {}, {}, {"stop": 1}, {}])
    assert [value[T] for value in values] == [1.0, 2.0, 0.2, 0.4, 20.0, 20.0, 0.2]
    assert said[1] == ["stop was 1 at step 1, above 0: sampling.temperature = 0.2, now 0.2"]
    assert len(said[2]) == 1  # already at 0.2
    assert schedule.values(2, 200)[T] == 0.2  # looking back


def test_rules_act_in_their_order_and_see_each_other():
    rules = [
        Rule(metric="r", above=0, over=1, setting=T, set=3.0),
        Rule(metric="r", above=0, over=1, setting=T, add=1.0, at_most=3.5),
    ]
    values, said = run(Schedule(BASE, rules=rules), [{"r": 1}, {}])
    assert values[1] == {T: 3.5}
    assert [sentence.split(": ")[1] for sentence in said[0]] == [f"{T} = 3, now 3", f"{T} + 1, now 3.5"]


def test_now_is_said_with_the_ramps_value_of_the_step_and_whole_where_it_is_whole():
    rule = Rule(metric="r", above=0, over=1, setting=G, multiply=0.3)
    schedule = Schedule(BASE, ramps=[Ramp(G, ((0, 10), (1000, 1000010)), over="tokens")], rules=[rule])
    schedule.values(3, 1000)
    assert schedule.observe(3, {"r": 1})[0].endswith(f"{G} × 0.3, now 300003")


def test_an_endless_factor_stays_finite_and_an_infinite_metric_counts_as_huge():
    rule = Rule(metric="norm", above=100, over=2, setting=T, multiply=1e200, cooldown=0)
    schedule = Schedule(BASE, rules=[rule])
    values, said = run(schedule, [{"norm": math.inf}, {"norm": torch.tensor(1.0)}, {"norm": "high"}, {"norm": 1e9}, {}])
    assert [len(sentences) for sentences in said] == [0, 1, 0, 0, 0]
    assert values[-1] == {T: 1e200}
    json.dumps(schedule.state(), allow_nan=False)


def test_a_step_may_be_observed_in_parts_but_not_go_back():
    schedule = Schedule(BASE, rules=[Rule(**HALVE)])
    schedule.observe(4, {"loss": 1.0})
    schedule.observe(4, {"accuracy": 0.5})
    assert schedule.state()["observed"] == 1
    with pytest.raises(InputError, match="step 3 was observed after step 4; load the state that was saved then"):
        schedule.observe(3, {})


def test_a_metric_that_never_comes_is_mentioned_once():
    rules = [Rule(**HALVE), Rule(**HALVE | {"setting": T}), Rule(**HALVE | {"metric": "kl"})]
    schedule = Schedule(BASE, rules=rules)
    _, said = run(schedule, [{"acuracy": 0.5, "kl": 0.3, "accuracy": math.nan, "loss": 1.0}] * 120)
    assert [(step, sentences) for step, sentences in enumerate(said) if sentences] == [
        (
            50,
            [
                "a rule waits for the metric 'accuracy', but none of 50 steps reported a number of that name; "
                "the nearest that came is 'acuracy'"
            ],
        )
    ]
    lonely = Schedule(BASE, rules=rules[:1])
    _, said = run(lonely, [{}] * 51)
    assert said[50] == ["a rule waits for the metric 'accuracy', but none of 50 steps reported a number of that name"]


def test_an_evaluation_after_the_fiftieth_step_is_in_time():
    rule = Rule(**HALVE | {"metric": "eval/accuracy"})
    schedule = Schedule(BASE, rules=[rule])
    _, said = run(schedule, [{"loss": 1.0}] * 50)
    said += [schedule.observe(49, {"eval/accuracy": 0.5}), *run(schedule, [{"loss": 1.0}] * 60, start=50)[1]]
    assert not any(said)


# Resumption

numbers = st.floats(0.125, 8)
settings = st.fixed_dictionaries({}, optional={T: numbers, KL: numbers, G: st.integers(1, 64)}).filter(bool)
lengths = st.one_of(st.tuples(st.integers(1, 6), st.none()), st.tuples(st.none(), st.integers(1, 900)))
phase_lists = st.lists(st.tuples(lengths, settings), max_size=4).map(
    lambda rows: [Phase(f"p{i}", steps=n, tokens=t, set=s) for i, ((n, t), s) in enumerate(rows)]
)
ramp_lists = st.lists(
    st.builds(Ramp, st.sampled_from([T, KL, G]), points, st.sampled_from(["steps", "tokens"])),
    max_size=2,
    unique_by=lambda ramp: ramp.setting,
)
changes = st.sampled_from(["multiply", "set", "add"])


@st.composite
def rules_of(draw):
    change = draw(changes)
    return Rule(
        metric=draw(st.sampled_from(["reward", "eval/accuracy", "never"])),
        over=draw(st.integers(1, 4)),
        setting=(setting := draw(st.sampled_from([T, G]))),
        **{draw(st.sampled_from(["below", "above"])): draw(st.floats(-1, 1))},
        **{change: float(draw(st.integers(1, 32))) if change == "set" and setting == G else draw(numbers)},
        cooldown=draw(st.none() | st.integers(0, 5)),
        times=draw(st.none() | st.integers(1, 3)),
    )


rows = st.tuples(
    st.integers(0, 400),  # tokens sampled in the step
    st.dictionaries(
        st.sampled_from(["reward", "eval/accuracy"]), st.floats(-2, 2) | st.sampled_from([math.nan, math.inf])
    ),
)


def play(schedule, steps, cut=None, between=False):
    """Everything a run gets to hear; at ``cut`` it stops and another schedule goes on from the state."""
    heard, tokens = [], 0
    for step, (sampled, metrics) in enumerate(steps):
        if step == cut and not between:
            schedule = reloaded(schedule)
        heard.append((schedule.phase(step, tokens), schedule.values(step, tokens)))
        if step == cut and between:
            schedule = reloaded(schedule)
        tokens += sampled
        heard.append(schedule.observe(step, metrics))
    return heard, schedule.state()


def reloaded(schedule):
    fresh = Schedule(BASE, phases=schedule._phases, ramps=list(schedule._ramps.values()), rules=schedule._rules)
    fresh.load_state(json.loads(json.dumps(schedule.state(), allow_nan=False)))
    return fresh


@given(
    phases=phase_lists,
    ramps=ramp_lists,
    rules=st.lists(rules_of(), max_size=3),
    steps=st.lists(rows, min_size=1, max_size=14),
    cut=st.integers(0, 13),
    between=st.booleans(),
)
def test_a_run_that_stops_and_resumes_equals_one_that_does_not(phases, ramps, rules, steps, cut, between):
    whole = Schedule(BASE, phases=phases, ramps=ramps, rules=rules)
    broken = Schedule(BASE, phases=phases, ramps=ramps, rules=rules)
    heard, state = play(whole, steps)
    assert (heard, state) == play(broken, steps, cut, between)
    for _, values in heard[::2]:
        assert {type(value) for name, value in values.items() if name == G} <= {int}
        assert {type(value) for name, value in values.items() if name != G} <= {float}
        assert all(math.isfinite(value) for value in values.values())


def test_the_warning_about_a_metric_survives_a_resumption():
    steps = [(0, {"acuracy": 0.5})] + [(0, {"loss": 1.0})] * 60
    heard, state = play(Schedule(BASE, rules=[Rule(**HALVE)]), steps)
    assert (heard, state) == play(Schedule(BASE, rules=[Rule(**HALVE)]), steps, cut=30)
    assert heard[101] != []
    assert heard[101][0].endswith("the nearest that came is 'acuracy'")


def test_a_state_is_a_copy():
    schedule = Schedule(BASE, rules=[Rule(**HALVE)])
    schedule.observe(0, {"accuracy": 0.1})
    state = schedule.state()
    kept = json.dumps(state)
    schedule.observe(1, {"accuracy": 0.1})
    assert json.dumps(state) == kept
    schedule.load_state(state)
    schedule.observe(1, {"accuracy": 0.1})
    assert json.dumps(state) == kept


def test_a_state_of_another_recipe_is_refused():
    saved = Schedule(BASE, phases=[Phase("a", steps=5, set={T: 1}), Phase("b", set={T: 2})], rules=[Rule(**HALVE)])
    saved.values(7, 0)
    same_so_far = [Phase("a", steps=9, set={T: 1}), Phase("b", steps=10, set={T: 2}), Phase("c", set={T: 3})]
    longer = Schedule(BASE, phases=same_so_far, rules=[Rule(**HALVE)])
    longer.load_state(saved.state())
    assert [longer.phase(step, 0) for step in (7, 14, 15)] == ["b", "b", "c"]
    renamed = Schedule(BASE, phases=[Phase("x", steps=5, set={T: 1}), Phase("b", set={T: 2})], rules=[Rule(**HALVE)])
    with pytest.raises(
        ConfigError, match=r"gone through the phases \['a', 'b'\], the recipe has \['x', 'b'\]; put back"
    ):
        renamed.load_state(saved.state())
    with pytest.raises(ConfigError, match=r"the recipe has \[\]"):
        Schedule(BASE, rules=[Rule(**HALVE)]).load_state(saved.state())
    ruled = Schedule(BASE, phases=same_so_far, rules=[Rule(**HALVE | {"over": 11})])
    with pytest.raises(ConfigError, match="the recipe's rules are not those of the saved run; put them back or start"):
        ruled.load_state(saved.state())
    assert ruled.state() == Schedule(BASE, phases=same_so_far, rules=[Rule(**HALVE | {"over": 11})]).state()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fired": [[1]]}, "ValueError"),
        ({"fired": [[1, 0]]}, "ValueError: a rule fired that is not there"),
        ({"fired": [[-1, 0]]}, "ValueError: a rule fired that is not there"),
        ({"observed": None}, "TypeError"),
        ({"rules": [{"window": []}]}, "KeyError: 'rule'"),
        ({"phases": 3}, "TypeError"),
    ],
)
def test_a_damaged_state_is_refused(change, reason):
    schedule = Schedule(BASE, rules=[Rule(**HALVE)])
    with pytest.raises(CheckpointError, match=rf"the saved schedule is damaged \({reason}.*resume from another checkp"):
        schedule.load_state(schedule.state() | change)
    with pytest.raises(CheckpointError, match=r"damaged \(KeyError: 'phases'\)"):
        schedule.load_state({})
    with pytest.raises(ConfigError, match=r"gone through the phases \[\]"):
        schedule.load_state(schedule.state() | {"phases": []})


# Warm-up and decay of the learning rate


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("constant", {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0, 8: 1.0, 12: 1.0, 99: 1.0}),
        ("linear", {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0, 6: 0.8, 8: 0.6, 12: 0.2, 99: 0.2}),
        ("cosine", {0: 0.25, 3: 1.0, 4: 1.0, 6: 0.6 + 0.4 * math.sqrt(0.5), 8: 0.6, 12: 0.2, 99: 0.2}),
    ],
)
def test_warmup_and_decay_by_hand(shape, expected):
    for step, factor in expected.items():
        given_ = warmup_decay(step, warmup_steps=4, total_steps=12, shape=shape, final=0.2)
        assert given_ == pytest.approx(factor, rel=1e-12), step


def test_warmup_may_be_absent_or_longer_than_the_run():
    assert warmup_decay(0, warmup_steps=0, total_steps=10, shape="linear", final=0.0) == 1.0
    assert warmup_decay(5, warmup_steps=0, total_steps=10, shape="linear", final=0.0) == 0.5
    assert warmup_decay(0, warmup_steps=1, total_steps=None, shape="constant", final=0.0) == 1.0
    assert warmup_decay(4, warmup_steps=10, total_steps=5, shape="cosine", final=0.1) == 0.5
    assert warmup_decay(10, warmup_steps=10, total_steps=10, shape="cosine", final=0.1) == 0.1


@given(
    step=st.integers(0, 60),
    warmup=st.integers(0, 20),
    total=st.integers(1, 50),
    shape=st.sampled_from(["constant", "linear", "cosine"]),
    final=st.floats(0, 1),
)
def test_the_factor_is_a_share_that_never_rises_after_the_warmup(step, warmup, total, shape, final):
    now, later = (
        warmup_decay(s, warmup_steps=warmup, total_steps=total, shape=shape, final=final) for s in (step, step + 1)
    )
    assert 0 <= now <= 1
    if step >= warmup:
        assert final - 1e-12 <= later <= now


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"total_steps": None}, "a linear decay must know where it ends: set the run's number of steps, or use 'const"),
        ({"shape": "cosin"}, "unknown decay of the learning rate 'cosin'; did you mean 'cosine'"),
        ({"shape": "exponential"}, "unknown decay of the learning rate 'exponential'"),
        ({"warmup_steps": -1}, "warmup_steps must be a whole number of at least 0, got -1"),
        ({"total_steps": 0}, "total_steps must be a whole number of at least 1, got 0"),
        ({"final": 1.5}, "the final share of the learning rate must be between 0 and 1, got 1.5"),
        ({"final": math.nan}, "the final share of the learning rate must be a finite number, got nan"),
    ],
)
def test_what_warmup_and_decay_refuse(change, message):
    with pytest.raises(ConfigError, match=message):
        warmup_decay(0, **{"warmup_steps": 2, "total_steps": 10, "shape": "linear", "final": 0.0} | change)


# The recipe's tables

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


def test_the_recipes_tables():
    recipe = tomllib.loads(RECIPE)
    assert parse_phases(recipe["phases"], resolve) == (
        Phase("warm-up", steps=100, set={T: 0.7, KL: 0.02, G: 8}),
        Phase("main", tokens=50_000_000, set={T: 1}),
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
def test_then(then, change):
    [rule] = parse_rules([{"when": "r > 1_000", "over": 2, "then": then}], resolve)
    assert rule == Rule(metric="r", above=1000.0, over=2, setting=T, **change)


@pytest.mark.parametrize("sign", ["<", "<=", ">", ">="])
def test_when(sign):
    [rule] = parse_rules([{"when": f"r {sign} 1", "over": 2, "then": "temperature * 2"}], resolve)
    assert (rule.below, rule.above) == ((1.0, None) if "<" in sign else (None, 1.0))
    assert rule.inclusive is ("=" in sign)


A = {"name": "a", "steps": 3, "temperature": 0.7}


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"name": "a"}, r"phases must be a list of tables, each under its own \[\[phases\]\], got \{'name': 'a'\}"),
        ([3], "phases must be a list of tables"),
        ([{"steps": 3, "temperature": 1}], r"\[\[phases\]\] number 1 has no name; add one, such as name = \"warm-up\""),
        ([A | {"name": ""}], "a phase's name must be a word or two of text, got ''"),
        ([A | {"name": 3}], "a phase's name must be a word or two of text, got 3"),
        (
            [A, A | {"name": "b", "temprature": 1}],
            r"\[\[phases\]\] number 2: .*'temprature'; did you mean 'temperature'",
        ),
        ([A | {"step": 1}], r"\[\[phases\]\] number 1: unknown setting 'step'.*; or did you mean 'steps'\?"),
        ([A | {"sampling": {"temp": 1}}], r"\[\[phases\]\] number 1: unknown setting 'sampling.temp'"),
        ([A | {"sampling": {}}], r"\[\[phases\]\] number 1: unknown setting 'sampling'"),
        ([A | {"tokens": 5}], "phase 'a' has both steps and tokens; a phase has one length, so keep one of them"),
        (
            [{"name": "a", "steps": 3}],
            "phase 'a' changes no setting; give it one, such as temperature = 0.7, or remove",
        ),
        (
            [{"name": "a", "kl_coef": 1}, A | {"name": "b"}],
            "phase 'a' has no length, so the next would never begin; gi",
        ),
        ([A, A], "two phases are called 'a'; give each a name of its own"),
        ([A | {T: 0.5}], r"\[\[phases\]\] number 1 sets sampling.temperature twice, the second time as 'sampling"),
        ([A | {"steps": 0}], "phase 'a': steps must be a whole number of at least 1, got 0"),
        ([A | {"steps": 1.0}], "phase 'a': steps must be a whole number of at least 1, got 1.0"),
        ([A | {"steps": True}], "phase 'a': steps must be a whole number of at least 1, got True"),
        ([{"name": "a", "tokens": -1, "kl_coef": 1}], "phase 'a': tokens must be a whole number of at least 1, got -1"),
        ([A | {"temperature": "hot"}], "phase 'a': sampling.temperature must be a finite number, got 'hot'"),
        ([A | {"temperature": True}], "phase 'a': sampling.temperature must be a finite number, got True"),
        ([A | {"temperature": math.nan}], "phase 'a': sampling.temperature must be a finite number, got nan"),
        ([A | {"temperature": math.inf}], "phase 'a': sampling.temperature must be a finite number, got inf"),
        ([A | {"temperature": 10**400}], "phase 'a': sampling.temperature must be a finite number, got 1000"),
    ],
)
def test_phases_that_are_refused(tables, message):
    with pytest.raises(ConfigError, match=message):
        parse_phases(tables, resolve)


F = {"from": 1.0, "to": 0.5, "steps": 10}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            0.5,
            r"\[ramps\] temperature must be a table, got 0.5; write \{ from = 1.0, to = 0.7, steps = 200 \} or \{ at",
        ),
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
        ({"at": []}, "the ramp of sampling.temperature has no points; give it at least one, such as"),
        ({"at": [[0, 1], [5, 2], [5, 3]]}, "its points must go forward, but 5 comes after 5; sort them"),
        ({"at": [[7, 1], [5, 2]]}, "the ramp of sampling.temperature: its points must go forward, but 5 comes after 7"),
        ({"at": [[-1, 1]]}, "the position of a point must be a whole number of at least 0, got -1"),
        ({"at": [[0.5, 1]]}, "the position of a point must be a whole number of at least 0, got 0.5"),
        ({"at": [[0, True]]}, "the ramp of sampling.temperature: the value at 0 must be a finite number, got True"),
        (
            {"at": [[0, 1]], "over": "step"},
            r"unknown unit \('over'\) of the ramp of sampling.temperature 'step'; did yo",
        ),
        (
            F | {"shape": "cosinus"},
            "unknown shape of the ramp of sampling.temperature 'cosinus'; did you mean 'cosine'",
        ),
        (
            F | {"to": 0, "shape": "exponential"},
            "exponential, which needs values above 0, but at 10 it is 0; raise that",
        ),
        (F | {"from": math.nan}, "the value at 0 must be a finite number, got nan"),
        (F | {"steps": 0}, r"\[ramps\] temperature: steps must be a whole number of at least 1, got 0"),
        (F | {"start": -1}, r"\[ramps\] temperature: start must be a whole number of at least 0, got -1"),
    ],
)
def test_ramps_that_are_refused(entry, message):
    with pytest.raises(ConfigError, match=message):
        parse_ramps({"temperature": entry}, resolve)


def test_two_ramps_and_unknown_ramps_are_refused():
    with pytest.raises(
        ConfigError, match=r"\[ramps\] sampling.temperature: sampling.temperature is driven by two ramps"
    ):
        parse_ramps({"temperature": F, "sampling": {"temperature": F}}, resolve)
    with pytest.raises(ConfigError, match=r"\[ramps\] kl: unknown setting 'kl'"):
        parse_ramps({"kl": F}, resolve)
    with pytest.raises(ConfigError, match=r"ramps must be one table, written \[ramps\], got \[\]"):
        parse_ramps([], resolve)


R = {"when": "r < 1", "over": 2, "then": "temperature * 0.5"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"atleast": 1}, r"unknown key in \[\[rules\]\] number 1: 'atleast'; did you mean 'at_least'"),
        (
            {"when": "r = 1"},
            r"\[\[rules\]\] number 1: when = 'r = 1' cannot be read; write a name, a sign and a number",
        ),
        ({"when": "r < high"}, "when = 'r < high' cannot be read; .*: 'accuracy < 0.15'"),
        ({"when": "r < nan"}, "when = 'r < nan' cannot be read"),
        ({"when": "r < 1 < 2"}, "cannot be read"),
        ({"when": "< 1"}, "cannot be read"),
        ({"when": ""}, "cannot be read"),
        ({"when": 3}, "when = 3 cannot be read"),
        ({"then": "temperature"}, "then = 'temperature' cannot be read; .*: 'learning_rate \\* 0.5'"),
        ({"then": "temperature *= 2"}, "cannot be read"),
        ({"then": "temperature ** 2"}, "cannot be read"),
        ({"then": "temperature * inf"}, "cannot be read"),
        ({"then": "temperature / 0"}, "then = 'temperature / 0' divides by zero"),
        (
            {"then": "temperatur * 2"},
            r"\[\[rules\]\] number 1: unknown setting 'temperatur'; did you mean 'temperature'",
        ),
        ({"over": 0}, "the rule on 'r' for sampling.temperature: over must be a whole number of at least 1, got 0"),
        ({"over": 2.5}, "over must be a whole number of at least 1, got 2.5"),
        ({"cooldown": -1}, "cooldown must be a whole number of at least 0, got -1"),
        ({"times": 0}, "times must be a whole number of at least 1, got 0"),
        ({"at_least": 2, "at_most": 1}, "at_least = 2 is above at_most = 1; exchange them"),
        ({"at_least": "low"}, "at_least must be a finite number, got 'low'"),
        ({"at_most": False}, "at_most must be a finite number, got False"),
        ({"then": "temperature = 2", "at_most": 1}, "set = 2.0 is outside its own limits; widen them or set another"),
        ({"then": "temperature = 2", "at_least": 3}, "set = 2.0 is outside its own limits"),
    ],
)
def test_rules_that_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        parse_rules([R | change], resolve)


def test_rules_lack_nothing():
    for key in R:
        rest = {name: value for name, value in R.items() if name != key}
        with pytest.raises(ConfigError, match=rf"\[\[rules\]\] number 2 has no '{key}'; add it, such as {key} = "):
            parse_rules([R, rest], resolve)
    with pytest.raises(ConfigError, match=r"rules must be a list of tables, each under its own \[\[rules\]\]"):
        parse_rules(R, resolve)
    for change in ({"above": 1.0}, {"below": None}):
        with pytest.raises(ConfigError, match=r"the rule on 'accuracy' for .* needs exactly one of below and above"):
            Rule(**HALVE | change)
    for change in ({"add": 1.0}, {"set": 1.0}, {"multiply": None}):
        with pytest.raises(ConfigError, match="needs exactly one of multiply, set and add"):
            Rule(**HALVE | change)
    with pytest.raises(ConfigError, match="below must be a finite number, got nan"):
        Rule(**HALVE | {"below": math.nan})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"phases": [Phase("a", set={"sampling.temprature": 1})]},
            "unknown setting in phase 'a': 'sampling.temprature'; d",
        ),
        ({"ramps": [Ramp("top_p", ((0, 1),))]}, "unknown setting in the ramp of top_p: 'top_p'"),
        ({"rules": [Rule(**HALVE | {"setting": "lr"})]}, "unknown setting in the rule on 'accuracy': 'lr'"),
        (
            {"ramps": [Ramp(KL, ((0, 1),)), Ramp(T, ((0, 1),)), Ramp(T, ((0, 2),))]},
            "sampling.temperature is driven by two ramps; put their",
        ),
        ({"phases": [Phase("a", set={T: 1}), Phase("b", set={T: 1})]}, "phase 'a' has no length"),
        ({"phases": [Phase("a", set={G: 7.5})]}, f"phase 'a': {G} is a whole number, got 7.5; write 8"),
        ({"ramps": [Ramp(G, ((0, 8), (9, 2.5)))]}, f"the ramp of {G}: {G} is a whole number, got 2.5"),
        (
            {"rules": [Rule(metric="r", above=0, over=1, setting=G, set=1.5)]},
            "the rule on 'r': .* whole number, got 1.5",
        ),
        ({"rules": [Rule(**HALVE | {"setting": G, "at_least": 1.5})]}, "is a whole number, got 1.5"),
        ({"rules": [Rule(**HALVE | {"setting": G, "at_most": 2.5})]}, "is a whole number, got 2.5"),
    ],
)
def test_what_a_schedule_refuses(more, message):
    with pytest.raises(ConfigError, match=message):
        Schedule(BASE, **more)


@pytest.mark.parametrize("value", [None, True, math.nan, "1"])
def test_a_driven_setting_must_have_a_number_to_start_from(value):
    with pytest.raises(ConfigError, match=r"temperature, which phase 'a' changes, must be a finite number, got"):
        Schedule({T: value}, phases=[Phase("a", set={T: 1})])
    assert Schedule({T: value, KL: 1.0}, phases=[Phase("a", set={KL: 2})]).values(0, 0) == {KL: 2.0}
