"""The doctor: sick runs are diagnosed with the right evidence, live and afterwards; healthy ones have no findings."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from groupwise.analysis.findings import ALL_CHECKS, DAMAGED, MISSING, diagnose
from groupwise.analysis.run_reader import RunReader
from groupwise.analysis.step_settings import StepSettings
from groupwise.training.monitor.checks import CHECKS, EVALUATION_CHECKS, WINDOW
from groupwise.training.monitor.health_checks import HealthChecks
from groupwise.training.trainer import Callback
from tests.analysis.sick_runs import SICK, run
from tests.training.monitor.test_descriptions import FAST, RUNS
from tests.training.runs import run_steps

# What else is true of a run that was made sick, and what its evidence must show.
ALSO = {
    "answers_longer": {"truncated"},
    "answers_identical": {"no_learning_signal", "reward_constant"},  # one answer, so one reward
    "kl_high": {"answers_identical", "zero_spread"},  # a learning rate at which the policy collapses in ten steps
    "entropy_collapsed": {"answers_identical", "zero_spread", "no_learning_signal"},
    "overfitting": {"entropy_collapsed", "answers_identical", "zero_spread", "no_learning_signal"},
    "masked": {"no_learning_signal"},
    "answers_alike": {"answers_identical", "no_learning_signal", "reward_constant"},
    "answers_scattered": {"no_learning_signal"},  # a completion that is alone has nothing to be compared with
}
EVIDENCE = {
    "truncated": lambda e: e["completions/clipped_ratio"] > 0.95,
    "no_answer": lambda e: e["right_no_answer"] == 1.0,
    "answers_longer": lambda e: 12 >= e["completions/mean_length"] > 1.5 * e["completions/mean_length at the start"],
    "answers_identical": lambda e: e["completions/identical"] == 1.0,
    "kl_high": lambda e: e["kl"] > 0.5,
    "entropy_collapsed": lambda e: e["entropy"] < 0.1 < 2 < e["entropy at the start"],
    "entropy_exploded": lambda e: e["entropy"] > 5 > 2 * e["entropy at the start"],
    "log_prob_mismatch": lambda e: e["sampler/logp_difference_mean"] > 0.05,
    "weights_unchanged": lambda e: e["weights_changed"] < 0.01 and e["learning_rate"] == pytest.approx(1e-12),
    "no_learning_signal": lambda e: e["signal/contributing"] == 0,
    "zero_spread": lambda e: 0.5 < e["frac_reward_zero_std"] < 1,
    "reward_constant": lambda e: e["rewards/constant/mean"] == 0.25 and len(e) == 2,
    "reward_dominates": lambda e: e["rewards/hundredfold/variance_share"] > 0.99,
    "rewards_failed": lambda e: 0.05 * 12 < e["rewards_failed"] < 0.5 * 12,  # of 3 prompts × 4 completions
    "not_finite": lambda e: (e["updates_not_finite"], e["updates"]) == (1, 0),
    "masked": lambda e: (e["mask_ratio"], e["masks/too_short"]) == (0, 1),
    "stale": lambda e: e["sampler/logp_difference_mean"] > 0.3,
    "teacher_far": lambda e: e["distillation/kl"] > 0.95 * e["distillation/kl at the start"] > 0.01,
    "memory": lambda e: (e["token_budget"], e["token_budget_full"]) == (128, 512),
    "overfitting": lambda e: (
        e["eval/right_high"] < e["eval/right_low at its best"] and e["reward"] > e["reward at its best"]
    ),
    "kl_low": lambda e: 0 < e["kl"] < 1e-4 and e["step"] >= 50,
    "answers_alike": lambda e: (e["prompts with one cluster"], e["diversity/mean_distance"]) == (1, 0),
    "answers_unrelated": lambda e: (
        e["prompts with one cluster"] == 1 and 0 < e["similarity_groups/avg_silhouette_score"] < 0.95
    ),
    "answers_scattered": lambda e: e["answers alone in their cluster"] > 0.9,
    "no_pairs": lambda e: e["preference/pairs"] == 0 and e["preference/refused/margin"] > 2,
    "preference_opposed": lambda e: e["grad_cosine/grpo_preference"] < -0.5,
    "chosen_unlikely": lambda e: e["preference/chosen_reward"] < -1 and e["preference/margin"] > 0,
}  # fmt: skip
ERRORS = {"truncated", "weights_unchanged", "no_learning_signal", "not_finite", "overfitting"}
WITHOUT_EXAMPLES = {
    "kl_high", "kl_low", "log_prob_mismatch", "weights_unchanged", "not_finite", "stale", "memory", "teacher_far",
    "answers_unrelated", "answers_scattered", "no_pairs", "preference_opposed", "chosen_unlikely",
}  # fmt: skip
SETTINGS = {
    "truncated": "sampling.max_new_tokens",
    "kl_high": "loss.kl_coef",
    "weights_unchanged": "optimizer.learning_rate",
    "zero_spread": "train.resample_rounds",
    "log_prob_mismatch": "model.lora.dropout",
    "reward_dominates": "advantages.combine",
    "memory": "train.token_budget",
    "teacher_far": "optimizer.learning_rate",
    "stale": "train.max_staleness",
    "answers_unrelated": "grouping.min_silhouette",
    "answers_scattered": "grouping.threshold",
    "no_pairs": "preference.min_margin",
}


def said_first(trainer):
    """The first step at which each warning was said while the run trained."""
    warnings = [re.fullmatch(r"step (\d+): warning (\w+): .*", text) for text in trainer.display.said]
    first = {}
    for match in filter(None, warnings):
        first.setdefault(match[2], int(match[1]))
    return first


@pytest.mark.slow
@pytest.mark.parametrize("name", SICK)
def test_a_sick_run_is_diagnosed(name, tmp_path):
    trainer = SICK[name](tmp_path / "run")
    trainer.run()
    reader = RunReader(tmp_path / "run")
    found = {finding.name: finding for finding in diagnose(reader)}
    finding = found[name]
    assert found.keys() - {name} <= ALSO.get(name, set())
    assert EVIDENCE[name](finding.evidence), finding.evidence
    assert finding.severity == ("error" if name in ERRORS else "warning")
    assert finding.steps[0] <= finding.evidence["step"] <= finding.steps[1] <= reader.step
    assert finding.message
    assert SETTINGS.get(name, finding.settings[0] if finding.settings else None) in [*finding.settings, None]
    for setting in finding.settings:
        assert setting in finding.remedy
    assert bool(finding.examples) == (name not in WITHOUT_EXAMPLES)
    for example in finding.examples:
        assert any(
            (row["prompt_number"], row["sample"]) == (example.prompt_number, example.sample)
            for row in reader.rollouts(example.step)
        )
    assert json.loads(json.dumps(finding.as_dict()))["steps"] == list(finding.steps)
    # The same was said while it trained, at the same steps, and the run's last lines point to the doctor.
    assert said_first(trainer) == {other: found[other].steps[0] for other in found}
    (line,) = [line for line in trainer.display.summary if "groupwise doctor" in line]
    assert name in line


def test_every_named_finding_is_tried():
    assert SICK.keys() == EVIDENCE.keys()
    assert SICK.keys() | {DAMAGED, MISSING} == set(ALL_CHECKS) == {*CHECKS, *EVALUATION_CHECKS, DAMAGED, MISSING}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A healthy run of 12 steps with an evaluation before, in and after it."""
    folder = tmp_path_factory.mktemp("healthy") / "run"
    trainer = run(folder, {"evaluate": {"every": 6, "before_training": True, "max_new_tokens": 3}})
    trainer.run()
    assert said_first(trainer) == {}
    assert not any("doctor" in line for line in trainer.display.summary)
    return folder


