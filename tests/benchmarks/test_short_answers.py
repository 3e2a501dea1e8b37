"""The benchmark of short answers: what it measures, and that it compares two checkouts."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "short_answers.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("short_answers", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_a_part_within_another_counts_only_once(script, monkeypatch):
    now = iter([0.0, 1.0, 3.0, 7.0, 15.0])
    monkeypatch.setattr(script.time, "process_time", now.__next__)
    clock = script.PartClock()
    clock.counts = True
    with clock.part("rest"), clock.part("update"):
        pass
    assert clock.seconds == {"rest": 1.0 + 4.0, "update": 2.0}


def test_products_are_recorded_by_part_with_their_gradients(script):
    recorder = script.ProductRecorder()
    weight = torch.ones(3, 4, requires_grad=True)
    with recorder.part("update"):
        weight.exp() @ torch.ones(4, 2)  # before the steps that count
    recorder.counts = True
    with recorder.part("rest"):
        with recorder.part("update"):
            (weight @ torch.ones(4, 2)).sum().backward()
        torch.ones(5, 6) @ torch.ones(6, 7)
    shapes = {(call[0], call[2][0][1], call[2][1][1]): count for call, count in recorder._calls.items()}
    assert shapes == {("update", (3, 4), (4, 2)): 1, ("update", (3, 2), (2, 4)): 1, ("rest", (5, 6), (6, 7)): 1}
    seconds = recorder.seconds(steps=2)
    assert seconds["update"] > 0
    assert seconds["rest"] > 0
    assert seconds["scoring"] == 0


def test_the_report_has_the_ratio_of_two_checkouts(script, capsys):
    def side(cpu, products):
        parts = dict.fromkeys(script.PARTS, 0.0)
        return {"cpu": parts | {"update": cpu}, "products": parts | {"update": products}, "losses": [1.0]}

    script.report({"this checkout": side(0.2, 0.1), "the other": side(0.5, 0.1)})
    assert "the other / this: step 2.50, host 4.00; losses are equal" in capsys.readouterr().out


def test_the_least_of_several_rounds(script):
    rounds = [
        {"cpu": dict.fromkeys(script.PARTS, a), "products": dict.fromkeys(script.PARTS, b), "losses": [0.5]}
        for a, b in ((3.0, 1.0), (2.0, 1.5))
    ]
    assert script.best(rounds)["cpu"]["rest"] == 2.0
    assert script.best(rounds)["products"]["rest"] == 1.0


def test_a_folder_that_is_no_checkout(tmp_path):
    done = subprocess.run([sys.executable, str(SCRIPT), "--against", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "is no checkout" in done.stderr


@pytest.mark.slow
def test_a_checkout_against_itself():
    command = [sys.executable, str(SCRIPT), "--against", str(ROOT), "--rounds", "1", "--steps", "1", "--tokens", "3"]
    done = subprocess.run([*command, "--prompts", "8", "--samples", "4"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "losses are equal" in done.stdout
