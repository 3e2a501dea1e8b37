"""The outside of a run: whose folder it is, what is exported, and what is said about it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch
import yaml
from markdown_it import MarkdownIt
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from groupwise.config import with_settings
from groupwise.errors import CheckpointError
from groupwise.rundir import RunDir, read_json, read_metrics, verify_manifest, write_bytes
from groupwise.tasks import Task
from groupwise.text import one_line, printable
from groupwise.training.display.curves import draw_curves
from groupwise.training.store.model_card import base_model, model_card
from groupwise.training.trainer import Trainer
from tests.training.runs import ROWS, graded_trainer, merged, small_trainer

QUICK = {"train": {"steps": 2, "batch_size": 2}, "sampling": {"max_new_tokens": 4}, "evaluate": {"max_new_tokens": 2}}
LORA = {"model": {"lora": {"rank": 4}}, "optimizer": {"learning_rate": 1e-2}}


PAIRS = [{"prompt": f"Say {n}: ", "chosen": f"{n} and more", "rejected": f"{n}!"} for n in range(12)]
OFFLINE = {"algorithm": "dpo", "preference": {"held_out_from_train": 4, "batch_size": 4, "cache_ref_logps": False}}
BOTH = merged(OFFLINE, {"algorithm": "pg_grpo", "preference": {"pairs": "both"}})


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """The reference's log-probs of pairs are not kept beyond a test."""
    monkeypatch.setenv("GROUPWISE_CACHE", str(tmp_path / "cache"))


def pairs_trainer(folder, *changes, **options) -> Trainer:
    """A run that learns from pairs of a file; without a task it samples nothing."""
    path = folder.with_name("pairs.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    source = {"preference": {"train": str(path)}}
    return small_trainer(folder, QUICK, source, *changes, **{"task": None, **options})


def titles_of(folder, drawn, metric, goal=None) -> list[str]:
    assert draw_curves(folder, metric=metric, goal=goal) is not None
    return [axes.get_title(loc="left") for axes in drawn[-1].axes]


def logits_of(model) -> torch.Tensor:
    ids = torch.tensor([[72, 101, 108, 108, 111, 32, 53, 58]])
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def test_the_model_and_every_policy_load_elsewhere(tmp_path):
    """transformers, which knows nothing of groupwise, gets the logits that the trainer has."""
    trainer = small_trainer(tmp_path / "run", QUICK, {"evaluate": {"every": 1}})
    untrained = logits_of(trainer.components.model).clone()
    result = trainer.run()
    assert result.model == tmp_path / "run" / "model"
    own = logits_of(trainer.components.model)
    assert not torch.equal(own, untrained)
    best = tmp_path / "run" / f"checkpoint-{result.best_step}" / "policy"
    last = tmp_path / "run" / "checkpoint-2" / "policy"
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(last)), own)
    exported = AutoModelForCausalLM.from_pretrained(result.model)
    assert torch.equal(logits_of(exported), logits_of(AutoModelForCausalLM.from_pretrained(best)))
    for folder in (last, result.model):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer("Say 5: ")["input_ids"] == trainer.components.tokenizer("Say 5: ")["input_ids"]
        verify_manifest(folder)


@pytest.mark.slow
def test_lora_is_merged(tmp_path):
    """A checkpoint holds the adapter alone, the model is whole."""
    trainer = graded_trainer(tmp_path / "run", [0, 1, 2], QUICK, LORA)
    untrained = logits_of(trainer.components.model).clone()
    result = trainer.run()
    policy = tmp_path / "run" / "checkpoint-2" / "policy"
    assert (policy / "adapter_model.safetensors").exists()
    assert not (policy / "model.safetensors").exists()
    assert all("lora_" in name for name in load_file(policy / "adapter_model.safetensors"))
    own = logits_of(trainer.components.model)
    exported = AutoModelForCausalLM.from_pretrained(result.model)
    assert type(exported).__name__ == "LlamaForCausalLM"
    assert not list(result.model.glob("adapter*"))
    assert torch.allclose(logits_of(exported), own, atol=1e-5)
    assert not torch.allclose(own, untrained, atol=1e-3)


