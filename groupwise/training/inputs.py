"""What is known of a run before its folder is created and its model is loaded: task, rewards, loss, schedule.

Everything that can be wrong with a recipe by itself, or with its rows and rewards, is found here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from groupwise.config import Recipe, resolve_scheduled, scheduled_names, with_settings
from groupwise.core.losses import Loss
from groupwise.distributed.ranks import Ranks
from groupwise.errors import ConfigError, check_choice, did_you_mean
from groupwise.evaluate import REWARD
from groupwise.grouping.embed import check_embedder
from groupwise.rewards import RewardFunction, Scorer, make_reward, named
from groupwise.rewards.sharded import ShardedScorer
from groupwise.tasks import Task, find_task, load_task
from groupwise.text import Say, plural
from groupwise.training.display.base import Display
from groupwise.training.early_checks import check_processes, secret_notes
from groupwise.training.environments import RunEnvironment, check_conversations, load_environment
from groupwise.training.extras import groups_by_similarity
from groupwise.training.preference import PREFERENCE_ACCURACY
from groupwise.training.rollout.advantages import AdvantageFunction, GroupingFunction, find_advantage, find_grouping
from groupwise.training.schedule.learning_rate import learning_rate_factor
from groupwise.training.schedule.lengths import BATCH, RunLength, run_length
from groupwise.training.schedule.parse import parse_phases, parse_ramps, parse_rules
from groupwise.training.schedule.rules import Phase
from groupwise.training.schedule.schedule import Schedule
from groupwise.training.update.objective import active_terms, find_loss, needs_rewards, samples_completions


@dataclass(frozen=True)
class RunInputs:
    """The parts of a run that are checked before its folder is created and its model is loaded."""

    task: Task
    environment: RunEnvironment | None  # None if a completion is a single turn
    scorer: Scorer | None  # None if no completion is ever scored
    loss: Loss
    advantage: AdvantageFunction | None  # None for the built-in one
    grouping: GroupingFunction | None  # None to group by prompt
    driven: tuple[str, ...]  # the settings that a schedule changes
    samples: bool  # whether completions are sampled at some time; otherwise the run only learns from pairs or examples


def load_inputs(
    recipe: Recipe,
    *,
    task: Task | None = None,
    rewards: Sequence[Any] = (),
    tools: Sequence[Callable[..., Any]] = (),
    environment: Any = None,
    rollout: Callable[..., Any] | None = None,
    say: Say = lambda text: None,
    display: Display | None = None,
    ranks: Ranks | None = None,
) -> RunInputs:
    """Read the rows and find the rewards. ``task`` replaces the recipe's; ``rewards`` are added to the recipe's."""
    check_processes(recipe, 1 if ranks is None else ranks.size)
    driven = make_schedule(recipe).driven
    samples = samples_completions(recipe, driven)
    if task is None and not samples and not names_rows(recipe):
        find_task(recipe.task).read_options(recipe)  # a wrong option is an error even if the task's rows are not read
        task = Task("pairs", [])
    display = display or Display()
    if task is None:
        display.stage("reading rows")
        task = load_task(recipe)
    for note in (*task.notes, *secret_notes(recipe)):
        say(note)
    surroundings = load_environment(recipe, task, tools=tools, environment=environment, rollout=rollout)
    if surroundings is not None:
        check_conversations(recipe, surroundings, task)
        rewards = [*surroundings.rewards, *rewards]
    elif recipe.advantages.turn_weight:
        raise ConfigError(
            "advantages.turn_weight compares the turns of conversations, but this run has no environment; set it to 0"
        )
    scorer = make_scorer(recipe, task, rewards, needed=samples and needs_rewards(recipe, driven), ranks=ranks)
    if scorer is not None:
        scorer.on_call = lambda names: display.stage(f"scoring: {names}")
    loss = find_loss(recipe.loss.name)
    _check_objective(recipe, driven, scorer)
    _check_batches(recipe, samples)
    _check_sft(recipe, task)
    pairs = recipe.preference.held_out is not None or recipe.preference.held_out_from_train > 0
    held_out = task.held_out_rows
    if (metric := recipe.evaluate.metric) is not None and (held_out or pairs):
        check_metric(metric, measured_metrics(task, recipe, rows=bool(held_out), pairs=pairs))
    if scorer is not None and (task.train or held_out):
        columns = dict.fromkeys(key for row in task.train or held_out for key in row)
        more = () if surroundings is None else surroundings.columns
        if more is not None:
            scorer.check_arguments([*columns, *more])
    return RunInputs(
        task=task,
        environment=surroundings,
        scorer=scorer,
        loss=loss,
        advantage=find_advantage(recipe.advantages.function),
        grouping=find_grouping(recipe.advantages.grouping),
        driven=driven,
        samples=samples,
    )


def check_training_inputs(recipe: Recipe, inputs: RunInputs) -> None:
    """Raise an error if a training run has no rows, phases that do not fit, or an embedder that does not exist."""
    learning_rate_factor(recipe.optimizer, 0, recipe.train.steps or 1000)  # it refuses options of a schedule
    rows = len(inputs.task.train)
    if inputs.samples and not rows:
        raise ConfigError(f"the task {inputs.task.name!r} has no rows to train on; set data.train")
    if inputs.samples:
        run_length(recipe, read_phases(recipe), rows, samples=True)  # again later, without the rows that are too long
    if groups_by_similarity(recipe):
        check_embedder(recipe.grouping.embedder)


def make_scorer(
    recipe: Recipe, task: Task, rewards: Sequence[Any], *, needed: bool = True, ranks: Ranks | None = None
) -> Scorer | None:
    """The rewards of the task, of the recipe, and those given in Python. ``needed``: completions will be scored."""
    functions = list(task.rewards)
    for number, entry in enumerate(recipe.rewards):
        reward = make_reward(entry.function, entry.options, f"rewards.{number}.options")
        functions.append(named(reward, entry.weight, entry.name))
    functions += [reward if isinstance(reward, RewardFunction) else named(reward) for reward in rewards]
    if functions:
        options: dict[str, Any] = {"timeout": recipe.scoring.timeout, "on_error": recipe.scoring.on_error}
        if ranks is not None and ranks.size > 1:
            return ShardedScorer(functions, ranks, **options)
        return Scorer(functions, **options)
    if needed:
        raise ConfigError(
            "there is no reward to learn from: add [[rewards]] with function = 'module:function' or "
            "'file.py:function', or choose a task that brings its own"
        )
    return None


def names_rows(recipe: Recipe) -> bool:
    """Whether a recipe has rows to sample from or to evaluate on; pairs alone need none."""
    return recipe.task != "rows" or recipe.data.train is not None or recipe.data.held_out is not None


def default_run_name(recipe: Recipe) -> str:
    """The run's name if the recipe has none: the task's, or "pairs" if nothing is sampled."""
    if not names_rows(recipe) and not samples_completions(recipe):
        return "pairs"
    return recipe.task if ":" not in recipe.task else "run"


def make_schedule(recipe: Recipe, length: RunLength | None = None) -> Schedule:
    """The phases, ramps and rules of a recipe. To use its phases, give the run's `length_of`."""
    resolve = partial(resolve_scheduled, recipe)
    phases, ramps = read_phases(recipe), parse_ramps(recipe.ramps, resolve)
    for phase in phases:
        _check_scheduled(recipe, dict(phase.set), f"phase {phase.name!r}")
    for ramp in ramps:
        integer = isinstance(recipe.get(ramp.setting), int)
        for _, value in ramp.points:
            point = {ramp.setting: round(value) if integer else value}
            _check_scheduled(recipe, point, f"the ramp of {ramp.setting}")

    def refusal(values: dict[str, Any]) -> str | None:
        try:
            _check_step(recipe, values)
        except ConfigError as error:
            return str(error)
        return None

    rules = parse_rules(recipe.rules, resolve)
    _check_lengths(recipe, phases, [*(ramp.setting for ramp in ramps), *(rule.setting for rule in rules)])
    return Schedule(
        scheduled_names(recipe),
        phases=phases if length is None else length.phases,
        ramps=ramps,
        rules=rules,
        ends=recipe.ends_with_phases,
        refusal=refusal,
    )


