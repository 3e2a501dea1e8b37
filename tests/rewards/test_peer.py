"""TRL 1.16's own scoring and rewards, beside ours: functions written for it work unchanged and say the same."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from trl import GRPOTrainer
from trl.rewards import get_soft_overlong_punishment, think_format_reward
from trl.trainer.utils import get_callable_name, start_event_loop_in_daemon

from groupwise.rewards import Scorer, named, overlong_penalty

PROMPTS = [[{"role": "user", "content": f"question {number}"}] for number in range(4)]
TEXTS = ["<think>a</think>1", "2", "<think>\nb\n</think>\n3", ""]
COMPLETIONS = [[{"role": "assistant", "content": text}] for text in TEXTS]
COLUMNS = {"answer": ["1", "2", "x", "4"], "level": [1, 2, 3, 4]}
IDS = [[1] * length for length in (3, 60, 75, 90)]


def correct(prompts, completions, answer, log_extra=None, log_metric=None, **kwargs):
    said = [completion[0]["content"][-1:] for completion in completions]
    log_extra("said", said)
    log_metric("level", sum(kwargs["level"]) / len(said))
    log_metric("level", 0.0)
    return [None if gold == "x" else float(gold == each) for gold, each in zip(answer, said, strict=True)]


async def judge(completions, trainer_state, **kwargs):
    await asyncio.sleep(0)
    return [trainer_state.global_step * len(completion[0]["content"]) for completion in completions]


class Levels:
    def __call__(self, level, **kwargs):
        return torch.tensor(level) / 4


FUNCTIONS = [correct, judge, Levels(), think_format_reward, get_soft_overlong_punishment(80, 20)]


@pytest.fixture
def theirs(monkeypatch):
    """TRL's trainer, as far as its scoring looks at it, with what it has logged."""
    # Its timers ask whether a tracker is running; there is none here.
    monkeypatch.setattr("trl.trainer.grpo_trainer.profiling_context", lambda *_: mock.MagicMock())
    thread, loop, ready = start_event_loop_in_daemon(name="peer")
    ready.wait()
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device=torch.device("cpu")),
        reward_funcs=FUNCTIONS,
        reward_func_names=[get_callable_name(function) for function in FUNCTIONS],
        reward_processing_classes=[None] * len(FUNCTIONS),
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


def test_the_same_functions_give_the_same_rewards(theirs, monkeypatch):
    monkeypatch.setattr("trl.trainer.grpo_trainer.gather", lambda x: x)
    inputs = [
        {"prompt": prompt, "answer": answer, "level": level}
        for prompt, answer, level in zip(PROMPTS, COLUMNS["answer"], COLUMNS["level"], strict=True)
    ]
    scoring = getattr(GRPOTrainer._calculate_rewards, "__wrapped__", GRPOTrainer._calculate_rewards)
    expected = scoring(theirs, inputs, PROMPTS, COMPLETIONS, IDS)
    scorer = Scorer(FUNCTIONS)
    assert [each.name for each in scorer.functions] == theirs.reward_func_names
    columns = {"prompt": PROMPTS, **COLUMNS}
    scorer.check_arguments(columns)
    scores = scorer.score(PROMPTS, COMPLETIONS, columns, completion_ids=IDS, trainer_state=theirs.state)
    torch.testing.assert_close(scores.rewards.float(), expected, equal_nan=True, rtol=1e-6, atol=0)
    assert scores.rewards[:, 0].isnan().tolist() == [False, False, True, False]
    assert scores.extra == dict(theirs._pending_extra_logs)
    assert scores.metrics == {name: sum(each) / len(each) for name, each in theirs._pending_metrics.items()}
    assert not scores.dropped.any()


def test_the_overlong_penalty_is_theirs():
    ids = [[0] * length for length in range(120)]
    for limit, buffer in ((100, 20), (100, 1), (60, 60)):
        expected = get_soft_overlong_punishment(limit, buffer)(completion_ids=ids)
        assert [overlong_penalty(len(each), limit, buffer) for each in ids] == pytest.approx(expected)


def test_their_name_of_a_callable_is_ours():
    for function in FUNCTIONS:
        assert named(function).name == get_callable_name(function)
