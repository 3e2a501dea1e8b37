"""Warnings about a run that goes wrong: each has a name, a message, and says which settings to change.

The checks look at means over the last `WINDOW` steps, so a single odd batch does not trigger them. The same warning is
given at most once in `QUIET` steps. The window is saved with the run: a resumed run gives the same warnings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.config import Recipe
from groupwise.training.monitor.timer import is_timing

WINDOW = 10  # steps that means are taken over
QUIET = 50  # steps before the same warning is given again

LOW_KL, LOW_KL_STEPS = 1e-4, 50  # steps with the same reference after which the KL should have grown
MIN_UNMASKED = 0.7  # share of samples left by all masks together
MAX_NO_ANSWER = 0.1
MAX_UNSPLIT = 0.5  # share of prompts whose answers are all in one cluster
ALIKE = 0.5  # relative to the distance between answers to different prompts; without it, a cosine distance
MAX_SINGLE = 0.5  # share of answers that are alone in their cluster
MAX_CLIPPED = 0.2  # share of tokens whose ratio is clipped, with asynchronous rollouts
FAR_FROM_SAMPLER = 0.3  # mean difference of a token's log-prob between the policy and the older one that sampled it
OPPOSED = -0.3  # cosine of the gradients of the preference term and of the rest
UNLIKELY = -1.0  # β × the change in log-prob of the chosen answers of pairs

MORE_SPREAD = "use easier or harder questions, raise <sampling.samples_per_prompt>, or <sampling.temperature>"
SAMPLE_MASKS = ("off_policy", "too_short", "no_answer", "repetitive", "truncated", "dropped")
SPLIT = "similarity_groups/n_prompts_split_into_"
REFUSED = "preference/refused/"
COSINE = "grad_cosine/grpo_preference"


@dataclass(frozen=True)
class RecentSteps:
    """The metrics of the last `WINDOW` steps and the settings of the newest."""

    step: int
    rows: Sequence[Mapping[str, float]]  # finite metrics, one row per step
    recipe: Recipe
    metric: str | None  # the task's
    prompts: int  # in all these steps

    def mean(self, name: str) -> float | None:
        """The mean over the steps that report a metric; None if none does."""
        values = [row[name] for row in self.rows if name in row]
        return math.fsum(values) / len(values) if values else None

    def means(self, prefix: str, *, missing_as_zero: bool = False) -> dict[str, float]:
        """The means of all metrics with a prefix, by the rest of their names."""
        values: dict[str, list[float]] = {}
        for row in self.rows:
            for name, value in row.items():
                if name.startswith(prefix):
                    values.setdefault(name.removeprefix(prefix), []).append(value)
        steps = len(self.rows)
        return {name: math.fsum(v) / (steps if missing_as_zero else len(v)) for name, v in values.items()}


Check = Callable[[RecentSteps], str | None]
"""Returns a message if something is wrong: "the KL is 0.8; raise <loss.kl_coef>" is shown with that setting's value."""


