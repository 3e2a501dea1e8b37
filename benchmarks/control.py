"""CartPole-v1: the control presets against Stable-Baselines3's PPO, in steps and CPU seconds until solved.

Usage::

    python benchmarks/control.py                                             # ten seeds of every contender
    python benchmarks/control.py --seeds 3 --only ppo-fast,sb3-tuned
    python benchmarks/control.py --first-seed 10 --only ppo-fast,grpo-fast   # ten not used to tune the presets
    python benchmarks/control.py --json control.json                         # also write every evaluation

All are evaluated in the same way: the greedy return on the same 20 held-out starts, after the first update that ends at
least 2,048 environment steps after the previous evaluation. Solved means a mean of 475 at two evaluations in a row;
steps and CPU seconds are counted up to the second one, without the evaluations. Everything runs on one thread. The
contenders take turns seed by seed; compare the ratios. A short warm-up run of each is not counted.

A run that is not solved within its budget counts as infinite; its last update is completed. If neither side of a ratio
is solved, the ratio is 0, to the disadvantage of groupwise.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.update({f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")})  # read by the imports

import numpy as np
import torch

from groupwise.control.algorithms import play_out
from groupwise.control.environments import HELD_OUT, make_environments
from groupwise.control.main import train
from groupwise.control.settings import config_of
from groupwise.rundir import package_versions
from groupwise.stats import Interval

ENVIRONMENT, SOLVED, STARTS, EVERY = "CartPole-v1", 475.0, 20, 2048
RL_ZOO = {"n_steps": 32, "batch_size": 256, "n_epochs": 20, "gae_lambda": 0.8, "gamma": 0.98, "ent_coef": 0.0}
SCHEDULE = 100_000  # steps in which RL Zoo's learning rate and clip range fall to 0


@dataclass
class Outcome:
    """The result of one run; each row is an evaluation: environment steps, CPU seconds and greedy return."""

    contender: str
    seed: int
    budget: int
    env_steps: int = 0
    cpu_seconds: float = 0.0
    solved_at: tuple[int, float] | None = None
    rows: list[tuple[int, float, float]] = field(default_factory=list)

    @property
    def to_solve(self) -> tuple[float, float]:
        """Environment steps and CPU seconds."""
        return self.solved_at or (math.inf, math.inf)

    def __str__(self) -> str:
        status = "not solved by" if self.solved_at is None else "solved after"
        return f"{status} {self.env_steps:,} steps and {self.cpu_seconds:.2f} CPU seconds"


Outcomes = dict[str, list[Outcome]]  # by contender, one for each seed
Ratios = dict[tuple[str, str], dict[str, Interval]]  # by (SB3, groupwise) and by statistic
Claims = dict[str, tuple[bool, str]]  # by claim: whether it holds, and the figure
STATISTICS = ("ratio of medians", "median of the seeds' ratios")

# --- the contenders --------------------------------------------------------------------------------------------------


def run_groupwise(contender: str, seed: int, budget: int) -> Outcome:
    evaluation = {"evaluate_every": EVERY, "starts": STARTS, "threshold": SOLVED, "stop_when_solved": True}
    config = config_of(environment=ENVIRONMENT, algorithm=contender, seed=seed, steps=budget, **evaluation)
    with tempfile.TemporaryDirectory() as temporary:
        training = train(config, Path(temporary) / "run")
    training.close()
    if training.exit_status:
        raise KeyboardInterrupt
    progress = training.progress
    rows = [(int(row["env_steps"]), row["cpu_seconds"], row["greedy_return"]) for row in progress.rows]
    return Outcome(contender, seed, budget, progress.env_steps, progress.cpu_seconds, progress.solved_at, rows)


def run_sb3(contender: str, seed: int, budget: int) -> Outcome:
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    def falling(start: float) -> Callable[[float], float]:
        """From ``start`` to 0 in `SCHEDULE` steps; SB3 passes the remaining share of the budget."""
        return lambda left: start * max(0.0, 1 - (1 - left) * budget / SCHEDULE)

    tuned = contender == "sb3-tuned"
    tuning: dict[str, Any] = {**RL_ZOO, "learning_rate": falling(1e-3), "clip_range": falling(0.2)}
    environments = make_vec_env(ENVIRONMENT, n_envs=8 if tuned else 1, seed=seed)
    model = PPO("MlpPolicy", environments, seed=seed, device="cpu", verbose=0, **(tuning if tuned else {}))
    outcome = Outcome(contender, seed, budget)
    model.learn(budget, callback=evaluation_callback(outcome))
    environments.close()
    return outcome


def evaluation_callback(outcome: Outcome) -> Any:
    """An SB3 callback that evaluates between updates, as groupwise does, outside the measured time."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Evaluation(BaseCallback):
        def _on_training_start(self) -> None:
            self.held_out = make_environments(ENVIRONMENT, STARTS)
            self.started = time.process_time()

        def _on_rollout_start(self) -> None:  # after an update
            outcome.env_steps = self.model.num_timesteps
            outcome.cpu_seconds += time.process_time() - self.started
            is_over = outcome.env_steps >= outcome.budget
            if not outcome.rows or is_over or outcome.env_steps >= outcome.rows[-1][0] + EVERY:
                self._evaluate()
            self.started = time.process_time()

        def _evaluate(self) -> None:
            player: Any = self
            greedy = float(play_out(player, self.held_out, range(HELD_OUT, HELD_OUT + STARTS), greedy=True).mean())
            outcome.rows.append((outcome.env_steps, outcome.cpu_seconds, greedy))
            if len(outcome.rows) > 1 and min(row[2] for row in outcome.rows[-2:]) >= SOLVED:
                outcome.solved_at = outcome.env_steps, outcome.cpu_seconds

        def get_action(self, states: np.ndarray, **_: Any) -> tuple[np.ndarray, None]:
            """The method of an agent that `play_out` calls."""
            return self.model.predict(states, deterministic=True)[0], None

        def _on_step(self) -> bool:
            return outcome.solved_at is None  # False ends the training

        def _on_training_end(self) -> None:
            if outcome.solved_at is None:
                self._on_rollout_start()
            self.held_out.close()

    return Evaluation()