def read_phases(recipe: Recipe) -> tuple[Phase, ...]:
    return parse_phases(recipe.phases, partial(resolve_scheduled, recipe))


def _check_lengths(recipe: Recipe, phases: Sequence[Phase], changed: Collection[str]) -> None:
    """Raise an error if a phase's or the run's number of steps is needed, but cannot be known.

    changed: the settings of ramps and rules.
    """
    for phase in phases:
        if phase.epochs is not None and (settings := [name for name in BATCH if name in changed]):
            raise ConfigError(
                f"phase {phase.name!r} is counted in epochs, but a ramp or a rule changes {settings[0]}, so its number "
                "of steps is not known; count it in steps, or change the batch by phases"
            )
        if phase.tokens is not None and recipe.ends_with_phases and recipe.optimizer.lr_schedule != "constant":
            raise ConfigError(
                f"phase {phase.name!r} is counted in tokens, so the number of steps is not known, over which "
                f"optimizer.lr_schedule {recipe.optimizer.lr_schedule!r} decays; set train.steps, count the phases in "
                "steps or epochs, or use a [ramps] entry over tokens for the learning rate"
            )


def _check_scheduled(recipe: Recipe, values: dict[str, Any], where: str) -> None:
    """A value that the schedule will set later is refused when the run starts, not after hours."""
    floats = {name: float(value) if isinstance(recipe.get(name), float) else value for name, value in values.items()}
    try:
        _check_step(recipe, floats)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _check_step(recipe: Recipe, values: dict[str, Any]) -> None:
    step_recipe = with_settings(recipe, values)
    _check_batches(step_recipe, samples_completions(step_recipe))


