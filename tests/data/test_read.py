"""Rows from every kind of source, and the errors for those that cannot be read."""

from __future__ import annotations

import copy
import csv
import gzip
import json
import pickle
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.data import read_rows
from groupwise.data.read import ENDINGS
from groupwise.errors import DataError, MissingExtraError

ROWS = [
    {"prompt": "2 + 2?", "answer": "4"},
    {"prompt": 'größer\u2028als,\r\n"zwei"', "answer": ""},
    {"prompt": "3 + 3?", "answer": "6"},
]


def lines_of(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def write(path, rows=ROWS):
    """Write the rows in the format of the file name."""
    name = path.name
    if name.endswith(".parquet"):
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path)
    elif name.endswith(".csv"):
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        content = json.dumps(rows, indent=1).encode() if ".json." in f"{name}." else lines_of(rows)
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


def bad(path, content, **options):
    """The message of the error that a file raises."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        read_rows(path, **options)
    return str(caught.value)


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_kind_of_file(tmp_path, ending):
    path = write(tmp_path / f"questions{ending}")
    rows = read_rows(path)
    assert rows == ROWS
    assert rows == read_rows(str(path), limit=10)
    assert read_rows(path, limit=2) == ROWS[:2]
    places = {
        "jsonl": ["line 1", "line 2", "line 3"],
        "json": ["entry 1", "entry 2", "entry 3"],
        "parquet": ["row 1", "row 2", "row 3"],
        "csv": ["line 2", "line 3", "line 5"],  # the second record holds a line break
    }[ENDINGS[ending]]
    assert [row.where for row in rows] == [f"questions{ending}, {place}" for place in places]


def test_upper_case_endings(tmp_path):
    path = tmp_path / "Q.JSONL"
    path.write_bytes(lines_of(ROWS))
    assert read_rows(path) == ROWS


def test_a_row_knows_its_origin(tmp_path):
    row = read_rows(write(tmp_path / "q.jsonl"))[0]
    assert isinstance(row, dict)
    assert json.loads(json.dumps(row)) == row == ROWS[0]
    assert {**row, "answer": 1} == {"prompt": "2 + 2?", "answer": 1}
    for other in (pickle.loads(pickle.dumps(row)), copy.copy(row), copy.deepcopy(row)):
        assert other == row
        assert other.where == "q.jsonl, line 1"


@given(
    st.lists(
        st.dictionaries(
            st.text(st.characters(codec="utf-8")),
            st.recursive(
                st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(st.characters(codec="utf-8")),
                lambda inner: st.lists(inner, max_size=3),
                max_leaves=4,
            ),
            max_size=3,
        ),
        min_size=1,
        max_size=5,
    ),
    st.booleans(),
)
def test_json_round_trip(tmp_path_factory, rows, ascii_only):
    folder = tmp_path_factory.mktemp("rows")
    lines = "\n".join(json.dumps(row, ensure_ascii=ascii_only) for row in rows)
    (folder / "q.jsonl").write_bytes(lines.encode())
    (folder / "q.json").write_text(json.dumps(rows, ensure_ascii=ascii_only), encoding="utf-8")
    assert read_rows(folder / "q.jsonl") == rows == read_rows(folder / "q.json")


def test_values_keep_their_types(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "a"}], "n": 1, "x": 0.5, "ok": True, "none": None, "d": {"k": [1]}}]
    for ending in (".jsonl", ".json", ".parquet"):
        assert read_rows(write(tmp_path / f"q{ending}", rows)) == rows
    path = tmp_path / "q.csv"
    path.write_text('prompt,n\n"[{""role"": ""user""}]",1\n')
    assert read_rows(path) == [{"prompt": '[{"role": "user"}]', "n": "1"}]


def test_blank_lines_and_byte_order_mark(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \n{"a": 2}')
    assert [(dict(row), row.where) for row in read_rows(path)] == [
        ({"a": 1}, "q.jsonl, line 1"),
        ({"a": 2}, "q.jsonl, line 4"),
    ]
    path = tmp_path / "q.csv"
    path.write_bytes(b"\xef\xbb\xbfa,b\r\n\r\n1,2\r\n")
    assert read_rows(path) == [{"a": "1", "b": "2"}]
    path = tmp_path / "q.json"
    path.write_bytes(b'\xef\xbb\xbf \n [{"a": 1}]')
    assert read_rows(path) == [{"a": 1}]


def test_json_with_an_object_per_line(tmp_path):
    path = tmp_path / "q.json"
    path.write_bytes(lines_of(ROWS))
    assert read_rows(path) == ROWS
    assert read_rows(path)[2].where == "q.json, line 3"
    path.write_bytes(lines_of(ROWS[:1]))
    assert read_rows(path) == ROWS[:1]


def test_long_csv_fields(tmp_path):
    path = write(tmp_path / "q.csv", [{"prompt": "x" * 200_000}])
    before = csv.field_size_limit(77_777)
    try:
        assert read_rows(path)[0]["prompt"] == "x" * 200_000
        assert csv.field_size_limit() == 77_777
    finally:
        csv.field_size_limit(before)


def test_a_csv_file_without_a_header(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('one,"a, ""b"""\ntwo,c\n')
    rows = read_rows(path, header=("name", "value"))
    assert rows == [{"name": "one", "value": 'a, "b"'}, {"name": "two", "value": "c"}]
    assert [row.where for row in rows] == ["rows.csv, line 1", "rows.csv, line 2"]
    assert read_rows(path, header=("name", "value"), limit=1) == rows[:1]
    (tmp_path / "more.csv").write_text("zero,d\n")
    assert read_rows(tmp_path, header=("name", "value")) == [{"name": "zero", "value": "d"}, *rows]  # each file anew
    with pytest.raises(DataError, match=r"rows.csv, line 1 has 2 fields, but the header names 3 \(a, b, c\)"):
        read_rows(path, header=("a", "b", "c"))


