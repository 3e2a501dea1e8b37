"""`groupwise check`: what a run will need, before it starts. Memory by purpose, and time from a small probe."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from statistics import mean
from typing import Any

import torch
from pydantic import BaseModel

from groupwise.config import Recipe, setting_names
from groupwise.data import Prompt, decode_completions, reward_inputs
from groupwise.distributed.ranks import Ranks
from groupwise.generate import Rollout, Sampling
from groupwise.generate.registry import make_generator
from groupwise.model.cache import CACHE_DTYPES, bytes_per_token
from groupwise.model.device import free_memory
from groupwise.model.handle import ModelHandle
from groupwise.model.logprobs import completion_logps, iter_packs
from groupwise.model.packing import activation_bytes, default_token_budget
from groupwise.redaction import without_secrets
from groupwise.tasks import TaskRow, find_task
from groupwise.text import format_duration, plural
from groupwise.training.components import RunComponents, length_of, load_components
from groupwise.training.display import Display
from groupwise.training.evaluation import NO_STEPS
from groupwise.training.extras import check_extras
from groupwise.training.inputs import check_training_inputs, load_inputs, make_schedule, most_tokens
from groupwise.training.preference.reference_cache import TokenPair
from groupwise.training.schedule.lengths import RunLength
from groupwise.training.sft import SupervisedFineTuning
from groupwise.training.trial_conversations import score_lines, try_conversations
from groupwise.training.update.teacher import Teacher

PROBE_TOKENS, PROBE_PAIRS = 16, 4
FORWARD = 1 / 3  # the share of a forward pass in forward and backward
GIB, MIB = 2**30, 2**20


def describe_run(
    recipe: Recipe, *, timed: bool = True, all_settings: bool = False, display: Display | None = None
) -> Iterator[str]:
    """Lines about a recipe: settings, data, memory, time. Nothing is trained; a model may be fetched.

    ``timed``: also sample a small batch, score it and time it. ``all_settings``: also those with their default.
    """
    display = display or Display()
    notices: list[str] = []
    check_extras(recipe)
    inputs = load_inputs(recipe, say=notices.append, display=display)
    check_training_inputs(recipe, inputs)
    components = load_components(recipe, inputs, notices.append, display=display)
    yield from _settings(recipe, all_settings)
    yield ""
    yield from _data(components)
    yield from _pairs(components)
    yield from notices
    yield ""
    yield from _memory(components)
    length = length_of(components)
    if length.steps == 0:
        yield f"steps: {SupervisedFineTuning(components).steps:,}, all of them SFT (train.steps is 0)"
        return
    steps, least = length.steps, ""
    if steps is None:
        steps, least = make_schedule(recipe, length).steps_left(0, 0, most_tokens(recipe)), "at least "
    sizes, pairs = [], components.pairs.train if components.learns_from_pairs else []
    if components.samples:
        count = recipe.train.prompts_per_step * recipe.sampling.samples_per_prompt
        if components.episodes is None:
            sizes.append(f"{plural(count, 'completion')} of up to {plural(recipe.sampling.max_new_tokens, 'token')}")
        else:
            turns = plural(recipe.environment.max_turns, "turn")
            sizes.append(f"{plural(count, 'conversation')} of up to {turns}")
    if pairs:
        sizes.append(plural(recipe.preference.batch_size, "pair") + (" of the data set" if components.samples else ""))
    each = f"every {recipe.train.steps_per_rollout} of them" if recipe.train.steps_per_rollout > 1 else "each"
    yield f"steps: {least}{steps:,}, {each} with {' and '.join(sizes)}"
    if length.phases:
        yield f"phases: {', '.join(_phases(length))}"
    if timed and components.episodes is not None:
        display.stage("trying some conversations")
        yield from try_conversations(components, components.episodes)
    elif timed:
        display.stage("timing a small batch")
        yield from _time(components, steps, pairs)


def _phases(length: RunLength) -> Iterator[str]:
    """Each phase with its length, and whether the run reaches it."""
    for phase in length.phases:
        lasts = "to the end" if phase.steps is None else plural(phase.steps, "step")
        lasts = lasts if phase.tokens is None else plural(phase.tokens, "token")
        yield f"{phase.name} ({lasts}{', not reached' if phase.name in length.unreached else ''})"


def _settings(recipe: Recipe, all_settings: bool) -> Iterator[str]:
    shown = "* differs from the default" if all_settings else "those that differ from the defaults; --all shows all"
    yield f"settings (algorithm {recipe.algorithm}; {shown})"
    for name, value, is_default in _setting_values(recipe):
        if all_settings or not is_default:
            yield f"  {' ' if is_default else '*'} {name} = {value}" if all_settings else f"  {name} = {value}"


def _setting_values(recipe: Recipe) -> Iterator[tuple[str, str, bool]]:
    """Every setting, its value, and whether that is the default."""
    defaults = Recipe()
    for name, _ in setting_names():
        if name.startswith("model.lora.") and recipe.model.lora is None:
            continue
        value = recipe.get(name)
        default = defaults.get(name) if not name.startswith("model.lora.") else None
        if name != "task_options":
            yield name, _shown(value), value == default
            continue
        options = find_task(recipe.task).read_options(recipe)
        for option, field in type(options).model_fields.items() if options is not None else ():
            value, default = getattr(options, option), field.get_default(call_default_factory=True)
            yield f"task_options.{option}", repr(without_secrets(value, option)), value == default


def _shown(value: Any) -> str:
    """A setting's value; tables without what they leave at its default."""
    if isinstance(value, list) and value and all(isinstance(entry, BaseModel) for entry in value):
        value = [entry.model_dump(exclude_defaults=True) for entry in value]
    return repr(without_secrets(value))


