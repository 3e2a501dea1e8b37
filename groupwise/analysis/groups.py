"""The prompts of a step with their samples: summaries, filters, sorting, search, and one prompt through the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, stdev
from typing import Any, NamedTuple

from groupwise.analysis.run_reader import RunReader
from groupwise.errors import CheckpointError, check_choice

REWARD, GRADE = "reward/", "grade/"  # the beginnings of columns
PAGE = 20  # prompts
EXCERPT = 60  # characters on each side of what was searched for

# Why a sample has no learning signal, by the record's masked_out.
SKIP_REASONS = {
    "equal_rewards": "all rewards of its group are equal",
    "no_advantage": "its advantage is 0",
    "no_pair": "it is in no preference pair",
    "dropped": "its reward failed",
    "truncated": "it was cut off at the length limit (masks.truncated)",
    "too_short": "it is too short (masks.validity)",
    "no_answer": "no answer was found in it (masks.validity)",
    "repetitive": "it repeats itself (masks.validity)",
    "off_policy": "the policy has moved too far from what sampled it (masks.off_policy)",
}
NO_MASK = ("equal_rewards", "no_advantage", "no_pair")


@dataclass(frozen=True)
class GroupSummary:
    """One prompt's samples in numbers: how many there are, are right, and so on; None where nothing was measured."""

    samples: int
    mean: float | None  # of the rewards
    spread: float | None  # their standard deviation; None with fewer than two
    best: int | None  # the sample with the largest reward
    right: int | None  # by the grade; None without one
    no_answer: int | None
    truncated: int
    contributing: int
    mean_length: float  # in tokens
    largest_advantage: float


@dataclass(frozen=True)
class PromptGroup:
    """A prompt of a step and its samples, which are rows of the rollout file."""

    step: int
    prompt_number: int
    row: int
    prompt: str
    samples: list[dict[str, Any]]
    grade: str | None  # the column by which a sample is right or wrong
    summary: GroupSummary

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Selection:
    """One page of a step's groups."""

    groups: list[PromptGroup]
    total: int  # that the filters and the search leave
    page: int
    pages: int
    counts: dict[str, int] = field(default_factory=dict)  # by filter, of all prompts of the step


class Visit(NamedTuple):
    """One time that a training row was sampled."""

    step: int
    prompt_number: int


class Match(NamedTuple):
    """A text that was searched for, in a prompt (``sample`` is None) or in a completion."""

    step: int
    prompt_number: int
    sample: int | None
    before: str
    text: str
    after: str


def main_grade(rows: Sequence[Mapping[str, Any]], metric: str | None = None) -> str | None:
    """The column that says whether a sample is right: that of ``metric``, or the first grade; None without grades."""
    grades = [name for name in (rows[0] if rows else ()) if name.startswith(GRADE)]
    return f"{GRADE}{metric}" if f"{GRADE}{metric}" in grades else next(iter(grades), None)


def groups_of(rows: Sequence[dict[str, Any]], metric: str | None = None) -> list[PromptGroup]:
    """The prompts of a step's rollouts, in order."""
    grade = main_grade(rows, metric)
    members: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        members.setdefault(row["prompt_number"], []).append(row)
    return [
        PromptGroup(
            samples[0]["step"],
            number,
            samples[0]["row"],
            samples[0]["prompt"],
            samples,
            grade,
            summary_of(samples, grade),
        )
        for number, samples in members.items()
    ]


def summary_of(samples: Sequence[Mapping[str, Any]], grade: str | None) -> GroupSummary:
    rewards = {index: row["reward"] for index, row in enumerate(samples) if row.get("reward") is not None}
    graded = [] if grade is None else [row.get(grade) for row in samples]
    return GroupSummary(
        samples=len(samples),
        mean=fmean(rewards.values()) if rewards else None,
        spread=stdev(rewards.values()) if len(rewards) > 1 else None,
        best=samples[max(rewards, key=lambda index: rewards[index])]["sample"] if rewards else None,
        right=sum(map(bool, graded)) if graded else None,
        no_answer=sum(result is None for result in graded) if graded else None,
        truncated=sum(row.get("stop_reason") == "length" for row in samples),
        contributing=sum(bool(row.get("contributes")) for row in samples),
        mean_length=fmean(row.get("completion_tokens") or 0 for row in samples),
        largest_advantage=max(abs(row.get("advantage") or 0.0) for row in samples),
    )


def _disagreement(group: PromptGroup) -> bool:
    if group.grade is None:
        return bool(group.summary.spread)
    return len({row[group.grade] for row in group.samples} - {None}) > 1


