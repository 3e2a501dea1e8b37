"""TRL's DPOTrainer with the settings of a test case. Importing this module takes seconds, so tests import it late."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
from transformers import LlamaForCausalLM, TrainerCallback
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from trl import DPOConfig, DPOTrainer

from groupwise.model.tiny import tiny_tokenizer
from tests.training.preference.test_dpo_peer import BATCH, LORA, STEPS, Case, Run, make_rows, trained


class OrderedDPOTrainer(DPOTrainer):
    """Takes pairs in their order and records its losses."""

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)

    def compute_loss(self, *arguments: Any, **options: Any) -> Tensor:
        loss = super().compute_loss(*arguments, **options)
        self.losses.append(loss.item())
        return loss


class StepRecorder(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.run = Run(trained(model))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        weights = dict(model.named_parameters())
        self.run.gradients.append({name: weights[name].grad.clone() for name in self.run.start})

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.run.weights.append(trained(model))


def trl_settings(case: Case, folder: Path) -> DPOConfig:
    preference, kinds = case.preference, case.preference["kind"]
    return DPOConfig(
        output_dir=str(folder),
        loss_type=[kinds] if isinstance(kinds, str) else kinds,
        loss_weights=preference.get("kind_weights"),
        beta=preference.get("beta", 0.1),
        max_length=preference.get("max_length"),
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


def trl_run(folder: Path, case: Case, source: Path, adapter: Mapping[str, Tensor] | None) -> Run:
    """The run of a case in TRL; ``adapter``: initial values of LoRA's weights."""
    lora = LoraConfig(r=LORA["rank"], lora_alpha=LORA["alpha"], target_modules=LORA["targets"], task_type="CAUSAL_LM")
    recorder = StepRecorder()
    trainer = OrderedDPOTrainer(
        LlamaForCausalLM.from_pretrained(source, dtype=getattr(torch, case.dtype)),
        args=trl_settings(case, folder),
        train_dataset=Dataset.from_list(make_rows(case.form)),
        processing_class=tiny_tokenizer(),
        callbacks=[recorder],
        peft_config=lora if case.lora else None,
    )
    trainer.losses = []
    if adapter is not None:
        trainer.model.load_state_dict(adapter, strict=False)
    with in_float64(case.dtype):
        trainer.train()
    recorder.run.losses = trainer.losses
    recorder.run.metrics = [row for row in trainer.state.log_history if "rewards/margins" in row]
    return recorder.run


@contextmanager
def in_float64(dtype: str) -> Iterator[None]:
    """Within this block, norms and TRL's log-probs are float64 if the model is."""

    def norm(self: Any, states: Tensor) -> Tensor:
        return self.weight * states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.variance_epsilon)

    def logps(hidden: Tensor, weight: Tensor, bias: None, targets: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        values = (hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
        nothing = torch.zeros_like(values)  # entropy and other statistics
        return values, nothing, None, nothing, nothing.bool()

    with pytest.MonkeyPatch.context() as patch:
        if dtype == "float64":
            patch.setattr(LlamaRMSNorm, "forward", norm)
            patch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", SimpleNamespace(apply=logps))
        yield
