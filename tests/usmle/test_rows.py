"""Multiple-choice rows in every published format, and invalid questions."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from groupwise.config import make_recipe
from groupwise.data import Row
from groupwise.errors import DataError
from groupwise.tasks import load_task
from groupwise.usmle.rows import check_options, question_of, read_questions

DATA = Path(__file__).parents[2].parent / "shared" / "data"
TEST, POOL, MEDMCQA = "medqa_usmle_4opt_test.jsonl", "medqa_usmle_train_pool.jsonl", "medmcqa_dev.jsonl"
real = pytest.mark.skipif(not (DATA / TEST).exists(), reason="the data sets of medical questions are not available")

TEXTS = {"A": "Sinus node", "B": "Mitral valve", "C": "Left atrium", "D": "Aortic root"}
MEDQA = {
    "question": "Which structure sets the pace of the heart?",
    "answer": "Sinus node",
    "options": TEXTS,
    "meta_info": "step1",
    "answer_idx": "A",
    "metamap_phrases": ["structure", "pace", "heart"],
}
MEDQA_FIVE = {**MEDQA, "options": {**TEXTS, "E": "Vena cava"}, "answer": "Vena cava", "answer_idx": "E"}
MEDMCQA_ROW = {
    "question": "Which of these is a loop diuretic",
    "exp": "Furosemide acts on the ascending limb.",
    "cop": 4,
    "opa": "Amiloride",
    "opb": "Mannitol",
    "opc": "Metolazone",
    "opd": "Furosemide",
    "subject_name": "Pharmacology",
    "topic_name": None,
    "id": "0a1b",
    "choice_type": "single",
}
MMLU_ROWS = [
    ["Which bone is in the arm?", "Ulna", "Tibia", "Fibula", "Femur", "A"],
    [
        'The "funny bone", so called, is a',
        "nerve, not a bone",
        "bone",
        'joint of the "elbow"',
        "muscle\nor tendon",
        "C",
    ],
]
OUR_FORMAT = {
    "question": "A 65-year-old man presents with...",
    "options": {
        "A": "Myocardial infarction",
        "B": "Pulmonary embolism",
        "C": "Pneumothorax",
        "D": "Aortic dissection",
    },
    "answer": "D",
    "explanation": "...",
}


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def mmlu(path, *rows):
    """A file as MMLU has them: without a header."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
    return str(path)


def parquet(path, *rows):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return str(path)


def read(source, skipped=None, **data):
    return read_questions(make_recipe({"task": "usmle", "data": {"train": source, **data}}), skipped)[0]


def right_text(row):
    return row["options"][row["answer"]]


# --- the published formats --------------------------------------------------------------------------------------------


def test_medqa_with_four_and_five_options(tmp_path):
    four, five = read(jsonl(tmp_path / "medqa.jsonl", MEDQA, MEDQA_FIVE))
    assert four == {
        "question": MEDQA["question"],
        "options": TEXTS,
        "answer": "A",
        "explanation": None,
        "category": None,
        "step": "step1",
        "id": None,
        "metadata": {"metamap_phrases": ["structure", "pace", "heart"]},
    }
    assert (list(five["options"]), five["answer"]) == (list("ABCDE"), "E")
    assert (four.where, five.where) == ("medqa.jsonl, line 1", "medqa.jsonl, line 2")


def test_medqa_with_its_options_in_a_list(tmp_path):
    """The format of bigbio."""
    listed = [{"key": letter, "value": text} for letter, text in TEXTS.items()]
    (row,) = read(parquet(tmp_path / "medqa.parquet", {**MEDQA, "options": listed}))
    assert (row["options"], row["answer"], row.where) == (TEXTS, "A", "medqa.parquet, row 1")


def test_options_that_arrow_fills_with_nulls(tmp_path):
    """A column of structs has the same letters in every row; missing options are null."""
    four, five = read(parquet(tmp_path / "medqa.parquet", MEDQA, MEDQA_FIVE))
    assert (list(four["options"]), list(five["options"])) == (list("ABCD"), list("ABCDE"))


