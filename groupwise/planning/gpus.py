"""GPUs and their links. Rates are peaks of data sheets; `constants` holds the share of them measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass

from groupwise.errors import ConfigError, did_you_mean

GB, GIB = 1e9, 2**30


@dataclass(frozen=True)
class Gpu:
    """One GPU in a usual server of its kind.

    flops: dense bfloat16 operations per second with float32 sums. bandwidth: bytes per second of its memory.
    link: bytes per second and direction to the other GPUs of its node. network: the same to other nodes, per GPU.
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    link: float
    network: float
    link_name: str
    source: str
    per_node: int = 8


NVLINK, PCIE = "NVLink", "PCIe"
GPUS = {
    gpu.name: gpu
    for gpu in (
        # NVLink's data sheet numbers count both directions; here they are halved.
        Gpu("h100", 989e12, 3.35e12, 80 * GB, 450 * GB, 50 * GB, NVLINK, "H100 SXM data sheet; 400 Gb/s per GPU (DGX)"),
        Gpu("h200", 989e12, 4.8e12, 141 * GB, 450 * GB, 50 * GB, NVLINK, "H200 SXM data sheet; 400 Gb/s per GPU (DGX)"),
        Gpu("a100-80g", 312e12, 2.039e12, 80 * GB, 300 * GB, 25 * GB, NVLINK, "A100 SXM data sheet; 200 Gb/s per GPU"),
        Gpu("b200", 2250e12, 8e12, 180 * GB, 900 * GB, 50 * GB, NVLINK, "DGX B200 data sheet; 400 Gb/s per GPU"),
        Gpu(
            "l40s",
            362e12,
            0.864e12,
            48 * GB,
            32 * GB,
            12.5 * GB,
            PCIE,
            "L40S data sheet, PCIe 4 × 16; 100 Gb/s per GPU",
        ),
        Gpu(
            "rtx-4090",
            165e12,
            1.008e12,
            24 * GB,
            32 * GB,
            3.1 * GB,
            PCIE,
            "Ada white paper, PCIe 4 × 16; 25 Gb/s per GPU",
        ),
    )
}


def find_gpu(name: str) -> Gpu:
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise ConfigError(
            f"--gpu {name!r} is not known{did_you_mean(name.lower(), list(GPUS))} (known: {', '.join(GPUS)})"
        )
    return gpu
