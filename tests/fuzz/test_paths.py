"""Strange things on a disk under strange names, given to everything that takes a path."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.cli.new_files import write_new_files
from groupwise.config import load_recipe
from groupwise.data import read_rows
from groupwise.data.read import is_hub_id
from groupwise.grouping.embed import needs_sentence_transformers
from groupwise.model.source import check_source
from groupwise.packaged import find_recipe
from groupwise.paths import check_writable
from groupwise.rundir import RunDir, read_json, read_metrics, verify_manifest, write_bytes
from groupwise.user_code import load_function
from groupwise.usmle.medical_words import load_medical_vocabulary
from groupwise.usmle.report import read_report
from tests.fuzz import accepted, many
from tests.fuzz.strange import texts

READERS: dict[str, Callable[[str], Any]] = {
    "rows": read_rows,
    "hub id": is_hub_id,
    "recipe": load_recipe,
    "recipe's name": find_recipe,
    "function": lambda path: load_function(f"{path}:f"),
    "function without a name": load_function,
    "model": check_source,
    "embedder": needs_sentence_transformers,
    "json": read_json,
    "metrics": read_metrics,
    "manifest": verify_manifest,
    "report": read_report,
    "vocabulary": load_medical_vocabulary,
    "run": lambda path: RunDir.create(path).discard(),
    "resume": lambda path: RunDir.resume(path).close(),
    "written file": lambda path: write_bytes(path, b"x"),
    "new files": lambda path: write_new_files(Path(path), {"a": b"x"}),
    "writable": check_writable,
}


def sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(2**40)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)


THINGS: dict[str, Callable[[Path], Any]] = {
    "nothing": lambda path: None,
    "file": lambda path: path.write_bytes(b"{}"),
    "folder": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
    "loop": lambda path: path.symlink_to(path.name),
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "full device": lambda path: path.symlink_to("/dev/full"),
    "socket": a_socket,
    "terabyte": sparse,
}
ENDINGS = ("", ".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz", ".toml", ".py", ".gguf", "/", "/inside.jsonl")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Smaller limits: a terabyte is refused at once.
    monkeypatch.setattr("groupwise.data.text_files.LONGEST_LINE", 1_000_000)
    monkeypatch.setattr("groupwise.data.text_files.LARGEST_JSON", 1_000_000)
    monkeypatch.setattr("groupwise.rundir.files.LARGEST_JSON", 1_000_000)
    monkeypatch.setattr("groupwise.rundir.metrics.LARGEST", 1_000_000)
    return tmp_path


def test_strange_things_under_strange_names(folder):
    @many(10)
    @given(
        reader=st.sampled_from(sorted(READERS)),
        thing=st.sampled_from(sorted(THINGS)),
        name=st.just("thing") | texts.filter(lambda text: text and not text.startswith((".", "/"))),  # below the folder
        ending=st.sampled_from(ENDINGS),
    )
    def run(reader, thing, name, ending):
        with suppress(OSError, ValueError):  # not every name can be made
            THINGS[thing](folder / f"{name}{ending}".rstrip("/").removesuffix("/inside.jsonl"))
        try:
            accepted("paths", lambda: READERS[reader](f"{name}{ending}"))
        finally:
            for entry in folder.iterdir():
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()

    run()