def test_an_answer_by_its_text_alone(tmp_path):
    without = {key: value for key, value in MEDQA.items() if key != "answer_idx"}
    (row,) = read(jsonl(tmp_path / "a.jsonl", {**without, "answer": " Left atrium "}))
    assert row["answer"] == "C"


def test_options_that_are_letters_themselves(tmp_path):
    """Places in a picture, as in a few questions of MedQA."""
    shown = {"A": "B", "B": "C", "C": "D", "D": "A"}
    (row,) = read(jsonl(tmp_path / "a.jsonl", {**MEDQA, "options": shown, "answer": "B", "answer_idx": "A"}))
    assert (row["options"], row["answer"]) == (shown, "A")
    (row,) = read(jsonl(tmp_path / "b.jsonl", {**MEDQA, "options": shown, "answer": "B", "answer_idx": None}))
    assert row["answer"] == "B"  # without answer_idx it is a letter


def test_medmcqa_original_files(tmp_path):
    first, last = read(jsonl(tmp_path / "dev.jsonl", {**MEDMCQA_ROW, "cop": 1}, MEDMCQA_ROW))
    assert (right_text(first), right_text(last)) == ("Amiloride", "Furosemide")
    assert last["options"] == {"A": "Amiloride", "B": "Mannitol", "C": "Metolazone", "D": "Furosemide"}
    assert last["explanation"] == "Furosemide acts on the ascending limb."
    assert (last["category"], last["step"], last["id"]) == ("Pharmacology", None, "0a1b")
    assert last["metadata"] == {"topic_name": None, "choice_type": "single"}


def test_medmcqa_saved_from_the_hub(tmp_path):
    rows = read(parquet(tmp_path / "validation.parquet", {**MEDMCQA_ROW, "cop": 0}, {**MEDMCQA_ROW, "cop": 3}))
    assert [right_text(row) for row in rows] == ["Amiloride", "Furosemide"]


@pytest.mark.parametrize(("cops", "right"), [("14", "AD"), ("03", "AD"), ("12", "AB")])
def test_medmcqa_as_csv_has_numbers_as_texts(tmp_path, cops, right):
    """An option's text may look like the number of another option."""
    lines = [f"Which?,3,1,2,4,{cop}\n" for cop in cops]
    (tmp_path / "dev.csv").write_text("question,opa,opb,opc,opd,cop\n" + "".join(lines))
    assert [row["answer"] for row in read(str(tmp_path / "dev.csv"))] == list(right)


def test_medmcqa_with_a_cop_that_is_not_a_number(tmp_path):
    source = jsonl(tmp_path / "dev.jsonl", {**MEDMCQA_ROW, "cop": [4]})
    with pytest.raises(DataError, match=r"^dev.jsonl, line 1: the answer is none of the options \(got \[4\]"):
        read(source)


def test_all_rows_of_a_file_decide_how_medmcqa_counts(tmp_path):
    """The first rows could count from 0 or from 1."""
    rows = [{**MEDMCQA_ROW, "cop": number} for number in (1, 2, 3, 0)]
    assert [row["answer"] for row in read(parquet(tmp_path / "from_0.parquet", *rows), train_rows=3)] == list("BCD")
    rows[3]["cop"] = 4
    assert [row["answer"] for row in read(parquet(tmp_path / "from_1.parquet", *rows), train_rows=3)] == list("ABC")
    assert [row["answer"] for row in read(parquet(tmp_path / "either.parquet", *rows[:3]))] == list("ABC")


@pytest.mark.parametrize("skipped", [None, Counter()])
def test_medmcqa_that_counts_both_ways(tmp_path, skipped):
    source = jsonl(tmp_path / "dev.jsonl", {**MEDMCQA_ROW, "cop": 0}, {**MEDMCQA_ROW, "cop": 1}, MEDMCQA_ROW)
    with pytest.raises(DataError, match=r"^dev.jsonl, line 3: cop is 4, but other rows have cop 0; it counts either"):
        read(source, skipped)


