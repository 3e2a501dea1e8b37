"""The fields that `GRPOTrainer` itself acts on; docs/trl-fields.md names the test of each."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback
from transformers.trainer_callback import DefaultFlowCallback, ExportableState, PrinterCallback

from groupwise.integrations.trl.translate import translate
from groupwise.trl import GRPOConfig, GRPOTrainer
from tests.integrations.trl.fixtures import POLICY, models, workplace

__all__ = ["models", "workplace"]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("workplace")]


def letters(completions, **_):
    return [float(len(set(completion))) for completion in completions]


def one(completions, **_):
    return [1.0] * len(completions)


def make_trainer(rewards: Any = letters, callbacks: Any = None, rows: Any = None, **fields: Any) -> GRPOTrainer:
    defaults = {
        "output_dir": "out",
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 4,
        "max_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 1e-3,
        "bf16": False,
        "use_cpu": True,
        "disable_tqdm": True,
    }
    data = Dataset.from_list(rows or [{"prompt": f"Say {number}: ", "word": str(number)} for number in range(4)])
    return GRPOTrainer(POLICY, rewards, GRPOConfig(**(defaults | fields)), data, data, callbacks=callbacks)


def logged_steps(trainer: GRPOTrainer, name: str) -> list[int]:
    return [entry["step"] for entry in trainer.state.log_history if name in entry]


def test_reward_weights():
    trainer = make_trainer([one, letters], reward_weights=[0.5, 2.0], max_steps=1)
    trainer.train()
    entry = trainer.state.log_history[0]
    assert trainer.reward_weights.tolist() == [0.5, 2.0]
    assert entry["reward"] == pytest.approx(0.5 + 2 * entry["rewards/letters/mean"])


def test_columns():
    columns: list[set[str]] = []

    def reward(completions, **others):
        columns.append(set(others))
        return letters(completions)

    make_trainer(reward, max_steps=1).train()
    make_trainer(reward, max_steps=1, remove_unused_columns=True).train()
    assert "word" in columns[0]
    assert columns[0] - columns[-1] == {"word"}


def test_logging():
    trainer = make_trainer(logging_steps=2, logging_first_step=True, include_num_input_tokens_seen="all")
    trainer.train()
    assert logged_steps(trainer, "loss") == [1, 2, 4]
    assert logged_steps(trainer, "num_input_tokens_seen") == [1, 2, 4, 4]
    assert logged_steps(trainer, "train_tokens_per_second") == [1, 2, 4]
    trainer = make_trainer(logging_strategy="no")
    trainer.train()
    assert logged_steps(trainer, "loss") == []
    assert "num_input_tokens_seen" not in trainer.state.log_history[-1]


def test_report_to():
    """transformers' callbacks get the config itself, so that what is only for them reaches them."""

    class Seen(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            self.space = args.trackio_space_id, args.trackio_bucket_id, args.trackio_static_space_id

    seen = Seen()
    spaces = {"trackio_space_id": "a", "trackio_bucket_id": "b", "trackio_static_space_id": "c"}
    trainer = make_trainer(callbacks=[seen], max_steps=1, report_to="tensorboard", **spaces)
    kinds = [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
    assert "TensorBoardCallback" in kinds
    trainer.train()
    assert seen.space == ("a", "b", "c")
    kinds = [type(callback).__name__ for callback in make_trainer().callback_handler.callbacks]
    assert "TensorBoardCallback" not in kinds


@pytest.mark.parametrize(("unique", "rows"), [(False, 8), (True, 2)])
def test_log_completions(monkeypatch, capsys, unique, rows):
    tables: list[Any] = []
    fake = SimpleNamespace(run=object(), Table=lambda dataframe: tables.append(dataframe), log=lambda table: None)
    monkeypatch.setitem(sys.modules, "wandb", fake)  # an account is needed for the real one
    trainer = make_trainer(max_steps=1, per_device_train_batch_size=8, log_completions=True, log_unique_prompts=unique)
    trainer.args.report_to = ["wandb"]
    trainer.train()
    assert len(tables[0]) == rows


def test_progress():
    printer = make_trainer(disable_tqdm=True).callback_handler.callbacks
    bar = make_trainer(disable_tqdm=False).callback_handler.callbacks
    assert any(type(callback) is PrinterCallback for callback in printer)
    assert not any(type(callback) is PrinterCallback for callback in bar)
    assert {type(callback) for callback in (*printer, *bar)} > {PrinterCallback, DefaultFlowCallback}


def test_evaluation():
    trainer = make_trainer(eval_strategy="steps", eval_steps=1, eval_delay=3)
    trainer.train()
    assert logged_steps(trainer, "eval_reward") == [3, 4]


@pytest.mark.parametrize(("greater", "best"), [(True, 4), (False, 2)])
def test_best(greater, best):
    def later_is_more(completions, trainer_state, **_):
        return [float(trainer_state.global_step + len(set(completion)) / 1000) for completion in completions]

    weights: dict[int, dict[str, torch.Tensor]] = {}

    class Keep(TrainerCallback):
        def on_save(self, args, state, control, model=None, **kwargs):
            weights[state.global_step] = {name: value.clone() for name, value in model.state_dict().items()}

    trainer = make_trainer(
        later_is_more,
        [Keep()],
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=2,
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="reward",
        greater_is_better=greater,
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best}")
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, weights[best][name]), name


@pytest.mark.parametrize("restore", [False, True])
def test_callback_states(restore):
    class Count(TrainerCallback, ExportableState):
        def __init__(self) -> None:
            self.count = 0

        def on_step_end(self, args, state, control, **kwargs):
            self.count += 1
            control.should_save = control.should_training_stop = state.global_step == 2

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"count": self.count}}

    make_trainer(callbacks=[Count()]).train()
    count = Count()
    trainer = make_trainer(callbacks=[count], restore_callback_states_from_checkpoint=restore)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4
    assert count.count == (4 if restore else 2)