CONTENDERS = dict.fromkeys(("ppo-fast", "ppo", "grpo-fast", "grpo"), run_groupwise)
CONTENDERS |= dict.fromkeys(("sb3-default", "sb3-tuned"), run_sb3)


def measure(names: list[str], seeds: range, budgets: dict[str, int]) -> Outcomes:
    say = partial(print, file=sys.stderr, flush=True)
    for name in names:
        say(f"warming up {name}")
        CONTENDERS[name](name, 0, EVERY)
    outcomes: Outcomes = {name: [] for name in names}
    for seed in seeds:
        for name in names:
            outcome = CONTENDERS[name](name, seed, budgets[name])
            outcomes[name].append(outcome)
            say(f"seed {seed}, {name}: {outcome}")
    return outcomes


# --- the tables ------------------------------------------------------------------------------------------------------


def figures_table(outcomes: Outcomes) -> list[str]:
    lines = [
        "| contender | solved | environment steps to solve, median [min, max] "
        "| CPU seconds to solve, median [min, max] | environment steps per CPU second |",
        "|---|---|---|---|---|",
    ]
    for name, runs in outcomes.items():
        solved = sum(run.solved_at is not None for run in runs)
        steps = spread([run.to_solve[0] for run in runs], ",.0f", runs[0].budget)
        seconds = spread([run.to_solve[1] for run in runs], ".2f", runs[0].budget)
        speed = np.median([run.env_steps / run.cpu_seconds for run in runs])
        lines.append(f"| {name} | {solved} of {len(runs)} | {steps} | {seconds} | {speed:,.0f} |")
    return lines


def spread(values: list[float], form: str, budget: int) -> str:
    never = f"not solved by {budget:,} steps"
    three = (float(np.median(values)), min(values), max(values))
    middle, low, high = (format(value, form) if math.isfinite(value) else never for value in three)
    return f"{middle} [{low}, {high}]" if low != never else never


def ratio_interval(theirs: list[Outcome], ours: list[Outcome], statistic: str) -> Interval:
    """A ratio of CPU seconds to solve, with a bootstrap interval over seeds.

    The bounds are bootstrap ratios without interpolation, since ratios may be infinite.
    """
    draws = np.random.default_rng(0).integers(len(theirs), size=(2000, len(theirs)))
    rows = np.vstack([np.arange(len(theirs)), draws])  # the first row is the original sample
    above, below = (np.array([run.to_solve[1] for run in runs])[rows] for runs in (theirs, ours))
    if statistic == "ratio of medians":
        above, below = (np.median(seconds, axis=1, keepdims=True) for seconds in (above, below))
    with np.errstate(invalid="ignore"):
        ratios = above / below
    ratios[np.isnan(ratios)] = 0.0  # infinite by infinite
    estimate, *drawn = np.median(ratios, axis=1).tolist()
    drawn.sort()
    return Interval(estimate, drawn[math.floor(0.025 * len(drawn))], drawn[math.ceil(0.975 * len(drawn)) - 1])


def compare(outcomes: Outcomes) -> Ratios:
    pairs = [(theirs, ours) for ours in ("ppo-fast", "grpo-fast") for theirs in ("sb3-default", "sb3-tuned")]
    return {
        (theirs, ours): {name: ratio_interval(outcomes[theirs], outcomes[ours], name) for name in STATISTICS}
        for theirs, ours in pairs
        if theirs in outcomes and ours in outcomes
    }


def ratios_table(ratios: Ratios) -> list[str]:
    lines = [f"| CPU seconds to solve | {' [95 %] | '.join(STATISTICS)} [95 %] |", "|---|---|---|"]
    return lines + [f"| {' / '.join(pair)} | {' | '.join(map(str, both.values()))} |" for pair, both in ratios.items()]


