"""The summary of a run, by hand: before and after, curves in numbers, samples, time; and what cannot be read."""

from __future__ import annotations

import json
import math

import pytest

from groupwise.analysis.run_reader import RunReader
from groupwise.analysis.summary import Measurement, summarize
from tests.analysis.written_runs import sample, write_run


def accuracy(value):
    return {"accuracy": value, "accuracy_low": value - 0.1, "accuracy_high": value + 0.1, "accuracy_no_answer": 0.0}


def held_out(rights, samples=1):
    """One row per answer; ``rights`` has one entry per question, or per question and sample."""
    return [
        {
            "row": index // samples,
            "sample": index % samples,
            "prompt": f"question {index // samples}",
            "completion": f"says {right}",
            "completion_tokens": 2,
            "stop_reason": "eos",
            "grade/accuracy": right,
        }
        for index, right in enumerate(rights)
    ]


def summary_of(folder, **contents):
    return summarize(RunReader(write_run(folder, **contents)))


def test_before_and_after(tmp_path):
    evaluations = {0: accuracy(0.25), 2: accuracy(0.75), 4: {**accuracy(0.5), "mean_length": 7.5}}
    folder = write_run(tmp_path / "run", steps=[{"reward": 0.1}] * 4, evaluations=evaluations)
    (folder / "best.json").write_text(json.dumps({"metric": "accuracy", "step": 2}))
    main, *others = summarize(RunReader(folder)).held_out
    assert (main.name, main.is_share) == ("accuracy", True)
    assert main.first == Measurement(0, 0.25, 0.15, 0.35)
    assert (main.last.step, main.last.value, main.best.step, main.best.value) == (4, 0.5, 2, 0.75)
    assert [(other.name, other.is_share) for other in others] == [("accuracy_no_answer", True), ("mean_length", False)]
    assert others[1].first == others[1].last == Measurement(4, 7.5)
    assert others[1].best is None


def test_the_same_questions_before_and_after(tmp_path):
    """Four of six are gained and one is lost: McNemar gives 2 · (1 + 5) / 2⁵."""
    before, after = [True, False, False, True, False, None], [True, True, True, False, True, True]
    contents = {
        "evaluations": {0: accuracy(1 / 3), 2: accuracy(5 / 6)},
        "answers": {0: held_out(before), 2: held_out(after)},
    }
    change = summary_of(tmp_path / "run", steps=[{"reward": 0.1}] * 2, **contents).paired
    assert (change.first_step, change.last_step, change.questions, change.gained, change.lost) == (0, 2, 6, 4, 1)
    assert change.p_value == 12 / 32
    assert change.difference.estimate == pytest.approx(3 / 6)
    assert change.test == "McNemar's test"
    (lost,) = change.lost_examples
    assert (lost.row, lost.prompt, lost.before, lost.after) == (3, "question 3", "says True", "says False")
    assert [example.row for example in change.gained_examples] == [1, 2, 4]


def test_several_samples_per_question_have_a_sign_flip_test(tmp_path):
    """Shares 0 → ½, ½ → 1 and 0 → ½: all differences have one sign, which 2 of 8 sign patterns give."""
    before, after = [False, False, True, False, False, False], [True, False, True, True, False, True]
    answers = {0: held_out(before, samples=2), 1: held_out(after, samples=2)}
    evaluations = {0: accuracy(1 / 6), 1: accuracy(2 / 3)}
    change = summary_of(tmp_path / "run", steps=[{"reward": 0.1}], evaluations=evaluations, answers=answers).paired
    assert (change.questions, change.gained, change.lost, change.test) == (3, 3, 0, "a sign-flip test")
    assert change.p_value == 2 / 8
    assert change.difference.estimate == pytest.approx(0.5)


def test_curves_in_numbers(tmp_path):
    steps = [{"reward": float(number), "kl": 0.0, "entropy": math.nan if number == 3 else 1.0} for number in range(20)]
    summary = summary_of(tmp_path / "run", steps=steps)
    reward, entropy = summary.curves
    assert (reward.name, reward.start, reward.end) == ("reward", 0.5, 18.5)  # the first and the last two of twenty
    assert (reward.lowest, reward.highest) == ((1, 0.0), (20, 19.0))
    assert (entropy.name, entropy.start, entropy.highest) == ("entropy", 1.0, (1, 1.0))
    assert "mean reward" in reward.meaning


