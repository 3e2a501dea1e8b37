"""`groupwise train` and `check`, and helpers for commands that take a recipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.cli.common import Commands, add, make_status, say
from groupwise.cli.parser import integer_of_at_least
from groupwise.cli.settings import parse_settings, section_help, short_help
from groupwise.distributed.launch import is_main_process, is_rank, launch, restarts
from groupwise.errors import ConfigError

if TYPE_CHECKING:
    from groupwise.config import Recipe
    from groupwise.training.display import Display

RECIPE_HELP = "a packaged recipe (`groupwise recipes`), a recipe in TOML, or the recipe.json of an earlier run"


FLAGS = {
    "resume": "continue the run in run.folder, or the newest one of this recipe's file",
    "allow_changed": "with --resume: accept other rows, another model, or changed source files",
    "overwrite": "delete an existing run in run.folder",
}


class HelpWithSettings(argparse.Action):
    """`--help` with the usual settings and the sections; `--help SECTION` shows a section, `--help all` everything."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        help_text = "show this help, or the settings of a section, or of `all`"
        super().__init__(option_strings, dest, nargs="?", metavar="SECTION", help=help_text)

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, topic: Any, option: Any = None) -> None:
        if topic is None:
            examples, parser.epilog = parser.epilog, None
            text = f"{parser.format_help()}{short_help(parser.prog.split()[-1])}\n{examples}\n"
        else:
            text = section_help(topic)
        parser._print_message(text, sys.stdout)
        parser.exit()


def add_train(commands: Commands) -> None:
    summary = "train a model with a recipe; Ctrl-C finishes the step and saves"
    examples = (
        "groupwise train quiz",
        "groupwise train recipe.toml --model.source HuggingFaceTB/SmolLM2-135M-Instruct --train.steps 200",
        "groupwise train recipe.toml --resume",
        "groupwise train recipe.toml --processes 8",
    )
    train = add_with_settings(commands, "train", _train, summary, examples)
    for flag, help_text in FLAGS.items():
        option = f"--{flag.replace('_', '-')}"
        train.add_argument(option, action="store_true", help=help_text)
    processes = "number of processes that share the work, one for each GPU (docs/several-gpus.md); default: 1"
    train.add_argument("--processes", type=integer_of_at_least(1), metavar="N", default=1, help=processes)
    train.set_defaults(interrupted="stopped at once; the last checkpoint, if there is one, goes on with --resume")


def add_check(commands: Commands) -> None:
    summary = "check a recipe: settings, data, model, memory and time; no training"
    examples = ("groupwise check recipe.toml", "groupwise check quiz --quick --sampling.max_new_tokens 64")
    check = add_with_settings(commands, "check", _check, summary, examples)
    check.add_argument("--quick", action="store_true", help="do not sample, score and time a small batch")
    check.add_argument("--all", action="store_true", help="show all settings, not only those that were chosen")


def add_with_settings(
    commands: Commands, name: str, run: Any, help_text: str, examples: Sequence[str]
) -> argparse.ArgumentParser:
    parser = add(commands, name, run, help_text, add_help=False, examples=examples)
    parser.add_argument("-h", "--help", action=HelpWithSettings)
    parser.add_argument("recipe", metavar="RECIPE", type=Path, help=RECIPE_HELP)
    parser.set_defaults(takes_settings=True)
    parser.usage = f"groupwise {name} RECIPE [--section.key VALUE …] [options]"
    return parser


