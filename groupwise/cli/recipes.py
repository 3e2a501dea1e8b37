"""`groupwise recipes`: the packaged recipes; list, show, copy."""

from __future__ import annotations

import argparse
import shlex
import textwrap
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.cli.common import Commands, add, console, say
from groupwise.cli.models import size
from groupwise.cli.new_files import write_new_files
from groupwise.errors import did_you_mean
from groupwise.packaged import packaged_recipe, packaged_recipes, recipes_folder
from groupwise.terminal import write_text

if TYPE_CHECKING:
    from groupwise.config import Recipe

GPU_PARAMETERS = 1e9  # training a model of this size takes more memory and time than most CPUs have
GPU_WORK = 1e14  # floating-point operations of a run: more than about an hour on a CPU


def add_recipes(commands: Commands) -> None:
    examples = ("groupwise recipes", "groupwise recipes show quiz", "groupwise recipes copy format my-format")
    recipes = add(
        commands, "recipes", _list, "list the packaged recipes and what they need; show, copy", examples=examples
    )
    recipes.usage = "groupwise recipes [list | show NAME | copy NAME [FOLDER]]"
    actions = recipes.add_subparsers(title="actions", metavar="ACTION", prog="groupwise recipes")
    recipes.suggest_action = _suggest_action
    add(actions, "list", _list, "list the packaged recipes and what they need")
    show = add(actions, "show", _show, "print a recipe", examples=examples[1:2])
    copy = add(actions, "copy", _copy, "copy a recipe with the files that it uses, to change it", examples=examples[2:])
    for action in (show, copy):
        action.add_argument("name", metavar="NAME", help="the name of a packaged recipe")
    copy.add_argument(
        "folder", nargs="?", type=Path, metavar="FOLDER", help="default: a new folder of the recipe's name"
    )


def _suggest_action(word: str) -> str:
    """A recipe's name in the place of an action is most likely to be shown."""
    recipes = packaged_recipes()
    name = word.removesuffix(".toml")
    if name not in recipes and not did_you_mean(word, ("list", "show", "copy")):
        name = next(iter(get_close_matches(name, recipes, n=1, cutoff=0.75)), "")
    return f"; did you mean `groupwise recipes show {name}`?" if name in recipes else ""


def _list(arguments: argparse.Namespace) -> int:
    from groupwise.config import load_recipe

    out = console()
    recipes = packaged_recipes()
    indent = max(map(len, recipes)) + 2
    for name, path in recipes.items():
        needs = ", ".join(describe_needs(load_recipe(path))) or "nothing else"
        for text, first in ((summary_of(path), name), (f"needs {needs}", "")):
            lines = textwrap.wrap(text, max(40, out.width - indent), break_on_hyphens=False, break_long_words=False)
            for number, line in enumerate(lines):
                start = (first if number == 0 else "").ljust(indent)
                out.print(start + line, soft_wrap=True, style=None if first else "dim")
    out.print("\ngroupwise train NAME trains one, groupwise recipes copy NAME copies it")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    write_text(packaged_recipe(arguments.name).read_text(encoding="utf-8"))
    return 0


def _copy(arguments: argparse.Namespace) -> int:
    path = packaged_recipe(arguments.name)
    folder = arguments.folder or Path(arguments.name)
    files = {name: (path.parent / name).read_bytes() for name in files_of(path)}
    for written in write_new_files(folder, files):
        say(f"wrote {written}")
    say(f"next: groupwise train {shlex.quote(str(folder / path.name))}")
    return 0


def summary_of(path: Path) -> str:
    """The first comment line of a recipe."""
    with path.open(encoding="utf-8") as lines:
        return next((line.strip("# \n") for line in lines if line.startswith("#")), "")


def files_of(path: Path) -> list[str]:
    """A recipe and the files of its folder that it uses, by their paths in that folder."""
    from groupwise.config import load_recipe

    folder, companion = path.parent, path.with_suffix(".py")  # what the recipe's comments suggest, as another task
    files = {path, *([companion] if companion.is_file() else [])}
    for text in _texts(load_recipe(path).model_dump()):
        for name in (text, text.rpartition(":")[0]):  # a file, or file.py:function
            if name and Path(name).is_relative_to(folder):
                found = Path(name)
                files |= {file for file in found.rglob("*") if file.is_file()} if found.is_dir() else {found}
    return sorted(str(file.relative_to(folder)) for file in files if file.is_file())


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _texts(entry)


def describe_needs(recipe: Recipe) -> Iterator[str]:
    """What training with a recipe needs: weights and their size, data, extras, a GPU."""
    from groupwise.data.read import is_hub_id
    from groupwise.model.weights import CATALOGUE
    from groupwise.training.extras import groups_by_similarity, recipe_needs

    sources = [recipe.model.source, *([recipe.grouping.embedder] if groups_by_similarity(recipe) else [])]
    for source in sources:
        if source in CATALOGUE:
            yield f"{source} ({size(CATALOGUE[source].download_bytes)})"
        elif source != "tiny":
            yield source
    for source in dict.fromkeys([*_texts(recipe.data.train), *_texts(recipe.preference.train)]):
        if is_hub_id(source):
            yield f"{source} from the hub"
        elif not Path(source).is_relative_to(recipes_folder()):
            yield f"the file {source}"
    extras = dict.fromkeys(need.extra for need in recipe_needs(recipe))
    if extras:
        yield f"pip install 'groupwise[{','.join(extras)}]'"
    if _is_for_a_gpu(recipe):
        yield "a GPU"


def _is_for_a_gpu(recipe: Recipe) -> bool:
    from groupwise.model.weights import CATALOGUE

    entry = CATALOGUE.get(recipe.model.source)
    if entry is None:
        return recipe.model.source != "tiny"
    prompts = (recipe.train.steps or 0) * recipe.train.prompts_per_step
    tokens = prompts * recipe.sampling.samples_per_prompt * recipe.sampling.max_new_tokens
    work = 8 * entry.parameters * tokens  # 2 per weight and token to sample it, 6 to learn from it
    return entry.parameters > GPU_PARAMETERS or work > GPU_WORK
