"""What a run leaves behind: the files hold what was given, viewers forget what was undone, and nobody stops a run."""

from __future__ import annotations

import math
import struct
import sys
import types

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.errors import CheckpointError, InputError, MissingExtraError, RunDirError
from groupwise.rundir import RunDir, read_metrics
from groupwise.training.display.curves import draw_curves
from groupwise.training.store.recorder import Recorder, is_share, rewind
from groupwise.training.store.rollout_files import COLUMNS, read_rollouts


@pytest.fixture
def run(tmp_path):
    with RunDir.create(tmp_path / "run") as run:
        yield run


def quiet(text: str) -> None:
    pytest.fail(f"said without need: {text}")


def table(step: int = 1, **changes):
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


# --- metrics and TensorBoard ------------------------------------------------------------------------------------------


def events(folder):
    """The events in TensorBoard's files, in the order in which it reads them; the checksums must be right."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    found = []
    for path in sorted(folder.glob("*tfevents*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            body = data[at + 12 : at + 12 + length]
            assert struct.unpack_from("<I", data, at + 8) == (masked_crc32c(data[at : at + 8]),)
            assert struct.unpack_from("<I", data, at + 12 + length) == (masked_crc32c(body),)
            found.append(Event.FromString(body))
            at += 16 + length
    return found


def visible(folder):
    """What a viewer shows: (step, name) → value. A session's start makes it forget the steps from there on."""
    from tensorboardX.proto.event_pb2 import SessionLog

    shown = {}
    for event in events(folder):
        if event.HasField("session_log"):
            assert event.session_log.status == SessionLog.START
            shown = {key: value for key, value in shown.items() if key[0] < event.step}
        for value in event.summary.value:
            shown[event.step, value.tag] = value.simple_value
    return shown


def test_a_row_goes_to_the_file_and_to_tensorboard(run):
    with Recorder(run, say=quiet) as records:
        records.evaluation(0, {"accuracy": 0.25, "eval/length": 3})
        records.step(1, {"reward": torch.tensor(0.5), "num_tokens": 12, "kl": None})
        records.step(2, {"reward": math.nan, "loss": math.inf, "huge": 1e300, "entropy": np.float64(1.5), "note": "x"})
    rows = read_metrics(run.path / "metrics.jsonl")
    assert rows[:2] == [
        {"step": 0, "eval/accuracy": 0.25, "eval/length": 3},
        {"step": 1, "reward": 0.5, "num_tokens": 12, "kl": None},
    ]
    assert math.isnan(rows[2].pop("reward"))
    assert rows[2] == {"step": 2, "loss": math.inf, "huge": 1e300, "entropy": 1.5, "note": "x"}
    assert visible(run.path / "tensorboard") == {
        (0, "eval/accuracy"): 0.25,
        (0, "eval/length"): 3,
        (1, "reward"): 0.5,
        (1, "num_tokens"): 12,
        (2, "entropy"): 1.5,
    }
    assert events(run.path / "tensorboard")[0].file_version == "brain.Event:2"


def test_a_resumed_run_forgets_and_viewers_too(run):
    with Recorder(run, say=quiet) as records:
        for step in range(1, 6):
            records.step(step, {"reward": step})
            records.rollouts(step, table(step))
    rewind(run, 3)
    with Recorder(run, resumed_at=3, say=quiet) as records:
        assert len(list((run.path / "tensorboard").iterdir())) == 2  # also within one second nothing is written over
        assert visible(run.path / "tensorboard") == {(step, "reward"): step for step in (1, 2, 3)}
        records.step(4, {"reward": 40})
    assert [row["reward"] for row in read_metrics(run.path / "metrics.jsonl")] == [1, 2, 3, 40]
    assert visible(run.path / "tensorboard") == {
        (1, "reward"): 1,
        (2, "reward"): 2,
        (3, "reward"): 3,
        (4, "reward"): 40,
    }
    assert sorted(path.name for path in (run.path / "rollouts").iterdir()) == [
        "step-000001.parquet",
        "step-000002.parquet",
        "step-000003.parquet",
    ]


