"""One update per step: the weights of the run whose steps are rollouts, resumed exactly between two updates."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from itertools import chain, pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file

from groupwise.core.ragged import Ragged
from groupwise.errors import ConfigError
from groupwise.rundir.files import write_manifest
from groupwise.training.update.saved_minibatches import TENSORS, read_minibatches, totals_of, write_minibatches
from groupwise.training.update.teacher import TeacherLogps
from tests.training.factories import moved_minibatch
from tests.training.runs import (
    ROWS,
    check_same,
    checkpoint_of,
    even,
    merged,
    metrics_of,
    run_steps,
    small_recipe,
    small_trainer,
)
from tests.training.test_resume import break_and_resume, slow_case

QUIET = {"evaluate": {"before_training": False, "every": 0}}
ONE = {"train": {"update_per_step": True}}
FOUR = {"train": {"iterations": 2, "mini_batches": 2}}
LORA = {"model": {"lora": {"rank": 4, "dropout": 0.3}}, "optimizer": {"learning_rate": 1e-2}}
KL = {"loss": {"kl_coef": 0.05}}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["KL", "dropout", "samples"])
def test_the_weights_are_those_of_the_run_whose_steps_are_rollouts(tmp_path, name):
    case = {"KL": KL, "dropout": LORA, "samples": {"train": {"mini_batch_by": "samples", "local_batch_size": 2}}}[name]
    small_trainer(tmp_path / "a", QUIET, FOUR, case, {"train": {"steps": 2}}).run()
    small_trainer(tmp_path / "b", QUIET, FOUR, case, ONE, {"train": {"steps": 8}}).run()
    rollouts, updates = checkpoint_of(tmp_path / "a", 2), checkpoint_of(tmp_path / "b", 8)
    different = [
        name
        for name, value in rollouts.items()
        if isinstance(value, torch.Tensor) and not torch.equal(value, updates[name])
    ]
    assert different == []
    rows = metrics_of(tmp_path / "b")
    assert [row["step"] for row in rows if "reward" in row] == [1, 5]
    assert [row["updates"] for row in rows[:8]] == [1.0] * 8
    assert rows[0]["loss"] != rows[1]["loss"]


CASES = {
    "KL": merged(FOUR, KL, {"reference": {"refresh_every": 3, "mix": 0.5}}),
    "dropout": merged(FOUR, LORA, KL),
    "masks": {
        "masks": {"off_policy": "v3.2", "off_policy_threshold": 1e-4, "keep_sampling_mask": True, "high_entropy": 0.5},
        "sampling": {"top_k": 12, "top_p": 0.95},
        "loss": {"importance_cap": 2.0},
        "train": {"iterations": 2, "mini_batches": 2, "mini_batch_by": "samples", "local_batch_size": 3},
    },
    "pairs of groups": merged(FOUR, {"algorithm": "pg_grpo"}),
    "a teacher that is shown more": merged(
        FOUR, {"distillation": {"weight": 0.5, "teacher": "reference", "show": "{prompt}aeiou"}}
    ),
    "a teacher's log-probs": merged(
        FOUR, {"distillation": {"weight": 0.5, "teacher": "policy", "kl": "sampled", "show": "{prompt}aeiou"}}
    ),
    "schedules": merged(
        FOUR,
        {
            "phases": [{"name": "cool", "steps": 3, "temperature": 0.6}],
            "ramps": {"learning_rate": {"from": 1e-3, "to": 2e-3, "steps": 6}},
            "rules": [{"when": "entropy < 100", "over": 2, "then": "clip_high * 1.5", "cooldown": 1}],
            "loss": {"clip_high": 0.2},
        },
    ),
}


@pytest.mark.parametrize("name", [name if name == "KL" else slow_case(name) for name in CASES])
def test_a_run_resumes_between_two_updates_of_a_rollout(tmp_path, name):
    changes = merged({"train": {"steps": 6}, "run": {"checkpoint_every": 1}}, QUIET, CASES[name], ONE)
    rows, state = break_and_resume(tmp_path, changes, (1, 3), steps=6)
    assert [row["step"] for row in rows if "reward" in row] == [1, 5]
    assert state["updates"]["rollouts"] == 2
    assert state["updates"]["made"] == 2
    if name == "schedules":  # the optimizer's settings change with every update, the others with the next rollout
        assert [row["temperature"] for row in rows[:6]] == [0.6] * 4 + [1.0] * 2
        assert [row["learning_rate"] for row in rows[:6]] == pytest.approx([(6 + n) / 6e3 for n in range(6)])


def test_steps_count_updates(tmp_path):
    """Learning rate, checkpoints, evaluations and epochs."""
    changes = {"train": {"steps": None, "epochs": 0.6}, "optimizer": {"lr_schedule": "linear"}}
    changes |= {"run": {"checkpoint_every": 3}, "evaluate": {"every": 3}}
    trainer = small_trainer(tmp_path / "run", FOUR, ONE, changes)
    trainer.run()
    assert trainer.total_steps == 8  # 2 rollouts of 3 of the 10 rows
    rows = metrics_of(tmp_path / "run")
    assert [row["learning_rate"] for row in rows if "loss" in row] == pytest.approx(
        [1e-3 * n / 8 for n in range(8, 0, -1)]
    )
    assert [row["step"] for row in rows if "eval/reward" in row] == [0, 3, 6, 8]
    assert {path.name for path in (tmp_path / "run").glob("checkpoint-*")} >= {"checkpoint-3", "checkpoint-6"}
    assert (tmp_path / "run" / "checkpoint-6" / TENSORS).exists()
    assert not (tmp_path / "run" / "checkpoint-8" / TENSORS).exists()  # the rollout is used up


def same_for_all(completions, **_):
    return [1.0] * len(completions)


def test_a_rollout_without_a_learning_signal_moves_the_weights_by_momentum_only(tmp_path):
    """As in TRL: the optimizer is stepped with a gradient of 0."""
    rewards = [0]

    def sometimes(completions, **_):
        rewards[0] += 1
        return even(completions) if rewards[0] == 1 else same_for_all(completions)

    with small_trainer(tmp_path / "run", QUIET, ONE, {"train": {"steps": 3}}, rewards=[sometimes]) as trainer:
        weights = [trainer.masters.state_dict()]
        for _ in trainer.steps():
            weights.append({name: value.clone() for name, value in trainer.masters.state_dict().items()})
        name = "model.embed_tokens.weight"
        state = trainer.optimizer.state[dict(trainer.masters.named_parameters())[name]]
    assert int(state["step"]) == 3
    moved = [float((after[name] - before[name]).abs().max()) for before, after in pairwise(weights)]
    assert moved[1] > 0
    rows = metrics_of(tmp_path / "run")
    assert [row["loss"] for row in rows[1:3]] == [0.0, 0.0]
    assert [row["grad_norm"] for row in rows[1:3]] == [0.0, 0.0]


def test_mini_batches_are_written_and_read_as_they_are(tmp_path):
    settings = {"loss.kl_coef": 0.1, "masks.keep_sampling_mask": True, "sampling.top_k": 5, "train.local_batch_size": 3}
    _, _, _, _, minibatch, _ = moved_minibatch({**settings, "loss.importance_cap": 2.0}, naive=False)
    write_minibatches(tmp_path, [minibatch, minibatch])
    totals = json.loads(json.dumps(totals_of([minibatch, minibatch])))
    (restored, _) = read_minibatches(tmp_path, totals)
    assert restored.samples == minibatch.samples
    assert restored.prompts.tolist() == minibatch.prompts.tolist()
    assert restored.totals == minibatch.totals
    for got, wanted in zip(chain(*restored.completions), chain(*minibatch.completions), strict=True):
        assert torch.equal(got, wanted)
    for name in ("advantages", "allowed", "sampler_logps", "mask", "old_logps", "ref_logps", "weights", "local_batch"):
        assert torch.equal(getattr(restored, name), getattr(minibatch, name)), name
    assert torch.equal(restored.kept.ids, minibatch.kept.ids)
    assert torch.equal(restored.local_lengths, minibatch.local_lengths)


def test_what_a_teacher_said_is_written_and_read(tmp_path):
    _, _, _, _, minibatch, _ = moved_minibatch({}, naive=False)
    minibatch.teacher_prompts = Ragged.of([[*prompt, 7, 8] for prompt in minibatch.prompts.tolist()])
    shape = minibatch.mask.shape
    minibatch.teacher = TeacherLogps(torch.randn(shape), torch.randint(9, (*shape, 2)), torch.randn(*shape, 2))
    write_minibatches(tmp_path, [minibatch])
    (restored,) = read_minibatches(tmp_path, totals_of([minibatch]))
    assert restored.teacher_prompts.tolist() == minibatch.teacher_prompts.tolist()
    for field in fields(TeacherLogps):
        assert torch.equal(getattr(restored.teacher, field.name), getattr(minibatch.teacher, field.name))


@pytest.mark.slow
def test_a_damaged_file_is_found_and_an_earlier_checkpoint_is_used(tmp_path):
    changes = merged(QUIET, FOUR, ONE, {"train": {"steps": 4}})
    small_trainer(tmp_path / "a", changes).run()
    run_steps(small_trainer(tmp_path / "b", changes), 3)
    file = tmp_path / "b" / "checkpoint-3" / TENSORS
    tensors = load_file(file)
    save_file({name: value for name, value in tensors.items() if not name.endswith("1/samples")}, file)
    write_manifest(file.parent)  # so that only its contents are wrong
    trainer = small_trainer(tmp_path / "b", changes, resume=True)
    trainer.run()
    assert trainer.display.heard("cannot be restored")
    assert trainer.display.heard("resuming after step 2")
    check_same(tmp_path / "a", tmp_path / "b", 4)


@pytest.mark.slow
def test_a_run_that_goes_on_in_the_other_way(tmp_path):
    changes = merged(QUIET, FOUR, {"train": {"steps": 4}})
    run_steps(small_trainer(tmp_path / "b", changes, ONE), 3)
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    with pytest.raises(ConfigError, match="between two updates of one rollout"):
        small_trainer(tmp_path / "b", changes, resume=True).run()
    run_steps(small_trainer(tmp_path / "c", changes, ONE, resume=True), 1)  # the rollout is used up
    result = small_trainer(tmp_path / "c", changes, {"train": {"steps": 5}}, resume=True).run()
    assert result.steps == 5
    result = small_trainer(tmp_path / "c", changes, ONE, {"train": {"steps": 6}}, resume=True).run()
    assert result.steps == 6


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": {"update_per_step": True, "max_staleness": 2}}, "a step is one update"),
        ({"algorithm": "pg_grpo", "train": {"mini_batch_by": "samples"}}, "different mini-batches"),
        ({"train": {"local_batch_size": 4}, "loss": {"denominator": "policy_mask"}}, "loss.denominator"),
        ({"optimizer": {"name": "adam"}}, "unknown optimizer 'adam'; did you mean 'adamw'"),
        ({"optimizer": {"lr_schedule_options": {"num_cycles": 2}}}, "optimizer.lr_schedule_options"),
        ({"optimizer": {"lr_schedule": "polynomial", "final_lr_ratio": 0.1}}, "optimizer.final_lr_ratio"),
        ({"loss": {"sapo_temperatures": [1.0]}}, "sapo_temperatures"),
        ({"loss": {"vespo_positive": [1.0, -1.0]}}, "vespo_positive"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        small_recipe(changes)


def test_more_mini_batches_than_completions(tmp_path):
    changes = {"train": {"mini_batches": 13, "mini_batch_by": "samples"}}
    with pytest.raises(ConfigError, match="more than the 12 completions of a step"):
        small_trainer(tmp_path / "run", changes)
    assert len(ROWS) == 10
