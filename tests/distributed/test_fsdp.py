"""Weights divided among real processes: log-probs and gradients are those of one process, whatever each rank has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from groupwise.distributed.fsdp import ShardedWeights, full, is_sharded, local
from groupwise.distributed.ranks import Ranks, connect
from groupwise.distributed.shards import read_shards, shard_shapes, write_shards
from groupwise.errors import CheckpointError, InputError
from groupwise.generate.engine import Engine
from groupwise.generate.types import Sampling
from groupwise.model.export import iter_full_weights
from groupwise.model.handle import ModelHandle, prepare
from groupwise.model.load import adopt_model
from groupwise.model.logprobs import completion_logps, iter_packs
from groupwise.model.lora import LoraSettings, add_lora
from groupwise.model.precision import set_precision
from groupwise.model.sharding import shard_weights
from tests.distributed.forks import drive, fork_ranks, values
from tests.model.models import tiny

HERE = "tests.distributed.test_fsdp"
CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7], [8, 9], [11, 12, 13, 14]]
COMPLETIONS = [[[3, 4, 5, 6], [7, 8]], [[9, 1, 2], [4]], [[5, 5, 5, 9, 2], [6, 1]]]
# The prompts of each rank: unequal shares, and ranks without any.
SHARES = {2: [[0, 2], [1]], 3: [[0, 1, 2], [], []]}
CASES = [
    "llama",
    "llama_one_head",
    "gemma3_softcap",
    "llama+lora",
    "llama_one_head+checkpointing",
    "qwen3+lora+checkpointing",
]

pytestmark = pytest.mark.slow  # each test starts processes


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


def gradients(share: list[int], handle: ModelHandle, model: Any) -> tuple[float, dict[str, Tensor]]:
    """The value and the gradient of a loss that is a sum over samples, with another weight for each."""
    prompts, completions = [PROMPTS[i] for i in share], [COMPLETIONS[i] for i in share]
    weights = (1.0 + torch.tensor([2.0 * i + j for i in share for j in range(2)])).sin()
    value = 0.0
    for samples, pack in iter_packs(handle, prompts, completions, with_entropy=True, token_budget=9):
        sums = torch.where(pack.mask, pack.logps, 0.0).sum(1)
        loss = (sums * weights[samples].to(sums)).sum() + 0.1 * pack.entropy.sum()
        loss.backward()
        value += float(loss.detach())
    return value, {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}


def greedy(handle: ModelHandle, share: list[int]) -> list[list[int]]:
    if not share:
        return []
    rollout = Engine(handle).generate([PROMPTS[i] for i in share], 1, Sampling(max_new_tokens=4, greedy=True))
    return [row.tolist() for row in rollout.ids]


def relative(value: Tensor, expected: Tensor) -> float:
    return float((value - expected).abs().max() / expected.abs().max())


def compared(kind: str, ranks: Ranks) -> dict[str, Any]:
    """How far the sharded model is from one process: log-probs, loss, gradients, samples."""
    model, handle = build(kind)
    one_value, one = gradients([0, 1, 2], handle, model)
    with torch.no_grad():
        one_logps = completion_logps(handle, PROMPTS, COMPLETIONS).logps
    share = SHARES[ranks.size][ranks.rank]
    one_greedy, one_weights = greedy(handle, share), dict(iter_full_weights(model))
    model, handle = build(kind)
    handle = shard_weights(handle, ranks, CPU)
    weights = dict(iter_full_weights(model))
    value, summed = gradients(share, handle, model)
    with torch.no_grad():
        logps = completion_logps(handle, [PROMPTS[i] for i in share], [COMPLETIONS[i] for i in share]).logps
    assert handle.sharded is not None
    with handle.sharded.gathered():
        gathered = greedy(handle, share)
    again_value, _ = gradients(share, handle, model)  # gradients add up, as those of packs do
    rows = [2 * i + j for i in share for j in range(2)]
    held = sum(local(parameter).numel() for parameter in model.parameters())
    return {
        "names": list(summed) == list(one) and list(weights) == list(one_weights),
        "gradient": max(
            float((full(summed[name]) / 2 - one[name]).abs().max() / one[name].abs().max()) for name in one
        ),
        "loss": abs(sum(ranks.gather(value)) - one_value) + abs(again_value - value),
        "logps": float((logps - one_logps[rows][:, : logps.shape[1]]).abs().max()) if rows else 0.0,
        "greedy": gathered == one_greedy,
        "weights": all(torch.equal(weights[name], one_weights[name]) for name in weights),
        "sharded": all(map(is_sharded, model.parameters())),
        "held": sum(ranks.gather(held)) / sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(handle.dtype),
    }


def compare_all() -> dict[str, Any]:
    ranks = connect(CPU)
    return {kind: compared(kind, ranks) for kind in CASES}


def run_all(folder: str) -> dict[str, Any]:
    """What the ranks of each test returned; all are forked from one process."""
    values(fork_ranks(3, lambda: save_shards(Path(folder))))
    return {
        "2": values(fork_ranks(2, compare_all)),
        "3": values(fork_ranks(3, compare_all)),
        "lower precision": values(fork_ranks(2, lower_precision)),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("fsdp") / "shards"
    return {**drive(f"{HERE}:run_all", str(folder)), "shards": folder}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", CASES)
def test_a_sharded_model_is_that_of_one_process(results, size, kind):
    for result in (rank[kind] for rank in results[str(size)]):
        assert result["gradient"] < 1e-10
        assert result["loss"] < 1e-10
        assert result["logps"] < 1e-10
        assert result["names"]
        assert result["greedy"]
        assert result["weights"]
        assert result["sharded"]
        assert result["held"] == 1.0  # every weight is on exactly one rank
        assert result["dtype"] == "torch.float64"


def mixed_precision(ranks: Ranks) -> dict[str, Any]:
    model, handle = build("llama_one_head", torch.bfloat16)
    one_value, one = gradients([0, 1, 2], handle, model)
    model, handle = build("llama_one_head", torch.bfloat16)
    handle = shard_weights(handle, ranks, CPU)
    value, summed = gradients(SHARES[2][ranks.rank], handle, model)
    pairs = [(full(summed[name]).flatten(), one[name].float().flatten()) for name in one]
    with pytest.raises(InputError, match="divided among processes already"):
        adopt_model(model)
    return {
        "dtypes": sorted({str(tensor.dtype) for tensor in (*model.parameters(), *summed.values())}),
        "dtype": str(handle.dtype),
        "cosine": min(float(torch.cosine_similarity(*pair, dim=0)) for pair in pairs),
        "loss": abs(sum(ranks.gather(value)) - one_value) / abs(one_value),
    }


def reduction(ranks: Ranks, *calls: str) -> Any:
    """The gradient of a weight that is 1 on rank 0 and 2 on rank 1, with only some of the calls that make it a sum."""
    layer = torch.nn.Linear(2, 1, bias=False)
    sharded = ShardedWeights(layer, [], ranks, ranks.mesh(CPU))
    sharded.root.set_gradient_divide_factor(1.0 if "factor" in calls else None)
    sharded.root.set_force_sum_reduction_for_comms("sum" in calls)
    try:
        sharded.run(lambda: layer(torch.full((1, 2), 1.0 + ranks.rank)).sum()).backward()
        return full(layer.weight.grad).flatten().tolist()
    except RuntimeError as error:
        return str(error)


def lower_precision() -> Any:
    ranks = connect(CPU)
    cases = (("factor", "sum"), ("sum",), ("factor",))  # the last one fails
    return mixed_precision(ranks), [reduction(ranks, *calls) for calls in cases]


def test_a_bfloat16_model_has_float32_slices_and_gradients(results):
    for result, _ in results["lower precision"]:
        assert result["dtypes"] == ["torch.float32"]
        assert result["dtype"] == "torch.bfloat16"
        assert result["cosine"] > 0.99
        assert result["loss"] < 0.01


def test_a_sum_of_gradients_needs_two_calls(results):
    for _, (both, only_sum, only_factor) in results["lower precision"]:
        assert both == [3.0, 3.0]
        assert only_sum == [1.5, 1.5]  # the mean
        assert isinstance(only_factor, str)  # an error: gloo has no scaled sum


TENSORS = {"masters/a": torch.arange(35.0).view(7, 5), "exp_avg/b": torch.arange(2, dtype=torch.float64)}


def divided(ranks: Ranks) -> dict[str, Tensor]:
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = ranks.mesh(CPU)
    slices = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in TENSORS.items()}
    return {**slices, "step/a": torch.tensor(4.0)}


def save_shards(folder: Path) -> None:
    ranks = connect(CPU)
    write_shards(folder, divided(ranks), ranks.rank)


def test_slices_of_three_ranks_are_read_by_one_process(results):
    folder = results["shards"]
    assert {path.suffix for path in folder.iterdir()} == {".safetensors"}  # nothing is pickled
    assert shard_shapes(folder) == {"masters/a": (7, 5), "exp_avg/b": (2,), "step/a": ()}
    targets = {**{name: torch.full_like(value, -1.0) for name, value in TENSORS.items()}, "step/a": torch.tensor(0.0)}
    read_shards(folder, targets)
    assert all(torch.equal(targets[name], value) for name, value in TENSORS.items())
    assert targets["step/a"] == 4
    with pytest.raises(CheckpointError, match=r"masters/a has the shape \(7, 5\)"):
        read_shards(folder, {"masters/a": torch.zeros(6, 5)})
    with pytest.raises(CheckpointError, match="masters/c is not there"):
        read_shards(folder, {"masters/c": torch.zeros(6, 5)})
    next(folder.glob("shard-00002-model-00002*")).unlink()
    with pytest.raises(CheckpointError, match="a part of masters/a is missing"):
        shard_shapes(folder)
