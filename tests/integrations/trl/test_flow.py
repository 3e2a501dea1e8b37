"""`GRPOTrainer` follows transformers' flow: events, logs, evaluations, checkpoints, and what callbacks decide."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback, TrainerState

from groupwise.trl import GRPOConfig, GRPOTrainer
from tests.integrations.trl.fixtures import POLICY, TEXTS, models, workplace

__all__ = ["models", "workplace"]

DATA = Dataset.from_dict({"prompt": TEXTS, "answer": [str(number) for number in range(8)]})
SMALL: dict[str, Any] = {
    "output_dir": "out",
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "num_generations_eval": 2,
    "per_device_eval_batch_size": 4,
    "max_completion_length": 5,
    "max_steps": 2,
    "logging_steps": 1,
    "save_strategy": "no",
    "learning_rate": 1e-3,
    "bf16": False,
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "gradient_checkpointing": False,
}


def letters(completions, **kwargs):
    return [float(len(set(completion))) for completion in completions]


def make(reward_funcs: Any = letters, train_dataset: Any = DATA, **arguments: Any) -> GRPOTrainer:
    own = {name: arguments.pop(name) for name in ("eval_dataset", "callbacks", "peft_config") if name in arguments}
    return GRPOTrainer(POLICY, reward_funcs, GRPOConfig(**{**SMALL, **arguments}), train_dataset, **own)


class Recorder(TrainerCallback):
    """Notes each event with the step, and what is asked for."""

    def __init__(self, **asked: Any) -> None:
        self.events: list[tuple[str, int]] = []
        self.asked = asked

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def note(args: Any, state: Any, control: Any, **details: Any) -> Any:
            self.events.append((name, state.global_step))
            for flag, steps in self.asked.items():
                if name == "on_step_end" and state.global_step in steps:
                    setattr(control, flag, True)
            return control

        return note

    def steps(self, event: str) -> list[int]:
        return [step for name, step in self.events if name == event]


def test_events_come_in_transformers_order(workplace: Path) -> None:
    recorder = Recorder()
    make(callbacks=[recorder], max_steps=1, gradient_accumulation_steps=2).train()
    names = [name for name, _ in recorder.events]
    begin = ["on_init_end", "on_train_begin", "on_epoch_begin", "on_step_begin", "on_substep_end"]
    step = ["on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_log", "on_epoch_end"]
    assert names == [*begin, *step, "on_log", "on_train_end"]


@pytest.mark.slow
def test_callbacks_decide(workplace: Path) -> None:
    asked = {"should_save": [1], "should_evaluate": [2], "should_log": [2], "should_training_stop": [3]}
    recorder = Recorder(**asked)
    trainer = make(callbacks=[recorder], max_steps=9, logging_strategy="no", eval_dataset=DATA.select([0, 1]))
    output = trainer.train()
    assert recorder.steps("on_save") == [1]
    assert recorder.steps("on_evaluate") == [2]
    assert output.global_step == 3
    losses = [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses == [2]
    assert [path.name for path in Path("out").glob("checkpoint-*")] == ["checkpoint-1"]
    assert "# out" in Path("out/README.md").read_text()  # a card with each checkpoint, as in TRL


@pytest.mark.slow
def test_logging(workplace: Path) -> None:
    trainer = make(logging_first_step=True, logging_steps=2, max_steps=5)
    output = trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logs] == [1, 2, 4]
    last = trainer.state.log_history[-1]
    assert {"train_loss", "train_runtime", "train_samples_per_second", "train_steps_per_second", "reward"} <= set(last)
    assert output.training_loss == last["train_loss"]
    epochs = make(logging_strategy="epoch", num_train_epochs=2, max_steps=-1, gradient_accumulation_steps=4)
    epochs.train()
    assert [entry["epoch"] for entry in epochs.state.log_history] == [1.0, 2.0, 2.0]


@pytest.mark.slow
def test_evaluation(workplace: Path) -> None:
    trainer = make(eval_dataset=DATA.select([0, 1]), eval_strategy="steps", eval_steps=1, eval_delay=2, max_steps=3)
    before = trainer.evaluate()
    assert before["eval_loss"] == pytest.approx(0.0, abs=1e-6)
    trainer.train()
    evaluated = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    assert [entry["step"] for entry in evaluated] == [2, 3]
    after = trainer.evaluate(metric_key_prefix="test")
    assert after["test_reward"] == after["eval_reward"] == evaluated[-1]["eval_reward"]
    rows = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "eval/reward" in row] == [2, 3]
    with pytest.raises(ValueError, match="nothing to evaluate on"):
        make().evaluate()


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{}, {"scale_rewards": "batch", "beta": 0.1}])
def test_evaluation_of_one_completion_per_prompt(workplace: Path, arguments: dict[str, Any]) -> None:
    trainer = make(eval_dataset=DATA.select([0, 1, 2]), num_generations_eval=1, **arguments)
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["eval_reward"] == metrics["eval_rewards/letters/mean"]


@pytest.mark.slow
def test_a_completion_without_any_reward_is_warned_of(workplace: Path, caplog: pytest.LogCaptureFixture) -> None:
    def none_at_times(completions, answer, **kwargs):
        return [None if number % 2 else 1.0 for number, _ in enumerate(completions)]

    trainer = make([none_at_times, none_at_times], max_steps=1)
    trainer.train()
    (record,) = caplog.records
    assert "All reward functions returned None for 2 of 4 completions" in record.getMessage()
    caplog.clear()
    make([none_at_times, letters], max_steps=1).train()
    assert not caplog.records


@pytest.mark.slow
def test_an_evaluation_at_the_start_is_made_once(workplace: Path) -> None:
    evaluated: list[int] = []

    def reward(completions, answer, trainer_state, **kwargs):
        if answer[0] == "held out":
            evaluated.append(trainer_state.global_step)
        return letters(completions)

    held_out = Dataset.from_dict({"prompt": TEXTS[:1], "answer": ["held out"]})
    make(reward, eval_dataset=held_out, eval_strategy="steps", eval_steps=1, eval_on_start=True, max_steps=1).train()
    assert evaluated == [0, 1]


@pytest.mark.slow
def test_metrics_of_an_evaluation_are_means_over_its_batches(workplace: Path) -> None:
    lengths: list[int] = []

    def reward(completions, completion_ids, **kwargs):
        lengths.extend(map(len, completion_ids))
        return letters(completions)

    recorder = Recorder()
    metrics = make(reward, eval_dataset=DATA.select(range(6)), callbacks=[recorder]).evaluate()
    batches = [lengths[start : start + 4] for start in range(0, 12, 4)]  # two rows with two completions each
    for name, of_batch in {"min": min, "max": max}.items():
        assert metrics[f"eval_completions/{name}_length"] == pytest.approx(sum(map(of_batch, batches)) / 3)
    assert len(recorder.steps("on_prediction_step")) == 3
    assert metrics["eval_samples_per_second"] * metrics["eval_runtime"] == pytest.approx(6, rel=0.01)


@pytest.mark.slow
def test_what_a_callback_gets_and_asks_for_before_a_step(workplace: Path) -> None:
    class StopAtBegin(TrainerCallback):
        def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
            self.batches, self.dataset = len(train_dataloader), train_dataloader.dataset

        def on_step_begin(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 1

    stop = StopAtBegin()
    trainer = make(callbacks=[stop], num_iterations=2, gradient_accumulation_steps=2, max_steps=9)
    assert trainer.train().global_step == 1  # a step of one micro-batch would be made, as in transformers
    assert stop.batches == 16  # four rollouts of two micro-batches, twice
    assert stop.dataset is DATA


@pytest.mark.slow
def test_an_epoch_that_ends_early_is_resumed_to_the_bit(workplace: Path) -> None:
    """A rollout has four prompts and four updates, an epoch two rollouts; the first epoch ends after one update."""

    def train(resume: str | None = None, **options: Any) -> tuple[list[list[str]], GRPOTrainer]:
        seen: list[list[str]] = []

        def reward(completions, answer, **kwargs):
            seen.append(sorted(set(answer)))
            return letters(completions)

        length = {"max_steps": -1, "num_train_epochs": 2, "steps_per_generation": 4}
        recorder = Recorder(should_epoch_stop=[1], should_save=[1, 3])
        trainer = make(reward, callbacks=[recorder], **length, **options)
        output = trainer.train(resume_from_checkpoint=resume)
        assert output.global_step == 9
        assert trainer.state.epoch == 2.0
        assert recorder.steps("on_epoch_begin") == ([0, 1] if resume is None else [int(resume[-1])])
        return seen, trainer

    seen, straight = train(output_dir="straight")
    assert sorted(seen[1] + seen[2]) == [str(number) for number in range(8)]  # the second epoch is complete
    for step in (1, 3):
        resumed_seen, resumed = train(f"straight/checkpoint-{step}", output_dir=f"resumed-{step}")
        assert resumed_seen == seen[1 if step == 1 else 2 :]
        assert [entry["epoch"] for entry in resumed.state.log_history] == [
            entry["epoch"] for entry in straight.state.log_history
        ]
        for one, other in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.slow
def test_a_learning_rate_that_a_callback_has_changed_is_resumed(workplace: Path) -> None:
    class Halve(TrainerCallback):
        def on_step_end(self, args, state, control, optimizer=None, **kwargs):
            if state.global_step == 2:
                for group in optimizer.param_groups:
                    group["lr"] /= 2

    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "callbacks": [Halve()]}
    straight = make(output_dir="straight", **options)
    straight.train()
    notes: list[str] = []
    resumed = make(output_dir="resumed", **options)
    resumed.train(resume_from_checkpoint="straight/checkpoint-2")
    for one, other in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    longer = make(output_dir="longer", **{**options, "max_steps": 8, "learning_rate": 1.0, "callbacks": []})
    longer._say = notes.append
    longer.train(resume_from_checkpoint="straight/checkpoint-3")
    assert any("learning_rate 1 has no effect" in note for note in notes)
    rates = [entry["learning_rate"] for entry in longer.state.log_history if "learning_rate" in entry]
    assert rates[3:] == pytest.approx([1e-3 * (8 - step) / 8 for step in range(3, 8)])  # of the longer run


@pytest.mark.slow
def test_best(workplace: Path) -> None:
    """Rewards of the evaluation are 3, 1, 2: with save_total_limit 1 the best checkpoint and the last one are kept."""
    values = iter([3.0, 1.0, 2.0])

    def reward(completions, answer, **kwargs):
        if answer[0] == "held out":
            value = next(values)
            return [value] * len(completions)
        return letters(completions)

    held_out = Dataset.from_dict({"prompt": TEXTS[:1], "answer": ["held out"]})
    often = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    best = {"metric_for_best_model": "eval_reward", "greater_is_better": True, "save_total_limit": 1}
    trainer = make(reward, eval_dataset=held_out, max_steps=3, load_best_model_at_end=True, **often, **best)
    trainer.train()
    assert trainer.state.best_metric == 3.0
    assert trainer.state.best_model_checkpoint == "out/checkpoint-1"
    assert [path.name for path in Path("out").glob("checkpoint-*")] == ["checkpoint-1"]
    saved = AutoModelForCausalLM.from_pretrained("out/checkpoint-1")
    for name, weight in saved.state_dict().items():
        assert torch.equal(weight, trainer.model.state_dict()[name])


@pytest.mark.slow
def test_push(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: dict[str, Any] = {}

    class Hub:
        def __init__(self, token: str | None = None) -> None:
            calls["token"] = token

        def create_repo(self, repository: str, **options: Any) -> Any:
            calls["repository"], calls["private"] = repository, options["private"]
            return type("Url", (), {"repo_id": repository})()

        def upload_folder(self, folder_path: str, ignore_patterns: list[str], **options: Any) -> str:
            from huggingface_hub.utils import filter_repo_objects

            files = [str(path.relative_to(folder_path)) for path in Path(folder_path).rglob("*") if path.is_file()]
            calls["files"] = set(filter_repo_objects(files, ignore_patterns=ignore_patterns))
            return "pushed"

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    hub = {"hub_model_id": "me/quiz", "hub_token": "hf_secret", "hub_private_repo": True}
    trainer = make(save_strategy="steps", log_completions=True, **hub)
    trainer.train()
    assert trainer.push_to_hub(dataset_name="me/data", tags=["quiz"]) == "pushed"
    assert (calls["token"], calls["repository"], calls["private"]) == ("hf_secret", "me/quiz", True)
    tokenizer = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert calls["files"] == {"README.md", "config.json", "generation_config.json", "model.safetensors", *tokenizer}
    card = Path("out/README.md").read_text()
    assert "me/data" in card
    assert "- quiz" in card
    assert "`letters`" in card


@pytest.mark.slow
def test_log_completions(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def reward(completions, log_extra, log_metric, **kwargs):
        log_extra("size", [len(completion) for completion in completions])
        log_metric("longest", max(map(len, completions)))
        return letters(completions)

    trainer = make(reward, log_completions=True, num_completions_to_print=1)
    trainer.train()
    table = pyarrow.parquet.read_table("out/completions/completions_00001.parquet").to_pydict()
    assert list(table) == ["step", "prompt", "completion", "reward", "size", "advantage"]
    assert table["reward"] == [float(len(set(completion))) for completion in table["completion"]]
    assert table["size"] == list(map(len, table["completion"]))
    assert sum(table["advantage"]) == pytest.approx(0.0, abs=1e-3)
    assert trainer.state.log_history[0]["longest"] == max(table["size"])
    assert "Step 1" in capsys.readouterr().out


@pytest.mark.slow
def test_averages_between_logs_survive_a_resume(workplace: Path) -> None:
    options = {"logging_steps": 4, "max_steps": 4, "steps_per_generation": 4, "per_device_train_batch_size": 4}
    straight = make(output_dir="straight", **options)
    straight.train()
    make(callbacks=[Recorder(should_save=[2], should_training_stop=[2])], **options).train()
    resumed = make(**options)
    resumed.train(resume_from_checkpoint=True)
    for name, value in straight.state.log_history[0].items():
        if name not in ("step_time", "epoch"):
            assert resumed.state.log_history[0][name] == value, name
    for one, other in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_resume_finds_checkpoints(workplace: Path) -> None:
    with pytest.raises(ValueError, match="No valid checkpoint found in output directory"):
        make().train(resume_from_checkpoint=True)
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    first = make(**options)
    first.train()
    again = make(**options)
    again.train(resume_from_checkpoint="out/checkpoint-1")  # an older one: the later ones are moved
    assert {path.name for path in Path("out/earlier-run-1").iterdir()} == {"checkpoint-2", "checkpoint-3"}
    elsewhere = make(**{**options, "output_dir": "other"})
    elsewhere.train(resume_from_checkpoint="out/checkpoint-2")
    for trainer in (again, elsewhere):
        for one, other in zip(first.model.parameters(), trainer.model.parameters(), strict=True):
            assert torch.equal(one, other)
    Path("foreign/checkpoint-5").mkdir(parents=True)
    Path("foreign/checkpoint-5/trainer_state.json").write_text("{}")
    with pytest.raises(ValueError, match="Can't find a valid checkpoint at gone"):
        make().train(resume_from_checkpoint="gone")
    with pytest.raises(ValueError, match=r"Can't find a valid checkpoint at foreign/checkpoint-5 .* written by TRL"):
        make().train(resume_from_checkpoint="foreign/checkpoint-5")


@pytest.mark.slow
def test_a_signal_saves_and_ends_the_process(workplace: Path) -> None:
    script = f"""
