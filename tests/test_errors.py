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
    assert str(errors.MissingExtraError("drawing", "matplotlib", "plot")) == (
        "drawing needs the package 'matplotlib'; install it with: pip install 'groupwise[plot]'"
    )


def test_a_missing_extra_can_be_pickled():
    error = errors.MissingExtraError("drawing", "matplotlib", "plot")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.MissingExtraError
    assert str(copy) == str(error)


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
