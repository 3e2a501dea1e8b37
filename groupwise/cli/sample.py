"""`groupwise sample`: several answers to a prompt, or the answer to one question of multiple choice."""

from __future__ import annotations

import argparse
import string
from collections import Counter
from typing import TYPE_CHECKING, Any

from groupwise.cli.common import Commands, add, console
from groupwise.errors import InputError

if TYPE_CHECKING:
    from groupwise.generate.types import Sampling

SAMPLES, TOKENS = 4, 64  # by default, for a prompt
ANSWER_TOKENS = 400  # for a question: room for its reasoning
FORMS = ("chat", "direct", "completion")  # how a question may be put, as usmle.prompt has it

# Why an answer gives no letter, by the rule that found so (`rewards.choice.NO_ANSWER`).
WHY_NONE = {
    "nothing": "it settles on no option",
    "several": "it names several options",
    "declined": "it declines to choose",
    "beyond the options": "it names a letter beyond the options",
}


def add_sample(commands: Commands) -> None:
    sample = add(
        commands,
        "sample",
        _sample,
        "several answers to each prompt, with what the model thought of them; or, with --option, the answer to a "
        "question of multiple choice: its reasoning, its letter, and how likely each option is",
    )
    sample.add_argument(
        "model", metavar="MODEL", help="a folder, a .gguf file, a name of `groupwise models list`, a hub id"
    )
    sample.add_argument("prompts", nargs="+", metavar="PROMPT")
    sample.add_argument(
        "--option", action="append", metavar="TEXT", help="an option of the question, A first; give 2 to 10 of them"
    )
    sample.add_argument("--form", choices=FORMS, help=f"with --option: how the question is put (default: {FORMS[0]})")
    sample.add_argument(
        "-n", "--samples", type=int, help=f"answers to each prompt (default: {SAMPLES}; to a question 1)"
    )
    sample.add_argument("--max-new-tokens", type=int, help=f"default: {TOKENS}; for a question {ANSWER_TOKENS}")
    sample.add_argument("--temperature", type=float, default=1.0)
    sample.add_argument("--top-k", type=int)
    sample.add_argument("--top-p", type=float, default=1.0)
    sample.add_argument("--min-p", type=float)
    sample.add_argument(
        "--greedy", action="store_true", help="the most likely token always; so it is for one answer to a question"
    )
    sample.add_argument("--stop", action="append", metavar="TEXT", help="end an answer with this text; may be repeated")
    sample.add_argument("--seed", type=int, default=0)
    sample.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    sample.add_argument("--device", default="auto")
    sample.add_argument("--dtype", default="auto")
    sample.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")


def _sample(arguments: argparse.Namespace) -> int:
    if arguments.form is not None and not arguments.option:
        raise InputError("--form says how a question with options is put; give its options with --option")
    form = arguments.form or FORMS[0]
    question = _question(arguments, form) if arguments.option else None
    samples = arguments.samples if arguments.samples is not None else 1 if question else SAMPLES
    sampling = _sampling(arguments, alone=question is not None and samples == 1)
    from groupwise.model import load_model_and_tokenizer, set_threads

    set_threads()
    model, tokenizer = load_model_and_tokenizer(
        arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        seed=arguments.seed,
        trust_remote_code=arguments.trust_remote_code,
    )
    if question is not None:
        _answer(question, form, model, tokenizer, sampling, samples, arguments)
    else:
        _continue(model, tokenizer, sampling, samples, arguments)
    return 0


def _sampling(arguments: argparse.Namespace, *, alone: bool) -> Sampling:
    from groupwise.generate.types import Sampling

    longest = ANSWER_TOKENS if arguments.option else TOKENS
    return Sampling(
        max_new_tokens=longest if arguments.max_new_tokens is None else arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        greedy=arguments.greedy or alone,
        seed=arguments.seed,
    )


