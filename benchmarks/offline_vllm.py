"""vLLM's offline engine for the benchmarks: where it is installed, its environment, and one call."""

from __future__ import annotations

import importlib.util
import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

# In this process, without network: every rendezvous of vLLM stays on this machine.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
}


def has_flashinfer() -> bool:
    """Whether vLLM samples with FlashInfer."""
    return importlib.util.find_spec("flashinfer") is not None


def environment() -> dict[str, str]:
    """The environment of a process that uses vLLM; variables that are set already are kept."""
    sampler = {} if has_flashinfer() else {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    return {**ENVIRONMENT, **sampler, **os.environ}


def require_vllm(device: str) -> str:
    """The version of vLLM, or an error before any work."""
    if importlib.util.find_spec("vllm") is None:
        how = (
            "make .venv-vllm/.installed, then run this with .venv-vllm/bin/python"
            if device == "cpu"
            else "pip install 'groupwise[vllm]'"
        )
        raise SystemExit(f"vLLM is not installed in this environment, so there is nothing to compare with: {how}")
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "of unknown version"


class OfflineVllm:
    """vLLM with the weights of a folder. A call's prompts are computed once per group, by prefix caching.

    counts: record the running sequences of each step, and the preemptions.
    cache_bytes: of keys and values, by default what ``memory_share`` leaves.
    """

    def __init__(
        self,
        folder: str,
        *,
        dtype: str,
        sequences: int,
        longest: int,
        memory_share: float,
        eager: bool,
        gpu: bool,
        counts: bool,
        cache_bytes: int | None = None,
    ) -> None:
        from vllm import LLM

        options: dict[str, Any] = {"enforce_eager": True} if eager else {}
        if gpu and not eager:
            options["compilation_config"] = {"max_cudagraph_capture_size": max(512, sequences)}
        if cache_bytes is not None:  # instead of what is free when it starts
            options["kv_cache_memory_bytes"] = cache_bytes
        self.llm: Any = LLM(
            folder,
            skip_tokenizer_init=True,
            dtype=dtype,
            seed=0,
            gpu_memory_utilization=memory_share,
            max_model_len=longest,
            max_num_seqs=sequences,
            enable_prefix_caching=True,
            generation_config="vllm",
            disable_log_stats=not counts,
            **options,
        )
        self.counts, self.running = counts, list[int]()
        if counts:
            self._watch()

    def _watch(self) -> None:
        """Record how many sequences run in each step, where this version of vLLM tells."""
        engine = getattr(self.llm, "llm_engine", None)
        core = getattr(getattr(engine, "engine_core", None), "engine_core", None)
        scheduler = getattr(core, "scheduler", None)
        if engine is None or not hasattr(scheduler, "running"):
            return
        step = engine.step

        def counted(*args: Any, **kwargs: Any) -> Any:
            outputs = step(*args, **kwargs)
            self.running.append(len(scheduler.running))
            return outputs

        engine.step = counted

    def preemptions(self) -> int | None:
        """Of all calls so far, where they are counted."""
        metrics = self.llm.get_metrics() if self.counts and hasattr(self.llm, "get_metrics") else []
        values = [metric.value for metric in metrics if getattr(metric, "name", "") == "vllm:num_preemptions"]
        return int(sum(values)) if values else None

    def forget(self) -> None:
        """Empty the cache of prompts, as after an update of the weights."""
        self.llm.reset_prefix_cache()

    def generate(self, prompts: list[list[int]], lengths: list[int], top_k: int, logprobs: bool) -> list[int]:
        """The lengths of the completions. ``lengths``: of all of them, prompt after prompt."""
        from vllm import SamplingParams

        samples = len(lengths) // len(prompts)
        options = {
            "temperature": 1.0, "top_k": top_k, "top_p": 1.0, "ignore_eos": True, "detokenize": False,
            "logprobs": 0 if logprobs else None,
        }  # fmt: skip
        if len(set(lengths)) == 1:
            inputs = [{"prompt_token_ids": ids} for ids in prompts]
            parameters: Any = SamplingParams(n=samples, max_tokens=lengths[0], **options)
        else:
            inputs = [{"prompt_token_ids": ids} for ids in prompts for _ in range(samples)]
            parameters = [SamplingParams(n=1, max_tokens=length, **options) for length in lengths]
        outputs = self.llm.generate(inputs, parameters, use_tqdm=False)
        return [len(completion.token_ids) for output in outputs for completion in output.outputs]
