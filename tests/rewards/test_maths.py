"""Numbers in answers, against values computed by hand and all gold answers of GSM8K; equality of LaTeX answers."""

from __future__ import annotations

import json
import signal
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.errors import DataError, InputError, MissingExtraError
from groupwise.rewards import RewardFunction, Scorer, make_reward, math_equal
from groupwise.rewards.maths import (
    correct_number,
    gold_number,
    lenient_answer,
    number_format,
    parse_number,
    same_number,
    strict_answer,
)

GSM8K = Path(__file__).parents[2].parent / "shared" / "data" / "gsm8k_test.jsonl"


NUMBERS = [
    ("18", 18),
    ("007", 7),
    ("  18 \n", 18),
    ("1,234", 1234),
    ("1,450,000", 1450000),
    ("$1,234.50", "1234.5"),
    ("-3", -3),
    ("−3", -3),
    ("–3", -3),
    ("+7", 7),
    ("-$3", -3),
    ("$-3", -3),
    ("€5", 5),
    ("5€", 5),
    ("$18$", 18),
    ("3/4", "3/4"),
    ("-3/4", "-3/4"),
    ("3 / 4", "3/4"),
    ("1 1/2", "3/2"),
    ("-1 1/2", "-3/2"),
    ("1,000 1/2 miles", "2001/2"),
    ("50%", 50),
    ("0.5%", "1/2"),
    ("18.", 18),
    ("18.0", 18),
    (".5", "1/2"),
    ("1.5e3", 1500),
    ("1.5E-3", "3/2000"),
    ("2e+2", 200),
    ("18 dollars", 18),
    ("18 dollars.", 18),
    ("18   dollars", 18),
    ("1\t1/2", "3/2"),
    ("18kg", 18),
    ("60 km/h", 60),
    ("$5/hour", 5),
    ("18 dollars per hour", 18),
    ("18 m^2", 18),
    ("18 m²", 18),
    ("90°", 90),
    ("2.5 million", 2500000),
    ("3 Thousand dollars", 3000),
    ("2 billions", 2000000000),
    (r"\frac{3}{4}", "3/4"),
    (r"-\dfrac{3}{4}", "-3/4"),
    (r"1\frac{1}{2}", "3/2"),
    (r"\$18", 18),
    (r"50\%", 50),
    (r"1{,}234", 1234),
    (r"1\,234", 1234),
    (r"18\text{ dollars}", 18),
]


def test_numbers():
    wrong = [(text, parse_number(text)) for text, value in NUMBERS if parse_number(text) != Fraction(value)]
    assert not wrong


NOT_NUMBERS = [
    "", " ", "abc", "-", "$", "%", ".", "####", "1,23", "12,3456", "1,234,56", "1,", "1 234", "1.2.3", "18 or 20",
    "18, 20", "18-3", "18 - 3", "18 x 3", "2x + 3", "18 = 18", "about 18", "x = 18", "--3", "- 3", "5%%", "3/0",
    "1/2/3", "1 3/2", "18!", "**18**", "18 is what we get here", "__import__('os')", "1e999999999", "1e-999999999",
    "9" * 101, "18 " + "a" * 300, "٣", "nan", "inf", "1_000", "0x12",
]  # fmt: skip


def test_texts_that_are_not_numbers():
    assert not [text for text in NOT_NUMBERS if parse_number(text) is not None]


@given(st.integers(-(10**12), 10**12), st.sampled_from(["{}", "{:,}", "${}", "{} eggs", "{:,}.", "{:,}.00", "{}%"]))
def test_whole_numbers_in_any_notation(number, notation):
    assert parse_number(notation.format(number)) == number
    assert strict_answer("It is 4.\n#### " + notation.format(number)) == number


@given(st.text(alphabet="0123456789,./-+$% e#\\{}boxedfracanswer:is\n", max_size=60))
def test_no_text_breaks_it(text):
    strict, lenient = strict_answer(text), lenient_answer(text)
    assert lenient == strict or strict is None
    assert number_format([""], [text]) in ([0.0], [1.0])
    if number_format([""], [text]) == [1.0]:
        assert strict is not None


LONG_TEXTS = [
    ("18", " ", "!"), ("", "1", ""), ("", "1,", ""), ("", "1,234", ""), ("", "1/", ""), ("", "1 ", ""),
    ("", "answer: ", ""), ("", "\\boxed{", ""), ("", "\\text{", ""), ("", "\\frac{", ""), ("18 ", "a-", "1"),
    ("", "answer is 1 + 1 = ", ""), ("", "#", ""), ("", "-", ""), ("", "1 thousand ", ""),
]  # fmt: skip


@pytest.fixture
def cpu_limit():
    """Ends a test after a minute of CPU time, however busy the machine is; regular expressions check for signals."""

    def give_up(*_):
        raise TimeoutError("more than linear time")

    before = signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, 60)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)