def test_push(monkeypatch):
    calls: dict[str, Any] = {}

    class Api:  # without network there is no hub
        def __init__(self, token=None, **_):
            calls["token"] = token

        def create_repo(self, name, private=None, **_):
            calls["private"] = private
            return SimpleNamespace(repo_id=name)

        def upload_folder(self, repo_id, revision=None, **_):
            calls["repository"], calls["revision"] = repo_id, revision

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    options = {"hub_model_id": "me/model", "hub_token": "key", "hub_private_repo": True, "hub_revision": "v2"}
    trainer = make_trainer(push_to_hub=True, **options)
    assert calls == {"token": "key", "private": True}  # before it trains, as in transformers
    trainer.save_model()
    assert calls == {"token": "key", "private": True, "repository": "me/model", "revision": "v2"}


@pytest.mark.parametrize(
    ("fields", "name"),
    [({"hub_model_id": "me/m"}, "me/m"), ({"output_dir": "runs/first/"}, "first"), ({"output_dir": "."}, None)],
)
def test_the_repository_is_named_as_in_transformers(monkeypatch, fields, name):
    """One name everywhere: in the request that makes it, for the upload, in ``hub_model_id`` and in the recipe."""
    made: list[str] = []
    uploaded: list[str] = []

    def create_repo(self, repo_id, **_):
        made.append(repo_id)
        return SimpleNamespace(repo_id=repo_id if "/" in repo_id else f"someone/{repo_id}")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", create_repo)
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", lambda self, repo_id, **_: uploaded.append(repo_id))
    name = name or Path.cwd().name
    trainer = make_trainer(push_to_hub=True, **fields)
    complete = name if "/" in name else f"someone/{name}"
    assert (made, trainer.hub_model_id) == ([name], complete)
    trainer.push_to_hub()
    assert (made, uploaded) == ([name], [complete])
    assert translate(trainer.args, rows=4).settings["run.push_to_hub"] == name


def test_a_repository_that_cannot_be_made_is_said_before_training(monkeypatch):
    def create_repo(self, repo_id, **_):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", create_repo)
    with pytest.raises(ValueError, match=r"repository out cannot be made on the hub: .*no network.*hf auth login"):
        make_trainer(push_to_hub=True)
