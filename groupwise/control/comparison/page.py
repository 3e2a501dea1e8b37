"""A comparison as a Markdown page: tables, each with a short explanation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

from groupwise.control.comparison.formatting import counted, number, percent, short, signed
from groupwise.control.comparison.pairwise_tests import (
    MAX_FOR_ALL_PAIRS,
    MIN_SEEDS,
    SIGNIFICANT,
    PairwiseTest,
    final_return_tests,
    speed_tests,
)
from groupwise.control.comparison.runs import (
    MEASURES,
    ComparedRun,
    RunsByAlgorithm,
    RunsByEnvironment,
    any_run,
    list_algorithms,
)
from groupwise.stats import Interval, bootstrap_interval, interquartile_mean, median_interval, proportion_interval
from groupwise.text import escape_markdown, markdown_table

DIAGNOSTICS = {
    "zero_spread_groups": "zero-spread groups",
    "group_spread": "group spread",
    "clip_fraction": "clip fraction",
    "entropy": "entropy",
    "episode_length": "episode length",
    "approx_kl": "approximate KL",
}
TEXT_COLUMNS = ("environment", "algorithm", "first", "second", "verdict")  # the others are numbers
NONE = "–"
READING = (
    "In brackets: 95 % intervals; a number without one was the same in every resampling of the runs. Steps and CPU "
    "seconds to a threshold are medians over the runs, where a run that was not solved counts as infinite. Final "
    "returns are interquartile means of the last evaluations."
)
FINAL_RETURNS = (
    "The probability that a run of the first ends with a higher greedy return than one of the second, ties "
    "counting half; the mean difference over the seeds that both have; and the p-value of a paired sign-flip test "
    f"of it. A verdict needs p < {SIGNIFICANT}, which fewer than {MIN_SEEDS} seeds cannot give. The p-values are "
    "not corrected for multiple tests: of twenty pairs that do not differ, one gets a verdict on average. With "
    f"more than {MAX_FOR_ALL_PAIRS} algorithms, only the first is compared with each of the others."
)
SPEEDS = (
    "The probability that a run of the first reaches the threshold in fewer environment steps than one of the "
    "second. A run that was not solved comes after all that were; ties count half. The test is the same, on ranks. "
    "Pairs without a solved run are left out."
)


def comparison_page(groups: RunsByEnvironment, plots: Mapping[str, str], starts: int) -> str:
    """The page as Markdown. ``plots`` are the file names of each environment's plot."""
    parts = [_summary(groups, starts), READING]
    for environment, runs in groups.items():
        name = escape_markdown(environment)
        parts += [f"## {name}", _outcomes(runs), f"![returns on {name}]({plots[environment]})"]
    if tests := final_return_tests(groups):
        table = _pairwise_table(tests, "ends higher", with_difference=True)
        parts += ["## Final greedy return, pair by pair", table, FINAL_RETURNS]
    if tests := speed_tests(groups):
        table = _pairwise_table(tests, "solves sooner", with_difference=False)
        parts += ["## Steps to the threshold, pair by pair", table, SPEEDS]
    parts += _diagnostics(groups)
    return "\n\n".join(parts) + "\n"


def _format_interval(interval: Interval, format_value: Callable[[float], str]) -> str:
    """``475.0 [462.1, 481.3]``; the estimate alone if all three are equal, as with a single run."""
    estimate, low, high = (format_value(value) for value in (interval.estimate, interval.low, interval.high))
    return estimate if low == estimate == high else f"{estimate} [{low}, {high}]"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return markdown_table(header, rows, left=[place for place, name in enumerate(header) if name in TEXT_COLUMNS])


def _summary(groups: RunsByEnvironment, starts: int) -> str:
    """One line: what was compared."""
    algorithms = list_algorithms(groups)
    seeds = {run.seed for by_algorithm in groups.values() for runs in by_algorithm.values() for run in runs}
    budgets = [
        f"{escape_markdown(name)} ({any_run(runs).budget:,} environment steps per run)" for name, runs in groups.items()
    ]
    return (
        f"A comparison of {counted(len(algorithms), 'algorithm')} ({', '.join(map(escape_markdown, algorithms))}) on "
        f"{counted(len(groups), 'environment')}: {', '.join(budgets)}; {_seeds(sorted(seeds))}; returns measured on "
        f"{counted(starts, 'held-out start')}."
    )


def _seeds(seeds: Sequence[int]) -> str:
    if len(seeds) > 2 and seeds[-1] - seeds[0] == len(seeds) - 1:
        return f"seeds {seeds[0]} to {seeds[-1]}"
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def _outcomes(by_algorithm: RunsByAlgorithm) -> str:
    threshold = any_run(by_algorithm).threshold
    goal = []
    if threshold is not None:
        goal = ["solved", f"steps to {number(threshold)}", f"CPU seconds to {number(threshold)}"]
    header = ["algorithm", "seeds", *goal, *(f"final {name}" for name in MEASURES.values()), "steps per CPU second"]
    return _table(header, [_outcome(algorithm, runs) for algorithm, runs in by_algorithm.items()])


