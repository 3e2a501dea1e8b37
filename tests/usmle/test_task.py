"""The task of medical questions: prompts, rewards, grades, and the options of a recipe."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.config import load_recipe, make_recipe
from groupwise.errors import ConfigError, DataError
from groupwise.rewards import Scorer
from groupwise.tasks import load_task
from groupwise.training.rollout.advantages import compute_group_advantages
from groupwise.usmle.answers import extract_answer
from groupwise.usmle.prompts import format_prompt, letter_answers, shuffle_options, with_prompt, worked_answer
from groupwise.usmle.rewards import compute_reward, grade
from groupwise.usmle.task import USMLE, UsmleOptions
from tests.training.factories import make_batch

FORMS = ("chat", "direct", "completion")
ROW = {
    "question": "A 65-year-old man presents with...",
    "options": {
        "A": "Myocardial infarction",
        "B": "Pulmonary embolism",
        "C": "Pneumothorax",
        "D": "Aortic dissection",
    },
    "answer": "D",
    "explanation": "The pain tears and moves to the back. ",
}
LETTERS = {
    2: "A or B",
    3: "A, B, or C",
    4: "A, B, C, or D",
    5: "A, B, C, D, or E",
    10: "A, B, C, D, E, F, G, H, I, or J",
}


def task_of(options=None, **tables):
    return load_task(make_recipe({"task": "usmle", "task_options": options or {}, **tables}))


def with_options(number):
    options = {letter: f"option {letter}" for letter in "ABCDEFGHIJ"[:number]}
    return {"question": "Which?", "options": options, "answer": "B"}


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_the_completion_prompt():
    assert format_prompt(ROW, "completion") == (
        "Medical Question: A 65-year-old man presents with...\n"
        "\n"
        "Options:\n"
        "A. Myocardial infarction\n"
        "B. Pulmonary embolism\n"
        "C. Pneumothorax\n"
        "D. Aortic dissection\n"
        "\n"
        "Analyze the case and provide the correct answer (A, B, C, or D): "
    )


def prompt_of_the_design(example):
    """`format_usmle_prompt`, as the design has it."""
    prompt = f"Medical Question: {example['question']}\n\n"
    prompt += "Options:\n"
    for key, value in sorted(example["options"].items()):
        prompt += f"{key}. {value}\n"
    prompt += "\nAnalyze the case and provide the correct answer (A, B, C, or D): "
    return prompt


@given(st.text(), st.lists(st.text(), min_size=4, max_size=4))
def test_the_completion_prompt_is_the_designs_to_the_character(question, texts):
    example = {"question": question, "options": dict(zip("BADC", texts, strict=True))}
    assert format_prompt(example, "completion") == prompt_of_the_design(example)


def test_the_chat_and_direct_prompts():
    asked = (
        "A 65-year-old man presents with...\n"
        "\n"
        "A. Myocardial infarction\n"
        "B. Pulmonary embolism\n"
        "C. Pneumothorax\n"
        "D. Aortic dissection\n"
        "\n"
    )
    assert format_prompt(ROW) == format_prompt(ROW, "chat")
    assert format_prompt(ROW) == (
        asked
        + "Reason step by step in a few sentences. End with a line that says 'Answer:' and the letter of the right "
        "option (A, B, C, or D)."
    )
    assert format_prompt(ROW, "direct") == (
        asked
        + "Reply with one line that says 'Answer:' and the letter of the right option (A, B, C, or D), nothing else."
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("number", LETTERS)
def test_a_prompt_names_the_letters_of_its_options(form, number):
    row = with_options(number)
    prompt = format_prompt({**row, "options": dict(reversed(row["options"].items()))}, form)
    end = {"completion": f"correct answer ({LETTERS[number]}): ", "chat": f"right option ({LETTERS[number]})."}
    end["direct"] = f"right option ({LETTERS[number]}), nothing else."
    assert prompt.endswith(end[form])
    listed = "".join(f"{letter}. option {letter}\n" for letter in "ABCDEFGHIJ"[:number])
    assert f"\n{listed}\n" in prompt
    assert prompt.count(". option ") == number


def test_a_row_with_a_prompt_keeps_its_file_and_line():
    row = task_of().train[3]
    assert row.where == "usmle_sample.jsonl, line 4"
    assert with_prompt(row, form="direct").where == row.where
    assert shuffle_options(row, "seed", form="direct").where == row.where
    assert with_prompt(ROW, form="direct")["prompt"] == format_prompt(ROW, "direct")


def test_the_shortest_answers():
    assert letter_answers(with_options(2), form="completion") == {"A": "A", "B": "B"}
    for form in ("chat", "direct"):
        assert letter_answers(with_options(3), form=form) == {letter: f"Answer: {letter}" for letter in "ABC"}


def test_the_target_of_sft():
    assert worked_answer(ROW, "chat") == "The pain tears and moves to the back.\n\nAnswer: D"
    assert worked_answer({**ROW, "explanation": None}, "chat") == "Answer: D"
    assert worked_answer(ROW, "direct") == "Answer: D"
    assert worked_answer(ROW, "completion") == "D. Aortic dissection"


@pytest.mark.parametrize("form", FORMS)
def test_both_readers_read_the_worked_and_the_shortest_answers(form):
    task = task_of({"prompt": form})
    assert len(task.examples) == len(task.train)
    for row, (prompt, answer) in zip(task.train, task.examples, strict=True):
        assert prompt == row["prompt"]
        assert grade(row, answer, strict=True) is True
        for letter, text in letter_answers(row, form=form).items():
            right = letter == row["answer"]
            assert grade(row, text, strict=True) is grade(row, text, strict=False) is right


@given(st.sampled_from(sorted(LETTERS)), st.text(max_size=8), st.sampled_from(FORMS))
def test_shuffled_options(number, seed, form):
    row = with_options(number)
    moved = shuffle_options(row, seed, form=form)
    assert moved["options"][moved["answer"]] == row["options"][row["answer"]]
    assert moved["options"] != row["options"]
    assert list(moved["options"]) == list(row["options"])
    assert sorted(moved["options"].values()) == sorted(row["options"].values())
    assert {old: moved["options"][new] for old, new in moved["moved"].items()} == row["options"]
    assert moved["answer"] == moved["moved"][row["answer"]]
    assert moved["prompt"] == format_prompt(moved, form)
    assert shuffle_options(row, seed, form=form) == moved


def test_every_other_order_is_equally_likely():
    orders = Counter(
        tuple(shuffle_options(with_options(3), str(seed), form="chat")["moved"].values()) for seed in range(600)
    )
    assert len(orders) == 5  # all but the original
    assert min(orders.values()) > 80  # 120 expected


# --- rewards and grades -----------------------------------------------------------------------------------------------

OPTIONS = {"A": "Sinus node", "B": "Mitral valve", "C": "Left atrium", "D": "Aortic root"}
COMPLETIONS = [
    "The pace comes from the node.\n\nAnswer: A",
    "Answer: B",
    "I think that the sinus node is correct.",
    "I do not know.",
]


def score(task, completions=COMPLETIONS, answer="A", options=OPTIONS):
    columns = {"options": [options] * len(completions), "answer": [answer] * len(completions)}
    return Scorer(task.rewards).score(["?"] * len(completions), completions, columns)


def test_the_strict_reward():
    scores = score(task_of({"reading": "strict"}))
    assert scores.rewards.flatten().tolist() == [1.0, 0.0, 0.0, 0.0]
    assert scores.extra == {
        "predicted": ["A", "B", None, None],
        "ground_truth": ["A", "A", "A", "A"],
        "correct": [True, False, False, False],
        "has_valid_answer": [True, True, False, False],
        "response_length": [40, 9, 39, 14],
        "rule": ["stated", "stated", "nothing", "nothing"],
    }


def test_the_lenient_reward():
    scores = score(task_of())
    assert scores.rewards.flatten().tolist() == [1.0, 0.0, 1.0, 0.0]
    assert scores.extra["predicted"] == ["A", "B", "A", None]
    assert scores.extra["has_valid_answer"] == [True, True, True, False]


DESIGN_ANSWERS = {
    "D": [
        "Given the sudden onset of chest pain radiating to the back, along with the patient's age and risk factors, "
        "the most likely diagnosis is D. Aortic dissection."
    ],
    "A": [
        "The answer is A",
        "A. Myocardial infarction",
        "Based on the symptoms, A",
        "Answer: A",
        "Option A",
        "A. Myocardial infarction is correct",
    ],
    None: ["This patient could have several conditions. Chest pain is concerning..."],
}
DESIGN_CASES = [(text, letter) for letter, texts in DESIGN_ANSWERS.items() for text in texts]


@pytest.mark.parametrize("options", [ROW["options"], None], ids=["options", "letters"])
@pytest.mark.parametrize(("text", "letter"), DESIGN_CASES)
def test_the_designs_own_answers(text, letter, options):
    """They are read with the question's options and without; also behind the prompt, as some models return it."""
    assert extract_answer(text, options).letter == letter
    if options is not None:
        assert extract_answer(prompt_of_the_design(ROW) + text, options).letter == letter


