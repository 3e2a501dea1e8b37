"""Train the runs of a comparison in parallel processes, then compare them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from pathlib import Path

from groupwise.control.comparison.read import read_run
from groupwise.control.comparison.write import write_comparison
from groupwise.control.main import (
    CONFIG_FILE,
    RESULT_FILE,
    Training,
    check_same_config,
    train,
)
from groupwise.control.models import STATE_FILE
from groupwise.control.settings import Config
from groupwise.errors import ConfigError, ControlError, GroupwiseError
from groupwise.rundir import end_with_parent, interrupts_ignored
from groupwise.rundir.files import read_object
from groupwise.terminal import guard_process
from groupwise.text import Say, plural


def compare(configs: Sequence[Config], folder: Path, *, jobs: int = 1, report: Say) -> str:
    """Train all ``configs`` that are not finished in ``folder``, ``jobs`` at a time; return the comparison as Markdown.

    A stopped run is continued. A run that fails does not stop the others.
    """
    for config in {(config.environment, config.algorithm): config for config in configs}.values():
        Training(config).close()  # refuse what cannot be trained before any work is done
    runs = [(config, _run_folder(folder, config)) for config in configs]
    unfinished = [(config, path) for config, path in runs if not _is_finished(config, path)]
    report(f"{plural(len(configs), 'run')}, {len(configs) - len(unfinished)} of them finished already")
    failed: list[str] = []
    with ProcessPoolExecutor(jobs, get_context("spawn"), _start_process) as pool:
        with interrupts_ignored():  # the workers are terminated below
            futures = {pool.submit(_train, config, path): config for config, path in unfinished}
        try:
            for number, future in enumerate(as_completed(futures), start=1):
                config = futures[future]
                name = f"{config.environment}, {config.algorithm}, seed {config.seed}"
                try:
                    outcome = future.result()
                except GroupwiseError as error:
                    outcome = f"failed: {error}"
                    failed.append(f"{name}: {error}")
                except BrokenProcessPool as error:
                    raise ControlError(
                        "the process of a run ended before the run did: it was killed, perhaps out of memory, or its "
                        "environment called os._exit; try again, with `groupwise control train` for its message"
                    ) from error
                report(f"[{number} of {len(unfinished)}] {name}: {outcome}")
        except BaseException:
            for process in active_children():
                process.terminate()  # its run finishes the update and saves
            raise
    finished = [read_run(config, path) for config, path in runs if _is_finished(config, path)]
    text = write_comparison(folder, finished, starts=configs[0].starts) if finished else ""
    if failed:
        raise ControlError(
            f"{len(failed)} of {len(configs)} runs failed; the others are compared, and the same command tries these "
            f"again. The first: {failed[0]}"
        )
    return text


def _start_process() -> None:
    end_with_parent()
    guard_process()


def _train(config: Config, folder: Path) -> str:
    try:
        training = train(config, folder, resume=(folder / STATE_FILE).exists(), overwrite=True)
    except KeyboardInterrupt:
        os._exit(130)
    if training.exit_status:  # end the process: the pool may have queued the next run for it already
        os._exit(training.exit_status)
    return training.outcome()


def _run_folder(folder: Path, config: Config) -> Path:
    environment, algorithm = (re.sub(r"[^\w.=-]+", "_", name) for name in (config.environment, config.algorithm))
    return folder / environment / algorithm / f"seed-{config.seed}"


def _is_finished(config: Config, folder: Path) -> bool:
    if not (folder / CONFIG_FILE).exists():
        return False
    saved = read_object(folder / CONFIG_FILE, steps=int)
    check_same_config(saved, config.model_dump(mode="json"), folder)
    if saved["steps"] > config.steps:
        raise ConfigError(
            f"{folder} was trained for {plural(int(saved['steps']), 'step')}, not {config.steps}; choose another folder"
        )
    return saved["steps"] == config.steps and (folder / RESULT_FILE).exists()
