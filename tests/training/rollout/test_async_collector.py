"""Asynchronous rollouts: which groups a step learns from, replays, resumes, remote generators, and errors."""

from __future__ import annotations

import copy
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from groupwise.config import make_recipe
from groupwise.distributed.ranks import Ranks
from groupwise.errors import CheckpointError, ConfigError, RewardError
from groupwise.generate.engine import Engine
from groupwise.model.handle import prepare
from groupwise.model.logprobs import completion_logps
from groupwise.rewards import named
from groupwise.rundir import read_json
from groupwise.training.inputs import load_inputs
from groupwise.training.rollout import make_collector as factory
from groupwise.training.rollout.async_collector import AsyncCollector
from groupwise.training.rollout.background import BackgroundThreads
from groupwise.training.rollout.saved_groups import GroupSource, read_groups, write_groups
from groupwise.training.store.arrivals import ARRIVALS, Arrival, append_arrival, read_arrivals, rewind_arrivals
from groupwise.training.store.rollout_files import read_rollouts
from groupwise.training.trainer import Callback
from tests.training.runs import ROWS, TASK, checkpoint_of, even, metrics_of, run_steps, small_recipe, small_trainer
from tests.weights import wordllama

STEPS = 5
AHEAD = {
    "train": {"steps": STEPS, "max_staleness": 2},
    "evaluate": {"every": 0, "before_training": False, "max_new_tokens": 3},
}


def sleepy(completions, **_):
    """A reward whose calls end in any order."""
    time.sleep(random.random() / 20)
    return even(completions)


class Gate:
    """A reward that holds the groups of these rows back until it is opened."""

    def __init__(self, *rows: int) -> None:
        self.held, self.opened = [ROWS[row]["prompt"] for row in rows], threading.Event()

    def __call__(self, prompts, completions, **_):
        if prompts[0] in self.held:
            self.opened.wait(120)
        return even(completions)


class At(Callback):
    """Does something after a step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step(self, trainer, report):
        if report.step == self.step:
            self.action(trainer.collector)


def wait_until(ready):
    end = time.monotonic() + 120
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.01)


def arrivals_of(folder: Path) -> list[Arrival]:
    return list(read_arrivals(str(folder)).values())


def check_same_result(one: Path, other: Path, step: int = STEPS) -> None:
    """The same weights, optimizer, metrics, completions and record."""
    first, second = checkpoint_of(one, step), checkpoint_of(other, step)
    tensors = [name for name in first if name != "state"]
    assert [name for name in tensors if not torch.equal(first[name], second[name])] == []
    assert any(name.startswith("optimizer/exp_avg/") for name in tensors)
    assert repr(metrics_of(one)) == repr(metrics_of(other))  # repr: NaN is not equal to itself
    assert read_rollouts(one).equals(read_rollouts(other))
    assert (one / ARRIVALS).read_text() == (other / ARRIVALS).read_text()


def check_each_group_once(folder: Path, steps: int = STEPS, prompts: int = 3) -> None:
    """Every group is learned or dropped once, a dropped one's row is drawn again, and no row is lost."""
    lines = arrivals_of(folder)
    assert [line.step for line in lines] == list(range(1, steps + 1))
    drawn = [pair for line in lines for draw in line.drawn for pair in draw]
    taken = [number for line in lines for number in line.taken]
    dropped = [number for line in lines for number, _ in line.dropped]
    assert [number for number, _ in drawn] == list(range(len(drawn)))
    assert sorted(taken + dropped) == list(range(len(drawn)))  # the last steps draw nothing for steps that never come
    assert all(len(line.taken) == prompts for line in lines)
    rows = dict(drawn)
    state = read_json(folder / f"checkpoint-{steps}" / "state.json")
    assert state["rollouts"]["ready"] == state["rollouts"]["unfinished"] == []
    # Each learned row counts once, and each waiting one: together they are the rows that the order gave.
    seen = [rows[number] for number in taken] + state["rollouts"]["redraw"]
    order = state["order"]
    given = order["epoch"] * order["rows"] + order["position"] - len(order["deferred"])
    assert len(seen) == given
    assert all(abs(seen.count(row) - len(seen) / len(ROWS)) <= 2 for row in range(len(ROWS)))


