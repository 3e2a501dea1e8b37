"""Time limits, threads and event loops: a reward that hangs, blocks or is interrupted. No result depends on timing."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
import subprocess
import sys
import threading
import time

import pytest

from groupwise.errors import RewardError
from groupwise.rewards import RewardFunction, Scorer, calls

PROMPTS = [""] * 4
COMPLETIONS = ["a", "bb", "ccc", "dddd"]
SHORT = 0.2


def score(*functions, on_error="stop", timeout=20.0):
    rewards = [RewardFunction(f"f{number}", function) for number, function in enumerate(functions)]
    return Scorer(rewards, on_error=on_error, timeout=timeout).score(PROMPTS, COMPLETIONS, {})


@pytest.fixture
def release():
    """Lets go of the functions that hang, when the test is over."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def short_grace(monkeypatch):
    monkeypatch.setattr(calls, "GRACE", 0.1)


async def lengths(completions, **_):
    await asyncio.sleep(0)
    return [float(len(completion)) for completion in completions]


class AsyncJudge:
    async def __call__(self, completions):
        return [2.0] * len(completions)

    async def method(self, completions):
        return [3.0] * len(completions)


# --- plain functions --------------------------------------------------------------------------------------------------


def test_a_function_that_hangs(release):
    def hangs(completions):
        release.wait(30)
        return [0.0] * 4

    start = time.perf_counter()
    with pytest.raises(RewardError) as error:
        score(hangs, timeout=SHORT)
    assert time.perf_counter() - start < 5
    assert str(error.value) == (
        "reward 'f0' failed on a batch of 4 (first completion 'a'): did not return within 0.2 s; its thread is left "
        "behind and may go on until the process ends"
    )


def test_a_hang_is_not_tried_again(release):
    hung = []

    def hangs(completions):
        hung.append(len(completions))
        release.wait(30)
        return [0.0] * len(completions)

    scores = score(hangs, lengths, on_error="drop", timeout=SHORT)
    assert hung == [4]
    assert scores.dropped.all()
    assert scores.rewards.isnan().all()
    assert [each.row for each in scores.failures] == [0, 1, 2, 3]
    assert "did not return within 0.2 s" in scores.failures[3].reason
    assert scores.seconds["f0"] == SHORT


def test_a_generator_that_hangs(release):
    def lazy(completions):
        yield 1.0
        release.wait(30)

    with pytest.raises(RewardError, match=r"did not return within 0\.2 s"):
        score(lazy, timeout=SHORT)


def test_the_limit_works_off_the_main_thread(release):
    errors = []

    def elsewhere():
        try:
            score(lambda completions: release.wait(30), timeout=SHORT)
        except RewardError as error:
            errors.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(10)
    assert len(errors) == 1
    assert "did not return within 0.2 s" in errors[0]


def test_rows_of_a_failed_batch_share_one_limit(release):
    tried = []

    def fails_then_hangs(completions):
        tried.append(completions[0])
        if len(completions) > 1:
            raise ValueError("batch")
        if completions == ["bb"]:
            release.wait(30)
        return [1.0]

    scores = score(fails_then_hangs, on_error="drop", timeout=SHORT)
    assert tried == ["a", "a", "bb"]
    assert scores.dropped.tolist() == [False, True, True, True]
    assert "its thread is left behind" in scores.failures[0].reason
    assert scores.failures[1].reason == scores.failures[2].reason == "not tried: the rows before it took the 0.2 s"


def test_plain_functions_run_in_order_and_before_the_async_ones():
    order = []

    def plain(name, completions):
        order.append(name)
        time.sleep(0.02)
        return [0.0] * 4

    async def slow(completions):
        order.append("async")
        return [1.0] * 4

    scores = score(slow, functools.partial(plain, "first"), functools.partial(plain, "second"))
    assert order == ["first", "second", "async"]
    assert scores.rewards[0].tolist() == [1.0, 0.0, 0.0]
    assert list(scores.seconds) == ["f0", "f1", "f2"]
    assert scores.seconds["f1"] >= 0.02


