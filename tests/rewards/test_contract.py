"""The reward contract: the arguments of a function, what it may return, and the message for each mistake."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.errors import DataError, InputError, RewardError
from groupwise.rewards import RewardFunction, RowFailure, Scorer, named

PROMPTS = ["p0", "p1", "p2", "p3"]
COMPLETIONS = ["a", "bb", "ccc", "dddd"]
ANSWERS = ["1", "2", "3", "4"]


def score(function, on_error="stop", timeout=60.0, **options):
    scorer = Scorer([RewardFunction("f", function)], on_error=on_error, timeout=timeout)
    return scorer.score(PROMPTS, COMPLETIONS, {"answer": ANSWERS}, **options)


def returning(value):
    return lambda completions, **_: value


def values(scores, column=0):
    return [None if math.isnan(value) else value for value in scores.rewards[:, column].tolist()]


def lengths(prompts, completions, **_):
    return [float(len(completion)) for completion in completions]


# --- names and weights ------------------------------------------------------------------------------------------------


class Judge:
    def __call__(self, completions):
        return [1.0] * len(completions)

    def method(self, completions):
        return [2.0] * len(completions)


def test_names():
    assert named(lengths) == RewardFunction("lengths", lengths, 1.0)
    assert named(lengths, 0.5, name="long") == RewardFunction("long", lengths, 0.5)
    assert named(functools.partial(functools.partial(lengths), x=1)).name == "lengths"
    assert named(Judge()).name == "Judge"
    assert named(Judge().method).name == "method"
    assert named(functools.partial(Judge())).name == "Judge"
    with pytest.raises(dataclasses.FrozenInstanceError):
        named(lengths).weight = 2.0


@pytest.mark.parametrize("weight", [math.nan, math.inf, "1", None, True, 1j])
def test_a_weight_is_a_finite_number(weight):
    with pytest.raises(InputError, match="the weight of reward 'f' must be a finite number, got"):
        RewardFunction("f", lengths, weight)


def test_a_weight_may_be_negative_or_of_numpy():
    assert RewardFunction("f", lengths, -2).weight == -2
    assert RewardFunction("f", lengths, np.float32(0.5)).weight == 0.5


def test_not_a_reward_function():
    with pytest.raises(InputError, match="reward 'f' must be a function, got 'maths:score'"):
        RewardFunction("f", "maths:score")
    for name in ("", None):
        with pytest.raises(InputError, match="a reward's name must be a text"):
            RewardFunction(name, lengths)


def test_two_functions_with_the_same_name():
    with pytest.raises(InputError, match=r"2 reward functions have the name 'lengths'; .*named\(function, name='…'\)"):
        Scorer([lengths, Judge(), lengths])
    assert [reward.name for reward in Scorer([lengths, named(lengths, name="again")]).functions] == ["lengths", "again"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"functions": []}, "there is no reward function to score with"),
        ({"timeout": 0}, "timeout must be a number of seconds above 0, or None for no limit, got 0"),
        ({"timeout": math.inf}, "timeout must be"),
        ({"timeout": 1e300}, "timeout must be"),
        ({"timeout": True}, "timeout must be"),
        ({"timeout": "60"}, "timeout must be"),
        ({"on_error": "stopp"}, "unknown on_error 'stopp'; did you mean 'stop'"),
    ],
)
def test_invalid_scorer_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        Scorer(**{"functions": [lengths], **arguments})


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [60.0, None])
def test_the_arguments_are_those_of_trl(timeout):
    seen = {}

    def reward(prompts, completions, completion_ids, **kwargs):
        seen.update(kwargs, prompts=prompts, completions=completions, completion_ids=completion_ids)
        return [0] * len(prompts)

    scorer = Scorer([reward], timeout=timeout)
    columns = {"answer": ANSWERS, "prompt": PROMPTS, "completion": PROMPTS, "a b": range(4)}
    state = object()
    scorer.score(PROMPTS, COMPLETIONS, columns, completion_ids=torch.arange(4), trainer_state=state)
    assert seen.pop("trainer_state") is state
    assert callable(seen.pop("log_extra"))
    assert callable(seen.pop("log_metric"))
    assert seen.pop("completion_ids") == list(torch.arange(4))
    assert seen == {"prompts": PROMPTS, "completions": COMPLETIONS, "answer": ANSWERS, "a b": [0, 1, 2, 3]}


def only_some(completions, answer, *, trainer_state, unknown=7):
    return [float(answer[0]) + unknown] * len(completions)


def positional_only(p, c, /):
    return [float(len(p[0]) + len(c[0]))] * len(c)


def positional_only_by_name(completions, answer, /, unknown=None, *, prompts):
    return [float(len(prompts[0]) + len(completions[0]) + int(answer[0]))] * len(completions)


def positional_only_with_default(completions, unknown=1, answer=None, /, **kwargs):
    return [float((answer is None) + len(kwargs["answer"]) + 10 * ("completions" in kwargs))] * len(completions)


def anything(*args):
    return [float(len(args[0][0]) + len(args[1][0]))] * 4


def anything_at_all(*args, **kwargs):
    return [float(len(args) + ("prompts" in kwargs))] * 4


@functools.wraps(only_some)
def wrapped(*args, **kwargs):
    return only_some(*args, **kwargs)


class Model:
    def score(self, prompts, completions, answer):
        return [float(answer[0])] * 4

    def __call__(self, completions, answer):
        return [float(answer[0]) + 1] * 4

    @classmethod
    def of_class(cls, completions):
        return [5.0] * 4


@pytest.mark.parametrize(
    ("function", "value"),
    [
        (only_some, 8.0),
        (functools.partial(only_some, unknown=1), 2.0),
        (functools.partial(lambda bound, completions: [bound] * 4, 3.0), 3.0),
        (wrapped, 8.0),
        (positional_only, 3.0),
        (positional_only_by_name, 4.0),
        (positional_only_with_default, 5.0),
        (anything, 3.0),
        (anything_at_all, 1.0),
        (Model().score, 1.0),
        (Model(), 2.0),
        (Model.of_class, 5.0),
        (functools.partial(map, lambda prompt, completion: 9), 9.0),  # a builtin without a signature
        (lambda completions: [4.0] * 4, 4.0),
        (lambda: [6.0] * 4, 6.0),
    ],
)
def test_a_function_gets_what_it_names(function, value):
    Scorer([named(function, name="f")]).check_arguments(["answer", "prompt"])
    assert values(score(function))[0] == value


def missing_one(prompts, completions, anser):
    return [0.0] * len(prompts)


def test_a_missing_argument():
    scorer = Scorer([lengths, missing_one])
    with pytest.raises(
        RewardError, match=r"'missing_one' needs the argument 'anser', .*did you mean 'answer'\?"
    ) as error:
        scorer.check_arguments(["prompt", "answer", "level"])
    names = ("prompts", "completions", "completion_ids", "answer", "level", "trainer_state", "log_extra", "log_metric")
    assert ", ".join(map(repr, names)) in str(error.value)
    with pytest.raises(RewardError, match="needs the argument 'anser'"):
        scorer.score(PROMPTS, COMPLETIONS, {"answer": ANSWERS})
    scorer.check_arguments(["anser"])


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        (lambda prompt: [], "prompt"),  # a column of that name is left out, as with TRL
        (lambda a, b, c, /: [], "c"),
        (lambda completions, x, /: [], "x"),
        (lambda prompts, completions, *, environments: [], "environments"),
        (Model.score, "self"),
    ],
)
def test_more_missing_arguments(function, argument):
    with pytest.raises(RewardError, match=f"reward 'f' needs the argument '{argument}'"):
        Scorer([named(function, name="f")]).check_arguments(["prompt", "answer"])


def test_completion_ids_are_optional():
    def reward(completion_ids):
        return [len(ids) for ids in completion_ids]

    Scorer([reward]).check_arguments([])
    assert values(score(reward, completion_ids=[[1], [], [1, 2], [3]])) == [1, 0, 2, 1]
    with pytest.raises(RewardError, match="needs the argument 'completion_ids'"):
        score(reward)


@pytest.mark.parametrize("column", ["prompts", "completions", "trainer_state", "log_extra", "log_metric"])
def test_a_column_with_the_name_of_an_argument(column):
    with pytest.raises(DataError, match=f"the data has a column '{column}', which is an argument of every reward"):
        Scorer([lengths]).check_arguments([column])
    with pytest.raises(DataError, match="rename it"):
        Scorer([lengths]).score(PROMPTS, COMPLETIONS, {column: ANSWERS})


def test_a_column_without_a_name():
    with pytest.raises(DataError, match="the data has a column 0; rewards get columns by name"):
        Scorer([lengths]).check_arguments([0])


def test_lists_of_different_lengths():
    scorer = Scorer([lengths])
    with pytest.raises(InputError, match="prompts has 3 entries for 4 completions"):
        scorer.score(PROMPTS[:3], COMPLETIONS, {})
    with pytest.raises(InputError, match="answer has 3 entries for 4 completions"):
        scorer.score(PROMPTS, COMPLETIONS, {"answer": ANSWERS[:3]})
    with pytest.raises(InputError, match="completion_ids has 1 entries for 4 completions"):
        scorer.score(PROMPTS, COMPLETIONS, {}, completion_ids=[[1]])
    with pytest.raises(InputError, match="completions must be a list with one entry per completion, got 'abcd'"):
        scorer.score(PROMPTS, "abcd", {})
    with pytest.raises(InputError, match="level must be a list with one entry per completion, got 3"):
        scorer.score(PROMPTS, COMPLETIONS, {"level": 3})


@pytest.mark.parametrize("timeout", [60.0, None])
def test_the_callers_lists_are_not_changed(timeout):
    def vandal(prompts, completions, answer, completion_ids):
        for values in (prompts, completions, answer, completion_ids):
            values.clear()
        return [0.0] * 4

    prompts, completions, columns, ids = list(PROMPTS), list(COMPLETIONS), {"answer": list(ANSWERS)}, [[1]] * 4
    scorer = Scorer([vandal, lengths], timeout=timeout)
    scores = scorer.score(prompts, completions, columns, completion_ids=ids)
    assert values(scores, 1) == [1, 2, 3, 4]
    assert (prompts, completions, columns, ids) == (PROMPTS, COMPLETIONS, {"answer": ANSWERS}, [[1]] * 4)


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ([1, 2.5, None, -3], [1, 2.5, None, -3]),
        ((True, False, True, None), [1, 0, 1, None]),
        ([None] * 4, [None] * 4),
        (np.array([1, 2, 3, 4]), [1, 2, 3, 4]),
        (np.array([1.5, 2, 3, 4], dtype=np.float32), [1.5, 2, 3, 4]),
        (np.array([True, False, False, True]), [1, 0, 0, 1]),
        (np.array([None, 1, 2, 3], dtype=object), [None, 1, 2, 3]),
        (torch.tensor([1.5, 2, 3, 4], dtype=torch.bfloat16, requires_grad=True), [1.5, 2, 3, 4]),
        (torch.tensor([True, False, False, True]), [1, 0, 0, 1]),
        ([torch.tensor(1.5), np.float32(2), np.int64(3), np.bool_(True)], [1.5, 2, 3, 1]),
        ([Fraction(1, 2), np.array(1.0), 0, torch.tensor(4)], [0.5, 1, 0, 4]),
        (range(4), [0, 1, 2, 3]),
        (dict(enumerate(range(4))).values(), [0, 1, 2, 3]),
    ],
)
@pytest.mark.parametrize("on_error", ["stop", "drop"])
def test_valid_results(result, expected, on_error):
    scores = score(returning(result), on_error)
    assert scores.rewards.dtype == torch.float64
    assert scores.rewards.shape == (4, 1)
    assert values(scores) == expected
    assert scores.dropped.tolist() == [False] * 4
    assert scores.failures == ()


def test_generators_are_listed():
    def lazy(completions):
        for completion in completions:
            yield float(len(completion))

    assert values(score(lazy)) == [1, 2, 3, 4]


BROKEN = [
    ([1.0] * 3, "returned 3 values for 4 rows; one per completion is needed"),
    ([1.0] * 5, "returned 5 values for 4 rows"),
    ([], "returned 0 values for 4 rows"),
    (iter([1.0] * 9), "returned more than 4 values for 4 rows"),
    (None, "returned None (NoneType), not a list with one number per completion; is a return missing?"),
    (1.0, "returned 1.0 (float), not a list with one number per completion"),
    ("1234", "returned '1234' (str), not a list"),
    (b"1234", "(bytes), not a list"),
    ({0: 1.0}, "returned {0: 1.0} (dict), not a list"),
    ({1.0, 2.0, 3.0, 4.0}, "(set), not a list"),
    (torch.zeros(4, 1), "returned a Tensor of shape (4, 1); expected (4,), one per completion"),
    (torch.tensor(1.0), "returned a Tensor of shape (); expected (4,)"),
    (np.zeros(3), "returned a ndarray of shape (3,); expected (4,)"),
    (np.float64(1.0), "returned a float64 of shape (); expected (4,)"),
]


@pytest.mark.parametrize(("result", "message"), BROKEN)
def test_results_that_cannot_be_assigned_to_rows(result, message):
    with pytest.raises(RewardError, match=re.escape(message)) as error:
        score(returning(result))
    assert "reward 'f' failed on a batch of 4 (first completion 'a'): " in str(error.value)


BAD = [
    (math.nan, "returned nan; a reward is a finite number, or None where it does not apply"),
    (math.inf, "returned inf;"),
    (-math.inf, "returned -inf;"),
    (torch.tensor(math.nan), "returned nan;"),
    (np.float32("inf"), "returned inf;"),
    ("1.0", "returned '1.0' (str);"),
    (1 + 2j, "returned (1+2j) (complex);"),
    ([1.0], "returned [1.0] (list);"),
    ({}, "returned {} (dict);"),
    (torch.ones(1), "returned tensor([1.]) (Tensor);"),
    (10**400, "(int); a reward is a finite number"),
    (Decimal(1), "returned Decimal('1') (Decimal);"),
]


@pytest.mark.parametrize(("value", "message"), BAD)
def test_values_that_are_not_rewards(value, message):
    with pytest.raises(RewardError, match=re.escape(message)) as error:
        score(returning([1.0, 2.0, value, value]))
    assert "reward 'f' failed on row 3 (prompt 'p2', completion 'ccc'): " in str(error.value)
    assert "it fails on 2 of 4 completions (scoring.on_error = 'drop' would leave them out)" in str(error.value)
    scores = score(returning([1.0, 2.0, value, None]), "drop")
    assert values(scores) == [1, 2, None, None]
    assert scores.dropped.tolist() == [False, False, True, False]
    assert [(failure.function, failure.row) for failure in scores.failures] == [("f", 2)]
    assert message in scores.failures[0].reason


def test_nan_of_an_array_is_refused():
    with pytest.raises(RewardError, match=r"row 2 .*returned nan"):
        score(returning(np.array([1, np.nan, 2, 3])))
    with pytest.raises(RewardError, match=r"row 1 .*returned 1j"):
        score(returning(torch.tensor([1j, 0, 0, 0])))


@given(st.lists(st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(), min_size=1, max_size=8))
def test_every_value_is_a_reward_or_a_failure(results):
    scorer = Scorer([named(lambda completions: results, name="f")], on_error="drop", timeout=None)
    scores = scorer.score([""] * len(results), [""] * len(results), {})
    for row, (result, reward) in enumerate(zip(results, scores.rewards[:, 0].tolist(), strict=True)):
        bad = isinstance(result, float) and not math.isfinite(result)
        assert bool(scores.dropped[row]) == bad == any(failure.row == row for failure in scores.failures)
        assert math.isnan(reward) if bad or result is None else reward == float(result)


# --- exceptions -------------------------------------------------------------------------------------------------------


def fragile(prompts, completions, **_):
    if "bb" in completions or "dddd" in completions:
        raise ValueError("no bb,\nno dddd")
    return [float(len(completion)) for completion in completions]


def whole_batch(completions):
    if len(completions) > 1:
        raise ValueError("too many")
    return [7.0]


@pytest.mark.parametrize("timeout", [60.0, None])
def test_an_exception_names_its_rows(timeout):
    with pytest.raises(RewardError) as error:
        score(fragile, timeout=timeout)
    line = fragile.__code__.co_firstlineno + 2
    assert str(error.value) == (
        "reward 'f' failed on row 2 (prompt 'p1', completion 'bb'): raised ValueError: no bb,\nno dddd "
        f"(test_contract.py, line {line}); it fails on 2 of 4 completions (scoring.on_error = 'drop' would leave them "
        "out)"
    )
    assert isinstance(error.value.__cause__, ValueError)
    scores = score(fragile, "drop", timeout)
    assert values(scores) == [1, None, 3, None]
    assert scores.dropped.tolist() == [False, True, False, True]
    assert [failure.row for failure in scores.failures] == [1, 3]


def test_an_exception_names_the_place_of_the_completion():
    places = [f"rows.jsonl, line {line}, completion {number}" for line in (3, 7) for number in (1, 2)]
    prompts = [[{"role": "user", "content": "What is the capital of France, and of which river?"}]] * 4
    with pytest.raises(RewardError) as error:
        Scorer([fragile]).score(prompts, COMPLETIONS, {}, places=places)
    place = "rows.jsonl, line 3, completion 2 (prompt 'What is the capital of France, and of w…', completion 'bb')"
    assert str(error.value).startswith(f"reward 'fragile' failed on {place}: raised ValueError")


@pytest.mark.parametrize("on_error", ["stop", "drop"])
def test_a_list_of_messages_taken_for_a_text(on_error):
    def upper(completions):
        return [float(completion.isupper()) for completion in completions]

    def found(completions):
        return [float(bool(re.search("A", completion))) for completion in completions]

    chats = [[{"role": "assistant", "content": "A"}]] * 2
    for function in (upper, found):
        scorer = Scorer([function], on_error=on_error)
        if on_error == "stop":
            with pytest.raises(RewardError, match=r"groupwise\.rewards\.text_of\(completion\) is its text"):
                scorer.score(["p"] * 2, chats, {})
        else:
            assert "groupwise.rewards.text_of" in scorer.score(["p"] * 2, chats, {}).failures[0].reason
    with pytest.raises(RewardError) as error:
        Scorer([upper]).score(["p"], [None], {})
    assert "text_of" not in str(error.value)


def test_columns_need_not_be_lists():
    def reward(completions, answer):
        return [float(text) for text in answer]

    answers = dict(enumerate(["1", "x", "3", "4"])).values()  # has a length and can be iterated, but not indexed
    scores = Scorer([reward], on_error="drop").score(tuple(PROMPTS), np.array(COMPLETIONS), {"answer": answers})
    assert values(scores) == [1, None, 3, 4]


def test_an_exception_of_the_batch_alone():
    with pytest.raises(
        RewardError, match=r"failed on a batch of 4 .*raised ValueError: too many .*each of its rows by itself"
    ):
        score(whole_batch)
    scores = score(whole_batch, "drop")
    assert values(scores) == [7] * 4
    assert not scores.dropped.any()
    (failure,) = scores.failures
    assert failure.row is None
    assert "too many" in failure.reason


@pytest.mark.parametrize("error", [SystemExit(3), StopIteration(), GeneratorExit(), AssertionError(), MemoryError("m")])
def test_every_kind_of_exception_is_reported(error):
    def reward(completions):
        raise error

    with pytest.raises(RewardError, match=rf"row 1 .*raised {type(error).__name__}.*4 of 4 completions"):
        score(reward)


def test_an_exception_while_listing():
    def lazy(completions):
        yield 1.0
        raise KeyError("k")

    with pytest.raises(RewardError, match="raised KeyError: 'k'"):
        score(lazy)


def test_long_messages_are_shortened():
    def reward(completions):
        raise ValueError("x" * 10_000)

    with pytest.raises(RewardError) as error:
        score(reward)
    assert len(str(error.value)) < 600
    scorer = Scorer([reward])
    with pytest.raises(RewardError) as error:
        scorer.score([""], ["y" * 10_000], {})
    assert len(str(error.value)) < 700


def test_a_completion_of_messages_is_quoted():
    scorer = Scorer([returning([math.nan])])
    with pytest.raises(RewardError, match="completion 'hello'"):
        scorer.score([[]], [[{"role": "assistant", "content": "hello"}]], {})
    with pytest.raises(RewardError, match="completion 42"):
        scorer.score([[]], [42], {})


def test_the_line_is_in_the_users_file():
    def reward(completions):
        import json

        return [json.loads("{")]

    with pytest.raises(
        RewardError, match=rf"JSONDecodeError: .*\(test_contract.py, line {reward.__code__.co_firstlineno + 3}\)"
    ):
        score(reward)


def test_a_function_that_wants_the_main_thread():
    import signal

    def reward(completions):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return [1.0] * len(completions)

    with pytest.raises(RewardError, match=r"only works in main thread.*set the time limit to None"):
        score(reward)
    assert values(score(reward, timeout=None)) == [1] * 4


# --- dropping ---------------------------------------------------------------------------------------------------------


def test_wrong_lengths_are_tried_row_by_row():
    def deduplicating(completions, log_metric, log_extra):
        kept = [completion for completion in completions if completion != "bb"]
        log_metric("kept", len(kept))
        log_extra("text", kept)
        return [1.0] * len(kept)

    scores = score(deduplicating, "drop")
    assert values(scores) == [1, None, 1, 1]
    assert scores.failures == (RowFailure("f", 1, "returned 0 values for 1 row; one per completion is needed"),)
    assert scores.extra == {"text": ["a", None, "ccc", "dddd"]}
    assert scores.metrics == {"kept": 1.0}  # of the scored rows; the log of the failed batch is dropped


@pytest.mark.parametrize(("result", "message"), [case for case in BROKEN if not hasattr(case[0], "__next__")])
def test_a_failure_in_every_row_drops_every_row(result, message):
    scores = score(returning(result), "drop")
    assert scores.dropped.all()
    assert scores.rewards.isnan().all()
    assert [failure.row for failure in scores.failures] == [0, 1, 2, 3]


def test_a_dropped_row_has_no_reward_at_all():
    scorer = Scorer([lengths, fragile, named(returning([1, math.nan, 1, None]), name="g")], on_error="drop")
    scores = scorer.score(PROMPTS, COMPLETIONS, {})
    assert scores.dropped.tolist() == [False, True, False, True]
    assert scores.rewards[[1, 3]].isnan().all()
    assert scores.rewards[[0, 2]].tolist() == [[1, 1, 1], [3, 3, 1]]
    assert [(failure.function, failure.row) for failure in scores.failures] == [
        ("fragile", 1),
        ("fragile", 3),
        ("g", 1),
    ]


def test_three_batches_without_a_scored_row_stop_the_run():
    broken = [True]
    scorer = Scorer([named(lambda completions: 1 / 0 if broken[0] else [1.0] * 4, name="f")], on_error="drop")

    def run():
        return scorer.score(PROMPTS, COMPLETIONS, {})

    assert run().dropped.all()
    assert run().dropped.all()
    broken[0] = False
    assert not run().dropped.any()
    broken[0] = True
    run()
    run()
    scorer.score([], [], {})  # an empty batch does not count
    with pytest.raises(
        RewardError, match=r"no row of the last 3 batches could be scored; reward 'f' \(completion 'a'\): raised ZeroD"
    ):
        run()


def test_nothing_to_score():
    scores = Scorer([lengths, Judge()]).score([], [], {"answer": []})
    assert scores.rewards.shape == (0, 2)
    assert scores.rewards.dtype == torch.float64
    assert scores.dropped.shape == (0,)


# --- logging ----------------------------------------------------------------------------------------------------------


def test_logging():
    def one(completions, log_extra, log_metric):
        for completion in completions:
            log_extra("upper", [completion.upper()])
        log_extra(column="size", values=np.array([1, 2, 3, 4]))
        log_metric("m", 1)
        log_metric(name="m", value=torch.tensor(2.0))
        return [0.0] * 4

    def two(completions, log_extra, log_metric):
        log_extra("size", [5] * 4)
        log_metric("m", 6.0)
        log_metric("n", 0.5)
        return [0.0] * 4

    scores = Scorer([one, two]).score(PROMPTS, COMPLETIONS, {})
    assert scores.extra == {"upper": ["A", "BB", "CCC", "DDDD"], "size": [1, 2, 3, 4], "two/size": [5] * 4}
    assert scores.metrics == {"m": 3.0, "n": 0.5}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x", [1, 2]), "logged 2 values as 'x' for 4 rows"),
        (("x", "abcd"), "log_extra needs a column's name and a list of values, got 'x', 'abcd'"),
        (("x", 3), "log_extra needs"),
        ((3, [1, 2, 3, 4]), "log_extra needs"),
    ],
)
def test_invalid_arguments_of_log_extra(arguments, message):
    def reward(completions, log_extra):
        log_extra(*arguments)
        return [0.0] * len(completions)

    with pytest.raises(RewardError, match=message):
        score(reward)


def test_a_metric_is_a_number():
    def reward(completions, log_metric):
        log_metric("m", "high")
        return [0.0] * len(completions)

    with pytest.raises(RewardError, match=r"raised InputError: log_metric\('m', …\) needs a number, got 'high'"):
        score(reward)
