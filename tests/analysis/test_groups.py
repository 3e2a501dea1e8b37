from __future__ import annotations

from itertools import islice

import pytest

from groupwise.analysis.groups import (
    FILTERS,
    SKIP_REASONS,
    SORTS,
    Visit,
    follow,
    groups_of,
    main_grade,
    search_run,
    select,
)
from groupwise.analysis.questions import Questions
from groupwise.analysis.run_reader import RunReader
from groupwise.core.masks import validity_reasons
from groupwise.errors import InputError
from groupwise.rundir import RunDir
from groupwise.training.monitor.checks.policy import SAMPLE_MASKS
from groupwise.training.store.rollout_files import COLUMNS, ROLLOUTS, RolloutWriter

# Four prompts of three samples: rewards, grades, and what else matters.
REWARDS = [[1.0, 0.0, 0.0], [0.5, 0.5, 0.5], [0.0, None, 0.25], [0.0, 0.0, 0.1]]
GRADES = [[True, False, None], [True, True, True], [False, None, False], [False, False, False]]


def table(step: int = 1) -> dict[str, list]:
    cells = [(prompt, sample) for prompt in range(4) for sample in range(3)]
    columns = {
        "step": [step for _ in cells],
        "prompt_number": [prompt for prompt, _ in cells],
        "row": [prompt + 10 * (step - 1) % 20 for prompt, _ in cells],
        "sample": [sample for _, sample in cells],
        "group": [prompt for prompt, _ in cells],
        "prompt": [f"Question {prompt}?" for prompt, _ in cells],
        "completion": [f"step {step} says {prompt}{'abc'[sample]}" for prompt, sample in cells],
        "reward": [REWARDS[prompt][sample] for prompt, sample in cells],
        "reward/right": [REWARDS[prompt][sample] for prompt, sample in cells],
        "grade/other": [True for _ in cells],
        "grade/right": [GRADES[prompt][sample] for prompt, sample in cells],
        "advantage": [(REWARDS[prompt][sample] or 0.0) * (-2 if prompt == 3 else 1) for prompt, sample in cells],
        "contributes": [prompt != 1 for prompt, _ in cells],
        "masked_out": [{1: "equal_rewards", 5: "equal_rewards", 7: "dropped"}.get(i) for i in range(12)],
        "prompt_tokens": [9 for _ in cells],
        "completion_tokens": [prompt + sample for prompt, sample in cells],
        "stop_reason": ["length" if (prompt, sample) == (3, 2) else "eos" for prompt, sample in cells],
    }
    return {**columns, "pair": ["chosen" if i == 9 else "rejected" if i == 10 else None for i in range(12)]}


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    folder = tmp_path_factory.mktemp("groups") / "run"
    with RunDir.create(folder) as run:
        for step in (1, 2, 3):
            RolloutWriter(folder / ROLLOUTS).write(step, table(step))
            run.metrics.record(step, {"reward": 0.5})
        run.metrics.record(3, {"eval/right": 0.5})
    return RunReader(folder)


@pytest.fixture(scope="module")
def groups(reader):
    return groups_of(reader.rollouts(1), reader.metric)


def test_summaries_by_hand(groups):
    first, second, third, last = (group.summary for group in groups)
    assert (first.samples, first.mean, first.best, first.right, first.no_answer) == (3, pytest.approx(1 / 3), 0, 1, 1)
    assert first.spread == pytest.approx(((2 / 3) ** 2 / 2 + 2 * (1 / 3) ** 2 / 2) ** 0.5)
    assert (first.truncated, first.contributing, first.mean_length, first.largest_advantage) == (0, 3, 1.0, 1.0)
    assert (second.spread, second.contributing, second.right) == (0.0, 0, 3)
    assert (third.mean, third.best, third.no_answer) == (0.125, 2, 1)  # a failed reward does not count
    assert (last.truncated, last.largest_advantage, last.best) == (1, 0.2, 2)
    assert [group.prompt for group in groups] == [f"Question {number}?" for number in range(4)]
    assert groups[0].as_dict()["summary"]["right"] == 1


def test_the_grade(reader):
    rows = reader.rollouts(1)
    assert main_grade(rows, "right") == "grade/right"
    assert main_grade(rows, None) == main_grade(rows, "unknown") == "grade/other"
    assert main_grade([], "right") is None
    ungraded = groups_of([{k: v for k, v in row.items() if not k.startswith("grade/")} for row in rows], "right")
    assert (ungraded[0].summary.right, ungraded[0].summary.no_answer) == (None, None)
    assert [group.prompt_number for group in select(ungraded, filters=["disagreement"]).groups] == [0, 2, 3]


