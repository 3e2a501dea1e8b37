"""Evaluation: accuracies and intervals computed by hand, and the other metrics."""

from __future__ import annotations

import math

import pytest
import torch

from groupwise.data import PromptBuilder
from groupwise.errors import ConfigError, RewardError
from groupwise.evaluate import CHUNK, REWARD, evaluate
from groupwise.generate import Engine, Sampling
from groupwise.generate.local import LocalGenerator
from groupwise.generate.types import Rollout
from groupwise.model.tiny import tiny_model, tiny_tokenizer
from groupwise.rewards import RewardFunction, Scorer
from groupwise.stats import bootstrap_interval

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id


class ScriptedGenerator(LocalGenerator):
    """A generator of given completions: a list for each prompt's text."""

    def __init__(self, answers, reason="eos"):
        super().__init__(max_num_seqs=128)
        self.answers, self.reason, self.calls = answers, reason, []

    def generate(self, prompts, samples, sampling, *, stop=None, keys=None):
        self.calls.append({"prompts": len(prompts), "samples": samples, "sampling": sampling, "keys": list(keys)})
        texts = [text for ids in prompts for text in self.answers[TOKENIZER.decode(ids)]]
        rows = [[*TOKENIZER(text)["input_ids"], END] for text in texts]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        zeros = torch.zeros(ids.shape)
        groups = torch.arange(len(prompts)).repeat_interleave(samples)
        lengths = torch.tensor([len(row) for row in rows])
        return Rollout(ids, lengths, zeros, zeros, (self.reason,) * len(rows), groups, zeros.int())


def rows_of(*prompts, **columns):
    return [
        {"prompt": prompt, **{name: values[number] for name, values in columns.items()}}
        for number, prompt in enumerate(prompts)
    ]


def run(answers, rows, *, samples=1, reason="eos", generator=None, **options):
    """Evaluate the scripted answers, a list for each row."""
    prompts = PromptBuilder(TOKENIZER, chat=False).build(rows)
    generator = generator or ScriptedGenerator(
        {row["prompt"]: texts for row, texts in zip(rows, answers, strict=True)}, reason
    )
    return evaluate(
        generator, TOKENIZER, rows, prompts, sampling=Sampling(max_new_tokens=8), samples=samples,
        **{"grades": {}, **options},
    )  # fmt: skip


def is_right(row, answer):
    """Right if the answer is the row's; None if it is not a letter."""
    return answer == row["right"] if answer.isalpha() else None


def test_accuracy_with_wilsons_interval():
    """3 of 4: centre (0.75 + z²/8) / (1 + z²/4), half-width z / (1 + z²/4) · √(0.75 · 0.25 / 4 + z²/64)."""
    rows = rows_of("1", "2", "3", "4", right=["a", "b", "c", "d"])
    result = run([["a"], ["b"], ["x"], ["d"]], rows, grades={"accuracy": is_right})
    assert result.metrics["accuracy"] == 0.75
    assert result.metrics["accuracy_low"] == pytest.approx(0.3006418)
    assert result.metrics["accuracy_high"] == pytest.approx(0.9544127)
    assert result.metrics["accuracy_no_answer"] == 0.0
    assert result.metrics["mean_length"] == 2.0  # the letter and the end
    assert result.metrics["truncated"] == 0.0
    assert str(result.interval("accuracy")) == "0.75 [0.301, 0.954]"


def test_no_answer_counts_as_wrong_and_is_reported():
    rows = rows_of("1", "2", "3", "4", right=["a", "b", "c", "d"])
    result = run([["a"], ["7"], ["?!"], ["x"]], rows, grades={"accuracy": is_right})
    assert result.metrics["accuracy"] == 0.25
    assert result.metrics["accuracy_no_answer"] == 0.5
    assert [answer["accuracy"] for answer in result.answers] == [True, None, None, False]


def test_several_grades():
    rows = rows_of("1", "2", right=["a", "b"])
    grades = {"strict": is_right, "lenient": lambda row, answer: answer.strip() == row["right"]}
    result = run([["a"], [" b"]], rows, grades=grades)
    assert (result.metrics["strict"], result.metrics["lenient"]) == (0.5, 1.0)
    assert (result.metrics["strict_no_answer"], result.metrics["lenient_no_answer"]) == (0.5, 0.0)