# --- equal to synchronous rollouts ------------------------------------------------------------------------------------

KINDS = {
    "resampling": {"train": {"resample_rounds": 2}, "sampling": {"samples_per_prompt": 2, "max_new_tokens": 2}},
    "pairs": {"preference": {"weight": 0.5}, "loss": {"kl_coef": 0.1}, "reference": {"refresh_every": 2}},
    "LoRA": {"model": {"lora": {"rank": 2}}},
    "length penalty": {"scoring": {"length_penalty": 0.5}, "loss": {"aggregation": "prompt_mean"}},
    "kept sets": {"sampling": {"top_k": 5}, "masks": {"keep_sampling_mask": True}, "train": {"mini_batches": 3}},
    "similarity": {"advantages": {"grouping": "similarity"}, "grouping": {"embedder": "wordllama", "workers": 0}},
}


def two_values(completions, **_):
    """Equal for most groups of two short completions, so that prompts are resampled."""
    return [float(len(text) > 1) for text in completions]


@pytest.mark.parametrize("kind", ["resampling", *(pytest.param(k, marks=pytest.mark.slow) for k in list(KINDS)[1:])])
def test_a_queue_without_staleness_is_the_synchronous_run(tmp_path, monkeypatch, kind):
    if kind == "similarity":
        wordllama()
    changes = [{"train": {"steps": 3}, "evaluate": AHEAD["evaluate"]}, KINDS[kind]]
    rewards = [two_values if kind == "resampling" else even]
    small_trainer(tmp_path / "sync", *changes, rewards=rewards).run()

    def queued(*arguments, **settings):
        recipe = make_recipe({"train": {"max_staleness": 0, "batch_size": 3, "accumulation": 1}})
        return AsyncCollector(*arguments, **settings, recipe=recipe, folder=tmp_path / "queue")

    monkeypatch.setattr(factory, "RolloutCollector", queued)
    small_trainer(tmp_path / "queue", *changes, rewards=rewards).run()
    one, other = checkpoint_of(tmp_path / "sync", 3), checkpoint_of(tmp_path / "queue", 3)
    assert [name for name in one if name != "state" and not torch.equal(one[name], other[name])] == []
    assert read_rollouts(tmp_path / "sync").equals(read_rollouts(tmp_path / "queue"))
    rows, queue_rows = metrics_of(tmp_path / "sync"), metrics_of(tmp_path / "queue")
    for row, queue_row in zip(rows, queue_rows, strict=True):
        extra = [name for name in queue_row if name not in row]
        assert all(name.startswith("async/") and queue_row[name] == 0.0 for name in extra)
        assert repr({name: queue_row[name] for name in row}) == repr(row)
    if kind == "resampling":
        assert any("resample/rounds" in row for row in rows)
        assert {line.round for line in arrivals_of(tmp_path / "queue")} > {0}


# --- staleness --------------------------------------------------------------------------------------------------------


def test_groups_are_learned_within_the_limit_and_stale_ones_are_drawn_again(tmp_path):
    gate = Gate(2)  # the row of the second group: it is held back for longer than its completions may be used
    changes = {"train": {"steps": STEPS, "max_staleness": 1}}
    opening = At(3, lambda collector: gate.opened.set())
    small_trainer(tmp_path, AHEAD, changes, rewards=[named(gate, name="reward")], callbacks=[opening]).run()
    rows, lines = [row for row in metrics_of(tmp_path) if "loss" in row], arrivals_of(tmp_path)
    assert lines[0].drawn[0][1] == (1, 2)
    assert (1, "stale") in lines[2].dropped
    assert lines[2].drawn[0][0][1] == 2  # its row is the first to be drawn again
    assert not any(1 in line.taken for line in lines)
    assert [row["async/dropped_stale"] for row in rows] == [len(line.dropped) for line in lines]
    assert max(row["async/staleness_max"] for row in rows) == 1
    assert all(step - 1 - oldest <= 1 for step, line in enumerate(lines, 1) for oldest, _ in line.versions)
    check_each_group_once(tmp_path)


