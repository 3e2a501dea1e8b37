"""A run folder of any size, written by the trainer's own writers without training: for measuring what reads it.

Usage::

    python benchmarks/large_run.py runs/large --steps 1000 --samples 256

The numbers and texts are random, but of the kind that a run has: rewards rise, completions get longer, some groups
have no spread, some completions are cut off. 1,000 steps × 256 samples are about 40 MB on disk.
"""

from __future__ import annotations

import argparse
import math
import random
from pathlib import Path
from typing import Any

from groupwise.config import Recipe
from groupwise.rundir import RunDir
from groupwise.training.store.recorder import Recorder
from groupwise.training.store.run_folder import mark_finished, write_inputs, write_recipe
from groupwise.training.store.token_files import TokenRow

SAMPLES_PER_PROMPT = 16
TEXT = (
    "the patient has a fever and cough so we consider first whether it is viral or bacterial then because lungs are "
    "clear on both sides with normal oxygen this makes pneumonia less likely than bronchitis therefore treatment rest "
    "fluids answer option history of smoking pain in chest worse after meals better with antacids suggests reflux not "
    "cardiac cause let me check again each step total number equals sum minus half of remaining apples per day costs"
)
EVALUATED_ROWS, EVALUATE_EVERY = 200, 50
TOKENS_EVERY, TOKENS_PROMPTS = 10, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=256, help=f"per step, {SAMPLES_PER_PROMPT} of each prompt")
    parser.add_argument("--words", type=int, default=75, help="of a completion, about 100 tokens")
    args = parser.parse_args()
    write_large_run(args.folder, steps=args.steps, samples=args.samples, words=args.words)


def write_large_run(folder: Path, *, steps: int, samples: int, words: int = 75) -> None:
    """Write a finished run. ``samples`` of each step belong to prompts of `SAMPLES_PER_PROMPT` samples."""
    rng, prompts = random.Random(0), max(1, samples // SAMPLES_PER_PROMPT)
    recipe = Recipe(
        task="gsm8k",
        train={"steps": steps, "batch_size": prompts},
        sampling={"samples_per_prompt": SAMPLES_PER_PROMPT},
        loss={"kl_coef": 0.05},
        evaluate={"every": EVALUATE_EVERY},
    )
    inputs = {
        "model": recipe.model.source, "task": recipe.task, "rewards": ["correct", "format"],
        "training rows": "7473, 0000000000000000", "held-out rows": f"{EVALUATED_ROWS}, 0000000000000000",
    }  # fmt: skip
    with RunDir.create(folder) as run:
        write_recipe(run, recipe, print, resuming=False)
        write_inputs(run, inputs, "large.toml")
        recorder = Recorder(run, say=print, tensorboard=False)
        for step in range(steps + 1):
            progress = step / steps
            if step:
                recorder.step(step, _metrics(rng, step, progress, samples))
                table = _rollouts(rng, step, prompts, progress, words)
                recorder.rollouts(step, table, _tokens(rng, table) if (step - 1) % TOKENS_EVERY == 0 else ())
            if step % EVALUATE_EVERY == 0:
                recorder.evaluation(step, _evaluation(progress), _answers(rng, step, progress, words))
        recorder.close()
        mark_finished(run, steps, steps)


def _accuracy(progress: float) -> float:
    return 0.2 + 0.6 * (1 - math.exp(-3 * progress))


def _metrics(rng: random.Random, step: int, progress: float, samples: int) -> dict[str, float]:
    """About eighty metrics, as a run of several terms and rewards logs."""
    accuracy = _accuracy(progress) + rng.gauss(0, 0.03)
    fixed = {
        "reward": 1.1 * accuracy,
        "reward_std": 0.4 * (1 - progress / 2),
        "frac_reward_zero_std": 0.1 + 0.3 * progress + rng.gauss(0, 0.02),
        "accuracy": accuracy,
        "accuracy_no_answer": 0.05 * (1 - progress),
        "rewards/correct/mean": accuracy,
        "rewards/correct/std": 0.4,
        "rewards/format/mean": 0.9,
        "rewards/format/std": 0.1,
        "completions/mean_length": 80 + 40 * progress + rng.gauss(0, 2),
        "completions/clipped_ratio": 0.05,
        "signal/contributing": 0.8 - 0.2 * progress,
        "loss": rng.gauss(0, 0.01),
        "loss/policy": rng.gauss(0, 0.01),
        "loss/kl": 0.001 * progress,
        "kl": 0.02 * progress + abs(rng.gauss(0, 0.002)),
        "entropy": 1.2 - 0.5 * progress,
        "grad_norm": 0.3 + abs(rng.gauss(0, 0.05)),
        "learning_rate": 1e-6,
        "temperature": 1.0,
        "samples_per_prompt": SAMPLES_PER_PROMPT,
        "num_tokens": step * samples * 100,
        "epoch": step / 467,
        "tokens_per_second": 5000 + rng.gauss(0, 200),
        "time/generate": 3 + rng.random(),
        "time/reward": 0.2 + rng.random() / 10,
        "time/train": 2 + rng.random(),
        "memory/generate": 40.0,
        "memory/train": 61.0,
        "step_time": 5.7 + rng.random(),
    }
    return fixed | {f"grad_norm/part_{number:02d}": rng.random() for number in range(50)}


def _evaluation(progress: float) -> dict[str, float]:
    value = _accuracy(progress)
    half = 1.96 * math.sqrt(value * (1 - value) / EVALUATED_ROWS)
    return {"accuracy": value, "accuracy_low": value - half, "accuracy_high": value + half, "mean_length": 90.0}


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(TEXT.split(), k=max(1, round(rng.gauss(words, words / 5)))))


