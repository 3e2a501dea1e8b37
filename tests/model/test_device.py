"""Devices by name, dtype by device, and the CPUs and memory of a container."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from groupwise.errors import InputError, is_out_of_memory
from groupwise.generate.engine import _can_capture
from groupwise.model import device as dev
from groupwise.model.device import (
    compute_dtype,
    cpu_has_bfloat16,
    float64_device,
    free_memory,
    resolve_device,
    resolve_dtype,
    set_threads,
    usable_cpus,
)
from groupwise.model.packing import CPU_TOKENS, default_token_budget

CPU, MPS = torch.device("cpu"), torch.device("mps")
GIB = 2**30


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A fake machine with 64 CPUs; machine(path, text) writes one of its files."""
    monkeypatch.setattr(dev, "ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)

    def write(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    return write


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_the_cpu(device):
    assert resolve_device(device) == CPU


@pytest.mark.parametrize(
    ("cuda", "mps", "device"),
    [(False, False, "cpu"), (False, True, "mps"), (True, False, "cuda:1"), (True, True, "cuda:1")],
)
def test_auto_is_cuda_then_mps_then_the_cpu(two_gpus, monkeypatch, cuda, mps, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert resolve_device() == resolve_device("auto") == torch.device(device)


def test_a_mac_computes_in_float32_on_plain_operations(monkeypatch):
    """What MPS does not have is not tried. Nothing here runs on a Mac: the device is only a name."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert compute_dtype() == resolve_dtype("auto", MPS) == torch.float32
    assert resolve_dtype("bfloat16", MPS) == torch.bfloat16
    with pytest.raises(InputError, match=r"mps has no float64; use float32 \(model.dtype\), or the device 'cpu'"):
        resolve_dtype("float64", MPS)
    with pytest.raises(InputError, match="mps has no float64"):
        resolve_dtype(torch.float64, MPS)
    assert float64_device(MPS) == CPU
    assert float64_device(CPU) == CPU
    handle = SimpleNamespace(device=MPS, dtype=torch.float32)
    assert not _can_capture(handle)
    assert default_token_budget(handle) == CPU_TOKENS
    assert is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB, …)"))


def test_mps_without_a_mac(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(InputError, match="finds no Apple GPU; use 'cpu'"):
        resolve_device("mps")


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "", None, 1.5])
def test_an_unknown_device(device):
    with pytest.raises(InputError, match="unknown device"):
        resolve_device(device)


def test_an_unsupported_device():
    with pytest.raises(InputError, match="'meta' is not supported"):
        resolve_device("meta")


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_cuda_without_cuda():
    with pytest.raises(InputError, match=r"'cuda' was requested, but this torch .* was built without CUDA.*use 'cpu'"):
        resolve_device("cuda")


def test_cuda_that_is_hidden(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(InputError, match=r"finds no CUDA device \(CUDA_VISIBLE_DEVICES is ''\)"):
        resolve_device("cuda")


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.version, "hip", None)


def test_cuda_devices_have_numbers(two_gpus):
    assert resolve_device("cuda") == torch.device("cuda:1")
    assert resolve_device("auto") == torch.device("cuda:1")
    assert resolve_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(InputError, match=r"'cuda:2' was requested, but there are only 2: cuda:0 to 1"):
        resolve_device("cuda:2")


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), torch.float32), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)]
)
def test_precision_of_a_gpu(two_gpus, monkeypatch, capability, dtype):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert compute_dtype("cuda") == dtype


@pytest.mark.parametrize(
    ("line", "has"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512bw avx512dq avx512vl", False),  # AVX-512 alone emulates it
        ("flags\t\t: fpu avx2 avx512f avx512_bf16", True),
        ("flags\t\t: fpu avx2 amx_bf16 amx_tile", True),
        ("Features\t: fp asimd asimdhp asimddp", False),
        ("Features\t: fp asimd i8mm bf16", True),
    ],
)
def test_precision_of_a_cpu(machine, line, has):
    machine("proc/cpuinfo", f"processor\t: 0\n{line}\nprocessor\t: 1\n{line}")
    assert cpu_has_bfloat16() is has
    assert compute_dtype("cpu") == (torch.bfloat16 if has else torch.float32)


@pytest.mark.parametrize(("capabilities", "has"), [({"bf16": True}, True), ({"bf16": False, "neon": True}, False)])
def test_precision_where_there_is_no_cpuinfo(machine, monkeypatch, capabilities, has):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert cpu_has_bfloat16() is has


def test_precision_is_that_of_this_cpu():
    if hasattr(torch.cpu, "get_capabilities"):  # must agree with torch
        capabilities = torch.cpu.get_capabilities()
        assert cpu_has_bfloat16() == any(capabilities.get(name, False) for name in ("bf16", "avx512_bf16", "amx_bf16"))


def test_dtypes_by_name():
    assert resolve_dtype("bfloat16", CPU) == resolve_dtype(torch.bfloat16, CPU) == torch.bfloat16
    assert resolve_dtype("float64", CPU) == torch.float64
    assert resolve_dtype("auto", CPU) == compute_dtype(CPU)


@pytest.mark.parametrize("dtype", ["bf16", torch.int8, None, 32])
def test_an_unknown_dtype(dtype):
    with pytest.raises(InputError, match=r"unknown dtype .*'bfloat16'"):
        resolve_dtype(dtype, CPU)


def test_no_container(machine):
    assert usable_cpus() == 64


@pytest.mark.parametrize(
    ("quota", "cpus"), [("max 100000", 64), ("400000 100000", 4), ("150000 100000", 1), ("1000 100000", 1)]
)
def test_a_quota_of_version_2(machine, quota, cpus):
    machine("proc/self/cgroup", "0::/")
    machine("sys/fs/cgroup/cpu.max", quota)
    assert usable_cpus() == cpus


def test_a_quota_of_a_parent_group(machine):
    machine("proc/self/cgroup", "0::/system.slice/run.scope")
    machine("sys/fs/cgroup/system.slice/run.scope/cpu.max", "max 100000")
    machine("sys/fs/cgroup/system.slice/cpu.max", "800000 100000")
    assert usable_cpus() == 8


@pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize(("quota", "cpus"), [("-1", 64), ("200000", 2)])
def test_a_quota_of_version_1(machine, folder, quota, cpus):
    machine("proc/self/cgroup", "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc")
    machine(f"sys/fs/cgroup/{folder}/cpu.cfs_quota_us", quota)  # mounted as the container's root
    machine(f"sys/fs/cgroup/{folder}/cpu.cfs_period_us", "100000")
    assert usable_cpus() == cpus


def test_affinity_is_the_lower_limit(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    machine("proc/self/cgroup", "0::/")
    machine("sys/fs/cgroup/cpu.max", "400000 100000")
    assert usable_cpus() == 2


def test_without_affinity(machine, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cpus() == os.cpu_count()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_a_process_that_is_pinned_to_one_cpu():
    code = (
        "import os, torch; torch.set_num_threads(8); os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from groupwise.model.device import set_threads, usable_cpus\n"
        "print(usable_cpus(), set_threads(), torch.get_num_threads())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1", "1"]


def test_threads_are_lowered_and_never_raised(machine):
    machine("proc/self/cgroup", "0::/")
    machine("sys/fs/cgroup/cpu.max", "300000 100000")
    torch.set_num_threads(16)
    assert set_threads() == torch.get_num_threads() == 3
    torch.set_num_threads(2)
    assert set_threads() == torch.get_num_threads() == 2


def test_memory_without_a_limit(machine):
    machine("proc/meminfo", f"MemTotal: {16 * 2**20} kB\nMemFree: {2**20} kB\nMemAvailable: {12 * 2**20} kB")
    assert free_memory("cpu") == 12 * GIB


def test_memory_within_a_limit_of_version_2(machine):
    machine("proc/meminfo", f"MemAvailable: {12 * 2**20} kB")
    machine("proc/self/cgroup", "0::/a/b")
    machine("sys/fs/cgroup/a/b/memory.max", "max")
    machine("sys/fs/cgroup/a/b/memory.current", GIB)
    machine("sys/fs/cgroup/a/memory.max", 4 * GIB)
    machine("sys/fs/cgroup/a/memory.current", 3 * GIB)
    machine("sys/fs/cgroup/a/memory.stat", f"anon {2 * GIB}\nfile {GIB}\ninactive_file {GIB // 2}")
    assert free_memory("cpu") == 1.5 * GIB


def test_memory_within_a_limit_of_version_1(machine):
    machine("proc/meminfo", f"MemAvailable: {12 * 2**20} kB")
    machine("proc/self/cgroup", "4:memory:/docker/abc")
    machine("sys/fs/cgroup/memory/memory.limit_in_bytes", 8 * GIB)
    machine("sys/fs/cgroup/memory/memory.usage_in_bytes", 9 * GIB // 2)
    machine("sys/fs/cgroup/memory/memory.stat", f"inactive_file 1\ntotal_inactive_file {GIB}")
    assert free_memory("cpu") == 4.5 * GIB


def test_version_1_without_a_limit(machine):
    machine("proc/meminfo", f"MemAvailable: {12 * 2**20} kB")
    machine("proc/self/cgroup", "4:memory:/")
    machine("sys/fs/cgroup/memory/memory.limit_in_bytes", 9223372036854771712)  # "no limit" in version 1
    machine("sys/fs/cgroup/memory/memory.usage_in_bytes", GIB)
    assert free_memory("cpu") == 12 * GIB


def test_no_memory_left(machine):
    machine("proc/meminfo", f"MemAvailable: {12 * 2**20} kB")
    machine("proc/self/cgroup", "0::/")
    machine("sys/fs/cgroup/memory.max", GIB)
    machine("sys/fs/cgroup/memory.current", GIB + 4096)
    assert free_memory("cpu") == 0


def test_memory_on_other_systems(machine, monkeypatch):
    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    assert free_memory("cpu") == half
    monkeypatch.setattr(os, "sysconf_names", {})
    assert free_memory("cpu") == dev.UNKNOWN_MEMORY


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc/meminfo")
def test_memory_of_this_machine():
    assert 2**20 < free_memory("cpu") <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_memory_of_a_gpu(two_gpus, monkeypatch):
    """Memory that torch has reserved but does not use counts as free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 25 * GIB)
    assert free_memory("cuda") == 15 * GIB
