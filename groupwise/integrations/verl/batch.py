"""From verl's batch to similarity groups: sessions, their texts and their groups.

A verl batch is a list of keys ``{uid}_{session}_{number}`` with tags; its tensors are stored elsewhere. Prompts may
have different numbers of answers: sessions may fail, and a dataset may ask for more samples of hard prompts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import InputError
from groupwise.grouping.labels import compute_group_distribution_per_prompt, similarity_group_labels
from groupwise.grouping.workers import SimilarityGrouper
from groupwise.integrations.verl.estimator import RowGroups


@dataclass(frozen=True)
class Sessions:
    """The N sessions that B rows belong to."""

    uids: list[str]  # (N,) the prompt of each
    last: list[int]  # (N,) the row of its last output
    session: list[int]  # (B,) the session of each row
    answers: dict[str, list[int]]  # the sessions of each prompt, without padding


def read_sessions(keys: Sequence[str], tags: Sequence[Mapping[str, Any]]) -> Sessions:
    """The sessions of a batch; a prompt's answers are in the order of their keys, whatever the order of the batch."""
    numbers: dict[str, int] = {}
    uids: list[str] = []
    last: list[int] = []
    latest: list[int] = []
    session: list[int] = []
    for row, key in enumerate(keys):
        name, _, number = key.rpartition("_")
        uid = name.rpartition("_")[0]
        if not uid or not number.isdecimal():
            raise InputError(f"the key {key!r} of verl's batch is not of the form uid_session_number")
        if name not in numbers:
            numbers[name] = len(uids)
            uids.append(uid)
            last.append(row)
            latest.append(int(number))
        place = numbers[name]
        session.append(place)
        if int(number) > latest[place]:
            last[place], latest[place] = row, int(number)
    answers: dict[str, list[int]] = defaultdict(list)
    for _, place in sorted(numbers.items()):
        if not tags[last[place]].get("is_padding", False):
            answers[uids[place]].append(place)
    return Sessions(uids, last, session, dict(answers))


def decode_answers(tokenizer: Any, ids: Sequence[Tensor], masks: Sequence[Tensor], after: str | None) -> list[str]:
    """The text that the model wrote in each answer, without tool outputs and special tokens.

    The mark ``after`` is kept even if it is a special token.
    """
    hidden = torch.tensor(
        [token for token in tokenizer.all_special_ids if after is None or tokenizer.decode([token]).strip() != after],
        dtype=torch.long,
    )
    kept = [
        row[mask.bool() & ~torch.isin(row, hidden)].tolist()
        for row, mask in zip((row.cpu() for row in ids), (mask.cpu() for mask in masks), strict=True)
    ]
    return [str(text) for text in tokenizer.batch_decode(kept)]


def find_groups(
    sessions: Sessions, texts: Mapping[int, str], grouper: SimilarityGrouper
) -> tuple[RowGroups, dict[str, float]]:
    """The groups of a batch and their metrics; ``texts`` are the answers by session, without padding."""
    labels = [f"{uid}_0" for uid in sessions.uids]
    scores: list[float] = []
    by_size: dict[int, list[str]] = defaultdict(list)
    for uid, members in sessions.answers.items():
        by_size[len(members)].append(uid)
    for _, uids in sorted(by_size.items()):
        result = grouper.group([[texts[place] for place in sessions.answers[uid]] for uid in uids])
        places = [place for uid in uids for place in sessions.answers[uid]]
        for place, label in zip(places, similarity_group_labels(uids, result.labels), strict=True):
            labels[place] = label
        scores += result.scores.tolist()
    metrics = {}
    if sessions.answers:
        places = [place for members in sessions.answers.values() for place in members]
        metrics = compute_group_distribution_per_prompt(
            [labels[place] for place in places], [sessions.uids[place] for place in places], scores
        )
    return RowGroups([labels[place] for place in sessions.session], sessions.last, sessions.session), metrics
