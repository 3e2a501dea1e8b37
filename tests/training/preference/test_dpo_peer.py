"""A run without a policy term is DPO: every step beside TRL 1.16's DPOTrainer, on the same pairs from the same weights.

In float32 the peer is as it comes. Its norms and log-probs are float32 whatever the model is, so for a comparison in
float64 these two formulas are written out plainly (`exactly`); all else is the peer's own code.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl.trainer.utils
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from torch.utils.data import SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from trl import DPOConfig, DPOTrainer

import groupwise.training.trainer
from groupwise.config import Recipe, make_recipe
from groupwise.model.logprobs import samples_together
from groupwise.model.tiny import VOCABULARY, tiny_tokenizer
from groupwise.training.components import make_optimizer
from groupwise.training.trainer import Callback, Trainer
from tests.model.models import SIZE
from tests.training.runs import RecordingDisplay, merged

STEPS, BATCH, PAIRS = 6, 4, 20  # the last step is in the second epoch
KINDS = ["sigmoid", "ipo", "hinge"]
METRICS = ["grad_norm", "logps/chosen", "logps/rejected"]
METRICS += [f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")]
LORA: dict[str, Any] = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj", "down_proj"]}


@dataclass
class Case:
    """What both trainers are told. ``optimizer``: plain SGD, or the AdamW that each of them has by itself."""

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
    """What a trainer did, step by step. ``weights`` are those after a step, gradients those that the optimizer saw."""

    start: dict[str, Tensor]
    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)

    def change(self, step: int) -> dict[str, Tensor]:
        """How far the weights have come by the end of a step."""
        return {name: weight - self.start[name] for name, weight in self.weights[step].items()}


def trained(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}


@contextmanager
def exactly(dtype: str) -> Iterator[None]:
    """Within this block the norms, and the peer's log-probs, are float64 where the model is."""

    def norm(self: Any, states: Tensor) -> Tensor:
        return self.weight * states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.variance_epsilon)

    def logps(hidden: Tensor, weight: Tensor, bias: None, targets: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        found = (hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
        nothing = torch.zeros_like(found)  # entropy and the like, which nobody looks at
        return found, nothing, None, nothing, nothing.bool()

    with pytest.MonkeyPatch.context() as patch:
        if dtype == "float64":
            patch.setattr(LlamaRMSNorm, "forward", norm)
            patch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", SimpleNamespace(apply=logps))
        yield


# --- the data and the model -------------------------------------------------------------------------------------------


def scribble(rng: random.Random, most: int) -> str:
    return "".join(rng.choice("abcdefgh  .") for _ in range(rng.randint(1, most)))


def made_rows(form: str) -> list[dict[str, Any]]:
    """Pairs of many lengths. Their answers differ from the first letter on, so that a short piece of them does too."""
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
    """A Llama of two layers with a head of its own, and weights large enough that attention matters."""
    folder = tmp_path_factory.mktemp("model")
    special = {"pad_token_id": 256, "bos_token_id": 257, "eos_token_id": 258}
    config = LlamaConfig(**{**SIZE, **special, "vocab_size": VOCABULARY, "num_hidden_layers": 2})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = LlamaForCausalLM(config)
        for weight in made.parameters():
            torch.nn.init.normal_(weight, mean=float(weight.dim() == 1), std=0.2)  # norms are about 1
    made.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


# --- groupwise --------------------------------------------------------------------------------------------------------


class Diary(Callback):
    """Writes down what a run of groupwise does."""

    def on_start(self, trainer: Trainer) -> None:
        self.run = Run(trained(trainer.components.model))
        self.gradient: dict[str, Tensor] = {}
        trainer.optimizer.register_step_pre_hook(partial(self.note, trainer))

    def note(self, trainer: Trainer, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """The optimizer is about to move: all weights or, where groups move one by one, some of them."""
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
    own = ("learning_rate", "max_grad_norm", "weight_decay", "eps")
    table: dict[str, Any] = {
        "algorithm": "dpo",
        "model": {"source": str(model), "dtype": case.dtype, "device": "cpu", "gradient_checkpointing": False},
        "preference": {"train": str(rows), "batch_size": BATCH, "shuffle": False, **case.preference},
        "train": {"steps": STEPS},
        "optimizer": {name: getattr(case, name) for name in own},
        "run": {"tensorboard": False, "picture": False, "checkpoint_every": 0},
    }
    texts = {"data": {"chat": False}} if case.form == "texts" else {}
    return make_recipe(merged(table, texts, {"model": {"lora": LORA}} if case.lora else {}))


def plain_sgd(recipe: Recipe, model: Any, masters: Any, say: Any) -> torch.optim.SGD:
    """SGD with the groups of the optimizer that a run would have."""
    groups = make_optimizer(recipe, model, masters, say).param_groups
    return torch.optim.SGD([{key: group[key] for key in ("params", "embedding", "decays")} for group in groups], lr=0.0)


def our_run(folder: Path, case: Case, model: Path, settings: Mapping[str, Any] | None = None) -> tuple[Run, Trainer]:
    """The run, and its trainer; dotted ``settings`` are those that the peer does not have."""
    rows, diary = folder / "pairs.jsonl", Diary()
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in made_rows(case.form)))
    recipe = our_recipe(case, model, rows).with_settings(settings or {})
    assert recipe.loss.policy_coef == recipe.loss.kl_coef == 0
    with exactly(case.dtype), pytest.MonkeyPatch.context() as patch:
        patch.setenv("GROUPWISE_CACHE", str(folder / "cache"))
        if case.optimizer == "sgd":
            patch.setattr(groupwise.training.trainer, "make_optimizer", plain_sgd)
        trainer = Trainer(recipe, callbacks=[diary], display=RecordingDisplay(), folder=folder / "run")
        trainer.run()
    return diary.run, trainer


# --- the peer ---------------------------------------------------------------------------------------------------------


class Watched(DPOTrainer):
    """The peer, which takes pairs in their order and writes down its losses."""

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)

    def compute_loss(self, *arguments: Any, **options: Any) -> Tensor:
        loss = super().compute_loss(*arguments, **options)
        self.losses.append(loss.item())
        return loss


