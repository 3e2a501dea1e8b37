"""Similarity groups: answers to a prompt are embedded and clustered, and each is compared with its cluster.

`SimilarityGrouperWorker` is the Ray worker, `compute_similarity_group_grpo_outcome_advantage` the estimator for verl.
"""

from groupwise.grouping.cluster import METHODS, SimilarityGroups, cosine_distances, nested_groups, similarity_groups
from groupwise.grouping.diversity import diversity, effective_clusters
from groupwise.grouping.embed import Embedder, check_embedder, load_embedder
from groupwise.grouping.grouper import GroupingResult, LocalGrouper, SimilarityGrouper, group_texts, join_results
from groupwise.grouping.labels import (
    LABELS,
    compute_group_distribution_per_prompt,
    compute_similarity_group_grpo_outcome_advantage,
    compute_single_member_mask,
    parent_labels,
    similarity_group_labels,
)
from groupwise.grouping.text import result_text
from groupwise.grouping.workers import RayGrouper, SimilarityGrouperWorker, make_grouper

__all__ = [
    "LABELS",
    "METHODS",
    "Embedder",
    "GroupingResult",
    "LocalGrouper",
    "RayGrouper",
    "SimilarityGrouper",
    "SimilarityGrouperWorker",
    "SimilarityGroups",
    "check_embedder",
    "compute_group_distribution_per_prompt",
    "compute_similarity_group_grpo_outcome_advantage",
    "compute_single_member_mask",
    "cosine_distances",
    "diversity",
    "effective_clusters",
    "group_texts",
    "join_results",
    "load_embedder",
    "make_grouper",
    "nested_groups",
    "parent_labels",
    "result_text",
    "similarity_group_labels",
    "similarity_groups",
]
