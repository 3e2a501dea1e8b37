"""Multiple choice on the command line: `groupwise eval --report`, `groupwise sample --option`, and a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from groupwise.cli import main
from groupwise.cli.evaluate import facts_of
from groupwise.cli.sample import WHY_NONE
from groupwise.cli.settings import parse_settings
from groupwise.config import make_recipe
from groupwise.errors import ConfigError
from groupwise.model import load_model_and_tokenizer
from groupwise.model.tiny import tiny_model, tiny_tokenizer
from groupwise.rundir import read_metrics
from groupwise.tasks import load_task
from groupwise.training.monitor.question_log import read_questions
from groupwise.training.store.rollout_files import read_rollouts
from groupwise.usmle.answers import NO_ANSWER
from groupwise.usmle.report import read_report
from groupwise.usmle.task import format_prompt

RECIPE = str(Path(__file__).parents[1] / "recipes" / "usmle.toml")
# The tiny model reads bytes, and its answers mean nothing however long they are.
SMALL = ["--model.name", "tiny", "--model.device", "cpu", "--data.max_prompt_length", "3000",
         "--data.held_out_rows", "2", "--usmle.prompt", "chat", "--evaluate.max_new_tokens", "4"]  # fmt: skip
EVAL = ["eval", RECIPE, *SMALL]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


@pytest.fixture
def said(capsys):
    """Run a command that works; what it prints."""

    def run(*words):
        capsys.readouterr()
        assert main(list(words)) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def complaint(capsys):
    """Run a command that is refused; what it complains of, in the last line on the standard error."""

    def run(*words):
        capsys.readouterr()
        assert main(list(words)) == 2
        *before, error = capsys.readouterr().err.splitlines()
        assert all(line.startswith("tiny: ") for line in before)  # what was being done
        assert error.startswith("groupwise: ")
        return error.removeprefix("groupwise: ")

    return run


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    """The tiny model with other weights, as a run leaves it behind."""
    folder = tmp_path_factory.mktemp("models") / "other"
    model = tiny_model(seed=5)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


# --- eval -------------------------------------------------------------------------------------------------------------


def test_a_report(here, said):
    out = said(*EVAL, "--report", "deep/report", "--answers", "answers.jsonl", "--evaluate.samples", "3")
    folder = here / "deep" / "report"
    assert sorted(path.name for path in folder.iterdir()) == ["report.json", "report.md", "report.png"]
    report = read_report(folder)
    assert (report.n, report.sampled.samples, report.mean_tokens) == (2, 3, 4.0)
    stored = json.loads((folder / "report.json").read_text())
    assert stored["title"] == "tiny on usmle"
    assert stored["facts"]["model"] == "tiny"
    assert stored["facts"]["questions"] == "the task's own rows"
    assert (stored["facts"]["prompt"], stored["facts"]["longest answer"]) == ("chat", "4 tokens")
    assert (stored["facts"]["samples"], stored["facts"]["seed"]) == ("3, temperature 1", "0")
    assert (folder / "report.md").read_text().startswith("# tiny on usmle\n")
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    lines = out.splitlines()
    assert lines[0].split() == ["measure", "value", "95", "%", "interval"]
    shown = {re.split(r"  +", line)[0]: re.split(r"  +", line)[1] for line in lines[1:6]}
    assert shown == {name: f"{share.value:.1%}" for name, share in report.accuracies().items()}
    assert list(shown) == ["strict", "lenient", "majority vote", "likeliest letter", "shuffled"]
    assert lines[6].startswith("2 questions; without an answer: ")
    assert lines[6].endswith("4.0 tokens in an answer, 100.0% cut off")
    assert lines[7:] == [f"deep/report/report.{ending}" for ending in ("json", "png", "md")]
    answers = [json.loads(line) for line in (here / "answers.jsonl").read_text().splitlines()]
    assert [(answer["number"], answer["sample"], answer["tokens"]) for answer in answers] == [(0, 0, 4), (1, 0, 4)]
    assert [answer["lenient"] for answer in answers] == [outcome.lenient for outcome in report.outcomes]


def test_a_report_against_an_earlier_one(here, said, other_model):
    said(*EVAL, "--report", "first")
    before = read_report("first")
    words = [RECIPE, *SMALL[2:], "--model.source", other_model]
    out = said("eval", *words, "--report", "second", "--against", "first")
    assert out.splitlines()[0].split()[-1] == "before"
    likely = next(line for line in out.splitlines() if line.startswith("likeliest letter "))
    assert likely.endswith(f"{before.letters.accuracy.value:.1%}")
    assert re.search(r"^strict: \+0\.0%, not to be told from chance \(McNemar p = 1\)$", out, re.MULTILINE)
    stored = json.loads((here / "second" / "comparison.json").read_text())
    assert stored["fingerprint"] == before.fingerprint == read_report("second").fingerprint
    assert stored["before"]["likeliest letter"]["value"] == before.letters.accuracy.value
    # The report's file serves as well as its folder, and a report may take the place of the one it is compared with.
    again = said("eval", *words, "--report", "first", "--against", "first/report.json")
    assert again == out.replace("second/", "first/")
    assert read_report("first") == read_report("second")


def test_a_report_against_a_model(here, said, other_model):
    out = said("eval", RECIPE, *SMALL[2:], "--model.source", other_model, "--report", "both", "--against", "tiny")
    assert sorted(path.name for path in (here / "both" / "before").iterdir()) == [
        "report.json",
        "report.md",
        "report.png",
    ]
    said(*EVAL, "--report", "alone")
    assert read_report("both/before") == read_report("alone")
    assert json.loads(Path("both/before/report.json").read_text())["title"] == "tiny on usmle"
    assert json.loads(Path("both/report.json").read_text())["title"] == f"{other_model} on usmle"
    assert "both/comparison.json" in out.splitlines()


def test_a_log_says_what_was_done(capsys):
    assert main([*EVAL, "--report", "report"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "tiny: answering, done",
        "tiny: answering with other orders, done",
        "tiny: scoring letters, done",
        "tiny: scoring letters in other orders, done",
    ]


@pytest.mark.parametrize(
    ("settings", "source"),
    [
        ({}, "the task's own rows"),
        ({"data.held_out": "data/medqa.jsonl"}, "medqa.jsonl"),
        ({"data.held_out": ["data/a.jsonl", "data/b.csv"], "data.train": "data/c.jsonl"}, "a.jsonl, b.csv"),
        ({"data.train": "data/c.jsonl", "data.held_out_from_train": 300}, "300 held out from c.jsonl"),
        ({"data.train": "GBaker/MedQA-USMLE-4-options", "data.held_out_split": "test"}, "MedQA-USMLE-4-options, test"),
    ],
)
def test_a_report_says_where_its_questions_come_from(settings, source):
    assert facts_of(make_recipe({"task": "usmle"}).with_settings(settings))["questions"] == source


def test_how_a_question_is_put_is_a_fact_of_the_usmle_task_alone():
    assert facts_of(make_recipe({"task": "usmle"}))["prompt"] == "chat"
    assert "prompt" not in facts_of(make_recipe({"task": "quiz"}))


def test_an_earlier_report_on_other_questions(here, complaint, said):
    said(*EVAL, "--report", "first")
    other = [*EVAL, "--data.held_out_from_train", "5"]
    error = complaint(*other, "--report", "second", "--against", "first", "--answers", "a.jsonl")
    assert error == (
        "the two reports are not about the same questions (2 and 2; the texts, the options or the right letters "
        "differ); evaluate both models on the same held-out rows"
    )
    assert not (here / "second").exists()  # found out before a single question was answered
    assert not (here / "a.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--against", "first"], "--against compares two reports; say with --report FOLDER where this one is to be "
                                 "written"),
        (["--report", "file"], "--report file is a file; name a folder"),
        (["--report", "file/within"], "--report file is a file; name a folder"),
        (["--report", "new", "--answers", "."], "--answers . is a folder; name a file"),
        (["--report", "new", "--against", "gone/report.json"], "there is no report at gone/report.json; name the "
         "folder that an evaluation has written, or its report.json"),
        (["--report", "new", "--against", "damaged"], "damaged/report.json is no report of an evaluation: it has no "
                                                      "version"),
        (["--report", "new", "--against", "./gone"], "there is no folder and no file gone (looked for in {here})"),
        (["--report", "new", "--task", "quiz"], "the task 'quiz' is not multiple choice, so there is no report of "
                                                "letters on it"),
        (["--report", "new", "--data.train", "own.jsonl"], "there is nothing to evaluate on: give held-out rows "
                                                           "(data.held_out)"),
        (["--model.source", "tiny"], "--model.source is given twice"),
    ],
)  # fmt: skip
def test_what_a_user_gets_wrong(here, complaint, words, sentence):
    (here / "file").write_text("mine")
    (here / "damaged").mkdir()
    (here / "damaged" / "report.json").write_text("{}")
    (here / "own.jsonl").write_text(
        json.dumps({"question": "Which?", "options": {"A": "this", "B": "that"}, "answer": "A"})
    )
    assert complaint(*EVAL, *words) == sentence.replace("{here}", str(here))
    assert not (here / "new").exists()
    assert (here / "file").read_text() == "mine"


def test_without_a_report_there_is_a_table(here, said):
    out = said(*EVAL, "--answers", "answers.jsonl")
    rows = {line.split("  ")[0]: line.split()[-1] for line in out.splitlines()[1:3]}
    assert rows == {"accuracy *": "100.0%", "accuracy_lenient": "100.0%"}  # without an answer
    assert "2 answers by tiny: 4.0 tokens on average" in out
    assert len((here / "answers.jsonl").read_text().splitlines()) == 2


def test_a_models_name_is_its_source():
    assert parse_settings(["--model.name", "tiny"]) == {"model.source": "tiny"}
    assert parse_settings(["--model.name=a/b"]) == {"model.source": "a/b"}
    with pytest.raises(ConfigError, match=r"--model.source is given twice"):
        parse_settings(["--model.name", "tiny", "--model.source", "tiny"])


# --- sample -----------------------------------------------------------------------------------------------------------


def likely(out):
    """The options with their probabilities, from the table, and what stands below it."""
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


def test_one_question(said):
    words = ["sample", "tiny", "What is high?", "--option", "[high] sodium", "--option", "K+", "--max-new-tokens", "5"]
    out = said(*words, "--device", "cpu")
    rows, below = likely(out)
    assert [(letter, text, chosen) for letter, (text, _, chosen) in rows.items()] == [
        ("A", "[high] sodium", ""),
        ("B", "K+", ""),
    ]
    assert sum(share for _, share, _ in rows.values()) == pytest.approx(100, abs=0.11)
    assert "[length, 5 tokens]" in out
    assert below == ["no letter is taken from this answer: it settles on no option"]
    assert said(*words, "--device", "cpu", "--temperature", "2") == out  # one answer is the likeliest
    assert likely(said(*words, "--form", "completion"))[0] != rows


def test_the_probabilities_are_those_of_an_exam(said):
    """Computed once more, from the model itself."""
    tokenizer, model = tiny_tokenizer(), tiny_model()
    asked = format_prompt({"question": "Which?", "options": {"A": "one", "B": "two", "C": "three"}}, "direct")
    prompt = chat_ids(tokenizer, asked)
    prompt += tokenizer("Answer: ", add_special_tokens=False)["input_ids"]
    letters = [tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in "ABC"]
    with torch.no_grad():
        wanted = model(torch.tensor([prompt])).logits[0, -1, letters].softmax(-1)
    options = [word for text in ("one", "two", "three") for word in ("--option", text)]
    rows, _ = likely(said("sample", "tiny", " Which? ", *options, "--form", "direct", "--max-new-tokens", "2"))
    assert [share for _, share, _ in rows.values()] == pytest.approx([100 * float(share) for share in wanted], abs=0.06)


def taught(folder, asked, answer):
    """A tiny model that has learnt one answer by heart."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    prompt = chat_ids(tokenizer, asked)
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
        ("Answer: B", {"A": "", "B": "yes"}, "answer: B, in the form that was asked for"),
        ("I choose two.", {"A": "", "B": "yes"}, "answer: B, by the rule '"),
        ("Answer: C", {"A": "", "B": ""}, "no letter is taken from this answer: it names a letter beyond the options"),
    ],
)
def test_the_letter_that_an_answer_gives(here, said, answer, chosen, sentence):
    model = taught(here / "taught", format_prompt({"question": "Which?", "options": {"A": "one", "B": "two"}}), answer)
    out = said("sample", model, "Which?", "--option", "one", "--option", "two", "--max-new-tokens", "30")
    assert out.splitlines()[0] == answer
    rows, below = likely(out)
    assert {letter: shown for letter, (_, _, shown) in rows.items()} == chosen
    assert len(below) == 1
    assert below[0].startswith(sentence)


