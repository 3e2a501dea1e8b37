"""Evaluation on several sets of held-out rows, and of the rewards beside the grades."""

from __future__ import annotations

import statistics

import pytest

from groupwise.errors import ConfigError
from groupwise.rewards import named
from groupwise.tasks import Task
from groupwise.training.monitor.descriptions import describe_metric
from groupwise.training.store.rollout_files import read_rows, step_files
from groupwise.training.store.token_files import EVALUATIONS
from tests.training.runs import ROWS, even, metrics_of, small_trainer, vowels

SETS = {"easy": ROWS[:3], "hard": ROWS[3:8]}
SHORT = {"train": {"steps": 2}, "evaluate": {"every": 1, "samples": 2, "temperature": 1.0}}


def answers_of(folder, step):
    return read_rows(step_files(folder / EVALUATIONS)[step])


def test_every_set_has_its_own_metrics(tmp_path):
    trainer = small_trainer(tmp_path / "run", SHORT, task=Task("sets", ROWS, SETS))
    result = trainer.run()
    assert trainer.metric == "easy/reward"
    assert result.held_out["easy/reward"] == max(
        row["eval/easy/reward"] for row in metrics_of(tmp_path / "run")[1:] if "eval/easy/reward" in row
    )
    for row in (row for row in metrics_of(tmp_path / "run") if "eval/easy/reward" in row):
        answers = answers_of(tmp_path / "run", row["step"])
        assert [answer["row"] for answer in answers] == [number for number in range(8) for _ in range(2)]
        assert [answer["prompt"] for answer in answers[::2]] == [row["prompt"] for row in ROWS[:8]]
        easy, hard = ([answer["reward"] for answer in part] for part in (answers[:6], answers[6:]))
        assert row["eval/easy/reward"] == pytest.approx(statistics.mean(easy))
        assert row["eval/hard/reward"] == pytest.approx(statistics.mean(hard))
        assert row["eval/hard/reward_low"] <= row["eval/hard/reward"] <= row["eval/hard/reward_high"]
        assert "eval/reward" not in row
        assert all(describe_metric(name) for name in row if name.startswith("eval/"))


def test_one_of_the_sets_selects_the_best_checkpoint(tmp_path):
    changes = {"evaluate": {"metric": "hard/reward"}}
    trainer = small_trainer(tmp_path / "run", SHORT, changes, task=Task("sets", ROWS, SETS))
    with trainer:
        assert trainer.metric == "hard/reward"
    with pytest.raises(ConfigError, match=r"'reward' is not measured .*easy/reward, hard/reward"):
        small_trainer(tmp_path / "other", {"evaluate": {"metric": "reward"}}, task=Task("sets", ROWS, SETS))


def test_a_set_needs_a_name():
    with pytest.raises(ConfigError, match="'a/b' cannot be the name of a set"):
        Task("sets", ROWS, {"a/b": ROWS[:1]})


def test_rewards_are_reported_beside_the_grades(tmp_path):
    task = Task(
        "graded",
        ROWS,
        ROWS[:4],
        grades={"long": lambda row, text: len(text) > 2},
        metric="long",
        rewards=(named(even, 2.0), named(vowels, 0.5)),
    )
    small_trainer(tmp_path / "plain", SHORT, {"train": {"steps": 1}}, task=task).run()
    assert "eval/reward" not in metrics_of(tmp_path / "plain")[0]
    small_trainer(tmp_path / "run", SHORT, {"train": {"steps": 1}, "evaluate": {"rewards": True}}, task=task).run()
    row, answers = metrics_of(tmp_path / "run")[0], answers_of(tmp_path / "run", 0)
    texts = [answer["completion"] for answer in answers]
    columns = {"even": even(texts), "vowels": vowels(texts)}
    for name, column in columns.items():
        assert row[f"eval/rewards/{name}/mean"] == pytest.approx(statistics.mean(column))
        assert row[f"eval/rewards/{name}/std"] == pytest.approx(statistics.stdev(column))
    total = [2 * one + 0.5 * other for one, other in zip(*columns.values(), strict=True)]
    assert [answer["reward"] for answer in answers] == pytest.approx(total)
    assert row["eval/reward"] == pytest.approx(statistics.mean(total))
    assert row["eval/reward_std"] == pytest.approx(statistics.stdev(total))
    assert row["eval/long"] == sum(len(text) > 2 for text in texts) / len(texts)
