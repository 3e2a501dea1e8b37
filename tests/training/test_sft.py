"""The supervised warm-up: before the first step, and as a whole run."""

from __future__ import annotations

import math
import signal
from itertools import chain

import pytest
import torch

from groupwise.environments import Environment, Reply
from groupwise.errors import ConfigError, NotFiniteError
from groupwise.rundir import read_json
from groupwise.tasks import Task
from groupwise.training.preflight import describe_run
from groupwise.training.sft import SupervisedFineTuning
from tests.training.runs import ROWS, even, metrics_of, run_steps, small_recipe, small_trainer

EXAMPLES = [(f"Say number {number}: ", "one" * (number % 3 + 1)) for number in range(10)]


def says_one(row, text):
    return text.startswith("one")


TASK = Task("form", ROWS, ROWS[:4], grades={"right": says_one}, metric="right", examples=EXAMPLES)
SUPERVISED = {
    "train": {"steps": 0},
    "sft": {"epochs": 12, "batch_size": 4, "learning_rate": 3e-3},
    "evaluate": {"every": 0, "max_new_tokens": 3},
    "loss": {"kl_coef": 0.1},
}


def weights_of(trainer):
    return {name: weight.clone() for name, weight in trainer.masters.state_dict().items()}


def test_a_supervised_run(tmp_path):
    """Measured before as step 0 and after as its last step; what is exported is the warmed-up model."""
    trainer = small_trainer(tmp_path / "run", SUPERVISED, task=TASK)
    result = trainer.run()
    assert (result.steps, result.best_step, result.exit_status) == (30, 30, 0)  # 10 examples × 12 / 4
    assert (result.first_held_out["right"], result.held_out["right"]) == (0.0, 1.0)
    rows = metrics_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, *range(1, 31), 30]
    assert [row["step"] for row in rows if "eval/right" in row] == [0, 30]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 30
    assert losses[-1] < losses[0] / 4
    assert rows[1]["learning_rate"] == 3e-3
    assert trainer.reference is None
    assert read_json(tmp_path / "run" / "best.json")["checkpoint"] == "checkpoint-30"
    assert "30 supervised steps" in (result.model / "README.md").read_text()
    assert not any(str(line).startswith("questions") for line in trainer.display.summary)


def test_a_supervised_run_that_is_resumed_is_whole(tmp_path):
    small_trainer(tmp_path / "run", SUPERVISED, task=TASK).run()
    rows = metrics_of(tmp_path / "run")
    again = small_trainer(tmp_path / "run", SUPERVISED, task=TASK, resume=True)
    assert again.run().steps == 30
    assert metrics_of(tmp_path / "run") == rows
    more = small_trainer(tmp_path / "run", SUPERVISED, {"train": {"steps": 40}}, task=TASK, resume=True)
    with pytest.raises(
        ConfigError, match=r"SFT alone \(train\.steps = 0\) cannot be resumed.*--model\.source .*policy"
    ):
        more.run()
    more = small_trainer(tmp_path / "run", SUPERVISED, {"sft": {"epochs": 24}}, task=TASK, resume=True)
    with pytest.raises(ConfigError, match=r"is finished, and 60 steps of SFT are more.*start a new run"):
        more.run()
    assert metrics_of(tmp_path / "run") == rows


def test_a_supervised_run_that_is_stopped_is_not_saved_by_halves(tmp_path):
    trainer = small_trainer(tmp_path / "run", SUPERVISED, task=TASK)
    with trainer:
        stage = trainer.display.stage

        def stop_at(text):
            stage(text)
            if text == "SFT: 7 of 30 supervised steps":
                trainer.stopping.signal = signal.SIGINT

        trainer.display.stage = stop_at
        assert list(trainer.steps()) == []
        result = trainer.finish()
    assert (result.steps, result.model, result.exit_status) == (0, None, 130)
    assert trainer.display.heard("stopped after 7 of 30 steps of SFT")
    assert not list((tmp_path / "run").glob("checkpoint-*"))
    assert small_trainer(tmp_path / "run", SUPERVISED, task=TASK, resume=True).run().steps == 30


@pytest.mark.parametrize(
    ("changes", "task", "sentence"),
    [
        ({"train": {"steps": 0}}, TASK, "train.steps is 0 and there is no SFT"),
        ({"sft": {"epochs": 2.5}}, Task("try", ROWS), "sft.epochs is 2.5, but the task 'try' has no examples"),
        ({"sft": {"steps": 3}}, Task("try", ROWS), "sft.steps is 3, but the task 'try' has no examples; set it to 0"),
    ],
)
def test_what_cannot_be(tmp_path, changes, task, sentence):
    with pytest.raises(ConfigError, match=sentence):
        small_trainer(tmp_path / "run", changes, task=task, rewards=[even])
    assert not (tmp_path / "run").exists()


def test_epochs_show_every_example_as_often_as_any_other(tmp_path):
    with small_trainer(tmp_path / "run", SUPERVISED, {"sft": {"epochs": 2}}, task=TASK) as trainer:
        own = trainer.sft
        draw = own._example_order()
        drawn = [draw() for _ in range(own.steps)]
    assert own.steps == 5
    flat = [number for batch in drawn for number in batch]
    assert sorted(flat) == sorted([*range(10)] * 2)
    assert sorted(flat[:10]) == [*range(10)]
    assert flat[:10] != flat[10:]


@pytest.mark.parametrize(("epochs", "size", "steps"), [(1, 4, 3), (0.1, 4, 1), (2, 32, 1), (None, 4, 6)])
def test_how_many_steps(tmp_path, epochs, size, steps):
    changes = {"sft": {"steps": 6, "epochs": epochs, "batch_size": size}}
    with small_trainer(tmp_path / "run", changes, task=TASK) as trainer:
        assert trainer.sft.steps == steps


