"""The benchmark over lengths: the distributions, its arguments, what it keeps, its table, and engines with limits."""

from __future__ import annotations

import argparse
import json
import math

import lengths
import pytest
from length_distributions import GSM8K_QUANTILES, at_quantile, even, gsm8k_lengths, log_normal, spread
from lengths import DEFAULTS, Point, cells, points_of, read_results, report
from results import Results
from sides import EngineSide, Job, SideError, save_checkpoint

from tests.benchmarks.scripts import run_script


def arguments(**changed: object) -> argparse.Namespace:
    values = {
        **DEFAULTS["cpu"], "device": "cpu", "dtype": "float32", "sigma": 1.2, "data": None, "tokenizer": None,
        "only": None, "no_training": False, "cache_mib": None, "against": None, "eager": False, "timeout": 60,
        "json": None, "picture": None, "draw": None, "repeat": 2, "cpu_time": False,
    }  # fmt: skip
    return argparse.Namespace(**{**values, **changed})


# --- the distributions -----------------------------------------------------------------------------------------------


def test_a_quantile_lies_between_its_neighbours():
    assert [at_quantile([10, 20, 40], share) for share in (0, 0.25, 0.5, 0.75, 1)] == [10, 15, 20, 30, 40]
    assert at_quantile([7], 0.3) == 7


def test_the_log_normal_quantiles():
    quantile = log_normal(100, 2)
    assert quantile(0.5) == pytest.approx(100)
    assert quantile(0.8413447460685429) == pytest.approx(100 * math.exp(2))  # one standard deviation above


def test_lengths_have_the_shape_and_are_the_same_again():
    drawn = spread(log_normal(800, 1.2), 256, 8192)
    assert drawn == spread(log_normal(800, 1.2), 256, 8192)
    assert drawn != sorted(drawn)
    assert max(drawn) == 8192
    assert sum(length == 8192 for length in drawn) == 7  # of 256: 1 − Φ(ln(10.24) / 1.2) = 2.6 %
    assert sum(length <= 800 for length in drawn) == 128
    assert min(spread(lambda share: 0.2, 3, 9)) == 1


def test_even_lengths_have_as_many_tokens():
    assert even([1, 9, 1]) == [4, 4, 3]
    assert even([5, 5]) == [5, 5]


def test_gsm8k_from_rows(tmp_path):
    file = tmp_path / "gsm8k_train.jsonl"
    file.write_text('{"answer": "48/2 = 24 clips.\\n#### 24"}\n\n{"answer": "No."}\n')
    by_hand = [2, 7 + 1 + 1 + 1 + 4 + 2]  # 4 8 / 2 = 2 4, clips, the point, the line break, # # # #, 2 4
    assert gsm8k_lengths(file) == gsm8k_lengths(tmp_path) == by_hand
    assert gsm8k_lengths(file, lambda texts, add_special_tokens: {"input_ids": [text.split() for text in texts]}) == [
        1,
        6,
    ]


def test_gsm8k_without_rows():
    assert gsm8k_lengths() == list(GSM8K_QUANTILES) == sorted(GSM8K_QUANTILES)
    assert len(GSM8K_QUANTILES) == 21


@pytest.mark.parametrize("content", ["", "[]\n", "{\n", '{"question": "1"}\n', '{"answer": 3}\n', '{"answer": ""}\n'])
def test_data_of_another_form(tmp_path, content):
    file = tmp_path / "x.jsonl"
    file.write_text(content)
    with pytest.raises(SystemExit, match="--data"):
        gsm8k_lengths(file)


def test_missing_data(tmp_path):
    with pytest.raises(SystemExit, match=r"none\.jsonl must be JSON lines"):
        gsm8k_lengths(tmp_path / "none.jsonl")


# --- what is measured ------------------------------------------------------------------------------------------------


def test_a_sweep_changes_one_length():
    points = {point.name: point.job for point in points_of(arguments(prompts=2))}
    assert [name for name in points if name.startswith("groups")] == ["groups 2", "groups 8", "groups 32"]
    assert points["prompts 128"] == Job([127, 128], 4, 32)
    assert points["groups 8"] == Job([63, 64], 8, 32)
    assert points["completions 256"] == Job([63, 64], 4, 256)
    heavy, beside = points["heavy 128"], points["heavy 128, even"]
    assert heavy.tokens == beside.tokens
    assert heavy.new_tokens == beside.new_tokens == 128  # the engine knows this limit only
    assert max(heavy.completion_lengths) == 128
    assert max(beside.completion_lengths) - min(beside.completion_lengths) <= 1


