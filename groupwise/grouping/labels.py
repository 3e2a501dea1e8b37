"""The names of the similarity-group document, over labels such as ``"{uid}_{sim_group}"``.

A label says who is compared with whom: the prompt's uid, then the cluster within the prompt, then, with more levels,
the cluster within that one. What a trainer calls between grouping and the update is here, and needs no Ray: who is
alone, what to log, and the advantage. It deviates from the document's snippet where groupwise always does: equal
rewards get exactly 0, and the standard deviation is increased by epsilon rather than taken as it is.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from groupwise.core import group_advantages
from groupwise.core._checks import check_mask, check_tensors, shape_of
from groupwise.errors import InputError

LABELS = "similarity_group_labels"  # where a batch keeps them
PREFIX = "similarity_groups/"
LEAST_COUNTS = 8  # the document counts prompts of 1 to 8 groups, whether or not there are any


def similarity_group_labels(uids: Sequence[str], labels: Any) -> list[str]:
    """``"{uid}_{sim_group}"`` for each of P·G samples, prompt after prompt; ``"{uid}_{a}_{b}"`` with more levels.

    uids: one for each of P prompts.
    labels: clusters ``(P, G)``, or ``(P, G, levels)`` from coarse to fine; a tensor, an array or nested lists.
    """
    names, clusters = _listed(uids), _tensor(labels)
    if clusters.dim() == 2:
        clusters = clusters.unsqueeze(2)
    if clusters.dim() != 3 or len(clusters) != len(names):
        raise InputError(
            f"labels has shape {shape_of(clusters)}; expected (P, G) or (P, G, levels) for the P = {len(names)} uids"
        )
    if clusters.is_floating_point() or clusters.is_complex():
        raise InputError(f"labels must be whole numbers, got {clusters.dtype}")
    repeated = [name for name, count in Counter(map(str, names)).items() if count > 1]
    if repeated:
        raise InputError(f"two prompts have the uid {repeated[0]!r}; their answers would be compared with each other")
    return [
        "_".join([str(name), *map(str, path)])
        for name, paths in zip(names, clusters.tolist(), strict=True)
        for path in paths
    ]


def parent_labels(labels: Sequence[str]) -> list[str]:
    """Each label without its last part: the cluster's own cluster, or the prompt's uid, which may contain ``_``."""
    names = _listed(labels)
    for name in names:
        if not isinstance(name, str) or "_" not in name:
            raise InputError(f"the label {name!r} has no parent; labels look like 'uid_0'")
    return [name.rpartition("_")[0] for name in names]


def compute_single_member_mask(labels: Any) -> Tensor:
    """Which of B samples ``(B,)`` are alone in their group: their advantage is 0, whatever their reward."""
    names = _listed(labels)
    sizes = Counter(names)
    return torch.tensor([sizes[name] == 1 for name in names], dtype=torch.bool)


def compute_group_distribution_per_prompt(
    labels: Any, uids: Sequence[Any] | None = None, scores: Any = None
) -> dict[str, float]:
    """What to log of one batch: into how many groups its prompts were split, and how many samples are alone.

    uids: the prompt of each sample; without them a label's last part is taken for its group.
    scores: silhouettes, one per prompt, for their mean.
    """
    names = _listed(labels)
    prompts = parent_labels(names) if uids is None else _listed(uids)
    if not names or len(prompts) != len(names):
        raise InputError(
            f"{len(prompts)} uids were given for {len(names)} labels; there must be one of each per sample"
        )
    pairs = list(zip(prompts, names, strict=True))  # a bare number is a group of its prompt only
    groups = Counter(prompt for prompt, _ in set(pairs))
    split = Counter(groups.values())
    found = {
        f"{PREFIX}n_prompts_split_into_{number}_groups": float(split[number])
        for number in range(1, max(LEAST_COUNTS, *split) + 1)
    }
    found[f"{PREFIX}avg_groups_per_prompt"] = statistics.fmean(groups.values())
    found[f"{PREFIX}n_single_member_groups"] = float(compute_single_member_mask(pairs).sum())
    if scores is not None:
        values = [float(score) for score in _listed(scores)]
        if len(values) != len(groups):
            raise InputError(f"{len(values)} scores were given for {len(groups)} prompts")
        found[f"{PREFIX}avg_silhouette_score"] = statistics.fmean(values)
    return found


def compute_similarity_group_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    similarity_group_labels: Any = None,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    **unused: Any,
) -> tuple[Tensor, Tensor]:
    """verl's estimator: each sample's summed reward, less the mean of its similarity group, over the group's spread.

    token_level_rewards, response_mask: ``(B, T)``.
    index: the prompt of each sample, or its ``"{uid}_{sim_group}"`` where there are no ``similarity_group_labels``.
    similarity_group_labels: ``"{uid}_{sim_group}"`` for each sample, or the bare number of its group.
    norm_adv_by_std_in_grpo: divide by the standard deviation; one of the same name in ``config`` goes before it.

    Returns advantages and returns ``(B, T)``, which are the same: the sample's number at each of its tokens. A sample
    that is alone in its group gets 0. ``unused`` is whatever else a trainer passes to all its estimators.
    """
    check_tensors(token_level_rewards=token_level_rewards, response_mask=response_mask)
    if token_level_rewards.dim() != 2 or not token_level_rewards.is_floating_point():
        raise InputError(
            f"token_level_rewards must be floating-point numbers of shape (B, T), got {token_level_rewards.dtype} of "
            f"shape {shape_of(token_level_rewards)}"
        )
    mask = check_mask("response_mask", response_mask, token_level_rewards.shape)
    groups = _combined(index, similarity_group_labels, len(token_level_rewards))
    by_spread = _setting(config, "norm_adv_by_std_in_grpo", norm_adv_by_std_in_grpo)
    with torch.no_grad():
        rewards = token_level_rewards.sum(dim=-1)
        each = group_advantages(rewards, groups, scale="group" if by_spread else "none", eps=epsilon)
        advantages = each.to(token_level_rewards.dtype).unsqueeze(1) * mask
    return advantages, advantages.clone()


def _combined(index: Any, labels: Any, size: int) -> list[Any]:
    prompts = _listed(index)
    groups = prompts if labels is None else _listed(labels)
    for name, values in (("index", prompts), ("similarity_group_labels", groups)):
        if len(values) != size:
            raise InputError(f"{name} has {len(values)} labels for {size} samples")
    if labels is not None and any(_is_bare(group) for group in groups):
        # Cluster 0 of one prompt is not cluster 0 of another.
        return list(zip(prompts, groups, strict=True))
    return groups


def _is_bare(label: object) -> bool:
    """A group's number, or numbers, within its prompt, rather than a label that names the prompt too."""
    return isinstance(label, (Real, tuple)) or (isinstance(label, str) and label.isdecimal())


def _setting(config: Any, name: str, default: Any) -> Any:
    """A setting of verl's, whose configurations are mappings or objects."""
    found = getattr(config, name, None)
    if found is None and hasattr(config, "get"):
        found = config.get(name)
    return default if found is None else found


def _listed(values: Any) -> list[Any]:
    """One value per sample, from a list, an array or a tensor."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise InputError(f"expected one label per sample, got {type(values).__name__} {str(values)[:40]!r}")
    return [tuple(value) if isinstance(value, list) else value for value in values]  # so that it can be counted


def _tensor(labels: Any) -> Tensor:
    try:
        return torch.tensor(labels.tolist() if hasattr(labels, "tolist") else labels)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"labels must be whole numbers of shape (P, G) or (P, G, levels): {error}") from error