def test_mmlu_without_a_header(tmp_path):
    first, second = read(mmlu(tmp_path / "mmlu_college_medicine_test.csv", *MMLU_ROWS))
    assert (first["question"], right_text(first)) == ("Which bone is in the arm?", "Ulna")
    assert second["question"] == 'The "funny bone", so called, is a'
    assert second["options"]["A"] == "nerve, not a bone"
    assert right_text(second) == 'joint of the "elbow"'
    assert second["options"]["D"] == "muscle\nor tendon"
    assert (first["category"], second["category"]) == ("college medicine", "college medicine")
    assert (first["metadata"], second.where) == ({}, "mmlu_college_medicine_test.csv, line 2")


def test_a_folder_of_mmlu(tmp_path):
    for name in ("virology_test", "anatomy_test"):
        mmlu(tmp_path / f"{name}.csv", *MMLU_ROWS)
    (tmp_path / "._anatomy_test.csv").write_bytes(b"\0\0")  # written by macOS
    (tmp_path / "README.txt").write_text("about")
    rows = read(str(tmp_path))
    assert [row["category"] for row in rows] == ["anatomy", "anatomy", "virology", "virology"]
    assert rows[3].where == "virology_test.csv, line 2"
    assert [row["category"] for row in read(str(tmp_path), train_rows=3)] == ["anatomy", "anatomy", "virology"]


@pytest.mark.parametrize(
    "header", ["question,A,B,C,D,answer", "answer,question,A,B,C,D", "Answer,Question,A,B,C,D", "id,answer,A,B,C,D"]
)
def test_a_header_is_not_a_question(tmp_path, header):
    values = {"question": "Which?", "Question": "Which?", "answer": "B", "Answer": "B", "id": "x1"}
    line = ",".join(values.get(name, f"option {name}") for name in header.split(","))
    (tmp_path / "own.csv").write_text(f"{header}\n{line}\n")
    if "question" in header:
        (row,) = read(str(tmp_path / "own.csv"))
        assert (row["question"], right_text(row), row.where) == ("Which?", "option B", "own.csv, line 2")
        return
    with pytest.raises(DataError, match=r"^own.csv, line 2: there is no column 'question' \(there are '"):
        read(str(tmp_path / "own.csv"))


def test_our_own_format(tmp_path):
    (row,) = read(
        jsonl(tmp_path / "usmle.jsonl", {**OUR_FORMAT, "category": "cardiology", "step": 2, "id": 7, "year": 1})
    )
    assert {name: row[name] for name in OUR_FORMAT} == OUR_FORMAT
    assert (row["category"], row["step"], row["id"], row["metadata"]) == ("cardiology", "2", "7", {"year": 1})


def test_a_list_of_texts_as_options(tmp_path):
    (row,) = read(jsonl(tmp_path / "a.jsonl", {"question": "How many?", "options": [1, 2.5, " 3 "], "answer": 2}))
    assert (row["options"], row["answer"]) == ({"A": "1", "B": "2.5", "C": "3"}, "C")


# --- from the hub -----------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    """Replaces the hub; it returns a real `datasets.Dataset`."""
    import datasets

    asked, answers = [], {}

    def load(name, subset, *, split):
        asked.append((name, subset, split))
        return datasets.Dataset.from_list(answers[name])

    monkeypatch.setattr("datasets.load_dataset", load)
    return asked, answers