@pytest.mark.parametrize("recipe", ["usmle", "default"])
def test_the_designs_good_answers_earn_the_reward(recipe):
    task = task_of() if recipe == "default" else load_task(load_recipe(recipe))
    texts = [text for text, _ in DESIGN_CASES]
    for right in "AD":
        wanted = [float(letter == right) for _, letter in DESIGN_CASES]
        assert score(task, texts, right, ROW["options"]).rewards.flatten().tolist() == wanted
        row = {**ROW, "answer": right}
        graded = [None if letter is None else letter == right for _, letter in DESIGN_CASES]
        assert [task.grades["accuracy"](row, text) for text in texts] == graded


def test_the_reward_of_one_answer():
    reward, info = compute_reward(ROW, "The pain tears, so the answer is D.")
    assert (reward, info) == (
        1.0,
        {
            "predicted": "D",
            "ground_truth": "D",
            "correct": True,
            "has_valid_answer": True,
            "response_length": 35,
            "rule": "stated",
        },
    )
    assert compute_reward(ROW, "Option D")[0] == 1.0
    assert compute_reward(ROW, "Option D", strict=True)[0] == 0.0
    reward, info = compute_reward(ROW, "No idea.")
    assert (reward, info["predicted"], info["has_valid_answer"], info["correct"]) == (0.0, None, False, False)


