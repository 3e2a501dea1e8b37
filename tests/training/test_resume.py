"""A run that is stopped after k steps and goes on is the run that never stopped, to the bit, whatever its settings."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
import torch

from groupwise.config import make_recipe
from groupwise.errors import CheckpointError, ConfigError
from groupwise.rundir import read_json
from groupwise.tasks import Task
from groupwise.tasks.quiz import quiz_task
from groupwise.training.display import LineDisplay
from groupwise.training.store.rollout_files import read_rollouts
from tests.training.runs import (
    ROWS,
    TASK,
    check_same,
    checkpoint_of,
    even,
    merged,
    metrics_of,
    run_steps,
    small_trainer,
    vowels,
)


def disturb() -> None:
    """Another process has other random numbers; in this one they must be made so."""
    torch.manual_seed(4321)
    random.seed(4321)
    np.random.seed(4321)


def break_and_resume(tmp_path, changes, at, *, steps=4, **options):
    """The unbroken run is in ``a``; the one in ``b`` stops after each number of steps in ``at``."""
    disturb()
    small_trainer(tmp_path / "a", changes, **options).run()
    done = 0
    for stop in at:
        disturb()
        torch.rand(stop)
        run_steps(small_trainer(tmp_path / "b", changes, resume=done > 0, **options), stop - done)
        done = stop
    disturb()
    trainer = small_trainer(tmp_path / "b", changes, resume=True, **options)
    trainer.run()
    assert trainer.display.steps == list(range(done + 1, steps + 1))
    check_same(tmp_path / "a", tmp_path / "b", steps)
    return metrics_of(tmp_path / "b"), checkpoint_of(tmp_path / "b", steps)["state"]


def count_steps(rows):
    return [row for row in rows if "reward" in row]


def slow_case(value):
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.mark.parametrize("at", [(1,), slow_case((3,)), slow_case((1, 2))], ids=str)
def test_plain(tmp_path, at):
    rows, state = break_and_resume(tmp_path, {"optimizer": {"warmup_steps": 2, "lr_schedule": "cosine"}}, at)
    assert [row["step"] for row in count_steps(rows)] == [1, 2, 3, 4]
    assert sum(row["updates"] for row in count_steps(rows)) >= 3
    assert len(read_rollouts(tmp_path / "b")) == 4 * 12
    rates = [row["learning_rate"] for row in count_steps(rows)]
    assert rates[0] < rates[1]
    assert rates[3] < rates[2]
    assert state["order"]["position"] % 10


@pytest.mark.slow
def test_in_the_middle_of_a_later_epoch(tmp_path):
    """Five rows, three in a step: epochs end within a batch, and rows are put off."""
    task = Task("few", ROWS[:5], ROWS[:2])
    rows, _ = break_and_resume(tmp_path, {"train": {"steps": 5}}, (3,), steps=5, task=task)
    assert [row["epoch"] for row in count_steps(rows)] == pytest.approx([0.6, 1.2, 1.8, 2.4, 3.0])


SCHEDULES = {
    "phases": [
        {"name": "cool", "steps": 1, "temperature": 0.6},
        {"name": "near", "tokens": 140, "kl_coef": 0.1},
        {"name": "wide", "samples_per_prompt": 6},
    ],
    "ramps": {"clip_high": {"from": 0.2, "to": 0.4, "steps": 4}, "top_p": {"from": 1.0, "to": 0.9, "tokens": 300}},
    "rules": [{"when": "reward < 0.9", "over": 2, "then": "learning_rate * 0.5", "cooldown": 1}],
}


@pytest.mark.parametrize("at", [(1,), slow_case((2, 3))], ids=str)
def test_schedules(tmp_path, at):
    """Stopped within a phase of tokens, between two firings of a rule, and halfway up a ramp."""
    changes = {**SCHEDULES, "loss": {"clip_high": 0.2}, "train": {"steps": 5}}
    rows, state = break_and_resume(tmp_path, changes, at, steps=5)
    steps = count_steps(rows)
    assert [row["temperature"] for row in steps] == [0.6, 1.0, 1.0, 1.0, 1.0]
    assert [row["kl_coef"] for row in steps] == [0.0, 0.1, 0.1, 0.0, 0.0]
    assert [row["samples_per_prompt"] for row in steps] == [4, 4, 4, 6, 6]
    assert [row["learning_rate"] for row in steps] == [1e-3, 1e-3, 5e-4, 2.5e-4, 1.25e-4]
    assert [step for _, step in state["schedule"]["fired"]] == [1, 2, 3, 4]


SHORT = {"train": {"steps": 3}, "evaluate": {"before_training": False, "every": 0}, "run": {"checkpoint_every": 2}}
KL = {"loss": {"kl_coef": 0.05}}
LORA = {"model": {"lora": {"rank": 4, "alpha": 8.0}}, "optimizer": {"learning_rate": 1e-2}}
SETTINGS = {
    "reference that is refreshed": {**KL, "reference": {"refresh_every": 2}},
    "reference that is mixed": {**KL, "reference": {"refresh_every": 1, "mix": 0.3}},
    "reference that stays": KL,
    "lora": LORA,
    "lora with a refreshed reference": {**LORA, **KL, "reference": {"refresh_every": 2}},
    "lora with dropout": {**LORA, **KL, "model": {"lora": {"rank": 4, "dropout": 0.3}}, "train": {"iterations": 2}},
    "iterations and mini-batches": {"train": {"iterations": 2, "mini_batches": 2}, **KL},
    "masks": {
        "masks": {"off_policy": "v3.2", "off_policy_threshold": 1e-4, "keep_sampling_mask": True, "high_entropy": 0.5},
        "sampling": {"top_k": 12, "top_p": 0.95},
        "loss": {"importance_cap": 2.0},
        "train": {"iterations": 2},
    },
    "rows by pass rate": {
        "data": {"sampling": "pass_rate", "solved_pass_rate": 0.5, "solved_share": 0.3, "unsolved_pass_rate": 0.4},
        "train": {"steps": 5},
    },
    "adaptive entropy": {"loss": {"entropy_target": 1.0, "entropy_step": 0.1, "entropy_coef": 0.45}},
    "pass@k that falls": {
        "advantages": {"pass_at_k": 3},
        "scoring": {"success_threshold": 0.45},
        "phases": [{"name": "several", "steps": 1, "pass_at_k": 3}, {"name": "each", "pass_at_k": 1}],
    },
    "dppo with lora": {
        **LORA,
        "algorithm": "dppo",
        "masks": {"divergence_threshold": 1e-4},
        "train": {"iterations": 2, "mini_batches": 2},
    },
    "scalerl and a length penalty": {
        "algorithm": "scalerl",
        "scoring": {"length_penalty": 0.3, "success_threshold": 0.4},
        "train": {"mini_batches": 3},
    },
    "resample_rounds": {
        "train": {"resample_rounds": 2},
        "sampling": {"samples_per_prompt": 2, "max_new_tokens": 4},
    },
    "checkpointing, compared terms, embeddings": {
        "model": {"gradient_checkpointing": True},
        "train": {"log_term_gradients_every": 2},
        "optimizer": {"embedding_learning_rate": 1e-4, "weight_decay": 0.1},
        "loss": {"kl_coef": 0.05, "entropy_coef": 0.01},
    },
}


QUICK_SETTINGS = ("reference that is refreshed", "lora", "iterations and mini-batches")


@pytest.mark.parametrize("name", [name if name in QUICK_SETTINGS else slow_case(name) for name in SETTINGS])
def test_settings(tmp_path, name):
    changes = SETTINGS[name]
    rewards = [vowels if name == "resample_rounds" else even]  # few answers have a vowel: many groups are equal
    changes = merged(SHORT, changes)
    last = changes["train"]["steps"]
    rows, state = break_and_resume(tmp_path, changes, (last - 1,), steps=last, rewards=rewards)
    steps = count_steps(rows)
    tensors = checkpoint_of(tmp_path / "b", last)
    assert sum(row["updates"] for row in steps) >= 2
    if "reference" in name:
        every = changes.get("reference", {}).get("refresh_every", 0)
        assert steps[-1]["reference_refreshes"] == state["refreshes"] == (3 // every if every else 0)
        names = [name.removeprefix("reference/") for name in tensors if name.startswith("reference/")]
        assert any(not torch.equal(tensors[f"reference/{key}"], tensors[f"masters/{key}"]) for key in names)
    if "lora" in name:
        assert all("lora_" in key for key in tensors if key.startswith("masters/"))
    if name == "iterations and mini-batches":
        assert max(row["updates"] for row in steps) == 4
    if name == "resample_rounds":
        assert sum(row.get("resample/replaced", 0) for row in steps) > 0
    if name == "rows by pass rate":
        assert steps[-1]["pass_rate/skipped"] > 0
        assert steps[-1]["pass_rate/mean"] != steps[-2]["pass_rate/mean"]
    if name == "adaptive entropy":  # it is above the target, so the weight falls and is not applied
        assert [row["entropy_coef"] for row in steps] == pytest.approx([0.35, 0.25, 0.15])
        assert state["entropy"]["coefficient"] == steps[-1]["entropy_coef"]
    if name == "dppo with lora":
        assert sum(row["clip_ratio/region_mean"] for row in steps) > 0
    if name == "masks":
        assert sum(row.get("masks/off_policy", 0) for row in steps) > 0


@pytest.mark.slow
def test_warm_up(tmp_path):
    """SFT is not repeated, and its weights are there."""
    task = quiz_task(make_recipe({"data": {"train_rows": 16, "held_out_rows": 4}}))
    changes = {
        "sft": {"steps": 6, "batch_size": 8, "learning_rate": 3e-3},
        "sampling": {"max_new_tokens": 4},
        "train": {"steps": 3},
        "loss": {"kl_coef": 0.05},
    }
    rows, _ = break_and_resume(tmp_path, changes, (2,), steps=3, task=task)
    assert "eval/accuracy" in rows[0]
    assert rows[0]["step"] == 0
    # The reference is the policy after the warm-up, so the first KL is none at all.
    assert count_steps(rows)[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    unbroken = metrics_of(tmp_path / "a")
    small_trainer(tmp_path / "c", changes, {"sft": {"steps": 1}}, task=task).run()
    assert metrics_of(tmp_path / "c")[1] != unbroken[1]


@pytest.mark.slow
def test_best_and_patience(tmp_path):
    """Evaluations after steps 1 to 6; the third is the best. The counts live in the checkpoint."""
    values = {1: 1, 2: 2, 3: 3, 4: 1, 5: 0, 6: 2}  # right answers of three, after each step
    trainers = []

    def grade(row, answer):
        return int(row["prompt"].split()[2].rstrip(":")) < values.get(trainers[-1].step, 0)

    task = Task("fading", ROWS, ROWS[:3], grades={"right": grade}, metric="right")
    changes = {"train": {"steps": 8, "batch_size": 2}, "evaluate": {"every": 1, "patience": 3, "max_new_tokens": 1}}

    def trainer(folder, **options):
        trainers.append(small_trainer(folder, changes, task=task, **options))
        return trainers[-1]

    whole = trainer(tmp_path / "a").run()
    assert (whole.steps, whole.best_step) == (6, 3)
    assert trainers[-1].display.heard("stopped early: 3 evaluations without a better right")
    for stop in (2, 5):
        folder = tmp_path / f"b{stop}"
        run_steps(trainer(folder), stop)
        result = trainer(folder, resume=True).run()
        assert (result.steps, result.best_step) == (6, 3)
        assert result.first_held_out == whole.first_held_out
        check_same(tmp_path / "a", folder, 6)
        assert read_json(folder / "best.json") == read_json(tmp_path / "a" / "best.json")


@pytest.mark.slow
def test_bfloat16(tmp_path):
    """Masters and moments are float32, the model computes with their rounded values."""
    changes = {
        "model": {"dtype": "bfloat16"},
        "train": {"steps": 2, "batch_size": 2},
        "sampling": {"samples_per_prompt": 3, "max_new_tokens": 3},
        "evaluate": {"before_training": False, "every": 0, "max_new_tokens": 1},
        "reference": {"refresh_every": 1, "mix": 0.5},
        "loss": {"kl_coef": 0.05},
    }
    break_and_resume(tmp_path, changes, (1,), steps=2, task=Task("try", ROWS, ROWS[:1]))
    tensors = checkpoint_of(tmp_path / "b", 2)
    assert {value.dtype for value in tensors.values() if isinstance(value, torch.Tensor)} == {torch.float32}
    masters = [value for name, value in tensors.items() if name.startswith("masters/")]
    assert any(not torch.equal(value, value.bfloat16().float()) for value in masters)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reference that is mixed", "iterations and mini-batches"])
def test_two_threads(tmp_path, name):
    """The number of threads changes sums in their last bits, so it belongs to the run."""
    changes = {**SETTINGS[name], "evaluate": {"every": 0}}
    torch.set_num_threads(2)
    small_trainer(tmp_path / "a", changes).run()
    run_steps(small_trainer(tmp_path / "b", changes), 2)
    assert checkpoint_of(tmp_path / "b", 2)["state"]["threads"] == 2
    torch.set_num_threads(1)
    trainer = small_trainer(tmp_path / "b", changes, resume=True)
    trainer.run()
    assert torch.get_num_threads() == 2
    assert trainer.display.heard("the run was started with 2 threads")
    check_same(tmp_path / "a", tmp_path / "b", 4)


def test_another_number_of_threads_may_be_chosen(tmp_path):
    torch.set_num_threads(2)
    run_steps(small_trainer(tmp_path / "run"), 1)
    trainer = small_trainer(tmp_path / "run", {"model": {"threads": 1}}, resume=True)
    run_steps(trainer, 1)
    assert torch.get_num_threads() == 1
    assert trainer.display.heard("the run was started with 2 threads; with 1 its numbers may differ")


def test_token_budget_and_rows_at_once_are_kept(tmp_path):
    """What was resolved at run time, or lowered when memory ran out, holds after a resume."""
    trainer = small_trainer(tmp_path / "run")
    trainer.updater.token_budget, trainer.generator.max_num_seqs = 77, 5
    run_steps(trainer, 1)
    resumed = small_trainer(tmp_path / "run", resume=True)
    run_steps(resumed, 1)
    assert (resumed.updater.token_budget, resumed.generator.max_num_seqs) == (77, 5)
    assert [row["token_budget"] for row in count_steps(metrics_of(tmp_path / "run"))] == [77, 77]


def test_finished_run(tmp_path):
    """Resumed once more, it finishes again and changes nothing."""
    folder = tmp_path / "run"
    small_trainer(folder).run()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and "model" not in path.parts}
    trainer = small_trainer(folder, resume=True)
    result = trainer.run()
    assert trainer.display.steps == []
    assert (result.steps, result.exit_status, result.model) == (4, 0, folder / "model")
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and "model" not in path.parts}
    assert after == before
    assert not trainer.display.heard("resumed with another")


def test_more_steps(tmp_path):
    """A finished run that is given more steps goes on; what is different now is said."""
    folder = tmp_path / "run"
    small_trainer(folder).run()
    trainer = small_trainer(folder, {"train": {"steps": 6}, "sampling": {"temperature": 0.8}}, resume=True)
    result = trainer.run()
    assert (result.steps, trainer.display.steps) == (6, [5, 6])
    assert trainer.display.said[:3] == [
        "resuming after step 4, from checkpoint-4",
        "resumed with another sampling.temperature: 1.0 before, 0.8 now",
        "resumed with another train.steps: 4 before, 6 now",
    ]
    assert read_json(folder / "recipe.json")["train"]["steps"] == 6
    assert [row["temperature"] for row in count_steps(metrics_of(folder))] == [1.0] * 4 + [0.8] * 2
    # Had the run been meant to have six steps from the start, these would be the same ones.
    small_trainer(tmp_path / "long", {"train": {"steps": 6}}).run()
    assert count_steps(metrics_of(tmp_path / "long"))[:4] == count_steps(metrics_of(folder))[:4]


def test_every_notice_of_a_resumed_run_is_given_once(tmp_path):
    first = tmp_path / "run"
    small_trainer(first).run()
    stream = io.StringIO()
    changes = {"train": {"steps": 5}, "evaluate": {"samples": 2}}
    small_trainer(first, changes, resume=True, display=LineDisplay(stream)).run()
    notices = [line for line in stream.getvalue().splitlines() if line.startswith("resum")]
    assert sorted(notices) == [
        "resumed with another evaluate.samples: 1 before, 2 now",
        "resumed with another train.steps: 4 before, 5 now",
        "resuming after step 4, from checkpoint-4",
    ]


def test_steps_after_the_checkpoint_are_done_again(tmp_path):
    """What was recorded after the last checkpoint is forgotten, not kept twice."""
    changes = {"run": {"checkpoint_every": 2}, "evaluate": {"every": 0}}
    small_trainer(tmp_path / "a", changes).run()
    run_steps(small_trainer(tmp_path / "b", changes), 3)
    assert [row["step"] for row in count_steps(metrics_of(tmp_path / "b"))] == [1, 2, 3]
    assert len(list((tmp_path / "b" / "rollouts").iterdir())) == 3
    trainer = small_trainer(tmp_path / "b", changes, resume=True)
    trainer.run()
    assert trainer.display.steps == [3, 4]
    check_same(tmp_path / "a", tmp_path / "b", 4)


def test_without_a_checkpoint_it_begins_anew(tmp_path):
    changes = {"run": {"checkpoint_every": 0}, "evaluate": {"every": 0}}
    small_trainer(tmp_path / "a", changes).run()
    run_steps(small_trainer(tmp_path / "b", changes), 2)
    trainer = small_trainer(tmp_path / "b", changes, resume=True)
    trainer.run()
    assert "no finished checkpoint" in trainer.display.said[0]
    assert trainer.display.steps == [1, 2, 3, 4]
    check_same(tmp_path / "a", tmp_path / "b", 4)


def test_a_newer_checkpoint_that_is_damaged(tmp_path):
    """The one before it is taken, and what the damaged one's step had recorded is done again."""
    small_trainer(tmp_path / "a").run()
    run_steps(small_trainer(tmp_path / "b", {"run": {"keep_checkpoints": 1}}), 2)
    run_steps(small_trainer(tmp_path / "b", {"run": {"keep_checkpoints": 20}}, resume=True), 1)
    path = tmp_path / "b" / "checkpoint-3" / "masters.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x00")
    damaged = path.read_bytes()
    trainer = small_trainer(tmp_path / "b", {"run": {"keep_checkpoints": 1}}, resume=True)
    run_steps(trainer, 1)
    assert trainer.display.heard("checkpoint-3 is damaged and was removed: its steps are done again")
    assert trainer.display.heard("resuming after step 2, from checkpoint-2")
    assert path.read_bytes() != damaged
    small_trainer(tmp_path / "b", resume=True).run()
    check_same(tmp_path / "a", tmp_path / "b", 4)


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"train": {"seed": 1}}, ConfigError, "the saved order was"),
        (KL, CheckpointError, r"holds no reference, but this recipe needs one \(loss.kl_coef or preference.weight\)"),
        (LORA, CheckpointError, "master weights do not fit the model"),
        (
            {"rules": [{"when": "reward < 0", "over": 2, "then": "learning_rate * 0.5"}]},
            ConfigError,
            "the recipe's rules differ",
        ),
    ],
)
def test_what_cannot_be_resumed(tmp_path, changes, error, sentence):
    folder = tmp_path / "run"
    run_steps(small_trainer(folder), 2)
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(error, match=sentence):
        small_trainer(folder, changes, resume=True).run()
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert small_trainer(folder, resume=True).run().steps == 4  # nothing is lost, and nothing is locked


def test_other_rows(tmp_path):
    run_steps(small_trainer(tmp_path / "run"), 1)
    fewer = Task("try", TASK.train[:9], TASK.held_out)
    with pytest.raises(ConfigError, match=r"training rows \(before: 10, .*now: 9, .*--allow-changed"):
        small_trainer(tmp_path / "run", resume=True, task=fewer)
    again = small_trainer(tmp_path / "run", resume=True, allow_changed=True, task=fewer)
    run_steps(again, 1)  # a new epoch over the other rows: 3 of 9
    assert again.order.epoch == pytest.approx(1 + 3 / 9)
    assert len(again.question_log.state()) == 3  # row 0 may be another row now
    assert "the training rows changed: a new epoch over them begins" in again.display.said


def test_resumed_by_its_own_recipe(tmp_path):
    """A run that was resumed by runs/…/recipe.json is still found by the recipe that started it."""
    run_steps(small_trainer(tmp_path / "run", recipe_file="mine.toml"), 1)
    small_trainer(tmp_path / "run", resume=True, recipe_file="recipe.json").run()
    assert read_json(tmp_path / "run" / "inputs.json")["recipe"] == "mine.toml"
