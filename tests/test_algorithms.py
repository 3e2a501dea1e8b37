"""The presets and their values."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from groupwise.algorithms import ALGORITHMS, find_algorithm
from groupwise.config import Recipe, make_recipe, setting_names
from groupwise.core.losses import LOSSES
from groupwise.errors import ConfigError

# TRL's defaults. The ratio per token is the default of the loss.
TRL_DEFAULTS = {
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
    "loss.ratio": None,
    "loss.clip_low": 0.2,
    "loss.clip_high": None,
    "loss.kl_coef": 0.0,
    "advantages.scale": "group",
    "data.max_prompt_length": 512,
    "data.shuffle": True,
    "model.gradient_checkpointing": True,
    "model.dtype": "auto",
}

# What the two presets of enhanced_grpo have in common.
ENHANCED = {
    "sampling.samples_per_prompt": 16,
    "sampling.temperature": 1.0,
    "sampling.top_k": 40,
    "sampling.max_new_tokens": 512,
    "train.batch_size": 16,
    "train.accumulation": 1,
    "optimizer.learning_rate": 1e-5,
    "optimizer.embedding_learning_rate": 2e-4,
    "train.epochs": 2.0,
    "loss.kl_coef": 0.01,
    "advantages.baseline": "mean",
    "advantages.scale": "none",
    "masks.off_policy_threshold": 0.5,
    "masks.min_length": 10,
    "optimizer.max_grad_norm": 1.0,
    "reference.refresh_every": 100,
    "reference.mix": 1.0,
    "loss.name": "reinforce",
    "loss.denominator": "policy_mask",
    "loss.kl_aggregation": "token_mean",
}
# Where they differ: the forms of DeepSeek-V3.2, and the variants.
V32_FORMS = {
    "loss.kl": "unbiased",
    "masks.off_policy": "v3.2",
    "masks.keep_sampling_mask": True,
    "masks.validity": False,
}
LITERAL_FORMS = {
    "loss.kl": "full_ratio_weighted",
    "masks.off_policy": "reference_drift",
    "masks.keep_sampling_mask": False,
    "masks.validity": True,
}


def differences(one, other):
    """The settings in which two presets differ, with the values of the first."""
    return {name: one.get(name) for name, _ in setting_names() if one.get(name) != other.get(name)}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_preset_is_a_recipe(name):
    recipe = make_recipe({"algorithm": name})
    assert recipe.algorithm == name
    for setting, value in ALGORITHMS[name].settings.items():
        assert recipe.get(setting) == value
    assert recipe.loss.name in LOSSES


def test_dapo_has_trls_defaults():
    recipe = make_recipe({"algorithm": "dapo"})
    assert {name: recipe.get(name) for name in TRL_DEFAULTS} == TRL_DEFAULTS
    assert LOSSES["dapo"].ratios[0] == "token"
    assert LOSSES["dapo"].aggregation == "token_mean"


def test_the_defaults_of_the_sections_are_the_same():
    assert {name: Recipe().get(name) for name in TRL_DEFAULTS} == TRL_DEFAULTS
    assert make_recipe({"algorithm": "dapo"}) == Recipe()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", {"loss.name": "grpo"}),
        ("dr_grpo", {"loss.name": "dr_grpo", "advantages.scale": "none"}),
        ("gspo", {"loss.name": "gspo", "loss.ratio": "sequence", "loss.clip_low": 3e-4, "loss.clip_high": 4e-4}),
        ("cispo", {"loss.name": "cispo", "loss.clip_high": 5.0}),
        ("maxrl", {"advantages.scale": "mean", "advantages.eps": 0.0}),
        ("dppo", {"loss.name": "cispo", "loss.clip_high": 20.0, "masks.divergence": "tv"}),
        (
            "scalerl",
            {
                "loss.name": "cispo",
                "loss.clip_high": 5.0,
                "loss.aggregation": "prompt_mean",
                "advantages.scale": "batch_advantages",
                "masks.drop_equal_rewards": True,
                "model.float32_head": True,
            },
        ),
    ],
)
def test_differences_of_the_other_presets(name, expected):
    assert differences(make_recipe({"algorithm": name}), Recipe()) == {"algorithm": name, **expected}


def test_losses_of_the_presets():
    assert LOSSES["grpo"].aggregation == "sequence_mean"
    assert LOSSES["dr_grpo"].aggregation == "constant"
    assert LOSSES["gspo"].ratios == ("sequence",)


@pytest.mark.parametrize(("name", "forms"), [("enhanced_grpo", V32_FORMS), ("enhanced_grpo_literal", LITERAL_FORMS)])
def test_enhanced_grpo(name, forms):
    recipe = make_recipe({"algorithm": name})
    assert {name: recipe.get(name) for name in ENHANCED} == ENHANCED
    assert {name: recipe.get(name) for name in forms} == forms
    assert set(differences(recipe, Recipe())) <= {*ENHANCED, *forms, "algorithm", "data.max_prompt_length"}


def test_enhanced_grpo_literal_differs_only_in_its_forms():
    enhanced, literal = (make_recipe({"algorithm": name}) for name in ("enhanced_grpo", "enhanced_grpo_literal"))
    assert differences(literal, enhanced) == {"algorithm": "enhanced_grpo_literal", **LITERAL_FORMS}


def test_only_enhanced_grpo_has_the_mean_of_the_kl_over_tokens():
    with_mean = {name for name in ALGORITHMS if make_recipe({"algorithm": name}).loss.kl_aggregation != "loss"}
    assert with_mean == {"enhanced_grpo", "enhanced_grpo_literal"}


def test_additional_metric_names():
    names = {"policy_loss": "loss/policy", "kl_penalty": "loss/kl", "kl_divergence": "kl", "avg_reward": "reward"}
    without = {name for name in ALGORITHMS if not name.startswith("enhanced_grpo")} - {"pg_grpo", "dpo"}
    assert all(not ALGORITHMS[name].metrics for name in without)
    assert dict(ALGORITHMS["enhanced_grpo"].metrics) == names
    assert dict(ALGORITHMS["enhanced_grpo_literal"].metrics) == names | {"kl_divergence": "kl_ratio_weighted"}
    with pytest.raises(TypeError):
        ALGORITHMS["enhanced_grpo"].metrics["loss"] = "mine"


def test_a_loss_on_the_default_preset_uses_its_default_ratio():
    for name in LOSSES:
        assert make_recipe({"loss": {"name": name}}).loss.ratio is None


def test_presets_are_immutable():
    for name in ("dapo", "dpo"):
        with pytest.raises(TypeError):
            ALGORITHMS[name].settings["loss.kl_coef"] = 1.0
        with pytest.raises(FrozenInstanceError):
            ALGORITHMS[name].settings = {}


def test_a_misspelt_preset():
    with pytest.raises(ConfigError, match=r"unknown algorithm 'drgrpo'; did you mean 'dr_grpo'\? \(allowed: 'dapo', "):
        find_algorithm("drgrpo")
    assert find_algorithm("gspo") is ALGORITHMS["gspo"]


def test_pg_grpo():
    recipe = make_recipe({"algorithm": "pg_grpo"})
    expected = {
        "loss.name": "grpo",
        "loss.ratio": "token",
        "loss.policy_coef": 1.0,
        "loss.kl": "k3",
        "loss.kl_coef": 0.04,
        "reference.refresh_every": 0,
        "preference.weight": 0.1,
        "preference.beta": 0.1,
        "preference.kind": "sigmoid",
        "preference.pairs": "group",
    }
    assert {name: recipe.get(name) for name in expected} == expected


def test_dpo_is_pg_grpo_without_sampling():
    changed = differences(make_recipe({"algorithm": "dpo"}), make_recipe({"algorithm": "pg_grpo"}))
    assert changed == {
        "algorithm": "dpo",
        "loss.policy_coef": 0.0,
        "loss.kl_coef": 0.0,
        "preference.weight": 1.0,
        "preference.pairs": "data",
    }
    names = ALGORITHMS["dpo"].metrics
    assert names == ALGORITHMS["pg_grpo"].metrics
    assert {name.partition("/")[0] for name in names} == {"rewards", "logps"}
    assert all(name.startswith("preference/") for name in names.values())