def test_several_answers_to_a_question(said):
    words = ["--option", "one", "--option", "two", "--max-new-tokens", "3", "-n", "4"]
    out = said("sample", "tiny", "Which?", *words)
    assert out.count("[length, 3 tokens]") == 4
    rows, below = likely(out)
    chosen = sum(int(shown.removesuffix(" of 4")) for _, _, shown in rows.values() if shown)
    none = sum(int(re.match(r"no letter is taken from (\d) of 4 answers: it ", line)[1]) for line in below)
    assert chosen + none == 4
    assert said("sample", "tiny", "Which?", *words) == out
    assert said("sample", "tiny", "Which?", *words, "--seed", "1") != out


def test_every_reason_for_no_letter_has_its_words():
    assert set(WHY_NONE) == set(NO_ANSWER)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["q", "--option", "one"], "--option: a question needs 2 to 10 options (it has 1)"),
        (["q", *["--option=x"] * 11], "--option: a question needs 2 to 10 options (it has 11)"),
        (["q", "--option", "one", "--option", " ONE"], "--option: two options are the same ('one')"),
        (["q", "--option", "one", "--option", " "], "--option: an option is empty (B)"),
        (["q", "r", "--option", "one", "--option", "two"], "options belong to one question, but 2 prompts are given"),
        ([" ", "--option", "one", "--option", "two"], "the question is empty; put it in front of its options"),
        (["q", "--form", "direct"], "--form says how a question with options is put; give its options with --option"),
    ],
)
def test_questions_that_cannot_be_asked(complaint, words, sentence):
    """Found before a model is loaded: this one does not exist."""
    assert complaint("sample", "no-such-model", *words) == sentence


