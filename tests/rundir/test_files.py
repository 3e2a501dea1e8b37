"""Atomic files and folders, and manifests that detect damage."""

from __future__ import annotations

import csv
import json
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from groupwise.errors import CheckpointError, RunDirError
from groupwise.rundir.files import (
    atomic_folder,
    read_json,
    remove_leftovers,
    verify_manifest,
    write_bytes,
    write_csv,
    write_json,
    write_manifest,
    write_safetensors,
)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_json_round_trip(tmp_path):
    value = {"learning_rate": 1e-6, "name": "größer", "steps": [1, 2], "none": None}
    write_json(tmp_path / "deep" / "config.json", value)
    assert read_json(tmp_path / "deep" / "config.json") == value
    assert "größer" in (tmp_path / "deep" / "config.json").read_text()
    write_json(tmp_path / "deep" / "config.json", [1])
    assert read_json(tmp_path / "deep" / "config.json") == [1]
    assert names(tmp_path / "deep") == ["config.json"]


@pytest.mark.parametrize("value", [{"a": {1, 2}}, object(), [torch.zeros(2)]])
def test_a_value_that_is_not_json_leaves_the_old_file(tmp_path, value):
    write_json(tmp_path / "x.json", "old")
    with pytest.raises(CheckpointError, match=r"x.json cannot be written as JSON"):
        write_json(tmp_path / "x.json", value)
    assert read_json(tmp_path / "x.json") == "old"
    assert names(tmp_path) == ["x.json"]


def test_reading_missing_or_damaged_json(tmp_path):
    with pytest.raises(CheckpointError, match=r"x.json cannot be read: No such file"):
        read_json(tmp_path / "x.json")
    (tmp_path / "x.json").write_text('{"a": ')
    with pytest.raises(CheckpointError, match=r"x.json is damaged"):
        read_json(tmp_path / "x.json")


def test_a_table_has_a_column_for_every_name_of_its_rows(tmp_path):
    rows = [{"step": 0, "return": 0.1 + 0.2}, {"step": 1, "return": None, "who": 'a "b", c'}, {"who": "d"}]
    write_csv(tmp_path / "rows.csv", iter(rows))
    text = (tmp_path / "rows.csv").read_text()
    assert text == 'step,return,who\n0,0.30000000000000004,\n1,,"a ""b"", c"\n,,d\n'


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permissions")
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_others_may_read_weights_as_the_umask_says(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_safetensors(tmp_path / "a.safetensors", {"w": torch.ones(2)})
        with atomic_folder(tmp_path / "model") as folder:
            save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    finally:
        os.umask(before)
    for path in (tmp_path / "a.safetensors", tmp_path / "model" / "model.safetensors"):
        assert stat.S_IMODE(path.stat().st_mode) == mode
    assert names(tmp_path) == ["a.safetensors", "model"]


def test_safetensors(tmp_path):
    tensors = {"a": torch.randn(3, 2).T, "b": torch.ones(2, dtype=torch.bfloat16, requires_grad=True)}
    write_safetensors(tmp_path / "model.safetensors", tensors, {"step": "7"})
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"step": "7"}
        assert torch.equal(file.get_tensor("a"), tensors["a"])
        assert file.get_tensor("b").dtype == torch.bfloat16
    assert names(tmp_path) == ["model.safetensors"]


def test_writing_to_an_impossible_path(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"could not be written: .*file is a file, not a folder.*untouched"):
        write_bytes(tmp_path / "file" / "below.json", b"1")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="could not be written"):
        write_bytes(tmp_path / "folder", b"1")
    assert names(tmp_path) == ["file", "folder"]


def test_a_folder_appears_complete_with_its_manifest(tmp_path):
    with atomic_folder(tmp_path / "checkpoint-1") as folder:
        write_json(folder / "state.json", {"step": 1})
        (folder / "deep").mkdir()
        write_safetensors(folder / "deep" / "w.safetensors", {"w": torch.ones(2)})
        assert not (tmp_path / "checkpoint-1").exists()
    manifest = verify_manifest(tmp_path / "checkpoint-1")
    assert sorted(manifest["files"]) == ["deep/w.safetensors", "state.json"]
    assert names(tmp_path) == ["checkpoint-1"]


