"""The command `groupwise`.

Each command is a function that adds a parser and sets the function that runs it. Commands import what they need when
they run, so that `groupwise --help` is fast. An error that groupwise raises becomes one line on stderr and exit status
2, and so do a wrong command line, a file that the system refuses and output that cannot be written; after a signal the
status is 128 + its number, as shells expect. Output that nobody reads (`groupwise … | head`) is no error: the command
ends quietly with 141, as a process that SIGPIPE ends. Any other error is one of groupwise itself: a traceback, and 1.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import NoReturn

from groupwise import __version__
from groupwise.cli.common import Command, Commands, format_examples, say_error
from groupwise.cli.control import add_control
from groupwise.cli.doctor import add_doctor
from groupwise.cli.evaluate import add_eval
from groupwise.cli.from_trl import add_from_trl
from groupwise.cli.init import add_init
from groupwise.cli.models import add_models
from groupwise.cli.parser import Parser
from groupwise.cli.plan import add_plan
from groupwise.cli.recipes import add_recipes
from groupwise.cli.replay import add_replay
from groupwise.cli.report import add_report
from groupwise.cli.sample import add_sample
from groupwise.cli.settings import parse_settings, split_settings
from groupwise.cli.train import add_check, add_train
from groupwise.cli.view import add_view
from groupwise.distributed.launch import is_main_process, is_rank, reports
from groupwise.errors import ConfigError, GroupwiseError, UserCodeError, did_you_mean
from groupwise.packaged import packaged_recipes
from groupwise.paths import path_reason, show_path
from groupwise.plugins import load_plugin, plugin_names
from groupwise.rundir.signals import SignalInterrupt, interrupt_on_signals
from groupwise.terminal import guard_process, write_text
from groupwise.text import error_reason, excerpt
from groupwise.user_code import describe_failure

# To add a command, write a function like `add_models` and list it here.
COMMANDS: tuple[Callable[[Commands], None], ...] = (
    add_train,
    add_check,
    add_plan,
    add_eval,
    add_doctor,
    add_sample,
    add_view,
    add_report,
    add_replay,
    add_recipes,
    add_init,
    add_models,
    add_from_trl,
    add_control,
)

EXAMPLES = (
    "groupwise train quiz                    a tiny model learns a quiz, on a CPU",
    "groupwise init my-run                   a recipe, a reward and rows to start from",
    "groupwise train my-run/recipe.toml      train on them",
    "groupwise view                          all runs in a browser, also while they train",
    "groupwise sample smollm2-135m 'Hello'   completions of a model",
)

BROKEN_PIPE = 141  # 128 + SIGPIPE
WRITE_ERRORS = (errno.EBADF, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
BUG = "this is an error of groupwise itself; please report it with the lines above"
ENDED = "code that is not groupwise's ended the command before it was finished"

# What other tools call some commands.
OTHER_NAMES = {
    "ask": "usmle ask",
    "dashboard": "view",
    "download": "models fetch",
    "evaluate": "eval",
    "generate": "sample",
    "help": "--help",
    "new": "init",
    "resume": "train RECIPE --resume",
    "run": "train",
    "version": "--version",
}

# A package adds a command with such a function as an entry point of the group ``groupwise.commands``, under the
# command's name. These are the entry points of pyproject.toml, for a source tree that is not installed.
PLUGINS = {"usmle": "groupwise.cli.usmle:add_usmle"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: that of the process) and return the exit status."""
    _keep_freed_memory()
    _prepare_streams()
    if argv is None:
        guard_process()
    end: SystemExit | None = None
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv), owns_process=argv is None)
    except SystemExit as error:  # of --help and --version
        status, end = 0, error
    problem = _flush()
    if problem is None and end is not None:
        raise end
    if problem is None or status:
        return status
    if isinstance(problem, BrokenPipeError):
        return BROKEN_PIPE
    say_error(_unwritten(problem))
    return 2


def _run(words: list[str], *, owns_process: bool) -> int:
    arguments = argparse.Namespace()
    try:
        with interrupt_on_signals():
            arguments = _parse(words)
            run: Command = arguments.run
            with _exits_reported():
                return run(arguments)
    except GroupwiseError as error:
        if owns_process and is_rank():  # torchrun ends all processes once one has failed: this one still has to say why
            with suppress(ValueError):
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if reports(error):
            say_error(error)
        return 2
    except KeyboardInterrupt as error:
        number = error.number if isinstance(error, SignalInterrupt) else signal.SIGINT
        name = f"{error}: " if isinstance(error, SignalInterrupt) else ""
        if is_main_process():
            say_error(f"{name}{getattr(arguments, 'interrupted', 'interrupted')}")
        return 128 + number
    except BrokenPipeError:
        return BROKEN_PIPE
    except Exception as error:
        sentence = _outside_cause(error)
        if sentence is None:
            with suppress(OSError):
                write_text(traceback.format_exc(), sys.stderr)
            say_error(f"{BUG}: {type(error).__name__}")
            return 1
        say_error(sentence)
        return 2


def _outside_cause(error: Exception) -> str | None:
    """The sentence for an error that a file, the system or the input caused; None for one of groupwise itself."""
    if isinstance(error, FileNotFoundError) and error.filename is None and not _has_current_folder():
        return "the current folder does not exist any more; change into another one"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{show_path(os.fsdecode(error.filename))} cannot be used: {path_reason(error)}"
    if isinstance(error, OSError):
        return _unwritten(error) if error.errno in WRITE_ERRORS else f"the system refused a call: {error_reason(error)}"
    if isinstance(error, ValueError) and str(error).startswith("embedded null"):
        return "a file name contains a NUL character, which no file name can have"
    if isinstance(error, UnicodeError):
        return f"a text is not valid Unicode: {error}"
    if isinstance(error, RecursionError):
        return "the input is nested too deeply"
    if isinstance(error, MemoryError):
        reason = f" ({error_reason(error)})" if str(error) else ""
        return (
            f"memory ran out{reason}; use fewer or shorter completions (train.batch_size, sampling.samples_per_prompt, "
            "sampling.max_new_tokens), or a smaller model"
        )
    return None


