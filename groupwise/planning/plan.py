"""The plan of a recipe on a number of GPUs: the best colocated and the best disaggregated layout, and which to take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from groupwise.config import Recipe
from groupwise.errors import ConfigError, check_integer
from groupwise.planning.gpus import GPUS, Gpu
from groupwise.planning.layouts import COLOCATED, DISAGGREGATED, SERVER_HOST_SECONDS, Layout, all_layouts
from groupwise.planning.links import LINK_SHARE
from groupwise.planning.shapes import ModelShape, named_shape, shape_of_source
from groupwise.planning.work import StepWork, work_of

MOST_GPUS, MOST_TOKENS = 100_000, 10_000_000
ADAPTER = "an adapter ([model.lora])"
WORTH_IT = 1.1  # asynchronous sampling learns from older weights: it must be this much faster to be recommended
NAMES = {
    "launches": "kernel launches",
    "products": "matrix products",
    "cache": "reading the KV caches",
    "logits": "logits over the vocabulary",
    "inner": "latency of small matrix products",
    "prompts": "latency of attention to the prompts",
    "activations": "reading and writing activations",
    "attention": "attention",
}


@dataclass(frozen=True)
class Plan:
    """What was asked, the best layout of each kind that fits, and the recommended one."""

    shape: ModelShape
    work: StepWork
    gpu: Gpu
    gpus: int
    layouts: tuple[Layout, ...]
    best: Layout
    assumed: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.shape.name,
            "parameters": self.shape.parameters,
            "gpu": self.gpu.name,
            "gpus": self.gpus,
            "recommended": self.best.kind,
            "settings": recommended_settings(self.best),
            "advice": list(advice(self)),
            "layouts": [layout_dict(layout) for layout in self.layouts],
            "assumptions": list(self.assumed),
        }


def make_plan(
    recipe: Recipe,
    gpu: Gpu,
    gpus: int,
    *,
    model_shape: str | None = None,
    prompt_tokens: float | None = None,
    answer_tokens: float | None = None,
) -> Plan:
    """Compare the layouts of a recipe's step; a `ConfigError` with what to do if none fits."""
    check_integer("--gpus", gpus, 1, ConfigError)
    if gpus > MOST_GPUS:
        raise ConfigError(f"--gpus {gpus} is more than {MOST_GPUS:,}, for which a plan means nothing")
    for option, number in (("--prompt-tokens", prompt_tokens), ("--answer-tokens", answer_tokens)):
        if number is not None and not 1 <= number <= MOST_TOKENS:
            raise ConfigError(f"{option} must be at least 1 and at most {MOST_TOKENS:,}, got {number:g}")
    shape = named_shape(model_shape) if model_shape is not None else shape_of_source(recipe.model.source)
    work = _with_teacher(work_of(recipe, prompt_tokens, answer_tokens), recipe, shape)
    assumed = tuple(_assumptions(recipe, work, gpu, gpus, prompt_tokens is None, answer_tokens is None))
    return plan_step(shape, work, gpu, gpus, assumed)


def _with_teacher(work: StepWork, recipe: Recipe, shape: ModelShape) -> StepWork:
    """The work with that of a teacher: one more forward pass, and its weights, unless they are the policy's."""
    settings = recipe.distillation
    if not settings.weight or settings.teacher is None:
        return work  # no teacher, or a server
    if not settings.is_model or (recipe.model.lora is not None and settings.teacher == recipe.model.source):
        return replace(work, forwards=work.forwards + 1)
    try:
        teacher = shape_of_source(settings.teacher).parameters
    except ConfigError as error:
        raise ConfigError(f"distillation.teacher: {error}; or plan without it (--distillation.weight 0)") from error
    return replace(work, forwards=work.forwards + teacher / shape.parameters, teacher=teacher)


def plan_step(
    shape: ModelShape, work: StepWork, gpu: Gpu, gpus: int, assumed: tuple[str, ...] = (), ideal: bool = False
) -> Plan:
    best, closest = best_layouts(shape, work, gpu, gpus, ideal)
    if not best:
        raise ConfigError(_does_not_fit(shape, work, gpu, gpus, closest))
    chosen = min(best.values(), key=lambda layout: layout.step_seconds)
    together = best.get(COLOCATED)
    if together is not None and chosen.step_seconds * WORTH_IT >= together.step_seconds:
        chosen = together
    return Plan(shape, work, gpu, gpus, tuple(best.values()), chosen, assumed)


