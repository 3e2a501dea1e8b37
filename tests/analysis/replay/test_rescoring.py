"""Recorded rollouts under other settings: against hand-computed advantages, and against runs that had the setting."""

from __future__ import annotations

import math
import statistics

import pyarrow
import pyarrow.parquet
import pytest
import torch

from groupwise.analysis.replay import rescore
from groupwise.analysis.replay.recorded import RunSource, read_step
from groupwise.analysis.replay.rescoring import Rescorer
from groupwise.analysis.run_reader import RunReader
from groupwise.analysis.step_settings import step_recipes
from groupwise.errors import CheckpointError, ConfigError, RewardError, RunDirError
from groupwise.tasks import Task
from tests.training.runs import ROWS, TASK, even, run_steps, small_trainer, vowels
from tests.weights import wordllama

SHORT = {"train": {"steps": 2}, "evaluate": {"before_training": False, "every": 0}, "run": {"checkpoint_every": 0}}
CUT = {"sampling": {"max_new_tokens": 12}}  # long enough for completions that end, and for those that are cut
SIMILAR = {"algorithm": "similarity_group_grpo", "grouping": {"embedder": "wordllama", "workers": 0}}


def graded(row, text):
    """By the first letter, so that all three grades occur."""
    return None if not text or ord(text[0]) % 5 == 0 else ord(text[0]) % 2 == 0


GRADED = Task("graded", ROWS, ROWS[:2], grades={"right": graded}, metric="right")


def rescored_advantages(folder, step, changes, *, task=TASK, rewards=()):
    """The advantages of a step under the changed settings, and what the run recorded."""
    reader = RunReader(folder)
    recipe, recorded = step_recipes(reader, [step])[step], read_step(reader, step)
    rescorer = Rescorer(RunSource(reader, recipe, task), changes, rewards)
    return rescorer.rescore(recorded, recipe, rescorer.check(recorded, recipe)).group_advantages, recorded


def test_advantages_without_a_scale_are_rewards_minus_their_mean(tmp_path):
    small_trainer(tmp_path / "run", SHORT).run()
    result = rescore(tmp_path / "run", settings={"advantages.scale": "none"}, task=TASK, most_changed=1000)
    assert result.self_check.passed
    assert result.self_check.samples == 24
    reader = RunReader(tmp_path / "run")
    expected, signs = {}, {"before": [], "after": []}
    for step in (1, 2):
        rows = reader.rollouts(step)
        for row in rows:
            mean = statistics.fmean(other["reward"] for other in rows if other["group"] == row["group"])
            after = row["reward"] - mean if abs(row["reward"] - mean) > 1e-9 else 0.0
            expected[step, row["prompt_number"], row["sample"]] = (row["advantage"], after)
            signs["before"].append((row["advantage"] > 0) - (row["advantage"] < 0))
            signs["after"].append((after > 0) - (after < 0))
    assert result.most_changed
    for sample in result.most_changed:
        before, after = expected[sample.step, sample.prompt_number, sample.sample]
        assert sample.advantage.before == pytest.approx(before, abs=1e-6)
        assert sample.advantage.after == pytest.approx(after, abs=1e-6)
    total = result.total
    assert total.reinforced == (signs["before"].count(1), signs["after"].count(1))
    assert total.discouraged == (signs["before"].count(-1), signs["after"].count(-1))
    assert total.sign_changes == 0
    pairs = list(expected.values())
    correlation = statistics.correlation([one for one, _ in pairs], [other for _, other in pairs])
    assert total.correlation == pytest.approx(correlation, abs=1e-6)
    assert [(change.name, change.before, change.after) for change in result.changed] == [
        ("advantages.scale", "group", "none")
    ]


CHANGES = {
    "scale": {"advantages.scale": "none"},
    "baseline": {"advantages.baseline": "leave_one_out", "advantages.unbiased": False},
    "truncated": {"masks.truncated": True},
    "equal rewards dropped": {"masks.drop_equal_rewards": True, "advantages.scale": "batch_advantages"},
    "validity": {"masks.validity": True, "masks.min_length": 3},
    "difficulty": {"advantages.difficulty": "hard"},
    "overlong": {"scoring.overlong_buffer": 4, "scoring.overlong_weight": 0.5},
    "length": {"scoring.length_penalty": 0.5, "scoring.success_threshold": 0.6},
    "maxrl": {"advantages.scale": "mean"},
    "pass@k": {"advantages.pass_at_k": 2, "scoring.success_threshold": 0.6},
    "combine": {"advantages.combine": "normalize_then_sum"},
    "pairs": {"preference.weight": 0.2, "preference.pairs_per_group": 2},
    "only pairs": {"preference.weight": 0.2, "loss.policy_coef": 0.0},
    "grouping": {
        "advantages.grouping": "similarity",
        "grouping.embedder": "wordllama",
        "grouping.workers": 0,
        "advantages.shrinkage": 1.0,
        "grouping.levels": 3,
    },
}


