"""Runs with a preference term: without weight they are GRPO, alone they are DPO; resumed, scheduled, refused."""

from __future__ import annotations

import json
import random
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from groupwise.errors import ConfigError
from groupwise.model.handle import prepare
from groupwise.rewards import named
from groupwise.rundir import read_json
from groupwise.tasks import Task
from groupwise.training.preference import dataset_pairs
from groupwise.training.preference.reference_cache import pair_logps
from groupwise.training.store.rollout_files import read_rollouts
from groupwise.training.trainer import Callback, Trainer
from tests.training.runs import (
    ROWS,
    TASK,
    check_same,
    checkpoint_of,
    even,
    metrics_of,
    run_steps,
    small_recipe,
    small_trainer,
)

NO_HELD_OUT = Task("try", ROWS)
QUICK = {
    "train": {"steps": 3, "batch_size": 2},
    "sampling": {"max_new_tokens": 4},
    "evaluate": {"before_training": False, "every": 0},
    "run": {"checkpoint_every": 0},
}
SAVED = {"run": {"checkpoint_every": 1}}
PG = {"algorithm": "pg_grpo", "preference": {"weight": 0.5}}
NO_POLICY = {"loss": {"policy_coef": 0.0, "kl_coef": 0.0}}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of the reference's log-probs for each test."""
    monkeypatch.setenv("GROUPWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "reference-logps"


def write_pairs(folder, number=14):
    """Vowels are preferred to consonants."""
    rows = [
        {"prompt": f"Say number {n}: ", "chosen": "aei"[n % 3] * (2 + n % 4), "rejected": "xyz"[n % 3] * (2 + n % 3)}
        for n in range(number)
    ]
    path = folder / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def pairs_of(folder, source="data", **more):
    return {"preference": {"pairs": source, "train": write_pairs(folder), "batch_size": 4, **more}}


def offline(path):
    """DPO on the pairs of a data set."""
    return {"algorithm": "dpo", "preference": {"train": path, "batch_size": 4}, "optimizer": {"learning_rate": 3e-3}}


def offline_trainer(folder, path, *changes, **options):
    """A trainer without rows and rewards."""
    return small_trainer(folder, QUICK, offline(path), *changes, task=None, rewards=[], **options)


def steps_in(folder):
    return [row for row in metrics_of(folder) if "updates" in row]


def values_of(folder, name):
    return [row.get(name) for row in steps_in(folder)]


def same_masters(one, other, step):
    first, second = checkpoint_of(one, step), checkpoint_of(other, step)
    names = [name for name in first if name.startswith("masters/")]
    assert names
    return all(torch.equal(first[name], second[name]) for name in names)


def disturb():
    """Change the global random states, as another process would have others."""
    torch.manual_seed(4321)
    random.seed(4321)
    np.random.seed(4321)


# --- without weight ---------------------------------------------------------------------------------------------------


def test_without_a_weight_the_run_is_bit_identical_to_grpo(tmp_path):
    """Also if a data set of pairs is named: none of them is used."""
    changes = (QUICK, SAVED, {"train": {"steps": 2, "mini_batches": 2, "log_term_gradients_every": 2}})
    kl = {"loss": {"kl_coef": 0.04}}
    small_trainer(tmp_path / "grpo", *changes, kl, {"algorithm": "grpo"}, task=TASK).run()
    small_trainer(tmp_path / "none", *changes, {"algorithm": "pg_grpo", "preference": {"weight": 0.0}}, task=TASK).run()
    check_same(tmp_path / "grpo", tmp_path / "none", 2)
    assert sum(values_of(tmp_path / "none", "updates")) > 2
    assert "pair" not in read_rollouts(tmp_path / "none").column_names
    named_pairs = pairs_of(tmp_path, weight=0.0)
    small_trainer(tmp_path / "named", *changes, {"algorithm": "pg_grpo"}, named_pairs, task=TASK).run()
    assert not (tmp_path / "cache").exists()
    state = read_json(tmp_path / "named" / "checkpoint-2" / "state.json")["pairs"]
    assert (state["epoch"], state["position"]) == (0, 0)
    first, second = checkpoint_of(tmp_path / "grpo", 2), checkpoint_of(tmp_path / "named", 2)
    assert first.keys() == second.keys()
    for key, value in first.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, second[key]), key
    assert {**first["state"], "pairs": None} == {**second["state"], "pairs": None}
    assert list(map(repr, metrics_of(tmp_path / "grpo"))) == list(map(repr, metrics_of(tmp_path / "named")))
    assert read_rollouts(tmp_path / "grpo").equals(read_rollouts(tmp_path / "named"))
    small_trainer(tmp_path / "some", *changes, PG, task=TASK).run()
    assert not same_masters(tmp_path / "grpo", tmp_path / "some", 2)


