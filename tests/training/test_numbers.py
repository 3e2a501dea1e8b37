"""Numbers at the edge: a run goes on with them, or stops before the weights move and says why."""

from __future__ import annotations

import math
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from groupwise.config import make_recipe
from groupwise.errors import ConfigError, GroupwiseError, NotFiniteError, RewardError, UserCodeError
from groupwise.evaluate import Evaluation
from groupwise.model.precision import MasterWeights
from groupwise.rundir import read_json, read_metrics
from groupwise.training.trainer import Callback, Trainer
from tests.training.factories import small_llama
from tests.training.runs import check_same, even, run_steps, small_trainer

LARGEST = sys.float_info.max


def weights_of(trainer: Trainer) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in trainer.masters.parameters()]


def unchanged(before: list[torch.Tensor], trainer: Trainer) -> bool:
    return all(map(torch.equal, before, trainer.masters.parameters()))


def one_or(low: float, high: float, extra: float = 0.0):
    """A reward that alternates between two numbers; ``extra`` is added to the third."""

    def reward(completions, **_):
        return [(high if number % 2 else low) + (extra if number == 2 else 0.0) for number in range(len(completions))]

    return reward


@pytest.mark.parametrize(
    "reward",
    [one_or(-LARGEST, LARGEST), one_or(0.0, LARGEST), one_or(5e-324, 1e-323), one_or(1e308, 1e308)],
    ids=["both ends", "one end", "denormal", "equal"],
)
def test_a_run_with_rewards_as_large_as_floats_go(tmp_path, reward):
    """It learns from them as from 0 and 1, evaluates, saves, draws its curves and can be resumed."""
    settings = {"train": {"steps": 2}, "run": {"plot": True}, "advantages": {"eps": 0.0}}
    trainer = small_trainer(tmp_path / "run", settings, rewards=[reward])
    trainer.run()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(math.isfinite(row["eval/reward"]) for row in rows if "eval/reward" in row)
    assert all(math.isfinite(row["loss"]) for row in rows if "loss" in row)
    assert small_trainer(tmp_path / "run", settings, rewards=[reward], resume=True).run().steps == 2


def test_such_rewards_give_the_advantages_of_ordinary_ones(tmp_path):
    """Multiplied by a power of two, every update has the same bits."""
    for name, high in (("one", 2.0), ("large", 2.0**1020), ("small", 2.0**-1060)):
        trainer = small_trainer(tmp_path / name, {"train": {"steps": 2}, "advantages": {"eps": 0.0}},
                                rewards=[one_or(0.0, high)])  # fmt: skip
        trainer.run()
    tensors = [
        load_file(tmp_path / name / "checkpoint-2" / "masters.safetensors") for name in ("one", "large", "small")
    ]
    for other in tensors[1:]:
        assert all(torch.equal(value, other[name]) for name, value in tensors[0].items())


@pytest.mark.parametrize(
    ("settings", "rewards", "error", "sentence"),
    [
        ({"advantages": {"scale": "none"}}, [one_or(-1e300, 1e300)], RewardError, "completion .* beyond float32"),
        ({}, [one_or(1e308, 1e308), (one_or(1e308, 1e308), 1.0)], RewardError, "'r0'.*1e.308.*lower its weight"),
        ({"loss": {"entropy_coef": 1e38}}, [even], NotFiniteError, "Lower loss.entropy_coef = 1e.38"),
        ({"loss": {"policy_coef": 3e38}}, [even], NotFiniteError, "Lower loss.policy_coef = 3e.38"),
        ({"preference": {"weight": 1.0, "beta": 1e38}}, [even], NotFiniteError, "Lower preference.beta = 1e.38"),
    ],
)  # fmt: skip
def test_what_stops_before_the_weights_move(tmp_path, settings, rewards, error, sentence):
    from groupwise.rewards import named

    functions = [named(*entry, name="second") if isinstance(entry, tuple) else named(entry, name=f"r{number}")
                 for number, entry in enumerate(rewards)]  # fmt: skip
    trainer = small_trainer(tmp_path / "run", settings, {"evaluate": {"before_training": False}}, rewards=functions)
    before = weights_of(trainer)
    with trainer, pytest.raises(error, match=sentence):
        list(trainer.steps())
    assert unchanged(before, trainer)
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def detached(tokens, settings):
    return -tokens.logps.detach() * tokens.advantages


