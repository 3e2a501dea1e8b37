"""The arms of `python benchmarks/distillation.py gsm8k`."""

from __future__ import annotations

import argparse

from gsm8k_arms import Arm, run_arms, table

ABOVE = "A correct solution of the problem below, for your reference:\n{answer}\n\nThe problem:\n{prompt}"
BELOW = (
    "{prompt}\n\nThis is a correct solution of the problem, for your reference:\n{answer}\n\nNow write your own "
    "solution, step by step, in the requested form, as if you had not seen it."
)
LORA = {
    "model.lora.rank": 32,
    "model.lora.alpha": 64.0,
    "optimizer.learning_rate": 2e-5,
    "optimizer.warmup_steps": 5,
    "sampling.samples_per_prompt": 8,  # of 32 prompts: a step samples 256 completions
    "train.batch_size": 32,
    "train.steps": "none",
    "evaluate.before_training": "false",  # that is the arm "before"
    "evaluate.every": 0,
    "run.resumable": "true",  # an adapter's checkpoint is small
    "run.checkpoint_every": 10,
    "run.save_tokens_every": 0,
}
TEACHER = {**LORA, "distillation.weight": 1.0, "distillation.teacher": "reference", "distillation.show": ABOVE}
ALONE = {**TEACHER, "loss.policy_coef": 0.0}
DEFAULT = ("before", "self", "grpo")
COLUMNS = {"KL per token": "distillation/kl", "length": "completions/mean_length"}


def arms(tokens: int) -> dict[str, Arm]:
    """The arms, trained for this many tokens."""
    return {
        "before": Arm("the model itself", trained=False),
        "grpo": Arm("GRPO", LORA, tokens=tokens),
        "self": Arm("itself, shown the worked answer above the problem", ALONE, tokens=tokens),
        "self-below": Arm("itself, shown it below the problem", {**ALONE, "distillation.show": BELOW}, tokens=tokens),
        "self-sampled": Arm("itself, sampled KL", {**ALONE, "distillation.kl": "sampled"}, tokens=tokens),
        "both": Arm("GRPO and itself", {**TEACHER, "distillation.weight": 0.1}, tokens=tokens),
    }


def gsm8k(args: argparse.Namespace) -> None:
    """Run the arms that have no result yet, and print the table of all that have one."""
    if not args.table:
        run_arms(arms(args.tokens), args.only or DEFAULT, args)
    print(table(arms(args.tokens), args.results, ["before", "grpo"], COLUMNS))
