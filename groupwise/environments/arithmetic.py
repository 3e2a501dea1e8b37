"""A calculator, as a tool. It reads the expression by a grammar of its own; nothing is evaluated as Python code.

Values and precedences are Python's: integers are exact, ``/`` gives a float, ``**`` binds tighter than a sign before it
and from right to left. ``^`` is ``**``, ``1,234`` is a number, and ``15%`` is 15 / 100 unless a number follows.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from typing import NamedTuple

from groupwise.errors import InputError, did_you_mean
from groupwise.text import excerpt

LONGEST = 1000  # characters of an expression
DEEPEST = 50  # nested parentheses, signs and powers
MOST_BITS = 4096  # of an integer, which is 1,233 digits
DIGITS = 15  # of a float that is shown: 0.1 + 0.2 is 0.3

Number = int | float


class Token(NamedTuple):
    """A number, a name or a sign of an expression. The last one is empty."""

    text: str
    place: int
    value: Number | None = None


_TOKEN = re.compile(
    r"\s*(?:(?P<grouped>\d{1,3}(?:,\d{3})+(?![\d_])(?:\.\d+)?)|(?P<number>(?:\d[\d_]*\.?[\d_]*|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<name>[A-Za-z_]\w*)|(?P<sign>\*\*|//|[-+*/%^(),]))"
)
_SIGNS = str.maketrans({"×": "*", "·": "*", "⋅": "*", "÷": "/", "−": "-", "–": "-", "[": "(", "]": ")"})


def arithmetic(expression: str) -> str:
    """Calculates an arithmetic expression exactly.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, such as (1,250 + 3) * 15%. There are also pi, e and
            the functions sqrt, abs, round, floor, ceil, min, max, log, log2, log10, exp, sin, cos and tan.

    Returns:
        The value.
    """
    return show_number(calculate(expression))


def calculate(expression: str) -> Number:
    """The value of an expression, or an `InputError` that says what is wrong with it and where."""
    if not isinstance(expression, str) or not expression.strip():
        raise InputError("there is no expression; write one such as (3 + 4) * 2")
    if len(expression) > LONGEST:
        raise InputError(f"the expression has {len(expression):,} characters; at most {LONGEST:,} are calculated")
    text = expression.strip().removesuffix("=").translate(_SIGNS).replace("$", "")
    return _Expression(text).value()


def show_number(value: Number) -> str:
    """A number as a model should see it: integers exactly, others with 15 digits."""
    if isinstance(value, int):
        return str(value)
    if value.is_integer() and abs(value) < 10**DIGITS:
        return str(int(value))
    text = f"{value:.{DIGITS}g}"
    return text if math.isfinite(float(text)) else repr(value)  # rounded up, the largest float would be infinite


class _Expression:
    """An expression that is read from left to right. Each method reads one kind of term and returns its value."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self._depth = 0
        self._in_call = 0
        self._next = self._read()

    def value(self) -> Number:
        """The value of the complete text."""
        value = self._sum()
        if self._next.text:
            raise self._unexpected()
        return value

    def _sum(self) -> Number:
        value = self._product()
        while (sign := self._next.text) in ("+", "-"):
            self._advance()
            value = _apply(sign, value, self._product())
        return value

    def _product(self) -> Number:
        value = self._signed()
        while (sign := self._next.text) in ("*", "/", "//", "%"):
            self._advance()
            value = _apply(sign, value, self._signed())
        return value

    def _signed(self) -> Number:
        if (sign := self._next.text) not in ("+", "-"):
            return self._power()
        self._enter()
        self._advance()
        value = self._signed()
        self._depth -= 1
        return -value if sign == "-" else value

    def _power(self) -> Number:
        value = self._atom()
        if self._next.text in ("**", "^"):
            self._enter()
            self._advance()
            value = _apply("**", value, self._signed())
            self._depth -= 1
        return value

    def _atom(self) -> Number:
        token = self._next
        if token.value is not None:
            self._advance()
            value = token.value
        elif token.text == "(":
            value = self._parentheses()
        elif token.text in _FUNCTIONS or token.text in _CONSTANTS:
            value = self._named(token)
        elif token.text[:1].isalpha() or token.text[:1] == "_":
            names = (*_FUNCTIONS, *_CONSTANTS)
            raise InputError(
                f"unknown name {excerpt(token.text)}{did_you_mean(token.text, names)} ({', '.join(names)})"
            )
        else:
            raise self._unexpected()
        if self._next.text == "%" and self._is_percent():
            self._advance()
            value = _apply("/", value, 100)
        return value

    def _is_percent(self) -> bool:
        """Whether a ``%`` stands after a percentage, and not between two numbers."""
        rest = self._text[self._position :].lstrip()
        if rest.startswith("-"):
            raise InputError(
                f"'%' before '-' (at character {self._next.place + 1}) can mean a percentage or a remainder; write "
                "parentheses, as in (50%) - 3 or 50 % (-3)"
            )
        return not re.match(r"[\w.(]", rest)

    def _parentheses(self) -> Number:
        in_call, self._in_call = self._in_call, 0
        self._enter()
        self._advance()
        value = self._sum()
        self._in_call = in_call
        self._close()
        return value

    def _named(self, token: Token) -> Number:
        self._advance()
        if token.text in _CONSTANTS:
            return _CONSTANTS[token.text]
        if self._next.text != "(":
            raise InputError(f"{token.text} is a function; write {token.text}(…)")
        in_call, self._in_call = self._in_call, 1  # commas are between arguments, not between thousands
        self._enter()
        self._advance()
        arguments = [self._sum()]
        while self._next.text == ",":
            self._advance()
            arguments.append(self._sum())
        self._in_call = in_call
        self._close()
        return _call(token.text, arguments)

    def _close(self) -> None:
        if self._next.text != ")":
            raise self._unexpected("')' is missing" if not self._next.text else None)
        self._depth -= 1
        self._advance()

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > DEEPEST:
            raise InputError(f"the expression is nested too deeply; at most {DEEPEST} levels are calculated")

    def _advance(self) -> None:
        self._next = self._read()

    def _read(self) -> Token:
        rest = self._text[self._position :]
        if not rest.strip():
            return Token("", len(self._text))
        match = _TOKEN.match(self._text, self._position)
        if match is not None and match["grouped"] and self._in_call:  # max(1,234) has two arguments
            match = re.compile(r"\s*(?P<grouped>)(?P<number>\d+)(?P<name>)(?P<sign>)").match(self._text, self._position)
        if match is None:
            place = self._position + len(rest) - len(rest.lstrip())
            raise InputError(
                f"unexpected {excerpt(self._text[place])} at character {place + 1} of {excerpt(self._text)}"
            )
        self._position = match.end()
        if digits := match["grouped"] or match["number"]:
            return Token(digits, match.end() - len(digits), _number(digits.replace(",", "")))
        text = match["name"] or match["sign"]
        return Token(text, match.end() - len(text))

    def _unexpected(self, reason: str | None = None) -> InputError:
        token = self._next
        if reason is None:
            reason = (
                f"unexpected {excerpt(token.text)} at character {token.place + 1}" if token.text else "it ends early"
            )
        if token.text == ",":
            reason += " (a comma separates thousands, as in 1,234, and arguments of functions)"
        return InputError(f"cannot read {excerpt(self._text)}: {reason}")


