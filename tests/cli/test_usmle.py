"""`groupwise usmle ask`, and a run of the recipe usmle.toml."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from groupwise.cli import main
from groupwise.cli.usmle import FORMS
from groupwise.config import make_recipe
from groupwise.config.fields import choices_of
from groupwise.model.tiny import tiny_model, tiny_tokenizer
from groupwise.rundir import read_metrics
from groupwise.tasks import load_task
from groupwise.training.store.rollout_files import read_rollouts
from groupwise.usmle.prompts import format_prompt
from groupwise.usmle.task import UsmleOptions

pytestmark = pytest.mark.usefixtures("folder")

SMALL = ["--model.device", "cpu", "--data.max_prompt_length", "3000", "--data.held_out_rows", "2",
         "--task_options.prompt", "chat", "--evaluate.max_new_tokens", "4"]  # fmt: skip
RECIPE = str(Path(__file__).parents[2] / "recipes" / "usmle.toml")


def table_of(out):
    """The options with their probabilities, and the lines below the table."""
    lines = out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("option "))
    rows = {}
    for line in lines[start + 1 :]:
        match = re.fullmatch(r"([A-J]) +(.+?) +([\d.]+)% *(.*?) *", line)
        if match is None:
            break
        rows[match[1]] = (match[2], float(match[3]), match[4])
    return rows, lines[start + 1 + len(rows) :]


def chat_ids(tokenizer, text):
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


def test_one_question(output_of):
    words = [
        "usmle",
        "ask",
        "tiny",
        "What is high?",
        "--option",
        "[high] sodium",
        "--option",
        "K+",
        "--max-new-tokens",
        "5",
    ]
    out = output_of(*words, "--device", "cpu")
    rows, below = table_of(out)
    assert [(letter, text, chosen) for letter, (text, _, chosen) in rows.items()] == [
        ("A", "[high] sodium", ""),
        ("B", "K+", ""),
    ]
    assert sum(share for _, share, _ in rows.values()) == pytest.approx(100, abs=0.11)
    assert "[length, 5 tokens]" in out
    assert below == ["no letter found in this answer: it chooses no option"]
    assert output_of(*words, "--device", "cpu", "--temperature", "2") == out  # one answer is greedy
    assert table_of(output_of(*words, "--form", "completion"))[0] != rows


def test_the_probabilities_against_a_plain_computation(output_of):
    tokenizer, model = tiny_tokenizer(), tiny_model()
    asked = format_prompt({"question": "Which?", "options": {"A": "one", "B": "two", "C": "three"}}, "direct")
    prompt = chat_ids(tokenizer, asked)
    prompt += tokenizer("Answer: ", add_special_tokens=False)["input_ids"]
    letters = [tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in "ABC"]
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1, letters].softmax(-1)
    options = [word for text in ("one", "two", "three") for word in ("--option", text)]
    rows, _ = table_of(
        output_of("usmle", "ask", "tiny", " Which? ", *options, "--form", "direct", "--max-new-tokens", "2")
    )
    assert [share for _, share, _ in rows.values()] == pytest.approx(
        [100 * float(share) for share in expected], abs=0.06
    )


def memorised(folder, question, answer):
    """A tiny model that has memorised one answer."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    prompt = chat_ids(tokenizer, question)
    ids = [*prompt, *tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    labels = torch.tensor([[-100] * len(prompt) + ids[len(prompt) :]])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loss = torch.tensor(1.0)
    while loss.item() > 0.01:
        loss = model(torch.tensor([ids]), labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("answer", "chosen", "sentence"),
    [
        ("Answer: B", {"A": "", "B": "yes"}, "answer: B, in the requested form"),
        pytest.param("I choose two.", {"A": "", "B": "yes"}, "answer: B, by the rule '", marks=pytest.mark.slow),
        pytest.param(
            "Answer: C",
            {"A": "", "B": ""},
            "no letter found in this answer: it names a letter beyond the options",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_letter_of_an_answer(folder, output_of, answer, chosen, sentence):
    model = memorised(
        folder / "model", format_prompt({"question": "Which?", "options": {"A": "one", "B": "two"}}), answer
    )
    out = output_of("usmle", "ask", model, "Which?", "--option", "one", "--option", "two", "--max-new-tokens", "30")
    assert out.splitlines()[0] == answer
    rows, below = table_of(out)
    assert {letter: shown for letter, (_, _, shown) in rows.items()} == chosen
    assert len(below) == 1
    assert below[0].startswith(sentence)


def test_several_answers(output_of):
    words = ["--option", "one", "--option", "two", "--max-new-tokens", "3", "-n", "4"]
    out = output_of("usmle", "ask", "tiny", "Which?", *words)
    assert out.count("[length, 3 tokens]") == 4
    rows, below = table_of(out)
    chosen = sum(int(shown.removesuffix(" of 4")) for _, _, shown in rows.values() if shown)
    none = sum(int(re.match(r"no letter found in (\d) of 4 answers: it ", line)[1]) for line in below)
    assert chosen + none == 4
    assert output_of("usmle", "ask", "tiny", "Which?", *words) == out
    assert output_of("usmle", "ask", "tiny", "Which?", *words, "--seed", "1") != out


def test_the_words_of_the_task():
    assert choices_of(UsmleOptions.model_fields["prompt"]) == FORMS


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["q", "--option", "one"], "--option: a question needs 2 to 10 options (it has 1)"),
        (["q", *["--option=x"] * 11], "--option: a question needs 2 to 10 options (it has 11)"),
        (["q", "--option", "one", "--option", " ONE"], "--option: two options are the same ('one')"),
        (["q", "--option", "one", "--option", " "], "--option: an option is empty (B)"),
        ([" ", "--option", "one", "--option", "two"], "the question is empty"),
    ],
)
def test_invalid_questions(error_of, words, sentence):
    """Checked before the model, which does not exist, is loaded."""
    assert error_of("usmle", "ask", "no-such-model", *words) == sentence


@pytest.mark.parametrize("flag", ["--option", "--form"])
def test_sample_names_the_new_command(error_of, flag):
    assert "groupwise usmle ask" in error_of("sample", "no-such-model", "q", flag, "x")


def test_help_lists_the_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "commands of plug-ins: usmle" in capsys.readouterr().out


def test_sample_shows_brackets_in_a_prompt(output_of):
    out = output_of("sample", "tiny", "[/b] [red]what", "-n", "1", "--max-new-tokens", "2")
    assert out.startswith("[/b] [red]what ")


def test_two_steps_of_the_recipe(folder, output_of):
    small = ["--data.train_rows", "4", "--sampling.samples_per_prompt", "4", "--sampling.max_new_tokens", "6",
             "--train.steps", "2", "--train.batch_size", "2", "--train.accumulation", "1", "--train.mini_batches", "1",
             "--run.folder", "run", "--run.plot", "false", "--run.tensorboard", "false"]  # fmt: skip
    out = output_of("train", RECIPE, "--model.source", "tiny", *SMALL, *small)
    assert "step 2/2" in out
    questions = [json.loads(line) for line in (folder / "run" / "questions.jsonl").read_text().splitlines()]
    assert [entry["id"] for entry in questions] == ["s001", "s002", "s003", "s004"]
    assert sum(entry["visits"] for entry in questions) == 4
    steps = [row for row in read_metrics(folder / "run" / "metrics.jsonl") if "learning_rate" in row]
    assert [row["step"] for row in steps] == [1, 2]
    sample_rows = load_task(make_recipe({"task": "usmle"})).train
    rollouts = read_rollouts(folder / "run").to_pylist()
    assert len(rollouts) == sum(2 * row["samples_per_prompt"] for row in steps)  # 2 prompts a step
    for sample in rollouts:
        assert sample["ground_truth"] == sample_rows[sample["row"]]["answer"]
        assert sample["has_valid_answer"] is (sample["predicted"] is not None)
        assert sample["correct"] is (sample["predicted"] == sample["ground_truth"])
        assert sample["reward"] == float(sample["correct"])
        assert 0 <= sample["response_length"] <= 6
        assert sample["rule"]
    for row in steps:
        assert (row["avg_reward"], row["policy_loss"]) == (row["reward"], row["loss/policy"])
        assert (row["kl_divergence"], row["kl_penalty"]) == (row["kl"], row["loss/kl"])
        assert {"loss", "accuracy", "accuracy_masked", "mask_ratio", "chance"} <= set(row)
        asked = [len(sample_rows[sample["row"]]["options"]) for sample in rollouts if sample["step"] == row["step"]]
        assert row["chance"] == pytest.approx(sum(1 / number for number in asked) / len(asked))

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder / "run" / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "run" / "model")
    prompt = tokenizer("Which?", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=2, do_sample=False).shape[1] == prompt["input_ids"].shape[1] + 2
    assert "2 answers by run/model: " in output_of("eval", RECIPE, "--model.source", "run/model", *SMALL)
