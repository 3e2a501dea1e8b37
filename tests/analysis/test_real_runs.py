"""Every kind of run is read: all algorithms, supervised, on pairs alone, asynchronous; finished or not."""

from __future__ import annotations

import pytest

from groupwise.analysis.groups import groups_of, select
from groupwise.analysis.questions import Questions
from groupwise.analysis.run_reader import RunReader
from groupwise.analysis.tree import group_tree
from tests.training.monitor.test_descriptions import RUNS, run_similarity_groups
from tests.training.preference.test_run import offline_trainer, write_pairs

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("make", RUNS, ids=lambda make: make.__name__)
def test_any_kind_of_run(make, tmp_path):
    trainer = make(tmp_path / "run")
    trainer.run()
    reader = RunReader(tmp_path / "run")
    assert (reader.problems, reader.status) == ([], "finished")
    assert reader.step == reader.total_steps == trainer.step
    assert reader.metric == trainer.metric
    assert reader.parsed_recipe() == trainer.recipe
    samples = make.__name__ != "run_sft"
    assert reader.rollout_steps == ([*range(1, reader.step + 1)] if samples else [])
    assert reader.token_steps == ([1] if samples else [])
    assert reader.evaluation_steps == [row["step"] for row in reader.evaluations]
    questions = Questions(reader)
    assert questions.problems == []
    assert len(questions.held_out()) == len(trainer.components.held_out)
    if samples:
        rows = reader.rollouts(1)
        groups = groups_of(rows, reader.metric)
        assert sum(group.summary.samples for group in groups) == len(rows)
        assert select(groups).total == len(groups)
        tokens = {(row.prompt_number, row.sample): row for row in reader.tokens(1)}
        for group in groups:
            leaves = list(group_tree(group.samples, list(tokens.values())).leaves())
            assert sorted(sample for leaf in leaves for sample in leaf.samples) == [
                row["sample"] for row in group.samples
            ]
        for row in rows:
            if (found := tokens.get((row["prompt_number"], row["sample"]))) is not None:
                assert "".join(found.texts) == found.completion
                if "conversation" not in row:  # of a conversation it has a line for each turn
                    assert found.completion == row["completion"]
                assert len(found.ids) == len(found.ends) == len(found.policy_logps) == row["completion_tokens"]
        visited = {question.row for question in questions.training()}
        assert {row["row"] for row in rows if row["reward"] is not None} <= visited


def test_pairs_alone(tmp_path):
    trainer = offline_trainer(tmp_path / "run", write_pairs(tmp_path))
    trainer.run()
    reader = RunReader(tmp_path / "run")
    assert (reader.problems, reader.status, reader.step) == ([], "finished", reader.total_steps)
    assert (reader.rollout_steps, reader.token_steps, reader.evaluation_steps) == ([], [], [])
    assert Questions(reader).training() == []


def test_the_map_of_similarity_groups(tmp_path):
    run_similarity_groups(tmp_path / "run").run()
    rows = RunReader(tmp_path / "run").rollouts(1)
    for number in {row["prompt_number"] for row in rows}:
        group = [row for row in rows if row["prompt_number"] == number]
        assert all(row["similarity_group_labels"] for row in group)
        assert sum(row["map_x"] for row in group) == pytest.approx(0, abs=1e-9)
        places = {row["completion"]: (row["map_x"], row["map_y"]) for row in group}
        for row in group:  # equal completions have one place
            assert (row["map_x"], row["map_y"]) == pytest.approx(places[row["completion"]], abs=1e-6)
