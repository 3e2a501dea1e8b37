"""The training loops, and a run with its files.

Edit `CONFIG` and run ``python -m groupwise.control.main``, or use `groupwise control train | compare | play`.
"""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from groupwise.control.algorithms import GRPOAgent, PPOAgent, make_agent, play_out
from groupwise.control.environments import HELD_OUT, Environments, make_environments, shape_of
from groupwise.control.models import (
    BEST_FILE,
    MODEL_FORMAT,
    STATE_FILE,
    load_weights,
    read_model,
    write_model,
    write_torch,
)
from groupwise.control.play import play
from groupwise.control.settings import Config, PPOSettings, config_of
from groupwise.control.utils import GRPOBuffer, LivePlotter, PPOBuffer, Shape
from groupwise.errors import CheckpointError, ConfigError, GroupwiseError, check_choice
from groupwise.rundir import RunDir, StopRequest, package_versions, stop_on_signals, write_csv
from groupwise.terminal import write_text
from groupwise.text import fixed, one_line

CONFIG: dict[str, Any] = {
    "mode": "train",  # "train" the algorithms one after the other and let them play; or only "play" trained ones
    "environment": "CartPole-v1",
    "algorithms": ["grpo", "ppo"],  # presets: grpo, grpo-fast, ppo, ppo-fast; "grpo-fast:lr=0.003"
    "seed": 0,
    "steps": 500_000,  # environment steps for each, at most
    "stop_when_solved": True,
    "live_plot": True,  # in a window; without a display, an image file in the folder
    "folder": "runs/control",
}

CONFIG_FILE, PROGRESS_FILE, RESULT_FILE = "config.json", "progress.csv", "result.json"
MEASURED = ("env_steps", "cpu_seconds", "greedy_return", "sampled_return")  # in every row of the progress
ProgressRow = dict[str, float]  # an evaluation and the mean metrics of the updates before it
OnProgress = Callable[[ProgressRow], None]
Metrics = dict[str, float]
Updates = Iterator[tuple[int, Metrics]]  # the steps and the metrics of each update