def test_all_wrong_and_all_right_have_an_interval():
    rows = rows_of("1", "2", right=["a", "b"])
    z2 = 1.959963984540054**2
    for answers, share in (([["a"], ["b"]], 1.0), ([["x"], ["x"]], 0.0)):
        result = run(answers, rows, grades={"accuracy": is_right}).interval("accuracy")
        assert result.estimate == share
        inner = result.low if share else 1 - result.high
        assert inner == pytest.approx(2 / (2 + z2))


def test_several_samples_of_a_row_are_averaged_first():
    rows = rows_of("1", "2", right=["a", "b"])
    result = run([["a", "a", "x"], ["x", "7", "b"]], rows, samples=3, grades={"accuracy": is_right})
    assert result.metrics["accuracy"] == pytest.approx((2 / 3 + 1 / 3) / 2)
    assert result.metrics["accuracy_no_answer"] == pytest.approx(1 / 6)
    interval = bootstrap_interval([2 / 3, 1 / 3])  # rows are resampled, not answers
    assert result.metrics["accuracy_low"] == pytest.approx(interval.low) == pytest.approx(1 / 3)
    assert result.metrics["accuracy_high"] == pytest.approx(interval.high) == pytest.approx(2 / 3)
    assert [(answer["row"], answer["sample"], answer["answer"]) for answer in result.answers] == [
        (0, 0, "a"), (0, 1, "a"), (0, 2, "x"), (1, 0, "x"), (1, 1, "7"), (1, 2, "b"),
    ]  # fmt: skip


def test_rows_are_resampled_not_samples():
    """Eight equal samples of each of two rows are two observations."""
    rows = rows_of("1", "2", right=["a", "b"])
    result = run([["a"] * 8, ["x"] * 8], rows, samples=8, grades={"accuracy": is_right}).interval("accuracy")
    assert (result.estimate, result.low, result.high) == (0.5, 0.0, 1.0)


def test_the_record_of_a_completion():
    rows = rows_of("1", right=["a"])
    result = run([["ab"]], rows, grades={"accuracy": is_right}, reason="length")
    origin = {"row": 0, "where": "row 1", "prompt": "1"}
    assert result.answers == [
        {**origin, "sample": 0, "answer": "ab", "tokens": 3, "stop_reason": "length", "accuracy": False}
    ]
    assert result.metrics["truncated"] == 1.0


def test_rewards_instead_of_grades():
    rows = rows_of("1", "2", "3", right=["a", "b", "c"])
    scorer = Scorer(
        [
            RewardFunction("length", lambda completions, **_: [float(len(text)) for text in completions]),
            RewardFunction("right", lambda completions, right, **_: [
                float(text == wanted) for text, wanted in zip(completions, right, strict=True)], 0.5),
        ]
    )  # fmt: skip
    result = run([["a"], ["bb"], ["xyz"]], rows, scorer=scorer)
    assert [answer[REWARD] for answer in result.answers] == [1.5, 2.0, 3.0]
    assert result.metrics[REWARD] == pytest.approx(6.5 / 3)
    interval = bootstrap_interval([1.5, 2.0, 3.0])
    assert (result.metrics["reward_low"], result.metrics["reward_high"]) == (interval.low, interval.high)
    assert result.metrics["reward_unscored"] == 0.0
    assert "accuracy" not in result.metrics


def test_grades_and_rewards_together():
    rows = rows_of("1", "2", right=["a", "b"])
    scorer = Scorer([RewardFunction("one", lambda completions, **_: [1.0] * len(completions))])
    result = run([["a"], ["x"]], rows, grades={"accuracy": is_right}, scorer=scorer)
    assert (result.metrics["accuracy"], result.metrics[REWARD]) == (0.5, 1.0)


def test_a_completion_without_a_reward_is_not_counted():
    """None means not applicable, which is neither 0 nor a failure."""
    rows = rows_of("1", "2", "3", right=["a", "b", "c"])
    scorer = Scorer([RewardFunction("some", lambda completions, **_: [1.0, None, 0.0])])
    result = run([["a"], ["b"], ["c"]], rows, scorer=scorer)
    assert result.metrics[REWARD] == 0.5
    assert result.metrics["reward_unscored"] == pytest.approx(1 / 3)
    assert [answer[REWARD] for answer in result.answers] == [1.0, None, 0.0]


