"""Rewards that a recipe names, with options."""

from __future__ import annotations

import re
import sys
import textwrap

import pytest

from groupwise.config import load_recipe, make_recipe
from groupwise.errors import ConfigError, InputError, MissingExtraError, RewardError
from groupwise.rewards import BUILTIN, make_reward, named
from groupwise.tasks import Task

TASK = Task("nothing", train=[])  # a task without rewards
USER_FILE = """
from groupwise.errors import CheckpointError

def plain(prompts, completions, **_):
    return [0.5] * len(completions)

def factory(factor, power=1):
    def inner(completions, **_):
        return [factor * len(completion) ** power for completion in completions]
    return inner

def anything(**options):
    return lambda completions, **_: [float(len(options))] * len(completions)

def forgets(factor):
    lambda completions: [factor]

def breaks(factor):
    return helper(factor)

def helper(factor):
    raise KeyError("no such factor")

def damaged(factor):
    raise CheckpointError("the factor's file is damaged")

class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, completions, **_):
        return [self.factor] * len(completions)

number = 5
"""


def make_scorer(recipe):
    from groupwise.training.inputs import make_scorer

    return make_scorer(recipe, TASK, ())


@pytest.fixture
def user_file(tmp_path):
    file = tmp_path / "user.py"
    file.write_text(textwrap.dedent(USER_FILE))
    return str(file)


def test_without_options_a_function_is_the_reward(user_file):
    assert make_reward(f"{user_file}:plain")([], ["a", "b"]) == [0.5, 0.5]
    assert make_reward(f"{user_file}:plain", {})([], ["a"]) == [0.5]


def test_with_options_a_function_builds_the_reward(user_file):
    assert make_reward(f"{user_file}:factory", {"factor": 2})(completions=["abc"]) == [6]
    assert make_reward(f"{user_file}:factory", {"factor": 2, "power": 2})(completions=["abc"]) == [18]
    assert make_reward(f"{user_file}:anything", {"one": 1, "two": 2})(completions=["abc"]) == [2.0]
    assert make_reward(f"{user_file}:Scaled", {"factor": 3.0})(completions=["abc"]) == [3.0]


def test_builtin_rewards():
    assert make_reward("length_band", {"low": 1, "high": 2})([], ["one two", "one two three"]) == [1.0, 0.0]
    assert make_reward("repetition")([], ["a b c d"]) == [1.0]
    assert set(BUILTIN) == {"judge", "reward_model", "length_band", "repetition", "keywords", "math_equal"}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("judge", {"model": "m", "endpoint": "http://localhost:1/v1"}),
        ("length_band", {"low": 1, "high": 2}),
        ("repetition", {}),
        ("keywords", {}),
    ],
)
def test_a_builtin_reward_has_its_name(name, options):
    assert named(make_reward(name, options)).name == name


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("jugde", {}, "unknown reward 'jugde'; did you mean 'judge'? (allowed: 'judge', 'reward_model', 'length_band', "
         "'repetition', 'keywords', 'math_equal', 'module:function', 'file.py:function')"),
        ("nothing_alike_at_all", {"a": 1}, "unknown reward 'nothing_alike_at_all' (allowed: 'judge', "),
        ("length_band", {"low": 1, "hihg": 2}, "unknown option of reward 'length_band': 'hihg'; did you mean 'high'? "
         "(allowed: 'low', 'high', 'soft', 'unit', 'after')"),
        ("judge", {"api_key": "a\nb", "model": "m"}, "the value of api_key cannot be a key"),
        ("length_band", {"low": 1}, "reward 'length_band' needs the option 'high': add options = { high = … } to its "
         "entry"),
        ("length_band", {}, "reward 'length_band' needs the option 'low'"),
        ("length_band", {"low": 5, "high": 2}, "reward 'length_band': high is 2, which is less than low, 5"),
        ("length_band", {"low": "5", "high": 6}, "reward 'length_band': low must be an integer"),
        ("{user}:factory", {"factro": 1}, "'factro'; did you mean 'factor'? (allowed: 'factor', 'power')"),
        ("{user}:factory", {"power": 1}, "needs the option 'factor'"),
        ("{user}:plain", {"factor": 1}, "scores completions itself, so it takes no options; leave them out"),
        ("{user}:forgets", {"factor": 1}, "has to return the function that scores; it returned None (NoneType)"),
        ("{user}:breaks", {"factor": 1}, "building it raised KeyError: 'no such factor' (user.py, line 22)"),
        ("{user}:number", {"factor": 1}, "number is not a function but 5 (int)"),
        ("{user}:none", {"factor": 1}, "there is no 'none' in"),
        ("nowhere_such:none", {}, "there is no module 'nowhere_such'"),
        (":function", {}, "a reward is given as module:function or path/file.py:function, got ':function'"),
        ("{user}", {}, "; write {user}:function (functions there: plain, "),
    ],
    ids=range(18),
)  # fmt: skip
def test_invalid_rewards(user_file, function, options, message):
    with pytest.raises(ConfigError, match=re.escape(message.replace("{user}", user_file))):
        make_reward(function.replace("{user}", user_file), options)


