"""Preference learning from pairs of completions: pairs out of sampled groups, and pairs of a data set."""

# Metrics of held-out pairs: the share in which the chosen completion has the higher DPO reward, or log-prob per token.
PREFERENCE_ACCURACY = "preference_accuracy"
LOGP_ACCURACY = "preference_logp_accuracy"