def dtypes_in(path) -> set[str]:
    with safe_open(path, "pt") as opened:
        return {str(opened.get_slice(name).get_dtype()) for name in opened.keys()}  # noqa: SIM118 - no mapping


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        pytest.param(None, "F32", marks=pytest.mark.slow),
        ("bfloat16", "BF16"),
        pytest.param("float16", "F16", marks=pytest.mark.slow),
    ],
)
def test_export_dtype(tmp_path, dtype, name):
    """What is exported is rounded; what the run goes on from is not."""
    trainer = small_trainer(tmp_path / "run", QUICK, {"run": {"export_dtype": dtype}, "train": {"steps": 1}})
    result = trainer.run()
    assert dtypes_in(result.model / "model.safetensors") == {name}
    assert dtypes_in(tmp_path / "run" / "checkpoint-1" / "policy" / "model.safetensors") == {name}
    assert dtypes_in(tmp_path / "run" / "checkpoint-1" / "masters.safetensors") == {"F32"}
    assert "model.safetensors" in {path.name for path in result.model.iterdir()}
    assert torch.allclose(
        logits_of(AutoModelForCausalLM.from_pretrained(result.model, dtype=torch.float32)),
        logits_of(trainer.components.model),
        atol=1e-6 if dtype is None else 0.05,
    )


FADING = [0, 1, 3, 2, 1]  # after steps 0 to 4


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"run": {"resumable": False}}, marks=pytest.mark.slow),
        pytest.param(LORA, marks=pytest.mark.slow),
        merged(LORA, {"run": {"resumable": False}}),
    ],
    ids=str,
)
def test_the_best_is_exported(tmp_path, changes):
    """The held-out metric is at its height after step 2: that policy it is, though the run went on to step 4."""
    often = {"train": {"steps": 4}, "evaluate": {"every": 1}, "run": {"keep_checkpoints": 1}}
    trainer = graded_trainer(tmp_path / "run", FADING, QUICK, often, changes, held_out=3)
    at_the_height = []
    with trainer:
        for report in trainer.steps():
            if report.step == 2:
                at_the_height.append(logits_of(trainer.components.model).clone())
        result = trainer.finish()
    assert (result.steps, result.best_step) == (4, 2)
    assert result.first_held_out["right"] == 0
    assert (result.held_out["right"], result.last_held_out["right"]) == (1.0, pytest.approx(1 / 3))
    folder = tmp_path / "run"
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    assert read_json(folder / "best.json")["checkpoint"] == "checkpoint-2"
    assert read_json(folder / "best.json")["value"] == 1.0
    verify_manifest(result.model)
    exported = logits_of(AutoModelForCausalLM.from_pretrained(result.model))
    assert torch.allclose(exported, at_the_height[0], atol=1e-5)
    own = logits_of(trainer.components.model)
    assert not torch.allclose(exported, own, atol=1e-4)  # the trainer itself still has the last one
    assert "the policy of step 2 is exported, the best of 4 evaluations" in trainer.display.summary
    card = (result.model / "README.md").read_text()
    assert "after 2 steps" in card
    assert "| right | 0.0% [0.0%, 56.1%] | 100.0% [43.9%, 100.0%] |" in card


def test_the_best_is_damaged(tmp_path):
    """It is not exported, whatever is in it; the last policy is named instead."""
    changes = {"train": {"steps": 3}, "evaluate": {"every": 1}}
    folder = tmp_path / "run"
    trainer = graded_trainer(folder, FADING, QUICK, changes)
    with trainer:
        for _ in trainer.steps():
            pass
        path = folder / "checkpoint-2" / "masters.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        sentence = (
            r"the best checkpoint cannot be exported: .*masters\.safetensors has been changed .* The last policy is "
            rf"in {folder}/checkpoint-3/policy"
        )
        with pytest.raises(CheckpointError, match=sentence):
            trainer.finish()
    assert not (folder / "model").exists()


