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
from groupwise.training.components import (
    RunComponents,
    check_embedder_of,
    check_rows,
    count_steps,
    load_components,
    make_schedule,
)
from groupwise.training.evaluation import metric_of
from groupwise.training.preference.reference_cache import TokenPair
from groupwise.training.rollout.advantages import find_advantage, find_grouping
from groupwise.training.sft import SupervisedFineTuning

PROBE_TOKENS, PROBE_PAIRS = 16, 4
FORWARD = 1 / 3  # of a pass forward and backward
GIB, MIB = 2**30, 2**20


def describe_run(recipe: Recipe, *, timed: bool = True) -> Iterator[str]:
    """Lines that say what a recipe comes to. Nothing is trained and nothing is written."""
    notices: list[str] = []
    check_embedder_of(recipe)
    components = load_components(recipe, say=notices.append)
    schedule = make_schedule(recipe)
    check_rows(components)
    find_advantage(recipe.advantages.function)
    find_grouping(recipe.advantages.grouping)
    metric_of(components)
    yield from _settings(recipe)
    yield ""
    yield from _data(components)
    yield from _pairs(components)
    yield from notices
    yield ""
    yield from _memory(components)
    steps = count_steps(components)
    if not steps:
        yield f"steps: {SupervisedFineTuning(components).steps:,}, all of them supervised (train.steps is 0)"
        return
    fixed = components.pairs.train if components.learns_from_pairs else []
    yield f"steps: {steps:,}, each with {_step(recipe, components.samples, fixed)}"
    phase = schedule.phase(0, 0)
    if phase is not None:
        yield f"the first phase is {phase!r}"
    if timed:
        yield from _time(components, steps, fixed)


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


def _data(components: RunComponents) -> Iterator[str]:
    prompts = components.train.prompts or components.held_out.prompts
    if not prompts:
        return
    lengths = [len(prompt.ids) for prompt in prompts]
    yield (
        f"data: {len(components.train):,} rows to train on, {len(components.held_out):,} held out; prompts of "
        f"{mean(lengths):.0f} tokens on average, {max(lengths)} at most"
    )
    if components.scorer is not None:
        yield f"rewards: {', '.join(f'{each.name} × {each.weight:g}' for each in components.scorer.functions)}"
    yield f"the first prompt, as the model sees it: {prompts[0].text!r}"


def _pairs(components: RunComponents) -> Iterator[str]:
    """Where pairs come from, how many there are, and how long."""
    how, sets = components.recipe.preference, components.pairs
    if how.pairs != "data" and components.learns_from_pairs:
        answers = components.recipe.sampling.samples_per_prompt
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
    texts = [components.tokenizer.decode(ids) for ids in (list(pairs[0].prompt), pairs[0].chosen, pairs[0].rejected)]
    yield "the first pair, as the model sees it: {!r}, better {!r}, worse {!r}".format(*texts)


def _sources(*given: str | list[str] | None) -> str:
    named = [each if isinstance(each, list) else [each] for each in given if each is not None]
    return ", ".join(dict.fromkeys(name for names in named for name in names))


def _memory(components: RunComponents) -> Iterator[str]:
    recipe, handle = components.recipe, components.handle
    trained = sum(weight.numel() for weight in components.model.parameters() if weight.requires_grad)
    held = sum(weight.numel() * weight.element_size() for weight in components.model.parameters())
    low = handle.dtype in (torch.bfloat16, torch.float16)
    budget = recipe.train.token_budget or default_token_budget(handle)
    rows, cached = _answers_at_once(components)
    needs = {
        "weights": held,
        "float32 masters": 4 * trained if low else 0,
        "gradients": 4 * trained,
        "AdamW": 8 * trained,
        "reference": trained * handle.dtype.itemsize if components.uses_reference else 0,
        f"activations of {budget:,} tokens": budget
        * activation_bytes(handle, checkpointing=recipe.model.gradient_checkpointing),
        f"cache of {rows} answers": bytes_per_token(handle.shapes, handle.dtype) * cached,
    }
    yield f"model: {recipe.model.source}, {trained:,} weights to train, {handle.dtype}, on {handle.device}"
    if handle.fallback_reason:
        yield f"  the plain path, with each prompt computed once per answer: {handle.fallback_reason}"
    yield "memory, at most:"
    for name, size in needs.items():
        if size:
            yield f"  {_size(size):>9}  {name}"
    total, free = sum(needs.values()) - held, free_memory(handle.device)
    shorter = "sampling.max_new_tokens" if components.samples else "preference.max_length"
    verdict = "fits" if total < free else f"does not fit: lower train.token_budget or {shorter}"
    yield f"  {_size(total):>9}  beside the weights, of {_size(free)} that are free: {verdict}"


