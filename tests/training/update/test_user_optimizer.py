"""Other optimizers than AdamW, schedules, and a torch optimizer and scheduler that are given to the trainer."""

from __future__ import annotations

import pytest
import torch
from transformers import get_scheduler

from groupwise.config.sections import OptimizerSection
from groupwise.errors import ConfigError
from groupwise.model import load_model_and_tokenizer
from groupwise.model.precision import MasterWeights
from groupwise.training.schedule.learning_rate import learning_rate_factor, warmup_decay
from groupwise.training.trainer import Trainer
from groupwise.training.update.user_optimizer import UserOptimizer
from tests.training.factories import small_llama
from tests.training.runs import TASK, RecordingDisplay, checkpoint_of, even, metrics_of, run_steps, small_recipe
from tests.training.test_resume import disturb

QUIET = {"evaluate": {"before_training": False, "every": 0}}


@pytest.mark.parametrize("from_zero", [False, True])
def test_a_warmup_from_zero_by_hand(from_zero):
    settings = OptimizerSection(warmup_steps=4, warmup_from_zero=from_zero, lr_schedule="linear")
    factors = [learning_rate_factor(settings, step, 8) for step in range(9)]
    warmup = [0.0, 0.25, 0.5, 0.75] if from_zero else [0.25, 0.5, 0.75, 1.0]
    assert factors == [*warmup, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert warmup_decay(0, warmup_steps=0, total_steps=8, shape="constant", final=0.0, from_zero=True) == 1.0


SCHEDULES = {
    "linear": {},
    "cosine": {},
    "cosine_with_restarts": {"num_cycles": 3},
    "polynomial": {"power": 2.0, "lr_end": 1e-5},
    "inverse_sqrt": {"timescale": 7},
    "cosine_with_min_lr": {"min_lr": 1e-4},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1, "warmup_lr_rate": 0.5},
    "warmup_stable_decay": {"num_decay_steps": 5, "decay_type": "cosine"},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_that_of_transformers(name):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    scheduler = get_scheduler(name, optimizer, 4, 20, dict(SCHEDULES[name]))
    settings = {"learning_rate": 1e-3, "warmup_steps": 4, "warmup_from_zero": True, "lr_schedule": name}
    if name not in ("linear", "cosine"):
        settings["lr_schedule_options"] = SCHEDULES[name]
    section = OptimizerSection(**settings)
    for step in range(20):
        assert 1e-3 * learning_rate_factor(section, step, 20) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-18)
        optimizer.step()
        scheduler.step()


def make(folder, settings, *, model=None, tokenizer=None, **options) -> Trainer:
    return Trainer(
        small_recipe(QUIET, settings),
        task=TASK,
        rewards=[even],
        model=model,
        tokenizer=tokenizer,
        display=RecordingDisplay(),
        folder=folder,
        **options,
    )


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ({"name": "sgd", "options": {"speed": 3}}, "optimizer.name 'sgd' with options .*speed"),
        ({"name": "torch.optim:LBFGS"}, "LBFGS"),
        ({"name": "torch.nn:Linear", "options": {"out_features": 2}}, "torch.nn:Linear"),
        ({"name": "torch.optim:Nothing"}, "Nothing"),
        ({"lr_schedule": "polynomial", "lr_schedule_options": {"strength": 2}}, "lr_schedule_options .*strength"),
    ],
)
def test_what_cannot_be_made_is_refused_at_the_start(tmp_path, optimizer, words):
    with pytest.raises(ConfigError, match=words):
        make(tmp_path / "run", {"optimizer": optimizer})
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def tensors_of(folder, step):
    return {name: value for name, value in checkpoint_of(folder, step).items() if isinstance(value, torch.Tensor)}


