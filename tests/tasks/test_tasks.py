"""How a recipe's task is found: by a registered name, by a function, or by a definition with options."""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from groupwise import plugins
from groupwise.cli import PLUGINS
from groupwise.config import load_recipe, make_recipe, with_settings
from groupwise.errors import ConfigError
from groupwise.tasks import TASKS, Task, find_task, load_task
from groupwise.training.early_checks import check_names

OWN_TASKS = """
from pydantic import BaseModel, ConfigDict
from groupwise.tasks import Task, TaskDefinition

class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    words: int = 2
    file: str | None = None

def plain(recipe):
    return Task("plain", [{"prompt": recipe.model.source}])

def wrong(recipe):
    return []

defined = TaskDefinition(lambda recipe, options: Task("defined", [{"prompt": "x" * options.words}]), options=Options)
number = 3
"""


@pytest.fixture
def own_tasks(tmp_path, monkeypatch):
    """A file of tasks, in another folder than the working directory."""
    (tmp_path / "mine.py").write_text(OWN_TASKS)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # of another test
    return tmp_path / "mine.py"


@pytest.fixture
def register(monkeypatch):
    """Register an entry point, as an installed package would."""

    def add(name, value):
        entry = EntryPoint(name, value, "groupwise.tasks")
        monkeypatch.setattr(plugins, "entry_points", lambda group: [entry] if group == entry.group else [])

    return add


def test_our_entry_points_are_the_same_in_pyproject_and_in_the_code():
    """The code repeats them for a source tree that is not installed."""
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    entry_points = tomllib.loads(pyproject.read_text())["project"]["entry-points"]
    assert entry_points["groupwise.tasks"] == TASKS
    assert entry_points["groupwise.commands"] == PLUGINS


@pytest.mark.parametrize("name", TASKS)
def test_our_tasks_are_found_without_an_installed_package(name, monkeypatch):
    monkeypatch.setattr(plugins, "entry_points", lambda group: [])
    assert callable(find_task(name))


def test_our_tasks_are_known_before_the_run_without_an_installed_package(monkeypatch):
    monkeypatch.setattr(plugins, "entry_points", lambda group: [])
    check_names(make_recipe({"task": "game", "model": {"source": "tiny"}}))
    with pytest.raises(ConfigError, match="'gaem'; did you mean 'game'"):
        check_names(make_recipe({"task": "gaem", "model": {"source": "tiny"}}))


def test_a_task_of_another_package(register, own_tasks, monkeypatch):
    monkeypatch.syspath_prepend(own_tasks.parent)
    register("theirs", "mine:defined")
    assert load_task(make_recipe({"task": "theirs", "task_options": {"words": 3}})).train == [{"prompt": "xxx"}]
    assert set(plugins.plugin_names("groupwise.tasks", TASKS)) == {*TASKS, "theirs"}


def test_an_unknown_task():
    with pytest.raises(ConfigError, match=r"unknown task 'gms8k'; did you mean 'gsm8k'\? .*'rows', 'quiz'"):
        load_task(make_recipe({"task": "gms8k"}))


@pytest.mark.parametrize("value", ["no_such_package.tasks:task", "groupwise.tasks.rows:no_such_task"])
def test_an_entry_point_that_cannot_be_loaded(register, value):
    register("broken", value)
    with pytest.raises(ConfigError, match=rf"the task 'broken' cannot be loaded from {value}: .*no_such"):
        load_task(make_recipe({"task": "broken"}))


def test_an_entry_point_that_is_not_a_task(register, own_tasks, monkeypatch):
    monkeypatch.syspath_prepend(own_tasks.parent)
    register("number", "mine:number")
    with pytest.raises(ConfigError, match="'number' is neither a function nor a TaskDefinition, but int"):
        load_task(make_recipe({"task": "number"}))


def test_a_function_of_the_recipe(own_tasks):
    (own_tasks.parent / "recipe.toml").write_text('task = "mine.py:plain"')
    task = load_task(load_recipe(own_tasks.parent / "recipe.toml"))
    assert (task.name, task.train) == ("plain", [{"prompt": "tiny"}])
    with pytest.raises(ConfigError, match=r"'.*mine.py:wrong' returned list, not a groupwise.tasks.Task"):
        load_task(make_recipe({"task": f"{own_tasks}:wrong"}))
    with pytest.raises(ConfigError, match=r"there is no 'plian' in .*mine.py; did you mean 'plain'\?"):
        load_task(make_recipe({"task": f"{own_tasks}:plian"}))


def test_a_definition_with_options(own_tasks):
    recipe = own_tasks.parent / "recipe.toml"
    recipe.write_text('task = "mine.py:defined"\n[task_options]\nwords = 3\nfile = "mine.py"\n')
    assert load_task(load_recipe(recipe)).train == [{"prompt": "xxx"}]
    loaded = load_recipe(recipe, {"task_options.words": 1})
    assert load_task(loaded).train == [{"prompt": "x"}]
    assert loaded.task_options == {"words": 1, "file": str(own_tasks)}  # a file beside the recipe
    assert load_task(with_settings(loaded, {"task_options.words": 4})).train == [{"prompt": "xxxx"}]
    assert loaded.get("task_options.words") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"word": 3}, r"^\[task_options\].* 'word'; did you mean 'words'\?.*words, file"),
        ({"words": "3"}, r"^\[task_options\].* words = '3' cannot be used; .* write 3 without quotes"),
    ],
)
def test_options_that_a_definition_refuses(own_tasks, options, message):
    with pytest.raises(ConfigError, match=message):
        load_task(make_recipe({"task": f"{own_tasks}:defined", "task_options": options}))


@pytest.mark.parametrize("task", ["quiz", "plain"])
def test_a_task_without_options_refuses_any(own_tasks, task):
    task = task if task in TASKS else f"{own_tasks}:{task}"
    with pytest.raises(ConfigError, match=r"^\[task_options\]: the task .* has no options, but 'words' is set"):
        load_task(make_recipe({"task": task, "task_options": {"words": 1}}))


def test_the_metric_must_be_one_of_the_grades():
    grades = {"accuracy": lambda row, answer: True}
    with pytest.raises(ConfigError, match=r"'acuracy' of the task 'x' is none of its grades \(accuracy\)"):
        Task("x", [], grades=grades, metric="acuracy")
    with pytest.raises(ConfigError, match="None of the task 'x' is none of its grades"):
        Task("x", [], grades=grades)
    assert Task("x", [], grades=grades, metric="accuracy").metric == "accuracy"
