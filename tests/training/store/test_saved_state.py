"""A checkpoint whose state or tensors are not those of a run is damaged, and the one before it is used."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from groupwise.errors import CheckpointError
from groupwise.rundir import RunDir, read_json, write_json
from groupwise.rundir.files import LATER_STATE, write_manifest
from groupwise.training.store import checkpoint
from groupwise.training.store.saved_state import check_state
from groupwise.training.trainer import Trainer
from tests.training.runs import run_steps, small_trainer

SETTINGS = {
    "train": {"steps": 3, "batch_size": 2},
    "sampling": {"max_new_tokens": 3},
    "evaluate": {"every": 2, "max_new_tokens": 1},
    "loss": {"kl_coef": 0.05},
}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> Iterator[tuple[Path, Trainer]]:
    """The folder of a run with checkpoints of steps 1 and 2, and the trainer that would resume it."""
    folder = tmp_path_factory.mktemp("state") / "run"
    run_steps(small_trainer(folder, SETTINGS), 2)
    (folder / "checkpoint-2" / LATER_STATE).unlink(missing_ok=True)
    with small_trainer(folder, SETTINGS, resume=True) as trainer:
        yield folder, trainer


@pytest.fixture
def newest(resumed, tmp_path) -> Iterator[Any]:
    """A copy of the newest checkpoint to damage, and a function that tells which one is then used."""
    folder, trainer = resumed
    home, place = trainer.run_dir, tmp_path / "run"
    shutil.copytree(folder, place, ignore=shutil.ignore_patterns(".lock", ".holder.json"))

    def used() -> str:
        write_manifest(place / "checkpoint-2")  # only the content can tell
        trainer.checkpointer.newest()
        return checkpoint.checkpoint_name(trainer.state.step)

    with RunDir.resume(place) as run:
        trainer.checkpointer.run_dir = run
        yield place / "checkpoint-2", used
        trainer.checkpointer.run_dir = home


def test_an_intact_one_is_used(newest):
    _, used = newest
    assert used() == "checkpoint-2"


PARTS = ("train", "order", "pairs", "schedule", "health_checks", "questions", "token_budget", "max_num_seqs", "threads")


def test_a_part_that_is_missing_or_of_another_type(newest):
    folder, used = newest
    state = read_json(folder / "state.json")
    file = folder / "state.json"
    for part in (*PARTS, "supervised", "refreshes", "step"):
        with pytest.raises(CheckpointError, match=rf"state\.json is damaged: {part}: Field required"):
            check_state({name: value for name, value in state.items() if name != part}, 2, file)
        wrong = {} if part == "pairs" else None
        with pytest.raises(CheckpointError, match=rf"state\.json is damaged: {part}"):
            check_state({**state, part: wrong}, 2, file)
        write_json(file, {**state, part: wrong})
        assert used() == "checkpoint-1"


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("train", "step", 3),
        ("train", "tokens", -1),
        ("train", "best", {"step": 1}),
        ("train", "last", [1]),
        ("order", "position", 11),
        ("order", "deferred", [10]),
        ("order", "epoch", 1.5),
        ("order", "epoch", True),
        ("order", "seed", 2**70),
        ("health_checks", "window", "abc"),
        ("questions", "x", [1.0]),
        ("schedule", "phases", None),
        ("schedule", "observed", "many"),
        ("schedule", "fired", [[5, 1]]),
        (None, "threads", 10**9),
        (None, "token_budget", 0),
        (None, "max_num_seqs", "128"),
        (None, "step", 1),
        (None, "format", 1),
    ],
)
def test_absurd_values(newest, part, key, value):
    folder, used = newest
    state = read_json(folder / "state.json")
    (state if part is None else state[part])[key] = value
    write_json(folder / "state.json", state)
    assert used() == "checkpoint-1"


def change_tensors(file: Path, change: Any) -> None:
    tensors = load_file(file)
    change(tensors, sorted(tensors))
    save_file(tensors, file, metadata={"format": "pt"})


TENSORS = {
    "a missing moment": ("optimizer", lambda tensors, names: tensors.pop(names[0])),
    "a moment of another weight": (
        "optimizer",
        lambda tensors, names: tensors.update({"exp_avg/other": torch.ones(2)}),
    ),
    "a moment of another shape": ("optimizer", lambda tensors, names: tensors.update({names[0]: torch.ones(3, 3)})),
    "a missing weight": ("masters", lambda tensors, names: tensors.pop(names[0])),
    "a weight of another shape": ("masters", lambda tensors, names: tensors.update({names[0]: torch.ones(3, 3)})),
    "no weights": ("masters", lambda tensors, names: tensors.clear()),
    "a missing weight of the reference": ("reference", lambda tensors, names: tensors.pop(names[0])),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_do_not_fit(newest, name):
    folder, used = newest
    file, change = TENSORS[name]
    change_tensors(folder / f"{file}.safetensors", change)
    assert used() == "checkpoint-1"


@pytest.mark.parametrize("name", ["masters", "optimizer"])
def test_a_manifest_that_omits_a_file_which_is_gone(newest, name):
    folder, used = newest
    (folder / f"{name}.safetensors").unlink()
    assert used() == "checkpoint-1"


def test_it_is_said_what_is_damaged(newest, resumed):
    folder, used = newest
    said = resumed[1].display.said
    said.clear()
    change_tensors(folder / "optimizer.safetensors", TENSORS["a missing moment"][1])
    used()
    assert "has only a part of the state" in said[0]
