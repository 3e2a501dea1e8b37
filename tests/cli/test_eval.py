"""`groupwise eval`: the table, the report of multiple choice, and held-out pairs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from groupwise.cli import BROKEN_PIPE, main
from groupwise.cli import evaluate as evaluate_command
from groupwise.model import load_model_and_tokenizer
from groupwise.model.tiny import tiny_model, tiny_tokenizer
from groupwise.usmle import report as report_module
from groupwise.usmle.report import read_report

pytestmark = pytest.mark.usefixtures("folder")

RECIPE = str(Path(__file__).parents[2] / "recipes" / "usmle.toml")
# The tiny model reads bytes; its answers are meaningless at any length.
SMALL = ["--model.source", "tiny", "--model.device", "cpu", "--data.max_prompt_length", "3000",
         "--data.held_out_rows", "2", "--task_options.prompt", "chat", "--evaluate.max_new_tokens", "4"]  # fmt: skip
EVAL = ["eval", RECIPE, *SMALL]


@pytest.fixture
def no_drawing(monkeypatch):
    """Replace the picture by an empty file."""
    monkeypatch.setattr(report_module, "draw_report", lambda path, *_, **__: path.write_bytes(b""))


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    """The tiny model with other weights."""
    folder = tmp_path_factory.mktemp("models") / "other"
    model = tiny_model(seed=5)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def test_a_report(folder, output_of):
    out = output_of(*EVAL, "--report", "deep/report", "--answers", "answers.jsonl", "--evaluate.samples", "3")
    report_folder = folder / "deep" / "report"
    assert sorted(path.name for path in report_folder.iterdir()) == ["report.json", "report.md", "report.png"]
    report = read_report(report_folder)
    assert (report.n, report.sampled.samples, report.mean_tokens) == (2, 3, 4.0)
    stored = json.loads((report_folder / "report.json").read_text())
    assert stored["title"] == "tiny on usmle"
    assert stored["facts"]["model"] == "tiny"
    assert stored["facts"]["questions"] == "the task's own rows"
    assert (stored["facts"]["prompt"], stored["facts"]["longest answer"]) == ("chat", "4 tokens")
    assert (stored["facts"]["samples"], stored["facts"]["seed"]) == ("3, temperature 1", "0")
    assert (report_folder / "report.md").read_text().startswith("# tiny on usmle\n")
    assert (report_folder / "report.png").read_bytes().startswith(b"\x89PNG")
    lines = out.splitlines()
    assert lines[0].split() == ["measure", "value", "95", "%", "interval"]
    shown = {re.split(r"  +", line)[0]: re.split(r"  +", line)[1] for line in lines[1:7]}
    assert shown == {name: f"{share.value:.1%}" for name, share in report.accuracies().items()}
    assert list(shown) == [
        "strict",
        "lenient",
        "majority vote",
        "likeliest letter",
        "likeliest, all orders",
        "shuffled",
    ]
    assert lines[7].startswith("2 questions; without an answer: ")
    assert lines[7].endswith("4.0 tokens per answer, 100.0% cut off")
    assert lines[8:-1] == [f"deep/report/report.{ending}" for ending in ("json", "png", "md")]
    assert lines[-1] == "answers: answers.jsonl"
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert [(answer["number"], answer["sample"], answer["tokens"]) for answer in answers] == [(0, 0, 4), (1, 0, 4)]
    assert [answer["lenient"] for answer in answers] == [outcome.lenient for outcome in report.outcomes]


@pytest.mark.slow
def test_a_report_against_an_earlier_one(folder, output_of, other_model):
    output_of(*EVAL, "--report", "first")
    before = read_report("first")
    words = [RECIPE, *SMALL[2:], "--model.source", other_model]
    out = output_of("eval", *words, "--report", "second", "--against", "first")
    assert out.splitlines()[0].split()[-1] == "before"
    likely = next(line for line in out.splitlines() if line.startswith("likeliest letter "))
    assert likely.endswith(f"{before.letters.accuracy.value:.1%}")
    assert re.search(r"^strict: \+0\.0%, not significant \(McNemar p = 1\)$", out, re.MULTILINE)
    stored = json.loads((folder / "second" / "comparison.json").read_text())
    assert stored["fingerprint"] == before.fingerprint == read_report("second").fingerprint
    assert stored["before"]["likeliest letter"]["value"] == before.letters.accuracy.value
    # The report's file can be given instead of its folder, and a report may replace the one it is compared with.
    again = output_of("eval", *words, "--report", "first", "--against", "first/report.json")
    assert again == out.replace("second/", "first/")
    assert read_report("first") == read_report("second")


@pytest.mark.slow
@pytest.mark.usefixtures("no_drawing")
def test_a_report_against_a_model(folder, output_of, other_model):
    out = output_of("eval", RECIPE, *SMALL[2:], "--model.source", other_model, "--report", "both", "--against", "tiny")
    assert sorted(path.name for path in (folder / "both" / "before").iterdir()) == [
        "report.json",
        "report.md",
        "report.png",
    ]
    output_of(*EVAL, "--report", "alone")
    assert read_report("both/before") == read_report("alone")
    assert json.loads(Path("both/before/report.json").read_text())["title"] == "tiny on usmle"
    assert json.loads(Path("both/report.json").read_text())["title"] == f"{other_model} on usmle"
    assert "both/comparison.json" in out.splitlines()


@pytest.mark.slow
def test_progress_in_a_log(folder, capsys):
    assert main([*EVAL, "--report", "report"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "tiny: answering, done",
        "tiny: answering with shuffled options, done",
        "tiny: scoring letters, done",
        "tiny: scoring letters with shuffled options, done",
        "tiny: scoring letters in all orders, done",
    ]


@pytest.mark.slow
def test_an_earlier_report_on_other_questions(folder, error_of, output_of):
    output_of(*EVAL, "--report", "first")
    other = [*EVAL, "--data.held_out_from_train", "5"]
    error = error_of(*other, "--report", "second", "--against", "first", "--answers", "a.jsonl")
    assert "the two reports are not about the same questions (2 and 2;" in error
    assert not (folder / "second").exists()  # no question was answered
    assert not (folder / "a.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--against", "first"], "also give --report FOLDER"),
        (["--report", "file"], "--report file is a file; give a folder"),
        (["--report", "file/within"], "cannot be written"),
        (["--report", "new", "--answers", "."], "--answers . is a folder; give a file"),
        (["--report", "new", "--against", "gone/report.json"], "there is no report at gone/report.json"),
        (["--report", "new", "--against", "damaged"], "damaged/report.json is not a report of an evaluation"),
        (["--report", "new", "--against", "./gone"], "gone"),
        (["--report", "new", "--task", "quiz"], "the task 'quiz' has no report; evaluate it without --report"),
        (["--report", "new", "--data.train", "own.jsonl"], "there is nothing to evaluate on"),
        (["--task_options.promt", "chat"], "did you mean 'prompt'?"),
        (["--model.source", "tiny"], "--model.source is given twice"),
    ],
)
def test_wrong_arguments(folder, error_of, words, message):
    (folder / "file").write_text("mine")
    (folder / "damaged").mkdir()
    (folder / "damaged" / "report.json").write_text("{}")
    question = {"question": "Which?", "options": {"A": "this", "B": "that"}, "answer": "A"}
    (folder / "own.jsonl").write_text(json.dumps(question))
    assert message in error_of(*EVAL, *words)
    assert not (folder / "new").exists()
    assert (folder / "file").read_text() == "mine"


def test_without_a_report_there_is_a_table(folder, output_of):
    out = output_of(*EVAL, "--answers", "answers.jsonl")
    rows = {line.split("  ")[0]: line.split()[-1] for line in out.splitlines()[1:4]}
    assert rows == dict.fromkeys(("accuracy *", "accuracy_strict", "accuracy_lenient"), "100.0%")  # without an answer
    assert "2 answers by tiny: 4.0 tokens on average" in out
    assert out.splitlines()[-1] == "answers: answers.jsonl"
    assert len((folder / "answers.jsonl").read_text().splitlines()) == 2


def test_answers_are_written_even_if_nobody_reads_the_table(folder, monkeypatch):
    def closed(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr(evaluate_command, "_print_metrics", closed)
    assert main([*EVAL, "--answers", "answers.jsonl"]) == BROKEN_PIPE
    assert len((folder / "answers.jsonl").read_text().splitlines()) == 2


def test_held_out_pairs_are_measured_without_a_reference(folder, output_of):
    """Against a plain computation of the mean log-probs; alone, and together with the rows of a task."""
    rows = [{"prompt": f"Say {n}: ", "chosen": f"{n}.", "rejected": f"{n}, {n + 1}?"} for n in range(12)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "dpo.toml").write_text(
        'algorithm = "dpo"\n[data]\nchat = false\n[preference]\ntrain = "pairs.jsonl"\nheld_out = "pairs.jsonl"\n'
    )
    model, tokenizer = load_model_and_tokenizer("tiny", device="cpu")
    right = 0
    for row in rows:
        means = []
        for answer in (row["chosen"], row["rejected"]):
            prompt, end = tokenizer(row["prompt"])["input_ids"], [tokenizer.eos_token_id]
            ids = torch.tensor([*prompt, *tokenizer(answer, add_special_tokens=False)["input_ids"], *end])
            with torch.no_grad():
                logps = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
            means.append(float(logps[len(prompt) - 1 :].mean()))
        right += means[0] > means[1]
    lines = output_of("eval", "dpo.toml").splitlines()
    assert lines[0].split("  ")[0] == "metric"
    assert lines[1].split()[:2] == ["preference_logp_accuracy", f"{right / 12:.4f}"]
    assert len(lines) == 2
    names = [line.split("  ")[0] for line in output_of(*EVAL, "--preference.held_out", "pairs.jsonl").splitlines()]
    assert names[1:5] == ["accuracy *", "accuracy_strict", "accuracy_lenient", "preference_logp_accuracy"]
