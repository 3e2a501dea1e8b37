"""A verl plugin for similarity-group GRPO on Ray (docs/verl.md).

verl finds it through an entry point. It adds an advantage estimator, and verl's trainers group answers by similarity if
it is selected. ``python -m groupwise.integrations.verl`` checks the installation.
"""

ESTIMATOR = "similarity_group_grpo"  # algorithm.adv_estimator
TESTED_VERSION = "0.9.1"