def test_medqa_from_the_hub(hub):
    asked, answers = hub
    answers["GBaker/MedQA-USMLE-4-options"] = [MEDQA, {**MEDQA, "answer": "Aortic root", "answer_idx": "D"}]
    recipe = make_recipe(
        {
            "task": "usmle",
            "data": {"train": "GBaker/MedQA-USMLE-4-options", "train_split": "train", "held_out_split": "test"},
        }
    )
    train, held_out = read_questions(recipe, None)
    assert asked == [("GBaker/MedQA-USMLE-4-options", None, "train"), ("GBaker/MedQA-USMLE-4-options", None, "test")]
    assert [right_text(row) for row in train] == ["Sinus node", "Aortic root"]
    assert held_out[0].where == "GBaker/MedQA-USMLE-4-options (test), row 1"


@pytest.mark.parametrize("numbers", [(0, 3), (1, 2), (2, 3)])
def test_medmcqa_from_the_hub_counts_from_0(hub, numbers):
    """Even if the rows do not show it."""
    _, answers = hub
    answers["openlifescienceai/medmcqa"] = [{**MEDMCQA_ROW, "cop": number} for number in numbers]
    rows = read("openlifescienceai/medmcqa")
    assert [row["answer"] for row in rows] == ["ABCD"[number] for number in numbers]


def test_medmcqas_test_split_has_no_answers(hub):
    _, answers = hub
    answers["openlifescienceai/medmcqa"] = [{**MEDMCQA_ROW, "cop": -1}] * 2
    where = r"openlifescienceai/medmcqa \(test\), row 1"
    with pytest.raises(DataError, match=rf"^{where}: the answer is none of the options \(got -1, options A, B, C, D\)"):
        read("openlifescienceai/medmcqa", train_split="test")
    with pytest.raises(DataError, match=rf"^{where}: the answer .*; none of the 2 rows is a valid question"):
        read("openlifescienceai/medmcqa", Counter(), train_split="test")


def test_mmlu_from_the_hub(hub):
    asked, answers = hub
    answers["cais/mmlu"] = [
        {"question": question, "subject": "anatomy", "choices": choices, "answer": "ABCD".index(answer)}
        for question, *choices, answer in MMLU_ROWS
    ]
    rows = read("cais/mmlu", subset="anatomy", train_split="test")
    assert asked == [("cais/mmlu", "anatomy", "test")]
    assert [right_text(row) for row in rows] == ["Ulna", 'joint of the "elbow"']
    assert (rows[0]["category"], rows[1].where) == ("anatomy", "cais/mmlu, subset anatomy (test), row 2")


# --- invalid questions ------------------------------------------------------------------------------------------------

ELEVEN = {letter: f"option {letter}" for letter in "ABCDEFGHIJK"}
FAULTS = [
    ({"question": ""}, "the question is empty"),
    ({"question": "  \n"}, "the question is empty"),
    ({"question": None}, "the question is empty"),
    ({"question": 5}, "the question is empty"),
    ({"answer": "E"}, "the answer is none of the options (got 'E', options A, B, C, D)"),
    ({"answer": "a"}, "the answer is none of the options (got 'a', options A, B, C, D)"),
    ({"answer": ""}, "the answer is none of the options (got '', options A, B, C, D)"),
    ({"answer": "Liver"}, "the answer is none of the options (got 'Liver', options A, B, C, D)"),
    ({"answer": 4}, "the answer is none of the options (got 4, options A, B, C, D)"),
    ({"answer": -1}, "the answer is none of the options (got -1, options A, B, C, D)"),
    ({"answer": None}, "the answer is none of the options (got None, options A, B, C, D)"),
    (
        {"answer": None, "options": {**TEXTS, "D": "None"}},
        "the answer is none of the options (got None, options A, B, C, D)",
    ),
    ({"answer": "Mitral valve", "answer_idx": "A"}, "answer_idx and answer are different options ('A' and 'Mitral val"),
    ({"options": {"A": "one"}}, "a question needs 2 to 10 options (it has 1)"),
    ({"options": {"A": "one", "B": None}}, "a question needs 2 to 10 options (it has 1)"),
    ({"options": []}, "a question needs 2 to 10 options (it has 0)"),
    ({"options": None}, "a question needs 2 to 10 options (it has 0)"),
    ({"options": "A. one B. two"}, "a question needs 2 to 10 options (it has 0)"),
    ({"options": ELEVEN}, "a question needs 2 to 10 options (it has 11)"),
    ({"options": {**TEXTS, "D": "  "}}, "an option is empty (D)"),
    ({"options": [{"key": "A", "value": "one"}, {"key": "B", "value": None}]}, "an option is empty (B)"),
    ({"options": {**TEXTS, "D": ["one"]}}, "an option is empty (D)"),
    ({"options": {**TEXTS, "D": "sinus  NODE "}}, "two options are the same ('sinus node')"),
    ({"options": {"A": "one", "AB": "two"}}, "options need distinct letters from A to J (got 'AB')"),
    ({"options": {"A": "one", "": "two"}}, "options need distinct letters from A to J (got '')"),
    ({"options": {"1": "one", "2": "two"}}, "options need distinct letters from A to J (got '1')"),
    (
        {"options": [{"key": "A", "value": "one"}, {"key": "A", "value": "two"}]},
        "options need distinct letters from A to J (got 'A')",
    ),
]
GOOD = {"question": "Which structure sets the pace?", "options": TEXTS, "answer": "A"}


