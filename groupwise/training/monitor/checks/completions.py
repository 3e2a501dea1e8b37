"""Checks of the sampled completions: cut off, without an answer, longer and longer, or all the same."""

from __future__ import annotations

from groupwise.training.monitor.checks.base import Problem, RecentSteps

MAX_TRUNCATED, ALL_TRUNCATED = 0.5, 0.95  # share cut off; above a half, most rewards are for unfinished texts
MAX_NO_ANSWER = 0.1
# Longer answers may be what is learned. Half as long again, and close to the limit or cut off more often, is a trend
# that the limit ends.
LONGER, NEAR_LIMIT, MORE_CUT = 1.5, 0.7, 0.1
MAX_IDENTICAL = 0.5  # share of prompts whose completions are all the same: the majority, as for groups without spread
MAX_UNSPLIT = 0.5  # share of prompts whose answers are all in one cluster
ALIKE = 0.5  # relative to the distance between answers to different prompts; without it, a cosine distance
MAX_SINGLE = 0.5  # share of answers that are alone in their cluster

CUT_OFF = "completions/clipped_ratio"
SINGLE = "similarity_groups/n_single_member_groups"
SPLIT = "similarity_groups/n_prompts_split_into_"


def truncated(recent: RecentSteps) -> Problem | None:
    cut, sampling = recent.mean(CUT_OFF), recent.recipe.sampling
    if cut is None or cut <= MAX_TRUNCATED or sampling.min_new_tokens >= sampling.max_new_tokens:
        return None
    return Problem(
        f"{cut:.0%} of the completions are cut off before they end",
        "raise <sampling.max_new_tokens>, or ask for shorter answers in the prompt (data.system_prompt)",
        {CUT_OFF: cut},
        "error" if cut >= ALL_TRUNCATED else "warning",
    )


def no_answer(recent: RecentSteps) -> Problem | None:
    name = f"{recent.metric}_no_answer"
    share = recent.mean(name)
    if share is None or share <= MAX_NO_ANSWER:
        return None
    message, evidence = f"{share:.0%} of the completions contain no answer", {name: share}
    cut = recent.mean(CUT_OFF) or 0.0
    if cut > MAX_NO_ANSWER:
        evidence[CUT_OFF] = cut
        return Problem(f"{message}, and {cut:.0%} are cut off", "raise <sampling.max_new_tokens>", evidence)
    remedy = "describe its form in the prompt (data.system_prompt), or reward the form ([[rewards]])"
    return Problem(message, remedy, evidence)


def answers_longer(recent: RecentSteps) -> Problem | None:
    length, start = recent.mean("completions/mean_length"), recent.start.get("completions/mean_length")
    if length is None or start is None or length < LONGER * start:
        return None
    cut, cut_at_start = recent.mean(CUT_OFF) or 0.0, recent.start.get(CUT_OFF, 0.0)
    limit = recent.recipe.sampling.max_new_tokens
    if length < NEAR_LIMIT * limit and cut < cut_at_start + MORE_CUT:
        return None
    return Problem(
        f"the completions grow toward the limit of {limit} tokens: {length:.0f} tokens on average, {start:.0f} at the "
        f"start, and {cut:.0%} are cut off",
        "raise <sampling.max_new_tokens>, or penalise long answers with <scoring.overlong_buffer>; check whether the "
        "reward pays for length, and whether <loss.name> favours long answers",
        {"completions/mean_length": length, "completions/mean_length at the start": start, CUT_OFF: cut},
    )


def answers_identical(recent: RecentSteps) -> Problem | None:
    share = recent.mean("completions/identical")
    if share is None or share <= MAX_IDENTICAL or recent.solved or recent.recipe.taught:
        return None
    return Problem(
        f"for {share:.0%} of the prompts all completions are the same text",
        "raise <sampling.temperature>, <loss.entropy_coef>, or <loss.kl_coef>, or lower <optimizer.learning_rate>; "
        "check whether one answer to everything exploits the reward",
        {"completions/identical": share},
    )


def _unsplit(recent: RecentSteps) -> tuple[float, float, str]:
    """The share of prompts whose answers are all in one cluster; the distance of answers to one prompt relative to that
    of answers to different prompts; and these distances in words."""
    counts = recent.means(SPLIT)
    share = counts.get("1_groups", 0.0) / max(1e-9, sum(counts.values()))
    within = recent.mean("diversity/mean_distance") or 0.0
    between = recent.mean("diversity/distance_between_prompts")
    text = f"their mean distance is {within:.2f}"
    if between is None or between <= 0:
        return share, within, text
    return share, within / between, f"{text}, that of answers to different prompts {between:.2f}"


def answers_alike(recent: RecentSteps) -> Problem | None:
    share, distance, text = _unsplit(recent)
    if share <= MAX_UNSPLIT or distance >= ALIKE:
        return None
    return Problem(
        f"the answers to {share:.0%} of the prompts are all alike ({text})",
        "check whether they exploit the reward, and raise <sampling.temperature>, <loss.kl_coef>, or "
        "<loss.entropy_coef>",
        {"prompts with one cluster": share, "diversity/mean_distance": recent.mean("diversity/mean_distance") or 0.0},
    )


def answers_unrelated(recent: RecentSteps) -> Problem | None:
    share, distance, text = _unsplit(recent)
    if share <= MAX_UNSPLIT or distance < ALIKE:
        return None
    silhouette = recent.mean("similarity_groups/avg_silhouette_score") or 0.0
    by_threshold = recent.recipe.grouping.limit == "grouping.threshold"
    more = "raise <grouping.threshold>" if by_threshold else "lower <grouping.min_silhouette>"
    return Problem(
        f"the answers to {share:.0%} of the prompts form no clusters (silhouette {silhouette:.2f}) though they differ "
        f"({text}), so each prompt is one group",
        f"raise <sampling.samples_per_prompt>, {more}, or try another <grouping.embedder>",
        {"prompts with one cluster": share, "similarity_groups/avg_silhouette_score": silhouette},
    )


def answers_scattered(recent: RecentSteps) -> Problem | None:
    answers = sum(recent.means(SPLIT).values()) * recent.recipe.sampling.samples_per_prompt
    share = (recent.mean(SINGLE) or 0.0) / max(1e-9, answers)
    if share <= MAX_SINGLE:
        return None
    return Problem(
        f"{share:.0%} of the answers are alone in their cluster and have no learning signal",
        f"lower <{recent.recipe.grouping.limit}>, set <advantages.shrinkage>, or try another <grouping.embedder>",
        {"answers alone in their cluster": share},
    )