OPTIONS = {"task": GRADED, "rewards": [even, vowels]}


@pytest.fixture(scope="module")
def base_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    run_steps(small_trainer(folder, SHORT, CUT, **OPTIONS), 1)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_equals_a_run_that_had_the_setting(base_run, tmp_path, name):
    """The first step of both runs has the same completions; later ones come from other weights."""
    if name == "grouping":
        wordllama()
    changes = CHANGES[name]
    nested: dict = {}
    for setting, value in changes.items():
        section, key = setting.split(".")
        nested.setdefault(section, {})[key] = value
    run_steps(small_trainer(tmp_path, SHORT, CUT, nested, **OPTIONS), 1)
    after, before = rescored_advantages(base_run, 1, changes, task=GRADED)
    other = read_step(RunReader(tmp_path), 1)
    assert before.batch.texts == other.batch.texts
    assert torch.equal(after.advantages, other.advantages)
    assert torch.equal(after.contributes, other.contributes)
    assert after.skip_reasons() == other.masked_out
    torch.testing.assert_close(after.rewards, other.rewards, equal_nan=True)
    if after.pairs is not None:
        assert after.pairs.roles(len(other.pairs)) == other.pairs
    changed = (after.contributes != before.contributes) | (after.advantages != before.advantages)
    assert bool(changed.any()) or (name == "pairs" and "chosen" in other.pairs)
    result = rescore(base_run, settings=changes, task=GRADED)
    assert result.self_check.passed
    assert result.total.pairs.after == other.pairs.count("chosen")


