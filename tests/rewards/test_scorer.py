"""Time limits, threads and the event loop: rewards that hang, block or are interrupted.

A test whose function must finish in time has a limit of minutes; one whose limit must expire lets it hang.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from groupwise.errors import RewardError
from groupwise.rewards import RewardFunction, Scorer, scorer

PROMPTS = [""] * 4
COMPLETIONS = ["a", "bb", "ccc", "dddd"]
SHORT = 0.2  # for functions that hang
LONG = 300.0  # for functions that return


def score(*functions, on_error="stop", timeout=LONG):
    rewards = [RewardFunction(f"f{number}", function) for number, function in enumerate(functions)]
    return Scorer(rewards, on_error=on_error, timeout=timeout).score(PROMPTS, COMPLETIONS, {})


@pytest.fixture
def release():
    """Set after the test, so that functions that hang can end."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture(autouse=True)
def long_grace(monkeypatch):
    monkeypatch.setattr(scorer, "GRACE", LONG)


@pytest.fixture
def short_grace(monkeypatch, long_grace):
    monkeypatch.setattr(scorer, "GRACE", 0.1)


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
        release.wait(LONG)
        return [0.0] * 4

    with pytest.raises(RewardError) as error:
        score(hangs, timeout=SHORT)
    assert str(error.value) == (
        "reward 'f0' failed on a batch of 4 (first completion 'a'): did not return within 0.2 s; its thread is left "
        "behind and may go on until the process ends"
    )


def test_a_hang_is_not_tried_again(release):
    hung = []

    def hangs(completions):
        hung.append(len(completions))
        release.wait(LONG)
        return [0.0] * len(completions)

    scores = score(hangs, on_error="drop", timeout=SHORT)
    assert hung == [4]
    assert scores.dropped.all()
    assert scores.rewards.isnan().all()
    assert [failure.row for failure in scores.failures] == [0, 1, 2, 3]
    assert "did not return within 0.2 s" in scores.failures[3].reason


def test_a_generator_that_hangs(release):
    def lazy(completions):
        yield 1.0
        release.wait(LONG)

    with pytest.raises(RewardError, match=r"did not return within 0\.2 s"):
        score(lazy, timeout=SHORT)


def test_the_limit_works_off_the_main_thread(release):
    errors = []

    def elsewhere():
        try:
            score(lambda completions: release.wait(LONG), timeout=SHORT)
        except RewardError as error:
            errors.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(LONG)
    assert len(errors) == 1
    assert "did not return within 0.2 s" in errors[0]


