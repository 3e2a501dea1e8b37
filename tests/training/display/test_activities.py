"""A run tells its display what it is doing, from the first import to the picture at its end."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from groupwise.cli import main
from groupwise.model import source, weights
from groupwise.model.source import report_fetches, resolve_source
from groupwise.tasks import Task
from groupwise.training import components
from groupwise.training.components import load_components
from groupwise.training.display import LineDisplay
from tests.training.runs import ROWS, RecordingDisplay, even, small_recipe, small_trainer


class WatchingDisplay(RecordingDisplay):
    """Also keeps what the run was doing, and the completions."""

    def __init__(self):
        super().__init__()
        self.activities, self.counts, self.shown, self.details = [], {}, [], []

    def stage(self, text):
        self.activities.append(text)

    def progress(self, text, done, total, unit="", *, estimated=True, detail=""):
        self.activities.append(text)
        self.counts.setdefault((text, unit), []).append((done, total))
        self.details.append(detail)

    def samples(self, samples):
        super().samples(samples)
        self.shown.append(samples)

    @property
    def order(self):
        """The activities, without repetitions."""
        return [text for text, _ in itertools.groupby(self.activities)]


def test_the_activities_of_a_run(tmp_path):
    examples = [(row["prompt"], "seven") for row in ROWS]
    display, task = WatchingDisplay(), Task("try", ROWS, ROWS[:2], examples=examples)
    settings = {
        "train": {"steps": 1, "mini_batches": 3},
        "sft": {"steps": 2, "batch_size": 4},
        "evaluate": {"samples": 2, "temperature": 1.0},
        "run": {"plot": True, "show_samples": 3},
    }
    small_trainer(tmp_path / "run", settings, task=task, rewards=[even], display=display).run()
    evaluation = ["evaluating", "scoring: even (held-out rows)"]
    assert display.order == [
        "loading the model tiny",
        "building prompts from 12 rows",
        "preparing the model",
        "SFT",
        *evaluation,
        "sampling",
        "scoring",
        "scoring: even",
        "computing log-probs",
        *(f"updating, mini-batch {number} of 3" for number in (1, 2, 3)),
        "saving a checkpoint",
        *evaluation,
        "saving a checkpoint",
        "exporting the model",
        "drawing the curves",
    ]
    assert display.counts["SFT", "supervised steps"] == [(0, 2), (1, 2), (2, 2)]
    assert display.counts["sampling", "completions"][-1] == (12, 12)
    assert display.counts["updating, mini-batch 3 of 3", "completions"][-1] == (4, 4)
    done = [done for done, _ in display.counts["evaluating", "rows"]]
    assert done[0] == 0
    assert done.count(2) >= 2  # two evaluations
    (shown,) = display.shown
    assert len(shown) == 3
    assert [sample.reward for sample in shown] == sorted((sample.reward for sample in shown), reverse=True)
    assert shown[0].prompt.startswith("Say number")


def test_an_evaluation_of_few_rows_moves_with_its_tokens(tmp_path, monkeypatch):
    """All completions are sampled at the same time, so that none is done for a long while."""
    monkeypatch.setattr("groupwise.generate.request.REPORT_SECONDS", 0.0)
    display = WatchingDisplay()
    settings = {"train": {"steps": 1}, "evaluate": {"samples": 2, "max_new_tokens": 5, "before_training": False}}
    settings["sampling"] = {"max_new_tokens": 6}
    small_trainer(tmp_path / "run", settings, display=display).run()
    for name, unit, total in (("evaluating", "rows", 2), ("sampling", "completions", 12)):
        done = [done for done, of in display.counts[name, unit] if of == total]
        assert done == sorted(done)
        assert done[-1] == total
        assert len({value for value in done if 0 < value < total}) >= 2
        assert all(isinstance(value, float) for value in done)
    tokens = [int(detail.split()[0]) for detail in display.details if detail]
    assert len(set(tokens)) >= 5
    assert tokens[-1] <= 2 * 2 * 5


def test_a_step_is_announced_when_it_begins(tmp_path):
    class Positions(RecordingDisplay):
        seen: ClassVar = []

        def stage(self, text):
            self.seen.append((text.partition(":")[0], self._current))

        def begin_step(self, step):
            super().begin_step(step)
            assert self._step == step - 1

    display = Positions()
    settings = {"train": {"steps": 3}, "evaluate": {"every": 2}}
    small_trainer(tmp_path / "run", settings, display=display).run()
    steps = {name: [step for text, step in display.seen if text == name] for name, _ in display.seen}
    assert set(steps["sampling"]) == set(steps["updating"]) == {1, 2, 3}
    assert set(steps["evaluating"]) == {0, 2, 3}
    assert set(steps["saving a checkpoint"]) == {1, 2, 3}


def test_the_steps_of_a_supervised_run_are_counted(tmp_path):
    seen = []

    class Positions(RecordingDisplay):
        def progress(self, text, *_, **__):
            seen.append((text, self._current))

    examples = [(row["prompt"], "seven") for row in ROWS]
    settings = {"train": {"steps": 0}, "sft": {"steps": 3, "batch_size": 4}}
    task = Task("try", ROWS, ROWS[:2], examples=examples)
    small_trainer(tmp_path / "run", settings, task=task, rewards=[even], display=Positions()).run()
    assert [step for text, step in seen if text == "SFT"] == [0, 0, 2, 3]
    assert [text for text, step in seen if step == 3 and text == "evaluating"]


def test_no_completions_are_chosen_if_none_are_shown(tmp_path):
    display = WatchingDisplay()
    settings = {"train": {"steps": 1}, "evaluate": {"before_training": False}, "run": {"show_samples": 0}}
    small_trainer(tmp_path / "run", settings, display=display).run()
    assert display.shown == []


def test_rows_are_read_and_weights_are_fetched_visibly(tmp_path, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n')
    folder, fetched = load_tiny(tmp_path), []

    def fetch(name, *, progress, **_):
        fetched.append(folder)
        progress("download", 40_000_000, 140_000_000)
        progress("convert", 0, None)
        return folder

    monkeypatch.setattr(weights, "cached", lambda *_: fetched[0] if fetched else None)
    monkeypatch.setattr(weights, "fetch", fetch)
    display = WatchingDisplay()
    recipe = small_recipe(
        {"model": {"source": "smollm2-135m"}, "data": {"train": str(rows)}, "rewards": [{"function": "repetition"}]}
    )
    load_components(recipe, display=display)
    assert display.order[:4] == [
        "reading rows",
        "loading the model smollm2-135m",
        "downloading smollm2-135m",
        "converting smollm2-135m",
    ]
    assert display.counts == {("downloading smollm2-135m", "bytes"): [(40_000_000, 140_000_000)]}


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("smollm2-135m", "smollm2-135m is not cached: downloading it, 93 MB\n"),
        ("a/b", "a/b is not cached: downloading it\n"),
    ],
)
def test_a_download_has_one_line_where_activities_have_none(source, text):
    for activities in (True, False):
        stream = io.StringIO()
        report = components._fetch_report(source, LineDisplay(stream, activities=activities))
        for done in range(0, 140_000_000, 70_000_000):
            report("download", done, 140_000_000)
        report("convert", 0, None)
        assert ("is not cached" in stream.getvalue()) is not activities
    assert stream.getvalue() == text


def load_tiny(tmp_path):
    from groupwise.model import load_model_and_tokenizer

    model, tokenizer = load_model_and_tokenizer("tiny")
    model.save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_downloads_from_the_hub_are_reported_and_draw_nothing(tmp_path, monkeypatch, capfd):
    def snapshot_download(name, *, tqdm_class, **_):
        with tqdm_class(desc="Fetching 3 files", total=3) as files, tqdm_class(total=0, unit="B", name="hub") as size:
            size.total = 1000
            size.update(250)
            size.refresh()
            files.update(3)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    reports = []
    with report_fetches(lambda *report: reports.append(report)):
        assert resolve_source("owner/name").path == Path(tmp_path)
    assert ("download", 250, 1000) in reports
    assert {stage for stage, *_ in reports} == {"download"}
    assert {total for *_, total in reports} == {1000}
    assert capfd.readouterr() == ("", "")
    assert source._fetch_progress.get() is None


def test_the_first_text_does_not_wait_for_torch():
    code = (
        "import sys; import groupwise.cli; from groupwise.training.display import make_display, live; make_display();"
        "print([name for name in ('torch', 'transformers', 'pydantic') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"


@pytest.mark.parametrize("command", ["train", "check", "eval"])
def test_commands_read_the_recipe_and_then_show_that_they_are_loading(command, monkeypatch, capsys):
    from groupwise.errors import ConfigError

    display, shown = WatchingDisplay(), []
    monkeypatch.setattr("groupwise.training.display.make_display", lambda *_, **__: display)

    def stage(text):
        shown.append(text)
        raise ConfigError("seen")

    monkeypatch.setattr(display, "stage", stage)
    assert main([command, "recipe.toml"]) == 2
    assert "there is no recipe" in capsys.readouterr().err
    assert shown == []
    assert main([command, "quiz"]) == 2
    assert shown == ["loading PyTorch"]
