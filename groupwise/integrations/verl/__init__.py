"""A verl plugin for similarity-group GRPO on Ray (docs/verl.md).

verl finds it through an entry point. It adds an advantage estimator and trainer modes to verl's registries.
``python -m groupwise.integrations.verl`` checks the installation.
"""

ESTIMATOR = "similarity_group_grpo"  # algorithm.adv_estimator
TESTED_VERSION = "0.9.1"

# trainer.v1.trainer_mode, and the mode of verl that it extends.
MODES = {
    "similarity_sync": "sync",
    "similarity_colocate_async": "colocate_async",
    "similarity_separate_async": "separate_async",
}