def _check_objective(recipe: Recipe, driven: Collection[str], scorer: Scorer | None) -> None:
    """Raise an error if nothing would be learned, or if group pairs are ordered by a reward that does not exist."""
    if all(term.is_regularizer for term in active_terms(recipe, driven)) and recipe.train.steps != 0:
        raise ConfigError(
            "loss.policy_coef, preference.weight and distillation.weight are all 0, so nothing would be learned; set "
            "one of them"
        )
    if recipe.loss.entropy_target is not None and "loss.entropy_coef" in driven:
        raise ConfigError(
            "loss.entropy_coef is changed by a phase, a ramp or a rule, but loss.entropy_target adapts it; schedule "
            "loss.entropy_target instead, or leave that out"
        )
    names = [] if scorer is None else [function.name for function in scorer.functions]
    if recipe.preference.reward is not None:
        check_choice("preference.reward:", recipe.preference.reward, names, ConfigError)


def measured_metrics(task: Task, recipe: Recipe, *, rows: bool, pairs: bool) -> list[str]:
    """The metrics of an evaluation of held-out rows and pairs: grades or the reward, and the pairs' accuracy."""
    names = [*task.grades, *([REWARD] if recipe.evaluate.rewards or not task.grades else [])]
    names = [f"{part}/{name}" if part else name for part in task.held_out_sets for name in names] if rows else []
    return [*names, PREFERENCE_ACCURACY] if pairs else names


def check_metric(name: str, measured: Sequence[str]) -> None:
    if name not in measured:
        near = did_you_mean(name, measured)
        raise ConfigError(
            f"evaluate.metric {name!r} is not measured by this task{near} (there are: {', '.join(measured)})"
        )


def _check_batches(recipe: Recipe, samples: bool) -> None:
    """Raise an error if there are more mini-batches than prompts or pairs in a step."""
    if samples:
        count, what = recipe.train.prompts_per_step, "prompt"
        settings = "train.batch_size × train.accumulation"
        if recipe.train.mini_batch_by == "samples":
            count, what = count * recipe.sampling.samples_per_prompt, "completion"
            settings += " × sampling.samples_per_prompt"
    else:
        count, what, settings = recipe.preference.batch_size, "pair", "preference.batch_size"
    if recipe.train.mini_batches > count:
        raise ConfigError(
            f"train.mini_batches {recipe.train.mini_batches} is more than the {plural(count, what)} of a step "
            f"({settings})"
        )


def _check_sft(recipe: Recipe, task: Task) -> None:
    setting = next((name for name in ("sft.epochs", "sft.steps") if recipe.get(name)), None)
    if setting is not None and not task.examples:
        off = "leave it out" if setting == "sft.epochs" else "set it to 0"
        raise ConfigError(f"{setting} is {recipe.get(setting):g}, but the task {task.name!r} has no examples; {off}")
    if recipe.train.steps == 0 and setting is None:
        raise ConfigError(
            "train.steps is 0 and there is no SFT, so nothing would be trained; set train.steps, or sft.steps or "
            "sft.epochs for a supervised run"
        )


def most_tokens(recipe: Recipe) -> int:
    """The tokens of a step if every completion has full length."""
    sampling = recipe.sampling
    return recipe.train.prompts_per_step * sampling.samples_per_prompt * sampling.max_new_tokens