def test_the_token_budget_changes_nothing_but_memory(tmp_path):
    """One example at a time, or all at once."""
    ends = []
    for budget in (1, 10**6):
        changes = {"sft": {"steps": 3, "batch_size": 5}, "model": {"dtype": "float64"}}
        with small_trainer(tmp_path / str(budget), changes, task=TASK) as trainer:
            SupervisedFineTuning(trainer.components).run(trainer.masters, budget)
            ends.append(weights_of(trainer))
    for name, weight in ends[0].items():
        torch.testing.assert_close(weight, ends[1][name], rtol=1e-6, atol=1e-9)


def test_sft_that_is_not_finite_stops_with_its_weights_as_they_were(tmp_path):
    with small_trainer(tmp_path / "run", {"sft": {"steps": 3}}, task=TASK) as trainer:
        with torch.no_grad():
            trainer.components.model.model.norm.weight[0] = math.inf
        before = weights_of(trainer)
        with pytest.raises(NotFiniteError, match=r"in step 1 of SFT the loss is nan.*sft\.learning_rate"):
            trainer.sft.run(trainer.masters, 10**6)
        assert all(torch.equal(weight, before[name]) for name, weight in weights_of(trainer).items())


def test_dropout_in_the_warm_up_is_the_same_every_time(tmp_path):
    ends = []
    for number in range(2):
        torch.manual_seed(number)  # whatever else has drawn from it
        changes = {"sft": {"steps": 2}, "model": {"lora": {"rank": 2, "dropout": 0.5}}}
        with small_trainer(tmp_path / str(number), changes, task=TASK) as trainer:
            torch.manual_seed(number)
            trainer.sft.run(trainer.masters, 10**6)
            ends.append(weights_of(trainer))
    assert all(torch.equal(weight, ends[1][name]) for name, weight in ends[0].items())


def test_examples_that_do_not_fit_the_model(tmp_path):
    long = Task("form", ROWS, examples=[("Say number 1: ", "one" * 4000)])
    with pytest.raises(ConfigError, match=r"the longest example of SFT has \d+ tokens.*window of \d+; lower"):
        small_trainer(tmp_path / "run", {"sft": {"steps": 1}}, task=long)
    assert not (tmp_path / "run").exists()


def test_a_warm_up_before_grpo_is_evaluated_after_it(tmp_path):
    changes = {**SUPERVISED, "train": {"steps": 1, "batch_size": 2}}
    run_steps(small_trainer(tmp_path / "run", changes, task=TASK), 1)
    rows = metrics_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 1]
    assert rows[0]["eval/right"] == 1.0


def test_what_a_supervised_run_comes_to():
    recipe = small_recipe({"train": {"steps": 0}, "task": "quiz", "sft": {"steps": 7}})
    assert list(describe_run(recipe, timed=False))[-1] == "steps: 7, all of them SFT (train.steps is 0)"


class Echo(Environment):
    """Repeats what the model said, once."""

    async def start(self, row, seed):
        self.turns = 0

    async def respond(self, turn):
        self.turns += 1
        return Reply([{"role": "user", "content": turn.text}], done=self.turns == 2)

    async def reward(self):
        return 1.0


def conversation(*texts):
    """Messages of the assistant and the user, in turn."""
    return [{"role": ("assistant", "user")[number % 2], "content": text} for number, text in enumerate(texts)]


def test_of_conversations_the_turns_are_learned(tmp_path):
    """The first loss is the mean over the assistant's tokens, computed one conversation at a time."""
    examples = [("Say: ", conversation("one", "[two]", "three")), ("Say no: ", conversation("no"))]
    task = Task("talk", ROWS, examples=examples)
    changes = {"train": {"steps": 0}, "sft": {"epochs": 1, "batch_size": 2}}
    with small_trainer(tmp_path / "run", changes, task=task, rewards=[], environment=Echo) as trainer:
        tokenizer, model, logps = trainer.components.tokenizer, trainer.components.model, []
        for prompt, messages in examples:
            texts = [prompt, *(message["content"] for message in messages)]
            parts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
            ids = torch.tensor([list(chain.from_iterable(parts))])
            learned = torch.tensor([number % 2 == 1 for number, part in enumerate(parts) for _ in part])
            with torch.no_grad():
                rows = model(ids).logits[0].log_softmax(-1)
            logps += [rows[place - 1, ids[0, place]] for place in learned.nonzero().flatten().tolist()]
        trainer.run()
    (loss,) = [row["loss"] for row in metrics_of(tmp_path / "run") if "loss" in row]
    assert loss == pytest.approx(-torch.stack(logps).mean().item(), abs=1e-5)
    assert len(logps) == len("one" + "three" + "no")


def test_conversations_as_examples_need_an_environment(tmp_path):
    task = Task("talk", ROWS, ROWS[:2], examples=[("Say: ", conversation("one", "[two]", "three"))])
    with pytest.raises(ConfigError, match="example 1 of the task 'talk' is a conversation; set environment"):
        small_trainer(tmp_path / "run", SUPERVISED, task=task).run()


def test_a_conversation_that_cannot_be_learned_is_named(tmp_path):
    task = Task("talk", ROWS, examples=[("Say: ", conversation("one", "[two]"))])
    changes = {"train": {"steps": 0}, "sft": {"steps": 1}}
    with pytest.raises(ConfigError, match=r"example 1 of the task 'talk' cannot be learned: .* begins and ends with"):
        small_trainer(tmp_path / "run", changes, task=task, rewards=[], environment=Echo).run()
