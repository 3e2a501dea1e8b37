"""GSM8K: rows, the two grades on answers written by hand, and invalid rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from groupwise.config import load_recipe, make_recipe
from groupwise.data import read_rows
from groupwise.errors import DataError, MissingExtraError
from groupwise.rewards import Scorer
from groupwise.tasks import load_task
from groupwise.tasks import rows as rows_module
from groupwise.tasks.gsm8k import FORMAT_WEIGHT, INSTRUCTION, calculator_conversation, grade, gsm8k_task, make_row

DATA = Path(__file__).parents[2].parent / "shared" / "data"
real = pytest.mark.skipif(not (DATA / "gsm8k_test.jsonl").exists(), reason="the files of GSM8K are not available")

QUESTION = "A robe takes 2 bolts of blue fiber and half that much white fiber.  How many bolts in total does it take? "
ROW = {"question": QUESTION, "answer": "It takes 2/2=<<2/2=1>>1 bolt.\nSo the total is 2+1=<<2+1=3>>3 bolts.\n#### 3"}

# answer, strict, lenient; the right number is 3.
ANSWERS = [
    ("2 / 2 = 1 and 2 + 1 = 3.\n#### 3", True, True),
    ("#### 3", True, True),
    ("####3", True, True),
    ("#### 3.0", True, True),
    ("#### $3", True, True),
    ("#### 3 bolts", True, True),
    ("#### 6/2", True, True),
    ("First #### 4, no:\n#### 3", True, True),  # the last one counts
    (r"It is \boxed{3}.", True, True),
    ("#### 4", False, False),
    ("It is 3.\n#### 4", False, False),  # the form wins over the text
    ("#### 30", False, False),
    ("#### -3", False, False),
    ("The answer is 3.", None, True),
    ("So it takes 2 + 1 = 3 bolts.", None, True),
    ("The answer is 3, which is more than 2.", None, True),
    ("### 3", None, True),
    ("##### 3", None, True),
    ("#### three\nthat is 3", None, True),
    ("The answer is 4.", None, False),
    ("It takes 3 bolts, or 4 with a spare.", None, False),  # the last number
    ("#### __import__('os').system('true')", None, None),  # never evaluated
    ("I do not know.", None, None),
    ("", None, None),
    ("####", None, None),
]


def test_a_row():
    row = make_row(ROW)
    assert row["prompt"] == QUESTION.strip() + "\n\n" + INSTRUCTION
    assert row["question"] == QUESTION
    assert row["answer"] == ROW["answer"]
    assert "#### 42" in INSTRUCTION


@pytest.mark.parametrize(("answer", "strict", "lenient"), ANSWERS)
def test_strict_and_lenient(answer, strict, lenient):
    assert grade(ROW, answer, strict=True) is strict
    assert grade(ROW, answer, strict=False) is lenient


def test_the_lenient_accuracy_is_never_smaller_than_the_strict_one():
    for answer, strict, _ in ANSWERS:
        if strict:
            assert grade(ROW, answer, strict=False)


def says(text, *expressions):
    calls = [
        {"type": "function", "function": {"name": "arithmetic", "arguments": {"expression": expression}}}
        for expression in expressions
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def told(text):
    return {"role": "tool", "content": text, "name": "arithmetic"}


@pytest.mark.parametrize(
    ("answer", "conversation"),
    [
        (
            ROW["answer"],
            [
                says("", "2/2"),
                told("1"),
                says("It takes 2/2=1 bolt.", "2+1"),
                told("3"),
                says("So the total is 2+1=3 bolts.\n#### 3"),
            ],
        ),
        (
            "First.\nIt is 2*3=<<2*3=6>>6 and 6*.5=<<6*.5=3>>3.\n#### 3",
            [says("First.", "2*3"), told("6"), says("", "6*.5"), told("3"), says("It is 2*3=6 and 6*.5=3.\n#### 3")],
        ),
        ("Nothing to do.\n#### 3", [says("Nothing to do.\n#### 3")]),
        ("2+2=<<2+2=5>>5\n#### 5", [says("2+2=<<2+2=5>>5\n#### 5")]),  # wrong
        ("<<two*3=6>>6\n#### 6", [says("<<two*3=6>>6\n#### 6")]),  # no expression
    ],
)
def test_an_answer_as_a_conversation_with_the_calculator(answer, conversation):
    assert calculator_conversation(answer) == conversation


def test_examples_with_the_calculator(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(ROW) + "\n" + json.dumps({**ROW, "answer": "#### 3"}) + "\n")
    data = {"task": "gsm8k", "data": {"train": str(tmp_path / "a.jsonl")}}
    assert gsm8k_task(make_recipe(data)).examples == ()
    task = gsm8k_task(make_recipe({**data, "environment": {"tools": ["arithmetic"]}}))
    assert task.examples == [(task.train[0]["prompt"], calculator_conversation(ROW["answer"]))]


@real
def test_nearly_all_answers_are_conversations_with_the_calculator():
    rows = read_rows(DATA / "gsm8k_train.jsonl")
    lengths = [len(calculator_conversation(row["answer"])) for row in rows]
    assert sum(length > 1 for length in lengths) > 0.95 * len(rows)


def test_the_rewards(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(ROW) + "\n")
    task = gsm8k_task(make_recipe({"task": "gsm8k", "data": {"train": str(tmp_path / "a.jsonl")}}))
    assert [(reward.name, reward.weight) for reward in task.rewards] == [("correct", 1.0), ("format", FORMAT_WEIGHT)]
    completions = ["2 + 1 = 3\n#### 3", "#### 4", "The answer is 3.", "#### 3\n#### 3"]
    columns = {"answer": [ROW["answer"]] * 4, "question": [QUESTION] * 4}
    scores = Scorer(task.rewards).score(["?"] * 4, completions, columns).rewards
    assert scores.tolist() == [[1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [1.0, 0.0]]


def test_the_task(tmp_path):
    for name, rows in (("train", [ROW] * 3), ("test", [ROW])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "recipe.toml").write_text('task = "gsm8k"\ndata = { train = "train.jsonl", held_out = "test.jsonl" }\n')
    task = load_task(load_recipe(tmp_path / "recipe.toml"))
    assert (task.name, len(task.train), len(task.held_out)) == ("gsm8k", 3, 1)
    assert task.metric == "accuracy"
    assert {name: graded(task.held_out[0], "#### 3") for name, graded in task.grades.items()} == {
        "accuracy": True,
        "accuracy_lenient": True,
    }
    assert [graded(task.held_out[0], "It is 3") for graded in task.grades.values()] == [None, True]
    assert task.train[2].where == "train.jsonl, line 3"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "#### 3"}, r"a.jsonl, line 2: GSM8K needs the column 'question' with a text, got None"),
        ({"question": "How many?"}, r"a.jsonl, line 2: GSM8K needs the column 'answer' with a text, got None"),
        (
            {"question": " ", "answer": "#### 3"},
            r"a.jsonl, line 2: GSM8K needs the column 'question' with a text, got ' '",
        ),
        (
            {"question": "How many?", "answer": 3},
            r"a.jsonl, line 2: GSM8K needs the column 'answer' with a text, got 3",
        ),
        (
            {"question": "How many?", "answer": "Three.\n#### three"},
            r"a.jsonl, line 2: the gold answer .*three.* is not a number and has none after '####'",
        ),
        ({"question": "How many?", "answer": "Three"}, r"a.jsonl, line 2: the gold answer .* is not a number"),
    ],
)
@pytest.mark.parametrize("part", ["train", "held_out"])
def test_a_bad_row_is_named_by_file_and_line(tmp_path, row, message, part):
    (tmp_path / "good.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "a.jsonl").write_text(json.dumps(ROW) + "\n" + json.dumps(row) + "\n")
    data = {"train": str(tmp_path / "good.jsonl"), "held_out": str(tmp_path / "good.jsonl")}
    with pytest.raises(DataError, match=message):
        gsm8k_task(make_recipe({"task": "gsm8k", "data": {**data, part: str(tmp_path / "a.jsonl")}}))


def test_rows_made_by_a_program():
    with pytest.raises(DataError, match="a row of GSM8K: GSM8K needs the column 'question'"):
        make_row({"answer": "#### 3"})


def test_from_the_hub(monkeypatch):
    asked = []

    def read(source, **options):
        asked.append((source, options["subset"], options["split"]))
        return [ROW]

    monkeypatch.setattr(rows_module, "read_rows", read)
    data = {"train": "openai/gsm8k", "train_split": "train", "held_out_split": "test"}
    gsm8k_task(make_recipe({"task": "gsm8k", "data": data}))
    gsm8k_task(make_recipe({"task": "gsm8k", "data": {"train": __file__, "held_out": "openai/gsm8k"}}))
    gsm8k_task(make_recipe({"task": "gsm8k", "data": {"train": "openai/gsm8k", "subset": "socratic"}}))
    assert asked == [
        ("openai/gsm8k", "main", "train"),
        ("openai/gsm8k", "main", "test"),
        (__file__, None, None),
        ("openai/gsm8k", "main", "test"),
        ("openai/gsm8k", "socratic", None),
    ]


def test_a_local_folder_of_the_hubs_name(tmp_path, monkeypatch):
    (tmp_path / "openai" / "gsm8k").mkdir(parents=True)
    (tmp_path / "openai" / "gsm8k" / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    monkeypatch.chdir(tmp_path)
    task = gsm8k_task(make_recipe({"task": "gsm8k", "data": {"train": "openai/gsm8k"}}))
    assert [row["question"] for row in task.train] == [ROW["question"]]


@pytest.mark.parametrize(
    "error", [DataError("the hub cannot be reached"), MissingExtraError("reading the hub", "datasets", "hub")]
)
def test_without_the_hub_the_error_says_which_files_are_needed(monkeypatch, error):
    def read(source, **options):
        raise error

    monkeypatch.setattr(rows_module, "read_rows", read)
    with pytest.raises(DataError, match=r"openai/gsm8k.*--data.train FILE.*question and answer.*#### N") as raised:
        gsm8k_task(make_recipe({"task": "gsm8k", "data": {"train": "openai/gsm8k", "held_out": "openai/gsm8k"}}))
    assert str(raised.value).endswith(str(error))
    with pytest.raises(type(error)) as raised:  # files of one's own have their own errors
        gsm8k_task(make_recipe({"task": "gsm8k", "data": {"train": "my/rows"}}))
    assert raised.value is error


@real
@pytest.mark.slow
def test_all_rows_of_the_data_set():
    data = {"train": str(DATA / "gsm8k_train.jsonl"), "held_out": str(DATA / "gsm8k_test.jsonl")}
    task = gsm8k_task(make_recipe({"task": "gsm8k", "data": data}))
    assert (len(task.train), len(task.held_out)) == (7473, 1319)
    assert task.held_out[0]["prompt"].startswith("Janet’s ducks lay 16 eggs per day.")
    # Every gold answer, given as an answer, is right by both grades; another row's is right only by chance.
    for row in task.held_out:
        assert grade(row, row["answer"], strict=True) is True
        assert grade(row, row["answer"], strict=False) is True
    shifted = zip(task.held_out, [*task.held_out[1:], task.held_out[0]], strict=True)
    assert sum(bool(grade(row, other["answer"], strict=True)) for row, other in shifted) < 0.05 * 1319


@real
def test_no_question_is_in_both_files():
    train, test = (
        {row["question"].strip() for row in read_rows(DATA / f"gsm8k_{part}.jsonl")} for part in ("train", "test")
    )
    assert not train & test
