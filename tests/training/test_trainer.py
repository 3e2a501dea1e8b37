"""A whole run: what it calls, records, stops at and leaves behind."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from groupwise.config import load_recipe
from groupwise.errors import CheckpointError, ConfigError, GroupwiseError, RewardError
from groupwise.integrations.vllm.errors import VllmError
from groupwise.rundir import read_json
from groupwise.tasks import Task
from groupwise.text import plural
from groupwise.training.store.rollout_files import read_rollouts
from groupwise.training.trainer import Callback, RunResult, Trainer
from tests.training.runs import (
    ROWS,
    check_same,
    even,
    graded_trainer,
    metrics_of,
    run_steps,
    small_recipe,
    small_trainer,
)

QUICK = {
    "train": {"steps": 3, "batch_size": 2},
    "sampling": {"max_new_tokens": 4},
    "evaluate": {"every": 2, "max_new_tokens": 2},
}


class Diary(Callback):
    """Writes down what it is told, and checks that the trainer is what it should be at that point."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def on_start(self, trainer):
        self.events.append(("start", trainer.step))

    def on_rollout(self, trainer, batch, group_advantages):
        assert len(batch) == len(group_advantages.advantages) == 8
        assert batch.texts
        self.events.append(("rollout", trainer.step))

    def on_step(self, trainer, report):
        assert report.step == trainer.step
        assert len(report.batch.prompts) == 2
        assert report.metrics["reward"] == pytest.approx(float(report.group_advantages.rewards.mean()))
        self.events.append(("step", report.step))

    def on_evaluation(self, trainer, evaluation):
        assert {"reward", "reward_low", "reward_high", "mean_length"} <= evaluation.metrics.keys()
        assert len(evaluation.answers) == 2
        self.events.append(("evaluation", trainer.step))

    def on_checkpoint(self, trainer, folder):
        assert (folder / "manifest.json").exists()
        self.events.append(("checkpoint", folder.name))

    def on_end(self, trainer, result):
        assert isinstance(result, RunResult)
        self.events.append(("end", result.steps))


def test_callbacks(tmp_path):
    """Each at its point, with what belongs to it, and once: also where a step is the best and the last one."""
    diary, other = Diary(), Diary()
    small_trainer(tmp_path / "run", QUICK, {"run": {"checkpoint_every": 2}}, callbacks=[diary, other]).run()
    assert diary.events == other.events
    checkpoints = [event for event in diary.events if event[0] == "checkpoint"]
    assert checkpoints == [("checkpoint", "checkpoint-2"), ("checkpoint", "checkpoint-3")]
    assert [event for event in diary.events if event[0] != "checkpoint"] == [
        ("start", 0),
        ("evaluation", 0),
        ("rollout", 0),
        ("step", 1),
        ("rollout", 1),
        ("step", 2),
        ("evaluation", 2),
        ("rollout", 2),
        ("step", 3),
        ("evaluation", 3),
        ("end", 3),
    ]
    # A step is saved before it is evaluated, so that a failing evaluation does not lose it.
    assert diary.events.index(checkpoints[0]) < diary.events.index(("evaluation", 2))


@pytest.mark.slow
def test_callbacks_of_a_resumed_run(tmp_path):
    run_steps(small_trainer(tmp_path / "run", QUICK), 2)
    diary = Diary()
    small_trainer(tmp_path / "run", QUICK, resume=True, callbacks=[diary]).run()
    assert diary.events == [
        ("start", 2),
        ("rollout", 2),
        ("step", 3),
        ("checkpoint", "checkpoint-3"),
        ("evaluation", 3),
        ("end", 3),
    ]


