"""What a run is made of, from its recipe: task, model, prompts, rewards. Everything that can be wrong is found here,
before a single token is sampled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from groupwise.config import Recipe, resolve_scheduled, samples_answers, scheduled_names
from groupwise.core.losses import Loss
from groupwise.data import Prompt, PromptBuilder
from groupwise.errors import ConfigError, check_choice
from groupwise.generate.stop import StopStrings
from groupwise.generate.types import Stop
from groupwise.grouping.embed import check_embedder
from groupwise.model import LoraSettings, load_model_and_tokenizer, prepare, set_threads
from groupwise.model.handle import ModelHandle
from groupwise.model.precision import MasterWeights
from groupwise.rewards import RewardFunction, Scorer, make_reward, named
from groupwise.tasks import Task, load_task
from groupwise.tasks.base import Row
from groupwise.training.preference.dataset_pairs import PairSplits, load_pairs
from groupwise.training.schedule.parse import parse_phases, parse_ramps, parse_rules
from groupwise.training.schedule.schedule import Schedule, warmup_decay
from groupwise.training.update.objective import find_loss

Say = Callable[[str], None]


@dataclass(frozen=True)
class PromptSet:
    """Rows and their prompts, side by side."""

    rows: list[Row]
    prompts: list[Prompt]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def longest(self) -> int:
        return max((len(prompt.ids) for prompt in self.prompts), default=0)


@dataclass(frozen=True)
class RunComponents:
    """All that a run is made of."""

    recipe: Recipe
    task: Task
    model: Any
    tokenizer: Any
    handle: ModelHandle
    train: PromptSet
    held_out: PromptSet
    builder: PromptBuilder
    scorer: Scorer | None  # None where no answer is ever scored
    stop: Stop | None
    loss: Loss
    pairs: PairSplits
    driven: tuple[str, ...]  # the settings that a schedule moves

    def ever(self, name: str) -> bool:
        """Whether a number is not 0 at some time: to begin with, or because a schedule moves it."""
        return bool(self.recipe.get(name)) or name in self.driven

    @property
    def samples(self) -> bool:
        """Whether answers are sampled at some time; else there are pairs of a data set alone."""
        return samples_answers(self.recipe, self.driven)

    @property
    def learns_from_pairs(self) -> bool:
        """Whether there is a preference term at some time."""
        return self.ever("preference.weight")

    @property
    def uses_reference(self) -> bool:
        """Whether a reference is needed: for a KL, for pairs, or for a mask that looks at it."""
        if self.recipe.train.steps == 0:
            return bool(self.pairs.held_out)
        needs = self.ever("loss.kl_coef") or self.recipe.masks.off_policy == "reference_drift"
        return needs or self.learns_from_pairs or bool(self.pairs.held_out)

    @property
    def keeps_reference(self) -> bool:
        """Whether the reference's log-probs of a data set's pairs are found once: they are kept, and it never moves."""
        return self.recipe.preference.cache and not self.ever("reference.refresh_every")


def load_components(
    recipe: Recipe,
    *,
    task: Task | None = None,
    rewards: Sequence[Any] = (),
    say: Say = lambda text: None,
) -> RunComponents:
    """Load and check everything."""
    driven = make_schedule(recipe).driven
    samples = samples_answers(recipe, driven)
    task = task or (load_task(recipe) if samples or names_rows(recipe) else Task("pairs", []))
    for note in task.notes:
        say(note)
    scorer = make_scorer(recipe, task, rewards, needed=samples)
    loss = find_loss(recipe.loss.name)
    check_objective(recipe, driven, scorer)
    _check_sft(recipe, task)
    settings = recipe.model
    lora = None
    if settings.lora is not None:
        how = settings.lora
        targets = how.targets if isinstance(how.targets, str) else tuple(how.targets)
        lora = LoraSettings(how.rank, how.alpha, how.dropout, targets, how.rslora)
    set_threads()
    model, tokenizer = load_model_and_tokenizer(
        settings.source,
        dtype=settings.dtype,
        device=settings.device,
        lora=lora,
        trust_remote_code=settings.trust_remote_code,
        revision=settings.revision,
        seed=recipe.train.seed,
    )
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    builder = PromptBuilder(
        tokenizer,
        system_prompt=recipe.data.system_prompt if recipe.data.system_prompt is not None else task.system_prompt,
        chat=recipe.data.chat,
        chat_template_kwargs=recipe.data.chat_template_kwargs,
        max_prompt_length=recipe.data.max_prompt_length,
        on_too_long=recipe.data.on_too_long,
    )
    train = _questions(builder, task.train, recipe.data.prompt, "training", say)
    held_out = _questions(builder, task.held_out, recipe.data.prompt, "held-out", say)
    if scorer is not None and (len(train) or len(held_out)):
        scorer.check_arguments(dict.fromkeys(key for row in train.rows or held_out.rows for key in row))
    handle = prepare(model, compile=settings.compile, notice=say)
    _check_window(recipe, handle, train, held_out)
    strings = [*recipe.sampling.stop, *task.stop]
    return RunComponents(
        recipe=recipe,
        task=task,
        model=model,
        tokenizer=tokenizer,
        handle=handle,
        train=train,
        held_out=held_out,
        builder=builder,
        scorer=scorer,
        stop=StopStrings(tokenizer, strings) if strings else None,
        loss=loss,
        pairs=load_pairs(
            recipe,
            builder,
            handle.window,
            learns=bool(recipe.preference.weight) or "preference.weight" in driven,
            say=say,
        ),
        driven=driven,
    )


def names_rows(recipe: Recipe) -> bool:
    """Whether a recipe has questions, to train on or to evaluate by; pairs alone need none."""
    return recipe.task != "rows" or recipe.data.train is not None or recipe.data.held_out is not None


def check_rows(components: RunComponents) -> None:
    """Raise an error where answers are to be sampled, but there is nothing to ask."""
    if components.samples and not len(components.train):
        raise ConfigError(f"the task {components.task.name!r} has no rows to train on; set data.train")


def check_objective(recipe: Recipe, driven: Collection[str], scorer: Scorer | None) -> None:
    """Raise an error where nothing would be learned, or where group pairs are ordered by a reward that is not there."""
    weights = ("loss.policy_coef", "preference.weight")
    if not any(recipe.get(name) or name in driven for name in weights) and recipe.train.steps != 0:
        raise ConfigError(
            "loss.policy_coef and preference.weight are both 0, so nothing would be learned; set one of them"
        )
    names = [] if scorer is None else [function.name for function in scorer.functions]
    if recipe.preference.reward is not None:
        check_choice("preference.reward:", recipe.preference.reward, names, ConfigError)


def compares_texts(recipe: Recipe) -> bool:
    """Whether a run looks at which answers are alike, to compare these alone or only to measure it."""
    return recipe.train.steps != 0 and (recipe.advantages.grouping == "similarity" or recipe.grouping.measure)


def check_embedder_of(recipe: Recipe) -> None:
    """Raise an error if a run needs an embedder that cannot be had. An evaluation needs none."""
    if compares_texts(recipe):
        check_embedder(recipe.grouping.embedder)


def count_steps(components: RunComponents) -> int:
    """How many steps a run has: train.steps, or as many as its epochs take; without answers, epochs of its pairs."""
    train = components.recipe.train
    if train.steps is not None:
        return train.steps
    rows, batch = len(components.train), train.batch_size * train.accumulation
    if not components.samples:
        rows, batch = len(components.pairs.train), components.recipe.preference.batch_size
    return max(1, round(rows * (train.epochs or 1.0) / batch))


def make_scorer(recipe: Recipe, task: Task, rewards: Sequence[Any], *, needed: bool = True) -> Scorer | None:
    """The task's rewards, those of the recipe, and those given in Python; ``needed``: answers will be scored."""
    functions = list(task.rewards)
    for entry in recipe.rewards:
        functions.append(named(make_reward(entry.function, entry.options), entry.weight, entry.name))
    functions += [given if isinstance(given, RewardFunction) else named(given) for given in rewards]
    if functions:
        return Scorer(functions, timeout=recipe.scoring.timeout, on_error=recipe.scoring.on_error)
    if needed:
        raise ConfigError(
            "there is no reward to learn from: add [[rewards]] with function = 'module:function' or "
            "'file.py:function', or choose a task that brings its own"
        )
    return None