class HealthChecks:
    """Runs `CHECKS` and the task's ``extra`` checks after each step; ``metric`` is the task's grade."""

    def __init__(self, metric: str | None = None, extra: Mapping[str, Check] | None = None) -> None:
        self.metric = metric
        self.checks = {**CHECKS, **(extra or {})}
        self._window: list[dict[str, float]] = []
        self._prompts: list[int] = []
        self._warned_at: dict[str, int] = {}

    def observe(self, step: int, metrics: Mapping[str, float], recipe: Recipe) -> dict[str, str]:
        """Check the last steps, given the metrics and settings of the newest (counted from 1); messages by name."""
        row = {name: float(value) for name, value in metrics.items() if not is_timing(name) and math.isfinite(value)}
        self._window = [*self._window, row][-WINDOW:]
        self._prompts = [*self._prompts, recipe.train.prompts_per_step][-WINDOW:]
        if len(self._window) < WINDOW:
            return {}
        recent = RecentSteps(step, self._window, recipe, self.metric, sum(self._prompts))
        warnings = {}
        for name, check in self.checks.items():
            if name in self._warned_at and step - self._warned_at[name] < QUIET:
                continue
            message = check(recent)
            if message is not None:
                self._warned_at[name] = step
                warnings[name] = re.sub(r"<(\w+\.\w+)>", lambda match: _with_value(match[1], recipe), message)
        return warnings

    def state(self) -> dict[str, Any]:
        return {"window": list(self._window), "questions": list(self._prompts), "said": dict(self._warned_at)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._window, self._prompts = list(state["window"]), list(state["questions"])
        self._warned_at = dict(state["said"])


def _with_value(setting: str, recipe: Recipe) -> str:
    value = recipe.get(setting)
    return f"{setting}, now {value:g}" if isinstance(value, float) else f"{setting}, now {value!r}"


def _kl_high(recent: RecentSteps) -> str | None:
    kl = recent.mean("kl")
    if kl is None or kl <= recent.recipe.run.kl_warning:
        return None
    return (
        f"the KL to the reference is {kl:.3g}; raise <loss.kl_coef>, or lower <optimizer.learning_rate>, or, if the "
        "task needs a KL as high as that, raise <run.kl_warning>"
    )


def _kl_low(recent: RecentSteps) -> str | None:
    kl, every = recent.mean("kl"), recent.recipe.reference.refresh_every
    steps = (recent.step - 1) % every + 1 if every else recent.step  # since the last refresh
    if kl is None or not recent.recipe.loss.kl_coef or abs(kl) >= LOW_KL or steps < LOW_KL_STEPS:
        return None
    return (
        f"the KL to the reference is {kl:.1e}, so it has no effect but costs the reference's forward passes; lower "
        "<loss.kl_coef> (0 switches it off)"
    )


def _masked(recent: RecentSteps) -> str | None:
    unmasked = recent.mean("mask_ratio")
    if unmasked is None or unmasked >= MIN_UNMASKED:
        return None
    shares = {name: share for name, share in recent.means("masks/").items() if name in SAMPLE_MASKS}
    largest = max(shares, key=lambda name: shares[name], default="")
    start = f"only {unmasked:.0%} of the answers are left by the masks"
    if not largest:
        return f"{start}; switch off a mask (masks.*)"
    return f"{start}; {largest} masks {shares[largest]:.0%}: {_mask_remedy(largest, recent)}"


def _mask_remedy(mask: str, recent: RecentSteps) -> str:
    if mask == "off_policy" and recent.recipe.masks.off_policy == "reference_drift":
        refreshed = bool(recent.recipe.reference.refresh_every)
        return "lower <reference.refresh_every>" if refreshed else "set reference.refresh_every, such as 100"
    if mask == "off_policy":
        return "lower <train.iterations>, or <optimizer.learning_rate>"
    if mask == "truncated":
        return "raise <sampling.max_new_tokens>"
    if mask == "dropped":
        return "their rewards failed; check the reward function"
    return "ask for the form of an answer in the prompt (data.system_prompt), or raise <sampling.max_new_tokens>"


def _no_answer(recent: RecentSteps) -> str | None:
    share = recent.mean(f"{recent.metric}_no_answer")
    if share is None or share <= MAX_NO_ANSWER:
        return None
    start = f"{share:.0%} of the completions contain no answer"
    cut = recent.mean("completions/clipped_ratio") or 0.0
    if cut > MAX_NO_ANSWER:
        return f"{start}, and {cut:.0%} are cut off: raise <sampling.max_new_tokens>"
    return f"{start}: describe its form in the prompt (data.system_prompt), or reward the form ([[rewards]])"


def _stale(recent: RecentSteps) -> str | None:
    """The ratio to the sampler is clipped often, or with an importance weight, the two differ much."""
    clipped, distance = recent.mean("clip_ratio/region_mean") or 0.0, recent.mean("sampler/logp_difference_mean") or 0.0
    if not recent.mean("async/staleness_max") or (clipped <= MAX_CLIPPED and distance <= FAR_FROM_SAMPLER):
        return None
    return (
        f"the policy has moved away from the one that sampled: a token's log-prob differs by {distance:.2g} on "
        f"average, and the ratio of {clipped:.0%} of the tokens is clipped; lower <train.max_staleness>, or "
        "<optimizer.learning_rate>"
    )


def _no_learning_signal(recent: RecentSteps) -> str | None:
    if recent.mean("signal/contributing") != 0.0:
        return None
    unmasked = recent.mean("mask_ratio")
    masked = ", or the answers that differ are masked" if unmasked is not None and unmasked < 1 else ""
    source = " from the sampled answers, only from the data set's pairs" if recent.mean("preference/pairs") else ""
    start = f"for {WINDOW} steps nothing was learned{source}: the rewards in each group are all equal{masked}"
    return f"{start}; {MORE_SPREAD}"


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


def _answers_alike(recent: RecentSteps) -> str | None:
    share, distance, text = _unsplit(recent)
    if share <= MAX_UNSPLIT or distance >= ALIKE:
        return None
    return (
        f"the answers to {share:.0%} of the prompts are all alike ({text}); check whether they exploit the reward, and "
        "raise <sampling.temperature>, <loss.kl_coef>, or <loss.entropy_coef>"
    )


def _answers_unrelated(recent: RecentSteps) -> str | None:
    share, distance, text = _unsplit(recent)
    if share <= MAX_UNSPLIT or distance < ALIKE:
        return None
    silhouette = recent.mean("similarity_groups/avg_silhouette_score") or 0.0
    return (
        f"the answers to {share:.0%} of the prompts form no clusters (silhouette {silhouette:.2f}) because no two are "
        f"alike ({text}), so each prompt is one group; raise <sampling.samples_per_prompt>, or try another "
        "<grouping.embedder>"
    )


def _answers_scattered(recent: RecentSteps) -> str | None:
    answers = sum(recent.means(SPLIT).values()) * recent.recipe.sampling.samples_per_prompt
    share = (recent.mean("similarity_groups/n_single_member_groups") or 0.0) / max(1e-9, answers)
    if share <= MAX_SINGLE:
        return None
    return (
        f"{share:.0%} of the answers are alone in their cluster and have no learning signal; lower "
        "<grouping.max_groups>, set <advantages.shrinkage>, or try another <grouping.embedder>"
    )


def _no_pairs(recent: RecentSteps) -> str | None:
    if not recent.mean("preference/weight") or recent.mean("preference/pairs") != 0.0:
        return None
    if not all("preference/pairs" in row for row in recent.rows):  # the term was switched on only recently
        return None
    refused = recent.means(REFUSED)
    reason = max(refused, key=lambda name: refused[name], default="")
    start = f"for {WINDOW} steps there was no pair to learn from"
    if not refused.get(reason):
        return f"{start}; check <preference.pairs>, and preference.train"
    return f"{start}: {_pair_remedy(reason, recent)}"


def _pair_remedy(reason: str, recent: RecentSteps) -> str:
    if reason == "tie":
        return f"the rewards in most groups are all equal; {MORE_SPREAD}"
    more = "raise <sampling.samples_per_prompt>"
    if reason == "margin":
        return f"the best and the worst reward of most groups are too close; lower <preference.min_margin>, or {more}"
    if reason == "same_answer":
        start = "in most groups the best and the worst are the same text with different rewards"
        return f"{start}; raise <sampling.temperature>, and check why the reward varies"
    clusters = ", lower grouping.max_groups" if recent.recipe.advantages.grouping == "similarity" else ""
    start = "most groups have fewer than two answers left; check the masks (masks.*) and failed rewards"
    return f"{start}{clusters}, or {more}"


def _preference_opposed(recent: RecentSteps) -> str | None:
    cosine = recent.mean(COSINE)
    if cosine is None or cosine >= OPPOSED:
        return None
    return (
        f"the pairs and the rest of the objective disagree: the cosine of their gradients is {cosine:.2f}; lower "
        "<preference.weight>, by hand or by a rule ([[rules]]), or check whether the rewards and the pairs agree"
    )


def _chosen_unlikely(recent: RecentSteps) -> str | None:
    reward, margin = recent.mean("preference/chosen_reward"), recent.mean("preference/margin")
    if reward is None or reward >= UNLIKELY or margin is None or margin <= 0:
        return None
    preference = recent.recipe.preference
    has_sft = "sft" in preference.kinds
    sft = "raise the weight of the kind 'sft'" if has_sft else "add the kind 'sft' with a small weight"
    return (
        f"the chosen answers of pairs become less likely too, by {-reward / preference.beta:.3g} in log-prob; lower "
        "<optimizer.learning_rate>, or <preference.weight>, raise <preference.beta>, or "
        f"{sft} (preference.kind_weights)"
    )


CHECKS: dict[str, Check] = {
    "kl_high": _kl_high,
    "kl_low": _kl_low,
    "masked": _masked,
    "no_answer": _no_answer,
    "no_learning_signal": _no_learning_signal,
    "stale": _stale,
    "answers_alike": _answers_alike,
    "answers_unrelated": _answers_unrelated,
    "answers_scattered": _answers_scattered,
    "no_pairs": _no_pairs,
    "preference_opposed": _preference_opposed,
    "chosen_unlikely": _chosen_unlikely,
}
