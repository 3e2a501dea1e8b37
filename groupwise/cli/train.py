"""`groupwise train` and `check`, and helpers for commands that take a recipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.cli.common import Commands, add, console
from groupwise.cli.settings import parse_settings, settings_help

if TYPE_CHECKING:
    from groupwise.config import Recipe

RECIPE_HELP = "a recipe in TOML (recipes/ has some), or the recipe.json of an earlier run"


class HelpWithSettings(argparse.Action):
    """`--help` that also lists every setting of a recipe."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show this help, with every setting, and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.print_help()
        sys.stdout.write(settings_help())
        parser.exit()


def add_train(commands: Commands) -> None:
    summary = "train a model with a recipe; Ctrl-C finishes the step and saves"
    train = add_with_settings(commands, "train", _train, summary)
    for option, help_text in (
        ("--resume", "continue the run in run.folder, or the newest one of this recipe's file"),
        ("--allow-changes", "with --resume: accept other rows, rewards or another model"),
        ("--overwrite", "delete an existing run in run.folder"),
    ):
        train.add_argument(option, action="store_true", help=help_text)


def add_check(commands: Commands) -> None:
    summary = "load data and model, show every setting, estimate memory and time; no training"
    check = add_with_settings(commands, "check", _check, summary)
    check.add_argument("--quick", action="store_true", help="skip the time estimate, which runs a small batch")


def add_with_settings(commands: Commands, name: str, run: Any, help_text: str) -> argparse.ArgumentParser:
    parser = add(commands, name, run, help_text, add_help=False)
    parser.add_argument("-h", "--help", action=HelpWithSettings)
    parser.add_argument("recipe", metavar="RECIPE", type=Path, help=RECIPE_HELP)
    parser.set_defaults(takes_settings=True)
    parser.usage = f"groupwise {name} RECIPE [--section.key VALUE …] [options]"
    return parser


def _train(arguments: argparse.Namespace) -> int:
    recipe = recipe_of(arguments)
    from groupwise.rundir.run import MARKER
    from groupwise.training.display import make_display
    from groupwise.training.store.run_folder import RECIPE
    from groupwise.training.trainer import Trainer

    with make_display() as display:
        in_run = arguments.recipe.name == RECIPE and (arguments.recipe.parent / MARKER).exists()
        trainer = Trainer(
            recipe,
            display=display,
            folder=arguments.recipe.parent if in_run and arguments.resume and not recipe.run.folder else None,
            resume=arguments.resume,
            overwrite=arguments.overwrite,
            recipe_file=arguments.recipe.name,
            allow_changes=arguments.allow_changes,
        )
        return trainer.run().exit_status


def _check(arguments: argparse.Namespace) -> int:
    recipe = recipe_of(arguments)
    from groupwise.training.preflight import describe_run

    out = console()
    for line in describe_run(recipe, timed=not arguments.quick):
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    from groupwise.config import load_recipe

    return load_recipe(arguments.recipe, parse_settings(arguments.settings))