def test_a_function_that_returns_none_leaves_the_others():
    rows = rows_of("1", "2", right=["a", "b"])
    scorer = Scorer([RewardFunction("a", lambda completions, **_: [1.0, None]),
                     RewardFunction("b", lambda completions, **_: [2.0, 2.0], 0.5)])  # fmt: skip
    result = run([["a"], ["b"]], rows, scorer=scorer)
    assert [answer[REWARD] for answer in result.answers] == [2.0, 1.0]
    assert result.metrics["reward_unscored"] == 0.0


def test_unscored_samples_are_left_out_of_the_mean_of_a_row():
    rows = rows_of("1", "2", right=["a", "b"])
    scorer = Scorer([RewardFunction("a", lambda completions, **_: [1.0, None, 3.0, 5.0])])
    result = run([["a", "b"], ["c", "d"]], rows, samples=2, scorer=scorer)
    assert result.metrics[REWARD] == pytest.approx((1.0 + 4.0) / 2)


def test_a_failed_reward_is_never_zero():
    rows = rows_of("1", "2", right=["a", "b"])

    def breaks(completions, **_):
        if "b" in completions:
            raise KeyError("b")
        return [1.0] * len(completions)

    with pytest.raises(RewardError, match=r"reward 'breaks' failed on row 2 .*completion 'b'"):
        run([["a"], ["b"]], rows, scorer=Scorer([breaks]))
    with pytest.raises(RewardError, match=r"failed on row 2, completion 1 \(prompt '2', completion 'b'\)"):
        run([["a", "a"], ["b", "a"]], rows, samples=2, scorer=Scorer([breaks]))
    result = run([["a"], ["b"]], rows, scorer=Scorer([breaks], on_error="drop"))
    assert result.metrics[REWARD] == 1.0
    assert result.metrics["reward_unscored"] == 0.5


def test_rewards_that_score_nothing():
    rows = rows_of("1", "2", right=["a", "b"])
    skipping = Scorer([RewardFunction("none", lambda completions, **_: [None] * len(completions))])
    with pytest.raises(RewardError, match=r"scored none of the 2 completions .*: they returned None"):
        run([["a"], ["b"]], rows, scorer=skipping)

    def broken(completions, **_):
        raise KeyError("x")

    with pytest.raises(RewardError, match=r"scored none of the 2 completions .*\(.*KeyError"):
        run([["a"], ["b"]], rows, scorer=Scorer([broken], on_error="drop"))


def test_arguments_of_a_reward():
    seen = {}

    def reward(prompts, completions, completion_ids, right, trainer_state, **columns):
        seen.update(prompts=prompts, completions=completions, ids=completion_ids, right=right, others=sorted(columns))
        seen["state"] = trainer_state
        return [0.0] * len(prompts)

    rows = [{"prompt": "1", "right": "a"}, {"prompt": "2", "right": "b", "more": 5}]
    run([["a"], ["bc"]], rows, scorer=Scorer([reward]), trainer_state="state")
    assert seen["state"] == "state"
    assert seen["prompts"] == ["1", "2"]
    assert seen["completions"] == ["a", "bc"]
    assert seen["ids"] == [[ord("a"), END], [ord("b"), ord("c"), END]]
    assert seen["right"] == ["a", "b"]
    assert {"more"} <= set(seen["others"])
    assert "prompt" not in seen["others"]


def test_chat_prompts_give_completions_as_messages():
    rows = [{"prompt": [{"role": "user", "content": "1"}]}]
    prompts = PromptBuilder(TOKENIZER).build(rows)
    seen = []

    def reward(completions, **_):
        seen.extend(completions)
        return [1.0] * len(completions)

    generator = ScriptedGenerator({prompts[0].text: ["a"]})
    evaluate(generator, TOKENIZER, rows, prompts, grades={}, scorer=Scorer([reward]), sampling=Sampling())
    assert seen == [[{"role": "assistant", "content": "a"}]]