def test_the_thread_is_the_callers_only_without_a_limit():
    threads, variable = [], contextvars.ContextVar("variable", default="unset")

    def reward(completions):
        threads.append((threading.current_thread(), variable.get()))
        return [0.0] * 4

    variable.set("set")
    score(reward, timeout=None)
    score(reward, timeout=20.0)
    assert threads[0] == (threading.main_thread(), "set")
    assert threads[1][0].daemon
    assert threads[1][0] is not threading.main_thread()
    assert threads[1][1] == "set"


@pytest.mark.parametrize("timeout", [20.0, None])
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_an_interrupt_in_a_function_gets_through(timeout, kind):
    def plain(completions):
        raise KeyboardInterrupt

    async def coroutine(completions):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(plain if kind == "plain" else coroutine, on_error="drop", timeout=timeout)
    assert score(lengths).rewards[3].item() == 4.0  # the loop lives on


# --- async functions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lengths, [1, 2, 3, 4]),
        (functools.partial(lengths, unused=1), [1, 2, 3, 4]),
        (AsyncJudge(), [2] * 4),
        (functools.partial(AsyncJudge()), [2] * 4),
        (AsyncJudge().method, [3] * 4),
        (lambda completions: lengths(completions), [1, 2, 3, 4]),
    ],
)
@pytest.mark.parametrize("timeout", [20.0, None])
def test_async_functions(function, expected, timeout):
    assert score(function, timeout=timeout).rewards[:, 0].tolist() == expected


def test_a_class_is_called_not_awaited():
    class Reward(list):
        def __init__(self, completions):
            super().__init__([5.0] * len(completions))

        async def __call__(self):
            return None

    assert score(Reward).rewards[:, 0].tolist() == [5.0] * 4


def test_async_functions_run_at_once():
    inside, both = [], asyncio.Event()

    async def one(completions, log_extra, log_metric):
        inside.append(1)
        if len(inside) == 2:
            both.set()
        await both.wait()  # without the other one this never ends
        log_extra("order", [len(inside)] * 4)
        return [1.0] * 4

    scores = score(one, functools.partial(one), timeout=10.0)
    assert scores.rewards.tolist() == [[1.0, 1.0]] * 4
    assert list(scores.extra) == ["order", "f1/order"]


def test_what_is_logged_does_not_depend_on_who_is_faster():
    async def slow(completions, log_extra):
        await asyncio.sleep(0.05)
        log_extra("who", ["slow"] * 4)
        return [1.0] * 4

    async def fast(completions, log_extra):
        log_extra("who", ["fast"] * 4)
        return [1.0] * 4

    assert score(slow, fast).extra == {"who": ["slow"] * 4, "f1/who": ["fast"] * 4}
    assert score(fast, slow).extra == {"who": ["fast"] * 4, "f1/who": ["slow"] * 4}


def test_one_loop_serves_all_calls():
    loops = []

    async def reward(completions):
        loops.append(asyncio.get_running_loop())
        return [1.0] * 4

    score(reward)
    score(reward, timeout=None)
    assert loops[0] is loops[1]


def test_an_async_function_is_cancelled_at_the_limit():
    ended = threading.Event()

    async def hangs(completions):
        try:
            await asyncio.sleep(30)
        finally:
            ended.set()

    with pytest.raises(RewardError, match=r"reward 'f1' failed .*did not return within 0\.2 s; it was cancelled"):
        score(lengths, hangs, timeout=SHORT)
    assert ended.is_set()
    scores = score(hangs, lengths, on_error="drop", timeout=SHORT)
    assert scores.dropped.all()
    assert {each.function for each in scores.failures} == {"f0"}


