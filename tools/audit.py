"""Look up the pinned packages in PyPI's database of vulnerabilities, with pip-audit: `make audit`.

Exit status 0: every package was looked up, and none has a known vulnerability. 1: some have. 3: the service was not
reached, or does not know every package, so that the audit was not run, or not completely. That is never a pass.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

FOUND, NOT_RUN = 1, 3


def main(files: Sequence[str]) -> int:
    statuses = set()
    for file in files:
        # The files pin every package with its dependencies, so pip has nothing to resolve.
        options = ("--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off")
        command = [sys.executable, "-m", "pip_audit", "--requirement", file, *options]
        done = subprocess.run(command, capture_output=True, text=True)
        lines, status = summarise(file, done.stdout, done.stderr)
        print("\n".join(lines))
        statuses.add(status)
    return next((status for status in (FOUND, NOT_RUN) if status in statuses), 0)


def summarise(file: str, output: str, complaints: str = "") -> tuple[list[str], int]:
    """What to print about a file, and the exit status, from what pip-audit wrote."""
    try:
        packages: list[Mapping[str, Any]] = json.loads(output)["dependencies"]
    except (ValueError, LookupError, TypeError):
        reason = (complaints.strip().splitlines() or ["pip-audit wrote nothing"])[-1]
        return [f"{file}: not run: the advisory service cannot be reached ({reason})"], NOT_RUN
    unknown = [package["name"] for package in packages if "skip_reason" in package]
    if len(unknown) == len(packages):
        return [f"{file}: not run: the advisory service cannot be reached, or knows none of the packages"], NOT_RUN
    lines = [
        f"{file}: {package['name']} {package['version']} has {entry['id']}; fixed in "
        f"{', '.join(entry['fix_versions']) or 'no version yet'}"
        for package in packages
        for entry in package.get("vulns", ())
    ]
    status = FOUND if lines else NOT_RUN if unknown else 0
    if unknown:
        lines.append(f"{file}: not complete: the advisory service does not know {', '.join(unknown)}")
    return [*lines, f"{file}: {len(packages) - len(unknown)} of {len(packages)} packages were looked up"], status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