def make_schedule(recipe: Recipe) -> Schedule:
    """The phases, ramps and rules of a recipe."""

    def resolve(name: str) -> str:
        return resolve_scheduled(recipe, name)

    phases, ramps = parse_phases(recipe.phases, resolve), parse_ramps(recipe.ramps, resolve)
    for phase in phases:
        _try(recipe, dict(phase.set), f"phase {phase.name!r}")
    for ramp in ramps:
        for _, value in ramp.points:
            whole = isinstance(recipe.get(ramp.setting), int)
            _try(recipe, {ramp.setting: round(value) if whole else float(value)}, f"the ramp of {ramp.setting}")
    return Schedule(scheduled_names(recipe), phases=phases, ramps=ramps, rules=parse_rules(recipe.rules, resolve))


def _try(recipe: Recipe, values: dict[str, Any], where: str) -> None:
    """A value that a schedule will set later is refused now, not after hours."""
    try:
        recipe.with_settings(
            {name: float(value) if isinstance(recipe.get(name), float) else value for name, value in values.items()}
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def make_optimizer(
    recipe: Recipe, model: Any, masters: MasterWeights, say: Say = lambda text: None
) -> torch.optim.AdamW:
    """AdamW on the masters: input embeddings may have a learning rate of their own, and only matrices decay.

    The head never has that rate. Where it is the same matrix as the embeddings, the plain rate holds for both, unless
    optimizer.tied_embedding_rate says otherwise; what is not applied is said.
    """
    names = _embeddings(recipe, model)
    trained = {name for name, _ in masters.named_parameters()}
    own = recipe.optimizer.embedding_learning_rate
    if own not in (None, recipe.optimizer.learning_rate) and not names & trained:
        why = "are also the head (optimizer.tied_embedding_rate = true applies it)" if not names else "are not trained"
        say(f"optimizer.embedding_learning_rate {own:g} is not applied: the embeddings {why}")
    groups: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {}
    for name, master in masters.named_parameters():
        groups.setdefault((name in names, master.dim() > 1), []).append(master)
    how = recipe.optimizer
    return torch.optim.AdamW(
        [
            {"params": members, "embedding": is_embedding, "decays": decays}
            for (is_embedding, decays), members in sorted(groups.items())
        ],
        lr=how.learning_rate,
        betas=(how.beta1, how.beta2),
        eps=how.eps,
        weight_decay=0.0,
        fused=next(masters.parameters()).is_cuda,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, now: Recipe, step: int, total_steps: int) -> None:
    """Give each group of `make_optimizer` what the recipe of a step (from 0) says."""
    how = now.optimizer
    factor = warmup_decay(
        step, warmup_steps=how.warmup_steps, total_steps=total_steps, shape=how.decay, final=how.final
    )
    for group in optimizer.param_groups:
        own = how.embedding_learning_rate if group["embedding"] else None
        group["lr"] = factor * (how.learning_rate if own is None else own)
        group["weight_decay"] = how.weight_decay if group["decays"] else 0.0


def _embeddings(recipe: Recipe, model: Any) -> set[str]:
    """The names of the weights that have the embeddings' learning rate."""
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    tied = outputs is not None and outputs.weight is inputs.weight
    if tied and not recipe.optimizer.tied_embedding_rate:
        return set()
    return {name for name, parameter in model.named_parameters() if parameter is inputs.weight}


def _check_sft(recipe: Recipe, task: Task) -> None:
    name, wanted = next(
        ((name, value) for name in ("epochs", "steps") if (value := recipe.get(f"sft.{name}"))), ("steps", None)
    )
    if wanted is not None and not task.examples:
        off = "leave it out" if name == "epochs" else "set it to 0"
        raise ConfigError(f"sft.{name} is {wanted:g}, but the task {task.name!r} has no examples; {off}")
    if recipe.train.steps == 0 and wanted is None:
        raise ConfigError(
            "train.steps is 0 and there is no supervised warm-up, so nothing would be trained; set train.steps, or "
            "sft.steps or sft.epochs for a supervised run"
        )


def _questions(builder: PromptBuilder, rows: Sequence[Row], column: str, which: str, say: Say) -> PromptSet:
    if not rows:
        return PromptSet([], [])
    prompts = builder.build(rows, column)
    if builder.dropped:
        say(
            f"{builder.dropped} of {len(rows)} {which} rows are left out: their prompts have more than "
            f"{builder.max_prompt_length} tokens"
        )
    return PromptSet([rows[number] for number in builder.kept], prompts)


def _check_window(recipe: Recipe, handle: ModelHandle, train: PromptSet, held_out: PromptSet) -> None:
    if handle.window is None:
        return
    sampled, evaluated = recipe.sampling.max_new_tokens, recipe.evaluate.max_new_tokens
    cases = [("training", train, "sampling", sampled)]
    cases.append(("held-out", held_out, *(("sampling", sampled) if evaluated is None else ("evaluate", evaluated))))
    for which, questions, section, tokens in cases:
        if len(questions) and questions.longest + tokens > handle.window:
            raise ConfigError(
                f"the longest {which} prompt has {questions.longest} tokens; with {section}.max_new_tokens {tokens} "
                f"that is more than the model's window of {handle.window}; lower one of them (data.max_prompt_length)"
            )
