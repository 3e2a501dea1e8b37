"""The calculator, against Python's own evaluation."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from groupwise.environments import ToolCall, arithmetic, make_tools
from groupwise.environments.arithmetic import calculate, show_number
from groupwise.errors import InputError

NUMBERS = st.integers(0, 10**6).map(str) | st.floats(0, 1e6).map(repr)


def combined(terms):
    operators = st.sampled_from([" + ", " - ", "*", " / ", "//", " % ", "**"])
    pairs = st.tuples(terms, operators, terms).map("".join)
    return pairs | pairs.map("({})".format) | terms.map("-{}".format) | terms.map("+{}".format)


EXPRESSIONS = st.recursive(NUMBERS, combined, max_leaves=8)


@given(EXPRESSIONS)
def test_an_expression_has_the_value_that_python_gives_it(expression):
    assume("% -" not in expression and "% +" not in expression)  # refused: it can mean a percentage
    try:
        expected = evaluated(expression)
    except (ZeroDivisionError, OverflowError, ValueError):
        expected = None
    if expected is None or isinstance(expected, complex) or not math.isfinite(expected):
        with pytest.raises(InputError):
            calculate(expression)
        return
    value = calculate(expression)
    assert value == expected
    assert type(value) is type(expected)


def evaluated(expression):
    """Python's value; None for integers that would take it too long."""
    base, *exponents = expression.split("**")
    if len(exponents) > 1 or any(len(part) > 3 for part in exponents):
        assume("**" not in expression)
    assume(len(base) < 40 or not exponents)
    value = eval(expression)  # of our own making: digits, signs and parentheses
    if isinstance(value, int) and value.bit_length() > 4096:
        return None
    return value


@given(st.integers(-(10**30), 10**30))
def test_thousands_may_be_separated(number):
    assert arithmetic(f"{number:,}") == arithmetic(str(number)) == arithmetic(f"{number:_}") == str(number)


@given(st.floats(allow_nan=False, allow_infinity=False))
@example(1.7976931348623151e308)
def test_a_float_is_shown_with_fifteen_digits(number):
    assert math.isclose(float(show_number(number)), number, rel_tol=1e-14, abs_tol=5e-324)


@given(st.text(max_size=40) | st.text("0123456789.,+-*/%^() eE_maxsqrt", max_size=30))
def test_any_text_has_a_value_or_an_explanation(text):
    with contextlib.suppress(InputError):  # no other error
        assert arithmetic(text)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("(1 + 2) * 3 =", "9"),
        ("[1 + 2] × 3 ÷ 2 − 1", "3.5"),
        ("2^3^2", "512"),
        ("-2**2", "-4"),
        ("2**-1", "0.5"),
        ("0.1 + 0.2", "0.3"),
        ("6 / 2", "3"),
        ("7 // 2 + 7 % 4", "6"),
        ("$1,250.50 * 2", "2501"),
        ("15%", "0.15"),
        ("200 * 15%", "30"),
        ("200 / 50%", "400"),
        ("(10 + 5)% + 1", "1.15"),
        ("50 % (3)", "2"),
        ("max(1,234)", "234"),
        ("max((1,234), 5)", "1234"),
        ("min(3, 2, 2.5)", "2"),
        ("round(2.567, 2) + round(2.4)", "4.57"),
        ("sqrt(16) + abs(-2) + floor(1.9) + ceil(1.1)", "9"),
        ("log(e) + log2(8) + log10(1000) + log(9, 3)", "9"),
        ("sin(0) + cos(0) + tan(0) + exp(0)", "2"),
        ("pi", "3.14159265358979"),
        ("1e3", "1000"),
        (".5 + 5.", "5.5"),
        ("2**1000", str(2**1000)),
        ("1e-20", "1e-20"),
        ("1e20", "1e+20"),
    ],
)
def test_values(expression, value):
    assert arithmetic(expression) == value


@pytest.mark.parametrize(
    ("expression", "word"),
    [
        ("", "no expression"),
        (" ", "no expression"),
        (None, "no expression"),
        ("1 +", "ends early"),
        ("(1 + 2", "')' is missing"),
        ("1 + 2)", "unexpected ')' at character 6"),
        ("2 3", "unexpected '3' at character 3"),
        ("1,23", "thousands"),
        ("1.2.3", "unexpected"),
        ("1 & 2", "unexpected '&' at character 3"),
        ("1__", "not a number"),
        ("x + 1", "unknown name 'x'"),
        ("sqr(4)", "did you mean 'sqrt'?"),
        ("sqrt 4", "write sqrt(…)"),
        ("sqrt(1, 2)", "sqrt takes 1 argument, got 2"),
        ("sqrt(-1)", "sqrt(-1) is not defined"),
        ("log(0)", "not defined"),
        ("log(1, 1)", "not defined"),
        ("round(1.5, 0.5)", "not defined"),
        ("50% - 3", "write parentheses"),
        ("1 / 0", "division by zero"),
        ("1 % 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("(-8) ** (1/3)", "real numbers"),
        ("9**9**9", "too large"),
        ("9**9**9**9**9**9", "too large"),
        ("10**400 * 1.0", "too large"),
        ("10**400 / 1", "too large"),
        ("1e400", "too large"),
        ("exp(1000)", "too large"),
        ("1" * 1001, "at most 1,000"),
        ("(" * 60 + "1" + ")" * 60, "nested too deeply"),
        ("-" * 900 + "1", "nested too deeply"),
        ("2**" * 300 + "1", "nested too deeply"),
        ("__import__('os').system('true')", "unknown name '__import__'"),
        ("().__class__", "unexpected ')'"),
    ],
)
def test_what_cannot_be_calculated_is_explained(expression, word):
    with pytest.raises(InputError) as error:
        arithmetic(expression)
    assert word in str(error.value)
    assert len(str(error.value)) < 300


def test_it_is_a_tool():
    (tool,) = make_tools([arithmetic])
    assert tool.name == "arithmetic"
    assert tool.convert(ToolCall("arithmetic", {"expression": 5}).arguments) == {"expression": "5"}
