"""The table at the end of a run, and what a run that was stopped says about going on."""

from __future__ import annotations

import os
import signal

import pytest

from groupwise.training.trainer import Callback
from tests.training.runs import RecordingDisplay, run_steps, small_trainer

QUICK = {"train": {"steps": 3, "batch_size": 2}, "sampling": {"max_new_tokens": 4}, "evaluate": {"max_new_tokens": 2}}


class Stop(Callback):
    """Ctrl-C in the second step."""

    def on_step(self, trainer, report):
        if report.step == 2:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("before_training", [True, False])
def test_one_evaluation_is_one_column(tmp_path, before_training):
    display = RecordingDisplay()
    changes = {"train": {"steps": 2}, "evaluate": {"before_training": before_training, "every": 0}}
    small_trainer(tmp_path / "run", QUICK, changes, display=display).run()
    (header,) = [line for line in display.summary if isinstance(line, tuple) and "held-out" in line[0]]
    both = ("before training", "after 2 steps")
    assert header[1:] == (both if before_training else ("after 2 steps (first)",))


@pytest.mark.parametrize("resumable", [True, False])
def test_a_stopped_run_recommends_what_works(tmp_path, monkeypatch, resumable):
    monkeypatch.chdir(tmp_path)
    display = RecordingDisplay()
    changes = {"run": {"resumable": resumable}}
    result = small_trainer(tmp_path / "run", QUICK, changes, callbacks=[Stop()], display=display).run()
    assert result.exit_status == 130
    (line,) = [
        line for line in display.summary if isinstance(line, str) and line.startswith("stopped after step 2 of 3")
    ]
    assert ("--resume" in line) == resumable
    if not resumable:
        source = line.rpartition("--model.source ")[2]
        assert source == os.path.join("run", "checkpoint-2", "policy")
        assert small_trainer(tmp_path / "new", QUICK, {"model": {"source": source}}).run().steps == 3


@pytest.mark.parametrize("samples", [1, 2])
def test_evaluations_with_other_settings_are_not_compared(tmp_path, samples):
    changes = {"train": {"steps": 2}, "evaluate": {"every": 0}}
    run_steps(small_trainer(tmp_path / "run", QUICK, changes), 1)
    display = RecordingDisplay()
    now = {"evaluate": {"samples": samples}}
    small_trainer(tmp_path / "run", QUICK, changes, now, resume=True, display=display).run()
    notes = [line for line in display.summary if isinstance(line, str) and "do not compare" in line]
    assert [note.rpartition(" ")[2] for note in notes] == ([] if samples == 1 else ["evaluate.samples"])
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert ("Do not compare the two columns: the run was resumed with another `evaluate.samples`" in card) == bool(
        notes
    )


def test_a_run_that_was_stopped_before_its_first_step(tmp_path):
    class StopAtOnce(Callback):
        def on_evaluation(self, trainer, evaluation):
            os.kill(os.getpid(), signal.SIGINT)

    display = RecordingDisplay()
    small_trainer(tmp_path / "run", QUICK, callbacks=[StopAtOnce()], display=display).run()
    assert "stopped before the first step; --resume starts from the beginning" in display.summary
