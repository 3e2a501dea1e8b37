"""The controller: training loops, what a run saves, comparing algorithms, watching one play.

The fifth document's third file. As the document imagines it, ``python -m groupwise.control.main`` does what `CONFIG`
says: edit it and run. `groupwise control train | compare | play` does the same from the command line.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from groupwise.control.algorithms import (
    GRPOAgent,
    GRPOSettings,
    PPOAgent,
    PPOSettings,
    checked,
    make_agent,
    play_out,
    settings_of,
)
from groupwise.control.comparison import ComparedRun, write_comparison
from groupwise.control.utils import (
    Array,
    Environments,
    GRPOBuffer,
    LivePlotter,
    PPOBuffer,
    SeededGymEnv,
    Shape,
    make_environments,
    write_film,
)
from groupwise.errors import CheckpointError, ConfigError, ControlError, GroupwiseError, check_choice
from groupwise.rundir import (
    RunDir,
    StopRequest,
    end_with_parent,
    interrupts_ignored,
    package_versions,
    read_json,
    stop_on_signals,
    write_bytes,
    write_csv,
)

CONFIG: dict[str, Any] = {
    "mode": "train",  # "train" the algorithms one after the other, then let them play; or only "play" what is there
    "environment": "CartPole-v1",
    "algorithms": ["grpo-fast", "ppo-fast"],  # grpo-paper, grpo-fast, ppo, ppo-fast; "grpo-fast:lr=0.003" changes one
    "seed": 0,
    "steps": 40_000,  # environment steps for each
    "live_plot": True,  # a window; a picture in the folder where there is no display
    "folder": "runs/control",
}

CONFIG_FILE, PROGRESS_FILE, RESULT_FILE = "config.json", "progress.csv", "result.json"
BEST_FILE, STATE_FILE, MODELS, MODEL_FORMAT = "best_model.pt", "state.pt", "models", 1
HELD_OUT = 2**30  # seeds from here on are for evaluation; training draws below
Row = dict[str, float]
Report = Callable[[Row], None]


class Config(BaseModel):
    """A run: everything that decides what it does. It is saved as config.json."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    environment: str = Field(default="CartPole-v1", description="a Gymnasium id, or MODULE:ID for one of your own")
    options: dict[str, Any] = Field(default={}, description="what the environment is made with")
    algorithm: str = Field(default="grpo-fast", description="a preset, with changes: grpo-fast:same_start=false")
    seed: int = Field(default=0, ge=0, lt=2**31, description="decides the weights, the first states and all sampling")
    steps: int = Field(default=100_000, ge=1, description="environment steps to train for; the last update is finished")
    evaluate_every: int = Field(default=2048, ge=1, description="environment steps between evaluations")
    starts: int = Field(default=20, ge=1, description="held-out first states that an evaluation plays")
    threshold: float | None = Field(
        default=None, description="the return that counts as solved (the environment's own)"
    )
    stop_when_solved: bool = Field(default=False, description="stop after two evaluations in a row at the threshold")
    save_every: int = Field(default=50, ge=1, description="updates between saved states")

    settings: GRPOSettings | PPOSettings = Field(discriminator="algorithm", description="what the algorithm stands for")


def config_of(**values: Any) -> Config:
    """A run's configuration; what cannot be used is a ConfigError. Settings that are not given are the algorithm's."""
    algorithm = values.get("algorithm", Config.model_fields["algorithm"].default)
    if "settings" not in values and isinstance(algorithm, str):
        values["settings"] = settings_of(algorithm).model_dump()
    return checked(Config, values)


# --- the training loops ----------------------------------------------------------------------------------------------