def test_a_rollout_that_cannot_be_deleted_is_named(run):
    (run.path / "rollouts" / "step-000009.parquet").mkdir(parents=True)
    with pytest.raises(RunDirError, match=r"step-000009.parquet, of a step that is done again, cannot be deleted"):
        rewind(run, 3)


def test_events_reach_the_disk_while_the_run_goes_on(run, monkeypatch):
    monkeypatch.setattr("groupwise.training.store.recorder.FLUSH_SECONDS", 0.0)
    with Recorder(run, say=quiet) as records:
        records.step(1, {"reward": 1.0})
        assert visible(run.path / "tensorboard") == {(1, "reward"): 1.0}


def test_without_tensorboard(run, monkeypatch):
    with Recorder(run, tensorboard=False, say=quiet) as records:
        records.step(1, {"reward": 1.0})
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    said = []
    with Recorder(run, say=said.append) as records:
        records.step(2, {"reward": 1.0})
    assert said == ["TensorBoard events are not written: for them, pip install 'groupwise[tensorboard]'"]
    assert not (run.path / "tensorboard").exists()
    assert len(read_metrics(run.path / "metrics.jsonl")) == 2


def test_a_full_disk_switches_tensorboard_off_and_is_said_once(run, monkeypatch):
    import tensorboardX

    said = []
    records = Recorder(run, say=said.append)
    records.step(1, {"reward": 1.0})

    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensorboardX.RecordWriter, "write", full)
    for step in range(2, 40):
        records.step(step, {"reward": 1.0})
    records.close()
    assert said == [
        "TensorBoard gets no more metrics: No space left on device. The run goes on; metrics.jsonl has them all"
    ]
    assert len(read_metrics(run.path / "metrics.jsonl")) == 39


def test_a_disk_that_is_full_at_the_start(run, monkeypatch):
    import tensorboardX

    def full(self):
        raise OSError(28, "No space left on device")

    said = []
    monkeypatch.setattr(tensorboardX.RecordWriter, "flush", full)
    with Recorder(run, say=said.append) as records:
        records.step(1, {"reward": 1.0})
    assert said == ["TensorBoard gets no metrics: No space left on device. The run goes on; metrics.jsonl has them all"]


def test_tensorboard_that_cannot_begin_is_said(run, capsys):
    (run.path / "tensorboard").write_text("in the way")
    with Recorder(run) as records:
        records.step(1, {"reward": 1.0})
    said = capsys.readouterr().err
    assert said.startswith("groupwise: TensorBoard gets no metrics: ")
    assert "is a file, not a folder. The run goes on; metrics.jsonl has them all\n" in said


def test_metrics_that_cannot_be_written_stop_the_run_and_are_told_to_nobody(run, monkeypatch):
    def full(line):
        raise RunDirError("metrics.jsonl could not be written: the disk is full")

    monkeypatch.setattr(run.metrics, "_append", full)
    with Recorder(run, say=quiet) as records, pytest.raises(RunDirError, match="the disk is full"):
        records.step(1, {"reward": 1.0})
    assert visible(run.path / "tensorboard") == {}


# --- Weights & Biases -------------------------------------------------------------------------------------------------


