"""Fit the constants of `groupwise plan` to measurements of one GPU, and compare its predictions with all of them.

python tools/fit_plan.py            # write groupwise/planning/constants.py from benchmarks/results/plan_h200.json
python tools/fit_plan.py --check    # exit status 1 if the constants would change; print predicted and measured times

Only measurements that are not marked ``validation`` are fitted: those of the 135M and the 0.5B shape with up to 512 new
tokens. Each constant multiplies a term of the cost model, so that a fit is a linear least-squares problem; what counts
is the relative error. A constant that multiplies an ideal time is at least 1, the others are not negative.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from groupwise.planning import constants, cost, memory
from groupwise.planning.cost import Device, Terms
from groupwise.planning.gpus import GPUS
from groupwise.planning.shapes import SHAPES, ModelShape
from groupwise.planning.work import StepWork

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "benchmarks" / "results" / "plan_h200.json"
CONSTANTS = ROOT / "groupwise" / "planning" / "constants.py"
AT_LEAST_ONE = ("products", "cache", "bytes")


class Comparison(NamedTuple):
    """A phase that was measured, and the terms that predict it."""

    phase: str
    shape: str
    work: str
    measured: float
    terms: Terms
    validation: bool
    source: str

    @property
    def predicted(self) -> float:
        return sum(cost.seconds(self.phase, self.terms).values())

    @property
    def error(self) -> float:
        """Relative: 0.1 is 10 % too much."""
        return self.predicted / self.measured - 1


def read_report() -> dict[str, Any]:
    return dict(json.loads(MEASURED.read_text()))


def shape_of(row: Mapping[str, Any]) -> ModelShape:
    return SHAPES[row["shape"].removesuffix("-shape")]


def work_of(row: Mapping[str, Any]) -> StepWork:
    tokens = row["new_tokens"]
    return StepWork(
        row["prompts"],
        row["prompt_tokens"],
        row["samples"],
        tokens,
        tokens,
        checkpointing=row.get("checkpointing", False),
    )


def device_of(report: Mapping[str, Any]) -> Device:
    (limits,) = (row for row in report["measurements"] if row["what"] == "limits")
    return Device(limits["product"], limits["copy"])


def describe(row: Mapping[str, Any]) -> str:
    if "prompts" not in row:
        return ""
    work = " × ".join(str(row[name]) for name in ("prompts", "prompt_tokens", "samples", "new_tokens"))
    extra = ", checkpointing" if row.get("checkpointing") else ""
    return work + (extra or (f", packs of {row['budget']:,}" if row.get("small_budget") else ""))


def comparisons(report: Mapping[str, Any], device: Device | None = None) -> Iterator[Comparison]:
    """Every time that was measured, phase by phase."""
    device = device or device_of(report)
    source = "plan_constants.py"
    for row in report["measurements"]:
        if row["what"] == "limits":
            continue
        shape, name, validation = shape_of(row), row["shape"].removesuffix("-shape"), row["validation"]

        def compare(phase: str, measured: float, terms: Terms, row: Any = row) -> Comparison:
            return Comparison(phase, name, describe(row), measured, terms, validation, source)  # noqa: B023

        if row["what"] == "step":
            yield compare("optimizer", row["optimizer"], cost.optimizer_terms(row["parameters"], device))
            yield compare("sync", row["sync"], cost.sync_terms(row["parameters"], device))
            continue
        work = work_of(row)
        if row["what"] == "generation":
            decode, _ = cost.decode_terms(shape, work, device, row["rows"])
            yield compare("prefill", row["prefill"], cost.prefill_terms(shape, work, device))
            yield compare("decode", row["generate"] - row["prefill"], decode)
        else:
            budget = row["budget"]
            yield compare("training", row["forward_backward"], cost.training_terms(shape, work, device, budget))
            if row["forward"] is not None:
                terms = cost.training_terms(shape, work, device, budget, backward=False)
                yield compare("forward", row["forward"], terms)


def fit(rows: Sequence[Comparison]) -> dict[str, float]:
    """The constants with the least sum of squared relative errors."""
    names = list(rows[0].terms)
    matrix = np.array([[row.terms[name] / row.measured for name in names] for row in rows])
    least = np.array([1.0 if name in AT_LEAST_ONE else 0.0 for name in names])
    found = least.copy()
    for _ in range(20000):  # coordinate descent; each coordinate has its best value, or its least one
        for index in range(len(names)):
            column = matrix[:, index]
            rest = 1 - matrix @ found + column * found[index]
            square = column @ column
            found[index] = max(least[index], column @ rest / square) if square else least[index]
    return {name: float(f"{value:.4g}") for name, value in zip(names, found, strict=True)}


def memory_comparisons(report: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], float, float, float]]:
    """For each training measurement: its row, the measured activations, the counted ones, and the rest of the peak.

    What is held before a pass (weights, masters, AdamW) is measured, and the gradients are subtracted.
    """
    weights = {row["shape"]: row for row in report["measurements"] if row["what"] == "step"}
    for row in report["measurements"]:
        if row["what"] != "training" or not row["peak"]:
            continue
        shape, step, work = shape_of(row), weights[row["shape"]], work_of(row)
        held = step["weight_bytes"] + step["master_bytes"] + step["adam_bytes"] + 4 * step["parameters"]
        rest = held + memory.logits_bytes(shape)
        tokens = min(row["budget"], work.packed_tokens)
        per_token = shape.activation_bytes
        if work.checkpointing:
            per_token = shape.checkpoint_bytes + 2 * shape.activation_bytes / shape.layers
        yield row, row["peak"] - rest, per_token * tokens, rest


def fit_memory(report: Mapping[str, Any]) -> dict[str, float]:
    factors: dict[str, float] = {}
    for name, checkpointing in (("activations", False), ("checkpoints", True)):
        pairs = [
            (measured / (measured + rest), counted / (measured + rest))
            for row, measured, counted, rest in memory_comparisons(report)
            if not row["validation"] and bool(row.get("checkpointing")) == checkpointing
        ]
        factors[name] = float(f"{sum(m * c for m, c in pairs) / sum(c * c for _, c in pairs):.4g}")
    return factors


def fitted(report: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    peaks, device = GPUS["h200"], device_of(report)
    shares = {"flops": device.flops / peaks.flops, "bandwidth": device.bandwidth / peaks.bandwidth}
    result = {"device": {name: float(f"{share:.4g}") for name, share in shares.items()}}
    rows = [row for row in comparisons(report) if not row.validation]
    for phase in ("prefill", "decode", "training", "forward", "optimizer", "sync"):
        result[phase] = fit([row for row in rows if row.phase == phase])
    return result | {"memory": fit_memory(report)}


def source_of(values: Mapping[str, Mapping[str, float]]) -> str:
    head = CONSTANTS.read_text().split("FITTED")[0]
    lines = [f'    "{phase}": {json.dumps(dict(numbers))},' for phase, numbers in values.items()]
    return "\n".join([f"{head}FITTED: dict[str, dict[str, float]] = {{", *lines, "}"]) + "\n"


def main() -> int:
    report = read_report()
    values = fitted(report)
    changed = values != constants.FITTED
    if changed and "--check" not in sys.argv:
        CONSTANTS.write_text(source_of(values))
        print(f"wrote {CONSTANTS.relative_to(ROOT)}")
    constants.FITTED.update(values)
    for row in comparisons(report):
        mark = "validation" if row.validation else "fitted"
        line = (
            f"{row.phase:10}{row.shape:14}{row.work:38}{row.measured:9.4f}{row.predicted:9.4f}{row.error:+8.1%}  {mark}"
        )
        print(line)
    for case, measured, counted, rest in memory_comparisons(report):
        kind = "checkpoints" if case.get("checkpointing") else "activations"
        predicted = rest + constants.FITTED["memory"][kind] * counted
        total = measured + rest
        print(
            f"memory    {case['shape']:20}{describe(case):38}{total / 2**30:7.1f}{predicted / 2**30:7.1f}{predicted / total - 1:+8.1%}"
        )
    return 1 if changed and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
