"""Generators by name: ``sampling.generator`` chooses one.

Another package adds one with an entry point of the group ``groupwise.generators``: a function that is called with the
recipe, the model and the run's processes, and returns a `Generator`.
"""

from __future__ import annotations

from collections.abc import Callable

from groupwise.config import Recipe
from groupwise.distributed.ranks import Ranks
from groupwise.generate.sharded import ShardedGenerator
from groupwise.generate.types import Generator
from groupwise.model.handle import ModelHandle
from groupwise.plugins import BUILTIN_GENERATORS, GENERATORS, load_plugin

MakeGenerator = Callable[[Recipe, ModelHandle, Ranks], Generator]


def make_generator(recipe: Recipe, handle: ModelHandle, ranks: Ranks | None = None) -> Generator:
    """The recipe's generator, which samples with the weights of ``handle``, and can do so now. Close it at the end.

    With several ranks the prompts are divided among them, and all of them call it.
    """
    make: MakeGenerator = load_plugin(GENERATORS, BUILTIN_GENERATORS, recipe.sampling.generator, "sampling.generator")
    ranks = ranks or Ranks()
    with ranks.stage("starting the generator"):
        generator = make(recipe, handle, ranks)
        try:
            generator.check_health()
        except BaseException:
            generator.close()
            raise
    return generator if ranks.size == 1 else ShardedGenerator(generator, ranks, handle.sharded)