def test_rows_after_the_limit_are_not_read(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"a": 1}\nnonsense\n')
    assert read_rows(path, limit=1) == [{"a": 1}]


def test_parquet_rows_are_numbered_across_batches(tmp_path):
    rows = read_rows(write(tmp_path / "q.parquet", [{"n": number} for number in range(3000)]))
    assert [row["n"] for row in rows] == list(range(3000))
    assert rows[2999].where == "q.parquet, row 3000"


def test_a_folder_is_read_in_order_of_names(tmp_path):
    write(tmp_path / "part-2.jsonl", ROWS[1:2])
    write(tmp_path / "part-10.jsonl.gz", ROWS[:1])
    write(tmp_path / "part-3.jsonl", ROWS[2:])
    (tmp_path / "part-0.jsonl").write_text("")  # one without rows does no harm
    (tmp_path / "README.md").write_text("read me")
    (tmp_path / ".hidden.csv").write_text("x")
    (tmp_path / "deep.csv").mkdir()
    rows = read_rows(tmp_path)
    assert rows == ROWS
    assert [row.where for row in rows] == ["part-10.jsonl.gz, line 1", "part-2.jsonl, line 1", "part-3.jsonl, line 1"]
    assert read_rows(str(tmp_path), limit=2) == ROWS[:2]


def test_a_folder_of_several_formats(tmp_path):
    write(tmp_path / "a.jsonl")
    write(tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"has files of several formats \(a.jsonl, b.parquet\); name one file"):
        read_rows(tmp_path)


@pytest.mark.parametrize(
    ("one", "other"), [("train.jsonl", "test.jsonl"), ("train-00000-of-00001.parquet", "validation-00000.parquet")]
)
def test_a_folder_of_several_splits_is_not_mixed(tmp_path, one, other):
    write(tmp_path / one)
    write(tmp_path / other)
    with pytest.raises(DataError, match=rf"has several splits \({min(one, other)}, {max(one, other)}\); name one file"):
        read_rows(tmp_path)
    assert read_rows(tmp_path / one) == ROWS


def test_names_that_only_begin_like_a_split(tmp_path):
    write(tmp_path / "trains.jsonl", ROWS[:1])
    write(tmp_path / "testimony.jsonl", ROWS[:1])
    write(tmp_path / "train-1.jsonl", ROWS[:1])
    write(tmp_path / "train-2.jsonl", ROWS[:1])
    assert len(read_rows(tmp_path)) == 4


def test_a_folder_without_data(tmp_path):
    with pytest.raises(DataError, match=r"has no data files \(names that end in .jsonl, .*\.csv\)$"):
        read_rows(tmp_path)
    (tmp_path / "data").mkdir()
    with pytest.raises(DataError, match=r"it contains folders \(data\), name one of them"):
        read_rows(tmp_path)


