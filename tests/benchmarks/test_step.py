"""The benchmark of a complete step: its arguments, its table, its limits, and TRL's settings with vLLM."""

from __future__ import annotations

import argparse
import json
import time
from types import SimpleNamespace

import pytest
import step
import step_trl
from step_work import clock, environment, now, run_limits, save_model, timed_generation

from groupwise.generate.engine import Engine
from tests.benchmarks.scripts import run_script

TINY = ("--model", "tiny-shape", "--prompts", "2", "--samples", "2", "--prompt-tokens", "8", "--new-tokens", "4")


def arguments(**changed: object) -> argparse.Namespace:
    values = {
        "device": "cpu", "dtype": "float32", "model": "tiny-shape", "prompts": 2, "samples": 3, "prompt_tokens": 8,
        "new_tokens": 5, "micro": 3, "top_k": 40, "cpu_time": False, "memory_share": 0.25, "repeat": 1,
    }  # fmt: skip
    return argparse.Namespace(**{**values, **changed})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--trl-vllm",), "--trl-vllm needs --against trl"),
        (("--turns", "--no-drop-in"), "--turns compares"),
        (("--turns", "--cpu-time"), "--turns compares"),
        (("--json", "/no/such/folder/x.json"), "there is no folder /no/such/folder"),
        (("--against", "verl"), "invalid choice: 'verl'"),
    ],
)
def test_wrong_arguments(options, words, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["step.py", "--device", "cpu", *options])
    with pytest.raises(SystemExit) as ended:
        step.main()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_cpu_time_is_for_the_cpu(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["step.py", "--device", "cuda", "--cpu-time"])
    with pytest.raises(SystemExit):
        step.main()
    assert "it needs --device cpu" in capsys.readouterr().err


def test_trl_with_vllm_needs_vllm(monkeypatch):
    monkeypatch.setattr("sys.argv", ["step.py", "--device", "cpu", "--against", "trl", "--trl-vllm"])
    with pytest.raises(SystemExit, match="vLLM is not installed"):
        step.main()


def test_cpu_time_does_not_count_waiting():
    args = arguments(cpu_time=True)
    before = now(args)
    time.sleep(0.2)
    assert now(args) - before < 0.1
    assert clock(arguments()) is time.perf_counter


def test_generation_is_timed_only_for_cpu_time():
    original = Engine.generate
    with timed_generation(arguments()) as seconds:
        assert Engine.generate is original
    assert seconds == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "generate", lambda self, *values: len(values))
        counted = Engine.generate
        with timed_generation(arguments(cpu_time=True)) as seconds:
            assert Engine.generate("engine", 1, 2) == 2
        assert len(seconds) == 1
        assert Engine.generate is counted


def test_the_table(capsys):
    ours = {"step": 2.0, "generation": 1.5, "training": 0.5, "peak": 4.0, "tokens": 100}
    theirs = {"step": 6.0, "generation": 3.0, "training": 3.0, "peak": 2.0, "tokens": 100}
    limits = {"step": 1.0, "generation": 0.5, "training": 0.25, "bandwidth": 0.2, "products": 0.3}
    step.report(arguments(), {"groupwise": ours, "trl-vllm": theirs}, limits)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    assert lines[0] == ["seconds", "step", "generation", "training", "peak", "GiB", "tokens/s"]
    assert lines[1] == ["groupwise", "2.000s", "1.500s", "0.500s", "4.0", "50"]
    assert lines[3] == ["limits", "1.000s", "0.500s", "0.250s"]
    assert lines[4] == ["trl-vllm", "/", "3.00×", "2.00×", "6.00×", "0.50×"]
    assert lines[5] == ["groupwise", "/", "limits", "2.00×", "3.00×", "2.00×"]


def test_the_parts_of_a_step_in_cpu_time():
    steps = [{"completions/mean_length": 5, "time/generate": 9.0, "time/train": 9.0}]
    result = step.result_of(arguments(cpu_time=True), steps, [3.0, 5.0, 4.0], [1.0, 1.5, 2.0])
    assert (result["step"], result["generation"], result["training"]) == (4.0, 1.5, 2.5)
    wall = step.result_of(arguments(), steps, [3.0, 5.0, 4.0], [])
    assert (wall["generation"], wall["training"]) == (9.0, 9.0)


def test_short_completions_end_the_comparison():
    with pytest.raises(SystemExit, match="would not be fair"):
        step.result_of(arguments(), [{"completions/mean_length": 4.5}], [1.0], [1.0])


def test_the_limits_of_a_step():
    limits = run_limits(arguments())
    assert limits["generation"] == limits["bandwidth"] + limits["products"]
    assert limits["step"] == limits["generation"] + limits["training"]
    assert min(limits.values()) > 0


@pytest.mark.parametrize("vllm", [True, False])
def test_trl_gets_vllm_in_its_own_process(tmp_path, vllm):
    args = arguments(folder=tmp_path)
    save_model(args)
    library = SimpleNamespace(GRPOConfig=lambda **fields: fields, GRPOTrainer=lambda **fields: fields)
    config = step_trl.make_trl(args, 2, [], library, vllm=vllm)["args"]
    assert config.get("use_vllm", False) is vllm
    if not vllm:
        assert config["generation_kwargs"] == {"min_new_tokens": 5}
        return
    assert config["vllm_mode"] == "colocate"
    assert config["vllm_gpu_memory_utilization"] == 0.25
    assert config["vllm_max_model_length"] == 8 + 5 + 8  # the longest prompt, its completion, and some room
    assert config["generation_kwargs"] == {"ignore_eos": True}


def test_the_environment_of_a_side():
    assert environment("trl-vllm")["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in environment("trl")
    assert "MIMALLOC_PURGE_DELAY" in environment("groupwise")


@pytest.mark.slow
def test_a_complete_run(tmp_path):
    out = tmp_path / "step.json"
    done = run_script("step.py", *TINY, "--repeat", "2", "--no-drop-in", "--cpu-time", "--json", str(out))
    assert done.returncode == 0, done.stderr
    content = json.loads(out.read_text())
    assert list(content["results"]) == ["groupwise"]
    assert content["work"]["model"] == "tiny-shape"
    result = content["results"]["groupwise"]
    assert result["step"] == pytest.approx(result["generation"] + result["training"])
    assert "CPU seconds" in done.stdout
    assert "groupwise / limits" in done.stdout
