"""Settings that contradict each other, found when a recipe is made.

`core` is imported only for a recipe that needs it, because it loads torch: most recipes are read without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from groupwise.algorithms import find_algorithm
from groupwise.config.sections import LOSS_NAMES, OPTIMIZERS, DataSection, PreferenceSection, Recipe
from groupwise.errors import MIN_TEMPERATURE, InputError, did_you_mean
from groupwise.text import excerpt

PASS_RATE_SETTINGS = ("solved_pass_rate", "solved_share", "unsolved_pass_rate", "unsolved_share", "pass_rate_memory")
HOST_PART = re.compile("[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
CORRECTIONS = ("loss.importance_cap", "loss.importance_floor", "loss.rejection_low", "loss.rejection_high")


def contradictions(recipe: Recipe) -> Iterator[str]:
    """A sentence for each contradiction."""
    checks = (
        _loss,
        _aggregation,
        _equal_rewards,
        _divergence,
        _correction,
        _advantages,
        _sampling,
        _vllm,
        _asynchronous,
        _updates,
    )
    for check in (*checks, _optimizer, _shrinkage, _preference, _entropy, _data, _distillation):
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


def _aggregation(recipe: Recipe) -> Iterator[str]:
    if recipe.loss.aggregation == "prompt_mean" and recipe.loss.denominator != "completion_mask":
        yield (
            "loss.aggregation 'prompt_mean' divides by all tokens of a prompt's completions, so it needs "
            "loss.denominator 'completion_mask'"
        )


def _equal_rewards(recipe: Recipe) -> Iterator[str]:
    if not recipe.masks.drop_equal_rewards:
        return
    if recipe.advantages.baseline == "none":
        yield (
            "masks.drop_equal_rewards drops groups without a learning signal, but with advantages.baseline 'none' "
            "equal rewards have one; set one of the two to its default"
        )
    if recipe.distillation.weight:
        yield (
            "masks.drop_equal_rewards would also drop completions that the teacher of [distillation] scores; set it "
            "to false"
        )
    if recipe.train.mini_batch_by == "samples":
        yield (
            "masks.drop_equal_rewards leaves mini-batches with different numbers of completions, but "
            "train.mini_batch_by 'samples' gives every token of a batch the same weight; set that to 'prompts'"
        )


def _divergence(recipe: Recipe) -> Iterator[str]:
    loss, masks = recipe.loss, recipe.masks
    if masks.divergence is None:
        if masks.divergence_threshold is not None:
            yield "masks.divergence_threshold has no effect without masks.divergence; set that to 'tv' or 'kl'"
        return
    if loss.name in ("gspo", "luspo") or loss.ratio not in (None, "token"):
        what = f"loss.ratio {loss.ratio!r}" if loss.ratio not in (None, "token") else f"the loss {loss.name!r}"
        yield f"masks.divergence limits single tokens, but {what} has one ratio per completion; use one per token"
    if loss.dual_clip is not None:
        yield "masks.divergence takes the place of the clip, so loss.dual_clip has no effect; leave it out"


def _correction(recipe: Recipe) -> Iterator[str]:
    loss = recipe.loss
    weighted = loss.importance_cap is not None or loss.importance_floor is not None
    if loss.importance_normalize and not weighted:
        yield "loss.importance_normalize has no effect without weights; set loss.importance_cap, such as 5.0"
    if loss.rejection != "geometric" and loss.rejection_low is None and loss.rejection_high is None:
        yield f"loss.rejection {loss.rejection!r} has no effect without bounds; set loss.rejection_high"
    if loss.rejection == "k3" and loss.rejection_low is not None:
        yield "loss.rejection 'k3' is a distance that is 0 for equal log-probs; set loss.rejection_high, not _low"
    if loss.importance_sampling != "token_truncate" and not weighted:
        yield (
            f"loss.importance_sampling {loss.importance_sampling!r} has no effect without bounds; set "
            "loss.importance_cap, such as 5.0, or loss.importance_floor, such as 0.5"
        )
    for low, high in (("importance_floor", "importance_cap"), ("rejection_low", "rejection_high")):
        least, most = recipe.get(f"loss.{low}"), recipe.get(f"loss.{high}")
        if least is not None and most is not None and least > most:
            yield f"loss.{low} {least:g} is above loss.{high} {most:g}"


def _advantages(recipe: Recipe) -> Iterator[str]:
    advantages, k = recipe.advantages, recipe.advantages.pass_at_k
    if k is None and advantages.scale != "mean":
        return
    setting = "advantages.scale 'mean'" if k is None else f"advantages.pass_at_k {k}"
    for penalty in ("scoring.overlong_buffer", "scoring.length_penalty"):
        if recipe.get(penalty) and k is None:
            yield f"{setting} divides by the mean of rewards of at least 0, which {penalty} makes negative; set it to 0"
        elif recipe.get(penalty):
            yield f"{setting} only asks whether a completion succeeds, so {penalty} would have no effect; set it to 0"
    if advantages.combine != "sum_then_normalize":
        yield f"{setting} is of the sum of the rewards; set advantages.combine to 'sum_then_normalize'"
    if advantages.function is not None:
        yield f"{setting} has no effect, as advantages.function computes the advantages; leave one of them out"
    if k is None:
        return
    if k > recipe.sampling.samples_per_prompt:
        yield (
            f"advantages.pass_at_k {k} is more than sampling.samples_per_prompt {recipe.sampling.samples_per_prompt}: "
            "a group has fewer completions than that"
        )
    if advantages.scale not in ("group", "none"):
        yield f"{setting} has a scale of its own; set advantages.scale to 'group' or 'none', not {advantages.scale!r}"
    if advantages.baseline != "mean":
        yield f"{setting} has a baseline of its own; set advantages.baseline to 'mean', not {advantages.baseline!r}"
    if advantages.shrinkage:
        yield f"{setting} counts successes, so there is no mean to shrink; set advantages.shrinkage to 0"


def _entropy(recipe: Recipe) -> Iterator[str]:
    loss = recipe.loss
    if loss.entropy_target is not None and loss.entropy_coef_min > loss.entropy_coef_max:
        least, most = loss.entropy_coef_min, loss.entropy_coef_max
        yield f"loss.entropy_coef_min {least:g} is above loss.entropy_coef_max {most:g}"


def _data(recipe: Recipe) -> Iterator[str]:
    data, defaults = recipe.data, DataSection()
    for name in PASS_RATE_SETTINGS if data.sampling != "pass_rate" else ():
        default = getattr(defaults, name)
        if getattr(data, name) != default:
            yield (
                f"data.{name} has no effect without data.sampling 'pass_rate'; set that, or leave data.{name} at its "
                f"default, {default:g}"
            )
    if data.sampling == "pass_rate" and data.unsolved_pass_rate >= data.solved_pass_rate:
        yield (
            f"data.unsolved_pass_rate {data.unsolved_pass_rate:g} is not below data.solved_pass_rate "
            f"{data.solved_pass_rate:g}, so no row would be between the two; lower it"
        )


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
    if recipe.masks.keep_sampling_mask and sampling.repetition_penalty != 1:
        yield (
            "masks.keep_sampling_mask renormalizes over the tokens that the filters left, but "
            "sampling.repetition_penalty changes their probabilities, too; set one of the two"
        )
    if recipe.masks.keep_sampling_mask and not (sampling.top_k or sampling.top_p < 1 or sampling.min_p):
        yield "masks.keep_sampling_mask renormalizes over the tokens that top_k, top_p or min_p leave; set one of them"


def _vllm(recipe: Recipe) -> Iterator[str]:
    if recipe.sampling.generator != "vllm":
        return
    for server in recipe.vllm.servers:
        if (problem := _address_problem(server)) is not None:
            yield f"vllm.servers: {problem}"
    if recipe.vllm.weights == "nccl" and not recipe.vllm.servers:
        yield "vllm.weights 'nccl' sends weights to servers, but vllm.servers is empty; name them, or leave it out"
    if recipe.masks.keep_sampling_mask:
        yield (
            "masks.keep_sampling_mask needs the tokens that the filters left, which vLLM does not return; set "
            "sampling.generator to 'engine', or masks.keep_sampling_mask to false"
        )
    if recipe.sampling.kv_cache_dtype != "auto":
        yield (
            "sampling.kv_cache_dtype is a setting of the engine; with sampling.generator 'vllm' leave it out, and "
            "start the servers with --kv-cache-dtype fp8"
        )
    filters = [name for name in ("top_k", "min_p") if recipe.get(f"sampling.{name}")]
    filters += ["top_p"] * (recipe.sampling.top_p < 1)
    changed = [*filters, *["min_new_tokens"] * (recipe.sampling.min_new_tokens > 0)]
    changed += ["repetition_penalty"] * (recipe.sampling.repetition_penalty != 1)
    if changed and (correction := next(_needs_sampler_logps(recipe), None)):
        yield (
            f"{correction} compares the trainer's log-probs with the sampler's, but with sampling.{changed[0]} vLLM "
            f"only returns them after that was applied; leave sampling.{changed[0]} out, or {correction}, or set "
            "sampling.generator to 'engine'"
        )
    ordered = recipe.sampling.order == "vllm" or (recipe.sampling.order == "transformers" and "min_p" not in filters)
    if filters and not ordered and (len(filters) > 1 or recipe.sampling.order == "mlx_lm"):
        yield f"vLLM applies the filters in its own order; set sampling.order to 'vllm', not {recipe.sampling.order!r}"


def _address_problem(server: str) -> str | None:
    """What is wrong with a server's address; None if it can be used. A password in it is not repeated."""
    example = "write it like 'http://host:8000'"
    try:
        url = urlsplit(server)
    except ValueError as error:  # brackets that are no IPv6 address
        return f"{excerpt(server)} is not an address ({error}); {example}"
    if "@" in server:
        return f"an address must not have a user or a password in it; {example}, and put a key into api_key_env"
    shown = excerpt(server)
    if url.scheme not in ("http", "https"):
        other = f"the scheme {excerpt(url.scheme)}" if "://" in server else "no http:// or https://"
        return f"{shown} is not an address that can be asked: it has {other}; {example}"
    try:
        port = url.port
    except ValueError:
        port = 0
    if port == 0:
        return f"the port of {shown} is not a number from 1 to 65535; {example}"
    host = url.hostname or ""
    if not host:
        return f"{shown} names no host; {example}"
    if ":" not in host and not all(HOST_PART.fullmatch(part) for part in host.removesuffix(".").split(".")):
        return f"the host {excerpt(host)} of {shown} cannot be a name; {example}"
    if url.path.strip("/") or url.query or url.fragment:
        return f"{shown} is more than the address of a server; leave out everything behind its port, such as /v1"
    return None


