"""A short form of `make soak`: what must stay the same from step to step does, as counts and not as times."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_nothing_grows_from_step_to_step(tmp_path):
    out = tmp_path / "soak.json"
    options = ["--steps", "40", "--rows", "300", "--every", "2", "--out"]
    command = [sys.executable, "benchmarks/soak.py", *options, str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    samples = json.loads(out.read_text())["samples"]
    assert [sample["step"] for sample in samples] == list(range(2, 41, 2))
    settled = samples[6:]  # after the first evaluations and checkpoints
    assert max(sample["checkpoints"] for sample in samples) <= 3  # the last two, and the best
    for name in ("files", "threads", "children"):
        assert len({sample[name] for sample in settled}) == 1, (name, done.stdout)
    objects = [sample["objects"] for sample in settled]
    assert max(objects) - min(objects) < 200  # of 430,000; a dict per step would be more than that with its entries
    states = [sample["state"] for sample in settled]
    grown = [after - before for before, after in pairwise(states)]
    assert max(grown) < 60 * 4 * 2  # bytes per visit, of four prompts in each of two steps
    metrics = [sample["metrics"] for sample in settled]
    assert max(after - before for before, after in pairwise(metrics)) < 3 * 3000  # two steps and an evaluation