def test_metrics(tmp_path):
    """A row for each step, and one for each evaluation, in their order; a file of rollouts for each step."""
    trainer = small_trainer(tmp_path / "run", QUICK, {"train": {"steps": 5}})
    result = trainer.run()
    rows = metrics_of(tmp_path / "run")
    kinds = [(row["step"], "eval" if "eval/reward" in row else "step") for row in rows]
    expected = [(0, "eval"), (1, "step"), (2, "step"), (2, "eval"), (3, "step"), (4, "step"), (4, "eval")]
    assert kinds == [*expected, (5, "step"), (5, "eval")]
    assert all(name == "step" or name.startswith("eval/") for name in rows[0])
    lengths = read_rollouts(tmp_path / "run").to_pandas().groupby("step")["completion_tokens"].sum()
    assert [row["num_tokens"] for row in rows if "num_tokens" in row] == lengths.cumsum().tolist()
    assert {"reward", "rewards/even/mean", "entropy", "grad_norm", "learning_rate", "epoch"} <= rows[1].keys()
    assert result.first_held_out["reward"] == rows[0]["eval/reward"]
    assert result.last_held_out["reward"] == rows[-1]["eval/reward"]
    assert result.held_out["reward"] == max(row["eval/reward"] for row in rows[1:] if "eval/reward" in row)
    table = read_rollouts(tmp_path / "run")
    assert table["step"].to_pylist() == [step for step in range(1, 6) for _ in range(8)]
    rewards = table.filter(table["step"].to_numpy() == 2)["reward"].to_pylist()
    assert rows[2]["reward"] == pytest.approx(sum(rewards) / 8)
    assert even(table["completion"].to_pylist()) == pytest.approx(table["reward"].to_pylist())


@pytest.mark.parametrize(
    ("settings", "at"),
    [({"every": 0}, [0, 3]), ({"every": 1, "before_training": False}, [1, 2, 3]), ({"every": 3}, [0, 3])],
    ids=str,
)
def test_when_it_is_evaluated(tmp_path, settings, at):
    small_trainer(tmp_path / "run", QUICK, {"evaluate": settings}).run()
    assert [row["step"] for row in metrics_of(tmp_path / "run") if "eval/reward" in row] == at


def test_nothing_held_out(tmp_path):
    trainer = small_trainer(tmp_path / "run", QUICK, task=Task("try", ROWS))
    result = trainer.run()
    assert trainer.evaluate() is None
    assert (result.best_step, result.first_held_out, trainer.metric) == (None, {}, None)
    assert not (tmp_path / "run" / "best.json").exists()
    assert not any("eval/reward" in row for row in metrics_of(tmp_path / "run"))


@pytest.mark.slow
def test_the_best_is_the_last_of_equals(tmp_path):
    changes = {"train": {"steps": 5}, "evaluate": {"every": 1}}
    trainer = graded_trainer(tmp_path / "run", [4, 1, 2, 2, 2, 1], QUICK, changes)
    result = trainer.run()
    assert result.best_step == 4  # what was measured before the first step is nobody's doing
    assert read_json(tmp_path / "run" / "best.json")["metric"] == "right"
    held_out = [metrics["right"] for metrics in (result.first_held_out, result.held_out, result.last_held_out)]
    assert held_out == [1.0, 0.5, 0.25]


def test_early_stop(tmp_path):
    """Two evaluations that are not better, equal ones too, and it ends after the second, with the best in hand."""
    changes = {"train": {"steps": 8}, "evaluate": {"every": 1, "patience": 2}}
    trainer = graded_trainer(tmp_path / "run", [0, 1, 0, 3, 3, 2, 4, 4, 4], QUICK, changes)
    result = trainer.run()
    assert (result.steps, result.best_step, result.exit_status) == (5, 4, 0)
    assert trainer.display.said[-1] == "stopped early: 2 evaluations without a better right"
    assert result.model is not None


@pytest.mark.slow
def test_patience_outlasts_the_run(tmp_path):
    trainer = graded_trainer(tmp_path / "run", [0, 3, 2, 1], QUICK, {"evaluate": {"every": 1, "patience": 2}})
    assert trainer.run().steps == 3
    assert not trainer.display.heard("stopped early")


@pytest.mark.slow
def test_another_metric(tmp_path):
    trainer = graded_trainer(tmp_path / "run", [0, 3, 2, 1], QUICK, {"evaluate": {"every": 1, "metric": "ever"}})
    assert trainer.run().best_step == 3  # the last of equal ones; by "right" it would be step 1
    assert read_json(tmp_path / "run" / "best.json")["metric"] == "ever"
    sentence = r"evaluate\.metric 'never' is not measured by this task.*\(there are: right, ever\)"
    with pytest.raises(ConfigError, match=sentence):
        graded_trainer(tmp_path / "other", [0], QUICK, {"evaluate": {"metric": "never"}})
    assert not (tmp_path / "other").exists()


