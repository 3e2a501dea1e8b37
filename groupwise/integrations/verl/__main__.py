"""``python -m groupwise.integrations.verl``: does it work here?"""

from __future__ import annotations

import argparse
import sys

from groupwise.integrations.verl.check import max_logp_mismatch


def main(arguments: list[str] | None = None) -> int:
    """Say every finding; 1 where one is bad."""
    parser = argparse.ArgumentParser(
        prog="python -m groupwise.integrations.verl",
        description="Say whether similarity-group GRPO works in the verl that is installed here.",
    )
    parser.add_argument("--embedder", help="the one that a run will use; by default that of the defaults")
    findings = max_logp_mismatch(parser.parse_args(arguments).embedder)
    bad = sum(not finding.good for finding in findings)
    end = f"{bad} of {len(findings)} findings are bad." if bad else "All is as it should be."
    sys.stdout.write("\n".join([*map(str, findings), end]) + "\n")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