class FakeWandb(types.ModuleType):
    """The three calls that are used of the package."""

    def __init__(self):
        super().__init__("wandb")
        self.started, self.rows, self.finished, self.refuse = [], [], 0, ""

    def init(self, **options):
        if self.refuse == "init":
            raise ConnectionError("no network")
        self.started.append(options)
        return self

    def log(self, values, step):
        if self.refuse == "log":
            raise RuntimeError("\n".join(["the server", "is away."]))
        self.rows.append((step, values))

    def finish(self):
        self.finished += 1
        if self.refuse == "finish":
            raise RuntimeError


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_gets_the_numbers_and_a_resumed_run_goes_on_with_its_id(run, wandb):
    settings = {"train": {"steps": 3}}
    with Recorder(run, tensorboard=False, wandb="quiz", settings=settings, say=quiet) as records:
        records.evaluation(0, {"accuracy": 0.25})
        records.step(1, {"reward": 0.5, "kl": None, "loss": math.nan})
    with Recorder(run, tensorboard=False, wandb="quiz", resumed_at=1, say=quiet):
        pass
    first, second = wandb.started
    assert first == {
        "project": "quiz",
        "name": "run",
        "id": first["id"],
        "resume": "allow",
        "dir": str(run.path),
        "config": settings,
    }
    assert second["id"] == first["id"]
    assert len(first["id"]) == 12
    assert wandb.rows == [(0, {"eval/accuracy": 0.25}), (1, {"reward": 0.5})]
    assert wandb.finished == 2


@pytest.mark.parametrize(
    ("refuse", "sentence", "rows"),
    [
        ("init", "Weights & Biases gets no metrics: no network.", 0),
        ("log", "Weights & Biases gets no more metrics: the server is away.", 1),
        ("finish", "Weights & Biases gets no more metrics: RuntimeError.", 3),
    ],
)
def test_wandb_that_fails_is_said_once(run, wandb, refuse, sentence, rows):
    said = []
    wandb.refuse = "init" if refuse == "init" else ""
    records = Recorder(run, wandb="quiz", say=said.append)
    records.step(1, {"reward": 1})
    wandb.refuse = refuse
    records.step(2, {"reward": 2})
    records.step(3, {"reward": 3})
    records.close()
    assert said == [f"{sentence} The run goes on; metrics.jsonl has them all"]
    assert len(wandb.rows) == rows
    assert len(read_metrics(run.path / "metrics.jsonl")) == 3
    assert len(visible(run.path / "tensorboard")) == 3  # the other watcher is not concerned


def test_without_wandb(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"reporting to Weights & Biases .* pip install 'groupwise\[wandb\]'"):
        Recorder(run, wandb="quiz", say=quiet)


# --- rollouts ---------------------------------------------------------------------------------------------------------


def test_rollouts_have_their_columns_in_order_with_plain_types(run):
    with Recorder(run, tensorboard=False, say=quiet) as records:
        records.rollouts(12, table(12))
    path = run.path / "rollouts" / "step-000012.parquet"
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    found = pa.parquet.read_table(path)
    own = [name for name in COLUMNS if name != "reward/"]
    own[own.index("advantage") : own.index("advantage")] = ["reward/form", "reward/right"]
    assert found.column_names == [*own, "judge"]
    types = {field.name: str(field.type) for field in found.schema}
    assert types == {**{name: COLUMNS.get(name, "double") for name in own}, "judge": "string"}
    first, second = found.to_pylist()
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


def test_the_folder_is_one_data_set_though_a_column_is_empty_in_a_step(run):
    import pandas

    with Recorder(run, tensorboard=False, say=quiet) as records:
        records.rollouts(1, table(1, votes=[3, 4]))
        records.rollouts(2, table(2, masked_out=[None] * 2, reward=[math.nan] * 2, group=[None] * 2, votes=[None] * 2))
        records.rollouts(3, table(3, votes=[2.5, None]))
    folder = run.path / "rollouts"
    schemas = {pa.parquet.read_schema(path) for path in folder.iterdir()}
    assert len(schemas) == 1
    whole = pa.dataset.dataset(folder).to_table()
    assert whole["votes"].to_pylist() == [3, 4, None, None, 2.5, None]
    assert whole == read_rollouts(run.path)
    frame = pandas.read_parquet(folder)
    assert frame["reward"].isna().tolist() == [False, True, True, True, False, True]