def _unwritten(error: OSError) -> str:
    return f"the output cannot be written: {'it is closed' if error.errno == errno.EBADF else error_reason(error)}"


def _has_current_folder() -> bool:
    try:
        os.getcwd()
    except OSError:
        return False
    return True


@contextmanager
def _exits_reported() -> Iterator[None]:
    """Within this block, code that ends the process is an error with status 2, whatever status it asks for.

    A user's environment, reward or task may call `sys.exit` or `os._exit`: with status 0, a command that is not
    finished would look like a success. Forked processes may exit as they like.
    """
    exit_now, command = os._exit, os.getpid()

    def report(status: int) -> NoReturn:
        if os.getpid() == command:
            caller = sys._getframe(1)
            say_error(f"{Path(caller.f_code.co_filename).name}, line {caller.f_lineno}: {ENDED}: os._exit({status})")
            _flush()
            status = 2
        exit_now(status)

    os._exit = report
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit, or a class of a user's own or of a compiled extension
        raise UserCodeError(f"{ENDED}: it {describe_failure(error)}") from error
    finally:
        os._exit = exit_now


def _prepare_streams() -> None:
    """Replace a standard stream that is closed (`>&-`): otherwise the next opened file would get its number.

    What is written to a closed output fails, as on a full disk; errors go nowhere. A character that the output's
    encoding does not have is written as an escape.
    """
    for name, mode, flag in (("stdin", "r", os.O_RDONLY), ("stdout", "w", os.O_RDONLY), ("stderr", "w", os.O_WRONLY)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.open(os.devnull, flag), mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _flush() -> OSError | None:
    """Flush the output here, and return what is wrong with it: at its end Python would print that as a traceback."""
    problem = None
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:  # a closed pipe, a full disk, a terminal that is gone
            problem = error if stream is sys.stdout or problem is None else problem
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # what is still buffered goes there
        except ValueError:  # a stream that was closed in Python
            pass
    return problem


def _keep_freed_memory() -> None:
    """Let PyTorch keep freed memory for 10 s.

    PyTorch's builds for ARM allocate with mimalloc, which returns freed memory to the system after 10 ms; taking it
    again costs a tenth of a training step. The variable is read when torch is loaded.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("MIMALLOC_PURGE_DELAY", "10000")


def _parse(words: list[str]) -> argparse.Namespace:
    _check_words(words)
    parser = Parser(
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
            names = [*commands.choices, *plugins]
            near = _suggest_command(words, commands.choices) or did_you_mean(name, names)
            raise ConfigError(f"there is no command {name!r}{near} (commands: {', '.join(names)})")
        elif name != "--" and name.partition("=")[0] not in parser._option_string_actions:
            raise ConfigError(f"{name} is not an option of groupwise; a command comes first: {parser.usage}")
    settings: list[tuple[str, str | None]] = []
    command = commands.choices.get(name)
    if command is not None and command.get_default("takes_settings"):
        words[1:], settings = split_settings(words[1:], command._option_string_actions)
        _check_options(command, settings)
    arguments, rest = parser.parse_known_args(words)
    if rest and arguments.takes_settings:
        parse_settings(settings, name)  # a setting of another library may be what has several values
        word = rest[0]
        is_setting = "." in word and not word.startswith("-") and not word.endswith(".toml")
        hint = f"; did you mean --{word}?" if is_setting else ""
        raise ConfigError(f"{word!r} is not understood; settings are given as --section.key VALUE{hint}")
    if rest:
        getattr(arguments, "parser", parser).unknown(rest)
    arguments.settings = settings
    return arguments


def _check_words(words: Sequence[str]) -> None:
    """Raise an error for a word that is not text: it could be neither printed nor written into a recipe."""
    for number, word in enumerate(words, start=1):
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"argument {number}, {excerpt(word)}, is not UTF-8; rename the file or type it anew"
            ) from None


def _check_options(command: Parser, settings: Sequence[tuple[str, str | None]]) -> None:
    """Raise an error for a misspelt option of a command, which looks like a setting."""
    for name, _ in settings:
        option = f"--{name.replace('_', '-')}"
        if get_close_matches(option, command.long_options(), cutoff=0.8):
            command.unknown([option])


def _suggest_command(words: list[str], commands: Mapping[str, Parser]) -> str:
    """The end of the sentence about an unknown command: an action of another one, or what a recipe is given to."""
    name, *rest = words
    actions = {command: parser.actions() for command, parser in commands.items()}
    near = get_close_matches(name, {action for names in actions.values() for action in names}, n=1, cutoff=0.75)
    if name in OTHER_NAMES:
        matches = [OTHER_NAMES[name]]
    elif name.endswith(".toml") or name in packaged_recipes():
        matches = [f"train {name}"]
    elif near and not get_close_matches(name, commands, n=1):
        matches = [f"{command} {near[0]}" for command, names in actions.items() if near[0] in names]
    else:
        return ""
    if len(matches) == 1 and rest and not rest[0].startswith("-") and len(matches[0].split()) == 2:
        matches = [f"{matches[0]} {shlex.join(rest)}"]  # can be pasted
    return f"; did you mean {' or '.join(f'`groupwise {match}`' for match in matches)}?"


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