def test_accuracy_is_by_the_rewards_reader():
    for reading, accuracy in (("lenient", True), ("strict", None)):
        grades = task_of({"reading": reading}).grades
        graded = {name: grade(ROW, "Based on the symptoms, D") for name, grade in grades.items()}
        assert graded == {"accuracy": accuracy, "accuracy_strict": None, "accuracy_lenient": True}


@pytest.mark.parametrize(
    ("recipe", "overrides", "masked"),
    [
        # Each answer as the recipe's prompt asks for it, then one without an answer, and a repetition.
        ("usmle", {}, []),
        ("usmle-short", {}, []),
        ("usmle", {"task_options.prompt": "completion"}, []),
        ("usmle", {"task_options.prompt": "direct"}, ["too_short"]),
    ],
)
def test_the_literal_masks_leave_the_answers_that_the_recipes_ask_for(recipe, overrides, masked):
    recipe = load_recipe(recipe, {"algorithm": "enhanced_grpo_literal", **overrides})
    task = load_task(recipe)
    asked = [text for _, text in task.examples[:2]]
    texts = [*asked, "I cannot say anything about this case.", "and that is that " * 9 + "\nAnswer: A"]
    batch = replace(make_batch([[1.0] * 4], [[3] * 4], texts=texts), rows=[task.train[0]])
    result = compute_group_advantages(batch, recipe, [1.0], grades=task.grades, metric=task.metric)
    reasons = [sorted(name for name, out in result.masked_out.items() if out[sample]) for sample in range(4)]
    assert reasons == [masked, masked, ["no_answer"], ["repetitive"]]
    assert ["masks.min_length 10" in note for note in task.notes] == [True] * len(masked)


def test_metrics_of_the_letters():
    task = task_of({"reading": "strict"})
    scores = score(task)
    assert scores.metrics == {
        "chance": 0.25,
        "letters/A": 0.5,
        "letters/B": 0.5,
        "letters/C": 0.0,
        "letters/D": 0.0,
        "letters_right/A": 1.0,
        "letters_right/B": 0.0,
        "letters_right/C": 0.0,
        "letters_right/D": 0.0,
    }
    columns = {"options": [OPTIONS, {**OPTIONS, "E": "Vena cava"}], "answer": ["A", "E"]}
    mixed = Scorer(task.rewards).score(["?", "?"], ["no", "idea"], columns).metrics
    assert mixed["chance"] == pytest.approx((1 / 4 + 1 / 5) / 2)
    assert (mixed["letters_right/E"], mixed["letters/E"]) == (0.5, 0.0)


@pytest.mark.parametrize("reward", ["binary", "enhanced"])
def test_rewards_of_an_empty_batch(reward):
    assert score(task_of({"reward": reward}), []).rewards.shape == (0, 1)


def test_a_chat_completion():
    message = [[{"role": "assistant", "content": "Answer: A"}]]
    assert score(task_of(), message).rewards.tolist() == [[1.0]]
    assert score(task_of({"reward": "enhanced"}), message).extra["response_length"] == [9]


