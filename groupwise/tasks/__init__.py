"""The tasks by name, and the way from a recipe to one."""

from __future__ import annotations

from collections.abc import Callable

from groupwise.config import Recipe
from groupwise.errors import ConfigError, check_choice
from groupwise.rewards import load_function
from groupwise.tasks.base import Grade, Row, Task

__all__ = ["TASKS", "Grade", "Row", "Task", "load_task"]


def _quiz(recipe: Recipe) -> Task:
    from groupwise.tasks.quiz import quiz_task

    return quiz_task(recipe)


def _gsm8k(recipe: Recipe) -> Task:
    from groupwise.tasks.gsm8k import gsm8k_task

    return gsm8k_task(recipe)


def _usmle(recipe: Recipe) -> Task:
    from groupwise.usmle.task import usmle_task

    return usmle_task(recipe)


def _rows(recipe: Recipe) -> Task:
    from groupwise.tasks.rows import rows_task

    return rows_task(recipe)


# A new task is a function from a recipe to a `Task`, named here.
TASKS: dict[str, Callable[[Recipe], Task]] = {"rows": _rows, "quiz": _quiz, "gsm8k": _gsm8k, "usmle": _usmle}


def load_task(recipe: Recipe) -> Task:
    """The task that a recipe names: one of `TASKS`, or ``module:function`` that takes the recipe and returns a Task."""
    if ":" in recipe.task:
        made = load_function(recipe.task, what="task")(recipe)
        if not isinstance(made, Task):
            raise ConfigError(f"the task {recipe.task!r} returned {type(made).__name__}, not a groupwise.tasks.Task")
        return made
    check_choice("task", recipe.task, TASKS, ConfigError)
    return TASKS[recipe.task](recipe)