# --- stopped and resumed ----------------------------------------------------------------------------------------------

RESUMED = {
    "group": ("group", {}),
    "data": ("data", {}),
    "both": ("both", {}),
    "both, computed in each step": ("both", {"preference": {"cache_ref_logps": False}}),
    "data, refreshed": ("data", {"reference": {"refresh_every": 2}}),
    "lora": ("both", {"model": {"lora": {"rank": 4, "alpha": 8.0}}, "optimizer": {"learning_rate": 1e-2}}),
    "lora with dropout": ("both", {"model": {"lora": {"rank": 4, "dropout": 0.3}}, "preference": {"kind": "aot"}}),
    "mini-batches": ("both", {"train": {"mini_batches": 2, "iterations": 2, "batch_size": 3}}),
}


QUICK_RESUMED = ("both",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK_RESUMED else pytest.param(name, marks=pytest.mark.slow) for name in RESUMED]
)
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, cache, name):
    """The order of pairs continues; the reference's log-probs are read from disk or computed again."""
    source, more = RESUMED[name]
    pairs = {"preference": {"pairs": "group"}} if source == "group" else pairs_of(tmp_path, source)
    changes = (QUICK, SAVED, PG, pairs, more)
    disturb()
    small_trainer(tmp_path / "a", *changes, task=NO_HELD_OUT).run()
    if source == "both" and name != "mini-batches":
        shutil.rmtree(cache, ignore_errors=True)
    torch.rand(7)
    run_steps(small_trainer(tmp_path / "b", *changes, task=NO_HELD_OUT), 2)
    if source != "group":
        state = read_json(tmp_path / "b" / "checkpoint-2" / "state.json")
        assert (state["pairs"]["rows"], state["pairs"]["position"]) == (14, 8)
        assert cache.exists() is ("refreshed" not in name and "each step" not in name)
        if name in ("both", "lora"):
            shutil.rmtree(cache)
    torch.rand(3)
    trainer = small_trainer(tmp_path / "b", *changes, resume=True, task=NO_HELD_OUT)
    trainer.run()
    assert trainer.display.steps == [3]
    check_same(tmp_path / "a", tmp_path / "b", 3)
    steps = steps_in(tmp_path / "b")
    if source == "data":
        assert [row["preference/pairs"] for row in steps] == [4, 4, 4]
    else:
        from_data = [row.get("preference/pairs_data", 0) for row in steps]
        assert from_data == ([0, 0, 0] if source == "group" else [4, 4, 4])
        assert sum(row["preference/pairs"] for row in steps) > sum(from_data)
    if name == "mini-batches":
        assert max(values_of(tmp_path / "b", "updates")) == 4