LONG = "Nothing else in the picture fits the case as well as this does.\n"  # of 64 characters
TERM = "Tachycardia is what the picture would show in such a patient.\n"  # of 62 characters
ENHANCED = [f"{TERM}Answer: A", f"{LONG}Answer: A", "Answer: A", f"{TERM}Answer: B", "Tachycardia.\nAnswer: B", LONG]


@pytest.mark.parametrize(
    ("reward", "totals", "bonus", "clamped"),
    [
        (
            "enhanced",
            [1.0, 1.0, 0.9, 0.05, 0.0, 0.0],
            [0.05, 0.0, 0.0, 0.05, 0.05, 0.0],
            [-0.05, 0.0, 0.0, 0.0, 0.05, 0.0],
        ),
        (
            "enhanced_when_right",
            [1.05, 1.0, 0.9, 0.0, 0.0, 0.0],
            [0.05, 0.0, 0.0, 0.0, 0.0, 0.0],
            [0.0, 0.0, 0.0, 0.0, 0.1, 0.0],
        ),
    ],
)
def test_the_enhanced_rewards_and_their_parts(reward, totals, bonus, clamped):
    scores = score(task_of({"reward": reward}), ENHANCED)
    assert scores.rewards.flatten().tolist() == pytest.approx(totals)
    assert scores.extra["enhanced/correctness"] == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert scores.extra["enhanced/term_bonus"] == pytest.approx(bonus)
    assert scores.extra["enhanced/short_penalty"] == pytest.approx([0.0, 0.0, -0.1, 0.0, -0.1, 0.0])
    assert scores.extra["enhanced/clamped"] == pytest.approx(clamped)
    assert scores.extra["predicted"] == ["A", "A", "A", "B", "B", None]
    assert scores.metrics["enhanced/correctness"] == 0.5
    assert scores.metrics["enhanced/short_penalty"] == pytest.approx(-0.2 / 6)
    assert scores.metrics["letters/A"] == 0.6


def test_the_weights_of_the_enhanced_reward(tmp_path):
    (tmp_path / "words.txt").write_text("picture\n")
    options = {
        "reward": "enhanced",
        "term_bonus": 0.2,
        "short_penalty": 0.3,
        "short_length": 64,
        "vocabulary": str(tmp_path / "words.txt"),
    }
    task = task_of(options)
    assert [each.name for each in task.rewards] == ["enhanced"]
    scores = score(task, ["Answer: A", f"{LONG}Answer: B", "The picture: the sinus node.", f"{TERM}no"])
    assert scores.rewards.flatten().tolist() == pytest.approx([0.7, 0.2, 0.9, 0.2])
    with pytest.raises(DataError, match=r"gone.txt cannot be read: No such file"):
        task_of({**options, "vocabulary": str(tmp_path / "gone.txt")})


def test_the_vocabulary_is_found_beside_the_recipe(tmp_path):
    (tmp_path / "words.txt").write_text("picture\n")
    (tmp_path / "recipe.toml").write_text(
        'task = "usmle"\ntask_options = { reward = "enhanced", vocabulary = "words.txt" }'
    )
    task = load_task(load_recipe(tmp_path / "recipe.toml"))
    assert score(task, [f"{LONG}", "Tachycardia" + 50 * " "]).rewards.flatten().tolist() == [0.05, 0.0]


@pytest.mark.parametrize(
    ("answer", "strict", "lenient"),
    [
        ("Answer: A", True, True),
        ("It is B, no:\nAnswer: A", True, True),
        ("Answer: B", False, False),
        ("I think that the sinus node is correct.", None, True),
        ("I would go for B here.", None, False),
        ("I do not know.", None, None),
        ("", None, None),
    ],
)
def test_the_grades(answer, strict, lenient):
    row = {"question": "Which?", "options": OPTIONS, "answer": "A"}
    assert grade(row, answer, strict=True) is strict
    assert grade(row, answer, strict=False) is lenient


# --- from a recipe ----------------------------------------------------------------------------------------------------


def test_the_packaged_sample():
    task = task_of()
    assert (task.name, len(task.train), len(task.held_out)) == ("usmle", 48, 16)
    assert not {row["id"] for row in task.train} & {row["id"] for row in task.held_out}
    assert [row["id"] for row in task.held_out] == [f"s{number:03}" for number in range(49, 65)]
    assert (list(task.grades), task.metric) == (["accuracy", "accuracy_strict", "accuracy_lenient"], "accuracy")
    assert [(each.name, each.weight) for each in task.rewards] == [("correct", 1.0)]
    assert task.train[0]["metadata"] == {"difficulty": "hard"}
    row = task.held_out[0]
    assert row["prompt"] == format_prompt(row)
    assert list(task.health_checks) == ["below_chance", "one_letter"]