def _needs_sampler_logps(recipe: Recipe) -> Iterator[str]:
    """The settings that need the sampler's log-probs under the full distribution."""
    for name in CORRECTIONS:
        if recipe.get(name) is not None:
            yield name
    if recipe.masks.off_policy == "v3.2":
        yield "masks.off_policy"
    if recipe.masks.divergence is not None:
        yield "masks.divergence"
    if recipe.train.max_staleness:
        yield "train.max_staleness"


def _asynchronous(recipe: Recipe) -> Iterator[str]:
    train = recipe.train
    if train.replay is not None and not train.max_staleness:
        yield "train.replay repeats an asynchronous run; set train.max_staleness to the value that it had"
    if train.max_staleness and recipe.loss.name == "reinforce" and recipe.loss.importance_cap is None:
        yield (
            "the loss 'reinforce' has no ratio, so it cannot correct for the older weights that train.max_staleness "
            "allows; set loss.importance_cap, or use another loss"
        )


def _updates(recipe: Recipe) -> Iterator[str]:
    train = recipe.train
    if train.update_per_step and train.max_staleness:
        yield (
            f"train.max_staleness {train.max_staleness} counts steps of one rollout each, but with "
            "train.update_per_step a step is one update; set one of them to its default"
        )
    if train.mini_batch_by == "samples" and recipe.preference.weight and recipe.preference.pairs != "data":
        yield (
            "train.mini_batch_by 'samples' may put the completions of a preference pair into different mini-batches; "
            "set it to 'prompts', or preference.pairs to 'data'"
        )
    if train.local_batch_size is not None and recipe.loss.denominator != "completion_mask":
        yield (
            f"train.local_batch_size means are over all completions, but loss.denominator is "
            f"{recipe.loss.denominator!r}; set that to 'completion_mask', or leave train.local_batch_size out"
        )


