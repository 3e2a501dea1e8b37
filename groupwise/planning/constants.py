"""Constants of the cost model, fitted by tools/fit_plan.py to benchmarks/results/plan_h200.json. Do not edit."""

from __future__ import annotations

FITTED: dict[str, dict[str, float]] = {
    "device": {"flops": 0.79, "bandwidth": 0.88},
    "prefill": {"launches": 4e-4, "products": 1.5, "activations": 1.5, "logits": 2.0, "call": 0.005},
    "decode": {"launches": 5e-5, "products": 1.2, "cache": 1.6, "logits": 2.0, "rows": 1e-6, "call": 2e-4},
    "training": {"products": 1.2, "attention": 2.0, "activations": 2.0, "logits": 1.5, "launches": 1e-4, "call": 0.01},
    "forward": {"products": 1.2, "attention": 2.0, "activations": 2.0, "logits": 1.5, "launches": 1e-4, "call": 0.01},
    "optimizer": {"bytes": 1.2, "call": 0.001},
    "sync": {"bytes": 1.2, "call": 0.0005},
    "memory": {"activations": 1.0, "checkpoints": 1.0},
}
