"""Checks of the policy and its updates: KL, entropy, masks, staleness, log-probs, rounding, NaN, memory."""

from __future__ import annotations

import math

from groupwise.training.monitor.checks.base import Problem, RecentSteps

LOW_KL, LOW_KL_STEPS = 1e-4, 50  # steps with the same reference after which the KL should have grown
MIN_UNMASKED = 0.7  # share of samples left by all masks together
MAX_CLIPPED = 0.2  # share of tokens whose ratio is clipped, with asynchronous rollouts
FAR_FROM_SAMPLER = 0.3  # mean difference of a token's log-prob between the policy and the older one that sampled it
# Below a seventh of its start and below 0.1 nats, nearly every token is certain: samples of a group hardly differ.
COLLAPSED, COLLAPSED_BELOW = 0.15, 0.1
# Twice its start and half a nat more: a policy that learns becomes more certain, not less.
EXPLODED, EXPLODED_BY = 2.0, 0.5
WRONG_LOGPS = 0.5  # nats between sampler and trainer that no rounding explains: ratios are off by e^0.5 on average
# AdamW moves a weight by about the learning rate. Healthy rates change nearly all float32 weights in each step.
MIN_CHANGED, NONE_CHANGED = 0.5, 0.01
# A student that learns halves its KL to the teacher within the first steps; below 0.01 per token there is little left.
TEACHER_KL, TEACHER_STEPS, NOT_NEARER, NEAR_TEACHER = "distillation/kl", 20, 0.95, 0.01
NEARLY_FULL = 0.95  # of the device's memory; the next longer completion may not fit

SAMPLE_MASKS = ("off_policy", "too_short", "no_answer", "repetitive", "truncated", "dropped")


def kl_high(recent: RecentSteps) -> Problem | None:
    kl = recent.mean("kl")
    if kl is None or kl <= recent.recipe.run.kl_warning:
        return None
    return Problem(
        f"the KL to the reference is {kl:.3g}",
        "raise <loss.kl_coef>, or lower <optimizer.learning_rate>, or, if the task needs a KL as high as that, raise "
        "<run.kl_warning>",
        {"kl": kl},
    )


def kl_low(recent: RecentSteps) -> Problem | None:
    kl, every = recent.mean("kl"), recent.recipe.reference.refresh_every
    steps = (recent.step - 1) % every + 1 if every else recent.step  # since the last refresh
    if kl is None or not recent.recipe.loss.kl_coef or abs(kl) >= LOW_KL or steps < LOW_KL_STEPS:
        return None
    return Problem(
        f"the KL to the reference is {kl:.1e}, so it has no effect but costs the reference's forward passes",
        "lower <loss.kl_coef> (0 switches it off)",
        {"kl": kl},
    )


def entropy_collapsed(recent: RecentSteps) -> Problem | None:
    entropy, start = recent.mean("entropy"), recent.start.get("entropy")
    if entropy is None or start is None or recent.solved or recent.recipe.taught:  # a teacher may be certain
        return None
    if entropy >= min(COLLAPSED * start, COLLAPSED_BELOW):
        return None
    bonus = "set loss.entropy_target, such as half of that at the start, or raise <loss.entropy_coef>"
    if recent.recipe.loss.entropy_target is not None:
        bonus = "raise <loss.entropy_target>, <loss.entropy_step>"
    return Problem(
        f"the entropy of the policy fell from {start:.3g} to {entropy:.3g} per token, so the samples of a prompt "
        "hardly differ",
        f"{bonus}, <loss.kl_coef>, or <sampling.temperature>, or lower <optimizer.learning_rate>",
        {"entropy": entropy, "entropy at the start": start},
    )


def entropy_exploded(recent: RecentSteps) -> Problem | None:
    entropy, start = recent.mean("entropy"), recent.start.get("entropy")
    if entropy is None or start is None or entropy <= max(EXPLODED * start, start + EXPLODED_BY):
        return None
    bonus = "lower <loss.entropy_coef>, or " if recent.recipe.loss.entropy_coef > 0 else "lower "
    if recent.recipe.loss.entropy_target is not None:
        bonus = "lower <loss.entropy_target>, or "
    return Problem(
        f"the entropy of the policy rose from {start:.3g} to {entropy:.3g} per token: it forgets what it knew",
        f"{bonus}<optimizer.learning_rate>, or raise <loss.kl_coef>",
        {"entropy": entropy, "entropy at the start": start},
    )


def teacher_far(recent: RecentSteps) -> Problem | None:
    """A student that learns from a teacher alone does not approach it."""
    kl, start = recent.mean(TEACHER_KL), recent.start.get(TEACHER_KL)
    if kl is None or start is None or not recent.recipe.taught or recent.step < TEACHER_STEPS:
        return None
    if start < NEAR_TEACHER or kl < NOT_NEARER * start:
        return None
    return Problem(
        f"the KL to the teacher is {kl:.3g}, as at the start ({start:.3g}): the student does not approach it",
        "raise <optimizer.learning_rate>, and check that the teacher's prompts are in a form that it knows "
        "(<distillation.show>)",
        {TEACHER_KL: kl, f"{TEACHER_KL} at the start": start},
    )


