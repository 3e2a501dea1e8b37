"""The groups of a step, and one group with its tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from groupwise.analysis.choices import Fork, forks_by_share
from groupwise.analysis.groups import (
    SORTS,
    Match,
    PromptGroup,
    groups_of,
    search_run,
    select,
)
from groupwise.analysis.tree import Branch, group_tree, split_words
from groupwise.errors import CheckpointError
from groupwise.text import plural
from groupwise.training.store.token_files import TokenRow
from groupwise.viewer.api import Query, run_route
from groupwise.viewer.routes.sample import sample_fields
from groupwise.viewer.runs import NotServedError, ServedRun

SENT = 600  # characters of a text in a list; the complete text is sent on demand
SAMPLES_PER_PAGE = 192
MATCHES = 60  # of a search in all steps, after which no further step is searched
STEPS_SEARCHED = 100  # by one request
FORKS = 3  # that are named above the picture
LEAST_SHARE = 0.05  # of a fork that is named
BRANCHES = 6  # of a fork that are named
BEFORE = 48  # characters before a fork

FILTER_TITLES = {
    "disagreement": ("Disagreement", "some answers are right and others wrong; without grades: rewards differ"),
    "none_right": ("None right", "no answer to the prompt is right"),
    "no_answer": ("No answer found", "the answer could not be extracted from a completion"),
    "zero_spread": ("Equal rewards", "all rewards are equal: no learning signal"),
    "truncated": ("Truncated", "a completion was cut off at max_new_tokens"),
    "masked": ("Masked", "a mask excludes a completion from the loss"),
    "failed": ("Reward failed", "a reward function failed on a completion"),
    "pairs": ("In pairs", "a completion is in a preference pair"),
}
SORT_TITLES = {
    "prompt": "prompt number",
    "spread": "spread of rewards",
    "reward": "mean reward",
    "length": "mean length",
    "advantage": "largest advantage",
}


@run_route("groups")
def groups(run: ServedRun, query: Query) -> dict[str, Any]:
    """A page of a step's groups, as filtered, sorted and searched; or with ``everywhere`` the matches in all steps."""
    search = query.text("search")
    if search and query.text("everywhere"):
        return _search_everywhere(run, query, search)
    step = step_of(run, query)
    found = _groups_at(run, step)
    largest = max((len(group.samples) for group in found), default=1)
    chosen = select(
        found,
        filters=query.names("filter"),
        sort=query.text("sort") or "prompt",
        search=search,
        page=query.integer("page", 1, least=1) - 1,
        size=min(20, max(2, SAMPLES_PER_PAGE // largest)),
    )
    recorded = {row.prompt_number for row in _tokens_at(run, step)}
    shown = plural(chosen.total, "prompt") + (f" of {len(found)}" if chosen.total < len(found) else "")
    return {
        "step": step,
        "summary": f"{shown}, {largest} answers each" if largest > 1 else shown,
        "filters": [
            {
                "name": name,
                "title": FILTER_TITLES[name][0],
                "hint": FILTER_TITLES[name][1],
                "count": chosen.counts[name],
            }
            for name in FILTER_TITLES
            if name != "pairs" or run.reader.settings.get("preference.weight")
        ],
        "sorts": [{"name": name, "title": SORT_TITLES.get(name, name)} for name in SORTS],
        "page": chosen.page + 1,
        "pages": chosen.pages,
        "groups": [
            {**group_fields(group, SENT), "has_tokens": group.prompt_number in recorded} for group in chosen.groups
        ],
    }


@run_route("group")
def group(run: ServedRun, query: Query) -> dict[str, Any]:
    """One group with complete texts, and as a tree: where the answers part, and which choice paid."""
    step, number = step_of(run, query), query.integer("prompt", 0)
    found = {group.prompt_number: group for group in _groups_at(run, step)}
    if number not in found:
        raise NotServedError(f"step {step} has no prompt {number}; it has {plural(len(found), 'prompt')}, from 0")
    chosen = found[number]
    tokens = [row for row in _tokens_at(run, step) if row.prompt_number == number]
    texts = {row.sample: row.texts for row in tokens}
    by_tokens = all(row["sample"] in texts for row in chosen.samples)
    pieces = texts if by_tokens else {row["sample"]: split_words(row["completion"]) for row in chosen.samples}
    tree = group_tree(chosen.samples, tokens)
    advantages = {row["sample"]: row.get("advantage") or 0.0 for row in chosen.samples}

    def choice(branch: Branch) -> str:
        """The text of a branch's first piece; with the next ones if it is a part of a character."""
        own = pieces[branch.samples[0]][branch.start : branch.start + branch.pieces]
        return next((text for text in own if text), "")

    decisive = [fork for fork in forks_by_share(tree, advantages) if fork.share >= LEAST_SHARE]
    return {
        **group_fields(chosen),
        "prompts": list(found),
        "token_samples": list(texts),
        "by_tokens": by_tokens,
        "tree": _branch_fields(tree, choice),
        "forks": [_fork_fields(fork, choice) for fork in decisive[:FORKS]],
    }


def step_of(run: ServedRun, query: Query) -> int:
    """The step that is asked for: the last recorded one if none is."""
    steps = run.reader.rollout_steps
    if not steps:
        raise NotServedError("this run has recorded no answers; run.save_rollouts = true records them")
    return query.integer("step", steps[-1])


def _groups_at(run: ServedRun, step: int) -> list[PromptGroup]:
    return groups_of(run.reader.rollouts(step), run.reader.grade)


def _tokens_at(run: ServedRun, step: int) -> list[TokenRow]:
    """The recorded tokens of a step; none if there are none, or if they cannot be read."""
    try:
        return run.reader.tokens(step) if step in run.reader.token_steps else []
    except CheckpointError:
        return []


def group_fields(group: PromptGroup, sent: int | None = None) -> dict[str, Any]:
    """A group with its samples; ``sent`` is the number of characters of each text."""
    summary = asdict(group.summary)
    if all(row.get("advantage") is None for row in group.samples):
        summary["contributing"] = None  # held-out answers are not trained on
    return {
        "step": group.step,
        "prompt_number": group.prompt_number,
        "row": group.row,
        "prompt": group.prompt[:sent],
        "prompt_hidden": max(0, len(group.prompt) - sent) if sent else 0,
        "summary": summary,
        "samples": [sample_fields(row, group.samples, sent) for row in group.samples],
    }


def _branch_fields(branch: Branch, choice: Callable[[Branch], str]) -> dict[str, Any]:
    return {
        "text": branch.text,
        "choice": choice(branch),
        "ends": not branch.pieces,
        "samples": branch.samples,
        "advantage": branch.mean_advantage,
        "children": [_branch_fields(child, choice) for child in branch.children],
    }


def _fork_fields(fork: Fork, choice: Callable[[Branch], str]) -> dict[str, Any]:
    branches = sorted(fork.branches, key=lambda branch: -len(branch.samples))[:BRANCHES]
    return {
        "before": ("…" if len(fork.before) > BEFORE else "") + fork.before[-BEFORE:],
        "share": fork.share,
        "branches": [
            {
                "choice": choice(branch),
                "ends": not branch.pieces,
                "count": len(branch.samples),
                "advantage": branch.mean_advantage,
            }
            for branch in sorted(branches, key=lambda branch: -(branch.mean_advantage or 0.0))
        ],
        "others": len(fork.branches) - len(branches),
    }


def _search_everywhere(run: ServedRun, query: Query, search: str) -> dict[str, Any]:
    """Matches in the newest steps before ``before``, and the step from which older ones are searched next."""
    before = query.integer("before", 10**15)
    steps = [step for step in run.reader.rollout_steps if step < before]
    first = steps[-STEPS_SEARCHED:][0] if steps else 0
    matches: list[Match] = []
    for match in search_run(run.reader, search, before=before, since=first):
        if len(matches) >= MATCHES and match.step != matches[-1].step:  # a step is searched to its end
            first = matches[-1].step
            break
        matches.append(match)
    return {
        "matches": [match._asdict() for match in matches],
        "first": first,
        "older": sum(step < first for step in steps),
        "sorts": [{"name": name, "title": SORT_TITLES.get(name, name)} for name in SORTS],
    }