def test_nothing_to_evaluate_on_or_by():
    with pytest.raises(
        ConfigError,
        match=r"there is nothing to evaluate on: give held-out rows \(data.held_out, data.held_out_from_train\)",
    ):
        evaluate(ScriptedGenerator({}), TOKENIZER, [], [], grades={"accuracy": is_right}, sampling=Sampling())
    with pytest.raises(ConfigError, match="there is nothing to evaluate by: the task has neither grades nor rewards"):
        run([["a"]], rows_of("1"))


def test_rows_have_the_same_keys_in_any_chunk():
    """So the samples of a row do not depend on the chunk size."""
    rows = rows_of(*(f"{number}" for number in range(CHUNK + 3)))
    generator = ScriptedGenerator({row["prompt"]: ["a"] for row in rows})
    steps = []
    result = run([["a"]] * len(rows), rows, generator=generator, grades={"accuracy": lambda row, answer: True},
                progress=lambda done, total: steps.append((done, total)))  # fmt: skip
    assert [call["prompts"] for call in generator.calls] == [CHUNK, 3]
    assert [key for call in generator.calls for key in call["keys"]] == list(range(CHUNK + 3))
    assert steps == [(CHUNK, CHUNK + 3), (CHUNK + 3, CHUNK + 3)]
    assert len(result.answers) == CHUNK + 3
    assert result.answers[-1]["row"] == CHUNK + 2


# --- with a real model -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine():
    return Engine(tiny_model())


def completions_of(engine, sampling, samples=1, count=6):
    rows = rows_of(*(f"Say {number}: " for number in range(count)))
    prompts = PromptBuilder(TOKENIZER, chat=False).build(rows)
    grades = {"accuracy": lambda row, answer: bool(answer)}
    result = evaluate(engine, TOKENIZER, rows, prompts, grades=grades, sampling=sampling, samples=samples)
    return [answer["answer"] for answer in result.answers]


def test_greedy_completions_do_not_depend_on_the_seed(engine):
    first = completions_of(engine, Sampling(max_new_tokens=6, greedy=True, seed=1))
    assert completions_of(engine, Sampling(max_new_tokens=6, greedy=True, seed=2)) == first
    twice = completions_of(engine, Sampling(max_new_tokens=6, greedy=True, seed=1), samples=2)
    assert twice == [text for text in first for _ in range(2)]


def test_sampled_completions_depend_only_on_the_seed(engine):
    first = completions_of(engine, Sampling(max_new_tokens=6, seed=1))
    assert completions_of(engine, Sampling(max_new_tokens=6, seed=1)) == first
    assert completions_of(engine, Sampling(max_new_tokens=6, seed=2)) != first
    assert completions_of(engine, Sampling(max_new_tokens=6, seed=1), count=3) == first[:3]
    several = completions_of(engine, Sampling(max_new_tokens=6, seed=1), samples=3)
    assert len(set(several)) > 6


def test_metrics_are_plain_finite_numbers(engine):
    rows = rows_of("1", "2")
    prompts = PromptBuilder(TOKENIZER, chat=False).build(rows)
    result = evaluate(engine, TOKENIZER, rows, prompts, grades={"accuracy": lambda row, answer: None},
                     sampling=Sampling(max_new_tokens=4))  # fmt: skip
    assert all(type(value) is float and math.isfinite(value) for value in result.metrics.values())
    assert all(type(value) in (str, int, float, type(None)) for answer in result.answers for value in answer.values())


def test_rewards_are_computed_in_batches():
    """The time limit of a reward is that of one batch, so an evaluation of many rows must not be one call."""
    sizes = []

    def length(completions, **_):
        sizes.append(len(completions))
        return [float(len(text)) for text in completions]

    rows = rows_of(*"abcdefg")
    answers = [["x" * number] for number in range(1, 8)]
    scorer = Scorer([RewardFunction("length", length)])
    evaluation = run(answers, rows, scorer=scorer, score_batch=3)
    assert sizes == [3, 3, 1]
    assert evaluation.metrics[REWARD] == 4.0
    assert [record[REWARD] for record in evaluation.answers] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