def test_a_loop_of_ones_own(tmp_path):
    """Broken off and closed, everything that was done is on the disk; the lock is gone, and the run goes on."""
    small_trainer(tmp_path / "whole", QUICK).run()
    trainer = small_trainer(tmp_path / "run", QUICK)
    seen = []
    for report in trainer.steps():
        seen.append(report.step)
        assert report.metrics["step_time"] > 0
        if report.step == 2:
            break
    trainer.close()
    assert seen == [1, 2]
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [0, 1, 2, 2]
    assert not (tmp_path / "run" / "model").exists()
    small_trainer(tmp_path / "run", QUICK, resume=True).run()
    check_same(tmp_path / "whole", tmp_path / "run", 3)


@pytest.mark.slow
def test_a_loop_in_two_parts(tmp_path):
    """Whoever iterates again goes on where the first loop stopped."""
    small_trainer(tmp_path / "whole", QUICK).run()
    with small_trainer(tmp_path / "run", QUICK) as trainer:
        assert next(trainer.steps()).step == 1
        assert [report.step for report in trainer.steps()] == [2, 3]
        assert list(trainer.steps()) == []
        trainer.finish()
    check_same(tmp_path / "whole", tmp_path / "run", 3)


@pytest.mark.slow
def test_finish_after_a_break(tmp_path):
    """It evaluates and saves what had not been, and exports: nothing is lost."""
    with small_trainer(tmp_path / "run", QUICK, {"run": {"checkpoint_every": 0}}) as trainer:
        next(trainer.steps())
        result = trainer.finish()
    assert (result.steps, result.best_step) == (1, 1)
    assert (tmp_path / "run" / "checkpoint-1" / "manifest.json").exists()
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    resumed = small_trainer(tmp_path / "run", QUICK, resume=True)
    resumed.run()
    assert resumed.display.steps == [2, 3]


def test_before_it_has_begun(tmp_path):
    with (
        small_trainer(tmp_path / "run", QUICK) as trainer,
        pytest.raises(ConfigError, match=r"not started yet: iterate over steps\(\) first"),
    ):
        trainer.evaluate()


@pytest.mark.slow
def test_off_the_main_thread(tmp_path):
    """In a thread no signal can be caught; the run is the same."""
    small_trainer(tmp_path / "whole", QUICK).run()
    results = []
    thread = threading.Thread(target=lambda: results.append(small_trainer(tmp_path / "run", QUICK).run()))
    thread.start()
    thread.join()
    assert results[0].steps == 3
    check_same(tmp_path / "whole", tmp_path / "run", 3)


class Failing:
    """A reward that fails in one call."""

    __name__ = "even"

    def __init__(self, bad_call: int) -> None:
        self.calls, self.bad_call = 0, bad_call

    def __call__(self, completions, **_):
        self.calls += 1
        if self.calls == self.bad_call:
            raise ZeroDivisionError("a mistake of mine")
        return even(completions)


def test_a_failing_reward(tmp_path):
    """The error names it; the steps before are on the disk, and the mended run is the one that never failed."""
    changes = {"evaluate": {"every": 0, "before_training": False}}
    small_trainer(tmp_path / "whole", QUICK, changes, rewards=[even]).run()
    failing = small_trainer(tmp_path / "run", QUICK, changes, rewards=[Failing(3)])
    with pytest.raises(RewardError, match=r"even.*a mistake of mine"):
        failing.run()
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [1, 2]
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    with pytest.raises(ConfigError, match=r"test_trainer\.py, source of reward 'even'"):
        small_trainer(tmp_path / "run", QUICK, changes, rewards=[even], resume=True)
    small_trainer(tmp_path / "run", QUICK, changes, rewards=[even], resume=True, allow_changed=True).run()
    check_same(tmp_path / "whole", tmp_path / "run", 3)