def _data(components: RunComponents) -> Iterator[str]:
    prompts = components.train.prompts or components.held_out.prompts
    if not prompts:
        return
    lengths = [len(prompt.ids) for prompt in prompts]
    yield (
        f"data: {plural(len(components.train), 'row')} to train on, {len(components.held_out):,} held out; prompts of "
        f"{mean(lengths):.0f} tokens on average, {max(lengths)} at most"
    )
    if components.scorer is not None:
        rewards = ", ".join(f"{function.name} × {function.weight:g}" for function in components.scorer.functions)
        yield f"rewards: {rewards}"
    yield f"the first prompt, as the model sees it: {prompts[0].text!r}"
    if components.teacher is not None:
        yield from _teacher(components, components.teacher)


def _teacher(components: RunComponents, teacher: Teacher) -> Iterator[str]:
    """Who the teacher is, what is learned from it, and what only it is shown."""
    settings = components.recipe.distillation
    kinds = {"policy": "the policy itself", "reference": "the policy at the start"}
    name = kinds.get(teacher.weights, teacher.name)
    if teacher.server is not None:
        name = f"{teacher.server.model} at {teacher.name}"
    elif teacher.handle is not None:
        count = sum(weight.numel() for weight in teacher.handle.model.parameters())
        name += f", {count:,} weights, {teacher.handle.dtype}"
    kl = "the exact KL" if settings.kl == "full" else "the KL of the sampled tokens"
    if teacher.server is not None and settings.kl == "full":
        kl = f"the KL over the {plural(settings.top_k, 'most likely token')}"
    yield f"teacher: {name}; {kl}, weight {settings.weight:g}"
    prompt = next((prompt for prompt in components.train.prompts if prompt.teacher_ids is not None), None)
    if prompt is not None:
        text = components.tokenizer.decode(list(prompt.teacher_ids or ()))
        yield f"the first prompt, as the teacher sees it: {text!r}"