def test_rows_of_a_failed_batch_share_one_limit(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(scorer, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    tried = []

    def slow_rows(completions):
        tried.append(completions[0])
        if len(completions) > 1:
            raise ValueError("batch")
        clock[0] += 0.6 * LONG
        return [1.0]

    scores = score(slow_rows, on_error="drop")
    assert tried == ["a", "a", "bb"]
    assert scores.dropped.tolist() == [False, False, True, True]
    assert [failure.reason for failure in scores.failures] == ["not tried: the rows before it took the 300 s"] * 2


def test_a_row_that_hangs_is_left_behind(release):
    def hangs_on_rows(completions):
        if len(completions) > 1:
            raise ValueError("batch")
        release.wait(LONG)

    scores = score(hangs_on_rows, on_error="drop", timeout=SHORT)
    assert scores.dropped.all()
    assert "its thread is left behind" in scores.failures[0].reason


def test_plain_functions_run_in_order_and_before_the_async_ones():
    order = []

    def plain(name, completions):
        order.append(name)
        return [0.0] * 4

    async def coroutine(completions):
        order.append("async")
        return [1.0] * 4

    scores = score(coroutine, functools.partial(plain, "first"), functools.partial(plain, "second"))
    assert order == ["first", "second", "async"]
    assert scores.rewards[0].tolist() == [1.0, 0.0, 0.0]


def test_a_plain_function_runs_in_the_callers_thread_only_without_a_limit():
    threads, variable = [], contextvars.ContextVar("variable", default="unset")

    def reward(completions):
        threads.append((threading.current_thread(), variable.get()))
        return [0.0] * 4

    variable.set("set")
    score(reward, timeout=None)
    score(reward, timeout=LONG)
    assert threads[0] == (threading.main_thread(), "set")
    assert threads[1][0].daemon
    assert threads[1][0] is not threading.main_thread()
    assert threads[1][1] == "set"


@pytest.mark.parametrize("timeout", [LONG, None])
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_an_interrupt_in_a_function_gets_through(timeout, kind):
    def plain(completions):
        raise KeyboardInterrupt

    async def coroutine(completions):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(plain if kind == "plain" else coroutine, on_error="drop", timeout=timeout)
    assert score(lengths).rewards[3].item() == 4.0  # the loop still works


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
@pytest.mark.parametrize("timeout", [LONG, None])
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

    scores = score(one, functools.partial(one))
    assert scores.rewards.tolist() == [[1.0, 1.0]] * 4
    assert list(scores.extra) == ["order", "f1/order"]


def test_the_log_does_not_depend_on_which_function_ends_first():
    def race():
        fast_done = asyncio.Event()

        async def slow(completions, log_extra):
            await fast_done.wait()
            log_extra("who", ["slow"] * 4)
            return [1.0] * 4

        async def fast(completions, log_extra):
            log_extra("who", ["fast"] * 4)
            fast_done.set()
            return [1.0] * 4

        return slow, fast

    slow, fast = race()
    assert score(slow, fast).extra == {"who": ["slow"] * 4, "f1/who": ["fast"] * 4}
    slow, fast = race()
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
            await asyncio.sleep(LONG)
        finally:
            ended.set()

    with pytest.raises(RewardError, match=r"did not return within 0\.2 s; it was cancelled"):
        score(hangs, timeout=SHORT)
    assert ended.is_set()
    scores = score(hangs, on_error="drop", timeout=SHORT)
    assert [failure.row for failure in scores.failures] == [0, 1, 2, 3]


@pytest.mark.parametrize("ending", ["returns", "raises"])
def test_what_an_async_function_does_after_the_limit_does_not_count(ending):
    async def late(completions):
        try:
            await asyncio.sleep(LONG)
        except asyncio.CancelledError:
            if ending == "raises":
                raise ValueError("late") from None
        return [1.0] * 4

    with pytest.raises(RewardError, match="it was cancelled"):
        score(late, timeout=SHORT)


def test_an_async_function_that_cannot_be_cancelled(short_grace):
    over = []

    async def stubborn(completions):
        while not over:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue
        return [1.0] * 4

    try:
        with pytest.raises(RewardError, match=r"cannot be cancelled: .* ignores that it is cancelled"):
            score(stubborn, timeout=SHORT)
        assert score(lengths).rewards[0].item() == 1.0
    finally:
        over.append(True)


def test_a_blocked_loop_is_replaced(short_grace, release):
    async def blocks(completions):
        release.wait(LONG)
        return [1.0] * 4

    with pytest.raises(
        RewardError, match=r"did not return within 0\.2 s .* blocks the event loop.* loop is left behind"
    ):
        score(blocks, timeout=SHORT)
    assert score(lengths).rewards[0].item() == 1.0


def test_a_function_that_ended_before_the_loop_was_blocked_keeps_its_rewards(release, monkeypatch):
    blocked = threading.Event()

    async def blocks(completions):
        for _ in range(100):  # turns of the loop, in which the other function ends
            await asyncio.sleep(0)
        blocked.set()
        release.wait(LONG)

    def wait_until_blocked(futures, timeout):
        blocked.wait(timeout)
        return concurrent.futures.wait(futures, 0)

    monkeypatch.setattr(scorer, "wait", wait_until_blocked)
    scores = score(lengths, blocks, on_error="drop")
    assert {failure.function for failure in scores.failures} == {"f1"}


def test_rows_of_a_failed_async_batch_are_tried_at_the_same_time():
    def make_fragile():
        rows, all_rows = [], asyncio.Event()

        async def fragile(completions):
            if "ccc" in completions:
                raise ValueError("no ccc")
            rows.append(completions)
            if len(rows) == 3:
                all_rows.set()
            await all_rows.wait()
            return [float(len(completion)) for completion in completions]

        return fragile

    with pytest.raises(
        RewardError,
        match=r"row 3 \(prompt '', completion 'ccc'\): raised ValueError: no ccc \(test_scorer.py, line \d+\)",
    ):
        score(make_fragile())
    scores = score(make_fragile(), on_error="drop")
    assert scores.dropped.tolist() == [False, False, True, False]
    assert scores.rewards[[0, 1, 3], 0].tolist() == [1, 2, 4]


@pytest.mark.parametrize("error", [SystemExit(2), asyncio.CancelledError(), TimeoutError(), StopAsyncIteration()])
def test_an_exception_of_an_async_function_is_reported(error):
    async def reward(completions):
        raise error

    with pytest.raises(RewardError, match=rf"raised {type(error).__name__}"):
        score(reward)
    assert score(lengths).rewards[0].item() == 1.0


def test_the_result_of_an_async_function_is_checked():
    async def short(completions):
        return [1.0]

    async def generator(completions):
        yield 1.0

    with pytest.raises(RewardError, match="returned 1 value for 4 rows"):
        score(short)
    with pytest.raises(RewardError, match=r"\(async_generator\), not a list"):
        score(generator)


def test_a_caller_inside_a_running_loop():
    async def main():
        return score(lengths)

    assert asyncio.run(main()).rewards[3].item() == 4.0


ANOTHER_PROCESS = """
import asyncio, os, signal, sys, threading, time
from groupwise.rewards import Scorer

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored

def score(function):
    return Scorer([function], timeout=600.0, on_error="drop").score([""], [""], {}).rewards.item()

async def works(completions):
    return [1.0]

print(score(works))
child = os.fork()
if not child:
    os._exit(0 if score(works) == 1.0 else 1)
print("child", os.waitpid(child, 0)[1])

cleaned = threading.Event()

def main_thread_waits():
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame is not None:
        if frame.f_code.co_name in ("join", "wait"):
            return True
        frame = frame.f_back
    return False

def ctrl_c():
    while not main_thread_waits():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

async def coroutine(completions):
    threading.Thread(target=ctrl_c, daemon=True).start()
    try:
        await asyncio.sleep(3600)
    finally:
        cleaned.set()

def plain(completions):
    ctrl_c()
    time.sleep(3600)

for function in (coroutine, plain):
    try:
        score(function)
    except KeyboardInterrupt:
        print(function.__name__, "interrupted")
print("cleaned", cleaned.wait(300))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_ctrl_c_gets_through_and_a_fork_gets_its_own_loop():
    """In another process, whose exit also shows that a hanging function does not keep it alive."""
    command = [sys.executable, "-W", "ignore", "-c", ANOTHER_PROCESS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "1.0",
        "child 0",
        "coroutine interrupted",
        "plain interrupted",
        "cleaned True",
    ]