def _continue(model: Any, tokenizer: Any, sampling: Sampling, samples: int, arguments: argparse.Namespace) -> None:
    from rich.text import Text

    from groupwise.generate import Engine, StopStrings

    stop = StopStrings(tokenizer, arguments.stop) if arguments.stop else None
    chat = tokenizer.chat_template is not None and not arguments.raw
    prompts = [_prompt_ids(tokenizer, text, chat) for text in arguments.prompts]
    rollout = Engine(model).generate(prompts, samples, sampling, stop=stop)
    out, row = console(), 0
    for text, members in zip(arguments.prompts, rollout.completions(), strict=True):
        out.rule(Text(text.splitlines()[0] if text else "(nothing)"), align="left", style="dim")
        for ids in members:
            likely = float(rollout.logps[row, : len(ids)].mean())
            facts = f"[{rollout.stop_reasons[row]}, {len(ids)} tokens, {likely:.2f} a token]"
            answer = str(tokenizer.decode(ids, skip_special_tokens=True)).strip()
            out.print(f"{answer}\n", facts, sep="", markup=False, highlight=False, soft_wrap=True)
            row += 1


def _question(arguments: argparse.Namespace, form: str) -> dict[str, Any]:
    """The question as a row of the task, its prompt included."""
    from groupwise.usmle.rows import check_options
    from groupwise.usmle.task import ask

    if len(arguments.prompts) != 1:
        raise InputError(f"options belong to one question, but {len(arguments.prompts)} prompts are given")
    if not arguments.prompts[0].strip():
        raise InputError("the question is empty; put it in front of its options")
    options = check_options(list(zip(string.ascii_uppercase, arguments.option, strict=False)), "--option")
    return ask({"question": arguments.prompts[0].strip(), "options": options}, form=form)


def _answer(
    question: dict[str, Any],
    form: str,
    model: Any,
    tokenizer: Any,
    sampling: Sampling,
    samples: int,
    arguments: argparse.Namespace,
) -> None:
    from functools import partial

    from rich.table import Table
    from rich.text import Text

    from groupwise.data import PromptBuilder
    from groupwise.generate import Engine, StopStrings
    from groupwise.model import prepare
    from groupwise.usmle.exam import ModelUnderTest
    from groupwise.usmle.task import letter_answers

    handle = prepare(model)
    candidate = ModelUnderTest(
        handle,
        Engine(handle),
        tokenizer,
        PromptBuilder(tokenizer, chat=False if arguments.raw else None, max_prompt_length=None),
        stop=StopStrings(tokenizer, arguments.stop) if arguments.stop else None,
    )
    given = candidate.answer([question], sampling, samples)
    likely = candidate.letters([question], partial(letter_answers, form=form))[0].probabilities
    out = console()
    for answer in given:
        out.print(answer.text.strip(), markup=False, highlight=False, soft_wrap=True)
        out.print(f"[{answer.stop_reason}, {answer.tokens} tokens]\n", markup=False, highlight=False)
    chosen = [answer.lenient for answer in given]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("option", "", "probability", "chosen"):
        table.add_column(column, justify="right" if column in ("probability", "chosen") else "left")
    for letter, text in question["options"].items():
        times = chosen.count(letter)
        shown = "" if not times else "yes" if samples == 1 else f"{times} of {samples}"
        table.add_row(letter, Text(text), f"{likely[letter]:.1%}", shown)  # brackets in it are no markup
    out.print(table)
    for rule, number in Counter(answer.rule for answer in given if answer.lenient is None).items():
        which = "this answer" if samples == 1 else f"{number} of {samples} answers"
        out.print(f"no letter is taken from {which}: {WHY_NONE[rule]}", highlight=False)
    if samples == 1 and given[0].lenient is not None:
        how = "in the form that was asked for" if given[0].strict else f"by the rule '{given[0].rule}'"
        out.print(f"answer: {given[0].lenient}, {how}", markup=False, highlight=False)


def _prompt_ids(tokenizer: Any, text: str, chat: bool) -> list[int]:
    if chat:
        messages = [{"role": "user", "content": text}]
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])
    return list(tokenizer(text)["input_ids"])