def test_a_file_that_is_missing(tmp_path, monkeypatch):
    write(tmp_path / "questions.jsonl")
    here = re.escape(str(tmp_path))
    with pytest.raises(
        DataError, match=rf"no file or folder 'question.jsonl' in {here}; did you mean 'questions.jsonl'"
    ):
        read_rows(tmp_path / "question.jsonl")
    with pytest.raises(DataError, match=rf"the folder {here}.nowhere.deep does not exist, only {here}$"):
        read_rows(tmp_path / "nowhere" / "deep" / "q.jsonl")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        DataError, match=rf"no file or folder 'qestions.jsonl' in {here}; did you mean 'questions.jsonl'"
    ):
        read_rows("qestions.jsonl")
    with pytest.raises(DataError, match=r"did you mean 'questions.jsonl'\?. A hub dataset is written owner/name"):
        read_rows("questions")
    with pytest.raises(DataError, match=rf"no file or folder 'zzz.csv' in {here}$"):
        read_rows("./zzz.csv")
    with pytest.raises(DataError, match=rf"no file or folder 'missing.jsonl' in {here}$"):  # the ending is not enough
        read_rows("missing.jsonl")
    with pytest.raises(DataError, match="does not exist, only"):
        read_rows("x/" * 200 + "y" * 500)  # longer than any system lets a name be


@pytest.mark.parametrize("source", ["", None, 3, ["a.jsonl"]])
def test_invalid_sources(source):
    with pytest.raises(DataError, match="named by a text or a path, not by"):
        read_rows(source)


def test_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "q.jsonl")
    assert read_rows("~/q.jsonl") == ROWS


def test_files_have_no_splits(tmp_path):
    path = write(tmp_path / "q.jsonl")
    with pytest.raises(DataError, match=r"split='test' is for hub datasets, but .*q.jsonl is local; leave split"):
        read_rows(path, split="test")
    with pytest.raises(DataError, match=r"subset='main' .*leave subset out"):
        read_rows(tmp_path, subset="main")


def test_an_unknown_ending(tmp_path):
    assert "q.txt has an unknown format; its name must end in .jsonl" in bad(tmp_path / "q.txt", "hello")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("q.jsonl", b""),
        ("q.jsonl", b"\n\n"),
        ("q.json", b"[]"),
        ("q.json", b""),
        ("q.csv", b""),
        ("q.csv", b"prompt,answer\n"),
        ("q.jsonl.gz", gzip.compress(b"", mtime=0)),
    ],
)
def test_empty(tmp_path, name, content):
    assert bad(tmp_path / name, content).endswith(f"{name} is empty: it has no rows")


