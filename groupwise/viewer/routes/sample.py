"""One sample as the page shows it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.analysis.groups import GRADE, REWARD, SKIP_REASONS
from groupwise.training.store.rollout_files import COLUMNS

LABELS = "similarity_group_labels"  # as in grouping/labels.py, which imports torch
CONVERSATION = "conversation"  # a column of runs with an environment
SHOWN = {*COLUMNS, "pair", "map_x", "map_y", "where", LABELS, CONVERSATION}  # columns that have a place of their own


def sample_fields(
    row: Mapping[str, Any], siblings: Sequence[Mapping[str, Any]], sent: int | None = None
) -> dict[str, Any]:
    """A row of a rollout file; its text is cut after ``sent`` characters, and ``hidden`` are not sent.

    ``siblings``: the prompt's rows.
    """
    completion = row["completion"] or ""
    parts = {
        name: {column.removeprefix(name): value for column, value in row.items() if column.startswith(name)}
        for name in (REWARD, GRADE)
    }
    known = {name for name in row if name in SHOWN or name.startswith((REWARD, GRADE))}
    return {
        "sample": row["sample"],
        "completion": completion[:sent],
        "hidden": max(0, len(completion) - sent) if sent else 0,
        "reward": row.get("reward"),
        "rewards": parts[REWARD],
        "grades": parts[GRADE],
        "advantage": row.get("advantage"),
        "why": why(row, siblings),
        "completion_tokens": row.get("completion_tokens"),
        "stop_reason": row.get("stop_reason"),
        "cluster": cluster_of(row),
        "pair": row.get("pair"),
        "turns": _turns(row.get(CONVERSATION), sent),
        "extra": {name: value for name, value in row.items() if name not in known and value is not None},
    }


def _turns(conversation: Any, sent: int | None) -> list[dict[str, Any]] | None:
    """Who said what after the prompt, each text cut after ``sent`` characters; None if this is no conversation."""
    try:
        messages = json.loads(conversation)
        return [
            {
                "role": str(message["role"]),
                "text": str(message["content"])[:sent],
                "hidden": max(0, len(str(message["content"])) - sent) if sent else 0,
                "calls": [
                    json.dumps(call["function"], ensure_ascii=False)[:sent] for call in message.get("tool_calls", ())
                ],
            }
            for message in messages
        ]
    except (TypeError, ValueError, KeyError, AttributeError):
        return None


def why(row: Mapping[str, Any], siblings: Sequence[Mapping[str, Any]]) -> str | None:
    """Why a sample has no learning signal, in words; None if it has."""
    reason = row.get("masked_out")
    if reason == "equal_rewards" and sum(other.get("group") == row.get("group") for other in siblings) == 1:
        return "alone in its group: nothing to compare it with"
    return SKIP_REASONS.get(reason, reason) if reason else None


def cluster_of(row: Mapping[str, Any]) -> str | None:
    """The cluster within the prompt, such as "2", or "2.1" with two levels."""
    label = row.get(LABELS)
    return None if label is None else str(label).partition("_")[2].replace("_", ".")
