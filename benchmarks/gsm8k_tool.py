"""GSM8K with a calculator, beside the same without one: held-out accuracy before and after training, on a GPU.

Arms: "plain-before" and "plain", the recipe gsm8k; "tool-before", "tool-shown" and "tool", gsm8k-tool.toml, in which
the model may call the tool arithmetic. "tool-shown" is the model after the supervised steps that show it calls, "tool"
after GRPO, too; "plain" and "tool" have as many steps of that, from as many questions and completions. The table also
has the mean number of calls in a conversation, and the tokens that a forward pass computed as a share of a padded
batch, each at the first and the last step.

Estimated on an H200: 2 minutes for an arm without training, 4 for "plain", 8 for "tool"; --only runs them one by one.

Usage::

    python benchmarks/gsm8k_tool.py --data FOLDER --results RESULTS
    python benchmarks/gsm8k_tool.py --data FOLDER --results RESULTS --only tool-before tool
    python benchmarks/gsm8k_tool.py --results RESULTS --table
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gsm8k_arms import Arm, add_arguments, run_arms, table
from trials import add_run_arguments

TOOL = str(Path(__file__).with_name("gsm8k-tool.toml"))
TRAINED = {"evaluate.before_training": "false", "evaluate.every": 0, "run.save_tokens_every": 0}
DEFAULT = ("plain-before", "plain", "tool-before", "tool-shown", "tool")
COLUMNS = {
    "calls": "episodes/tool_calls",
    "failed calls": "episodes/failed_tool_calls",
    "computed share": "episodes/computed_share",
}


def arms(steps: int) -> dict[str, Arm]:
    """The arms, trained for this many steps."""
    trained = {**TRAINED, "train.steps": steps}
    return {
        "plain-before": Arm("no tool, before", trained=False),
        "plain": Arm("no tool", trained),
        "tool-before": Arm("calculator, before", recipe=TOOL, trained=False),
        "tool-shown": Arm("calculator, shown calls", {**TRAINED, "train.steps": 0}, TOOL),
        "tool": Arm("calculator", trained, TOOL),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    add_arguments(parser, list(arms(1)), DEFAULT, "gsm8k-tool")
    add_run_arguments(parser)
    args = parser.parse_args()
    if not args.table:
        run_arms(arms(args.steps), args.only or DEFAULT, args)
    print(table(arms(args.steps), args.results, ["plain-before", "plain", "tool-shown"], COLUMNS))


if __name__ == "__main__":
    main()
