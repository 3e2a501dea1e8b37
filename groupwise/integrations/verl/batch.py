"""From verl's batch to similarity groups: sessions, their texts and their groups.

A batch of verl's V1 trainer is a list of keys ``{uid}_{session}_{number}`` with tags; its tensors are stored elsewhere.
In the classic trainer, a row is an answer and has its prompt's uid. Prompts may have different numbers of answers:
sessions may fail, and a dataset may ask for more samples of hard prompts.
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


@dataclass(frozen=True)
class Sessions:
    """The N sessions that B rows belong to."""

    uids: list[str]  # (N,) the prompt of each
    last: list[int]  # (N,) the row of its last output
    session: list[int]  # (B,) the session of each row
    answers: dict[str, list[int]]  # the sessions of each prompt, without padding


def read_sessions(keys: Sequence[str], tags: Sequence[Mapping[str, Any]]) -> Sessions:
    """The sessions of a batch; a prompt's answers are in the order of their keys, whatever the order of the batch."""
    outputs: dict[str, list[tuple[int, int]]] = {}  # number and row of each output of a session "uid_session"
    names = []
    for row, key in enumerate(keys):
        name, _, number = key.rpartition("_")
        if not name.rpartition("_")[0] or not number.isdecimal():
            raise InputError(f"the key {key!r} of verl's batch is not of the form uid_session_number")
        outputs.setdefault(name, []).append((int(number), row))
        names.append(name)
    places = {name: place for place, name in enumerate(outputs)}
    uids = [name.rpartition("_")[0] for name in outputs]
    last = [max(numbered)[1] for numbered in outputs.values()]
    answers: dict[str, list[int]] = defaultdict(list)
    for _, place in sorted(places.items()):
        if not tags[last[place]].get("is_padding", False):
            answers[uids[place]].append(place)
    return Sessions(uids, last, [places[name] for name in names], dict(answers))


def read_rows(uids: Sequence[str]) -> Sessions:
    """The sessions of a batch whose rows are one answer each, of these prompts."""
    rows = list(range(len(uids)))
    answers: dict[str, list[int]] = defaultdict(list)
    for row, uid in enumerate(uids):
        answers[uid].append(row)
    return Sessions(list(uids), rows, rows, dict(answers))


def decode_answers(tokenizer: Any, ids: Sequence[Tensor], masks: Sequence[Tensor], after: str | None) -> list[str]:
    """The text that the model wrote in each answer, without tool outputs and special tokens.

    The mark ``after`` is kept even if it is a special token.
    """
    hidden = torch.tensor(
        [token for token in tokenizer.all_special_ids if after is None or tokenizer.decode([token]).strip() != after],
        dtype=torch.long,
    )
    pairs = [(row.cpu(), mask.cpu().bool()) for row, mask in zip(ids, masks, strict=True)]
    kept = [row[mask & ~torch.isin(row, hidden)].tolist() for row, mask in pairs]
    return [str(text) for text in tokenizer.batch_decode(kept)]


def find_groups(
    sessions: Sessions, texts: Mapping[int, str], grouper: SimilarityGrouper
) -> tuple[list[str], dict[str, float]]:
    """The label ``"{uid}_{cluster}"`` of each row, and metrics. ``texts``: the answers by session, without padding."""
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
    if texts:
        uids = [sessions.uids[place] for place in texts]
        metrics = compute_group_distribution_per_prompt([labels[place] for place in texts], uids, scores)
    return [labels[place] for place in sessions.session], metrics
