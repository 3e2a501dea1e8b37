"""Rows from tables that a program holds."""

from __future__ import annotations

import numpy as np
import pandas
import pyarrow
import pytest

from groupwise.data.tables import as_rows
from groupwise.errors import DataError

MESSAGES = [{"role": "user", "content": "One plus one?"}]
ROWS = [{"prompt": "One?", "answer": 1}, {"prompt": "Two?", "answer": 2}]


def test_every_table_gives_the_same_rows():
    datasets = pytest.importorskip("datasets")
    frame = pandas.DataFrame(ROWS)
    tables = [ROWS, tuple(ROWS), iter(ROWS), frame, pyarrow.table(frame), datasets.Dataset.from_list(ROWS)]
    for table in tables:
        rows = as_rows(table)
        assert rows == ROWS, type(table)
        assert [type(value) for row in rows for value in row.values()] == [str, int] * 2
        assert [row.where for row in rows] == ["row 1", "row 2"]


def test_a_streamed_dataset_is_read_as_far_as_needed():
    datasets = pytest.importorskip("datasets")

    def endless():
        while True:
            yield {"prompt": "again"}

    assert len(as_rows(datasets.IterableDataset.from_generator(endless), limit=3)) == 3


def test_missing_values_of_a_frame_are_none_and_arrays_are_lists():
    frame = pandas.DataFrame({"prompt": [np.array(MESSAGES), np.array(MESSAGES)], "score": [1.5, float("nan")]})
    assert as_rows(frame) == [{"prompt": MESSAGES, "score": 1.5}, {"prompt": MESSAGES, "score": None}]


def test_rows_are_copies():
    as_rows(ROWS)[0]["prompt"] = "changed"
    assert ROWS[0]["prompt"] == "One?"


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([], "no rows"),
        (pandas.DataFrame({"prompt": []}), "no rows"),
        (["One?"], 'row 1 is of type str.*{"prompt"'),
        ([ROWS[0], 3], "row 2 is of type int"),
        ([{1: "One?"}], "column named 1"),
        ({"prompt": ["One?"]}, "dict; give a list with one dict per row"),
        (12, "of type int"),
        (pandas.DataFrame([["a", "b"]], columns=["prompt", "prompt"]), "two columns named 'prompt'"),
    ],
)
def test_what_is_no_table_is_refused(table, words):
    with pytest.raises(DataError, match=words):
        as_rows(table)


def test_a_dataset_with_splits_is_refused():
    datasets = pytest.importorskip("datasets")
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})
    with pytest.raises(DataError, match=r"choose one of its splits \(train\)"):
        as_rows(splits)
