"""A tool that runs Python code in a sandbox."""

from __future__ import annotations

import re
from collections.abc import Callable

from groupwise.environments.sandbox import Sandbox
from groupwise.errors import ConfigError
from groupwise.text import excerpt

NOTHING_PRINTED = "(the code printed nothing; print what you want to see)"
_FENCE = re.compile(r"\s*```[A-Za-z0-9_+-]*[ \t]*\n(.*?)\n?```\s*", re.DOTALL)
_LINE = re.compile(r'File "/tmp/main\.py", line (\d+)')


def code_tool(sandbox: Sandbox | None = None, *, name: str = "python") -> Callable[[str], str]:
    """A tool that runs code and returns what it printed, and the last line of the error if there was one.

    The time limit of the tool, `Limits.tool_seconds`, should be longer than the sandbox's, so that the model sees what
    was printed before the code was stopped.
    """
    if not name.isidentifier():
        raise ConfigError(f"the name of a tool must be one of Python's, such as 'python', got {excerpt(name)}")
    place = sandbox or Sandbox()

    def python(code: str) -> str:
        """Runs Python code and returns what it prints. Each call starts anew, without the variables of earlier ones.

        Args:
            code: The code. Print the results.
        """
        return run_code(place, code)

    python.__name__ = python.__qualname__ = name
    return python


def run_code(sandbox: Sandbox, code: str) -> str:
    """What code prints, followed by its error in one line. A Markdown fence around the code is taken off."""
    fenced = _FENCE.fullmatch(code)
    result = sandbox.run(fenced[1] if fenced else code)
    error = result.error
    if error is None:
        return result.stdout.rstrip("\n") or NOTHING_PRINTED
    lines = _LINE.findall(result.stderr)
    if lines and result.stopped is None:
        error += f" (line {lines[-1]})"
    return "\n".join(filter(None, (result.stdout.rstrip("\n"), error)))