@pytest.mark.slow
def test_groups_of_another_size_are_dropped_when_the_schedule_changes_it(tmp_path):
    phases = [{"name": "four", "steps": 2, "temperature": 1.0}, {"name": "three", "steps": 3, "samples_per_prompt": 3}]
    small_trainer(tmp_path, AHEAD, {"phases": phases}).run()
    rows = [row for row in metrics_of(tmp_path) if "loss" in row]
    assert [row["async/dropped_settings"] for row in rows] == [0, 0, rows[1]["async/groups_waiting"], 0, 0]
    assert rows[2]["async/dropped_settings"] >= 3
    assert [row["samples_per_prompt"] for row in rows] == [4, 4, 3, 3, 3]
    check_each_group_once(tmp_path)


# --- replay -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param(
            {"train": {"resample_rounds": 1}, "loss": {"importance_cap": 2.0}, "sampling": {"samples_per_prompt": 2}},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"data": {"sampling": "pass_rate", "solved_pass_rate": 0.5, "unsolved_pass_rate": 0.45}},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_replay_gives_the_same_bits_whatever_the_rewards_take(tmp_path, changes):
    gate = Gate(3, 6)  # of the groups 0 and 4, which come late, so that batches are not in the order of the draws

    def open_gate(collector):
        gate.opened.set()
        wait_until(lambda: any(group.number == 0 for group in collector._ready()))

    small_trainer(
        tmp_path / "run", AHEAD, changes, rewards=[named(gate, name="reward")], callbacks=[At(2, open_gate)]
    ).run()
    taken = [number for line in arrivals_of(tmp_path / "run") for number in line.taken]
    assert taken != sorted(taken)
    replay = {"train": {"replay": str(tmp_path / "run")}}
    small_trainer(tmp_path / "replay", AHEAD, changes, replay, rewards=[named(sleepy, name="reward")]).run()
    check_same_result(tmp_path / "run", tmp_path / "replay")


@pytest.mark.slow
def test_a_replay_of_other_data_or_settings_is_refused(tmp_path):
    small_trainer(tmp_path / "run", AHEAD).run()
    replay = {"train": {"replay": str(tmp_path / "run" / ARRIVALS)}}
    seed, rounds = {"train": {"seed": 1}}, {"train": {"resample_rounds": 1}}
    with pytest.raises(ConfigError, match="draws other rows"):
        run_steps(small_trainer(tmp_path / "seed", AHEAD, replay, seed), 1)
    with pytest.raises(ConfigError, match=r"has no round 1 of step 1"):
        run_steps(small_trainer(tmp_path / "size", AHEAD, replay, rounds, rewards=[zero]), 1)
    with pytest.raises(ConfigError, match="does not exist"):
        small_trainer(tmp_path / "none", AHEAD, {"train": {"replay": str(tmp_path / "none")}})


def zero(completions, **_):
    return [0.0] * len(completions)


# --- resume -----------------------------------------------------------------------------------------------------------


