"""`groupwise sample`: several answers to a prompt."""

from __future__ import annotations

import argparse
from typing import Any

from groupwise.cli.common import Commands, add, console


def add_sample(commands: Commands) -> None:
    sample = add(commands, "sample", _sample, "several answers to each prompt, with what the model thought of them")
    sample.add_argument(
        "model", metavar="MODEL", help="a folder, a .gguf file, a name of `groupwise models list`, a hub id"
    )
    sample.add_argument("prompts", nargs="+", metavar="PROMPT")
    sample.add_argument("-n", "--samples", type=int, default=4, help="answers to each prompt (default: 4)")
    sample.add_argument("--max-new-tokens", type=int, default=64)
    sample.add_argument("--temperature", type=float, default=1.0)
    sample.add_argument("--top-k", type=int)
    sample.add_argument("--top-p", type=float, default=1.0)
    sample.add_argument("--min-p", type=float)
    sample.add_argument("--greedy", action="store_true", help="the most likely token always")
    sample.add_argument("--stop", action="append", metavar="TEXT", help="end an answer with this text; may be repeated")
    sample.add_argument("--seed", type=int, default=0)
    sample.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    sample.add_argument("--device", default="auto")
    sample.add_argument("--dtype", default="auto")
    sample.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")


def _sample(arguments: argparse.Namespace) -> int:
    from groupwise.generate.types import Sampling

    sampling = Sampling(
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        greedy=arguments.greedy,
        seed=arguments.seed,
    )
    from groupwise.generate import Engine, StopStrings
    from groupwise.model import load_model_and_tokenizer

    model, tokenizer = load_model_and_tokenizer(
        arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        seed=arguments.seed,
        trust_remote_code=arguments.trust_remote_code,
    )
    stop = StopStrings(tokenizer, arguments.stop) if arguments.stop else None
    chat = tokenizer.chat_template is not None and not arguments.raw
    prompts = [_prompt_ids(tokenizer, text, chat) for text in arguments.prompts]
    rollout = Engine(model).generate(prompts, arguments.samples, sampling, stop=stop)
    out, row = console(), 0
    for text, members in zip(arguments.prompts, rollout.completions(), strict=True):
        out.rule(text.splitlines()[0] if text else "(nothing)", align="left", style="dim")
        for ids in members:
            likely = float(rollout.logps[row, : len(ids)].mean())
            facts = f"[{rollout.stop_reasons[row]}, {len(ids)} tokens, {likely:.2f} a token]"
            answer = str(tokenizer.decode(ids, skip_special_tokens=True)).strip()
            out.print(f"{answer}\n", facts, sep="", markup=False, highlight=False, soft_wrap=True)
            row += 1
    return 0


def _prompt_ids(tokenizer: Any, text: str, chat: bool) -> list[int]:
    if chat:
        messages = [{"role": "user", "content": text}]
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])
    return list(tokenizer(text)["input_ids"])
