"""Record what short runs end with, so that a refactoring can show that it changed nothing.

    python tools/record_runs.py before.json              # on the old code
    python tools/record_runs.py after.json --against before.json

Each run is a command line, a few steps on the CPU. Recorded is one SHA-256 per run over the weights, the optimizer's
state, the reference and the loss and reward of every step. The hashes belong to one CPU and one build of torch: compare
only what one machine recorded. Runs that need data take it from ``--data`` and are left out, and named, without it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHORT = ["--train.steps", "5", "--evaluate.every", "3", "--run.tensorboard", "false", "--run.plot", "false"]
QUIZ = ["recipes/quiz.toml", "--train.batch_size", "8", "--data.held_out_rows", "32", "--sft.steps", "20", *SHORT]
TINY = ["--model.source", "tiny", "--model.threads", "1"]
USMLE = ["recipes/usmle-short.toml", *TINY, "--sampling.max_new_tokens", "12", "--sampling.samples_per_prompt", "8",
         "--train.batch_size", "4", "--run.resumable", "true", *SHORT]  # fmt: skip

TRAIN_RUNS: dict[str, list[str]] = {
    "quiz": QUIZ,
    "lora": [*QUIZ, "--model.lora.rank", "4", "--model.lora.dropout", "0.1"],
    "passes": [*QUIZ, "--train.mini_batches", "2", "--train.iterations", "2", "--train.resample_rounds", "2",
               "--sampling.samples_per_prompt", "4", "--sampling.top_k", "40", "--masks.keep_sampling_mask", "true",
               "--loss.importance_cap", "2.0", "--masks.high_entropy", "0.8", "--loss.entropy_coef", "0.01",
               "--reference.refresh_every", "2", "--train.log_term_gradients_every", "2"],
    "similarity": ["recipes/modes.toml", "--train.batch_size", "4", "--sft.steps", "30", *SHORT],
    "preference": ["recipes/preference.toml", "--train.batch_size", "8", "--data.held_out_rows", "32",
                   "--sft.steps", "20", *SHORT],
    "usmle_short": USMLE,
    "usmle_short_literal": [*USMLE, "--algorithm", "enhanced_grpo_literal"],
}  # fmt: skip
DATA_RUNS: dict[str, list[str]] = {
    "pairs": ["recipes/preference-data.toml", *TINY, "--data.train", "{data}/creative_prompts.jsonl",
              "--preference.train", "{data}/llamafactory_dpo_en_demo.json", "--sampling.max_new_tokens", "12",
              "--preference.held_out_from_train", "40", "--train.batch_size", "4", "--evaluate.samples", "1",
              "--data.held_out_from_train", "4", "--preference.batch_size", "4", *SHORT],
    "gsm8k": ["recipes/gsm8k.toml", *TINY, "--data.train", "{data}/gsm8k_train.jsonl", "--data.train_rows", "40",
              "--data.held_out", "{data}/gsm8k_test.jsonl", "--data.held_out_rows", "4", "--train.batch_size", "4",
              "--data.max_prompt_length", "1024", "--sampling.max_new_tokens", "16", "--evaluate.max_new_tokens", "16",
              "--run.resumable", "true",
              *SHORT],
}  # fmt: skip
CONTROL_RUNS: dict[str, list[str]] = {
    "control_grpo": ["--algo", "grpo-fast", "--steps", "6000"],
    "control_ppo": ["--algo", "ppo-fast", "--steps", "6000"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--against", type=Path, help="hashes recorded earlier; exit status 1 where one differs")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--only", nargs="*", help="the runs to record; all of them by default")
    arguments = parser.parse_args()
    wanted = {name: ["train", *command] for name, command in TRAIN_RUNS.items()}
    if arguments.data.is_dir():
        for name, command in DATA_RUNS.items():
            wanted[name] = ["train", *(part.format(data=arguments.data) for part in command)]
    else:
        print(f"left out, as there is no {arguments.data}: {', '.join(DATA_RUNS)}")
    wanted |= {name: ["control", "train", *command] for name, command in CONTROL_RUNS.items()}
    hashes: dict[str, str] = {}
    for name, command in wanted.items():
        if arguments.only and name not in arguments.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            hashes[name] = record(name, command, Path(folder) / "run")
        print(f"{name:16} {hashes[name]}", flush=True)
    arguments.out.write_text(json.dumps(hashes, indent=2) + "\n")
    if arguments.against is None:
        return 0
    before = json.loads(arguments.against.read_text())
    changed = [name for name in hashes if hashes[name] != before.get(name)]
    print(f"changed: {', '.join(changed)}" if changed else f"the same in all {len(hashes)} runs")
    return int(bool(changed))


def record(name: str, command: list[str], folder: Path) -> str:
    """The hash of one run, made in ``folder``."""
    where = ["--out", str(folder)] if command[0] == "control" else ["--run.folder", str(folder)]
    done = subprocess.run([sys.executable, "-m", "groupwise", *command, *where], cwd=ROOT, capture_output=True)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout.decode()[-2000:]}\n{done.stderr.decode()[-2000:]}")
    digest = hashlib.sha256()
    for key, value in sorted(contents(folder).items()):
        digest.update(key.encode())
        digest.update(value)
    return digest.hexdigest()


def contents(folder: Path) -> dict[str, bytes]:
    """What is hashed, by name: tensors of the last checkpoint and each step's loss and reward."""
    import torch
    from safetensors.torch import load_file

    found: dict[str, bytes] = {}

    def add(key: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[key] = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        elif isinstance(value, dict):
            for inner, entry in value.items():
                add(f"{key}/{inner}", entry)
        elif isinstance(value, list | tuple):
            for number, entry in enumerate(value):
                add(f"{key}/{number}", entry)

    for path in sorted(folder.rglob("*.pt")):
        add(path.name, torch.load(path, weights_only=True))
    checkpoints = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    for path in sorted(checkpoints[-1].glob("*.safetensors")) if checkpoints else []:
        add(path.name, load_file(path))
    rows = folder / "metrics.jsonl"
    for number, line in enumerate(rows.read_text().splitlines() if rows.exists() else []):
        row = json.loads(line)
        found[f"metrics/{number:04}"] = repr([row.get(key) for key in ("step", "loss", "reward", "kl")]).encode()
    if not any(len(value) > 64 for value in found.values()):
        raise SystemExit(f"nothing to hash was found in {folder}")
    return found


if __name__ == "__main__":
    sys.exit(main())
