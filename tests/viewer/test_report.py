"""`groupwise report`: one file that needs nothing else, opened from disk in a real browser; what it holds."""

from __future__ import annotations

import json
import re
import shutil
import threading
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from groupwise.cli import main
from groupwise.viewer.report import Answers, chosen_steps, run_report
from tests.analysis.written_runs import sample, write_run
from tests.control.test_report import write_comparison
from tests.training.preference.test_run import offline_trainer, write_pairs
from tests.training.runs import run_steps, small_trainer
from tests.training.test_sft import SUPERVISED
from tests.training.test_sft import TASK as FORM

HOSTILE = (
    "</script><script>window.attacked = true</script><img src='http://example.org/x' onerror='window.attacked = 1'>"
)
EXPORT = {"run": {"checkpoint_every": 0, "resumable": False}}


def embedded(html):
    """The answers in a report's file, with shared parts in their places."""
    data = json.loads(re.search(r'<script type="application/json" id="report">(.*?)</script>', html, re.DOTALL)[1])

    def resolve(value):
        if isinstance(value, list):
            return [resolve(entry) for entry in value]
        if isinstance(value, dict):
            return (
                resolve(data["shared"][value["$"]])
                if "$" in value
                else {key: resolve(entry) for key, entry in value.items()}
            )
        return value

    return {key: resolve(answer) for key, answer in data["answers"].items()} | {"left out": data["left_out"]}


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory):
    """Two steps of two prompts, whose texts are HTML."""
    rows = [
        sample(prompt, number, float(number), prompt=HOSTILE, completion=HOSTILE * (number + 1), advantage=number - 0.5)
        for prompt in range(2)
        for number in range(2)
    ]
    steps = [{"reward": 0.5, "entropy": 1.0 - step / 4, "step_time": 1.0, "num_tokens": 10} for step in range(3)]
    evaluation = {"accuracy": 0.5, "accuracy_low": 0.4, "accuracy_high": 0.6}
    return write_run(
        tmp_path_factory.mktemp("runs") / "hostile",
        settings={"run": {"name": "hostile"}},
        steps=steps,
        rollouts={1: rows, 2: rows, 3: rows},
        evaluations={0: evaluation, 3: evaluation},
    )


# What the file holds


def test_parts_that_occur_again_are_stored_once():
    text, numbers = "a long text that occurs in several answers, " * 3, list(range(40))
    answers = Answers(10_000)
    assert answers.add("one", {"rows": [{"text": text, "numbers": numbers, "value": 0.123456789}], "nothing": None})
    before = answers.size
    assert answers.add("two", {"rows": [{"text": text, "numbers": numbers, "value": 0.123456789}], "other": True})
    assert answers.size - before < 60
    texts = ",".join(f"{json.dumps(key)}:{answer}" for key, answer in answers.texts.items())
    data = f'{{"answers":{{{texts}}},"shared":[{",".join(answers.shared)}],"left_out":[]}}'
    html = f'<script type="application/json" id="report">{data}</script>'
    row = {"text": text, "numbers": numbers, "value": 0.123457}
    assert embedded(html) == {
        "one": {"rows": [row], "nothing": None},
        "two": {"rows": [row], "other": True},
        "left out": [],
    }


def test_what_does_not_fit_leaves_nothing_behind():
    answers = Answers(500)
    assert answers.add("one", {"text": "a" * 100})
    size, shared = answers.size, list(answers.shared)
    assert not answers.add("two", {"parts": [{"text": "b" * 100}, {"text": "c" * 600}]})
    assert (answers.size, answers.shared, list(answers.texts)) == (size, shared, ["one"])
    assert answers.add("three", {"parts": [{"text": "b" * 100}]})


def test_the_chosen_steps():
    finding = {"examples": [{"step": 7}, {"step": 5000}]}
    steps = chosen_steps(range(1, 1001), [finding])
    assert len(steps) == 12
    assert {1, 7, 1000} <= set(steps)
    assert max(later - earlier for earlier, later in pairwise(steps)) <= 200
    assert chosen_steps([3, 9], []) == [3, 9]
    assert chosen_steps([], [finding]) == []


def test_the_file_requests_nothing_and_runs_nothing_but_its_own_scripts(hostile_run):
    html = run_report(hostile_run).html
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)[1]
    assert policy.startswith("default-src &#x27;none&#x27;; script-src &#x27;sha256-")
    assert "unsafe" not in policy
    assert "http:" not in policy
    assert html.count("</script") == html.count("<script") == 1 + policy.split("style-src")[0].count("sha256-")
    assert HOSTILE[:20] not in html
    tags = Tags()
    tags.feed(html)
    addresses = [value for _, attributes in tags.found for name, value in attributes if name in ("src", "href")]
    assert [address.split(",")[0] for address in addresses] == ["data:image/svg+xml;base64", "#content"]


