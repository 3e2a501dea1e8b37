"""A run that is killed at any point of a save resumes from a complete checkpoint, to the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from groupwise.rundir import RunDir, read_json, verify_manifest
from groupwise.training.store import checkpoint
from tests.faults import crash_loop
from tests.weights import wordllama

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> tuple[Path, list[str]]:
    """A folder with ``killed-1``, ``killed-2``, …, and the operation at which each process was killed."""
    base = tmp_path_factory.mktemp("kill") / "base"
    return base, [point for _, point in crash_loop.killed_runs("full", 2, base)]


def test_killed_at_every_point(killed):
    base, points = killed
    kinds = {point.split()[0] for point in points}
    assert kinds == {"open", "fsync", "save_file", "os.rename", "os.mkdir", "os.remove", "os.rmdir"}
    chosen = []
    for number, point in enumerate(points, start=1):
        with RunDir.resume(base / f"killed-{number}") as run:
            newest = checkpoint.newest(run)
            assert newest is not None, point
            verify_manifest(newest)
            chosen.append(checkpoint.read_state(newest)["step"])
            assert newest.name == f"checkpoint-{chosen[-1]}"
            # Every folder with a checkpoint's name is complete, and best.json names an existing one.
            for folder in run.path.glob("checkpoint-*"):
                verify_manifest(folder)
            best = read_json(run.path / "best.json")
            verify_manifest(run.path / best["checkpoint"])
            assert not list(run.path.rglob(".unfinished-*"))
    # First the old checkpoint, from some point on the new one.
    assert chosen == sorted(chosen)
    assert set(chosen) == {1, 2}
    assert chosen[points.index("os.rename checkpoint-1")] == 2


@pytest.mark.parametrize("kind", crash_loop.KINDS)
def test_killed_runs_resume_to_the_same_bits(kind, tmp_path):
    """A few of the kills of `make test-crash`, before and after the new checkpoint had its name."""
    if crash_loop.SIMILARITY in crash_loop.KINDS[kind]:
        wordllama()
    counts = crash_loop.crash_loop(kind, 5, tmp_path)
    assert counts.kills == 5
    assert counts.points > 80
    assert set(counts.from_step) == {1, 2}
