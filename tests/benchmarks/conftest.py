"""The benchmarks are scripts that import each other by name, as Python finds them when it runs one."""

from __future__ import annotations

import sys
from pathlib import Path

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
if BENCHMARKS not in sys.path:
    sys.path.append(BENCHMARKS)