def best_layouts(
    shape: ModelShape, work: StepWork, gpu: Gpu, gpus: int, ideal: bool = False
) -> tuple[dict[str, Layout], Layout | None]:
    """The fastest layout of each kind that fits, and the one that lacks the least memory."""
    best: dict[str, Layout] = {}
    closest: Layout | None = None
    for layout in all_layouts(shape, work, gpu, gpus, ideal):
        if layout.missing is not None:
            if closest is None or layout.most_memory < closest.most_memory:
                closest = layout
        elif layout.kind not in best or _preference(layout) < _preference(best[layout.kind]):
            best[layout.kind] = layout
    return best, closest


def _preference(layout: Layout) -> float:
    """Seconds; the default sharding is preferred unless the other is 5 % faster."""
    return layout.step_seconds * (1.05 if layout.training.sharding == "weights" else 1.0)


def _does_not_fit(shape: ModelShape, work: StepWork, gpu: Gpu, gpus: int, closest: Layout | None) -> str:
    """What is missing, and the changes that would help."""
    shorter = next((tokens for tokens in (work.max_tokens // 2, work.max_tokens // 4) if tokens >= 64), work.max_tokens)
    half = replace(work, max_tokens=shorter, answer_tokens=min(work.answer_tokens, shorter))
    changes: list[tuple[str, StepWork, Gpu, int]] = [
        ("--model.gradient_checkpointing true", replace(work, checkpointing=True), gpu, gpus),
        (ADAPTER, replace(work, lora_rank=16, reference=False), gpu, gpus),
        (f"{ADAPTER} with gradient checkpointing", replace(work, lora_rank=16, checkpointing=True), gpu, gpus),
        (f"--sampling.max_new_tokens {shorter}", half, gpu, gpus),
        *((f"--gpus {gpus * times}", work, gpu, gpus * times) for times in (2, 4, 8, 16)),
        *((f"--gpu {other.name}", work, other, gpus) for other in GPUS.values() if other.memory > gpu.memory),
    ]
    helping = [text for text, other, on, number in changes if best_layouts(shape, other, on, number)[0]]
    more = [text for text in helping if text.startswith("--gpus")]
    helping = [text for text in helping if text not in more[1:]]  # the least number of GPUs is enough
    helping = [text for text in helping if not (text.startswith(f"{ADAPTER} ") and ADAPTER in helping)]
    remedy = f"What helps: {', or '.join(helping)}" if helping else "Choose a smaller model"
    reason = "" if closest is None else f": {closest.missing}"
    model = f"{shape.name} ({shape.size} parameters)"
    return f"{model} does not fit on {gpus} × {gpu.name}{reason}. {remedy}"


def _assumptions(
    recipe: Recipe, work: StepWork, gpu: Gpu, gpus: int, prompts_assumed: bool, answers_assumed: bool
) -> Iterator[str]:
    yield "times are fitted to one H200 with this engine and trainer (docs/scale.md has every error of the fit)"
    if gpu.name != "h200":
        yield f"{gpu.name}: rates of its data sheet ({gpu.source}), times the shares of the peaks measured on an H200"
    if gpus > 1:
        yield (
            f"everything beyond one GPU is predicted, not measured: links at {LINK_SHARE:.0%} of their data sheet, "
            f"{gpu.per_node} GPUs per node"
        )
    if prompts_assumed:
        yield f"prompts of {work.prompt_tokens:.0f} tokens, half of data.max_prompt_length (--prompt-tokens)"
    if answers_assumed:
        yield f"every completion has its full length, {work.max_tokens} tokens (--answer-tokens)"
    else:
        lengths = f"exponentially distributed up to {work.max_tokens}"
        yield f"completions of {work.answer_tokens:g} tokens on average, {lengths}"
    if recipe.distillation.weight and recipe.distillation.server is not None:
        yield "the teacher's server answers at once"
    yield "rewards take no time, and every group has a learning signal"
    yield "checkpoints, evaluation and start-up are left out"
    if gpus > 1:
        rate = f"{1 / SERVER_HOST_SECONDS:,.0f}"
        yield f"servers decode as fast as this engine, but at most {rate} tokens per second each, as vLLM did here"
        yield 'new weights reach the servers over the network (vllm.weights "nccl")'
    if recipe.sampling.generator not in ("engine", "vllm"):
        yield f"sampling.generator {recipe.sampling.generator!r} is not known here; it is planned as the engine"


def recommended_settings(layout: Layout) -> dict[str, Any]:
    settings: dict[str, Any] = {"model.sharding": layout.training.sharding} if layout.training.ranks > 1 else {}
    if layout.kind == DISAGGREGATED:
        return settings | {"sampling.generator": "vllm", "vllm.weights": "nccl", "train.max_staleness": 1}
    return settings | {"sampling.generator": "engine"}


def bound(layout: Layout) -> tuple[str, float]:
    """The largest part of a step, in words, and its share of the seconds that the step waits for."""
    parts = dict(layout.sampling.seconds) | {part.name: part.seconds for part in layout.exchanges}
    learning = layout.training.seconds | {part.name: part.seconds for part in layout.training.exchanges}
    if layout.kind == COLOCATED:
        parts |= learning
    elif layout.training_seconds > layout.sampling_seconds + layout.transfer_seconds:
        parts = dict(learning)
    name = max(parts, key=lambda part: parts[part])
    phase, _, term = name.partition(": ")
    phases = {"decode": "decoding", "train": "learning"}
    words = f"{phases[phase]}: {NAMES.get(term, term)}" if phase in phases else name
    return words, parts[name] / sum(parts.values())


def advice(plan: Plan) -> Iterator[str]:
    """The recommendation, a sentence each."""
    best, (what, share) = plan.best, bound(plan.best)
    yield f"The step is bound by {what} ({share:.0%} of {best.step_seconds:,.2f} s)."
    others = {layout.kind: layout for layout in plan.layouts}
    if plan.gpus == 1:
        yield "One GPU samples and learns in turn."
    elif best.kind == COLOCATED and DISAGGREGATED in others:
        other = others[DISAGGREGATED]
        gain = ", not enough less to learn from older weights" if other.step_seconds < best.step_seconds else ""
        yield (
            f"Colocated: with {other.servers} of {plan.gpus} GPUs as servers a step would take "
            f"{other.step_seconds:,.2f} s{gain}."
        )
    elif best.kind == COLOCATED:
        yield "Colocated: no division into servers and learners fits."
    elif COLOCATED in others:
        yield (
            f"Disaggregated: {best.servers} GPUs sample while {best.training.ranks} learn; colocated, a step would "
            f"take {others[COLOCATED].step_seconds:,.2f} s."
        )
    else:
        yield (
            f"Disaggregated: {best.servers} GPUs sample and {best.training.ranks} learn; the model does not fit "
            "on GPUs that do both."
        )
    yield f"It fits: at most {best.most_memory / 1e9:,.0f} of {plan.gpu.memory / 1e9:,.0f} GB per GPU."
    work, samplers = plan.work, (best.servers or plan.gpus) // best.tensor_parallel
    if samplers > work.prompts or best.training.ranks > work.prompts_per_update:
        yield (
            f"Whole prompts are divided: {work.prompts:,} of a step to {samplers:,} samplers, "
            f"{work.prompts_per_update:,} of an update to {best.training.ranks:,} GPUs that learn; the rest is idle. "
            "Raise train.batch_size or train.accumulation."
        )
    settings = ", ".join(f"{name} = {value!r}".replace("'", '"') for name, value in recommended_settings(best).items())
    yield f"Set {settings}."


def layout_dict(layout: Layout) -> dict[str, Any]:
    what, share = bound(layout)
    return {
        "kind": layout.kind,
        "predicted": layout.gpus > 1 or layout.gpu.name != "h200",
        "training_gpus": layout.training.ranks,
        "server_gpus": layout.servers,
        "tensor_parallel": layout.tensor_parallel,
        "sharding": layout.training.sharding,
        "samples_at_once": layout.sampling.rows,
        "token_budget": layout.training.budget,
        "step_seconds": layout.step_seconds,
        "synchronous_seconds": layout.synchronous_seconds,
        "sampling_seconds": layout.sampling.seconds,
        "training_seconds": layout.training.seconds,
        "exchanges": [vars(part) for part in layout.all_exchanges],
        "tokens_per_second": layout.tokens_per_second,
        "bound_by": what,
        "bound_share": share,
        "memory_sampling": layout.sampling.memory,
        "memory_training": layout.training.memory,
        "memory_of_gpu": layout.gpu.memory,
    }
