"""``python -m groupwise.integrations.verl``: check the installation."""

from __future__ import annotations

import argparse
import sys

from groupwise.integrations.verl.check import check_installation
from groupwise.terminal import write_text


def main(arguments: list[str] | None = None) -> int:
    """Print all findings; return 1 if one is bad."""
    parser = argparse.ArgumentParser(
        prog="python -m groupwise.integrations.verl",
        description="Check whether similarity-group GRPO works in the installed verl.",
    )
    parser.add_argument("--embedder", help="the embedder of the run; default: that of [grouping]")
    findings = check_installation(parser.parse_args(arguments).embedder)
    bad = sum(not finding.good for finding in findings)
    end = f"{bad} of {len(findings)} findings are bad." if bad else "All checks passed."
    write_text("\n".join([*map(str, findings), end]) + "\n")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
