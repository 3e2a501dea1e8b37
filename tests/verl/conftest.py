"""Tests with the real verl: `make test-verl`, in a separate environment, since verl pins an older transformers.

Without verl nothing here is collected.
"""

from __future__ import annotations

import importlib.util
import os
import secrets

import pytest

HAS_VERL = importlib.util.find_spec("verl") is not None
collect_ignore_glob = [] if HAS_VERL else ["*.py"]

# No usage statistics, and a random auth token.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def pytest_configure(config):
    if HAS_VERL:  # verl warns about engines that are not installed; only warnings of groupwise are errors
        config.addinivalue_line("filterwarnings", "ignore")
        config.addinivalue_line("filterwarnings", "error:::groupwise")


@pytest.fixture(scope="session")
def ray_cluster():
    """A Ray with two (pretended) GPUs."""
    import ray

    ray.init(num_cpus=16, num_gpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="session")
def queue(ray_cluster):
    """verl's real TransferQueue, with one unit of storage."""
    import transfer_queue

    from tests.verl.common import compose

    transfer_queue.init(compose().transfer_queue)
    yield transfer_queue
    transfer_queue.close()
