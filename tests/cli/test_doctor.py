"""`groupwise doctor`: what it prints, its JSON and its exit status."""

from __future__ import annotations

import json
import shutil

import pytest

from groupwise.analysis.findings import ALL_CHECKS
from groupwise.cli import main
from tests.analysis.sick_runs import run


def paid_for_nothing(completions, **_):
    return [0.5] * len(completions)


@pytest.fixture(scope="module")
def sick(tmp_path_factory):
    """A run whose completions are cut off, and which has a reward of no use beside a good one."""
    from tests.training.runs import even

    folder = tmp_path_factory.mktemp("runs") / "sick"
    run(folder, {"sampling": {"min_new_tokens": 0}, "train": {"steps": 11}}, rewards=[even, paid_for_nothing]).run()
    return folder


def test_a_sick_run(sick, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["doctor", str(sick)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{sick}: step 11 of 11, finished"
    first = lines.index("error  truncated: completions are cut off")
    fields = dict(line.split(maxsplit=1) for line in lines[first + 1 : first + 6])
    assert fields["what"].endswith("of the completions are cut off before they end")
    assert fields["when"] == "steps 10 to 11"
    assert fields["evidence"].startswith("completions/clipped_ratio 0.9")
    assert fields["evidence"].endswith("(step 11)")
    assert fields["example"].startswith("step 11, prompt ")
    assert "Say number" in fields["example"]
    assert fields["change"].startswith("raise sampling.max_new_tokens, now 4, ")
    assert any(line.startswith("warning  reward_constant: ") for line in lines)
    assert lines[-1] == f"2 findings; {len(ALL_CHECKS)} checks over 11 steps and 1 evaluation"


@pytest.mark.parametrize(("severity", "status"), [("error", 1), ("warning", 1), ("never", 0)])
def test_the_exit_status(sick, severity, status):
    assert main(["doctor", str(sick), "--fail-on", severity]) == status


def test_only_warnings(sick, tmp_path):
    folder = shutil.copytree(sick, tmp_path / "run")
    file = folder / "metrics.jsonl"
    file.write_text(file.read_text().replace('"completions/clipped_ratio": 1.0', '"completions/clipped_ratio": 0.0'))
    assert main(["doctor", str(folder)]) == 1
    assert main(["doctor", str(folder), "--fail-on", "error"]) == 0


def test_json(sick, capsys):
    assert main(["doctor", str(sick), "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert (result["status"], result["step"], result["total_steps"], result["evaluations"]) == ("finished", 11, 11, 1)
    assert result["checks"] == list(ALL_CHECKS)
    truncated, constant = result["findings"]
    assert (truncated["name"], truncated["severity"]) == ("truncated", "error")
    assert truncated["steps"] == [10, 11]
    assert truncated["settings"] == ["sampling.max_new_tokens", "data.system_prompt"]
    assert truncated["examples"][0].keys() == {"step", "prompt_number", "sample"}
    assert constant["evidence"] == {"step": 11, "rewards/paid_for_nothing/mean": 0.5}


def test_a_healthy_run_and_the_newest_one(folder, output_of):
    run(folder / "runs" / "healthy", {"train": {"steps": 1}}).run()
    out = output_of("doctor")
    assert out.splitlines()[0] == "runs/healthy: step 1 of 1, finished"
    assert f"no findings; {len(ALL_CHECKS)} checks over 1 step and 1 evaluation" in out
    assert "most checks need 10 steps" in out
    assert ", ".join(ALL_CHECKS) in out


def test_bad_input(folder, error_of):
    assert "nowhere does not exist; give the folder of a run" in error_of("doctor", "nowhere")
    assert "runs does not exist" in error_of("doctor")
    (folder / "foreign").mkdir()
    (folder / "foreign" / "metrics.jsonl").write_text("{}")
    assert "foreign holds no run" in error_of("doctor", "foreign")
    (folder / "file").write_text("")
    assert "file is a file, not the folder of a run" in error_of("doctor", "file")
    assert "--fail-on must be error, warning or never" in error_of("doctor", "foreign", "--fail-on", "always")


def test_text_of_a_model_cannot_change_the_terminal(sick, tmp_path, capsys):
    import pyarrow.parquet

    folder = shutil.copytree(sick, tmp_path / "run")
    for file in (folder / "rollouts").iterdir():
        table = pyarrow.parquet.read_table(file)
        place = table.column_names.index("completion")
        texts = pyarrow.array(["\x1b[31mred\x1b[0m"] * len(table))
        pyarrow.parquet.write_table(table.set_column(place, "completion", texts), file)
    main(["doctor", str(folder)])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "x1b[31mred" in out