def fill_and_fail(path, error):
    with atomic_folder(path) as folder:
        write_json(folder / "state.json", 1)
        raise error


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_a_folder_that_fails_leaves_nothing(tmp_path, error):
    with pytest.raises(type(error)):
        fill_and_fail(tmp_path / "c", error)
    assert names(tmp_path) == []


def fill_a_full_disk(path):
    with atomic_folder(path), open("/dev/full", "wb", buffering=0) as full:
        full.write(b"x")


def test_a_full_disk_while_filling_a_folder(tmp_path):
    with pytest.raises(CheckpointError, match=r"No space left on device.*untouched"):
        fill_a_full_disk(tmp_path / "c")
    assert names(tmp_path) == []


def test_a_finished_folder_is_never_overwritten(tmp_path):
    with atomic_folder(tmp_path / "c") as folder:
        write_json(folder / "x.json", 1)
    with pytest.raises(RunDirError, match="exists already"), atomic_folder(tmp_path / "c"):
        pass
    assert read_json(tmp_path / "c" / "x.json") == 1


def damage(folder, kind):
    path = folder / "state.json"
    if kind == "missing":
        path.unlink()
    elif kind == "shorter":
        path.write_bytes(path.read_bytes()[:-1])
    elif kind == "changed":
        data = bytearray(path.read_bytes())
        data[3] ^= 1
        path.write_bytes(data)
    elif kind == "no manifest":
        (folder / "manifest.json").unlink()
    elif kind == "manifest cut":
        (folder / "manifest.json").write_text('{"version": 1, "fi')
    elif kind == "manifest empty":
        (folder / "manifest.json").write_text("[]")
    elif kind == "manifest newer":
        (folder / "manifest.json").write_text(json.dumps({"version": 99, "files": {}}))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "state.json is missing"),
        ("shorter", r"state.json has \d+ bytes instead of \d+"),
        ("changed", "state.json has been changed"),
        ("no manifest", "not a finished checkpoint"),
        ("manifest cut", "valid JSON"),
        ("manifest empty", "does not have version 1"),
        ("manifest newer", "does not have version 1"),
    ],
)
def test_damage_is_detected_and_named(tmp_path, kind, message):
    write_json(tmp_path / "state.json", {"step": 12345})
    write_manifest(tmp_path)
    verify_manifest(tmp_path)
    damage(tmp_path, kind)
    with pytest.raises(CheckpointError, match=message):
        verify_manifest(tmp_path)


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    write_json(tmp_path / "kept.json", 1)
    (tmp_path / ".unfinished-abc-model.safetensors").write_bytes(b"half")
    (tmp_path / ".unfinished-def-checkpoint-2").mkdir()
    (tmp_path / ".unfinished-def-checkpoint-2" / "x").write_bytes(b"half")
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["kept.json"]


def test_files_have_the_default_permissions(tmp_path):
    """Not readable by the owner alone, as files of ``tempfile`` are."""
    before = os.umask(0o022)
    try:
        write_json(tmp_path / "x.json", 1)
    finally:
        os.umask(before)
    assert (tmp_path / "x.json").stat().st_mode & 0o777 == 0o644


def test_lone_surrogates_in_json_and_csv_survive_or_are_escaped(tmp_path):
    write_json(tmp_path / "a.json", {"folder": "run\udcff", "ß": "日"})
    assert read_json(tmp_path / "a.json") == {"folder": "run\udcff", "ß": "日"}
    write_csv(tmp_path / "a.csv", [{"name": "\udcff"}])
    assert (tmp_path / "a.csv").read_text(encoding="utf-8") == "name\n\\udcff\n"


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n", "＝"])
def test_a_csv_file_has_no_formulas(tmp_path, start):
    text = f"{start}HYPERLINK(1)"
    write_csv(tmp_path / "rows.csv", [{text: text, "n": -1.5, "s": "-1.5", "e": "+1e-3", "plain": "a=b", "none": None}])
    with open(tmp_path / "rows.csv", newline="") as file:
        header, row = csv.reader(file)
    text = text.replace("\r", "\\r")
    assert header == [f"'{text}", "n", "s", "e", "plain", "none"]
    assert row == [f"'{text}", "-1.5", "-1.5", "+1e-3", "a=b", ""]


