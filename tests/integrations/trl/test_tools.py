"""`tools` and `environment_factory` of `GRPOTrainer`: what rewards get, what is logged, and the same runs in TRL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from datasets import Dataset

from groupwise.errors import ConfigError, UserCodeError
from groupwise.trl import GRPOConfig, GRPOTrainer
from tests.integrations.trl.fixtures import TEXTS, models, tool_tokenizer, workplace

__all__ = ["models", "workplace"]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dapo": ("tools", {}),
    "grpo, reused, KL": ("environment", {"loss_type": "grpo", "num_iterations": 2, "beta": 0.1, "max_steps": 4}),
    "vespo, one turn with calls": ("both", {"loss_type": "vespo", "max_tool_calling_iterations": 1}),
    "no calls": ("environment", {"loss_type": "dr_grpo", "max_tool_calling_iterations": 0, "scale_rewards": "none"}),
    "sequence ratios, truncated ones left out": (
        "tools",
        {
            "loss_type": "luspo",
            "importance_sampling_level": "sequence",
            "mask_truncated_completions": True,
            "num_iterations": 2,
        },
    ),
    "evaluation": (
        "environment",
        {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4, "loss_type": "sapo"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_rewards_logs_and_weights_are_those_of_trl(tmp_path, name):
    from tests.integrations.trl import tool_parity as parity

    given, changes = CASES[name]
    options: dict[str, Any] = {
        "tools": {"tools": [parity.multiply, parity.look]},
        "environment": {"environment_factory": parity.Till},
        "both": {"tools": [parity.look], "environment_factory": parity.Counter},
    }[given]
    theirs = parity.run_trl(tmp_path / "trl", changes, **options)
    ours = parity.run_drop_in(tmp_path / "ours", changes, **options)
    messages = [message for call in theirs.calls for completion in call["completions"] for message in completion]
    assert sum(message["role"] == "tool" for message in messages) >= (0 if name == "no calls" else 10)
    compare(ours, theirs, changes)
    assert any("tools/call_frequency" in entry for entry in ours.logs)


FUNCTION_CASES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo, reused, KL": {"loss_type": "grpo", "num_iterations": 2, "beta": 0.1, "max_steps": 4},
    "bnpo, two rewards": {"loss_type": "bnpo", "reward_weights": [1.0, 0.5]},
    "luspo, sequence ratios": {"loss_type": "luspo", "importance_sampling_level": "sequence", "num_iterations": 2},
    "vespo, entropy": {"loss_type": "vespo", "entropy_coef": 0.1, "num_iterations": 2},
    "dr_grpo, evaluation": {
        "loss_type": "dr_grpo",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 4,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTION_CASES)
def test_a_rollout_function_trains_as_in_trl(tmp_path, name):
    from tests.integrations.trl import tool_parity as parity

    changes, functions = FUNCTION_CASES[name], [parity.Rollouts(), parity.Rollouts()]
    texts = [row if name == "dapo" else {"prompt": row["prompt"][0]["content"]} for row in parity.ROWS]
    theirs, ours = (
        run(tmp_path / run.__name__, changes, rollout_func=function, train_dataset=Dataset.from_list(texts))
        for run, function in zip((parity.run_trl, parity.run_drop_in), functions, strict=True)
    )
    assert functions[0].prompts == functions[1].prompts
    compare(ours, theirs, changes)
    assert theirs.calls[0]["score"][:3] == [0, 1 / 16, 2 / 16]
    assert "env_mask" not in theirs.calls[0]


def compare(ours: Any, theirs: Any, changes: dict[str, Any]) -> None:
    """The arguments of rewards, the logs and the weights of two runs."""
    from tests.integrations.trl.log_parity import differences

    left_out = ["vespo/phi_seq_mean"]  # it is not logged here
    if changes.get("mask_truncated_completions"):  # entropy is a mean over what is computed
        left_out.append("entropy")
    logs = [
        [{key: entry[key] for key in entry if key not in left_out} for entry in seen.logs] for seen in (ours, theirs)
    ]
    assert theirs.calls
    assert differences(ours.calls, theirs.calls) == []
    assert differences(*logs, tolerance=1e-7) == []
    for weight, value in theirs.weights.items():
        assert float((ours.weights[weight] - value).abs().max()) <= 1e-9, weight


# -- without TRL -------------------------------------------------------------------------------------------------------


def lookup(city: str) -> str:
    """Looks up a city.

    Args:
        city: Its name.
    """
    return f"{city}: {len(city)}"


class Shop:
    """An environment in TRL's form; `failing` is a price that it cannot handle."""

    def reset(self, price: int = 0, **columns: Any) -> str | None:
        if price == 99:
            raise RuntimeError("the till is stuck")
        self.price = price
        return f" The price is {price}." if price else None

    def pay(self, amount: int) -> str:
        """Pays.

        Args:
            amount: In euros.
        """
        self.price -= amount
        return f"{self.price} left"

    def get_reward(self) -> float:
        return -abs(self.price) / 8


