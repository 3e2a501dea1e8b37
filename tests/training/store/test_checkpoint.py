"""What is chosen to go on from, what is kept, and what is said where nothing can be."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from groupwise.distributed.ranks import Ranks
from groupwise.errors import CheckpointError
from groupwise.model.precision import MasterWeights
from groupwise.rundir import RunDir, read_json, verify_manifest, write_json
from groupwise.rundir.files import write_manifest
from groupwise.training.store import checkpoint
from groupwise.training.update.reference import Reference
from tests.training.runs import metrics_of, run_steps, small_trainer


def make_model(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config).to(dtype)


class Policy:
    """A model that moves a little in every step, and can be saved."""

    def __init__(self, run: RunDir, *, dtype: torch.dtype = torch.float32, reference: bool = False) -> None:
        self.run, self.ranks = run, Ranks()
        self.masters = MasterWeights(make_model(dtype))
        self.optimizer = torch.optim.AdamW(self.masters.parameters(), lr=1e-3)
        self.reference = Reference(self.masters) if reference else None
        self.generator = torch.Generator().manual_seed(7)

    def move(self) -> None:
        for master in self.masters.parameters():
            master.grad = torch.randn(master.shape, generator=self.generator)
        self.optimizer.step()
        self.masters.sync_to_model()

    def save(self, step: int, **options) -> Path:
        state = {"refreshes": 3, "tokens": 10 * step}
        checkpoint.save_checkpoint(self.run, step, state, self, tokenizer=None, dtype=None, **options)
        return self.run.path / f"checkpoint-{step}"

    def load(self, folder: Path) -> dict:
        return checkpoint.load_checkpoint(folder, self)

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {f"master {name}": value.clone() for name, value in self.masters.state_dict().items()}
        for name, master in self.masters.named_parameters():
            for key, value in self.optimizer.state[master].items():
                found[f"{key} {name}"] = torch.as_tensor(value).clone()
        found |= {f"model {name}": value.clone() for name, value in self.masters.model.state_dict().items()}
        if self.reference is not None:
            found |= {f"reference {name}": value.clone() for name, value in self.reference.state_dict().items()}
        return found


@pytest.fixture
def run(tmp_path):
    with RunDir.create(tmp_path / "run") as run:
        yield run


def fill(run: RunDir, *steps: int) -> None:
    """Checkpoints that are whole, with next to nothing in them."""
    for step in steps:
        with run.folder(checkpoint.checkpoint_name(step)) as folder:
            write_json(folder / "state.json", {"format": checkpoint.FORMAT, "step": step, "padding": "x" * 50})


def names(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.path.glob("checkpoint-*"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_there_and_back(run, dtype):
    """Masters, both moments, the count of steps, the reference and the state come back bit for bit."""
    policy = Policy(run, dtype=dtype, reference=True)
    policy.move()
    policy.reference.refresh()
    policy.move()
    before = policy.tensors()
    folder = policy.save(2)
    other = Policy(run, dtype=dtype, reference=True)
    for _ in range(3):
        other.move()
    state = other.load(folder)
    assert state == {"format": 2, "step": 2, "refreshes": 3, "tokens": 20}
    assert other.reference.refreshes == 3
    after = other.tensors()
    assert after.keys() == before.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert {value.dtype for name, value in after.items() if name.startswith("master")} == {torch.float32}
    other.generator.set_state(policy.generator.get_state())
    policy.move()
    other.move()
    after = other.tensors()
    assert [name for name, value in policy.tensors().items() if not torch.equal(value, after[name])] == []


def test_contents(run):
    folder = Policy(run, reference=True).save(7)
    assert folder == run.path / "checkpoint-7"
    inside = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    expected = {"masters.safetensors", "optimizer.safetensors", "reference.safetensors", "state.json", "manifest.json"}
    assert {name for name in inside if "/" not in name} == expected
    assert {"policy/config.json", "policy/model.safetensors"} <= inside
    assert all(Path(name).suffix in (".safetensors", ".json") for name in inside)
    listed = set(verify_manifest(folder)["files"])
    assert inside - listed == {"manifest.json", "policy/manifest.json"}


def test_an_existing_one_stays(run):
    """It is of the same step, so it is the same, but for the state."""
    policy = Policy(run)
    folder = policy.save(1)
    before = (folder / "masters.safetensors").read_bytes()
    policy.move()
    assert policy.save(1) == folder
    assert (folder / "masters.safetensors").read_bytes() == before


def cut(folder: Path) -> None:
    os.truncate(folder / "state.json", 20)


def flip(folder: Path) -> None:
    data = bytearray((folder / "state.json").read_bytes())
    data[-10] ^= 1
    (folder / "state.json").write_bytes(data)


def without_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def without_a_file(folder: Path) -> None:
    (folder / "state.json").unlink()


DAMAGE = {
    cut: "state.json has 20 bytes instead of",
    flip: r"state.json has been changed \(its SHA-256 differs\)",
    without_manifest: "has no manifest.json: it is not a finished checkpoint",
    without_a_file: "state.json is missing",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damaged_ones_are_not_chosen(run, damage):
    fill(run, 1, 2, 10)
    assert checkpoint.newest(run).name == "checkpoint-10"
    damage(run.path / "checkpoint-10")
    assert checkpoint.newest(run).name == "checkpoint-2"
    damage(run.path / "checkpoint-2")
    assert checkpoint.newest(run).name == "checkpoint-1"
    damage(run.path / "checkpoint-1")
    with pytest.raises(CheckpointError, match=f"no checkpoint in .*run is intact: .*checkpoint-10.*{DAMAGE[damage]}"):
        checkpoint.newest(run)


def test_none_yet(run):
    assert checkpoint.newest(run) is None


def test_all_damaged_keeps_the_records(tmp_path):
    """To begin anew would throw away what the run has recorded: that is for its owner to decide."""
    folder = tmp_path / "run"
    run_steps(small_trainer(folder), 2)
    for step in (1, 2):
        os.truncate(folder / f"checkpoint-{step}" / "masters.safetensors", 100)
    rows, rollouts = metrics_of(folder), sorted((folder / "rollouts").iterdir())
    sentence = "no checkpoint in .* is intact: .*Restore one from a copy, or start again in another folder"
    with pytest.raises(CheckpointError, match=sentence):
        small_trainer(folder, resume=True).run()
    assert metrics_of(folder) == rows
    assert sorted((folder / "rollouts").iterdir()) == rollouts


def test_somebody_elses_folders(run):
    """A copy that a user made is neither chosen nor deleted, and does no harm."""
    fill(run, 1, 2, 3)
    shutil.copytree(run.path / "checkpoint-3", run.path / "checkpoint-3-copy")
    shutil.copytree(run.path / "checkpoint-3", run.path / "checkpoint-best")
    assert checkpoint.newest(run).name == "checkpoint-3"
    checkpoint.prune(run, 1, None)
    assert names(run) == ["checkpoint-3", "checkpoint-3-copy", "checkpoint-best"]
    checkpoint.rewind(run, 0)
    assert names(run) == ["checkpoint-3-copy", "checkpoint-best"]
    assert checkpoint.newest(run) is None


def test_prune(run):
    fill(run, 2, 4, 8, 10, 12)
    checkpoint.prune(run, 2, "checkpoint-4")
    assert names(run) == ["checkpoint-10", "checkpoint-12", "checkpoint-4"]
    checkpoint.prune(run, 2, "checkpoint-12")
    assert names(run) == ["checkpoint-10", "checkpoint-12"]
    checkpoint.prune(run, 5, None)
    assert names(run) == ["checkpoint-10", "checkpoint-12"]
    checkpoint.prune(run, 1, None)
    assert names(run) == ["checkpoint-12"]
    assert not list(run.path.glob(".unfinished*"))


def test_an_interrupted_prune(tmp_path, monkeypatch):
    """What is half deleted has lost its name, and the next owner removes the rest."""
    with RunDir.create(tmp_path / "run") as run:
        fill(run, 1, 2, 3)

        def interrupted(path, **_):
            (Path(path) / "state.json").unlink()
            raise KeyboardInterrupt

        monkeypatch.setattr(shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.prune(run, 1, None)
        monkeypatch.undo()
        assert names(run) == ["checkpoint-2", "checkpoint-3"]
        for name in names(run):
            verify_manifest(run.path / name)
        assert [path.name for path in run.path.glob(".unfinished*")] == [".unfinished-old-checkpoint-1"]
    with RunDir.resume(tmp_path / "run") as run:
        assert not list(run.path.glob(".unfinished*"))
        checkpoint.prune(run, 1, None)
        assert names(run) == ["checkpoint-3"]


def test_rewind(run):
    """Later checkpoints are damaged ones: counted among the last, they would push out what is whole."""
    fill(run, 1, 2, 3, 10)
    assert checkpoint.rewind(run, 3) == ["checkpoint-10"]
    assert names(run) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert checkpoint.rewind(run, 2) == ["checkpoint-3"]
    assert checkpoint.rewind(run, 2) == []


def test_the_best_is_known_after_a_resume(tmp_path):
    """An evaluation after the checkpoint of its step was written is added to it: best.json and the state agree."""
    folder = tmp_path / "run"
    changes = {"run": {"keep_checkpoints": 1}, "evaluate": {"every": 0, "max_new_tokens": 1}, "train": {"steps": 3}}
    with small_trainer(folder, changes) as trainer:
        for report in trainer.steps():
            if report.step == 2:
                trainer.evaluate()
                break
    assert read_json(folder / "best.json")["checkpoint"] == "checkpoint-2"
    assert checkpoint.read_state(folder / "checkpoint-2")["train"]["best"]["step"] == 2
    (folder / "best.json").write_text("{")  # whatever it was, the checkpoint knows better
    resumed = run_steps(small_trainer(folder, {**changes, "train": {"steps": 9}}, resume=True), 1)
    assert read_json(folder / "best.json")["checkpoint"] == "checkpoint-2"
    assert resumed.state.best["step"] == 2
    assert names(resumed.run_dir) == ["checkpoint-2", "checkpoint-3"]  # the best one is kept


def test_a_later_state_that_is_damaged_is_ignored(run):
    policy = Policy(run)
    folder = policy.save(1)
    policy.save(1)
    path = folder / checkpoint.LATER_STATE
    path.write_text(path.read_text().replace('"tokens": 10', '"tokens": 11'))
    assert checkpoint.read_state(folder)["tokens"] == 10
    path.write_text("{")
    assert checkpoint.read_state(folder)["tokens"] == 10


def test_policy_alone(run):
    policy = Policy(run, reference=True)
    folder = policy.save(3, resumable=False)
    assert {path.name for path in folder.iterdir()} == {"policy", "state.json", "manifest.json"}
    assert checkpoint.read_state(folder)["step"] == 3
    sentence = rf"{folder} holds only the policy \(run.resumable was false\).*--model.source {folder / 'policy'}"
    with pytest.raises(CheckpointError, match=sentence):
        policy.load(folder)


def test_no_reference_in_it(run):
    folder = Policy(run).save(1)
    with pytest.raises(
        CheckpointError, match=r"holds no reference, but this recipe needs one \(loss.kl_coef or preference.weight\)"
    ):
        Policy(run, reference=True).load(folder)


def test_a_format_of_another_time(run):
    folder = Policy(run).save(1)
    write_json(folder / "state.json", {"format": 1, "step": 1})
    write_manifest(folder)
    with pytest.raises(CheckpointError, match=r"written by another version of groupwise.*--model\.source .*policy"):
        Policy(run).load(folder)
