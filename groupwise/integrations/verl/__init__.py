"""Similarity-group GRPO inside verl, on Ray, for runs that outgrow one machine (docs/verl.md).

verl finds the plugin by itself, through an entry point, and is not changed: an advantage estimator and trainer modes
are added to its registries. ``python -m groupwise.integrations.verl`` says whether all of that works here.
"""

ESTIMATOR = "similarity_group_grpo"  # algorithm.adv_estimator
SETTINGS = "similarity"  # algorithm.similarity holds a run's grouping section
LABELS = "similarity_group_labels"  # the field that the trainer adds to verl's batch
TRIED_VERSION = "0.9.1"

# trainer.v1.trainer_mode, and the mode of verl's own that it is but for the advantage.
MODES = {
    "similarity_sync": "sync",
    "similarity_colocate_async": "colocate_async",
    "similarity_separate_async": "separate_async",
}

__all__ = ["ESTIMATOR", "LABELS", "MODES", "SETTINGS", "TRIED_VERSION"]