def test_an_empty_parquet_file(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "q.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    with pytest.raises(DataError, match=r"q.parquet is empty"):
        read_rows(path)


DAMAGED = [
    ("q.jsonl", '{"a": 1}\n{"a": }\n', "q.jsonl, line 2, column 7: this is not JSON: Expecting value"),
    ("q.jsonl", '{"a": 1}\n\n{"a": "cut', "q.jsonl, line 3, column 7: this is not JSON: Unterminated string"),
    ("q.json", '[{"a": 1},\n {"a" 2}]', "q.json, line 2, column 7: this is not JSON: Expecting ':'"),
    ("q.json", '[{"a": 1}', "q.json, line 1, column 10: this is not JSON"),
    ("q.json", '{"a": 1}\n{"a"}', "q.json, line 2, column 5: this is not JSON"),
    ("q.jsonl", '{"a": 1}\n[1]\n', 'q.jsonl, line 2 is not an object: expected {"prompt": …}'),
    ("q.jsonl", '{"a": 1}\nnull\n', "got missing (null) (a .json file"),
    ("q.json", '[{"a": 1}, "b"]', "q.json, entry 2 is not an object"),
    ("q.json", '{\n "data": [1]\n}\n', "q.json is one object over several lines; give a list of objects"),
    ("q.jsonl", '{"a": ' + "9" * 5000 + "}", "q.jsonl, line 1: this cannot be read as JSON: Exceeds the limit"),
    ("q.jsonl", "[" * 100_000, "q.jsonl, line 1: this cannot be read as JSON"),
    ("q.jsonl", '{"a": 1}\n{"a": "\\uD83D"}', "q.jsonl, line 2 contains a lone surrogate"),
    ("q.json", '[{"a": 1}, {"\\udc00": 1}]', "q.json, entry 2 contains a lone surrogate"),
    (
        "q.jsonl",
        b'{"a": 1}\n{"a": "\xfc"}',
        "q.jsonl, line 2: byte 8 of the line is not UTF-8 (invalid start byte)",
    ),
    ("q.json", b'[\n{"a": "\xfc"}]', "q.json, line 2: byte 8 of the line is not UTF-8"),
    (
        "q.csv",
        b"a\nb\n\xff\n",
        "q.csv, line 3: byte 1 of the line is not UTF-8 (invalid start byte); save the file",
    ),
    ("q.csv", "a,b\n1,2\n1,2,3\n", "q.csv, line 3 has 3 fields, but the header names 2 (a, b); put a field"),
    ("q.csv", 'a,b\n"1\n2",3\n1\n', "q.csv, line 4 has 1 fields, but the header names 2"),
    ("q.csv", 'a,b\n1,2\n"1,2\n3,4\n', "q.csv, line 3: this is not CSV: unexpected end of data"),
    ("q.csv", 'a,b\n"1"x,2\n', "q.csv, line 2: this is not CSV: ',' expected after '\"'"),
    ("q.csv", "a,a\n1,2\n", "q.csv, line 1: the header must name every column once, got 'a', 'a'"),
    ("q.csv", "a,\n1,2\n", "q.csv, line 1: the header must name every column once, got 'a', ''"),
    ("q.jsonl.gz", b"no gzip", "q.jsonl.gz is damaged or not a gzip file: Not a gzipped file"),
    (
        "q.jsonl.gz",
        gzip.compress(lines_of(ROWS), mtime=0)[:-12],
        "damaged or not a gzip file: Compressed file ended",
    ),
    ("q.parquet", b"PAR1 no parquet", "q.parquet is damaged or not a parquet file: "),
    ("q.parquet", b"", "q.parquet is damaged or not a parquet file: Parquet file size is 0 bytes; download it again"),
]


def test_errors_name_the_place(tmp_path):
    for name, content, sentence in DAMAGED:
        assert sentence in bad(tmp_path / name, content)


def test_a_pair_of_surrogates_is_a_character(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"a": "\\ud83d\\ude00 \\\\ud83d"}')
    assert read_rows(path) == [{"a": "😀 \\ud83d"}]


@pytest.mark.parametrize("place", [20, 40, 60])
def test_a_corrupt_gzip_file(tmp_path, place):
    data = bytearray(gzip.compress(lines_of(ROWS * 50), mtime=0))
    data[place] ^= 0xFF
    assert "q.jsonl.gz" in bad(tmp_path / "q.jsonl.gz", bytes(data))


def test_corrupt_parquet_files(tmp_path):
    whole = write(tmp_path / "whole.parquet", [{"prompt": f"question {n}"} for n in range(500)]).read_bytes()
    assert "is damaged or not a parquet file" in bad(tmp_path / "q.parquet", whole[:-20])
    assert "is damaged or not a parquet file" in bad(tmp_path / "q.parquet", whole[:4] + b"\xff" * 200 + whole[204:])


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".parquet"])
def test_a_file_that_the_system_will_not_open(tmp_path, monkeypatch, ending):
    """Simulated, because root may read everything."""
    path = write(tmp_path / f"q{ending}")
    real = open

    def refuse(file, *rest, **options):
        if str(file) == str(path):
            raise PermissionError(13, "Permission denied")
        return real(file, *rest, **options)

    monkeypatch.setattr("builtins.open", refuse)
    if ending == ".parquet":
        monkeypatch.setattr("pyarrow.parquet.ParquetFile", refuse)
    with pytest.raises(DataError, match=rf"q{ending} cannot be read: Permission denied"):
        read_rows(path)


class Hub:
    """Replaces `datasets.load_dataset`; tests have no network."""

    def __init__(self, monkeypatch, answer):
        self.asked = []
        self.answer = answer
        monkeypatch.setattr("datasets.load_dataset", self.load)

    def load(self, name, subset, *, split):
        import datasets

        self.asked.append((name, subset, split))
        if isinstance(self.answer, Exception):
            raise self.answer
        return datasets.Dataset.from_list(self.answer)


