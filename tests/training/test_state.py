"""What a run's state says about its evaluations."""

from __future__ import annotations

from groupwise.training.state import TrainState


def test_labels_of_evaluations():
    state = TrainState()
    state.add_evaluation({"reward": 0.1}, "reward")
    assert state.first_label == "before training"
    state.step = 1
    state.add_evaluation({"reward": 0.3}, "reward")
    assert state.measured_label == "after 1 step"
    state.step = 2
    state.add_evaluation({"reward": 0.2}, "reward")
    assert state.measured_label == "after 1 step (best of 2)"
    state.step = 1200
    state.add_evaluation({"reward": 0.4}, "reward")
    assert state.measured_label == "after 1,200 steps (best of 3)"


def test_a_first_evaluation_after_training_began():
    state = TrainState(step=1)
    state.add_evaluation({"reward": 0.1}, "reward")
    assert state.first_label == "after 1 step (first)"


def test_the_last_of_equal_evaluations_is_the_best_but_no_improvement():
    state, since = TrainState(), []
    for state.step, value in enumerate([0.9, 0.3, 0.3, 0.2, 0.3, 0.4]):
        state.add_evaluation({"reward": value}, "reward")
        since.append((state.best and state.best["step"], state.evaluations_since_improvement))
    assert since == [(None, 0), (1, 0), (2, 1), (2, 2), (4, 3), (5, 0)]
