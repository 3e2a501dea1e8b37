"""The corpus of multiple-choice outputs is sound in itself, whatever extractor is judged by it."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

LINES = (Path(__file__).parent / "choice_corpus.jsonl").read_text(encoding="utf-8").split("\n")
CASES = [json.loads(line) for line in LINES if line]


def repeated(values):
    return [value for value, count in Counter(values).items() if count > 1]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_a_case_is_well_formed(case):
    assert list(case) == ["id", "text", "options", "lenient", "strict", "why"]
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", case["id"])
    assert isinstance(case["text"], str)
    assert isinstance(case["why"], str)
    assert case["why"]
    options = case["options"]
    assert 2 <= len(options) <= 10
    assert "".join(options) == "ABCDEFGHIJ"[: len(options)]
    assert len(set(options.values())) == len(options)
    assert case["lenient"] is None or case["lenient"] in options
    assert case["strict"] in (None, case["lenient"])


def test_ids_and_cases_are_unique():
    assert repeated(case["id"] for case in CASES) == []
    assert repeated((case["text"], json.dumps(case["options"], sort_keys=True)) for case in CASES) == []


def test_every_kind_of_label_is_well_represented():
    assert len(CASES) >= 150
    kinds = Counter((case["lenient"] is not None, case["strict"] is not None) for case in CASES)
    assert set(kinds) == {(False, False), (True, False), (True, True)}
    assert min(kinds.values()) >= 50


def test_every_letter_of_four_is_an_answer_often():
    letters = Counter(case["lenient"] for case in CASES)
    assert all(letters[letter] >= 20 for letter in "ABCD")