@pytest.mark.parametrize(
    ("given", "kind", "kept"),
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
def test_columns_that_reward_functions_add(run, given, kind, kept):
    with Recorder(run, tensorboard=False, say=quiet) as records:
        records.rollouts(1, table(extra=given))
    column = read_rollouts(run.path)["extra"]
    assert (str(column.type), column.to_pylist()) == (kind, kept)


def test_an_added_column_keeps_its_type_also_when_the_run_is_resumed(run):
    with Recorder(run, tensorboard=False, say=quiet) as records:
        records.rollouts(1, table(1, a=[None, 1], b=[True, False], c=["x", "y"], d=[None, None]))
        records.rollouts(2, table(2, a=[True, True], b=[None, None], c=[1, 2], d=[0.5, None]))
    with Recorder(run, tensorboard=False, resumed_at=2, say=quiet) as records:
        records.rollouts(3, table(3, a=[None, None], b=[None, None], c=[None, None], d=[None, None]))
    for step in (2, 3):
        schema = pa.parquet.read_schema(run.path / "rollouts" / f"step-{step:06d}.parquet")
        assert [str(schema.field(name).type) for name in "abcd"] == ["double", "bool", "string", "double"]
    whole = read_rollouts(run.path)
    assert whole["d"].to_pylist() == [None, None, 0.5, None, None, None]  # empty text at first, numbers later
    assert whole["c"].to_pylist() == ["x", "y", "1", "2", None, None]
    assert whole["a"].to_pylist() == [None, 1, 1, 1, None, None]


def test_types_that_differ_are_read_as_the_widest(run):
    with Recorder(run, tensorboard=False, say=quiet) as records:
        records.rollouts(1, table(1, x=[True, False], only_here=[1, 2]))
        records.rollouts(2, table(2, x=[0.5, 2]))
        records.rollouts(3, table(3, x=["a", None]))
    assert read_rollouts(run.path, [1, 2])["x"].to_pylist() == [1.0, 0.0, 0.5, 2.0]
    assert read_rollouts(run.path)["x"].to_pylist() == ["true", "false", "0.5", "2", "a", None]
    assert read_rollouts(run.path)["only_here"].to_pylist() == [1, 2, None, None, None, None]


texts = st.text(alphabet=st.characters(blacklist_categories=["Cs"]))
rewards = st.floats(allow_nan=True, allow_infinity=True)


@settings(max_examples=25)
@given(st.lists(st.tuples(texts, rewards, st.booleans(), st.none() | texts), min_size=1))
def test_whatever_was_sampled_comes_back(samples):
    import tempfile

    completions, scores, contributes, notes = map(list, zip(*samples, strict=True))
    given = {
        "completion": completions,
        "reward": scores,
        "contributes": contributes,
        "masked_out": notes,
        "note": notes,
    }
    with tempfile.TemporaryDirectory() as folder, RunDir.create(folder) as run:
        with Recorder(run, tensorboard=False, say=quiet) as records:
            records.rollouts(1, given)
        found = read_rollouts(run.path).to_pydict()
    assert found == {**given, "reward": [None if math.isnan(score) else score for score in scores]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": [1.0]}, r"must be equally long, got .*'reward': 1"),
        ({"row": ["seven", 8]}, r"column 'row' must hold int64 values"),
        ({"row": [0.5, 8]}, r"column 'row' must hold int64 values: 0.5 is no whole number"),
        ({"reward/right": ["yes", "no"]}, r"column 'reward/right' must hold double values"),
        ({"contributes": [1, 0]}, r"column 'contributes' must hold bool values"),
    ],
)
def test_a_table_that_cannot_be_written(run, changes, message):
    with Recorder(run, tensorboard=False, say=quiet) as records, pytest.raises(InputError, match=message):
        records.rollouts(1, table(**changes))
    assert not (run.path / "rollouts").exists()