@pytest.mark.parametrize(("change", "sentence"), FAULTS)
def test_a_bad_row_is_refused_by_file_and_line(tmp_path, change, sentence):
    source = jsonl(tmp_path / "own.jsonl", GOOD, {**GOOD, **change})
    with pytest.raises(
        DataError, match=rf"^{re.escape(f'own.jsonl, line 2: {sentence}')}.*task_options.bad_rows = 'skip'"
    ):
        read(source)


@pytest.mark.parametrize(("change", "sentence"), FAULTS)
def test_a_bad_row_is_skipped_on_request(tmp_path, change, sentence):
    skipped = Counter()
    rows = read(jsonl(tmp_path / "own: mine.jsonl", {**GOOD, **change}, GOOD, {**GOOD, **change}), skipped)
    assert [row.where for row in rows] == ["own: mine.jsonl, line 2"]
    assert skipped == {sentence.split(" (")[0]: 2}


@pytest.mark.parametrize("cop", [None, -1, 5])
def test_medmcqa_without_a_right_answer(tmp_path, cop):
    """A missing answer is not the option with the text None."""
    bad = {**MEDMCQA_ROW, "cop": cop, "opc": "None"}
    sentence = rf"dev.jsonl, line 2: the answer is none of the options \(got {cop}, options A, B, C, D\)"
    with pytest.raises(DataError, match=sentence):
        read(jsonl(tmp_path / "dev.jsonl", MEDMCQA_ROW, bad))


def test_an_mmlu_row_with_a_bad_letter(tmp_path):
    source = mmlu(tmp_path / "anatomy_test.csv", *MMLU_ROWS, [*MMLU_ROWS[0][:5], "E"])
    with pytest.raises(DataError, match=r"^anatomy_test.csv, line 4: the answer is none of the options \(got 'E'"):
        read(source)


def test_the_notes_count_the_rows_that_are_left_out(tmp_path):
    faults = [{**GOOD, "answer": "E"}, {**GOOD, "question": ""}, {**GOOD, "answer": "F"}]
    source = jsonl(tmp_path / "own.jsonl", GOOD, *faults)
    held_out = jsonl(tmp_path / "held_out.jsonl", {**GOOD, "answer": "G"}, GOOD, GOOD)
    data = {"train": source, "held_out": held_out}
    task = load_task(make_recipe({"task": "usmle", "data": data, "task_options": {"bad_rows": "skip"}}))
    assert (len(task.train), len(task.held_out)) == (1, 2)
    assert task.notes == (
        "3 rows are left out: the answer is none of the options",
        "1 row is left out: the question is empty",
    )
    with pytest.raises(DataError, match=r"own.jsonl, line 2: .*task_options.bad_rows = 'skip'$"):
        load_task(make_recipe({"task": "usmle", "data": data}))
    assert load_task(make_recipe({"task": "usmle"})).notes == ()


