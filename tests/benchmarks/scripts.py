"""Runs a benchmark as a user does, with or without the stand-in for vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
STAND_IN = Path(__file__).parent / "stand_in"


def run_script(name: str, *options: str, stand_in: bool = False, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), *([str(STAND_IN)] if stand_in else [])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, str(ROOT / "benchmarks" / name), "--device", "cpu", *options]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
