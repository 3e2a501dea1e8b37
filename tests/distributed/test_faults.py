"""Processes of a run that die, hang, fail or are asked to stop; and runs that go on with another number of them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from groupwise.distributed.ranks import Ranks
from groupwise.rewards import named
from groupwise.training.trainer import Callback
from tests.distributed.forks import Ended, drive, fork_ranks, values
from tests.distributed.test_training import check_close, train
from tests.training.runs import check_same

pytestmark = pytest.mark.slow

HERE = "tests.distributed.test_faults"
STEPS = 3
QUICK: dict[str, Any] = {
    "train": {"steps": STEPS, "batch_size": 3, "accumulation": 1},
    "sampling": {"samples_per_prompt": 3, "max_new_tokens": 4},
    "evaluate": {"every": 0, "before_training": False},
}
SINGLE = {"model": {"dtype": "float32"}, "train": {"steps": 2}}
# Stages of the second step, and which of their occurrences in a run that is.
STAGES = {
    "sampling": 2,
    "scoring": 2,
    "computing log-probs": 2,
    "updating": 2,
    "stepping the optimizer": 2,
    "recording the step": 2,
    "saving a checkpoint": 5,  # three per checkpoint: before it, its files, and after it
}


def signal_at(stage: str, occurrence: int, rank: int, number: signal.Signals) -> None:
    """Let this process send itself a signal when it has begun a stage for the nth time, if it is this rank."""
    note, seen = Ranks._note, 0

    def noted(ranks: Ranks, text: str) -> None:
        nonlocal seen
        note(ranks, text)
        seen += text == stage and ranks.rank == rank
        if seen == occurrence and text == stage:
            os.kill(os.getpid(), number)

    Ranks._note = noted  # type: ignore[method-assign]


def killed_and_resumed(root: str) -> dict[str, list[Ended]]:
    """Runs of two processes, one of which is killed in each stage; all are resumed to their end."""
    folder = Path(root)
    values(fork_ranks(2, lambda: train("kl", folder / "uninterrupted", QUICK, SINGLE)))
    ended = {}
    for stage, occurrence in STAGES.items():
        for rank in range(2):
            name = f"{stage} {rank}"

            def work(stage=stage, occurrence=occurrence, rank=rank, name=name) -> Any:
                signal_at(stage, occurrence, rank, signal.SIGKILL)
                return train("kl", folder / name, QUICK, SINGLE)

            ended[name] = fork_ranks(2, work)
            values(fork_ranks(2, lambda name=name: train("kl", folder / name, QUICK, SINGLE, resume=True)))
    return ended


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> tuple[Path, dict[str, list[Any]]]:
    root = tmp_path_factory.mktemp("killed")
    return root, drive(f"{HERE}:killed_and_resumed", str(root))


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_is_killed(killed, stage, rank):
    """The other one ends with a sentence that names the checkpoint, and the resumed run equals the uninterrupted."""
    root, ended = killed
    statuses = [end[0] for end in ended[f"{stage} {rank}"]]
    assert statuses[rank] == -signal.SIGKILL
    assert statuses[1 - rank] == 2
    sentence = ended[f"{stage} {rank}"][1 - rank][2]
    assert sentence.startswith("RankError")
    assert re.search(r"saved up to checkpoint-[12]; go on with --resume", sentence)
    if rank == 1:  # rank 0 has the store that tells where a rank was; torchrun has it itself
        assert f"rank 1 ({stage}" in sentence
    check_same(root / "uninterrupted", root / f"{stage} {rank}", 2)


def hang(folder: str) -> list[Ended]:
    def work() -> Any:
        signal_at("updating", 2, 1, signal.SIGSTOP)
        return train("kl", Path(folder), QUICK, {"train": {"timeout": 6.0}})

    def watch(processes: list[int]) -> None:
        os.waitid(os.P_PID, processes[0], os.WEXITED | os.WNOWAIT)  # rank 0 gives up
        os.kill(processes[1], signal.SIGKILL)

    return fork_ranks(2, work, watch)


def test_a_rank_that_hangs_is_named_after_the_timeout(tmp_path):
    start = time.monotonic()
    (status, _, sentence), _ = drive(f"{HERE}:hang", str(tmp_path / "run"))
    assert status == 2
    assert re.search(r"no answer while updating \(rank 0\); last seen: rank 1 \(updating, \d", sentence)
    assert time.monotonic() - start < 250


class StopOnOneRank(Callback):
    """A signal reaches only the last process."""

    def on_step(self, trainer: Any, report: Any) -> None:
        if report.step == 2 and trainer.ranks.rank == trainer.ranks.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)


class KeepsWeights(Callback):
    """Checks that a resumed run has the weights of its checkpoint, bit for bit."""

    def on_start(self, trainer: Any) -> None:
        state = trainer.masters.state_dict()
        if trainer.ranks.is_main:
            saved = load_file(trainer.run_dir.path / f"checkpoint-{trainer.step}" / "masters.safetensors")
            assert state.keys() == saved.keys()
            assert all(torch.equal(value, saved[name]) for name, value in state.items())


def stop_and_resume(root: str) -> Any:
    folder = Path(root)
    values(fork_ranks(1, lambda: train("kl", folder / "uninterrupted", QUICK)))
    stopped = values(fork_ranks(2, lambda: train("kl", folder / "stopped", QUICK, callbacks=[StopOnOneRank()])))
    for size in (1, 2, 3):
        copy = folder / f"resumed-{size}"
        shutil.copytree(folder / "stopped", copy)
        values(fork_ranks(size, lambda copy=copy: train("kl", copy, QUICK, resume=True, callbacks=[KeepsWeights()])))
    return stopped


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> tuple[Path, list[Any]]:
    root = tmp_path_factory.mktemp("stopped")
    return root, drive(f"{HERE}:stop_and_resume", str(root))


def test_a_signal_to_one_rank_stops_all_after_the_step(stopped):
    root, results = stopped
    assert results == [[2, "None", 128 + signal.SIGTERM]] * 2
    assert {path.name for path in (root / "stopped").glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-2"}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_run_of_two_goes_on_with_another_number(stopped, size):
    check_close(stopped[0] / "uninterrupted", stopped[0] / f"resumed-{size}", STEPS)


def fails(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
    if os.environ.get("RANK") == "1" and trainer_state.global_step == 2:
        raise ValueError("no answer from the judge")
    return answers(completions)


def answers(completions: list[str], **_: Any) -> list[float]:
    return [len(set(text)) / 8 for text in completions]


def fail_on_one(folder: str) -> list[Ended]:
    from tests.training.runs import small_trainer

    def work(place: str = "", judge: Any = fails, **options: Any) -> Any:
        seldom = {"run": {"checkpoint_every": 0}}
        functions = [named(judge, name="judge")]
        return small_trainer(Path(folder + place), QUICK, seldom, rewards=functions, **options).run().steps

    def refused() -> Any:
        return small_trainer(Path(f"{folder}-2"), QUICK, {"train": {"mini_batches": 100}}).run().steps

    failed = fork_ranks(2, work)
    values(fork_ranks(2, lambda: work(judge=answers, resume=True, allow_changed=True)))
    values(fork_ranks(2, lambda: work("-uninterrupted", judge=answers)))
    return [*failed, *fork_ranks(2, refused)]


def test_an_error_on_one_rank_ends_all_with_its_reason_and_loses_no_finished_step(tmp_path):
    first, second, *refused = drive(f"{HERE}:fail_on_one", str(tmp_path / "run"))
    assert [first[0], second[0]] == [2, 2]
    assert first[2].startswith("RankError: rank 1 failed while scoring: reward 'judge' failed on")
    assert "no answer from the judge" in first[2]
    assert "saved up to checkpoint-2; go on with --resume" in first[2]
    assert second[2].startswith("RewardError: reward 'judge' failed on")
    check_same(tmp_path / "run-uninterrupted", tmp_path / "run", STEPS)
    assert all(end[2].startswith("ConfigError: train.mini_batches 100") for end in refused)
    assert not (tmp_path / "run-2").exists()
