"""The recorded tokens on a GPU: the log-probs that the update learns from, and the same run with and without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from groupwise.analysis.run_reader import RunReader
from groupwise.training.trainer import Callback, Trainer
from groupwise.training.update.minibatch import build_minibatch
from tests.gpu.test_train import largest_difference, masters
from tests.training.runs import small_trainer

pytestmark = pytest.mark.gpu

KL = {"loss": {"kl_coef": 0.1}, "train": {"steps": 3}}


class AsInTheUpdate(Callback):
    """The log-probs and the entropy of each step, computed as its update does."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def on_rollout(self, trainer: Trainer, batch: Any, group_advantages: Any) -> None:
        minibatch = build_minibatch(batch, group_advantages, range(len(batch.prompts)), trainer.step_recipe())
        result = trainer.updater._logps(minibatch, trainer.step_recipe(), True)
        for row, sample in enumerate(minibatch.samples):
            length = len(batch.ids[sample])
            place = trainer.step + 1, sample // batch.samples, sample % batch.samples
            self.seen[place] = result.logps[row, :length].cpu(), result.entropy[row, :length].cpu()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.02)])
def test_they_are_the_log_probs_of_the_update(tmp_path, dtype, tolerance):
    """In bfloat16 the mean difference is compared: the update's pass is compiled, the recorded one is not."""
    update = AsInTheUpdate()
    changes = {"model": {"dtype": dtype}, "run": {"save_tokens_every": 1}}
    trainer = small_trainer(tmp_path / "run", KL, changes, callbacks=[update])
    assert trainer.components.handle.device.type == "cuda"
    trainer.run()
    reader = RunReader(tmp_path / "run")
    assert reader.token_steps == [1, 2, 3]
    differences = []
    for step in reader.token_steps:
        for row in reader.tokens(step):
            logps, entropy = update.seen[step, row.prompt_number, row.sample]
            differences += (torch.tensor(row.policy_logps) - logps).abs().tolist()
            differences += (torch.tensor(row.entropy) - entropy).abs().tolist()
            assert row.ref_logps is not None
    assert len(differences) > 100
    assert sum(differences) / len(differences) < tolerance


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_run_is_the_same_without(tmp_path, dtype):
    for name, every in (("with", 1), ("without", 0)):
        small_trainer(tmp_path / name, KL, {"model": {"dtype": dtype}, "run": {"save_tokens_every": every}}).run()
    one, other = masters(tmp_path / "with", 3), masters(tmp_path / "without", 3)
    moved = largest_difference(one, masters(tmp_path / "with", 1))
    assert moved > 1e-3
    assert largest_difference(one, other) < 0.02 * moved  # as two runs on a GPU agree
