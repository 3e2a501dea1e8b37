"""Rows and preference pairs from files: valid ones that were changed, damaged bytes, and tables made by a program."""

from __future__ import annotations

import csv
import gzip
import io
import json
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from groupwise.data import PromptBuilder, check_prompts, read_rows
from groupwise.data.pairs import PairBuilder
from groupwise.data.tables import as_rows
from groupwise.model.tiny import tiny_tokenizer
from tests.fuzz import accepted, many
from tests.fuzz.strange import changed, damaged, python_values, texts

ROWS = [
    {"prompt": "What is 2 + 3?", "answer": "5", "level": 1},
    {"prompt": "Naïve\u2028café\x85", "answer": "ok", "level": 2.5},
    {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}], "answer": None},
    {"prompt": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "tags": ["a", {"b": 1}]},
]
PAIRS = [
    {"prompt": "Say a letter:", "chosen": " A", "rejected": " B"},
    {"chosen": "Say a letter: A", "rejected": "Say a letter: B"},
    {
        "prompt": [{"role": "user", "content": "Hello"}],
        "chosen": [{"role": "assistant", "content": "Hi."}],
        "rejected": [{"role": "assistant", "content": "No."}],
    },
    {
        "chosen": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}],
        "rejected": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "No."}],
    },
]


def as_json(rows: Any, ending: str) -> bytes:
    """The rows as a file, with what Python writes for NaN and lone surrogates."""
    on_lines = ending.startswith(".jsonl") and isinstance(rows, list)
    text = "\n".join(map(json.dumps, rows)) if on_lines else json.dumps(rows)
    data = text.encode("utf-8", "surrogatepass")
    return gzip.compress(data, 1) if ending.endswith(".gz") else data


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rows")


@pytest.fixture(scope="module")
def prompts():
    return PromptBuilder(tiny_tokenizer())


def read(path, data: bytes) -> list[dict[str, Any]] | None:
    path.write_bytes(data)
    rows = accepted("rows of a file", lambda: read_rows(path))
    if rows is not None:
        assert all(path.name in row.where for row in rows)
    return rows


@many(8)
@given(rows=changed(ROWS), ending=st.sampled_from([".jsonl", ".json", ".jsonl.gz", ".json.gz"]))
def test_changed_rows(folder, prompts, rows, ending):
    read_back = read(folder / f"rows{ending}", as_json(rows, ending))
    if read_back is not None:
        for row in read_back:
            accepted("prompts", lambda row=row: check_prompts([row]))
            accepted("prompts", lambda row=row: prompts.build([row]))


@many(8)
@given(data=st.data(), ending=st.sampled_from([".jsonl", ".json", ".jsonl.gz", ".json.gz", ".csv"]))
def test_damaged_text_files(folder, data, ending):
    table = [["prompt", "answer"], ['two\r\n"lines"', "é"], ["", "\u2028"]]
    original = csv_of(table) if ending == ".csv" else as_json(ROWS, ending)
    read(folder / f"damaged{ending}", data.draw(damaged(original) | st.binary(max_size=60)))


def csv_of(table: list[list[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text).writerows(table)
    return text.getvalue().encode("utf-8", "surrogatepass")


@many(4)
@given(table=st.lists(st.lists(texts, max_size=3), max_size=4))
def test_csv_files(folder, table):
    read(folder / "table.csv", csv_of([["prompt", "answer"], *table]))
    read(folder / "table.csv", csv_of(table))


PARQUET = io.BytesIO()
parquet.write_table(pyarrow.table({"prompt": ["a", "b" * 50] * 40, "n": [1, None] * 40}), PARQUET)


@many(8)
@given(damaged(PARQUET.getvalue()))
def test_damaged_parquet_files(folder, data):
    read(folder / "rows.parquet", data)


TIMES = [pyarrow.timestamp("ms"), pyarrow.date64(), pyarrow.duration("ns"), pyarrow.time64("ns")]


@many(2)
@given(kind=st.sampled_from(TIMES), value=st.integers(-(2**63), 2**63 - 1))
def test_parquet_times_that_python_does_not_have(folder, kind, value):
    column = pyarrow.array([value], pyarrow.int64()).cast(kind, safe=False)
    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"prompt": ["a"], "when": column}), file)
    read(folder / "times.parquet", file.getvalue())


@many(8)
@given(rows=changed(PAIRS, python_values), truncate=st.booleans())
def test_changed_pairs(prompts, rows, truncate):
    builder = PairBuilder(prompts, max_length=40, on_too_long="truncate" if truncate else "error")
    for row in rows if isinstance(rows, list) else [rows]:
        if isinstance(row, dict):
            accepted("preference pairs", lambda row=row: builder.build([row]))


@many(4)
@given(rows=changed(ROWS, python_values) | python_values)
def test_tables_of_a_program(prompts, rows):
    table = accepted("tables", lambda: as_rows(rows))
    if table is not None:
        accepted("prompts", lambda: check_prompts(table))
