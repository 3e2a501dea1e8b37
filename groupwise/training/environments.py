"""The environment of a run: from the recipe, the task or Python, and how its conversations become tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from groupwise.config import Recipe
from groupwise.conversations import (
    ChatFormat,
    EpisodeLimits,
    EpisodeSampler,
    PlainFormat,
    TurnFormat,
    TurnTemplate,
)
from groupwise.environments import (
    Environment,
    EnvironmentFactory,
    Limits,
    MethodEnvironment,
    Sandbox,
    ToolEnvironment,
    arithmetic,
    code_tool,
    make_tools,
    watched,
)
from groupwise.errors import ConfigError
from groupwise.paths import MEGABYTE, read_file, user_path
from groupwise.redaction import resolve_secrets
from groupwise.rewards import RewardFunction
from groupwise.tasks import Task
from groupwise.text import Say, excerpt
from groupwise.user_code import guarded, load_function

REWARD = "environment"  # the name of the reward that environments give
BUILTIN_TOOLS = ("arithmetic", "python")
# Columns that reward functions can ask for, beside those of the row.
REWARD_COLUMNS = ("environment_reward", "conversation", "turns")


@dataclass(frozen=True)
class RunEnvironment:
    """What makes the environments of a run; ``gives_reward``: they reward a conversation themselves.

    factory: None if conversations are held in another way, without environments.
    columns: those that reward functions can ask for, beside those of the row; None: known only when they are called.
    sampler: makes what samples the conversations, in place of `ConversationSampler`, from the same arguments.
    """

    factory: EnvironmentFactory | None
    gives_reward: bool
    columns: tuple[str, ...] | None = REWARD_COLUMNS
    sampler: Callable[..., Any] | None = None

    @property
    def rewards(self) -> list[RewardFunction]:
        """The environment's own reward."""
        return [RewardFunction(REWARD, environment_reward)] if self.gives_reward else []


def load_environment(
    recipe: Recipe, task: Task, *, tools: Sequence[Callable[..., Any]] = (), environment: Any = None
) -> RunEnvironment | None:
    """The environment of ``environment``, the tools, the recipe or the task; None without any.

    ``environment`` is a class or function that makes an environment, in groupwise's form or in TRL's, or is ready.
    """
    settings, limits = recipe.environment, limits_of(recipe)
    functions = [*(_builtin_or_own(name, recipe) for name in settings.tools), *tools]
    named = {
        "environment.factory": settings.factory,
        "environment.tools": functions or None,
        "environment": environment,
        f"the task {task.name!r}": task.environment,
    }
    given = [name for name, value in named.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"there are two environments, of {given[0]} and of {given[1]}; leave one of them out")
    if not given:
        return None
    if functions:
        return RunEnvironment(partial(ToolEnvironment, make_tools(functions), limits), gives_reward=False)
    if isinstance(environment, RunEnvironment):
        return environment
    factory = environment or task.environment
    if settings.factory is not None:
        factory = load_function(settings.factory, what="environment")
    if not callable(factory):
        raise ConfigError(f"an environment is given as a class or a function that makes one, got {excerpt(factory)}")
    return _in_own_form(factory, limits)


def _builtin_or_own(name: str, recipe: Recipe) -> Any:
    """A tool of the recipe. The built-in one that runs code is refused here if its network cannot be taken away."""
    settings = recipe.environment
    if name == "arithmetic":
        return arithmetic
    if name == "python":
        seconds = 0.8 * settings.tool_seconds  # so that the model sees what was printed before
        return code_tool(Sandbox(seconds=seconds, allow_network=settings.allow_network))
    if ":" not in name:
        raise ConfigError(
            f"environment.tools: {name!r} is none of the built-in tools ({', '.join(BUILTIN_TOOLS)}); a function of "
            "your own is given as module:function or file.py:function"
        )
    return load_function(name, what="tool")


