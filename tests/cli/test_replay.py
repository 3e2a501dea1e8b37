"""`groupwise replay` on the command line."""

from __future__ import annotations

import json
import shutil

import pytest

from groupwise.cli import main

QUIZ = (
    *("train", "quiz", "--run.folder", "run", "--train.steps", "3", "--train.batch_size", "8", "--sft.steps", "20"),
    *("--data.train_rows", "16", "--data.held_out_rows", "4", "--sampling.samples_per_prompt", "8"),
    *("--evaluate.before_training", "false", "--run.checkpoint_every", "1", "--run.keep_checkpoints", "9"),
    *("--run.plot", "false", "--run.tensorboard", "false"),
)


@pytest.fixture(scope="module")
def quiz(tmp_path_factory):
    """The folder with a short run of the quiz, taught enough that every step has a signal; and a file with rewards."""
    folder = tmp_path_factory.mktemp("quiz")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(list(QUIZ)) == 0
    (folder / "rewards.py").write_text(
        "def early(completions, question, **_):\n    return [float('A' <= text <= 'B') for text in completions]\n"
    )
    return folder


@pytest.fixture
def at_quiz(quiz, monkeypatch):
    monkeypatch.chdir(quiz)
    monkeypatch.setenv("COLUMNS", "120")
    return quiz


@pytest.mark.slow
def test_rescoring(at_quiz, output_of, tmp_path):
    words = ("replay", "run", "--steps", "1-2", "--set", "advantages.scale=none", "--reward", "rewards.py:early=0.5")
    text = output_of(*words, "--reward", "correct", "--out", str(tmp_path / "page.md"))
    assert "the recorded settings give the recorded advantages back, for 128 samples" in text
    assert "changed: advantages.scale group → none" in text
    assert "correct × 1 → correct × 1, early × 0.5" in text
    page = (tmp_path / "page.md").read_text()
    assert page.startswith("# run: 128 recorded samples of 2 steps")
    assert "| step | samples |" in page
    result = json.loads(output_of(*words, "--json"))
    assert [step["step"] for step in result["steps"]] == [1, 2]
    assert result["self_check"]["passed"] is True
    assert result["rewards"][1]["weight"] == {"before": None, "after": 0.5}
    text = output_of("replay", "run", "--algorithm", "enhanced_grpo")
    assert "not shown" in text
    assert "sampling.top_k" in text


@pytest.mark.slow
def test_a_step_again(at_quiz, output_of, tmp_path):
    text = output_of("replay", "run", "--step", "3", "--set", "loss.kl_coef=0.1", "--keep", str(tmp_path / "kept"))
    assert "1 replayed step up to step 3 is what the run recorded, bit for bit" in text
    assert "changed: loss.kl_coef 0.3 → 0.1" in text
    assert "weights: " in text
    kept = [str(tmp_path / "kept" / name) for name in ("unchanged", "changed")]
    assert main(["replay", kept[0], "--against", kept[1]]) == 1
    assert main(["replay", kept[0], "--against", "run"]) == 0
    result = json.loads(output_of("replay", "run", "--step", "2", "--json"))
    assert result["reproduced"]["equal"] is True
    assert result["total_weights"] is None


@pytest.mark.slow
def test_a_record_that_is_not_reproduced_has_status_1(at_quiz, tmp_path, capsys):
    shutil.copytree("run", tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    row = json.loads(lines[-2])
    row["loss"] += 1
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join([*lines[:-2], json.dumps(row), lines[-1], ""]))
    assert main(["replay", str(tmp_path / "run"), "--step", "3"]) == 1
    text = capsys.readouterr().out
    assert "NOT REPRODUCED: the replay leaves the recorded run at step 3" in text
    assert "the difference is in its update" in text


@pytest.mark.slow
def test_errors(at_quiz, error_of):
    assert "no use for --step" in error_of("replay", "run", "--step", "2", "--reward", "correct")
    assert "no use for --against" in error_of("replay", "run", "--against", "run", "--set", "loss.kl_coef=0.1")
    assert "belongs to --step N" in error_of("replay", "run", "--keep", "x")
    assert "add --step N" in error_of("replay", "run", "--set", "loss.kl_coef=0.1")
    assert "as in --set loss.kl_coef=0.1" in error_of("replay", "run", "--set", "loss.kl_coef")
    assert "given twice" in error_of("replay", "run", "--set", "loss.kl_coef=1", "--set", "loss.kl_coef=2")
    assert "such as 10-20" in error_of("replay", "run", "--steps", "9-2")
    assert "must be a number" in error_of("replay", "run", "--reward", "correct=x")
    assert "from 0 to below 1" in error_of("replay", "run", "--against", "run", "--tolerance", "2")
    assert "must be an integer" in error_of("replay", "run", "--step", "x")
    assert "does not exist" in error_of("replay", "no-run")
    assert "RUN is missing" in error_of("replay").replace("run_folder", "RUN")
