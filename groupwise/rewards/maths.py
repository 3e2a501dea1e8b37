r"""Numbers in answers: read with regular expressions as exact fractions, never evaluated as code.

The strict answer follows ``####`` (GSM8K's format) or is in ``\boxed{}``. The lenient one may be the last number of the
text. Train on the strict one, so that the policy also learns the format; report both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from numbers import Real
from typing import Any

from groupwise.errors import DataError
from groupwise.rewards.text import text_of
from groupwise.text import excerpt

LONGEST = 100  # characters of a number with its unit; also its largest exponent, so that 1e999999999 is not computed

Number = Fraction | int | float

_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_CURRENCY = "[$€£¥₹]"
# Possessive and bounded: a text of 100,000 digits and commas is read in linear time.
_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3}){1,33}+(?!,?[0-9])|[0-9]++)"
_NUMBER = rf"""
    (?P<sign>(?:(?<![)\]}}%])[-+])?{_CURRENCY}?|{_CURRENCY}[-+])
    (?:(?:(?P<mixed>{_WHOLE})[ ])?(?P<top>{_WHOLE})[ ]?/[ ]?(?P<bottom>{_WHOLE})
      |(?P<decimal>{_WHOLE}(?:\.[0-9]*)?|\.[0-9]+)(?:e(?P<exponent>[-+]?[0-9]+))?)
    (?:[ ]?(?P<scale>{"|".join(_SCALES)})s?\b)?
"""
_WORD = r"[^\W\d_](?:[^\W\d_]|['’./-])*(?:\^[23])?"
_FLAGS = re.VERBOSE | re.IGNORECASE

# A number alone, or with a unit of up to three words: "$1,234.50", "50%", "18 dollars per hour".
_ALONE = re.compile(rf"{_NUMBER}[ ]?(?:%|°|{_CURRENCY})?[ ]?(?:/?{_WORD}(?:[ ]{_WORD}){{0,2}})?\.?", _FLAGS)
# A number in a text. The 2 of "H2O" is not one, and the minus of "5-3" is not a sign.
_WITHIN = re.compile(rf"(?<![A-Za-z0-9_])(?<![0-9]\.){_NUMBER}", _FLAGS)
_LAST_LINE = re.compile(rf"\#{{4}}[ ]+{_NUMBER}%?(?<!\.)", _FLAGS)
_MARK = re.compile(r"(?<!#)####(?!#)")
# "the answer is 3 · 6 = 18": the part up to the last equals sign is the calculation.
_SAYS = re.compile(r"\banswer(?:\s+is\b|\s*:)(?:[\s0-9.,:$+*/x×·÷()-]*=)*", re.IGNORECASE)


def parse_number(text: str) -> Fraction | None:
    """The value of a text that is a number and nothing else, or None.

    Currency signs, a percent sign and a unit are ignored ("50%" is 50), but "million" is not. Fractions ("3/4",
    "1 1/2", also in LaTeX) and "1.5e3" are understood.
    """
    match = _ALONE.fullmatch(" ".join(_plain(text).split()))
    return _value(match) if match else None


def marked_answer(text: str) -> str | None:
    r"""The text after the last ``####``, up to the end of its line, or in the last ``\boxed{}`` if that comes later."""
    mark = max((match.end() for match in _MARK.finditer(text)), default=-1)
    box = text.rfind("\\boxed{")
    if box >= 0 and box >= mark:
        return _braced(text, box + len("\\boxed"))
    return text[mark:].partition("\n")[0] if mark >= 0 else None


def strict_answer(text: str) -> Fraction | None:
    """The number in the `marked_answer`, which may contain nothing else but what `parse_number` allows."""
    answer = marked_answer(text)
    return None if answer is None else parse_number(answer)


def lenient_answer(text: str) -> Fraction | None:
    """The strict answer, or else the number after the last "answer is", or else the last number."""
    strict = strict_answer(text)
    if strict is not None:
        return strict
    plain = _plain(text)
    numbers = list(_WITHIN.finditer(plain))
    start = max((match.end() for match in _SAYS.finditer(plain)), default=len(plain))
    candidates = (*(match for match in numbers if match.start() >= start), *reversed(numbers))
    return next((value for value in map(_value, candidates) if value is not None), None)


def same_number(a: Number | str | None, b: Number | str | None) -> bool:
    """Whether both are numbers, or texts of numbers, with exactly the same value. None equals nothing."""
    first, second = _exact(a), _exact(b)
    return first is not None and first == second


def gold_number(answer: Any) -> Fraction:
    """The number of a gold answer: "… #### 18", "18" or 18. Raises a `DataError` if there is none."""
    marked = isinstance(answer, str) and (_MARK.search(answer) or "\\boxed{" in answer)
    value = strict_answer(answer) if marked else _exact(answer)
    if value is None:
        raise DataError(f"the gold answer {excerpt(answer)} is not a number and has none after '####'")
    return value


def correct_number(prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """1.0 where the strict answer is the gold answer, else 0.0."""
    pairs = zip(completions, answer, strict=True)
    return [float(strict_answer(text_of(completion)) == gold_number(gold)) for completion, gold in pairs]


def number_format(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
    """1.0 where the completion's last line is ``#### N`` and there is no other ``####``, else 0.0."""
    return [float(_well_formed(text_of(completion))) for completion in completions]


def _well_formed(text: str) -> bool:
    match = _LAST_LINE.fullmatch(_plain(text.rstrip().rpartition("\n")[2]))
    return text.count("####") == 1 and match is not None and _value(match) is not None


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match[0]) > LONGEST:
        return None
    parts = {name: part.replace(",", "") for name, part in match.groupdict().items() if part is not None}
    if "top" in parts:
        top, bottom = int(parts["top"]), int(parts["bottom"])
        if not bottom or ("mixed" in parts and top >= bottom):
            return None
        value = int(parts.get("mixed", 0)) + Fraction(top, bottom)
    else:
        exponent = int(parts.get("exponent", 0))
        if abs(exponent) > LONGEST:
            return None
        value = Fraction(parts["decimal"].rstrip(".")) * Fraction(10) ** exponent
    value *= _SCALES.get(parts.get("scale", "").lower(), 1)
    return -value if "-" in parts["sign"] else value


def _exact(value: Any) -> Fraction | None:
    if isinstance(value, str):
        return parse_number(value)
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        return None
    return Fraction(str(value))  # 0.1 is exactly a tenth, as in a text


def _plain(text: str) -> str:
    """The text with a plain minus, and without the LaTeX markup of numbers."""
    for markup, plain in (("−", "-"), ("–", "-"), ("{,}", ","), ("\\,", ""), ("\\!", ""), ("\\$", "$"), ("\\%", "%")):
        text = text.replace(markup, plain)
    text = re.sub(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}", r" \1", text)
    text = re.sub(r"(?<=[0-9])(?=\\[dt]?frac)", " ", text)
    return re.sub(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}", r"\1/\2", text)


def _braced(text: str, start: int) -> str:
    """The text inside the braces that open at ``start``; empty if they are never closed."""
    depth = 0
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if not depth:
            return text[start + 1 : end]
    return ""
