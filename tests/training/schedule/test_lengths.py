"""The lengths of a run and its phases: by hand, against a slow literal version, in short runs, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.config import load_recipe, make_recipe
from groupwise.errors import ConfigError
from groupwise.training.schedule.lengths import RunLength, run_length
from groupwise.training.schedule.rules import LENGTHS, Phase
from groupwise.training.schedule.schedule import Schedule
from tests.training.runs import checkpoint_of, metrics_of, small_recipe, small_trainer
from tests.training.test_resume import break_and_resume

T, KL = "sampling.temperature", "loss.kl_coef"


def length(*phases, rows=64, samples=True, **train):
    """The length of a run; a phase is a dict with its length. A step has 16 prompts."""
    tables = [{"name": f"p{number}", "kl_coef": 0.1, **phase} for number, phase in enumerate(phases)]
    recipe = make_recipe(
        {"phases": tables, "train": {"batch_size": 16, "accumulation": 1, **train}, "preference": {"batch_size": 8}}
    )
    parsed = [
        Phase(table.pop("name"), **{unit: table.pop(unit) for unit in LENGTHS if unit in table}, set=table)
        for table in map(dict, recipe.phases)
    ]
    return run_length(recipe, parsed, rows, samples=samples)


def steps_of(result: RunLength) -> list[int | None]:
    assert all(phase.epochs is None and phase.share is None for phase in result.phases)
    return [phase.steps for phase in result.phases]


@pytest.mark.parametrize(
    ("rows", "steps"),
    [
        (48, [100, 6, 1]),  # 6 + 1.32 steps
        (64, [100, 8, 2]),  # 8 + 1.76
        (2002, [100, 250, 55]),  # 250.25 + 55.055 = 305.3
        (10_178, [100, 1272, 280]),  # 1272.25 + 279.895 = 1552.1
    ],
)
def test_the_usmle_recipe(rows, steps):
    """Warm-up of 100 steps, main phase of two epochs, final tuning of 0.44 epochs, for any number of questions."""
    recipe = load_recipe("usmle")
    phases = [Phase(p["name"], **{unit: p[unit] for unit in LENGTHS if unit in p}, set={T: 1}) for p in recipe.phases]
    result = run_length(recipe, phases, rows, samples=True)
    assert (steps_of(result), result.steps, result.unreached) == (steps, sum(steps), ())
    cut = run_length(load_recipe("usmle", {"train.steps": 4}), phases, rows, samples=True)
    assert (cut.steps, cut.unreached) == (4, ("main", "final"))


def test_shares_of_the_run():
    thirds = [{"share": 0.33}, {"share": 0.33}, {"share": 0.34}]
    assert steps_of(length(*thirds, steps=100)) == [33, 33, 34]
    assert steps_of(length(*thirds, steps=10)) == [3, 4, 3]  # ends at 3.3, 6.6 and 10
    assert steps_of(length(*thirds, rows=160, epochs=1.0)) == [3, 4, 3]
    rest = length({"steps": 2}, {"share": 0.5}, {}, steps=10)
    assert (steps_of(rest), rest.steps) == ([2, 5, None], 10)
    assert steps_of(length({"share": 0.01}, {"share": 0.99}, steps=10)) == [1, 9]  # a phase lasts at least a step


def test_an_epoch_has_as_many_steps_as_the_phase_has_batches():
    assert steps_of(length({"epochs": 1}, {"epochs": 1, "train.batch_size": 4}, {"epochs": 1})) == [4, 16, 4]
    assert steps_of(length({"epochs": 1}, {"epochs": 1}, rows=40)) == [2, 3]  # 2.5 and 5
    assert steps_of(length({"epochs": 0.5}, {"epochs": 1.5}, rows=40)) == [1, 4]  # 1.25 and 5
    assert steps_of(length({"epochs": 1}, samples=False)) == [8]  # 64 pairs, 8 at a time


def test_the_same_epochs_give_the_same_number_of_steps_with_and_without_phases():
    for rows in range(1, 200):
        for epochs in (0.1, 0.5, 1.0, 2.0, 3.3):
            assert length({"epochs": epochs}, rows=rows).steps == length(rows=rows, epochs=epochs).steps


def test_where_tokens_end_the_run_the_number_of_steps_is_not_known():
    tokens = length({"steps": 5}, {"tokens": 900}, {"epochs": 0.6}, {"epochs": 0.4})
    assert (tokens.steps, tokens.unreached, steps_of(tokens)) == (None, (), [5, None, 2, 2])
    assert length({"tokens": 900}, steps=7).steps == 7
    assert length({"tokens": 900}, {}, epochs=1.0).steps == 4


units = st.one_of(
    st.fixed_dictionaries({"steps": st.integers(1, 40)}),
    st.fixed_dictionaries({"epochs": st.floats(0.001, 4)}),
)


@given(st.lists(units, min_size=1, max_size=6), st.integers(1, 500))
def test_the_run_is_the_sum_of_its_phases(phases, rows):
    """Every phase has a step, one of steps exactly its number, and no border is off by more than rounding allows."""
    result = length(*phases, rows=rows)
    steps = steps_of(result)
    assert result.steps == sum(steps)
    assert min(steps) >= 1
    exact = 0.0
    for number, (phase, taken) in enumerate(zip(phases, steps, strict=True)):
        if "steps" in phase:
            assert taken == phase["steps"]
        exact += phase["steps"] if "steps" in phase else rows * phase["epochs"] / 16
        # Forced steps of phases that are shorter than one move later borders, by less than one each.
        assert -0.5 - 1e-6 <= sum(steps[: number + 1]) - exact <= 0.5 + number + 1


@given(
    st.lists(st.floats(0.01, 1), min_size=1, max_size=8),
    st.integers(10, 2000),
)
def test_shares_fill_the_run(weights, total):
    shares = [weight / sum(weights) for weight in weights]
    result = length(*({"share": share} for share in shares), steps=total)
    if all(share * total >= 1 for share in shares):
        assert sum(steps_of(result)) == total
        assert result.unreached == ()
        for taken, share in zip(steps_of(result), shares, strict=True):
            assert abs(taken - share * total) <= 1


mixed = st.one_of(
    st.fixed_dictionaries({"steps": st.integers(1, 5)}), st.fixed_dictionaries({"tokens": st.integers(1, 300)})
)


@given(
    st.lists(mixed, min_size=1, max_size=4),
    st.lists(st.integers(1, 90), min_size=60, max_size=60),
    st.integers(0, 40),
)
def test_a_run_of_tokens_ends_where_a_slow_count_ends(phases, sampled, cut):
    """Step by step: which phase a step is in, and after which step the run is over; also if it is resumed."""
    parsed = [Phase(f"p{number}", **phase, set={T: number + 1}) for number, phase in enumerate(phases)]
    expected = []
    tokens, at = 0, 0
    for number, phase in enumerate(phases):
        begun, first = tokens, at
        while at < 60 and (
            at - first < phase["steps"] if "steps" in phase else tokens - begun < phase["tokens"] or at == first
        ):
            expected.append(number + 1.0)
            tokens, at = tokens + sampled[at], at + 1
    schedule = Schedule({T: 0.5}, phases=parsed, ends=True)
    seen, tokens = [], 0
    while len(seen) < 60 and schedule.steps_left(len(seen), tokens, 7.5):
        if len(seen) == cut:
            state, schedule = schedule.state(), Schedule({T: 0.5}, phases=parsed, ends=True)
            schedule.load_state(state)
        seen.append(schedule.values(len(seen), tokens)[T])
        tokens += sampled[len(seen) - 1]
    assert seen == expected
    assert schedule.values(len(seen), tokens)[T] == len(phases) or len(seen) == 60  # the last evaluation's


def test_steps_left_by_hand():
    phases = [Phase("a", steps=3, set={T: 1}), Phase("b", tokens=100, set={T: 2}), Phase("c", steps=2, set={T: 3})]
    schedule = Schedule({T: 0.5}, phases=phases, ends=True)
    assert schedule.steps_left(0, 0, 30) == 3 + 4 + 2
    assert schedule.steps_left(2, 60, 30) == 1 + 4 + 2
    assert schedule.steps_left(3, 80, 30) == 4 + 2
    assert schedule.steps_left(4, 110, 30) == 3 + 2
    assert schedule.steps_left(5, 170, 40) == 1 + 2
    assert schedule.steps_left(6, 215, 40) == 2
    assert schedule.steps_left(8, 300, 40) == 0


# --- refused ----------------------------------------------------------------------------------------------------------

OWN = [{"name": "a", "steps": 2, "kl_coef": 0.1}, {"name": "b", "epochs": 1, "kl_coef": 0.2}]


def test_epochs_beside_phases_that_end_the_run(tmp_path):
    match = r"^{}: train.epochs cannot be set beside \[\[phases\]\] .* ends with the last phase"
    with pytest.raises(ConfigError, match=match.format("the recipe")):
        make_recipe({"phases": OWN, "train": {"epochs": 3.0}})
    with pytest.raises(ConfigError, match=match.format("on the command line")):
        make_recipe({"phases": OWN}, overrides={"train.epochs": 3.0})
    assert make_recipe({"phases": OWN}).ends_with_phases
    assert make_recipe({"phases": OWN, "algorithm": "enhanced_grpo"}).ends_with_phases  # its preset has epochs
    assert make_recipe({"phases": OWN, "train": {"epochs": None}}).ends_with_phases
    assert not make_recipe({"phases": OWN, "train": {"epochs": 3.0, "steps": 5}}).ends_with_phases
    for last in ({"share": 0.5}, {}, {"steps": None}):
        phases = [OWN[0], {"name": "b", "kl_coef": 0.2, **last}]
        assert not make_recipe({"phases": phases, "train": {"epochs": 3.0}}).ends_with_phases
    assert not make_recipe({}).ends_with_phases
    # A run's recipe.json has every setting.
    saved = make_recipe({"phases": OWN}).model_dump()
    assert make_recipe(saved, base={}).ends_with_phases
    with pytest.raises(ConfigError, match=r"on the command line: train\.epochs"):
        make_recipe(saved, base={}, overrides={"train.epochs": 2.0})


@pytest.mark.parametrize(
    ("phases", "train", "message"),
    [
        ([{"steps": 4}, {}], {"epochs": 1.0}, "no room for phase 'p1': .* 5 steps or more, and the run has 4 "),
        ([{"share": 0.5}, {"steps": 3}], {"epochs": 1.0}, r"no room for phase 'p1': .* 5 .* \(train.epochs 1\)"),
        ([{"share": 1.0}, {}], {"epochs": 1.0}, "no room for phase 'p1'"),
        ([{"epochs": 2}, {"tokens": 5}, {}], {"epochs": 1.0}, "no room for phase 'p0': .* 8 steps or more"),
    ],
)
def test_phases_that_do_not_fit(phases, train, message):
    with pytest.raises(ConfigError, match=message):
        length(*phases, **train)
    assert length(*phases, steps=1).steps == 1  # to cut a run is meant


def test_tokens_of_a_run_that_samples_nothing():
    with pytest.raises(ConfigError, match="phase 'p0' is counted in sampled tokens, but this run samples nothing"):
        length({"tokens": 5}, samples=False)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"ramps": {"batch_size": {"from": 3, "to": 6, "steps": 4}}}, "'b' is counted in epochs, but a ramp or a rule"),
        (
            {"rules": [{"when": "reward < 0", "over": 1, "then": "train.accumulation * 2"}]},
            "'b' is counted in epochs, .* changes train.accumulation, .* count it in steps",
        ),
        (
            {"phases": [{"name": "t", "tokens": 9, "kl_coef": 0.1}], "optimizer": {"lr_schedule": "cosine"}},
            "'t' is counted in tokens, so the number of steps .*lr_schedule 'cosine' decays; set train.steps",
        ),
    ],
)
def test_a_number_of_steps_that_is_needed_but_not_known(tmp_path, tables, message):
    with pytest.raises(ConfigError, match=message):
        small_trainer(tmp_path / "run", {"train": {"steps": None}, "phases": OWN}, tables)
    assert not (tmp_path / "run").exists()


# --- runs -------------------------------------------------------------------------------------------------------------


def steps_in(folder):
    return [row for row in metrics_of(folder) if "reward" in row]


@pytest.mark.parametrize("at", [(4,), pytest.param((1, 3), marks=pytest.mark.slow)], ids=str)
def test_a_run_of_epochs_is_resumed_exactly(tmp_path, at):
    """Ten rows, three in a step: phases of 1, 3.33 and 1.67 steps, stopped at and beside their borders."""
    phases = [
        {"name": "one", "steps": 1, "temperature": 0.6},
        {"name": "two", "epochs": 1, "temperature": 0.8},
        {"name": "three", "epochs": 0.5, "temperature": 1.2},
    ]
    changes = {"train": {"steps": None}, "phases": phases, "optimizer": {"lr_schedule": "linear"}}
    rows, _ = break_and_resume(tmp_path, changes, at, steps=6)
    steps = [row for row in rows if "reward" in row]
    assert [row["temperature"] for row in steps] == [0.6, 0.8, 0.8, 0.8, 1.2, 1.2]
    assert [row["learning_rate"] for row in steps] == pytest.approx([1e-3 * (6 - step) / 6 for step in range(6)])


def test_a_run_of_tokens(tmp_path):
    """72 tokens a step at most: the run ends with the step that reaches the sum, and is resumed exactly."""
    phases = [{"name": "cold", "tokens": 100, "temperature": 0.6}, {"name": "hot", "tokens": 130, "temperature": 1.2}]
    changes = {"train": {"steps": None}, "phases": phases, "sampling": {"min_new_tokens": 6}}
    with small_trainer(tmp_path / "first", changes) as trainer:
        assert trainer.total_steps == 2 + 2
    rows, state = break_and_resume(tmp_path, changes, (1, 3), steps=4)
    assert [row["temperature"] for row in rows if "reward" in row] == [0.6, 0.6, 1.2, 1.2]
    assert state["train"]["tokens"] == 4 * 72
    result = small_trainer(tmp_path / "a", changes, resume=True)
    assert (result.run().steps, result.display.facts.steps) == (4, 4)
    # The last evaluation is made in the last phase, and the run goes on in it if it becomes longer.
    assert checkpoint_of(tmp_path / "a", 4)["state"]["schedule"]["phases"][-1][0] == "hot"
    longer = [phases[0], {**phases[1], "tokens": 300}]
    assert small_trainer(tmp_path / "a", {**changes, "phases": longer}, resume=True).run().steps == 7
    assert [row["temperature"] for row in steps_in(tmp_path / "a")][4:] == [1.2] * 3


def test_train_steps_cuts_a_run_of_phases_which_is_then_continued(tmp_path):
    phases = [{"name": "one", "steps": 2, "temperature": 0.6}, {"name": "two", "steps": 1, "temperature": 1.2}]
    cut = small_trainer(tmp_path / "run", {"train": {"steps": 1}, "phases": phases})
    assert cut.run().steps == 1
    assert cut.display.heard("train.steps 1 ends the run before 'two'")
    for steps in (3, None):  # after three steps the last phase is over, unless it ends the run
        small_trainer(tmp_path / "run", {"train": {"steps": steps}, "phases": phases}, resume=True).run()
    longer = [phases[0], {**phases[1], "steps": 3}]
    assert small_trainer(tmp_path / "run", {"train": {"steps": None}, "phases": longer}, resume=True).run().steps == 5
    assert [row["temperature"] for row in steps_in(tmp_path / "run")] == [0.6, 0.6, 1.2, 1.2, 1.2]


def test_shares_in_a_run(tmp_path):
    phases = [{"name": "one", "share": 0.25, "temperature": 0.6}, {"name": "two", "temperature": 1.2}]
    trainer = small_trainer(tmp_path / "run", {"phases": phases})
    assert (trainer.run().steps, small_recipe({"phases": phases}).ends_with_phases) == (4, False)
    assert [row["temperature"] for row in steps_in(tmp_path / "run")] == [0.6, 1.2, 1.2, 1.2]


# --- the recipe usmle -------------------------------------------------------------------------------------------------


def test_the_usmle_recipe_is_the_designs_procedure():
    recipe = load_recipe("usmle")
    values = {
        "algorithm": "enhanced_grpo",
        "task_options": {"prompt": "chat", "reading": "lenient"},
        "sampling.samples_per_prompt": 16,
        "sampling.temperature": 1.0,
        "sampling.top_k": 40,
        "sampling.max_new_tokens": 512,
        "train.batch_size": 16,
        "train.accumulation": 1,
        "optimizer.learning_rate": 1e-5,
        "optimizer.embedding_learning_rate": 2e-4,
        "optimizer.max_grad_norm": 1.0,
        "loss.kl_coef": 0.01,
        "loss.kl_aggregation": "token_mean",
        "advantages.baseline": "mean",
        "advantages.scale": "none",
        "masks.off_policy_threshold": 0.5,
        "reference.refresh_every": 100,
        "run.log_every": 10,
        "evaluate.every": 50,
    }
    assert {name: recipe.get(name) for name in values} == values
    assert recipe.phases == [
        {"name": "warm-up", "steps": 100, "temperature": 0.7, "kl_coef": 0.02, "samples_per_prompt": 8},
        {"name": "main", "epochs": 2, "temperature": 1.0, "kl_coef": 0.01, "samples_per_prompt": 16},
        {"name": "final", "epochs": 0.44, "temperature": 0.8, "learning_rate": 5e-6},
    ]
    [rule] = recipe.rules
    assert (rule["when"], rule["then"], rule["during"]) == ("accuracy < 0.15", "learning_rate * 0.5", "warm-up")
