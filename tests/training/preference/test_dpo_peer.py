"""A run without a policy term is DPO: every step equals TRL 1.16's DPOTrainer, on the same pairs and weights.

In float32 TRL is unmodified. Its norms and log-probs are float32 for any model, so for comparisons in float64 these two
functions are replaced (`trl_dpo.in_float64`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import groupwise.training.trainer
from groupwise.config import Recipe, make_recipe, with_settings
from groupwise.model.packing import pack_members
from groupwise.model.tiny import VOCABULARY, tiny_tokenizer
from groupwise.training.trainer import Callback, Trainer
from groupwise.training.update.optimizer import make_optimizer
from tests.model.models import SIZE
from tests.training.runs import RecordingDisplay, merged

pytestmark = pytest.mark.slow

STEPS, BATCH, PAIRS = 6, 4, 20  # the last step is in the second epoch
KINDS = ["sigmoid", "ipo", "hinge"]
METRICS = ["grad_norm", "logps/chosen", "logps/rejected"]
METRICS += [f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")]
LORA: dict[str, Any] = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj", "down_proj"]}


@dataclass
class Case:
    """The settings of both trainers. ``optimizer``: SGD, or each trainer's AdamW."""

    preference: Mapping[str, Any]
    form: str = "texts"
    dtype: str = "float64"
    optimizer: str = "sgd"
    learning_rate: float = 0.03
    max_grad_norm: float | None = None
    weight_decay: float = 0.0
    eps: float = 1e-8
    lora: bool = False


@dataclass
class Run:
    """The steps of a trainer: weights after each step, gradients as the optimizer got them."""

    start: dict[str, Tensor]
    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)

    def change(self, step: int) -> dict[str, Tensor]:
        """The change of the weights since the start."""
        return {name: weight - self.start[name] for name, weight in self.weights[step].items()}


def trained(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}


# --- the data and the model -------------------------------------------------------------------------------------------


def scribble(rng: random.Random, most: int) -> str:
    return "".join(rng.choice("abcdefgh  .") for _ in range(rng.randint(1, most)))


def make_rows(form: str) -> list[dict[str, Any]]:
    """Pairs of many lengths that differ in the first character."""
    rng = random.Random(0)
    rows: list[dict[str, Any]] = []
    for number in range(PAIRS):
        prompt, chosen, rejected = f"Q{scribble(rng, 20)}:", f"1{scribble(rng, 25)}", f"2{scribble(rng, 25)}"
        row: dict[str, Any] = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        if form == "messages":
            row = {name: [{"role": "assistant", "content": text}] for name, text in row.items()}
            row["prompt"][0]["role"] = "user"
            row["prompt"][:0] = [{"role": "system", "content": "Be brief."}] * (number % 2)
        rows.append(row)
    return rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama without tied embeddings, with weights large enough that attention matters."""
    folder = tmp_path_factory.mktemp("model")
    special = {"pad_token_id": 256, "bos_token_id": 257, "eos_token_id": 258}
    config = LlamaConfig(**{**SIZE, **special, "vocab_size": VOCABULARY, "num_hidden_layers": 2})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model_ = LlamaForCausalLM(config)
        for weight in model_.parameters():
            torch.nn.init.normal_(weight, mean=float(weight.dim() == 1), std=0.2)  # norms are about 1
    model_.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


# --- groupwise --------------------------------------------------------------------------------------------------------


class RunRecorder(Callback):
    """Records the steps of a groupwise run."""

    def on_start(self, trainer: Trainer) -> None:
        self.run = Run(trained(trainer.components.model))
        self.gradient: dict[str, Tensor] = {}
        trainer.optimizer.register_step_pre_hook(partial(self.note, trainer))

    def note(self, trainer: Trainer, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Before an optimizer step, of all parameter groups or of one."""
        moving = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        for name, master in trainer.masters.named_parameters():
            if id(master) in moving:
                assert name not in self.gradient
                self.gradient[name] = master.grad.clone()

    def on_step(self, trainer: Trainer, report: Any) -> None:
        self.run.losses.append(report.metrics["loss"])
        self.run.metrics.append(report.metrics)
        self.run.gradients.append(self.gradient)
        self.run.weights.append(trained(trainer.components.model))
        self.gradient = {}


