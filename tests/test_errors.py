"""Error classes: standard exceptions, pickling, and suggestions for misspelt names."""

from __future__ import annotations

import pickle

import pytest

from groupwise import errors


@pytest.mark.parametrize(
    ("error", "standard"),
    [
        (errors.InputError, ValueError),
        (errors.ConfigError, ValueError),
        (errors.DataError, ValueError),
        (errors.RewardError, RuntimeError),
        (errors.CheckpointError, RuntimeError),
        (errors.RunDirError, RuntimeError),
        (errors.MissingExtraError, ImportError),
    ],
)
def test_also_a_standard_exception(error, standard):
    assert issubclass(error, errors.GroupwiseError)
    assert issubclass(error, standard)


def test_a_missing_extra_names_the_command_that_installs_it():
    assert str(errors.MissingExtraError("LoRA", "peft", "lora")) == (
        "LoRA needs the package 'peft'; install it with: pip install 'groupwise[lora]'"
    )


def test_several_missing_extras_are_one_command():
    error = errors.MissingExtraError("LoRA", "peft", "lora", ("a", "datasets", "hub"), ("b", "datasets", "hub"))
    assert "LoRA needs the package 'peft'; a needs the package 'datasets'; b needs" in str(error)
    assert str(error).endswith("install them with: pip install 'groupwise[lora,hub]'")


@pytest.mark.parametrize("more", [(), (("the hub", "datasets", "hub"),)])
def test_a_missing_extra_can_be_pickled(more):
    error = errors.MissingExtraError("LoRA", "peft", "lora", *more)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.MissingExtraError
    assert str(copy) == str(error)


def test_installed_packages_are_not_asked_for():
    errors.check_installed([("a", "pytest", "x"), ("b", "json", "y")])
    with pytest.raises(errors.MissingExtraError) as error:
        errors.check_installed(
            [("a", "pytest", "x"), ("b", "no-such-one", "y"), ("b", "no-such-two", "y"), ("c", "no-such-one", "z")]
        )
    assert str(error.value) == (
        "b needs the package 'no-such-one'; c needs the package 'no-such-one'; install them with: pip install "
        "'groupwise[y,z]'"
    )


def test_choices():
    errors.check_choice("fruit", "apple", ["apple", "pear"])
    with pytest.raises(errors.InputError, match=r"unknown fruit 'aple'; did you mean 'apple'\? \(allowed: 'apple', 'p"):
        errors.check_choice("fruit", "aple", ["apple", "pear"])
    with pytest.raises(errors.ConfigError, match=r"unknown fruit 7 \(allowed"):
        errors.check_choice("fruit", 7, ["apple"], errors.ConfigError)


def test_whole_numbers():
    assert errors.check_integer("n", 3, 3) == 3
    for value in (2, 3.0, True, "3", None):
        with pytest.raises(errors.InputError, match="n must be an integer of at least 3, got"):
            errors.check_integer("n", value, 3)
    with pytest.raises(errors.ConfigError):
        errors.check_integer("n", 0, 1, errors.ConfigError)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("latn.jsonl", "latin.jsonl"),
        ("latin.json", "latin.jsonl"),
        ("Rows.jsonl", "rows.jsonl"),
        ("latin.csv.gz", "latin.jsonl"),
        ("rows", "rows.jsonl"),
        ("row.parquet", "rows.parquet"),  # the same extension first
        ("missing.jsonl", None),  # shares only its extension
        ("a.jsonl", None),
        (".jsonl", None),
    ],
)
def test_the_nearest_file(name, nearest):
    assert errors.nearest_file(name, ["rows.parquet", "latin.jsonl", "rows.jsonl", ".git"]) == nearest
    assert errors.nearest_file(name, []) is None
