"""One vLLM server: what it must be, the weights that it has, and completions from it."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

from torch import Tensor

from groupwise.errors import GroupwiseError
from groupwise.integrations.vllm.client import ServerClient
from groupwise.integrations.vllm.errors import ServerError, ServerSetupError
from groupwise.integrations.vllm.versions import VllmVersion, find_version
from groupwise.integrations.vllm.weights import WeightTransfer
from groupwise.text import excerpt

START = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs --max-model-len {length}"
UNTIED = {"tie_word_embeddings": False}
POLL = 0.05  # seconds between two looks at requests that are being aborted
HALF_PRECISION_DIFFERENCE, DIFFERENCE = 0.3, 0.02  # of a token's log-prob, on average, for the same weights


class Probe:
    """A short text, and the log-probs of its tokens under the weights that a server should have."""

    def __init__(self, ids: list[int], logps: Tensor, half: bool) -> None:
        self.ids, self.logps, self.half = ids, logps.double().tolist(), half  # log-probs of all tokens but the first


class Server:
    """A server and its state, which the generator's lock guards.

    version: of the weights that it has loaded completely, None if that is not certain.
    in_flight: requests for completions that it has not answered yet.
    tied: the model's output head is its embedding.
    """

    def __init__(self, client: ServerClient, needed_length: int, *, tied: bool) -> None:
        self.client, self.needed_length, self.tied = client, needed_length, tied
        self.version: int | None = None
        self.in_flight = 0
        self.failure = ""
        self.loading = threading.Lock()
        self._api: VllmVersion | None = None
        self._model, self._length, self._half = "", sys.maxsize, False
        self._identity = ""

    @property
    def url(self) -> str:
        return self.client.url

    def inspect(self) -> VllmVersion:
        """Raise an error unless the server runs and was started in the right way; the version of vLLM."""
        try:
            api = find_version(str(self.client.get("/version")["version"]), f"the server {self.url}")
            settings = self.client.get("/server_info?config_format=json")["vllm_config"]
            config, device = settings["model_config"], settings["device_config"]["device"]
            mode, length = config["logprobs_mode"], int(config["max_model_len"])
            self._half = str(config["dtype"]).removeprefix("torch.") in ("bfloat16", "float16", "half")
            untied = config.get("word_embeddings_untied_by_checkpoint") or config["hf_overrides"] == UNTIED
            self._model = str(self.client.get("/v1/models")["data"][0]["id"])
        except GroupwiseError:
            raise
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerError(f"{self.url} does not answer as a vLLM server does: {error!r:.200}") from error
        if mode != "processed_logprobs":
            raise ServerSetupError(
                f"the server {self.url} returns {mode}, which ignore the temperature; start it with: "
                f"{START.format(length=self.needed_length)}"
            )
        if device == "cpu" and self.tied and not untied:
            raise ServerSetupError(
                f"the server {self.url} runs on the CPU, where vLLM does not update a head that is tied to the "
                f"embedding; start it with --hf-overrides '{json.dumps(UNTIED)}'"
            )
        self._api, self._length = api, length
        self.check_length(self.needed_length)
        return api

    def look(self) -> None:
        """Note in ``failure`` whether the server answers."""
        try:
            self.inspect()
            self.failure = ""
        except ServerError as error:
            self.failure = str(error)

    def check_length(self, needed: int) -> None:
        """Raise an error if a prompt with its completion does not fit."""
        if self._length < needed:
            raise ServerSetupError(
                f"the server {self.url} has room for {self._length} tokens, but the longest prompt and its completion "
                f"take {needed}; start it with: {START.format(length=needed)}"
            )

    def load(self, transfer: WeightTransfer, version: int, name: str, probe: Probe) -> None:
        """Give the server new weights. Requests that it works on end first, with the tokens that they have.

        Until all is done the server has no version, so that it gets no prompts after a failure in between.
        """
        api = self.inspect()
        deadline = time.monotonic() + self.client.timeout
        self.client.post("/pause?mode=abort")
        while self.in_flight:
            if time.monotonic() > deadline:
                raise ServerError(
                    f"the server {self.url} did not end its requests within {self.client.timeout:g} seconds"
                )
            time.sleep(POLL)
            self.client.post("/pause?mode=abort")  # also those that arrived after the first call
        transfer.load(self.client, api)
        if (self.client.post("/reset_prefix_cache") or {}).get("success") is not True:
            raise ServerError(f"the server {self.url} still holds prompts that were computed with the old weights")
        self.client.post("/resume")
        self._check_weights(probe)
        self._identity = api.mark(self.client, name)
        self.version = version

    def _check_weights(self, probe: Probe) -> None:
        """Compare the log-probs of a short text with the trainer's."""
        body = {"model": self._model, "prompt": probe.ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        try:
            reply = self.client.post("/v1/completions", body)
        except ServerSetupError as error:
            raise ServerSetupError(
                f"the server {self.url} cannot compute a short text; is it the same model? {error}"
            ) from error
        try:
            found = reply["choices"][0]["prompt_logprobs"][1:]
            logps = [float(entry[str(token)]["logprob"]) for entry, token in zip(found, probe.ids[1:], strict=True)]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerError(f"{self.url} did not return log-probs of a prompt: {error!r:.200}") from error
        difference = sum(abs(one - other) for one, other in zip(logps, probe.logps, strict=True)) / len(logps)
        if not difference <= (HALF_PRECISION_DIFFERENCE if self._half or probe.half else DIFFERENCE):
            raise ServerSetupError(
                f"after loading the weights, the log-probs of the server {self.url} differ from the trainer's by "
                f"{difference:.3g} per token; start it with the model that is trained (model.source)"
            )

    def complete(self, body: dict[str, Any], count: int, vocabulary: int) -> list[tuple[list[int], list[float], str]]:
        """Ids, log-probs and the reason of the end of ``count`` completions."""
        reply = self.client.post(
            "/v1/completions", {"model": self._model, "n": count, "return_token_ids": True, **body}
        )
        completions = _read(reply, count, vocabulary, self.url)
        if self._api is None or self._api.identity(self.client) != self._identity:
            raise ServerError(f"the server {self.url} was restarted, or another run has changed its weights")
        return completions


def _read(reply: Any, count: int, vocabulary: int, url: str) -> list[tuple[list[int], list[float], str]]:
    completions: dict[int, tuple[list[int], list[float], str]] = {}
    try:
        for choice in reply["choices"]:
            ids, logps = choice["token_ids"] or [], (choice["logprobs"] or {}).get("token_logprobs") or []
            if len(ids) != len(logps):
                raise ServerError(f"{url} returned {len(ids)} tokens with {len(logps)} log-probs")
            if not all(isinstance(token, int) and 0 <= token < vocabulary for token in ids):
                raise ServerError(f"{url} returned a token outside the vocabulary of {vocabulary}")
            if not all(isinstance(logp, float | int) and logp == logp for logp in logps):
                raise ServerError(f"{url} returned a log-prob that is not a number")
            completions[choice["index"]] = (ids, [float(logp) for logp in logps], str(choice["finish_reason"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise ServerError(f"{url} answered without completions: {excerpt(str(reply), 100)}") from error
    if sorted(completions) != list(range(count)):
        raise ServerError(f"{url} returned {len(completions)} completions instead of {count}")
    return [completions[index] for index in range(count)]
