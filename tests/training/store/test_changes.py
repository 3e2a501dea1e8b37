"""What a run was resumed with, and whether its evaluations can be compared."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from groupwise.config import make_recipe
from groupwise.rundir import RunDir, read_json
from groupwise.training.state import TrainState
from groupwise.training.store.changes import RESUMED, changed_evaluation, record_changes
from groupwise.training.store.run_folder import write_inputs, write_recipe

INPUTS = {"held-out rows": "2, a", "training rows": "9, b"}


def resume(run, step, settings, inputs=INPUTS):
    recipe = make_recipe(settings)
    record_changes(run, recipe, inputs, step)
    write_inputs(run, inputs, None)
    write_recipe(run, recipe, lambda text: None, resuming=bool(step))
    return recipe


def changed(run, recipe, state, grades=()):
    components = SimpleNamespace(recipe=recipe, task=SimpleNamespace(grades=grades))
    return changed_evaluation(run.path, components, state)


def state_of(first, best):
    return TrainState(
        step=9, first_evaluated_at=first, evaluated_at=9, best={"step": best, "value": 1.0, "metrics": {}}
    )


@pytest.fixture
def run(tmp_path):
    with RunDir.create(tmp_path / "run") as run:
        resume(run, 0, {})
        yield run


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"evaluate": {"samples": 4, "temperature": 1.0}}, ["evaluate.samples", "evaluate.temperature"]),
        ({"evaluate": {"every": 5, "patience": 2}, "train": {"steps": 9}}, []),
        ({"data": {"system_prompt": "Be short."}}, ["data.system_prompt"]),
        ({"sampling": {"max_new_tokens": 7}}, ["sampling.max_new_tokens"]),
        ({"rewards": [{"function": "repetition"}]}, ["rewards"]),
    ],
)
def test_settings_that_evaluations_depend_on(run, settings, names):
    recipe = resume(run, 4, settings)
    assert changed(run, recipe, state_of(0, 6)) == names
    assert changed(run, recipe, state_of(0, 4)) == []  # the result is from before the change
    assert changed(run, recipe, state_of(5, 6)) == []  # and so is nothing
    if names == ["rewards"]:
        assert changed(run, recipe, state_of(0, 6), grades=("accuracy",)) == []


def test_a_length_of_its_own(run):
    resume(run, 2, {"evaluate": {"max_new_tokens": 5}})
    recipe = resume(run, 4, {"evaluate": {"max_new_tokens": 5}, "sampling": {"max_new_tokens": 9}})
    assert changed(run, recipe, state_of(0, 6)) == ["evaluate.max_new_tokens"]
    assert changed(run, recipe, state_of(3, 6)) == []


def test_changes_that_are_taken_back(run):
    resume(run, 2, {"evaluate": {"samples": 4}})
    recipe = resume(run, 5, {})
    assert changed(run, recipe, state_of(0, 4)) == ["evaluate.samples"]
    assert changed(run, recipe, state_of(0, 7)) == []
    assert [entry["step"] for entry in read_json(run.path / RESUMED)["resumed"]] == [2, 5]


def test_other_rows(run):
    recipe = resume(run, 4, {}, {"held-out rows": "3, c", "training rows": "8, d"})
    assert changed(run, recipe, state_of(0, 6)) == ["held-out rows"]


def test_a_run_that_is_resumed_as_it_is_has_no_record(run):
    recipe = resume(run, 4, {})
    assert not (run.path / RESUMED).exists()
    assert changed(run, recipe, state_of(0, 6)) == []
