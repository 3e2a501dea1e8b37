"""Runs in which an answer is compared only with answers like itself."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from groupwise.config import make_recipe
from groupwise.core import group_advantages
from groupwise.errors import ConfigError
from groupwise.grouping.grouper import GroupingResult
from groupwise.grouping.labels import LABELS, compute_single_member_mask
from groupwise.training.components import load_components
from groupwise.training.inputs import load_inputs
from groupwise.training.preflight import describe_run
from groupwise.training.rollout.advantages import GROUPINGS, compute_group_advantages
from groupwise.training.rollout.batch import join
from groupwise.training.store.rollout_files import read_rollouts
from groupwise.training.trainer import Trainer
from tests.training.factories import make_batch, short_recipe
from tests.training.runs import TASK, check_same, even, merged, run_steps, small_recipe, small_trainer
from tests.weights import wordllama

SIMILAR = {
    "algorithm": "similarity_group_grpo",
    "grouping": {"embedder": "wordllama", "workers": 0},
    "train": {"steps": 3, "batch_size": 3, "accumulation": 1},
    "sampling": {"samples_per_prompt": 6, "max_new_tokens": 10},
    "evaluate": {"before_training": False, "every": 0},
}


@pytest.fixture(autouse=True)
def _weights():
    wordllama()


def first_report(trainer: Trainer):
    with trainer:
        return next(iter(trainer.steps()))


def test_answers_are_compared_within_their_cluster(tmp_path):
    report = first_report(small_trainer(tmp_path, SIMILAR))
    batch, labels = report.batch, report.batch.extra[LABELS]
    assert [label.rpartition("_")[0] for label in labels] == [f"1.0.{p}" for p in range(3) for _ in range(6)]
    assert max(int(label.rpartition("_")[2]) for label in labels) >= 1
    expected = group_advantages(batch.scored, labels, eps=1e-6)
    torch.testing.assert_close(report.group_advantages.advantages, expected.float())
    lone = compute_single_member_mask(labels)
    assert bool(lone.any())
    assert report.group_advantages.advantages[lone].abs().max() == 0
    assert report.group_advantages.advantages[~lone].abs().max() > 0


def test_what_a_step_logs_and_records(tmp_path):
    report = first_report(small_trainer(tmp_path, SIMILAR))
    metrics, similarity = report.metrics, report.batch.similarity
    counts = [metrics[f"similarity_groups/n_prompts_split_into_{k}_groups"] for k in range(1, 9)]
    assert sum(counts) == 3
    per_prompt = [len(set(similarity.labels[p, :, 0].tolist())) for p in range(3)]
    assert metrics["similarity_groups/avg_groups_per_prompt"] == pytest.approx(sum(per_prompt) / 3)
    assert metrics["similarity_groups/n_single_member_groups"] == int(
        compute_single_member_mask(report.batch.extra[LABELS]).sum()
    )
    assert metrics["similarity_groups/avg_silhouette_score"] == pytest.approx(float(similarity.scores.mean()))
    assert 0 < metrics["diversity/mean_distance"] < 2
    assert metrics["diversity/distance_between_prompts"] > 0
    assert 1 <= metrics["diversity/effective_clusters"] <= 6
    assert all(0 < metrics[f"diversity/distinct_{n}"] <= 1 for n in (1, 2, 3))
    assert metrics["time/group"] > 0
    assert "similarity_groups/n_rewards_skipped" not in metrics


def test_the_records_have_the_labels(tmp_path):
    run_steps(small_trainer(tmp_path, SIMILAR), 2)
    table = read_rollouts(tmp_path)
    assert table.column(LABELS).to_pylist()[0].startswith("1.0.0_")
    assert table.column(LABELS).to_pylist()[-1].startswith("2.0.2_")


def test_diversity_can_be_measured_while_all_are_compared_with_all(tmp_path):
    plain = merged(SIMILAR, {"algorithm": "dapo"})
    measured = first_report(small_trainer(tmp_path / "a", plain, {"grouping": {"log_diversity": True}}))
    assert measured.metrics["diversity/mean_distance"] > 0
    assert torch.equal(measured.group_advantages.groups, measured.batch.prompt_of)
    quiet = first_report(small_trainer(tmp_path / "b", plain))
    assert not [name for name in quiet.metrics if name.startswith(("diversity/", "similarity_groups/"))]
    assert torch.equal(measured.group_advantages.advantages, quiet.group_advantages.advantages)


def test_rewards_of_answers_that_are_alone_are_not_computed(tmp_path):
    seen = []

    def counting(completions, log_extra, **_):
        seen.append(len(completions))
        log_extra("seen", [True] * len(completions))
        return even(completions)

    counting.__name__ = "even"
    all_of_them = first_report(small_trainer(tmp_path / "a", SIMILAR, rewards=[counting]))
    some = first_report(
        small_trainer(tmp_path / "b", SIMILAR, {"grouping": {"skip_single_members": True}}, rewards=[counting])
    )
    lone = compute_single_member_mask(some.batch.extra[LABELS])
    assert seen == [18, 18 - int(lone.sum())]
    assert some.metrics["similarity_groups/n_rewards_skipped"] == int(lone.sum()) > 0
    assert some.batch.rewards[lone].isnan().all()
    assert not some.batch.dropped.any()
    assert some.batch.extra["seen"] == [None if alone else True for alone in lone.tolist()]
    torch.testing.assert_close(some.batch.rewards[~lone], all_of_them.batch.rewards[~lone])
    assert torch.equal(some.group_advantages.advantages, all_of_them.group_advantages.advantages)


def test_a_step_in_which_all_are_alone_asks_for_no_reward_and_changes_nothing(tmp_path):
    def unwanted(completions, answer, **_):
        raise RuntimeError("nobody needs this")

    rows = [{"prompt": f"Say {n}: ", "answer": n} for n in range(4)]
    trainer = Trainer.from_rows(
        rows,
        unwanted,
        folder=tmp_path,
        **merged(
            SIMILAR,
            {
                "data": {"chat": False},
                "run": {"tensorboard": False, "plot": False},
                "grouping": {"method": "threshold", "threshold": 1.0, "skip_single_members": True},
                "scoring": {"overlong_buffer": 2},
            },
        ),
    )
    report = first_report(trainer)
    assert report.metrics["updates"] == 0
    assert report.metrics["similarity_groups/n_prompts_split_into_6_groups"] == 3
    assert not report.group_advantages.contributes.any()


def test_a_resampled_batch_keeps_its_clusters(tmp_path):
    settings = {"grouping": {"method": "threshold", "threshold": 0.7}}
    for seed in range(10):  # until a prompt has no learning signal and is replaced
        train = {"train": {"resample_rounds": 2, "seed": seed}}
        report = first_report(small_trainer(tmp_path / str(seed), SIMILAR, settings, train))
        batch = report.batch
        rounds = {label.split(".")[1] for label in batch.extra[LABELS]}
        if len(rounds) > 1:
            break
    assert len(rounds) > 1
    for prompt in range(len(batch.prompts)):
        own = [int(label.rpartition("_")[2]) for label in batch.extra[LABELS][6 * prompt : 6 * prompt + 6]]
        assert own == batch.similarity.labels[prompt, :, 0].tolist()
    torch.testing.assert_close(
        report.group_advantages.advantages, group_advantages(batch.scored, batch.extra[LABELS], eps=1e-6).float()
    )


def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path):
    run_steps(small_trainer(tmp_path / "whole", SIMILAR), 3)
    run_steps(small_trainer(tmp_path / "broken", SIMILAR), 2)
    run_steps(small_trainer(tmp_path / "broken", SIMILAR, resume=True), 1)
    check_same(tmp_path / "whole", tmp_path / "broken", 3)


@pytest.mark.slow
def test_a_worker_that_is_killed_in_a_run_costs_nothing(tmp_path):
    pytest.importorskip("ray")
    run_steps(small_trainer(tmp_path / "here", SIMILAR), 3)
    trainer = small_trainer(tmp_path / "there", SIMILAR, {"grouping": {"workers": 1}})
    with trainer:
        for report in trainer.steps():
            if report.step == 1:
                for pid in trainer.grouper.pids:
                    os.kill(pid, signal.SIGKILL)
            if report.step == 3:
                break
        assert trainer.grouper.restarts == 1
        assert trainer.display.heard("worker")
    check_same(tmp_path / "here", tmp_path / "there", 3)


REWARDS = [[1.0, 2.0, 6.0, 4.0], [5.0, 9.0, 2.0, 2.0]]
LENGTHS = [[1, 2, 3, 4], [2, 2, 2, 2]]


def similar_batch(levels: list[list[list[int]]], names: list[str]):
    batch = make_batch(REWARDS, LENGTHS)
    labels = torch.tensor(levels)
    none = torch.zeros(2)
    similarity = GroupingResult(labels, none, none, torch.zeros(2, 3), torch.zeros(*labels.shape[:2], 2))
    object.__setattr__(batch, "similarity", similarity)
    batch.extra[LABELS] = names
    return batch


def test_small_clusters_borrow_from_their_prompt():
    batch = similar_batch(
        [[[0], [0], [1], [1]], [[0], [1], [1], [1]]],
        ["a_0", "a_0", "a_1", "a_1", "b_0", "b_1", "b_1", "b_1"],
    )
    recipe = short_recipe({"advantages.grouping": "similarity", "advantages.shrinkage": 2.0})
    result = compute_group_advantages(batch, recipe, [1.0], grouping=GROUPINGS["similarity"])
    expected = group_advantages(batch.scored, batch.extra[LABELS], within=[batch.prompt_of], shrinkage=2.0)
    torch.testing.assert_close(result.advantages, expected.float())
    assert result.advantages[4] > 0, "alone, and better than its prompt's mean"
    assert not result.equal.any()


def test_clusters_in_clusters_borrow_from_the_clusters():
    names = ["a_0_0", "a_0_0", "a_0_1", "a_1_0", "b_0_0", "b_0_1", "b_0_1", "b_0_1"]
    batch = similar_batch([[[0, 0], [0, 0], [0, 1], [1, 0]], [[0, 0], [0, 1], [0, 1], [0, 1]]], names)
    recipe = short_recipe({"advantages.grouping": "similarity", "advantages.shrinkage": 2.0})
    result = compute_group_advantages(batch, recipe, [1.0], grouping=GROUPINGS["similarity"])
    middle = [name.rpartition("_")[0] for name in names]
    expected = group_advantages(batch.scored, names, within=[batch.prompt_of, middle], shrinkage=2.0)
    torch.testing.assert_close(result.advantages, expected.float())
    two = group_advantages(batch.scored, names, within=[batch.prompt_of], shrinkage=2.0)
    assert not torch.allclose(expected, two)


def test_batches_are_taken_apart_and_joined_with_their_clusters():
    names = ["a_0", "a_0", "a_1", "a_1", "b_0", "b_1", "b_1", "b_1"]
    batch = similar_batch([[[0], [0], [1], [1]], [[0], [1], [1], [1]]], names)
    again = join([batch.take([1]), batch.take([0])])
    assert again.similarity.labels[:, :, 0].tolist() == [[0, 1, 1, 1], [0, 0, 1, 1]]
    assert again.extra[LABELS] == names[4:] + names[:4]


def test_a_batch_without_clusters_is_refused():
    with pytest.raises(ConfigError, match="sampled without a grouper"):
        compute_group_advantages(make_batch(), short_recipe(), [1.0], grouping=GROUPINGS["similarity"])


def test_a_grouping_across_prompts_has_no_prompt_to_borrow_from():
    recipe = short_recipe({"advantages.grouping": "similarity", "advantages.shrinkage": 1.0})
    with pytest.raises(ConfigError, match="different prompts into one group"):
        compute_group_advantages(make_batch(), recipe, [1.0], grouping=lambda batch: [0] * len(batch))


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"advantages": {"shrinkage": 1.0}}, "there are no clusters to shrink"),
        (
            {"algorithm": "similarity_group_grpo", "advantages": {"shrinkage": 1.0, "baseline": "leave_one_out"}},
            "needs advantages.baseline 'mean'",
        ),
        (
            {
                "algorithm": "similarity_group_grpo",
                "advantages": {"shrinkage": 1.0},
                "grouping": {"skip_single_members": True},
            },
            "advantages.shrinkage is above 0",
        ),
        (
            {
                "algorithm": "similarity_group_grpo",
                "advantages": {"baseline": "none"},
                "grouping": {"skip_single_members": True},
            },
            "advantages.baseline is 'none'",
        ),
        (
            {"algorithm": "similarity_group_grpo", "sampling": {"samples_per_prompt": 1}},
            "every advantage is 0",
        ),
        ({"grouping": {"method": "averge"}}, "did you mean 'average'"),
        ({"grouping": {"max_groups": 1}}, "grouping.max_groups = 1"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(table, says):
    with pytest.raises(ConfigError, match=says):
        make_recipe(table)


def test_an_embedder_that_cannot_be_had_is_an_error_before_the_run_begins(tmp_path):
    with pytest.raises(ConfigError, match="wordlama"):
        small_trainer(tmp_path / "run", SIMILAR, {"grouping": {"embedder": "wordlama"}})
    assert not (tmp_path / "run").exists()


def test_an_evaluation_needs_no_embedder():
    recipe = small_recipe(SIMILAR, {"grouping": {"embedder": "wordlama"}})
    inputs = load_inputs(recipe, task=TASK, rewards=[even])
    assert len(load_components(recipe, inputs).held_out) == 2
    with pytest.raises(ConfigError, match="wordlama"):
        list(describe_run(small_recipe(SIMILAR, {"task": "quiz", "grouping": {"embedder": "wordlama"}}), timed=False))
