"""Group labels ``"{uid}_{cluster}"``, and statistics and advantages over them.

A label identifies the samples that are compared with each other: the prompt's uid, the cluster within the prompt and,
with more levels, the cluster within that cluster. The functions have the signatures that a verl trainer expects. As
everywhere in groupwise, equal rewards get an advantage of exactly 0, and epsilon is added to the standard deviation.
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
from groupwise.core._checks import check_mask, check_tensors
from groupwise.errors import InputError

LABELS = "similarity_group_labels"  # the key in a batch
PREFIX = "similarity_groups/"
LEAST_COUNTS = 8  # prompts with 1 to 8 groups are always reported, also if there are none


def similarity_group_labels(uids: Sequence[str], labels: Tensor) -> list[str]:
    """``"{uid}_{cluster}"`` for each of P·G samples, prompt by prompt; ``"{uid}_{a}_{b}"`` with more levels.

    uids: one per prompt. labels: clusters ``(P, G, levels)`` from coarse to fine, as integers.
    """
    names = _listed(uids)
    if labels.dim() != 3 or len(labels) != len(names):
        raise InputError(
            f"labels has shape {tuple(labels.shape)}; expected (P, G, levels) for the P = {len(names)} uids"
        )
    repeated = [name for name, count in Counter(map(str, names)).items() if count > 1]
    if repeated:
        raise InputError(f"two prompts have the uid {repeated[0]!r}; their answers would be compared with each other")
    return [
        "_".join([str(name), *map(str, path)])
        for name, paths in zip(names, labels.tolist(), strict=True)
        for path in paths
    ]


def parent_labels(labels: Sequence[str]) -> list[str]:
    """Each label without its last part: the enclosing cluster, or the prompt's uid, which may contain ``_``."""
    names = _listed(labels)
    for name in names:
        if not isinstance(name, str) or "_" not in name:
            raise InputError(f"the label {name!r} has no parent; labels look like 'uid_0'")
    return [name.rpartition("_")[0] for name in names]


def compute_single_member_mask(labels: Any) -> Tensor:
    """The samples ``(B,)`` that are alone in their group; their advantage is 0 for any reward."""
    names = _listed(labels)
    sizes = Counter(names)
    return torch.tensor([sizes[name] == 1 for name in names], dtype=torch.bool)


def compute_group_distribution_per_prompt(
    labels: Any, uids: Sequence[Any] | None = None, scores: Any = None
) -> dict[str, float]:
    """Metrics of one batch: the number of groups per prompt, and of samples that are alone in theirs.

    uids: the prompt of each sample; by default the label without its last part.
    scores: silhouettes, one per prompt, for their mean.
    """
    names = _listed(labels)
    prompts = parent_labels(names) if uids is None else _listed(uids)
    if not names or len(prompts) != len(names):
        raise InputError(
            f"{len(prompts)} uids were given for {len(names)} labels; there must be one of each per sample"
        )
    pairs = list(zip(prompts, names, strict=True))  # a bare cluster number is only unique within its prompt
    groups = Counter(prompt for prompt, _ in set(pairs))
    split = Counter(groups.values())
    metrics = {
        f"{PREFIX}n_prompts_split_into_{number}_groups": float(split[number])
        for number in range(1, max(LEAST_COUNTS, *split) + 1)
    }
    metrics[f"{PREFIX}avg_groups_per_prompt"] = statistics.fmean(groups.values())
    metrics[f"{PREFIX}n_single_member_groups"] = float(compute_single_member_mask(pairs).sum())
    if scores is not None:
        values = [float(score) for score in _listed(scores)]
        if len(values) != len(groups):
            raise InputError(f"{len(values)} scores were given for {len(groups)} prompts")
        metrics[f"{PREFIX}avg_silhouette_score"] = statistics.fmean(values)
    return metrics


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
    """GRPO advantages within similarity groups, with the signature of a verl advantage estimator.

    token_level_rewards, response_mask: ``(B, T)``. A sample's reward is the sum over its tokens.
    index: the prompt of each sample, or its ``"{uid}_{cluster}"`` if there are no ``similarity_group_labels``.
    similarity_group_labels: ``"{uid}_{cluster}"`` of each sample, or the bare cluster number.
    norm_adv_by_std_in_grpo: divide by the standard deviation. The same key in ``config`` takes precedence.

    Returns advantages and returns ``(B, T)``, which are equal: the sample's advantage at each of its tokens. A sample
    alone in its group gets 0. ``unused`` takes further arguments that verl passes to all estimators.
    """
    check_tensors(token_level_rewards=token_level_rewards, response_mask=response_mask)
    if token_level_rewards.dim() != 2 or not token_level_rewards.is_floating_point():
        raise InputError(
            f"token_level_rewards must be floating-point numbers of shape (B, T), got {token_level_rewards.dtype} of "
            f"shape {tuple(token_level_rewards.shape)}"
        )
    mask = check_mask("response_mask", response_mask, token_level_rewards.shape)
    groups = _combined(index, similarity_group_labels, len(token_level_rewards))
    by_spread = _setting(config, "norm_adv_by_std_in_grpo", norm_adv_by_std_in_grpo)
    with torch.no_grad():
        rewards = token_level_rewards.sum(dim=-1)
        sample_advantages = group_advantages(rewards, groups, scale="group" if by_spread else "none", eps=epsilon)
        advantages = sample_advantages.to(token_level_rewards.dtype).unsqueeze(1) * mask
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
    """Whether a label is only a cluster number (or numbers), without the prompt's uid."""
    return isinstance(label, (Real, tuple)) or (isinstance(label, str) and label.isdecimal())


def _setting(config: Any, name: str, default: Any) -> Any:
    """A setting of verl, whose configurations are mappings or objects."""
    value = getattr(config, name, None)
    if value is None and hasattr(config, "get"):
        value = config.get(name)
    return default if value is None else value


def _listed(values: Any) -> list[Any]:
    """One value per sample, from a list, an array or a tensor."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise InputError(f"expected one label per sample, got {type(values).__name__} {str(values)[:40]!r}")
    return [tuple(value) if isinstance(value, list) else value for value in values]  # tuples are hashable