@pytest.mark.parametrize("part", ["train", "held_out"])
def test_a_file_without_a_valid_row(tmp_path, part):
    data = {"train": jsonl(tmp_path / "good.jsonl", GOOD), "held_out": jsonl(tmp_path / "fine.jsonl", GOOD)}
    data[part] = jsonl(tmp_path / "bad.jsonl", {**GOOD, "answer": "E"}, {**GOOD, "question": ""})
    with pytest.raises(DataError, match=r"^bad.jsonl, line 1: the answer .*; none of the 2 rows is a valid question"):
        load_task(make_recipe({"task": "usmle", "data": data, "task_options": {"bad_rows": "skip"}}))


def test_bad_rows_are_removed_before_rows_are_held_out(tmp_path):
    source = jsonl(tmp_path / "own.jsonl", *[{**GOOD, "answer": letter} for letter in "AEBECEDE"])
    train, held_out = read_questions(
        make_recipe({"task": "usmle", "data": {"train": source, "held_out_from_train": 3}}), Counter()
    )
    assert (len(train), len(held_out)) == (1, 3)
    assert sorted(row["answer"] for row in train + held_out) == list("ABCD")


def test_a_row_without_a_file():
    assert question_of(GOOD)["answer"] == "A"
    with pytest.raises(DataError, match=r"^row 1: there is no column 'question' \(there are none\)"):
        question_of({})
    with pytest.raises(DataError, match=r"^here: the answer"):
        question_of(Row({**GOOD, "answer": "Z"}, "here"))


@pytest.mark.parametrize("number", [2, 3, 10])
def test_two_to_ten_options(number):
    pairs = [(letter, f"option {letter}") for letter in "ABCDEFGHIJ"[:number]]
    assert check_options(pairs[::-1], "here") == dict(pairs)
    assert list(check_options(pairs[::-1], "here")) == list("ABCDEFGHIJ"[:number])


# --- the real files ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exam():
    return read(str(DATA / TEST))


@real
def test_the_medqa_test_set(exam):
    assert len(exam) == 1273
    assert {len(row["options"]) for row in exam} == {4}
    assert {row["step"] for row in exam} == {"step1", "step2&3"}
    assert set(exam[0]["metadata"]) == {"metamap_phrases"}


@real
@pytest.mark.slow
def test_the_medqa_training_questions(exam):
    pool = read(str(DATA / POOL))
    assert len(pool) > 2000
    assert {len(row["options"]) for row in pool} == {4, 5}
    assert all(row["metadata"]["split"] for row in pool)
    assert not {row["question"] for row in pool} & {row["question"] for row in exam}


@real
@pytest.mark.slow
def test_the_medmcqa_file(exam):
    skipped = Counter()
    rows = read(str(DATA / MEDMCQA), skipped)
    assert len(rows) == 4162
    assert sum(skipped.values()) == 21
    assert set(skipped) <= {"two options are the same", "an option is empty"}
    assert {row["answer"] for row in rows} == set("ABCD")
    assert all(row["category"] and row["id"] for row in rows)
    assert not {row["question"] for row in rows} & {row["question"] for row in exam}
    with pytest.raises(DataError, match=r"^medmcqa_dev.jsonl, line \d+: .*task_options.bad_rows = 'skip'$"):
        read(str(DATA / MEDMCQA))


@real
@pytest.mark.slow
def test_the_mmlu_files():
    rows = read([str(path) for path in sorted(DATA.glob("mmlu_*_test.csv"))])
    assert len(rows) == 1089
    assert {row["category"] for row in rows} == {
        "anatomy",
        "clinical knowledge",
        "college biology",
        "college medicine",
        "medical genetics",
        "professional medicine",
    }
    assert right_text(rows[0]) == "paralysis of the facial muscles."