class Tags(HTMLParser):
    """The elements of a page with their attributes."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, attrs))


def test_the_answers_of_the_page(hostile_run):
    answers = embedded(run_report(hostile_run).html)
    assert answers["run/hostile"]["path"] == "hostile"  # not where it is on this machine
    assert answers["run/hostile/metrics"]["columns"]["entropy"]["values"] == [1.0, 0.75, 0.5]
    group = answers["run/hostile/group?prompt=1&step=3"]
    assert [one["completion"] for one in group["samples"]] == [HOSTILE, HOSTILE * 2]
    assert answers["run/hostile/summary"]["samples"][0]["step"] == 1
    assert answers["left out"] == []


def test_a_small_limit_is_kept_and_what_is_left_out_is_said(tmp_path):
    def rows(step):
        return [sample(0, number, float(number), completion=f"{step} {number} {HOSTILE * 50}") for number in range(4)]

    steps = range(1, 15)
    folder = write_run(tmp_path / "run", steps=[{"reward": 0.5}] * 14, rollouts={step: rows(step) for step in steps})
    complete = run_report(folder)
    assert complete.left_out == ["samples of 2 of 14 steps"]
    limit = len(complete.html.encode()) - 100_000
    report = run_report(folder, limit=limit)
    assert limit - 100_000 < len(report.html.encode()) < limit
    assert any("of groups, for the size" in sentence for sentence in report.left_out[1:])
    assert embedded(report.html)["left out"] == report.left_out


def test_secrets_of_the_recipe_do_not_appear(tmp_path):
    secret = "sk-4f9d2c71aa"
    options = {"model": "m", "base_url": "http://127.0.0.1:1/v1", "api_key": secret}
    folder = write_run(
        tmp_path / "run", settings={"rewards": [{"function": "judge", "options": options}]}, steps=[{"reward": 0.5}]
    )
    markdown = tmp_path / "run.md"
    assert main(["report", str(folder), "--out", str(tmp_path / "run.html"), "--markdown", str(markdown)]) == 0
    for path in (tmp_path / "run.html", markdown):
        text = path.read_text()
        assert secret not in text
        assert "judge" in text


# Runs that are not as they should be


def test_an_interrupted_and_damaged_run(tmp_path, hostile_run):
    folder = tmp_path / "hostile"
    shutil.copytree(hostile_run, folder)
    (folder / "finished.json").unlink()
    (folder / "recipe.json").write_text("{")
    path = folder / "rollouts" / "step-000003.parquet"
    path.write_bytes(path.read_bytes()[:100])
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "reward": 0.')  # killed while it wrote
    answers = embedded(run_report(folder).html)
    assert answers["run/hostile"]["status"] == "stopped"
    assert any("recipe.json" in problem for problem in answers["run/hostile"]["problems"])
    assert any("step-000003.parquet" in problem for problem in answers["run/hostile/summary"]["problems"])
    assert "run/hostile/groups?step=2" in answers
    assert "run/hostile/groups?step=3" not in answers


@pytest.mark.slow
def test_while_checkpoints_and_rollouts_are_deleted(tmp_path, hostile_run):
    folder = tmp_path / "hostile"
    shutil.copytree(hostile_run, folder)
    ended = threading.Event()

    def prune():
        number = 0
        while not ended.is_set():
            number += 1
            (folder / f"checkpoint-{number}").mkdir()
            shutil.copy(folder / "rollouts" / "step-000001.parquet", folder / "rollouts" / "step-000009.parquet")
            shutil.rmtree(folder / f"checkpoint-{number}")
            (folder / "rollouts" / "step-000009.parquet").unlink()

    pruning = threading.Thread(target=prune)
    pruning.start()
    try:
        for _ in range(5):
            assert "run/hostile/groups?step=2" in embedded(run_report(folder).html)
    finally:
        ended.set()
        pruning.join()


@pytest.mark.slow
def test_runs_of_pairs_alone_and_of_examples_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("GROUPWISE_CACHE", str(tmp_path / "cache"))
    run_steps(offline_trainer(tmp_path / "pairs", write_pairs(tmp_path), EXPORT), 2)
    run_steps(small_trainer(tmp_path / "sft", SUPERVISED, EXPORT, {"sft": {"epochs": 2}}, task=FORM), 2)
    for name, metric in (("pairs", "preference/loss"), ("sft", "loss")):
        markdown = tmp_path / f"{name}.md"
        assert (
            main(["report", str(tmp_path / name), "--out", str(tmp_path / f"{name}.html"), "--markdown", str(markdown)])
            == 0
        )
        answers = embedded((tmp_path / f"{name}.html").read_text())
        assert answers[f"run/{name}"]["rollout_steps"] == []
        assert metric in answers[f"run/{name}/metrics"]["columns"]
        assert f"`{metric}`" in markdown.read_text()


# The command


def test_the_files_of_the_command(hostile_run, tmp_path, capsys):
    out, markdown = tmp_path / "new" / "report.html", tmp_path / "report.md"
    command = ["report", str(hostile_run), "--out", str(out), "--markdown", str(markdown)]
    assert main(command) == 0
    assert "needs no server and no network" in capsys.readouterr().out
    assert out.read_text().startswith("<!DOCTYPE html>")
    assert markdown.read_text().startswith("# hostile")
    assert main(command) == 2
    assert "exists already; add --force" in capsys.readouterr().err
    assert main([*command, "--force"]) == 0


def test_the_default_file_is_in_the_run_and_is_replaced(tmp_path, hostile_run, capsys):
    folder = tmp_path / "hostile"
    shutil.copytree(hostile_run, folder)
    for _ in range(2):
        assert main(["report", str(folder)]) == 0
    assert (folder / "report.html").stat().st_size > 1_000_000
    assert {path.name for path in folder.iterdir()} - {path.name for path in hostile_run.iterdir()} == {"report.html"}


def refused(capsys, *words):
    assert main(["report", *map(str, words)]) == 2
    return capsys.readouterr().err


def test_bad_folders_and_files(tmp_path, hostile_run, capsys):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.json").write_text("[]")
    (tmp_path / "file").write_text("")
    out = tmp_path / "out.html"
    assert "does not exist; give the folder of a run" in refused(capsys, tmp_path / "none", "--out", out)
    assert "is not a folder" in refused(capsys, tmp_path / "file", "--out", out)
    assert "holds no run" in refused(capsys, tmp_path / "foreign", "--out", out)
    assert "holds no run" in refused(capsys, hostile_run.parent, "--out", out)
    assert "is a folder" in refused(capsys, hostile_run, "--out", tmp_path / "foreign")
    assert "is a file" in refused(capsys, hostile_run, "--out", tmp_path / "file" / "report.html")
    assert "same file" in refused(capsys, hostile_run, "--out", out, "--markdown", out)
    assert "at least 2" in refused(capsys, hostile_run, "--out", out, "--max-size", "1")
    assert not out.exists()


# In a browser, from disk


@pytest.fixture(scope="module")
def hostile_file(hostile_run, tmp_path_factory):
    path = tmp_path_factory.mktemp("reports") / "hostile.html"
    path.write_text(run_report(hostile_run).html)
    return path.as_uri()


def show(page, address, view):
    page.goto(f"{address}#/run/hostile/{view}")
    page.wait_for_selector(f".view-{view} *")


@pytest.mark.slow
def test_a_report_opens_from_disk_and_requests_nothing(page, hostile_file):
    page.goto(hostile_file)
    page.wait_for_selector(".view-summary .chart[data-drawn]")
    assert page.locator("nav a[aria-current]").inner_text() == "Summary"
    assert page.locator(".summary-sample .sample-text").nth(1).inner_text() == HOSTILE * 2
    for view in page.locator("nav a").evaluate_all("links => links.map(link => link.dataset.view)"):
        show(page, hostile_file, view)
        page.wait_for_selector(".loading", state="detached")
        assert page.locator(".box.error").count() == 0, view
    assert page.evaluate("window.attacked") is None
    assert page.locator("main img, main script").count() == 0
    assert {address.split("#")[0] for address in page.requested if not address.startswith("data:")} == {hostile_file}


@pytest.mark.slow
def test_groups_of_a_report(page, hostile_file):
    show(page, hostile_file, "groups")
    page.wait_for_selector(".group")
    assert page.locator(".group").count() == 2
    assert page.locator("input[type=search]").count() == 0  # a report cannot search all steps
    assert HOSTILE in page.locator(".group .sample-text").nth(1).inner_text()
    page.get_by_role("button", name="previous step").click()
    page.wait_for_selector('.group[data-step="2"]')
    page.goto(f"{hostile_file}#/run/hostile/group?step=999&prompt=0")
    page.wait_for_selector(".box.error")
    assert "does not hold that part" in page.locator(".box.error").inner_text()


@pytest.mark.slow
def test_a_report_is_light_on_paper_and_dark_on_a_dark_screen(page, hostile_file):
    page.emulate_media(color_scheme="dark")
    page.goto(hostile_file)
    page.wait_for_selector(".view-summary .chart[data-drawn]")
    theme = "document.documentElement.dataset.theme"
    assert page.evaluate(theme) == "dark"
    page.emulate_media(media="print", color_scheme="dark")
    page.wait_for_selector('html[data-theme="light"]')


@pytest.mark.slow
def test_a_comparison_of_control_runs(tmp_path, page):
    out = tmp_path / "duel.html"
    assert main(["report", str(write_comparison(tmp_path / "duel")), "--out", str(out)]) == 0
    page.goto(out.as_uri())
    page.wait_for_selector(".view-comparison .chart[data-drawn]")
    assert page.locator(".view-comparison .chart[data-drawn]").count() == 4
    assert page.locator(".view-comparison table").first.locator("tbody tr").count() == 2
    assert "Final greedy return, pair by pair" in page.locator("main").inner_text()
    assert {address for address in page.requested if not address.startswith("data:")} == {out.as_uri()}
