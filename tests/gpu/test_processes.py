"""Two processes on one GPU, over gloo, give the result of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.processes import run
from tests.distributed.test_training import STEPS, check_close, train
from tests.training.runs import checkpoint_of

pytestmark = pytest.mark.gpu

HERE = "tests.gpu.test_processes"
GPU = {"model": {"device": "cuda"}}


def on_gpu(folder: str, dtype: str) -> list[Any]:
    result = train("kl", Path(folder), GPU, {"model": {"dtype": dtype}})
    return [*result, torch.cuda.max_memory_allocated()]


def test_the_result_is_that_of_one_process(tmp_path):
    run(f"{HERE}:on_gpu", 1, str(tmp_path / "one"), "float64")
    run(f"{HERE}:on_gpu", 2, str(tmp_path / "two"), "float64")
    check_close(tmp_path / "one", tmp_path / "two", STEPS)


def test_bfloat16(tmp_path):
    """Both processes end with the same weights, whose masters are float32."""
    (steps, *_), other = run(f"{HERE}:on_gpu", 2, str(tmp_path / "run"), "bfloat16")
    assert steps == other[0] == STEPS
    saved = checkpoint_of(tmp_path / "run", STEPS)
    masters = {name: value for name, value in saved.items() if name.startswith("masters/")}
    assert all(value.dtype == torch.float32 and bool(value.isfinite().all()) for value in masters.values())
