"""Run folders as they are found: running, interrupted, damaged, resumed, of another version, or not a run at all."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from groupwise.analysis.run_reader import RunReader, find_runs
from groupwise.config import make_recipe
from groupwise.errors import CheckpointError, RunDirError
from groupwise.rundir import RunDir, write_json
from groupwise.training.store.rollout_files import ROLLOUTS, RolloutWriter
from groupwise.training.store.run_folder import mark_finished


def samples(step: int, *completions: str) -> dict[str, list]:
    """The table of a step of one prompt."""
    texts = list(completions) or ["a", "b"]
    fixed = {"step": step, "prompt_number": 0, "prompt": "Say"}
    table = {name: [value] * len(texts) for name, value in fixed.items()}
    numbers = list(range(len(texts)))
    rewards = [float(step * number) for number in numbers]
    return {
        **table,
        "row": [number + 1 for number in numbers],
        "sample": numbers,
        "completion": texts,
        "reward": rewards,
    }


def write_run(folder: Path, rows: list[dict], **settings: object) -> Path:
    """A closed run with these rows and settings, and rollouts of its steps."""
    with RunDir.create(folder) as run:
        run.write_json("recipe.json", make_recipe(overrides=settings).recorded())
        run.write_json("inputs.json", {"training rows": "12, abc", "training pairs": "none"})
        writer = RolloutWriter(folder / ROLLOUTS)
        for row in rows:
            run.metrics.record(row["step"], {name: value for name, value in row.items() if name != "step"})
            if "reward" in row:
                writer.write(row["step"], samples(row["step"]))
    return folder


def steps(*numbers: int) -> list[dict]:
    return [{"step": number, "reward": number / 10, "num_tokens": 100 * number} for number in numbers]


@pytest.fixture
def folder(tmp_path):
    rows = [{"step": 0, "eval/accuracy": 0.25, "eval/accuracy_low": 0.2}, *steps(1, 2, 3)]
    return write_run(tmp_path / "run", [*rows, {"step": 3, "eval/accuracy": 0.5, "eval/accuracy_low": 0.4}])


def test_what_a_run_says(folder):
    reader = RunReader(folder)
    assert reader.problems == []
    assert (reader.name, reader.step, reader.status, reader.metric) == ("run", 3, "stopped", "accuracy")
    assert [row["step"] for row in reader.training_rows] == [1, 2, 3]
    assert [row["step"] for row in reader.evaluations] == [0, 3]
    assert reader.column("eval/accuracy") == ([0, 3], [0.25, 0.5])
    assert reader.column("unknown") == ([], [])
    assert reader.metric_names == ["eval/accuracy", "eval/accuracy_low", "reward", "num_tokens"]
    assert reader.settings["loss.kl_coef"] == reader.recipe["loss"]["kl_coef"] == 0.0
    assert reader.parsed_recipe() == make_recipe()
    assert reader.rollout_steps == [1, 2, 3]
    assert (reader.token_steps, reader.evaluation_steps, reader.checkpoints) == ([], [], {})
    assert reader.rollouts(2, ["reward", "row", "unknown"]) == [{"row": 1, "reward": 0.0}, {"row": 2, "reward": 2.0}]
    assert not reader.refresh()


def test_the_number_of_steps(tmp_path):
    batch = {"train.batch_size": 4, "train.accumulation": 1}
    assert RunReader(write_run(tmp_path / "steps", [], **{"train.steps": 7})).total_steps == 7
    assert RunReader(write_run(tmp_path / "epochs", [], **{"train.epochs": 2.0, **batch})).total_steps == 6
    assert RunReader(write_run(tmp_path / "sft", [], **{"train.steps": 0, "sft.steps": 9})).total_steps == 9
    folder = write_run(tmp_path / "unknown", [], **{"train.steps": 3})
    (folder / "recipe.json").write_text("{}")
    assert RunReader(folder).total_steps is None
    write_json(folder / "finished.json", {"step": 5, "total_steps": 5})
    assert RunReader(folder).total_steps == 5


def test_phases_in_steps_and_tokens(tmp_path):
    recipe = make_recipe(
        {
            "train": {"steps": 10},
            "phases": [
                {"name": "hot", "steps": 2, "temperature": 1.2},
                {"name": "warm", "tokens": 250, "temperature": 1.1},
                {"name": "cold", "temperature": 0.9},
            ],
        }
    )
    folder = write_run(tmp_path / "run", steps(*range(1, 8)))
    write_json(folder / "recipe.json", recipe.recorded())
    # After 2 steps 200 tokens were sampled; the second phase ends with the step that reaches 450: step 5.
    assert RunReader(folder).phases == [("hot", 1, 2), ("warm", 3, 5), ("cold", 6, 7)]


def test_a_running_run_grows(tmp_path):
    with RunDir.create(tmp_path / "run") as run:
        reader = RunReader(run.path)
        assert (reader.status, reader.step, reader.problems) == ("running", 0, [])
        assert reader.recipe == reader.settings == {}
        run.metrics.record(1, {"reward": math.nan})
        assert reader.refresh()
        first = reader.training_rows[0]
        assert math.isnan(first["reward"])
        with open(run.path / "metrics.jsonl", "ab") as file:  # a line that is being written
            file.write(b'{"step": 2, "rew')
            file.flush()
            assert not reader.refresh()
            file.write(b'ard": 0.5}\n')
        assert reader.refresh()
        assert reader.column("reward")[0] == [1, 2]
        assert reader.training_rows[0] is first  # only what was appended is read
    assert reader.refresh()
    assert reader.status == "stopped"


@pytest.mark.parametrize("last", [2, 5])
def test_a_resumed_run_rewinds_its_metrics(folder, last):
    reader = RunReader(folder)
    with RunDir.resume(folder) as run:
        run.metrics.rewind(1)
        for step in range(2, last + 1):
            run.metrics.record(step, {"reward": 7.0})
    assert reader.refresh()
    assert reader.column("reward") == ([*range(1, last + 1)], [0.1, *[7.0] * (last - 1)])


def test_a_file_of_the_same_length_that_was_replaced_in_place(folder):
    reader = RunReader(folder)
    path = folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b"0.5", b"0.9"))
    assert reader.refresh()
    assert reader.column("eval/accuracy") == ([0, 3], [0.25, 0.9])


def test_damaged_lines_are_left_out_and_named(folder):
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b'{"step": 1, "reward\n', b"[1]\n", *lines[2:], b'{"step": 9']))
    reader = RunReader(folder)
    assert [row["step"] for row in reader.rows] == [0, 2, 3, 3]
    assert len(reader.problems) == 2
    assert reader.problems[0].startswith("metrics.jsonl, line 2 is damaged: it is not JSON")
    assert reader.problems[1].startswith("metrics.jsonl, line 3 is damaged")
    path.unlink()
    assert reader.refresh()
    assert (reader.rows, reader.problems, reader.step, reader.metric_names) == ([], [], 0, [])


@pytest.mark.parametrize("content", ["{", "[]", "\x00\xff", '{"train": 5}', '{"train": {"unknown": 1}}'])
def test_a_recipe_that_cannot_be_read(folder, content):
    (folder / "recipe.json").write_text(content)
    reader = RunReader(folder)
    assert reader.parsed_recipe() is None
    assert (reader.total_steps, reader.phases) == (None, [])
    assert len(reader.problems) == 1
    assert "recipe.json" in reader.problems[0]
    write_json(folder / "recipe.json", make_recipe(overrides={"train.steps": 3}).recorded())
    assert reader.refresh()
    assert (reader.total_steps, reader.problems) == (3, [])


@pytest.mark.parametrize(
    "name", ["inputs.json", "versions.json", "best.json", "resumed.json", "finished.json", "run.json"]
)
@pytest.mark.parametrize(
    "content", [b"{", b"[3]", b"", b"null", b'{"step": "x", "resumed": 5, "metric": [], "format": 9}']
)
def test_any_small_file_may_be_damaged(folder, name, content):
    (folder / name).write_bytes(content)
    reader = RunReader(folder)
    facts = (reader.inputs, reader.versions, reader.changes, reader.total_steps, reader.phases, reader.created)
    assert reader.step == 3, facts
    assert reader.status in ("stopped", "finished")
    assert reader.metric == "accuracy"
    damaged = not content.startswith(b'{"')
    assert any(name in problem for problem in reader.problems) == (damaged or name == "run.json")


def test_a_number_beyond_the_largest_float(folder):
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(f'{{"step": 4, "reward": -1{"0" * 400}, "note": "text", "nothing": null, "flag": true}}\n')
    reader = RunReader(folder)
    assert reader.column("reward")[1][-1] == -math.inf
    assert (reader.column("note"), reader.column("nothing"), reader.column("flag")) == (
        ([], []),
        ([], []),
        ([4], [1.0]),
    )


def test_changes_on_resume(folder):
    write_json(folder / "resumed.json", {"resumed": [{"step": 2, "changed": {"train.steps": [3, 9]}}, {"step": "?"}]})
    assert RunReader(folder).changes == [{"step": 2, "changed": {"train.steps": [3, 9]}}]


def test_damaged_and_deleted_rollouts(folder):
    reader = RunReader(folder)
    whole = reader.rollouts(1)
    file = folder / ROLLOUTS / "step-000003.parquet"
    for content in (
        b"",
        b"PAR1",
        file.read_bytes()[:-30],
        file.read_bytes()[: len(file.read_bytes()) // 2],
        os.urandom(500),
    ):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"step-000003.parquet is damaged"):
            reader.rollouts(3)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"step-000003\.parquet"):
        reader.rollouts(3)  # deleted since the files were listed
    with pytest.raises(CheckpointError, match=r"no file of step 8; there are 3 steps between 1 and 3"):
        reader.rollouts(8)
    shutil.rmtree(folder / ROLLOUTS)
    reader.refresh()
    assert reader.rollout_steps == []
    with pytest.raises(CheckpointError, match="there are none"):
        reader.rollouts(1)
    assert whole[0]["completion"] == "a"


def test_rollouts_that_are_written_again_are_read_again(folder):
    reader = RunReader(folder)
    assert reader.rollouts(1) is reader.rollouts(1)
    RolloutWriter(folder / ROLLOUTS).write(1, samples(1, "new"))
    assert [row["completion"] for row in reader.rollouts(1)] == ["new"]
    RolloutWriter(folder / ROLLOUTS).write(1, {"step": [1], "prompt": ["another program's"]})
    with pytest.raises(CheckpointError, match=r"step-000001.parquet is damaged: 'prompt_number' is missing"):
        reader.rollouts(1)


def test_the_checkpoints_that_there_are(folder):
    for step in (2, 10):
        (folder / f"checkpoint-{step}").mkdir()
    (folder / ".unfinished-old-checkpoint-1").mkdir()
    reader = RunReader(folder)
    assert reader.checkpoints == {2: folder / "checkpoint-2", 10: folder / "checkpoint-10"}
    (folder / "checkpoint-2").rmdir()  # pruned meanwhile
    assert list(reader.checkpoints) == [10]


def holder(pid: int, host: str = socket.gethostname(), since: str = "2035-01-01T00:00:00+0000") -> dict:
    return {"pid": pid, "host": host, "since": since}


def test_the_status_of_runs(folder):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    cases = [
        (None, "stopped"),
        (holder(os.getpid()), "running"),
        (holder(ended.pid), "stopped"),  # killed
        (holder(os.getpid(), since="2001-01-01T00:00:00+0000"), "stopped"),  # another process got its number
        (holder(os.getpid(), since="?"), "running"),
        (holder(os.getpid(), host="elsewhere"), "unknown"),
        ({"pid": "1"}, "unknown"),
        (holder(-1), "unknown"),
    ]
    for entry, status in cases:
        (folder / ".holder.json").unlink(missing_ok=True)
        if entry is not None:
            write_json(folder / ".holder.json", entry)
        assert RunReader(folder).status == status, entry


def test_finished_runs(folder):
    with RunDir.resume(folder) as run:
        mark_finished(run, 3, 3)
        assert RunReader(folder).status == "finished"  # the process still has the folder open
    assert RunReader(folder).status == "finished"
    with RunDir.resume(folder) as run:
        os.utime(folder / "finished.json", (1, 1))
        assert RunReader(folder).status == "running"  # resumed, to go on
        run.metrics.record(4, {"reward": 1.0})
    assert RunReader(folder).status == "stopped"


def test_nothing_is_written_or_locked(folder):
    (folder / "checkpoint-3").mkdir()
    before = sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))
    reader = RunReader(folder)
    with RunDir.resume(folder):  # would fail if the reader had the lock
        pass
    before = sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))
    reader.refresh()
    reader.rollouts(1)
    assert (reader.phases, reader.problems) == ([], [])
    assert sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*")) == before


def test_folders_that_hold_no_run(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name, reason in (("missing", "does not exist"), ("file", "is a file"), ("empty", "there is no run.json in it")):
        with pytest.raises(RunDirError, match=f"{name} .*{reason}|{name} {reason}"):
            RunReader(tmp_path / name)
        with pytest.raises(RunDirError, match=name):
            find_runs([tmp_path / name])
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(RunDirError, match="loop"):
        RunReader(tmp_path / "loop")


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read(folder):
    folder.chmod(0)
    try:
        with pytest.raises(RunDirError, match="Permission denied"):
            RunReader(folder)
    finally:
        folder.chmod(0o755)


def test_runs_below_a_folder_newest_first(tmp_path):
    for name, created in (("b/old", "2025-01-01T00:00:00+0000"), ("new", "2026-01-01T00:00:00+0000"), ("c/d/e", "")):
        RunDir.create(tmp_path / name).close()
        write_json(tmp_path / name / "run.json", {"format": 1, "created": created})
    (tmp_path / "b" / "old" / "inner").mkdir()
    write_json(tmp_path / "b" / "old" / "inner" / "run.json", {})
    (tmp_path / "link").symlink_to("new")
    (tmp_path / "broken").symlink_to("nowhere")
    (tmp_path / ".hidden").mkdir()
    assert find_runs([tmp_path]) == [tmp_path / "link", tmp_path / "b" / "old"]  # c/d/e is too deep
    assert find_runs([tmp_path / "c"]) == [tmp_path / "c" / "d" / "e"]
    assert find_runs([tmp_path / "new", tmp_path / "link"]) == [tmp_path / "new"]
    assert find_runs([tmp_path / "new"])[0].samefile(RunReader(tmp_path / "link").path)


def test_reading_loads_no_torch():
    """So that a page opens at once."""
    modules = "run_reader, groups, tree, questions"
    code = (
        f"import sys; from groupwise.analysis import {modules}; print('torch' in sys.modules, 'pyarrow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_thousand_steps_are_read_once(tmp_path):
    rows = [{"step": step, **{f"m/{name}": step + name for name in range(80)}} for step in range(1, 1001)]
    folder = write_run(tmp_path / "run", [])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = RunReader(folder)
    assert len(reader.rows) == 1000
    assert reader.column("m/79") == (list(range(1, 1001)), [float(step + 79) for step in range(1, 1001)])
    assert not reader.refresh()
