"""Grouping in Ray workers equals grouping in this process, on an existing Ray and on a local one."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import psutil
import pytest
import ray
import torch

from groupwise.config import GroupingSection
from groupwise.errors import CheckpointError, ConfigError, InputError
from groupwise.grouping import connection, workers
from groupwise.grouping.grouper import GroupingResult, LocalGrouper
from groupwise.grouping.workers import RayGrouper, SimilarityGrouperWorker, make_grouper
from groupwise.model.weights import cache_folder
from tests.weights import wordllama

ROOT = Path(__file__).parents[2]
FIELDS = tuple(field.name for field in fields(GroupingResult))
SUBJECTS = ("the cat on the stove", "a galaxy of stars", "plum jam and bread", "the ship in the harbour")
TEXTS = [
    [f"{SUBJECTS[answer * prompt % 4]}, {'again ' * (answer % 3)}and number {prompt}" for answer in range(6)]
    for prompt in range(1, 8)
]


def settings_with(**changes: object) -> GroupingSection:
    return GroupingSection(embedder=str(wordllama()), levels=3, **changes)


def check_same(ours: GroupingResult, expected: GroupingResult) -> None:
    for name in FIELDS:
        assert torch.equal(getattr(ours, name), getattr(expected, name)), name


@pytest.fixture(scope="module")
def expected() -> GroupingResult:
    result = LocalGrouper(settings_with()).group(TEXTS)
    assert len(result.labels[..., 0].unique()) > 1
    return result


def fail(text: str) -> None:
    raise AssertionError(f"unexpected message: {text}")


def test_in_this_process_by_default(expected):
    with make_grouper(settings_with(workers=0), fail) as grouper:
        assert isinstance(grouper, LocalGrouper)
        check_same(grouper.group(TEXTS), expected)
    assert isinstance(make_grouper(settings_with(device="cpu"), fail), LocalGrouper)


@pytest.mark.parametrize(
    ("gpus", "device", "number"),
    [(0, "auto", 0), (1, "auto", 0), (2, "auto", 2), (9, "auto", 8), (4, "cuda", 4), (4, "cpu", 0), (4, "cuda:1", 0)],
)
def test_default_number_of_workers(monkeypatch, gpus, device, number):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert workers._worker_count(GroupingSection(device=device)) == number
    assert workers._worker_count(GroupingSection(device=device, workers=3)) == 3


def test_without_ray_grouping_is_local(monkeypatch, expected):
    monkeypatch.setitem(sys.modules, "ray", None)
    said = []
    with make_grouper(settings_with(workers=2), said.append) as grouper:
        check_same(grouper.group(TEXTS), expected)
    assert len(said) == 1
    assert "pip install 'groupwise[ray]'" in said[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ray_host": "203.0.113.7"}, "'203.0.113.7', which is not an address of this machine; use 127.0.0.1"),
        ({"ray_host": "0.0.0.0"}, "address at which other machines reach this one"),
        ({"ray_host": "no..host"}, "'no..host', which is not an address of this machine"),
        ({"ray_address": "127.0.0.1:1"}, "Ray cluster at 127.0.0.1:1: .*refused"),
        ({"ray_address": "nonsense"}, "Ray cluster at nonsense: Invalid address format"),
    ],
)
def test_unusable_addresses(changes, message):
    with pytest.raises(ConfigError, match=message):
        RayGrouper(settings_with(**changes), 1, fail)
    assert not ray.is_initialized()


def test_unknown_embedder_fails_before_ray_starts():
    with pytest.raises(ConfigError, match="wordllama"):
        make_grouper(GroupingSection(embedder="wordlama", workers=1), fail)
    assert not ray.is_initialized()


@pytest.fixture(scope="module")
def existing() -> Iterator[str]:
    """The address of a running Ray with one (pretended) GPU."""
    handler = signal.getsignal(signal.SIGTERM)
    connection.prepare_environment()
    folder = tempfile.mkdtemp(dir="/tmp")  # a socket path must be short
    with connection.loopback_only(True):
        context = ray.init(
            "local",
            num_cpus=1,
            num_gpus=1,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=100_000_000,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
    yield context.address_info["address"]
    ray.shutdown()
    signal.signal(signal.SIGTERM, handler)
    shutil.rmtree(folder, ignore_errors=True)


def gone(pid: int) -> bool:
    """Whether a process has ended, or ends soon."""
    try:
        psutil.Process(pid).wait(30)
    except psutil.NoSuchProcess:
        pass
    except psutil.TimeoutExpired:
        return False
    return True


def test_results_do_not_depend_on_the_number_of_workers(existing, expected):
    """Two workers share one GPU, half of it each. The existing Ray keeps running."""
    said = []
    with make_grouper(settings_with(workers=2), said.append) as grouper:
        check_same(grouper.group(TEXTS), expected)
        first_two = GroupingResult(*(getattr(expected, name)[:2] for name in FIELDS))
        check_same(grouper.group(TEXTS[:2]), first_two)
        with pytest.raises(InputError, match=r"texts\[6\] has 1 answers and texts\[0\] has 6"):
            grouper.group([*TEXTS[:6], ["alone"]])
        pids = list(grouper.pids)
        assert len(set(pids)) == 2
        assert os.getpid() not in pids
    assert all(gone(pid) for pid in pids)
    assert said == [
        "[RayPPOTrainer] Creating 2 similarity grouper workers...",
        f"[SimilarityGrouperWorker] Loading model: {wordllama()}",
    ]
    assert ray.is_initialized()
    assert ray.cluster_resources()["GPU"] == 1
    grouper.close()
    with pytest.raises(InputError, match="this grouper is closed"):
        grouper.group(TEXTS)


@pytest.mark.slow
def test_ray_address_is_joined_and_left_running(existing, expected):
    code = (
        "import json, sys, ray\n"
        "from tests.grouping.test_workers import TEXTS, settings_with, make_grouper\n"
        "with make_grouper(settings_with(workers=1, ray_address=sys.argv[1]), lambda text: None) as grouper:\n"
        "    print(json.dumps([ray.get_runtime_context().gcs_address, grouper.group(TEXTS).labels.tolist()]))\n"
        "assert not ray.is_initialized()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, existing],
        cwd=ROOT,
        # Otherwise Ray replaces 127.0.0.1 by the network address.
        env={**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [existing, expected.labels.tolist()]
    assert ray.cluster_resources()["GPU"] == 1


@pytest.mark.slow
def test_errors_in_a_worker_keep_their_type(existing, tmp_path):
    for name in ("l2_supercat_256.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("damaged")
    with pytest.raises(CheckpointError, match=r"could not be loaded: .*; get it again") as caught:
        make_grouper(GroupingSection(embedder=str(tmp_path), workers=1), lambda text: None)
    assert type(caught.value) is CheckpointError
    assert ray.is_initialized()


@pytest.mark.slow
def test_no_free_gpu(existing):
    @ray.remote(num_cpus=0, num_gpus=1)
    class Greedy:
        def ready(self) -> bool:
            return True

    greedy = Greedy.remote()
    assert ray.get(greedy.ready.remote())
    with pytest.raises(ConfigError, match=r"no worker within 0\.5 seconds; lower grouping\.workers"):
        RayGrouper(settings_with(), 2, lambda text: None, start_timeout=0.5)
    ray.kill(greedy)


@pytest.mark.slow
def test_similarity_grouper_worker_as_ray_actor(existing, expected):
    actor = ray.remote(SimilarityGrouperWorker).options(num_cpus=0).remote(str(wordllama()), GroupingSection(levels=3))
    check_same(ray.get(actor.group.remote(TEXTS)), expected)
    ray.kill(actor)


def test_similarity_grouper_worker_logs_what_it_loads(caplog):
    with caplog.at_level(logging.INFO, "groupwise"):
        SimilarityGrouperWorker(model_name=str(wordllama()))
    assert f"loading {wordllama()}" in caplog.messages


# A process with a local Ray and with signal handlers, like a training run.
DRIVER = """
import json, signal, time
import torch
from groupwise.grouping.workers import make_grouper
from tests.grouping.test_workers import TEXTS, settings_with