def test_a_resumed_run_on_pairs_alone_equals_the_uninterrupted_one(tmp_path, cache):
    path = write_pairs(tmp_path)
    changes = (SAVED, {"train": {"steps": 5}})
    offline_trainer(tmp_path / "a", path, *changes).run()
    run_steps(offline_trainer(tmp_path / "b", path, *changes), 3)
    shutil.rmtree(cache)
    trainer = offline_trainer(tmp_path / "b", path, *changes, resume=True)
    trainer.run()
    assert trainer.display.steps == [4, 5]
    first, second = checkpoint_of(tmp_path / "a", 5), checkpoint_of(tmp_path / "b", 5)
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert torch.equal(value, second[key]) if isinstance(value, torch.Tensor) else value == second[key], key
    assert metrics_of(tmp_path / "a") == metrics_of(tmp_path / "b")
    assert values_of(tmp_path / "b", "epoch") == pytest.approx([4 / 14, 8 / 14, 12 / 14, 16 / 14, 20 / 14])


# --- schedules --------------------------------------------------------------------------------------------------------


def test_a_ramp_of_the_weight(tmp_path):
    """There are no pairs as long as the weight is 0, and the data set's are not used up."""
    ramp = {"ramps": {"preference.weight": {"at": [[0, 0.0], [1, 0.0], [3, 0.4]]}}, "train": {"steps": 4}}
    pairs = pairs_of(tmp_path, "both", weight=0.0)
    small_trainer(tmp_path / "run", QUICK, SAVED, PG, pairs, ramp, task=NO_HELD_OUT).run()
    assert values_of(tmp_path / "run", "preference/weight") == [None, None, pytest.approx(0.2), 0.4]
    assert values_of(tmp_path / "run", "preference/pairs_data") == [None, None, 4, 4]
    paired = [row.get("preference/pairs_group", 0) for row in steps_in(tmp_path / "run")]
    assert paired[:2] == [0, 0]
    assert sum(paired[2:]) > 0
    states = [read_json(tmp_path / "run" / f"checkpoint-{step}" / "state.json") for step in (1, 2, 3, 4)]
    assert [state["pairs"]["position"] for state in states] == [0, 0, 4, 8]
    table = read_rollouts(tmp_path / "run").to_pandas()
    assert table[table.step <= 2].pair.isna().all()
    assert (table[table.step == 3].pair == "chosen").sum() == paired[2]


@pytest.mark.slow
def test_a_phase_changes_the_weight(tmp_path):
    phases = [
        {"name": "grpo", "steps": 1, "preference.weight": 0.0},
        {"name": "both", "steps": 1, "preference.weight": 0.3, "preference.pairs_per_group": 2},
    ]
    small_trainer(tmp_path / "run", QUICK, PG, {"phases": phases}, task=NO_HELD_OUT).run()
    assert values_of(tmp_path / "run", "preference/weight") == [None, 0.3, 0.5]
    asked_for = [
        sum(value for key, value in row.items() if key.startswith(("preference/pairs", "preference/refused/")))
        for row in steps_in(tmp_path / "run")
    ]
    assert asked_for == [0, 2 * 2, 2]  # of two groups
    # The first step is a GRPO step.
    small_trainer(tmp_path / "grpo", QUICK, {"algorithm": "grpo", "loss": {"kl_coef": 0.04}}, task=NO_HELD_OUT).run()
    assert steps_in(tmp_path / "run")[0] == steps_in(tmp_path / "grpo")[0]


def test_an_offline_run_may_start_with_weight_0(tmp_path):
    """Such a step updates nothing and samples nothing."""
    ramp = {"ramps": {"preference.weight": {"at": [[0, 0.0], [1, 1.0]]}}, "train": {"steps": 2}}
    offline_trainer(tmp_path / "run", write_pairs(tmp_path), ramp, {"preference": {"weight": 0.0}}).run()
    assert values_of(tmp_path / "run", "updates") == [0, 1]
    assert values_of(tmp_path / "run", "preference/weight") == [None, 1.0]


