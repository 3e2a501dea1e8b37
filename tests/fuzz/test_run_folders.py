"""Run folders in which something is damaged: a run resumes from what is intact, or says what is damaged."""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.analysis.groups import groups_of, select
from groupwise.analysis.questions import Questions
from groupwise.analysis.run_reader import RunReader
from groupwise.analysis.tree import group_tree
from groupwise.errors import CheckpointError, GroupwiseError
from groupwise.rundir import RunDir, read_metrics
from groupwise.rundir.files import MANIFEST, write_manifest
from groupwise.training.display import Display
from groupwise.training.display.base import RunFacts
from groupwise.training.store import checkpoint
from groupwise.training.store.changes import changed_evaluation, record_changes
from groupwise.training.store.inputs import describe_inputs
from groupwise.training.store.recorder import last_metrics, rewind
from groupwise.training.store.rollout_files import read_rollouts
from groupwise.training.store.run_folder import check_inputs, find_run, nothing_to_resume, write_inputs, write_recipe
from groupwise.training.trainer import Trainer
from tests.fuzz import accepted, many
from tests.training.runs import run_steps, small_trainer

BORDER = "run folders"
SETTINGS = {
    "train": {"steps": 4, "batch_size": 2},
    "sampling": {"max_new_tokens": 3},
    "evaluate": {"every": 1, "max_new_tokens": 1, "before_training": False},
    "loss": {"kl_coef": 0.05},
    "rules": [{"when": "reward < 2", "over": 2, "then": "learning_rate * 0.9"}],
}
ODD: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 3, 10**9, 2**53, 2**70, -(2**70), 0.5, 1e308, float("nan"), float("inf")),
    *("", "x", "NaN", "../..", "/etc/passwd", "a\0b", "\x1b[31m", "\u202e", "\ud800", "9" * 5000, "x" * 10_000),
    *([], {}, [[]], [None], {"": None}, [1, 2], {"step": 1}, json.loads("[" * 300 + "]" * 300)),
]


class Run(NamedTuple):
    folder: Path
    trainer: Trainer
    inputs: dict[str, Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """A stopped run with three checkpoints, and the trainer that would resume it; in memory, where that is possible."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as base:
        yield from stopped_run(Path(base) / "run")


def stopped_run(folder: Path) -> Iterator[Run]:
    run_steps(small_trainer(folder, SETTINGS), 2)
    changed = {**SETTINGS, "sampling": {"max_new_tokens": 2}}
    run_steps(small_trainer(folder, changed, resume=True), 1)
    (folder / "finished.json").write_text('{"step": 3, "total_steps": 3}')
    with small_trainer(folder, SETTINGS, resume=True) as trainer:
        yield Run(folder, trainer, describe_inputs(trainer.components))


def paths_in(value: Any, depth: int = 10) -> list[tuple[Any, ...]]:
    """The paths to the values within a JSON value."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(), *((key, *path) for key, inner in entries if depth for path in paths_in(inner, depth - 1))]


@st.composite
def mutated(draw: Any, value: Any) -> Any:
    """A JSON value in which one to three things are dropped, replaced, repeated or wrapped."""
    value = json.loads(json.dumps(value))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(paths_in(value)))
        odd = copy.deepcopy(draw(st.sampled_from(ODD)))
        if not path:
            value = draw(st.sampled_from([value, odd, [value], {"x": value}]))
            continue
        holder = value
        for key in path[:-1]:
            holder = holder[key]
        change = draw(st.sampled_from(["drop", "replace", "replace", "wrap", "add"]))
        if change == "drop":
            del holder[path[-1]]
        elif change == "add" and isinstance(holder, dict):
            holder[draw(st.sampled_from(["", "step", "..", "x" * 300, "\u200b"]))] = odd
        else:
            holder[path[-1]] = [holder[path[-1]]] if change == "wrap" else odd
    return value


