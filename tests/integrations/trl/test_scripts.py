"""Scripts written for TRL run with their import changed, and log what they log with TRL."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.integrations.trl.fixtures import SCRIPTS, log_keys, models, run_script, workplace
from tests.vllm.test_faults import model, start

__all__ = ["model", "models", "start", "workplace"]

pytestmark = pytest.mark.slow
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py"))
# Scripts that are run with TRL, too. The others differ from these only in what is not logged.
COMPARED = ["quick_start", "several_rewards", "multi_task", "gspo", "cispo", "kl_reference", "evaluation_sets"]
COMPARED += ["tools", "environment", "rollout_function"]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("vllm_server", *COMPARED)])
def test_script(name: str, workplace: Path) -> None:
    trainer = run_script(name)["trainer"]
    history = trainer.state.log_history
    assert history[-1]["train_loss"] == pytest.approx(sum(_losses(history)) / len(_losses(history)), abs=1e-6)
    assert trainer.state.global_step == len(_losses(history)) >= 2
    assert all(math.isfinite(entry["reward"]) for entry in history if "reward" in entry)


@pytest.mark.parametrize("name", COMPARED)
def test_script_logs_what_it_logs_with_trl(name: str, workplace: Path) -> None:
    ours, theirs = log_keys(run_script(name)["trainer"]), log_keys(run_script(name, "trl")["trainer"])
    more = ("eval_first_", "eval_second_", "test_")  # here each set's metrics also have its name, not only the loss
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert set(other) <= set(mine)
        assert all(key.startswith(more) for key in set(mine) - set(other))


def test_vllm_server(workplace: Path, start) -> None:
    (server,) = start()
    trainer = run_script("vllm_server", **{"http://127.0.0.1:8000": server.url})["trainer"]
    assert trainer.state.global_step == 2
    assert server.prompts


def test_a_resumed_run_has_the_weights_and_logs_of_one_that_was_not_interrupted(workplace: Path) -> None:
    namespace = run_script("resume")
    resumed = namespace["trainer"]
    straight = namespace["make_trainer"]()  # in a folder that holds the resumed run
    straight.train()
    assert (workplace / "resume" / "earlier-run-1" / "checkpoint-2").is_dir()
    for name, weight in straight.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name
    timing = ("train", "step_time")
    logs = [
        [{key: value for key, value in entry.items() if not key.startswith(timing)} for entry in history]
        for history in (straight.state.log_history, resumed.state.log_history)
    ]
    assert [entry for entry in logs[0] if "loss" in entry] == [entry for entry in logs[1] if "loss" in entry]


def _losses(history: list[dict[str, float]]) -> list[float]:
    return [entry["loss"] for entry in history if "loss" in entry]
