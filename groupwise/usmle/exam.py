"""An examination in multiple choice: a model answers the questions, and what it said becomes the records of a report.

Each question is answered once with the likeliest tokens, once more with its options in another order, and as often as
is asked by chance. Besides, the letters' own probabilities are computed, which need no answer in any form: the
log-probs of the shortest answer with each letter, normalised over the question's letters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from groupwise.data import Prompt, PromptBuilder
from groupwise.errors import ConfigError
from groupwise.generate.types import Generator, Sampling, Stop
from groupwise.model.handle import ModelHandle
from groupwise.model.logprobs import completion_logps
from groupwise.tasks.base import Choices, Reorder, Row, Task
from groupwise.usmle.analysis import ExamReport, Letters, ModelAnswer, Order, Question, analyse
from groupwise.usmle.answers import extract_answer
from groupwise.usmle.compare import check_same
from groupwise.usmle.records import fingerprint

CHUNK = 256  # rows that are answered at a time, so that a display can move
SCORED_CHUNK = 64  # rows whose letters are scored at a time

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many rows are, and of how many."""


@dataclass(frozen=True)
class ModelUnderTest:
    """A model that sits an exam, with all that it takes to ask it."""

    handle: ModelHandle
    generator: Generator
    tokenizer: Any
    builder: PromptBuilder
    prompt_column: str = "prompt"
    stop: Stop | None = None

    def prompts(self, rows: Sequence[Row]) -> list[Prompt]:
        """The rows' prompts; none is left out, however long."""
        builder = copy.copy(self.builder)
        builder.max_prompt_length = None
        return builder.build(rows, self.prompt_column)

    def answer(
        self,
        rows: Sequence[Row],
        sampling: Sampling,
        samples: int = 1,
        progress: Callable[[int], None] = lambda done: None,
    ) -> list[ModelAnswer]:
        """``samples`` answers to every row, and the letters that are read in them."""
        found: list[ModelAnswer] = []
        for start in range(0, len(rows), CHUNK):
            part = rows[start : start + CHUNK]
            keys = list(range(start, start + len(part)))
            ids = [prompt.ids for prompt in self.prompts(part)]
            rollout = self.generator.generate(ids, samples, sampling, stop=self.stop, keys=keys)
            lengths = rollout.lengths.tolist()
            tokens = [row[:length].tolist() for row, length in zip(rollout.ids, lengths, strict=True)]
            texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
            for place, (text, length, reason) in enumerate(zip(texts, lengths, rollout.stop_reasons, strict=True)):
                number, sample = divmod(place, samples)
                found.append(read_answer(part[number], start + number, sample, text, length, reason))
            progress(start + len(part))
        return found

    @torch.no_grad()
    def letters(
        self, rows: Sequence[Row], choices: Choices, progress: Callable[[int], None] = lambda done: None
    ) -> list[Letters]:
        """How likely the model holds each letter of every row."""
        found: list[Letters] = []
        for start in range(0, len(rows), SCORED_CHUNK):
            part = rows[start : start + SCORED_CHUNK]
            texts = [choices(row) for row in part]
            answers = [self.tokenizer(list(own.values()), add_special_tokens=False)["input_ids"] for own in texts]
            scored = completion_logps(self.handle, [prompt.ids for prompt in self.prompts(part)], answers)
            totals = torch.where(scored.mask, scored.logps, 0.0).sum(-1).cpu().double()
            ends = torch.tensor([len(own) for own in texts]).cumsum(0).tolist()
            for number, (own, end) in enumerate(zip(texts, ends, strict=True)):
                shares = totals[end - len(own) : end].softmax(0).tolist()
                found.append(Letters(start + number, dict(zip(own, shares, strict=True))))
            progress(start + len(part))
        return found


def run_exam(
    candidate: ModelUnderTest,
    task: Task,
    rows: Sequence[Row],
    *,
    max_new_tokens: int,
    samples: int = 1,
    temperature: float = 1.0,
    seed: int = 0,
    like: ExamReport | None = None,
    progress: Progress = lambda what, done, total: None,
) -> tuple[ExamReport, list[ModelAnswer]]:
    """The report on the rows of a task in multiple choice, and the greedy answers to them.

    With more than one of ``samples``, so many are drawn at ``temperature`` as well. ``like``: the report that this one
    is to be compared with; one on other questions is refused before any is answered.
    """
    if task.choices is None or task.reorder is None:
        raise ConfigError(f"the task {task.name!r} is not multiple choice, so there is no report of letters on it")
    if not rows:
        raise ConfigError("there is nothing to evaluate on: give held-out rows (data.held_out)")

    questions = [question_of(row, number) for number, row in enumerate(rows)]
    if like is not None:
        check_same(like, fingerprint(questions), len(questions))

    def telling(what: str) -> Callable[[int], None]:
        return lambda done: progress(what, done, len(rows))

    greedy = Sampling(max_new_tokens=max_new_tokens, greedy=True, seed=seed)
    answers = candidate.answer(rows, greedy, progress=telling("answering"))
    moved, orders = _reordered(rows, task.reorder)
    shuffled = candidate.answer(moved, greedy, progress=telling("answering with other orders"))
    drawn: list[ModelAnswer] = []
    if samples > 1:
        by_chance = replace(greedy, greedy=False, temperature=temperature)
        drawn = candidate.answer(rows, by_chance, samples, progress=telling("answering by chance"))
    letters = candidate.letters(rows, task.choices, telling("scoring letters"))
    shuffled_letters = candidate.letters(moved, task.choices, telling("scoring letters in other orders"))
    report = analyse(
        questions,
        answers,
        sampled=drawn,
        shuffled=list(zip(orders, shuffled, strict=True)),
        letters=letters,
        shuffled_letters=list(zip(orders, shuffled_letters, strict=True)),
    )
    return report, answers


def question_of(row: Row, number: int) -> Question:
    """A row as the report's record of a question."""
    known = {name: row.get(name) for name in ("category", "step", "id")}
    return Question(number, row["question"], row["options"], row["answer"], **known)


def read_answer(row: Row, number: int, sample: int, text: str, tokens: int, stop_reason: str) -> ModelAnswer:
    """What both readers find in an answer."""
    lenient = extract_answer(text, row["options"])
    strict = extract_answer(text, row["options"], strict=True)
    return ModelAnswer(number, sample, text, lenient.letter, strict.letter, lenient.rule, tokens, stop_reason)


def _reordered(rows: Sequence[Row], reorder: Reorder) -> tuple[list[Row], list[Order]]:
    moved = [reorder(row, f"exam {number}") for number, row in enumerate(rows)]
    return moved, [row["moved"] for row in moved]
