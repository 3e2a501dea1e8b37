"""What can be wrong with a recipe and is found in a second: before PyTorch, the rows and the model are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from groupwise.config import Recipe
from groupwise.data.read import check_source as check_data_source
from groupwise.errors import ConfigError, GroupwiseError, check_choice
from groupwise.model.source import check_source as check_model_source
from groupwise.plugins import BUILTIN_GENERATORS, BUILTIN_TASKS, GENERATORS, plugin_names
from groupwise.redaction import literal_secrets, resolve_secrets
from groupwise.training.extras import check_extras, data_sources
from groupwise.training.store.arrivals import read_arrivals
from groupwise.user_code import load_function, names_file

ROW_TASKS = ("rows", "gsm8k", "usmle")  # another task may read data.train in its own way


def check_names(recipe: Recipe, *, training: bool = True) -> None:
    """Raise an error for a missing extra, file, function or secret, and for a model's name that is not known.

    ``training``: False to evaluate only.
    """
    for place, options in _options(recipe):
        resolve_secrets(options, place)
    check_extras(recipe, training=training)
    check_model_source(recipe.model.source, revision=recipe.model.revision)
    if training and recipe.distillation.is_model and recipe.distillation.teacher is not None:
        try:
            check_model_source(recipe.distillation.teacher, revision=recipe.distillation.revision)
        except GroupwiseError as error:
            raise ConfigError(f"distillation.teacher: {error}") from error
    for source in data_sources(recipe, rows=recipe.task in ROW_TASKS):
        check_data_source(source)
    if ":" not in recipe.task:
        check_choice("task", recipe.task, plugin_names("groupwise.tasks", BUILTIN_TASKS), ConfigError)
    generators = plugin_names(GENERATORS, BUILTIN_GENERATORS)
    check_choice("sampling.generator", recipe.sampling.generator, generators, ConfigError)
    if training and recipe.train.replay is not None:
        read_arrivals(recipe.train.replay)
    functions = [("task", recipe.task), *(("reward", entry.function) for entry in recipe.rewards)]
    if training:
        functions += [("loss", recipe.loss.name), ("advantage", recipe.advantages.function or "")]
        functions += [("optimizer", recipe.optimizer.name)]
    for what, name in functions:
        if ":" in name or names_file(name):  # the user's own
            load_function(name, what=what)


def check_processes(recipe: Recipe, processes: int) -> None:
    """Raise an error if a run cannot have several processes."""
    if processes == 1:
        return
    generator = recipe.sampling.generator
    if generator == "vllm" and not recipe.vllm.servers:
        raise ConfigError(
            f"vLLM can be used in the process that trains if there is one, not {processes}; start servers and "
            "name them in vllm.servers"
        )
    if recipe.train.max_staleness and generator == "engine":
        raise ConfigError(
            f"train.max_staleness {recipe.train.max_staleness} samples ahead, but this run's {processes} processes "
            "sample together, with the model that is trained; set it to 0, or sample on vLLM servers "
            "(sampling.generator = 'vllm', vllm.servers)"
        )


def secret_notes(recipe: Recipe) -> list[str]:
    """A recommendation if a recipe holds secrets itself."""
    names = [name for place, options in _options(recipe) for name in literal_secrets(options, place)]
    if not names:
        return []
    return [
        f"{', '.join(names)}: the recipe holds {'a secret' if len(names) == 1 else 'secrets'}. The run's files will "
        f'not, but an environment variable is safer: {names[0].rpartition(".")[2]} = {{ env = "NAME" }}'
    ]


def _options(recipe: Recipe) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The tables of a recipe that may hold a secret, with their names."""
    yield "task_options", recipe.task_options
    yield "data.chat_template_kwargs", recipe.data.chat_template_kwargs
    yield "optimizer.options", recipe.optimizer.options
    for number, entry in enumerate(recipe.rewards):
        yield f"rewards.{number}.options", entry.options