def _answers_at_once(components: RunComponents) -> tuple[int, int]:
    """How many answers are sampled side by side, and their tokens with the prompts; in evaluations, if only there."""
    recipe, how = components.recipe, components.recipe.sampling
    if components.samples:
        asked, each, tokens = components.train, how.samples_per_prompt, how.max_new_tokens
        prompts = recipe.train.batch_size * recipe.train.accumulation
    else:
        asked, each = components.held_out, recipe.evaluate.samples
        prompts, tokens = len(asked), recipe.evaluate.max_new_tokens or how.max_new_tokens
    rows = min(prompts * each, Engine(components.handle).max_num_seqs)
    return rows, asked.longest * -(-rows // each) + rows * tokens


def _time(components: RunComponents, steps: int, fixed: Sequence[TokenPair]) -> Iterator[str]:
    seconds, pair, probes, full = 0.0, 0.0, [], ""
    if components.samples:
        seconds += _seconds_per_step(components)
        probes.append(f"answers of {_probe_tokens(components.recipe)} tokens")
        full = " if every answer is of full length"
    if fixed:
        pair, number = _seconds_per_pair(components, fixed)
        passes = components.recipe.train.iterations + (0 if components.keeps_reference else FORWARD)
        seconds += pair * passes * components.recipe.preference.batch_size
        probes.append(f"{number} pairs")
    yield (
        f"time: about {seconds:.1f} s a step{full}, {_duration(seconds * steps)} in all, without evaluation (from "
        f"{' and '.join(probes)}; within a factor of two)"
    )
    if fixed and components.keeps_reference:
        yield (
            f"  before the first step about {_duration(pair * FORWARD * len(fixed))} for the reference's log-probs of "
            f"{len(fixed):,} pairs, which are kept on the disk"
        )


def _seconds_per_pair(components: RunComponents, pairs: Sequence[TokenPair]) -> tuple[float, int]:
    """A few pairs forward and backward, scaled to one of average length; and how many they were."""
    few = pairs[:: -(-len(pairs) // PROBE_PAIRS)]
    budget = components.recipe.train.token_budget or default_token_budget(components.handle)
    budget = max(budget, *(_tokens(pair) for pair in few))
    seconds = 0.0
    for probe in (few[:1], few):  # the first call compiles and allocates
        start = time.perf_counter()
        prompts, answers = [pair.prompt for pair in probe], [[pair.chosen, pair.rejected] for pair in probe]
        for _, found in each_pack(components.handle, prompts, answers, token_budget=budget):
            found.logps.sum().backward()  # type: ignore[no-untyped-call]
        seconds = _since(start, components)
        components.model.zero_grad(set_to_none=True)
    return seconds * mean(map(_tokens, pairs)) / sum(map(_tokens, few)), len(few)


def _tokens(pair: TokenPair) -> int:
    """What is computed of a pair: its prompt once, and both answers."""
    return len(pair.prompt) + len(pair.chosen) + len(pair.rejected)


def _seconds_per_step(components: RunComponents) -> float:
    """One prompt's answers, a few tokens long, sampled and run forward and backward; scaled up to a step."""
    recipe, how = components.recipe, components.recipe.sampling
    prompt = max(components.train.prompts[:64], key=lambda each: len(each.ids))
    engine = Engine(components.handle)
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
        completion_logps(components.handle, [prompt.ids], rollout.completions()).logps.sum().backward()  # type: ignore[no-untyped-call]
        components.model.zero_grad(set_to_none=True)
        seconds = _since(start, components)
    prompts = recipe.train.batch_size * recipe.train.accumulation
    computed = len(prompt.ids) + how.samples_per_prompt * tokens
    needed = prompts * (len(prompt.ids) + how.samples_per_prompt * how.max_new_tokens)
    passes = recipe.train.iterations + (recipe.train.iterations * recipe.train.mini_batches > 1) / 3
    # A decoding step costs little more for more rows, on a GPU almost nothing.
    batches = prompts if components.handle.device.type == "cpu" else 1
    return generation * how.max_new_tokens / tokens * batches + seconds * needed / computed * passes


def _since(start: float, components: RunComponents) -> float:
    """Seconds, with all that a GPU has still to do."""
    if components.handle.device.type == "cuda":
        torch.cuda.synchronize(components.handle.device)
    return time.perf_counter() - start


def _probe_tokens(recipe: Recipe) -> int:
    return min(PROBE_TOKENS, recipe.sampling.max_new_tokens)


def _size(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
