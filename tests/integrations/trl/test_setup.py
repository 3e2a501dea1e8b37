"""What `GRPOTrainer` loads and refuses before it trains: arguments, data, rewards, adapters."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from peft import LoraConfig, PrefixTuningConfig
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    EarlyStoppingCallback,
)

from groupwise.integrations.trl.datasets import evaluation_rows, training_rows
from groupwise.integrations.trl.logs import MetricAverages, sample_metrics
from groupwise.integrations.trl.rewards import ModelReward, RewardWeights, make_rewards
from groupwise.integrations.trl.run import Epoch, RunEpochs
from groupwise.integrations.trl.setup import NOT_CALLED
from groupwise.trl import GRPOConfig, GRPOTrainer
from tests.integrations.trl.fixtures import POLICY, REWARD_MODEL, TEXTS, models, workplace
from tests.integrations.trl.test_flow import DATA, SMALL, letters, make

__all__ = ["models", "workplace"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"quantization_config": object()}, "quantised"),
        ({"reward_funcs": None}, "reward_funcs is missing"),
        ({"reward_funcs": [letters, 3]}, r"reward_funcs has 3 \(int\)"),
        ({"reward_funcs": POLICY}, "not a reward model"),
        ({"reward_processing_classes": [None, None]}, "2 tokenizers for 1 reward_funcs.* must match"),
        ({"train_dataset": None}, "train_dataset is missing"),
        ({"train_dataset": DatasetDict({"train": DATA})}, r"choose one of its splits \(train\)"),
        ({"train_dataset": DATA.rename_column("prompt", "question")}, "no column 'prompt'"),
        ({"train_dataset": Dataset.from_dict({"prompt": TEXTS, "image": TEXTS})}, "images are not supported"),
        ({"eval_dataset": {}}, "empty dict"),
        (
            {"args": GRPOConfig(**SMALL, eval_strategy="epoch")},
            "eval_strategy is 'epoch'.* no eval_dataset",
        ),
        ({"callbacks": [print]}, "transformers.TrainerCallback"),
        ({"processing_class": SimpleNamespace()}, "give the tokenizer of a text model"),
        ({"peft_config": PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")}, "PrefixTuningConfig"),
        ({"peft_config": LoraConfig(use_dora=True)}, "use_dora = True is not supported"),
        ({"peft_config": LoraConfig(modules_to_save=["lm_head"])}, "modules_to_save"),
        ({"peft_config": LoraConfig(init_lora_weights="pissa")}, "init_lora_weights"),
        ({"peft_config": LoraConfig(target_modules=r"model\.layers\.\d+")}, "selects no layer"),
        ({"args": SimpleNamespace(output_dir="out")}, "SimpleNamespace without num_generations"),
    ],
)
def test_refused_with_a_sentence(workplace: Path, arguments: dict[str, Any], words: str) -> None:
    given = {"reward_funcs": letters, "args": GRPOConfig(**SMALL), "train_dataset": DATA, **arguments}
    with pytest.raises(ValueError, match=words):
        GRPOTrainer(POLICY, **given)
    assert not Path("out").exists()


def test_a_weight_for_each_reward(workplace: Path) -> None:
    with pytest.raises(ValueError, match=r"reward_weights has 1 numbers for 2 reward_funcs.* must match"):
        make([letters, len], reward_weights=[1.0])


def test_a_stream_needs_max_steps(workplace: Path) -> None:
    with pytest.raises(ValueError, match="set max_steps"):
        make(train_dataset=DATA.to_iterable_dataset(), max_steps=-1, num_train_epochs=1)


def test_a_subclass_that_replaces_a_part_of_trls_loop_is_refused(workplace: Path) -> None:
    class Mine(GRPOTrainer):
        def compute_loss(self, *arguments: Any, **options: Any) -> None: ...

    with pytest.raises(ValueError, match="Mine has a method compute_loss"):
        Mine(POLICY, letters, GRPOConfig(**SMALL), DATA)


def test_the_methods_that_a_subclass_may_not_replace_are_trls() -> None:
    from trl import GRPOTrainer as Peer

    assert [name for name in NOT_CALLED if not hasattr(Peer, name)] == []
    assert [name for name in NOT_CALLED if hasattr(GRPOTrainer, name)] == []


def test_arguments_are_in_trls_order() -> None:
    import inspect

    from trl import GRPOTrainer as Peer

    ours, theirs = (inspect.signature(kind.__init__).parameters for kind in (GRPOTrainer, Peer))
    assert list(ours) == list(theirs)
    assert [entry.default for entry in ours.values()] == [entry.default for entry in theirs.values()]


def test_attributes(workplace: Path) -> None:
    trainer = make(eval_dataset=DATA.select([0]))
    assert trainer.ref_model is None
    assert trainer.is_world_process_zero()
    assert trainer.is_local_process_zero()
    assert trainer.accelerator.is_main_process
    assert trainer.reward_funcs == [letters]
    assert len(trainer.train_dataset) == 8
    assert trainer.model.config._name_or_path == POLICY
    assert trainer.pop_callback(EarlyStoppingCallback) is None
    trainer.add_callback(EarlyStoppingCallback)
    trainer.remove_callback(EarlyStoppingCallback)
    assert trainer.get_num_trainable_parameters() == trainer.model.num_parameters()
    assert trainer.hub_model_id is None
    assert (trainer.beta, trainer.temperature, trainer.epsilon_high) == (0.0, 1.0, 0.2)
    trainer.end()
    trainer.log({"own": 1.0})
    assert trainer.state.log_history == [{"own": 1.0, "epoch": 0, "step": 0}]


def test_only_the_rows_of_the_run_are_read_from_a_stream() -> None:
    read: list[int] = []

    def rows():
        for number in range(1000):
            read.append(number)
            yield {"prompt": f"{number}"}

    assert len(training_rows(rows(), limit=3, remove_unused_columns=False)) == 3
    assert len(read) <= 4


def test_formats_of_data_sets() -> None:
    arrays = DATA.with_format("numpy")
    (first, *_), lists = training_rows(arrays, limit=None, remove_unused_columns=False), DATA.to_list()
    assert first == lists[0]
    assert type(first["prompt"]) is str
    sets = evaluation_rows(DatasetDict({"a": DATA, "b": DATA.select([0])}), remove_unused_columns=False)
    assert {name: len(part) for name, part in sets.items()} == {"a": 8, "b": 1}


def test_a_conversation_may_end_with_the_assistant(workplace: Path) -> None:
    """As in TRL 1.16 the answer is another message of the assistant."""
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Let me think."}]
    trainer = make(train_dataset=Dataset.from_dict({"prompt": [chat] * 4}))
    expected = trainer.processing_class.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert trainer._setup.components.train.prompts[0].text == expected


def test_reward_names_are_trls() -> None:
    from functools import partial

    class Judge:
        def __call__(self, **_: Any) -> list[float]: ...

    given = [letters, partial(letters), Judge(), lambda **_: []]
    functions = make_rewards(given, [None] * 4, RewardWeights(None, 4), {})
    assert [function.name for function in functions] == ["letters", "letters_2", "Judge", "<lambda>"]
    assert [function.metric_name for function in functions] == ["letters", "letters", "Judge", "<lambda>"]


@pytest.mark.parametrize("conversational", [False, True])
def test_a_reward_model_scores_as_in_trl(workplace: Path, conversational: bool) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(REWARD_MODEL, num_labels=1).eval()
    tokenizer = AutoTokenizer.from_pretrained(REWARD_MODEL)
    prompts, completions = TEXTS[:3], ["a", "bcd", "efghijk"]
    if conversational:
        prompts = [[{"role": "user", "content": text}] for text in prompts]
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    ours = ModelReward(model, tokenizer, "model", {})(prompts, completions)
    texts = [
        tokenizer.apply_chat_template(prompt + completion, tokenize=False) if conversational else prompt + completion
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
    with torch.inference_mode():
        expected = model(**inputs).logits[:, 0].tolist()
    assert ours == pytest.approx(expected, abs=1e-6)


def test_sample_metrics_by_hand() -> None:
    nan = torch.nan
    rewards = torch.tensor([[1.0, nan], [1.0, nan], [0.0, 2.0], [4.0, 0.0], [nan, nan], [2.0, nan]]).double()
    lengths, truncated = torch.tensor([3, 5, 5, 1, 2, 2]), torch.tensor([False, True, True, False, False, False])
    metrics = sample_metrics(lengths, truncated, rewards, {"a": 1.0, "b": 0.5}, samples=2)
    assert metrics["completions/mean_terminated_length"] == 2.0
    assert metrics["completions/max_terminated_length"] == 3.0
    assert metrics["completions/clipped_ratio"] == pytest.approx(2 / 6)
    assert metrics["rewards/a/mean"] == pytest.approx(8 / 5)
    assert metrics["rewards/b/std"] == pytest.approx(2**0.5)
    assert metrics["reward"] == pytest.approx((1 + 1 + 1 + 4 + 2) / 5)
    assert metrics["frac_reward_zero_std"] == pytest.approx(1 / 3)  # a group of one reward has no standard deviation


def test_averages_leave_out_nan() -> None:
    averages = MetricAverages()
    averages.add({"a": 1.0, "b": float("nan")})
    averages.add({"a": float("nan"), "b": float("nan")})
    averages.add({"c": 0.0})
    averages.add({"c": None})
    averages.replace("n", 5.0)
    copied = MetricAverages()
    copied.load_state(averages.state())
    assert averages.take() == copied.take() == {"a": 1.0, "b": None, "c": None, "n": 5.0}
    assert averages.take() == {}


def test_epochs_are_counted_as_in_transformers() -> None:
    args = GRPOConfig(**{**SMALL, "max_steps": -1, "gradient_accumulation_steps": 3, "num_iterations": 2})
    translation: Any = SimpleNamespace(updates=8)
    epochs = RunEpochs.of(args, translation, DATA, 8)  # 2 rollouts of 3 prompts, in 6 micro-batches each
    assert (epochs.per_epoch, epochs.number) == (4, 2)
    epoch = Epoch(epochs)
    assert [epoch.at(update) for update in (1, 4)] == [0.25, 1.0]
    assert [update for update in range(1, 5) if epoch.ends_at(update)] == [4]
    assert epoch.begin_next(4)
    assert epoch.at(6) == 1.5
    resumed = Epoch(epochs)
    resumed.load_state(epoch.state())
    assert resumed.at(6) == 1.5
    assert not epoch.begin_next(6)


@pytest.mark.slow
def test_an_adapter_is_trained_and_saved_as_peft_saves_it(workplace: Path) -> None:
    from peft import PeftModel

    trainer = make(peft_config=LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, task_type="CAUSAL_LM"), beta=0.1)
    assert trainer.ref_model is None
    assert trainer.recipe.model.lora.targets == ["q_proj", "v_proj"]  # PEFT's own for this architecture
    base = {name: weight.clone() for name, weight in trainer.model.named_parameters() if "lora_" not in name}
    trainer.train()
    for name, weight in trainer.model.named_parameters():
        assert "lora_" in name or torch.equal(weight, base[name])
    trainer.save_model("saved")
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= {
        path.name for path in Path("saved").iterdir()
    }
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(POLICY), "saved")
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected = trainer.model.eval()(ids).logits
        assert torch.allclose(loaded(ids).logits, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"target_modules": r".*\.1\..*(q|k)_proj"}, 2),
        ({"target_modules": ["q_proj", "v_proj"], "layers_to_transform": 0}, 2),
        ({"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1], "layers_pattern": "layers"}, 2),
        ({"target_modules": "all-linear", "exclude_modules": ["gate_proj", "up_proj", "down_proj"]}, 8),
        ({"exclude_modules": r".*v_proj"}, 2),
    ],
)
def test_an_adapter_is_on_the_layers_that_peft_would_select(
    workplace: Path, options: dict[str, Any], count: int
) -> None:
    from peft import get_peft_model

    config = LoraConfig(task_type="CAUSAL_LM", **options)
    trainer = make(peft_config=config)
    names = [name for name, weight in trainer.model.named_parameters() if weight.requires_grad]
    expected = get_peft_model(AutoModelForCausalLM.from_pretrained(POLICY), config).named_parameters()
    assert names == [name for name, weight in expected if weight.requires_grad]
    assert len(names) == 2 * count


@pytest.mark.slow
def test_the_model_can_be_used_after_training(workplace: Path) -> None:
    trainer = make(beta=0.1, sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=1.0)
    start = {name: weight.clone() for name, weight in trainer.ref_model.state_dict().items()}
    trainer.train()
    trained = trainer.model.state_dict()
    assert any(not torch.equal(weight, trained[name]) for name, weight in start.items())
    for name, weight in trainer.ref_model.state_dict().items():
        assert torch.equal(weight, trained[name])
    inputs = trainer.processing_class("Say", return_tensors="pt")
    trainer.model.eval()
    assert trainer.model.generate(**inputs, max_new_tokens=3, do_sample=False).shape[1] > inputs["input_ids"].shape[1]
    trainer.save_model("saved")
    saved = AutoModelForCausalLM.from_pretrained("saved")
    assert saved.dtype == torch.float32
    greedy = {**inputs, "max_new_tokens": 3, "do_sample": False}
    assert torch.equal(saved.generate(**greedy), trainer.model.generate(**greedy))


@pytest.mark.slow
def test_a_second_training_goes_on_from_the_trained_weights(workplace: Path) -> None:
    trainer = make()
    trainer.train()
    after_first = [weight.clone() for weight in trainer.model.parameters()]
    trainer.train()
    assert trainer.state.global_step == 2
    assert Path("out/earlier-run-1").is_dir()
    assert any(not torch.equal(one, other) for one, other in zip(after_first, trainer.model.parameters(), strict=True))


def test_other_names_are_those_of_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    import trl

    from groupwise.trl import ModelConfig, TrlParser

    assert (ModelConfig, TrlParser) == (trl.ModelConfig, trl.TrlParser)
    with pytest.raises(ImportError):
        from groupwise.trl import SuchTrainer  # noqa: F401
    monkeypatch.setattr("groupwise.trl.is_installed", lambda package: False)
    with pytest.raises(ImportError, match="ScriptArguments is one of TRL's own, which is not installed"):
        from groupwise.trl import ScriptArguments  # noqa: F401
