"""One side of a comparison in a process of its own: groupwise's engine, or vLLM.

The parent starts `SideProcess`, sends it jobs and reads one result for each. Started as a script, this file is the
child: ``python benchmarks/sides.py groupwise FOLDER``. What libraries print does not disturb the results, which are the
lines that begin with RESULT.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import ceilings, load, peak_memory, synchronize
from limits import MeasuredProducts, ModelSize, generation_limits
from offline_vllm import OfflineVllm, environment
from transformers.utils.logging import disable_progress_bar

from groupwise.generate.engine import Engine
from groupwise.generate.request import Request
from groupwise.generate.runner import Runner
from groupwise.generate.types import Rollout, Sampling, Stop

SIDES = ("groupwise", "vllm")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}  # the CPU time of all threads of groupwise's process


@dataclass(frozen=True)
class Job:
    """Completions to generate. lengths: of each sample, prompt after prompt; by default ``new_tokens`` each."""

    prompt_lengths: list[int]
    samples: int
    new_tokens: int
    top_k: int = 0
    logprobs: bool = False
    lengths: list[int] | None = None

    @property
    def completion_lengths(self) -> list[int]:
        return self.lengths or [self.new_tokens] * (len(self.prompt_lengths) * self.samples)

    @property
    def tokens(self) -> int:
        return sum(self.completion_lengths)

    def prompts(self, vocabulary: int) -> list[torch.Tensor]:
        """The same random prompts for both sides."""
        generator = torch.Generator().manual_seed(1)
        return [torch.randint(10, vocabulary, (length,), generator=generator) for length in self.prompt_lengths]


# --- the parent's side -----------------------------------------------------------------------------------------------


class SideError(Exception):
    """A side could not do a job; the text says why."""


class SideProcess:
    """The process of a side. ``limit``: seconds for its start and for each job, after which it is killed."""

    def __init__(self, side: str, folder: str | Path, options: dict[str, Any], limit: float) -> None:
        self.side, self.limit = side, limit
        words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        self._files = ExitStack()
        errors = Path(self._files.enter_context(tempfile.TemporaryDirectory())) / "stderr"
        self._errors = self._files.enter_context(errors.open("w+"))
        self._process = subprocess.Popen(
            [sys.executable, __file__, side, str(folder), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment() if side == "vllm" else None,
        )
        try:
            self.started = self._answer()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SideProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, kind: str, job: Any) -> dict[str, Any]:
        """The result of a job."""
        if self._process.stdin is None:
            raise SideError(f"{self.side} has no input")
        try:
            self._process.stdin.write(json.dumps({"kind": kind, "job": asdict(job)}) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._ended() from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        timer = threading.Timer(self.limit, self._process.kill)
        timer.start()
        try:
            for line in self._process.stdout or ():
                if line.startswith("RESULT "):
                    result = dict(json.loads(line.removeprefix("RESULT ")))
                    if "error" in result:
                        raise SideError(f"{self.side}: {result['error']}")
                    return result
            raise self._ended()
        finally:
            timer.cancel()

    def _ended(self) -> SideError:
        code = self._process.wait()
        self._errors.seek(0)
        tail = "".join(self._errors.readlines()[-12:]).strip()
        reason = f"took more than {self.limit:g} s, or was killed" if code == -9 else f"ended with status {code}"
        return SideError(f"{self.side} {reason}:\n{tail}")

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    continue
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._files.close()


def save_checkpoint(
    args: argparse.Namespace, model: str, folder: str | Path, limit: float, positions: int = 8192
) -> None:
    """Write the weights that both sides load; for a GPU in a process that frees its memory by ending."""
    options = {"model": model, "device": args.device, "positions": positions}
    if args.device == "cpu":
        save(argparse.Namespace(**options, dtype=args.dtype, folder=folder))
    else:
        options |= {"dtype": args.dtype} if args.dtype else {}
        SideProcess("save", folder, options, limit).close()


# --- the child's side ------------------------------------------------------------------------------------------------


class FixedLengthEngine(Engine):
    """An engine whose samples end at given lengths, which its plan of the cache does not know, as with EOS."""

    lengths: Sequence[int] = ()
    running: Sequence[int] = ()  # rows of each decode step of the last call

    def _generate(self, request: Request, stop: Stop | None) -> Rollout:
        request.limits = np.minimum(request.limits, np.array(self.lengths))
        return super()._generate(request, stop)

    def _runner(self, *values: Any, **options: Any) -> Runner:
        runner = super()._runner(*values, **options)
        decode, self.running = runner.decode, (running := [])

        def counted(batch: Any, uniform: Any) -> Any:
            running.append(len(batch.samples))
            return decode(batch, uniform)

        runner.decode = counted  # type: ignore[method-assign]
        return runner


class EngineSide:
    """groupwise's engine with the weights of a folder."""

    def __init__(self, args: argparse.Namespace) -> None:
        from groupwise.model.device import set_threads
        from groupwise.model.load import load_model

        set_threads()
        self.device, self.clock = args.device, CLOCKS[args.clock]
        self.model = load_model(args.folder, dtype=args.dtype or "auto", device=args.device)
        cache = args.cache_mib * 2**20 if args.cache_mib else None
        self.engine = FixedLengthEngine(self.model, max_num_seqs=args.sequences, cache_bytes=cache)
        self.size = ModelSize.of(self.model)
        self.products = MeasuredProducts(args.device, self.model.dtype)
        self.copy_rate = self.matmul_rate = 0.0
        self.trainer: Any = None

    @property
    def facts(self) -> dict[str, Any]:
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return {"parameters": parameters, "dtype": str(self.model.dtype).removeprefix("torch.")}

    def generate(self, job: Job) -> dict[str, Any]:
        prompts = job.prompts(self.model.config.vocab_size)
        sampling = Sampling(max_new_tokens=job.new_tokens, top_k=job.top_k or None, eos_ids=())
        self.engine.lengths = job.completion_lengths
        seconds: list[float] = []
        rollouts: list[Rollout] = []

        def call() -> None:
            synchronize(self.device)
            start = self.clock()
            rollouts.append(self.engine.generate(prompts, job.samples, sampling))
            synchronize(self.device)
            seconds.append(self.clock() - start)

        peak = peak_memory(self.device, call)
        rollout, running = rollouts[0], self.engine.running
        check_lengths("groupwise", rollout.lengths.tolist(), job)
        return {
            "seconds": seconds[0],
            "peak": peak,
            "steps": rollout.stats.get("decode_steps"),
            "running_most": max(running, default=0),
            "running_mean": sum(running) / max(1, len(running)),
            "preempted": rollout.stats.get("preempted"),
        }

    def limits(self, job: Job) -> dict[str, Any]:
        """The limits for prompts that are computed once per group, and for samples that all run at once."""
        self.engine.release()
        if not self.copy_rate:
            self.copy_rate, self.matmul_rate = ceilings(self.device, self.model.dtype)
        found = generation_limits(
            self.size,
            job.prompt_lengths,
            job.samples,
            job.new_tokens,
            bytes_per_number=self.model.dtype.itemsize,
            bytes_per_second=self.copy_rate,
            product=self.products,
        )
        tokens = sum(job.prompt_lengths) + job.tokens
        operations = 2 * self.facts["parameters"] * tokens
        return {
            **asdict(found),
            "copy_rate": self.copy_rate,
            "matmul_rate": self.matmul_rate,
            "at_matmul_rate": operations / self.matmul_rate,
        }

    def train(self, job: Job) -> dict[str, Any]:
        """A training step with random completions of these lengths."""
        from training_step import TrainingStep

        self.engine.release()
        self.trainer = self.trainer or TrainingStep(self.engine.handle, self.clock)
        return dict(self.trainer.run(job.prompts(self.model.config.vocab_size), job.samples, job.completion_lengths))