def test_a_prompt_in_brackets_is_shown_as_it_is(said):
    out = said("sample", "tiny", "[/b] [red]what", "-n", "1", "--max-new-tokens", "2")
    assert out.startswith("[/b] [red]what ")


# --- a run ------------------------------------------------------------------------------------------------------------


def test_two_steps_of_the_recipe(here, said):
    small = ["--data.train_rows", "4", "--sampling.samples_per_prompt", "4", "--sampling.max_new_tokens", "6",
             "--train.steps", "2", "--train.batch_size", "2", "--train.accumulation", "1", "--train.mini_batches", "1",
             "--run.folder", "run", "--run.picture", "false", "--run.tensorboard", "false"]  # fmt: skip
    out = said("train", RECIPE, *SMALL, *small)
    assert "step 2/2" in out
    questions = read_questions(here / "run")
    assert [entry["id"] for entry in questions] == ["s001", "s002", "s003", "s004"]
    assert sum(entry["visits"] for entry in questions) == 4
    steps = [row for row in read_metrics(here / "run" / "metrics.jsonl") if "learning_rate" in row]
    assert [row["step"] for row in steps] == [1, 2]
    sample_rows = load_task(make_recipe({"task": "usmle"})).train
    rollouts = read_rollouts(here / "run").to_pylist()
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

    model = AutoModelForCausalLM.from_pretrained(here / "run" / "model")
    tokenizer = AutoTokenizer.from_pretrained(here / "run" / "model")
    prompt = tokenizer("Which?", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=2, do_sample=False).shape[1] == prompt["input_ids"].shape[1] + 2
    assert "2 answers by run/model: " in said("eval", RECIPE, "--model.name", "run/model", *SMALL[2:])