@pytest.mark.parametrize(
    ("limit", "wanted"), [(1.01, [0.5, 0.25, 0.125]), pytest.param(-1.01, [0.5, 0.5, 0.5], marks=pytest.mark.slow)]
)
def test_a_rule_lowers_the_weight_by_the_cosine_of_gradients(tmp_path, limit, wanted):
    """A cosine is always below one limit, and never below the other."""
    rule = {"when": f"grad_cosine/grpo_preference < {limit}", "over": 1, "then": "preference.weight * 0.5"}
    changes = {"rules": [rule], "train": {"log_term_gradients_every": 1}}
    trainer = small_trainer(tmp_path / "run", QUICK, PG, changes, task=NO_HELD_OUT)
    trainer.run()
    assert values_of(tmp_path / "run", "preference/weight") == wanted
    assert all(-1 <= cosine <= 1 for cosine in values_of(tmp_path / "run", "grad_cosine/grpo_preference"))
    assert trainer.display.heard("preference.weight") is (limit > 0)


# --- equal rewards ----------------------------------------------------------------------------------------------------


class Passes(Callback):
    """Counts forward passes between sampling and the end of a step."""

    def __init__(self):
        self.training, self.seen = False, 0

    def on_start(self, trainer):
        trainer.components.handle.trunk.register_forward_pre_hook(self.note, with_kwargs=True)

    def on_rollout(self, trainer, batch, group_advantages):
        self.training = True

    def on_step(self, trainer, report):
        self.training = False

    def note(self, *_):
        self.seen += self.training


def equal(completions, **_):
    return [0.5] * len(completions)


@pytest.mark.parametrize("policy", [1.0, pytest.param(0.0, marks=pytest.mark.slow)])
def test_equal_rewards_are_not_computed_and_change_no_weight(tmp_path, policy):
    settings = {"loss": {"kl_coef": 0.0, "policy_coef": policy}, "optimizer": {"weight_decay": 0.5}}
    settings["run"] = {"save_tokens_every": 0}  # which takes passes of its own
    seen = {}
    for reward in (equal, even):
        passes = Passes()
        trainer = small_trainer(
            tmp_path / reward.__name__, QUICK, PG, settings, task=NO_HELD_OUT, rewards=[reward], callbacks=[passes]
        )
        before = {name: weight.clone() for name, weight in trainer.masters.state_dict().items()}
        with trainer:
            reports = list(trainer.steps())
        moved = [not torch.equal(weight, before[name]) for name, weight in trainer.masters.state_dict().items()]
        seen[reward.__name__] = passes.seen, any(moved), reports
    passed, moved, reports = seen["equal"]
    assert (passed, moved) == (0, False)
    for report in reports:
        assert report.metrics["updates"] == report.metrics["preference/pairs"] == 0
        assert report.metrics["signal/tokens_not_computed"] == 1.0
        assert report.metrics["preference/refused/tie"] == 2
        assert (report.metrics["loss"], report.metrics["grad_norm"]) == (0, 0)
        assert report.group_advantages.pairs.roles(8) == [None] * 8
    passed, moved, _ = seen["even"]
    assert passed > 0
    assert moved


