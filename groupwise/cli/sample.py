"""`groupwise sample`: several completions of each prompt."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from groupwise.cli.common import Commands, add, console, make_status
from groupwise.errors import ConfigError, InputError, check_installed
from groupwise.text import plural, printable

if TYPE_CHECKING:
    from groupwise.generate.types import Sampling

MODEL_HELP = "a folder, a .gguf file, a name of `groupwise models list`, or a hub id"


def add_sample(commands: Commands) -> None:
    examples = (
        "groupwise sample smollm2-135m 'Why is the sky blue?' -n 4",
        "groupwise sample runs/NAME/model 'What is 2 + 3?' --greedy -n 1",
        "groupwise sample FOLDER 'Once upon a time' --raw --temperature 0.7",
    )
    sample = add(commands, "sample", _sample, "sample completions of prompts from a model", examples=examples)
    sample.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    sample.add_argument("prompts", nargs="+", metavar="PROMPT", help="each is completed -n times")
    add_sampling_arguments(sample, samples=4, max_new_tokens=64)
    sample.add_argument("--system", metavar="TEXT", help="a system message before each prompt, as data.system_prompt")
    for flag in ("--option", "--form"):
        sample.add_argument(flag, help=argparse.SUPPRESS)


def add_sampling_arguments(parser: argparse.ArgumentParser, *, samples: int, max_new_tokens: int) -> None:
    """Add the options for sampling and for loading the model, with the defaults of two of them."""
    parser.add_argument(
        "-n", "--samples", type=int, default=samples, metavar="N", help=f"completions per prompt (default: {samples})"
    )
    help_text = f"maximum length of a completion in tokens (default: {max_new_tokens})"
    parser.add_argument("--max-new-tokens", type=int, default=max_new_tokens, metavar="N", help=help_text)
    parser.add_argument("--temperature", type=float, default=1.0, metavar="X", help="sampling temperature (default: 1)")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from the K most likely tokens only")
    help_text = "sample from the smallest set of tokens with this total probability (default: 1)"
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help=help_text)
    help_text = "sample from tokens with at least this share of the highest probability"
    parser.add_argument("--min-p", type=float, metavar="P", help=help_text)
    help_text = "order of temperature and filters: transformers, vllm or mlx_lm (default: transformers)"
    parser.add_argument("--order", default="transformers", metavar="NAME", help=help_text)
    parser.add_argument("--greedy", action="store_true", help="always take the most likely token")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end a completion with this text; repeatable")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the sampling (default: 0)")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    parser.add_argument("--device", default="auto", help="such as cpu or cuda:1 (default: the GPU if there is one)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, … (default: auto)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")


def sampling_of(arguments: argparse.Namespace) -> Sampling:
    from groupwise.generate.types import Sampling

    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "order", "greedy", "seed")
    return Sampling(**{name: getattr(arguments, name) for name in names})


def load_model_of(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The model and the tokenizer."""
    from groupwise.model import load_model_and_tokenizer
    from groupwise.training.extras import model_needs

    check_installed(model_needs(arguments.model))
    options = {name: getattr(arguments, name) for name in ("device", "dtype", "seed", "trust_remote_code")}
    return load_model_and_tokenizer(arguments.model, **options)


def _sample(arguments: argparse.Namespace) -> int:
    if arguments.option is not None or arguments.form is not None:
        raise ConfigError("--option and --form now belong to `groupwise usmle ask MODEL QUESTION`")
    from rich.text import Text

    with make_status() as status:
        status.stage("loading PyTorch and transformers")
        sampling = sampling_of(arguments)
        import groupwise.model.handle  # noqa: F401

        status.stage(f"loading the model {arguments.model}")
        model, tokenizer = load_model_of(arguments)
    from groupwise.data import decode_completions
    from groupwise.generate import Engine, StopStrings

    stop = StopStrings(tokenizer, arguments.stop) if arguments.stop else None
    chat = tokenizer.chat_template is not None and not arguments.raw
    if arguments.system is not None and not chat:
        raise ConfigError("--system needs a chat template: the model has none, or --raw is set; put it into the prompt")
    prompts = [_prompt_ids(tokenizer, text, chat, arguments.system) for text in arguments.prompts]
    rollout = Engine(model).generate(prompts, arguments.samples, sampling, stop=stop)
    _, completions, lengths = decode_completions(tokenizer, rollout.ids, rollout.lengths)
    out = console()
    for row, (completion, length) in enumerate(zip(completions, lengths, strict=True)):
        if row % arguments.samples == 0:
            prompt = arguments.prompts[row // arguments.samples]
            out.rule(Text(printable(prompt).splitlines()[0] if prompt else "(empty prompt)"), align="left", style="dim")
        mean_logp = float(rollout.logps[row, :length].mean())
        facts = f"[{rollout.stop_reasons[row]}, {plural(int(length), 'token')}, mean log-prob {mean_logp:.2f}]"
        out.print(f"{completion.strip()}\n", facts, sep="", soft_wrap=True)
    return 0


def _prompt_ids(tokenizer: Any, text: str, chat: bool, system: str | None) -> list[int]:
    from groupwise.chat_template import TemplateError, chat_ids

    if chat:
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": text})
        try:
            return chat_ids(tokenizer, [messages], add_generation_prompt=True)[0]
        except TemplateError as error:
            raise InputError(f"the model's chat template fails: {error}; --raw samples without it") from error
    return list(tokenizer(text)["input_ids"])