@pytest.fixture
def copy(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_a_healthy_run_has_no_findings(finished):
    assert diagnose(RunReader(finished)) == []


@pytest.mark.slow
def test_the_beginning_of_the_default_quiz_is_healthy(tmp_path):
    """The packaged recipe, with fewer prompts per step and held-out rows, until the checks have seen a few windows."""
    from groupwise.config import load_recipe
    from groupwise.packaged import find_recipe
    from groupwise.training.trainer import Trainer
    from tests.training.runs import RecordingDisplay

    recipe = load_recipe(
        find_recipe(Path("quiz")),
        {
            "train.steps": 12,
            "train.batch_size": 16,
            "data.held_out_rows": 64,
            "run.tensorboard": False,
            "run.plot": False,
        },
    )
    trainer = Trainer(recipe, folder=tmp_path / "run", display=RecordingDisplay())
    trainer.run()
    assert said_first(trainer) == {}
    assert diagnose(RunReader(tmp_path / "run")) == []


TRUE_OF = {  # what is true of runs of a model with random weights, whose answers never end
    "run_dapo": {"truncated"},
    "run_many_options": {"truncated", "no_answer", "masked", "no_learning_signal", "rewards_failed"},
    "run_enhanced_grpo": {"truncated", "masked", "no_learning_signal"},
    "run_similarity_groups": {"truncated", "answers_alike", "answers_unrelated", "answers_scattered"},
    "run_pg_grpo": {"truncated"},
    "run_usmle": {"truncated", "no_answer", "masked", "no_learning_signal", "below_chance"},
    "run_sft": set(),
    "run_ahead": {"truncated", "zero_spread"},
    "run_masked_weights": {"truncated"},
    "run_distillation": {"truncated"},
    "run_conversations": {"truncated", "reward_constant"},
}


@pytest.mark.slow
@pytest.mark.parametrize("make", RUNS, ids=lambda make: make.__name__)
def test_runs_of_all_algorithms_have_no_findings_that_are_not_true(make, tmp_path, monkeypatch):
    monkeypatch.setitem(FAST["train"], "steps", WINDOW + 1)
    trainer = make(tmp_path / "run")
    trainer.run()
    found = {finding.name: finding for finding in diagnose(RunReader(tmp_path / "run"))}
    assert found.keys() <= TRUE_OF[make.__name__]
    assert said_first(trainer) == {name: finding.steps[0] for name, finding in found.items()}


# --- the folder -------------------------------------------------------------------------------------------------------


def names_of(folder):
    return [finding.name for finding in diagnose(RunReader(folder))]


def rewrite(folder, change):
    """Change the lines of metrics.jsonl."""
    file = folder / "metrics.jsonl"
    file.write_text("\n".join(change(file.read_text().splitlines())) + "\n")


def test_a_damaged_line_and_missing_steps(copy):
    rewrite(copy, lambda lines: [*lines[:4], lines[4][:50], *lines[7:]])
    damaged, missing = diagnose(RunReader(copy))
    assert (damaged.name, missing.name) == (DAMAGED, MISSING)
    assert "metrics.jsonl, line 5 is damaged" in damaged.message
    assert damaged.evidence["problem 1"] in damaged.message
    assert "steps 4–6" in missing.message
    assert (missing.steps, missing.evidence) == ((4, 6), {"steps without metrics": 3})


def test_a_damaged_last_file(copy):
    (copy / "rollouts" / "step-000012.parquet").write_bytes(b"PAR1 and then nothing")
    (finding,) = diagnose(RunReader(copy))
    assert finding.name == DAMAGED
    assert "step-000012.parquet is damaged" in finding.message


def test_without_settings_only_the_files_are_checked(copy):
    (copy / "recipe.json").write_text("{")
    rewrite(copy, lambda lines: [lines[0], *lines[3:]])
    (finding,) = diagnose(RunReader(copy))
    assert finding.name == DAMAGED
    assert "nothing else can be checked" in finding.message


def test_a_run_that_was_killed_in_the_middle_of_a_line(copy):
    file = copy / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    assert names_of(copy) == []


def test_metrics_of_any_kind_do_not_stop_the_doctor(copy):
    def change(lines):
        row = json.loads(lines[-2])
        odd = {**row, "step": row["step"], "kl": "NaN", "reward": None, "entropy": "a text", "rewards_failed": 1e300}
        return [*lines[:-1], json.dumps(odd), json.dumps({"step": row["step"]}), lines[-1]]

    rewrite(copy, change)
    assert set(names_of(copy)) <= {"rewards_failed"}


def test_an_interrupted_and_a_running_run(tmp_path, monkeypatch):
    """Findings appear as the run goes on, and only the new steps are looked at."""
    looked, look = [], HealthChecks.look
    with run(tmp_path / "run", rewards=[always_one]) as trainer:
        steps = trainer.steps()
        for _ in range(9):
            next(steps)
        reader = RunReader(tmp_path / "run")
        assert diagnose(reader) == []
        next(steps)
        monkeypatch.setattr(HealthChecks, "look", lambda *arguments: looked.append(arguments[1]) or look(*arguments))
        assert diagnose(reader) == []  # not read yet
        reader.refresh()
        looked.clear()
        found = diagnose(reader)
        assert diagnose(reader) == found
    assert looked == [10]
    assert {finding.name for finding in found} == {"no_learning_signal", "reward_constant"}
    assert diagnose(RunReader(tmp_path / "run")) == found


def always_one(completions, **_):
    return [1.0] * len(completions)


def test_a_rewound_run_is_looked_at_again(copy):
    reader = RunReader(copy)
    assert diagnose(reader) == []
    value = re.compile('"signal/contributing": [0-9.]+')
    rewrite(copy, lambda lines: [value.sub('"signal/contributing": 0.0', line) for line in lines[:-2]])
    reader.refresh()
    assert [finding.name for finding in diagnose(reader)] == ["no_learning_signal"]


def test_warnings_of_a_task_are_findings(copy):
    """A check of a task is not known without its rows; what it recorded is."""
    warned = '"step": 11, "warnings/below_chance": 1.0,'
    rewrite(copy, lambda lines: [line.replace('"step": 11,', warned) for line in lines])
    (finding,) = diagnose(RunReader(copy))
    assert (finding.name, finding.steps, finding.severity) == ("below_chance", (11, 11), "warning")


# --- the settings of each step ----------------------------------------------------------------------------------------

SCHEDULED = {
    "phases": [
        {"name": "first", "steps": 3, "temperature": 0.9},
        {"name": "second", "steps": 2, "temperature": 0.7, "train.iterations": 2},
    ],
    "ramps": {"loss.entropy_coef": {"from": 0.0, "to": 0.1, "tokens": 300}},
    "rules": [{"when": "reward > -1", "over": 2, "then": "kl_coef + 0.1", "times": 2}],
    "loss": {"kl_coef": 0.1},
    "train": {"steps": 8},
    "run": {"checkpoint_every": 1},
}


class RememberRecipes(Callback):
    def __init__(self):
        self.recipes = {}

    def on_rollout(self, trainer, batch, group_advantages):
        self.recipes[trainer.step + 1] = trainer.step_recipe()


@pytest.mark.slow
def test_the_settings_of_each_step_are_those_of_the_run(tmp_path):
    """With phases, a ramp over tokens and a rule, of a run that was resumed with another learning rate."""
    remember = RememberRecipes()
    run_steps(run(tmp_path / "run", SCHEDULED, callbacks=[remember]), 4)
    faster = {**SCHEDULED, "optimizer": {"learning_rate": 0.5}}
    run(tmp_path / "run", faster, callbacks=[remember], resume=True).run()
    reader = RunReader(tmp_path / "run")
    settings, tokens = StepSettings(reader, strict=False), 0
    for row in reader.rows:
        recipe = settings.at(row["step"], tokens)
        if "reward" in row:
            assert recipe == remember.recipes[row["step"]], row["step"]
            tokens = row["num_tokens"]
        settings.observe(row["step"], {name: value for name, value in row.items() if name != "step"})
    recipes = remember.recipes.values()
    assert {recipe.optimizer.learning_rate for recipe in recipes} == {1e-3, 0.5}
    assert {recipe.sampling.temperature for recipe in recipes} == {0.9, 0.7, 1.0}
    assert {recipe.train.iterations for recipe in recipes} == {1, 2}
    assert sorted({round(recipe.loss.kl_coef, 6) for recipe in recipes}) == [0.1, 0.2, 0.3]
    assert len({recipe.loss.entropy_coef for recipe in recipes}) > 4
