"""What the page asks for, without a server: a real run's answers, damaged and foreign folders, new and deleted runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from groupwise.errors import GroupwiseError, InputError, RunDirError
from groupwise.rundir import json_bytes
from groupwise.viewer import api as api_module
from groupwise.viewer import runs as runs_module
from groupwise.viewer.api import Api, answer_key
from groupwise.viewer.routes.sample import sample_fields
from groupwise.viewer.runs import NotServedError, ServedRuns


@pytest.fixture(autouse=True)
def _always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_module, "REFRESH", 0.0)


def make_run(folder: Path, rows: list[dict[str, Any]], **files: Any) -> Path:
    """A run folder with these metrics, as the trainer would leave it."""
    folder.mkdir(parents=True)
    marker = {"format": 1, "groupwise": "0.2.0", "created": "2026-11-18T09:54:39+0000"}
    for name, value in {"run": marker, "recipe": {"algorithm": "grpo", "task": "quiz"}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def step(number: int, **metrics: Any) -> dict[str, Any]:
    return {"step": number, "reward": number / 10, "num_tokens": 100 * number, "step_time": 2.0, **metrics}


ROWS = [{"step": 0, "eval/accuracy": 0.2, "eval/accuracy_low": 0.1, "eval/accuracy_high": 0.3}, step(1), step(2)]
ROWS += [{"step": 2, "eval/accuracy": 0.6, "eval/accuracy_low": 0.5, "eval/accuracy_high": 0.7}, step(3)]


@pytest.mark.slow
def test_a_real_run_answers_every_path(quiz_run: Path):
    api = Api(ServedRuns([quiz_run.parent]))
    (listed,) = api.get("runs")["runs"]
    assert listed["status"] == "finished"
    assert listed["step"] == listed["total_steps"] == 12
    assert (listed["task"], listed["model"], listed["metric"]) == ("quiz", "tiny", "accuracy")
    for name in api_module.RUN_ROUTES:
        if name in ("", "state", "curves", "metrics", "time", "settings", "findings"):
            json_bytes(api.get(f"run/quiz/{name}" if name else "run/quiz"))
    columns = api.get("run/quiz/metrics")["columns"]
    assert columns["reward"]["steps"] == list(range(1, 13))
    assert columns["eval/accuracy"]["steps"] == [0, 4, 8, 12]
    time = api.get("run/quiz/time")
    assert time["stages"] == ["generate", "reward", "train", "other"]
    assert sum(time["totals"].values()) == pytest.approx(time["seconds"], rel=0.01)
    titles = [section["title"] for section in api.get("run/quiz/curves")["sections"]]
    assert titles[0] == "Main"
    assert "Others" not in titles  # every metric of the quiz has a description
    changed = {one["name"] for one in api.get("run/quiz/settings")["settings"] if one["changed"]}
    assert "sampling.samples_per_prompt" not in changed  # 8 is the default
    assert {"train.steps", "loss.kl_coef", "optimizer.learning_rate"} <= changed


def test_points_by_step_tokens_and_time(tmp_path):
    make_run(tmp_path / "a", ROWS)
    columns = Api(ServedRuns([tmp_path])).get("run/a/metrics", {"names": "reward,eval/accuracy,unknown"})["columns"]
    assert columns == {
        "reward": {"steps": [1, 2, 3], "tokens": [100, 200, 300], "seconds": [2, 4, 6], "values": [0.1, 0.2, 0.3]},
        "eval/accuracy": {"steps": [0, 2], "tokens": [0, 200], "seconds": [0, 4], "values": [0.2, 0.6]},
    }


def test_the_list_has_the_metric_from_first_to_best_to_last(tmp_path):
    rows = [*ROWS, {"step": 3, "eval/accuracy": 0.4, "eval/accuracy_low": 0.3, "eval/accuracy_high": 0.5}]
    make_run(tmp_path / "a", rows)
    (run,) = Api(ServedRuns([tmp_path])).get("runs")["runs"]
    assert run["held_out"] == {"first": 0.2, "best": 0.6, "last": 0.4}
    assert run["reward"] == {"first": 0.1, "best": 0.3, "last": 0.3}
    assert (run["status"], run["step"], run["tokens"], run["seconds"]) == ("stopped", 3, 300, 6.0)


def test_new_runs_appear_and_deleted_ones_go(tmp_path):
    make_run(tmp_path / "a", ROWS)
    api = Api(ServedRuns([tmp_path]))
    make_run(tmp_path / "b", ROWS)
    assert {run["id"] for run in api.get("runs")["runs"]} == {"a", "b"}
    make_run(tmp_path / "c", ROWS)
    assert api.get("run/c/state")["step"] == 3  # a link to a new run needs no list first
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(NotServedError, match="no run 'a'"):
        api.get("run/a/state")
    assert {run["id"] for run in api.get("runs")["runs"]} == {"b", "c"}
    for name in ("b", "c"):
        shutil.rmtree(tmp_path / name)
    assert api.get("runs")["runs"] == []


def test_a_run_that_goes_on_and_one_that_is_rewound_have_a_new_version(tmp_path):
    run = make_run(tmp_path / "a", ROWS)
    api = Api(ServedRuns([run]))
    first = api.get("run/a/state")
    assert api.get("run/a/state") == first
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(step(4)) + "\n" + '{"step": 5, "rew')  # the last line is being written
    later = api.get("run/a/state")
    assert (later["step"], later["version"]) == (4, first["version"] + 1)
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS[:3]))  # resumed from step 2
    rewound = api.get("run/a/state")
    assert (rewound["step"], rewound["version"]) == (2, first["version"] + 2)
    assert api.get("run/a/metrics", {"names": "reward"})["columns"]["reward"]["steps"] == [1, 2]


def test_what_is_computed_is_kept_until_the_run_changes(tmp_path):
    run = make_run(tmp_path / "a", ROWS)
    served = ServedRuns([run]).get("a")
    calls: list[int] = []
    for _ in range(2):
        served.refresh()
        served.cached("key", lambda: calls.append(1))
    assert len(calls) == 1
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(step(4)) + "\n")
    served.refresh()
    served.cached("key", lambda: calls.append(1))
    assert len(calls) == 2


def test_damaged_runs_are_listed_with_their_problem(tmp_path):
    make_run(tmp_path / "good", ROWS)
    bad = make_run(tmp_path / "bad", ROWS)
    (bad / "recipe.json").write_text("{")
    text = (bad / "metrics.jsonl").read_text().splitlines()
    (bad / "metrics.jsonl").write_text("\n".join([text[0], "nonsense", *text[2:]]) + "\n")
    listed = {run["id"]: run for run in Api(ServedRuns([tmp_path])).get("runs")["runs"]}
    assert listed["good"]["problems"] == []
    assert any("metrics.jsonl" in problem for problem in listed["bad"]["problems"])
    assert any("recipe.json" in problem for problem in listed["bad"]["problems"])
    for path in ("", "/curves", "/metrics", "/time", "/settings", "/findings"):
        json_bytes(Api(ServedRuns([bad])).get(f"run/bad{path}"))


def test_nothing_of_a_path_reaches_the_file_system(tmp_path):
    make_run(tmp_path / "runs" / "a", ROWS)
    make_run(tmp_path / "secret", ROWS)
    api = Api(ServedRuns([tmp_path / "runs"]))
    for path in (
        "run/../secret",
        "run/..%2fsecret",
        f"run/{tmp_path}/secret",
        "run/",
        "run",
        "",
        "../runs",
        "run/a/../b",
    ):
        with pytest.raises(NotServedError):
            api.get(path)


def test_ids_are_unique_and_fit_into_a_url(tmp_path):
    names = ["a", "b/a", "<script>alert(1)", "ü b", "a?b=1#c"]
    for name in names:
        make_run(tmp_path / name, ROWS)
    runs = Api(ServedRuns([tmp_path])).get("runs")["runs"]
    identifiers = {run["id"] for run in runs}
    assert len(identifiers) == len(names)
    assert all(part.isascii() and not set(part) & set("<>/ ?#%&") for part in identifiers)
    assert {run["name"] for run in runs} == {Path(name).name for name in names}
    again = {run["id"] for run in Api(ServedRuns([tmp_path])).get("runs")["runs"]}
    assert again == identifiers  # a link is good after a restart


@pytest.mark.parametrize("folder", ["missing", "empty", "file"])
def test_folders_without_runs_are_errors(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match=folder):
        ServedRuns([tmp_path / folder])


def test_bad_queries_say_what_is_allowed(tmp_path):
    make_run(tmp_path / "a", ROWS)
    api = Api(ServedRuns([tmp_path]))
    for value in ("x", "-1", "5", "9" * 40, "１２"):
        with pytest.raises(InputError, match="points must be an integer of at least 10"):
            api.get("run/a/metrics", {"points": value})
    with pytest.raises(InputError, match="1 to 16 runs"):
        api.get("compare", {"runs": ""})
    with pytest.raises(GroupwiseError, match="no run 'zebra'"):
        api.get("compare", {"runs": "a,zebra"})


def test_runs_are_compared(tmp_path):
    make_run(tmp_path / "a", ROWS, recipe={"algorithm": "grpo", "loss": {"kl_coef": 0.1}}, versions={"torch": "1"})
    make_run(tmp_path / "b", ROWS, recipe={"algorithm": "grpo", "loss": {"kl_coef": 0.2}}, versions={"torch": "1"},
             inputs={"sources": {"reward": {"r.py": "ab"}}})  # fmt: skip
    answer = Api(ServedRuns([tmp_path])).get("compare", {"runs": "a,b"})
    assert answer["tables"]["settings"] == [
        {"name": "algorithm", "values": ["grpo", "grpo"], "differs": False},
        {"name": "loss.kl_coef", "values": [0.1, 0.2], "differs": True},
    ]
    assert answer["tables"]["versions"] == [{"name": "torch", "values": ["1", "1"], "differs": False}]
    assert answer["tables"]["inputs"] == [{"name": "r.py, source of reward", "values": [None, "ab"], "differs": True}]
    assert [chart["title"] for chart in answer["sections"][0]["charts"]] == ["eval/accuracy", "reward"]


def test_not_finite_numbers_are_valid_json(tmp_path):
    make_run(tmp_path / "a", [step(1, kl="NaN"), step(2, kl="Infinity"), step(3, kl=1.0)])
    answer = Api(ServedRuns([tmp_path])).get("run/a/metrics", {"names": "kl"})
    assert answer["columns"]["kl"]["values"] == [None, None, 1.0]
    json_bytes(answer)


def test_the_key_of_an_answer_in_a_report():
    assert answer_key("run/a", {}) == "run/a"
    assert answer_key("run/a/groups", {"step": "3", "filter": "", "search": "a b&ü'("}) == (
        "run/a/groups?search=a%20b%26%C3%BC'(&step=3"
    )


def test_the_turns_of_a_conversation():
    call = {"type": "function", "function": {"name": "price", "arguments": {"item": "bread"}}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3.2 euros", "name": "price"},
        {"role": "assistant", "content": "It costs 3.20."},
    ]
    row = {"sample": 0, "completion": "It costs 3.20.", "conversation": json.dumps(messages), "turns": 2.0}
    fields = sample_fields(row, [row], sent=4)
    assert [turn["role"] for turn in fields["turns"]] == ["assistant", "tool", "assistant"]
    assert [turn["text"] for turn in fields["turns"]] == ["", "3.2 ", "It c"]
    assert [turn["hidden"] for turn in fields["turns"]] == [0, 5, 10]
    assert sample_fields(row, [row])["turns"][0]["calls"] == ['{"name": "price", "arguments": {"item": "bread"}}']
    assert fields["extra"] == {"turns": 2.0}


@pytest.mark.parametrize(
    "text", [None, "", "{", "3", '["a"]', '[{"role": "user"}]', '[{"role": 1, "content": 2, "tool_calls": 5}]']
)
def test_what_is_no_conversation_is_shown_as_text(text):
    row = {"sample": 0, "completion": "hello", "conversation": text}
    fields = sample_fields(row, [row])
    assert fields["turns"] is None
    assert fields["completion"] == "hello"