def _pairs(components: RunComponents) -> Iterator[str]:
    """Where pairs come from, how many there are, and their lengths."""
    settings, splits = components.recipe.preference, components.pairs
    if settings.pairs != "data" and components.learns_from_pairs:
        samples = components.recipe.sampling.samples_per_prompt
        yield (
            f"pairs of sampled completions: up to {min(settings.pairs_per_group, samples // 2)} of each {samples}, the "
            f"best against the worst by {settings.reward or 'the sum of all rewards'}"
        )
    pairs = [*splits.train, *splits.held_out]
    if not pairs:
        return
    lengths = [len(pair.prompt) + max(len(pair.chosen), len(pair.rejected)) for pair in pairs]
    yield (
        f"pairs of {_sources(settings.train, settings.held_out)}: {len(splits.train):,} to train on, "
        f"{len(splits.held_out):,} held out; a prompt and its longer completion have {mean(lengths):.0f} tokens on "
        f"average, {max(lengths)} at most"
    )
    texts = [components.tokenizer.decode(ids) for ids in (list(pairs[0].prompt), pairs[0].chosen, pairs[0].rejected)]
    yield "the first pair, as the model sees it: {!r}, chosen {!r}, rejected {!r}".format(*texts)


def _sources(*settings: str | list[str] | None) -> str:
    lists = [value if isinstance(value, list) else [value] for value in settings if value is not None]
    return ", ".join(dict.fromkeys(name for names in lists for name in names))