def test_a_data_set_on_the_hub(monkeypatch):
    hub = Hub(monkeypatch, ROWS)
    rows = read_rows("owner/name")
    assert rows == ROWS
    assert rows[2].where == "owner/name (train), row 3"
    rows = read_rows("owner/name", split="test", subset="main", limit=1)
    assert rows == ROWS[:1]
    assert rows[0].where == "owner/name, subset main (test), row 1"
    assert hub.asked == [("owner/name", None, "train"), ("owner/name", "main", "test")]
    hub.answer = []
    with pytest.raises(DataError, match=r"^owner/name is empty"):
        read_rows("owner/name")


def test_local_files_win_over_the_hub(tmp_path, monkeypatch):
    hub = Hub(monkeypatch, [{"prompt": "from the hub"}])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    write(tmp_path / "owner" / "name" / "q.csv")
    assert read_rows("owner/name") == ROWS
    assert hub.asked == []


@pytest.mark.parametrize(
    "source", ["/owner/name", "./owner", "../owner/name", "~/name", "owner/name.jsonl", "data/Q.CSV", "a/b/c", "a\\b/c",
               "owner", "owner/na me", "/", "owner/"],
)  # fmt: skip
def test_invalid_dataset_names_never_reach_the_hub(tmp_path, monkeypatch, source):
    hub = Hub(monkeypatch, ROWS)
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    with pytest.raises(DataError):
        read_rows(source)
    assert hub.asked == []


def test_a_path_never_reaches_the_hub(tmp_path, monkeypatch):
    hub = Hub(monkeypatch, ROWS)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"the folder .*owner does not exist"):
        read_rows(Path("owner/name"))
    assert hub.asked == []


def test_a_hub_that_cannot_be_reached():
    """With the real package, offline."""
    with pytest.raises(
        DataError,
        match=r"no file or folder owner/name, and the hub cannot be reached: Couldn't reach .*download it on "
        r"another machine \(hf download owner/name --repo-type dataset",
    ):
        read_rows("owner/name")


def test_errors_from_the_hub(monkeypatch):
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

    hub = Hub(monkeypatch, DatasetNotFoundError("Dataset 'owner/name' doesn't exist on the Hub.\nAnd more"))
    with pytest.raises(
        DataError, match=r"no accessible dataset .*: Dataset 'owner/name' doesn't .* Hub\. Check the spelling"
    ):
        read_rows("owner/name")
    hub.answer = ValueError("Unknown split \"tset\". Should be one of ['train'].")
    with pytest.raises(DataError, match=r"owner/name, subset main, split 'tset' cannot be loaded .*Unknown split"):
        read_rows("owner/name", subset="main", split="tset")
    hub.answer = DatasetGenerationError("An error occurred while generating the dataset")
    with pytest.raises(DataError, match="split 'train' cannot be loaded from the hub: An error occurred"):
        read_rows("owner/name")
    hub.answer = RuntimeError("Dataset scripts are no longer supported")
    with pytest.raises(DataError, match="Dataset scripts are no longer supported"):
        read_rows("owner/name")


def test_without_the_datasets_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        MissingExtraError, match=r"no file or folder owner/name; reading it from the hub needs .*\[hub\]"
    ):
        read_rows("owner/name")


