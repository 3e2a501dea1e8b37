"""Bytes and seconds of the exchanges between GPUs. Rates are those of data sheets, times what collectives reach."""

from __future__ import annotations

import math
from dataclasses import dataclass

from groupwise.planning.gpus import Gpu

LINK_SHARE = 0.8  # of a link's peak, which collectives of many megabytes reach; assumed
LINK_LATENCY, NETWORK_LATENCY = 3e-6, 10e-6  # of one hop, seconds; assumed
SERVER_LATENCY = 10e-6  # of a sum over the GPUs of one server, which is not a ring; assumed
HOST_RATE = 2e9  # bytes per second that one process receives by gloo, through the host; assumed
NETWORK, HOST = "network", "host"


@dataclass(frozen=True)
class Exchange:
    """One kind of exchange in a step: the bytes that each GPU sends over the named link, and the seconds it takes."""

    name: str
    link: str
    bytes: float
    seconds: float


@dataclass(frozen=True)
class Links:
    """The links between ``ranks`` GPUs; ``ideal`` ones take no time."""

    gpu: Gpu
    ranks: int
    ideal: bool = False

    @property
    def nodes(self) -> int:
        return math.ceil(self.ranks / self.gpu.per_node)

    @property
    def name(self) -> str:
        return NETWORK if self.nodes > 1 else self.gpu.link_name

    @property
    def bandwidth(self) -> float:
        """Of a ring. Between nodes there are as many rings as GPUs in a node, each over its own network port."""
        across = min(self.gpu.link, self.gpu.network * self.gpu.per_node)
        return LINK_SHARE * (across if self.nodes > 1 else self.gpu.link)

    def ring(self, name: str, size: float, times: float = 1.0) -> Exchange:
        """A reduce-scatter or an all-gather of ``size`` bytes: every rank sends (n − 1)/n of them."""
        sent = size * (self.ranks - 1) / self.ranks
        between = self.nodes - 1
        latency = between * NETWORK_LATENCY + (self.ranks - 1 - between) * LINK_LATENCY
        seconds = 0.0 if self.ideal or self.ranks == 1 else sent / self.bandwidth + latency
        shared = self.gpu.per_node if self.nodes > 1 else 1  # the rings of a node
        return Exchange(name, self.name, times * sent / shared, times * seconds)

    def sum_in_server(self, name: str, size: float, times: float) -> Exchange:
        """A sum over the GPUs of one server that all of them get."""
        sent = 2 * size * (self.ranks - 1) / self.ranks
        seconds = 0.0 if self.ideal else sent / self.bandwidth + SERVER_LATENCY
        return Exchange(name, self.name, times * sent, times * seconds)

    def to_every_host(self, name: str, size: float) -> Exchange:
        """An all-gather of ``size`` bytes in the hosts' memory, by gloo."""
        received = size * (self.ranks - 1) / self.ranks
        return Exchange(name, HOST, received, 0.0 if self.ideal else received / HOST_RATE)

    def broadcast(self, name: str, size: float) -> Exchange:
        """From one rank to others, passed on in a chain, so that each link carries ``size`` bytes once."""
        rate = LINK_SHARE * (self.gpu.network if self.nodes > 1 else self.gpu.link)
        return Exchange(name, self.name, size, 0.0 if self.ideal else size / rate)