def rows(count: int = 4, **columns: Any) -> Dataset:
    prompts = [[{"role": "user", "content": text}] for text in TEXTS[:count]]
    return Dataset.from_list(
        [{"prompt": prompt, "price": number + 1, **columns} for number, prompt in enumerate(prompts)]
    )


@pytest.fixture
def forced(workplace, monkeypatch):
    """A function that makes a trainer of a tiny model with a template for tools; its turns are the given texts."""
    pytest.importorskip("trl")
    import groupwise.integrations.trl.trainer
    import groupwise.training.trainer
    from tests.integrations.trl import tool_parity

    def make(*turns: str, reward_funcs: Any = None, data: Any = None, **options: Any) -> GRPOTrainer:
        def turn(context: list[int], number: int) -> list[int]:
            answered = list(context).count(tool_parity.TOKENIZER.eos_token_id) // 2 - 1  # a turn and its answer end so
            return tool_parity.TOKENIZER(turns[answered].replace("NUMBER", str(number)) + "<|im_end|>")["input_ids"]

        monkeypatch.setattr(tool_parity, "forced_turn", turn)
        for module in (groupwise.training.trainer, groupwise.integrations.trl.trainer):
            monkeypatch.setattr(module, "make_generator", lambda recipe, handle, ranks: tool_parity.ForcedTurns(handle))
        arguments = {
            name: options.pop(name) for name in ("tools", "environment_factory", "eval_dataset") if name in options
        }
        settings = {**tool_parity.SETTINGS, "output_dir": "out", "max_steps": 2, "logging_steps": 1}
        args = GRPOConfig(**{**settings, "max_completion_length": 256, **options})
        data = None if data is False else data or rows()
        model = tool_parity.make_model().float()
        return GRPOTrainer(model, reward_funcs, args, data, processing_class=tool_tokenizer(), **arguments)

    return make


PAY = '<tool_call>\n{"name": "pay", "arguments": {"amount": NUMBER}}\n</tool_call>'


def test_an_environment_rewards_and_is_shown_to_rewards(forced):
    seen: list[dict[str, Any]] = []

    def watch(prompts: Any, completions: Any, environments: Any, price: Any, **_: Any) -> list[float]:
        for values in zip(prompts, completions, [entry.price for entry in environments], price, strict=True):
            seen.append(dict(zip(("prompt", "completion", "left", "price"), values, strict=True)))
        return [0.5] * len(prompts)

    trainer = forced(
        PAY, "Done.", reward_funcs=watch, environment_factory=Shop, tools=[lookup], reward_weights=[2.0],
        log_completions=True, max_steps=1,
    )  # fmt: skip
    assert trainer.reward_func_names == ["watch", "Shop"]
    assert trainer.reward_weights.tolist() == [2.0, 1.0]
    trainer.train()
    first = seen[1]  # sample 1 of the first row
    assert first["prompt"] == [{"role": "user", "content": f"{TEXTS[0]} The price is 1."}]
    assert [message["role"] for message in first["completion"]] == ["assistant", "tool", "assistant"]
    assert first["completion"][0]["tool_calls"][0]["function"] == {"name": "pay", "arguments": {"amount": 1}}
    assert first["completion"][1]["content"] == "0 left"
    assert [entry["left"] for entry in seen] == [entry["price"] - number % 4 for number, entry in enumerate(seen)]
    log = trainer.state.log_history[0]
    expected = sum(-abs(entry["left"]) / 8 for entry in seen) / len(seen)
    assert log["rewards/Shop/mean"] == pytest.approx(expected)
    assert log["reward"] == pytest.approx(expected + 1.0)
    assert (log["tools/call_frequency"], log["tools/failure_frequency"]) == (1.0, 0.0)
    table = pyarrow.parquet.read_table("out/completions/completions_00001.parquet").to_pylist()
    assert [row["prompt"] for row in table] == [entry["prompt"] for entry in seen]
    assert [row["completion"][1]["content"] for row in table] == [entry["completion"][1]["content"] for entry in seen]
    assert set(table[0]) == {"step", "prompt", "completion", "watch", "Shop", "advantage"}


