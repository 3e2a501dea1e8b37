"""groupwise beside vLLM: cells, memory, the table, and complete runs with a stand-in for vLLM."""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from types import SimpleNamespace

import against_vllm
import pytest
from against_vllm import (
    HEADER,
    Cell,
    compare,
    in_turn,
    memory_of,
    memory_share,
    one_after_the_other,
    row,
    samplers,
    start_together,
)
from common import counts, shapes
from sides import Job, SideError, SideProcess

from tests.benchmarks.scripts import run_script

ARGS = argparse.Namespace(
    device="cpu", dtype="float32", prompt_tokens=10, samples=3, new_tokens=5, repeat=2, eager=False, timeout=60,
    json=None, memory_share=None, together=False, shapes=["tiny-shape"], model=None, prompts=[2, 4],
    only=["topk40", "plain"],
)  # fmt: skip
LIMITS = {"bandwidth": 0.1, "arithmetic": 0.3, "copy_rate": 1e9, "at_matmul_rate": 0.2}
SMALL = ("--shapes", "tiny", "--samples", "2", "--new-tokens", "4", "--prompt-tokens", "6", "--repeat", "1")


class FakeSide:
    """A side's process: answers take one second, then two, and so on."""

    def __init__(self, order: list[str], side: str, fails_at: int | None = None) -> None:
        self.order, self.side, self.fails_at, self.calls = order, side, fails_at, 0

    def ask(self, kind: str, job: Job) -> dict[str, object]:
        self.order.append(f"{self.side} {kind} {len(job.prompt_lengths)}")
        if kind == "limits":
            return LIMITS
        self.calls += 1
        if self.calls == self.fails_at:
            raise SideError(f"{self.side}: out of memory")
        return {"seconds": float(self.calls), "peak": 7}

    def __enter__(self) -> FakeSide:
        return self

    def __exit__(self, *_: object) -> None:
        self.order.append(f"{self.side} ends")


def test_samplers_of_cells():
    jobs = [Cell("tiny-shape", 3, name).job(ARGS) for name in ("plain", "topk7", "topk40-logprobs", "plain-logprobs")]
    assert [(job.top_k, job.logprobs) for job in jobs] == [(0, False), (7, False), (40, True), (0, True)]
    assert jobs[0].prompt_lengths == [9, 10, 11]
    assert jobs[0].completion_lengths == [5] * 9
    assert jobs[0].tokens == 45


@pytest.mark.parametrize("text", ["topk", "topk0", "topkx", "plain,", "beam", "topk40-", "topk40-logprobs-logprobs"])
def test_unknown_samplers(text):
    with pytest.raises(argparse.ArgumentTypeError, match="allowed: plain"):
        samplers(text)


@pytest.mark.parametrize("text", ["0", "1,", "", "-1", "2,x", "1.5"])
def test_wrong_counts(text):
    with pytest.raises(argparse.ArgumentTypeError):
        counts(text)


def test_lists_of_arguments():
    assert counts("16, 64,16") == [16, 64]
    assert shapes("135m,qwen2.5-7b-shape") == ["smollm2-135m-shape", "qwen2.5-7b-shape"]
    with pytest.raises(argparse.ArgumentTypeError, match="unknown shape '9b'"):
        shapes("9b")


def test_both_sides_take_turns():
    order: list[str] = []
    sides = {side: FakeSide(order, side) for side in ("vllm", "groupwise")}
    result = in_turn(ARGS, Cell("tiny-shape", 2, "plain").job(ARGS), sides)
    assert order == ["groupwise generate 2", "vllm generate 2"] * 3 + ["groupwise limits 2"]
    assert result["seconds"] == {"groupwise": [2.0, 3.0], "vllm": [2.0, 3.0]}  # the first call is not counted
    assert result["first_call"] == {"groupwise": 1.0, "vllm": 1.0}
    assert result["limits"] == LIMITS


def test_one_side_after_the_other_ends_the_first_before_the_second_starts():
    order: list[str] = []
    jobs = {cell: cell.job(ARGS) for cell in (Cell("tiny-shape", 2, "plain"), Cell("tiny-shape", 4, "plain"))}
    measured = dict(one_after_the_other(ARGS, jobs, lambda side: FakeSide(order, side)))
    assert order.index("vllm ends") == 6
    assert not any(entry.startswith("groupwise") for entry in order[:6])
    assert [cell.prompts for cell in measured] == [2, 4]