def test_a_reward_that_fails_between_two_checkpoints_loses_no_step(tmp_path):
    """Neither in a step nor in an evaluation."""
    changes = {"run": {"checkpoint_every": 0}, "evaluate": {"every": 2, "before_training": False}}
    small_trainer(tmp_path / "whole", QUICK, changes, rewards=[even]).run()
    for place, call in (("step", 4), ("evaluation", 3)):  # calls: step 1, step 2, evaluation, step 3
        folder = tmp_path / place
        with pytest.raises(RewardError, match=r"even.*a mistake of mine"):
            small_trainer(folder, QUICK, changes, rewards=[Failing(call)]).run()
        assert (folder / "checkpoint-2").exists()
        small_trainer(folder, QUICK, changes, rewards=[even], resume=True, allow_changed=True).run()
        check_same(tmp_path / "whole", folder, 3)


def test_weights_that_cannot_be_sent_to_the_generator_lose_no_step(tmp_path):
    changes = {"run": {"checkpoint_every": 0}, "evaluate": {"every": 0, "before_training": False}}
    small_trainer(tmp_path / "whole", QUICK, changes).run()
    trainer = small_trainer(tmp_path / "run", QUICK, changes)
    update = trainer.generator.update_weights

    def no_answer(version):
        if version == 2:
            raise VllmError("no vLLM server could be used")
        update(version)

    trainer.generator.update_weights = no_answer
    with pytest.raises(VllmError, match="no vLLM server"):
        trainer.run()
    assert (tmp_path / "run" / "checkpoint-2").exists()
    small_trainer(tmp_path / "run", QUICK, changes, resume=True).run()
    check_same(tmp_path / "whole", tmp_path / "run", 3)


@pytest.mark.parametrize(
    "point",
    [
        "on_rollout",
        *(pytest.param(point, marks=pytest.mark.slow) for point in ("on_step", "on_evaluation", "on_checkpoint")),
    ],
)
def test_a_failing_callback(tmp_path, point):
    """Whatever a callback does in step 2, the finished steps are saved, and the run goes on to the same end."""
    seldom = {"run": {"checkpoint_every": 0}}
    small_trainer(tmp_path / "whole", QUICK, seldom).run()

    class Mistake(Callback):
        pass

    def fail(self, trainer, *_):
        if trainer.step == (1 if point == "on_rollout" else 2):
            raise KeyError("mine")

    setattr(Mistake, point, fail)
    with pytest.raises(KeyError, match="mine"):
        small_trainer(tmp_path / "run", QUICK, seldom, callbacks=[Mistake()]).run()
    assert (tmp_path / "run" / f"checkpoint-{1 if point == 'on_rollout' else 2}").exists()
    small_trainer(tmp_path / "run", QUICK, seldom, resume=True).run()
    check_same(tmp_path / "whole", tmp_path / "run", 3)


def test_a_policy_that_cannot_be_resumed(tmp_path):
    changes = {"run": {"resumable": False}}
    run_steps(small_trainer(tmp_path / "run", QUICK, changes), 2)
    rows = metrics_of(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"checkpoint-2 holds only the policy \(run.resumable was false\)"):
        small_trainer(tmp_path / "run", QUICK, changes, resume=True).run()
    assert metrics_of(tmp_path / "run") == rows
    # What the sentence advises works.
    source = {"model": {"source": str(tmp_path / "run" / "checkpoint-2" / "policy")}}
    assert small_trainer(tmp_path / "new", QUICK, source).run().steps == 3


def test_no_rows_or_no_reward(tmp_path):
    with pytest.raises(ConfigError, match=r"the task 'none' has no rows to train on; set data\.train"):
        small_trainer(tmp_path / "run", QUICK, task=Task("none", []))
    with pytest.raises(ConfigError, match="there is no reward to learn from"):
        small_trainer(tmp_path / "run", QUICK, rewards=[])
    assert not (tmp_path / "run").exists()


def test_the_recipe_of_a_run_can_be_used_again(tmp_path):
    trainer = small_trainer(tmp_path / "run", QUICK)
    run_steps(trainer, 1)
    assert load_recipe(tmp_path / "run" / "recipe.json") == trainer.recipe == small_recipe(QUICK)


