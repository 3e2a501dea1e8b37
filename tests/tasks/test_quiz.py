"""The quiz: its questions cannot be answered without the rule, and the rule answers all of them."""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.config import Recipe, with_settings
from groupwise.errors import ConfigError
from groupwise.rewards import Scorer
from groupwise.tasks.quiz import (
    CONSONANTS,
    ENDINGS,
    LETTERS,
    PARTS,
    VOWELS,
    beginnings_of,
    grade_letter,
    questions,
    quiz_task,
)

seeds = st.integers(0, 2**31)
FIRST_TRAIN = {
    "prompt": "A zutin\nB solol\nC wapam\nD nenib\nFor heart",
    "question": "For heart",
    "options": {"A": "zutin", "B": "solol", "C": "wapam", "D": "nenib"},
    "answer_idx": "B",
    "answer": "solol",
}
FIRST_HELD_OUT = "A hupam\nB witin\nC helol\nD renib\nFor sleep"
FIRST_EXAMPLE = ("A minib\nB culol\nC bopam\nD notin\nFor lipid", "D")


def make_quiz(*, train_rows, held_out_rows, seed=0):
    sizes = {"data.train_rows": train_rows, "data.held_out_rows": held_out_rows}
    return quiz_task(with_settings(Recipe(), {"task": "quiz", "train.seed": seed, **sizes}))


QUIZ = make_quiz(train_rows=4000, held_out_rows=4000, seed=3)


def share_right(choose, rows=QUIZ.held_out):
    return sum(choose(row) == row["answer_idx"] for row in rows) / len(rows)


def letter_of(row, name):
    return next(letter for letter, option in row["options"].items() if option == name)


# --- rows ------------------------------------------------------------------------------------------------------------


def test_a_seed_always_gives_the_same_questions():
    """Another order of random draws would be another quiz."""
    first = make_quiz(train_rows=1, held_out_rows=1, seed=0)
    assert first.train == [FIRST_TRAIN]
    assert [row["prompt"] for row in first.held_out] == [FIRST_HELD_OUT]
    assert first.examples[0] == FIRST_EXAMPLE


def test_columns_and_prompt():
    for row in QUIZ.train[:40]:
        assert list(row) == ["prompt", "question", "options", "answer_idx", "answer"]
        assert tuple(row["options"]) == LETTERS
        assert row["options"][row["answer_idx"]] == row["answer"]
        a, b, c, d = row["options"].values()
        assert row["prompt"] == f"A {a}\nB {b}\nC {c}\nD {d}\n{row['question']}"


def test_all_prompts_have_the_same_length():
    assert {len(row["prompt"].encode()) for row in QUIZ.train} == {len("A .....\n" * 4 + "For .....")} == {41}


@given(seed=seeds)
def test_exactly_one_option_is_right(seed):
    for row in islice(questions("train", seed), 8):
        ending = ENDINGS[row["question"].removeprefix("For ")]
        assert [name for name in row["options"].values() if name.endswith(ending)] == [row["answer"]]


def test_the_last_byte_identifies_complaints_and_endings():
    assert len({complaint[-1] for complaint in ENDINGS}) == len(ENDINGS) == len({e[-1] for e in ENDINGS.values()})


def test_size_and_seed():
    short, long = make_quiz(train_rows=5, held_out_rows=3, seed=1), make_quiz(train_rows=9, held_out_rows=7, seed=1)
    assert (len(short.train), len(short.held_out), len(long.train), len(long.held_out)) == (5, 3, 9, 7)
    assert (long.train[:5], long.held_out[:3], long.examples) == (short.train, short.held_out, short.examples)
    other = make_quiz(train_rows=5, held_out_rows=3, seed=2)
    assert other.train[0] != short.train[0]
    assert other.held_out[0] != short.held_out[0]
    assert other.examples[0][0] != short.examples[0][0]


# --- no shortcuts ----------------------------------------------------------------------------------------------------


@given(seed=seeds, part=st.sampled_from(sorted(PARTS)))
def test_each_option_is_the_answer_to_one_of_four_questions(seed, part):
    rows = list(islice(questions(part, seed), 12))
    for start in range(0, 12, 4):
        four = rows[start : start + 4]
        assert all(row["options"] == four[0]["options"] for row in four)
        assert sorted(row["answer_idx"] for row in four) == list(LETTERS)
        assert len({row["question"] for row in four}) == 4


@given(salt=st.integers())
def test_no_choice_by_the_options_alone_beats_chance(salt):
    """A random function of the options is right exactly one time in four."""

    def choose(row):
        return LETTERS[zlib.crc32(f"{salt} {row['options']}".encode()) % 4]

    assert share_right(choose, QUIZ.held_out[:400]) == 0.25


def most_often_right():
    """How often each name, and each ending, was the answer in training."""
    asked, right = Counter(), Counter()
    for row in QUIZ.train:
        for name in row["options"].values():
            asked.update([name, name[-3:]])
        right.update([row["answer"], row["answer"][-3:]])
    return {text: right[text] / asked[text] for text in asked}


RATES = most_often_right()
SHORTCUTS = {
    **{f"always {letter}": lambda row, letter=letter: letter for letter in LETTERS},
    "first in the alphabet": lambda row: letter_of(row, min(row["options"].values())),
    "last in the alphabet": lambda row: letter_of(row, max(row["options"].values())),
    "longest": lambda row: letter_of(row, max(row["options"].values(), key=len)),
    "most vowels": lambda row: letter_of(row, max(row["options"].values(), key=lambda n: sum(c in VOWELS for c in n))),
    "ending that was right most often": lambda row: letter_of(
        row, max(row["options"].values(), key=lambda name: RATES[name[-3:]])
    ),
    "most letters in common with the question": lambda row: letter_of(
        row, max(row["options"].values(), key=lambda name: len(set(name) & set(row["question"][4:])))
    ),
}


