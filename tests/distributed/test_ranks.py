"""What ranks exchange, in real processes; and what the others say if one fails, dies or hangs."""

from __future__ import annotations

import math
import os
import signal
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.distributed.message import decode, encode
from groupwise.distributed.ranks import Ranks, connect
from groupwise.distributed.split import split_by_cost
from groupwise.errors import ConfigError, GroupwiseError, InputError, RankError
from tests.distributed.processes import finish, run, start

HERE = "tests.distributed.test_ranks"
CPU = torch.device("cpu")

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES)
def test_a_message_is_read_as_it_was_written(value):
    assert decode(encode(value)) == value


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool])
def test_tensors_in_a_message(dtype):
    tensor = torch.tensor([[0, 1, 2], [3, 0, 1]]).to(dtype)
    value = decode(encode({"a": [tensor, "text", None], "same": tensor, "row": tensor[1], "none": tensor[:0]}))
    assert torch.equal(value["a"][0], tensor)
    assert value["a"][0].dtype == dtype
    assert torch.equal(value["row"], tensor[1])
    assert value["none"].shape == (0, 3)
    assert math.isnan(decode(encode(float("nan"))))


@pytest.mark.parametrize("value", [{1: "a"}, {"a": object()}, [{1, 2}]])
def test_what_a_message_cannot_hold(value):
    with pytest.raises(InputError, match="message"):
        encode(value)


@given(st.lists(st.floats(0, 1e6), max_size=40), st.integers(1, 7))
def test_a_split_has_every_item_once_and_is_even(costs, parts):
    shares = split_by_cost(costs, parts)
    assert sorted(item for share in shares for item in share) == list(range(len(costs)))
    totals = [sum(costs[item] for item in share) for share in shares]
    assert max(totals) <= sum(costs) / parts + max(costs, default=0.0) * (1 - 1 / parts) + 1e-6


def test_one_process_exchanges_nothing(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    ranks, tensor = connect(CPU), torch.ones(2)
    with ranks.stage("sampling"):
        ranks.sum_([tensor])
    assert (ranks.size, ranks.is_main, ranks.gather("a"), ranks.from_main(3), ranks.any(False)) == (
        1,
        True,
        ["a"],
        3,
        False,
    )
    assert torch.equal(tensor, torch.ones(2))


@pytest.mark.parametrize("variables", [{"RANK": "0", "WORLD_SIZE": "2"}, {"RANK": "one", "WORLD_SIZE": "2"}])
def test_variables_that_torchrun_did_not_set(monkeypatch, variables):
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_RANK": "0", **variables}.items():
        monkeypatch.setenv(name, value)
    if variables["RANK"] == "0":
        monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(ConfigError, match="start several processes with torchrun"):
        connect(CPU)


def exchange() -> list[object]:
    ranks = connect(CPU, timeout=60)
    gathered = ranks.gather({"rank": ranks.rank, "ids": torch.arange(ranks.rank)})
    total = torch.full((3,), 10.0**ranks.rank, dtype=torch.float64)
    ranks.sum_([total])
    values = [
        [entry["rank"] for entry in gathered],
        [entry["ids"].tolist() for entry in gathered],
        total.tolist(),
        ranks.from_main(f"from {ranks.rank}"),
        ranks.any(ranks.rank == 1),
        ranks.any(False),
    ]
    ranks.close()
    return values


@pytest.mark.parametrize("size", [2, 3])
def test_several_processes(size):
    total = float(sum(10**rank for rank in range(size)))
    expected = [list(range(size)), [list(range(rank)) for rank in range(size)], [total] * 3, "from 0", True, False]
    assert run(f"{HERE}:exchange", size) == [expected] * size


def fail_on(rank: int) -> str:
    ranks = connect(CPU, timeout=60)
    try:
        with ranks.stage("scoring"):
            if ranks.rank == rank:
                raise InputError("the reward is missing")
    except GroupwiseError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        ranks.close()  # as a trainer does: gloo's threads may end a process that exits without it
    return "no error"


def test_an_error_on_one_rank_is_raised_on_all():
    first, second = run(f"{HERE}:fail_on", 2, 1)
    assert first == "RankError: rank 1 failed while scoring: the reward is missing"
    assert second == "InputError: the reward is missing"


def die_or_hang(moment: str) -> str:
    ranks = connect(CPU, timeout=5)
    with ranks.stage("sampling"):
        pass
    if ranks.rank == 1:
        if moment == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    started = time.monotonic()
    try:
        with ranks.stage("scoring"):
            pass
    except RankError as error:
        assert time.monotonic() - started < 50
        return str(error)
    return "no error"


@pytest.mark.parametrize("moment", ["dies", "hangs"])
def test_a_rank_that_is_gone_is_named(moment):
    processes = start(f"{HERE}:die_or_hang", 2, moment)
    first = finish(processes[:1])[0]
    processes[1].kill()
    finish(processes[1:])
    assert "while scoring" in first.value
    assert "rank 1 (waiting after sampling" in first.value


def test_ranks_of_one_process_are_ready_made():
    assert (Ranks().rank, Ranks().size) == (0, 1)