def test_model_card(tmp_path):
    """What it is, what was measured, and every setting that was chosen."""
    settings = {"run": {"name": "mine"}, "loss": {"clip_low": 0.1}}
    trainer = graded_trainer(tmp_path / "run", [1, 1, 3], QUICK, settings, held_out=3)
    result = trainer.run()
    card = (result.model / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\ntags:\n- groupwise\n- grpo\n---\n\n# mine\n")
    assert "`tiny` after 2 steps of `dapo` on the task `graded`, trained with groupwise " in card
    assert "| right | 33.3% [6.1%, 79.2%] | 100.0% [43.9%, 100.0%] |" in card
    for name, value in {"loss.clip_low": 0.1, "optimizer.learning_rate": 0.001, "train.steps": 2}.items():
        assert f"- {name}: `{value!r}`\n" in card
    assert "loss.clip_high" not in card
    assert f"torch {version('torch')}" in card
    assert str(tmp_path) not in card


def test_names_in_a_model_card_are_no_markup(tmp_path):
    """In the front matter, the heading, code and tables."""
    evil = "a\n---\n: `x` | <img src=x onerror=alert(1)> [b](javascript:c) \x1b[31m \u202e"
    trainer = graded_trainer(tmp_path / "run", [1, 1, 3], QUICK, {"run": {"name": "mine"}}, held_out=3)
    trainer.run()
    recipe = with_settings(trainer.recipe, {"model.source": f"owner/{evil}", "run.name": evil, "task_options.x": evil})
    task = replace(trainer.components.task, name=evil, grades={evil: lambda *_: True}, metric=evil)
    state = replace(trainer.state)
    state.first = state.last = {f"{evil}{end}": 0.5 for end in ("", "_low", "_high")}
    card = model_card(replace(trainer.components, recipe=recipe, task=task), state, [evil])
    _, front, page = card.split("---\n", 2)
    assert yaml.safe_load(front)["base_model"] == one_line(f"owner/{evil}")
    tokens = [token for block in MarkdownIt().enable("table").parse(page) for token in (block, *(block.children or ()))]
    assert not {token.type for token in tokens} & {"link_open", "image", "html_inline", "html_block", "hr", "fence"}
    assert card == printable(card)
    assert "".join(token.content for token in tokens if token.type == "code_inline").count("onerror") == 6


def test_model_card_without_held_out_rows(tmp_path):
    trainer = small_trainer(tmp_path / "run", QUICK, task=Task("plain", ROWS))
    result = trainer.run()
    assert (result.first_held_out, result.held_out, result.best_step) == ({}, {}, None)
    card = (result.model / "README.md").read_text()
    assert "held out" not in card
    assert "# plain" in card
    assert trainer.display.summary == [f"model: {result.model}", f"run: {result.folder}"]


@pytest.mark.slow
def test_a_run_on_pairs_alone(tmp_path, monkeypatch):
    """Held-out pairs are what it is judged by; no reward and no question is spoken of."""
    monkeypatch.chdir(tmp_path)
    trainer = pairs_trainer(tmp_path / "run", OFFLINE, {"run": {"plot": True}, "optimizer": {"learning_rate": 1e-2}})
    result = trainer.run()
    share = r"\d+\.\d% \[\d+\.\d%, \d+\.\d%\]"
    head, relative, plain, *rest = trainer.display.summary
    assert head == ("4 held-out pairs", "before training", trainer.state.measured_label)
    assert relative[:2] == ("preference_accuracy", "50.0% [50.0%, 50.0%]")  # before, the policy is the reference
    best = trainer.state.best["metrics"]
    ends = [f"{best[f'preference_accuracy{end}']:.1%}" for end in ("", "_low", "_high")]
    assert relative[2] == "{} [{}, {}]".format(*ends)
    assert plain[0] == "preference_logp_accuracy"
    assert all(re.fullmatch(share, value) for value in plain[1:])
    paths = ["model: run/model", "picture: run/curves.png", "run: run"]
    assert [line for line in rest if not line.startswith("the policy of")] == paths
    card = (result.model / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\ntags:\n- groupwise\n- dpo\n---\n\n# pairs\n")
    assert "steps of `dpo` on 8 preference pairs, trained with groupwise " in card
    assert f"| preference_accuracy | 50.0% [50.0%, 50.0%] | {relative[2]} |" in card
    assert "| reward |" not in card


@pytest.mark.slow
def test_a_run_on_pairs_alone_that_holds_nothing_out(tmp_path):
    trainer = pairs_trainer(tmp_path / "run", OFFLINE, {"preference": {"held_out_from_train": 0}})
    result = trainer.run()
    assert (result.first_held_out, result.held_out, result.best_step) == ({}, {}, None)
    assert trainer.display.summary == [f"model: {result.model}", f"run: {result.folder}"]
    card = (result.model / "README.md").read_text()
    assert "after 2 steps of `dpo` on 12 preference pairs" in card
    assert "held out" not in card


@pytest.mark.slow
def test_a_run_on_questions_and_pairs(tmp_path):
    """Both are told. The task's goal is no goal for pairs, whatever the best checkpoint is chosen by."""
    task = Task("graded", ROWS, ROWS[:2], grades={"right": lambda row, answer: True}, metric="right", goal=0.8)
    for name, goals in (("right", [("goal", "80%", "reached")]), ("preference_accuracy", [])):
        trainer = pairs_trainer(tmp_path / name, BOTH, {"evaluate": {"metric": name}}, task=task)
        result = trainer.run()
        rows = [row for row in trainer.display.summary if isinstance(row, tuple)]
        assert rows[0][0] == "2 held-out rows, 4 pairs"
        assert rows[1] == ("right", "100.0% [34.2%, 100.0%]", "100.0% [34.2%, 100.0%]")
        assert [row[0] for row in rows[2:4]] == ["preference_accuracy", "preference_logp_accuracy"]
        assert rows[4:] == goals
        assert any(str(line).startswith("questions: ") for line in trainer.display.summary)
        card = (result.model / "README.md").read_text()
        assert "tags:\n- groupwise\n- grpo\n- dpo\n---\n\n# graded\n" in card
        assert "steps of `pg_grpo` on the task `graded` and 8 preference pairs, trained" in card


@pytest.mark.slow
def test_rewards_beside_pairs_stay_numbers(tmp_path):
    trainer = pairs_trainer(tmp_path / "run", BOTH, task=Task("plain", ROWS, ROWS[:2]))
    trainer.run()
    rows = {row[0]: row[1] for row in trainer.display.summary if isinstance(row, tuple)}
    assert re.fullmatch(r"-?\d\.\d{3} \[-?\d\.\d{3}, -?\d\.\d{3}\]", rows["reward"])
    assert rows["preference_accuracy"] == "50.0% [50.0%, 50.0%]"


def test_the_tags_follow_the_schedule(tmp_path):
    """A term that a ramp brings in later counts; one that the recipe leaves out does not."""
    ramps = {"preference.weight": {"from": 0.0, "to": 1.0, "steps": 2}}
    for name, changes, tags in (
        ("plain", {}, "- grpo\n---"),
        ("ramp", {"ramps": ramps}, "- grpo\n- dpo\n---"),
        ("online", {"preference": {"weight": 1.0}, "loss": {"policy_coef": 0.0}}, "- groupwise\n- dpo\n---"),
    ):
        with small_trainer(tmp_path / name, QUICK, changes) as trainer:
            assert tags in model_card(trainer.components, trainer.state)


def test_summary_of_rewards(tmp_path, monkeypatch):
    """Without grades the reward is what is told; paths are told as one would type them."""
    monkeypatch.chdir(tmp_path)
    trainer = small_trainer(tmp_path / "run", QUICK)
    trainer.run()
    head, (name, *values), *rest = trainer.display.summary
    assert head == ("2 held-out rows", "before training", trainer.state.measured_label)
    assert name == "reward"
    number = r"-?\d\.\d{3}"
    assert all(re.fullmatch(rf"{number} \[{number}, {number}\]", value) for value in values)
    assert rest[-2:] == ["model: run/model", "run: run"]


@pytest.mark.parametrize(("goal", "said"), [(0.0, "reached"), pytest.param(1.1, "not reached", marks=pytest.mark.slow)])
def test_summary_with_a_goal(tmp_path, goal, said):
    task = Task(
        "graded",
        ROWS,
        ROWS[:2],
        grades={"accuracy": lambda row, answer: len(answer) % 2 == 0},
        metric="accuracy",
        goal=goal,
    )
    trainer = small_trainer(tmp_path / "run", QUICK, task=task)
    trainer.run()
    rows = [row for row in trainer.display.summary if isinstance(row, tuple)]
    assert [row[0] for row in rows] == ["2 held-out rows", "accuracy", "goal"]
    assert rows[2][1:] == (f"{goal:.0%}", said)


def test_a_hub_that_cannot_be_reached(tmp_path, monkeypatch):
    """The push fails with a sentence; the model is there, and so is the exit status of a run that went well."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    trainer = small_trainer(tmp_path / "run", QUICK, {"run": {"push_to_hub": "nobody/nothing"}})
    result = trainer.run()
    (said,) = [text for text in trainer.display.said if "push" in text]
    assert said.startswith("the model could not be pushed to nobody/nothing (")
    assert said.endswith(f"it is in {result.model}")
    assert result.exit_status == 0
    verify_manifest(result.model)


def test_a_push(tmp_path, monkeypatch):
    calls = []

    class Hub:
        def create_repo(self, name, **options):
            calls.append(("create", name, options))

        def upload_folder(self, **options):
            calls.append(("upload", options["repo_id"], sorted(p.name for p in (tmp_path / "run/model").iterdir())))

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    trainer = small_trainer(tmp_path / "run", QUICK, {"run": {"push_to_hub": "me/mine"}})
    trainer.run()
    assert trainer.display.heard("pushed to me/mine")
    assert calls[0] == ("create", "me/mine", {"exist_ok": True})
    assert calls[1][:2] == ("upload", "me/mine")
    assert {"README.md", "config.json", "model.safetensors"} <= set(calls[1][2])


@pytest.mark.slow
def test_the_picture(tmp_path):
    trainer = small_trainer(tmp_path / "run", QUICK, {"run": {"plot": True}})
    trainer.run()
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert f"picture: {tmp_path / 'run' / 'curves.png'}" in trainer.display.summary


@pytest.fixture
def drawn(monkeypatch):
    figures = []
    monkeypatch.setattr("groupwise.plots.save_figure", lambda figure, path: figures.append(figure))
    return figures


def test_the_picture_of_a_run_on_pairs_alone(tmp_path, drawn):
    """It begins with the pairs, beside what they are held out for; nothing is kept free for a reward."""
    pairs_trainer(tmp_path / "run", OFFLINE, {"train": {"log_term_gradients_every": 1}}).run()
    assert titles_of(tmp_path / "run", drawn, "preference_accuracy") == [
        "DPO's reward of the two answers of a pair",
        "better answer preferred, while training",
        "better answer preferred, held-out pairs",
    ]
    rewards, _, held_out = drawn[-1].axes
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    for line, name in zip(rewards.lines, ("chosen", "rejected"), strict=True):
        known = [row[f"preference/{name}_reward"] for row in rows if f"preference/{name}_reward" in row]
        assert line.get_ydata().tolist() == pytest.approx(known)
    assert [text.get_text() for text in rewards.get_legend().get_texts()] == ["better", "worse"]
    known = [row["eval/preference_accuracy"] for row in rows if "eval/preference_accuracy" in row]
    assert held_out.lines[0].get_ydata().tolist() == known
    assert held_out.get_subplotspec().colspan.start == 1


def test_the_picture_of_a_run_with_rewards_and_pairs(tmp_path, drawn):
    with RunDir.create(tmp_path / "run") as run:
        run.metrics.record(0, {"eval/accuracy": 0.25, "eval/preference_accuracy": 0.5})
        for step in range(1, 31):
            pairs = {"preference/chosen_reward": 0.1, "preference/rejected_reward": -0.1, "preference/accuracy": 0.7}
            terms = {"grad_cosine/grpo_preference": 0.2, "grad_norm/grpo": 1.0, "grad_norm/preference": 0.5}
            run.metrics.record(step, {"reward": 1.0, **pairs, **(terms if step % 10 == 0 else {})})
        run.metrics.record(30, {"eval/accuracy": 0.5, "eval/preference_accuracy": 0.75})
    assert titles_of(run.path, drawn, "accuracy", goal=0.8) == [
        "reward while training",
        "right on held-out questions",
        "DPO's reward of the two answers of a pair",
        "better answer preferred, while training",
        "better answer preferred, held-out pairs",
        "cosine of the gradients of pairs and of GRPO",
        "norm of their gradients",
    ]
    panels = {axes.get_title(loc="left"): axes for axes in drawn[-1].axes}
    assert len(panels["right on held-out questions"].lines) == 2  # with the goal
    assert len(panels["better answer preferred, held-out pairs"].lines) == 1
    (cosine,) = panels["cosine of the gradients of pairs and of GRPO"].lines
    assert cosine.get_xdata().tolist() == [10, 20, 30]
    assert cosine.get_marker() == "o"
    raw, smooth = panels["better answer preferred, while training"].lines
    assert smooth.get_marker() == "None"
    assert raw.get_alpha() < 1


def test_a_model_from_before_is_replaced(tmp_path):
    """A finished run that was given more steps exports anew; nothing of the old model stays."""
    folder = tmp_path / "run"
    small_trainer(folder, QUICK).run()
    write_bytes(folder / "model" / "stale.txt", b"old")
    small_trainer(folder, QUICK, {"train": {"steps": 3}}, resume=True).run()
    assert not (folder / "model" / "stale.txt").exists()
    verify_manifest(folder / "model")
    assert "- train.steps: `3`\n" in (folder / "model" / "README.md").read_text()


@pytest.mark.parametrize(
    ("source", "metadata"),
    [
        ("smollm2-135m", {"base_model": "HuggingFaceTB/SmolLM2-135M-Instruct", "license": "apache-2.0"}),
        ("gemma3-270m", {"base_model": "google/gemma-3-270m", "license": "gemma"}),
        ("owner/name", {"base_model": "owner/name"}),
        ("tiny", {}),
        ("{folder}", {}),  # a folder: it may be anything
    ],
)
def test_the_card_names_the_base_model(tmp_path, source, metadata):
    assert base_model(source.format(folder=tmp_path)) == metadata
