"""The weight of the entropy bonus that adapts to a target: TRL's controller, the update, resuming, and errors."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from groupwise.config import make_recipe
from groupwise.errors import ConfigError
from groupwise.training.inputs import load_inputs
from groupwise.training.rollout.advantages import compute_group_advantages
from groupwise.training.update.entropy import EntropyController
from groupwise.training.update.minibatch import build_minibatch
from tests.core.trl_code import float64_by_default
from tests.training.factories import (
    gradient_of,
    last_gradient,
    make_batch,
    make_updater,
    naive_logps,
    naive_terms,
    short_recipe,
)
from tests.training.runs import TASK, even, metrics_of, small_recipe, small_trainer


def trl_trainer(*, target, step, first, least, most, accumulation):
    """What `GRPOTrainer._compute_loss` reads, for samples whose advantage is 0: the loss is the entropy bonus alone."""
    return SimpleNamespace(
        args=SimpleNamespace(
            delta=None,
            use_bias_correction_kl=False,
            entropy_target=target,
            entropy_coef_delta=step,
            entropy_coef_min=least,
            entropy_coef_max=most,
        ),
        loss_type="grpo",
        importance_sampling_level="token",
        epsilon_low=0.2,
        epsilon_high=0.2,
        beta=0.0,
        max_completion_length=8,
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        current_gradient_accumulation_steps=accumulation,
        use_vllm=False,
        aux_loss_enabled=False,
        entropy_coef=first,
        use_adaptive_entropy=True,
        _entropy_bonus_enabled=True,
        _last_world_entropy=float("inf"),
        _entropy_window_stats=None,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1, sync_gradients=False, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        _metrics={"train": defaultdict(list)},
    )


def trl_loss(trainer, entropy, mask):
    from trl import GRPOTrainer

    logps = torch.zeros_like(entropy)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logps, entropy, None)
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(mask), 1, dtype=torch.long),
        "completion_ids": torch.zeros(mask.shape, dtype=torch.long),
        "completion_mask": mask.long(),
        "advantages": torch.zeros(len(mask)),
        "old_per_token_logps": logps,
        "num_items_in_batch": mask.sum(),
    }
    with float64_by_default():
        return float(GRPOTrainer._compute_loss(trainer, None, inputs))


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 3])
def test_equals_trl(accumulation):
    """Coefficients, and whether they are applied, of forty random updates."""
    choose, applied = random.Random(accumulation), []
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        first, step = choose.choice([0.0, 0.02, 0.5]), choose.choice([0.005, 0.1])
        least, most = choose.choice([(0.0, 1.0), (0.01, 0.06), (-0.05, 0.2)])
        settings = {"loss.entropy_target": 0.5, "loss.entropy_step": step, "loss.entropy_coef": first}
        settings |= {"loss.entropy_coef_min": least, "loss.entropy_coef_max": most}
        trainer = trl_trainer(target=0.5, step=step, first=first, least=least, most=most, accumulation=accumulation)
        recipe, controller = short_recipe(settings), EntropyController()
        for _ in range(40):
            level = float(torch.rand((), generator=generator))
            total, tokens, loss, bonus = 0.0, 0, 0.0, 0.0
            for number in range(accumulation):
                entropy = 2 * level * torch.rand(2, 8, generator=generator, dtype=torch.float64)
                mask = torch.arange(8) < torch.randint(1, 9, (2, 1), generator=generator)
                trainer.accelerator.sync_gradients = number == accumulation - 1
                loss += trl_loss(trainer, entropy, mask)
                bonus += float(entropy[mask].mean()) / accumulation
                total, tokens = total + float((entropy * mask).sum()), tokens + int(mask.sum())
            weight = controller.apply(recipe).loss.entropy_coef
            assert loss == pytest.approx(-weight * bonus, rel=1e-12, abs=1e-15)
            applied.append(weight)
            controller.observe(trainer._last_world_entropy, recipe)
            assert trainer._last_world_entropy == pytest.approx(total / tokens, rel=1e-12)
            assert controller.coefficient(recipe) == trainer.entropy_coef
    assert applied[0] == 0.0
    assert len(set(applied)) > 20


def test_by_hand():
    recipe = short_recipe(
        {"loss.entropy_target": 1.0, "loss.entropy_step": 0.25, "loss.entropy_coef": 0.5, "loss.entropy_coef_max": 0.8}
    )
    controller = EntropyController()
    weights, applied = [], []
    for entropy in (2.0, 1.0, 0.5, 0.5, 1.5, 3.0, float("nan"), 0.1):
        applied.append(controller.apply(recipe).loss.entropy_coef)
        controller.observe(entropy, recipe)
        weights.append(controller.coefficient(recipe))
    assert weights == pytest.approx([0.25, 0.5, 0.75, 0.8, 0.55, 0.3, 0.3, 0.55])
    assert applied == pytest.approx([0.0, 0.0, 0.5, 0.75, 0.8, 0.0, 0.0, 0.0])
    again = EntropyController()
    again.load_state(json.loads(json.dumps(controller.state())))
    assert again.apply(recipe).loss.entropy_coef == controller.apply(recipe).loss.entropy_coef == weights[-1]


def test_without_a_target_nothing_changes():
    recipe, controller = short_recipe({"loss.entropy_coef": 0.5}), EntropyController()
    assert controller.apply(recipe) is recipe
    controller.observe(0.0, recipe)
    assert controller.state() is None


def test_updates_apply_the_weight_to_all_samples():
    """Also to those without an advantage; the next update has the weight that follows from the measured entropy."""
    recipe = short_recipe({"loss.entropy_target": 100.0, "loss.entropy_step": 0.1, "loss.entropy_coef": 0.2})
    batch = make_batch()
    group_advantages = compute_group_advantages(batch, recipe, [1.0])
    updater = make_updater(recipe)
    prompts = range(len(batch.prompts))
    minibatch = build_minibatch(batch, group_advantages, prompts, recipe)
    assert len(minibatch) == len(batch)  # prompt 1 has equal rewards
    for weight in (0.0, 0.3, 0.4):
        result = updater.update(minibatch, recipe)
        literal = short_recipe({"loss.entropy_coef": weight})
        terms = naive_terms(updater.handle, batch, group_advantages, prompts, literal)
        wanted = gradient_of(updater.handle.model, sum(terms.values()))
        for name, gradient in last_gradient(updater).items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-9, atol=1e-12)
        rows = naive_logps(updater.handle, batch, prompts, recipe)
        assert float(result.statistics["entropy"]) == pytest.approx(
            float(rows["entropy"][rows["mask"]].mean().detach())
        )
        assert result.values["entropy"] == pytest.approx(float(terms["entropy"].detach()) if weight else 0.0)


SMALL_RUN = {
    "train": {"steps": 3, "iterations": 2},
    "loss": {"entropy_target": 4.0, "entropy_step": 0.1, "entropy_coef": 0.05},
    "evaluate": {"every": 0, "before_training": False},
}


def test_a_run_logs_its_weight(tmp_path):
    small_trainer(tmp_path / "run", SMALL_RUN).run()
    rows = [row for row in metrics_of(tmp_path / "run") if "entropy" in row]
    assert [row["updates"] for row in rows] == [2, 2, 2]
    # The tiny model's entropy is above 4 nats, or below: each update moves the weight by 0.1, within 0 and 1.
    below = rows[0]["entropy"] <= 4.0
    assert [row["entropy_coef"] for row in rows] == pytest.approx([0.25, 0.45, 0.65] if below else [0.0] * 3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"loss": {"entropy_target": 0.5, "entropy_coef_min": 0.5, "entropy_coef_max": 0.1}},
            "entropy_coef_min 0.5 is",
        ),
        ({"loss": {"entropy_target": 0.0}}, "loss.entropy_target"),
        ({"loss": {"entropy_target": 0.5, "entropy_step": -1.0}}, "loss.entropy_step"),
    ],
)
def test_wrong_settings(changes, words):
    with pytest.raises(ConfigError, match=words):
        make_recipe(changes)


def test_a_schedule_of_the_weight_is_refused():
    recipe = small_recipe(
        {"loss": {"entropy_target": 0.5}, "ramps": {"entropy_coef": {"from": 0, "to": 1, "steps": 3}}}
    )
    with pytest.raises(ConfigError, match=r"schedule loss.entropy_target instead"):
        load_inputs(recipe, task=TASK, rewards=[even])
    load_inputs(
        small_recipe({"loss": {"entropy_target": 0.5}, "ramps": {"entropy_target": {"from": 1, "to": 2, "steps": 3}}}),
        task=TASK,
        rewards=[even],
    )