def test_the_best_and_the_worst_samples_are_of_different_prompts(tmp_path):
    """Of equal rewards the one with the larger advantage is the best, and that with the smallest the worst."""
    last = [sample(prompt, number, reward=float(number == 0), advantage=prompt * (1.0 if number == 0 else -1.0))
            for prompt in range(5) for number in range(2)]  # fmt: skip
    rollouts = {1: [sample(0, 0, 0.5), sample(0, 1, None)], 3: last}
    summary = summary_of(tmp_path / "run", steps=[{"reward": 0.1}] * 3, rollouts=rollouts)
    assert [entry.step for entry in summary.samples] == [1, 3]
    first, latest = summary.samples
    assert [row["completion"] for row in first.best] == [row["completion"] for row in first.worst] == ["answer 0.0"]
    assert [row["completion"] for row in latest.best] == ["answer 4.0", "answer 3.0", "answer 2.0"]
    assert [row["completion"] for row in latest.worst] == ["answer 4.1", "answer 3.1", "answer 2.1"]


def test_time_tokens_and_memory(tmp_path):
    steps = [
        {"step_time": 2.0, "time/generate": 1.0, "time/train": 0.5, "memory/train": size, "num_tokens": 100 * size}
        for size in (1, 3, 2)
    ]
    time = summary_of(tmp_path / "run", steps=steps).time
    assert (time.seconds, time.stages, time.tokens, time.memory) == (6.0, {"generate": 3.0, "train": 1.5}, 300, 3)


def test_questions_by_status(tmp_path):
    folder = write_run(tmp_path / "run", steps=[{"reward": 0.1}])
    statuses = ["learnt", "never", "learnt", "forgotten", "always"]
    lines = [json.dumps({"row": row, "status": status}) for row, status in enumerate(statuses)]
    (folder / "questions.jsonl").write_text("\n".join(lines))
    questions = summarize(RunReader(folder)).questions
    assert questions.counts == {"always": 1, "learnt": 2, "forgotten": 1, "never": 1}
    assert (questions.learnt, questions.forgotten) == ([0, 2], [3])
    (folder / "questions.jsonl").write_text(lines[0] + "\n{broken")
    assert summarize(RunReader(folder)).questions is None


def test_settings_that_differ_and_facts(tmp_path):
    summary = summary_of(tmp_path / "run", settings={"loss": {"kl_coef": 0.3}}, steps=[{"reward": 0.1}])
    assert ("loss.kl_coef", 0.0, 0.3) in summary.settings
    assert summary.facts["steps"] == "1 of 1, finished"
    assert (summary.facts["training rows"], summary.facts["rewards"]) == ("16", "correct")


def test_damaged_files_are_named_and_the_rest_is_shown(tmp_path):
    rollouts = {1: [sample(0, 0, 1.0)], 2: [sample(0, 0, 0.0)]}
    contents = {
        "evaluations": {0: accuracy(0.2), 2: accuracy(0.4)},
        "answers": {0: held_out([True]), 2: held_out([False])},
    }
    folder = write_run(tmp_path / "run", steps=[{"reward": 0.1}] * 2, rollouts=rollouts, **contents)
    for name in ("rollouts", "evaluations"):
        path = folder / name / "step-000002.parquet"
        path.write_bytes(path.read_bytes()[:40])
    summary = summarize(RunReader(folder))
    assert [entry.step for entry in summary.samples] == [1]
    assert summary.paired is None
    assert summary.held_out[0].last.value == 0.4
    assert sum("step-000002.parquet" in problem for problem in summary.problems) == 2


def test_a_run_that_has_only_begun(tmp_path):
    folder = write_run(tmp_path / "run", finished=False)
    for name in ("recipe.json", "inputs.json", "versions.json", "metrics.jsonl"):
        (folder / name).unlink()
    summary = summarize(RunReader(folder))
    assert (summary.step, summary.held_out, summary.curves, summary.samples, summary.time) == (0, [], [], [], None)
    assert json.loads(json.dumps(summary.as_dict()))["settings"] == []
