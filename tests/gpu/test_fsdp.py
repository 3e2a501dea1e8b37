"""Sharded weights on a GPU with one rank; two that share it are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from groupwise.distributed.fsdp import ShardedWeights, full
from groupwise.distributed.ranks import Ranks, connect
from groupwise.errors import ConfigError
from groupwise.generate.engine import Engine
from groupwise.generate.types import Sampling
from groupwise.model.handle import ModelHandle, decoder_layers, prepare
from groupwise.model.logprobs import iter_packs
from tests.distributed.processes import free_port, run
from tests.model.models import tiny

pytestmark = pytest.mark.gpu

HERE = "tests.gpu.test_fsdp"
CUDA = torch.device("cuda")
PROMPTS = [[5, 6, 7], [8, 9]]
COMPLETIONS = [[[3, 4, 5, 6], [7, 8]], [[9, 1, 2], [4]]]


def gradients(handle: ModelHandle, share: list[int]) -> dict[str, torch.Tensor]:
    prompts, completions = [PROMPTS[i] for i in share], [COMPLETIONS[i] for i in share]
    for _, pack in iter_packs(handle, prompts, completions):
        pack.logps.sum().backward()
    return {name: weight.grad for name, weight in handle.model.named_parameters()}


def compare(ranks: Ranks, mesh: Any, dtype: torch.dtype, share: list[int]) -> dict[str, Any]:
    """The sharded model beside one that is not, on the same device."""
    one = prepare(tiny("llama", dtype).to(CUDA))
    wanted = gradients(one, [0, 1])
    sampling = Sampling(max_new_tokens=8, greedy=True)
    greedy = Engine(one).generate(PROMPTS, 2, sampling).ids.tolist()
    handle = prepare(tiny("llama", dtype), compile=one.compiled is not None)
    sharded = ShardedWeights(handle.model, decoder_layers(handle.model), ranks, mesh)
    handle = ModelHandle(**{**vars(handle), "sharded": sharded})
    got = gradients(handle, share)
    cosines = [
        float(torch.cosine_similarity(full(got[name]).float().flatten(), wanted[name].float().flatten(), dim=0))
        for name in wanted
    ]
    engine = Engine(handle)
    samples = []
    for _ in range(2):  # the second time, captured graphs may be out of date
        with sharded.gathered():
            samples.append(engine.generate(PROMPTS, 2, sampling).ids.tolist())
    return {
        "cosine": min(cosines),
        "finite": all(map(math.isfinite, cosines)),
        "greedy": samples == [greedy, greedy],
        "device": str(handle.device.type),
        "dtype": str(handle.dtype),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_one_rank(dtype, backend):
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    torch.cuda.set_device(0)  # else a mesh warns
    address = f"tcp://127.0.0.1:{free_port()}"
    distributed.init_process_group(backend, init_method=address, rank=0, world_size=1)
    try:
        result = compare(Ranks(), init_device_mesh("cuda", (1,)), dtype, [0, 1])
    finally:
        distributed.destroy_process_group()
    assert result["finite"]
    assert result["cosine"] > (0.99999 if dtype == torch.float32 else 0.99)
    assert result["greedy"] or dtype == torch.bfloat16
    assert result["device"] == "cuda"


def share_the_gpu() -> str:
    torch.cuda.set_device(0)
    ranks = connect(CUDA)
    with pytest.raises(ConfigError, match="share one") as error:
        ranks.mesh(CUDA)
    return str(error.value)


def test_ranks_that_share_a_gpu_cannot_divide_the_weights():
    assert all("model.sharding" in reason for reason in run(f"{HERE}:share_the_gpu", 2))