def _rollouts(rng: random.Random, step: int, prompts: int, progress: float, words: int) -> dict[str, list[Any]]:
    """One row per sample; the samples of a prompt begin alike, as real ones do."""
    table: dict[str, list[Any]] = {}
    for number in range(prompts):
        row = (step * prompts + number) % 7473
        prompt, beginning = f"Question {row}: {_text(rng, 40)}?", _text(rng, words // 3)
        rewards = [float(rng.random() < _accuracy(progress)) for _ in range(SAMPLES_PER_PROMPT)]
        mean = sum(rewards) / len(rewards)
        for sample, right in enumerate(rewards):
            completion = f"{beginning} {_text(rng, 2 * words // 3)}. The answer is {row if right else row + sample}."
            has_spread = 0 < mean < 1
            values = {
                "step": step, "prompt_number": number, "row": row, "sample": sample, "group": number,
                "prompt": prompt, "completion": completion, "reward": right + 0.1, "reward/correct": right,
                "reward/format": 0.1, "grade/accuracy": bool(right), "advantage": right - mean,
                "contributes": has_spread, "masked_out": None if has_spread else "equal_rewards",
                "prompt_tokens": 60, "completion_tokens": len(completion) // 5,
                "stop_reason": "length" if rng.random() < 0.05 else "eos",
            }  # fmt: skip
            for name, value in values.items():
                table.setdefault(name, []).append(value)
    return table


def _tokens(rng: random.Random, table: dict[str, list[Any]]) -> list[TokenRow]:
    """The tokens of the first prompts' samples, one for every five characters."""
    rows = []
    for index in range(TOKENS_PROMPTS * SAMPLES_PER_PROMPT):
        completion = table["completion"][index]
        ends = [min(end, len(completion)) for end in range(5, len(completion) + 5, 5)]
        logps = [-rng.expovariate(1.0) for _ in ends]
        place = {name: table[name][index] for name in ("step", "prompt_number", "row", "sample")}
        entropy, ref_logps = [rng.random() for _ in ends], [logp + rng.gauss(0, 0.1) for logp in logps]
        rows.append(TokenRow(**place, completion=completion, ids=list(range(len(ends))), ends=ends, sampler_logps=logps,
                             policy_logps=logps, entropy=entropy, ref_logps=ref_logps))  # fmt: skip
    return rows


def _answers(rng: random.Random, step: int, progress: float, words: int) -> dict[str, list[Any]]:
    """One held-out completion per row."""
    rows = range(EVALUATED_ROWS)
    return {
        "step": [step] * EVALUATED_ROWS,
        "row": list(rows),
        "sample": [0] * EVALUATED_ROWS,
        "prompt": [f"Held-out question {row}?" for row in rows],
        "completion": [_text(rng, words) for _ in rows],
        "completion_tokens": [words] * EVALUATED_ROWS,
        "stop_reason": ["eos"] * EVALUATED_ROWS,
        "grade/accuracy": [rng.random() < _accuracy(progress) for _ in rows],
    }


if __name__ == "__main__":
    main()
