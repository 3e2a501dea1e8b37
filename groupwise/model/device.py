"""The device a model runs on, its dtype, the number of CPU threads, and the free memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from groupwise.errors import InputError

ROOT = Path("/")  # of /proc and /sys; tests replace it

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}

# Of a control group, in versions 2 and 1: its limit, its use, and the key of its page cache in memory.stat.
MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)

UNKNOWN_MEMORY = 4 * 2**30
"""The result of `free_memory`, in bytes, on a system that does not report it."""


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """The torch device; ``"auto"`` is the current CUDA device if there is one, else Apple's MPS, else the CPU.

    Other names (``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"mps"``) must be available. A CUDA device is returned with its
    index, so that "cuda" and "cuda:0" compare equal.
    """
    if isinstance(device, str) and device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"unknown device {device!r} (allowed: 'auto', 'cpu', 'cuda', 'cuda:1', 'mps')") from error
    if resolved.type == "cuda":
        return _cuda(resolved)
    if resolved.type == "mps":
        if not torch.backends.mps.is_available():
            raise InputError("the device 'mps' was requested, but torch finds no Apple GPU; use 'cpu' (model.device)")
    elif resolved.type != "cpu":
        raise InputError(f"the device {device!r} is not supported (allowed: cpu, cuda, mps)")
    return resolved


def _cuda(device: torch.device) -> torch.device:
    if not torch.cuda.is_available():
        if torch.version.cuda is None and torch.version.hip is None:
            reason = f"this torch ({torch.__version__}) was built without CUDA; install a CUDA build"
        else:
            hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
            seen = "" if hidden is None else f" (CUDA_VISIBLE_DEVICES is {hidden!r})"
            reason = f"torch finds no CUDA device{seen}; check nvidia-smi"
        raise InputError(f"the device {str(device)!r} was requested, but {reason}, or use 'cpu' (model.device)")
    index = torch.cuda.current_device() if device.index is None else device.index
    count = torch.cuda.device_count()
    if index >= count:
        raise InputError(f"the device {str(device)!r} was requested, but there are only {count}: cuda:0 to {count - 1}")
    return torch.device("cuda", index)


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The torch dtype; ``"auto"`` is `compute_dtype` of the device. MPS has no float64."""
    if isinstance(dtype, str) and dtype == "auto":
        return compute_dtype(device)
    resolved = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if resolved is None or resolved not in DTYPES.values():
        allowed = f"'auto', {', '.join(map(repr, DTYPES))}, or the torch dtype"
        raise InputError(f"unknown dtype {dtype!r} (allowed: {allowed})")
    if resolved == torch.float64 and float64_device(device) != device:
        raise InputError(f"{device} has no float64; use float32 (model.dtype), or the device 'cpu' (model.device)")
    return resolved


def float64_device(device: torch.device) -> torch.device:
    """The device to compute in float64 on: this one, or the CPU for MPS, which has no float64."""
    return torch.device("cpu") if device.type == "mps" else device


def compute_dtype(device: str | torch.device = "auto") -> torch.dtype:
    """bfloat16 where the device supports it in hardware, otherwise float32.

    Emulated bfloat16 computes each product in float32 and rounds it, which is slower and less precise. On MPS it is
    float32: which chips and versions of macOS have bfloat16 was not tested. float16 is never chosen: its largest
    number is 65,504, and gradients overflow.
    """
    device = resolve_device(device)
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0) if torch.version.hip is None else True
    else:
        fast = device.type == "cpu" and cpu_has_bfloat16()
    return torch.bfloat16 if fast else torch.float32


def cpu_has_bfloat16() -> bool:
    """Whether this CPU has instructions that multiply bfloat16 (AVX512-BF16 or AMX on x86, BF16 on ARM).

    oneDNN's ``_is_mkldnn_bf16_supported`` is no substitute: on x86 it is true for every AVX-512 CPU, even where
    bfloat16 is emulated.
    """
    flags = _cpuinfo_flags()
    if not flags:  # not Linux
        capabilities = getattr(torch.cpu, "get_capabilities", None)  # not in older versions
        flags = {name for name, has in capabilities().items() if has is True} if capabilities is not None else set()
    return not flags.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


