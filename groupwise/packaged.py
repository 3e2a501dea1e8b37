"""The recipes that come with groupwise: where they are, and which of them a name means.

An installed package has them in ``groupwise/recipes``, a source tree in ``recipes`` beside the package. Nothing is ever
written there.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from groupwise.errors import ConfigError, did_you_mean, nearest_file
from groupwise.paths import FILE, FOLDER, kind_of

SUFFIX = ".toml"
SHOWN = 5  # recipes of a folder that an error lists
ROW_FILES = {".jsonl", ".parquet", ".csv"}  # which a user may take for a recipe


def recipes_folder() -> Path:
    """The folder of the packaged recipes."""
    package = Path(__file__).resolve().parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def packaged_recipes() -> dict[str, Path]:
    """The files of the packaged recipes by their names, in alphabetical order."""
    paths = sorted(recipes_folder().glob(f"*{SUFFIX}"), key=lambda path: path.stem)
    return {path.stem: path for path in paths}


def packaged_recipe(name: str) -> Path:
    """The file of a packaged recipe."""
    recipes = packaged_recipes()
    if name in recipes:
        return recipes[name]
    if name.endswith(SUFFIX) and Path(name).stem in recipes:
        raise ConfigError(f"a packaged recipe is named without {SUFFIX}: {Path(name).stem}")
    raise ConfigError(f"there is no packaged recipe {name!r}{did_you_mean(name, recipes)} (there are: {_listed()})")


def find_recipe(recipe: str | Path) -> Path:
    """The file that ``recipe`` means: a file of that path, else the packaged recipe of that name."""
    path = Path(recipe)
    if path.suffix.lower() in ROW_FILES:
        state = "holds rows" if os.path.exists(path) else "does not exist, and would hold rows"
        raise ConfigError(
            f"{path} {state}: a recipe is a TOML file. To train on rows, let `groupwise init FOLDER` write a recipe, "
            f"or add --data.train {path} to a recipe that you have"
        )
    kind = kind_of(path, ConfigError)
    if kind == FILE:
        return path
    recipes = packaged_recipes()
    if str(recipe) in recipes:
        return recipes[str(recipe)]
    if kind == FOLDER:
        inside = _files_in(path)
        likely = "recipe.toml" if "recipe.toml" in inside else inside[0] if len(inside) == 1 else None
        hint = f"give a recipe's file{f', such as one of {_shown(inside)}' if inside else ''}"
        hint = f"did you mean {path / likely}?" if likely else hint
        raise ConfigError(f"{path} is a folder, not a recipe; {hint}")
    if os.path.lexists(path):
        return path  # a broken link or a device: reading it says what is wrong
    raise ConfigError(f"there is no recipe {path}{_hint(path, recipes)}")


def _hint(path: Path, recipes: Collection[str]) -> str:
    """The end of the sentence about a recipe that does not exist: the nearest file, or those that there are."""
    folder = path.parent if os.path.isdir(path.parent) else Path()
    files = _files_in(folder)
    if path.stem in recipes:
        return f"; the packaged recipe is named without a folder and without {SUFFIX}: {path.stem}"
    if path.suffix in ("", SUFFIX) and (nearest := nearest_file(path.name, files)):
        return f"; did you mean {folder / nearest}?"
    if path.suffix not in ("", SUFFIX):
        return f"; a recipe is a {SUFFIX} file or the name of a packaged one: {_listed()}"
    near = did_you_mean(path.stem, recipes)
    if not os.path.isdir(path.parent):
        near = f": there is no folder {path.parent}{near}"
    here = "here" if folder == Path() else f"in {folder}"
    local = f"recipes {here}: {_shown(files)}; " if files and not near else ""
    return f"{near} ({local}packaged recipes: {_listed()})"


def _files_in(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.glob(f"*{SUFFIX}") if file.name != "pyproject.toml")


def _shown(files: Sequence[str]) -> str:
    return ", ".join(files[:SHOWN]) + (", …" if len(files) > SHOWN else "")


def _listed() -> str:
    return ", ".join(packaged_recipes())