def as_bytes(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def damage_of(draw: Any, content: bytes, *, is_json: bool) -> bytes:
    """The content of a damaged file."""
    kinds = ["cut", "flip", "empty", "random", "more", *(["json"] * 6 if is_json else [])]
    kind = draw(st.sampled_from(kinds))
    if kind == "json":
        return as_bytes(draw(mutated(json.loads(content))))
    if kind == "cut":
        return content[: draw(st.integers(0, max(0, len(content) - 1)))]
    if kind == "flip":
        place = draw(st.integers(0, max(0, len(content) - 1)))
        return content[:place] + bytes([content[place] ^ draw(st.integers(1, 255))]) + content[place + 1 :]
    return {"empty": b"", "random": draw(st.binary(max_size=60)), "more": content + draw(st.binary(max_size=9))}[kind]


def replace_file(path: Path, draw: Any, content: bytes) -> None:
    """Damage a file; it may also be gone, a folder, or a link to itself or to another place."""
    path.unlink()
    kind = draw(st.sampled_from(["content"] * 8 + ["gone", "folder", "loop", "link"]))
    if kind == "content":
        path.write_bytes(content)
    elif kind == "folder":
        path.mkdir()
    elif kind != "gone":
        path.symlink_to(path.name if kind == "loop" else "/etc/hostname")


def copy_of(run: Run, to: Path) -> Path:
    """Files are replaced and never modified, so links are enough, except for the metrics and the lock."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(run.folder, to, copy_function=os.link, ignore=shutil.ignore_patterns(".lock", ".holder.json"))
    (to / "metrics.jsonl").unlink()
    shutil.copy(run.folder / "metrics.jsonl", to)
    return to


def resumed(run: Run, folder: Path) -> Path | None:
    """What a resume does before it loads weights: the checkpoint that is found, with its state loaded."""
    checkpointer, home = run.trainer.checkpointer, run.trainer.run_dir
    with RunDir.resume(folder) as run_dir:
        checkpointer.run_dir = run_dir
        try:
            check_inputs(run_dir, run.inputs, run.trainer.recipe)
            newest = checkpointer.newest()
            if newest is not None:
                checkpoint.load_checkpoint(newest, run.trainer.updater)
            record_changes(run_dir, run.trainer.recipe, run.inputs, 3)
            write_inputs(run_dir, run.inputs, None)
            write_recipe(run_dir, run.trainer.recipe, lambda text: None, resuming=True)
            rewind(run_dir, 3)
            show_metrics(folder)
        finally:
            checkpointer.run_dir = home
    return newest


def show_metrics(folder: Path) -> None:
    display = Display()
    display.start(RunFacts("", "", 0, "", "", 9, "right", ""), past=read_metrics(folder / "metrics.jsonl"))
    last_metrics(folder)


def readers(run: Run, folder: Path) -> list[Callable[[], Any]]:
    recipe, components = run.trainer.recipe, run.trainer.components
    return [
        lambda: resumed(run, folder),
        lambda: nothing_to_resume(recipe, folder),
        lambda: find_run(recipe, None, "mine.toml"),
        lambda: show_metrics(folder),
        lambda: read_rollouts(folder),
        lambda: changed_evaluation(folder, components, run.trainer.state),
        lambda: browse(folder),
    ]


def browse(folder: Path) -> None:
    """What a page, a report and a doctor read; once the run is open, each part is there or a sentence says why not."""
    reader = RunReader(folder)
    assert reader.status in ("finished", "stopped", "unknown", "running")
    facts = (reader.metric, reader.step, reader.total_steps, reader.phases, reader.changes, reader.settings)
    assert facts[1] >= 0
    assert all(isinstance(problem, str) for problem in reader.problems)
    questions = Questions(reader)
    assert all(question.status for question in [*questions.training(), *questions.held_out()])
    for step in reader.rollout_steps:
        with suppress(CheckpointError):
            groups = groups_of(reader.rollouts(step), reader.metric)
            assert select(groups, search="e", sort="spread").total <= len(groups)
            tokens = reader.tokens(step) if step in reader.token_steps else []
            assert all(group_tree(group.samples, tokens).samples for group in groups)
    for step in reader.evaluation_steps:
        with suppress(CheckpointError):
            assert reader.evaluation_answers(step)


@many(2)
@given(st.data())
def test_any_file(run, data):
    """Any file of the run folder is damaged or gone: every reader accepts it or raises an error with a sentence."""
    folder = copy_of(run, run.folder.parent / "runs" / "copy")
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    in_checkpoints = [name for name in names if len(name.parts) > 1]
    outside = [name for name in names if len(name.parts) == 1]
    some = data.draw(st.sampled_from([outside, names, in_checkpoints]))
    for name in data.draw(st.lists(st.sampled_from(some), min_size=1, max_size=2, unique=True)):
        content = (folder / name).read_bytes()
        replace_file(folder / name, data.draw, damage_of(data.draw, content, is_json=name.suffix == ".json"))
    before = os.getcwd()
    os.chdir(folder.parents[1])
    try:
        for read in data.draw(st.permutations(readers(run, folder))):
            accepted(BORDER, read)
    finally:
        os.chdir(before)


@many(3)
@given(st.data())
def test_only_the_newest_checkpoint(run, data):
    """It is used as it was, or the one before it is."""
    folder = copy_of(run, run.folder.parent / "runs" / "copy")
    newest = folder / "checkpoint-3"
    names = sorted(path.relative_to(newest) for path in newest.rglob("*") if path.is_file())
    name = data.draw(st.sampled_from([*names, *[Path("state.json")] * 10, *[Path(MANIFEST)] * 5]))
    content = (newest / name).read_bytes()
    damaged = damage_of(data.draw, content, is_json=name.suffix == ".json")
    replace_file(newest / name, data.draw, damaged)
    if name.name == "state.json" and data.draw(st.booleans()):
        with suppress(OSError):  # a link that leads to itself
            write_manifest(newest)  # then only its content can tell
    used = accepted(BORDER, lambda: resumed(run, folder))
    is_same = not (newest / name).is_symlink() and (newest / name).is_file() and damaged == content
    harmless = name.name in (MANIFEST, checkpoint.LATER_STATE) or name.suffix not in (".json", ".safetensors")
    if used is None:
        with pytest.raises(GroupwiseError):  # not of this checkpoint, but of the recipe: another seed or other rules
            resumed(run, folder)
        assert name.name == "state.json"
    else:
        assert used.name in ("checkpoint-2", "checkpoint-3")
        assert used.name == "checkpoint-2" or harmless or is_same or name.name == "state.json"
    # The weights and the state of one of them were loaded.
    assert run.trainer.state.step in (2, 3)


@many(3)
@given(st.data())
def test_lines_of_metrics(run, data):
    """Lines that are dropped, repeated, reordered, cut or replaced: a run resumes, and readers name the line."""
    folder = copy_of(run, run.folder.parent / "runs" / "copy")
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    for _ in range(data.draw(st.integers(1, 4))):
        if not lines:
            break
        place = data.draw(st.integers(0, len(lines) - 1))
        change = data.draw(st.sampled_from(["drop", "repeat", "swap", "damage", "mutate", "blank"]))
        if change == "drop":
            del lines[place]
        elif change == "repeat":
            lines.insert(place, lines[place])
        elif change == "swap":
            lines.append(lines.pop(place))
        elif change == "damage":
            lines[place] = damage_of(data.draw, lines[place] or b"{}", is_json=False)
        elif change == "mutate":
            with suppress(ValueError):
                lines[place] = as_bytes(data.draw(mutated(json.loads(lines[place])))) + b"\n"
        else:
            lines.insert(place, b"\r\n")
    (folder / "metrics.jsonl").write_bytes(b"".join(lines))
    accepted(BORDER, lambda: show_metrics(folder))
    assert accepted(BORDER, lambda: resumed(run, folder)) == folder / "checkpoint-3"
    show_metrics(folder)
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == sorted(
        row["step"] for row in read_metrics(folder / "metrics.jsonl")
    )
