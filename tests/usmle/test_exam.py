"""An exam of the tiny model: the letters' probabilities against a plain computation, and the report against the
answers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from groupwise.config import make_recipe
from groupwise.data import PromptBuilder
from groupwise.errors import ConfigError
from groupwise.generate import Engine, Rollout, Sampling
from groupwise.generate.local import LocalGenerator
from groupwise.model import load_model_and_tokenizer, prepare
from groupwise.tasks import load_task
from groupwise.usmle import exam as exam_module
from groupwise.usmle.answers import extract_answer
from groupwise.usmle.evaluation import exam_of_recipe
from groupwise.usmle.exam import ModelUnderTest, read_answer, run_exam
from groupwise.usmle.prompts import letter_answers, rotate_options, shuffle_options
from groupwise.usmle.records import ModelAnswer


def tiny(dtype="float32"):
    return load_model_and_tokenizer("tiny", dtype=dtype, device="cpu", seed=0)


def model_under_test(dtype="float32", *, chat=None):
    model, tokenizer = tiny(dtype)
    handle = prepare(model)
    # Every prompt is longer than this limit; an exam ignores it.
    builder = PromptBuilder(tokenizer, chat=chat, max_prompt_length=5, on_too_long="drop")
    return ModelUnderTest(handle, Engine(handle), tokenizer, builder)


def task_of(form="chat", held_out=None):
    recipe = make_recipe({"task": "usmle", "task_options": {"prompt": form}, "data": {"held_out_rows": held_out}})
    return load_task(recipe)


# --- letters ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def literal_letters(model, tokenizer, row, answers, *, chat):
    """One plain forward pass for each letter."""
    if chat:
        messages = [{"role": "user", "content": row["prompt"]}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    else:
        prompt = tokenizer(row["prompt"])["input_ids"]
    totals = []
    for text in answers.values():
        answer = tokenizer(text, add_special_tokens=False)["input_ids"]
        logps = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        places = range(len(prompt) - 1, len(prompt) + len(answer) - 1)
        totals.append(sum(float(logps[place, token]) for place, token in zip(places, answer, strict=True)))
    weights = torch.tensor(totals, dtype=torch.float64).exp()
    return dict(zip(answers, (weights / weights.sum()).tolist(), strict=True))


@pytest.mark.parametrize(
    ("form", "chat"),
    [
        ("chat", True),
        pytest.param("direct", True, marks=pytest.mark.slow),
        pytest.param("completion", True, marks=pytest.mark.slow),
        ("completion", False),
    ],
)
def test_letter_probabilities_equal_those_of_a_plain_forward_pass(form, chat):
    task = task_of(form)
    rows = [*task.held_out[:2], next(row for row in task.held_out if len(row["options"]) == 5)]
    scored = model_under_test("float64", chat=chat).letters(rows, form)
    model, tokenizer = tiny("float64")
    for row, entry in zip(rows, scored, strict=True):
        expected = literal_letters(model, tokenizer, row, letter_answers(row, form=form), chat=chat)
        assert entry == pytest.approx(expected, abs=1e-10)
        assert list(entry) == list(row["options"])
        assert sum(entry.values()) == pytest.approx(1, abs=1e-12)
        assert len({round(value, 6) for value in entry.values()}) > 1


def test_letter_probabilities_do_not_depend_on_the_chunk_size(monkeypatch):
    task = task_of("direct")
    candidate, rows = model_under_test("float64"), task.held_out[:5]
    seen = []
    together = candidate.letters(rows, "direct", seen.append)
    monkeypatch.setattr(exam_module, "SCORED_CHUNK", 2)
    apart = candidate.letters(rows, "direct", seen.append)
    assert seen == [5, 2, 4, 5]
    for one, other in zip(together, apart, strict=True):
        assert one == pytest.approx(other, abs=1e-10)


def test_letters_averaged_over_all_orders():
    """Each option stands once under each letter, so the mean of a model that only looks at letters is even."""
    rows = [*task_of("direct").held_out[:2], next(r for r in task_of("direct").held_out if len(r["options"]) == 5)]
    candidate, seen = model_under_test("float64"), []
    averaged = exam_module.average_over_orders(
        candidate, rows, "direct", candidate.letters(rows, "direct"), seen.append
    )
    assert seen == [0, 1, 2, 3]
    for row, entry in zip(rows, averaged, strict=True):
        orders = [rotate_options(row, by, form="direct") for by in range(len(row["options"]))]
        assert [order["options"][order["answer"]] for order in orders] == [row["options"][row["answer"]]] * len(orders)
        assert {tuple(order["options"].values()) for order in orders if order["prompt"]} != {
            tuple(row["options"].values())
        }
        for letter, text in row["options"].items():
            shown = [next(name for name, other in order["options"].items() if other == text) for order in orders]
            assert sorted(shown) == sorted(row["options"])
            scores = [candidate.letters([order], "direct")[0][name] for order, name in zip(orders, shown, strict=True)]
            assert entry[letter] == pytest.approx(sum(scores) / len(scores), abs=1e-10)
        assert sum(entry.values()) == pytest.approx(1, abs=1e-12)


class LooksOnlyAtLetters:
    def letters(self, rows, form, progress=None):
        return [dict(zip(sorted(row["options"]), (0.7, 0.1, 0.1, 0.05, 0.05), strict=False)) for row in rows]


def test_a_preference_for_a_letter_averages_out():
    rows = [row for row in task_of("direct").held_out if len(row["options"]) == 5][:2]
    model = LooksOnlyAtLetters()
    for entry in exam_module.average_over_orders(model, rows, "direct", model.letters(rows, "direct")):
        assert list(entry.values()) == pytest.approx([0.2] * 5)


# --- answers ----------------------------------------------------------------------------------------------------------


def test_answers_do_not_depend_on_the_chunk_size(monkeypatch):
    task = task_of("direct")
    candidate, rows = model_under_test(), task.held_out[:5]
    sampling = Sampling(max_new_tokens=6, temperature=1.0, seed=3)
    seen = []
    together = candidate.answer(rows, sampling, 2, seen.append)
    monkeypatch.setattr(exam_module, "CHUNK", 2)
    assert candidate.answer(rows, sampling, 2, seen.append) == together
    assert seen == [5, 2, 4, 5]
    assert [(answer.number, answer.sample) for answer in together] == [(n, s) for n in range(5) for s in range(2)]
    assert together[0].text != together[1].text
    assert all(answer.tokens <= 6 for answer in together)


@pytest.mark.parametrize(
    ("text", "lenient", "strict", "rule"),
    [
        ("So it is this.\nAnswer: B", "B", "B", "stated"),
        ("The second is correct: mitral valve.", "B", None, "option text"),
        ("No idea.", None, None, "nothing"),
    ],
)
def test_both_readers_read_an_answer(text, lenient, strict, rule):
    row = {"options": {"A": "Sinus node", "B": "Mitral valve"}, "answer": "A"}
    assert read_answer(row, 4, 2, text, 7, "eos") == ModelAnswer(
        4, 2, text, lenient, strict, extract_answer(text, row["options"]).rule, 7, "eos"
    )
    assert extract_answer(text, row["options"]).rule == rule


# --- the exam ---------------------------------------------------------------------------------------------------------


class ScriptedGenerator(LocalGenerator):
    """A generator of given texts; the tiny model's answers are meaningless."""

    def __init__(self, tokenizer, say):
        super().__init__(max_num_seqs=128)
        self.tokenizer, self.say = tokenizer, say
        self.asked = []

    def generate(self, prompts, samples, sampling, **options):
        self.asked.append((sampling.greedy, sampling.temperature, samples, len(prompts)))
        texts = [self.say(sample, sampling.greedy) for _ in prompts for sample in range(samples)]
        rows = [torch.tensor(self.tokenizer(text)["input_ids"]) for text in texts]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        zeros = torch.zeros(ids.shape)
        lengths = torch.tensor([len(row) for row in rows])
        groups = torch.arange(len(prompts)).repeat_interleave(samples)
        return Rollout(ids, lengths, zeros, zeros, ("eos",) * len(rows), groups, zeros.int())


