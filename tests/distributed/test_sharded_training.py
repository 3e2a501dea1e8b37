"""Runs with sharded weights (FSDP2): results of one process, and checkpoints that any number of processes resumes."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from groupwise.distributed.shards import read_complete
from groupwise.errors import CheckpointError, InputError
from groupwise.rundir import read_json
from groupwise.training.store import checkpoint, sharded
from groupwise.training.store.rollout_files import read_rollouts
from groupwise.training.update.objective import Objective
from tests.distributed.forks import Ended, drive, fork_ranks, values
from tests.distributed.test_training import CASES, check_metrics, check_records, train

pytestmark = pytest.mark.slow

HERE = "tests.distributed.test_sharded_training"
SHARDED: dict[str, Any] = {"model": {"sharding": "weights"}}
COMPARED: dict[str, dict[str, Any]] = {
    "kl": {"model": {"gradient_checkpointing": True}},
    "coupled_pairs": {},
    "kept": {},
    "lora": {"loss": {"kl_coef": 0.1}, "model": {"gradient_checkpointing": True, "float32_head": True}},
    "untied": {"loss": {"kl_coef": 0.1, "kl": "full"}, "model": {"float32_head": True}},
}
SIZES = {"kl": (2, 3), "lora": (2, 3), "kept": (3,)}  # the others run on two ranks
# A finished run of two steps, which ranks do two more of it, and how: sharded, or with all weights on each.
RESUMED = {
    "kl-2": [("to1", 1, {}), ("to3", 3, SHARDED), ("to2full", 2, {})],
    "kl-1": [("from1", 2, SHARDED)],
    "lora-2": [("to1", 1, {})],
    "lora-1": [("from1", 3, SHARDED)],
}


def case_of(name: str, root: Path) -> tuple[str, dict[str, Any]]:
    """The case of `CASES` and the changes of a name that begins as in `COMPARED`."""
    base = name.partition("-")[0]
    changes = dict(COMPARED[base])
    if base == "untied":
        changes["model"] = {**changes["model"], "source": str(root / "untied-model")}
    return base if base in CASES else "refill", changes


def go(root: Path, name: str, size: int, *changes: dict[str, Any], **options: Any) -> list[Ended]:
    """Train in ``root/name/run``."""
    case, own = case_of(name, root)
    (root / name).mkdir(exist_ok=True)
    pairs = [
        {"prompt": f"Say {n}: ", "chosen": "aei"[n % 3] * (n + 2), "rejected": "xyz"[n % 3] * 3} for n in range(14)
    ]
    (root / name / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return fork_ranks(size, lambda: train(case, root / name / "run", own, *changes, **options))


def write_untied(folder: Path) -> None:
    """The tiny model with a head of its own."""
    from transformers import LlamaForCausalLM

    from groupwise.model.tiny import tiny_config, tiny_model, tiny_tokenizer

    tied, config = tiny_model(0), tiny_config()
    config.tie_word_embeddings = False
    model = LlamaForCausalLM(config)
    model.load_state_dict({**tied.state_dict(), "lm_head.weight": tied.lm_head.weight.flip(1)})
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def run_all(folder: str) -> dict[str, Any]:
    """All runs of this module, in one process that forks; how the ranks ended of which one was killed or failed."""
    root = Path(folder)
    for name in COMPARED:
        values(go(root, f"{name}-1", 1))
        for size in SIZES.get(name, (2,)):
            values(go(root, f"{name}-{size}", size, SHARDED))
    four: dict[str, Any] = {"train": {"steps": 4}}
    for name, continued in RESUMED.items():
        for suffix, size, changes in continued:
            shutil.copytree(root / name, root / f"{name}-{suffix}")
            values(go(root, f"{name}-{suffix}", size, four, changes, resume=True))
    for name in ("kl", "lora"):
        values(go(root, f"{name}-four", 1, four))
        shutil.copytree(root / f"{name}-2", root / f"{name}-export")
        shutil.rmtree(root / f"{name}-export" / "run" / "model")
        values(go(root, f"{name}-export", 1, resume=True))  # there is no step to do
    return {
        "killed": [kill_while_saving(root, victim) for victim in (0, 1)],
        "failed": {kind: fail_in_a_pass(root, kind) for kind in FAILURES},
    }


def kill_while_saving(root: Path, victim: int) -> list[Any]:
    """A rank is killed while it writes the slices of step 2; then the run is resumed."""
    original, name = sharded.write_shards, f"kl-killed{victim}"

    def write(place: Path, tensors: Any, rank: int) -> None:
        original(place, tensors, rank)
        if rank == victim and place.parent.name.endswith("checkpoint-2"):
            os.kill(os.getpid(), signal.SIGKILL)

    sharded.write_shards = write
    ended = go(root, name, 2, SHARDED)
    sharded.write_shards = original
    left = sorted(path.name for path in (root / name / "run").glob("checkpoint-*"))
    values(go(root, name, 2, SHARDED, resume=True))
    unfinished = [path.name for path in (root / name / "run").iterdir() if path.name.startswith(".unfinished")]
    return [[end.status for end in ended], ended[1 - victim].error, left, unfinished]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise InputError("this rank cannot go on")


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


FAILURES = {"die": die, "fail": fail, "memory": run_out_of_memory}


def fail_in_a_pass(root: Path, kind: str) -> list[Any]:
    """Something happens to rank 1 between a forward pass and its backward pass, while rank 0 waits for its weights."""
    original = Objective.terms

    def terms(objective: Objective, micro_batch: Any) -> Any:
        if os.environ["RANK"] == "1":
            FAILURES[kind]()
        return original(objective, micro_batch)

    Objective.terms = terms  # type: ignore[method-assign]
    ended = go(root, f"kl-{kind}", 2, SHARDED)
    Objective.terms = original  # type: ignore[method-assign]
    return [[end.status, end.error] for end in ended]


class Runs(NamedTuple):
    root: Path
    killed: list[Any]
    failed: dict[str, Any]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    root = tmp_path_factory.mktemp("runs")
    write_untied(root / "untied-model")
    return Runs(root, **drive(f"{HERE}:run_all", str(root)))


def saved(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Masters, optimizer state and reference of a checkpoint, whichever form it has."""
    place = folder / f"checkpoint-{step}"
    checkpoint.verify_checkpoint(place)
    if (place / "shards").is_dir():
        return read_complete(place / "shards")
    tensors = {}
    for kind in ("masters", "optimizer", "reference"):
        if (place / f"{kind}.safetensors").exists():
            prefix = "" if kind == "optimizer" else f"{kind}/"
            tensors |= {prefix + name: value for name, value in load_file(place / f"{kind}.safetensors").items()}
    return tensors