class PeerDiary(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.run = Run(trained(model))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        weights = dict(model.named_parameters())
        self.run.gradients.append({name: weights[name].grad.clone() for name in self.run.start})

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.run.weights.append(trained(model))


def their_settings(case: Case, folder: Path) -> DPOConfig:
    how, kinds = case.preference, case.preference["kind"]
    return DPOConfig(
        output_dir=str(folder),
        loss_type=[kinds] if isinstance(kinds, str) else kinds,
        loss_weights=how.get("kind_weights"),
        beta=how.get("beta", 0.1),
        max_length=how.get("max_length"),
        truncation_mode="keep_start",
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=case.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=case.max_grad_norm or 0.0,
        weight_decay=case.weight_decay,
        adam_epsilon=case.eps,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        **({"optim": "sgd"} if case.optimizer == "sgd" else {}),
    )


def their_run(folder: Path, case: Case, source: Path, adapter: Mapping[str, Tensor] | None) -> Run:
    """The peer's run; ``adapter``: the first values of an adapter, if the model is to have one."""
    lora = LoraConfig(r=LORA["rank"], lora_alpha=LORA["alpha"], target_modules=LORA["targets"], task_type="CAUSAL_LM")
    diary = PeerDiary()
    trainer = Watched(
        LlamaForCausalLM.from_pretrained(source, dtype=getattr(torch, case.dtype)),
        args=their_settings(case, folder),
        train_dataset=Dataset.from_list(made_rows(case.form)),
        processing_class=tiny_tokenizer(),
        callbacks=[diary],
        peft_config=lora if case.lora else None,
    )
    trainer.losses = []
    if adapter is not None:
        trainer.model.load_state_dict(adapter, strict=False)
    with exactly(case.dtype):
        trainer.train()
    diary.run.losses = trainer.losses
    diary.run.metrics = [row for row in trainer.state.log_history if "rewards/margins" in row]
    return diary.run


@pytest.fixture(scope="module")
def peer(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """The peer's run of a case, which is done once for all tests."""
    known: dict[str, Run] = {}

    def run(case: Case, adapter: Mapping[str, Tensor] | None = None) -> Run:
        if repr(case) not in known:
            known[repr(case)] = their_run(tmp_path_factory.mktemp("peer"), case, model, adapter)
        return known[repr(case)]

    return run


# --- side by side -----------------------------------------------------------------------------------------------------


def size(values: Mapping[str, Tensor]) -> float:
    return sum(float(value.double().square().sum()) for value in values.values()) ** 0.5


def apart(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """How far weights or gradients, all together, are from the peer's, relative to these."""
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
    # Something has been learned, so that all this is not merely what the two began with.
    assert theirs.metrics[-1]["rewards/margins"] > 0.1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["texts", "messages"])
def test_every_step_is_the_peers(tmp_path, model, peer, kind, form):
    """Loss, metrics, gradients and weights; conversations with another β, and with gradients that are clipped."""
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
def test_every_step_is_that_of_the_peer_as_it_comes(tmp_path, model, peer, kind):
    """In float32, where a sum over an answer is known to some 1e-7 and each step builds on what the last one lost."""
    case = Case({"kind": kind}, dtype="float32", learning_rate=0.01)
    check_same(our_run(tmp_path, case, model)[0], peer(case), 5e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_adamw_takes_the_peers_steps(tmp_path, model, peer, kind, dtype):
    """It divides a gradient by its own size, so one that is nothing but rounding moves its weight as far as any other
    does: eps is well above that. In float32 the peer is again as it comes."""
    eps, relative = (1e-8, 1e-8) if dtype == "float64" else (1e-5, 2e-4)
    how = {"learning_rate": 1e-3, "max_grad_norm": 1.0, "weight_decay": 0.1, "eps": eps}
    case = Case({"kind": kind}, dtype=dtype, optimizer="adamw", **how)
    check_same(our_run(tmp_path, case, model)[0], peer(case), relative)


def test_several_kinds_with_weights(tmp_path, model, peer):
    """MPO. One of its kinds looks across pairs."""
    case = Case({"kind": ["sigmoid", "bco_pair", "sft"], "kind_weights": [0.8, 0.2, 1.0]})
    check_same(our_run(tmp_path, case, model)[0], peer(case), 1e-10)


def packs_of(trainer: Trainer, budget: int) -> list[tuple[int, int]]:
    """For each batch of an epoch, how many packs there are, and how many pairs are in two of them."""
    found = []
    for start in range(0, PAIRS, BATCH):
        pairs = trainer.pairs.sets.train[start : start + BATCH]
        longest = max(len(pair.prompt) + max(len(pair.chosen), len(pair.rejected)) for pair in pairs)
        prompts, answers = [pair.prompt for pair in pairs], [[pair.chosen, pair.rejected] for pair in pairs]
        packs = samples_together(trainer.components.handle, prompts, answers, max(budget, longest))
        whole = sum(any({row, row + 1} <= set(pack) for pack in packs) for row in range(0, 2 * BATCH, 2))
        found.append((len(packs), BATCH - whole))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [1, 80])
def test_packs_make_no_difference(tmp_path, model, peer, kind, budget):
    """Neither small ones, over which pairs are split, nor larger ones of whole pairs."""
    case = Case({"kind": kind})
    ours, trainer = our_run(tmp_path, case, model, {"train.token_budget": budget})
    assert all(packs > 1 and bool(split) == (budget == 1) for packs, split in packs_of(trainer, budget))
    check_same(ours, peer(case), 1e-10)


def test_a_reference_that_is_computed_in_each_step(tmp_path, model, peer):
    case = Case({"kind": "sigmoid"})
    ours, _ = our_run(tmp_path, case, model, {"preference.cache": False})
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    check_same(ours, peer(case), 1e-10)


def test_long_answers_are_cut_where_the_peer_cuts_them(tmp_path, model, peer):
    case = Case({"kind": "sigmoid", "max_length": 32})
    ours, trainer = our_run(tmp_path, case, model, {"preference.on_too_long": "cut"})
    pairs = trainer.pairs.sets.train
    lengths = [len(pair.prompt) + len(answer) for pair in pairs for answer in (pair.chosen, pair.rejected)]
    assert (len(pairs), max(lengths)) == (PAIRS, 32)
    assert lengths.count(32) > 10
    check_same(ours, peer(case), 1e-10)


def test_an_adapter_learns_what_the_peers_does(tmp_path, model, peer):
    case = Case({"kind": "sigmoid"}, lora=True, learning_rate=0.1)
    ours, _ = our_run(tmp_path, case, model)
    assert all("lora_" in name for name in ours.start)
    check_same(ours, peer(case, ours.start), 1e-10)