LOSSES = {
    "nan": (lambda tokens, settings: tokens.logps * math.nan, NotFiniteError, "The loss bad_losses:nan returned NaN"),
    "infinite": (lambda tokens, settings: tokens.logps / 0.0, NotFiniteError, "The loss bad_losses:infinite returned"),
    "detached": (detached, ConfigError, "without a gradient"),
    "complex": (lambda tokens, settings: tokens.logps * 1j, ConfigError, "complex64.*expected floats"),
    "integer": (lambda tokens, settings: tokens.logps.long(), ConfigError, "int64.*expected floats"),
    "short": (lambda tokens, settings: tokens.logps[:, 0], ConfigError, "expected one number per token"),
    "nothing": (lambda tokens, settings: None, ConfigError, "NoneType"),
    "raises": (
        lambda tokens, settings: {}["x"],
        UserCodeError,
        r"the loss bad_losses:raises raised KeyError.*test_numbers",
    ),
    "meta": (lambda tokens, settings: tokens.logps.to("meta"), ConfigError, "on meta; expected floats on cpu"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_custom_loss_that_cannot_be_used(tmp_path, monkeypatch, name):
    function, error, sentence = LOSSES[name]
    module = ModuleType("bad_losses")
    setattr(module, name, function)
    monkeypatch.setitem(sys.modules, "bad_losses", module)
    trainer = small_trainer(tmp_path / "run", {"loss": {"name": f"bad_losses:{name}"}})
    before = weights_of(trainer)
    with trainer, pytest.raises(error, match=sentence):
        list(trainer.steps())
    assert unchanged(before, trainer)


def test_a_custom_loss_in_half_precision_is_used(tmp_path, monkeypatch):
    module = ModuleType("bad_losses")
    module.half = lambda tokens, settings: (-tokens.logps * tokens.advantages).half()
    monkeypatch.setitem(sys.modules, "bad_losses", module)
    small_trainer(tmp_path / "run", {"loss": {"name": "bad_losses:half"}, "train": {"steps": 1}}).run()


@pytest.mark.parametrize("value", [math.nan, math.inf, 70000.0])
def test_weights_that_became_too_large_are_not_synced(value):
    model = small_llama(torch.float16)
    masters = MasterWeights(model)
    masters.check_finite("the update", "Lower the learning rate")
    name, master = list(masters.named_parameters())[3]
    with torch.no_grad():
        master.view(-1)[1] = value
    with pytest.raises(NotFiniteError, match=rf"the update gave the weight {name} the size .*Lower the learning rate"):
        masters.check_finite("the update", "Lower the learning rate")


class StrangeMetrics(Callback):
    """Adds metrics to each evaluation, which are then saved with the run."""

    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        evaluation.metrics.update(
            nan=math.nan, inf=-math.inf, big=10**400, array=np.float32(2), tensor=torch.tensor(3.0)
        )


def test_metrics_that_are_not_finite_never_prevent_a_checkpoint(tmp_path):
    def strange(completions, log_metric, **_):
        for name, value in {"nan": math.nan, "inf": math.inf, "huge": LARGEST, "half": np.float16(1.5)}.items():
            log_metric(name, value)
            log_metric(name, value)
        return even(completions)

    def trainer(folder, **options):
        return small_trainer(folder, rewards=[strange], callbacks=[StrangeMetrics()], **options)

    trainer(tmp_path / "one").run()
    run_steps(trainer(tmp_path / "two"), 2)
    trainer(tmp_path / "two", resume=True).run()
    check_same(tmp_path / "one", tmp_path / "two", 4)
    last = read_json(tmp_path / "one" / "checkpoint-4" / "state.json")["train"]["first"]
    assert (last["nan"], last["inf"], last["big"], last["array"], last["tensor"]) == (
        "NaN",
        "-Infinity",
        "Infinity",
        2,
        3,
    )
    row = read_metrics(tmp_path / "one" / "metrics.jsonl")[1]
    assert (row["inf"], row["huge"], row["half"]) == (math.inf, math.inf, 1.5)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"optimizer": {"learning_rate": 1e39}}, "at most 1"),
        ({"optimizer": {"learning_rate": 1e-3, "weight_decay": 1e4}}, "turn the signs of all weights"),
        ({"evaluate": {"temperature": 1e-300}}, "evaluate.temperature 1e-300 is below 1e-06.*0 is greedy"),
        ({"sampling": {"temperature": 5e-324}}, "at least 1e-06"),
    ],
)
def test_settings_beyond_sense(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make_recipe(settings)


def test_phases_and_rules_have_the_same_limits(tmp_path):
    for change in (
        {"phases": [{"name": "a", "steps": 1, "learning_rate": 10.0}, {"name": "b", "temperature": 1.0}]},
        {"phases": [{"name": "a", "temperature": 1e-300}]},
        {"phases": [{"name": "a", "temperature": math.nan}]},
        {"ramps": {"temperature": {"from": 1.0, "to": 1e-9, "steps": 2}}},
        {"rules": [{"when": "reward > nan", "over": 1, "then": "learning_rate * 2"}]},
    ):
        with pytest.raises(GroupwiseError):
            small_trainer(tmp_path / "run", change)
    rule = {"when": "reward > -1", "over": 1, "then": "learning_rate * 1e6"}
    trainer = small_trainer(tmp_path / "run", {"rules": [rule], "train": {"steps": 2}})
    trainer.run()
    assert trainer.optimizer.param_groups[0]["lr"] == 1e-3
    assert trainer.display.heard("is left out, it stays at 0.001")