def _number(digits: str) -> Number:
    try:
        value: Number = int(digits)
    except ValueError:
        try:
            value = float(digits)
        except ValueError:  # an underscore at its end
            raise InputError(f"{excerpt(digits)} is not a number") from None
    return _checked(value)


def _checked(value: Number) -> Number:
    """A value that is not too large to go on with."""
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise InputError(f"a number has more than {MOST_BITS * 3 // 10:,} digits")
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError("a number is too large")
    return value


def _apply(sign: str, left: Number, right: Number) -> Number:
    if sign == "**":
        return _power_of(left, right)
    try:
        return _checked(_OPERATIONS[sign](left, right))
    except ZeroDivisionError:
        raise InputError("division by zero") from None
    except OverflowError:
        raise InputError("a number is too large") from None


def _power_of(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1:
        if exponent > 0 and (base.bit_length() - 1) * exponent > MOST_BITS:
            raise InputError(f"a power is too large: it has more than {MOST_BITS * 3 // 10:,} digits")
        if exponent < -MOST_BITS:
            return 0.0
    if base < 0 and isinstance(exponent, float) and not exponent.is_integer():
        raise InputError("a negative number has no power of that kind among the real numbers")
    try:
        return _checked(base**exponent)
    except ZeroDivisionError:
        raise InputError("division by zero: 0 has no negative power") from None
    except OverflowError:
        raise InputError("a number is too large") from None


def _call(name: str, arguments: list[Number]) -> Number:
    function, least, most = _FUNCTIONS[name]
    if not least <= len(arguments) <= most:
        number = f"{least}" if least == most else f"{least} or more" if most > 9 else f"{least} or {most}"
        raise InputError(f"{name} takes {number} argument{'s' if number != '1' else ''}, got {len(arguments)}")
    try:
        return _checked(function(*arguments))
    except (ValueError, ZeroDivisionError):
        raise InputError(f"{name}({', '.join(map(show_number, arguments))}) is not defined") from None
    except OverflowError:
        raise InputError("a number is too large") from None


def _round(value: Number, digits: Number = 0) -> Number:
    if not isinstance(digits, int) or abs(digits) > MOST_BITS:
        raise ValueError
    return round(value, digits) if digits else round(value)


_OPERATIONS: dict[str, Callable[[Number, Number], Number]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod,
}  # fmt: skip

_CONSTANTS = {"pi": math.pi, "e": math.e}

_FUNCTIONS: dict[str, tuple[Callable[..., Number], int, int]] = {
    "sqrt": (math.sqrt, 1, 1), "abs": (abs, 1, 1), "round": (_round, 1, 2), "floor": (math.floor, 1, 1),
    "ceil": (math.ceil, 1, 1), "min": (min, 1, 100), "max": (max, 1, 100), "log": (math.log, 1, 2),
    "log2": (math.log2, 1, 1), "log10": (math.log10, 1, 1), "exp": (math.exp, 1, 1), "sin": (math.sin, 1, 1),
    "cos": (math.cos, 1, 1), "tan": (math.tan, 1, 1),
}  # fmt: skip
