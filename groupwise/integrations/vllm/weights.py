"""How new weights reach the servers: as files in a shared folder, or by NCCL."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from safetensors.torch import save_file
from torch import Tensor

from groupwise.config import Recipe
from groupwise.errors import ConfigError
from groupwise.integrations.vllm.client import ServerClient
from groupwise.integrations.vllm.versions import NcclSender, VllmVersion
from groupwise.rundir import atomic_folder

SHARD_BYTES = 2**31  # of a file; so much is held in memory at once


class WeightTransfer(Protocol):
    """Rank 0's side of an update: `publish` once, then `load` for each server.

    any_time: a server that comes back between two updates can load the weights then.
    """

    any_time: bool

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None: ...
    def load(self, client: ServerClient, api: VllmVersion) -> None: ...
    def close(self) -> None: ...


class FolderTransfer:
    """Writes each version into a folder of its own, which appears complete or not at all; the last one is kept."""

    def __init__(self, folder: str | None) -> None:
        self._temporary = tempfile.mkdtemp(prefix="groupwise-weights-") if folder is None else None
        self.folder = Path(self._temporary or str(folder)).expanduser().resolve()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the folder vllm.folder, {self.folder}, cannot be used: {error}") from error
        self.current: Path | None = None
        self.any_time = True

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        before, self.current = self.current, self.folder / f"version-{version}"
        if self.current.exists():  # of a run that was resumed
            shutil.rmtree(self.current)
        with atomic_folder(self.current) as unfinished:
            write_weights(weights, unfinished)
        if before is not None and before != self.current:
            shutil.rmtree(before, ignore_errors=True)

    def load(self, client: ServerClient, api: VllmVersion) -> None:
        client.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(self.current)}})

    def close(self) -> None:
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
        elif self.current is not None:
            shutil.rmtree(self.current, ignore_errors=True)


class NcclTransfer:
    """Sends the weights from this process's GPU; one connection per server, opened again if the server comes back.

    It follows vLLM's documentation of 0.26 and 0.32, and needs vLLM in this environment, too.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port, self.any_time = host, port, False  # later, the weights may be in the middle of an update
        self.weights: list[tuple[str, Tensor]] = []
        self._senders: dict[str, NcclSender] = {}
        self._ports: dict[str, int] = {}

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.weights = list(weights)

    def load(self, client: ServerClient, api: VllmVersion) -> None:
        sender = self._senders.pop(client.url, None)
        if sender is None:
            workers = int(client.get("/get_world_size")["world_size"])
            port = self._ports.setdefault(client.url, self.port + len(self._ports))
            sender = api.connect(client, self.host, port, workers)
        sender.send(self.weights)
        self._senders[client.url] = sender  # only if it still works

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()
        self.weights = []


def make_transfer(recipe: Recipe) -> WeightTransfer:
    settings = recipe.vllm
    if settings.weights == "nccl":
        return NcclTransfer(settings.nccl_host, settings.nccl_port)
    return FolderTransfer(settings.folder)


def write_weights(weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write weights as safetensors files of about `SHARD_BYTES` each."""
    shard: dict[str, Tensor] = {}
    number = held = 0

    def flush() -> None:
        nonlocal number, held
        number, held = number + 1, 0
        save_file(shard, folder / f"model-{number:05}.safetensors", metadata={"format": "pt"})
        shard.clear()

    for name, value in weights:
        shard[name] = value.to("cpu", copy=True).contiguous()  # safetensors refuses tied weights that share memory
        held += value.numel() * value.element_size()
        if held >= SHARD_BYTES:
            flush()
    if shard:
        flush()