def test_only_some():
    points = points_of(arguments(only=["gsm8k", "prompts"]))
    assert list(dict.fromkeys(point.kind for point in points)) == ["prompts", "gsm8k"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--only", "prompt"), "--only prompt: allowed are prompts, groups"),
        (("--sweep-groups", "4,0"), "whole numbers of at least 1"),
        (("--median", "0"), "--median must be above 0"),
        (("--sigma", "nan"), "--sigma must be above 0"),
        (("--picture", "x.gif"), "must end in .png"),
        (("--picture", "/no/such/folder/x.png"), "there is no folder /no/such/folder"),
        (("--tokenizer", "x"), "which is missing"),
        (("--cpu-time", "--against", "vllm"), "without --against"),
    ],
)
def test_wrong_arguments(options, words, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["lengths.py", "--device", "cpu", *options])
    with pytest.raises(SystemExit) as ended:
        lengths.main()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_vllm_must_be_installed(monkeypatch):
    monkeypatch.setattr("sys.argv", ["lengths.py", "--device", "cpu", "--against", "vllm"])
    with pytest.raises(SystemExit, match="vLLM is not installed"):
        lengths.main()


class FakeSide:
    asked: list[str]
    fails: str | None = None

    def __init__(self, side: str, folder: str, options: dict[str, object], limit: float) -> None:
        self.side = side
        FakeSide.asked.append(f"start {side}")

    def __enter__(self) -> FakeSide:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def ask(self, kind: str, job: Job) -> dict[str, object]:
        FakeSide.asked.append(f"{self.side} {kind} {job.new_tokens}")
        if FakeSide.fails == f"{self.side} {job.new_tokens}":
            raise SideError("out of memory")
        return {"seconds": float(len(FakeSide.asked)), "peak": 2**30, "running_most": 16, "running_mean": 7.5,
                "preempted": 0}  # fmt: skip


@pytest.fixture
def faked(monkeypatch):
    FakeSide.asked, FakeSide.fails = [], None
    monkeypatch.setattr(lengths, "SideProcess", FakeSide)
    monkeypatch.setattr(lengths, "save_checkpoint", lambda *args, **options: None)
    return FakeSide


def two_points(**changed: object) -> tuple[argparse.Namespace, list[Point]]:
    args = arguments(only=["completions"], sweep_completions=[16, 64], repeat=1, **changed)
    return args, points_of(args)


def test_a_side_generates_before_it_trains(faked):
    args, points = two_points(against="vllm")
    assert lengths.measure(args, points, Results(None, {})) == []
    starts = [entry for entry in faked.asked if entry.startswith("start")]
    assert sorted(starts) == ["start groupwise", "start vllm"]
    ours = [entry for entry in faked.asked if entry.startswith("groupwise")]
    assert ours == [f"groupwise {kind} {size}" for kind in ("generate", "train") for size in (16, 64) for _ in "12"]
    assert sum(entry.startswith("vllm") for entry in faked.asked) == 4


def test_the_size_of_the_cache_is_that_of_both_sides():
    args, points = two_points(cache_mib=5)
    ours, theirs = (lengths.options_of(args, side, points, 200) for side in ("groupwise", "vllm"))
    assert ours == {"device": "cpu", "sequences": 16, "dtype": "float32", "cache_mib": 5, "clock": "wall"}
    assert theirs["cache_mib"] == 5
    args.device = "cuda"
    assert lengths.options_of(args, "vllm", points, 200)["cache_mib"] == 5


def test_what_is_finished_is_not_measured_again(faked, tmp_path):
    args, points = two_points(json=tmp_path / "l.json")
    faked.fails = "groupwise 64"
    failures = lengths.measure(args, points, Results(args.json, {}))
    assert failures == ["generation: completions 64: out of memory", "training: completions 64: out of memory"]
    faked.asked, faked.fails = [], None
    again = Results(args.json, {})
    assert lengths.measure(args, points, again) == []
    assert "groupwise generate 16" not in faked.asked
    assert list(again.found) == [
        f"{part}: completions {size}" for size in (16, 64) for part in ("generation", "training")
    ]
    faked.asked = []
    assert lengths.measure(args, points, again) == []
    assert faked.asked == []


# --- the table and the picture ---------------------------------------------------------------------------------------

