"""The Parquet files of rollouts: columns, types, resumption and damage."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.errors import CheckpointError, InputError, RunDirError
from groupwise.training.store.rollout_files import COLUMNS, RolloutWriter, read_rollouts


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run" / "rollouts"


@pytest.fixture
def writer(folder):
    return RolloutWriter(folder)


def make_table(step: int = 1, **changes):
    """Two samples of one prompt."""
    columns = {
        "stop_reason": ["end", "length"],
        "judge": ["fine", None],
        "step": [step, step],
        "prompt_number": [0, 0],
        "row": [7, 7],
        "sample": [0, 1],
        "group": [0, 0],
        "prompt": ["2 + 2?", "2 + 2?"],
        "completion": ["4", "5 – or"],
        "reward/form": torch.tensor([0.5, math.nan]),
        "reward/right": [1, 0],
        "reward": [1.5, math.nan],
        "advantage": np.array([0.5, 0.0], dtype=np.float32),
        "contributes": torch.tensor([True, False]),
        "masked_out": [None, "truncated"],
        "prompt_tokens": [4, 4],
        "completion_tokens": torch.tensor([1, 3]),
    }
    return {**columns, **changes}


def test_columns_and_types(folder, writer):
    writer.write(12, make_table(12))
    path = folder / "step-000012.parquet"
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    written = pa.parquet.read_table(path)
    names = [name for name in COLUMNS if name not in ("reward/", "grade/")]
    names[names.index("advantage") : names.index("advantage")] = ["reward/form", "reward/right"]
    assert written.column_names == [*names, "judge"]
    types = {field.name: str(field.type) for field in written.schema}
    assert types == {**{name: COLUMNS.get(name, "double") for name in names}, "judge": "string"}
    first, second = written.to_pylist()
    assert first == {
        "step": 12,
        "prompt_number": 0,
        "row": 7,
        "sample": 0,
        "group": 0,
        "prompt": "2 + 2?",
        "completion": "4",
        "reward": 1.5,
        "reward/form": 0.5,
        "reward/right": 1.0,
        "advantage": 0.5,
        "contributes": True,
        "masked_out": None,
        "prompt_tokens": 4,
        "completion_tokens": 1,
        "stop_reason": "end",
        "judge": "fine",
    }
    assert (second["reward"], second["reward/form"], second["masked_out"]) == (None, None, "truncated")
    assert (second["completion"], second["contributes"], second["judge"]) == ("5 – or", False, None)
    assert pa.parquet.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD"


def test_the_folder_is_one_data_set_if_a_column_is_empty_in_a_step(folder, writer):
    import pandas

    writer.write(1, make_table(1, votes=[3, 4]))
    writer.write(2, make_table(2, masked_out=[None] * 2, reward=[math.nan] * 2, group=[None] * 2, votes=[None] * 2))
    writer.write(3, make_table(3, votes=[2.5, None]))
    schemas = {pa.parquet.read_schema(path) for path in folder.iterdir()}
    assert len(schemas) == 1
    dataset = pa.dataset.dataset(folder).to_table()
    assert dataset["votes"].to_pylist() == [3, 4, None, None, 2.5, None]
    assert dataset == read_rollouts(folder.parent)
    frame = pandas.read_parquet(folder)
    assert frame["reward"].isna().tolist() == [False, True, True, True, False, True]


@pytest.mark.parametrize(
    ("values", "kind", "kept"),
    [
        ([True, None], "bool", [True, None]),
        ([True, 2], "double", [1.0, 2.0]),
        ([np.float32(0.5), torch.tensor(3)], "double", [0.5, 3.0]),
        ([math.nan, math.inf], "double", [None, math.inf]),
        ([1, "one"], "string", ["1", "one"]),
        ([[1, 2], {"a": None}], "string", ["[1, 2]", "{'a': None}"]),
        ([None, None], "string", [None, None]),
        (["\ud83d!", ""], "string", ["?!", ""]),
        ([torch.ones(2), None], "string", ["tensor([1., 1.])", None]),
    ],
)
def test_columns_of_reward_functions(folder, writer, values, kind, kept):
    writer.write(1, make_table(extra=values))
    column = read_rollouts(folder)["extra"]
    assert (str(column.type), column.to_pylist()) == (kind, kept)


def test_a_column_keeps_its_type_also_in_a_resumed_run(folder, writer):
    writer.write(1, make_table(1, a=[None, 1], b=[True, False], c=["x", "y"], d=[None, None]))
    writer.write(2, make_table(2, a=[True, True], b=[None, None], c=[1, 2], d=[0.5, None]))
    RolloutWriter(folder).write(3, make_table(3, a=[None, None], b=[None, None], c=[None, None], d=[None, None]))
    for step in (2, 3):
        schema = pa.parquet.read_schema(folder / f"step-{step:06d}.parquet")
        assert [str(schema.field(name).type) for name in "abcd"] == ["double", "bool", "string", "double"]
    table = read_rollouts(folder)
    assert table["d"].to_pylist() == [None, None, 0.5, None, None, None]  # first empty, then numbers
    assert table["c"].to_pylist() == ["x", "y", "1", "2", None, None]
    assert table["a"].to_pylist() == [None, 1, 1, 1, None, None]


def test_different_types_are_read_as_the_widest(folder, writer):
    writer.write(1, make_table(1, x=[True, False], only_here=[1, 2]))
    writer.write(2, make_table(2, x=[0.5, 2]))
    writer.write(3, make_table(3, x=["a", None]))
    assert read_rollouts(folder, [1, 2])["x"].to_pylist() == [1.0, 0.0, 0.5, 2.0]
    assert read_rollouts(folder)["x"].to_pylist() == ["true", "false", "0.5", "2", "a", None]
    assert read_rollouts(folder)["only_here"].to_pylist() == [1, 2, None, None, None, None]


texts = st.text(alphabet=st.characters(blacklist_categories=["Cs"]))
rewards = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(st.tuples(texts, rewards, st.booleans(), st.none() | texts), min_size=1))
def test_round_trip(samples):
    completions, scores, contributes, notes = map(list, zip(*samples, strict=True))
    table = {
        "completion": completions,
        "reward": scores,
        "contributes": contributes,
        "masked_out": notes,
        "note": notes,
    }
    with tempfile.TemporaryDirectory() as folder:
        RolloutWriter(Path(folder)).write(1, table)
        read = read_rollouts(Path(folder)).to_pydict()
    assert read == {**table, "reward": [None if math.isnan(score) else score for score in scores]}


def test_a_folder_that_cannot_be_written(folder, writer):
    folder.parent.mkdir()
    folder.write_text("in the way")
    with pytest.raises(CheckpointError, match="is a file, not"):
        writer.write(1, make_table())


def test_reading_some_steps(folder, writer):
    for step in (2, 4, 1_000_000):
        writer.write(step, make_table(step))
    (folder / "step-notes.parquet").write_text("not ours")
    assert read_rollouts(folder)["step"].to_pylist() == [2, 2, 4, 4, 1_000_000, 1_000_000]
    assert read_rollouts(folder, (4, 2, 4))["step"].to_pylist() == [4, 4, 2, 2]
    with pytest.raises(RunDirError, match=r"has no rollouts of step 3, 5; it has 3 steps between 2 and 1000000"):
        read_rollouts(folder, [2, 3, 5])
    with pytest.raises(InputError, match="steps is empty"):
        read_rollouts(folder, [])
    (folder / "step-000004.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(CheckpointError, match=r"step-000004.parquet is damaged: .* Remove it"):
        read_rollouts(folder)


def test_a_folder_without_rollouts(folder):
    with pytest.raises(RunDirError, match=r"has no rollouts .*run.save_rollouts"):
        read_rollouts(folder)


def test_a_damaged_file_does_not_stop_a_resumed_run(folder, writer):
    folder.mkdir(parents=True)
    (folder / "step-000001.parquet").write_bytes(b"nothing")
    writer.write(2, make_table(2, votes=[1, 2]))
    assert read_rollouts(folder, [2])["votes"].to_pylist() == [1, 2]
