"""Settings come through verl's closed configuration, and the command line of the docs is one that verl accepts."""

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
    given = ["max_groups=4", "min_silhouette=0", "device=cuda", "text_after=null", "method=threshold", "workers=2"]
    found = read_settings(compose(*(f"+algorithm.similarity.{each}" for each in given)))
    assert found == GroupingSection(
        embedder="wordllama",
        max_groups=4,
        min_silhouette=0.0,
        device="cuda",
        text_after=None,
        method="threshold",
        workers=2,
    )


def test_without_any_the_defaults_are_the_documents():
    config = compose("~algorithm.similarity")
    assert read_settings(config) == GroupingSection()
    assert read_settings(config).embedder == "BAAI/bge-m3"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("+algorithm.similarity.max_group=3", "algorithm.similarity: unknown key 'grouping.max_group'; did you mean"),
        ("+algorithm.similarity.max_groups=1", "grouping.max_groups = 1 cannot be used; it should be a whole number"),
        ("+algorithm.similarity.skip_single_members=true", "verl computes rewards while answers are sampled"),
        ("+algorithm.similarity.ray_address=auto", "verl's own Ray is used; leave it out"),
        ("algorithm.similarity=minilm", "set its keys, as in"),
        ("algorithm.adv_estimator=grpo", "algorithm.adv_estimator is grpo, which does not use them; set it to similar"),
    ],
    ids=lambda value: value.partition("=")[0] if "=" in value else "",
)
def test_a_slip_is_answered_with_a_sentence(override, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        read_settings(compose(override))


def commands():
    """Every launch in the docs: the overrides after python -m verl.trainer.main_ppo."""
    page = (ROOT / "docs" / "verl.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    words = [shlex.split(block.replace("\\\n", " "), comments=True) for block in blocks]
    return [each[each.index("verl.trainer.main_ppo") + 1 :] for each in words if "verl.trainer.main_ppo" in each]


@pytest.mark.parametrize("number", range(len(commands())))
def test_verl_accepts_the_command_lines_of_the_docs(number):
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose_with_hydra("ppo_trainer", overrides=commands()[number])
    validate_config(config, need_reference_policy(config), need_critic(config))
    assert read_settings(config).embedder.endswith("/bge-m3")
    assert config.actor_rollout_ref.rollout.n == 8
    assert not need_critic(config)


def test_there_is_a_command_line_for_one_machine_and_one_for_several():
    assert [each[-1] for each in commands()] == ['trainer.logger=["console","wandb"]', "trainer.nnodes=2"]


def test_without_the_plus_hydra_says_that_there_is_no_such_key():
    with pytest.raises(ConfigCompositionException, match=r"To append to your config use \+algorithm\.similarty"):
        compose("algorithm.similarty.embedder=minilm")