def grpo_updates(agent: GRPOAgent, environments: Environments, rng: np.random.Generator) -> Iterator[tuple[int, Row]]:
    """One update after another: play some groups of episodes to their ends, learn, tell the steps and what was seen.

    All episodes of an update run at once; one that has ended drops out.
    """
    settings = agent.settings
    number = settings.groups * settings.group_size
    buffer = GRPOBuffer(number)
    while True:
        seeds = rng.integers(HELD_OUT, size=settings.groups if settings.same_start else number)
        seeds = seeds.repeat(number // len(seeds))
        noise = rng.integers(HELD_OUT, size=number).tolist() if settings.independent_noise else None
        members = np.arange(number)
        states = environments.reset(members, seeds.tolist(), noise)
        while len(members):
            actions, logps = agent.get_action(states)
            steps = environments.step(members, actions)
            buffer.store(members, states=states, actions=actions, logps=logps, rewards=steps.rewards)
            states, done = steps.observations, steps.done
            if done.any():
                buffer.end_episode(*members[done].tolist())
                members, states = members[~done], states[~done]
        episodes = buffer.episodes()
        yield sum(len(episode["rewards"]) for episode in episodes), agent.update(episodes)


def ppo_updates(agent: PPOAgent, environments: Environments, rng: np.random.Generator) -> Iterator[tuple[int, Row]]:
    """One update after another: take some steps in every environment, learn, tell the steps and what was seen."""
    settings = agent.settings
    everyone = np.arange(settings.environments)
    states = environments.reset(everyone, rng.integers(HELD_OUT, size=len(everyone)).tolist())
    buffer = PPOBuffer()
    returns, lengths = np.zeros(len(everyone)), np.zeros(len(everyone))
    while True:
        ended: list[tuple[float, float]] = []
        for _ in range(settings.steps // settings.environments):
            actions, logps = agent.get_action(states)
            steps = environments.step(everyone, actions)
            buffer.store(states=states, actions=actions, logps=logps, next_states=steps.observations, **steps.ends())
            states = steps.observations
            returns, lengths = returns + steps.rewards, lengths + 1
            if steps.done.any():
                done = everyone[steps.done]
                ended += zip(returns[done], lengths[done], strict=True)
                returns[done], lengths[done] = 0, 0
                states = states.copy()  # the buffer keeps the states that ended the episodes
                states[done] = environments.reset(done, rng.integers(HELD_OUT, size=len(done)).tolist())
        seen = agent.update(buffer)
        if ended:
            seen["train_return"], seen["episode_length"] = (float(x) for x in np.mean(ended, axis=0))
        yield settings.steps, seen


# --- a run -----------------------------------------------------------------------------------------------------------


@dataclass
class Progress:
    """Where a run stands; it is saved with the weights, so that a run that was stopped can go on."""

    update: int = 0
    env_steps: int = 0
    cpu_seconds: float = 0.0
    at_threshold: int = 0  # evaluations in a row, up to now
    solved_at: tuple[int, float] | None = None  # environment steps and CPU seconds
    best: tuple[float, float] | None = None  # greedy and sampled return
    rows: list[Row] = field(default_factory=list)  # of progress.csv
    seen: list[Row] = field(default_factory=list)  # by the updates since the last of them


def train(
    config: Config, folder: Path, *, resume: bool = False, overwrite: bool = False, report: Report | None = None
) -> Training:
    """Train by ``config`` and leave config.json, progress.csv, result.json and the models in ``folder``.

    ``report`` is called with each row of progress.csv, on resuming also with those that are there. Ctrl-C ends a run
    after the update under way, with everything saved. ``resume`` goes on with what was saved: GRPO as if it had never
    stopped; PPO with new episodes, for what is inside an environment cannot be saved. One thread is used, which is
    fastest for networks this small, and gives the same weights wherever the process has more.
    """
    report = report or (lambda row: None)
    with _one_thread():
        training = Training(config)  # an environment that cannot be used is refused before there is a folder
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
    """An agent, its environments and how far it has come."""

    def __init__(self, config: Config) -> None:
        settings, name, options = config.settings, config.environment, config.options
        number = settings.environments if isinstance(settings, PPOSettings) else settings.groups * settings.group_size
        self.config, self.progress, self.exit_status = config, Progress(), 0
        self.environments = make_environments(name, number, options)
        self.evaluation = make_environments(name, config.starts, options)
        self.threshold = _threshold(config, self.environments.shape)
        self.agent = make_agent(self.environments.shape, settings, config.seed)
        self.rng = np.random.default_rng(config.seed)
        self._versions = package_versions(("torch", "gymnasium", "numpy"))
        self._mark()

    def run(self, run: RunDir, stopping: StopRequest, report: Report) -> None:
        """Update, evaluate and save until the steps are used up, or somebody asks for the end."""
        progress, config = self.progress, self.config
        try:
            if self._is_due:
                report(self.evaluate(run))
            for steps, seen, seconds in self._updates():
                progress.update += 1
                progress.env_steps += steps
                progress.cpu_seconds += seconds
                progress.seen.append(seen)
                self._mark()
                run.metrics.record(progress.update, {"env_steps": progress.env_steps, **seen})
                if self._is_due:
                    report(self.evaluate(run))
                if progress.update % config.save_every == 0:
                    write_model(run.path / MODELS / f"update-{progress.update}.pt", self.model())
                    self.save(run)
                if stopping or self.is_over:
                    break
        except Exception:
            if progress.rows:
                self.save(run)
            raise
        self.save(run)
        self.exit_status = stopping.exit_status
        if self.is_over:
            run.write_json(RESULT_FILE, self._result())

    def _updates(self) -> Iterator[tuple[int, Row, float]]:
        """Each update's steps, what it saw, and its CPU seconds: of sampling and learning, not of evaluating."""
        if isinstance(self.agent, GRPOAgent):
            updates = grpo_updates(self.agent, self.environments, self.rng)
        else:
            updates = ppo_updates(self.agent, self.environments, self.rng)
        while not self.is_over:
            started = time.process_time()
            steps, seen = next(updates)
            yield steps, seen, time.process_time() - started

    @property
    def is_over(self) -> bool:
        solved = self.config.stop_when_solved and self.progress.solved_at is not None
        return solved or self.progress.env_steps >= self.config.steps

    @property
    def _is_due(self) -> bool:
        """Whether to evaluate now: at the start, at the end and every so many steps; on resuming, if that failed."""
        progress = self.progress
        if not progress.rows:
            return True
        last = progress.rows[-1]
        enough = progress.env_steps >= last["env_steps"] + self.config.evaluate_every
        return progress.update > last["update"] and (self.is_over or enough)

    def evaluate(self, run: RunDir) -> Row:
        """Play from the held-out starts, add a row to progress.csv and keep the model if it is the best so far."""
        progress = self.progress
        seeds = range(HELD_OUT, HELD_OUT + self.config.starts)
        greedy, sampled = (
            float(play_out(self.agent, self.evaluation, seeds, greedy=how).mean()) for how in (True, False)
        )
        row: Row = {
            "update": progress.update,
            "env_steps": progress.env_steps,
            "cpu_seconds": progress.cpu_seconds,
            "greedy_return": greedy,
            "sampled_return": sampled,
        }
        names = dict.fromkeys(name for seen in progress.seen for name in seen)
        row |= {name: float(np.mean([seen[name] for seen in progress.seen if name in seen])) for name in names}
        progress.rows.append(row)
        progress.seen.clear()
        progress.at_threshold = progress.at_threshold + 1 if self._reached(greedy) else 0
        if progress.at_threshold == 2 and progress.solved_at is None:
            progress.solved_at = progress.env_steps, progress.cpu_seconds
        if progress.best is None or (greedy, sampled) > progress.best:
            progress.best = greedy, sampled
            write_model(run.path / BEST_FILE, self.model())
        write_csv(run.path / PROGRESS_FILE, progress.rows)
        return row

    def close(self) -> None:
        self.environments.close()
        self.evaluation.close()

    def _reached(self, greedy: float) -> bool:
        return self.threshold is not None and greedy >= self.threshold

    def model(self) -> dict[str, Any]:
        """The weights, and where they come from: tensors and plain values only."""
        return {
            "format": MODEL_FORMAT,
            "config": self.config.model_dump(mode="json"),
            "weights": self.agent.networks.state_dict(),
            "versions": self._versions,
            "scores": self.progress.rows[-1],
        }

    def save(self, run: RunDir) -> None:
        """What `restore` needs: the model, the optimizer, and the generators as they were between two updates."""
        more = {
            "optimizer": self.agent.optimizer.state_dict(),
            "generators": json.dumps(self._generators),
            "progress": asdict(self.progress),
        }
        write_model(run.path / STATE_FILE, self.model() | more)

    def restore(self, run: RunDir) -> None:
        """Go on with a run of the same configuration; only its end may be another."""
        saved = read_model(run.path / STATE_FILE)
        before, now = saved["config"], self.config.model_dump(mode="json")
        _check_same(before, now, run.path)
        _load_weights(self.agent, saved, run.path / STATE_FILE)
        self.agent.optimizer.load_state_dict(saved["optimizer"])
        for generator, state in zip((self.rng, self.agent.generator), json.loads(saved["generators"]), strict=True):
            generator.bit_generator.state = state
        self.progress = Progress(**saved["progress"])
        self._mark()
        run.metrics.rewind(self.progress.update)
        (run.path / RESULT_FILE).unlink(missing_ok=True)  # it told of another end
        run.write_json(CONFIG_FILE, now)

    def _mark(self) -> None:
        """Remember where the generators stand, so that an update that fails can be begun again."""
        self._generators = [g.bit_generator.state for g in (self.rng, self.agent.generator)]

    def outcome(self) -> str:
        """What the run came to, in words."""
        progress = self.progress
        greedy, sampled = (progress.rows[-1][f"{how}_return"] for how in ("greedy", "sampled"))
        words = f"return {greedy:g} greedy and {sampled:g} sampled after {progress.env_steps:,} steps"
        if self.threshold is None:
            return words
        if progress.solved_at is None:
            return f"{words}, not solved (that is {self.threshold:g} twice in a row)"
        steps, seconds = progress.solved_at
        return f"{words}, solved after {steps:,} steps and {seconds:.2f} CPU seconds"

    def _result(self) -> dict[str, Any]:
        """What the run came to."""
        progress, last = self.progress, self.progress.rows[-1]
        facts = {name: last[name] for name in ("env_steps", "cpu_seconds", "greedy_return", "sampled_return")}
        return {**facts, "best": progress.best, "threshold": self.threshold, "solved_at": progress.solved_at}


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """A run may go on with another end, and with nothing else."""
    for name in sorted(set(now) - {"steps", "stop_when_solved", "save_every"}):
        if now[name] != before.get(name):
            raise ConfigError(
                f"{folder} was begun with {name} = {before.get(name)!r}, not {now[name]!r}; choose another folder"
            )


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread and no oneDNN: for networks this small, what those two prepare takes longer than the work."""
    threads, one_dnn = torch.get_num_threads(), torch.backends.mkldnn.enabled
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = one_dnn
        torch.set_num_threads(threads)


def read_progress(path: Path) -> list[Row]:
    """The rows of a progress.csv; what a row has not is left out of it."""
    try:
        with open(path, newline="") as file:
            return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    except (OSError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def write_model(path: Path, model: Mapping[str, Any]) -> None:
    content = io.BytesIO()
    torch.save(dict(model), content)
    write_bytes(path, content.getvalue())


def read_model(path: Path) -> dict[str, Any]:
    """A saved model. Only tensors and plain values are loaded, so that a file of somebody else's can do no harm."""
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist; a run writes {BEST_FILE} at its first evaluation, and {STATE_FILE} every so many "
            "updates and when it is stopped"
        )
    try:
        model = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever the damage leads to
        raise CheckpointError(f"{path} is no model, or is damaged: {' '.join(str(error).split())[:200]}") from error
    parts = (model.get(name) for name in ("config", "weights")) if isinstance(model, dict) else (None,)
    if not all(isinstance(part, dict) for part in parts) or model.get("format") != MODEL_FORMAT:
        raise CheckpointError(f"{path} is not a model of format {MODEL_FORMAT}, the one this groupwise writes")
    return dict(model)


def load_agent(path: Path) -> tuple[Config, GRPOAgent | PPOAgent]:
    """The agent of a run folder (its best), or of a saved file, ready to act."""
    model = read_model(path / BEST_FILE if path.is_dir() else path)
    config = config_of(**model["config"])
    environment = SeededGymEnv(config.environment, config.options)
    environment.close()
    agent = make_agent(environment.shape, config.settings, config.seed)
    _load_weights(agent, model, path)
    return config, agent


def _load_weights(agent: GRPOAgent | PPOAgent, model: Mapping[str, Any], path: Path) -> None:
    try:
        agent.networks.load_state_dict(model["weights"])
    except RuntimeError as error:
        name = model["config"].get("environment")
        raise CheckpointError(f"{path} does not fit {name} as it is here: {error}") from error


# --- comparing -------------------------------------------------------------------------------------------------------


def compare(configs: Sequence[Config], folder: Path, *, jobs: int = 1, report: Callable[[str], None]) -> str:
    """Train every one of ``configs`` that is not finished in ``folder``, ``jobs`` at once; the comparison as Markdown.

    A run that was stopped goes on where it was. A run that fails does not stop the others.
    """
    for config in {(config.environment, config.algorithm): config for config in configs}.values():
        Training(config).close()  # whatever will be refused is refused before any work
    runs = [(config, _folder_of(folder, config)) for config in configs]
    todo = [(config, path) for config, path in runs if not _is_finished(config, path)]
    report(f"{len(configs)} runs, {len(configs) - len(todo)} of them finished already")
    failed: list[str] = []
    with ProcessPoolExecutor(jobs, get_context("spawn"), end_with_parent) as pool:
        with interrupts_ignored():  # Ctrl-C reaches a terminal's every process; those that start here leave it to this
            futures = {pool.submit(_train_one, config, path): _name_of(config) for config, path in todo}
        try:
            for number, future in enumerate(as_completed(futures), start=1):
                try:
                    outcome = future.result()
                except GroupwiseError as error:
                    outcome = f"failed: {error}"
                    failed.append(f"{futures[future]}: {error}")
                except BrokenProcessPool as error:
                    raise ControlError("a run's process was killed, for want of memory perhaps; try again") from error
                report(f"[{number} of {len(todo)}] {futures[future]}: {outcome}")
        except BaseException:
            for process in active_children():
                process.terminate()  # on which a run finishes its update, saves, and its process ends
            raise
    finished = [_read_run(config, path) for config, path in runs if _is_finished(config, path)]
    text = write_comparison(folder, finished, starts=configs[0].starts) if finished else ""
    if failed:
        raise ControlError(
            f"{len(failed)} of {len(configs)} runs failed; the others are compared, and the same command tries these "
            f"again. The first: {failed[0]}"
        )
    return text


def _train_one(config: Config, folder: Path) -> str:
    try:
        training = train(config, folder, resume=(folder / STATE_FILE).exists(), overwrite=True)
    except KeyboardInterrupt:
        os._exit(130)
    if training.exit_status:  # the pool may have handed out the next run already: nobody must begin it
        os._exit(training.exit_status)
    return training.outcome()


def _name_of(config: Config) -> str:
    return f"{config.environment}, {config.algorithm}, seed {config.seed}"


def _folder_of(folder: Path, config: Config) -> Path:
    environment, algorithm = (re.sub(r"[^\w.=-]+", "_", name) for name in (config.environment, config.algorithm))
    return folder / environment / algorithm / f"seed-{config.seed}"


def _is_finished(config: Config, folder: Path) -> bool:
    if not (folder / CONFIG_FILE).exists():
        return False
    before = read_json(folder / CONFIG_FILE)
    _check_same(before, config.model_dump(mode="json"), folder)
    if before["steps"] > config.steps:
        raise ConfigError(f"{folder} has had {before['steps']} steps, not {config.steps}; choose another folder")
    return before["steps"] == config.steps and (folder / RESULT_FILE).exists()


def _read_run(config: Config, folder: Path) -> ComparedRun:
    result = read_json(folder / RESULT_FILE)
    solved = result["solved_at"] and tuple(result["solved_at"])
    rows = read_progress(folder / PROGRESS_FILE)
    return ComparedRun(
        config.environment, config.algorithm, config.seed, rows, config.steps, result["threshold"], solved
    )


# --- play ------------------------------------------------------------------------------------------------------------


def play(paths: Sequence[Path], *, seed: int = HELD_OUT, out: Path | None = None) -> list[float]:
    """Let trained agents play one greedy episode from the same s0; their returns.

    With ``out``, a film of them side by side (.gif or .mp4); without, one agent in a window.
    """
    players = [load_agent(path) for path in paths]
    names = sorted({config.environment for config, _ in players})
    if len(names) > 1:
        raise ConfigError(f"side by side they must play one environment, not {' and '.join(names)}")
    render_mode = "rgb_array" if out else "human"
    films = []
    for config, agent in players:
        environment = SeededGymEnv(config.environment, config.options, render_mode=render_mode)
        films.append(list(_episode(environment, config.algorithm, agent, seed)))
        environment.close()
    if out:
        fps = environment.env.metadata.get("render_fps") or 30
        write_film(out, [[(frame, caption) for frame, caption, _ in film] for film in films], fps)
    return [film[-1][2] for film in films]


def _episode(
    environment: SeededGymEnv, name: str, agent: GRPOAgent | PPOAgent, seed: int
) -> Iterator[tuple[Array, str, float]]:
    """Each moment of a greedy episode: its picture, a caption and the return so far."""
    state, total, done, number = environment.reset(seed=seed), 0.0, False, 0
    frame = environment.render()
    if environment.env.render_mode == "rgb_array" and frame.ndim != 3:
        raise ControlError(f"{environment.name} draws no pictures (rgb_array) that a film could be made of")
    yield frame, name, total
    while not done:
        actions, _ = agent.get_action(state[None], greedy=True)
        state, reward, terminated, truncated = environment.step(actions[0])
        total, number, done = total + reward, number + 1, terminated or truncated
        yield environment.render(), f"{name}   step {number}   return {total:g}", total


# --- what the document imagines --------------------------------------------------------------------------------------


def main(config: Mapping[str, Any] = CONFIG) -> None:
    """Do what ``config`` says: train the algorithms one after the other and draw them, then let them play."""
    check_choice("mode", config["mode"], ("train", "play"), ConfigError)
    folder = Path(config["folder"])
    common = {name: config[name] for name in ("environment", "seed", "steps")}
    runs = {
        name: (config_of(algorithm=name, **common), folder / name.replace(":", "_")) for name in config["algorithms"]
    }
    if config["mode"] == "train":
        first, _ = next(iter(runs.values()))
        with plotter_of(first, folder / "live.png", window=config["live_plot"]) as plotter:
            for name, (run, path) in runs.items():
                training = train(run, path, overwrite=True, report=partial(_show, plotter, name))
                say(f"{name}: {training.outcome()}")
                if training.exit_status:
                    sys.exit(training.exit_status)
    film = folder / "play.gif"
    returns = play([path for _, path in runs.values()], out=film)
    say(f"{film} shows them from one first state; returns: {', '.join(f'{value:g}' for value in returns)}")


def plotter_of(config: Config, picture: Path, *, window: bool) -> LivePlotter:
    """A live plot for runs of that environment."""
    environment = SeededGymEnv(config.environment, config.options)
    environment.close()
    threshold = _threshold(config, environment.shape)
    return LivePlotter(picture, title=config.environment, threshold=threshold, window=window)


def _threshold(config: Config, shape: Shape) -> float | None:
    return shape.threshold if config.threshold is None else config.threshold


def _show(plotter: LivePlotter, algorithm: str, row: Row) -> None:
    plotter.add(algorithm, row)
    say(f"{algorithm:12} {line_of(row)}")


def line_of(row: Row) -> str:
    """A row of progress in words."""
    return (
        f"{row['env_steps']:9,.0f} steps {row['cpu_seconds']:7.2f} CPU s   "
        f"greedy {row['greedy_return']:8.2f}   sampled {row['sampled_return']:8.2f}"
    )


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except GroupwiseError as error:
        sys.exit(f"groupwise: {error}")
