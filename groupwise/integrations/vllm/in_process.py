"""vLLM in the process that trains, on the same device. Between two calls its memory can be freed (``vllm.sleep``)."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from groupwise.config import Recipe
from groupwise.generate.request import Request
from groupwise.generate.types import Progress, Rollout, Sampling, Stop
from groupwise.integrations.vllm.errors import VllmError
from groupwise.integrations.vllm.samples import SampleTable, check_supported, derive_seed, sampling_fields
from groupwise.integrations.vllm.server import UNTIED
from groupwise.integrations.vllm.versions import find_version, reload_in_process
from groupwise.integrations.vllm.weights import write_weights
from groupwise.model.export import iter_full_weights
from groupwise.model.handle import ModelHandle

MAX_NUM_SEQS = 256


class InProcessGenerator:
    """An engine of vLLM with a copy of the model's weights, started at the first use.

    It has no tokenizer: a completion that ends with a stop string is sampled further, and cut afterwards.
    """

    def __init__(self, handle: ModelHandle, recipe: Recipe, length: int | None) -> None:
        self.handle, self.settings, self.length = handle, recipe.vllm, length
        self.seed = recipe.train.seed
        self.max_num_seqs = recipe.sampling.max_num_seqs or MAX_NUM_SEQS
        self.remote, self.version = False, 0
        self.progress: Progress | None = None
        self._llm: Any = None
        self._asleep = False

    def update_weights(self, version: int) -> None:
        self.version = version
        if self._llm is not None:
            self._wake()
            reload_in_process(self._llm, self._weights())

    def generate(
        self,
        prompts: Sequence[Any],
        samples: int | Sequence[int],
        sampling: Sampling,
        *,
        stop: Stop | None = None,
        keys: Sequence[int] | None = None,
    ) -> Rollout:
        """``samples`` completions of each prompt; see `Sampling` and `Rollout`."""
        check_supported(sampling)
        request = Request(self.handle, prompts, samples, sampling, keys)
        llm = self._engine()
        self._wake()
        from vllm import SamplingParams

        table, inputs, parameters = SampleTable(request, stop), [], []
        for prompt, count in enumerate(request.counts):
            limit = table.of_prompt(prompt)[0].limit
            seed = derive_seed(sampling.seed, request.keys[prompt])
            fields = sampling_fields(sampling, request.eos, 0, limit, seed)
            copies = count if sampling.greedy else 1  # vLLM refuses several greedy completions of one prompt
            options = {"n": count // copies, "detokenize": False, "flat_logprobs": True}
            parameters += [SamplingParams(**options, **fields)] * copies
            inputs += [{"prompt_token_ids": request.prompts[prompt].tolist()}] * copies
        try:
            outputs = llm.generate(inputs, parameters, use_tqdm=False)
        except (RuntimeError, ValueError, AssertionError) as error:
            raise VllmError(f"vLLM failed while it sampled: {type(error).__name__}: {error}") from error
        completions = [completion for output in outputs for completion in output.outputs]
        for sample, completion in zip(table.samples, completions, strict=True):
            table.extend(sample, completion.token_ids, completion.logprobs.logprobs, "", self.version)
            if not sample.reason:
                raise VllmError(
                    f"vLLM ended a completion after {len(sample.ids)} of {sample.limit} tokens "
                    f"({completion.finish_reason}), although nothing in it ends it"
                )
        if self.progress is not None:
            self.progress(float(len(table.samples)), len(table.samples), table.tokens)
        if self._can_sleep:
            llm.sleep(level=1)
            self._asleep = True
        return table.rollout({})

    @property
    def _on_cpu(self) -> bool:
        return self.handle.device.type == "cpu"

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """On the CPU vLLM does not update a head that is tied to the embedding, so there it gets both."""
        return iter_full_weights(self.handle.model, self.handle.dtype, repeat_tied=self._on_cpu)

    @property
    def _can_sleep(self) -> bool:
        return self.settings.sleep and self.handle.device.type == "cuda"

    def _wake(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    def _engine(self) -> Any:
        if self._llm is not None:
            return self._llm
        # Weights cannot be handed over to a process of vLLM's own.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        import vllm

        find_version(vllm.__version__, "this environment")
        dtype = str(self.handle.dtype).removeprefix("torch.")
        # With seeds, vLLM's sampler fails on the CPU for a prompt that is prefilled in several chunks.
        options: dict[str, Any] = {"hf_overrides": UNTIED, "enable_chunked_prefill": False} if self._on_cpu else {}
        with tempfile.TemporaryDirectory(prefix="groupwise-vllm-") as folder:
            write_weights(self._weights(), Path(folder))
            self._write_config(Path(folder), dtype)
            try:
                self._llm = vllm.LLM(
                    folder,
                    skip_tokenizer_init=True,
                    dtype=dtype,
                    seed=self.seed,
                    max_model_len=self.length,
                    max_num_seqs=self.max_num_seqs,
                    gpu_memory_utilization=self.settings.gpu_memory_utilization,
                    enforce_eager=self.settings.enforce_eager,
                    enable_prefix_caching=True,
                    enable_sleep_mode=self._can_sleep,
                    logprobs_mode="processed_logprobs",
                    generation_config="vllm",
                    disable_log_stats=True,
                    **options,
                )
            except (RuntimeError, ValueError, NotImplementedError) as error:
                raise VllmError(
                    f"vLLM could not be started in this process: {error}. Lower vllm.gpu_memory_utilization (now "
                    f"{self.settings.gpu_memory_utilization:g}) if memory is short, or use servers (vllm.servers)"
                ) from error
        return self._llm

    def _write_config(self, folder: Path, dtype: str) -> None:
        config = copy.deepcopy(self.handle.model.config)
        config._attn_implementation = None
        config.dtype = dtype
        config.save_pretrained(folder)

    def check_health(self) -> None:
        """There is nothing outside this process that could fail."""

    def release(self) -> None:
        """Free what vLLM holds on the device, if it can sleep."""
        if self._llm is not None and self._can_sleep and not self._asleep:
            self._llm.sleep(level=1)
            self._asleep = True

    def close(self) -> None:
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
