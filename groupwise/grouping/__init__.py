"""Similarity groups: answers to a prompt are embedded and clustered, and each is compared with its cluster.

`SimilarityGrouperWorker` is the Ray worker, `compute_similarity_group_grpo_outcome_advantage` the estimator for verl.
"""

from groupwise.grouping.cluster import nested_groups, similarity_groups
from groupwise.grouping.embed import load_embedder
from groupwise.grouping.labels import (
    compute_group_distribution_per_prompt,
    compute_similarity_group_grpo_outcome_advantage,
    compute_single_member_mask,
)
from groupwise.grouping.workers import SimilarityGrouperWorker

__all__ = [
    "SimilarityGrouperWorker",
    "compute_group_distribution_per_prompt",
    "compute_similarity_group_grpo_outcome_advantage",
    "compute_single_member_mask",
    "load_embedder",
    "nested_groups",
    "similarity_groups",
]