def test_a_resumed_run_keeps_finished_groups_samples_others_again_and_can_be_replayed(tmp_path):
    gate, run = Gate(4), tmp_path / "run"  # the row of group 7, which is drawn in the first two steps
    some_ready = At(2, lambda collector: wait_until(collector._ready))
    run_steps(small_trainer(run, AHEAD, rewards=[named(gate, name="reward")], callbacks=[some_ready]), 2)
    state = read_json(run / "checkpoint-2" / "state.json")["rollouts"]
    assert state["ready"]
    assert [7, 4] in state["unfinished"]
    small_trainer(run, AHEAD, rewards=[named(sleepy, name="reward")], resume=True, allow_changed=True).run()
    gate.opened.set()
    lines = arrivals_of(run)
    assert lines[2].dropped == [(number, "unfinished") for number, _ in state["unfinished"]]
    drawn_again = [row for line in lines[2:] for draw in line.drawn for _, row in draw]
    assert drawn_again[: len(state["unfinished"])] == [row for _, row in state["unfinished"]]
    rows = [row for row in metrics_of(run) if "loss" in row]
    assert [row["async/dropped_unfinished"] for row in rows] == [0, 0, len(state["unfinished"]), 0, 0]
    check_each_group_once(run)
    small_trainer(
        tmp_path / "replay", AHEAD, {"train": {"replay": str(run)}}, rewards=[named(sleepy, name="reward")]
    ).run()
    check_same_result(run, tmp_path / "replay")


KILLED = """
import os, random, signal, sys, threading, time
from pathlib import Path
from tests.training.rollout.test_async_collector import AHEAD, even
from tests.training.runs import small_trainer
calls, lock = [], threading.Lock()
def reward(completions, **_):
    with lock:
        calls.append(None)
        if len(calls) == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(random.random() / 10)
    return even(completions)
small_trainer(Path(sys.argv[1]), AHEAD, rewards=[reward]).run()
"""


@pytest.mark.slow
@pytest.mark.parametrize("call", [2, 7, 10, 13])
def test_a_killed_run_loses_and_doubles_nothing(tmp_path, call):
    run = tmp_path / "run"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(run), str(call)], capture_output=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()[-2000:]
    small_trainer(run, AHEAD, rewards=[named(sleepy, name="reward")], resume=True, allow_changed=True).run()
    check_each_group_once(run)
    small_trainer(
        tmp_path / "replay", AHEAD, {"train": {"replay": str(run)}}, rewards=[named(sleepy, name="reward")]
    ).run()
    check_same_result(run, tmp_path / "replay")


@pytest.mark.slow
def test_a_run_with_waiting_groups_is_not_resumed_as_a_synchronous_one(tmp_path):
    run_steps(small_trainer(tmp_path, AHEAD), 2)
    with pytest.raises(ConfigError, match=r"resume it with train\.max_staleness 1"):
        run_steps(small_trainer(tmp_path, AHEAD, {"train": {"max_staleness": 0}}, resume=True), 1)


