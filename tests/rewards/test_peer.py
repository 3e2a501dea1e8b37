"""Reward functions written for TRL 1.16 give the same rewards in its trainer and here."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from groupwise.rewards import Scorer, named, overlong_penalty

pytestmark = pytest.mark.slow  # imports TRL

PROMPTS = [[{"role": "user", "content": f"question {number}"}] for number in range(4)]
TEXTS = ["<think>a</think>1", "2", "<think>\nb\n</think>\n3", ""]
COMPLETIONS = [[{"role": "assistant", "content": text}] for text in TEXTS]
COLUMNS = {"answer": ["1", "2", "x", "4"], "level": [1, 2, 3, 4]}
IDS = [[1] * length for length in (3, 60, 75, 90)]


def correct(prompts, completions, answer, log_extra=None, log_metric=None, **kwargs):
    answers = [completion[0]["content"][-1:] for completion in completions]
    log_extra("answers", answers)
    log_metric("level", sum(kwargs["level"]) / len(answers))
    log_metric("level", 0.0)
    return [None if gold == "x" else float(gold == text) for gold, text in zip(answer, answers, strict=True)]


async def judge(completions, trainer_state, **kwargs):
    await asyncio.sleep(0)
    return [trainer_state.global_step * len(completion[0]["content"]) for completion in completions]


class Levels:
    def __call__(self, level, **kwargs):
        return torch.tensor(level) / 4


def reward_functions():
    from trl.rewards import get_soft_overlong_punishment, think_format_reward

    return [correct, judge, Levels(), think_format_reward, get_soft_overlong_punishment(80, 20)]


@pytest.fixture
def trl_trainer(monkeypatch):
    """The attributes of TRL's trainer that its scoring uses."""
    from trl import GRPOTrainer
    from trl.trainer.utils import get_callable_name, start_event_loop_in_daemon

    functions = reward_functions()
    # Its timers would look for an experiment tracker.
    monkeypatch.setattr("trl.trainer.grpo_trainer.profiling_context", lambda *_: mock.MagicMock())
    thread, loop, ready = start_event_loop_in_daemon(name="peer")
    ready.wait()
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device=torch.device("cpu")),
        reward_funcs=functions,
        reward_func_names=[get_callable_name(function) for function in functions],
        reward_processing_classes=[None] * len(functions),
        state=SimpleNamespace(global_step=7),
        environments=None,
        async_loop=loop,
        _pending_extra_logs=defaultdict(list),
        _pending_metrics=defaultdict(list),
    )
    trainer._log_completion_extra = lambda *arguments: GRPOTrainer._log_completion_extra(trainer, *arguments)
    trainer._log_metric = lambda *arguments: GRPOTrainer._log_metric(trainer, *arguments)
    yield trainer
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


def test_the_same_functions_give_the_same_rewards(trl_trainer, monkeypatch):
    from trl import GRPOTrainer

    monkeypatch.setattr("trl.trainer.grpo_trainer.gather", lambda x: x)
    inputs = [
        {"prompt": prompt, "answer": answer, "level": level}
        for prompt, answer, level in zip(PROMPTS, COLUMNS["answer"], COLUMNS["level"], strict=True)
    ]
    scoring = getattr(GRPOTrainer._calculate_rewards, "__wrapped__", GRPOTrainer._calculate_rewards)
    expected = scoring(trl_trainer, inputs, PROMPTS, COMPLETIONS, IDS)
    scorer = Scorer(trl_trainer.reward_funcs)
    assert [reward.name for reward in scorer.functions] == trl_trainer.reward_func_names
    columns = {"prompt": PROMPTS, **COLUMNS}
    scorer.check_arguments(columns)
    scores = scorer.score(PROMPTS, COMPLETIONS, columns, completion_ids=IDS, trainer_state=trl_trainer.state)
    torch.testing.assert_close(scores.rewards.float(), expected, equal_nan=True, rtol=1e-6, atol=0)
    assert scores.rewards[:, 0].isnan().tolist() == [False, False, True, False]
    assert scores.extra == dict(trl_trainer._pending_extra_logs)
    assert scores.metrics == {name: sum(values) / len(values) for name, values in trl_trainer._pending_metrics.items()}
    assert not scores.dropped.any()


def test_the_overlong_penalty_is_that_of_trl():
    from trl.rewards import get_soft_overlong_punishment

    ids = [[0] * length for length in range(120)]
    for limit, buffer in ((100, 20), (100, 1), (60, 60)):
        expected = get_soft_overlong_punishment(limit, buffer)(completion_ids=ids)
        assert [overlong_penalty(len(row), limit, buffer) for row in ids] == pytest.approx(expected)


def test_the_name_of_a_function_is_that_of_trl():
    from trl.trainer.utils import get_callable_name

    for function in reward_functions():
        assert named(function).name == get_callable_name(function)
