from __future__ import annotations

import pytest

from groupwise.analysis.questions import Questions, count_statuses
from groupwise.analysis.run_reader import RunReader
from groupwise.rundir import RunDir, json_bytes
from groupwise.training.store.rollout_files import ROLLOUTS, RolloutWriter
from groupwise.training.store.token_files import EVALUATIONS


def write(folder, step: int, rows: dict[int, list], kind: str = ROLLOUTS, column: str = "grade/right") -> None:
    """A file with the results of some rows, in this order."""
    cells = [(number, row, value) for number, (row, values) in enumerate(rows.items()) for value in values]
    table = {
        "step": [step for _ in cells],
        "row": [row for _, row, _ in cells],
        column: [value for *_, value in cells],
        "reward": [float(bool(value)) if column != "reward" else value for *_, value in cells],
    }
    if kind == ROLLOUTS:
        table["prompt_number"] = [number for number, *_ in cells]
    RolloutWriter(folder / kind).write(step, table)


@pytest.fixture
def folder(tmp_path):
    with RunDir.create(tmp_path / "run") as run:
        run.metrics.record(0, {"eval/right": 0.5, "eval/right_low": 0.4})
    write(run.path, 1, {3: [True, True], 5: [False, None], 6: [True, False]})
    write(run.path, 2, {7: [True, False], 5: [True, True]})
    write(run.path, 3, {6: [False, None], 3: [True, False]})
    return run.path


def test_histories_by_hand(folder):
    questions = Questions(RunReader(folder))
    assert (questions.graded_by, questions.scale) == ("right", None)
    found = {question.row: question for question in questions.training()}
    assert list(found) == [3, 5, 6, 7]
    assert (found[3].steps, found[3].prompt_numbers, found[3].values) == ([1, 3], [0, 1], [1.0, 0.5])
    assert [found[row].status for row in found] == ["always", "learnt", "forgotten", "always"]
    assert count_statuses(found.values()) == {"always": 2, "learnt": 1, "forgotten": 1}
    assert questions.held_out() == []
    assert found[5].as_dict()["values"] == [0.0, 1.0]


def test_new_rewound_and_damaged_steps(folder, monkeypatch):
    import groupwise.analysis.questions as module

    read: list[str] = []
    original = module.read_columns
    monkeypatch.setattr(
        module, "read_columns", lambda path, columns: (read.append(path.name), original(path, columns))[1]
    )
    questions = Questions(RunReader(folder))
    assert len(read) == 3
    assert not questions.update()
    assert len(read) == 3
    write(folder, 4, {5: [False, False]})
    assert questions.update()
    assert read[3:] == ["step-000004.parquet"]
    assert [question.status for question in questions.training() if question.row == 5] == ["forgotten"]
    for step in (3, 4):
        (folder / ROLLOUTS / f"step-00000{step}.parquet").unlink()
    write(folder, 2, {5: [False, True]})
    assert questions.update()
    assert {question.row: question.values for question in questions.training()}[5] == [0.0, 0.5]
    (folder / ROLLOUTS / "step-000002.parquet").write_bytes(b"PAR1")
    assert questions.update()
    assert [question.steps for question in questions.training()] == [[1], [1], [1]]
    assert "step-000002.parquet is damaged" in questions.problems[0]


def test_held_out_questions(folder):
    write(folder, 0, {0: [False], 1: [True]}, EVALUATIONS)
    write(folder, 3, {0: [True], 1: [None]}, EVALUATIONS)
    found = Questions(RunReader(folder)).held_out()
    assert [(question.row, question.steps, question.values) for question in found] == [
        (0, [0, 3], [0.0, 1.0]), (1, [0, 3], [1.0, 0.0]),
    ]  # fmt: skip
    assert [question.status for question in found] == ["learnt", "forgotten"]


def test_rewards_in_place_of_grades(tmp_path):
    with RunDir.create(tmp_path / "run") as run:
        run.metrics.record(1, {"reward": 0.0})
    write(run.path, 1, {0: [0.0, 0.5], 1: [None, None], 2: [1.0, 1.0]}, column="reward")
    questions = Questions(RunReader(run.path))
    assert (questions.graded_by, questions.scale) == (None, None)  # from 0 to 1 already
    assert [(question.row, question.values) for question in questions.training()] == [(0, [0.25]), (2, [1.0])]
    write(run.path, 2, {0: [-3.0, -5.0], 2: [0.0, None]}, column="reward")
    assert questions.update()
    assert questions.scale == (-4.0, 1.0)
    assert [question.values for question in questions.training()] == [[0.85, 0.0], [1.0, 0.8]]


def test_without_rollouts_the_log_is_used(folder):
    for path in (folder / ROLLOUTS).iterdir():
        path.unlink()
    questions = Questions(RunReader(folder))
    assert questions.training() == []
    records = [
        {"row": 0, "visits": 0, "history": [], "status": "unseen"},
        {"row": 1, "visits": 2, "history": [0.0, 1.0], "status": "learnt"},
    ]
    (folder / "questions.jsonl").write_bytes(b"".join(json_bytes(record) + b"\n" for record in records))
    (question,) = questions.training()
    assert (question.row, question.steps, question.values, question.status) == (1, [], [0.0, 1.0], "learnt")
    (folder / "questions.jsonl").write_bytes(b'{"row": 1')
    assert questions.training() == []
