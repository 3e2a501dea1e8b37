"""Signs of a run that goes wrong, seen while it goes: each is a name, a sentence, and what to change.

A check looks at means over the last `WINDOW` steps, so that one odd batch makes no noise, and says the same thing at
most once in `QUIET` steps. What it looks at is saved with the run: a resumed run says what an unbroken one would have.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from groupwise.config import Recipe
from groupwise.errors import CheckpointError

WINDOW = 10  # steps over which means are taken
QUIET = 50  # steps before the same warning is said again

HIGH_KL = 0.5
LOW_KL, LOW_KL_FROM = 1e-4, 50  # and in how many steps with one reference a KL should have grown
LEAST_LEFT = 0.7  # of the samples, by all masks together
MOST_WITHOUT_ANSWER = 0.1
ONE_LETTER = 0.6
UNSPLIT = 0.5  # of the prompts have all answers in one cluster
ALIKE = 0.5  # of the distance between answers to different prompts; and without such, of a cosine distance of 1
LONE = 0.5  # of the answers are alone in their cluster
OPPOSED = -0.3  # cosine of the preference term's gradient and that of all the others
UNLIKELY = -1.0  # β times what the better answers of pairs have lost in log-prob

LETTERS, LETTERS_RIGHT = "letters/", "letters_right/"
CAUSES = ("off_policy", "too_short", "no_answer", "repetitive", "truncated", "dropped")
SPLIT = "similarity_groups/n_prompts_split_into_"
REFUSED = "preference/refused/"
COSINE = "grad_cosine/grpo_preference"
WATCHED = (
    "kl",
    "mask_ratio",
    "chance",
    "signal/teaching",
    "completions/clipped_ratio",
    "similarity_groups/n_single_member_groups",
    "similarity_groups/avg_silhouette_score",
    "diversity/mean_distance",
    "diversity/distance_between_prompts",
    "preference/weight",
    "preference/pairs",
    "preference/margin",
    "preference/chosen_reward",
    COSINE,
)


class HealthWarning(NamedTuple):
    """A check that has something to say."""

    name: str
    sentence: str


@dataclass(frozen=True)
class RecentSteps:
    """The last steps: their means, and the settings in force."""

    step: int
    means: Mapping[str, float]
    now: Recipe
    metric: str | None  # the task's
    questions: int  # in all steps of the window
    told: Counter[str]  # how many of the steps reported each metric

    def starting(self, prefix: str) -> dict[str, float]:
        """The means of metrics whose names start so, by the rest of the name."""
        return {name.removeprefix(prefix): mean for name, mean in self.means.items() if name.startswith(prefix)}


class HealthChecks:
    """Watches a run; ``metric`` is the name of the task's grade."""

    def __init__(self, metric: str | None = None) -> None:
        self.metric = metric
        self._window: list[dict[str, float]] = []
        self._questions: list[int] = []
        self._said: dict[str, int] = {}

    def observe(self, step: int, metrics: Mapping[str, float], now: Recipe) -> list[HealthWarning]:
        """Take in the metrics of a finished step, counted from 1; what there is to say about the last ones."""
        self._window = [*self._window, dict(self._watched(metrics))][-WINDOW:]
        self._questions = [*self._questions, now.train.batch_size * now.train.accumulation][-WINDOW:]
        if len(self._window) < WINDOW:
            return []
        told = Counter(name for row in self._window for name in row)
        view = RecentSteps(step, self._means(), now, self.metric, sum(self._questions), told)
        found = []
        for name, check in CHECKS.items():
            quiet = name in self._said and step - self._said[name] < QUIET
            sentence = None if quiet else check(view)
            if sentence is not None:
                self._said[name] = step
                found.append(HealthWarning(name, sentence))
        return found

    def state(self) -> dict[str, Any]:
        """All that is remembered, as JSON."""
        return {
            "window": [dict(row) for row in self._window],
            "questions": list(self._questions),
            "said": dict(self._said),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` gave."""
        try:
            window = [{str(name): float(value) for name, value in row.items()} for row in state["window"]]
            questions = [int(number) for number in state["questions"]]
            said = {str(name): int(step) for name, step in state["said"].items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the saved checks are damaged ({type(error).__name__}: {error}); resume from another checkpoint"
            ) from error
        self._window, self._questions, self._said = window, questions, said

    def _watched(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, float]]:
        names = {*WATCHED, *(f"masks/{cause}" for cause in CAUSES)}
        if self.metric is not None:
            names |= {self.metric, f"{self.metric}_no_answer"}
        for name, value in metrics.items():
            if (name in names or name.startswith((LETTERS, LETTERS_RIGHT, SPLIT, REFUSED))) and math.isfinite(value):
                yield name, float(value)

    def _means(self) -> dict[str, float]:
        """Of each metric over the steps that reported it. A letter that a step did not name had no share in it."""
        found = {}
        for name in dict.fromkeys(name for row in self._window for name in row):
            values = [row[name] for row in self._window if name in row]
            steps = len(self._window) if name.startswith((LETTERS, LETTERS_RIGHT)) else len(values)
            found[name] = math.fsum(values) / steps
        return found


def _kl_high(view: RecentSteps) -> str | None:
    kl, how = view.means.get("kl"), view.now
    if kl is None or kl <= HIGH_KL:
        return None
    return (
        f"the KL to the reference is {kl:.3g} (it should stay below {HIGH_KL:g}); raise loss.kl_coef, now "
        f"{how.loss.kl_coef:g}, or lower optimizer.learning_rate, now {how.optimizer.learning_rate:g}"
    )


def _kl_low(view: RecentSteps) -> str | None:
    kl, weight = view.means.get("kl"), view.now.loss.kl_coef
    if kl is None or not weight or abs(kl) >= LOW_KL or _steps_with_reference(view) < LOW_KL_FROM:
        return None
    return (
        f"the KL to the reference is {kl:.1e}: it holds nothing back and yet costs the reference's passes; lower "
        f"loss.kl_coef, now {weight:g} (0 leaves it out)"
    )


def _steps_with_reference(view: RecentSteps) -> int:
    """How many steps the policy has had to move away from the reference that it is measured against."""
    every = view.now.reference.refresh_every
    return (view.step - 1) % every + 1 if every else view.step


def _masked(view: RecentSteps) -> str | None:
    left = view.means.get("mask_ratio")
    if left is None or left >= LEAST_LEFT:
        return None
    taken = {name: share for name, share in view.starting("masks/").items() if name in CAUSES}
    most = max(taken, key=lambda name: taken[name], default="")
    start = f"only {left:.0%} of the answers may teach"
    if not most:
        return f"{start}; switch off a mask (masks.*)"
    return f"{start}; the mask {most} takes {taken[most]:.0%}: {_remedy(most, view.now)}"


def _remedy(mask: str, now: Recipe) -> str:
    """What to do about a mask that takes too much."""
    if mask == "off_policy" and now.masks.off_policy == "reference_drift":
        every = now.reference.refresh_every
        return f"lower reference.refresh_every, now {every}" if every else "set reference.refresh_every, such as 100"
    if mask == "off_policy":
        return (
            f"lower train.iterations, now {now.train.iterations}, or optimizer.learning_rate, now "
            f"{now.optimizer.learning_rate:g}"
        )
    limit = f"raise sampling.max_new_tokens, now {now.sampling.max_new_tokens}"
    if mask == "truncated":
        return limit
    if mask == "dropped":
        return "their rewards failed; look at the reward function"
    return f"ask for the form of an answer in the prompt (data.system_prompt), or {limit}"


def _no_answer(view: RecentSteps) -> str | None:
    none = view.means.get(f"{view.metric}_no_answer")
    if none is None or none <= MOST_WITHOUT_ANSWER:
        return None
    start = f"in {none:.0%} of the answers no answer can be found"
    cut = view.means.get("completions/clipped_ratio", 0.0)
    if cut > MOST_WITHOUT_ANSWER:
        return (
            f"{start}, and {cut:.0%} are cut off: raise sampling.max_new_tokens, now {view.now.sampling.max_new_tokens}"
        )
    return f"{start}: say its form in the prompt (data.system_prompt), or reward the form ([[rewards]])"


def _below_chance(view: RecentSteps) -> str | None:
    chance, right = view.means.get("chance"), view.means.get(view.metric or "")
    if chance is None or right is None:
        return None
    # Answers to one question have much in common, so questions are counted, not answers.
    error = math.sqrt(max(chance * (1 - chance), 0.0) / view.questions)
    if right >= chance - 2 * error:
        return None
    return (
        f"{view.metric} is {right:.1%}, below the {chance:.1%} of guessing; check that the data's answer letters are "
        f"those of the options, or lower optimizer.learning_rate, now {view.now.optimizer.learning_rate:g}"
    )


def _one_letter(view: RecentSteps) -> str | None:
    shares, right = view.starting(LETTERS), view.starting(LETTERS_RIGHT)
    letter = max(shares, key=lambda name: shares[name], default=None)
    if letter is None or shares[letter] <= max(ONE_LETTER, 2 * right.get(letter, 0.0)):
        return None
    how = view.now
    return (
        f"{shares[letter]:.0%} of the answers are {letter}; raise loss.entropy_coef, now {how.loss.entropy_coef:g}, "
        f"sampling.temperature, now {how.sampling.temperature:g}, or loss.kl_coef, now {how.loss.kl_coef:g}, or "
        "shuffle the options"
    )


def _nothing_taught(view: RecentSteps) -> str | None:
    if view.means.get("signal/teaching") != 0.0:
        return None
    masked = ", or masks took the answers that differ" if view.means.get("mask_ratio", 1.0) < 1 else ""
    beside = " from the sampled answers, only from the data set's pairs" if view.means.get("preference/pairs") else ""
    return (
        f"for {WINDOW} steps nothing was learned{beside}: the rewards in each group are all equal{masked}; "
        f"{_more_spread(view.now)}"
    )


def _more_spread(now: Recipe) -> str:
    """What to do about rewards that are all equal."""
    return (
        f"use easier or harder questions, raise sampling.samples_per_prompt, now {now.sampling.samples_per_prompt}, or "
        f"sampling.temperature, now {now.sampling.temperature:g}"
    )


def _unsplit_share(view: RecentSteps) -> float:
    """The share of the prompts whose answers are all in one cluster; 0 where no clusters are looked for."""
    counts = view.starting(SPLIT)
    return counts.get("1_groups", 0.0) / max(1e-9, sum(counts.values()))


def _likeness(view: RecentSteps) -> tuple[float, str]:
    """How far apart answers to one prompt are, relative to unrelated ones, and the same in words."""
    within = view.means.get("diversity/mean_distance", 0.0)
    between = view.means.get("diversity/distance_between_prompts")
    words = f"two of them are at a distance of {within:.2f}"
    if between is None or between <= 0:
        return within, words
    return within / between, f"{words}, answers to different prompts at {between:.2f}"


def _answers_alike(view: RecentSteps) -> str | None:
    share, (apart, words) = _unsplit_share(view), _likeness(view)
    if share <= UNSPLIT or apart >= ALIKE:
        return None
    how = view.now
    return (
        f"the answers to {share:.0%} of the prompts are all alike ({words}); look at some for a trick that the reward "
        f"pays for, and raise sampling.temperature, now {how.sampling.temperature:g}, loss.kl_coef, now "
        f"{how.loss.kl_coef:g}, or loss.entropy_coef, now {how.loss.entropy_coef:g}"
    )


def _answers_unrelated(view: RecentSteps) -> str | None:
    share, (apart, words) = _unsplit_share(view), _likeness(view)
    if share <= UNSPLIT or apart < ALIKE:
        return None
    silhouette = view.means.get("similarity_groups/avg_silhouette_score", 0.0)
    return (
        f"the answers to {share:.0%} of the prompts make no clusters (silhouette {silhouette:.2f}), not because they "
        f"are alike but because no two are ({words}): all are compared with all; raise sampling.samples_per_prompt, "
        f"now {view.now.sampling.samples_per_prompt}, or try another grouping.embedder, now "
        f"{view.now.grouping.embedder!r}"
    )


def _answers_scattered(view: RecentSteps) -> str | None:
    answers = sum(view.starting(SPLIT).values()) * view.now.sampling.samples_per_prompt
    share = view.means.get("similarity_groups/n_single_member_groups", 0.0) / max(1e-9, answers)
    if share <= LONE:
        return None
    return (
        f"{share:.0%} of the answers are alone in their cluster and teach nothing; lower grouping.max_groups, now "
        f"{view.now.grouping.max_groups}, set advantages.shrinkage, now {view.now.advantages.shrinkage:g}, or try "
        f"another grouping.embedder, now {view.now.grouping.embedder!r}"
    )


def _no_pairs(view: RecentSteps) -> str | None:
    if not view.means.get("preference/weight") or view.means.get("preference/pairs") != 0.0:
        return None
    if view.told["preference/pairs"] < WINDOW:  # the term has just come in
        return None
    refused = view.starting(REFUSED)
    most = max(refused, key=lambda name: refused[name], default="")
    start = f"for {WINDOW} steps there was not one pair to learn from"
    if not refused.get(most):
        return f"{start}; look at preference.pairs, now {view.now.preference.pairs!r}, and at preference.train"
    return f"{start}: {_why_no_pair(most, view.now)}"


def _why_no_pair(reason: str, now: Recipe) -> str:
    """Why most groups gave none, and what to do about it."""
    samples = f"sampling.samples_per_prompt, now {now.sampling.samples_per_prompt}"
    if reason == "tie":
        return f"the rewards in most groups are all equal; {_more_spread(now)}"
    if reason == "margin":
        return (
            "the best and the worst reward of most groups are too close; lower preference.min_margin, now "
            f"{now.preference.min_margin:g}, or raise {samples}"
        )
    if reason == "same_answer":
        return (
            "in most groups the best and the worst are the same answer with another reward; raise "
            f"sampling.temperature, now {now.sampling.temperature:g}, and see why the reward changes its mind"
        )
    clusters = ", lower grouping.max_groups" if now.advantages.grouping == "similarity" else ""
    return (
        "most groups have fewer than two answers that may teach; see what the masks (masks.*) and failed rewards take"
        f"{clusters}, or raise {samples}"
    )


def _preference_opposed(view: RecentSteps) -> str | None:
    cosine = view.means.get(COSINE)
    if cosine is None or cosine >= OPPOSED:
        return None
    return (
        f"the pairs and the rest of the objective pull apart: the cosine of their gradients is {cosine:.2f}; lower "
        f"preference.weight, now {view.now.preference.weight:g}, by hand or by a rule ([[rules]]), or look at whether "
        "the rewards and the pairs want the same"
    )


def _chosen_unlikely(view: RecentSteps) -> str | None:
    reward, margin = view.means.get("preference/chosen_reward"), view.means.get("preference/margin")
    if reward is None or reward >= UNLIKELY or margin is None or margin <= 0:
        return None
    how = view.now.preference
    more = "raise the weight of the kind 'sft'" if "sft" in how.kinds else "add the kind 'sft' with a small weight"
    return (
        f"the better answers of pairs become less likely too, by {-reward / how.beta:.3g} in log-prob; lower "
        f"optimizer.learning_rate, now {view.now.optimizer.learning_rate:g}, or preference.weight, now "
        f"{how.weight:g}, raise preference.beta, now {how.beta:g}, or {more} (preference.kind_weights)"
    )


CHECKS: dict[str, Callable[[RecentSteps], str | None]] = {
    "kl_high": _kl_high,
    "kl_low": _kl_low,
    "masked": _masked,
    "no_answer": _no_answer,
    "below_chance": _below_chance,
    "one_letter": _one_letter,
    "nothing_taught": _nothing_taught,
    "answers_alike": _answers_alike,
    "answers_unrelated": _answers_unrelated,
    "answers_scattered": _answers_scattered,
    "no_pairs": _no_pairs,
    "preference_opposed": _preference_opposed,
    "chosen_unlikely": _chosen_unlikely,
}
