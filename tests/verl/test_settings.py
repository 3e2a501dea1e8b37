"""Settings in verl's configuration, and the command line of docs/verl.md."""

from __future__ import annotations

import re
import shlex

import pytest
from hydra import compose as compose_with_hydra
from hydra import initialize_config_module
from hydra.errors import ConfigCompositionException
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

from groupwise.config import GroupingSection
from groupwise.errors import ConfigError
from groupwise.integrations.verl.settings import read_settings
from tests.verl.common import ROOT, compose


def test_settings_are_those_of_a_recipe():
    overrides = ["max_groups=4", "min_silhouette=0", "device=cuda", "text_after=null", "method=threshold", "workers=2"]
    settings = read_settings(compose(*(f"+algorithm.similarity.{override}" for override in overrides)))
    assert settings == GroupingSection(
        embedder="wordllama",
        max_groups=4,
        min_silhouette=0.0,
        device="cuda",
        text_after=None,
        method="threshold",
        workers=2,
    )


def test_default_settings():
    config = compose("~algorithm.similarity")
    assert read_settings(config) == GroupingSection()
    assert read_settings(config).embedder == "BAAI/bge-m3"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("+algorithm.similarity.max_group=3", "max_group"),
        ("+algorithm.similarity.max_groups=1", "grouping.max_groups"),
        ("+algorithm.similarity.skip_single_members=true", "verl computes rewards during sampling"),
        ("+algorithm.similarity.ray_address=auto", "verl's Ray is used; remove it"),
        ("algorithm.similarity=minilm", "set its keys, as in"),
        ("algorithm.adv_estimator=grpo", "algorithm.adv_estimator is grpo, which does not use them; set it to similar"),
    ],
    ids=lambda value: value.partition("=")[0] if "=" in value else "",
)
def test_invalid_settings(override, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        read_settings(compose(override))


def commands():
    """The overrides of every command in the docs, after python -m verl.trainer.main_ppo."""
    page = (ROOT / "docs" / "verl.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    words = [shlex.split(block.replace("\\\n", " "), comments=True) for block in blocks]
    module = "verl.trainer.main_ppo"
    return [command[command.index(module) + 1 :] for command in words if module in command]


@pytest.mark.parametrize("number", range(len(commands())))
def test_commands_of_the_docs_are_valid(number):
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose_with_hydra("ppo_trainer", overrides=commands()[number])
    validate_config(config, need_reference_policy(config), need_critic(config))
    assert read_settings(config).embedder.endswith("/bge-m3")
    assert config.actor_rollout_ref.rollout.n == 8
    assert not need_critic(config)


def test_docs_have_commands_for_one_machine_and_for_several():
    assert [command[-1] for command in commands()] == ['trainer.logger=["console","wandb"]', "trainer.nnodes=2"]


def test_a_key_without_plus_is_an_error_of_hydra():
    with pytest.raises(ConfigCompositionException, match=r"To append to your config use \+algorithm\.similarty"):
        compose("algorithm.similarty.embedder=minilm")
