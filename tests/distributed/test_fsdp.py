"""Weights divided among real processes: log-probs and gradients are those of one process, whatever each rank's share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from groupwise.distributed.fsdp import full
from groupwise.distributed.ranks import Ranks, connect
from groupwise.distributed.shards import read_shards, shard_shapes, write_shards
from groupwise.model.handle import ModelHandle, prepare
from groupwise.model.logprobs import completion_logps, iter_packs
from groupwise.model.lora import LoraSettings, add_lora
from groupwise.model.precision import MasterWeights, set_precision
from groupwise.model.sharding import shard_weights
from tests.distributed.processes import run
from tests.model.models import tiny

HERE = "tests.distributed.test_fsdp"
CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7], [8, 9], [11, 12, 13, 14]]
COMPLETIONS = [[[3, 4, 5, 6], [7, 8]], [[9, 1, 2], [4]], [[5, 5, 5, 9, 2], [6, 1]]]
# The prompts of each rank: unequal shares, and a rank without any.
SHARES = {1: [[0, 1, 2]], 2: [[0, 2], [1]], 3: [[0, 1, 2], [], []]}


def build(kind: str, dtype: torch.dtype = torch.float64) -> tuple[Any, ModelHandle]:
    architecture, *options = kind.split("+")
    model: Any = tiny(architecture)
    if "lora" in options:
        model = add_lora(model, LoraSettings(rank=2), seed=1)
        with torch.no_grad():  # B starts at zero, and then A has no gradient
            for number, (name, weight) in enumerate(model.named_parameters()):
                if "lora_B" in name:
                    weight.copy_(torch.linspace(-0.1, 0.1, weight.numel()).view_as(weight) + number / 1000)
    set_precision(model, dtype)
    handle = prepare(model, compile=False)
    if "checkpointing" in options:
        handle.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        handle.model.enable_input_require_grads()
        handle.model.train()
    return model, handle


def loss_of(logps: Tensor, mask: Tensor, samples: Tensor) -> Tensor:
    """A loss that is a sum over samples, with another weight for each."""
    return (torch.where(mask, logps, 0.0).sum(1) * (1 + samples.to(logps)).sin()).sum()


def gradients(kind: str, share: list[int], handle: ModelHandle, model: Any) -> tuple[float, dict[str, Tensor]]:
    masters = MasterWeights(model)
    prompts, completions = [PROMPTS[i] for i in share], [COMPLETIONS[i] for i in share]
    number = torch.tensor([2 * i + j for i in share for j in range(2)])
    value = 0.0
    for samples, pack in iter_packs(handle, prompts, completions, with_entropy=True, token_budget=9):
        loss = loss_of(pack.logps, pack.mask, number[samples]) + 0.1 * pack.entropy.sum()
        loss.backward()
        masters.take_gradients()
        value += float(loss.detach())
    if not masters.sharded:
        return value, {name: master.grad for name, master in masters.named_parameters()}
    from groupwise.distributed.fsdp import sharded_like

    return value, {
        name: full(sharded_like(master.grad, masters.sharded[name])) for name, master in masters.named_parameters()
    }


def sharded_gradients(kind: str, size: int) -> dict[str, Any]:
    """The largest difference from one process of log-probs, loss and gradients, relative to their size."""
    ranks = connect(CPU)
    model, handle = build(kind)
    one_value, one = gradients(kind, [0, 1, 2], handle, model)
    with torch.no_grad():
        one_logps = completion_logps(handle, PROMPTS, COMPLETIONS).logps
    model, handle = build(kind)
    handle = shard_weights(handle, ranks, CPU)
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    share = SHARES[size][ranks.rank]
    value, summed = gradients(kind, share, handle, model)
    with torch.no_grad():
        logps = completion_logps(handle, [PROMPTS[i] for i in share], [COMPLETIONS[i] for i in share]).logps
    rows = [2 * i + j for i in share for j in range(2)]
    width = logps.shape[1]
    worst = max(float((summed[name] - one[name]).abs().max() / one[name].abs().max()) for name in one)
    result = {
        "names": list(summed) == list(one),
        "gradient": worst,
        "loss": abs(sum(ranks.gather(value)) - one_value),
        "logps": float((logps - one_logps[rows][:, :width]).abs().max()) if rows else 0.0,
        "held": sum(ranks.gather(held)) / sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(handle.dtype),
    }
    ranks.close()
    return result


CASES = ["llama", "llama_one_head", "gemma3_softcap", "llama+lora", "llama_one_head+checkpointing", "qwen3+lora+checkpointing"]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", CASES)
def test_sharded_gradients_are_those_of_one_process(kind, size):
    for result in run(f"{HERE}:sharded_gradients", size, kind, size):
        assert result["names"]
        assert result["gradient"] < 1e-10, result
        assert result["loss"] < 1e-10
        assert result["logps"] < 1e-10
        assert result["held"] == 1.0  # every weight is on one rank
        assert result["dtype"] == "torch.float64"


def tensors_for(ranks: Ranks) -> dict[str, Tensor]:
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = {"masters/a": torch.arange(35.0).view(7, 5), "exp_avg/b": torch.arange(2, dtype=torch.float64)}
    mesh = ranks.mesh(CPU)
    return {
        **{name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in whole.items()},
        "step/a": torch.tensor(4.0),
    }


def save_shards(folder: str) -> None:
    ranks = connect(CPU)
    write_shards(Path(folder), tensors_for(ranks), ranks.rank)
    ranks.close()


def load_shards(folder: str) -> bool:
    ranks = connect(CPU)
    expected = tensors_for(ranks)
    targets = {name: torch.full_like(value, -1.0) for name, value in expected.items()}
    read_shards(Path(folder), targets)
    same = all(torch.equal(full(targets[name]), full(expected[name])) for name in expected)
    ranks.close()
    return same
