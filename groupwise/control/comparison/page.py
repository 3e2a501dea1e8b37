"""A comparison as a page of Markdown: tables, each with a sentence that says what it means."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

from groupwise.control.comparison.pairwise_tests import (
    LEAST_SEEDS,
    MOST_FOR_ALL_PAIRS,
    SIGNIFICANT,
    PairwiseTest,
    duels_of_endings,
    duels_of_speed,
)
from groupwise.control.comparison.runs import MEASURES, Cells, Row, Run, algorithms_of, any_run, is_number
from groupwise.control.comparison.text import counted, escape, number, percent, short, signed
from groupwise.stats import Interval, bootstrap_interval, interquartile_mean, median_interval, proportion_interval

DIAGNOSTICS = {
    "zero_spread_groups": "zero-spread groups",
    "group_spread": "group spread",
    "clip_fraction": "clip fraction",
    "entropy": "entropy",
    "episode_length": "episode length",
    "approx_kl": "approximate KL",
}
WORDS = ("environment", "algorithm", "first", "second", "verdict")  # columns that are words, not numbers
UNITS = ("steps", "CPU seconds")
NONE = "–"


def page(cells: Cells, pictures: Mapping[str, str], starts: int | None = None) -> str:
    """The whole page. ``pictures`` are the names of each environment's picture beside it."""
    parts = [
        _compared(cells, starts),
        "In brackets: 95 % intervals; a figure without one was the same in every resampling of the runs. Steps and CPU "
        "seconds to a threshold are medians over the runs, of which one that was not solved counts as infinite; final "
        "returns are interquartile means of the last evaluations.",
    ]
    for environment, row in cells.items():
        picture = f"![returns on {escape(environment)}]({pictures[environment]})"
        parts += [f"## {escape(environment)}", _outcomes(row), picture]
    parts += [*_endings(duels_of_endings(cells)), *_speeds(duels_of_speed(cells)), *_diagnostics(cells)]
    return "\n\n".join(parts) + "\n"


def _interval(interval: Interval, told: Callable[[float], str]) -> str:
    """``475.0 [462.1, 481.3]``; the estimate alone where no resampling moved it, as with a single run."""
    estimate, low, high = told(interval.estimate), told(interval.low), told(interval.high)
    return estimate if low == estimate == high else f"{estimate} [{low}, {high}]"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, [":--" if name in WORDS else "--:" for name in header], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _compared(cells: Cells, starts: int | None) -> str:
    """What was compared, in one line."""
    algorithms = algorithms_of(cells)
    budgets = [f"{escape(name)} ({any_run(row).budget:,} environment steps a run)" for name, row in cells.items()]
    facts = [
        f"{counted(len(algorithms), 'algorithm')}: {', '.join(map(escape, algorithms))}",
        f"{counted(len(cells), 'environment')}: {', '.join(budgets)}",
        _seeds(sorted({run.seed for row in cells.values() for runs in row.values() for run in runs})),
    ]
    if starts is not None:
        facts.append(f"returns measured on {counted(starts, 'held-out start')}")
    return f"Compared are {'; '.join(facts)}."


def _seeds(seeds: Sequence[int]) -> str:
    if len(seeds) > 2 and seeds[-1] - seeds[0] == len(seeds) - 1:
        return f"seeds {seeds[0]} to {seeds[-1]}"
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def _outcomes(row: Row) -> str:
    threshold = any_run(row).threshold
    goal = [] if threshold is None else ["solved", *(f"{unit} to {number(threshold)}" for unit in UNITS)]
    header = ["algorithm", "seeds", *goal, *(f"final {name}" for name in MEASURES.values()), "steps per CPU second"]
    return _table(header, [_outcome(algorithm, runs) for algorithm, runs in row.items()])


def _outcome(algorithm: str, runs: Sequence[Run]) -> list[str]:
    goal = [] if runs[0].threshold is None else [_solved(runs), *_time_to_solve(runs)]
    finals = [bootstrap_interval([run.last(name) for run in runs], statistic=interquartile_mean) for name in MEASURES]
    seconds = sum(run.last("cpu_seconds") for run in runs)
    speed = short(sum(run.last("env_steps") for run in runs) / seconds) if seconds else NONE
    return [escape(algorithm), str(len(runs)), *goal, *(_interval(final, number) for final in finals), speed]


def _solved(runs: Sequence[Run]) -> str:
    solved = sum(run.solved_at is not None for run in runs)
    share = proportion_interval(solved, len(runs))
    return f"{solved} of {len(runs)} [{percent(share.low)}, {percent(share.high)}]"


