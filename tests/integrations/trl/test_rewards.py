"""Rewards of a `GRPOTrainer`: what they may return, their names and weights, what they are called with, and how their
errors reach a script."""

from __future__ import annotations

import logging
import math
import sys
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback, TrainerState

from groupwise.errors import RewardError
from groupwise.integrations.trl.rewards import InvalidRewardError, RewardWeights, TrlReward
from groupwise.rewards import Scorer
from tests.integrations.trl.fixtures import models, workplace
from tests.integrations.trl.test_flow import DATA, letters, make

__all__ = ["models", "workplace"]


class WrongAnswer(Exception):
    """An error of a script's own."""


def reward_of(result: Any, count: int = 4) -> list[Any]:
    """The rewards of one function that returns ``result`` for ``count`` completions; NaN where there is none."""
    reward = TrlReward("own", lambda **_: result, "own", RewardWeights(None, 1), 0)
    scored = Scorer([reward], timeout=None).score([""] * count, [""] * count, {})
    return scored.rewards[:, 0].tolist()


@pytest.mark.parametrize(
    "result",
    [
        [0, 1.0, 2, 3],
        (0, 1, 2, 3),
        range(4),
        map(float, range(4)),
        {"a": 0, "b": 1, "c": 2, "d": 3}.values(),
        np.arange(4),
        np.arange(4, dtype="float16")[:, None],
        [np.float32(0), np.int64(1), np.float64(2), 3],
        torch.arange(4),
        torch.arange(4).bfloat16(),
        torch.arange(4.0, requires_grad=True),
        torch.arange(4.0)[:, None],
        [torch.tensor(float(number)) for number in range(4)],
        [torch.tensor([float(number)]) for number in range(4)],
        [Decimal(number) for number in range(4)],
    ],
    ids=lambda result: type(result).__name__,
)
def test_what_a_reward_may_return(result: Any) -> None:
    assert reward_of(result) == [0.0, 1.0, 2.0, 3.0]


def test_booleans_are_numbers() -> None:
    assert reward_of([True, False, np.bool_(True), torch.tensor(False)]) == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "result", [[None, 1.0, math.nan, np.float32("nan")], torch.tensor([[math.nan], [1.0], [math.nan], [math.nan]])]
)
def test_nan_is_none_as_in_trl(result: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "groupwise"):
        first, second, *others = reward_of(result)
    assert second == 1.0
    assert all(math.isnan(value) for value in (first, *others))
    assert [record.message for record in caplog.records if "returned NaN" in record.message][1:] == []
    assert "'own' returned NaN" in caplog.text


@pytest.mark.parametrize(
    ("result", "words", "kind"),
    [
        ([1.0] * 3, "3 values for 4 rows", ValueError),
        ([1.0] * 5, "5 values for 4 rows", ValueError),
        (torch.zeros(4, 2), r"shape \(4, 2\)", ValueError),
        (["1.0"] * 4, r"returned '1.0' \(str\)", ValueError),
        ("abcd", "not a list", ValueError),
        ([math.inf, 1, 1, 1], "a reward is a finite number", ValueError),
        (None, "is a return missing", TypeError),
        (1.0, "not a list", TypeError),
        (torch.tensor(1.0), r"shape \(\)", TypeError),
        ([1j] * 4, "complex", TypeError),
    ],
)
@pytest.mark.slow
def test_a_wrong_result_is_the_error_of_trl(workplace: Path, result: Any, words: str, kind: type) -> None:
    with pytest.raises(kind, match=words) as caught:
        make(lambda **_: result).train()
    assert isinstance(caught.value, RewardError)
    assert "on_error" not in str(caught.value)  # a setting of recipes


async def later(**_: Any) -> list[float]:
    raise WrongAnswer("no")


def now(**_: Any) -> list[float]:
    raise WrongAnswer("no")


@pytest.mark.slow
@pytest.mark.parametrize("function", [now, later])
def test_the_error_of_a_reward_reaches_the_script(workplace: Path, function: Any) -> None:
    with pytest.raises(WrongAnswer) as caught:
        make(function).train()
    assert str(caught.value) == "no"
    (note,) = caught.value.__notes__
    assert f"reward '{function.__name__}' failed on row" in note
    assert "prompt 'Say number" in note
    assert caught.value.__cause__ is caught.value.__context__ is None


@pytest.mark.slow
def test_the_error_of_a_reward_reaches_the_script_from_an_evaluation(workplace: Path) -> None:
    def only_training(trainer_state: TrainerState, completions: list[str], **_: Any) -> list[float]:
        if len(completions) > 4:
            raise KeyError("rows") from WrongAnswer("before")
        return [1.0] * len(completions)

    with pytest.raises(KeyError, match="rows") as caught:
        make(only_training, eval_dataset=DATA, eval_strategy="steps", eval_steps=1).train()
    assert isinstance(caught.value.__cause__, WrongAnswer)
    with pytest.raises(KeyError, match="rows"):
        make(only_training).evaluate(DATA)


