"""Mathematical equality of LaTeX answers with the package math-verify: fractions, roots, sets, intervals, matrices.

SymPy may compute forever on an answer such as ``9^{9^{9^9}}``, in a call that no thread can interrupt. So answers are
compared in another process, which ends when an answer takes too long.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from groupwise.errors import DataError, MissingExtraError, RewardError
from groupwise.rewards.maths import marked_answer, same_number
from groupwise.rewards.options import check_number, check_text
from groupwise.rewards.text import column_of, text_of
from groupwise.text import excerpt

LONGEST = 1000  # characters of an answer that are read


def math_equal(*, column: str = "answer", seconds: float = 5.0) -> Callable[..., list[float]]:
    r"""A reward of 1.0 for each completion whose answer equals the one in the data's ``column``, else 0.0.

    An answer is the text after the last ``####`` or in the last ``\boxed{}``; in the column it may also stand alone.
    Numbers are compared to six digits, so 0.333333 equals 1/3. An answer that takes more than ``seconds`` of CPU time
    gets 0.0 and counts in math_equal/timeouts.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise MissingExtraError("the reward math_equal", "math-verify", "math")
    check_text("column", column)
    check_number("seconds", seconds, 0.001)

    def math_equal(
        prompts: Sequence[Any],
        completions: Sequence[Any],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float]:
        golds = column_of(columns, column)
        results: list[bool | None] = []
        with _MathProcess(seconds) as process:
            for completion, gold in zip(completions, golds, strict=True):
                answer, right = marked_answer(text_of(completion)), marked_answer(str(gold))
                right = str(gold) if right is None else right
                if not answer or same_number(answer, right):  # numbers need no other process
                    results.append(bool(answer))
                else:
                    results.append(process.equal(right, answer[:LONGEST]))
        if log_metric is not None and results:
            log_metric("math_equal/timeouts", results.count(None) / len(results))
        return [float(bool(result)) for result in results]

    return math_equal


class _MathProcess:
    """The process that compares the answers of a batch. It starts with the first of them, and again after it ended."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._process: Any = None  # typed as Popen its pipes may be None

    def __enter__(self) -> _MathProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def equal(self, gold: str, answer: str) -> bool | None:
        """Whether two LaTeX answers are equal; None if that takes too much time or memory."""
        if self._process is None:
            worker = str(Path(__file__).with_name("math_worker.py"))
            command = [sys.executable, "-P", worker, str(self._seconds)]  # -P: this folder is not on its path
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            self._process = subprocess.Popen(command, encoding="utf-8", **pipes)
            if not self._reply(""):
                raise RewardError("the process that compares answers did not start; does `import math_verify` work?")
        reply = self._reply(json.dumps([gold, answer]) + "\n")
        if reply == "null\n":
            raise DataError(f"the gold answer {excerpt(gold)} cannot be read as LaTeX")
        return bool(json.loads(reply)) if reply else None

    def _reply(self, question: str) -> str:
        """The process's next line; empty if it has ended."""
        reply = ""
        with suppress(BrokenPipeError):
            self._process.stdin.write(question)
            self._process.stdin.flush()
            reply = self._process.stdout.readline()
        if not reply:
            self.__exit__()
        return reply
