"""TRL 1.16's loss functions, called with our tensors.

They are methods of trainers, so a stand-in object has the attributes that they read; `make_grpo_trainer` is a real
trainer. float64 is the default dtype during a call, since TRL makes tensors from Python numbers in places
(`torch.where(mask, 1.0, 1.05)`).
"""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import torch


@contextmanager
def float64_by_default():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def make_grpo_trainer(folder, *, size, group, length):
    """A `GRPOTrainer` of a tiny model whose batch has ``size`` completions, with two rewards that are always 0."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", "a", "b", "c"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )
    args = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=size,
        num_generations=group,
        max_completion_length=length,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=1,
    )

    def first(completions, **_):
        return [0.0] * len(completions)

    def second(completions, **_):
        return [0.0] * len(completions)

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=[first, second],
            args=args,
            train_dataset=Dataset.from_list([{"prompt": "a b"}] * size),
            processing_class=tokenizer,
        )
    trainer.model.train()
    return trainer


def _accelerator():
    return SimpleNamespace(
        num_processes=1,
        process_index=0,
        device=torch.device("cpu"),
        sync_gradients=True,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
        pad_across_processes=lambda x, dim, pad_index: x,
    )


def grpo_loss(
    batch,
    *,
    loss,
    ratio="token",
    clip_low=0.2,
    clip_high=0.2,
    dual_clip=None,
    max_length=None,
    total_tokens=None,
    accumulation=1,
    threshold=None,
    entropy=None,
    top_fraction=1.0,
    beta=0.0,
    bias_corrected=False,
    use_old=True,
):
    """`GRPOTrainer._compute_loss` for one micro-batch: the loss and the logged metrics."""
    from trl import GRPOTrainer

    args = SimpleNamespace(
        delta=dual_clip,
        use_bias_correction_kl=bias_corrected,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
        steps_per_generation=accumulation,
    )
    entropy = torch.zeros_like(batch.logps) if entropy is None else entropy
    trainer = SimpleNamespace(
        args=args,
        loss_type=loss,
        importance_sampling_level=ratio,
        epsilon_low=clip_low,
        epsilon_high=clip_high,
        beta=beta,
        max_completion_length=max_length,
        off_policy_mask_threshold=threshold,
        top_entropy_quantile=top_fraction,
        current_gradient_accumulation_steps=accumulation,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        model=SimpleNamespace(training=True),
        accelerator=_accelerator(),
        _metrics={"train": defaultdict(list)},
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *_, **__: (batch.logps, entropy, None),
    )
    trainer.get_high_entropy_mask = partial(GRPOTrainer.get_high_entropy_mask, trainer)
    rows = len(batch.logps)
    inputs = {
        "prompt_ids": torch.zeros(rows, 1, dtype=torch.long),
        "prompt_mask": torch.ones(rows, 1, dtype=torch.long),
        "completion_ids": torch.zeros(batch.logps.shape, dtype=torch.long),
        "completion_mask": batch.mask.long(),
        "advantages": batch.advantages,
        "ref_per_token_logps": batch.ref_logps,
        "num_items_in_batch": torch.tensor(float(batch.tokens if total_tokens is None else total_tokens)),
    }
    if use_old:
        inputs["old_per_token_logps"] = batch.old_logps
    with float64_by_default():
        loss_value = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss_value, trainer._metrics["train"]


def off_policy_mask(*args):
    from trl import GRPOTrainer

    return GRPOTrainer.get_off_policy_mask(*args)


def dpo_loss(token_logps, token_mask, ref_chosen, ref_rejected, *, kinds, weights, beta, label_smoothing, tau=0.05):
    """`DPOTrainer._compute_loss`: token_logps ``(2N, T)`` with the chosen answers first."""
    from trl import DPOTrainer

    zeros = torch.zeros_like(token_logps)
    outputs = SimpleNamespace(log_probs=token_logps, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    trainer = SimpleNamespace(
        args=SimpleNamespace(discopop_tau=tau),
        loss_types=kinds,
        loss_weights=weights,
        beta=beta,
        label_smoothing=label_smoothing,
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        precompute_ref_logps=True,
        use_weighting=False,
        aux_loss_enabled=False,
        model=SimpleNamespace(training=True),
        accelerator=_accelerator(),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    prompt = torch.zeros(len(token_mask), 1, dtype=torch.long)  # one prompt token, so that shifting drops nothing
    completion_mask = torch.cat([prompt, token_mask.long()], dim=1)
    inputs = {
        "input_ids": torch.zeros_like(completion_mask),
        "attention_mask": torch.ones_like(completion_mask),
        "completion_mask": completion_mask,
        "ref_chosen_logps": ref_chosen,
        "ref_rejected_logps": ref_rejected,
    }
    with float64_by_default():
        loss = DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    return loss, trainer._metrics["train"]