def training_memory(components: RunComponents) -> dict[str, int]:
    """The bytes that an update takes at most, by purpose, if one process has all weights."""
    recipe, handle = components.recipe, components.handle
    trained = _trained_weights(components)
    half = handle.dtype in (torch.bfloat16, torch.float16)
    budget = recipe.train.token_budget or default_token_budget(handle)
    if components.samples and not components.learns_from_pairs:  # a pack has no more tokens than a mini-batch
        prompts = -(-recipe.train.prompts_per_step // recipe.train.mini_batches)
        completions = prompts * recipe.sampling.samples_per_prompt * recipe.sampling.max_new_tokens
        if recipe.train.mini_batch_by == "samples":
            prompts = recipe.train.prompts_per_step  # a mini-batch may have completions of all
        budget = min(budget, prompts * components.train.longest + completions)
    return {
        "weights": sum(weight.numel() * weight.element_size() for weight in components.model.parameters()),
        "float32 masters": 4 * trained if half else 0,
        "gradients": 4 * trained,
        "AdamW": 8 * trained,
        "reference": trained * handle.dtype.itemsize if components.uses_reference else 0,
        "float32 copy of the head": _head_copy(handle) if half else 0,
        "teacher": _teacher_bytes(components),
        f"activations of {budget:,} tokens": budget
        * activation_bytes(handle, checkpointing=recipe.model.gradient_checkpointing),
    }


def _head_copy(handle: ModelHandle) -> int:
    """The bytes of the float32 weights that ``model.float32_head`` needs during a pass; none on a CUDA device."""
    if handle.head is None or not handle.head.float32 or handle.device.type == "cuda":
        return 0
    return 4 * handle.head.weight.numel()


def _teacher_bytes(components: RunComponents) -> int:
    """The weights of a teacher that is a model of its own."""
    own = None if components.teacher is None else components.teacher.handle
    return 0 if own is None else sum(weight.numel() * weight.element_size() for weight in own.model.parameters())


def estimate_memory(components: RunComponents, ranks: Ranks) -> int:
    """The bytes of `training_memory` in all; 0, not known, if several ranks divide the weights."""
    return sum(training_memory(components).values()) if ranks.size == 1 else 0


def _trained_weights(components: RunComponents) -> int:
    return sum(weight.numel() for weight in components.model.parameters() if weight.requires_grad)


def _memory(components: RunComponents) -> Iterator[str]:
    recipe, handle, trained = components.recipe, components.handle, _trained_weights(components)
    sequences, cached_tokens = _sampled_at_once(components)
    needs = training_memory(components)
    dtype = CACHE_DTYPES[recipe.sampling.kv_cache_dtype] or handle.dtype
    needs[f"KV cache of {sequences} completions"] = bytes_per_token(handle.shapes, dtype) * cached_tokens
    yield f"model: {recipe.model.source}, {trained:,} weights to train, {handle.dtype}, on {handle.device}"
    if handle.fallback_reason:
        yield f"  without shared prompts, each computed once per completion: {handle.fallback_reason}"
    yield "memory, at most:"
    for name, size in needs.items():
        if size:
            yield f"  {_size(size):>9}  {name}"
    total, free = sum(needs.values()) - needs["weights"] - needs["teacher"], free_memory(handle.device)
    shorter = "sampling.max_new_tokens" if components.samples else "preference.max_length"
    verdict = "fits" if total < free else f"does not fit: lower train.token_budget or {shorter}"
    yield f"  {_size(total):>9}  beside the weights, of {_size(free)} that are free: {verdict}"


def _sampled_at_once(components: RunComponents) -> tuple[int, int]:
    """How many completions are sampled at once, and their tokens with the prompts; in evaluations, if only there."""
    recipe, sampling = components.recipe, components.recipe.sampling
    if components.samples:
        prompt_set, each, tokens = components.train, sampling.samples_per_prompt, sampling.max_new_tokens
        prompts = recipe.train.prompts_per_step
    else:
        prompt_set, each = components.held_out, recipe.evaluate.samples
        prompts, tokens = len(prompt_set), recipe.evaluate.max_new_tokens or sampling.max_new_tokens
    with closing(make_generator(recipe, components.handle)) as generator:
        sequences = min(prompts * each, generator.max_num_seqs)
    return sequences, prompt_set.longest * -(-sequences // each) + sequences * tokens


def _time(components: RunComponents, steps: int, pairs: Sequence[TokenPair]) -> Iterator[str]:
    seconds, pair_seconds, probes, condition = 0.0, 0.0, [], ""
    if components.samples:
        tokens = min(PROBE_TOKENS, components.recipe.sampling.max_new_tokens)
        row = max(range(len(components.train))[:64], key=lambda number: len(components.train.prompts[number].ids))
        seconds_per_step, rollout = _seconds_per_step(components, components.train.prompts[row], tokens)
        seconds += seconds_per_step
        yield from _rewards(components, components.train.rows[row], rollout)
        probes.append(f"completions of {tokens} tokens")
        condition = " if every completion has full length"
        if components.teacher is not None and components.teacher.server is not None:
            condition += ", without the teacher's server"
    if pairs:
        pair_seconds, count = _seconds_per_pair(components, pairs)
        passes = components.recipe.train.iterations + (0 if components.has_fixed_reference else FORWARD)
        seconds += pair_seconds * passes * components.recipe.preference.batch_size
        probes.append(plural(count, "pair"))
    seconds /= components.recipe.train.steps_per_rollout
    yield (
        f"time: about {seconds:.1f} s a step{condition}, {format_duration(seconds * steps)} in all, without evaluation "
        f"(from {' and '.join(probes)}; within a factor of two)"
    )
    if pairs and components.has_fixed_reference:
        yield (
            f"  before the first step about {format_duration(pair_seconds * FORWARD * len(pairs))} for the reference's "
            f"log-probs of {len(pairs):,} pairs, which are kept on disk"
        )


def _seconds_per_pair(components: RunComponents, pairs: Sequence[TokenPair]) -> tuple[float, int]:
    """A few pairs forward and backward, scaled to one of average length; and how many there were."""
    few = pairs[:: -(-len(pairs) // PROBE_PAIRS)]
    budget = components.recipe.train.token_budget or default_token_budget(components.handle)
    budget = max(budget, *(_tokens(pair) for pair in few))
    seconds = 0.0
    for probe in (few[:1], few):  # the first call compiles and allocates
        start = time.perf_counter()
        prompts, completions = [pair.prompt for pair in probe], [[pair.chosen, pair.rejected] for pair in probe]
        for _, tokens in iter_packs(components.handle, prompts, completions, token_budget=budget):
            tokens.logps.sum().backward()  # type: ignore[no-untyped-call]
        seconds = _since(start, components)
        components.model.zero_grad(set_to_none=True)
    return seconds * mean(map(_tokens, pairs)) / sum(map(_tokens, few)), len(few)


def _tokens(pair: TokenPair) -> int:
    """The tokens computed for a pair: its prompt once, and both completions."""
    return len(pair.prompt) + len(pair.chosen) + len(pair.rejected)


def _rewards(components: RunComponents, row: TaskRow, rollout: Rollout) -> Iterator[str]:
    """Score sampled completions of one row, so that a reward that fails is found before training."""
    if components.scorer is None:
        return
    completions = decode_completions(components.tokenizer, rollout.ids, rollout.lengths)
    count = len(completions.ids)
    scores = components.scorer.score(
        *reward_inputs([row] * count, completions.texts, components.recipe.data.prompt),
        completion_ids=completions.ids,
        trainer_state=NO_STEPS,
    )
    length = f"{plural(count, 'completion')} of {plural(rollout.ids.shape[1], 'token')}"
    yield from score_lines(components.scorer, scores, "completions", f" of {length}")


def _seconds_per_step(components: RunComponents, prompt: Prompt, tokens: int) -> tuple[float, Rollout]:
    """Completions of ``tokens`` for one prompt, sampled and run forward and backward, scaled up to a step."""
    recipe, settings = components.recipe, components.recipe.sampling
    sampling = Sampling(max_new_tokens=tokens, min_new_tokens=tokens, temperature=settings.temperature)
    with closing(make_generator(recipe, components.handle)) as generator:
        generator.update_weights(0)
        generator.generate([prompt.ids], settings.samples_per_prompt, sampling)  # the first call compiles and allocates
        start = time.perf_counter()
        rollout = generator.generate([prompt.ids], settings.samples_per_prompt, sampling)
        generation = time.perf_counter() - start
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        logps = completion_logps(components.handle, [prompt.ids], rollout.completions()).logps
        logps.sum().backward()  # type: ignore[no-untyped-call]
        components.model.zero_grad(set_to_none=True)
        seconds = _since(start, components)
    prompts = recipe.train.prompts_per_step
    computed = len(prompt.ids) + settings.samples_per_prompt * tokens
    needed = prompts * (len(prompt.ids) + settings.samples_per_prompt * settings.max_new_tokens)
    passes = recipe.train.iterations + (recipe.train.iterations * recipe.train.mini_batches > 1) / 3
    passes += _teacher_passes(components)
    # A decoding step costs little more for more sequences, on a GPU almost nothing.
    batches = prompts if components.handle.device.type == "cpu" else 1
    return generation * settings.max_new_tokens / tokens * batches + seconds * needed / computed * passes, rollout


def _teacher_passes(components: RunComponents) -> float:
    """The teacher's forward passes, as a share of a forward and backward pass of the policy, by their sizes."""
    teacher = components.teacher
    if teacher is None or teacher.server is not None:
        return 0.0
    size = 1.0
    if teacher.handle is not None:
        sizes = [sum(w.numel() for w in model.parameters()) for model in (teacher.handle.model, components.model)]
        size = sizes[0] / sizes[1]
    times = components.recipe.train.iterations if components.recipe.distillation.kl == "full" else 1
    return FORWARD * size * times


def _since(start: float, components: RunComponents) -> float:
    """Seconds since ``start``, once the GPU has finished."""
    if components.handle.device.type == "cuda":
        torch.cuda.synchronize(components.handle.device)
    return time.perf_counter() - start


def _size(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"
