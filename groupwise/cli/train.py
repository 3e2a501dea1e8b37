"""`groupwise train`, `check` and `eval`: what a recipe is for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.cli.common import Commands, add, console
from groupwise.errors import ConfigError

if TYPE_CHECKING:
    from groupwise.config import Recipe

RECIPE_HELP = "a recipe in TOML (recipes/ has some), or the recipe.json of an earlier run"
SETTINGS_HELP = "any setting may be given as --section.key VALUE; `--help` lists them all"


class HelpWithSettings(argparse.Action):
    """`--help` that also explains every setting of a recipe; they are read from the recipe's own classes."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show this help, with every setting, and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.print_help()
        sys.stdout.write(settings_help())
        parser.exit()


def add_train(commands: Commands) -> None:
    train = _add_with_settings(
        commands, "train", _train, "train a model by a recipe; Ctrl-C finishes the step and saves"
    )
    train.add_argument("--resume", action="store_true", help="go on with the run in run.folder, or the newest one")
    train.add_argument("--overwrite", action="store_true", help="delete a run that is in run.folder already")


def add_check(commands: Commands) -> None:
    check = _add_with_settings(
        commands,
        "check",
        _check,
        "load a recipe's data and model, show every setting and what it will need; no training",
    )
    check.add_argument("--quick", action="store_true", help="do not time a small batch, so there is no time estimate")


def add_eval(commands: Commands) -> None:
    evaluate = _add_with_settings(commands, "eval", _eval, "measure a model on a recipe's held-out rows")
    evaluate.add_argument(
        "--answers", type=Path, metavar="FILE", help="write every answer with its grades, as JSON lines"
    )


def _add_with_settings(commands: Commands, name: str, run: Any, help_text: str) -> argparse.ArgumentParser:
    parser = add(commands, name, run, help_text, add_help=False)
    parser.add_argument("-h", "--help", action=HelpWithSettings)
    parser.add_argument("recipe", metavar="RECIPE", type=Path, help=RECIPE_HELP)
    parser.set_defaults(takes_settings=True)
    parser.usage = f"groupwise {name} RECIPE [--section.key VALUE …] [options]"
    return parser


def _train(arguments: argparse.Namespace) -> int:
    recipe = _recipe(arguments)
    from groupwise.train.display import make_display
    from groupwise.train.trainer import Trainer

    with make_display() as display:
        trainer = Trainer(
            recipe,
            display=display,
            base=arguments.recipe.parent,
            resume=arguments.resume,
            overwrite=arguments.overwrite,
        )
        return trainer.run().exit_status


def _check(arguments: argparse.Namespace) -> int:
    recipe = _recipe(arguments)
    from groupwise.train.estimate import describe_run

    out = console()
    for line in describe_run(recipe, base=arguments.recipe.parent, timed=not arguments.quick):
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


def _eval(arguments: argparse.Namespace) -> int:
    recipe = _recipe(arguments)
    from rich.table import Table

    from groupwise.train.held_out import evaluate_recipe

    found, metric = evaluate_recipe(recipe, base=arguments.recipe.parent)
    out = console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("metric", "value", "95 % interval", "without an answer"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    names = [name for name in found.metrics if f"{name}_low" in found.metrics]
    for name in names:
        interval = found.interval(name)
        none = found.metrics.get(f"{name}_no_answer")
        table.add_row(
            f"{name} *" if name == metric else name,
            f"{interval.estimate:.4f}",
            f"{interval.low:.4f} – {interval.high:.4f}",
            "" if none is None else f"{none:.1%}",
        )
    out.print(table)
    answered = len(found.answers)
    length, cut = found.metrics["mean_length"], found.metrics["truncated"]
    out.print(
        f"{answered:,} answers by {recipe.model.source}: {length:.1f} tokens on average, {cut:.1%} cut off",
        markup=False,
        highlight=False,
    )
    if arguments.answers is not None:
        import json

        from groupwise.rundir import write_bytes

        lines = "".join(json.dumps(answer, ensure_ascii=False) + "\n" for answer in found.answers)
        write_bytes(arguments.answers, lines.encode())
    return 0


def _recipe(arguments: argparse.Namespace) -> Recipe:
    from groupwise.config import load_recipe

    return load_recipe(arguments.recipe, parse_settings(arguments.settings))


def parse_settings(words: Sequence[str]) -> dict[str, Any]:
    """``--section.key value`` and ``--section.key=value`` as dotted settings; a switch without a value means true."""
    from groupwise.config import parse_override

    found: dict[str, Any] = {}
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        if not word.startswith("--") or word == "--":
            raise ConfigError(f"{word!r} is not understood; settings are given as --section.key VALUE")
        name, equals, text = word[2:].partition("=")
        if not equals:
            text = waiting.pop(0) if waiting and not waiting[0].startswith("--") else "true"
        name = name.replace("-", "_")
        if name in found:
            raise ConfigError(f"--{name} is given twice")
        found[name] = parse_override(name, text)
    return found


def settings_help() -> str:
    """Every setting with its default and its sentence, section by section."""
    import textwrap

    from groupwise.config import setting_names

    lines = ["\nsettings (in the recipe as [section] key = value, here as --section.key VALUE):\n"]
    section = None
    for name, field in setting_names():
        own = name.rpartition(".")[0]
        if own != section:
            section = own
            lines.append(f"\n  [{section}]\n" if section else "")
        default = field.get_default(call_default_factory=True)
        shown = (
            {None: "none", True: "true", False: "false"}.get(default, default)
            if not isinstance(default, (list, dict))
            else default
        )
        text = f"{field.description or ''} (default: {shown})" if shown not in ([], {}) else field.description or ""
        wrapped = textwrap.fill(text, 112, initial_indent="      ", subsequent_indent="      ")
        lines.append(f"  --{name}\n{wrapped}\n")
    return "".join(lines)
