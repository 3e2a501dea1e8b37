"""The process in which `math_equal` compares answers: gold and answer as a line of JSON in, a line of JSON out.

Only math-verify's LaTeX parser is used, which is a grammar; its parser of plain expressions calls eval().
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import suppress
from typing import Any

MEMORY = 4 * 2**30  # bytes


def main(seconds: float) -> None:
    from math_verify import LatexExtractionConfig, parse, verify

    def parsed(answer: str) -> Any:
        latex = answer if re.search(r"(?<!\\)\$", answer) else f"${answer}$"
        return parse(latex, [LatexExtractionConfig()], parsing_timeout=None)

    limit_time = _set_limits()
    print("ready", flush=True)  # noqa: T201
    for line in sys.stdin:
        limit_time(seconds)
        gold, answer = map(parsed, json.loads(line))
        equal = verify(gold, answer, timeout_seconds=None) if gold else None
        limit_time(0)
        print(json.dumps(equal), flush=True)  # noqa: T201


def _set_limits() -> Any:
    """Limit the memory; return a function that sets a timer of CPU time, at whose end the system ends the process."""
    try:
        import resource
        import signal
    except ImportError:  # Windows
        return lambda seconds: None
    with suppress(ValueError, OSError):  # a lower limit may be set already
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    return lambda seconds: signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    main(float(sys.argv[1]))
