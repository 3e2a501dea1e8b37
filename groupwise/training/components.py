"""What a run is made of, loaded from its recipe: the inputs (`inputs.py`), model, prompts, preference pairs, teacher.

What is wrong with them together is found here, before a single token is sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from groupwise.config import Recipe
from groupwise.conversations import EpisodeSampler
from groupwise.data import Prompt, PromptBuilder
from groupwise.distributed.ranks import Ranks
from groupwise.errors import ConfigError
from groupwise.generate.stop import StopStrings
from groupwise.generate.types import Stop
from groupwise.model import (
    LoraSettings,
    adopt_model,
    load_model,
    load_model_and_tokenizer,
    load_tokenizer,
    prepare,
    set_threads,
)
from groupwise.model.device import resolve_device, resolve_dtype
from groupwise.model.flash import FLASH_DTYPES
from groupwise.model.handle import ModelHandle
from groupwise.model.sharding import shard_weights
from groupwise.model.source import report_fetches
from groupwise.model.weights import CATALOGUE, FetchProgress
from groupwise.redaction import resolve_secrets
from groupwise.tasks import Task
from groupwise.tasks.base import TaskRow
from groupwise.text import Say, plural
from groupwise.training.display.base import BYTES, Display
from groupwise.training.environments import make_episode_sampler, template_arguments
from groupwise.training.inputs import RunInputs, check_metric, load_inputs, measured_metrics, read_phases
from groupwise.training.preference import PREFERENCE_ACCURACY
from groupwise.training.preference.dataset_pairs import PairSplits, load_pairs
from groupwise.training.schedule.lengths import RunLength, run_length
from groupwise.training.teacher import load_teacher, longest_addition, with_teacher_ids
from groupwise.training.update.objective import needs_reference
from groupwise.training.update.teacher import Teacher

FETCH_STAGES = {
    "wait": "waiting for another process that is fetching",
    "download": "downloading",
    "check": "joining and checking",
    "convert": "converting",
}


@dataclass(frozen=True)
class PromptSet:
    """Rows and their prompts, side by side. ``parts``: the places of each of several sets of rows, by name."""

    rows: list[TaskRow]
    prompts: list[Prompt]
    parts: Mapping[str, range] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max((len(prompt.ids) for prompt in self.prompts), default=0)


@dataclass(frozen=True)
class RunComponents(RunInputs):
    """The loaded parts of a run. They do not change while it goes on; `TrainState` does."""

    recipe: Recipe
    model: Any
    tokenizer: Any
    handle: ModelHandle
    train: PromptSet
    held_out: PromptSet
    builder: PromptBuilder
    episodes: EpisodeSampler | None  # if completions are conversations
    stop: Stop | None
    pairs: PairSplits
    teacher: Teacher | None = None  # loaded for training only

    @property
    def supervised(self) -> bool:
        """Whether the run is supervised fine-tuning alone (train.steps = 0)."""
        return self.recipe.train.steps == 0

    @property
    def learns_from_pairs(self) -> bool:
        """Whether there is a preference term at some time."""
        return self._is_ever_set("preference.weight")

    @property
    def uses_reference(self) -> bool:
        """Whether a reference policy is needed: for the update, or to evaluate held-out pairs."""
        return bool(self.pairs.held_out) or (not self.supervised and needs_reference(self.recipe, self.driven))

    @property
    def has_fixed_reference(self) -> bool:
        """Whether the reference's log-probs of a data set's pairs are computed once and kept."""
        return self.recipe.preference.cache_ref_logps and not self._is_ever_set("reference.refresh_every")

    @property
    def metric(self) -> str | None:
        """The metric that selects the best checkpoint; None if nothing is held out."""
        measured = self.measured_metrics
        if not measured:
            return None
        own = f"{next(iter(self.task.held_out_sets))}/{self.task.metric}".lstrip("/") if self.task.metric else None
        chosen = self.recipe.evaluate.metric or (own if self.grades_rows else None) or measured[0]
        check_metric(chosen, measured)
        return chosen

    @property
    def measured_metrics(self) -> list[str]:
        """The metrics of an evaluation that can select a checkpoint: grades or the reward, and the pairs' accuracy."""
        return measured_metrics(self.task, self.recipe, rows=self.grades_rows, pairs=bool(self.pairs.held_out))

    @property
    def grades_rows(self) -> bool:
        """Whether there are held-out rows, and grades or rewards to evaluate them by."""
        return bool(len(self.held_out)) and bool(self.task.grades or self.scorer)

    @property
    def goal(self) -> float | None:
        """The task's goal for its metric; None for a metric of pairs."""
        return None if self.metric == PREFERENCE_ACCURACY else self.task.goal

    @property
    def has_dropout(self) -> bool:
        """Whether the same tokens get other log-probs in each forward pass of training."""
        return self.recipe.model.has_dropout

    def _is_ever_set(self, name: str) -> bool:
        return bool(self.recipe.get(name)) or name in self.driven


