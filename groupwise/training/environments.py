"""The environment of a run: from the recipe, the task or Python, and how its conversations become tokens."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from groupwise.config import Recipe
from groupwise.conversations import (
    ChatFormat,
    EpisodeLimits,
    EpisodeSampler,
    PlainFormat,
    RolloutFunction,
    TurnFormat,
    TurnTemplate,
)
from groupwise.environments import (
    Environment,
    Limits,
    MethodEnvironment,
    Sandbox,
    Schema,
    ToolEnvironment,
    arithmetic,
    code_tool,
    make_tools,
    watched,
)
from groupwise.errors import ConfigError
from groupwise.model.handle import context_length_of
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
    """What makes the environments of a run, or with ``is_rollout`` its rollout function.

    factory: None if conversations are held in another way, without environments.
    gives_reward: they reward a conversation themselves.
    columns: those that reward functions can ask for, beside those of the row; None: known only when they are called.
    sampler: makes what samples the conversations, in place of `ConversationSampler`, from the same arguments.
    sources: the user's functions and classes by their roles, or the names that they were loaded by; a resumed run
    compares their files.
    """

    factory: Callable[..., Any] | None
    gives_reward: bool
    is_rollout: bool = False
    columns: tuple[str, ...] | None = REWARD_COLUMNS
    sampler: Callable[..., Any] | None = None
    sources: tuple[tuple[str, str | Callable[..., Any]], ...] = ()

    @property
    def rewards(self) -> list[RewardFunction]:
        """The environment's own reward."""
        return [RewardFunction(REWARD, environment_reward)] if self.gives_reward else []


def load_environment(
    recipe: Recipe,
    task: Task,
    *,
    tools: Sequence[Callable[..., Any]] = (),
    environment: Any = None,
    rollout: Callable[..., Any] | None = None,
) -> RunEnvironment | None:
    """The environment of ``environment``, the tools, ``rollout``, the recipe or the task; None without any.

    ``environment`` is a class or function that makes an environment, in groupwise's form or in TRL's, or is ready.
    """
    settings, limits = recipe.environment, limits_of(recipe)
    functions = [*(_builtin_or_own(name, recipe) for name in settings.tools), *tools]
    named = {
        "environment.factory": settings.factory,
        "environment.rollout": settings.rollout,
        "environment.tools": functions or None,
        "environment": environment,
        "rollout": rollout,
        f"the task {task.name!r}": task.environment,
    }
    given = [name for name, value in named.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"there are two environments, of {given[0]} and of {given[1]}; leave one of them out")
    if not given:
        return None
    if functions:
        own: tuple[str | Callable[..., Any], ...] = (
            *(name for name in settings.tools if name not in BUILTIN_TOOLS),
            *tools,
        )
        sources = tuple((f"tool {_name_of(tool)!r}", tool) for tool in own)
        make = partial(ToolEnvironment, make_tools(functions), limits)
        return RunEnvironment(make, gives_reward=False, sources=sources)
    if isinstance(environment, RunEnvironment):
        return environment
    if settings.rollout is not None:
        rollout = load_function(settings.rollout, what="rollout function")
    if rollout is not None:
        _check_rollout(rollout)
        source = ("rollout", settings.rollout or rollout)
        return RunEnvironment(rollout, gives_reward=True, is_rollout=True, sources=(source,))
    factory = environment or task.environment
    if settings.factory is not None:
        factory = load_function(settings.factory, what="environment")
    if not callable(factory):
        raise ConfigError(f"an environment is given as a class or a function that makes one, got {excerpt(factory)}")
    return replace(_in_own_form(factory, limits), sources=(("environment", settings.factory or factory),))


def _name_of(tool: Any) -> str:
    """Of a function, or in the name that it is loaded by."""
    return tool.rpartition(":")[2] if isinstance(tool, str) else str(getattr(tool, "__name__", type(tool).__name__))


