"""The sides of benchmarks/step.py that train through TRL's interface: TRL itself, and the drop-in."""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import torch
from common import median
from step_work import LEARNING_RATE, between, now, peak, recipe_of, reward, rows, start_counting


def watch_of(args: argparse.Namespace) -> Any:
    """A callback of transformers that takes the time at each step's end."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(now(args))

    return Watch()


def run_trl_vllm(args: argparse.Namespace) -> dict[str, Any]:
    """TRL with vLLM on the same device, and with the importance weights that it then uses by default."""
    return run_trl(args, vllm=True)


def run_trl(args: argparse.Namespace, vllm: bool = False) -> dict[str, Any]:
    import trl

    warm, watch = 1, watch_of(args)
    times: list[float] = []
    trainer = make_trl(args, warm + args.repeat, [watch], library=trl, vllm=vllm)
    generate = trainer._generate

    def timed(*args_: Any, **kwargs: Any) -> Any:
        start = now(args)
        completions = generate(*args_, **kwargs)
        times.append(now(args) - start)
        return completions

    trainer._generate = timed
    start_counting(args)
    trainer.train()
    lengths = [entry["completions/mean_length"] for entry in trainer.state.log_history if "reward" in entry]
    if any(length != args.new_tokens for length in lengths):
        raise SystemExit(f"TRL stopped early ({lengths}); the comparison would not be fair")
    step, generation = median(between(watch.ends, warm)), median(times[warm:])
    return {
        "step": step,
        "generation": generation,
        "training": step - generation,
        "peak": peak(args),
        "tokens": args.prompts * args.samples * args.new_tokens,
    }


def make_trl(
    args: argparse.Namespace,
    steps: int,
    callbacks: list[Any],
    library: Any,
    dtype: torch.dtype | None = None,
    vllm: bool = False,
) -> Any:
    """The trainer of `trl`, or of `groupwise.trl`: everything else is the same."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from groupwise.model.device import resolve_device, resolve_dtype

    answers = args.prompts * args.samples
    micro = min(args.micro, answers)
    dtype = dtype or resolve_dtype(args.dtype or "auto", resolve_device(args.device))
    generation: dict[str, Any] = {"generation_kwargs": {"min_new_tokens": args.new_tokens}}
    if vllm:
        longest = max(len(row["prompt"]) for row in rows(args)) + args.new_tokens
        generation = {
            "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": args.memory_share,
            "vllm_max_model_length": longest + 8, "generation_kwargs": {"ignore_eos": True},
        }  # fmt: skip
    config = library.GRPOConfig(
        output_dir=str(args.folder / "trl"),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=answers // micro,
        num_generations=args.samples,
        max_completion_length=args.new_tokens,
        temperature=1.0,
        top_k=args.top_k or 0,
        top_p=1.0,
        **generation,
        loss_type="dapo",
        beta=0.0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_steps=steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        gradient_checkpointing=False,
        bf16=dtype == torch.bfloat16,
        use_cpu=args.device == "cpu",
        shuffle_dataset=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return library.GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(rows(args)),
            processing_class=AutoTokenizer.from_pretrained(args.model),
            callbacks=callbacks,
        )


def run_agreement(args: argparse.Namespace) -> dict[str, Any]:
    """Loss and gradient of the same samples by both, in float32, on a smaller batch."""
    from groupwise.core import group_advantages
    from groupwise.core.losses import LOSSES
    from groupwise.data import Prompt
    from groupwise.generate import Engine, Sampling
    from groupwise.model import MasterWeights, load_model, prepare
    from groupwise.training.rollout.batch import Batch, GroupAdvantages
    from groupwise.training.update.minibatch import build_minibatch
    from groupwise.training.update.optimizer import make_optimizer
    from groupwise.training.update.updater import Updater

    args.prompts, args.samples, args.new_tokens, args.dtype = 2, 4, min(32, args.new_tokens), "float32"
    torch.backends.cuda.matmul.allow_tf32 = False
    texts = [row["prompt"] for row in rows(args)]
    prompts = [tuple(text.encode()) for text in texts]
    model = load_model(args.model, device=args.device, dtype="float32")
    handle = prepare(model, compile=False)
    rollout = Engine(handle).generate(
        prompts,
        args.samples,
        Sampling(max_new_tokens=args.new_tokens, min_new_tokens=args.new_tokens, top_k=args.top_k),
    )
    ids = [row.clone() for row in rollout.ids]
    rewards = torch.tensor(reward([row.tolist() for row in ids]), dtype=torch.float64)
    advantages = group_advantages(rewards, args.samples).float()
    recipe = recipe_of(args, 1)
    batch = Batch(
        rows=rows(args), row_numbers=[0, 1], prompts=[Prompt(p, t) for p, t in zip(prompts, texts, strict=True)],
        samples=args.samples, ids=ids, texts=[""] * len(ids), stop_reasons=["length"] * len(ids),
        sampler_logps=list(rollout.logps), versions=list(rollout.versions), kept=None, rewards=rewards[:, None],
        dropped=torch.zeros(len(ids), dtype=torch.bool),
    )  # fmt: skip
    none = torch.zeros(len(ids), dtype=torch.bool)
    batch_advantages = GroupAdvantages(rewards, batch.prompt_of, advantages, {}, none)
    masters = MasterWeights(model)
    updater = Updater(handle, masters, make_optimizer(recipe, model, masters), None, 10**6, LOSSES["dapo"])
    result = updater._gradient(build_minibatch(batch, batch_advantages, [0, 1], recipe), recipe, False, False)
    ours = {name: master.grad.clone() for name, master in masters.named_parameters()}
    masters.close()

    import trl

    trainer = make_trl(args, 1, [], trl, torch.float32)
    trl_model = trainer.model
    device = next(trl_model.parameters()).device
    width = max(map(len, prompts))
    padded = torch.tensor([[256] * (width - len(p)) + list(p) for p in prompts]).repeat_interleave(args.samples, 0)
    seen = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]).repeat_interleave(args.samples, 0)
    inputs = {
        "prompt_ids": padded, "prompt_mask": seen, "completion_ids": torch.stack(ids),
        "completion_mask": torch.ones(len(ids), args.new_tokens, dtype=torch.long), "advantages": advantages,
        "num_items_in_batch": torch.tensor(len(ids) * args.new_tokens),
    }  # fmt: skip
    # TRL divides by the accumulation steps of its loop, which does not run here.
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer._compute_loss(trl_model.train(), {name: value.to(device) for name, value in inputs.items()})
    loss.backward()
    theirs = {name: parameter.grad for name, parameter in trl_model.named_parameters() if parameter.grad is not None}
    if ours.keys() != theirs.keys():
        raise SystemExit(f"the two models have different weights: {sorted(ours.keys() ^ theirs.keys())[:3]}")
    difference = sum(float((ours[name] - theirs[name]).double().square().sum()) for name in ours) ** 0.5
    size = sum(float(gradient.double().square().sum()) for gradient in theirs.values()) ** 0.5
    return {
        "ours": float(sum(result.values.values())),
        "theirs": float(loss.detach()),
        "gradient": difference / size,
        "size": size,
    }