def check_close(one: Path, other: Path, step: int) -> None:
    """The same samples; metrics, weights, optimizer state and reference within 1e-10."""
    rollouts, others = (read_rollouts(folder).to_pydict() for folder in (one, other))
    assert rollouts["completion"] == others["completion"]
    check_records(one, other)
    check_metrics(one, other)
    first, second = saved(one, step), saved(other, step)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        # Where a gradient is 0 but for rounding, AdamW's first steps are of the size of the learning rate.
        torch.testing.assert_close(tensor, second[name], rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize("name", COMPARED)
def test_the_result_is_that_of_one_process(runs, name):
    for size in SIZES.get(name, (2,)):
        folder = runs.root / f"{name}-{size}" / "run"
        check_close(runs.root / f"{name}-1" / "run", folder, 2)
        writers = {file.name.partition("-model")[0] for file in (folder / "checkpoint-2" / "shards").iterdir()}
        assert writers == {f"shard-{number:05d}" for number in range(1, size + 1)}


@pytest.mark.parametrize("name", [f"{name}-{suffix}" for name, runs in RESUMED.items() for suffix, *_ in runs])
def test_a_run_saved_by_some_ranks_is_resumed_by_others(runs, name):
    check_close(runs.root / f"{name.partition('-')[0]}-four" / "run", runs.root / name / "run", 4)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_while_saving_leaves_no_half_of_a_checkpoint(runs, victim):
    statuses, error, left, unfinished = runs.killed[victim]
    assert statuses[victim] == -signal.SIGKILL
    assert statuses[1 - victim] == 2
    assert "saving a checkpoint" in error
    assert ("rank 1 (" if victim else "another rank died") in error  # rank 0 holds what is known about the others
    assert left == ["checkpoint-1"]
    assert unfinished == []
    tensors, others = saved(runs.root / f"kl-killed{victim}" / "run", 2), saved(runs.root / "kl-2" / "run", 2)
    assert tensors.keys() == others.keys()
    assert [name for name in tensors if not torch.equal(tensors[name], others[name])] == []


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("die", "another rank died"),
        ("fail", "rank 1 failed while updating: this rank"),
        ("memory", "lower train.token_budget"),
    ],
)
def test_a_rank_that_fails_in_a_pass_ends_the_others(runs, kind, words):
    (status, error), (failed, _) = runs.failed[kind]
    assert status == 2
    assert words in error
    assert failed == (-signal.SIGKILL if kind == "die" else 2)


def check_same_files(one: Path, other: Path) -> None:
    """Check that two folders have the same safetensors files, bit for bit."""
    names, others = (
        sorted(file.relative_to(folder) for file in folder.rglob("*.safetensors")) for folder in (one, other)
    )
    assert names == others != []
    assert [name for name in names if not filecmp.cmp(one / name, other / name, shallow=False)] == []


@pytest.mark.parametrize("name", ["kl", "lora"])
def test_the_export_is_that_of_one_process_bit_for_bit(runs, name):
    folder, one = runs.root / f"{name}-2" / "run" / "model", runs.root / f"{name}-export" / "run" / "model"
    check_same_files(folder, one)
    for file in ("config.json", "generation_config.json", "tokenizer.json"):
        assert read_json(folder / file) == read_json(one / file)


def test_a_damaged_slice_is_found(runs, tmp_path):
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(runs.root / "kl-2" / "run" / "checkpoint-2", folder)
    checkpoint.verify_checkpoint(folder)
    file = next((folder / "shards").glob("shard-00002-*"))
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="has been changed"):
        checkpoint.verify_checkpoint(folder)
    file.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        checkpoint.verify_checkpoint(folder)
