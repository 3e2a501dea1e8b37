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