def check_resumed(tmp_path, start, steps=4):
    """``start(folder, resume)`` gives a trainer of ``steps`` steps; the run in ``b`` stops after two."""
    start(tmp_path / "a", False).run()
    run_steps(start(tmp_path / "b", False), 2)
    disturb()
    start(tmp_path / "b", True).run()
    one, other = tensors_of(tmp_path / "a", steps), tensors_of(tmp_path / "b", steps)
    assert one.keys() == other.keys()
    assert [name for name, value in one.items() if not torch.equal(value, other[name])] == []
    assert any(name.startswith("optimizer/") for name in one)
    assert [row.get("learning_rate") for row in metrics_of(tmp_path / "a")] == [
        row.get("learning_rate") for row in metrics_of(tmp_path / "b")
    ]
    return one


OPTIMIZERS = {
    "sgd": {"name": "sgd", "options": {"momentum": 0.9}},
    "adafactor": {"name": "adafactor"},
    "module": {"name": "torch.optim:NAdam", "options": {"momentum_decay": 0.01}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_optimizers_resume_exactly(tmp_path, name):
    settings = {"optimizer": {**OPTIMIZERS[name], "lr_schedule": "polynomial", "warmup_steps": 1}}
    saved = check_resumed(tmp_path, lambda folder, resume: make(folder, settings, resume=resume))
    kinds = {full.split("/")[1] for full in saved if full.startswith("optimizer/")}
    expected = {"sgd": "momentum_buffer", "adafactor": "exp_avg_sq_row"}
    assert expected.get(name, "mu_product") in kinds


def with_own_optimizer(folder, resume=False, *, scheduler=True):
    settings = {"model": {"dtype": "float32"}, "train": {"iterations": 2}, "optimizer": {"max_grad_norm": 0.5}}
    model, tokenizer = load_model_and_tokenizer("tiny", dtype="float32", device="cpu")
    vectors = [weight for weight in model.parameters() if weight.dim() == 1]
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=2e-3, betas=(0.8, 0.9)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)) if scheduler else None
    return make(
        folder, settings, model=model, tokenizer=tokenizer, resume=resume, optimizer=optimizer, lr_scheduler=schedule
    )


@pytest.mark.slow
def test_an_optimizer_and_a_scheduler_of_ones_own(tmp_path):
    check_resumed(tmp_path, with_own_optimizer)
    rates = [row["learning_rate"] for row in metrics_of(tmp_path / "a") if "loss" in row]
    assert rates == pytest.approx([2e-3 / (1 + step) for step in range(4)])


def test_it_steps_the_float32_masters_of_a_bfloat16_model():
    model = small_llama(torch.bfloat16)
    masters = MasterWeights(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    assert UserOptimizer(optimizer).move_to(model, masters) is optimizer
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    assert sorted(map(id, weights)) == sorted(map(id, masters.parameters()))
    assert {weight.dtype for weight in weights} == {torch.float32}


@pytest.mark.slow
def test_without_a_scheduler_the_run_is_that_of_the_recipe(tmp_path):
    """The same optimizer as the recipe's own, given by hand."""
    own = {"learning_rate": 2e-3, "weight_decay": 0.1, "beta1": 0.8, "beta2": 0.9, "max_grad_norm": 0.5}
    recipe = {"train": {"iterations": 2}, "model": {"dtype": "float32"}, "optimizer": own}
    make(tmp_path / "a", recipe).run()
    with_own_optimizer(tmp_path / "b", scheduler=False).run()
    one, other = tensors_of(tmp_path / "a", 4), tensors_of(tmp_path / "b", 4)
    assert [name for name, value in one.items() if not torch.equal(value, other[name])] == []


def test_what_does_not_fit_together_is_refused(tmp_path):
    model, tokenizer = load_model_and_tokenizer("tiny", device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"model": model, "tokenizer": tokenizer}
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    constant = torch.optim.lr_scheduler.ConstantLR(other)
    for words, given in {
        "without its optimizer": {"lr_scheduler": constant, **options},
        "without the model": {"optimizer": optimizer},
        "of another optimizer": {"optimizer": optimizer, "lr_scheduler": constant, **options},
        "needs a metric": {"optimizer": optimizer, "lr_scheduler": plateau, **options},
        "1 parameters that the model does not train": {"optimizer": other, **options},
    }.items():
        with pytest.raises(ConfigError, match=words):
            make(tmp_path / "run", {}, **given)