def _in_own_form(factory: Callable[[], Any], limits: Limits) -> RunEnvironment:
    """The environment of a factory in groupwise's form, or in TRL's, which is recognised by its method reset()."""
    kind: Any = factory if isinstance(factory, type) else type(guarded(factory, "the environment's factory")())
    if callable(getattr(kind, "respond", None)):
        own_reward = getattr(kind, "reward", Environment.reward) is not Environment.reward
        return RunEnvironment(guarded(factory, f"the environment {kind.__name__}"), own_reward)
    if callable(getattr(kind, "reset", None)):
        return RunEnvironment(partial(MethodEnvironment, factory, limits), hasattr(kind, "get_reward"))
    raise ConfigError(
        f"environment {kind.__name__}: it has neither respond(), as groupwise's environments have, nor reset(), as "
        "TRL's have"
    )


def limits_of(recipe: Recipe) -> Limits:
    settings = recipe.environment
    return Limits(
        turn_seconds=settings.turn_seconds,
        tool_seconds=settings.tool_seconds,
        max_reply_chars=settings.max_reply_chars,
        max_tool_calls=settings.max_tool_calls,
        wait_seconds=settings.wait_seconds,
    )


def check_conversations(recipe: Recipe, environment: RunEnvironment, task: Task, processes: int) -> None:
    """Raise an error if the recipe wants something that conversations cannot do, or rows have columns of theirs."""
    wanted = {
        "train.max_staleness": recipe.train.max_staleness > 0,
        "distillation.weight": recipe.distillation.weight > 0,
        "advantages.grouping 'similarity'": recipe.advantages.grouping == "similarity",
        "scoring.overlong_buffer": recipe.scoring.overlong_buffer > 0,
        "scoring.length_penalty": recipe.scoring.length_penalty > 0,
        "several processes": processes > 1,
    }
    for name, value in wanted.items():
        if value:
            raise ConfigError(f"conversations with an environment cannot be trained with {name} yet; leave that out")
    for row in (*task.train[:1], *task.held_out_rows[:1]):
        if taken := sorted(set(row) & set(environment.columns or ())):
            raise ConfigError(
                f"the rows have the column {taken[0]!r}, in which reward functions get what happened in the "
                "conversation; rename it"
            )


def make_episode_sampler(
    recipe: Recipe, environment: RunEnvironment | None, task: Task, tokenizer: Any, model: Any, *, say: Say
) -> EpisodeSampler | None:
    """The sampler of a run's conversations; None if it has no environment."""
    if environment is None or environment.factory is None:
        return None
    rows = [*task.train[:1], *task.held_out_rows[:1]]
    template = recipe.environment.chat_template or getattr(tokenizer, "chat_template", None)
    chat = bool(template) if recipe.data.chat is None else recipe.data.chat
    chat = chat or any(not isinstance(row.get(recipe.data.prompt), str) for row in rows)
    factory = environment.factory
    context_length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    settings, limits = recipe.environment, limits_of(recipe)
    probe = watched(factory(), limits)
    turn_format: TurnFormat
    if chat:
        kwargs = resolve_secrets(recipe.data.chat_template_kwargs, "data.chat_template_kwargs")
        template = TurnTemplate(tokenizer, probe.schemas, _template_text(recipe), kwargs)
        if template.replaced is not None:
            say(template.replaced)
        turn_format = ChatFormat(template, settings.call_format)
    elif probe.schemas:
        raise ConfigError(
            "tools need a chat template, which tells the model of them; set data.chat = true, or use a model with one"
        )
    else:
        turn_format = PlainFormat(tokenizer)
    lengths = (settings.max_turns, settings.max_tokens, context_length)
    sampler = EpisodeSampler(factory, turn_format, EpisodeLimits(*lengths, settings.retries, limits))
    sampler.give_back(probe)
    return sampler


def _template_text(recipe: Recipe) -> str | None:
    file = recipe.environment.chat_template
    if file is None:
        return None
    try:
        return read_file(user_path(file), ConfigError, limit=MEGABYTE).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"environment.chat_template: {file} is not a text in UTF-8") from error


def template_arguments(sampler: EpisodeSampler | None) -> dict[str, Any]:
    """Arguments of the chat template for the prompts of a run with these conversations."""
    if sampler is None or not isinstance(sampler.format, ChatFormat):
        return {}
    template = sampler.format.template
    arguments: dict[str, Any] = {"chat_template": template.chat_template}
    return {**arguments, "tools": template.tools} if template.tools else arguments


def environment_reward(environment_reward: Sequence[float | None], **_: Any) -> list[float | None]:
    """The reward that the environment gave."""
    return list(environment_reward)