def test_a_broken_line_is_reported_under_its_own_number(tmp_path):
    """Line feeds alone separate lines: not the separators that occur in texts, and blank lines count."""
    good = '{"prompt": "a\u2028b\x85c", "n": 1}'
    lines = ["\ufeff" + good, "", "  ", good + "\r", good, '{"prompt": "x" "y"}', good]
    for name, data in (("rows.jsonl", "\n".join(lines)), ("rows.json", "\n".join(lines))):
        (tmp_path / name).write_text(data, encoding="utf-8", newline="")
        with pytest.raises(DataError, match=rf"^{name}, line 6, column 16: this is not JSON"):
            read_rows(tmp_path / name)
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress("\n".join(lines).encode()))
    with pytest.raises(DataError, match="line 6, column 16"):
        read_rows(packed)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('[\n{"prompt": "a"},\n\n{"prompt": b}\n]', "line 4, column 12"),
        ('[\n{"prompt": "a"}\n{"prompt": "b"}]', "line 3, column 1: this is not JSON: expected a comma"),
        ('[{"prompt": "a"},\n]', "line 2, column 1: this is not JSON: there is no value after the comma"),
        ('[{"prompt": "a"}]\n\n[]', "line 3, column 1: this is not JSON: there is more after the end"),
        ('[\n{"prompt": "a"},\n{"n": ' + "9" * 5000 + "}]", "line 3: this cannot be read as JSON"),
        ('[\n{"prompt": "a"},\n{"n": 1, "n": 2}]', "line 3: this cannot be read as JSON: the key 'n' is there twice"),
        ('{\n"prompt": "a",\n"n": x\n}', "line 3, column 6"),  # one object over several lines, and broken
        ('{"prompt": "a"}\n{"prompt":\n{"prompt": "c"}', "line 2, column 11"),
        ('[{"prompt": "a"}', "line 1, column 17: this is not JSON: expected a comma or the end"),
        ("[", "line 1, column 2"),
    ],
)
def test_places_in_a_json_file(tmp_path, text, place):
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(DataError, match=f"^rows.json, {place}"):
        read_rows(tmp_path / "rows.json")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "a", "prompt": "b"}', "the key 'prompt' is there twice"),
        ('{"prompt": "a", "x": {"y": 1, "y": 1}}', "the key 'y' is there twice"),
        ('{"prompt": "a", "n": ' + "9" * 5000 + "}", "4300 digits"),
        ('{"prompt": ' + "[" * 100_000, "nested too deeply"),
        ('{"prompt": ' + "[" * 150 + "]" * 150 + "}", "nested more than 100 deep"),
        ('{"prompt": "a"} {"prompt": "b"}', "column 17: this is not JSON: there is more after the object"),
        ('{"prompt": "\\ud800"}', "lone surrogate"),
        ("{", "this is not JSON"),
    ],
)
def test_lines_that_json_readers_would_take_or_crash_on(tmp_path, line, problem):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n\n' + line + "\n")
    with pytest.raises(DataError, match=problem) as error:
        read_rows(tmp_path / "rows.jsonl")
    assert str(error.value).startswith("rows.jsonl, line 3")


def test_a_line_and_a_list_have_a_largest_size(tmp_path, monkeypatch):
    monkeypatch.setattr("groupwise.data.text_files.LONGEST_LINE", 1_000_000)
    monkeypatch.setattr("groupwise.data.text_files.LARGEST_JSON", 1_000_000)
    short, long = (json.dumps({"prompt": "x" * length}) for length in (900_000, 1_100_000))
    (tmp_path / "rows.jsonl").write_text(f"{short}\n{short}\n")
    assert len(read_rows(tmp_path / "rows.jsonl")) == 2
    (tmp_path / "rows.jsonl").write_text(f"{short}\n{long}\n")
    with pytest.raises(DataError, match=r"rows.jsonl, line 2 has more than 1 MB"):
        read_rows(tmp_path / "rows.jsonl")
    (tmp_path / "rows.json").write_text(f"[{short}, {short}]")
    with pytest.raises(DataError, match=r"rows.json has more than 1 MB; write a .jsonl file"):
        read_rows(tmp_path / "rows.json")
    (tmp_path / "rows.csv").write_text('prompt\n"never closed\n' + "x\n" * 600_000)
    with pytest.raises(DataError, match=r"rows.csv, line 2: this is not CSV: field larger than field limit"):
        read_rows(tmp_path / "rows.csv")
    bomb = gzip.compress(b"0" * 50_000_000)
    (tmp_path / "rows.jsonl.gz").write_bytes(bomb)
    with pytest.raises(DataError, match="line 1 has more than 1 MB"):
        read_rows(tmp_path / "rows.jsonl.gz")


def test_parquet_files_that_python_cannot_hold(tmp_path):
    import pyarrow
    from pyarrow import parquet

    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["prompt", "prompt"])
    parquet.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(DataError, match="two columns named 'prompt'"):
        read_rows(tmp_path / "twice.parquet")
    when = pyarrow.array([2**62], pyarrow.int64()).cast(pyarrow.timestamp("ms"), safe=False)
    parquet.write_table(pyarrow.table({"prompt": ["a"], "when": when}), tmp_path / "when.parquet")
    with pytest.raises(DataError, match=r"when.parquet is damaged"):
        read_rows(tmp_path / "when.parquet")


def test_a_link_to_nothing(tmp_path):
    (tmp_path / "rows.jsonl").symlink_to("nowhere.jsonl")
    with pytest.raises(DataError, match=r"is a link to nowhere.jsonl, which does not exist"):
        read_rows(tmp_path / "rows.jsonl")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "other").symlink_to("other")  # a loop that is no data file
    (tmp_path / "folder" / "a.jsonl").write_text('{"prompt": "a"}\n')
    assert read_rows(tmp_path / "folder") == [{"prompt": "a"}]
