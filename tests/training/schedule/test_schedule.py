"""Schedules: values computed by hand, exact resumption, and the messages of rules."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.errors import CheckpointError, ConfigError, InputError
from groupwise.training.schedule.parse import parse_rules
from groupwise.training.schedule.rules import Phase, Ramp, Rule
from groupwise.training.schedule.schedule import Schedule

T, KL, LR, G = "sampling.temperature", "loss.kl_coef", "optimizer.learning_rate", "sampling.samples_per_prompt"
BASE = {T: 1.0, KL: 0.04, LR: 1e-5, G: 16}
HALVE = {"metric": "accuracy", "below": 0.15, "over": 10, "setting": LR, "multiply": 0.5}


def run(schedule, metrics, tokens_per_step=100, start=0):
    """The values of each step, and the messages after it."""
    values, messages = [], []
    for step, row in enumerate(metrics, start=start):
        values.append(schedule.values(step, step * tokens_per_step))
        messages.append(schedule.observe(step, row))
    return values, messages


def steps_with(messages):
    return [step for step, sentences in enumerate(messages) if sentences]


def test_an_empty_schedule():
    schedule = Schedule(BASE)
    assert schedule.values(0, 0) == {}
    assert schedule.phase(7, 700) is None
    assert schedule.observe(0, {"accuracy": 0.0}) == []


def test_phases_of_steps_by_hand():
    schedule = Schedule(BASE, phases=[Phase("cold", steps=2, set={T: 0.7, G: 8}), Phase("hot", steps=3, set={T: 1.2})])
    seen = [(schedule.phase(step, 0), *schedule.values(step, 0).values()) for step in range(7)]
    cold, hot, after = ("cold", 0.7, 8), ("hot", 1.2, 16), (None, 1.0, 16)
    assert seen == [cold, cold, hot, hot, hot, after, after]
    assert list(schedule.values(0, 0)) == [T, G]  # only scheduled settings


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


def test_a_phase_of_tokens_lasts_at_least_a_step_and_ends_when_they_are_reached_exactly():
    schedule = Schedule(BASE, phases=[Phase(name, tokens=10, set={T: 0.5}) for name in "abc"])
    assert schedule.phase(0, 0) == "a"
    assert schedule.phase(1, 9) == "a"
    assert schedule.phase(2, 10) == "b"
    assert schedule.phase(3, 1000) == "c"
    assert schedule.phase(3, 1000) == "c"
    assert schedule.phase(4, 1010) is None


def test_phases_of_steps_need_not_be_queried_at_every_step():
    schedule = Schedule(BASE, phases=[Phase("a", steps=10, set={T: 0.5}), Phase("b", steps=10, set={T: 0.6})])
    assert [schedule.phase(step, 0) for step in (0, 15, 19, 20)] == ["a", "b", "b", None]


@pytest.mark.parametrize(
    ("shape", "at_10", "at_25", "at_40"),
    [("linear", 1.0, 2.5, 4.0), ("cosine", 1.0, 2.5, 4.0), ("exponential", 1.0, 2.0, 4.0), ("constant", 1.0, 1.0, 4.0)],
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


def test_a_ramp_uses_its_unit_and_overrides_the_phase():
    ramps = [Ramp(T, ((0, 1.0), (1000, 0.0)), over="tokens"), Ramp(KL, ((0, 0.0), (10, 1.0)))]
    schedule = Schedule(BASE, phases=[Phase("a", steps=100, set={T: 0.3, LR: 1.0})], ramps=ramps)
    assert schedule.values(2, 500) == {T: 0.5, LR: 1.0, KL: pytest.approx(0.2)}


def test_integers_are_rounded_and_other_numbers_are_floats():
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
    rounded = Schedule(BASE, ramps=[Ramp(G, points, shape=shape, over="tokens")]).values(0, position)[G]
    assert type(rounded) is int
    assert min(y for _, y in points) <= rounded <= max(y for _, y in points)


def test_a_rule_fires_when_its_window_is_full_and_then_waits():
    schedule = Schedule(BASE, rules=[Rule(**HALVE)])
    values, said = run(schedule, [{"accuracy": 0.12}] * 31)
    assert steps_with(said) == [9, 19, 29]
    assert said[9] == [
        "accuracy was 0.12 on average over the last 10 steps, below 0.15: optimizer.learning_rate × 0.5, now 5e-06"
    ]
    assert [value[LR] for value in values] == [1e-5] * 10 + [5e-6] * 10 + [2.5e-6] * 10 + [1.25e-6]


def test_a_rule_compares_the_mean_of_its_window():
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
    assert steps_with(said) == fires
    middle = "at or " if inclusive else ""
    assert said[fires[0]][0].startswith(f"r was {fires[0]} at step {fires[0]}, {middle}{side} 2: {T} − 0.1, now 0.9")


def test_steps_without_the_metric_do_not_count():
    rule = Rule(metric="eval/accuracy", below=0.5, over=2, setting=T, multiply=0.5)
    rows = [{"eval/accuracy": 0.1}, {}, {"eval/accuracy": math.nan}, {"eval/accuracy": None}, {"eval/accuracy": 0.3}]
    _, said = run(Schedule(BASE, rules=[rule]), [*rows, *rows])
    assert steps_with(said) == [4, 9]  # step 5 is within the cooldown
    assert said[4][0].startswith("eval/accuracy was 0.2 on average over the last 2 steps that reported it, below 0.5")


def test_cooldown_and_times():
    def fires(**more):
        _, said = run(Schedule(BASE, rules=[Rule(**HALVE | {"over": 2} | more)]), [{"accuracy": 0}] * 10)
        return steps_with(said)

    assert fires() == fires(cooldown=2) == [1, 3, 5, 7, 9]
    assert fires(cooldown=0) == fires(cooldown=1) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert fires(cooldown=4) == [1, 5, 9]
    assert fires(times=2) == [1, 3]


TWO = [Phase("warm-up", steps=3, set={T: 0.7}), Phase("main", set={T: 1.0})]


def test_a_rule_for_a_phase_ignores_other_phases():
    rule = Rule(**HALVE | {"over": 2, "during": "warm-up"})
    values, said = run(Schedule(BASE, phases=TWO, rules=[rule]), [{"accuracy": 0.0}] * 8)
    assert steps_with(said) == [1]
    assert [value[LR] for value in values] == [1e-5] * 2 + [5e-6] * 6  # its change remains
    later = Rule(**HALVE | {"over": 2, "during": "main"})
    schedule = Schedule(BASE, phases=TWO, rules=[later])
    _, said = run(schedule, [{"accuracy": 0.0}] * 5)
    assert steps_with(said) == [4]  # steps 3 and 4; step 2 does not count
    assert schedule.state()["rules"][0]["window"] == [[3, 0.0], [4, 0.0]]


def test_a_rule_for_a_phase_after_the_last_one():
    rule = Rule(**HALVE | {"over": 3, "during": "only"})
    schedule = Schedule(BASE, phases=[Phase("only", steps=2, set={T: 0.7})], rules=[rule])
    assert run(schedule, [{"accuracy": 0}] * 9)[1] == [[]] * 9


def test_a_rule_for_a_phase_that_does_not_exist():
    rule = Rule(**HALVE | {"during": "warmup"})
    with pytest.raises(
        ConfigError, match=r"'accuracy': during = 'warmup'; did you mean 'warm-up'\? \(allowed: 'warm-up', 'main'\)"
    ):
        Schedule(BASE, phases=TWO, rules=[rule])
    with pytest.raises(ConfigError, match="unknown phase in the rule on 'accuracy': during = 'warmup'"):
        Schedule(BASE, rules=[rule])


def test_a_rule_for_a_phase_is_parsed_and_saved():
    table = {"when": "accuracy < 0.15", "over": 10, "then": "learning_rate * 0.5"}
    (plain,) = parse_rules([table], lambda name: LR)
    (rule,) = parse_rules([{**table, "during": "warm-up"}], lambda name: LR)
    assert (plain.during, rule.during) == (None, "warm-up")
    schedule = Schedule(BASE, phases=TWO, rules=[rule])
    run(schedule, [{"accuracy": 0.0}] * 2)
    again = Schedule(BASE, phases=TWO, rules=[rule])
    again.load_state(json.loads(json.dumps(schedule.state())))
    assert again.state() == schedule.state()
    with pytest.raises(ConfigError, match="rules differ"):
        Schedule(BASE, phases=TWO, rules=[plain]).load_state(schedule.state())
    # As in a checkpoint older than `during`.
    assert "during" not in Schedule(BASE, phases=TWO, rules=[plain]).state()["rules"][0]["rule"]


def test_times_are_counted_per_rule():
    often = Rule(metric="r", above=0, over=1, setting=T, add=1)
    once = Rule(metric="r", above=0, over=1, setting=KL, add=1, times=1)
    values, _ = run(Schedule(BASE, rules=[often, once]), [{"r": 1}] * 4)
    assert [value[T] for value in values] == [1, 2, 3, 4]
    assert [value[KL] for value in values] == [0.04, 1.04, 1.04, 1.04]


def test_a_rules_limits_stop_its_change():
    schedule = Schedule(BASE, rules=[Rule(**HALVE | {"over": 1, "at_least": 4e-6})])
    values, said = run(schedule, [{"accuracy": 0}] * 5)
    assert [value[LR] for value in values] == [1e-5, 5e-6, 4e-6, 4e-6, 4e-6]
    assert [len(sentences) for sentences in said] == [1, 1, 0, 0, 0]  # a rule that would change nothing does not fire
    assert len(schedule.state()["fired"]) == 2
    up = Rule(metric="r", above=0, over=1, setting=G, multiply=1.5, at_most=30)
    values, _ = run(Schedule(BASE, rules=[up]), [{"r": 1}] * 4)
    assert [value[G] for value in values] == [16, 24, 30, 30]


def test_limits_may_be_equal_and_a_set_may_lie_on_one():
    assert Rule(**HALVE | {"at_least": 2e-6, "at_most": 2e-6}).change(2e-6) == 2e-6
    for limit in ("at_least", "at_most"):
        assert Rule(metric="r", above=0, over=1, setting=T, set=2.0, **{limit: 2.0}).change(1.0) == 2.0


def test_limits_do_not_clip_what_a_phase_put_outside_them():
    rule = Rule(metric="r", above=0, over=1, setting=T, multiply=0.5, at_least=0.4, at_most=3.0)
    phases = [Phase("a", steps=2, set={T: 1.0}), Phase("low", steps=1, set={T: 0.1}), Phase("high", set={T: 16.0})]
    values, said = run(Schedule(BASE, phases=phases, rules=[rule]), [{"r": 1}] * 4)
    assert [value[T] for value in values] == [1.0, 0.5, 0.1, 4.0]
    assert [len(sentences) for sentences in said] == [1, 1, 0, 1]
    assert rule.change(0.1) == 0.1
    assert Rule(metric="r", above=0, over=1, setting=T, add=0.1, at_least=1.0).change(0.0) == 0.1


def test_a_factor_keeps_acting_while_phase_and_ramp_move_the_value():
    rule = Rule(metric="r", above=0, over=1, setting=LR, multiply=0.5, times=1)
    phases = [Phase("a", steps=2, set={LR: 1.0}), Phase("b", set={LR: 3.0})]
    assert [value[LR] for value in run(Schedule(BASE, phases=phases, rules=[rule]), [{"r": 1}] * 4)[0]] == [
        1.0, 0.5, 1.5, 1.5,
    ]  # fmt: skip
    ramp = Ramp(LR, ((0, 1.0), (4, 5.0)))
    assert [value[LR] for value in run(Schedule(BASE, ramps=[ramp], rules=[rule]), [{"r": 1}] * 4)[0]] == [
        1.0, 1.0, 1.5, 2.0,
    ]  # fmt: skip


def test_set_holds_until_the_phase_changes_and_factors_last_longer():
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


def test_the_message_gives_the_value_at_the_step_and_integers_as_such():
    rule = Rule(metric="r", above=0, over=1, setting=G, multiply=0.3)
    schedule = Schedule(BASE, ramps=[Ramp(G, ((0, 10), (1000, 1000010)), over="tokens")], rules=[rule])
    schedule.values(3, 1000)
    assert schedule.observe(3, {"r": 1})[0].endswith(f"{G} × 0.3, now 300003")


def test_values_stay_finite_and_an_infinite_metric_is_clipped():
    rule = Rule(metric="norm", above=100, over=2, setting=T, multiply=1e200, cooldown=0)
    schedule = Schedule(BASE, rules=[rule])
    values, said = run(schedule, [{"norm": math.inf}, {"norm": torch.tensor(1.0)}, {"norm": "high"}, {"norm": 1e9}, {}])
    assert [len(sentences) for sentences in said] == [0, 1, 0, 0, 0]
    assert values[-1] == {T: 1e200}
    json.dumps(schedule.state(), allow_nan=False)


def test_a_step_may_be_observed_twice_but_not_an_earlier_one():
    schedule = Schedule(BASE, rules=[Rule(**HALVE)])
    schedule.observe(4, {"loss": 1.0})
    schedule.observe(4, {"accuracy": 0.5})
    assert schedule.state()["observed"] == 1
    with pytest.raises(InputError, match="step 3 was observed after step 4"):
        schedule.observe(3, {})


def test_a_metric_that_is_never_reported_is_mentioned_once():
    rules = [Rule(**HALVE), Rule(**HALVE | {"setting": T}), Rule(**HALVE | {"metric": "kl"})]
    schedule = Schedule(BASE, rules=rules)
    _, said = run(schedule, [{"acuracy": 0.5, "kl": 0.3, "accuracy": math.nan, "loss": 1.0}] * 120)
    assert [(step, sentences) for step, sentences in enumerate(said) if sentences] == [
        (
            50,
            ["a rule needs the metric 'accuracy', but no step of the first 50 reported it; did you mean 'acuracy'?"],
        )
    ]
    lonely = Schedule(BASE, rules=rules[:1])
    _, said = run(lonely, [{}] * 51)
    assert said[50] == ["a rule needs the metric 'accuracy', but no step of the first 50 reported it"]


def test_an_evaluation_after_the_fiftieth_step_is_in_time():
    rule = Rule(**HALVE | {"metric": "eval/accuracy"})
    schedule = Schedule(BASE, rules=[rule])
    _, said = run(schedule, [{"loss": 1.0}] * 50)
    said += [schedule.observe(49, {"eval/accuracy": 0.5}), *run(schedule, [{"loss": 1.0}] * 60, start=50)[1]]
    assert not any(said)


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
    """All that a schedule returns; at ``cut`` another schedule continues from its state."""
    results, tokens = [], 0
    for step, (sampled, metrics) in enumerate(steps):
        if step == cut and not between:
            schedule = reloaded(schedule)
        results.append((schedule.phase(step, tokens), schedule.values(step, tokens)))
        if step == cut and between:
            schedule = reloaded(schedule)
        tokens += sampled
        results.append(schedule.observe(step, metrics))
    return results, schedule.state()


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
def test_a_resumed_run_equals_an_uninterrupted_one(phases, ramps, rules, steps, cut, between):
    results, state = play(Schedule(BASE, phases=phases, ramps=ramps, rules=rules), steps)
    resumed = Schedule(BASE, phases=phases, ramps=ramps, rules=rules)
    assert (results, state) == play(resumed, steps, cut, between)
    for _, values in results[::2]:
        assert {type(value) for name, value in values.items() if name == G} <= {int}
        assert {type(value) for name, value in values.items() if name != G} <= {float}
        assert all(math.isfinite(value) for value in values.values())


def test_the_warning_about_a_metric_comes_also_after_a_resumption():
    steps = [(0, {"acuracy": 0.5})] + [(0, {"loss": 1.0})] * 60
    results, state = play(Schedule(BASE, rules=[Rule(**HALVE)]), steps)
    assert (results, state) == play(Schedule(BASE, rules=[Rule(**HALVE)]), steps, cut=30)
    assert results[101] != []
    assert results[101][0].endswith("did you mean 'acuracy'?")


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
    with pytest.raises(ConfigError, match=r"phases \['a', 'b'\], but the recipe has \['x', 'b'\]"):
        renamed.load_state(saved.state())
    with pytest.raises(ConfigError, match=r"the recipe has \[\]"):
        Schedule(BASE, rules=[Rule(**HALVE)]).load_state(saved.state())
    ruled = Schedule(BASE, phases=same_so_far, rules=[Rule(**HALVE | {"over": 11})])
    with pytest.raises(ConfigError, match="rules differ"):
        ruled.load_state(saved.state())
    assert ruled.state() == Schedule(BASE, phases=same_so_far, rules=[Rule(**HALVE | {"over": 11})]).state()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fired": [[1]]}, "ValueError"),
        ({"fired": [[1, 0]]}, "ValueError: a rule fired that does not exist"),
        ({"fired": [[-1, 0]]}, "ValueError: a rule fired that does not exist"),
        ({"observed": None}, "TypeError"),
        ({"rules": [{"window": []}]}, "KeyError: 'rule'"),
        ({"phases": 3}, "TypeError"),
    ],
)
def test_a_damaged_state_is_refused(change, reason):
    schedule = Schedule(BASE, rules=[Rule(**HALVE)])
    with pytest.raises(CheckpointError, match=rf"schedule is damaged \({reason}.*resume from another"):
        schedule.load_state(schedule.state() | change)
    with pytest.raises(CheckpointError, match=r"damaged \(KeyError: 'phases'\)"):
        schedule.load_state({})
    with pytest.raises(ConfigError, match=r"went through the phases \[\]"):
        schedule.load_state(schedule.state() | {"phases": []})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"phases": [Phase("a", set={G: 7.5})]}, f"phase 'a': {G} must be an integer, got 7.5; write 8"),
        ({"ramps": [Ramp(G, ((0, 8), (9, 2.5)))]}, f"the ramp of {G}: {G} must be an integer, got 2.5"),
        ({"rules": [Rule(metric="r", above=0, over=1, setting=G, set=1.5)]}, "the rule on 'r': .* integer, got 1.5"),
        ({"rules": [Rule(**HALVE | {"setting": G, "at_least": 1.5})]}, "must be an integer, got 1.5"),
        ({"rules": [Rule(**HALVE | {"setting": G, "at_most": 2.5})]}, "must be an integer, got 2.5"),
    ],
)
def test_invalid_schedules(more, message):
    with pytest.raises(ConfigError, match=message):
        Schedule(BASE, **more)


@pytest.mark.parametrize("value", [None, True, math.nan, "1"])
def test_a_scheduled_setting_needs_a_number_in_the_recipe(value):
    with pytest.raises(ConfigError, match=r"temperature, which phase 'a' changes, must be a finite number, got"):
        Schedule({T: value}, phases=[Phase("a", set={T: 1})])
    assert Schedule({T: value, KL: 1.0}, phases=[Phase("a", set={KL: 2})]).values(0, 0) == {KL: 2.0}


def refuse_below_one(values):
    return "train.batch_size must be at least 1" if values["train.batch_size"] < 1 else None


def test_a_rule_does_not_leave_the_range_of_a_setting():
    """A change that the recipe refuses is left out, and said; the run goes on, and so does a resumed one."""
    rule = Rule(metric="reward", over=1, below=0.5, setting="train.batch_size", multiply=0.5)
    schedule = Schedule({"train.batch_size": 3}, rules=[rule], refusal=refuse_below_one)
    values, messages = [], []
    for step in range(5):
        values.append(schedule.values(step, 0)["train.batch_size"])
        messages += schedule.observe(step, {"reward": 0.0})
    assert values == [3, 2, 1, 1, 1]
    assert "now 2" in messages[0]
    assert "is left out, it stays at 1: train.batch_size must be at least 1" in messages[2]
    again = Schedule({"train.batch_size": 3}, rules=[rule], refusal=refuse_below_one)
    again.load_state(json.loads(json.dumps(schedule.state())))
    assert again.values(5, 0) == schedule.values(5, 0) == {"train.batch_size": 1}


def test_a_rule_whose_change_becomes_impossible_in_a_later_phase():
    """Halving 4 is fine, halving the next phase's 1 is not: there the rule's change is left out."""
    rule = Rule(metric="reward", over=1, below=0.5, setting="train.batch_size", multiply=0.25, times=1)
    phases = [Phase("large", steps=2, set={"train.batch_size": 8}), Phase("small", set={"train.batch_size": 1})]
    schedule = Schedule({"train.batch_size": 8}, phases=phases, rules=[rule], refusal=refuse_below_one)
    values = []
    for step in range(4):
        values.append(schedule.values(step, 0)["train.batch_size"])
        schedule.observe(step, {"reward": 0.0})
    assert values == [8, 2, 1, 1]
