"""The command `groupwise`.

Each command is a function that adds a parser and sets the function that runs it. Commands import what they need when
they run, so that `groupwise --help` is fast. An error that groupwise raises becomes one line on stderr and exit status
2; an interrupted command exits with 130, as shells expect. Output that nobody reads (`groupwise … | head`) is no error.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata

from groupwise import __version__
from groupwise.cli.common import Command, Commands, format_examples, say_error
from groupwise.cli.control import add_control
from groupwise.cli.evaluate import add_eval
from groupwise.cli.init import add_init
from groupwise.cli.models import add_models
from groupwise.cli.recipes import add_recipes
from groupwise.cli.sample import add_sample
from groupwise.cli.settings import split_settings
from groupwise.cli.train import add_check, add_train
from groupwise.errors import ConfigError, GroupwiseError, did_you_mean
from groupwise.plugins import load_plugin, plugin_names

# To add a command, write a function like `add_models` and list it here.
COMMANDS: tuple[Callable[[Commands], None], ...] = (
    add_train,
    add_check,
    add_eval,
    add_sample,
    add_recipes,
    add_init,
    add_models,
    add_control,
)

EXAMPLES = (
    "groupwise train quiz                    a tiny model learns a quiz, on a CPU",
    "groupwise init my-run                   a recipe, a reward and rows to start from",
    "groupwise train my-run/recipe.toml      train on them",
    "groupwise sample smollm2-135m 'Hello'   completions of a model",
)

# A package adds a command with such a function as an entry point of the group ``groupwise.commands``, under the
# command's name. These are the entry points of pyproject.toml, for a source tree that is not installed.
PLUGINS = {"usmle": "groupwise.cli.usmle:add_usmle"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: that of the process) and return the exit status."""
    _keep_freed_memory()
    _replace_closed_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = argparse.Namespace()
    try:
        arguments = _parse(words)
        run: Command = arguments.run
        return run(arguments)
    except GroupwiseError as error:
        say_error(error)
        return 2
    except KeyboardInterrupt:
        say_error(getattr(arguments, "interrupted", "interrupted"))
        return 130
    except BrokenPipeError:
        return 1
    finally:
        _flush()


def _replace_closed_streams() -> None:
    """Write to nowhere if standard output or error is closed (`>&-`); the next opened file would get its number."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for the rest of the process


def _flush() -> None:
    """Flush the output here: at the end of the process a closed pipe would be reported by Python."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # what is still buffered goes there
        except (OSError, ValueError):  # a full disk, or a stream that was closed in Python
            pass


def _keep_freed_memory() -> None:
    """Let PyTorch keep freed memory for 10 s.

    PyTorch's builds for ARM allocate with mimalloc, which returns freed memory to the system after 10 ms; taking it
    again costs a tenth of a training step. The variable is read when torch is loaded.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("MIMALLOC_PURGE_DELAY", "10000")


def _parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="groupwise",
        usage="groupwise COMMAND …",
        description="Train language models with group-relative policy optimization (GRPO).",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(takes_settings=False)
    parser.add_argument("--version", action="version", version=f"groupwise {__version__}", help="show the version")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", prog="groupwise", required=True)
    for add in COMMANDS:
        add(commands)
    name = words[0] if words else ""
    if name not in commands.choices:
        plugins = plugin_names("groupwise.commands", PLUGINS)
        parser.epilog = "\n".join([f"commands of plug-ins: {', '.join(plugins)}", "", *_last_lines()])
        if name in plugins:
            load_plugin("groupwise.commands", PLUGINS, name, "command")(commands)
        elif not words:
            parser.print_help()
            parser.exit()
        elif not name.startswith("-"):
            near = did_you_mean(name, [*commands.choices, *plugins])
            listed = ", ".join([*commands.choices, *plugins])
            raise ConfigError(f"there is no command {name!r}{near} (commands: {listed})")
    settings: list[tuple[str, str | None]] = []
    command = commands.choices.get(name)
    if command is not None and command.get_default("takes_settings"):
        words[1:], settings = split_settings(words[1:], command._option_string_actions)
    arguments, rest = parser.parse_known_args(words)
    if rest and arguments.takes_settings:
        raise ConfigError(f"{rest[0]!r} is not understood; settings are given as --section.key VALUE")
    if rest:
        hint = "; an algorithm's settings follow its name, as in --algo grpo-fast:lr=0.01" if name == "control" else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    arguments.settings = settings
    return arguments


def _last_lines() -> list[str]:
    """The end of the help: where to start, and where to read on."""
    return [
        *format_examples(EXAMPLES).splitlines(),
        "",
        "`groupwise COMMAND --help` describes a command, `groupwise train --help all` the settings.",
        *_documentation(),
    ]


def _documentation() -> list[str]:
    """The URL of the docs, if the metadata of the installed package has one."""
    try:
        urls = metadata("groupwise").get_all("Project-URL") or []
    except PackageNotFoundError:
        return []
    return [f"Documentation: {url.split(',', 1)[1].strip()}" for url in urls if url.startswith("Documentation,")]