# --- the claims ------------------------------------------------------------------------------------------------------

SOLVES = {  # environment steps and CPU seconds within which nine of ten seeds must be solved
    "ppo-fast": (30_000, 5.0),
    "ppo": (math.inf, math.inf),
    "grpo-fast": (60_000, 1.0),
    "grpo": (500_000, math.inf),
}
TIMES_AS_FAST = {("sb3-default", "ppo-fast"): 5, ("sb3-tuned", "ppo-fast"): 2}  # by the ratio of medians


def check_claims(outcomes: Outcomes, ratios: Ratios) -> Claims:
    """The claims about the contenders that ran."""
    claims: Claims = {}
    for name in (name for name in SOLVES if name in outcomes):
        runs, (steps, seconds) = outcomes[name], SOLVES[name]
        solved = [run.solved_at for run in runs if run.solved_at]
        count = sum(after <= steps and took <= seconds for after, took in solved)
        needed = -(-9 * len(runs) // 10)
        limits = [f"{steps:,} steps"] * math.isfinite(steps) + [f"{seconds:g} CPU s"] * math.isfinite(seconds)
        within = f" within {' and '.join(limits)}" if limits else ""
        claims[f"{name} solves at least {needed} of {len(runs)} seeds{within}"] = count >= needed, f"it is {count}"
    for pair, times in TIMES_AS_FAST.items():
        if pair in ratios:
            ratio = ratios[pair]["ratio of medians"]
            claims[f"{pair[1]} is at least {times} times as fast as {pair[0]}"] = ratio.estimate >= times, str(ratio)
    return claims


def as_json(outcomes: Outcomes, ratios: Ratios, held: Claims, machine: str) -> str:
    def plain(interval: Interval) -> dict[str, float | None]:
        return {name: value if math.isfinite(value) else None for name, value in asdict(interval).items()}

    figures = {
        "runs": [asdict(run) for runs in outcomes.values() for run in runs],
        "ratios": {" / ".join(pair): {name: plain(r) for name, r in both.items()} for pair, both in ratios.items()},
        "promises": {words: {"holds": holds, "found": figure} for words, (holds, figure) in held.items()},
        "machine": machine,
    }
    return json.dumps(figures, indent=1) + "\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="how many seeds (default: 10)")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them (default: 0)")
    parser.add_argument("--only", metavar="NAME,...", help=f"only these contenders, of {', '.join(CONTENDERS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file; null is infinite")
    for name, steps in (("ppo", 100_000), ("grpo-fast", 60_000), ("grpo", 500_000)):
        runs = "of every PPO, SB3's too," if name == "ppo" else f"of {name}"
        words = f"environment steps after which a run {runs} is stopped (default: {steps:,})"
        parser.add_argument(f"--{name}-steps", type=int, default=steps, metavar="STEPS", help=words)
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(CONTENDERS)
    if unknown := [name for name in names if name not in CONTENDERS]:
        parser.error(f"--only: there is no contender {unknown[0]!r}; there are {', '.join(CONTENDERS)}")
    if args.first_seed < 0:
        parser.error("--first-seed must be 0 or more")
    if min(args.seeds, args.ppo_steps, args.grpo_fast_steps, args.grpo_steps) < 1:
        parser.error("seeds and steps must be 1 or more")
    if args.json and not args.json.parent.is_dir():
        parser.error(f"--json: there is no folder {args.json.parent}")
    args.names = [name for name in CONTENDERS if name in names]
    if find_spec("stable_baselines3") is None and any(name.startswith("sb3") for name in args.names):
        parser.error("stable_baselines3 is missing: pip install 'groupwise[dev]', or leave it out with --only")
    return args


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    budgets = dict.fromkeys(CONTENDERS, args.ppo_steps)
    budgets |= {"grpo-fast": args.grpo_fast_steps, "grpo": args.grpo_steps}
    try:
        outcomes = measure(args.names, range(args.first_seed, args.first_seed + args.seeds), budgets)
    except KeyboardInterrupt:
        raise SystemExit("stopped before the end: nothing to show") from None
    ratios = compare(outcomes)
    held = check_claims(outcomes, ratios)
    versions = package_versions(("torch", "numpy", "gymnasium", "stable_baselines3"))
    machine = f"{platform.system()} {versions.pop('machine')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; "
    machine += ", ".join(f"{name} {version}" for name, version in versions.items())
    print("\n".join(figures_table(outcomes)))
    if ratios:
        print("\n" + "\n".join(ratios_table(ratios)))
    print()
    for words, (holds, figure) in held.items():
        print(f"- {'holds' if holds else 'DOES NOT HOLD'}: {words} ({figure})")
    print(f"\n{ENVIRONMENT}, one thread; {machine}")
    if args.json:
        args.json.write_text(as_json(outcomes, ratios, held, machine))


if __name__ == "__main__":
    main()
