"""The task ``rows``: which rows it reads, and from where."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.config import load_recipe, make_recipe
from groupwise.errors import ConfigError, DataError
from groupwise.tasks import load_task
from groupwise.tasks import rows as rows_module
from groupwise.tasks.rows import hold_out, read_both, rows_task


def write(path, *prompts):
    path.write_text("".join(json.dumps({"prompt": prompt, "n": n}) + "\n" for n, prompt in enumerate(prompts)))
    return path


def recipe_of(**data):
    return make_recipe({"data": data})


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A working directory that is not the recipe's."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_rows_are_unchanged(tmp_path):
    write(tmp_path / "a.jsonl", "one", "two")
    write(tmp_path / "b.jsonl", "three")
    task = rows_task(recipe_of(train=str(tmp_path / "a.jsonl"), held_out=str(tmp_path / "b.jsonl")))
    assert task.name == "rows"
    assert task.train == [{"prompt": "one", "n": 0}, {"prompt": "two", "n": 1}]
    assert task.held_out == [{"prompt": "three", "n": 0}]
    assert task.train[1].where == "a.jsonl, line 2"
    assert (task.rewards, task.grades, task.metric) == ((), {}, None)


def test_nothing_is_held_out_unless_it_is_named(tmp_path):
    path = write(tmp_path / "a.jsonl", "one", "two", "three")
    assert read_both(recipe_of(train=str(path)))[1] == []
    train, held_out = read_both(recipe_of(train=str(path), held_out=str(path), train_rows=2, held_out_rows=1))
    assert [row["n"] for row in train] == [0, 1]
    assert [row["n"] for row in held_out] == [0]


def test_files_beside_the_recipe(tmp_path, elsewhere):
    write(tmp_path / "a.jsonl", "beside the recipe")
    write(elsewhere / "a.jsonl", "here")
    write(elsewhere / "b.jsonl", "only here")
    (tmp_path / "recipe.toml").write_text('data = { train = "a.jsonl", held_out = "b.jsonl" }')
    train, held_out = read_both(load_recipe(tmp_path / "recipe.toml"))
    assert (train[0]["prompt"], held_out[0]["prompt"]) == ("beside the recipe", "only here")
    recipe = load_recipe(tmp_path / "recipe.toml", {"data.train": "a.jsonl"})
    assert read_both(recipe)[0][0]["prompt"] == "here"  # overrides are relative to the working directory
    (tmp_path / "recipe.toml").write_text('data = { train = "c.jsonl" }')
    with pytest.raises(DataError, match=rf"there is no file or folder 'c.jsonl' in {re.escape(str(elsewhere))}"):
        read_both(load_recipe(tmp_path / "recipe.toml"))


@pytest.mark.parametrize("name", ["train_split", "held_out_split", "subset"])
def test_settings_of_hub_datasets_are_named_as_typed(tmp_path, name):
    path = str(write(tmp_path / "a.jsonl", "one"))
    with pytest.raises(DataError, match=rf"^data.{name} = 'test' is for hub datasets, but .*a.jsonl is local"):
        read_both(recipe_of(train=path, **{name: "test"}))


def test_a_recipe_without_rows():
    with pytest.raises(ConfigError, match=r"the task 'rows' needs rows: set data.train.*Python rows does not keep"):
        load_task(make_recipe())


@pytest.fixture
def asked(monkeypatch):
    """What `read_rows` is asked for, without a hub."""
    calls = []

    def read(source, **options):
        calls.append((source, options))
        return [{"prompt": source}]

    monkeypatch.setattr(rows_module, "read_rows", read)
    return calls


def test_splits_of_a_hub_data_set(asked):
    recipe = recipe_of(train="a/b", subset="main", train_split="train", held_out_split="test", train_rows=5)
    train, held_out = read_both(recipe)
    assert asked == [
        ("a/b", {"split": "train", "subset": "main", "limit": 5}),
        ("a/b", {"split": "test", "subset": "main", "limit": None}),
    ]
    assert (train, held_out) == ([{"prompt": "a/b"}], [{"prompt": "a/b"}])


def test_another_data_set_can_be_held_out(asked):
    read_both(recipe_of(train="a/b", held_out="c/d", held_out_split="test", held_out_rows=3))
    assert asked == [
        ("a/b", {"split": None, "subset": None, "limit": None}),
        ("c/d", {"split": "test", "subset": None, "limit": 3}),
    ]


@pytest.mark.parametrize("file", ["train", "held_out"])
def test_a_subset_does_not_apply_to_a_file(asked, tmp_path, file):
    path = str(write(tmp_path / "a.jsonl", "one"))
    other = "held_out" if file == "train" else "train"
    read_both(recipe_of(**{file: path, other: "a/b", "subset": "main"}))
    assert {source: options["subset"] for source, options in asked} == {path: None, "a/b": "main"}


def test_a_subset_of_files_is_refused(tmp_path):
    path = str(write(tmp_path / "a.jsonl", "one"))
    for data in ({"train": path}, {"train": path, "held_out": path}):
        with pytest.raises(DataError, match=r"data.subset = 'main' .*hub"):
            read_both(recipe_of(**data, subset="main"))
    with pytest.raises(DataError, match=r"split = 'test' .*hub"):
        read_both(recipe_of(train=path, held_out_split="test"))


# --- several sources, and rows held out from the training rows -----------------------------------------------------


def test_several_files_one_after_another(tmp_path):
    one, two = write(tmp_path / "a.jsonl", "a0", "a1", "a2"), write(tmp_path / "b.jsonl", "b0", "b1")
    train, held_out = read_both(recipe_of(train=[str(one), str(two)], held_out=[str(two)]))
    assert [row["prompt"] for row in train] == ["a0", "a1", "a2", "b0", "b1"]
    assert [row["prompt"] for row in held_out] == ["b0", "b1"]
    assert train[3].where == "b.jsonl, line 1"


@pytest.mark.parametrize(("limit", "expected"), [(2, "a0 a1"), (3, "a0 a1 a2"), (4, "a0 a1 a2 b0"), (9, "a0 a1 a2 b0")])
def test_a_limit_counts_over_all_files(tmp_path, limit, expected):
    one, two = write(tmp_path / "a.jsonl", "a0", "a1", "a2"), write(tmp_path / "b.jsonl", "b0")
    train, _ = read_both(recipe_of(train=[str(one), str(two)], train_rows=limit))
    assert [row["prompt"] for row in train] == expected.split()


def test_no_more_is_read_than_the_limit(asked):
    read_both(recipe_of(train=["a/b", "c/d", "e/f"], train_rows=2))
    assert [(source, options["limit"]) for source, options in asked] == [("a/b", 2), ("c/d", 1)]


def test_splits_and_subsets_apply_to_the_hub_data_sets_of_a_list(asked, tmp_path):
    path = str(write(tmp_path / "a.jsonl", "one"))
    read_both(recipe_of(train=[path, "a/b"], train_split="train", subset="main", held_out=path))
    assert asked == [
        (path, {"split": None, "subset": None, "limit": None}),
        ("a/b", {"split": "train", "subset": "main", "limit": None}),
        (path, {"split": None, "subset": None, "limit": None}),
    ]


def test_several_hub_data_sets_with_two_splits(asked):
    read_both(recipe_of(train=["a/b", "c/d"], train_split="train", held_out_split="test"))
    assert [(source, options["split"]) for source, options in asked] == [
        ("a/b", "train"),
        ("c/d", "train"),
        ("a/b", "test"),
        ("c/d", "test"),
    ]


@given(st.integers(2, 40), st.data())
def test_held_out_rows_are_a_subset_in_order(number, data):
    rows = [{"prompt": str(place)} for place in range(number)]
    held = data.draw(st.integers(1, number - 1))
    seed = data.draw(st.integers(0, 5))
    train, held_out = hold_out(rows, held, seed)
    assert len(held_out) == held
    for part in (train, held_out):
        assert part == sorted(part, key=lambda row: int(row["prompt"]))
    assert sorted(train + held_out, key=lambda row: int(row["prompt"])) == rows
    assert hold_out(rows, held, seed) == (train, held_out)


def test_another_seed_holds_out_other_rows():
    rows = [{"prompt": str(place)} for place in range(100)]
    drawn = [tuple(row["prompt"] for row in hold_out(rows, 10, seed)[1]) for seed in range(5)]
    assert len(set(drawn)) == 5
    assert tuple(map(str, range(10))) not in drawn
    assert tuple(map(str, range(90, 100))) not in drawn


def test_rows_held_out_by_the_recipe(tmp_path):
    path = str(write(tmp_path / "a.jsonl", *"abcdefgh"))
    recipe = recipe_of(train=path, held_out_from_train=3)
    train, held_out = read_both(recipe)
    assert (len(train), len(held_out)) == (5, 3)
    assert sorted(row["prompt"] for row in train + held_out) == list("abcdefgh")
    assert (train, held_out) == hold_out(read_both(recipe_of(train=path))[0], 3, recipe.train.seed)
    # train_rows applies before rows are held out, held_out_rows after.
    train, held_out = read_both(recipe_of(train=path, train_rows=6, held_out_from_train=3, held_out_rows=2))
    assert (len(train), len(held_out)) == (3, 2)
    assert {row["prompt"] for row in train + held_out} < set("abcdef")


def test_rows_are_held_out_from_the_first_source(tmp_path):
    one, two = str(write(tmp_path / "a.jsonl", *"abcde")), str(write(tmp_path / "b.jsonl", *"xyz"))
    train, held_out = read_both(recipe_of(train=[one, two], held_out_from_train=3))
    assert {row["prompt"] for row in held_out} < set("abcde")
    assert [row["prompt"] for row in train[2:]] == list("xyz")
    assert held_out == read_both(recipe_of(train=one, held_out_from_train=3))[1]
    train, held_out = read_both(recipe_of(train=[one, two], held_out_from_train=3, train_rows=6))
    assert [row["prompt"] for row in train[2:]] == ["x"]
    with pytest.raises(ConfigError, match=r"held_out_from_train is 5, but there are 5 rows"):
        read_both(recipe_of(train=[one, two], held_out_from_train=5))


def test_a_split_beside_a_file_that_rows_are_held_out_from(asked, tmp_path):
    path = str(write(tmp_path / "a.jsonl", "one"))
    with pytest.raises(ConfigError, match=r"there is 1 row,"):
        read_both(recipe_of(train=[path, "a/b"], train_split="train", held_out_from_train=1))
    assert [(source, options["split"]) for source, options in asked] == [(path, None), ("a/b", "train")]


def test_rows_that_cannot_be_held_out(tmp_path):
    path = str(write(tmp_path / "a.jsonl", "one", "two", "three"))
    for number in (3, 4):
        with pytest.raises(ConfigError, match=rf"held_out_from_train is {number}, but there are 3 rows"):
            read_both(recipe_of(train=path, held_out_from_train=number))
    for name, value in {"held_out": path, "held_out_split": "test"}.items():
        with pytest.raises(ConfigError, match=rf"cannot be combined with data.{name};"):
            read_both(recipe_of(train=path, held_out_from_train=1, **{name: value}))
