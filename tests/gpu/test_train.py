"""Training on a GPU: it learns, goes on after a stop, and works itself out of a memory that is too small."""

from __future__ import annotations

import pytest
import torch

from tests.train.runs import checkpoint_of, go, merged, metrics_of, small_trainer

pytestmark = pytest.mark.gpu

MANY = {"sampling": {"samples_per_prompt": 16, "max_new_tokens": 96}, "train": {"steps": 1, "batch_size": 32}}


def masters(folder, step):
    found = checkpoint_of(folder, step)
    return {name: value for name, value in found.items() if name.startswith("masters/")}


def furthest(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stopped_run_goes_on(tmp_path, dtype):
    changes = {"model": {"dtype": dtype}, "loss": {"kl_coef": 0.1}, "train": {"iterations": 2}}
    small_trainer(tmp_path / "a", changes).run()
    go(small_trainer(tmp_path / "b", changes), 2)
    trainer = small_trainer(tmp_path / "b", changes, resume=True)
    assert trainer.parts.prepared.device.type == "cuda"
    trainer.run()
    assert [row["step"] for row in metrics_of(tmp_path / "b") if "reward" in row] == [1, 2, 3, 4]
    unbroken, resumed = masters(tmp_path / "a", 4), masters(tmp_path / "b", 4)
    moved = furthest(unbroken, masters(tmp_path / "a", 1))
    assert moved > 1e-3
    assert furthest(unbroken, resumed) < 0.02 * moved


def test_memory_runs_out(tmp_path):
    """Half as many tokens at a time, said aloud, and the same gradient."""
    changes = merged(MANY, {"model": {"dtype": "float32"}, "train": {"token_budget": 60_000}})
    enough = small_trainer(tmp_path / "a", changes)
    enough.run()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 700e6) / total)
        short = small_trainer(tmp_path / "b", changes)
        short.run()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert not enough.display.heard("memory ran out")
    assert short.display.heard("memory ran out: the step is done again with a token budget of 30,000; same result")
    (wanted,), (got,) = (
        [row for row in metrics_of(tmp_path / run) if row.get("updates")] for run in ("a", "b")
    )  # AdamW makes a whole step of a gradient that is rounding alone, so the gradient is compared, not the weights
    assert got["token_budget"] < wanted["token_budget"]
    assert wanted["grad_norm"] > 1e-3
    for name in ("grad_norm", "loss", "reward", "entropy"):
        assert got[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), name
