"""The supported versions of vLLM, and everything that differs between them.

How a server is recognised: 0.32 has a route for the name of its weights, which a restart or another trainer changes;
0.26 has none, so there it is the time at which the server's process started. How weights are sent by NCCL: the classes
of the trainer's side were replaced in 0.28.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from groupwise.integrations.vllm.client import ServerClient
from groupwise.integrations.vllm.errors import ServerError, ServerSetupError, VllmError

Weights = Sequence[tuple[str, Tensor]]
PACKAGES = {"0.26": "vllm==0.26.0", "0.32": "vllm==0.32.0"}


class NcclSender(Protocol):
    """A connection to the workers of one server."""

    def send(self, weights: Weights) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class VllmVersion:
    """A version of vLLM.

    mark: called with a server that has complete weights and a name for them; returns what `identity` must be from then
    on. identity: differs if the server was restarted, or given weights by another.
    connect: opens the NCCL transfer to a server: its client, this machine's address, a port, and the number of workers.
    """

    number: str
    mark: Callable[[ServerClient, str], str]
    identity: Callable[[ServerClient], str]
    connect: Callable[[ServerClient, str, int, int], NcclSender]


def find_version(number: str, where: str) -> VllmVersion:
    """The version with this number; an error names the supported ones."""
    short = ".".join(number.split(".")[:2])
    if short in VERSIONS:
        return VERSIONS[short]
    packages = " or ".join(f"pip install {package}" for package in PACKAGES.values())
    raise ServerSetupError(f"{where} has vLLM {number}; groupwise works with {' and '.join(PACKAGES)}: {packages}")


def _start_time(client: ServerClient) -> str:
    found = re.search(r"^process_start_time_seconds (\S+)$", client.get_text("/metrics"), re.MULTILINE)
    if found is None:
        raise ServerError(f"{client.url}/metrics does not tell when the server was started")
    return found[1]


def _mark_by_start_time(client: ServerClient, name: str) -> str:
    return _start_time(client)


def _weight_name(client: ServerClient) -> str:
    return str(client.get("/weight_info").get("weight_version"))


def _mark_by_weight_name(client: ServerClient, name: str) -> str:
    client.post("/update_weight_version", {"new_version": name})
    return name


def _description(weights: Weights) -> dict[str, Any]:
    return {
        "names": [name for name, _ in weights],
        "dtype_names": [str(value.dtype).removeprefix("torch.") for _, value in weights],
        "shapes": [list(value.shape) for _, value in weights],
    }


class _Nccl26:
    """The trainer's side in 0.26: a communicator, and a static method that broadcasts through it."""

    def __init__(self, client: ServerClient, host: str, port: int, workers: int) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        self.client, self.engine = client, NCCLWeightTransferEngine
        address = {"master_address": host, "master_port": port, "world_size": workers + 1}
        with ThreadPoolExecutor(1) as pool:  # both sides wait for each other
            joined = pool.submit(
                client.post, "/init_weight_transfer_engine", {"init_info": address | {"rank_offset": 1}}
            )
            self.group: Any = self.engine.trainer_init(address)
            joined.result()

    def send(self, weights: Weights) -> None:
        self.client.post("/start_weight_update")
        update = {"update_info": _description(weights) | {"packed": True}}
        pool = ThreadPoolExecutor(1)
        try:
            received = pool.submit(self.client.post, "/update_weights", update)
            self.engine.trainer_send_weights(iter(weights), {"group": self.group, "packed": True})
            received.result()
        finally:
            pool.shutdown(wait=False)  # after an error the other side may never answer
        self.client.post("/finish_weight_update")

    def close(self) -> None:
        self.group = None


class _Nccl32:
    """The trainer's side since 0.28: an engine that drives the handshake through a client and reads a source."""

    def __init__(self, client: ServerClient, host: str, port: int, workers: int) -> None:
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        class Source(WeightSource):  # type: ignore[misc]
            weights: Weights = ()

            def metadata(self) -> list[Any]:
                return [ParamMeta(name, value.dtype, tuple(value.shape)) for name, value in self.weights]

            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                return iter(self.weights)

        self.source = Source()
        self.engine: Any = WeightTransferTrainerFactory.trainer_init(
            NCCLTrainerInitInfo(master_address=host, master_port=port, world_size=workers + 1, rank=0, packed=True),
            client=_SyncClient(client),
            source=self.source,
        )

    def send(self, weights: Weights) -> None:
        self.source.weights = weights
        try:
            self.engine.send_weights()
        finally:
            self.source.weights = ()

    def close(self) -> None:
        self.engine.shutdown()


class _SyncClient:
    """The routes that vLLM's engine calls, with the timeout and the key of ours."""

    def __init__(self, client: ServerClient) -> None:
        self.client = client

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.client.post("/init_weight_transfer_engine", {"init_info": init_info})

    def shutdown_weight_transfer_engine(self) -> None:
        self.client.post("/shutdown_weight_transfer_engine")

    def start_weight_update(self) -> None:
        self.client.post("/start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self.client.post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.client.post("/finish_weight_update", {} if weight_version is None else {"weight_version": weight_version})


VERSIONS = {
    "0.26": VllmVersion("0.26", _mark_by_start_time, _start_time, _Nccl26),
    "0.32": VllmVersion("0.32", _mark_by_weight_name, _weight_name, _Nccl32),
}


def reload_in_process(llm: Any, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Load weights into an engine of this process; both versions have the same method."""
    with torch.no_grad():
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    if not llm.reset_prefix_cache():
        raise VllmError("vLLM still holds prompts that were computed with the old weights")
