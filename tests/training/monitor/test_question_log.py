"""The log of training questions: visits, status and resumption."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from groupwise.data import PassRates
from groupwise.errors import CheckpointError
from groupwise.tasks import Task
from groupwise.training.monitor.question_log import QUESTIONS, QuestionLog, status_of, summarise
from groupwise.training.rollout.advantages import compute_group_advantages
from tests.training.factories import make_batch, short_recipe
from tests.training.runs import check_same, run_steps, small_trainer

ROWS = [{"prompt": f"Say number {n}: ", "id": f"q{n}", "category": "sums" if n % 2 else "words"} for n in range(5)]


def read_questions(folder):
    return [json.loads(line) for line in (folder / QUESTIONS).read_text().splitlines()]


@pytest.mark.parametrize(
    ("history", "status"),
    [
        ([], "unseen"),
        ([0.5], "always"),
        ([1.0, 0.5, 0.75], "always"),
        ([0.0], "never"),
        ([0.0, 0.0], "never"),
        ([0.25], "between"),
        ([0.0, 0.25], "between"),
        ([0.25, 0.5], "learnt"),
        ([0.0, 1.0, 0.0, 0.5], "learnt"),
        ([0.5, 0.25], "forgotten"),
        ([0.0, 1.0, 0.0], "forgotten"),
        ([1.0, 0.0, 1.0], "between"),
    ],
)
def test_status(history, status):
    assert status_of(history) == status


def visit(log, right, rows, *, samples=4, dropped=(), rewards=None):
    """Observe a batch with ``right[i]`` right answers to the prompt i."""
    flat = iter([number < count for count in right for number in range(samples)])
    columns = rewards or [[1.0, 0.0, 0.0, 0.5]] * len(rows)
    batch = replace(make_batch(columns, [[2] * samples] * len(rows), dropped=dropped), row_numbers=list(rows))
    grades = {"accuracy": lambda row, text: next(flat) or None} if right else None
    log.observe(
        batch,
        compute_group_advantages(batch, short_recipe(), [1.0], grades=grades, metric="accuracy" if right else None),
    )


def test_the_table_by_hand(tmp_path):
    log = QuestionLog(ROWS, "accuracy")
    visit(log, [1, 4, 0], [0, 1, 2])
    visit(log, [3, 1], [0, 1])
    log.write(tmp_path)
    records = read_questions(tmp_path)
    assert records[0] == {
        "row": 0,
        "id": "q0",
        "category": "words",
        "visits": 2,
        "first": 0.25,
        "last": 0.75,
        "best": 0.75,
        "status": "learnt",
        "history": [0.25, 0.75],
    }
    assert [record["status"] for record in records] == ["learnt", "forgotten", "never", "unseen", "unseen"]
    assert (records[3]["first"], records[3]["best"], records[3]["history"]) == (None, None, [])
    assert summarise(records) == "questions: 1 learnt, 1 forgotten, 1 never solved, 2 unseen"
    assert summarise([{"status": "always"}] * 1200 + [{"status": "between"}]) == (
        "questions: 1,200 always right, 1 in between"
    )
    assert summarise([]) == "questions: none"


def test_without_a_grade_the_mean_reward_is_used_and_dropped_answers_are_ignored():
    log = QuestionLog(ROWS)
    visit(log, [], [2, 3], rewards=[[1.0, 0.0, 0.0, 0.5], [2.0, 2.0, 0.0, 0.0]], dropped=[1, 6, 7])
    assert log.state() == {"2": [0.5], "3": [2.0]}
    visit(log, [], [2], rewards=[[1.0] * 4], dropped=range(4))
    assert log.state()["2"] == [0.5]  # no scored answer: no visit


def test_the_state_is_json_and_drops_later_visits():
    log = QuestionLog(ROWS, "accuracy")
    visit(log, [1, 2], [0, 1])
    saved = json.loads(json.dumps(log.state()))
    visit(log, [4], [0])
    assert log.state() != saved
    log.load_state(saved)
    assert log.state() == saved


def first_letter(row, text):
    return bool(text) and ord(text[0]) % 2 == 0


TASK = Task("asked", ROWS, ROWS[:1], grades={"accuracy": first_letter}, metric="accuracy")
CHANGES = {"train": {"steps": 4, "batch_size": 2}, "sampling": {"max_new_tokens": 2}, "evaluate": {"every": 0}}


@pytest.mark.slow
def test_a_resumed_run_has_the_same_log(tmp_path):
    """Steps after the last checkpoint are repeated, and count once."""
    changes = [CHANGES, {"run": {"checkpoint_every": 2}}]
    uninterrupted = small_trainer(tmp_path / "uninterrupted", *changes, task=TASK)
    uninterrupted.run()
    run_steps(small_trainer(tmp_path / "run", *changes, task=TASK), 3)
    small_trainer(tmp_path / "run", *changes, task=TASK, resume=True).run()
    check_same(tmp_path / "uninterrupted", tmp_path / "run", 4)
    records = read_questions(tmp_path / "run")
    assert records == read_questions(tmp_path / "uninterrupted")
    assert sum(record["visits"] for record in records) == 8
    assert summarise(records) in uninterrupted.display.summary


def test_resampled_prompts_count_as_visits(tmp_path):
    """With two rounds of resampling and no learning signal, every prompt of every round counts."""
    task = Task("asked", ROWS, grades={"accuracy": lambda *_: True}, metric="accuracy")
    trainer = small_trainer(
        tmp_path / "run",
        CHANGES,
        {"train": {"steps": 1, "resample_rounds": 2}},
        task=task,
        rewards=[lambda completions, **_: [1.0] * len(completions)],
    )
    trainer.run()
    records = read_questions(tmp_path / "run")
    assert sum(record["visits"] for record in records) == 2 + 2 + 2
    assert {record["status"] for record in records} == {"always"}


def test_pass_rates_follow_from_the_log(tmp_path):
    """After a resume they are those of the visits in the checkpoint, and later visits are forgotten."""
    rates = PassRates(len(ROWS), 0.5)
    log = QuestionLog(ROWS, "accuracy", rates)
    visit(log, [1, 4, 0], [0, 1, 2])
    visit(log, [3, 1], [0, 1])
    assert [rates.of(row) for row in range(3)] == [0.5 * 0.25 + 0.5 * 0.75, 0.5 * 1.0 + 0.5 * 0.25, 0.0]
    state = json.loads(json.dumps(log.state()))
    log.write(tmp_path)
    assert [record["pass_rate"] for record in read_questions(tmp_path)][:3] == [0.5, 0.625, 0.0]
    assert read_questions(tmp_path)[3]["pass_rate"] is None
    assert [record["pass_rate"] for record in log.table()] == [r["pass_rate"] for r in read_questions(tmp_path)]
    before = rates.visited().tolist()
    visit(log, [4], [2])
    log.load_state(state)
    assert rates.visited().tolist() == before
    with pytest.raises(CheckpointError, match="more rows than"):
        log.load_state({str(len(ROWS)): [0.5]})
