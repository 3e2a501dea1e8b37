"""Settings in verl's configuration, and the command line of docs/verl.md."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest
from hydra import compose as compose_with_hydra
from hydra import initialize_config_module
from hydra.errors import ConfigCompositionException
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

from groupwise.config import GroupingSection
from groupwise.errors import ConfigError
from groupwise.integrations.verl.settings import read_settings
from tests.verl.common import ROOT, SIMILARITY, compose

VALID = [  # what verl asks for
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
]


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
        ("+algorithm.similarity.max_groups=1", "algorithm.similarity.max_groups"),
        ("+algorithm.similarity.n_similarity_workers=4", "algorithm.similarity.workers"),
        ("+algorithm.similarity.skip_single_members=true", "verl computes the reward of an answer when it is sampled"),
        ("+algorithm.similarity.ray_address=auto", "verl's Ray is used; remove it"),
        ("algorithm.similarity=minilm", "set its keys, as in"),
        ("algorithm.adv_estimator=grpo", "set algorithm.adv_estimator=similarity_group_grpo, or remove algorithm.simi"),
        ("algorithm.similarity.embedder=minlm", "did you mean 'minilm'"),
        ("algorithm.similarity.embedder=/nowhere", "Set algorithm.similarity.embedder to"),
        ("actor_rollout_ref.rollout.n=1", "actor_rollout_ref.rollout.n is 1"),
    ],
    ids=lambda value: value.partition("=")[0] if "=" in value else "",
)
def test_invalid_settings(override, sentence):
    """verl's own validation refuses them, in the process that starts Ray, for both of its trainers."""
    for trainer in ("true", "false"):
        config = compose("actor_rollout_ref.rollout.n=8", override, f"trainer.use_v1={trainer}")
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            validate_config(config, need_reference_policy(config), need_critic(config))


def test_other_estimators_are_not_checked():
    config = compose("~algorithm.similarity", "algorithm.adv_estimator=grpo", *VALID)
    validate_config(config, need_reference_policy(config), need_critic(config))


def test_the_command_refuses_before_ray_starts(tmp_path):
    """As a user sees it: the last line names the key and what to do, and no Ray was started."""
    done = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *SIMILARITY, "actor_rollout_ref.rollout.n=1"],
        cwd=tmp_path,  # Hydra writes there
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "ConfigError: actor_rollout_ref.rollout.n is 1" in done.stderr
    assert "ray init" not in done.stdout


def commands():
    """The overrides of every command in the docs, after python -m verl.trainer.main_ppo."""
    page = (ROOT / "docs" / "verl.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    words = [shlex.split(block.replace("\\\n", " "), comments=True) for block in blocks]
    module = "verl.trainer.main_ppo"
    return [command[command.index(module) + 1 :] for command in words if module in command]


@pytest.mark.parametrize("number", range(len(commands())))
def test_commands_of_the_docs_are_valid(number, tmp_path):
    (tmp_path / "bge-m3").mkdir()
    (tmp_path / "bge-m3" / "modules.json").write_text("[]")
    overrides = [word.replace("/shared", str(tmp_path)) for word in commands()[number]]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose_with_hydra("ppo_trainer", overrides=overrides)
    validate_config(config, need_reference_policy(config), need_critic(config))
    assert read_settings(config).embedder.endswith("/bge-m3")
    assert config.actor_rollout_ref.rollout.n == 8
    assert not need_critic(config)


def test_docs_have_commands_for_one_machine_and_for_several():
    assert [command[-1] for command in commands()] == ['trainer.logger=["console","wandb"]', "trainer.nnodes=2"]


def test_a_key_without_plus_is_an_error_of_hydra():
    with pytest.raises(ConfigCompositionException, match=r"To append to your config use \+algorithm\.similarty"):
        compose("algorithm.similarty.embedder=minilm")