def our_recipe(case: Case, model: Path, rows: Path) -> Recipe:
    names = ("learning_rate", "max_grad_norm", "weight_decay", "eps")
    table: dict[str, Any] = {
        "algorithm": "dpo",
        "model": {"source": str(model), "dtype": case.dtype, "device": "cpu", "gradient_checkpointing": False},
        "preference": {"train": str(rows), "batch_size": BATCH, "shuffle": False, **case.preference},
        "train": {"steps": STEPS},
        "optimizer": {name: getattr(case, name) for name in names},
        "run": {"tensorboard": False, "plot": False, "checkpoint_every": 0},
    }
    texts = {"data": {"chat": False}} if case.form == "texts" else {}
    return make_recipe(merged(table, texts, {"model": {"lora": LORA}} if case.lora else {}))


def plain_sgd(recipe: Recipe, model: Any, masters: Any, say: Any) -> torch.optim.SGD:
    """SGD with the parameter groups of a run's optimizer."""
    groups = make_optimizer(recipe, model, masters, say).param_groups
    return torch.optim.SGD([{key: group[key] for key in ("params", "embedding", "decays")} for group in groups], lr=0.0)


def our_run(folder: Path, case: Case, model: Path, settings: Mapping[str, Any] | None = None) -> tuple[Run, Trainer]:
    """The run and its trainer; ``settings`` are those that TRL does not have."""
    from tests.training.preference.trl_dpo import in_float64

    rows, recorder = folder / "pairs.jsonl", RunRecorder()
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in make_rows(case.form)))
    recipe = with_settings(our_recipe(case, model, rows), settings or {})
    assert recipe.loss.policy_coef == recipe.loss.kl_coef == 0
    with in_float64(case.dtype), pytest.MonkeyPatch.context() as patch:
        patch.setenv("GROUPWISE_CACHE", str(folder / "cache"))
        if case.optimizer == "sgd":
            patch.setattr(groupwise.training.trainer, "make_optimizer", plain_sgd)
        trainer = Trainer(recipe, callbacks=[recorder], display=RecordingDisplay(), folder=folder / "run")
        trainer.run()
    return recorder.run, trainer