def load_components(
    recipe: Recipe,
    inputs: RunInputs | None = None,
    say: Say = lambda text: None,
    *,
    model: Any = None,
    tokenizer: Any = None,
    display: Display | None = None,
    ranks: Ranks | None = None,
    training: bool = True,
) -> RunComponents:
    """Load the model and build the prompts of ``inputs``, by default the recipe's own.

    ``model`` and ``tokenizer`` are loaded ones that replace the recipe's. training: False to evaluate only,
    without the teacher.
    If its weights are to be divided among the ranks (`shard_components`), the model is loaded on the CPU.
    """
    display = display or Display()
    inputs = inputs or load_inputs(recipe, say=say, display=display)
    task = inputs.task
    shards = _shards_weights(recipe, ranks)
    display.stage(f"loading the model {recipe.model.source}" if model is None else "preparing the model")
    with report_fetches(_fetch_report(recipe.model.source, display)):
        model, tokenizer = _load_model(recipe, model, tokenizer, on_cpu=shards)
    display.stage(f"building prompts from {plural(len(task.train) + len(task.held_out_rows), 'row')}")
    must_reward = inputs.scorer is not None and len(inputs.scorer.functions) == 1
    episodes = make_episode_sampler(
        recipe, inputs.environment, task, tokenizer, model, must_reward=must_reward, say=say
    )
    kwargs = resolve_secrets(recipe.data.chat_template_kwargs, "data.chat_template_kwargs")
    builder = PromptBuilder(
        tokenizer,
        system_prompt=recipe.data.system_prompt if recipe.data.system_prompt is not None else task.system_prompt,
        chat=recipe.data.chat,
        chat_template_kwargs={**kwargs, **template_arguments(episodes)},
        max_prompt_length=recipe.data.max_prompt_length,
        on_too_long=recipe.data.on_too_long,
        assistant_last=recipe.data.assistant_last,
        may_be_empty=episodes is not None,
    )
    train = _build_prompts(builder, task.train, recipe.data.prompt, "training", say)
    held_out = _held_out_prompts(builder, task, recipe.data.prompt, say)
    if inputs.samples and task.train and not len(train):
        raise ConfigError(
            f"all {len(task.train):,} training rows are left out, because their prompts have more than "
            f"{recipe.data.max_prompt_length} tokens; raise data.max_prompt_length"
        )
    display.stage("preparing the model")
    compile = recipe.model.compile
    if shards and compile is None:
        compile = resolve_device(recipe.model.device).type == "cuda" and model.dtype in FLASH_DTYPES
    handle = prepare(model, compile=compile, float32_head=recipe.model.float32_head, notice=say)
    if recipe.model.float32_head and handle.head is None:
        raise ConfigError(
            f"model.float32_head needs groupwise's own head, but this model takes the plain path, where transformers "
            f"computes the logits: {handle.fallback_reason}; leave it out, or use model.dtype = 'float32'"
        )
    _check_window(recipe, handle, train, held_out)
    teacher: Teacher | None = None
    distillation = recipe.distillation
    if training and recipe.train.steps != 0 and (distillation.weight or "distillation.weight" in inputs.driven):
        display.stage(f"loading the teacher {distillation.teacher or distillation.server}")
        if distillation.show is not None:
            shown = with_teacher_ids(train.prompts, train.rows, builder, distillation.show, recipe.data.prompt)
            train = PromptSet(train.rows, shown)
        with report_fetches(_fetch_report(distillation.teacher or "", display)):
            teacher = load_teacher(
                recipe, model, tokenizer, handle, train.prompts, on_cpu=shards, compile=compile, say=say
            )
        window = teacher.context_length or handle.context_length
        if episodes is not None and window is not None:
            episodes.limit_context(window - longest_addition(train.prompts))
    elif training and (distillation.teacher or distillation.server):
        say("there is a teacher, but distillation.weight is 0, so it is not asked")
    stop_strings = [*recipe.sampling.stop, *task.stop]
    learns_from_pairs = bool(recipe.preference.weight) or "preference.weight" in inputs.driven
    return RunComponents(
        **vars(inputs),
        recipe=recipe,
        model=model,
        tokenizer=tokenizer,
        handle=handle,
        train=train,
        held_out=held_out,
        builder=builder,
        episodes=episodes,
        stop=StopStrings(tokenizer, stop_strings) if stop_strings else None,
        pairs=load_pairs(recipe, builder, handle.context_length, learns=learns_from_pairs, say=say),
        teacher=teacher,
    )


