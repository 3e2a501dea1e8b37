"""Tasks by name. A package adds one with an entry point of the group ``groupwise.tasks``."""

from __future__ import annotations

from dataclasses import replace

from groupwise.config import Recipe
from groupwise.errors import ConfigError
from groupwise.plugins import BUILTIN_TASKS as TASKS
from groupwise.plugins import load_plugin
from groupwise.tasks.base import Grade, Task, TaskDefinition, TaskReport, TaskRow
from groupwise.user_code import guarded, load_function

__all__ = ["TASKS", "Grade", "Task", "TaskDefinition", "TaskReport", "TaskRow", "find_task", "load_task"]


def find_task(name: str) -> TaskDefinition:
    """The definition of a task by its registered name, or by ``module:function`` (or ``file.py:function``)."""
    factory = load_function(name, what="task") if ":" in name else load_plugin("groupwise.tasks", TASKS, name, "task")
    if isinstance(factory, TaskDefinition):
        if name in TASKS:
            return factory
        report = factory.report and guarded(factory.report, f"the report of the task {name!r}")
        return replace(factory, make=guarded(factory.make, f"the task {name!r}"), report=report)
    if not callable(factory):
        raise ConfigError(f"the task {name!r} is neither a function nor a TaskDefinition, but {type(factory).__name__}")
    make = factory if name in TASKS else guarded(factory, f"the task {name!r}")
    return TaskDefinition(lambda recipe, options: make(recipe))


def load_task(recipe: Recipe) -> Task:
    """The task of a recipe, with its rows read and its options checked."""
    task = find_task(recipe.task)(recipe)
    if not isinstance(task, Task):
        raise ConfigError(f"the task {recipe.task!r} returned {type(task).__name__}, not a groupwise.tasks.Task")
    if recipe.task in TASKS:
        return task
    where = f"of the task {recipe.task!r}"
    grades = {name: guarded(grade, f"the grade {name!r} {where}") for name, grade in task.grades.items()}
    checks = {name: guarded(check, f"the health check {name!r} {where}") for name, check in task.health_checks.items()}
    return replace(task, grades=grades, health_checks=checks)