def test_calls_that_fail_are_counted(forced):
    trainer = forced(PAY.replace("pay", "steal"), "Done.", environment_factory=Shop, max_steps=1)
    trainer.train()
    log = trainer.state.log_history[0]
    assert (log["tools/call_frequency"], log["tools/failure_frequency"]) == (1.0, 1.0)


def test_calls_after_the_last_iteration_are_not_made(forced):
    turns = [PAY, *(PAY.replace("NUMBER", amount) for amount in ("1", "8"))]
    trainer = forced(*turns, environment_factory=Shop, max_tool_calling_iterations=2, max_steps=1)
    trainer.train()
    log = trainer.state.log_history[0]
    # Sample n pays n, then 1, of a price of 1 or 2.
    assert log["rewards/Shop/mean"] == pytest.approx(-sum(abs(p - n - 1) for p in (1, 2) for n in range(4)) / 64)
    assert log["tools/call_frequency"] == 2.0
    assert log["completions/clipped_ratio"] == 0.0


def test_an_environment_without_a_data_set(forced):
    class Riddle(Shop):
        def reset(self, **columns: Any) -> str:
            return f"{super().reset(price=5)} Pay it."

    seen: list[Any] = []

    def watch(prompts: Any, **_: Any) -> list[float]:
        seen.append(prompts)
        return [0.0] * len(prompts)

    with pytest.raises(ConfigError, match="max_steps"):
        forced(PAY, environment_factory=Riddle, data=False, max_steps=-1)
    trainer = forced(PAY, "Done.", environment_factory=Riddle, data=False, reward_funcs=watch)
    trainer.train()
    assert len(trainer.train_dataset) == 2  # the prompts of a rollout
    assert seen[0] == [[{"role": "user", "content": " The price is 5. Pay it."}]] * 8
    shares = [entry["rewards/Riddle/mean"] for entry in trainer.state.log_history[:2]]
    assert shares == pytest.approx([-(5 + 4 + 3 + 2) / 32] * 2)


def test_an_environment_that_fails_ends_the_run_and_keeps_its_steps(forced):
    data = Dataset.from_list([{**row, "price": 99 if number == 3 else 1} for number, row in enumerate(rows())])
    trainer = forced(PAY, "Done.", environment_factory=Shop, data=data, save_strategy="steps", save_steps=1)
    with pytest.raises(UserCodeError, match="the till is stuck"):
        trainer.train()
    assert trainer.state.global_step == 1
    assert Path("out/checkpoint-1/model.safetensors").is_file()
    assert [json.loads(line)["step"] for line in Path("out/metrics.jsonl").read_text().splitlines()] == [1]


def test_evaluation_holds_conversations(forced):
    trainer = forced(
        PAY, "Done.", environment_factory=Shop, eval_dataset=rows(2), num_generations_eval=2,
        eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=2,
    )  # fmt: skip
    metrics = trainer.evaluate()
    # Samples 0 and 1 pay 0 and 1 of the prices 1 and 2.
    assert metrics["eval_rewards/Shop/mean"] == pytest.approx(-(1 + 0 + 2 + 1) / 32)
    assert metrics["eval_tools/call_frequency"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tools": lookup}, "tools is a function; give a list"),
        ({"tools": [print]}, "print"),
        ({"tools": [lookup, lookup]}, "2 tools have the name 'lookup'"),
        ({"environment_factory": {"shop": Shop}}, "dict of several environments"),
        ({"environment_factory": 3}, "environment_factory is 3"),
        ({"environment_factory": dict}, "dict.* neither|reset"),
        ({"tools": [lookup], "reward_funcs": None}, r"reward_funcs is missing.* get_reward\(\)"),
        ({"tools": [lookup], "data": [{"prompt": "a text"}] * 4}, "has a text as its prompt"),
        ({"tools": [lookup], "max_tool_calling_iterations": -1}, "max_tool_calling_iterations"),
    ],
)
def test_what_is_refused(forced, arguments, words):
    with pytest.raises((ConfigError, TypeError), match=words):
        forced("Done.", **{"reward_funcs": letters, **arguments})


def letters(completions: Any, **_: Any) -> list[float]:
    return [float(len(completion[-1]["content"])) for completion in completions]