OURS = {"seconds": 2.0, "tokens": 1000, "peak": 2**31, "running_most": 16, "running_mean": 7.25, "preempted": 3,
        "kind": "completions", "x": 64, "unit": "seconds"}  # fmt: skip


def test_the_columns_of_a_line():
    vllm = {**OURS, "seconds": 5.0, "running_most": None, "preempted": None}
    line = cells("completions 64", OURS, {**OURS, "seconds": 0.5}, vllm)
    assert line == ("completions 64", "1,000", "2.000 s", "500", "2.00", "16 / 7.2", "3", "0.500 s", "2.00",
                    "5.000 s", "2.50×", "–", "–")  # fmt: skip
    assert cells("x", None, None, vllm)[2:9] == ("–",) * 7


def test_columns_that_were_not_measured_are_left_out(capsys):
    report({"generation: completions 64": OURS})
    without = capsys.readouterr().out
    assert "training" not in without
    assert "vLLM" not in without
    report({"generation: completions 64": OURS, "vllm: completions 64": OURS})
    assert "1.00×" in capsys.readouterr().out


def test_the_picture_of_a_file(tmp_path, monkeypatch, capsys):
    found = {f"{part}: completions {size}": {**OURS, "x": size} for part in ("generation", "vllm") for size in (16, 64)}
    found["training: gsm8k"] = {**OURS, "kind": "gsm8k", "x": "gsm8k"}
    file, picture = tmp_path / "l.json", tmp_path / "l.png"
    file.write_text(json.dumps({"work": {}, "results": found}))
    monkeypatch.setattr("sys.argv", ["lengths.py", "--draw", str(file), "--picture", str(picture)])
    lengths.main()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "completions 16" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", "[]", '{"results": 3}', '{"results": {"tiny-shape 2 plain": {}}}'])
def test_a_file_of_something_else_is_not_drawn(tmp_path, content):
    file = tmp_path / "x.json"
    file.write_text(content)
    with pytest.raises(SystemExit, match="--draw"):
        read_results(file)


# --- complete runs ---------------------------------------------------------------------------------------------------


@pytest.fixture
def side(tmp_path, monkeypatch):
    """groupwise's side with the tiny model and a small cache, in this process."""
    args = arguments()
    save_checkpoint(args, "tiny-shape", tmp_path, 60)
    monkeypatch.setattr("sides.peak_memory", lambda device, function: function() or 0)
    monkeypatch.setattr("training_step.peak_memory", lambda device, function: function() or 0)
    options = {"folder": str(tmp_path), "sequences": 16, "cache_mib": 1, "clock": "wall"}
    return EngineSide(argparse.Namespace(**{**vars(args), **options}))


def test_samples_end_at_their_own_lengths(side):
    result = side.generate(Job([20, 30], 2, 12, lengths=[3, 12, 1, 7]))
    assert result["steps"] == 11  # the first token comes from the prefill
    assert result["running_most"] == 3  # one sample needs no step
    assert result["running_mean"] == (2 + 11 + 6) / 11


def test_samples_that_do_not_fit_wait(side):
    """Of 16 × 512 tokens a cache of 1,024 holds few."""
    result = side.generate(Job([8] * 4, 4, 512))
    assert result["running_most"] < 16
    assert result["preempted"] > 0


def test_a_training_step_changes_the_weights(side):
    before = side.model.get_input_embeddings().weight.detach().clone()
    result = side.train(Job([20, 30], 2, 12, lengths=[3, 12, 1, 7]))
    assert result["tokens"] == 50 + 23
    assert not before.equal(side.model.get_input_embeddings().weight)


@pytest.mark.slow
def test_a_complete_run(tmp_path):
    out, picture = tmp_path / "l.json", tmp_path / "l.png"
    sizes = ("--prompts", "2", "--prompt-tokens", "12", "--samples", "2", "--new-tokens", "4", "--limits", "32")
    sweeps = ("--sweep-prompts", "8,16", "--sweep-groups", "2,4", "--sweep-completions", "4,8")
    options = (*sizes, *sweeps, "--median", "8", "--gsm8k-limit", "64", "--json", str(out), "--picture", str(picture))
    done = run_script("lengths.py", *options, "--against", "vllm", stand_in=True)
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())["results"]
    assert len(results) == 3 * 10
    assert results["vllm: heavy 32"]["preempted"] == 3  # of one call of the stand-in
    assert results["generation: heavy 32"]["tokens"] == results["generation: heavy 32, even"]["tokens"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "gsm8k, even" in done.stdout