def test_a_cell_that_fails_leaves_the_others():
    jobs = {cell: cell.job(ARGS) for cell in (Cell("tiny-shape", 2, "plain"), Cell("tiny-shape", 4, "plain"))}

    def start(side: str) -> FakeSide:
        return FakeSide([], side, fails_at=4 if side == "vllm" else None)

    first, second = dict(one_after_the_other(ARGS, jobs, start)).values()
    assert first["seconds"]["vllm"] == [2.0, 3.0]
    assert isinstance(second, SideError)


def test_the_share_of_the_memory():
    assert memory_share(10, 100, 5) == 0.175
    assert memory_share(33, 100, 5) == pytest.approx(0.4625)
    assert memory_share(35, 100, 5) is None  # twice 48.75 is more than 95 of 100


def test_the_memory_of_a_job_by_hand():
    need = memory_of(ARGS, "tiny-shape", [Cell("tiny-shape", prompts, "plain").job(ARGS) for prompts in (2, 4)])
    tokens = (8 + 9 + 10 + 11) + 4 * 3 * 5
    assert need.cache == tokens * (2 * 2 * 2 * 32) * 4
    assert need.total == 279_552 * 4 + need.cache + 3 * 4 * 12 * 259


def test_a_line_of_the_table():
    result = {"seconds": {"groupwise": [1.0, 3.0, 2.0], "vllm": [6.0, 5.0, 9.0]}, "limits": LIMITS}
    line = row(ARGS, Cell("smollm2-135m-shape", 16, "topk40"), result)
    assert line.split() == ["135m", "16", "×", "3", "topk40", "2.000", "s", "6.000", "s", "3.00×", "0.100", "s",
                            "0.300", "s", "0.200", "s", "5.00", "15.00"]  # fmt: skip
    assert len(line) == len(HEADER.strip("\n"))


def test_results_of_each_model_are_kept_when_the_next_one_is_interrupted(tmp_path, monkeypatch, capsys):
    args = argparse.Namespace(**{**vars(ARGS), "json": tmp_path / "r.json", "shapes": ["tiny-shape", "x"]})
    asked: list[str] = []

    def measure(args, cells):
        asked.extend(cell.name for cell in cells)
        if cells[0].model == "x":
            raise KeyboardInterrupt
        for cell in cells:
            yield cell, {"seconds": {"groupwise": [1.0], "vllm": [2.0]}, "limits": LIMITS}

    monkeypatch.setattr(against_vllm, "measure", measure)
    monkeypatch.setattr(against_vllm, "require_vllm", lambda device: "0.32.0")
    with pytest.raises(KeyboardInterrupt):
        compare(args)
    assert len(json.loads(args.json.read_text())["results"]) == 4
    asked.clear()
    with pytest.raises(KeyboardInterrupt):
        compare(args)
    assert {name.split()[0] for name in asked} == {"x"}
    assert capsys.readouterr().out.count("2.00×") == 8


def test_a_failure_is_reported_and_not_kept(tmp_path, monkeypatch, capsys):
    args = argparse.Namespace(**{**vars(ARGS), "json": tmp_path / "r.json"})
    monkeypatch.setattr(against_vllm, "measure", lambda args, cells: [(cells[0], SideError("vllm: out of memory"))])
    monkeypatch.setattr(against_vllm, "require_vllm", lambda device: "0.32.0")
    assert not compare(args)
    assert "not measured: tiny-shape 2 topk40: vllm: out of memory" in capsys.readouterr().out
    assert not args.json.exists()


def test_a_side_that_takes_too_long_is_killed(tmp_path):
    with pytest.raises(SideError, match=r"took more than 0\.1 s"):
        SideProcess("groupwise", tmp_path, {"device": "cpu"}, 0.1)


def test_vllm_must_be_installed():
    done = run_script("generate.py", "--against", "vllm", *SMALL)
    assert done.returncode == 1
    assert "vLLM is not installed" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_complete_run_and_what_is_left_of_it(tmp_path):
    out, log = tmp_path / "r.json", tmp_path / "log"
    options = ("--against", "vllm", *SMALL, "--prompts", "2,3", "--only", "topk5,plain-logprobs", "--json", str(out))
    done = run_script("generate.py", *options, stand_in=True, STAND_IN_LOG=str(log))
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())["results"]
    assert list(results) == [
        f"tiny-shape {prompts} {name}" for prompts in (2, 3) for name in ("topk5", "plain-logprobs")
    ]
    assert all(set(result["seconds"]) == {"groupwise", "vllm"} for result in results.values())
    assert all(result["limits"]["bandwidth"] > 0 for result in results.values())
    assert "FlashInfer's sampler: not installed" in done.stdout
    started = log.read_text()
    assert started.count("start") == 1  # one engine for all cells of a model
    assert '"max_num_seqs": 6' in started
    assert '"disable_log_stats": true' in started  # nothing is counted where only time is compared
    del results["tiny-shape 3 plain-logprobs"]
    out.write_text(json.dumps({**json.loads(out.read_text()), "results": results}))
    again = run_script("generate.py", *options, stand_in=True, STAND_IN_FAILS="generate")
    assert again.returncode == 1
    assert "has 3 finished results" in again.stdout
    assert "not measured: tiny-shape 3 plain-logprobs: vllm: ValueError: the stand-in fails" in again.stdout