def test_long_texts_take_linear_time(cpu_limit):
    """At 30,000 characters quadratic time is minutes in all, and linear time less than a second."""
    for start, repeated, end in LONG_TEXTS:
        text = start + repeated * (30_000 // len(repeated)) + end
        for function in (parse_number, strict_answer, lenient_answer, lambda text: number_format([""], [text])):
            function(text)
            function("#### " + text)


STRICT = [
    ("so 9 + 9 = 18\n#### 18", 18),
    ("#### 18", 18),
    ("####18", 18),
    ("therefore #### 18 eggs\nDone.", 18),
    ("#### 17\nno, wait\n#### 18", 18),
    ("#### 1,234\r\n", 1234),
    (r"so \boxed{18}.", 18),
    (r"\boxed{17} or \boxed{\frac{3}{4}}", "3/4"),
    (r"#### \boxed{18}", 18),
    (r"####\boxed{18}", 18),
    ("\\boxed{17}\n#### 18", 18),
    ("#### 17\n\\boxed{18}", 18),
]


def test_strict_answers():
    answers = {text: (strict_answer(text), lenient_answer(text)) for text, _ in STRICT}
    assert answers == {text: (Fraction(value), Fraction(value)) for text, value in STRICT}


LENIENT = [
    ("", None),
    ("no numbers at all", None),
    ("The answer is 18.", 18),
    ("Answer: $1,234.50 for 7 days", Fraction("1234.5")),
    ("**Answer:** 18", 18),
    ("the answer is 17, no, the ANSWER  is\n**18** with 3 left", 18),
    ("The answer is not clear; we had 5, then 7.", 5),
    ("The answer is: 3 × (4 + 2) = 36/2 = 18 eggs, and 5 left", 18),
    ("The answer is 18, where x = 3", 18),
    ("We had 5 and the answer is unknown", 5),
    ("first 5, then 7 eggs.", 7),
    ("5-3", 3),
    ("10–20", 20),
    ("(4)-3", 3),
    ("x=-3", -3),
    ("we get -3", -3),
    ("water is H2O, 4 of it, x2", 4),
    ("version 1.2.3", Fraction("1.2")),
    ("7 then 3/0", 7),
    ("it costs US$18", 18),
    ("答案是18", 18),
    (r"the answer is $\frac{3}{4}$", Fraction(3, 4)),
    ("7 and " + "9" * 200, 7),
    ("#### 18 or 20", 20),
    ("#### 17\n#### Step 4: sum", 4),
    ("##### 18", 18),
    ("######## 18", 18),
    ("the answer is 12,3456", 12),
    ("#### **18**", 18),
    ("#### ", None),
    ("#### \n18", 18),
    (r"\boxed{x = 18}", 18),
    (r"\boxed{18", 18),
    (r"#### 17 \boxed{}", 17),
]


def test_lenient_answers_of_texts_without_a_strict_one():
    answers = {text: (strict_answer(text), lenient_answer(text)) for text, _ in LENIENT}
    assert answers == {text: (None, value) for text, value in LENIENT}


def test_same_number():
    assert same_number("18.0", 18)
    assert same_number("1,000", Fraction(1000))
    assert same_number(0.1, "0.1")
    assert same_number(0.1, Fraction(1, 10))
    assert same_number(np.int64(18), np.float32(18))
    assert same_number(1e16, "10000000000000000")
    assert not same_number("0.333", "1/3")
    assert not same_number("18", "-18")
    assert not same_number(None, None)
    assert not same_number("x", "x")
    assert not same_number(True, 1)
    assert not same_number(float("nan"), float("nan"))
    assert not same_number(float("inf"), "18")


def test_gold():
    assert gold_number("9 + 9 = <<9+9=18>>18\n#### 18") == 18
    assert gold_number("1,000") == 1000
    assert gold_number(18) == 18
    assert gold_number(0.5) == Fraction(1, 2)
    for answer in ("unknown", "18\n####", None, float("nan"), ["18"], True):
        with pytest.raises(DataError, match=r"the gold answer .* is not a number and has none after '####'"):
            gold_number(answer)


def test_rewards():
    completions = [
        "#### 18",
        "#### 17",
        "The answer is 18",
        "18 #### 18 eggs",
        [{"role": "assistant", "content": "#### 18"}],
    ]
    prompts, answer = ["?"] * 5, ["18", 18, "so\n#### 18", "18.0", "$18"]
    assert correct_number(prompts=prompts, completions=completions, answer=answer, other=1) == [1.0, 0.0, 0.0, 1.0, 1.0]
    assert number_format(prompts=prompts, completions=completions, other=1) == [1.0, 1.0, 0.0, 0.0, 1.0]
    scorer = Scorer([correct_number, RewardFunction("form", number_format, 0.1)])
    scorer.check_arguments(["question", "answer"])
    scores = scorer.score(prompts, completions, {"answer": answer})
    assert scores.rewards.tolist() == [[1, 1], [0, 1], [0, 0], [1, 0], [1, 1]]


FORMATS = [
    ("so\n#### 18", 1.0),
    ("so\n####  -1,234.5 \n\n", 1.0),
    ("so\n#### −3", 1.0),
    ("#### $18", 1.0),
    ("#### 50%", 1.0),
    ("#### 3/4", 1.0),
    ("so #### 18", 0.0),
    ("####18", 0.0),
    ("##### 18", 0.0),
    ("#### 18.", 0.0),
    ("#### 18 eggs", 0.0),
    ("#### 18\nThat is it.", 0.0),
    ("#### 17\n#### 18", 0.0),
    ("#### 3/0", 0.0),
    ("#### ", 0.0),
    (r"\boxed{18}", 0.0),
    ("", 0.0),
]


def test_number_format():
    texts = [text for text, _ in FORMATS]
    assert dict(zip(texts, number_format([""] * len(texts), texts), strict=True)) == dict(FORMATS)


@pytest.mark.skipif(not GSM8K.exists(), reason=f"GSM8K's test split is not at {GSM8K.parent.name}/{GSM8K.name}")
def test_every_gold_answer_of_gsm8k():
    answers = [json.loads(line)["answer"] for line in GSM8K.read_text(encoding="utf-8").splitlines()]
    assert len(answers) == 1319
    values = [int(answer.split("#### ")[1].replace(",", "")) for answer in answers]
    assert [strict_answer(answer) for answer in answers] == values
    assert [lenient_answer(answer) for answer in answers] == values
    prompts = [""] * len(answers)
    assert set(correct_number(prompts, answers, answers)) == {1.0}
    assert set(correct_number(prompts, [f"#### {value + 1}" for value in values], answers)) == {0.0}
    assert set(number_format(prompts, answers)) == {1.0}
    without = [answer.split("####")[0] for answer in answers]
    assert set(correct_number(prompts, without, answers)) == {0.0}
    said = [f"Of 3 and 4, the answer is {value:,} dollars." for value in values]
    assert [lenient_answer(text) for text in said] == [gold_number(answer) for answer in answers]


# --- math_equal -------------------------------------------------------------------------------------------------------

EQUAL = [
    ("\\frac{1}{2}", "so \\boxed{0.5}"),
    ("(x+1)^2", "\\boxed{x^2 + 2x + 1}"),
    ("\\sqrt{8}", "\\boxed{2\\sqrt2}"),
    ("\\{1, 2\\}", "\\boxed{\\{2, 1\\}}"),
    ("(1, 2]", "\\boxed{(1,2]}"),
    ("\\frac{\\pi}{2}", "#### $\\pi/2$"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\boxed{\\begin{pmatrix}1\\\\2\\end{pmatrix}}"),
    ("The root is \\boxed{x=5}.", "\\boxed{5}"),
    ("1/3", "#### 0.333333"),
    (18, "#### 18"),
]
UNEQUAL = [
    ("\\frac{1}{2}", "\\boxed{0.51}"),
    ("(1, 2]", "\\boxed{(1,2)}"),
    ("x^2", "\\boxed{x^3}"),
    ("5", "\\boxed{17} or \\boxed{}"),
    ("5", "The answer is 5."),
    ("5", "#### __import__('os').abort()"),
    ("5", "\\boxed{\\frac{1}{0}}"),
]


def test_math_equal():
    reward = make_reward("math_equal", {"seconds": 600.0})
    cases = [*((case, 1.0) for case in EQUAL), *((case, 0.0) for case in UNEQUAL)]
    golds, completions = zip(*(case for case, _ in cases), strict=True)
    rewards = reward([""] * len(cases), list(completions), answer=list(golds))
    assert [case for case, score in zip(cases, rewards, strict=True) if score != case[1]] == []


def test_math_equal_gives_up_on_an_answer_that_cannot_be_computed():
    """It takes a call into C that no thread can interrupt; the next answer gets a new process."""
    scorer = Scorer([math_equal(column="gold", seconds=1.0)], timeout=600.0)
    scores = scorer.score([""] * 2, ["\\boxed{9^{9^{9^9}}}", "\\boxed{5}"], {"gold": ["5", "\\sqrt{25}"]})
    assert scores.rewards.tolist() == [[0.0], [1.0]]
    assert scores.metrics == {"math_equal/timeouts": 0.5}


@pytest.mark.slow
def test_math_equal_needs_a_gold_answer_in_latex():
    with pytest.raises(DataError, match="gold answer '' cannot be read"):
        math_equal(column="gold")([""], ["#### x"], gold=[""])


def test_math_equal_refuses(monkeypatch):
    reward = math_equal(column="gold")
    with pytest.raises(InputError, match=r"no column 'gold' .*'answer'"):
        reward([""], ["#### x"], answer=["x"])
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(MissingExtraError, match=r"groupwise\[math\]"):
        math_equal()