def test_only_groups_with_different_rewards_are_computed(tmp_path):
    """Without the policy loss only members of pairs, with their prompts."""

    def some(prompts, completions, **_):
        odd = [int(prompt.split()[2][:-1]) % 2 for prompt in prompts]
        return [0.5 if same else value for same, value in zip(odd, even(completions), strict=True)]

    settings = {"train": {"batch_size": 4, "steps": 2}}
    with small_trainer(tmp_path / "run", QUICK, PG, NO_POLICY, settings, task=NO_HELD_OUT, rewards=[some]) as trainer:
        reports = list(trainer.steps())
    equal_groups = 0
    for report in reports:
        batch, pairs = report.batch, report.group_advantages.pairs
        members = pairs.members(len(batch)).tolist()
        computed = sum(len(ids) for ids, member in zip(batch.ids, members, strict=True) if member)
        prompts = {sample // 4 for sample, member in enumerate(members) if member}
        computed += sum(len(batch.prompts[prompt].ids) for prompt in prompts)
        everything = sum(len(prompt.ids) for prompt in batch.prompts) + int(batch.lengths.sum())
        assert report.metrics["signal/tokens_not_computed"] == pytest.approx(1 - computed / everything)
        assert report.metrics["signal/contributing"] == sum(members) / 16 == 2 * len(pairs) / 16
        odd = [prompt for prompt, row in enumerate(batch.row_numbers) if row % 2]
        assert not prompts & set(odd)
        equal_groups += len(odd)
        assert report.metrics["preference/refused/tie"] >= len(odd)
        assert report.metrics["updates"] == 1
    assert 0 < equal_groups < 8


# --- pairs of a data set alone ----------------------------------------------------------------------------------------


@torch.no_grad()
def accuracy(model, pairs):
    """The share of pairs whose chosen completion is likelier per token."""
    logps = pair_logps(prepare(model), pairs, token_budget=4096)
    lengths = torch.tensor([[len(pair.chosen), len(pair.rejected)] for pair in pairs])
    better, worse = (logps / lengths).unbind(1)
    return float((better > worse).double().mean())


def test_dpo_on_pairs_alone(tmp_path, capsys):
    """Ten pairs, four in a step, eight epochs: twenty steps, without rows, rewards or sampling."""
    changes = {
        "preference": {"held_out_from_train": 4},
        "train": {"steps": None, "epochs": 8.0},
        "evaluate": {"before_training": True, "every": 4},
    }
    recipe = small_recipe(QUICK, offline(write_pairs(tmp_path)), changes)
    with Trainer(recipe, folder=tmp_path / "run") as trainer:  # with the default display
        assert (trainer.total_steps, trainer.components.samples, trainer.metric) == (20, False, "preference_accuracy")
        before = accuracy(trainer.components.model, trainer.pairs.splits.train)
        result = trainer.run()
    rows, steps = metrics_of(tmp_path / "run"), steps_in(tmp_path / "run")
    assert [row["step"] for row in steps] == list(range(1, 21))
    assert rows[0]["step"] == 0
    assert rows[0]["eval/preference_accuracy"] == 0.5
    assert rows[0]["eval/preference_margin"] == 0.0
    assert rows[0]["eval/preference_loss"] == pytest.approx(np.log(2))
    assert result.held_out["preference_accuracy"] == 1.0
    assert result.held_out["preference_loss"] < 0.5 * rows[0]["eval/preference_loss"]
    assert result.held_out["preference_margin"] > 0
    assert (result.steps, result.exit_status) == (20, 0)
    # Nothing was sampled.
    assert not (tmp_path / "run" / "rollouts").exists()
    assert not any(name == "reward" or name.startswith(("reward/", "completions/")) for row in rows for name in row)
    assert {row["num_tokens"] for row in steps} == {0}
    assert [row["epoch"] for row in steps] == pytest.approx([0.4 * step for step in range(1, 21)])
    assert {row["preference/pairs"] for row in steps} == {4}
    assert steps[-1]["preference/accuracy"] == steps[-1]["rewards/accuracies"] == 1.0
    # The best evaluation is the first one with the best value, and its model is exported.
    best = read_json(tmp_path / "run" / "best.json")
    evaluated = {row["step"]: row["eval/preference_accuracy"] for row in rows if "eval/preference_accuracy" in row}
    assert sorted(evaluated) == [0, 4, 8, 12, 16, 20]
    assert (best["metric"], best["value"]) == ("preference_accuracy", 1.0)
    assert best["step"] == result.best_step == max(step for step, value in evaluated.items() if value == 1.0)
    model = AutoModelForCausalLM.from_pretrained(result.model)
    assert accuracy(model, trainer.pairs.splits.train) >= max(0.9, before + 0.2)
    assert "preferred" in capsys.readouterr().out


def test_epochs_of_pairs_determine_the_number_of_steps(tmp_path):
    path = write_pairs(tmp_path)
    for number, (epochs, batch_size, wanted) in enumerate([(1.0, 4, 4), (2.0, 7, 4), (0.1, 16, 1)]):
        changes = {"train": {"steps": None, "epochs": epochs}, "preference": {"batch_size": batch_size}}
        with offline_trainer(tmp_path / str(number), path, changes) as trainer:
            assert trainer.total_steps == wanted


def test_held_out_pairs_are_computed_in_the_packs_of_their_reference(tmp_path, monkeypatch):
    """Other packs change the last bits, and a policy equal to the reference would not have margin 0."""
    budgets = []

    def spy(real):
        def call(*arguments, token_budget, **options):
            budgets.append(token_budget)
            return real(*arguments, token_budget=token_budget, **options)

        return call

    for name in ("pair_logps", "reference_logps"):
        monkeypatch.setattr(dataset_pairs, name, spy(getattr(dataset_pairs, name)))
    changes = {"preference": {"held_out_from_train": 4}, "train": {"token_budget": 64, "steps": 1}}
    offline_trainer(tmp_path / "run", write_pairs(tmp_path), changes, {"evaluate": {"before_training": True}}).run()
    assert len(budgets) == 4  # training pairs, held-out pairs, and the evaluations before and after
    assert len(set(budgets[1:])) == 1


def test_held_out_pairs_beside_held_out_rows(tmp_path):
    """Both are evaluated; the rows' metric selects the best checkpoint unless evaluate.metric is set."""
    for metric, wanted in ((None, "reward"), ("preference_accuracy", "preference_accuracy")):
        changes = {"evaluate": {"metric": metric, "before_training": True}, "train": {"steps": 1}}
        pairs = pairs_of(tmp_path, "both", held_out_from_train=4)
        trainer = small_trainer(tmp_path / wanted, QUICK, PG, pairs, changes, task=TASK)
        result = trainer.run()
        assert trainer.metric == wanted
        assert {"reward", "preference_accuracy"} <= set(result.first_held_out)
        assert result.first_held_out["preference_accuracy"] == 0.5
        assert read_json(tmp_path / wanted / "best.json")["metric"] == wanted
    with pytest.raises(ConfigError, match="'accuracy' is not measured by this task"):
        small_trainer(tmp_path / "no", QUICK, PG, pairs, {"evaluate": {"metric": "accuracy"}}, task=TASK)


def test_group_pairs_in_training_and_a_data_set_held_out(tmp_path):
    """Held-out pairs do not need a data set for training."""
    pairs = {"preference": {"held_out": write_pairs(tmp_path)}}
    result = small_trainer(
        tmp_path / "run",
        QUICK,
        PG,
        pairs,
        {"evaluate": {"before_training": True}, "train": {"steps": 1}},
        task=NO_HELD_OUT,
    ).run()
    assert result.first_held_out["preference_accuracy"] == 0.5
    (row,) = steps_in(tmp_path / "run")
    assert row["preference/pairs"] + row["preference/refused/tie"] == 2


# --- pairs of sampled completions -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_online_dpo_learns(tmp_path):
    """Without policy loss and KL, only from the best and worst completions of each group."""
    changes = {
        "train": {"steps": 24, "batch_size": 4},
        "sampling": {"samples_per_prompt": 6},
        "preference": {"weight": 1.0, "pairs_per_group": 3, "beta": 0.2},
        "optimizer": {"learning_rate": 3e-3},
        "run": {"save_rollouts": False},
    }
    with small_trainer(tmp_path / "run", QUICK, PG, NO_POLICY, changes, task=NO_HELD_OUT) as trainer:
        reports = list(trainer.steps())
    rewards = [report.metrics["reward"] for report in reports]
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.2
    assert not any("loss/policy" in report.metrics for report in reports)
    margins = [report.metrics["preference/margin"] for report in reports]
    assert max(margins) > 0 == margins[0]


def opposed(completions, **_):
    """The negative of `even`, without ties."""
    return [-score - 0.01 * len(text) for score, text in zip(even(completions), completions, strict=True)]


def test_another_reward_may_rank_the_pairs(tmp_path):
    """It has weight 0 and ranks the other way round; advantages still follow the weighted sum."""
    rewards = [named(even), named(opposed, 0.0)]
    tables = {}
    for reward in (None, "opposed"):
        folder = tmp_path / str(reward)
        settings = {"preference": {"reward": reward}, "train": {"steps": 1, "batch_size": 4}}
        small_trainer(folder, QUICK, PG, settings, task=NO_HELD_OUT, rewards=rewards).run()
        tables[reward] = read_rollouts(folder).to_pandas()
    assert (tables[None]["reward/even"] == tables["opposed"]["reward/even"]).all()
    assert (tables[None].advantage == tables["opposed"].advantage).all()
    for reward, column in ((None, "reward"), ("opposed", "reward/opposed")):
        paired = 0
        for _, group in tables[reward].groupby("prompt_number"):
            best, worst = group[group.pair == "chosen"], group[group.pair == "rejected"]
            assert len(best) == len(worst) <= 1
            if len(best):
                paired += 1
                assert best[column].item() == group[column].max() > group[column].min() == worst[column].item()
        assert paired >= 2
    assert not tables[None].pair.equals(tables["opposed"].pair)


def test_the_rollout_files_have_a_pair_column(tmp_path):
    small_trainer(tmp_path / "run", QUICK, PG, task=NO_HELD_OUT).run()
    table = read_rollouts(tmp_path / "run").to_pandas()
    assert set(table.pair.dropna()) == {"chosen", "rejected"}
    assert table.pair.isna().any()
    for (step, _), group in table.groupby(["step", "prompt_number"]):
        roles = group.pair.dropna().tolist()
        assert sorted(roles) in ([], ["chosen", "rejected"]), step
        if roles:
            better, worse = (group[group.pair == role].reward.item() for role in ("chosen", "rejected"))
            assert better == group.reward.max() > group.reward.min() == worse
    counts = (table.pair == "chosen").groupby(table.step).sum().tolist()
    assert counts == values_of(tmp_path / "run", "preference/pairs")


# --- the reference ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_reference_that_is_refreshed_is_not_cached(tmp_path, cache):
    """Refreshed after every step it equals the policy, so margins are 0; otherwise they are not."""
    path = write_pairs(tmp_path)
    margins = {}
    for every in (0, 1, 2):
        changes = {"reference": {"refresh_every": every}, "train": {"steps": 4}}
        with offline_trainer(tmp_path / str(every), path, changes) as trainer:
            list(trainer.steps())
            assert (trainer.pairs.train_reference is None) is bool(every)
        margins[every] = values_of(tmp_path / str(every), "preference/margin")
        assert values_of(tmp_path / str(every), "reference_refreshes")[-1] == (4 // every if every else 0)
        if every == 0:
            assert len(list(cache.rglob("*.safetensors"))) == 1
            shutil.rmtree(cache)
        assert not cache.exists()
    assert margins[1] == pytest.approx([0.0] * 4, abs=1e-5)
    assert margins[0][:2] == pytest.approx(margins[2][:2], abs=1e-5)
    assert margins[2] == pytest.approx([0.0, margins[0][1], 0.0, margins[2][3]], abs=1e-5)
    assert min(map(abs, margins[0][1:])) > 0.05
    assert abs(margins[2][3]) > 0.05


def test_the_cache_is_used_and_does_not_change_the_result(tmp_path, cache):
    """A second run reads what the first computed; a run without cache computes it in each step."""
    path = write_pairs(tmp_path)
    folders = {}
    for name, settings in (("first", {}), ("second", {}), ("none", {"preference": {"cache_ref_logps": False}})):
        before = {file: file.stat().st_mtime_ns for file in cache.rglob("*.safetensors")}
        offline_trainer(tmp_path / name, path, SAVED, settings).run()
        folders[name] = tmp_path / name
        after = {file: file.stat().st_mtime_ns for file in cache.rglob("*.safetensors")}
        assert len(after) == 1
        assert name == "first" or before == after
    assert same_masters(folders["first"], folders["second"], 3)
    assert metrics_of(folders["first"]) == metrics_of(folders["second"])
    for first, second in zip(steps_in(folders["first"]), steps_in(folders["none"]), strict=True):
        for key in ("preference/loss", "preference/margin", "grad_norm"):
            assert first[key] == pytest.approx(second[key], rel=1e-3, abs=1e-5)


# --- refused settings -------------------------------------------------------------------------------------------------

REFUSED = {
    "no data set": (
        {"preference": {"pairs": "data"}},
        r"preference\.pairs is 'data', so preference\.train must name a data set",
    ),
    "both without a data set": (
        {"preference": {"pairs": "both"}},
        r"preference\.pairs is 'both', so preference\.train",
    ),
    "an unused data set": (
        {"preference": {"train": "pairs.jsonl"}},
        r"preference\.train is set, but preference\.pairs is 'group'.*set preference.pairs to 'data' or 'both'",
    ),
    "held-out pairs without a data set": (
        {"preference": {"held_out_from_train": 3}},
        r"preference\.held_out_from_train is set, but preference\.pairs is 'group'",
    ),
    "an unknown kind": (
        {"preference": {"kind": "sigmod"}},
        r"\[preference\] unknown kind of preference loss 'sigmod'.*did you mean 'sigmoid'",
    ),
    "an unknown kind among others": (
        {"preference": {"kind": ["ipo", "dpo"]}},
        r"unknown kind of preference loss 'dpo'",
    ),
    "wrong number of weights": (
        {"preference": {"kind": ["ipo", "sft"], "kind_weights": [1.0]}},
        r"\[preference\] 1 weights \[1\.0\] were given for 2 kinds \['ipo', 'sft'\]",
    ),
    "smoothing without effect": (
        {"preference": {"label_smoothing": 0.1}},
        r"preference\.label_smoothing has no effect on the kind sigmoid; .* 'robust'",
    ),
    "missing smoothing": ({"preference": {"kind": "exo_pair"}}, r"'exo_pair' needs label_smoothing above 0"),
    "no objective": (
        {"loss": {"policy_coef": 0.0}, "preference": {"weight": 0.0}},
        r"loss\.policy_coef, preference\.weight and distillation\.weight are all 0",
    ),
    "one sample per prompt": ({"sampling": {"samples_per_prompt": 1}}, r"samples_per_prompt is 1, so"),
    "one sample per prompt, without a baseline": (
        {"sampling": {"samples_per_prompt": 1}, "advantages": {"baseline": "none"}},
        r"no group has two completions for a pair; use at least 2",
    ),
    "an unknown reward": (
        {"preference": {"reward": "evne"}},
        r"unknown preference\.reward: 'evne'.*did you mean 'even'",
    ),
    "a ramp to an invalid value": (
        {"ramps": {"preference.label_smoothing": {"from": 0.0, "to": 0.2, "steps": 2}}},
        r"the ramp of preference\.label_smoothing: .*has no effect on the kind sigmoid",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_settings_are_refused_before_the_run_starts(tmp_path, name):
    changes, sentence = REFUSED[name]
    with pytest.raises(ConfigError, match=sentence):
        small_trainer(tmp_path / "run", QUICK, PG, changes, task=NO_HELD_OUT)
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "cache").exists()


def test_a_data_set_may_be_missing_if_the_weight_is_0(tmp_path):
    """Unless a schedule changes the weight."""
    none = {"preference": {"pairs": "data", "weight": 0.0}}
    with small_trainer(tmp_path / "run", QUICK, PG, none, task=NO_HELD_OUT) as trainer:
        assert trainer.pairs.order is None
    ramp = {"ramps": {"preference.weight": {"from": 0.0, "to": 0.1, "steps": 2}}}
    with pytest.raises(ConfigError, match=r"preference\.train must name a data set"):
        small_trainer(tmp_path / "other", QUICK, PG, none, ramp, task=NO_HELD_OUT)