def masked(recent: RecentSteps) -> Problem | None:
    unmasked = recent.mean("mask_ratio")
    if unmasked is None or unmasked >= MIN_UNMASKED:
        return None
    shares = {name: share for name, share in recent.means("masks/").items() if name in SAMPLE_MASKS}
    largest = max(shares, key=lambda name: shares[name], default="")
    message, evidence = f"only {unmasked:.0%} of the answers are left by the masks", {"mask_ratio": unmasked}
    if not largest:
        return Problem(message, "switch off a mask (masks.*)", evidence)
    evidence[f"masks/{largest}"] = shares[largest]
    return Problem(f"{message}; {largest} masks {shares[largest]:.0%}", _mask_remedy(largest, recent), evidence)


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


def stale(recent: RecentSteps) -> Problem | None:
    """The ratio to the sampler is clipped often, or with an importance weight, the two differ much."""
    clipped, distance = recent.mean("clip_ratio/region_mean") or 0.0, recent.mean("sampler/logp_difference_mean") or 0.0
    if not recent.mean("async/staleness_max") or (clipped <= MAX_CLIPPED and distance <= FAR_FROM_SAMPLER):
        return None
    return Problem(
        f"the policy has moved away from the one that sampled: a token's log-prob differs by {distance:.2g} on "
        f"average, and the ratio of {clipped:.0%} of the tokens is clipped",
        "lower <train.max_staleness>, or <optimizer.learning_rate>",
        {"clip_ratio/region_mean": clipped, "sampler/logp_difference_mean": distance},
    )


def log_prob_mismatch(recent: RecentSteps) -> Problem | None:
    """Sampler and trainer compute different log-probs before the first update of a batch."""
    mismatch, limit = recent.newest.get("sampler/logp_difference_mean", 0.0), recent.recipe.train.max_logp_mismatch
    if not mismatch > limit:  # also if it is NaN: not measured
        return None
    if recent.newest.get("async/staleness_max"):  # older weights have sampled, so that the log-probs have to differ
        return None
    remedy = "check what changes the weights in between, or a model whose layers behave differently in training"
    if recent.recipe.model.has_dropout:
        remedy = "LoRA dropout is the likely cause: set model.lora.dropout = 0"
    elif recent.recipe.model.dtype != "float32":
        head = "" if recent.recipe.model.float32_head else "model.float32_head = true makes it smaller, "
        remedy += (
            f"; with bfloat16 weights (<model.dtype>) rounding is the likely cause: {head}loss.importance_cap = 2.0 "
            "corrects for it, model.dtype = 'float32' avoids it"
        )
    return Problem(
        f"before the update, sampler and trainer differ by {mismatch:.3f} in a token's log-prob on average "
        f"(train.max_logp_mismatch is {limit:g})",
        remedy,
        {"sampler/logp_difference_mean": mismatch},
        "error" if mismatch > max(limit, WRONG_LOGPS) else "warning",
    )


def weights_unchanged(recent: RecentSteps) -> Problem | None:
    """Updates are smaller than the distance to the next float32 number, so that they are rounded away."""
    shares = [row["weights_changed"] for row in recent.rows if row.get("updates") and "weights_changed" in row]
    changed = sum(shares) / max(1, len(shares))
    if not shares or changed >= MIN_CHANGED:
        return None
    rate = recent.mean("learning_rate") or 0.0
    return Problem(
        f"a step changes only {changed:.1%} of the weights, because most updates are lost in rounding (the learning "
        f"rate is {rate:.3g} on average)",
        "raise <optimizer.learning_rate>, or check <optimizer.warmup_steps> and the schedule of the learning rate",
        {"weights_changed": changed, "learning_rate": rate},
        "error" if changed < NONE_CHANGED else "warning",
    )


def not_finite(recent: RecentSteps) -> Problem | None:
    if not recent.newest.get("updates_not_finite"):
        return None
    skipped, done = recent.mean("updates_not_finite") or 0.0, recent.mean("updates") or 0.0
    share = skipped / (skipped + done)
    return Problem(
        f"{share:.0%} of the updates were skipped because of NaN or inf",
        "lower <optimizer.learning_rate>, or <optimizer.max_grad_norm>, and look at the rewards and advantages of "
        "these steps",
        {"updates_not_finite": skipped, "updates": done},
        "error" if not done else "warning",
    )


def memory(recent: RecentSteps) -> Problem | None:
    """Memory ran out, so that the packs were halved, or it may: by the estimate, or by the peak so far."""
    newest, full = recent.newest, recent.newest.get("token_budget_full")
    remedy = "lower <train.token_budget>, <sampling.max_new_tokens>, or <sampling.max_num_seqs>"
    if not recent.recipe.model.gradient_checkpointing:
        remedy += ", or set model.gradient_checkpointing = true"
    if full is not None:
        budget = newest["token_budget"]
        return Problem(
            f"memory ran out: a pass now has {budget:,.0f} tokens instead of {full:,.0f} (token_budget); the results "
            "are the same, but it is slower, and may run out again",
            remedy,
            {"token_budget": budget, "token_budget_full": full},
        )
    total, estimate = newest.get("device_memory", math.inf), newest.get("memory_estimate", 0.0)
    if estimate > total:
        return Problem(
            f"an update may need {estimate:.1f} GiB by the estimate of `groupwise check`; there are {total:.1f} GiB",
            remedy,
            {"memory_estimate": estimate, "device_memory": total},
        )
    peaks = {name: value for name, value in newest.items() if name.startswith("memory/")}
    stage = max(peaks, key=lambda name: peaks[name], default="")
    if not stage or peaks[stage] < NEARLY_FULL * total:
        return None
    return Problem(
        f"memory is nearly full: {peaks[stage]:.1f} of {total:.1f} GiB at the peak of {stage.removeprefix('memory/')}",
        remedy,
        {stage: peaks[stage], "device_memory": total},
    )
