"""`groupwise plan`: memory, time and traffic of a recipe's step on many GPUs, without loading a model."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from groupwise.cli.common import Commands, console, make_table, print_table, say
from groupwise.cli.train import add_with_settings, recipe_of
from groupwise.terminal import write_text

if TYPE_CHECKING:
    from groupwise.planning.layouts import Layout
    from groupwise.planning.plan import Plan


def add_plan(commands: Commands) -> None:
    summary = "plan a recipe on many GPUs: memory, time, traffic, placement; predicted, nothing is run"
    examples = (
        "groupwise plan recipe.toml --gpus 64 --gpu h100",
        "groupwise plan gsm8k --gpus 8 --model-shape qwen2.5-7b --answer-tokens 300",
    )
    plan = add_with_settings(commands, "plan", _plan, summary, examples)
    plan.add_argument("--gpus", type=int, default=8, metavar="N", help="number of GPUs (default: 8)")
    plan.add_argument(
        "--gpu", default="h100", metavar="NAME", help="h100 (default), h200, a100-80g, b200, l40s, rtx-4090"
    )
    plan.add_argument("--model-shape", metavar="NAME", help="plan for this model instead, e.g. llama-3.1-70b")
    plan.add_argument("--prompt-tokens", type=float, metavar="MEAN", help="default: half of data.max_prompt_length")
    plan.add_argument("--answer-tokens", type=float, metavar="MEAN", help="default: sampling.max_new_tokens, all full")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")


def _plan(arguments: argparse.Namespace) -> int:
    recipe = recipe_of(arguments)
    from groupwise.planning.gpus import find_gpu
    from groupwise.planning.plan import make_plan

    plan = make_plan(
        recipe,
        find_gpu(arguments.gpu),
        arguments.gpus,
        model_shape=arguments.model_shape,
        prompt_tokens=arguments.prompt_tokens,
        answer_tokens=arguments.answer_tokens,
    )
    if arguments.json:
        write_text(json.dumps(plan.as_dict(), indent=2) + "\n")
        return 0
    _show(plan)
    return 0


def _show(plan: Plan) -> None:
    from groupwise.planning.plan import advice

    work, gpu = plan.work, plan.gpu
    say(f"{plan.shape.name}, {plan.shape.size} parameters, on {plan.gpus} × {gpu.name} ({gpu.source})")
    say(
        f"a step: {work.prompts:,.0f} prompts of {work.prompt_tokens:,.0f} tokens × {work.samples} completions of "
        f"{work.answer_tokens:,.0f} tokens, {work.sampled_tokens:,.0f} sampled tokens"
    )
    say("")
    _show_layouts(plan)
    for layout in plan.layouts:
        say("")
        _show_memory(layout)
    if any(layout.all_exchanges for layout in plan.layouts):
        say("")
        _show_exchanges(plan)
    say("")
    for sentence in advice(plan):
        say(sentence)
    say("\nassumed:")
    for line in plan.assumed:
        say(f"  {line}")


def _show_layouts(plan: Plan) -> None:
    from groupwise.planning.plan import bound

    measured = plan.gpus == 1 and plan.gpu.name == "h200"
    heading = "fitted to measurements" if measured else "predicted"
    layouts = plan.layouts
    table = make_table(heading, *(layout.kind for layout in layouts), left=[heading])

    def row(name: str, values: Iterable[str]) -> None:
        table.add_row(f"  {name}", *values)

    row("", ("recommended" if layout is plan.best else "" for layout in layouts))
    row("GPUs that sample", (f"{layout.servers or plan.gpus:,}" for layout in layouts))
    row("GPUs that learn", (f"{layout.training.ranks:,}" for layout in layouts))
    if any(layout.tensor_parallel > 1 for layout in layouts):
        row("GPUs of one sampler", (f"{layout.tensor_parallel}" for layout in layouts))
    row("model.sharding", (layout.training.sharding if layout.training.ranks > 1 else "-" for layout in layouts))
    row("samples at once, each", (f"{layout.sampling.rows:,}" for layout in layouts))
    row("tokens per pass", (f"{layout.training.budget:,.0f}" for layout in layouts))
    row("sampling", (_seconds(layout.sampling_seconds) for layout in layouts))
    if plan.gpus > 1:
        row("weights and samples", (_seconds(layout.transfer_seconds) for layout in layouts))
    row("learning", (_seconds(layout.training_seconds) for layout in layouts))
    row("step", (_seconds(layout.step_seconds) for layout in layouts))
    if plan.gpus > 1:
        row("step without overlap", (_seconds(layout.synchronous_seconds) for layout in layouts))
    row("tokens per second", (f"{layout.tokens_per_second:,.0f}" for layout in layouts))
    row("  per GPU", (f"{layout.tokens_per_second / plan.gpus:,.0f}" for layout in layouts))
    print_table(console(), table)
    for layout in layouts:
        what, share = bound(layout)
        say(f"{layout.kind}: {share:.0%} of the step is {what}")


def _show_memory(layout: Layout) -> None:
    limit = layout.gpu.memory
    table = make_table("memory per GPU, GB", "sampling", "learning", left=["memory per GPU, GB"])
    sampling, training = layout.sampling.memory, layout.training.memory
    for name in dict.fromkeys([*training, *sampling]):
        held = [part.get(name, 0.0) for part in (sampling, training)]
        if any(held):
            table.add_row(f"  {name}", *(f"{size / 1e9:,.1f}" if size else "" for size in held))
    totals = [sum(part.values()) for part in (sampling, training)]
    table.add_row(f"  {layout.kind}: sum, of {limit / 1e9:,.0f}", *(f"{total / 1e9:,.1f}" for total in totals))
    print_table(console(), table)


def _show_exchanges(plan: Plan) -> None:
    table = make_table("sent per GPU and step", "link", "GB", "waited", left=["sent per GPU and step", "link"])
    for layout in plan.layouts:
        for part in layout.all_exchanges:
            name = f"  {layout.kind}: {part.name}"
            table.add_row(name, part.link, f"{part.bytes / 1e9:,.2f}", _seconds(part.seconds))
    print_table(console(), table)


def _seconds(number: float) -> str:
    digits = 2 if number < 100 else 0
    return f"{number:,.{digits}f} s" if math.isfinite(number) else "∞"