heard = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: heard.append(signal.Signals(number).name))
grouper = make_grouper(settings_with(workers=1), lambda text: None)
first = grouper.group(TEXTS)
print(json.dumps([grouper._connection._folder, *grouper.pids]), flush=True)
until = time.monotonic() + 600
while len(heard) < 2 and time.monotonic() < until:
    time.sleep(0.01)
second = grouper.group(TEXTS)
print(json.dumps([sorted(heard), grouper.restarts, torch.equal(first.centres, second.centres)]), flush=True)
time.sleep(3600)
"""


@pytest.mark.slow
def test_local_ray_listens_on_loopback_and_ends_with_the_run(tmp_path):
    """The run's handlers get SIGINT and SIGTERM, and its workers continue."""
    wordllama()
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(tmp_path), "GROUPWISE_CACHE": str(cache_folder())},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    family, folder = [], None
    try:
        line = process.stdout.readline()
        assert line, process.communicate()
        folder, *pids = json.loads(line)
        driver = psutil.Process(process.pid)
        family = [driver, *driver.children(recursive=True)]
        names = {child.pid: child.name() for child in family}
        assert {child.pid for child in family} > set(pids)
        listening = {
            connection.laddr.ip
            for member in family
            for connection in member.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening
        addresses = [ipaddress.ip_address(ip) for ip in listening]
        assert all((getattr(ip, "ipv4_mapped", None) or ip).is_loopback for ip in addresses), listening
        os.killpg(process.pid, signal.SIGINT)
        os.kill(process.pid, signal.SIGTERM)
        assert json.loads(process.stdout.readline()) == [["SIGINT", "SIGTERM"], 0, True]
        process.kill()
        # Ray's agents wait up to a minute for the other processes to return.
        children = [child for child in family[1:] if not names[child.pid].endswith("Agent")]
        assert len(children) >= 4
        assert psutil.wait_procs(children, timeout=600)[1] == []
        assert not (tmp_path / ".ray").exists()
    finally:
        process.kill()
        process.communicate()
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
