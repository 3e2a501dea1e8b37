"""The models, adapters, tokenizers and data sets of a `GRPOTrainer`: what it takes, and that what it saves is what it
trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from groupwise.integrations.trl.datasets import MissingPromptError
from groupwise.trl import GRPOConfig, GRPOTrainer
from tests.integrations.trl.fixtures import POLICY, TEXTS, models, workplace
from tests.integrations.trl.test_flow import DATA, SMALL, letters

__all__ = ["models", "workplace"]

IDS = torch.tensor([[5, 6, 7, 8]])


def load(dtype: str = "float32") -> Any:
    return AutoModelForCausalLM.from_pretrained(POLICY, dtype=dtype)


def adapted(dtype: str = "float32", **options: Any) -> Any:
    return get_peft_model(load(dtype), LoraConfig(**{"r": 2, "task_type": "CAUSAL_LM", **options}))


def make(model: Any = POLICY, data: Any = DATA, **arguments: Any) -> GRPOTrainer:
    names = ("eval_dataset", "processing_class", "peft_config", "quantization_config", "reward_funcs")
    own = {name: arguments.pop(name) for name in names if name in arguments}
    reward = own.pop("reward_funcs", letters)
    return GRPOTrainer(model, reward, GRPOConfig(**{**SMALL, "max_steps": 1, **arguments}), data, **own)


@pytest.mark.parametrize(
    ("model", "arguments", "computes", "saves"),
    [
        (lambda: POLICY, {}, "float32", "float32"),
        (lambda: POLICY, {"model_init_kwargs": {"dtype": "bfloat16"}}, "bfloat16", "bfloat16"),
        (lambda: POLICY, {"model_init_kwargs": {"dtype": torch.float32}}, "float32", "float32"),
        (lambda: f"{Path(POLICY).resolve()}/", {"model_init_kwargs": {"dtype": "auto"}}, "float32", "float32"),
        (lambda: POLICY, {"bf16": True}, "bfloat16", "float32"),
        (load, {}, "float32", "float32"),
        (lambda: load("bfloat16"), {}, "bfloat16", "bfloat16"),
        (lambda: load("bfloat16"), {"bf16": True}, "bfloat16", "bfloat16"),
        (load, {"model_init_kwargs": {"dtype": "bfloat16"}}, "float32", "float32"),  # it is loaded already
        (lambda: adapted("bfloat16"), {}, "bfloat16", "float32"),
        (adapted, {"bf16": True}, "bfloat16", "float32"),
    ],
)
@pytest.mark.slow
def test_dtypes(
    workplace: Path, model: Callable[[], Any], arguments: dict[str, Any], computes: str, saves: str
) -> None:
    """With bf16 a model computes in bfloat16; otherwise in its own dtype. What is saved has the dtype of TRL."""
    trainer = make(model(), **arguments)
    assert trainer.model.dtype == getattr(torch, computes)
    trainer.train()
    trainer.save_model("saved")
    if Path("saved/adapter_config.json").exists():
        loaded = PeftModel.from_pretrained(load(), "saved")
    else:
        loaded = AutoModelForCausalLM.from_pretrained("saved")
    assert loaded.dtype == getattr(torch, saves)


@pytest.mark.parametrize(
    "options",
    [
        {"r": 4, "lora_alpha": 16, "target_modules": "all-linear", "lora_dropout": 0.1},
        {"r": 2, "use_rslora": True, "target_modules": ("q_proj", "o_proj")},
        {"r": 2, "target_modules": ["q_proj", "c_attn"]},  # PEFT takes those that exist
        {"r": 2, "init_lora_weights": "gaussian", "task_type": None},
        {"r": 2, "modules_to_save": [], "bias": "none", "rank_pattern": {}},
    ],
)
@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_an_adapter_and_the_merged_model_give_the_logits_of_training(
    workplace: Path, options: dict[str, Any], beta: float
) -> None:
    config = LoraConfig(**{"task_type": "CAUSAL_LM", **options})
    expected = get_peft_model(load(), LoraConfig(**{"task_type": "CAUSAL_LM", **options}))
    trainer = make(peft_config=config, beta=beta, learning_rate=0.1)
    assert len(list(trainer.model.parameters())) == len(list(expected.parameters()))
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    trainer.train()
    assert any(not torch.equal(weight, trainer.model.get_parameter(name)) for name, weight in before.items())
    trainer.save_model("saved")
    with torch.no_grad():
        logits = trainer.model.eval()(IDS).logits
        loaded = PeftModel.from_pretrained(load(), "saved")
        assert torch.allclose(loaded.eval()(IDS).logits, logits, atol=1e-5)
        loaded.merge_and_unload().save_pretrained("merged")
        assert torch.allclose(load_from("merged")(IDS).logits, logits, atol=1e-4)
        assert not torch.allclose(load()(IDS).logits, logits, atol=1e-3)


def load_from(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.slow
def test_a_checkpoint_of_an_adapter_is_loaded_by_peft(workplace: Path) -> None:
    trainer = make(adapted(), save_strategy="steps", save_steps=1)
    trainer.train()
    loaded = PeftModel.from_pretrained(load(), "out/checkpoint-1")
    with torch.no_grad():
        assert torch.allclose(loaded.eval()(IDS).logits, trainer.model.eval()(IDS).logits, atol=1e-5)


def with_two() -> Any:
    model = adapted()
    model.add_adapter("other", LoraConfig(r=2, task_type="CAUSAL_LM"))
    return model


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"model": Path("somewhere")}, TypeError, r"model is a PosixPath.*write str\(PosixPath"),
        ({"model": None}, TypeError, "model is a NoneType; give a name"),
        ({"model": torch.nn.Linear(2, 2)}, TypeError, "Linear, which is not a causal language model"),
        ({"model": "no/such"}, ValueError, "no folder no/such"),
        ({"peft_config": {"r": 4}}, TypeError, "peft_config is a dict"),
        ({"peft_config": IA3Config(task_type="CAUSAL_LM")}, TypeError, "IA3Config; only peft.LoraConfig"),
        ({"peft_config": LoraConfig(bias="all")}, ValueError, "bias = 'all' is not supported"),
        ({"peft_config": LoraConfig(rank_pattern={"q_proj": 2})}, ValueError, "rank_pattern"),
        ({"peft_config": LoraConfig(target_modules=["zzz"])}, ValueError, "no layer 'zzz'"),
        ({"peft_config": LoraConfig(target_modules=["lm_head"])}, ValueError, "lm_head"),
        ({"model": adapted, "peft_config": LoraConfig()}, ValueError, "PeftModel already"),
        ({"model": with_two}, ValueError, "2 adapters"),
        ({"processing_class": POLICY}, TypeError, "processing_class is a str"),
        ({"data": {"prompt": TEXTS}}, TypeError, "choose one of its splits"),
        ({"data": DatasetDict({"train": DATA})}, TypeError, r"choose one of its splits \(train\)"),
        ({"data": "rows.jsonl"}, TypeError, "train_dataset is a str.*load_dataset"),
        ({"data": DATA.select([])}, ValueError, "train_dataset: there are no rows"),
        ({"data": DATA.rename_column("prompt", "question")}, KeyError, "no column 'prompt'"),
        ({"data": Dataset.from_dict({"prompt": [None, "a"]})}, ValueError, "prompt is missing"),
        ({"data": Dataset.from_dict({"prompt": [1, 2]})}, ValueError, "prompt is of type int"),
        ({"data": Dataset.from_dict({"prompt": TEXTS, "completions": TEXTS})}, ValueError, "column 'completions'"),
        ({"eval_dataset": {"a": DATA.remove_columns("prompt")}}, KeyError, r"eval_dataset\['a'\] has no column"),
        ({"eval_dataset": DATA.select([])}, ValueError, "eval_dataset: there are no rows"),
        ({"generation_kwargs": {"eos_token_id": 7}}, ValueError, "eos_token_id=7 is not among"),
    ],
)
def test_what_is_refused_has_the_type_of_trls_error(
    workplace: Path, arguments: dict[str, Any], kind: type, words: str
) -> None:
    given = arguments | ({"model": arguments["model"]()} if arguments.get("model") in (adapted, with_two) else {})
    with pytest.raises(kind, match=words) as caught:
        make(**given)
    assert isinstance(caught.value, ValueError)
    assert not Path("out").exists()


def test_a_missing_column_is_a_key_error_with_a_readable_message() -> None:
    assert str(MissingPromptError("no 'prompt'")) == "no 'prompt'"


def test_the_tokenizer_is_loaded_as_in_trl(workplace: Path) -> None:
    tokenizer = make().processing_class
    assert (tokenizer.padding_side, tokenizer.truncation_side) == ("left", "left")
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    tokenizer.pad_token = None
    tokenizer.padding_side = "right"
    trainer = make(processing_class=tokenizer)
    assert trainer.processing_class is tokenizer
    assert tokenizer.padding_side == "right"
    assert tokenizer.pad_token == tokenizer.eos_token
    assert trainer.model.config.pad_token_id == tokenizer.eos_token_id


@pytest.mark.slow
def test_the_end_of_a_completion_may_be_repeated_in_generation_kwargs(workplace: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    assert make(generation_kwargs=ids).train().global_step == 1


def test_quantization_of_a_loaded_model_is_ignored_as_in_trl(workplace: Path) -> None:
    assert make(load(), quantization_config=object()).model is not None


ODD = {
    "number": range(8),
    "share": [0.5] * 8,
    "flag": [True] * 8,
    "nothing": [None] * 8,
    "nested": [[{"x": [1, None]}]] * 8,
    "raw": [b"a"] * 8,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    [
        Dataset.from_dict({"prompt": TEXTS, **ODD}),
        Dataset.from_dict({"prompt": TEXTS, **ODD}).to_iterable_dataset(),
        [{"prompt": text, **{name: next(iter(values)) for name, values in ODD.items()}} for text in TEXTS],
        Dataset.from_dict({"prompt": TEXTS}).with_transform(
            lambda rows: {**rows, **{name: list(values)[: len(rows["prompt"])] for name, values in ODD.items()}}
        ),
    ],
    ids=["Dataset", "IterableDataset", "list", "transform"],
)
def test_columns_of_odd_types_reach_the_rewards(workplace: Path, data: Any) -> None:
    calls: list[dict[str, Any]] = []

    def reward(completions: Any, **columns: Any) -> list[float]:
        calls.append(columns)
        return [1.0] * len(completions)

    make(data=data, reward_funcs=reward, shuffle_dataset=False, log_completions=True).train()
    for name, values in ODD.items():
        assert calls[0][name] == [next(iter(values))] * 4, name
    assert calls[0]["prompts"] == [TEXTS[0]] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "prompt",
    [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}],
        [{"role": role, "content": "a"} for role in ("user", "assistant", "user")],
        [{"role": "user", "content": "a", "name": "me"}],
    ],
)
def test_conversations_are_rendered_as_in_trl(workplace: Path, prompt: list[dict[str, str]]) -> None:
    data = Dataset.from_dict({"prompt": [prompt] * 4})
    trainer = make(data=data, reward_funcs=lambda completions, **_: [len(part[0]["content"]) for part in completions])
    ids = trainer.processing_class.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    assert list(trainer._setup.components.train.prompts[0].ids) == list(ids)
    trainer.train()


@pytest.mark.slow
@pytest.mark.parametrize("initial", ["gaussian", False])
def test_an_adapter_starts_as_peft_draws_it(workplace: Path, initial: Any) -> None:
    trainer = make(peft_config=LoraConfig(r=2, init_lora_weights=initial, target_modules="all-linear"))
    weights = dict(trainer.model.named_parameters())
    first = [weight for name, weight in weights.items() if "lora_A" in name]
    second = [weight for name, weight in weights.items() if "lora_B" in name]
    assert len(first) == len(second) == 14
    assert all(bool(weight.any()) for weight in first)
    assert all(bool(weight.any()) is (initial is False) for weight in second)
    if initial == "gaussian":
        assert torch.cat([weight.flatten() for weight in first]).std().item() == pytest.approx(0.5, rel=0.1)  # 1 / r
    trainer.train()
    trainer.save_model("saved")
    loaded = PeftModel.from_pretrained(load(), "saved").eval()
    with torch.no_grad():
        assert torch.allclose(loaded(IDS).logits, trainer.model.eval()(IDS).logits, atol=1e-5)
    if initial is False:
        with pytest.raises(ValueError, match="init_lora_weights = False with beta"):
            make(peft_config=LoraConfig(r=2, init_lora_weights=False), beta=0.1)


@pytest.mark.slow
def test_the_reference_of_a_trained_adapter_is_how_it_starts(workplace: Path) -> None:
    """As in TRL, where it is a second adapter."""
    model = adapted(init_lora_weights=False)
    trainer = make(model, beta=0.5)
    trainer.train()
    assert trainer.state.log_history[0]["kl"] == pytest.approx(0, abs=1e-6)
