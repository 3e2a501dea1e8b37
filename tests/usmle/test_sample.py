"""The packaged sample of medical questions: its format, and that nothing but medicine reveals the right letter."""

from __future__ import annotations

import importlib.resources
import json
import re
from collections import Counter

import pytest

HELD_OUT = 16
KEYS = ["id", "question", "options", "answer", "explanation", "category", "step", "difficulty"]


def read_sample():
    text = (importlib.resources.files("groupwise.usmle") / "usmle_sample.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


SAMPLE = read_sample()


def ids_where(fault):
    return [row["id"] for row in SAMPLE if fault(row)]


def right_option(row):
    return row["options"][row["answer"]]


def wrong_options(row):
    return [option for letter, option in row["options"].items() if letter != row["answer"]]


def sentences(text):
    """The number of sentences; a decimal point does not end one."""
    return len(re.findall(r"[.?!](?=\s|$)", text))


def telling_words(text):
    """The words with meaning: longer than three letters, or numbers."""
    return {word for word in re.findall(r"[a-z0-9]+", text.casefold()) if len(word) > 3 or word.isdigit()}


def test_there_are_enough_questions_for_both_parts():
    assert len(SAMPLE) >= 40 + HELD_OUT


def test_every_row_has_the_same_keys_in_the_same_order():
    assert ids_where(lambda row: list(row) != KEYS) == []


def test_every_text_is_one_trimmed_line():
    def untidy(row):
        texts = [row[key] for key in KEYS if key != "options"] + list(row["options"].values())
        return any(not text or text != " ".join(text.split()) for text in texts)

    assert ids_where(untidy) == []


def test_ids_count_up_and_questions_are_unique():
    assert [row["id"] for row in SAMPLE] == [f"s{number:03d}" for number in range(1, len(SAMPLE) + 1)]
    assert len({row["question"].casefold() for row in SAMPLE}) == len(SAMPLE)


def test_letters_run_from_a_to_d_or_e_and_the_answer_is_one_of_them():
    assert ids_where(lambda row: "".join(row["options"]) not in ("ABCD", "ABCDE")) == []
    assert ids_where(lambda row: row["answer"] not in row["options"]) == []


def test_options_of_a_question_differ_beyond_case():
    assert ids_where(lambda row: len({o.casefold() for o in row["options"].values()}) != len(row["options"])) == []


def test_no_option_refers_to_the_others():
    assert ids_where(lambda row: any("of the above" in o.casefold() for o in row["options"].values())) == []


def test_every_question_ends_with_a_question_mark():
    assert ids_where(lambda row: not row["question"].endswith("?")) == []


def test_steps_and_difficulties_are_the_known_ones():
    assert {row["step"] for row in SAMPLE} == {"step1", "step2&3"}
    assert {row["difficulty"] for row in SAMPLE} == {"easy", "medium", "hard"}


def test_explanations_name_the_right_option():
    assert ids_where(lambda row: not telling_words(right_option(row)) & telling_words(row["explanation"])) == []


def test_explanations_take_two_to_four_sentences():
    assert ids_where(lambda row: not 2 <= sentences(row["explanation"]) <= 4) == []


def test_explanations_do_not_mention_letters():
    by_letter = re.compile(r"\b(?:option|choice|answer) [A-E]\b|\([A-E]\)", re.IGNORECASE)
    assert ids_where(lambda row: by_letter.search(row["explanation"])) == []


def test_right_letters_are_balanced():
    counts = Counter(row["answer"] for row in SAMPLE)
    assert {letter: counts[letter] for letter in "ABCD" if not 12 <= counts[letter] * 64 / len(SAMPLE) <= 18} == {}


def test_a_quarter_of_the_questions_has_a_fifth_option_that_is_sometimes_right():
    five = [row for row in SAMPLE if "E" in row["options"]]
    assert 1 / 8 <= len(five) / len(SAMPLE) <= 3 / 8
    assert 1 / 8 <= sum(row["answer"] == "E" for row in five) / len(five) <= 3 / 8


def test_length_does_not_reveal_the_right_option():
    """It must not always be the longest, and not never."""
    longest = ids_where(lambda row: len(right_option(row)) > max(map(len, wrong_options(row))))
    shortest = ids_where(lambda row: len(right_option(row)) < min(map(len, wrong_options(row))))
    assert 1 / 10 <= len(longest) / len(SAMPLE) <= 1 / 3
    assert 1 / 10 <= len(shortest) / len(SAMPLE) <= 1 / 3


def test_short_questions_and_vignettes_are_mixed():
    short = ids_where(lambda row: sentences(row["question"]) <= 2)
    assert 1 / 4 <= len(short) / len(SAMPLE) <= 1 / 2


def test_there_are_many_categories_and_none_is_small():
    counts = Counter(row["category"] for row in SAMPLE)
    assert len(counts) >= 8
    assert min(counts.values()) >= 4


def test_both_parts_cover_every_category_step_and_difficulty():
    train, held_out = SAMPLE[:-HELD_OUT], SAMPLE[-HELD_OUT:]
    for key in ("category", "step", "difficulty"):
        assert {row[key] for row in train} == {row[key] for row in held_out}


@pytest.mark.parametrize(
    ("option", "lone_letter"),
    [
        ("Hepatitis B virus", "B"),
        ("Vitamin D deficiency", "D"),
        ("Group B Streptococcus", "B"),
        ("Protein C deficiency", "C"),
        ("Type A behavior", "A"),
    ],
)
def test_some_right_options_contain_the_letter_of_a_wrong_one(option, lone_letter):
    """A reader that takes any single capital letter as the answer fails on these."""
    (row,) = [row for row in SAMPLE if right_option(row) == option]
    assert lone_letter in row["options"]
    assert row["answer"] != lone_letter


def test_a_right_option_contains_a_capital_that_is_not_a_letter_of_its_question():
    (row,) = [row for row in SAMPLE if right_option(row) == "Factor V Leiden"]
    assert "V" not in row["options"]
