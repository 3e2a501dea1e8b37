"""The algorithms by name: each is a frozen record of settings, never a branch in the trainer.

A preset is the layer below a recipe: the recipe's own keys win over it, key by key. ``dapo`` and ``grpo`` carry the
second document's whole block of defaults, which are TRL's; the others say in what they differ. Two of its lines are
read with care: bfloat16 is used where the device has it in hardware (``model.dtype = "auto"``), and its batch of 4
with accumulation 4 counts prompts, so that a step compares 16 groups.

The first document quotes three features of DeepSeek-V3.2 and writes each down in another form than the paper's. There
are two presets, with the same numbers; they differ in

- the KL: the paper's estimate k3 · π_θ/π_old is unbiased under samples of an older policy. The document's is exact,
  but times the mean over the vocabulary of π_θ/(π_ref + 1e-8), so it is not the KL: the factor may be large, or near 0
  where most of the vocabulary is next to impossible;
- the off-policy mask: the paper's drops an answer that did worse than its group and that the policy has left behind
  since it was sampled. The document's drops whatever has become likelier than under the reference, good or bad;
- the 'keep sampling mask': the paper's renormalises the policy over the tokens that top-k had left, so that what is
  trained is what was sampled from. The document's drops answers that are too short, repetitive or without a letter,
  which also takes away the reason not to give such answers.

``enhanced_grpo`` has the paper's forms, ``enhanced_grpo_literal`` the document's own.

``similarity_group_grpo`` is the third document: which answers are compared with each other is decided by what they say
(``[grouping]`` has the settings). Its loss is the mean over all tokens, as in verl, for which the document is written.

``pg_grpo`` is the fourth document: GRPO and DPO in one objective, L = L_clip + w₁·KL + w₂·L_DPO, all of it to be
minimised (its formula for the first two has the signs of something to be maximised, its code those of a loss; its
formula has one ratio per answer, its code one per token, which is what is here). It leaves both weights open. w₁ = 0.04
is DeepSeekMath's. w₂ = 0.1 makes the two gradients about equally large where answers have some two hundred tokens
(docs/preference.md): DPO sums over an answer's tokens what GRPO averages, so short answers want a larger one. ``dpo``
is the end of that scale where a data set of pairs is all there is: nothing is sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from groupwise.errors import ConfigError, check_choice


@dataclass(frozen=True)
class Algorithm:
    """A named choice of settings; keys are dotted, as on the command line.

    ``metrics`` are further names under which a run logs what it measures: alias → the name that groupwise has for it.
    """

    name: str
    summary: str
    settings: Mapping[str, Any]
    metrics: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def but(self, name: str, summary: str, changes: Mapping[str, Any]) -> Algorithm:
        """The same algorithm with some settings changed, under another name."""
        return Algorithm(name, summary, MappingProxyType({**self.settings, **changes}), self.metrics)


DAPO = Algorithm(
    "dapo",
    "clipped ratio per token, every token of the batch weighs the same (the second document's defaults)",
    MappingProxyType(
        {
            "optimizer.learning_rate": 1e-6,
            "train.epochs": 3.0,
            "train.batch_size": 4,
            "train.accumulation": 4,
            "train.iterations": 1,
            "sampling.samples_per_prompt": 8,
            "sampling.max_new_tokens": 256,
            "sampling.temperature": 1.0,
            "sampling.top_p": 1.0,
            "sampling.top_k": None,
            "sampling.min_p": None,
            "loss.name": "dapo",
            "loss.ratio": None,  # the loss's own, here per token: who names another loss gets that one's
            "loss.clip_low": 0.2,
            "loss.clip_high": None,
            "loss.kl_coef": 0.0,
            "advantages.scale": "group",
            "data.max_prompt_length": 512,
            "data.shuffle": True,
            "model.gradient_checkpointing": True,
            "model.dtype": "auto",
        }
    ),
)

GRPO = DAPO.but(
    "grpo",
    "the same with DeepSeekMath's aggregation: the mean over each answer's tokens, then over answers",
    {"loss.name": "grpo"},
)

DR_GRPO = DAPO.but(
    "dr_grpo",
    "no division by the group's spread nor by an answer's length, so neither is favoured",
    {"loss.name": "dr_grpo", "advantages.scale": "none"},
)

GSPO = DAPO.but(
    "gspo",
    "one ratio per answer (its geometric mean over tokens), with the far narrower clip that this needs",
    {"loss.name": "gspo", "loss.ratio": "sequence", "loss.clip_low": 3e-4, "loss.clip_high": 4e-4},
)

CISPO = DAPO.but(
    "cispo",
    "the ratio is capped and detached, so that a clipped token still teaches",
    {"loss.name": "cispo", "loss.clip_high": 5.0},
)

ENHANCED_GRPO = Algorithm(
    "enhanced_grpo",
    "the first document with DeepSeek-V3.2's own forms: its unbiased KL, off-policy mask and keep sampling mask",
    MappingProxyType(
        {
            "sampling.samples_per_prompt": 16,
            "sampling.temperature": 1.0,
            "sampling.top_k": 40,
            "sampling.max_new_tokens": 512,
            "train.batch_size": 16,
            "train.accumulation": 1,
            "train.epochs": 2.0,
            "optimizer.learning_rate": 1e-5,
            "optimizer.embedding_learning_rate": 2e-4,
            "optimizer.max_grad_norm": 1.0,
            "loss.name": "reinforce",
            "loss.denominator": "policy_mask",
            "loss.kl_coef": 0.01,
            "loss.kl": "unbiased",
            "advantages.scale": "none",
            "masks.off_policy": "v3.2",
            "masks.off_policy_threshold": 0.5,
            "masks.keep_sampling_mask": True,
            "masks.validity": False,
            "reference.refresh_every": 100,
            "data.max_prompt_length": 1024,
        }
    ),
    MappingProxyType(
        {
            "policy_loss": "loss/policy",
            "kl_penalty": "loss/kl",
            "kl_divergence": "kl",
            "avg_reward": "reward",
        }
    ),
)

ENHANCED_GRPO_LITERAL = ENHANCED_GRPO.but(
    "enhanced_grpo_literal",
    "the first document as it is written: the weighted full KL, its off-policy mask, invalid answers dropped",
    {
        "loss.kl": "full_ratio_weighted",
        "masks.off_policy": "reference_drift",
        "masks.validity": True,
        "masks.keep_sampling_mask": False,
    },
)

SIMILARITY_GROUP_GRPO = DAPO.but(
    "similarity_group_grpo",
    "an answer is compared only with answers like itself, so that being different is not punished (third document)",
    {"advantages.grouping": "similarity", "advantages.eps": 1e-6, "sampling.samples_per_prompt": 8},
)

PREFERENCE_METRICS = MappingProxyType(
    {
        "rewards/chosen": "preference/chosen_reward",
        "rewards/rejected": "preference/rejected_reward",
        "rewards/margins": "preference/margin",
        "rewards/accuracies": "preference/accuracy",
        "logps/chosen": "preference/chosen_logp",
        "logps/rejected": "preference/rejected_logp",
    }
)

PG_GRPO = Algorithm(
    "pg_grpo",
    "GRPO and DPO in one objective: each group's best answer is also preferred to its worst (fourth document)",
    MappingProxyType(
        {
            **GRPO.settings,
            "loss.ratio": "token",
            "loss.policy_coef": 1.0,
            "loss.kl_coef": 0.04,
            "loss.kl": "k3",
            "reference.refresh_every": 0,
            "preference.weight": 0.1,
            "preference.beta": 0.1,
            "preference.kind": "sigmoid",
            "preference.pairs": "group",
        }
    ),
    PREFERENCE_METRICS,
)

DPO = PG_GRPO.but(
    "dpo",
    "the preference term alone, on a data set of pairs; nothing is sampled",
    {"loss.policy_coef": 0.0, "loss.kl_coef": 0.0, "preference.weight": 1.0, "preference.pairs": "data"},
)

ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        DAPO,
        GRPO,
        DR_GRPO,
        GSPO,
        CISPO,
        ENHANCED_GRPO,
        ENHANCED_GRPO_LITERAL,
        SIMILARITY_GROUP_GRPO,
        PG_GRPO,
        DPO,
    )
}


def find_algorithm(name: str) -> Algorithm:
    """The preset of that name; an error that lists them all otherwise."""
    check_choice("algorithm", name, ALGORITHMS, ConfigError)
    return ALGORITHMS[name]