def test_an_async_function_that_refuses_to_be_cancelled(short_grace):
    over = []

    async def stubborn(completions):
        while not over:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue
        return [1.0] * 4

    try:
        with pytest.raises(RewardError, match="does not let itself be cancelled and is left behind"):
            score(stubborn, timeout=SHORT)
        assert score(lengths).rewards[0].item() == 1.0
    finally:
        over.append(True)


def test_a_blocked_loop_is_replaced(short_grace, release):
    async def blocks(completions):
        release.wait(30)
        return [1.0] * 4

    with pytest.raises(RewardError, match=r"within 0\.2 s and blocked the event loop, or another async reward did"):
        score(blocks, timeout=SHORT)
    assert score(lengths).rewards[0].item() == 1.0


def test_what_was_done_before_the_loop_was_blocked_is_kept(short_grace, release):
    async def blocks(completions):
        await asyncio.sleep(0.05)
        release.wait(30)

    scores = score(lengths, blocks, on_error="drop", timeout=SHORT)
    assert {each.function for each in scores.failures} == {"f1"}


def test_rows_of_a_failed_async_batch():
    at_once = []

    async def fragile(completions):
        if "ccc" in completions:
            raise ValueError("no ccc")
        at_once.append(1)
        await asyncio.sleep(0.02)
        assert len(at_once) == 3
        return [float(len(completion)) for completion in completions]

    with pytest.raises(
        RewardError, match=r"row 2 \(completion 'ccc'\): raised ValueError: no ccc \(test_calls.py, line \d+\)"
    ):
        score(fragile)
    at_once.clear()
    scores = score(fragile, on_error="drop")
    assert scores.dropped.tolist() == [False, False, True, False]
    assert scores.rewards[[0, 1, 3], 0].tolist() == [1, 2, 4]


@pytest.mark.parametrize("error", [SystemExit(2), asyncio.CancelledError(), TimeoutError(), StopAsyncIteration()])
def test_whatever_an_async_function_raises_is_named(error):
    async def reward(completions):
        raise error

    with pytest.raises(RewardError, match=rf"raised {type(error).__name__}"):
        score(reward)
    assert score(lengths).rewards[0].item() == 1.0


def test_what_an_async_function_returns_is_checked_too():
    async def short(completions):
        return [1.0]

    async def generator(completions):
        yield 1.0

    with pytest.raises(RewardError, match="returned 1 value for 4 rows"):
        score(short)
    with pytest.raises(RewardError, match=r"\(async_generator\), not a list"):
        score(generator)


def test_a_caller_that_runs_a_loop_of_its_own():
    async def main():
        return score(lengths)

    assert asyncio.run(main()).rewards[3].item() == 4.0


ANOTHER_PROCESS = """
import asyncio, os, signal, threading, time
from groupwise.rewards import Scorer

def score(function):
    return Scorer([function], timeout=20.0, on_error="drop").score([""], [""], {}).rewards.item()

async def works(completions):
    return [1.0]

print(score(works))
child = os.fork()
if not child:
    os._exit(0 if score(works) == 1.0 else 1)
print("child", os.waitpid(child, 0)[1])

cleaned = threading.Event()

def ctrl_c():
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()

async def coroutine(completions):
    ctrl_c()
    try:
        await asyncio.sleep(60)
    finally:
        cleaned.set()

def plain(completions):
    ctrl_c()
    time.sleep(60)

for function in (coroutine, plain):
    start = time.perf_counter()
    try:
        score(function)
    except KeyboardInterrupt:
        print(function.__name__, "interrupted", time.perf_counter() - start < 15)
print("cleaned", cleaned.wait(5))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_ctrl_c_gets_through_and_a_fork_gets_a_loop_of_its_own():
    """Both need a process of their own, whose end also shows that what hangs does not keep it alive."""
    command = [sys.executable, "-W", "ignore", "-c", ANOTHER_PROCESS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")
    lines = ["1.0", "child 0", "coroutine interrupted True", "plain interrupted True", "cleaned True"]
    assert done.stdout.splitlines() == lines
