"""Constants of the cost model, fitted by tools/fit_plan.py to benchmarks/results/plan_h200.json. Do not edit."""

from __future__ import annotations

FITTED: dict[str, dict[str, float]] = {
    "device": {"flops": 0.8123, "bandwidth": 0.8844},
    "passes": {"products": 1.0, "attention": 1.951, "activations": 5.823, "logits": 1.751, "launches": 0.03942},
    "decode": {
        "launches": 3.971e-05,
        "products": 1.288,
        "cache": 1.403,
        "logits": 17.63,
        "inner": 1.615e-09,
        "prompts": 1.695e-11,
    },
    "optimizer": {"bytes": 1.0, "call": 0.007918},
    "sync": {"bytes": 1.126, "call": 0.0001297},
    "memory": {"activations": 0.9341, "checkpoints": 0.4976},
}