def _cpuinfo_flags() -> set[str]:
    for line in _text(ROOT / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):  # x86 and ARM; equal for all cores
            return set(value.split())
    return set()


def gpu_count() -> int:
    """The number of CUDA devices."""
    return torch.cuda.device_count()


def usable_cpus() -> int:
    """The number of CPUs this process can use, within its affinity and its container's CPU quota.

    A container with a quota of two CPUs still sees every core of the host; with a thread per core the threads wait for
    each other. A quota of 1.5 counts as 1: a second thread would stall half of the time, and the first with it.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS and Windows
    cpus = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    for folder in _control_groups("cpu"):
        quota, _, period = _text(folder / "cpu.max").partition(" ")  # version 2, as "150000 100000" or "max 100000"
        if not period:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")  # version 1
        share, length = _number(quota), _number(period)
        if share is not None and length is not None and share > 0 and length > 0:  # -1 is no limit
            cpus = min(cpus, share // length)
    return max(1, cpus)


def set_threads() -> int:
    """Lower torch's number of CPU threads to `usable_cpus` if it is higher, and return it.

    The processes of a run on one machine (torchrun's LOCAL_WORLD_SIZE) share the CPUs.
    It is never raised above what OMP_NUM_THREADS or torch.set_num_threads chose. This changes the whole process: a
    training run and the command line call it, loading a model does not.
    """
    processes = _number(os.environ.get("LOCAL_WORLD_SIZE", "")) or 1
    cpus = max(1, usable_cpus() // max(1, processes))
    if torch.get_num_threads() > cpus:
        torch.set_num_threads(cpus)
    return torch.get_num_threads()


def free_memory(device: str | torch.device = "auto") -> int:
    """The bytes that can still be allocated on a device.

    On CUDA: the driver's free memory plus what torch's allocator has reserved but not in use. On the CPU under Linux:
    the memory available without swapping, within the container's limits. Elsewhere half of the physical memory, or
    `UNKNOWN_MEMORY` on Windows: the standard library does not report free memory.
    """
    device = resolve_device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "mps":
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    available = _table(ROOT / "proc/meminfo").get("MemAvailable")  # in kB
    if available is None:
        if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
            return UNKNOWN_MEMORY
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    free = available * 1024
    for folder in _control_groups("memory"):
        for limit_file, used_file, cache in MEMORY_FILES:
            limit, used = _number(_text(folder / limit_file)), _number(_text(folder / used_file))
            if limit is not None and used is not None:
                # The page cache counts as used, but is reclaimed when needed.
                free = min(free, limit - used + _table(folder / "memory.stat").get(cache, 0))
    return max(0, free)


def _control_groups(controller: str) -> Iterator[Path]:
    """The folders of this process's control group and its parents, for one controller, in versions 1 and 2.

    In a container the kernel may report the host's path of the group while only the container's folder is mounted; then
    the parents, up to the mount itself, still exist.
    """
    mounts = ROOT / "sys/fs/cgroup"
    for line in _text(ROOT / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number == "0" and not controllers:
            top = mounts / "unified" if (mounts / "unified").is_dir() else mounts
        elif controller in controllers.split(","):
            top = next((m for m in (mounts / controllers, mounts / controller) if m.is_dir()), mounts / controller)
        else:
            continue
        below = Path(group.lstrip("/"))
        yield from (top / part for part in (below, *below.parents) if ".." not in part.parts)


def _table(path: Path) -> dict[str, int]:
    """The first number of each line by the word before it, as in /proc/meminfo and memory.stat."""
    rows = [line.split() for line in _text(path).splitlines()]
    return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:  # "max", or a missing file
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
