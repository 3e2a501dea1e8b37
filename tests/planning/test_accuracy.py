"""The plan's predictions against every measurement that there is; constants are fitted to the small shapes only."""

from __future__ import annotations

import pytest

from groupwise.planning import constants, memory
from groupwise.planning.gpus import GPUS
from tools import fit_plan

REPORT = fit_plan.read_report()
COMPARISONS = list(fit_plan.comparisons(REPORT))
TOTALS = [*fit_plan.totals(REPORT), *fit_plan.memory_totals(REPORT), *fit_plan.server_totals()]


def name_of(case):
    return "-".join(str(part) for part in case[:3]).replace(" ", "")


def test_the_constants_are_those_of_the_fit():
    assert fit_plan.fitted(REPORT) == constants.FITTED


def test_the_fit_has_not_seen_the_larger_model_or_longer_answers():
    fitted = [row for row in REPORT["measurements"] if row["what"] != "limits" and not row["validation"]]
    assert {row["shape"] for row in fitted} == {"smollm2-135m-shape", "qwen2.5-0.5b-shape"}
    assert max(row.get("new_tokens", 0) for row in fitted) == 512
    changed = {**REPORT, "measurements": [_slower(row) for row in REPORT["measurements"]]}
    assert fit_plan.fitted(changed) == constants.FITTED


def _slower(row):
    """A validation measurement with other numbers."""
    numbers = ("generate", "prefill", "forward_backward", "forward", "optimizer", "sync", "peak")
    if not row.get("validation"):
        return row
    return row | {name: 3 * row[name] for name in numbers if row.get(name)}


@pytest.mark.parametrize("total", TOTALS, ids=name_of)
def test_generation_training_steps_and_memory_within_20_percent(total):
    # The 135M shape's smallest batch, which is launched by the host in 0.1 s, is 24 % off in the fit itself.
    limit = 0.25 if total.kind == "fitted" and total.measured < 0.2 else 0.20
    assert abs(total.error) < limit


@pytest.mark.parametrize("row", [row for row in COMPARISONS if row.validation], ids=name_of)
def test_each_phase_of_the_larger_model_and_of_longer_answers(row):
    # A prefill of some 30 ms is launched by the host, whose time varies by half between equal calls.
    limit = 0.55 if row.phase == "prefill" else 0.20
    assert abs(row.error) < limit


def test_every_measurement_is_compared():
    kinds = {"generation": ("prefill", "decode"), "training": ("training", "forward"), "step": ("optimizer", "sync")}
    for what, phases in kinds.items():
        rows = [row for row in REPORT["measurements"] if row["what"] == what]
        expected = sum(2 if what != "training" or row["forward"] is not None else 1 for row in rows)
        assert sum(row.phase in phases for row in COMPARISONS) == expected > 0
    assert REPORT["failed"] == []


def test_bytes_of_weights_masters_adamw_and_cache_are_exact():
    for row in REPORT["measurements"]:
        if row["what"] == "step":
            count = row["parameters"]
            assert (row["weight_bytes"], row["master_bytes"]) == (2 * count, 4 * count)
            assert row["adam_bytes"] == pytest.approx(8 * count, rel=1e-5)  # and a counter for each tensor
            held = row["weight_bytes"] + row["master_bytes"] + row["adam_bytes"] + 4 * count
            assert row["allocated"] == pytest.approx(held, rel=0.01) or row["allocated"] > held
        if row["what"] == "generation":
            shape, work = fit_plan.shape_of(row), fit_plan.work_of(row)
            assert memory.cache_bytes(shape, work, row["rows"]) == row["cache_bytes"]


def test_the_default_token_budget_is_that_of_the_trainer():
    from dataclasses import replace

    gpu = replace(GPUS["h200"], memory=REPORT["memory"])
    for row in REPORT["measurements"]:
        if row["what"] == "training" and not row.get("small_budget"):
            # The report was made when the largest default was 65,536 tokens.
            assert memory.default_budget(fit_plan.shape_of(row), gpu) == min(row["budget"], memory.MAX_BUDGET)


def test_the_tables_of_the_docs_are_fresh():
    from tools import docs_scale

    text = docs_scale.PAGE.read_text(encoding="utf-8")
    stale = text.replace("| colocated |", "| together |", 1)
    assert stale != text
    assert docs_scale.fresh(stale) == text, "run: make docs"