class VllmSide:
    """vLLM behind the same jobs."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device = args.device
        self.vocabulary = int(json.loads((Path(args.folder) / "config.json").read_text())["vocab_size"])
        if args.device == "cpu" and args.cache_mib:
            os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(-(-args.cache_mib // 1024))  # GiB
        self.side = OfflineVllm(
            args.folder,
            dtype=args.dtype or "auto",
            sequences=args.sequences,
            longest=args.longest,
            memory_share=args.memory_share,
            eager=args.eager == "True",
            gpu=args.device == "cuda",
            counts=args.counts == "True",
            cache_bytes=args.cache_mib * 2**20 if args.device == "cuda" and args.cache_mib else None,
        )

    @property
    def facts(self) -> dict[str, Any]:
        import vllm

        return {"version": getattr(vllm, "__version__", "unknown")}

    def generate(self, job: Job) -> dict[str, Any]:
        prompts = [ids.tolist() for ids in job.prompts(self.vocabulary)]
        self.side.forget()
        self.side.running.clear()
        before = self.side.preemptions()
        synchronize(self.device)
        start = time.perf_counter()
        lengths = self.side.generate(prompts, job.completion_lengths, job.top_k, job.logprobs)
        synchronize(self.device)
        seconds, after, running = time.perf_counter() - start, self.side.preemptions(), self.side.running
        check_lengths("vLLM", lengths, job)
        return {
            "seconds": seconds,
            "peak": torch.cuda.max_memory_allocated() if self.device == "cuda" else None,
            "steps": len(running) or None,
            "running_most": max(running, default=None),
            "running_mean": sum(running) / len(running) if running else None,
            "preempted": None if before is None or after is None else after - before,
        }


def check_lengths(side: str, lengths: list[int], job: Job) -> None:
    if lengths != job.completion_lengths:
        raise ValueError(f"{side} gave completions of other lengths; the comparison would not be fair")


def save(args: argparse.Namespace) -> None:
    """Random weights of a shape, or a copy of a model, without EOS, so that no setting of a side ends a sample."""
    model = load(args)
    disable_progress_bar()
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(args.folder)
    for name in ("config.json", "generation_config.json"):
        path = Path(args.folder) / name
        if path.exists():
            path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": None}))


def serve(handlers: dict[str, Callable[[Job], dict[str, Any]]], facts: dict[str, Any]) -> None:
    """Answer jobs until the input ends. An error is an answer: the next job may be smaller."""
    print("\nRESULT " + json.dumps(facts), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = handlers[request["kind"]](Job(**request["job"]))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {str(error)[:600]}"}
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        print("\nRESULT " + json.dumps(answer), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=("save", *SIDES))
    parser.add_argument("folder")
    parser.add_argument("--model")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype")
    parser.add_argument("--positions", type=int, help="of a model with random weights")
    parser.add_argument("--sequences", type=int, help="samples at once, at most")
    parser.add_argument("--longest", type=int, help="tokens of a prompt and its completion")
    parser.add_argument("--cache-mib", type=int, help="of keys and values")
    parser.add_argument("--memory-share", type=float, default=0.6, help="of the GPU's memory, for vLLM")
    parser.add_argument("--eager", default="False", choices=("True", "False"), help="vLLM without compilation")
    parser.add_argument("--counts", default="False", choices=("True", "False"), help="of vLLM: running, preempted")
    parser.add_argument("--clock", default="wall", choices=list(CLOCKS), help="of groupwise's side")
    args = parser.parse_args()
    if args.side == "save":
        save(args)
        serve({}, {})
    elif args.side == "groupwise":
        engine = EngineSide(args)
        serve({"generate": engine.generate, "limits": engine.limits, "train": engine.train}, engine.facts)
    else:
        vllm = VllmSide(args)
        serve({"generate": vllm.generate}, vllm.facts)
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads may not end


if __name__ == "__main__":
    main()