@pytest.mark.slow
def test_damaged_groups_are_a_damaged_checkpoint(tmp_path):
    some_ready = At(2, lambda collector: wait_until(collector._ready))
    trainer = run_steps(small_trainer(tmp_path / "run", AHEAD, callbacks=[some_ready]), 2)
    collector = trainer.collector
    groups = {group.number: group.result for group in collector._groups if group.result is not None}
    source = GroupSource(collector.rows, collector.prompts, collector.tokenizer, 1)
    write_groups(tmp_path, groups)
    restored = read_groups(tmp_path, source)
    assert list(restored) == list(groups) != []
    for number, result in restored.items():
        batch, before = result.batch, groups[number].batch
        assert (batch.texts, batch.stop_reasons) == (before.texts, before.stop_reasons)
        for name in ("ids", "sampler_logps", "versions"):
            pairs = zip(getattr(batch, name), getattr(before, name), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
        assert torch.equal(batch.rewards, before.rewards)
        assert result.tokens == groups[number].tokens
    with pytest.raises(CheckpointError, match="rewards is"):
        read_groups(tmp_path, GroupSource(source.rows, source.prompts, source.tokenizer, 2))
    details = (tmp_path / "rollouts.json").read_text()
    for old, new, words in [
        ('"row": ', '"row": 999', "cannot be restored"),
        ('"skipped": 0', '"skipped": -1', "skipped"),
        ('"lengths": [', '"lengths": [1, ', "is"),
        ("[", "{", "not"),
    ]:
        (tmp_path / "rollouts.json").write_text(details.replace(old, new, 1))
        with pytest.raises(CheckpointError, match=words):
            read_groups(tmp_path, source)


# --- a remote generator -----------------------------------------------------------------------------------------------


class SecondModel(Engine):
    """Samples with its own copy of the model, as a server does: an update copies the weights."""

    def __init__(self, handle) -> None:
        super().__init__(prepare(copy.deepcopy(handle.model)))
        self.remote, self.trained, self.lock = True, handle.model, threading.Lock()
        self.weights, self.threads = {}, set()

    def generate(self, *arguments, **keywords):
        with self.lock:  # an update waits for what is being sampled
            self.threads.add(threading.current_thread().name)
            return super().generate(*arguments, **keywords)

    def update_weights(self, version):
        with self.lock:
            self.handle.model.load_state_dict(self.trained.state_dict())
            self.weights[version] = copy.deepcopy(self.trained.state_dict())
            self.version = version


class KeepBatches(Callback):
    def __init__(self):
        self.batches = []

    def on_rollout(self, trainer, batch, group_advantages):
        self.batches.append(batch)


@pytest.mark.slow
def test_a_remote_generator_samples_in_the_background_with_the_weights_of_each_version(tmp_path, monkeypatch):
    generators, kept = [], KeepBatches()

    def make(recipe, handle, *_):
        generators.append(SecondModel(handle))
        return generators[-1]

    monkeypatch.setattr("groupwise.training.trainer.make_generator", make)
    trainer = small_trainer(tmp_path, AHEAD, rewards=[named(sleepy, name="reward")], callbacks=[kept])
    trainer.run()
    (generator,) = generators
    assert {name for name in generator.threads if name != "MainThread"} == {"groupwise-sampling"}
    assert sum(len(batch.prompts) for batch in kept.batches) == 3 * STEPS
    for step, batch in enumerate(kept.batches):
        for prompt in range(len(batch.prompts)):
            group = batch.take([prompt])
            (version,) = {version for sample in group.versions for version in sample.tolist()}
            assert 0 <= step - version <= 2
            generator.handle.model.load_state_dict(generator.weights[version])
            logps = completion_logps(generator.handle, [group.prompts[0].ids], [group.ids]).logps
            for row, sampled in zip(logps, group.sampler_logps, strict=True):
                assert torch.allclose(row[: len(sampled)].detach(), sampled, atol=2e-5)
    check_each_group_once(tmp_path)
    with pytest.raises(ConfigError, match="samples elsewhere"):
        small_trainer(tmp_path / "replay", AHEAD, {"train": {"replay": str(tmp_path)}})


# --- errors and stopping ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_reward_that_fails_in_the_background_ends_the_run_with_its_sentence_and_saves(tmp_path):
    def failing(completions, trainer_state, **_):
        if trainer_state.global_step > 1:
            raise ValueError("no such judge")
        return even(completions)

    trainer = small_trainer(tmp_path, AHEAD, {"run": {"checkpoint_every": 0}}, rewards=[named(failing, name="reward")])
    with pytest.raises(
        RewardError, match=r"reward 'reward' failed on row .*, completion 1 .*no such judge.*4 of 4 completions"
    ):
        trainer.run()
    assert trainer.step >= 2
    assert (tmp_path / f"checkpoint-{trainer.step}").exists()
    small_trainer(tmp_path, AHEAD, rewards=[named(even, name="reward")], resume=True, allow_changed=True).run()
    check_each_group_once(tmp_path)


@pytest.mark.slow
def test_a_stop_while_rewards_are_pending_saves_without_waiting_for_them(tmp_path):
    gate = Gate(7, 4, 5, 9)  # all rows of the third batch
    trainer = small_trainer(tmp_path, AHEAD, rewards=[named(gate, name="reward")])

    def stopped():  # it is asked only while the trainer waits
        if trainer.step == 2:
            trainer.stopping.signal = signal.SIGTERM
        return bool(trainer.stopping)

    trainer.collector.stopped = stopped
    result = trainer.run()
    assert (result.steps, result.exit_status) == (2, 143)
    unfinished = read_json(tmp_path / "checkpoint-2" / "state.json")["rollouts"]["unfinished"]
    assert len(unfinished) >= 3
    small_trainer(tmp_path, AHEAD, rewards=[named(even, name="reward")], resume=True, allow_changed=True).run()
    gate.opened.set()
    check_each_group_once(tmp_path)
    rows = [row for row in metrics_of(tmp_path) if "loss" in row]
    assert rows[2]["async/dropped_unfinished"] == len(unfinished)


@pytest.mark.parametrize(("generator", "words"), [("engine", "2 processes sample together"), ("vllm", "one, not 2")])
def test_what_several_processes_cannot_do_is_refused_before_the_model_is_loaded(generator, words):
    recipe = small_recipe(AHEAD, {"sampling": {"generator": generator}})
    with pytest.raises(ConfigError, match=words):
        load_inputs(recipe, task=TASK, rewards=[even], ranks=Ranks(1, 2))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train": {"replay": "runs/a"}}, "set train.max_staleness"),
        ({"train": {"max_staleness": 1}, "loss": {"name": "reinforce"}}, "loss.importance_cap"),
        ({"train": {"max_staleness": -1}}, "max_staleness"),
        (
            {"train": {"max_staleness": 1}, "sampling": {"generator": "vllm", "top_k": 5}},
            "vLLM only returns them after",
        ),
        ({"ramps": {"train.max_staleness": {"points": [[0, 0], [5, 2]]}}, "train": {"max_staleness": 1}}, "fixed"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path, settings, words):
    with pytest.raises(ConfigError, match=words):
        small_trainer(tmp_path, settings)


# --- the record and the threads ---------------------------------------------------------------------------------------


def test_the_record_ends_with_its_last_complete_line_and_damage_is_named(tmp_path):
    lines = [Arrival(step=step, drawn=[[(step, 3)]], taken=[step], versions=[(0, 1)]) for step in (1, 2, 3)]
    for line in lines:
        append_arrival(tmp_path, line)
    file = tmp_path / ARRIVALS
    with file.open("a") as text:
        text.write('{"step": 4, "ta')
    assert list(read_arrivals(str(tmp_path)).values()) == lines
    assert rewind_arrivals(tmp_path, 2) is None
    assert list(read_arrivals(str(file)).values()) == lines[:2]
    file.write_text('{"step": 1, "taken": [-3]}\n' + file.read_text())
    with pytest.raises(Exception, match=r"line 1 is damaged: taken\.0"):
        read_arrivals(str(file))
    note = rewind_arrivals(tmp_path, 1)
    assert "cannot be replayed" in str(note)
    assert not file.exists()
    file.write_text("")
    with pytest.raises(ConfigError, match="no complete line"):
        read_arrivals(str(tmp_path))


def test_threads_run_jobs_at_once_and_a_job_that_hangs_does_not_hold_up_the_end(monkeypatch):
    monkeypatch.setattr("groupwise.training.rollout.background.GRACE", 0.01)
    threads, both, never, done = BackgroundThreads(2, "test"), threading.Barrier(2), threading.Event(), []
    for _ in range(2):
        threads.add(lambda: done.append(both.wait(60)))  # each waits for the other
    while len(done) < 2:
        time.sleep(0.01)
    threads.add(lambda: never.wait(60))
    threads.close()
    threads.add(lambda: done.append(None))  # nothing begins any more
    never.set()
    assert sorted(done) == [0, 1]