def _train(arguments: argparse.Namespace) -> int:
    from groupwise.training.display import Display, make_display

    # First, because the imports below take seconds.
    with make_display() if is_main_process() and arguments.processes == 1 else Display() as display:
        recipe = recipe_of(arguments)
        if arguments.processes > 1:
            return _launch(arguments, recipe)
        from groupwise.training.store.run_folder import nothing_to_resume

        folder = _run_folder(arguments, recipe)
        if folder is not None and arguments.resume and not arguments.allow_changed:
            finished = nothing_to_resume(recipe, folder)
            if finished is not None:
                display.say(finished)
                return 0
        load_libraries(recipe, display)
        from groupwise.training.trainer import Trainer

        trainer = Trainer(
            recipe,
            display=display,
            folder=folder,
            resume=arguments.resume,
            overwrite=arguments.overwrite,
            recipe_file=recipe_file_name(arguments.recipe),
            allow_changed=arguments.allow_changed,
        )
        return trainer.run().exit_status


def _launch(arguments: argparse.Namespace, recipe: Recipe) -> int:
    """Start the processes that train, each of which runs this command without --processes."""
    if is_rank():
        raise ConfigError(
            "--processes starts the processes itself; leave it out under torchrun, which has --nproc-per-node"
        )
    from groupwise.training.early_checks import check_names, check_processes

    _run_folder(arguments, recipe)  # an error once, not in every process
    check_names(recipe, training=True)
    check_processes(recipe, arguments.processes)
    from groupwise.model.device import gpu_count, usable_cpus

    number, gpus = arguments.processes, gpu_count()
    if recipe.model.device in ("auto", "cuda") and 0 < gpus < number:
        raise ConfigError(
            f"--processes {number} needs as many GPUs, and this machine has {gpus}; use --processes {gpus}, or train "
            "on its CPU with --model.device cpu"
        )
    command = ["train", str(arguments.recipe)]
    command += [f"--{name}" if text is None else f"--{name}={text}" for name, text in arguments.settings]
    command += [f"--{flag.replace('_', '-')}" for flag in FLAGS if getattr(arguments, flag)]
    return launch(number, command, {"OMP_NUM_THREADS": str(max(1, usable_cpus() // number))})


def _run_folder(arguments: argparse.Namespace, recipe: Recipe) -> Path | None:
    """The folder of the run: the one to resume, the one that the recipe names, or None for a new one below runs/."""
    from groupwise.rundir.run import check_unused, holds_run
    from groupwise.training.store.run_folder import RECIPE, find_run

    chosen = None if recipe.run.folder is None else Path(recipe.run.folder)
    if restarts():
        return chosen  # the trainer goes on with the run that was begun
    if arguments.resume:
        in_run = arguments.recipe.name == RECIPE and holds_run(arguments.recipe.parent)
        return find_run(
            recipe, chosen or (arguments.recipe.parent if in_run else None), recipe_file_name(arguments.recipe)
        )
    if chosen is not None and not (arguments.overwrite and holds_run(chosen)):
        check_unused(chosen)
    return chosen


def recipe_file_name(path: Path) -> str:
    """The name by which the runs of a recipe are found again; several folders may have a recipe.toml."""
    return f"{path.resolve().parent.name}/{path.name}" if path.name == "recipe.toml" else path.name


def _check(arguments: argparse.Namespace) -> int:
    with make_status() as display:
        recipe = recipe_of(arguments)
        load_libraries(recipe, display)
        from groupwise.training.preflight import describe_run

        lines = list(describe_run(recipe, timed=not arguments.quick, all_settings=arguments.all, display=display))
    for line in lines:
        say(line)
    return 0


def load_libraries(recipe: Recipe, display: Display, *, training: bool = True) -> None:
    """Check what can be checked at once, then load PyTorch and transformers, which takes seconds and is shown."""
    from groupwise.training.early_checks import check_names

    check_names(recipe, training=training)
    display.stage("loading PyTorch")
    import torch  # noqa: F401

    display.stage("loading transformers")
    import groupwise.model.handle  # noqa: F401


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    from groupwise.config import load_recipe
    from groupwise.packaged import find_recipe

    arguments.recipe = find_recipe(arguments.recipe)  # a packaged recipe has the same file name from every folder
    return load_recipe(arguments.recipe, parse_settings(arguments.settings, arguments.parser.prog.split()[-1]))