def _optimizer(recipe: Recipe) -> Iterator[str]:
    optimizer = recipe.optimizer
    if optimizer.name not in OPTIMIZERS and ":" not in optimizer.name:
        near = did_you_mean(optimizer.name, OPTIMIZERS)
        allowed = f"{', '.join(OPTIMIZERS)}, or module:Class"
        yield f"unknown optimizer {optimizer.name!r}{near} (allowed: {allowed})"
    if optimizer.lr_schedule in ("constant", "linear", "cosine"):
        if optimizer.lr_schedule_options:
            yield (
                f"optimizer.lr_schedule_options are arguments of a schedule of transformers, but "
                f"optimizer.lr_schedule {optimizer.lr_schedule!r} has none; use optimizer.final_lr_ratio"
            )
    elif optimizer.final_lr_ratio:
        yield (
            f"optimizer.final_lr_ratio has no effect on optimizer.lr_schedule {optimizer.lr_schedule!r}; use "
            "optimizer.lr_schedule_options, such as {min_lr_rate = 0.1}"
        )
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


def _distillation(recipe: Recipe) -> Iterator[str]:
    settings = recipe.distillation
    if settings.server is not None and (problem := _address_problem(settings.server)) is not None:
        yield f"distillation.server: {problem}"
    if settings.teacher is not None and settings.server is not None:
        yield "distillation.teacher and distillation.server are both set; leave one of them out"
    if not settings.weight:
        return
    if settings.teacher is None and settings.server is None:
        yield (
            f"distillation.weight is {settings.weight:g}, but there is no teacher; set distillation.teacher (a model, "
            "or 'policy' with distillation.show) or distillation.server"
        )
    if settings.teacher in ("policy", "reference") and settings.show is None:
        other = "; for a KL to the reference, set loss.kl_coef" if settings.teacher == "reference" else ""
        yield (
            f"distillation.teacher {settings.teacher!r} sees what the student sees, so there is nothing to learn from "
            f"it; set distillation.show to what only the teacher is shown, such as 'answer'{other}"
        )
    if settings.server is not None and recipe.sampling.temperature != 1:
        yield (
            f"sampling.temperature is {recipe.sampling.temperature:g}, but a server returns log-probs of its prompts "
            "at temperature 1; set it to 1, or load the teacher with distillation.teacher"
        )
    if settings.server is not None and settings.kl == "sampled" and recipe.masks.keep_sampling_mask:
        yield (
            "masks.keep_sampling_mask renormalizes the policy over some tokens, which distillation.server cannot do "
            "for the teacher; set distillation.kl to 'full', or masks.keep_sampling_mask to false"
        )
