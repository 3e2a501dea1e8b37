"""A step taken again is the recorded step; with a change it is the step of a run that had the change from there on."""

from __future__ import annotations

import hashlib
import shutil

import pytest
import torch
from safetensors.torch import load_file

from groupwise.analysis.replay import rescore, retake
from groupwise.errors import CheckpointError, ConfigError, InputError, RunDirError
from groupwise.rundir import RunDir
from tests.training.runs import TASK, even, metrics_of, run_steps, small_trainer, vowels
from tests.weights import wordllama

BASE = {"train": {"steps": 4}, "evaluate": {"before_training": False, "every": 0}}
KL = {"loss": {"kl_coef": 0.05}}
OPTIONS = {"task": TASK, "rewards": [even]}
REFRESHED = {**KL, "reference": {"refresh_every": 1, "mix": 0.3}}
RUNS = {
    "dapo": {},
    "refreshed reference": REFRESHED,
    "pairs": {"algorithm": "pg_grpo"},
    "similarity": {"algorithm": "similarity_group_grpo", "grouping": {"embedder": "wordllama", "workers": 0}},
    "evaluations and rules": {
        "evaluate": {"every": 1, "max_new_tokens": 3},
        "rules": [{"when": "eval/reward > -1", "over": 1, "then": "learning_rate * 0.5", "cooldown": 0}],
    },
    "asynchronous": {"train": {"steps": 4, "max_staleness": 1}},
}


def weights(folder, step):
    return load_file(folder / f"checkpoint-{step}" / "masters.safetensors")