def _time_to_solve(runs: Sequence[Run]) -> list[str]:
    never = f"not solved by {short(runs[0].budget)} steps"
    steps, seconds = (median_interval(times) for times in zip(*(run.time_to_solve for run in runs), strict=True))
    return [
        _interval(steps, lambda value: never if math.isinf(value) else short(value)),
        _interval(seconds, lambda value: never if math.isinf(value) else number(value)),
    ]


def _endings(pairwise_tests: Sequence[PairwiseTest]) -> list[str]:
    if not pairwise_tests:
        return []
    header = ["environment", "first", "second", "first ends higher", "first − second", "shared seeds", "p", "verdict"]
    rows = [[*_who(duel), _difference(duel), *_evidence(duel, "ends higher")] for duel in pairwise_tests]
    says = (
        "How likely a run of the first ends with a higher greedy return than one of the second, ties counting half; "
        "the mean difference over the seeds that both have, and the p-value of a paired sign-flip test of it. A "
        f"verdict needs p < {SIGNIFICANT}, which fewer than {LEAST_SEEDS} seeds cannot give. Each pair stands alone: "
        "of twenty that do not differ, one gets a verdict all the same. Of more than "
        f"{MOST_FOR_ALL_PAIRS} algorithms, only the first is compared with each of the others."
    )
    return ["## Final greedy return, pair by pair", _table(header, rows), says]


def _speeds(pairwise_tests: Sequence[PairwiseTest]) -> list[str]:
    if not pairwise_tests:
        return []
    header = ["environment", "first", "second", "first solves sooner", "shared seeds", "p", "verdict"]
    rows = [[*_who(duel), *_evidence(duel, "solves sooner")] for duel in pairwise_tests]
    says = (
        "How likely a run of the first gets to the threshold in fewer environment steps than one of the second. A run "
        "that was not solved comes after all that were; ties count half. The test is the same, on ranks. Pairs "
        "without a solved run are left out."
    )
    return ["## Steps to the threshold, pair by pair", _table(header, rows), says]


def _who(duel: PairwiseTest) -> list[str]:
    return [*map(escape, (duel.environment, duel.first, duel.second)), _interval(duel.chance, percent)]


def _difference(duel: PairwiseTest) -> str:
    return _interval(duel.test.difference, signed) if duel.test else NONE


def _evidence(duel: PairwiseTest, does: str) -> list[str]:
    p_value = NONE if duel.test is None else f"{duel.test.p_value:.3f}" if duel.test.p_value >= 0.001 else "< 0.001"
    return [str(duel.seeds), p_value, _verdict(duel, does)]


def _verdict(duel: PairwiseTest, does: str) -> str:
    if duel.seeds < LEAST_SEEDS:
        return f"no verdict: {counted(duel.seeds, 'seed')}, {LEAST_SEEDS} are needed"
    return f"{escape(duel.winner)} {does}" if duel.winner is not None else "not distinguishable"


def _diagnostics(cells: Cells) -> list[str]:
    """What the runs said of themselves; a column that no run has, and an algorithm that has none, are left out."""
    told = {
        (environment, algorithm): {name: _course(name, runs) for name in DIAGNOSTICS}
        for environment, row in cells.items()
        for algorithm, runs in row.items()
    }
    names = [name for name in DIAGNOSTICS if any(cell[name] != NONE for cell in told.values())]
    rows = [
        [*map(escape, key), *(cell[name] for name in names)]
        for key, cell in told.items()
        if any(cell[name] != NONE for name in names)
    ]
    if not rows:
        return []
    says = "The mean over a run's evaluations, in parentheses its first and its last quarter, averaged over the runs."
    header = ["environment", "algorithm", *(DIAGNOSTICS[name] for name in names)]
    return ["## Diagnostics", _table(header, rows), says]


def _course(name: str, runs: Sequence[Run]) -> str:
    """``0.41 (0.62 → 0.13)``: over the whole of each run, its first quarter and its last."""
    told = percent if name == "zero_spread_groups" else number
    parts = [[_quarters(run)[place] for run in runs] for place in range(3)]
    means = [_mean(name, rows) for rows in parts]
    whole, first, last = (NONE if mean is None else told(mean) for mean in means)
    return NONE if means[0] is None else f"{whole} ({first} → {last})"


def _quarters(run: Run) -> tuple[Sequence[Mapping[str, float]], ...]:
    quarter = max(1, len(run.rows) // 4)
    return run.rows, run.rows[:quarter], run.rows[-quarter:]


def _mean(name: str, runs: Iterable[Sequence[Mapping[str, float]]]) -> float | None:
    """The mean over runs of the mean over their rows, of those that have a number."""
    known = [[row[name] for row in rows if is_number(row.get(name))] for rows in runs]
    means = [fmean(values) for values in known if values]
    return fmean(means) if means else None
