"""Penalties on length: as columns of the rewards, by hand, with a schedule and in a run."""

from __future__ import annotations

import math

import pytest
import torch

from groupwise.errors import ConfigError
from groupwise.training.rollout.penalties import penalty_columns, penalty_names
from tests.training.factories import make_trainer, short_recipe

NAN = math.nan


def one(prompts, completions, **_):
    return [1.0] * len(completions)


def test_the_overlong_penalty_by_hand():
    """No penalty up to 6 of 8 tokens, then −1/2 and −1, times the weight."""
    recipe = short_recipe({"scoring.overlong_buffer": 2, "scoring.overlong_weight": 0.5})
    rewards = torch.tensor([1.0, 2.0, NAN, 4.0], dtype=torch.float64)
    result = penalty_columns(["overlong"], rewards, [1, 6, 7, 8], [0] * 4, recipe)
    assert result.tolist() == [[0.0], [0.0], [-0.25], [-0.5]]
    wide = short_recipe({"scoring.overlong_buffer": 100})
    result = penalty_columns(["overlong"], rewards, [0, 4, 8, 2], [0] * 4, wide)
    assert result.flatten().tolist() == [0.0, -0.5, -1.0, -0.25]


def test_the_length_penalty_by_hand():
    """Of the prompt's scored completions 2 of 3 succeed, and of the other prompt's none: the least rate is 1/2."""
    recipe = short_recipe({"scoring.length_penalty": 3.0, "scoring.success_threshold": 0.9})
    rewards = torch.tensor([1.0, 0.5, NAN, 0.9, 0.0, 0.8], dtype=torch.float64)
    result = penalty_columns(["adaptive_length_penalty"], rewards, [8, 4, 2, 0, 8, 4], [0, 0, 0, 0, 7, 7], recipe)
    assert result[:, 0].tolist() == pytest.approx([-2.0, -1.0, NAN, 0.0, -1.5, -0.75], nan_ok=True)
    both = penalty_columns(["overlong", "adaptive_length_penalty"], rewards, [8] * 6, [0] * 6, recipe)
    assert both.shape == (6, 2)
    assert penalty_columns(["overlong"], rewards[:0], [], [], recipe).shape == (0, 1)


def test_the_length_of_a_conversation_by_hand():
    """3 turns of 8 tokens, but 20 with what was given: no penalty up to 16 sampled tokens, then −1/4 for each."""
    settings = {"scoring.overlong_buffer": 4, "scoring.length_penalty": 1.0, "environment.max_turns": 3}
    rewards, names = torch.tensor([1.0] * 3, dtype=torch.float64), ["overlong", "adaptive_length_penalty"]
    for limit, most in (({}, 24), ({"environment.max_tokens": 20}, 20), ({"environment.max_tokens": 90}, 24)):
        recipe, lengths = short_recipe({**settings, **limit}), [most - 4, most - 3, most]
        result = penalty_columns(names, rewards, lengths, [0] * 3, recipe, conversations=True)
        assert result[:, 0].tolist() == [0.0, -0.25, -1.0]
        assert result[:, 1].tolist() == pytest.approx([-length / most for length in lengths])


def test_penalties_of_a_schedule_have_a_column_from_the_start():
    recipe = short_recipe({})
    assert penalty_names(recipe) == []
    assert penalty_names(recipe, ["scoring.length_penalty"]) == ["adaptive_length_penalty"]
    on = short_recipe({"scoring.length_penalty": 0.1, "scoring.overlong_buffer": 2})
    assert penalty_names(on) == ["overlong", "adaptive_length_penalty"]


def test_the_overlong_penalty_in_a_run(tmp_path):
    settings = {"train.steps": 1, "scoring.overlong_buffer": 4, "scoring.overlong_weight": 2.0}
    with make_trainer(tmp_path, settings, reward=one) as trainer:
        (report,) = trainer.steps()
    assert trainer.collector.names[-1] == "overlong"
    assert trainer.collector.weights == [1.0, 1.0]
    full = [reason == "length" for reason in report.batch.stop_reasons]
    assert sum(full) > 4
    assert [total == -1.0 for total in report.group_advantages.rewards.tolist()] == full
    assert report.metrics["rewards/overlong/mean"] < -1


def test_the_length_penalty_in_a_run(tmp_path):
    """Where all succeed, shorter completions are reinforced; the rewards of the functions stay as they are."""
    settings = {"train.steps": 1, "scoring.length_penalty": 0.5, "sampling.stop": list("abcdefghij0123456789")}
    with make_trainer(tmp_path, settings, reward=one) as trainer:
        (report,) = trainer.steps()
    assert trainer.collector.names == ["one", "adaptive_length_penalty"]
    batch, result = report.batch, report.group_advantages
    assert batch.rewards[:, 0].tolist() == [1.0] * len(batch)
    assert batch.rewards[:, 1].tolist() == pytest.approx([-0.5 * length / 8 for length in batch.lengths.tolist()])
    lengths, advantages = batch.lengths.view(-1, 4), result.advantages.view(-1, 4)
    assert len(set(batch.lengths.tolist())) > 1
    for own, group in zip(lengths.double(), advantages, strict=True):
        assert ((own < own.mean()) == (group > 0)).all()
        assert ((own > own.mean()) == (group < 0)).all()


def test_a_dropped_sample_is_not_a_failure(tmp_path):
    """Of the three completions that are scored all succeed, so the rate is 1."""

    def reward(prompts, completions, **_):
        return [math.nan if place % 4 == 0 else 1.0 for place in range(len(completions))]

    settings = {"train.steps": 1, "scoring.length_penalty": 1.0, "scoring.on_error": "drop"}
    with make_trainer(tmp_path, settings, reward=reward) as trainer:
        (report,) = trainer.steps()
    batch = report.batch
    assert batch.dropped.tolist() == [place % 4 == 0 for place in range(len(batch))]
    scored = ~batch.dropped
    assert batch.rewards[scored, 1].tolist() == pytest.approx((-batch.lengths[scored] / 8).tolist())


def test_a_penalty_that_a_phase_turns_on(tmp_path):
    phases = [
        {"name": "free", "steps": 1, "temperature": 1.0},
        {"name": "short", "steps": 1, "scoring.length_penalty": 1.0},
    ]
    settings = {"phases": phases, "train.steps": None}
    with make_trainer(tmp_path, settings, reward=one) as trainer:
        first, second = trainer.steps()
    assert first.batch.rewards[:, 1].abs().sum() == 0
    assert (second.batch.rewards[:, 1] < 0).all()


def test_a_reward_with_the_name_of_a_penalty_is_refused(tmp_path):
    def overlong(prompts, completions, **_):
        return [1.0] * len(completions)

    with make_trainer(tmp_path / "off", reward=overlong):
        pass  # without the penalty it is a name as any other
    with (
        pytest.raises(ConfigError, match=r"'overlong' has the name of the penalty that scoring\.overlong_buffer adds"),
        make_trainer(tmp_path / "on", {"scoring.overlong_buffer": 2}, reward=overlong),
    ):
        pass
