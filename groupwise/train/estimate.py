"""What a run will need, before it begins: memory by what it is for, and time from a small batch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import mean

import torch

from groupwise.config import Recipe, setting_names
from groupwise.generate import Engine, Sampling
from groupwise.model.cache import bytes_per_token
from groupwise.model.device import free_memory
from groupwise.model.logprobs import activation_bytes, completion_logps, default_token_budget
from groupwise.train.compare import find_advantage, find_grouping
from groupwise.train.held_out import metric_of
from groupwise.train.setup import Parts, check_embedder_of, load_parts, make_schedule, steps_of
from groupwise.train.warmup import WarmUp

PROBE_TOKENS = 16
GIB, MIB = 2**30, 2**20


def describe_run(recipe: Recipe, *, timed: bool = True) -> Iterator[str]:
    """Lines that say what a recipe comes to. Nothing is trained and nothing is written."""
    notices: list[str] = []
    check_embedder_of(recipe)
    parts = load_parts(recipe, say=notices.append)
    find_advantage(recipe.advantages.function)
    find_grouping(recipe.advantages.grouping)
    metric_of(parts)
    yield from _settings(recipe)
    yield ""
    yield from _data(parts)
    yield from notices
    yield ""
    yield from _memory(parts)
    steps = steps_of(recipe, len(parts.train))
    if not steps:
        yield f"steps: {WarmUp(parts).steps:,}, all of them supervised (train.steps is 0)"
        return
    answers = recipe.train.batch_size * recipe.train.accumulation * recipe.sampling.samples_per_prompt
    yield f"steps: {steps:,}, each with {answers:,} answers of up to {recipe.sampling.max_new_tokens} tokens"
    phase = make_schedule(recipe).phase(0, 0)
    if phase is not None:
        yield f"the first phase is {phase!r}"
    if timed:
        seconds = _seconds_per_step(parts)
        yield (
            f"time: about {seconds:.1f} s a step if every answer is of full length, {_duration(seconds * steps)} in "
            f"all, without evaluation (from answers of {_probe_tokens(recipe)} tokens; within a factor of two)"
        )


def _settings(recipe: Recipe) -> Iterator[str]:
    yield f"settings (algorithm {recipe.algorithm}; * differs from the default)"
    plain = Recipe()
    for name, _ in setting_names():
        if name.startswith("model.lora.") and recipe.model.lora is None:
            continue
        value = recipe.get(name)
        default = plain.get(name) if not name.startswith("model.lora.") else None
        yield f"  {'*' if value != default else ' '} {name} = {value!r}"


def _data(parts: Parts) -> Iterator[str]:
    lengths = [len(prompt.ids) for prompt in parts.train.prompts]
    yield (
        f"data: {len(parts.train):,} rows to train on, {len(parts.held_out):,} held out; prompts of "
        f"{mean(lengths):.0f} tokens on average, {max(lengths)} at most"
    )
    yield f"rewards: {', '.join(f'{each.name} × {each.weight:g}' for each in parts.scorer.functions)}"
    yield f"the first prompt, as the model sees it: {parts.train.prompts[0].text!r}"


def _memory(parts: Parts) -> Iterator[str]:
    recipe, prepared = parts.recipe, parts.prepared
    trained = sum(weight.numel() for weight in parts.model.parameters() if weight.requires_grad)
    held = sum(weight.numel() * weight.element_size() for weight in parts.model.parameters())
    low = prepared.dtype in (torch.bfloat16, torch.float16)
    budget = recipe.train.token_budget or default_token_budget(prepared)
    how = recipe.sampling
    rows = min(recipe.train.batch_size * recipe.train.accumulation * how.samples_per_prompt, Engine(prepared).max_rows)
    prompts = parts.train.longest * -(-rows // how.samples_per_prompt)
    uses_reference = bool(recipe.loss.kl_coef) or recipe.masks.off_policy == "document"
    needs = {
        "weights": held,
        "float32 masters": 4 * trained if low else 0,
        "gradients": 4 * trained,
        "AdamW": 8 * trained,
        "reference": trained * prepared.dtype.itemsize if uses_reference else 0,
        f"activations of {budget:,} tokens": budget
        * activation_bytes(prepared, checkpointing=recipe.model.gradient_checkpointing),
        f"cache of {rows} answers": bytes_per_token(prepared.shapes, prepared.dtype)
        * (prompts + rows * how.max_new_tokens),
    }
    yield f"model: {recipe.model.source}, {trained:,} weights to train, {prepared.dtype}, on {prepared.device}"
    if prepared.why_plain:
        yield f"  the plain path, with each prompt computed once per answer: {prepared.why_plain}"
    yield "memory, at most:"
    for name, size in needs.items():
        if size:
            yield f"  {_size(size):>9}  {name}"
    total, free = sum(needs.values()) - held, free_memory(prepared.device)
    verdict = "fits" if total < free else "does not fit: lower train.token_budget or sampling.max_new_tokens"
    yield f"  {_size(total):>9}  beside the weights, of {_size(free)} that are free: {verdict}"


def _seconds_per_step(parts: Parts) -> float:
    """One prompt's answers, a few tokens long, sampled and run forward and backward; scaled up to a step."""
    recipe, how = parts.recipe, parts.recipe.sampling
    prompt = max(parts.train.prompts[:64], key=lambda each: len(each.ids))
    engine = Engine(parts.prepared)
    tokens = _probe_tokens(recipe)
    sampling = Sampling(max_new_tokens=tokens, min_new_tokens=tokens, temperature=how.temperature)
    engine.generate([prompt.ids], how.samples_per_prompt, sampling)  # the first call compiles and allocates
    start = time.perf_counter()
    rollout = engine.generate([prompt.ids], how.samples_per_prompt, sampling)
    generation = time.perf_counter() - start
    engine.release()
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        completion_logps(parts.prepared, [prompt.ids], rollout.completions()).logps.sum().backward()  # type: ignore[no-untyped-call]
        parts.model.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - start
    prompts = recipe.train.batch_size * recipe.train.accumulation
    computed = len(prompt.ids) + how.samples_per_prompt * tokens
    needed = prompts * (len(prompt.ids) + how.samples_per_prompt * how.max_new_tokens)
    passes = recipe.train.iterations + (recipe.train.iterations * recipe.train.mini_batches > 1) / 3
    # A decoding step costs little more for more rows, on a GPU almost nothing.
    batches = prompts if parts.prepared.device.type == "cpu" else 1
    return generation * how.max_new_tokens / tokens * batches + seconds * needed / computed * passes


def _probe_tokens(recipe: Recipe) -> int:
    return min(PROBE_TOKENS, recipe.sampling.max_new_tokens)


def _size(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