def test_a_report_on_scripted_answers():
    """The greedy answer is always C; of three samples one is A, one is C, and one has no answer."""
    task = task_of("direct")
    rows = task.held_out[:6]
    candidate = model_under_test()
    generator = ScriptedGenerator(
        candidate.tokenizer, lambda sample, greedy: "Answer: C" if greedy else ("Answer: A", "Answer: C", "hm")[sample]
    )
    stages = []
    report, answers = run_exam(
        replace(candidate, generator=generator),
        rows,
        form="direct",
        max_new_tokens=10,
        samples=3,
        temperature=0.7,
        progress=lambda *facts: stages.append(facts),
    )
    right = [row["answer"] for row in rows]
    assert 0 < right.count("C") < 6
    assert [answer.text for answer in answers] == ["Answer: C"] * 6
    assert [outcome.lenient for outcome in report.outcomes] == ["C"] * 6
    assert [outcome.right for outcome in report.outcomes] == right
    assert report.lenient.value == report.strict.value == right.count("C") / 6
    assert [outcome.sampled for outcome in report.outcomes] == pytest.approx([(letter in "AC") / 3 for letter in right])
    # The letter C is another option once they are shuffled.
    moved = [shuffle_options(row, f"exam {number}", form="direct") for number, row in enumerate(rows)]
    assert report.shuffled.accuracy.value == sum(row["answer"] == "C" for row in moved) / 6
    same = sum(other["options"]["C"] == row["options"]["C"] for row, other in zip(rows, moved, strict=True))
    assert report.shuffled.consistency.value == same / 6
    scored = candidate.letters(rows, "direct")
    assert [outcome.letters for outcome in report.outcomes] == [max(entry, key=entry.get) for entry in scored]
    assert generator.asked == [(True, 1.0, 1, 6), (True, 1.0, 1, 6), (False, 0.7, 3, 6)]
    orders = max(len(row["options"]) for row in rows)
    assert stages == [
        ("answering", 6, 6),
        ("answering with shuffled options", 6, 6),
        ("sampling answers", 6, 6),
        ("scoring letters", 6, 6),
        ("scoring letters with shuffled options", 6, 6),
        *(("scoring letters in all orders", 6 * order // (orders - 1), 6) for order in range(1, orders)),
    ]


def test_a_report_by_the_tiny_model():
    task = task_of("completion", 3)
    candidate = model_under_test()
    settings = {"form": "completion", "max_new_tokens": 5, "samples": 3, "seed": 4}
    report, answers = run_exam(candidate, task.held_out, **settings)
    assert (report.n, len(report.outcomes), report.sampled.samples) == (3, 3, 3)
    assert answers == candidate.answer(task.held_out, Sampling(max_new_tokens=5, greedy=True, seed=4))
    for row, outcome, answer in zip(task.held_out, report.outcomes, answers, strict=True):
        assert (outcome.right, outcome.category) == (row["answer"], row["category"])
        assert (outcome.lenient, outcome.strict) == (answer.lenient, answer.strict)
    assert report.chance == pytest.approx(sum(1 / len(row["options"]) for row in task.held_out) / 3)
    assert run_exam(model_under_test(), task.held_out, **settings) == (report, answers)


def test_an_exam_without_questions():
    with pytest.raises(ConfigError, match=r"nothing to evaluate on: give held-out rows \(data.held_out\)"):
        run_exam(model_under_test(), [], form="chat", max_new_tokens=3)


def test_the_exam_of_a_recipe():
    recipe = make_recipe(
        {
            "task": "usmle",
            "data": {"held_out_rows": 2, "max_prompt_length": 2000},
            "evaluate": {"max_new_tokens": 4},
            "model": {"device": "cpu"},
        }
    )
    report, answers = exam_of_recipe(recipe)
    assert (report.n, report.sampled) == (2, None)
    assert [answer.tokens for answer in answers] == [4, 4]
