"""`groupwise usmle ask`: a model's answer to one multiple-choice question."""

from __future__ import annotations

import argparse
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from groupwise.cli.common import Commands, add, console, format_examples, make_table, print_table
from groupwise.cli.sample import MODEL_HELP, add_sampling_arguments, load_model_of, sampling_of
from groupwise.errors import InputError
from groupwise.text import plural

if TYPE_CHECKING:
    from groupwise.usmle.records import ModelAnswer

FORMS = ("chat", "direct", "completion")  # the choices of task_options.prompt


def add_usmle(commands: Commands) -> None:
    help_text = "multiple-choice questions of medical exams"
    parser = commands.add_parser("usmle", help=help_text, description=help_text, allow_abbrev=False)
    ask = add(
        parser.add_subparsers(title="commands", metavar="COMMAND", required=True),
        "ask",
        _ask,
        "answer a multiple-choice question: the completion, its letter, and the probability of each option",
    )
    ask.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    ask.add_argument("question", metavar="QUESTION", help="the text of the question, without the options")
    ask.add_argument(
        "--option", action="append", default=[], metavar="TEXT", help="an option, A first; give 2 to 10 of them"
    )
    ask.add_argument("--form", choices=FORMS, default=FORMS[0], help=f"form of the prompt (default: {FORMS[0]})")
    add_sampling_arguments(ask, samples=1, max_new_tokens=400)
    example = "groupwise usmle ask smollm2-135m 'Which vitamin prevents scurvy?' --option A --option C"
    note = "One answer is always greedy; --temperature and the like are for -n above 1."
    ask.epilog = f"{note}\n\n{format_examples([example])}"


def _ask(arguments: argparse.Namespace) -> int:
    from groupwise.usmle.prompts import with_prompt
    from groupwise.usmle.rows import check_options

    if not arguments.question.strip():
        raise InputError("the question is empty")
    options = check_options(list(zip(string.ascii_uppercase, arguments.option, strict=False)), "--option")
    row = with_prompt({"question": arguments.question.strip(), "options": options}, form=arguments.form)
    sampling = sampling_of(arguments)
    if arguments.samples == 1:
        sampling = replace(sampling, greedy=True)
    model, tokenizer = load_model_of(arguments)
    from groupwise.data import PromptBuilder
    from groupwise.generate import Engine, StopStrings
    from groupwise.model import prepare
    from groupwise.usmle.exam import ModelUnderTest

    handle = prepare(model)
    under_test = ModelUnderTest(
        handle,
        Engine(handle),
        tokenizer,
        PromptBuilder(tokenizer, chat=False if arguments.raw else None, max_prompt_length=None),
        stop=StopStrings(tokenizer, arguments.stop) if arguments.stop else None,
    )
    answers = under_test.answer([row], sampling, arguments.samples)
    probabilities = under_test.letters([row], arguments.form)[0]
    out = console()
    for answer in answers:
        out.print(answer.text.strip(), soft_wrap=True)
        out.print(f"[{answer.stop_reason}, {plural(answer.tokens, 'token')}]\n")
    print_table(out, _table(options, answers, probabilities))
    for line in _conclusions(answers):
        out.print(line)
    return 0


def _table(options: dict[str, str], answers: Sequence[ModelAnswer], probabilities: Any) -> Any:
    table = make_table("option", "", "probability", "chosen", left=["option", ""])
    letters = [answer.lenient for answer in answers]
    for letter, text in options.items():
        times = letters.count(letter)
        chosen = "" if not times else "yes" if len(answers) == 1 else f"{times} of {len(answers)}"
        table.add_row(letter, text, f"{probabilities[letter]:.1%}", chosen)
    return table


def _conclusions(answers: Sequence[ModelAnswer]) -> list[str]:
    from groupwise.usmle.answers import NO_ANSWER

    first, total = answers[0], len(answers)
    if total == 1 and first.lenient is not None:
        form = "in the requested form" if first.strict else f"by the rule '{first.rule}'"
        return [f"answer: {first.lenient}, {form}"]
    counts = Counter(answer.rule for answer in answers if answer.lenient is None)
    return [
        f"no letter found in {'this answer' if total == 1 else f'{count} of {total} answers'}: {NO_ANSWER[rule]}"
        for rule, count in counts.items()
    ]
