"""Stands in for vLLM where its speed does not matter: the same calls, and completions of the asked lengths."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__version__ = "0.32.0"


class SamplingParams:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class LLM:
    def __init__(self, folder: str, **options: Any) -> None:
        self.options, self.preempted = options, 0
        self.running: list[int] = []
        self.llm_engine = SimpleNamespace(
            engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler=self)), step=self._step
        )
        if log := os.environ.get("STAND_IN_LOG"):
            with Path(log).open("a") as file:
                print("start", json.dumps(options), os.environ.get("VLLM_CPU_KVCACHE_SPACE"), file=file)
        print("vLLM prints something that is no result")
        if os.environ.get("STAND_IN_FAILS") == "start":
            raise RuntimeError("the stand-in has no memory")

    def get_metrics(self) -> list[Any]:
        return [SimpleNamespace(name="vllm:num_preemptions", value=self.preempted)]

    def reset_prefix_cache(self) -> bool:
        return True

    def _step(self) -> list[Any]:
        self.running = self.running[1:]
        return []

    def generate(self, inputs: list[Any], sampling: Any, use_tqdm: bool) -> list[Any]:
        if os.environ.get("STAND_IN_FAILS") == "generate":
            raise ValueError("the stand-in fails")
        parameters = sampling if isinstance(sampling, list) else [sampling] * len(inputs)
        self.running = list(range(sum(one.n for one in parameters) + 1))
        self.llm_engine.step()
        self.preempted += 3
        short = int(os.environ.get("STAND_IN_SHORT", "0"))
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=[5] * (one.max_tokens - short)) for _ in range(one.n)])
            for one in parameters
        ]
