"""What a run will need, before it begins: memory by what it is for, and time from a small batch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import mean

import torch

from groupwise.config import Recipe, setting_names
from groupwise.generate import Engine, Sampling
from groupwise.model.cache import bytes_per_token
from groupwise.model.device import free_memory
from groupwise.model.logprobs import activation_bytes, completion_logps, default_token_budget, each_pack
from groupwise.train.compare import find_advantage, find_grouping
from groupwise.train.held_out import metric_of
from groupwise.train.pair_logps import TokenPair
from groupwise.train.setup import (
    Parts,
    check_embedder_of,
    check_rows,
    load_parts,
    make_schedule,
    steps_of,
)
from groupwise.train.warmup import WarmUp

PROBE_TOKENS, PROBE_PAIRS = 16, 4
FORWARD = 1 / 3  # of a pass forward and backward
GIB, MIB = 2**30, 2**20


def describe_run(recipe: Recipe, *, timed: bool = True) -> Iterator[str]:
    """Lines that say what a recipe comes to. Nothing is trained and nothing is written."""
    notices: list[str] = []
    check_embedder_of(recipe)
    parts = load_parts(recipe, say=notices.append)
    schedule = make_schedule(recipe)
    check_rows(parts)
    find_advantage(recipe.advantages.function)
    find_grouping(recipe.advantages.grouping)
    metric_of(parts)
    yield from _settings(recipe)
    yield ""
    yield from _data(parts)
    yield from _pairs(parts)
    yield from notices
    yield ""
    yield from _memory(parts)
    steps = steps_of(parts)
    if not steps:
        yield f"steps: {WarmUp(parts).steps:,}, all of them supervised (train.steps is 0)"
        return
    fixed = parts.pairs.train if parts.learns_from_pairs else []
    yield f"steps: {steps:,}, each with {_step(recipe, parts.samples, fixed)}"
    phase = schedule.phase(0, 0)
    if phase is not None:
        yield f"the first phase is {phase!r}"
    if timed:
        yield from _time(parts, steps, fixed)


def _step(recipe: Recipe, samples: bool, fixed: Sequence[TokenPair]) -> str:
    """What a step works on."""
    found = []
    if samples:
        answers = recipe.train.batch_size * recipe.train.accumulation * recipe.sampling.samples_per_prompt
        found.append(f"{answers:,} answers of up to {recipe.sampling.max_new_tokens} tokens")
    if fixed:
        found.append(f"{recipe.preference.batch_size:,} pairs" + (" of the data set" if samples else ""))
    return " and ".join(found)


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
    prompts = parts.train.prompts or parts.held_out.prompts
    if not prompts:
        return
    lengths = [len(prompt.ids) for prompt in prompts]
    yield (
        f"data: {len(parts.train):,} rows to train on, {len(parts.held_out):,} held out; prompts of "
        f"{mean(lengths):.0f} tokens on average, {max(lengths)} at most"
    )
    if parts.scorer is not None:
        yield f"rewards: {', '.join(f'{each.name} × {each.weight:g}' for each in parts.scorer.functions)}"
    yield f"the first prompt, as the model sees it: {prompts[0].text!r}"


def _pairs(parts: Parts) -> Iterator[str]:
    """Where pairs come from, how many there are, and how long."""
    how, sets = parts.recipe.preference, parts.pairs
    if how.pairs != "data" and parts.learns_from_pairs:
        answers = parts.recipe.sampling.samples_per_prompt
        yield (
            f"pairs of sampled answers: up to {min(how.pairs_per_group, answers // 2)} of each {answers}, the best "
            f"against the worst by {how.reward or 'the sum of all rewards'}"
        )
    pairs = [*sets.train, *sets.held_out]
    if not pairs:
        return
    lengths = [len(pair.prompt) + max(len(pair.chosen), len(pair.rejected)) for pair in pairs]
    yield (
        f"pairs of {_sources(how.train, how.held_out)}: {len(sets.train):,} to train on, {len(sets.held_out):,} held "
        f"out; a prompt and its longer answer have {mean(lengths):.0f} tokens on average, {max(lengths)} at most"
    )
    texts = [parts.tokenizer.decode(ids) for ids in (list(pairs[0].prompt), pairs[0].chosen, pairs[0].rejected)]
    yield "the first pair, as the model sees it: {!r}, better {!r}, worse {!r}".format(*texts)


def _sources(*given: str | list[str] | None) -> str:
    named = [each if isinstance(each, list) else [each] for each in given if each is not None]
    return ", ".join(dict.fromkeys(name for names in named for name in names))


def _memory(parts: Parts) -> Iterator[str]:
    recipe, prepared = parts.recipe, parts.prepared
    trained = sum(weight.numel() for weight in parts.model.parameters() if weight.requires_grad)
    held = sum(weight.numel() * weight.element_size() for weight in parts.model.parameters())
    low = prepared.dtype in (torch.bfloat16, torch.float16)
    budget = recipe.train.token_budget or default_token_budget(prepared)
    rows, cached = _answers_at_once(parts)
    needs = {
        "weights": held,
        "float32 masters": 4 * trained if low else 0,
        "gradients": 4 * trained,
        "AdamW": 8 * trained,
        "reference": trained * prepared.dtype.itemsize if parts.uses_reference else 0,
        f"activations of {budget:,} tokens": budget
        * activation_bytes(prepared, checkpointing=recipe.model.gradient_checkpointing),
        f"cache of {rows} answers": bytes_per_token(prepared.shapes, prepared.dtype) * cached,
    }
    yield f"model: {recipe.model.source}, {trained:,} weights to train, {prepared.dtype}, on {prepared.device}"
    if prepared.why_plain:
        yield f"  the plain path, with each prompt computed once per answer: {prepared.why_plain}"
    yield "memory, at most:"
    for name, size in needs.items():
        if size:
            yield f"  {_size(size):>9}  {name}"
    total, free = sum(needs.values()) - held, free_memory(prepared.device)
    shorter = "sampling.max_new_tokens" if parts.samples else "preference.max_length"
    verdict = "fits" if total < free else f"does not fit: lower train.token_budget or {shorter}"
    yield f"  {_size(total):>9}  beside the weights, of {_size(free)} that are free: {verdict}"


def _answers_at_once(parts: Parts) -> tuple[int, int]:
    """How many answers are sampled side by side, and their tokens with the prompts; in evaluations, if only there."""
    recipe, how = parts.recipe, parts.recipe.sampling
    if parts.samples:
        asked, each, tokens = parts.train, how.samples_per_prompt, how.max_new_tokens
        prompts = recipe.train.batch_size * recipe.train.accumulation
    else:
        asked, each = parts.held_out, recipe.evaluate.samples
        prompts, tokens = len(asked), recipe.evaluate.max_new_tokens or how.max_new_tokens
    rows = min(prompts * each, Engine(parts.prepared).max_rows)
    return rows, asked.longest * -(-rows // each) + rows * tokens


def _time(parts: Parts, steps: int, fixed: Sequence[TokenPair]) -> Iterator[str]:
    seconds, pair, probes, full = 0.0, 0.0, [], ""
    if parts.samples:
        seconds += _seconds_per_step(parts)
        probes.append(f"answers of {_probe_tokens(parts.recipe)} tokens")
        full = " if every answer is of full length"
    if fixed:
        pair, number = _seconds_per_pair(parts, fixed)
        passes = parts.recipe.train.iterations + (0 if parts.keeps_reference else FORWARD)
        seconds += pair * passes * parts.recipe.preference.batch_size
        probes.append(f"{number} pairs")
    yield (
        f"time: about {seconds:.1f} s a step{full}, {_duration(seconds * steps)} in all, without evaluation (from "
        f"{' and '.join(probes)}; within a factor of two)"
    )
    if fixed and parts.keeps_reference:
        yield (
            f"  before the first step about {_duration(pair * FORWARD * len(fixed))} for the reference's log-probs of "
            f"{len(fixed):,} pairs, which are kept on the disk"
        )


def _seconds_per_pair(parts: Parts, pairs: Sequence[TokenPair]) -> tuple[float, int]:
    """A few pairs forward and backward, scaled to one of average length; and how many they were."""
    few = pairs[:: -(-len(pairs) // PROBE_PAIRS)]
    budget = parts.recipe.train.token_budget or default_token_budget(parts.prepared)
    budget = max(budget, *(_tokens(pair) for pair in few))
    seconds = 0.0
    for probe in (few[:1], few):  # the first call compiles and allocates
        start = time.perf_counter()
        prompts, answers = [pair.prompt for pair in probe], [[pair.chosen, pair.rejected] for pair in probe]
        for _, found in each_pack(parts.prepared, prompts, answers, token_budget=budget):
            found.logps.sum().backward()  # type: ignore[no-untyped-call]
        seconds = _since(start, parts)
        parts.model.zero_grad(set_to_none=True)
    return seconds * mean(map(_tokens, pairs)) / sum(map(_tokens, few)), len(few)


def _tokens(pair: TokenPair) -> int:
    """What is computed of a pair: its prompt once, and both answers."""
    return len(pair.prompt) + len(pair.chosen) + len(pair.rejected)


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
        seconds = _since(start, parts)
    prompts = recipe.train.batch_size * recipe.train.accumulation
    computed = len(prompt.ids) + how.samples_per_prompt * tokens
    needed = prompts * (len(prompt.ids) + how.samples_per_prompt * how.max_new_tokens)
    passes = recipe.train.iterations + (recipe.train.iterations * recipe.train.mini_batches > 1) / 3
    # A decoding step costs little more for more rows, on a GPU almost nothing.
    batches = prompts if parts.prepared.device.type == "cpu" else 1
    return generation * how.max_new_tokens / tokens * batches + seconds * needed / computed * passes


def _since(start: float, parts: Parts) -> float:
    """Seconds, with all that a GPU has still to do."""
    if parts.prepared.device.type == "cuda":
        torch.cuda.synchronize(parts.prepared.device)
    return time.perf_counter() - start


def _probe_tokens(recipe: Recipe) -> int:
    return min(PROBE_TOKENS, recipe.sampling.max_new_tokens)


def _size(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
