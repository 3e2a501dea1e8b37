"""An exam: a model answers multiple-choice questions, and its answers become the records of a report.

Each question is answered greedily, answered greedily again with its options shuffled, and sampled several times if
asked for. The letters' probabilities need no written answer: they are the log-probs of the shortest answer with each
letter, normalised over the question's letters; also averaged over orders in which each option has each letter once,
which leaves no preference for a letter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from groupwise.data import Prompt, PromptBuilder, decode_completions
from groupwise.errors import ConfigError
from groupwise.generate.types import Generator, Sampling, Stop
from groupwise.model.handle import ModelHandle
from groupwise.model.logprobs import completion_logps
from groupwise.tasks.base import TaskRow
from groupwise.usmle.analysis import LetterProbabilities, analyse
from groupwise.usmle.answers import extract_answer
from groupwise.usmle.compare import check_same
from groupwise.usmle.prompts import letter_answers, rotate_options, shuffle_options
from groupwise.usmle.records import ModelAnswer, Question, fingerprint
from groupwise.usmle.tables import ExamReport

CHUNK = 256  # rows answered at a time, between two calls of `progress`
SCORED_CHUNK = 64  # rows whose letters are scored at a time

ExamProgress = Callable[[str, int, int], None]
"""Takes a description of the stage, the number of rows done, and their total."""


@dataclass(frozen=True)
class ModelUnderTest:
    """A model with all that is needed to ask it questions."""

    handle: ModelHandle
    generator: Generator
    tokenizer: Any
    builder: PromptBuilder
    stop: Stop | None = None

    def prompts(self, rows: Sequence[TaskRow]) -> list[Prompt]:
        """The rows' prompts, whatever their length."""
        builder = copy.copy(self.builder)
        builder.max_prompt_length = None
        return builder.build(rows)

    def answer(
        self,
        rows: Sequence[TaskRow],
        sampling: Sampling,
        samples: int = 1,
        progress: Callable[[int], None] = lambda done: None,
    ) -> list[ModelAnswer]:
        """``samples`` answers to every row."""
        answers: list[ModelAnswer] = []
        for start in range(0, len(rows), CHUNK):
            chunk = rows[start : start + CHUNK]
            keys = list(range(start, start + len(chunk)))
            prompts = [prompt.ids for prompt in self.prompts(chunk)]
            rollout = self.generator.generate(prompts, samples, sampling, stop=self.stop, keys=keys)
            _, texts, lengths = decode_completions(self.tokenizer, rollout.ids, rollout.lengths)
            for place, (text, length, reason) in enumerate(zip(texts, lengths, rollout.stop_reasons, strict=True)):
                number, sample = divmod(place, samples)
                answers.append(read_answer(chunk[number], start + number, sample, text, length, reason))
            progress(start + len(chunk))
        return answers

    @torch.no_grad()
    def letters(
        self, rows: Sequence[TaskRow], form: str, progress: Callable[[int], None] = lambda done: None
    ) -> list[LetterProbabilities]:
        """The probability of each letter of every row."""
        scored: list[LetterProbabilities] = []
        for start in range(0, len(rows), SCORED_CHUNK):
            chunk = rows[start : start + SCORED_CHUNK]
            texts = [letter_answers(row, form=form) for row in chunk]
            answers = [
                self.tokenizer(list(by_letter.values()), add_special_tokens=False)["input_ids"] for by_letter in texts
            ]
            result = completion_logps(self.handle, [prompt.ids for prompt in self.prompts(chunk)], answers)
            totals = torch.where(result.mask, result.logps, 0.0).sum(-1).cpu().double()
            by_row = torch.split(totals, [len(by_letter) for by_letter in texts])
            for by_letter, logps in zip(texts, by_row, strict=True):
                scored.append(dict(zip(by_letter, logps.softmax(0).tolist(), strict=True)))
            progress(start + len(chunk))
        return scored


def run_exam(
    model: ModelUnderTest,
    rows: Sequence[TaskRow],
    *,
    form: str,
    max_new_tokens: int,
    samples: int = 1,
    temperature: float = 1.0,
    seed: int = 0,
    like: ExamReport | None = None,
    progress: ExamProgress = lambda stage, done, total: None,
) -> tuple[ExamReport, list[ModelAnswer]]:
    """The report on the rows, and the greedy answers to them.

    ``form`` is the form of the rows' prompts. With ``samples`` above 1, so many answers are sampled at ``temperature``
    as well. ``like`` is the report to compare with; if it is about other questions, no question is answered.
    """
    if not rows:
        raise ConfigError("there is nothing to evaluate on: give held-out rows (data.held_out)")
    questions = [
        Question(number, row["question"], row["options"], row["answer"], row.get("category"), row.get("step"))
        for number, row in enumerate(rows)
    ]
    if like is not None:
        check_same(like, fingerprint(questions), len(questions))

    def report_to(stage: str) -> Callable[[int], None]:
        return lambda done: progress(stage, done, len(rows))

    greedy = Sampling(max_new_tokens=max_new_tokens, greedy=True, seed=seed)
    answers = model.answer(rows, greedy, progress=report_to("answering"))
    moved = [shuffle_options(row, f"exam {number}", form=form) for number, row in enumerate(rows)]
    shuffled = model.answer(moved, greedy, progress=report_to("answering with shuffled options"))
    sampled: list[ModelAnswer] = []
    if samples > 1:
        sampling = replace(greedy, greedy=False, temperature=temperature)
        sampled = model.answer(rows, sampling, samples, progress=report_to("sampling answers"))
    letters = model.letters(rows, form, report_to("scoring letters"))
    shuffled_letters = model.letters(moved, form, report_to("scoring letters with shuffled options"))
    averaged = average_over_orders(model, rows, form, letters, report_to("scoring letters in all orders"))
    report = analyse(
        questions,
        answers,
        sampled=sampled,
        orders=[row["moved"] for row in moved],
        shuffled=shuffled,
        letters=letters,
        shuffled_letters=shuffled_letters,
        averaged_letters=averaged,
    )
    return report, answers


def average_over_orders(
    model: ModelUnderTest,
    rows: Sequence[TaskRow],
    form: str,
    letters: Sequence[LetterProbabilities],
    progress: Callable[[int], None] = lambda done: None,
) -> list[LetterProbabilities]:
    """The mean probability of each option, under its letter in the row, over all rotations of the options.

    ``letters`` are the probabilities in the original order.
    """
    totals = [dict(scores) for scores in letters]
    orders = max(len(row["options"]) for row in rows)
    for by in range(1, orders):
        rotated = {n: rotate_options(row, by, form=form) for n, row in enumerate(rows) if len(row["options"]) > by}
        for number, scores in zip(rotated, model.letters(list(rotated.values()), form), strict=True):
            for letter, shown in rotated[number]["moved"].items():
                totals[number][letter] += scores[shown]
        progress(len(rows) * by // (orders - 1))
    return [{letter: total / len(scores) for letter, total in scores.items()} for scores in totals]


def read_answer(row: TaskRow, number: int, sample: int, text: str, tokens: int, stop_reason: str) -> ModelAnswer:
    """A completion as a record, with the letters that the two readers find in it."""
    lenient, strict = (extract_answer(text, row["options"], strict=strict) for strict in (False, True))
    return ModelAnswer(number, sample, text, lenient.letter, strict.letter, lenient.rule, tokens, stop_reason)
