"""A CPU platform for verl, in place of CUDA and vLLM.

Every process of a run imports this (VERL_USE_EXTERNAL_MODULES); VERL_PLATFORM=cpu selects it.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import ModuleType

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplicaRegistry


class CpuModule(ModuleType):
    """torch.cpu, with stubs for the functions of torch.cuda."""

    def mem_get_info(self, *_):
        return 1, 1

    def get_device_name(self, *_):
        return "CPU"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name, lambda *_, **__: 0)


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = CpuModule("cpu")

    def is_available(self):
        return True

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    def set_device(self, device_index): ...

    def synchronize(self, device_index=None): ...

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings): ...

    def empty_cache(self): ...

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg):
        yield

    def profiler_start(self): ...

    def profiler_stop(self): ...

    def ray_resource_name(self):
        return "GPU"

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False

    def cudart(self): ...


def _replica():
    from tests.verl.cpu_rollout import CpuReplica

    return CpuReplica


def _one_gloo(backend=None, init=torch.distributed.init_process_group, **others):
    """verl names a backend for the CPU and for the device, which are the same here; torch accepts it only once."""
    return init(backend="gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **others)


torch.distributed.init_process_group = _one_gloo
RolloutReplicaRegistry.register("cpu", _replica)
base._ROLLOUT_REGISTRY["cpu", "async"] = "tests.verl.cpu_rollout.CpuRollout"