def test_held_out_pairs_are_measured_without_a_reference(here, said):
    """Which answer is likelier per token, by a plain computation; alone, and beside the task's own questions."""
    rows = [{"prompt": f"Say {n}: ", "chosen": f"{n}.", "rejected": f"{n}, {n + 1}?"} for n in range(12)]
    (here / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (here / "dpo.toml").write_text(
        'algorithm = "dpo"\n[data]\nchat = false\n[preference]\ntrain = "pairs.jsonl"\nheld_out = "pairs.jsonl"\n'
    )
    model, tokenizer = load_model_and_tokenizer("tiny", device="cpu")
    likelier = 0
    for row in rows:
        means = []
        for answer in (row["chosen"], row["rejected"]):
            prompt, end = tokenizer(row["prompt"])["input_ids"], [tokenizer.eos_token_id]
            ids = torch.tensor([*prompt, *tokenizer(answer, add_special_tokens=False)["input_ids"], *end])
            with torch.no_grad():
                logps = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
            means.append(float(logps[len(prompt) - 1 :].mean()))
        likelier += means[0] > means[1]
    lines = said("eval", "dpo.toml").splitlines()
    assert lines[0].split("  ")[0] == "metric"
    assert lines[1].split()[:3] == ["preference_logp_accuracy", "*", f"{likelier / 12:.4f}"]
    assert len(lines) == 2
    names = [line.split("  ")[0] for line in said(*EVAL, "--preference.held_out", "pairs.jsonl").splitlines()]
    assert names[1:4] == ["accuracy *", "accuracy_lenient", "preference_logp_accuracy"]