def shard_components(components: RunComponents, ranks: Ranks, say: Say) -> RunComponents:
    """The components with the model's weights divided among the ranks, each part on its rank's device, if the recipe
    wants that and there are several ranks."""
    recipe = components.recipe
    if not _shards_weights(recipe, ranks):
        if recipe.model.sharding == "weights":
            say("model.sharding = 'weights' has no effect: this run has one process, which holds all weights")
        return components
    with ranks.stage("dividing the weights", exchanges=True):
        device, teacher = resolve_device(recipe.model.device), components.teacher
        handle = shard_weights(components.handle, ranks, device)
        if teacher is not None and teacher.handle is not None:
            teacher = replace(teacher, handle=shard_weights(teacher.handle, ranks, device))
    return replace(components, handle=handle, teacher=teacher)


def _shards_weights(recipe: Recipe, ranks: Ranks | None) -> bool:
    return recipe.model.sharding == "weights" and ranks is not None and ranks.size > 1


def _fetch_report(source: str, display: Display) -> FetchProgress:
    """Shows the progress of a download; where no progress is shown, one line says that there is one."""
    entry, announced = CATALOGUE.get(source), False

    def report(stage: str, done: int, total: int | None) -> None:
        nonlocal announced
        if not announced:
            size = f", {entry.download_bytes / 1e6:,.0f} MB" if entry is not None else ""
            display.announce(f"{source} is not cached: downloading it{size}")
            announced = True
        text = f"{FETCH_STAGES.get(stage, stage)} {source}"
        if total:
            display.progress(text, done, total, BYTES)
        else:
            display.stage(text)

    return report


def _load_model(recipe: Recipe, model: Any, tokenizer: Any, *, on_cpu: bool) -> tuple[Any, Any]:
    settings, lora = recipe.model, None
    if settings.lora is not None:
        targets = settings.lora.targets
        lora = LoraSettings(
            settings.lora.rank,
            settings.lora.alpha,
            settings.lora.dropout,
            targets if isinstance(targets, str) else tuple(targets),
            settings.lora.rslora,
        )
    set_threads()
    options: dict[str, Any] = {"dtype": settings.dtype, "device": settings.device, "lora": lora}
    options["seed"] = recipe.train.seed
    if on_cpu:
        options["device"] = "cpu"
        if model is None:  # as its device will be
            options["dtype"] = resolve_dtype(settings.dtype, resolve_device(settings.device))
    hub: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code, "revision": settings.revision}
    if model is not None:
        model = adopt_model(model, **options)
        tokenizer = load_tokenizer(settings.source, **hub) if tokenizer is None else tokenizer
    elif tokenizer is not None:
        model = load_model(settings.source, **options, **hub)
    else:
        model, tokenizer = load_model_and_tokenizer(settings.source, **options, **hub)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    return model, tokenizer


def length_of(components: RunComponents) -> RunLength:
    """The number of steps and the phases of a run over its rows, or over its pairs if nothing is sampled."""
    recipe, samples = components.recipe, components.samples
    rows = len(components.train) if samples else len(components.pairs.train)
    return run_length(recipe, read_phases(recipe), rows, samples=samples)


def _build_prompts(builder: PromptBuilder, rows: Sequence[TaskRow], column: str, which: str, say: Say) -> PromptSet:
    if not rows:
        return PromptSet([], [])
    prompts = builder.build(rows, column)
    if builder.dropped:
        say(
            f"{builder.dropped} of {len(rows)} {which} rows are left out: their prompts have more than "
            f"{builder.max_prompt_length} tokens"
        )
    return PromptSet([rows[number] for number in builder.kept], prompts)


def _held_out_prompts(builder: PromptBuilder, task: Task, column: str, say: Say) -> PromptSet:
    """The held-out rows of all sets, one set after another; sets without a row that fits are left out."""
    sets = {
        name: _build_prompts(builder, rows, column, f"held-out {name}".rstrip(), say)
        for name, rows in task.held_out_sets.items()
    }
    if list(sets) == [""]:
        return sets[""]
    joined, parts = PromptSet([], []), {}
    for name, part in sets.items():
        parts[name] = range(len(joined), len(joined) + len(part))
        joined = PromptSet(joined.rows + part.rows, joined.prompts + part.prompts)
    return replace(joined, parts={name: places for name, places in parts.items() if places})


def _check_window(recipe: Recipe, handle: ModelHandle, train: PromptSet, held_out: PromptSet) -> None:
    if handle.context_length is None:
        return
    sampled, evaluated = recipe.sampling.max_new_tokens, recipe.evaluate.max_new_tokens
    cases = [("training", train, "sampling", sampled)]
    cases.append(("held-out", held_out, *(("sampling", sampled) if evaluated is None else ("evaluate", evaluated))))
    for which, prompts, section, tokens in cases:
        if len(prompts) and prompts.longest + tokens > handle.context_length:
            raise ConfigError(
                f"the longest {which} prompt has {prompts.longest} tokens; with {section}.max_new_tokens {tokens} "
                f"that is more than the model's window of {handle.context_length}; lower one of them "
                "(data.max_prompt_length)"
            )