def test_what_the_memory_does_not_hold_together_is_left_out(monkeypatch):
    started: list[tuple[str, str, int]] = []

    class Started:
        def __init__(self, side, folder, options, limit):
            started.append((side, folder, options["sequences"]))
            self.close = lambda: None

    monkeypatch.setattr(against_vllm, "SideProcess", Started)
    monkeypatch.setattr(against_vllm, "save_checkpoint", lambda *_: None)
    cells = {"tiny-shape": [Cell("tiny-shape", prompts, "plain") for prompts in (2, 4000)]}
    monkeypatch.setattr(against_vllm, "total_memory", lambda device: 5 * 2**30)
    failures: list[str] = []
    with ExitStack() as stack:
        sides = start_together(ARGS, cells, stack, failures)
    assert [cell.prompts for cell in cells["tiny-shape"]] == [2]
    assert len(failures) == 1
    assert "tiny-shape 4000 plain: the memory does not hold it" in failures[0]
    assert set(sides["tiny-shape"]) == {"groupwise", "vllm"}
    assert {count for *_, count in started} == {6}
    monkeypatch.setattr(against_vllm, "total_memory", lambda device: 1000)
    with ExitStack() as stack:
        assert start_together(ARGS, cells, stack, failures) == {}
    assert len(failures) == 2


@pytest.mark.slow
def test_sides_that_start_together(tmp_path):
    out = tmp_path / "r.json"
    options = ("--against", "vllm", *SMALL, "--prompts", "1,2", "--together", "--json", str(out))
    done = run_script("generate.py", *options, stand_in=True)
    assert done.returncode == 0, done.stderr
    assert list(json.loads(out.read_text())["results"]) == ["tiny-shape 1 topk40", "tiny-shape 2 topk40"]
    failing = run_script("generate.py", *options[:-2], stand_in=True, STAND_IN_FAILS="start")
    assert failing.returncode == 1
    assert "the stand-in has no memory" in failing.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [("STAND_IN_FAILS", "start", "the stand-in has no memory"), ("STAND_IN_SHORT", "1", "would not be fair")],
)
def test_what_goes_wrong_in_vllm_is_told(variable, value, words):
    done = run_script("generate.py", "--against", "vllm", *SMALL, "--prompts", "1", stand_in=True, **{variable: value})
    assert done.returncode == 1
    assert words in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--prompts", "2,3"), "several numbers of prompts need --against vllm"),
        (("--shapes", "tiny"), "--shapes needs --against vllm"),
        (("--only", "plain"), "--only needs --against vllm"),
        (("--json", "x.json"), "--json needs --against vllm"),
        (("--memory-share", "0.5"), "--memory-share needs --against vllm"),
        (("--memory-share", "1.5", "--against", "vllm"), "must lie between 0 and 1"),
    ],
)
def test_options_that_need_vllm(options, words, monkeypatch, capsys):
    import generate

    monkeypatch.setattr("sys.argv", ["generate.py", "--device", "cpu", *options])
    with pytest.raises(SystemExit) as ended:
        generate.main()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_the_stand_in_is_called_as_vllm_is():
    """Both kinds of calls: one request per prompt with n samples, and one request per sample with its own length."""
    from offline_vllm import OfflineVllm

    side = OfflineVllm.__new__(OfflineVllm)
    calls: list[tuple[int, list[int]]] = []

    def generate(inputs, parameters, use_tqdm):
        several = parameters if isinstance(parameters, list) else [parameters] * len(inputs)
        calls.append((len(inputs), [one.n for one in several]))
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * one.max_tokens) for _ in range(one.n)])
            for one in several
        ]

    side.llm = SimpleNamespace(generate=generate)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
        assert side.generate([[1], [2]], [4, 4, 4, 4], 0, False) == [4, 4, 4, 4]
        assert side.generate([[1], [2]], [4, 1, 2, 3], 0, True) == [4, 1, 2, 3]
    assert calls == [(2, [2, 2]), (4, [1, 1, 1, 1])]
