"""Checks of the rewards: without spread, constant, failing, one that dominates, and one that leads astray."""

from __future__ import annotations

from groupwise.training.monitor.checks.base import MORE_SPREAD, WINDOW, Problem, RecentSteps
from groupwise.training.monitor.checks.completions import SINGLE, SPLIT

MAX_ZERO_SPREAD = 0.5  # share of groups without a learning signal: more than half of the sampling is wasted
DOMINATES = 0.95  # share of the variance of the weighted sum; the others together then change the order of few samples
STILL_VARIES = 0.5  # of its spread at the start; a function that varies less than that has been learned
MAX_FAILED, MOST_FAILED = 0.05, 0.5  # share of completions; a few odd ones are what scoring.on_error = "drop" is for

ZERO_SPREAD = "frac_reward_zero_std"
PENALTIES = ("overlong", "adaptive_length_penalty")  # as in training.rollout.penalties, which needs torch


def no_learning_signal(recent: RecentSteps) -> Problem | None:
    if recent.mean("signal/contributing") != 0.0:
        return None
    unmasked = recent.mean("mask_ratio")
    masked = ", or the answers that differ are masked" if unmasked is not None and unmasked < 1 else ""
    if (k := recent.recipe.advantages.pass_at_k) is not None:
        masked += f", or any {k} answers of a group have a success (advantages.pass_at_k)"
    pairs = recent.mean("preference/pairs")
    source = " from the sampled answers, only from the data set's pairs" if pairs else ""
    return Problem(
        f"for {WINDOW} steps nothing was learned{source}: the rewards in each group are all equal{masked}",
        MORE_SPREAD,
        {"signal/contributing": 0.0},
        "warning" if pairs or recent.solved else "error",
    )


def zero_spread(recent: RecentSteps) -> Problem | None:
    share = _share_without_spread(recent)
    if share <= MAX_ZERO_SPREAD or recent.solved or recent.recipe.taught or not recent.mean("signal/contributing"):
        return None  # without any signal it is `no_learning_signal`
    reward = recent.mean("reward") or 0.0
    return Problem(
        f"{share:.0%} of the groups have equal rewards and no learning signal (the mean reward is {reward:.3g})",
        f"{MORE_SPREAD}; or replace such prompts by others with <train.resample_rounds>",
        {ZERO_SPREAD: share, "reward": reward},
    )


def _share_without_spread(recent: RecentSteps) -> float:
    """The share of groups whose rewards are all equal; clusters of one answer are left out (`answers_scattered`)."""
    share, single = recent.mean(ZERO_SPREAD) or 0.0, recent.mean(SINGLE) or 0.0
    groups = sum(recent.means(SPLIT).values()) * (recent.mean("similarity_groups/avg_groups_per_prompt") or 0.0)
    if not groups:
        return share
    return max(0.0, share * groups - single) / (groups - single) if groups > single else 0.0


def reward_constant(recent: RecentSteps) -> Problem | None:
    stds = {name.removesuffix("/std"): std for name, std in recent.means("rewards/").items() if name.endswith("/std")}
    stds = {name: std for name, std in stds.items() if name not in PENALTIES}  # a penalty that is not needed is 0
    constant = [name for name in stds if name not in recent.varied]
    if not constant or recent.recipe.taught:
        return None
    names, value = " and ".join(constant), recent.mean(f"rewards/{constant[0]}/mean") or 0.0
    subject = f"the reward {names} has" if len(constant) == 1 else f"the rewards {names} have"
    return Problem(
        f"{subject} been the same for every completion since the start ({value:.3g})",
        "look at completions and what the function returns for them: it may read another column or another form of "
        "answer than the model gives; if the model always satisfies it, leave it out",
        {f"rewards/{name}/mean": recent.mean(f"rewards/{name}/mean") or 0.0 for name in constant},
        "error" if len(constant) == len(stds) else "warning",
    )


def reward_dominates(recent: RecentSteps) -> Problem | None:
    """Of the functions that vary still as they did, one has nearly all of the variance of the weighted sum."""
    ending = "/variance_share"
    shares = {
        name.removesuffix(ending): share for name, share in recent.means("rewards/").items() if name.endswith(ending)
    }

    def varies(name: str) -> bool:
        std = f"rewards/{name}/std"
        if name in PENALTIES:
            return False
        return (recent.mean(std) or 0.0) > STILL_VARIES * recent.start.get(std, 0.0) and name in recent.varied

    shares = {name: share for name, share in shares.items() if varies(name)}
    largest = max(shares, key=lambda name: shares[name], default="")
    if len(shares) < 2 or shares[largest] <= DOMINATES:
        return None
    others = " and ".join(name for name in shares if name != largest)
    return Problem(
        f"the reward {largest} has {shares[largest]:.1%} of the variance of the weighted sum, so {others} hardly "
        "matters",
        "change the weights in [[rewards]], or set <advantages.combine> to 'normalize_then_sum', which gives each "
        "function the same spread",
        {f"rewards/{name}{ending}": share for name, share in shares.items()},
    )


def rewards_failed(recent: RecentSteps) -> Problem | None:
    failed = recent.mean("rewards_failed") or 0.0
    share = failed * len(recent.rows) / max(1, recent.prompts * recent.recipe.sampling.samples_per_prompt)
    if share <= MAX_FAILED:
        return None
    return Problem(
        f"the rewards of {share:.0%} of the completions failed, and these were dropped (scoring.on_error)",
        "mend the reward function; the run's output has the first reason of each step, and scoring.on_error = 'stop' "
        "stops at the first",
        {"rewards_failed": failed},
        "error" if share > MOST_FAILED else "warning",
    )


def overfitting(recent: RecentSteps) -> Problem | None:
    """The held-out metric is below its best by more than both intervals, while the reward has risen since."""
    best, last = recent.best, recent.last
    if best is None or last is None or last.high >= best.low:
        return None
    if best.reward is None or last.reward is None or last.reward <= best.reward:
        return None
    return Problem(
        f"the reward rose from {best.reward:.3g} to {last.reward:.3g} while held-out {recent.held_out} fell from "
        f"{best.value:.3g} (step {best.step}) to {last.value:.3g} (step {last.step}, at most {last.high:.3g})",
        "read the completions with the highest rewards: the policy may exploit the reward; raise <loss.kl_coef>, lower "
        "<optimizer.learning_rate>, use more rows, or stop at the best evaluation with <evaluate.patience>",
        {
            f"eval/{recent.held_out}": last.value,
            f"eval/{recent.held_out}_high": last.high,
            f"eval/{recent.held_out}_low at its best": best.low,
            "step of its best": float(best.step),
            "reward": last.reward,
            "reward at its best": best.reward,
        },
        "error",
    )