def test_a_failing_last_evaluation_loses_no_step(tmp_path):
    """The last step is saved before it is evaluated; a resume only evaluates and exports."""
    small_trainer(tmp_path / "whole", QUICK, {"run": {"checkpoint_every": 0}}).run()

    def fails_in_evaluations(completions, trainer_state, **_):
        if trainer_state.global_step == 3:
            raise ValueError("too slow")
        return even(completions)

    changes = {"run": {"checkpoint_every": 0}, "evaluate": {"every": 0}}
    fails_in_evaluations.__name__ = "even"
    with pytest.raises(RewardError, match="too slow"):
        small_trainer(tmp_path / "run", QUICK, changes, rewards=[fails_in_evaluations]).run()
    assert (tmp_path / "run" / "checkpoint-3" / "manifest.json").exists()
    trainer = small_trainer(tmp_path / "run", QUICK, changes, rewards=[even], resume=True, allow_changed=True)
    result = trainer.run()
    assert (result.steps, result.best_step) == (3, 3)
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [0, 1, 2, 3, 3]
    assert (result.model / "model.safetensors").exists()


def test_a_rule_cannot_end_a_run(tmp_path):
    rules = [{"when": "reward < 2", "over": 1, "then": "batch_size * 0.5"}]
    changes = {"train": {"steps": 4, "batch_size": 2}, "rules": rules, "evaluate": {"every": 0}}
    trainer = small_trainer(tmp_path / "run", changes)
    assert trainer.run().steps == 4
    assert trainer.display.heard("is left out, it stays at 1")


def test_what_was_measured_when(tmp_path):
    """Without an evaluation before training, the first one is not called that; the best of several is called so."""
    trainer = small_trainer(tmp_path / "run", QUICK, {"evaluate": {"before_training": False, "every": 1}})
    result = trainer.run()
    head = trainer.display.summary[0]
    assert head[1] == "after 1 step (first)"
    assert head[2] == f"after {plural(result.best_step, 'step')} (best of 3)"
    card = (result.model / "README.md").read_text()
    assert "| held out | after 1 step (first) | after" in card
    assert "best of 3 evaluations on these rows, so its figure is optimistic" in card
    one = small_trainer(tmp_path / "one", QUICK, {"evaluate": {"every": 0}})
    one.run()
    assert one.display.summary[0][1:] == ("before training", "after 3 steps")


def test_a_failed_start_leaves_no_folder(tmp_path):
    """The next try finds nothing in its way, and a run that was there keeps everything."""
    bad = {"model": {"source": str(tmp_path / "no-model")}}
    with pytest.raises(GroupwiseError, match="no-model"):
        small_trainer(tmp_path / "run", QUICK, bad)
    assert not (tmp_path / "run").exists()
    assert run_steps(small_trainer(tmp_path / "run", QUICK), 1).step == 1
    with pytest.raises(GroupwiseError, match="no-model"):
        small_trainer(tmp_path / "run", QUICK, bad, resume=True)
    assert (tmp_path / "run" / "checkpoint-1").exists()


@pytest.mark.parametrize(
    ("changes", "options", "sentence"),
    [
        ({"data": {"train": "missing.jsonl"}}, {"task": None}, "missing.jsonl"),
        ({"rewards": [{"function": "nowhere.py:reward"}]}, {}, "nowhere.py"),
        ({"advantages": {"function": "nowhere:advantage"}}, {}, "nowhere"),
        ({}, {"rewards": [lambda prompts, completions, column, **_: []]}, "column"),
        ({}, {"folder_in_use": True}, "not empty"),
    ],
    ids=["rows", "rewards", "advantage", "columns", "folder"],
)
def test_inputs_are_checked_before_the_model_is_loaded(tmp_path, monkeypatch, changes, options, sentence):
    def load(*_, **__):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("groupwise.training.components.load_model_and_tokenizer", load)
    folder = tmp_path / "run"
    if options.pop("folder_in_use", False):
        folder.mkdir()
        (folder / "mine.txt").write_text("mine")
    with pytest.raises(GroupwiseError, match=sentence):
        small_trainer(folder, QUICK, changes, **options)


def test_from_rows_takes_every_section(tmp_path):
    settings = {"train": {"steps": 1}, "sampling": {"max_new_tokens": 4}, "run": {"tensorboard": False, "plot": False}}
    model = {"source": "tiny", "dtype": "float32", "lora": {"rank": 2}, "gradient_checkpointing": False}
    for _ in range(2):
        trainer = Trainer.from_rows(ROWS, even, model=model, folder=tmp_path / "run", overwrite=True, **settings)
        with trainer:
            assert trainer.recipe.model.lora.rank == 2
            assert len(list(trainer.steps())) == 1