@pytest.mark.parametrize("shortcut", [name for name in SHORTCUTS if "common" not in name])
def test_shortcuts_are_at_chance(shortcut):
    assert share_right(SHORTCUTS[shortcut]) == 0.25


def test_memorised_names_are_at_chance_even_in_training():
    def choose(row):
        return letter_of(row, max(row["options"].values(), key=lambda name: RATES[name]))

    assert share_right(choose, QUIZ.train) == 0.25


def test_the_question_alone_is_near_chance():
    """The best letter for each complaint, chosen on the held-out rows themselves."""
    letters = defaultdict(Counter)
    for row in QUIZ.held_out:
        letters[row["question"]][row["answer_idx"]] += 1
    assert set(letters) == {f"For {complaint}" for complaint in ENDINGS}
    assert sum(max(counter.values()) for counter in letters.values()) / len(QUIZ.held_out) < 0.29


def test_the_rule_is_not_spelling():
    assert share_right(SHORTCUTS["most letters in common with the question"]) < 0.35


def test_the_rule_of_the_training_rows_answers_every_held_out_question():
    seen = defaultdict(Counter)
    for row in QUIZ.train:
        seen[row["question"]][row["answer"][-1]] += 1

    def choose(row):
        return letter_of(row, max(row["options"].values(), key=lambda name: seen[row["question"]][name[-1]]))

    assert share_right(choose) == 1.0


# --- held-out names are new ------------------------------------------------------------------------------------------


def names(rows):
    return {name for row in rows for name in row["options"].values()}


def test_the_parts_share_no_names_for_any_seed():
    train, held_out, examples = (set(beginnings_of(part)) for part in ("train", "held_out", "examples"))
    assert not train & held_out
    assert not train & examples
    assert not held_out & examples
    assert len(train | held_out | examples) == len(CONSONANTS) * len(VOWELS)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (3, 4))])
def test_a_part_uses_all_of_its_names(seed):
    quiz = make_quiz(train_rows=12_000, held_out_rows=4000, seed=seed)
    examples = {line[2:] for prompt, _ in quiz.examples for line in prompt.split("\n")[:4]}
    used = {"train": names(quiz.train), "held_out": names(quiz.held_out), "examples": examples}
    for part, used_names in used.items():
        assert used_names == {beginning + ending for beginning in beginnings_of(part) for ending in ENDINGS.values()}


def test_every_letter_of_a_held_out_name_was_seen_in_that_place_in_training():
    held_out, train = (zip(*beginnings_of(part), strict=True) for part in ("held_out", "train"))
    for new, seen in zip(held_out, train, strict=True):
        assert set(new) <= set(seen)


# --- SFT examples ----------------------------------------------------------------------------------------------------


def test_the_letters_of_the_examples_are_random():
    rows = list(islice(questions("examples", 3), len(QUIZ.examples)))
    assert [row["prompt"] for row in rows] == [prompt for prompt, _ in QUIZ.examples]
    counts = Counter(answer for _, answer in QUIZ.examples)
    assert sorted(counts) == list(LETTERS)
    assert min(counts.values()) > 0.2 * len(rows)
    right = sum(row["answer_idx"] == answer for row, (_, answer) in zip(rows, QUIZ.examples, strict=True))
    assert 0.2 < right / len(rows) < 0.3


# --- answers ---------------------------------------------------------------------------------------------------------

NO_ANSWERS = [
    "", " ", "A B C D", "ABCD", "AB", "AA", "a", "E", "B ", " B", "B\n", "B.", "(B)", "Answer: B", "A 45-year-old",
    "rivenac", "B rivenac", "B<|end|>", "В", "Ｂ", "B\0",
]  # fmt: skip


def test_only_a_single_letter_is_an_answer():
    assert [answer for answer in NO_ANSWERS if grade_letter({"answer_idx": "B"}, answer) is not None] == []


@pytest.mark.parametrize("right", LETTERS)
@pytest.mark.parametrize("answer", LETTERS)
def test_a_letter_is_right_or_wrong(answer, right):
    assert grade_letter({"answer_idx": right}, answer) is (answer == right)


def test_the_reward_is_one_for_the_right_letter_alone():
    completions = ["B", "A", "A B C D", "", [{"role": "assistant", "content": "B"}], "B"]
    columns = {"answer_idx": ["B", "B", "B", "B", "B", "C"], "answer": ["rivenac"] * 6}
    (reward,) = QUIZ.rewards
    assert reward.name == "correct"
    assert reward.weight == 1.0
    scores = Scorer(QUIZ.rewards).score(["?"] * 6, completions, columns)
    assert scores.rewards[:, 0].tolist() == [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]


def test_the_task():
    assert QUIZ.name == "quiz"
    assert QUIZ.metric == "accuracy"
    assert QUIZ.grades == {"accuracy": grade_letter}
    assert QUIZ.goal == 0.9


# --- recipes and invalid input --------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["train", "held_out"])
def test_a_recipe_with_data_is_refused(key):
    recipe = with_settings(Recipe(), {"task": "quiz", f"data.{key}": "mine.jsonl"})
    with pytest.raises(ConfigError, match=rf"generates its questions, but data\.{key} is 'mine.jsonl'"):
        quiz_task(recipe)
