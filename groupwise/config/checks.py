"""Settings that contradict each other, found when a recipe is made.

`core` is imported only for a recipe that needs it, because it loads torch: most recipes are read without it.
"""

from __future__ import annotations

from collections.abc import Iterator

from groupwise.algorithms import find_algorithm
from groupwise.config.sections import LOSS_NAMES, PreferenceSection, Recipe
from groupwise.errors import MIN_TEMPERATURE, InputError, did_you_mean


def contradictions(recipe: Recipe) -> Iterator[str]:
    """A sentence for each contradiction."""
    for check in (_loss, _sampling, _asynchronous, _optimizer, _shrinkage, _preference):
        yield from check(recipe)


def _loss(recipe: Recipe) -> Iterator[str]:
    name, ratio = recipe.loss.name, recipe.loss.ratio
    preset = find_algorithm(recipe.algorithm).settings
    if name in LOSS_NAMES and (ratio is None or (name, ratio) == (preset.get("loss.name"), preset.get("loss.ratio"))):
        return
    from groupwise.core.losses import LOSSES

    if name not in LOSSES and ":" not in name:
        yield f"unknown loss {name!r}{did_you_mean(name, LOSSES)} (allowed: {', '.join(LOSSES)}, or module:function)"
    if name in LOSSES and ratio is not None and ratio not in LOSSES[name].ratios:
        yield f"the loss {name!r} has no {ratio} ratio; leave loss.ratio out or use {LOSSES[name].ratios[0]!r}"


def _sampling(recipe: Recipe) -> Iterator[str]:
    sampling = recipe.sampling
    if recipe.train.steps is None and recipe.train.epochs is None and not recipe.ends_with_phases:
        yield "set train.steps or train.epochs; without both the run would never end"
    if sampling.min_new_tokens > sampling.max_new_tokens:
        yield (
            f"sampling.min_new_tokens {sampling.min_new_tokens} is more than sampling.max_new_tokens "
            f"{sampling.max_new_tokens}"
        )
    if 0 < recipe.evaluate.temperature < MIN_TEMPERATURE:
        yield (
            f"evaluate.temperature {recipe.evaluate.temperature!r} is below {MIN_TEMPERATURE:g}, where logits "
            "overflow; 0 is greedy"
        )
    has_group_baseline = recipe.advantages.baseline != "none" and recipe.advantages.grouping in ("prompt", "similarity")
    if recipe.loss.policy_coef and sampling.samples_per_prompt == 1 and has_group_baseline:
        yield "sampling.samples_per_prompt is 1, so every advantage is 0 and nothing is learned; use at least 2"
    if recipe.masks.keep_sampling_mask and not (sampling.top_k or sampling.top_p < 1 or sampling.min_p):
        yield "masks.keep_sampling_mask renormalizes over the tokens that top_k, top_p or min_p leave; set one of them"


def _asynchronous(recipe: Recipe) -> Iterator[str]:
    train = recipe.train
    if train.replay is not None and not train.max_staleness:
        yield "train.replay repeats an asynchronous run; set train.max_staleness to the value that it had"
    if train.max_staleness and recipe.loss.name == "reinforce" and recipe.loss.importance_cap is None:
        yield (
            "the loss 'reinforce' has no ratio, so it cannot correct for the older weights that train.max_staleness "
            "allows; set loss.importance_cap, or use another loss"
        )
    filters = recipe.sampling.top_k or recipe.sampling.top_p < 1 or recipe.sampling.min_p
    if train.max_staleness and recipe.sampling.generator == "vllm" and filters:
        yield (
            "train.max_staleness needs the sampler's log-probs, which vLLM does not return with top_k, top_p or "
            "min_p; leave them out, or set sampling.generator to 'engine'"
        )


def _optimizer(recipe: Recipe) -> Iterator[str]:
    optimizer = recipe.optimizer
    rate = max(optimizer.learning_rate, optimizer.embedding_learning_rate or 0.0)
    if rate * optimizer.weight_decay > 1:
        yield (
            f"optimizer.weight_decay {optimizer.weight_decay:g} times the learning rate {rate:g} is more than 1: each "
            "step would turn the signs of all weights; lower one of them"
        )


def _shrinkage(recipe: Recipe) -> Iterator[str]:
    advantages = recipe.advantages
    if advantages.shrinkage and advantages.grouping == "prompt":
        remedy = "set advantages.grouping to 'similarity', or advantages.shrinkage to 0"
        yield f"advantages.shrinkage: with advantages.grouping 'prompt' there are no clusters to shrink; {remedy}"
    if advantages.shrinkage and advantages.baseline != "mean":
        needed = f"needs advantages.baseline 'mean', not {advantages.baseline!r}"
        yield f"advantages.shrinkage moves a cluster's mean, so it {needed}; set that, or advantages.shrinkage to 0"
    if recipe.grouping.skip_single_members and (advantages.shrinkage or advantages.baseline == "none"):
        reason = "advantages.shrinkage is above 0" if advantages.shrinkage else "advantages.baseline is 'none'"
        yield (
            f"grouping.skip_single_members skips rewards whose advantage is 0, but {reason}, so the advantage of a "
            "completion that is alone in its cluster is not 0; set grouping.skip_single_members to false"
        )


def _preference(recipe: Recipe) -> Iterator[str]:
    preference = recipe.preference
    if preference.kind != "sigmoid" or preference.kind_weights is not None or preference.label_smoothing:
        yield from _kinds(preference)
    if preference.pairs == "group" and (preference.train is not None or preference.held_out_from_train):
        key = "train" if preference.train is not None else "held_out_from_train"
        yield (
            f"preference.{key} is set, but preference.pairs is 'group', which takes pairs from sampled completions "
            f"only; set preference.pairs to 'data' or 'both', or leave preference.{key} out"
        )
    if preference.pairs == "group" and preference.weight and recipe.sampling.samples_per_prompt == 1:
        yield "sampling.samples_per_prompt is 1, so no group has two completions for a pair; use at least 2"


def _kinds(preference: PreferenceSection) -> Iterator[str]:
    from groupwise.core.preference import SMOOTHED_KINDS, check_kinds

    try:
        check_kinds(
            preference.kind,
            preference.kind_weights,
            beta=preference.beta,
            label_smoothing=preference.label_smoothing,
            discopop_tau=preference.discopop_tau,
        )
    except InputError as error:
        yield f"[preference] {error}"
    if preference.label_smoothing and not SMOOTHED_KINDS.intersection(preference.kinds):
        kinds = ", ".join(preference.kinds)
        yield f"preference.label_smoothing has no effect on the kind {kinds}; for noisy labels use 'robust'"
