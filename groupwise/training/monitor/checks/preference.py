"""Checks of learning from preference pairs."""

from __future__ import annotations

from groupwise.training.monitor.checks.base import MORE_SPREAD, WINDOW, Problem, RecentSteps

OPPOSED = -0.3  # cosine of the gradients of the preference term and of the rest
UNLIKELY = -1.0  # β × the change in log-prob of the chosen answers of pairs

REFUSED = "preference/refused/"
COSINE = "grad_cosine/grpo_preference"


def no_pairs(recent: RecentSteps) -> Problem | None:
    if not recent.mean("preference/weight") or recent.mean("preference/pairs") != 0.0:
        return None
    if not all("preference/pairs" in row for row in recent.rows):  # the term was switched on only recently
        return None
    refused = recent.means(REFUSED)
    reason = max(refused, key=lambda name: refused[name], default="")
    message = f"for {WINDOW} steps there was no pair to learn from"
    if not refused.get(reason):
        return Problem(message, "check <preference.pairs>, and preference.train", {"preference/pairs": 0.0})
    cause, remedy = _refusal(reason, recent)
    evidence = {"preference/pairs": 0.0, f"{REFUSED}{reason}": refused[reason]}
    return Problem(f"{message}: {cause}", remedy, evidence)


def _refusal(reason: str, recent: RecentSteps) -> tuple[str, str]:
    """Why pairs are refused, and what to change."""
    more = "raise <sampling.samples_per_prompt>"
    if reason == "tie":
        return "the rewards in most groups are all equal", MORE_SPREAD
    if reason == "margin":
        cause = "the best and the worst reward of most groups are too close"
        return cause, f"lower <preference.min_margin>, or {more}"
    if reason == "same_answer":
        cause = "in most groups the best and the worst are the same text with different rewards"
        return cause, "raise <sampling.temperature>, and check why the reward varies"
    by_similarity = recent.recipe.advantages.grouping == "similarity"
    clusters = f", lower {recent.recipe.grouping.limit}" if by_similarity else ""
    cause = "most groups have fewer than two answers left"
    return cause, f"check the masks (masks.*) and failed rewards{clusters}, or {more}"


def preference_opposed(recent: RecentSteps) -> Problem | None:
    cosine = recent.mean(COSINE)
    if cosine is None or cosine >= OPPOSED:
        return None
    return Problem(
        f"the pairs and the rest of the objective disagree: the cosine of their gradients is {cosine:.2f}",
        "lower <preference.weight>, by hand or by a rule ([[rules]]), or check whether the rewards and the pairs agree",
        {COSINE: cosine},
    )


def chosen_unlikely(recent: RecentSteps) -> Problem | None:
    reward, margin = recent.mean("preference/chosen_reward"), recent.mean("preference/margin")
    if reward is None or reward >= UNLIKELY or margin is None or margin <= 0:
        return None
    preference = recent.recipe.preference
    has_sft = "sft" in preference.kinds
    sft = "raise the weight of the kind 'sft'" if has_sft else "add the kind 'sft' with a small weight"
    return Problem(
        f"the chosen answers of pairs become less likely too, by {-reward / preference.beta:.3g} in log-prob",
        "lower <optimizer.learning_rate>, or <preference.weight>, raise <preference.beta>, or "
        f"{sft} (preference.kind_weights)",
        {"preference/chosen_reward": reward, "preference/margin": margin},
    )
