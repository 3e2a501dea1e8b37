"""The checks of the installation, and what they report."""

from __future__ import annotations

import os
import site
import subprocess
import sys

import pytest

from groupwise.integrations.verl.check import check_installation
from tests.verl.common import ROOT
from tests.weights import wordllama

CODE = "import sys; sys.path[:0] = {paths!r}; sys.argv = ['check', '--embedder', 'wordllama']; import runpy; {run}"


def run_check(*arguments, command=None, **environment):
    done = subprocess.run(
        command or [sys.executable, "-m", "groupwise.integrations.verl", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
    return done.returncode, done.stdout.splitlines()


def test_all_checks_pass():
    wordllama()
    code, lines = run_check("--embedder", "wordllama")
    assert lines[-1] == "All checks passed."
    assert code == 0
    assert lines[0] == "good: verl 0.9.1 is installed"
    assert "good: verl sees the entry point verl.plugins of groupwise, called groupwise" in lines
    assert any("become [0.707, -0.707, 0.0] through verl" in line for line in lines)
    assert "good: the embedder wordllama returns vectors of 256 numbers" in lines


def test_missing_entry_point(tmp_path):
    """The installed packages without groupwise, whose source is on the path."""
    for entry in os.scandir(site.getsitepackages()[0]):
        if "groupwise" not in entry.name:
            (tmp_path / entry.name).symlink_to(entry.path)
    run = "runpy.run_module('groupwise.integrations.verl', run_name='__main__')"
    code = CODE.format(paths=[str(tmp_path), str(ROOT)], run=run)
    status, lines = run_check(command=[sys.executable, "-S", "-c", code])
    assert status == 1
    bad = [line for line in lines if line.startswith("BAD:")]
    assert "verl finds no entry point verl.plugins of groupwise. What to do: install groupwise with pip" in bad[0]
    assert "VERL_USE_EXTERNAL_MODULES=groupwise.integrations.verl.plugin" in bad[0]
    assert "the estimator similarity_group_grpo is not registered in verl" in bad[1]
    assert lines[-1] == "3 of 6 findings are bad."


def test_disabled_plugins():
    status, lines = run_check("--embedder", "wordllama", VERL_USE_EXTERNAL_PLUGINS="other")
    assert status == 1
    assert "VERL_USE_EXTERNAL_PLUGINS is 'other', which keeps verl from loading the plugin groupwise" in lines[1]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("wordlama", "did you mean 'wordllama'?"),
        ("/nowhere", "there is no folder"),
        ("nobody/no-such", "nobody/no-such is not available"),
    ],
    ids=["slip", "folder", "hub"],
)
def test_unavailable_embedder_is_the_only_failure(name, sentence):
    bad = [finding for finding in check_installation(name) if not finding.good]
    assert len(bad) == 1
    assert sentence in str(bad[0])
    assert "+algorithm.similarity.embedder=NAME" in str(bad[0])


def test_changed_signature_in_verl(monkeypatch):
    from verl.trainer.ppo.v1 import PPOTrainer

    monkeypatch.setattr(PPOTrainer, "_compute_advantage", lambda self, batch, new, metrics: None)
    bad = [str(finding) for finding in check_installation(str(wordllama())) if not finding.good]
    assert len(bad) == 1
    assert "this version of verl differs:" in bad[0]
    assert "missing a required argument: 'new'" in bad[0]