def grpo_updates(agent: GRPOAgent, environments: Environments, rng: np.random.Generator) -> Updates:
    """Per update: play groups of complete episodes, learn from them, and yield the steps taken and the metrics.

    All episodes of an update run at once; one that has ended drops out.
    """
    settings = agent.settings
    number = settings.groups * settings.group_size
    buffer = GRPOBuffer(number)
    while True:
        seeds = rng.integers(HELD_OUT, size=settings.groups if settings.same_start else number)
        seeds = seeds.repeat(number // len(seeds))
        noise = rng.integers(HELD_OUT, size=number).tolist() if settings.independent_noise else None
        members, taken = np.arange(number), 0
        states = environments.reset(members, seeds.tolist(), noise)
        while len(members):
            actions, logps = agent.get_action(states)
            steps = environments.step(members, actions)
            buffer.store(states, actions, steps.rewards, logps, members)
            taken += len(members)
            states, done = steps.observations, steps.done
            if done.any():
                buffer.end_episode(*members[done].tolist())
                members, states = members[~done], states[~done]
        yield taken, agent.update(buffer)


def ppo_updates(agent: PPOAgent, environments: Environments, rng: np.random.Generator) -> Updates:
    """Per update: take steps in every environment, learn from them, and yield the steps taken and the metrics."""
    settings = agent.settings
    members = np.arange(settings.environments)
    states = environments.reset(members, rng.integers(HELD_OUT, size=len(members)).tolist())
    buffer = PPOBuffer()
    returns, lengths = np.zeros(len(members)), np.zeros(len(members))
    while True:
        ended: list[tuple[float, float]] = []
        for _ in range(settings.steps // settings.environments):
            actions, logps = agent.get_action(states)
            steps = environments.step(members, actions)
            buffer.store(states, actions, steps.rewards, steps.observations, logps, steps.terminated, steps.truncated)
            states = steps.observations
            returns, lengths = returns + steps.rewards, lengths + 1
            if steps.done.any():
                done = members[steps.done]
                ended += zip(returns[done], lengths[done], strict=True)
                returns[done], lengths[done] = 0, 0
                states = states.copy()  # the buffer keeps the states that ended the episodes
                states[done] = environments.reset(done, rng.integers(HELD_OUT, size=len(done)).tolist())
        metrics = agent.update(buffer)
        if ended:
            metrics["train_return"], metrics["episode_length"] = (float(x) for x in np.mean(ended, axis=0))
        yield settings.steps, metrics


@dataclass
class TrainingProgress:
    """The counters and results of a run, saved in its checkpoint."""

    update: int = 0
    env_steps: int = 0
    cpu_seconds: float = 0.0
    at_threshold: int = 0  # the last evaluations in a row that reached the threshold
    solved_at: tuple[int, float] | None = None  # environment steps and CPU seconds
    best: tuple[float, float] | None = None  # greedy and sampled return
    rows: list[ProgressRow] = field(default_factory=list)  # of progress.csv
    seen: list[Metrics] = field(default_factory=list)  # of the updates since the last row


def train(
    config: Config, folder: Path, *, resume: bool = False, overwrite: bool = False, report: OnProgress | None = None
) -> Training:
    """Train with ``config`` and write config.json, progress.csv, result.json and the models to ``folder``.

    ``report`` is called with each row of progress.csv; on resuming also with the existing ones. Ctrl-C ends the run
    after the current update and saves it. ``resume`` continues from the checkpoint: GRPO to the same bits as without
    the stop, PPO with new episodes, because the state of an environment cannot be saved. Training uses one thread,
    which is fastest for such small networks and makes the weights independent of the number of threads.
    """
    report = report or (lambda row: None)
    with _one_thread():
        training = Training(config)  # checks the environment before the folder is created
        with RunDir.resume(folder) if resume else RunDir.create(folder, overwrite=overwrite) as run:
            if resume:
                training.restore(run)
                for row in training.progress.rows:
                    report(row)
            else:
                run.write_json(CONFIG_FILE, config.model_dump(mode="json"))
            with stop_on_signals(lambda message: None) as stopping:
                training.run(run, stopping, report)
    return training


class Training:
    """An agent, its environments and its progress."""

    def __init__(self, config: Config) -> None:
        settings, name, options = config.settings, config.environment, config.options
        number = settings.environments if isinstance(settings, PPOSettings) else settings.groups * settings.group_size
        self.config, self.progress, self.exit_status = config, TrainingProgress(), 0
        self.environments = make_environments(name, number, options)
        self.evaluation = make_environments(name, config.starts, options)
        self.threshold = _threshold(config, self.environments.shape)
        self.agent = make_agent(self.environments.shape, settings, config.seed)
        self.rng = np.random.default_rng(config.seed)
        if isinstance(self.agent, GRPOAgent):
            self._updates = grpo_updates(self.agent, self.environments, self.rng)
        else:
            self._updates = ppo_updates(self.agent, self.environments, self.rng)
        self._versions = package_versions(("torch", "gymnasium", "numpy"))
        self._remember_generators()

    def run(self, run: RunDir, stopping: StopRequest, report: OnProgress) -> None:
        """Update, evaluate and save until the budget is used up or a stop is requested."""
        progress, config = self.progress, self.config
        try:
            if self._evaluation_is_due:
                report(self.evaluate(run))
            while not self.is_over:
                started = time.process_time()
                steps, metrics = next(self._updates)
                progress.cpu_seconds += time.process_time() - started  # without evaluations
                progress.update += 1
                progress.env_steps += steps
                progress.seen.append(metrics)
                self._remember_generators()
                run.metrics.record(progress.update, {"env_steps": progress.env_steps, **metrics})
                if self._evaluation_is_due:
                    report(self.evaluate(run))
                if progress.update % config.save_every == 0:
                    self._write_model(run.path / "models" / f"update-{progress.update}.pt")
                    self.save(run)
                if stopping:
                    break
        except Exception:
            if progress.rows:
                self.save(run)
            raise
        self.save(run)
        self.exit_status = stopping.exit_status
        if self.is_over:
            run.write_json(RESULT_FILE, self._result())

    @property
    def is_over(self) -> bool:
        solved = self.config.stop_when_solved and self.progress.solved_at is not None
        return solved or self.progress.env_steps >= self.config.steps

    @property
    def _evaluation_is_due(self) -> bool:
        """Whether to evaluate: at the start, every ``evaluate_every`` steps, and at the end."""
        progress = self.progress
        if not progress.rows:
            return True
        last = progress.rows[-1]
        enough = progress.env_steps >= last["env_steps"] + self.config.evaluate_every
        return progress.update > last["update"] and (self.is_over or enough)

    def evaluate(self, run: RunDir) -> ProgressRow:
        """Play from the held-out starts, add a row to progress.csv and save the model if it is the best so far."""
        run.check_in_place()
        progress = self.progress
        seeds = range(HELD_OUT, HELD_OUT + self.config.starts)
        greedy, sampled = (
            float(play_out(self.agent, self.evaluation, seeds, greedy=is_greedy).mean()) for is_greedy in (True, False)
        )
        row: ProgressRow = {
            "update": progress.update,
            "env_steps": progress.env_steps,
            "cpu_seconds": progress.cpu_seconds,
            "greedy_return": greedy,
            "sampled_return": sampled,
        }
        names = dict.fromkeys(name for metrics in progress.seen for name in metrics)
        row |= {name: float(np.mean([values[name] for values in progress.seen if name in values])) for name in names}
        progress.rows.append(row)
        progress.seen.clear()
        reached = self.threshold is not None and greedy >= self.threshold
        progress.at_threshold = progress.at_threshold + 1 if reached else 0
        if progress.at_threshold == 2 and progress.solved_at is None:
            progress.solved_at = progress.env_steps, progress.cpu_seconds
        if progress.best is None or (greedy, sampled) > progress.best:
            progress.best = greedy, sampled
            self._write_model(run.path / BEST_FILE)
        write_csv(run.path / PROGRESS_FILE, progress.rows)
        return row

    def close(self) -> None:
        self.environments.close()
        self.evaluation.close()

    def _about(self) -> dict[str, Any]:
        """The configuration, versions and scores of the current weights: only plain values."""
        return {
            "format": MODEL_FORMAT,
            "config": self.config.model_dump(mode="json"),
            "versions": self._versions,
            "scores": self.progress.rows[-1],
        }

    def _write_model(self, path: Path) -> None:
        write_model(path, self.agent.state_dict(), self._about())

    def save(self, run: RunDir) -> None:
        """Write the checkpoint: the model, the optimizer, the generators and the progress after the last update."""
        run.check_in_place()
        state = {
            "weights": self.agent.state_dict(),
            "optimizer": self.agent.optimizer.state_dict(),
            "generators": json.dumps(self._generators),
            "progress": asdict(self.progress),
        }
        write_torch(run.path / STATE_FILE, self._about() | state)

    def restore(self, run: RunDir) -> None:
        """Load the checkpoint of a run with the same configuration; see `check_same_config`."""
        path = run.path / STATE_FILE
        saved = read_model(path)
        config = self.config.model_dump(mode="json")
        check_same_config(saved["config"], config, run.path)
        load_weights(self.agent, saved, path)
        try:
            self.agent.optimizer.load_state_dict(saved["optimizer"])
            for generator, state in zip((self.rng, self.agent.generator), json.loads(saved["generators"]), strict=True):
                generator.bit_generator.state = state
            self.progress = _read_progress(saved["progress"])
        except Exception as error:  # torch and NumPy raise many kinds for parts that are missing or of wrong types
            reason = f"{type(error).__name__}: {one_line(str(error))[:200]}"
            raise CheckpointError(f"{path} is damaged ({reason}); start the run again with --overwrite") from error
        self._remember_generators()
        run.metrics.rewind(self.progress.update)
        (run.path / RESULT_FILE).unlink(missing_ok=True)  # the result of a smaller budget
        run.write_json(CONFIG_FILE, config)

    def _remember_generators(self) -> None:
        """Keep the state of the generators, so that a failed update can be repeated on resuming."""
        self._generators = [g.bit_generator.state for g in (self.rng, self.agent.generator)]

    def outcome(self) -> str:
        """The result of the run as a sentence."""
        progress = self.progress
        last = progress.rows[-1]
        greedy, sampled = last["greedy_return"], last["sampled_return"]
        text = f"return {greedy:g} greedy and {sampled:g} sampled after {progress.env_steps:,} steps"
        if self.threshold is None:
            return text
        if progress.solved_at is None:
            return f"{text}, not solved (that is {self.threshold:g} twice in a row)"
        steps, seconds = progress.solved_at
        return f"{text}, solved after {steps:,} steps and {seconds:.2f} CPU seconds"

    def _result(self) -> dict[str, Any]:
        progress, last = self.progress, self.progress.rows[-1]
        result = {name: last[name] for name in ("env_steps", "cpu_seconds", "greedy_return", "sampled_return")}
        return {**result, "best": progress.best, "threshold": self.threshold, "solved_at": progress.solved_at}


def _read_progress(values: Mapping[str, Any]) -> TrainingProgress:
    """The progress of a checkpoint; a ValueError if a part of it has the wrong type."""
    progress = TrainingProgress(**values)
    counts = (progress.update, progress.env_steps, progress.at_threshold)
    rows = [*progress.rows, *progress.seen]
    numbers = [progress.cpu_seconds, *(progress.best or ()), *(progress.solved_at or ())]
    numbers += [number for row in rows for number in row.values()]
    if not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError("its counters are not numbers")
    if not progress.rows or not all(name in row for row in progress.rows for name in ("update", *MEASURED)):
        raise ValueError("its evaluations are incomplete")
    if not all(type(number) in (int, float) for number in numbers):
        raise ValueError("its results are not numbers")
    for pair in (progress.best, progress.solved_at):
        if pair is not None and len(pair) != 2:
            raise ValueError("its results are incomplete")
    return progress


def check_same_config(saved: Mapping[str, Any], config: Mapping[str, Any], folder: Path) -> None:
    """A run continues only with the configuration it was started with, except for its budget and checkpoints."""
    for name in sorted(set(config) - {"steps", "stop_when_solved", "save_every"}):
        if config[name] != saved.get(name):
            raise ConfigError(
                f"{folder} was started with {name} = {saved.get(name)!r}, not {config[name]!r}; choose another folder"
            )


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread and no oneDNN, whose overhead is larger than the work for such small networks."""
    threads, one_dnn = torch.get_num_threads(), torch.backends.mkldnn.enabled
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = one_dnn
        torch.set_num_threads(threads)


def read_progress(path: Path) -> list[ProgressRow]:
    """The rows of a progress.csv, without empty cells."""
    try:
        with open(path, newline="") as file:
            rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    except (OSError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    for number, row in enumerate(rows, 1):
        if missing := [name for name in MEASURED if name not in row]:
            raise CheckpointError(f"{path} is damaged: its row {number} has no {missing[0]}; train this run again")
    return rows


def main(config: Mapping[str, Any] = CONFIG) -> None:
    """Train the algorithms of ``config`` one after the other with a live plot, then let them play."""
    check_choice("mode", config["mode"], ("train", "play"), ConfigError)
    folder = Path(config["folder"])
    common = {name: config[name] for name in ("environment", "seed", "steps", "stop_when_solved")}
    runs = {
        name: (config_of(algorithm=name, **common), folder / name.replace(":", "_")) for name in config["algorithms"]
    }
    if config["mode"] == "train":
        first, _ = next(iter(runs.values()))
        with closing(make_plotter(first, folder / "live.png", window=config["live_plot"])) as plotter:

            def report(name: str, row: ProgressRow) -> None:
                plotter.add(name, row)
                _print(f"{name:12} {format_row(row)}")

            for name, (run, path) in runs.items():
                training = train(run, path, overwrite=True, report=partial(report, name))
                _print(f"{name}: {training.outcome()}")
                if training.exit_status:
                    sys.exit(training.exit_status)
    video = folder / "play.gif"
    returns = play([path for _, path in runs.values()], out=video)
    _print(f"{video} shows them from the same first state; returns: {', '.join(f'{value:g}' for value in returns)}")


def make_plotter(config: Config, image: Path, *, window: bool) -> LivePlotter:
    """A live plot for runs on the environment of ``config``."""
    threshold = _threshold(config, shape_of(config.environment, config.options))
    return LivePlotter(image, title=config.environment, threshold=threshold, window=window)


def _threshold(config: Config, shape: Shape) -> float | None:
    return shape.threshold if config.threshold is None else config.threshold


def format_row(row: ProgressRow) -> str:
    """A row of progress as a line of text."""
    return (
        f"{row['env_steps']:9,.0f} steps {row['cpu_seconds']:7.2f} CPU s   "
        f"greedy {fixed(row['greedy_return'], '8.2f'):>8}   sampled {fixed(row['sampled_return'], '8.2f'):>8}"
    )


def _print(line: str) -> None:
    write_text(f"{line}\n")


if __name__ == "__main__":
    try:
        main()
    except GroupwiseError as error:
        sys.exit(f"groupwise: {one_line(str(error))}")