@pytest.mark.parametrize(
    ("name", "prompts"),
    [
        ("disagreement", [0]),  # in group 2 one is wrong and one has no answer
        ("no_answer", [0, 2]),
        ("none_right", [2, 3]),
        ("zero_spread", [1]),
        ("truncated", [3]),
        ("masked", [2]),  # equal rewards are not a mask
        ("failed", [2]),
        ("pairs", [3]),
    ],
)
def test_filters(groups, name, prompts):
    selection = select(groups, filters=[name])
    assert [group.prompt_number for group in selection.groups] == prompts
    assert selection.counts[name] == selection.total == len(prompts)
    assert set(selection.counts) == set(FILTERS)


@pytest.mark.parametrize(
    ("name", "prompts"),
    [
        ("prompt", [0, 1, 2, 3]),
        ("spread", [0, 2, 3, 1]),
        ("reward", [1, 0, 2, 3]),
        ("length", [3, 2, 1, 0]),
        ("advantage", [0, 1, 2, 3]),
    ],
)
def test_orders(groups, name, prompts):
    assert [group.prompt_number for group in select(groups, sort=name).groups] == prompts
    assert [group.prompt_number for group in select(groups, sort=name, reverse=True).groups] == prompts[::-1]
    assert len(SORTS) == 5


def test_filters_search_and_pages_together(groups):
    both = select(groups, filters=["no_answer", "failed"])
    assert [group.prompt_number for group in both.groups] == [2]
    assert both.counts["no_answer"] == 2  # counts are those of the step
    assert [group.prompt_number for group in select(groups, search="SAYS 2B").groups] == [2]
    assert select(groups, search="question").total == 4
    assert select(groups, search="nowhere").groups == []
    page = select(groups, page=1, size=3)
    assert ([group.prompt_number for group in page.groups], page.total, page.pages) == ([3], 4, 2)
    assert select(groups, page=99, size=3).page == 1
    assert select([], page=-5).pages == 1
    with pytest.raises(InputError, match=r"'disagree'.*did you mean 'disagreement'"):
        select(groups, filters=["disagree"])
    with pytest.raises(InputError, match="unknown order"):
        select(groups, sort="rewards")


def test_search_over_the_run_newest_first_and_lazily(reader):
    (match,) = search_run(reader, "STEP 2 says 1B")
    assert (match.step, match.prompt_number, match.sample) == (2, 1, 1)
    assert (match.before, match.text, match.after) == ("", "step 2 says 1b", "")
    found = list(search_run(reader, "question 3"))
    assert [(match.step, match.sample) for match in found] == [(3, None), (2, None), (1, None)]  # once per prompt
    assert [match.step for match in search_run(reader, "question 3", before=2)] == [1]
    assert list(search_run(reader, "")) == []
    read: list[int] = []
    rollouts = reader.rollouts
    try:
        reader.rollouts = lambda step, columns=None: (read.append(step), rollouts(step, columns))[1]
        assert len(list(islice(search_run(reader, "says"), 12))) == 12
    finally:
        del reader.rollouts
    assert read == [3]


def test_search_with_letters_that_change_their_length(tmp_path):
    with RunDir.create(tmp_path / "run") as run:
        cells = {"prompt_number": [0], "sample": [0], "prompt": ["Straße"], "completion": ["x"]}
        RolloutWriter(run.path / ROLLOUTS).write(1, cells)
        (match,) = search_run(RunReader(run.path), "STRASSE")
    assert match.before + match.text + match.after == "Straße"


def test_one_row_through_the_run(reader):
    visits = Questions(reader).visits(1)
    assert visits == [Visit(1, 1), Visit(3, 1)]  # step 2 has other rows
    seen = list(follow(reader, visits, reader.metric))
    assert [(group.step, group.row, group.summary.right) for group in seen] == [(1, 1, 3), (3, 1, 3)]
    assert [group.step for group in follow(reader, [Visit(1, 1), Visit(77, 0)])] == [1]  # deleted meanwhile


def test_every_reason_has_words():
    import torch

    lengths = torch.tensor([1])
    names = validity_reasons(lengths=lengths, min_length=1, has_answer=lengths, repetition=lengths)
    assert {*names, *SAMPLE_MASKS, "equal_rewards", "no_advantage", "no_pair"} == set(SKIP_REASONS)
    assert "masked_out" in COLUMNS
