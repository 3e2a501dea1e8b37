"""A comparison as a page: tables, each with a short explanation, and the curves of each environment.

The page is a list of blocks, from which `comparison_page` makes Markdown and `groupwise report` an HTML page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

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
from groupwise.text import escape_markdown, markdown_table, one_line

Block = dict[str, Any]
"""{"heading": text}, {"text": text}, {"list": texts}, {"curves": environment} or {"table": {header, rows, left}}, where
``left`` are the numbers of the columns that hold text. Texts are plain, without Markdown."""

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
    f"of it. A verdict needs p below {SIGNIFICANT}, which fewer than {MIN_SEEDS} seeds cannot give. The p-values are "
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
    return blocks_as_markdown(comparison_blocks(groups, starts), plots)


def comparison_blocks(groups: RunsByEnvironment, starts: int) -> list[Block]:
    """What the page shows, in order."""
    blocks: list[Block] = [{"text": _summary(groups, starts)}, {"text": READING}]
    for environment, runs in groups.items():
        blocks += [{"heading": environment}, _outcomes(runs), {"curves": environment}]
    if tests := final_return_tests(groups):
        table = _pairwise_table(tests, "ends higher", with_difference=True)
        blocks += [{"heading": "Final greedy return, pair by pair"}, table, {"text": FINAL_RETURNS}]
    if tests := speed_tests(groups):
        table = _pairwise_table(tests, "solves sooner", with_difference=False)
        blocks += [{"heading": "Steps to the threshold, pair by pair"}, table, {"text": SPEEDS}]
    return blocks + _diagnostics(groups)


def blocks_as_markdown(blocks: Iterable[Block], plots: Mapping[str, str]) -> str:
    """The page as Markdown; an environment that has no plot gets none."""
    drawn = [block for block in blocks if "curves" not in block or block["curves"] in plots]
    return "\n\n".join(_as_markdown(block, plots) for block in drawn) + "\n"


def _as_markdown(block: Block, plots: Mapping[str, str]) -> str:
    if "heading" in block:
        return f"## {escape_markdown(block['heading'])}"
    if "text" in block:
        return escape_markdown(block["text"])
    if "list" in block:
        return "\n".join(f"- {escape_markdown(text)}" for text in block["list"])
    if "curves" in block:
        return f"![returns on {escape_markdown(block['curves'])}]({plots[block['curves']]})"
    table = block["table"]
    rows = [
        [escape_markdown(cell) if place in table["left"] else cell for place, cell in enumerate(row)]
        for row in table["rows"]
    ]
    return markdown_table([escape_markdown(name) for name in table["header"]], rows, left=table["left"])


def _format_interval(interval: Interval, format_value: Callable[[float], str]) -> str:
    """``475.0 [462.1, 481.3]``; the estimate alone if all three are equal, as with a single run."""
    estimate, low, high = (format_value(value) for value in (interval.estimate, interval.low, interval.high))
    return estimate if low == estimate == high else f"{estimate} [{low}, {high}]"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Block:
    left = [place for place, name in enumerate(header) if name in TEXT_COLUMNS]
    return {"table": {"header": list(header), "rows": [list(row) for row in rows], "left": left}}


def _summary(groups: RunsByEnvironment, starts: int) -> str:
    """One line: what was compared."""
    algorithms = list_algorithms(groups)
    seeds = {run.seed for by_algorithm in groups.values() for runs in by_algorithm.values() for run in runs}
    budgets = [
        f"{one_line(name)} ({any_run(runs).budget:,} environment steps per run)" for name, runs in groups.items()
    ]
    return (
        f"A comparison of {counted(len(algorithms), 'algorithm')} ({', '.join(map(one_line, algorithms))}) on "
        f"{counted(len(groups), 'environment')}: {', '.join(budgets)}; {_seeds(sorted(seeds))}; returns measured on "
        f"{counted(starts, 'held-out start')}."
    )


def _seeds(seeds: Sequence[int]) -> str:
    if len(seeds) > 2 and seeds[-1] - seeds[0] == len(seeds) - 1:
        return f"seeds {seeds[0]} to {seeds[-1]}"
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def _outcomes(by_algorithm: RunsByAlgorithm) -> Block:
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
    return [algorithm, str(len(runs)), *goal, *returns, speed]


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


def _pairwise_table(tests: Sequence[PairwiseTest], verb: str, *, with_difference: bool) -> Block:
    difference = ["first − second"] if with_difference else []
    header = ["environment", "first", "second", f"first {verb}", *difference, "shared seeds", "p", "verdict"]
    rows = []
    for test in tests:
        row = [test.environment, test.first, test.second, _format_interval(test.probability, percent)]
        if with_difference:
            row.append(_format_interval(test.test.difference, signed) if test.test else NONE)
        p_value = NONE if test.test is None else f"{test.test.p_value:.3f}" if test.test.p_value >= 0.001 else "< 0.001"
        rows.append([*row, str(test.seeds), p_value, _verdict(test, verb)])
    return _table(header, rows)


def _verdict(test: PairwiseTest, verb: str) -> str:
    if test.seeds < MIN_SEEDS:
        return f"no verdict: {counted(test.seeds, 'seed')}, {MIN_SEEDS} are needed"
    return f"{test.winner} {verb}" if test.winner is not None else "not distinguishable"


def _diagnostics(groups: RunsByEnvironment) -> list[Block]:
    """Columns that no run has, and algorithms without any diagnostic, are left out."""
    cells = {
        (environment, algorithm): {name: _diagnostic(name, runs) for name in DIAGNOSTICS}
        for environment, by_algorithm in groups.items()
        for algorithm, runs in by_algorithm.items()
    }
    names = [name for name in DIAGNOSTICS if any(cell[name] != NONE for cell in cells.values())]
    rows = [
        [*key, *(cell[name] for name in names)]
        for key, cell in cells.items()
        if any(cell[name] != NONE for name in names)
    ]
    if not rows:
        return []
    explanation = (
        "The mean over a run's evaluations, in parentheses over its first and its last quarter, averaged over the runs."
    )
    header = ["environment", "algorithm", *(DIAGNOSTICS[name] for name in names)]
    return [{"heading": "Diagnostics"}, _table(header, rows), {"text": explanation}]


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
