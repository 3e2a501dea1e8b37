"""The recorder: files and sinks get the metrics, resumed runs drop later steps, and failing sinks do not stop a run."""

from __future__ import annotations

import math
import struct
import sys
import types
from contextlib import closing

import numpy as np
import pytest
import torch

from groupwise.config import make_recipe
from groupwise.errors import MissingExtraError, RunDirError
from groupwise.rundir import RunDir, read_metrics
from groupwise.training.extras import check_extras
from groupwise.training.store.recorder import Recorder, rewind


@pytest.fixture
def run(tmp_path):
    with RunDir.create(tmp_path / "run") as run:
        yield run


def quiet(text: str) -> None:
    pytest.fail(f"unexpected message: {text}")


def events(folder):
    """The events in the order in which TensorBoard reads them; checks the checksums."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    result = []
    for path in sorted(folder.glob("*tfevents*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            body = data[at + 12 : at + 12 + length]
            assert struct.unpack_from("<I", data, at + 8) == (masked_crc32c(data[at : at + 8]),)
            assert struct.unpack_from("<I", data, at + 12 + length) == (masked_crc32c(body),)
            result.append(Event.FromString(body))
            at += 16 + length
    return result


def visible(folder):
    """What TensorBoard shows: (step, name) → value. A session start hides the steps from there on."""
    from tensorboardX.proto.event_pb2 import SessionLog

    shown = {}
    for event in events(folder):
        if event.HasField("session_log"):
            assert event.session_log.status == SessionLog.START
            shown = {key: value for key, value in shown.items() if key[0] < event.step}
        for value in event.summary.value:
            shown[event.step, value.tag] = value.simple_value
    return shown


def test_metrics_are_written_to_the_file_and_to_tensorboard(run):
    with closing(Recorder(run, say=quiet)) as recorder:
        recorder.evaluation(0, {"accuracy": 0.25, "length": 3})
        recorder.step(1, {"reward": torch.tensor(0.5), "num_tokens": 12, "kl": None})
        recorder.step(2, {"reward": math.nan, "loss": math.inf, "huge": 1e300, "entropy": np.float64(1.5), "note": "x"})
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


def test_a_resumed_run_drops_later_steps(run):
    with closing(Recorder(run, say=quiet)) as recorder:
        for step in range(1, 6):
            recorder.step(step, {"reward": step})
            recorder.rollouts(step, {"step": [step], "reward": [1.0]})
    rewind(run, 3)
    with closing(Recorder(run, resumed_at=3, say=quiet)) as recorder:
        assert len(list((run.path / "tensorboard").iterdir())) == 2  # nothing is overwritten within a second
        assert visible(run.path / "tensorboard") == {(step, "reward"): step for step in (1, 2, 3)}
        recorder.step(4, {"reward": 40})
    assert [row["reward"] for row in read_metrics(run.path / "metrics.jsonl")] == [1, 2, 3, 40]
    assert visible(run.path / "tensorboard") == {(step, "reward"): value for step, value in enumerate((1, 2, 3, 40), 1)}
    assert sorted(path.stem for path in (run.path / "rollouts").iterdir()) == [
        f"step-00000{step}" for step in (1, 2, 3)
    ]


def test_a_rollout_file_that_cannot_be_deleted(run):
    (run.path / "rollouts" / "step-000009.parquet").mkdir(parents=True)
    with pytest.raises(RunDirError, match=r"step-000009.parquet.* cannot be deleted"):
        rewind(run, 3)


def test_events_are_flushed_during_the_run(run):
    with closing(Recorder(run, say=quiet)) as recorder:
        recorder.step(1, {"reward": 1.0})
        assert visible(run.path / "tensorboard") == {(1, "reward"): 1.0}


def test_without_tensorboard(run, monkeypatch):
    with closing(Recorder(run, tensorboard=False, say=quiet)) as recorder:
        recorder.step(1, {"reward": 1.0})
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    said = []
    with closing(Recorder(run, say=said.append)) as recorder:  # the default: only if the package is there
        recorder.step(2, {"reward": 1.0})
    assert said == []
    with pytest.raises(MissingExtraError, match=r"pip install 'groupwise\[tensorboard\]'"):
        Recorder(run, tensorboard=True, say=quiet)
    assert not (run.path / "tensorboard").exists()
    assert len(read_metrics(run.path / "metrics.jsonl")) == 2


def test_a_recipe_that_asks_for_tensorboard_is_refused_before_anything_is_loaded(monkeypatch):
    recipe = make_recipe({"run": {"tensorboard": True}})
    check_extras(recipe)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(MissingExtraError, match=r"run\.tensorboard.*pip install 'groupwise\[tensorboard\]'"):
        check_extras(recipe)
    check_extras(make_recipe({}))


def test_a_full_disk_switches_tensorboard_off_and_is_reported_once(run, monkeypatch):
    import tensorboardX

    said = []
    recorder = Recorder(run, say=said.append)
    recorder.step(1, {"reward": 1.0})

    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensorboardX.RecordWriter, "write", full)
    for step in range(2, 40):
        recorder.step(step, {"reward": 1.0})
    recorder.close()
    (message,) = said
    assert message.startswith("TensorBoard gets no more metrics: No space left on device. ")
    assert len(read_metrics(run.path / "metrics.jsonl")) == 39


def test_a_full_disk_at_the_start(run, monkeypatch):
    import tensorboardX

    def full(self):
        raise OSError(28, "No space left on device")

    said = []
    monkeypatch.setattr(tensorboardX.RecordWriter, "flush", full)
    with closing(Recorder(run, say=said.append)) as recorder:
        recorder.step(1, {"reward": 1.0})
    (message,) = said
    assert message.startswith("TensorBoard gets no metrics: No space left on device. ")


def test_a_file_instead_of_tensorboards_folder_is_reported(run):
    (run.path / "tensorboard").write_text("in the way")
    said = []
    with closing(Recorder(run, say=said.append)) as recorder:
        recorder.step(1, {"reward": 1.0})
    (message,) = said
    assert message.startswith("TensorBoard gets no metrics: ")
    assert "is a file, not a folder. The run continues" in message


def test_metrics_that_cannot_be_written_stop_the_run_and_reach_no_sink(run, monkeypatch):
    def full(line):
        raise RunDirError("metrics.jsonl could not be written: the disk is full")

    monkeypatch.setattr(run.metrics, "_append", full)
    with closing(Recorder(run, say=quiet)) as recorder, pytest.raises(RunDirError, match="the disk is full"):
        recorder.step(1, {"reward": 1.0})
    assert visible(run.path / "tensorboard") == {}


class FakeWandb(types.ModuleType):
    """The three functions that are used."""

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
            raise RuntimeError("the server is away.\nTraceback")
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


def test_wandb_gets_the_numbers_and_a_resumed_run_continues_the_same_run(run, wandb):
    settings = {"train": {"steps": 3}}
    with closing(Recorder(run, tensorboard=False, wandb="quiz", settings=settings, say=quiet)) as recorder:
        recorder.evaluation(0, {"accuracy": 0.25})
        recorder.step(1, {"reward": 0.5, "kl": None, "loss": math.nan})
    Recorder(run, tensorboard=False, wandb="quiz", resumed_at=1, say=quiet).close()
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
    ("refuse", "message", "rows"),
    [
        ("init", "Weights & Biases gets no metrics: no network.", 0),
        ("log", "Weights & Biases gets no more metrics: the server is away.", 1),
        ("finish", "Weights & Biases gets no more metrics: RuntimeError.", 3),
    ],
)
def test_a_wandb_failure_is_reported_once(run, wandb, refuse, message, rows):
    said = []
    wandb.refuse = "init" if refuse == "init" else ""
    recorder = Recorder(run, wandb="quiz", say=said.append)
    recorder.step(1, {"reward": 1})
    wandb.refuse = refuse
    recorder.step(2, {"reward": 2})
    recorder.step(3, {"reward": 3})
    recorder.close()
    assert said == [f"{message} The run continues; metrics.jsonl has them all"]
    assert len(wandb.rows) == rows
    assert len(read_metrics(run.path / "metrics.jsonl")) == 3
    assert len(visible(run.path / "tensorboard")) == 3  # the other sink is not affected


def test_without_wandb(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"reporting to Weights & Biases .* pip install 'groupwise\[wandb\]'"):
        Recorder(run, wandb="quiz", say=quiet)