def test_rollouts_that_cannot_be_written_stop_the_run(run):
    (run.path / "rollouts").write_text("in the way")
    with Recorder(run, tensorboard=False, say=quiet) as records, pytest.raises(CheckpointError, match="is a file, not"):
        records.rollouts(1, table())


def test_no_rollouts_where_none_are_wanted(run):
    with Recorder(run, rollouts=False, tensorboard=False, say=quiet) as records:
        records.rollouts(1, table())
    assert not (run.path / "rollouts").exists()


def test_some_steps_are_read(run):
    with Recorder(run, tensorboard=False, say=quiet) as records:
        for step in (2, 4, 1_000_000):
            records.rollouts(step, table(step))
    (run.path / "rollouts" / "step-notes.parquet").write_text("not ours")
    assert read_rollouts(run.path)["step"].to_pylist() == [2, 2, 4, 4, 1_000_000, 1_000_000]
    assert read_rollouts(run.path / "rollouts", (4, 2, 4))["step"].to_pylist() == [4, 4, 2, 2]
    with pytest.raises(RunDirError, match=r"has no rollouts of step 3, 5; it has 3 steps between 2 and 1000000"):
        read_rollouts(run.path, [2, 3, 5])
    with pytest.raises(InputError, match="asked for no step at all"):
        read_rollouts(run.path, [])
    (run.path / "rollouts" / "step-000004.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(CheckpointError, match=r"step-000004.parquet is damaged: .* Remove it"):
        read_rollouts(run.path)


def test_a_folder_without_rollouts(run):
    with pytest.raises(RunDirError, match=r"holds no rollouts .* was the run told to keep them"):
        read_rollouts(run.path)


def test_a_damaged_newest_file_does_not_hinder_a_resumed_run(run):
    (run.path / "rollouts").mkdir()
    (run.path / "rollouts" / "step-000001.parquet").write_bytes(b"nothing")
    with Recorder(run, tensorboard=False, say=quiet) as records:
        records.rollouts(2, table(2, votes=[1, 2]))
    assert read_rollouts(run.path, [2])["votes"].to_pylist() == [1, 2]


# --- the picture ------------------------------------------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch):
    figures = []
    monkeypatch.setattr("groupwise.plots.save_figure", lambda figure, path: figures.append(figure))
    return figures


def record(run, rows):
    for step, values in rows:
        run.metrics.record(step, values)


def title(axes):
    return axes.get_title(loc="left")


WHOLE = {
    "entropy": 1.0,
    "kl": 0.1,
    "completions/mean_length": 20.0,
    "completions/clipped_ratio": 0.25,
}


def test_every_panel_is_drawn(run, drawn):
    record(run, [(0, {"eval/accuracy": 0.25, "eval/accuracy_low": 0.2, "eval/accuracy_high": 0.4})])
    record(run, [(step, {"reward": float(step), **WHOLE}) for step in range(1, 41)])
    record(run, [(40, {"eval/accuracy": 0.5})])
    assert draw_curves(run.path, metric="accuracy", goal=0.8) == run.path / "curves.png"
    panels = {title(axes): axes for axes in drawn[0].axes}
    assert list(panels) == [
        "reward while training",
        "right on held-out questions",
        "entropy",
        "KL to the reference",
        "tokens in an answer",
        "answers cut off",
    ]
    raw, smooth = panels["reward while training"].lines
    np.testing.assert_array_equal(raw.get_ydata(), np.arange(1, 41))
    # 40 points, so 2 on each side: in the middle the mean of five, at the ends of those that there are.
    np.testing.assert_allclose(smooth.get_ydata()[[0, 1, 2, 20, 38, 39]], [2, 2.5, 3, 21, 38.5, 39])
    assert raw.get_alpha() < 1
    held_out = panels["right on held-out questions"]
    assert held_out.lines[0].get_xdata().tolist() == [0, 40]
    assert held_out.lines[0].get_ydata().tolist() == [0.25, 0.5]
    assert held_out.lines[0].get_marker() == "o"
    assert held_out.lines[1].get_ydata() == [0.8, 0.8]
    assert held_out.texts[0].get_text() == "goal 80 %"
    band = held_out.collections[0].get_paths()[0].get_extents()
    assert (band.y0, band.y1) == (0.2, 0.4)  # of the one evaluation that has an interval
    for name, shown in (("answers cut off", "30 %"), ("right on held-out questions", "30 %"), ("entropy", "0.30")):
        formatter = panels[name].yaxis.get_major_formatter()
        formatter.set_locs([0.25, 0.3])
        assert formatter(0.3) == shown


@pytest.mark.parametrize(
    ("values", "metric", "titles", "columns"),
    [
        ({"reward": 1.0}, "accuracy", ["reward while training"], 1),
        ({"reward": 1.0, "kl": 0.5}, "accuracy", ["reward while training", "KL to the reference"], 2),
        ({"reward": 1.0, "eval/score": 70.0}, "score", ["reward while training", "score, held out"], 2),
        ({"reward": 1.0, "eval/score": 70.0}, None, ["reward while training"], 1),
        (
            {"reward": math.nan, "entropy": None, "kl": "x", "completions/clipped_ratio": 0.0},
            "a",
            ["answers cut off"],
            1,
        ),
    ],
)
def test_what_was_not_recorded_is_left_out(run, drawn, values, metric, titles, columns):
    record(run, [(1, values), (2, values)])
    assert draw_curves(run.path, metric=metric) is not None
    assert [title(axes) for axes in drawn[0].axes] == titles
    assert drawn[0].axes[0].get_gridspec().ncols == columns


def test_an_accuracy_that_is_in_percent_already_is_not_made_so_again(run, drawn):
    record(run, [(1, {"eval/accuracy": 40.0}), (2, {"eval/accuracy": 50.0})])
    draw_curves(run.path, metric="accuracy", goal=60)
    (axes,) = drawn[0].axes
    assert axes.texts[0].get_text() == "goal 60"
    axes.yaxis.get_major_formatter().set_locs([40, 50])
    assert axes.yaxis.get_major_formatter()(40) == "40"


def test_a_last_panel_without_a_neighbour_is_as_wide_as_two(run, drawn):
    record(run, [(step, {"reward": 1.0, "eval/accuracy": 0.5, "entropy": 1.0}) for step in (1, 2)])
    draw_curves(run.path, metric="accuracy")
    spans = [axes.get_subplotspec() for axes in drawn[0].axes]
    assert [(span.colspan.start, span.colspan.stop) for span in spans] == [(0, 1), (1, 2), (0, 2)]
    assert [(span.rowspan.start, span.rowspan.stop) for span in spans] == [(0, 2), (0, 2), (2, 4)]


def test_the_picture_is_a_whole_file(run):
    record(run, [(step, {"reward": 1.0 / step, "eval/accuracy": 1.0, **WHOLE}) for step in range(1, 30)])
    path = draw_curves(run.path, metric="accuracy", goal=0.5)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.read_bytes().endswith(b"IEND\xaeB`\x82")


def test_nothing_to_draw(run):
    assert draw_curves(run.path, metric="accuracy") is None
    record(run, [(1, {"loss": 1.0})])
    assert draw_curves(run.path, metric="accuracy") is None
    assert not (run.path / "curves.png").exists()


def test_without_matplotlib_there_is_no_picture(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    record(run, [(1, {"reward": 1.0})])
    assert draw_curves(run.path, metric=None) is None
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["accuracy", "eval/accuracy_lenient", "pass@1", "completions/clipped_ratio", "right"])
def test_shares(name):
    assert is_share(name)


@pytest.mark.parametrize("name", ["reward", "generated", "brightness", "length", "", "passenger"])
def test_no_shares(name):
    assert not is_share(name)
