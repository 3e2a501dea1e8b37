"""Fit the constants of `groupwise plan` to measurements of one GPU, and compare its predictions with all of them.

python tools/fit_plan.py            # write groupwise/planning/constants.py from benchmarks/results/plan_h200.json
python tools/fit_plan.py --check    # exit status 1 if the constants would change; print predicted and measured times

Only measurements that are not marked ``validation`` are fitted: those of the 135M and the 0.5B shape with up to 512 new
tokens. Each constant multiplies a term of the cost model, so that a fit is a linear least-squares problem; what counts
is the relative error. A constant that multiplies an ideal time is at least 1, the others are not negative.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from groupwise.planning import constants, cost, memory
from groupwise.planning.cost import Device, Terms
from groupwise.planning.gpus import GPUS
from groupwise.planning.layouts import server_share
from groupwise.planning.shapes import SHAPES, ModelShape
from groupwise.planning.work import StepWork

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "benchmarks" / "results" / "plan_h200.json"
CONSTANTS = ROOT / "groupwise" / "planning" / "constants.py"
# Seconds of earlier runs on an H200 with other programs beside them (docs/performance.md): a complete step of the
# trainer and its parts, and the engine alone.
EARLIER = (
    ("step", "smollm2-135m", 16, 1.80),
    ("generation", "smollm2-135m", 16, 1.26),
    ("training", "smollm2-135m", 16, 0.52),
    ("generation", "smollm2-135m", 16, 1.23),
    ("step", "qwen2.5-0.5b", 16, 2.67),
    ("generation", "qwen2.5-0.5b", 16, 1.43),
    ("training", "qwen2.5-0.5b", 16, 1.19),
    ("generation", "qwen2.5-1.5b", 16, 2.35),
    ("generation", "qwen2.5-1.5b", 64, 6.88),
    ("generation", "qwen2.5-7b", 16, 4.92),
)
# The same for vLLM 0.26, as the sampler of all prompts × 16 samples at once.
SERVERS = (
    ("smollm2-135m", 16, 2.87),
    ("qwen2.5-0.5b", 16, 2.44),
    ("qwen2.5-1.5b", 16, 2.48),
    ("qwen2.5-1.5b", 64, 12.2),
    ("qwen2.5-7b", 16, 5.21),
)
AT_LEAST_ONE = ("products", "attention", "activations", "cache", "bytes")


class Comparison(NamedTuple):
    """A phase that was measured, and the terms that predict it."""

    phase: str
    shape: str
    work: str
    measured: float
    terms: Terms
    validation: bool

    @property
    def group(self) -> str:
        """The constants that it shares with other phases."""
        return "passes" if self.phase in ("prefill", "forward", "training") else self.phase

    @property
    def predicted(self) -> float:
        return sum(cost.seconds(self.group, self.terms).values())

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
    for row in report["measurements"]:
        if row["what"] == "limits":
            continue
        shape, name, validation = shape_of(row), row["shape"].removesuffix("-shape"), row["validation"]

        def compare(phase: str, measured: float, terms: Terms, row: Any = row) -> Comparison:
            return Comparison(phase, name, describe(row), measured, terms, validation)  # noqa: B023

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


class Total(NamedTuple):
    """A measured time that several phases make up, or a peak of memory."""

    what: str
    shape: str
    work: str
    measured: float
    predicted: float
    kind: str  # fitted, validation, or another run

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def totals(report: Mapping[str, Any]) -> Iterator[Total]:
    """Generation, training and complete steps, of this file and of earlier runs on an H200."""
    rows = list(comparisons(report))
    steps = {row.shape: [other for other in rows if not other.work and other.shape == row.shape] for row in rows}
    for shape, work in dict.fromkeys((row.shape, row.work) for row in rows if row.work):
        phases = {row.phase: row for row in rows if (row.shape, row.work) == (shape, work)}
        for what, names in (("generation", ("prefill", "decode")), ("training", ("training",))):
            parts = [phases[name] for name in names if name in phases]
            if what == "training":
                parts += steps[shape] if parts else []
            if parts:
                yield total_of(what, shape, work, parts)
        if {"decode", "training"} <= phases.keys():
            chosen = [phases["prefill"], phases["decode"], phases["training"], *steps[shape]]
            yield total_of("step", shape, work, chosen)
    device = device_of(report)
    for what, name, prompts, measured in EARLIER:
        shape, work = SHAPES[name], StepWork(prompts, 250, 16, 512, 512)
        predicted = 0.0
        if what != "training":
            predicted += sum(cost.seconds("decode", cost.decode_terms(shape, work, device)[0]).values())
            predicted += sum(cost.seconds("passes", cost.prefill_terms(shape, work, device)).values())
        if what != "generation":
            budget = memory.default_budget(shape, replace(GPUS["h200"], memory=report["memory"]))
            predicted += sum(cost.seconds("passes", cost.training_terms(shape, work, device, budget)).values())
            for phase, terms in (("optimizer", cost.optimizer_terms), ("sync", cost.sync_terms)):
                predicted += sum(cost.seconds(phase, terms(shape.parameters, device)).values())
        yield Total(what, name, f"{prompts} × 250 × 16 × 512", measured, predicted, "another run")


def server_totals() -> Iterator[Total]:
    """Generation by vLLM, as `groupwise plan` predicts it for a server on one H200."""
    for name, prompts, measured in SERVERS:
        work = StepWork(prompts, 250, 16, 512, 512, max_num_seqs=prompts * 16)
        cost_of_server = server_share(SHAPES[name], work, GPUS["h200"], 1, 1, False)
        predicted = sum(cost_of_server.seconds.values())
        yield Total("generation", name, f"{prompts} × 250 × 16 × 512", measured, predicted, "another run")


def total_of(what: str, shape: str, work: str, parts: Sequence[Comparison]) -> Total:
    sums = (sum(part.measured for part in parts), sum(part.predicted for part in parts))
    return Total(what, shape, work, *sums, "validation" if any(part.validation for part in parts) else "fitted")


def memory_totals(report: Mapping[str, Any]) -> Iterator[Total]:
    """Peaks of training, with weights, masters, gradients and optimizer."""
    for row, measured, counted, rest in memory_comparisons(report):
        kind = "checkpoints" if row.get("checkpointing") else "activations"
        peak = rest + constants.FITTED["memory"][kind] * counted
        name = row["shape"].removesuffix("-shape")
        mark = "validation" if row["validation"] else "fitted"
        yield Total("memory", name, describe(row), measured + rest, peak, mark)


def fit(rows: Sequence[Comparison]) -> dict[str, float]:
    """The constants with the least sum of squared relative errors.

    Where a phase takes as long as the slower of host and GPU, guess which of them that is for each measurement, fit the
    constants, and so on until the guess holds. It starts with the measurements that are the furthest from ideal.
    """
    names = list(rows[0].terms)
    matrix = np.array([[row.terms[name] / row.measured for name in names] for row in rows])
    least = np.array([1.0 if name in AT_LEAST_ONE else 0.0 for name in names])
    on_host = np.array([name in cost.HOST and rows[0].group == "passes" for name in names])
    if not on_host.any():
        return rounded(names, least_squares(matrix, least))
    order = np.argsort(matrix[:, names.index("products")])
    best, best_error = least, np.inf
    for count in range(len(rows)):
        host_bound = np.isin(np.arange(len(rows)), order[:count])
        for _ in range(8):
            found = least_squares(np.where(host_bound[:, None] == on_host, matrix, 0.0), least)
            host, device = (matrix * found * on_host).sum(1), (matrix * found * ~on_host).sum(1)
            host_bound = host > device
        if (error := ((np.maximum(host, device) - 1) ** 2).sum()) < best_error:
            best, best_error = found, error
    return rounded(names, best)


def rounded(names: Sequence[str], numbers: np.ndarray) -> dict[str, float]:
    return {name: float(f"{number:.4g}") for name, number in zip(names, numbers, strict=True)}


def least_squares(matrix: np.ndarray, least: np.ndarray) -> np.ndarray:
    """The numbers, none below ``least``, whose products with the rows are nearest to 1: tries every set of numbers that
    are at their least."""
    best, best_error = least, np.inf
    for free in itertools.product((False, True), repeat=len(least)):
        found, chosen = least.copy(), np.array(free)
        if chosen.any():
            target = 1 - matrix[:, ~chosen] @ least[~chosen]
            found[chosen] = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)[0]
        error = ((matrix @ found - 1) ** 2).sum()
        if (found >= least).all() and error < best_error:
            best, best_error = found, error
    return best


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
        tokens = work.packs(row["budget"]).largest
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
    for group in ("passes", "decode", "optimizer", "sync"):
        result[group] = fit([row for row in rows if row.group == group])
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
        times = f"{row.measured:9.4f}{row.predicted:9.4f}{row.error:+8.1%}  {mark}"
        print(f"{row.phase:11}{row.shape:14}{row.work:40}{times}")
    for total in (*totals(report), *memory_totals(report)):
        scale = 2**30 if total.what == "memory" else 1.0
        values = f"{total.measured / scale:9.3f}{total.predicted / scale:9.3f}{total.error:+8.1%}  {total.kind}"
        print(f"{total.what:11}{total.shape:14}{total.work:40}{values}")
    return 1 if changed and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