def _outcome(algorithm: str, runs: Sequence[ComparedRun]) -> list[str]:
    goal = [] if runs[0].threshold is None else _time_to_solve(runs)
    finals = [bootstrap_interval([run.last(name) for run in runs], statistic=interquartile_mean) for name in MEASURES]
    seconds = sum(run.last("cpu_seconds") for run in runs)
    speed = short(sum(run.last("env_steps") for run in runs) / seconds) if seconds else NONE
    returns = [_format_interval(final, number) for final in finals]
    return [escape_markdown(algorithm), str(len(runs)), *goal, *returns, speed]


def _time_to_solve(runs: Sequence[ComparedRun]) -> list[str]:
    """The share of solved runs, and the steps and CPU seconds they needed."""
    solved = sum(run.solved_at is not None for run in runs)
    share = proportion_interval(solved, len(runs))
    never = f"not solved by {short(runs[0].budget)} steps"
    steps, seconds = (median_interval(times) for times in zip(*(run.time_to_solve for run in runs), strict=True))
    return [
        f"{solved} of {len(runs)} [{percent(share.low)}, {percent(share.high)}]",
        _format_interval(steps, lambda value: never if math.isinf(value) else short(value)),
        _format_interval(seconds, lambda value: never if math.isinf(value) else number(value)),
    ]


def _pairwise_table(tests: Sequence[PairwiseTest], verb: str, *, with_difference: bool) -> str:
    difference = ["first − second"] if with_difference else []
    header = ["environment", "first", "second", f"first {verb}", *difference, "shared seeds", "p", "verdict"]
    rows = []
    for test in tests:
        row = [*map(escape_markdown, (test.environment, test.first, test.second))]
        row.append(_format_interval(test.probability, percent))
        if with_difference:
            row.append(_format_interval(test.test.difference, signed) if test.test else NONE)
        p_value = NONE if test.test is None else f"{test.test.p_value:.3f}" if test.test.p_value >= 0.001 else "< 0.001"
        rows.append([*row, str(test.seeds), p_value, _verdict(test, verb)])
    return _table(header, rows)


def _verdict(test: PairwiseTest, verb: str) -> str:
    if test.seeds < MIN_SEEDS:
        return f"no verdict: {counted(test.seeds, 'seed')}, {MIN_SEEDS} are needed"
    return f"{escape_markdown(test.winner)} {verb}" if test.winner is not None else "not distinguishable"


def _diagnostics(groups: RunsByEnvironment) -> list[str]:
    """Columns that no run has, and algorithms without any diagnostic, are left out."""
    cells = {
        (environment, algorithm): {name: _diagnostic(name, runs) for name in DIAGNOSTICS}
        for environment, by_algorithm in groups.items()
        for algorithm, runs in by_algorithm.items()
    }
    names = [name for name in DIAGNOSTICS if any(cell[name] != NONE for cell in cells.values())]
    rows = [
        [*map(escape_markdown, key), *(cell[name] for name in names)]
        for key, cell in cells.items()
        if any(cell[name] != NONE for name in names)
    ]
    if not rows:
        return []
    explanation = (
        "The mean over a run's evaluations, in parentheses over its first and its last quarter, averaged over the runs."
    )
    header = ["environment", "algorithm", *(DIAGNOSTICS[name] for name in names)]
    return ["## Diagnostics", _table(header, rows), explanation]


def _diagnostic(name: str, runs: Sequence[ComparedRun]) -> str:
    """``0.41 (0.62 → 0.13)``: the mean over all rows, over the first quarter and over the last."""
    format_value = percent if name == "zero_spread_groups" else number
    quarters = [max(1, len(run.rows) // 4) for run in runs]
    means = [
        _mean(name, [run.rows for run in runs]),
        _mean(name, [run.rows[:quarter] for run, quarter in zip(runs, quarters, strict=True)]),
        _mean(name, [run.rows[-quarter:] for run, quarter in zip(runs, quarters, strict=True)]),
    ]
    overall, first, last = (NONE if mean is None else format_value(mean) for mean in means)
    return NONE if means[0] is None else f"{overall} ({first} → {last})"


def _mean(name: str, runs: Iterable[Sequence[Mapping[str, float]]]) -> float | None:
    """The mean over runs of the mean over their rows, ignoring rows without a number."""
    columns = [[row[name] for row in rows if math.isfinite(row.get(name, math.nan))] for rows in runs]
    means = [fmean(values) for values in columns if values]
    return fmean(means) if means else None
