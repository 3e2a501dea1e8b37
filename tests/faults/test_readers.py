"""Two readers, as `sample` and `eval` are, while a run writes checkpoints and deletes the older ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from groupwise.errors import CheckpointError
from groupwise.model import load, load_model, load_tokenizer
from groupwise.model.export import export_model
from groupwise.rundir import RunDir
from groupwise.rundir.files import delete_folder
from groupwise.training.store import checkpoint

ROOT = Path(__file__).parents[2]
LOADS = 25
# Loads the newest checkpoint that it sees, again and again, and counts how that ends.
READER = """
import json, sys
from collections import Counter
from pathlib import Path
import torch
torch.set_num_threads(1)
from groupwise.errors import GroupwiseError
from groupwise.model import load_model_and_tokenizer

folder, wanted, counts, last = Path(sys.argv[1]), int(sys.argv[2]), Counter(), ""
Path(sys.argv[3]).touch()
while counts["loaded"] < wanted:
    for path in sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name[11:])):
        step = int(path.name.rpartition("-")[2])
        try:
            model, _ = load_model_and_tokenizer(path / "policy", device="cpu", dtype="float32")
        except GroupwiseError as error:
            last = str(error)
            counts["deleted" if "deleted while it was read" in last else "not there"] += 1
            continue
        values = set(model.model.embed_tokens.weight.flatten().tolist())
        assert values == {float(step)}, f"checkpoint-{step} has other weights"
        counts["loaded"] += 1
print(json.dumps([counts, last]))
"""


@pytest.mark.slow
def test_readers_while_checkpoints_are_deleted(tmp_path):
    """Each load gives exactly the weights of that checkpoint, or ends with a sentence."""
    model, tokenizer = load_model("tiny", device="cpu", dtype="float32"), load_tokenizer("tiny")
    started = [tmp_path / "reader-1", tmp_path / "reader-2"]
    with RunDir.create(tmp_path / "run") as run:
        readers = [
            subprocess.Popen(
                [sys.executable, "-c", READER, str(run.path), str(LOADS), str(file)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for file in started
        ]
        step = 0
        while any(reader.poll() is None for reader in readers):
            step += 1
            if step % 25 == 0:
                run.clear()  # as --overwrite does
            model.model.embed_tokens.weight.data.fill_(float(step))
            with run.folder(f"checkpoint-{step}") as folder:
                export_model(model, folder / "policy", tokenizer=tokenizer)
            checkpoint.prune(run, 1, None)
        results = [reader.communicate() for reader in readers]
    assert [reader.returncode for reader in readers] == [0, 0], results
    counts = [json.loads(out)[0] for out, _ in results]
    assert [count["loaded"] >= LOADS for count in counts] == [True, True]
    sys.stdout.write(f"{step} checkpoints written; {counts}\n")


def test_a_checkpoint_that_is_deleted_while_it_is_read(tmp_path, monkeypatch):
    """The error says so, whichever file was next."""
    model, tokenizer = load_model("tiny", device="cpu"), load_tokenizer("tiny")
    for point in ("_check_config", "_check_weights", "load_tokenizer"):
        with RunDir.create(tmp_path / point) as run:
            with run.folder("checkpoint-1") as folder:
                export_model(model, folder / "policy", tokenizer=tokenizer)
            real = getattr(load, point)

            def delete_first(*arguments, _real=real, _run=run, **options):
                delete_folder(_run.path / "checkpoint-1")
                return _real(*arguments, **options)

            monkeypatch.setattr(load, point, delete_first)
            with pytest.raises(
                (CheckpointError, ValueError), match=r"was deleted while it was read|there is no folder"
            ):
                load.load_model_and_tokenizer(run.path / "checkpoint-1" / "policy", device="cpu")
            monkeypatch.undo()