def test_parts_of_the_sample():
    task = task_of(data={"train_rows": 5, "held_out_rows": 2})
    assert [row["id"] for row in task.train] == ["s001", "s002", "s003", "s004", "s005"]
    assert [row["id"] for row in task.held_out] == ["s049", "s050"]
    drawn = task_of(data={"held_out_from_train": 20})
    assert (len(drawn.train), len(drawn.held_out)) == (44, 20)
    assert {row["id"] for row in drawn.train} | {row["id"] for row in drawn.held_out} == {
        f"s{number:03}" for number in range(1, 65)
    }
    assert drawn.held_out != task_of(data={"held_out_from_train": 20}, train={"seed": 1}).held_out
    few = task_of(data={"held_out_from_train": 4, "train_rows": 10, "held_out_rows": 3})
    assert (len(few.train), len(few.held_out)) == (6, 3)
    with pytest.raises(ConfigError, match=r"held_out_from_train is 64, but there are 64 rows"):
        task_of(data={"held_out_from_train": 64})


@pytest.mark.parametrize("form", FORMS)
def test_all_parts_have_the_form_of_the_prompt(form):
    task = task_of({"prompt": form, "copies": 2})
    assert all(row["prompt"] == format_prompt(row, form) for row in (*task.train, *task.held_out))
    assert task.examples[-1][1] == worked_answer(task.train[-1], form)


def test_copies_have_shuffled_options():
    task = task_of({"copies": 3})
    plain, first, second = (task.train[start : start + 48] for start in (0, 48, 96))
    assert (len(task.train), len(task.held_out)) == (144, 16)
    assert plain == task_of().train
    for copy in (first, second):
        for row, other in zip(plain, copy, strict=True):
            assert other["id"] == row["id"]
            assert other["options"] != row["options"]
            assert other["options"][other["answer"]] == row["options"][row["answer"]]
    assert [row["moved"] for row in first] != [row["moved"] for row in second]
    assert task_of({"copies": 3}).train == task.train
    assert task_of({"copies": 3}, train={"seed": 1}).train != task.train


def test_files_instead_of_the_sample(tmp_path):
    for name, number in (("train", 3), ("held_out", 2)):
        (tmp_path / f"{name}.jsonl").write_text((json.dumps(ROW) + "\n") * number)
    train, held_out = (str(tmp_path / f"{name}.jsonl") for name in ("train", "held_out"))
    for data, numbers in (
        ({"train": train}, (3, 0)),
        ({"held_out": held_out}, (0, 2)),
        ({"train": [train, held_out], "held_out": held_out}, (5, 2)),
        ({"train": train, "held_out_from_train": 1}, (2, 1)),
    ):
        task = task_of(data=data)
        assert (len(task.train), len(task.held_out)) == numbers


# --- options ----------------------------------------------------------------------------------------------------------


def test_the_defaults():
    assert USMLE.read_options(make_recipe({"task": "usmle"})) == UsmleOptions()
    assert UsmleOptions().model_dump() == {
        "prompt": "chat",
        "reading": "lenient",
        "reward": "binary",
        "term_bonus": 0.05,
        "short_penalty": 0.1,
        "short_length": 50,
        "vocabulary": None,
        "copies": 1,
        "bad_rows": "error",
    }
    assert all(field.description for field in UsmleOptions.model_fields.values())


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"promt": "chat"}, ["'promt'", "did you mean 'prompt'?", "bad_rows"]),
        ({"prompt": "chatt"}, ["'chatt'", "did you mean 'chat'?", "chat, direct, completion"]),
        ({"copies": 0}, ["copies = 0", "an integer of at least 1"]),
        ({"copies": 2.0}, ["copies = 2.0", "write 2"]),
        ({"term_bonus": "0.1"}, ["term_bonus = '0.1'", "write 0.1 without quotes"]),
        ({"term_bonus": -1, "colour": "red"}, ["term_bonus = -1", "'colour'"]),
    ],
)
def test_wrong_options(options, parts):
    with pytest.raises(ConfigError, match=r"^\[task_options\]") as error:
        task_of(options)
    assert [part for part in parts if part not in str(error.value)] == []
