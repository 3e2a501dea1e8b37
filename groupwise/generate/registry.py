"""Generators by name: ``sampling.generator`` chooses one.

Another package adds one with an entry point of the group ``groupwise.generators``: a function that is called with the
recipe and the model, and returns a `Generator`.
"""

from __future__ import annotations

from collections.abc import Callable

from groupwise.config import Recipe
from groupwise.generate.types import Generator
from groupwise.model.handle import ModelHandle
from groupwise.plugins import BUILTIN_GENERATORS, GENERATORS, load_plugin

MakeGenerator = Callable[[Recipe, ModelHandle], Generator]


def make_generator(recipe: Recipe, handle: ModelHandle) -> Generator:
    """The recipe's generator, which samples with the weights of ``handle``. Close it at the end."""
    make: MakeGenerator = load_plugin(GENERATORS, BUILTIN_GENERATORS, recipe.sampling.generator, "sampling.generator")
    return make(recipe, handle)
