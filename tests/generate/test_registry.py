"""Generators by name, and what every generator has."""

from __future__ import annotations

import pytest
import torch

from groupwise import plugins
from groupwise.config import make_recipe
from groupwise.errors import ConfigError
from groupwise.generate import Engine, PlainGenerator, Sampling
from groupwise.generate.registry import make_generator
from groupwise.model import load_model, prepare
from groupwise.training.early_checks import check_names

HANDLE = prepare(load_model("tiny", device="cpu"))


def test_the_default_is_our_engine():
    generator = make_generator(make_recipe({"sampling": {"max_num_seqs": 7}}), HANDLE)
    assert isinstance(generator, Engine)
    assert (generator.handle, generator.max_num_seqs, generator.version) == (HANDLE, 7, 0)


def test_a_plug_in(monkeypatch):
    monkeypatch.setitem(plugins.BUILTIN_GENERATORS, "plain", "tests.generate.test_registry:make_plain")
    recipe = make_recipe({"sampling": {"generator": "plain"}})
    check_names(recipe)
    assert isinstance(make_generator(recipe, HANDLE), PlainGenerator)


def make_plain(recipe, handle, ranks):
    return PlainGenerator(handle)


def test_an_unknown_generator_is_refused_before_anything_is_loaded():
    recipe = make_recipe({"sampling": {"generator": "engin"}})
    for refuse in (check_names, lambda recipe: make_generator(recipe, HANDLE)):
        with pytest.raises(ConfigError, match=r"sampling\.generator.*'engin'.*engine"):
            refuse(recipe)


@pytest.mark.parametrize("kind", [Engine, PlainGenerator])
def test_each_token_has_the_version_of_its_weights(kind):
    generator = kind(HANDLE)
    for version in (0, 3):
        generator.update_weights(version)
        generator.check_health()
        rollout = generator.generate([[1, 2], [3]], 2, Sampling(max_new_tokens=4))
        assert torch.equal(rollout.versions, torch.full_like(rollout.ids, version, dtype=torch.int32))
    generator.close()