RUNS = {
    "validity and difficulty": {
        "masks": {"validity": True, "min_length": 3},
        "advantages": {"difficulty": "uncertain"},
    },
    "pairs": {"algorithm": "pg_grpo"},
    "refreshed reference": {"loss": {"kl_coef": 0.1}, "reference": {"refresh_every": 1}},
    "overlong, dropped": {"scoring": {"overlong_buffer": 3, "on_error": "drop"}},
    "length penalty": {"scoring": {"length_penalty": 0.5, "success_threshold": 1.0}},
    "pass@k": {"advantages": {"pass_at_k": 2}, "scoring": {"success_threshold": 1.5}},
    "similarity": {**SIMILAR, "grouping": {**SIMILAR["grouping"], "skip_single_members": True, "levels": 3}},
    "phases": {
        "phases": [{"name": "first", "steps": 1, "advantages.eps": 1.0}, {"name": "second", "advantages.eps": 0.1}]
    },
    "rules": {"rules": [{"when": "reward > -1", "over": 1, "then": "advantages.eps * 100", "cooldown": 0}]},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_recorded_settings_give_recorded_advantages_back(tmp_path, name):
    if name == "similarity":
        wordllama()

    def failing(completions, **_):
        return [None if "a" in text else 1.0 for text in completions]

    rewards = [even, failing]
    run_steps(small_trainer(tmp_path / "run", SHORT, CUT, RUNS[name], task=GRADED, rewards=rewards), 2)
    result = rescore(tmp_path / "run", task=GRADED)
    assert result.self_check.passed, result.self_check
    assert result.self_check.largest == 0
    assert result.total.correlation == pytest.approx(1)
    assert not result.most_changed
    assert result.changed == []


@pytest.mark.slow
def test_settings_changed_on_a_resume_hold_from_there_on(tmp_path):
    changes = {"train": {"steps": 3}, "run": {"checkpoint_every": 1}}
    run_steps(small_trainer(tmp_path, SHORT, changes), 2)
    run_steps(small_trainer(tmp_path, SHORT, changes, {"advantages": {"scale": "none"}}, resume=True), 1)
    recipes = step_recipes(RunReader(tmp_path), [1, 2, 3])
    assert [recipes[step].advantages.scale for step in (1, 2, 3)] == ["group", "group", "none"]
    assert rescore(tmp_path, task=TASK).self_check.passed


@pytest.mark.slow
def test_other_rewards(tmp_path):
    """Recorded ones by name, with the weights of the run or others, beside functions that are called on the rows."""
    task = Task("rows", [{"prompt": f"Say {number}: ", "wanted": "aeiou"[number % 5]} for number in range(10)])
    small_trainer(tmp_path / "run", SHORT, task=task, rewards=[even, vowels]).run()

    def wanted(completions, wanted, **_):
        return [float(letter in text) for text, letter in zip(completions, wanted, strict=True)]

    result = rescore(tmp_path / "run", rewards=[("even", 0.5), (wanted, 2.0)], task=task, most_changed=100)
    assert result.self_check.passed
    weights = {reward.name: reward.weight for reward in result.rewards}
    assert weights["even"] == (1, 0.5)
    assert weights["vowels"].before == 1
    assert math.isnan(weights["vowels"].after)
    assert weights["wanted"].after == 2
    rows = {(step, row["prompt_number"], row["sample"]): row
            for step in (1, 2) for row in RunReader(tmp_path / "run").rollouts(step)}  # fmt: skip
    for sample in result.most_changed:
        row = rows[sample.step, sample.prompt_number, sample.sample]
        letter = task.train[row["row"]]["wanted"]
        assert sample.reward.after == pytest.approx(0.5 * row["reward/even"] + 2 * (letter in row["completion"]))
    assert result.changed[0].before == "even × 1, vowels × 1"
    assert result.changed[0].after == "even × 0.5, wanted × 2"


@pytest.mark.slow
def test_a_run_whose_task_is_not_known_by_name(tmp_path):
    """Weights follow from the recorded sums; only what needs rows is refused."""
    from groupwise.rewards import named

    small_trainer(tmp_path / "run", SHORT, rewards=[named(even, 2.0), named(vowels, -0.5)]).run()
    result = rescore(tmp_path / "run", settings={"advantages.scale": "none"})
    assert result.self_check.passed
    assert [reward.weight.before for reward in result.rewards] == [2.0, -0.5]
    assert any("recorded sums" in note for note in result.notes)
    with pytest.raises(ConfigError, match=r"cannot be loaded by the names.*task="):
        rescore(tmp_path / "run", rewards=[even, vowels])


@pytest.mark.slow
def test_an_edited_file_fails_the_check(tmp_path):
    small_trainer(tmp_path / "run", SHORT).run()
    path = tmp_path / "run" / "rollouts" / "step-000002.parquet"
    table = pyarrow.parquet.read_table(path)
    advantages = table.column("advantage").to_pylist()
    advantages[5] += 0.25
    place = table.column_names.index("advantage")
    pyarrow.parquet.write_table(table.set_column(place, "advantage", pyarrow.array(advantages)), path)
    check = rescore(tmp_path / "run", task=TASK).self_check
    assert not check.passed
    assert check.different == 1
    assert check.largest == pytest.approx(0.25)
    assert "step 2, prompt 1, sample 1" in check.first
    pyarrow.parquet.write_table(table.slice(1), path)
    with pytest.raises(CheckpointError, match=r"step 2.*missing"):
        rescore(tmp_path / "run", task=TASK)


@pytest.mark.slow
def test_refusals(tmp_path):
    folder = tmp_path / "run"
    small_trainer(folder, SHORT).run()
    for setting, words in {
        "sampling.temperature": "what is sampled.*--step",
        "model.source": "what is sampled",
        "loss.kl_coef": "acts in the update.*--step",
        "masks.off_policy": "acts in the update.*--step",
        "run.plot": "no effect",
        "phases": "set the setting itself",
        "loss.klcoef": "did you mean 'loss.kl_coef'",
        "algorithm": "--algorithm",
    }.items():
        with pytest.raises(ConfigError, match=words):
            rescore(folder, settings={setting: 1}, task=TASK)
    with pytest.raises(RunDirError, match="between 1 and 2"):
        rescore(folder, steps=[7], task=TASK)

    def with_ids(completions, completion_ids, **_):
        return [1.0] * len(completions)

    with pytest.raises(RewardError, match="not their token ids"):
        rescore(folder, rewards=[with_ids], task=TASK)
    with pytest.raises(ConfigError, match="rewards of this run: even"):
        rescore(folder, rewards=["evn"], task=TASK)
    other = Task("try", [{"prompt": f"Say {number}: "} for number in range(10)], ROWS[:2])
    with pytest.raises(ConfigError, match=r"not those of .*before: 10, .* now: 10, "):
        rescore(folder, rewards=[vowels], task=other)
    small_trainer(tmp_path / "none", SHORT, {"run": {"save_rollouts": False}}).run()
    with pytest.raises(RunDirError, match=r"no rollouts.*run\.save_rollouts is false"):
        rescore(tmp_path / "none", task=TASK)


@pytest.mark.slow
def test_another_preset(tmp_path):
    """Settings of the preset that act on advantages, masks and weights are shown; the others are named."""
    folder = tmp_path / "run"
    small_trainer(folder, SHORT, {"loss": {"clip_low": 0.1}}).run()
    result = rescore(folder, algorithm="gspo", task=TASK)
    assert [change.name for change in result.changed] == ["algorithm", "loss.name"]
    assert {change.name: change.after for change in result.not_shown} == {
        "loss.ratio": "sequence",
        "loss.clip_high": 4e-4,
    }
    lengths = torch.tensor([[row["completion_tokens"], row["advantage"]] for step in (1, 2)
                            for row in RunReader(folder).rollouts(step)])  # fmt: skip
    if len(lengths[:, 0].unique()) == 1:
        assert result.total.weighted_correlation == pytest.approx(1)
    result = rescore(folder, algorithm="dr_grpo", task=TASK)
    assert [change.name for change in result.changed] == ["algorithm", "loss.name", "advantages.scale"]


def test_weights_of_samples_in_the_loss():
    """By hand, for lengths 2, 1, 5: a mean over all tokens, over sequences, and a sum over a constant."""
    from groupwise.analysis.replay.rescoring import sample_weights
    from groupwise.training.rollout.batch import GroupAdvantages
    from tests.training.factories import make_batch, short_recipe

    def advantages(*, truncated, equal_rewards=None):
        masked = {"truncated": truncated} | ({} if equal_rewards is None else {"equal_rewards": equal_rewards})
        zeros = torch.zeros(len(truncated))
        return GroupAdvantages(zeros, zeros.long(), zeros, masked, zeros.bool())

    batch = make_batch([[1.0, 0.0, 0.5]], [[2, 1, 5]])
    everything, some = torch.tensor([True, True, True]), torch.tensor([True, True, False])
    cases = {
        ("dapo", "completion_mask"): ([2 / 8, 1 / 8, 5 / 8], [2 / 8, 1 / 8, 0]),
        ("dapo", "policy_mask"): ([2 / 8, 1 / 8, 5 / 8], [2 / 3, 1 / 3, 0]),
        ("grpo", "completion_mask"): ([1 / 3, 1 / 3, 1 / 3], [1 / 3, 1 / 3, 0]),
        ("dr_grpo", "completion_mask"): ([2 / 24, 1 / 24, 5 / 24], [2 / 24, 1 / 24, 0]),
        ("reinforce", "policy_mask"): ([2 / 3, 1 / 3, 5 / 3], [2 / 2, 1 / 2, 0]),
    }
    for (loss, denominator), expected in cases.items():
        recipe = short_recipe({"loss.name": loss, "loss.denominator": denominator})
        for allowed, weights in zip((everything, some), expected, strict=True):
            result = sample_weights(batch, advantages(truncated=~allowed), recipe)
            torch.testing.assert_close(result, torch.tensor(weights))
    batch = make_batch([[1.0, 0.0], [0.5, 0.0]], [[2, 6], [1, 1]])
    recipe = short_recipe({"loss.aggregation": "prompt_mean"})
    cut = torch.tensor([False, False, True, False])
    weights = sample_weights(batch, advantages(truncated=cut), recipe)
    torch.testing.assert_close(weights, torch.tensor([2 / 16, 6 / 16, 0.0, 1 / 4]))
    # Without the groups of equal rewards (masks.drop_equal_rewards) the first prompt is alone.
    equal = torch.tensor([False, False, True, True])
    expected = {
        "prompt_mean": [2 / 8, 6 / 8, 0.0, 0.0],
        "sequence_mean": [1 / 2, 1 / 2, 0.0, 0.0],
        "token_mean": [2 / 8, 6 / 8, 0.0, 0.0],
    }
    for name, shares in expected.items():
        recipe = short_recipe({"loss.aggregation": name})
        weights = sample_weights(batch, advantages(truncated=cut, equal_rewards=equal), recipe)
        torch.testing.assert_close(weights, torch.tensor(shares))


@pytest.mark.slow
def test_the_length_penalty_follows_other_rewards(tmp_path):
    """Where no completion succeeds any more, each is penalized as if one did."""
    from groupwise.rewards import named

    task = Task("try", ROWS, ROWS[:2], rewards=[named(always)])
    small_trainer(tmp_path / "run", SHORT, {"scoring": {"length_penalty": 0.5}}, task=task).run()
    rows = [row for step in (1, 2) for row in RunReader(tmp_path / "run").rollouts(step)]
    result = rescore(tmp_path / "run", rewards=[("always", 0.1)], task=task)
    assert result.self_check.passed
    before, after = (
        statistics.fmean(-0.5 * row["completion_tokens"] / 6 * rate for row in rows) for rate in (1.0, 1 / 4)
    )
    assert statistics.fmean(row["reward/adaptive_length_penalty"] for row in rows) == pytest.approx(before)
    penalty = next(reward for reward in result.rewards if reward.name == "adaptive_length_penalty")
    assert penalty.mean == pytest.approx(after)


def always(completions, **_):
    return [1.0] * len(completions)