def _masked(group: PromptGroup) -> bool:
    return any(row.get("masked_out") not in (None, *NO_MASK) for row in group.samples)


FILTERS: dict[str, Callable[[PromptGroup], bool]] = {
    "disagreement": _disagreement,
    "no_answer": lambda group: bool(group.summary.no_answer),
    "none_right": lambda group: group.summary.right == 0,
    "zero_spread": lambda group: group.summary.spread == 0,
    "truncated": lambda group: group.summary.truncated > 0,
    "masked": _masked,
    "failed": lambda group: any(row.get("masked_out") == "dropped" for row in group.samples),
    "pairs": lambda group: any(row.get("pair") for row in group.samples),
}
"""Groups to show: some answers right and others wrong (or unequal rewards, without a grade); an answer that was not
found; no right answer; equal rewards; completions cut off; samples left out by a mask; failed rewards; pairs."""

SORTS: dict[str, Callable[[PromptGroup], float]] = {
    "prompt": lambda group: group.prompt_number,
    "spread": lambda group: -(group.summary.spread or 0.0),
    "reward": lambda group: -(group.summary.mean if group.summary.mean is not None else float("-inf")),
    "length": lambda group: -group.summary.mean_length,
    "advantage": lambda group: -group.summary.largest_advantage,
}
"""Orders: by number, or the largest first."""


def select(
    groups: Sequence[PromptGroup],
    *,
    filters: Iterable[str] = (),
    sort: str = "prompt",
    reverse: bool = False,
    search: str = "",
    page: int = 0,
    size: int = PAGE,
) -> Selection:
    """The groups that all ``filters`` keep and whose prompt or completions contain ``search``; one page of them."""
    filters = list(dict.fromkeys(filters))
    for name in filters:
        check_choice("filter", name, FILTERS)
    check_choice("order", sort, SORTS)
    wanted = search.casefold()
    kept = [
        group
        for group in groups
        if all(FILTERS[name](group) for name in filters) and (not wanted or _contains(group, wanted))
    ]
    kept.sort(key=SORTS[sort], reverse=reverse)
    pages = max(1, -(-len(kept) // size))
    page = min(max(page, 0), pages - 1)
    counts = {name: sum(map(test, groups)) for name, test in FILTERS.items()}
    return Selection(kept[page * size : (page + 1) * size], len(kept), page, pages, counts)


def _contains(group: PromptGroup, wanted: str) -> bool:
    return wanted in group.prompt.casefold() or any(wanted in row["completion"].casefold() for row in group.samples)


def search_run(reader: RunReader, text: str, *, before: int | None = None, since: int | None = None) -> Iterator[Match]:
    """Where a text occurs in the prompts and completions of a run, newest step first, ignoring case.

    Steps are read one after another, so take as many results as are shown. ``before``, ``since``: only steps
    before this one, from this one on. Steps that cannot be read are left out.
    """
    wanted = text.casefold()
    if not wanted:
        return
    for step in reversed(reader.rollout_steps):
        if (before is not None and step >= before) or (since is not None and step < since):
            continue
        try:
            rows = reader.rollouts(step, ("prompt_number", "sample", "prompt", "completion"))
        except CheckpointError:
            continue
        prompts: set[int] = set()
        for row in rows:
            number = row["prompt_number"]
            if number not in prompts:
                prompts.add(number)
                yield from _matches(row["prompt"], wanted, Match(step, number, None, "", "", ""))
            yield from _matches(row["completion"], wanted, Match(step, number, row["sample"], "", "", ""))


def _matches(text: str, wanted: str, place: Match) -> Iterator[Match]:
    """The first occurrence. Folding may change the length of a text, such as of ß; then it is shown from its start."""
    folded = text.casefold()
    start = folded.find(wanted)
    if start < 0:
        return
    start = start if len(folded) == len(text) else 0
    end = start + (len(wanted) if len(folded) == len(text) else 0)
    yield place._replace(
        before=text[max(0, start - EXCERPT) : start], text=text[start:end], after=text[end : end + EXCERPT]
    )


def follow(reader: RunReader, visits: Iterable[Visit], metric: str | None = None) -> Iterator[PromptGroup]:
    """The groups of one training row at its ``visits`` (`Questions.visits`); those that cannot be read are left out."""
    for visit in visits:
        try:
            rows = reader.rollouts(visit.step)
        except CheckpointError:
            continue
        group = [row for row in rows if row["prompt_number"] == visit.prompt_number]
        yield from groups_of(group, metric)
