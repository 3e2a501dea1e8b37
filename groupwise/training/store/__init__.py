"""What a run writes: records, checkpoints, rollouts, and the exported model."""

EVAL_PREFIX = "eval/"  # of an evaluation's metrics in metrics.jsonl
