"""The presets: what the documents say, as frozen records."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from groupwise.algorithms import ALGORITHMS, DAPO, find_algorithm
from groupwise.config import Recipe, make_recipe, setting_names
from groupwise.core.losses import LOSSES
from groupwise.errors import ConfigError

# The second document's block of defaults. Its ratio per token is the loss's own.
SECOND_DOCUMENT = {
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

# The first document's GRPO_CONFIG and what its training step does.
FIRST_DOCUMENT = {
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
}
# In what DeepSeek-V3.2 and the document that quotes it differ.
PAPER = {"loss.kl": "unbiased", "masks.off_policy": "v3.2", "masks.keep_sampling_mask": True, "masks.validity": False}
DOCUMENT = {
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
    assert ALGORITHMS[name].name == name
    assert ALGORITHMS[name].summary
    assert recipe.loss.name in LOSSES


def test_dapo_is_the_second_documents_block():
    recipe = make_recipe({"algorithm": "dapo"})
    assert {name: recipe.get(name) for name in SECOND_DOCUMENT} == SECOND_DOCUMENT
    assert dict(DAPO.settings) == SECOND_DOCUMENT
    assert LOSSES["dapo"].ratios[0] == "token"
    assert LOSSES["dapo"].aggregation == "token_mean"


def test_the_sections_defaults_are_the_same_block():
    assert {name: Recipe().get(name) for name in SECOND_DOCUMENT} == SECOND_DOCUMENT
    assert make_recipe({"algorithm": "dapo"}) == Recipe()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", {"loss.name": "grpo"}),
        ("dr_grpo", {"loss.name": "dr_grpo", "advantages.scale": "none"}),
        ("gspo", {"loss.name": "gspo", "loss.ratio": "sequence", "loss.clip_low": 3e-4, "loss.clip_high": 4e-4}),
        ("cispo", {"loss.name": "cispo", "loss.clip_high": 5.0}),
    ],
)
def test_in_what_the_others_differ(name, expected):
    assert differences(make_recipe({"algorithm": name}), Recipe()) == {"algorithm": name, **expected}


def test_their_losses_are_what_they_are_called():
    assert LOSSES["grpo"].aggregation == "sequence_mean"
    assert LOSSES["dr_grpo"].aggregation == "constant"
    assert LOSSES["gspo"].ratios == ("sequence",)


@pytest.mark.parametrize(("name", "forms"), [("enhanced_grpo", PAPER), ("enhanced_grpo_literal", DOCUMENT)])
def test_enhanced_grpo_is_the_first_document(name, forms):
    recipe = make_recipe({"algorithm": name})
    assert {name: recipe.get(name) for name in FIRST_DOCUMENT} == FIRST_DOCUMENT
    assert {name: recipe.get(name) for name in forms} == forms
    assert set(differences(recipe, Recipe())) <= {*FIRST_DOCUMENT, *forms, "algorithm", "data.max_prompt_length"}


def test_the_two_forms_of_enhanced_grpo_differ_in_nothing_else():
    paper, document = (make_recipe({"algorithm": name}) for name in ("enhanced_grpo", "enhanced_grpo_literal"))
    assert differences(document, paper) == {"algorithm": "enhanced_grpo_literal", **DOCUMENT}


def test_the_names_of_the_documents_metrics():
    """Of the seven that its step returns, loss, accuracy and mask_ratio are what they are called everywhere."""
    names = {"policy_loss": "loss/policy", "kl_penalty": "loss/kl", "kl_divergence": "kl", "avg_reward": "reward"}
    without = {name for name in ALGORITHMS if not name.startswith("enhanced_grpo")} - {"pg_grpo", "dpo"}
    assert all(not ALGORITHMS[name].metrics for name in without)
    assert dict(ALGORITHMS["enhanced_grpo"].metrics) == dict(ALGORITHMS["enhanced_grpo_literal"].metrics) == names
    with pytest.raises(TypeError):
        ALGORITHMS["enhanced_grpo"].metrics["loss"] = "mine"


def test_another_loss_on_the_default_preset_brings_its_own_ratio():
    for name in LOSSES:
        assert make_recipe({"loss": {"name": name}}).loss.ratio is None


def test_a_preset_is_never_changed():
    with pytest.raises(TypeError):
        DAPO.settings["loss.kl_coef"] = 1.0
    with pytest.raises(FrozenInstanceError):
        DAPO.name = "mine"
    other = DAPO.but("mine", "for a test", {"loss.kl_coef": 1.0})
    assert (DAPO.settings["loss.kl_coef"], other.settings["loss.kl_coef"]) == (0.0, 1.0)
    assert other.settings["loss.name"] == "dapo"
    with pytest.raises(TypeError):
        other.settings["loss.kl_coef"] = 2.0


def test_a_misspelt_preset():
    with pytest.raises(ConfigError, match=r"unknown algorithm 'drgrpo'; did you mean 'dr_grpo'\? \(allowed: 'dapo', "):
        find_algorithm("drgrpo")
    assert find_algorithm("gspo") is ALGORITHMS["gspo"]


def test_the_fourth_documents_defaults():
    """Token ratio, grpo's aggregation, k3 to the frozen first model, DPO's sigmoid with beta 0.1, group pairs."""
    recipe = make_recipe({"algorithm": "pg_grpo"})
    said = {
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
    assert {name: recipe.get(name) for name in said} == said


def test_dpo_is_the_end_of_the_scale_without_grpo():
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
