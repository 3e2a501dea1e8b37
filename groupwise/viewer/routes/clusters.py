"""The answers to a prompt as a map of clusters, and the preference pairs of a step."""

from __future__ import annotations

from typing import Any

from groupwise.analysis.groups import groups_of
from groupwise.analysis.pairs import RolloutPair, pairs_of, word_differences
from groupwise.text import plural
from groupwise.viewer.api import Query, run_route
from groupwise.viewer.routes.groups import step_of
from groupwise.viewer.routes.sample import cluster_of, sample_fields
from groupwise.viewer.runs import NotServedError, ServedRun

PAIRS_PER_PAGE = 12


@run_route("clusters")
def clusters(run: ServedRun, query: Query) -> dict[str, Any]:
    """The clusters of a prompt's answers, with positions if the run has recorded them."""
    step, number = step_of(run, query), query.integer("prompt", 0)
    found = {group.prompt_number: group for group in groups_of(run.reader.rollouts(step), run.reader.grade)}
    if number not in found:
        raise NotServedError(f"step {step} has no prompt {number}; it has {plural(len(found), 'prompt')}, from 0")
    chosen = found[number]
    if cluster_of(chosen.samples[0]) is None:
        raise NotServedError('this run has no clusters; algorithm = "similarity_group_grpo" compares similar answers')
    points = [
        {**sample_fields(row, chosen.samples), "x": row.get("map_x"), "y": row.get("map_y")} for row in chosen.samples
    ]
    sizes: dict[str, int] = {}
    for point in points:
        sizes[point["cluster"]] = sizes.get(point["cluster"], 0) + 1
    return {
        "step": step,
        "prompt": number,
        "prompts": [
            {"prompt": group.prompt_number, "row": group.row, "clusters": len(set(map(cluster_of, group.samples)))}
            for group in found.values()
        ],
        "prompt_text": chosen.prompt,
        "clusters": sorted(sizes, key=lambda name: (-sizes[name], name)),
        "points": points,
        "mapped": all(point["x"] is not None and point["y"] is not None for point in points),
    }


@run_route("pairs")
def pairs(run: ServedRun, query: Query) -> dict[str, Any]:
    """What was preferred to what in a step, with the words in which the two differ."""
    step = step_of(run, query)
    ranked_by = run.reader.settings.get("preference.reward")
    found = pairs_of(run.reader.rollouts(step), ranked_by if isinstance(ranked_by, str) else None)
    pages = max(1, -(-len(found) // PAIRS_PER_PAGE))
    page = min(query.integer("page", 1, least=1), pages)
    shown = found[(page - 1) * PAIRS_PER_PAGE : page * PAIRS_PER_PAGE]
    return {
        "step": step,
        "summary": f"{plural(len(found), 'pair')} in step {step}"
        + (f", ranked by the reward {ranked_by}" if ranked_by else "")
        + ("" if found else ": no group had two answers whose rewards differ enough"),
        "page": page,
        "pages": pages,
        "pairs": [_pair_fields(pair) for pair in shown],
    }


def _pair_fields(pair: RolloutPair) -> dict[str, Any]:
    segments = word_differences(pair.chosen["completion"], pair.rejected["completion"])
    sides = [
        {**sample_fields(row, ()), "segments": parts}
        for row, parts in zip((pair.chosen, pair.rejected), segments, strict=True)
    ]
    return {
        "prompt_number": pair.chosen["prompt_number"],
        "row": pair.chosen["row"],
        "prompt": pair.chosen["prompt"],
        "margin": pair.margin,
        "chosen": sides[0],
        "rejected": sides[1],
    }