def check_equal(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def keep_only(folder, *steps):
    """Delete the other checkpoints, as a run does."""
    for path in folder.glob("checkpoint-*"):
        if int(path.name.rpartition("-")[2]) not in steps:
            shutil.rmtree(path)


def hashes(folder):
    return {path: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
            for path in sorted(folder.rglob("*")) if path.is_file()}  # fmt: skip


def metrics_at(folder, step):
    return next({name: repr(value) for name, value in row.items()} for row in metrics_of(folder) if row["step"] == step)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_an_unchanged_step_has_the_bits_of_the_run(tmp_path, name):
    if name == "similarity":
        wordllama()
    run = tmp_path / "run"
    run_steps(small_trainer(run, BASE, RUNS[name]), 4)
    final = weights(run, 3)
    keep_only(run, 1)
    before = hashes(run)
    result = retake(run, 3, **OPTIONS, keep=tmp_path / "kept")
    if name == "asynchronous" and result.notes:  # a group was still scored when the checkpoint was saved
        assert "asynchronous" in result.notes[0]
        return
    assert result.reproduced is not None
    assert result.reproduced.equal, result.reproduced
    assert result.reproduced.steps == 2
    assert (result.checkpoint, result.metrics, result.samples) == (1, [], None)
    check_equal(weights(tmp_path / "kept" / "unchanged", 3), final)
    assert hashes(run) == before


@pytest.mark.slow
def test_a_changed_step_is_that_of_a_run_with_the_change(tmp_path):
    """The other run has the same settings up to step 2, by its schedule."""
    run_steps(small_trainer(tmp_path / "run", BASE, REFRESHED), 3)
    phases = [{"name": "first", "steps": 2, "kl_coef": 0.05}, {"name": "second", "kl_coef": 0.5}]
    run_steps(small_trainer(tmp_path / "other", BASE, REFRESHED, {"phases": phases}), 3)
    keep_only(tmp_path / "run", 1)
    result = retake(tmp_path / "run", 3, {"loss.kl_coef": 0.5}, **OPTIONS, keep=tmp_path / "kept")
    assert result.reproduced is not None
    assert result.reproduced.equal
    assert [(change.name, change.before, change.after) for change in result.changed] == [("loss.kl_coef", 0.05, 0.5)]
    check_equal(weights(tmp_path / "kept" / "changed", 3), weights(tmp_path / "other", 3))
    assert metrics_at(tmp_path / "kept" / "changed", 3) == metrics_at(tmp_path / "other", 3)
    # The table of weights, by hand.
    start = weights(tmp_path / "kept" / "unchanged", 2)
    one, other = weights(tmp_path / "kept" / "unchanged", 3), weights(tmp_path / "kept" / "changed", 3)
    updates = [torch.cat([(after[name] - start[name]).flatten() for name in start]).double() for after in (one, other)]
    total = result.total_weights
    assert total is not None
    assert total.update == pytest.approx(float(updates[0].norm()), rel=1e-5)
    assert total.difference == pytest.approx(float((updates[1] - updates[0]).norm() / updates[0].norm()), rel=1e-5)
    assert total.cosine == pytest.approx(float(torch.cosine_similarity(*updates, dim=0)), rel=1e-5)
    assert total.difference > 0
    assert {part.name for part in result.weights} == start.keys()
    changed = {metric.name: metric for metric in result.metrics}
    assert changed["kl_coef"][1:] == (0.05, 0.05, 0.5)
    assert "reward" not in changed
    assert result.samples is not None
    assert result.samples.different == 0


@pytest.mark.slow
def test_a_change_wins_over_the_schedule(tmp_path):
    """A phase, a ramp and a rule set the value of the step; the change replaces it."""
    phases = [{"name": "first", "steps": 2, "kl_coef": 0.05}, {"name": "second", "kl_coef": 0.5}]
    schedule = {
        "phases": phases,
        "ramps": {"clip_high": {"from": 0.2, "to": 0.4, "steps": 4}},
        "rules": [{"when": "reward > -1", "over": 1, "then": "learning_rate * 0.5", "cooldown": 0}],
    }
    plain = {**REFRESHED, "loss": {"kl_coef": 0.05, "clip_high": 0.2}}
    run_steps(small_trainer(tmp_path / "run", BASE, plain, schedule), 3)
    result = retake(
        tmp_path / "run",
        3,
        {"loss.kl_coef": 0.05, "optimizer.learning_rate": 1e-3, "loss.clip_high": 0.2},
        **OPTIONS,
        keep=tmp_path / "kept",
    )
    assert result.reproduced is not None
    assert result.reproduced.equal
    changes = {change.name: (change.before, change.after) for change in result.changed}
    assert changes["loss.kl_coef"] == (0.5, 0.05)
    assert changes["optimizer.learning_rate"] == (2.5e-4, 1e-3)
    assert changes["loss.clip_high"] == (pytest.approx(0.3), 0.2)
    row = next(row for row in metrics_of(tmp_path / "kept" / "changed") if row["step"] == 3)
    assert (row["kl_coef"], row["learning_rate"]) == (0.05, 1e-3)


@pytest.mark.slow
def test_samples_of_another_temperature(tmp_path):
    run_steps(small_trainer(tmp_path / "run", BASE), 2)
    result = retake(tmp_path / "run", 2, {"sampling.temperature": 0.3}, **OPTIONS)
    samples = result.samples
    assert samples is not None
    assert 0 < samples.different <= samples.samples == 12
    assert samples.token is not None
    assert samples.unchanged != samples.changed
    result = retake(tmp_path / "run", 2, {"sampling.samples_per_prompt": 3}, **OPTIONS)
    assert result.samples is not None
    assert result.samples.resampled
    assert result.folder is None


@pytest.mark.slow
def test_a_running_run_that_was_killed_before(tmp_path):
    """Its lock is held, it has files of a killed process, and its last line of metrics is torn."""
    run = tmp_path / "run"
    run_steps(small_trainer(run, BASE), 3)
    with RunDir.resume(run):
        (run / ".unfinished-checkpoint-9").mkdir()
        with open(run / "metrics.jsonl", "ab") as file:
            file.write(b'{"step": 4, "rew')
        before = hashes(run)
        result = retake(run, 4, {"optimizer.learning_rate": 1e-4}, **OPTIONS)
        assert hashes(run) == before
    assert result.reproduced is None  # step 4 is not recorded
    assert result.checkpoint == 3
    assert result.total_weights is not None
    assert result.total_weights.changed_update == pytest.approx(0.1 * result.total_weights.update, rel=1e-3)


@pytest.mark.slow
def test_a_run_that_was_resumed_with_other_settings_on_the_way(tmp_path):
    run = tmp_path / "run"
    run_steps(small_trainer(run, BASE, KL), 2)
    run_steps(small_trainer(run, BASE, {"loss": {"kl_coef": 0.4}}, resume=True), 2)
    keep_only(run, 1)
    result = retake(run, 4, **OPTIONS)
    assert result.reproduced is not None
    assert result.reproduced.equal
    assert result.reproduced.steps == 3
    # Other rewards than it was started with: the steps before cannot be run again with them.
    run = tmp_path / "rewards"
    run_steps(small_trainer(run, BASE), 2)
    run_steps(small_trainer(run, BASE, resume=True, rewards=[vowels], allow_changed=True), 2)
    assert rescore(run, task=TASK).self_check.passed
    assert retake(run, 4, task=TASK, rewards=[vowels]).checkpoint == 3
    keep_only(run, 1)
    with pytest.raises(ConfigError, match=r"resumed after step 2 with other inputs \(rewards"):
        retake(run, 4, task=TASK, rewards=[vowels])


@pytest.mark.slow
def test_steps_without_an_earlier_checkpoint(tmp_path):
    run = tmp_path / "run"
    run_steps(small_trainer(run, BASE), 4)
    final = weights(run, 1)
    keep_only(run, 3, 4)
    with pytest.raises(CheckpointError, match=r"no checkpoint before step 3: steps 4 to 4 can be .*run\.keep_check"):
        retake(run, 3, **OPTIONS)
    with pytest.raises(InputError, match="has 4 steps"):
        retake(run, 5, **OPTIONS)
    result = retake(run, 1, {"optimizer.learning_rate": 1e-4}, **OPTIONS, from_start=True, keep=tmp_path / "kept")
    assert result.checkpoint == 0
    assert result.reproduced is not None
    assert result.reproduced.equal
    check_equal(weights(tmp_path / "kept" / "unchanged", 1), final)
    assert result.total_weights is not None
    assert result.total_weights.cosine == pytest.approx(1, abs=1e-4)
    (run / "checkpoint-3" / "masters.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"checkpoint-3 is damaged.*no step can be|checkpoint-3 is damaged"):
        retake(run, 4, **OPTIONS)


@pytest.mark.slow
def test_refusals(tmp_path):
    run = tmp_path / "run"
    run_steps(small_trainer(run, BASE, {"train": {"steps": 2}}), 2)
    for setting, value, words in (
        ("model.source", "x", "weights of the checkpoint"),
        ("model.lora.rank", 4, "weights of the checkpoint"),
        ("data.train", "x", "its own rows"),
        ("train.seed", 1, "order of the rows"),
        ("sft.steps", 1, "before the first step"),
        ("run.plot", True, "no effect"),
        ("loss.klcoef", 1, "did you mean 'loss.kl_coef'"),
        ("loss.kl_coef", 0.1, "needs a reference policy"),
        ("train.mini_batches", 99, "more than the 3 prompts"),
        ("loss.name", "nope", "nope"),
    ):
        with pytest.raises(ConfigError, match=words):
            retake(run, 2, {setting: value}, **OPTIONS)
    with pytest.raises(ConfigError):  # its task is not known by name
        retake(run, 2)
    with pytest.raises(ConfigError, match=rf"^{run} was started with other inputs"):
        retake(run, 2, task=TASK, rewards=[vowels])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(RunDirError, match="not an empty folder"):
        retake(run, 2, **OPTIONS, keep=tmp_path / "full")
    small = tmp_path / "small"
    run_steps(small_trainer(small, BASE, {"run": {"resumable": False}, "train": {"steps": 2}}), 2)
    with pytest.raises(CheckpointError, match=r"run\.resumable is false"):
        retake(small, 2, **OPTIONS)


@pytest.mark.slow
def test_another_preset(tmp_path):
    run = tmp_path / "run"
    run_steps(small_trainer(run, BASE), 2)
    result = retake(run, 2, algorithm="dr_grpo", **OPTIONS)
    assert [change.name for change in result.changed] == ["algorithm", "loss.name", "advantages.scale"]
    assert result.total_weights is not None
    assert result.total_weights.difference > 0
    result = retake(run, 2, {"loss.kl_coef": 0.0}, algorithm="enhanced_grpo", **OPTIONS)
    assert "data.max_prompt_length" in {change.name for change in result.not_applied}