import os, signal
from datasets import Dataset
from groupwise.trl import GRPOConfig, GRPOTrainer

def reward(completions, trainer_state, **kwargs):
    if trainer_state.global_step == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return [len(set(completion)) for completion in completions]

args = GRPOConfig(**{ {**SMALL, "max_steps": 9}!r})
GRPOTrainer({POLICY!r}, reward, args, Dataset.from_dict({{"prompt": {TEXTS!r}}})).train()
print("not reached")
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ})
    assert result.returncode == 128 + signal.SIGTERM, result.stderr
    assert "not reached" not in result.stdout
    assert "resume_from_checkpoint=True" in result.stdout
    state = json.loads(Path("out/checkpoint-2/trainer_state.json").read_text())
    assert state["global_step"] == 2


@pytest.mark.slow
def test_two_processes_train_as_one(workplace: Path) -> None:
    script = f"""
import json, sys
from datasets import Dataset
from groupwise.trl import GRPOConfig, GRPOTrainer

def letters(completions, **kwargs):
    return [float(len(set(completion))) for completion in completions]

data = Dataset.from_dict({{"prompt": {TEXTS!r}}})
settings = {SMALL!r} | json.loads(sys.argv[1])
trainer = GRPOTrainer({POLICY!r}, letters, GRPOConfig(**settings), data, data.select([0, 1]))
trainer.train()
trainer.save_model()
if trainer.is_world_process_zero():
    trainer.save_state()
"""
    Path("train.py").write_text(script)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "beta": 0.1}
    logs = []
    for processes in (1, 2):
        own = {"output_dir": f"out{processes}", "per_device_train_batch_size": 8 // processes}
        command = [*launch, str(processes), "train.py", json.dumps({**options, **own})]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
        assert result.returncode == 0, result.stderr
        logs.append(json.loads(Path(f"out{processes}/trainer_state.json").read_text())["log_history"])
    for one, two in zip(*logs, strict=True):
        for name, value in one.items():
            if not any(word in name for word in ("time", "per_second")):
                assert two[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    first, second = (AutoModelForCausalLM.from_pretrained(f"out{processes}") for processes in (1, 2))
    for one, two in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.allclose(one, two, atol=1e-4)


@pytest.mark.slow
def test_transformers_reads_the_state_of_a_checkpoint(workplace: Path) -> None:
    """Also values that JSON does not have, and the state of callbacks."""

    class Odd(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            state.log_history.append({"odd": float("nan"), "best": float("-inf"), "step": state.global_step})

    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "callbacks": [Odd()]}
    trainer = make(**options)
    trainer.train()
    loaded = TrainerState.load_from_json("out/checkpoint-1/trainer_state.json")
    assert (loaded.global_step, loaded.max_steps, loaded.save_steps) == (1, 2, 1)
    odd = loaded.log_history[0]
    assert odd["odd"] != odd["odd"]
    assert odd["best"] == float("-inf")
    assert "TrainerControl" in loaded.stateful_callbacks
    trainer.save_state()
    final = TrainerState.load_from_json("out/trainer_state.json")
    assert final.log_history[-1]["train_loss"] == trainer.state.log_history[-1]["train_loss"]
    resumed = make(**options)
    resumed.train(resume_from_checkpoint="out/checkpoint-1")
    assert resumed.state.log_history[0]["best"] == float("-inf")


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True])
def test_checkpoints_and_models_are_loaded_by_the_libraries(workplace: Path, adapter: bool) -> None:
    from peft import AutoPeftModelForCausalLM, LoraConfig
    from transformers import AutoTokenizer

    peft = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"])} if adapter else {}
    trainer = make(save_strategy="steps", save_steps=2, max_steps=2, **peft)
    trainer.train()
    trainer.save_model()
    ours = trainer.model.state_dict()
    kind = AutoPeftModelForCausalLM if adapter else AutoModelForCausalLM
    for folder in ("out/checkpoint-2", "out"):
        loaded = kind.from_pretrained(folder).state_dict()
        trained = [name for name in loaded if not adapter or "lora" in name]
        assert trained
        for name in trained:
            assert torch.equal(loaded[name], ours[name]), name
        assert AutoTokenizer.from_pretrained(folder).eos_token == trainer.processing_class.eos_token


def test_a_wrong_number_of_rewards_is_a_value_error(workplace: Path) -> None:
    with pytest.raises(ValueError, match="returned 3"):
        make(lambda completions, **kwargs: [1.0] * 3).train()