@pytest.mark.slow
def test_a_reward_may_end_the_process(workplace: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        make(lambda **_: sys.exit(3)).train()
    assert caught.value.code == 3


def test_an_argument_that_is_no_column_is_refused_at_once(workplace: Path) -> None:
    def needs(completions: Any, solution: Any) -> list[float]:
        return []

    with pytest.raises(TypeError, match="needs the argument 'solution'"):
        make(needs)


class Judge:
    def __call__(self, completions: Any, **_: Any) -> list[float]:
        return [1.0] * len(completions)

    def score(self, completions: Any, **_: Any) -> list[float]:
        return [2.0] * len(completions)


class AsyncJudge:
    async def __call__(self, completions: Any, **_: Any) -> list[float]:
        return [3.0] * len(completions)


@pytest.mark.slow
def test_names_and_metrics_are_those_of_trl(workplace: Path) -> None:
    """Also of lambdas, which share a name."""
    import trl

    rewards = [
        *(letters, partial(partial(letters)), Judge(), Judge().score, AsyncJudge()),
        *(lambda completions, **_: [0.5] * len(completions), lambda completions, **_: [0.25] * len(completions)),
    ]
    mine = make(list(rewards), max_steps=1)
    other = trl.GRPOTrainer(
        mine.model.config._name_or_path, list(rewards), trl.GRPOConfig(**_arguments(mine.args)), DATA
    )
    assert mine.reward_func_names == other.reward_func_names
    logs = []
    for trainer in (mine, other):
        trainer.train()
        entry = trainer.state.log_history[0]
        logs.append({name: value for name, value in entry.items() if name.startswith("rewards/")})
    assert list(logs[0]) == list(logs[1])
    assert logs[0]["rewards/<lambda>/mean"] == logs[1]["rewards/<lambda>/mean"] == 0.375


def _arguments(args: Any) -> dict[str, Any]:
    names = ("per_device_train_batch_size", "num_generations", "max_completion_length", "max_steps", "logging_steps")
    chosen = {name: getattr(args, name) for name in (*names, "report_to", "use_cpu", "bf16", "disable_tqdm")}
    return {**chosen, "output_dir": "trl", "save_strategy": "no"}


@pytest.mark.slow
@pytest.mark.parametrize("conversational", [False, True])
def test_what_a_reward_is_called_with(workplace: Path, conversational: bool) -> None:
    calls: list[dict[str, Any]] = []

    def reward(prompts: Any, completions: Any, **others: Any) -> list[float]:
        others["log_metric"]("own", 2.0)
        others["log_extra"]("noted", [str(entry) for entry in completions])
        calls.append({"prompts": prompts, "completions": completions, **others})
        return [1.0] * len(prompts)

    texts = DATA["prompt"][:4]
    prompts = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}] for text in texts]
    columns = {"number": range(4), "nested": [{"a": [number]} for number in range(4)], "nothing": [None] * 4}
    data = Dataset.from_dict({"prompt": prompts if conversational else texts, **columns, "completion": ["x"] * 4})
    trainer = make(reward, data, max_steps=1)
    trainer.train()
    (call,) = calls
    assert set(call) == {
        *("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"),
        *columns,
    }
    row = call["number"][0]
    assert call["number"] == [row] * 4
    assert call["nested"] == [{"a": [row]}] * 4
    assert call["nothing"] == [None] * 4
    assert call["prompts"] == [data[row]["prompt"]] * 4
    if conversational:
        assert all([message["role"] for message in entry] == ["assistant"] for entry in call["completions"])
    else:
        assert all(type(entry) is str for entry in call["completions"])
    assert all(type(token) is int for ids in call["completion_ids"] for token in ids)
    assert call["trainer_state"] is trainer.state
    assert trainer.state.log_history[0]["own"] == 2.0


def test_weights_are_checked() -> None:
    weights = RewardWeights([0.1, 2], 2)
    assert (weights.of(0), weights.of(1)) == (0.1, 2.0)  # not rounded to float32
    assert weights.tensor.dtype == torch.float32
    for given in (["0.1", 1], [math.nan, 1], [1, None]):
        with pytest.raises(ValueError, match="a weight is a finite number"):
            RewardWeights(given, 2)
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        weights.tensor = torch.ones(3)
    with pytest.raises(ValueError, match="must match"):
        RewardWeights([1.0], 2)


@pytest.mark.slow
def test_weights_can_be_changed_at_any_time(workplace: Path) -> None:
    class Anneal(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            trainer.reward_weights[1] = 10.0

    trainer = make([Judge(), Judge().score], callbacks=[Anneal()], reward_weights=[1.0, 0.5], max_steps=2)
    assert trainer.reward_weights.tolist() == [1.0, 0.5]
    trainer.reward_weights = torch.tensor([3.0, 0.5])
    trainer.train()
    assert [entry["reward"] for entry in trainer.state.log_history if "reward" in entry] == [4.0, 23.0]


def test_an_invalid_reward_is_one_of_several_standard_errors() -> None:
    assert issubclass(InvalidRewardError, (RewardError, ValueError))
    assert issubclass(InvalidRewardError, TypeError)
