"""`groupwise report` of control runs: what is read back, notes, settings, curves as numbers, both files."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from groupwise.cli import main
from groupwise.control.comparison.page import blocks_as_markdown, comparison_page
from groupwise.control.comparison.read import read_comparison
from groupwise.control.comparison.report import report_blocks, report_curves
from groupwise.control.comparison.runs import mean_curve
from groupwise.control.comparison.write import plot_file_name
from groupwise.control.settings import config_of
from groupwise.errors import ControlError
from groupwise.rundir import RunDir, write_csv, write_json


def write_control_run(folder, algorithm="grpo-fast", seed=0, returns=(20.0, 400.0), environment="CartPole-v1", **more):
    """A finished run with these greedy returns; ``more`` are diagnostics of its evaluations."""
    config = config_of(environment=environment, algorithm=algorithm, seed=seed, steps=2000, starts=4)
    rows = [
        {
            "update": place,
            "env_steps": 1000 * place,
            "cpu_seconds": 0.5 * place,
            "greedy_return": value,
            "sampled_return": value / 2,
            **more,
        }
        for place, value in enumerate(returns)
    ]
    with RunDir.create(folder) as run:
        run.write_json("config.json", config.model_dump(mode="json"))
    write_csv(folder / "progress.csv", rows)
    write_json(folder / "result.json", {"threshold": 475.0, "solved_at": None})
    return folder


def write_comparison(folder):
    for algorithm in ("ppo-fast", "grpo-fast:same_start=false"):
        for seed in range(2):
            place = folder / "CartPole-v1" / algorithm.replace(":", "_") / f"seed-{seed}"
            write_control_run(place, algorithm, seed, returns=(20.0, 100.0 * (seed + 1)))
    rows = [
        {"environment": "CartPole-v1", "algorithm": name, "seed": seed}
        for name in ("ppo-fast", "grpo-fast:same_start=false")
        for seed in (0, 1)
    ]
    write_csv(folder / "runs.csv", rows)
    return folder


@pytest.fixture
def comparison(tmp_path):
    return write_comparison(tmp_path / "duel")


def notes_of(folder):
    blocks = report_blocks(read_comparison(folder))
    return next((block["list"] for block in blocks if "list" in block), [])


def test_a_comparison_is_read_back_in_its_order(comparison):
    read = read_comparison(comparison)
    assert [(run.algorithm, run.seed) for run in read.runs] == [
        ("ppo-fast", 0), ("ppo-fast", 1), ("grpo-fast:same_start=false", 0), ("grpo-fast:same_start=false", 1)
    ]  # fmt: skip
    assert read.runs[1].last("greedy_return") == 200.0
    (comparison / "runs.csv").unlink()
    assert [run.algorithm for run in read_comparison(comparison).runs[::2]] == [
        "grpo-fast:same_start=false",
        "ppo-fast",
    ]


def test_the_page_is_that_of_the_comparison_with_notes_and_settings(comparison):
    read = read_comparison(comparison)
    blocks, plots = report_blocks(read), {"CartPole-v1": "CartPole-v1.png"}
    page = comparison_page(read.groups, plots, starts=4)
    without = [block for block in blocks if "list" not in block and block.get("heading") not in ("Notes", "Settings")]
    assert blocks_as_markdown(without[:-1], plots) == page
    rows = {row[0]: row[1:] for row in blocks[-1]["table"]["rows"]}
    assert blocks[-1]["table"]["header"] == ["setting", "ppo-fast", "grpo-fast:same_start=false"]
    assert rows["environment steps"] == ["2,000", "2,000"]
    assert rows["same_start"] == ["–", "false"]
    assert notes_of(comparison) == [
        "There are only 2 seeds per algorithm: a verdict needs 6, and fewer cannot give p below 0.05."
    ]


def test_curves_are_the_mean_curves(comparison):
    groups = read_comparison(comparison).groups
    (charts,) = report_curves(groups).values()
    assert [(chart["y_label"], chart["x_label"]) for chart in charts] == [
        ("greedy return", "environment steps"), ("greedy return", "CPU seconds"),
        ("sampled return", "environment steps"), ("sampled return", "CPU seconds"),
    ]  # fmt: skip
    series = charts[0]["series"][0]
    curve = mean_curve(groups["CartPole-v1"]["ppo-fast"], "env_steps", "greedy_return")
    assert (series["name"], charts[0]["threshold"]) == ("ppo-fast (2 runs)", 475.0)
    assert (series["x"], series["mean"]) == ([0.0, 1000.0], [20.0, 150.0])
    assert (series["low"], series["high"]) == (curve.mean.low.tolist(), curve.mean.high.tolist())


def test_notes_about_runs_that_learnt_little_or_lost_it(tmp_path):
    folder = tmp_path / "duel"
    for seed, returns in enumerate([(20, 400, 30), (20, 300, 310)]):
        write_control_run(
            folder / "CartPole-v1" / "grpo" / f"seed-{seed}", "grpo", seed, returns, zero_spread_groups=0.75
        )
    first, second = notes_of(folder)
    assert "grpo on CartPole-v1: in 75 % of the groups all returns are equal" in first
    assert "1 of 2 runs ended far below the best return (seed 0)" in second


def test_unfinished_and_damaged_runs_are_left_out_with_a_note(comparison):
    (comparison / "CartPole-v1" / "ppo-fast" / "seed-0" / "result.json").unlink()
    (comparison / "CartPole-v1" / "ppo-fast" / "seed-1" / "progress.csv").write_text("env_steps\nx\n")
    read = read_comparison(comparison)
    assert {run.algorithm for run in read.runs} == {"grpo-fast:same_start=false"}
    assert any("seed-0 is not finished" in note for note in read.notes)
    assert any("seed-1 cannot be read" in note for note in read.notes)
    shutil.rmtree(comparison / "CartPole-v1" / "grpo-fast_same_start=false")
    with pytest.raises(ControlError, match="no finished run to report"):
        read_comparison(comparison)


def embedded(path):
    return json.loads(re.search(r'id="report">(.*?)</script>', path.read_text(), re.DOTALL)[1])


def test_the_files_of_the_command(comparison, tmp_path, capsys):
    out, markdown = tmp_path / "duel.html", tmp_path / "text" / "duel.md"
    (comparison / plot_file_name("CartPole-v1")).write_bytes(b"\x89PNG")
    assert main(["report", str(comparison), "--out", str(out), "--markdown", str(markdown)]) == 0
    assert embedded(out)["start"] == "#/comparison"
    text = markdown.read_text()
    assert "![returns on CartPole-v1](../duel/CartPole-v1.png)" in text
    assert "## Notes\n\n- There are only 2 seeds" in text


def test_one_run_also_before_its_end(tmp_path, capsys):
    folder = write_control_run(tmp_path / "pole")
    assert main(["report", str(folder)]) == 0
    assert (folder / "report.html").exists()
    (folder / "result.json").unlink()
    assert main(["report", str(folder), "--markdown", str(tmp_path / "pole.md")]) == 0
    text = (tmp_path / "pole.md").read_text()
    assert "The run is not finished" in text
    assert "solved" not in text.split("## CartPole-v1")[1].split("##")[0]  # which threshold is not known