def _check_rollout(function: Any) -> None:
    """Raise an error unless it can be called as ``rollout(model, row)``."""
    name = getattr(function, "__name__", type(function).__name__)
    if not callable(function):
        raise ConfigError(f"a rollout function is a function, called as rollout(model, row), got {excerpt(function)}")
    try:
        inspect.signature(function).bind("model", "row")
    except TypeError as error:
        raise ConfigError(f"rollout function {name}: it is called as {name}(model, row), but {error}") from None
    except ValueError:  # a function of C, whose signature is not known
        return


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


def check_conversations(recipe: Recipe, environment: RunEnvironment, task: Task) -> None:
    """Raise an error if the recipe wants something that conversations cannot do, or rows have columns of theirs."""
    wanted = {
        "train.max_staleness": recipe.train.max_staleness > 0,
        "advantages.grouping 'similarity'": recipe.advantages.grouping == "similarity",
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
    recipe: Recipe,
    environment: RunEnvironment | None,
    task: Task,
    tokenizer: Any,
    model: Any,
    *,
    must_reward: bool = False,
    say: Say,
) -> EpisodeSampler | None:
    """The sampler of a run's conversations; None if it has no environment. ``must_reward``: nothing else does."""
    if environment is None or environment.factory is None:
        return None
    rows = [*task.train[:1], *task.held_out_rows[:1]]
    template = recipe.environment.chat_template or getattr(tokenizer, "chat_template", None)
    chat = bool(template) if recipe.data.chat is None else recipe.data.chat
    chat = chat or any(not isinstance(row.get(recipe.data.prompt), str) for row in rows)
    settings, limits, longest = recipe.environment, limits_of(recipe), context_length_of(model)
    lengths = EpisodeLimits(settings.max_turns, settings.max_tokens, longest, settings.retries, limits)
    factory = environment.factory
    formats = partial(_turn_format, recipe, tokenizer, chat)
    if environment.is_rollout:
        cached = _by_tools(partial(formats, is_strict=True))
        rollout = RolloutFunction(factory, cached, tokenizer, lengths, _request_parameters(recipe), must_reward)
        return EpisodeSampler(rollout, _announced(cached(()), say), lengths)
    probe = watched(factory(), limits)
    sampler = EpisodeSampler(factory, _announced(formats(probe.schemas), say), lengths)
    sampler.give_back(probe)
    return sampler


def _turn_format(
    recipe: Recipe, tokenizer: Any, chat: bool, tools: Sequence[Schema], *, is_strict: bool = False
) -> TurnFormat:
    """How the turns of a model with these tools become tokens."""
    if chat:
        kwargs = resolve_secrets(recipe.data.chat_template_kwargs, "data.chat_template_kwargs")
        template = TurnTemplate(tokenizer, tools, _template_text(recipe), kwargs)
        return ChatFormat(template, recipe.environment.call_format, is_strict=is_strict)
    if tools:
        raise ConfigError(
            "tools need a chat template, which tells the model of them; set data.chat = true, or use a model with one"
        )
    return PlainFormat(tokenizer)


def _announced(turn_format: TurnFormat, say: Say) -> TurnFormat:
    """The same; if its chat template was replaced, that is said."""
    if isinstance(turn_format, ChatFormat) and turn_format.template.replaced is not None:
        say(turn_format.template.replaced)
    return turn_format


def _by_tools(make: Callable[[Sequence[Schema]], TurnFormat]) -> Callable[[Sequence[Schema]], TurnFormat]:
    """``make``, with the formats of the last tools kept: to look at a chat template takes a moment."""
    cached = lru_cache(maxsize=64)(lambda schemas: make(json.loads(schemas)))
    return lambda tools: cached(json.dumps(tools))


def _request_parameters(recipe: Recipe) -> dict[str, Any]:
    """The parameters of a request to the model that the recipe decides."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {name: getattr(recipe.sampling, name) for name in names}


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