def finished_folder(path: Path) -> Path:
    with atomic_folder(path) as folder:
        write_json(folder / "state.json", {"step": 1})
        write_json(folder / "policy" / "config.json", {})
    return path


MANIFESTS = {
    "no files at all": ({}, "does not list policy/config.json"),
    "one file omitted": ({"state.json": None}, "does not list policy/config.json"),
    "a path above": ({"../other.json": {"bytes": 1, "sha256": "x"}}, "not inside the folder"),
    "an absolute path": ({"/etc/hostname": {"bytes": 1, "sha256": "x"}}, "not inside the folder"),
    "an empty name": ({"": {"bytes": 1, "sha256": "x"}}, "not inside the folder"),
    "a NUL byte": ({"a\0b": {"bytes": 1, "sha256": "x"}}, "not inside the folder"),
    "a name too long": ({"x" * 5000: {"bytes": 1, "sha256": "x"}}, "too long|missing"),
    "a size that is text": ({"state.json": {"bytes": "18", "sha256": "x"}}, "size or the SHA-256 of state.json"),
    "no hash": ({"state.json": {"bytes": 18}}, "size or the SHA-256 of state.json"),
    "a file that is a list": ({"state.json": []}, "size or the SHA-256 of state.json"),
    "a folder in place of a file": ({"policy": {"bytes": 18, "sha256": "x"}}, "policy is missing"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_that_are_not_believed(tmp_path, name):
    folder = finished_folder(tmp_path / "checkpoint")
    files, problem = MANIFESTS[name]
    true = read_json(folder / "manifest.json")["files"]
    files = {file: true[file] if facts is None else facts for file, facts in files.items()}
    write_json(folder / "manifest.json", {"version": 1, "files": files})
    with pytest.raises(CheckpointError, match=problem):
        verify_manifest(folder)


@pytest.mark.parametrize("files", [None, [], "state.json", 3])
def test_a_manifest_without_a_table_of_files(tmp_path, files):
    folder = finished_folder(tmp_path / "checkpoint")
    write_json(folder / "manifest.json", {"version": 1, "files": files})
    with pytest.raises(CheckpointError, match="no table of files"):
        verify_manifest(folder)


def test_a_folder_whose_name_is_too_long(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be used: File name too long"):
        verify_manifest(tmp_path / ("x" * 300))


def test_required_files_and_files_of_the_user(tmp_path):
    folder = finished_folder(tmp_path / "checkpoint")
    (folder / "notes.txt").write_text("mine")
    (folder / ".DS_Store").write_text("")
    verify_manifest(folder, required=["state.json"])
    with pytest.raises(CheckpointError, match=r"does not list masters\.safetensors"):
        verify_manifest(folder, required=["masters.safetensors"])
    (folder / "reference.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"does not list reference\.safetensors"):
        verify_manifest(folder)


def test_a_link_out_of_the_folder(tmp_path):
    folder = finished_folder(tmp_path / "checkpoint")
    (folder / "state.json").rename(tmp_path / "elsewhere.json")
    (folder / "state.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(CheckpointError, match=r"state\.json is a link to a file outside the folder"):
        verify_manifest(folder)
    (tmp_path / "link").symlink_to(finished_folder(tmp_path / "other"))
    verify_manifest(tmp_path / "link")  # the folder itself may be elsewhere


def test_json_that_cannot_be_read(tmp_path):
    path = tmp_path / "a.json"
    for content in (b"[" * 200_000, b"\xff", b"", b"{", b"1" * 5000):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"a\.json is damaged"):
            read_json(path)
    path.unlink()
    os.mkfifo(path)  # a reader would wait for ever
    with pytest.raises(CheckpointError, match="is a named pipe, not a file"):
        read_json(path)


def test_a_lone_surrogate_is_written_in_escapes(tmp_path):
    """As it may come from a damaged recipe.json: it must not prevent a checkpoint."""
    for value in ({"name": "\ud800"}, {"name": "é"}):
        write_json(tmp_path / "a.json", value)
        assert read_json(tmp_path / "a.json") == value
    assert "é".encode() in (tmp_path / "a.json").read_bytes()