def test_other_errors_of_a_factory_are_not_changed(user_file, monkeypatch):
    with pytest.raises(RuntimeError, match=r"^the factor's file is damaged$"):
        make_reward(f"{user_file}:damaged", {"factor": 1})
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(MissingExtraError):
        make_reward("judge", {"model": "m", "endpoint": "http://localhost:1/v1"})


# --- in a recipe ------------------------------------------------------------------------------------------------------

RECIPE = """
[[rewards]]
function = "length_band"
options = { low = 2, high = 3 }

[[rewards]]
function = "length_band"
weight = 0.5
name = "short"
options = { low = 1, high = 1, unit = "characters" }

[[rewards]]
function = "user.py:factory"
options = { factor = 2.0 }

[[rewards]]
function = "user.py:plain"
"""


@pytest.fixture
def recipe_folder(tmp_path, user_file):
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "judge").write_text("a file that has the name of a reward")
    (tmp_path / "length_band").mkdir()
    return tmp_path


def test_a_recipe_with_options(recipe_folder, monkeypatch):
    monkeypatch.chdir("/")
    scorer = make_scorer(load_recipe(recipe_folder / "recipe.toml"))
    assert [(each.name, each.weight) for each in scorer.functions] == [
        ("length_band", 1.0), ("short", 0.5), ("inner", 1.0), ("plain", 1.0),
    ]  # fmt: skip
    assert scorer.score(["p", "p"], ["one two", "x"], {}).rewards.tolist() == [[1, 0, 14, 0.5], [0, 1, 2, 0.5]]


def test_a_short_name_is_not_taken_for_a_file_beside_the_recipe(recipe_folder):
    recipe = load_recipe(recipe_folder / "recipe.toml")
    assert [entry.function for entry in recipe.rewards] == [
        "length_band", "length_band", f"{recipe_folder}/user.py:factory", f"{recipe_folder}/user.py:plain",
    ]  # fmt: skip


def test_a_rubric_is_relative_to_the_recipe(recipe_folder, monkeypatch):
    (recipe_folder / "rubric.md").write_text("Is {answer} funny?")
    entry = '[[rewards]]\nfunction = "judge"\noptions = {{ model = "m", endpoint = "http://localhost:1", {} }}\n'
    long = "Is {answer} funny? " * 100
    file = recipe_folder / "judged.toml"
    file.write_text(entry.format('rubric = "rubric.md"'))
    monkeypatch.chdir("/")
    recipe = load_recipe(file)
    assert recipe.rewards[0].options["rubric"] == str(recipe_folder / "rubric.md")
    assert make_scorer(recipe).functions[0].name == "judge"
    for rubric in (long, "judge_such"):
        file.write_text(entry.format(f'rubric = "{rubric}"'))
        assert load_recipe(file).rewards[0].options["rubric"] == rubric


def test_an_unknown_option_is_reported_before_the_run(recipe_folder):
    recipe = make_recipe({"rewards": [{"function": "keywords", "options": {"leats": 0.5}}]})
    with pytest.raises(ConfigError, match="option of reward 'keywords': 'leats'; did you mean 'least'"):
        make_scorer(recipe)


def test_a_missing_column_is_reported_before_the_run():
    recipe = make_recipe({"rewards": [{"function": "keywords", "options": {"column": "subject"}}]})
    scorer = make_scorer(recipe)
    with pytest.raises(RewardError, match=r"'keywords' needs the argument 'subject', .*did you mean 'subjects'"):
        scorer.check_arguments(["prompt", "subjects"])
    scorer.check_arguments(["prompt", "subject"])
    assert scorer.score(["p"], ["a cat"], {"subject": [["cat", "dog"]], "x": [1]}).rewards.tolist() == [[0.5]]


def test_two_rewards_of_one_kind_need_names():
    entry = {"function": "repetition"}
    with pytest.raises(InputError, match="2 reward functions have the name 'repetition'"):
        make_scorer(make_recipe({"rewards": [entry, entry]}))