@pytest.fixture(scope="module")
def peer(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """TRL's run of a case, computed once for all tests."""
    from tests.training.preference.trl_dpo import trl_run

    runs: dict[str, Run] = {}

    def run(case: Case, adapter: Mapping[str, Tensor] | None = None) -> Run:
        if repr(case) not in runs:
            runs[repr(case)] = trl_run(tmp_path_factory.mktemp("peer"), case, model, adapter)
        return runs[repr(case)]

    return run


# --- comparisons ------------------------------------------------------------------------------------------------------


def size(values: Mapping[str, Tensor]) -> float:
    return sum(float(value.double().square().sum()) for value in values.values()) ** 0.5


def apart(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The relative distance of weights or gradients from TRL's."""
    assert ours.keys() == theirs.keys()
    return size({name: ours[name] - value for name, value in theirs.items()}) / (size(theirs) or 1.0)


def check_same(ours: Run, theirs: Run, relative: float) -> None:
    assert len(ours.losses) == len(theirs.losses) == len(theirs.metrics) == len(theirs.gradients) == STEPS
    assert apart(ours.start, theirs.start) == 0
    assert ours.losses == pytest.approx(theirs.losses, rel=relative, abs=relative)
    for step in range(STEPS):
        assert apart(ours.gradients[step], theirs.gradients[step]) <= relative, step
        assert apart(ours.change(step), theirs.change(step)) <= relative, step
        for name in METRICS:
            if step or name != "rewards/accuracies":  # before the first step no pair has a margin
                expected = pytest.approx(theirs.metrics[step][name], rel=relative, abs=relative)
                assert ours.metrics[step][name] == expected, (step, name)
    # Something was learned, so the runs are not equal only because nothing changed.
    assert theirs.metrics[-1]["rewards/margins"] > 0.1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["texts", "messages"])
def test_every_step_equals_trl(tmp_path, model, peer, kind, form):
    """Loss, metrics, gradients and weights; conversations with another β and clipped gradients."""
    case = Case({"kind": kind})
    if form == "messages":
        case = Case({"kind": kind, "beta": 0.3}, form=form, learning_rate=0.2, max_grad_norm=1.0)
    ours, theirs = our_run(tmp_path, case, model)[0], peer(case)
    check_same(ours, theirs, 1e-10)
    assert list((tmp_path / "cache").rglob("*.safetensors"))  # the reference's log-probs
    if case.max_grad_norm is not None:
        assert theirs.metrics[0]["grad_norm"] > 2
        assert size(theirs.gradients[0]) == pytest.approx(1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_equals_unmodified_trl_in_float32(tmp_path, model, peer, kind):
    case = Case({"kind": kind}, dtype="float32", learning_rate=0.01)
    check_same(our_run(tmp_path, case, model)[0], peer(case), 5e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_adamw_equals_trl(tmp_path, model, peer, kind, dtype):
    """AdamW divides a gradient by its size, so even rounding errors move a weight: eps is well above them."""
    eps, relative = (1e-8, 1e-8) if dtype == "float64" else (1e-5, 2e-4)
    settings = {"learning_rate": 1e-3, "max_grad_norm": 1.0, "weight_decay": 0.1, "eps": eps}
    case = Case({"kind": kind}, dtype=dtype, optimizer="adamw", **settings)
    check_same(our_run(tmp_path, case, model)[0], peer(case), relative)


def test_several_kinds_with_weights(tmp_path, model, peer):
    """MPO. One of its kinds couples pairs."""
    case = Case({"kind": ["sigmoid", "bco_pair", "sft"], "kind_weights": [0.8, 0.2, 1.0]})
    check_same(our_run(tmp_path, case, model)[0], peer(case), 1e-10)


def packs_of(trainer: Trainer, budget: int) -> list[tuple[int, int]]:
    """For each batch of an epoch, the number of packs, and of pairs that are split over two packs."""
    counts = []
    for start in range(0, PAIRS, BATCH):
        pairs = trainer.pairs.splits.train[start : start + BATCH]
        longest = max(len(pair.prompt) + max(len(pair.chosen), len(pair.rejected)) for pair in pairs)
        prompts, completions = [pair.prompt for pair in pairs], [[pair.chosen, pair.rejected] for pair in pairs]
        packs = pack_members(trainer.components.handle, prompts, completions, max(budget, longest))
        unsplit = sum(any({row, row + 1} <= set(pack) for pack in packs) for row in range(0, 2 * BATCH, 2))
        counts.append((len(packs), BATCH - unsplit))
    return counts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [1, 80])
def test_packs_make_no_difference(tmp_path, model, peer, kind, budget):
    """Neither small ones, over which pairs are split, nor larger ones."""
    case = Case({"kind": kind})
    ours, trainer = our_run(tmp_path, case, model, {"train.token_budget": budget})
    assert all(packs > 1 and bool(split) == (budget == 1) for packs, split in packs_of(trainer, budget))
    check_same(ours, peer(case), 1e-10)


def test_a_reference_computed_in_each_step(tmp_path, model, peer):
    case = Case({"kind": "sigmoid"})
    ours, _ = our_run(tmp_path, case, model, {"preference.cache_ref_logps": False})
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    check_same(ours, peer(case), 1e-10)


def test_long_completions_are_truncated_as_in_trl(tmp_path, model, peer):
    case = Case({"kind": "sigmoid", "max_length": 32})
    ours, trainer = our_run(tmp_path, case, model, {"preference.on_too_long": "truncate"})
    pairs = trainer.pairs.splits.train
    lengths = [len(pair.prompt) + len(completion) for pair in pairs for completion in (pair.chosen, pair.rejected)]
    assert (len(pairs), max(lengths)) == (PAIRS, 32)
    assert lengths.count(32) > 10
    check_same(ours, peer(case), 1e-10)


def test_lora_equals_trl(tmp_path, model, peer):
    case = Case({"kind": "sigmoid"}, lora=True, learning_rate=0.1)
    ours, _ = our_run(tmp_path, case, model)
    assert all("lora_" in name for name in ours.start)
    check_same(ours, peer(case, ours.start), 1e-10)
