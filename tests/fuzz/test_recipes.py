"""Recipes: packaged ones with strange values at random places, damaged TOML and JSON, and settings as options."""

from __future__ import annotations

import datetime
import json
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.cli.settings import parse_settings, split_settings
from groupwise.config import load_recipe, make_recipe, setting_names
from groupwise.packaged import packaged_recipes
from tests.fuzz import accepted, many
from tests.fuzz.strange import changed, damaged, json_values, texts

PATHS = packaged_recipes()
TABLES = {name: tomllib.loads(path.read_text()) for name, path in PATHS.items()}
NAMES = [name for name, _ in setting_names()]
LISTS = ("rewards", "phases", "rules", "ramps")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("recipes")


@many(10)
@given(data=st.data())
def test_packaged_recipes_with_changes(data):
    dates = st.sampled_from([datetime.date(2026, 1, 1), datetime.datetime(2026, 1, 1), datetime.time(1)])
    table = data.draw(changed(TABLES[data.draw(st.sampled_from(sorted(TABLES)))], json_values | dates))
    if isinstance(table, dict):
        accepted("recipes", lambda: make_recipe(table))


@many(4)
@given(section=st.sampled_from([name.partition(".")[0] for name in NAMES]), value=json_values)
def test_a_section_of_another_type(section, value):
    accepted("recipes", lambda: make_recipe({section: value}))


@many(8)
@given(data=st.data(), ending=st.sampled_from([".toml", ".json"]))
def test_damaged_recipe_files(folder, data, ending):
    name = data.draw(st.sampled_from(sorted(PATHS)))
    original = PATHS[name].read_bytes() if ending == ".toml" else json.dumps(TABLES[name]).encode()
    path = folder / f"recipe{ending}"
    path.write_bytes(data.draw(damaged(original) | st.binary(max_size=60)))
    accepted("recipe files", lambda: load_recipe(path))


@st.composite
def options(draw):
    """Words as they are typed: a setting, or a name that is nearly one, and a value that may be junk."""
    name = draw(st.sampled_from(NAMES) | st.tuples(st.sampled_from(LISTS), texts, texts).map(".".join))
    junk = draw(texts)
    name = draw(st.sampled_from([name, name, name, f"{name}.{junk}", name[1:], name.partition(".")[2], junk]))
    value = draw(texts | json_values.map(json.dumps) | st.sampled_from(["1e999", "9" * 5000, "[" * 3000]))
    return [f"--{name}={value}"] if draw(st.booleans()) else [f"--{name}", value]


@many(12)
@given(words=st.lists(options(), min_size=1, max_size=2), name=st.sampled_from(sorted(PATHS)))
def test_settings_as_options(words, name):
    def recipe():
        _, settings = split_settings([word for pair in words for word in pair], ())
        return make_recipe(TABLES[name], overrides=parse_settings(settings))

    accepted("settings on the command line", recipe)
