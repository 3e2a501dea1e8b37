"""The meaning of every metric that a run logs, by section. docs/metrics.md is made from it.

A part in braces stands for a name that a run supplies: a reward's, a task's grade, a number of clusters, a letter.
A test runs several algorithms and fails if one logs a metric that has no description here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from itertools import combinations
from types import MappingProxyType

from groupwise.algorithms import ALGORITHMS

# The terms of the objective and their weights, as in `update.objective.TERMS`, which loads torch. A test compares them.
TERM_WEIGHTS = {
    "policy": "loss.policy_coef",
    "kl": "loss.kl_coef",
    "entropy": "loss.entropy_coef",
    "preference": "preference.weight",
    "distillation": "distillation.weight",
}

_REWARDS = {
    "reward": "mean reward of the step's completions: the weighted sum of all reward functions",
    "reward_std": "mean over groups of the standard deviation of the rewards; groups of one are left out",
    "frac_reward_zero_std": "share of groups whose rewards are all equal, so that they have no learning signal",
    "rewards/{reward}/mean": "mean of one reward function, unweighted, over the completions it scored",
    "rewards/{reward}/std": "its standard deviation over these completions",
    "rewards/{reward}/variance_share": "variance of this weighted reward within groups, as a share of the sum over all "
    "functions; with several functions that are summed before they are normalized",
    "rewards_failed": "number of completions whose reward failed and that were dropped (`scoring.on_error`)",
    "advantage/largest": "largest absolute advantage of a completion",
    "{grade}": "share of completions that the task's grade counts as right, such as `accuracy`",
    "{grade}_no_answer": "share of completions in which the grade finds no answer",
    "{grade}_masked": "the same as `{grade}`, over the completions that the masks leave; with `[masks]`",
}
_COMPLETIONS = {
    "completions/mean_length": "mean length of a completion in tokens",
    "completions/min_length": "length of the shortest completion",
    "completions/max_length": "length of the longest completion",
    "completions/mean_terminated_length": "mean length of the completions that ended by themselves",
    "completions/clipped_ratio": "share of completions that were cut off by `sampling.max_new_tokens`",
    "completions/identical": "share of prompts whose completions are all the same text",
}
_SIGNAL = {
    "signal/contributing": "share of completions that the policy loss learns from: unmasked, in a group with spread",
    "signal/tokens_not_computed": "share of prompt and completion tokens that were left out of the update",
    "difficulty/weight_max": "largest weight of a group; with `advantages.difficulty`",
    "pass_rate/mean": 'mean running pass rate of the training rows visited so far; with `data.sampling = "pass_rate"`',
    "pass_rate/solved": "share of these rows that count as solved (`data.solved_pass_rate`)",
    "pass_rate/unsolved": "share of these rows that count as unsolved (`data.unsolved_pass_rate`)",
    "pass_rate/visited": "share of all training rows that were visited so far",
    "pass_rate/skipped": "share of the rows whose turn it was in this step that were skipped for their pass rate",
    "resample/rounds": "extra rollout rounds; with `train.resample_rounds`",
    "resample/replaced": "prompts without a learning signal that were replaced",
    "resample/extra_tokens": "sampled tokens that are not part of the batch",
}
_ASYNC = {
    "async/staleness_mean": "mean age of a token: updates between the weights that sampled it and those that learn it",
    "async/staleness_max": "age of the oldest token of the batch; at most `train.max_staleness`",
    "async/groups_waiting": "groups that are drawn and not learned yet, after this batch was taken",
    "async/dropped_stale": "groups that became too old before their rewards were there; their rows are drawn again",
    "async/dropped_settings": "groups that were drawn before the schedule changed `sampling.samples_per_prompt`",
    "async/dropped_unfinished": "groups that were not finished in the checkpoint from which the run was resumed",
}
_LOSS = {
    "loss": "sum of all terms of the objective, the mean over the step's updates",
    **{f"loss/{name}": f"the {name} term, times its weight `{weight}`" for name, weight in TERM_WEIGHTS.items()},
    "grad_norm": "norm of the gradient before clipping",
    "updates": "optimizer updates in this step",
    "weights_changed": "share of the trained weights, in a sample of a few thousand, that the step changed; close to 1 "
    "unless the learning rate is lost in the rounding of float32",
    "updates_not_finite": "updates that were skipped because of NaN or inf (`train.on_non_finite`)",
    "kl": "KL to the reference per token, without its weight; with `loss.kl_coef`",
    "kl_ratio_weighted": 'the same, times the mean of π_θ/π_ref; with `loss.kl = "full_ratio_weighted"`',
    "distillation/kl": "reverse KL to the teacher per token, KL(π_θ ‖ π_T), without its weight: exact, or estimated "
    "from the sampled tokens; with `distillation.weight`",
    "distillation/agreement": "share of tokens for which student and teacher have the same most likely token; with "
    '`distillation.kl = "full"`',
    "entropy": "entropy of the policy per token",
    "ratio": "mean importance ratio π_θ/π_old, per token or sequence",
    "approx_kl": "k3 estimate of KL(π_old ‖ π_θ): how far the updates of this step moved the policy",
    "clip_ratio/low_mean": "share of tokens (or sequences) whose ratio was clipped at the lower bound; with "
    "`masks.divergence` share of tokens that it masks, those with a negative advantage",
    "clip_ratio/high_mean": "share that was clipped at the upper bound, or masked with a positive advantage",
    "clip_ratio/region_mean": "the sum of both",
    "clip_ratio/low_min": "smallest share, of all completions of a local batch, of tokens that were clipped at the "
    "lower bound; with `train.local_batch_size`, over whose batches `entropy`, `kl` and `clip_ratio/…` are then means",
    "clip_ratio/high_max": "largest such share at the upper bound",
    "sampler/logp_difference_mean": "mean difference of a token's log-prob between sampler and trainer; with "
    "`train.max_staleness` the weights differ, too",
    "sampler/logp_difference_max": "largest such difference",
    "sampler/kl": "k3 estimate of KL(π_sampler ‖ π_trainer) per token",
    "sampler/sequence_ratio_mean": "mean of π_trainer/π_sampler of a completion; 1 on average if they are the same",
    "sampler/sequence_ratio_max": "largest such ratio",
    "sampler/importance_mean": "mean weight of the computed tokens, or with a mode of sequences of the completions; "
    "with `loss.importance_cap` and its relatives",
    "sampler/importance_truncated": "share of these weights that are truncated",
    "sampler/importance_masked": "share of these tokens or completions that are masked; with the modes token_mask and "
    "sequence_mask of `loss.importance_sampling`",
    "sampler/rejected": "share of completions that `loss.rejection_low` and `loss.rejection_high` mask, by "
    "`loss.rejection`",
}
_GRADIENTS = {
    **{f"grad_norm/{name}": f"norm of the gradient of the {name} term" for name in TERM_WEIGHTS},
    "grad_norm/grpo": "norm of the gradient of all terms but the preference term",
    **{
        f"grad_cosine/{first}_{second}": f"cosine between the gradients of the {first} and the {second} term"
        for first, second in combinations(TERM_WEIGHTS, 2)
    },
    "grad_cosine/grpo_preference": "cosine between the gradient of the preference term and that of all others",
}
_MASKS = {
    "mask_ratio": "share of completions that all masks together leave",
    "masks/truncated": "share masked because they were cut off (`masks.truncated`)",
    "masks/equal_rewards": "share dropped because all rewards of their group are equal (`masks.drop_equal_rewards`)",
    "masks/too_short": "share masked because they have too few characters (`masks.validity`)",
    "masks/no_answer": "share masked because they contain no answer (`masks.validity`)",
    "masks/repetitive": "share masked because they repeat word trigrams (`masks.validity`)",
    "masks/off_policy": "share masked by `masks.off_policy`, the mean over the passes over the batch",
    "masks/dropped": 'share whose reward failed (`scoring.on_error = "drop"`)',
    "masks/keep_sampling_mask": "mean probability per token that the sampling filters removed",
}
_SIMILARITY = {
    "similarity_groups/avg_groups_per_prompt": "mean number of clusters of a prompt's completions",
    "similarity_groups/n_prompts_split_into_{number}_groups": "prompts with that many clusters; 1 to 8 always appear",
    "similarity_groups/n_single_member_groups": "completions that are alone in their cluster",
    "similarity_groups/avg_silhouette_score": "mean silhouette of the prompts' clusters, from -1 to 1",
    "similarity_groups/good_diversity": "1 if most prompts have 3 to 5 clear clusters, else 0",
    "similarity_groups/n_rewards_skipped": "completions that were not scored (`grouping.skip_single_members`)",
    "diversity/mean_distance": "mean cosine distance between two completions of a prompt",
    "diversity/distance_between_prompts": "mean cosine distance between completions of different prompts",
    "diversity/effective_clusters": "exponential of the entropy of the cluster sizes, the mean over prompts",
    "diversity/distinct_{number}": "distinct word n-grams of a prompt's completions, as a share of all; n is 1 to 3",
}
_PREFERENCE = {
    "preference/weight": "weight of the preference term in this step",
    "preference/pairs": "pairs in this step",
    "preference/pairs_group": 'pairs made from the sampled groups; with `preference.pairs = "both"`',
    "preference/pairs_data": 'pairs of the data set; with `preference.pairs = "both"`',
    "preference/refused/tie": "pairs refused because both rewards are equal",
    "preference/refused/margin": "pairs refused because the rewards differ by too little (`preference.min_margin`)",
    "preference/refused/same_answer": "pairs refused because both completions are the same text",
    "preference/refused/alone": "groups with fewer than two completions to compare",
    "preference/loss": "preference loss without its weight",
    "preference/accuracy": "share of pairs in which the chosen completion has the higher DPO reward",
    "preference/margin": "mean difference of the two DPO rewards",
    "preference/chosen_reward": "mean DPO reward of the chosen completion, β(log π_θ − log π_ref)",
    "preference/rejected_reward": "mean DPO reward of the rejected completion",
    "preference/chosen_logp": "mean log-prob of the chosen completion",
    "preference/rejected_logp": "mean log-prob of the rejected completion",
}
_PROGRESS = {
    "step": "number of the step, from 1; an evaluation before training has 0",
    "epoch": "passes over the training rows so far",
    "num_tokens": "completion tokens sampled so far",
    "learning_rate": "learning rate of this step",
    "temperature": "sampling temperature of this step",
    "samples_per_prompt": "completions per prompt in this step",
    "kl_coef": "weight of the KL in this step",
    "entropy_coef": "weight of the entropy bonus after this step; with `loss.entropy_target`",
    "token_budget": "tokens per forward and backward pass; halved if memory runs out",
    "token_budget_full": "its value before it was halved, once memory has run out",
    "reference_refreshes": "times that the reference was updated; if there is a reference",
}
_TIME = {
    "step_time": "seconds of the step",
    "tokens_per_second": "sampled tokens per second of the step",
    "time/generate": "seconds of sampling",
    "time/group": "seconds of embedding and clustering; with similarity groups",
    "time/reward": "seconds of the reward functions",
    "time/wait": "seconds that the step waited for rewards, or for completions of a remote generator; with "
    "`train.max_staleness`",
    "time/sampler_idle": "seconds in which a remote generator had nothing to sample; with `train.max_staleness`",
    "time/train": "seconds of the updates",
    "memory_estimate": "GiB that an update takes at most by the estimate of `groupwise check`; with one process",
    "device_memory": "memory of the GPU in GiB, or on a CPU what there was for this process",
    "memory/{stage}": "peak memory of that stage in GiB: the GPU's, or on a CPU the resident memory at its end",
}
_EVALUATION = {
    "eval/{grade}": "share of held-out rows that are right",
    "eval/{grade}_low": "lower end of its 95 % confidence interval",
    "eval/{grade}_high": "upper end of its 95 % confidence interval",
    "eval/{grade}_no_answer": "share of held-out completions without an answer",
    "eval/reward": "mean reward of the held-out rows; for tasks without a grade, or with `evaluate.rewards`",
    "eval/reward_low": "lower end of its 95 % confidence interval",
    "eval/reward_high": "upper end of its 95 % confidence interval",
    "eval/reward_unscored": "share of held-out completions without a reward",
    "eval/reward_std": "standard deviation of the held-out completions' rewards; with `evaluate.rewards`",
    "eval/rewards/{reward}/mean": "mean of that reward function on the held-out rows; with `evaluate.rewards`",
    "eval/rewards/{reward}/std": "its standard deviation",
    "eval/{set}/{metric}": "that metric of one of several sets of held-out rows",
    "eval/mean_length": "mean length of a held-out completion in tokens",
    "eval/truncated": "share of held-out completions that were cut off",
    "eval/preference_accuracy": "share of held-out pairs in which the chosen completion has the higher DPO reward",
    "eval/preference_accuracy_low": "lower end of its 95 % confidence interval",
    "eval/preference_accuracy_high": "upper end of its 95 % confidence interval",
    "eval/preference_logp_accuracy": "share of held-out pairs whose chosen one has the higher log-prob per token",
    "eval/preference_logp_accuracy_low": "lower end of its 95 % confidence interval",
    "eval/preference_logp_accuracy_high": "upper end of its 95 % confidence interval",
    "eval/preference_loss": "preference loss of the held-out pairs",
    "eval/preference_margin": "mean difference of the two DPO rewards of the held-out pairs",
    "eval/preference_chosen_reward": "mean DPO reward of the chosen completions",
    "eval/preference_rejected_reward": "mean DPO reward of the rejected completions",
}
_WARNINGS = {
    "warnings/kl_high": "the KL to the reference is above run.kl_warning",
    "warnings/kl_low": "the KL stays near 0 although it has a weight",
    "warnings/entropy_collapsed": "the entropy fell below 15 % of its start and below 0.1 per token",
    "warnings/entropy_exploded": "the entropy is twice that of the start, and more than 0.5 per token above it",
    "warnings/log_prob_mismatch": "sampler and trainer differ by more than train.max_logp_mismatch before the update",
    "warnings/weights_unchanged": "a step changes fewer than half of the weights",
    "warnings/not_finite": "updates were skipped because of NaN or inf",
    "warnings/memory": "memory ran out and the token budget was halved, or the peak is at 95 % of what there is",
    "warnings/stale": "with asynchronous rollouts, the policy is far from the one that sampled",
    "warnings/teacher_far": "a student that learns from a teacher alone does not approach it",
    "warnings/masked": "the masks leave fewer than 70 % of the completions",
    "warnings/truncated": "more than half of the completions are cut off",
    "warnings/no_answer": "more than 10 % of the completions contain no answer",
    "warnings/answers_longer": "completions are half as long again as at the start, and close to the limit",
    "warnings/answers_identical": "for most prompts all completions are the same text",
    "warnings/no_learning_signal": "ten steps in a row had no learning signal",
    "warnings/zero_spread": "more than half of the groups have equal rewards",
    "warnings/reward_constant": "a reward function has returned the same value for every completion since the start",
    "warnings/reward_dominates": "one of several reward functions has 95 % of the variance of their weighted sum",
    "warnings/rewards_failed": "the rewards of more than 5 % of the completions failed",
    "warnings/answers_alike": "the completions of most prompts are nearly the same",
    "warnings/answers_unrelated": "the completions of most prompts form no clusters",
    "warnings/answers_scattered": "most completions are alone in their cluster",
    "warnings/no_pairs": "ten steps in a row had no preference pair",
    "warnings/preference_opposed": "the preference term's gradient opposes that of the other terms",
    "warnings/chosen_unlikely": "the chosen completions of pairs become less likely",
    "eval/warnings/overfitting": "the held-out metric fell below its best by more than both intervals, while the "
    "reward rose",
    "warnings/below_chance": "accuracy is below guessing (task `usmle`)",
    "warnings/one_letter": "most answers are the same letter (task `usmle`)",
}
_BUILT_IN_REWARDS = {
    "chance": "accuracy of guessing (task `usmle`)",
    "letters/{letter}": "share of the answers that are that letter (task `usmle`)",
    "letters_right/{letter}": "share of the questions whose right answer is that letter (task `usmle`)",
    "enhanced/correctness": "mean of the part of the reward for a right answer (task `usmle`)",
    "enhanced/term_bonus": "mean bonus for medical terms (task `usmle`)",
    "enhanced/short_penalty": "mean penalty for a very short answer (task `usmle`)",
    "enhanced/clamped": "mean change by keeping the reward in its range (task `usmle`)",
    "judge/mean_score": "mean score that the judge gave (reward `judge`)",
    "judge/parse_failures": "share of verdicts without a readable score (reward `judge`)",
    "judge/requests_failed": "share of requests that failed (reward `judge`)",
    "judge/seconds": "mean seconds per request (reward `judge`)",
    "reward_model/truncated": "share of texts that were cut to the reward model's window (reward `reward_model`)",
    "math_equal/timeouts": "share of comparisons that took too long (reward `math_equal`)",
}

_CONVERSATIONS = {
    "episodes/turns": "mean number of the model's turns in a conversation",
    "episodes/given_share": "share of the tokens after the prompt that were given, not sampled: they are context only",
    "episodes/computed_share": "tokens of a forward pass, each shared beginning once, as a share of a padded batch",
    "episodes/reused_share": "share of the tokens before turns not computed again (generator `engine`; first process)",
    "episodes/tool_calls": "mean number of tool calls in a conversation",
    "episodes/failed_tool_calls": "of these, calls that were answered by an error",
    "episodes/unreadable_calls": "mean number of calls that could not be parsed, in a conversation",
    "episodes/done": "share of the conversations that the environment, or a final answer, ended",
    "episodes/turn_limit": "share that ended because of `environment.max_turns`",
    "episodes/token_limit": "share that ended because no tokens were left, also for the end of a turn",
    "episodes/retried": "share that was begun again, because the environment failed",
    "episodes/groups_failed": "number of groups that were left out, because the environment failed again",
    "environment/reward/{name}": "mean of one of several rewards that the environment gives, where it does",
    "environment/{name}": "mean over the conversations of a number that the environment counts",
}

SECTIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "Rewards and grades": _REWARDS,
        "Completions": _COMPLETIONS,
        "Conversations": _CONVERSATIONS,
        "Learning signal": _SIGNAL,
        "Asynchronous rollouts": _ASYNC,
        "Loss and update": _LOSS,
        "Gradients of the terms": _GRADIENTS,
        "Masks": _MASKS,
        "Similarity groups": _SIMILARITY,
        "Preference pairs": _PREFERENCE,
        "Progress and settings": _PROGRESS,
        "Time and memory": _TIME,
        "Evaluation": _EVALUATION,
        "Warnings": _WARNINGS,
        "Logged by built-in rewards": _BUILT_IN_REWARDS,
    }
)
"""The description of each metric, by section."""

_PARTS = {"reward": r"[^/]+", "number": r"\d+", "letter": "[A-Z]", "stage": "generate|group|reward|wait|train"}
_PARTS["name"] = ".+"
_PARTS |= {"set": r"(?!warnings/|rewards/)[^/]+", "metric": ".+"}


def aliases() -> dict[str, dict[str, str]]:
    """The additional names of metrics: what each is the same as, and the algorithms that log it, by alias."""
    found: dict[str, dict[str, str]] = {}
    for algorithm, preset in ALGORITHMS.items():
        for alias, name in preset.metrics.items():
            found.setdefault(alias, {})[algorithm] = name
    return found


def describe_metric(name: str, grades: Collection[str] = ()) -> str | None:
    """The meaning of a metric, or None if it has none here. ``grades`` are the names of the task's grades."""
    for pattern, meaning in {
        pattern: text for section in SECTIONS.values() for pattern, text in section.items()
    }.items():
        if matches(pattern, name, grades):
            return meaning
    same = aliases().get(name)
    return f"the same as `{next(iter(same.values()))}`" if same else None


def matches(pattern: str, name: str, grades: Collection[str] = ()) -> bool:
    """Whether a metric is one that a pattern of `SECTIONS` describes."""
    parts = {**_PARTS, "grade": "|".join(map(re.escape, grades)) or "(?!)"}
    expression = re.sub(r"\\{(\w+)\\}", lambda part: f"(?:{parts[part[1]]})", re.escape(pattern))
    return re.fullmatch(expression, name) is not None
