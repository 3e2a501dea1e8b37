"""A teacher behind a server: log-probs of given tokens from vLLM's completions API, or from one with OpenAI's echo.

vLLM returns with ``prompt_logprobs`` the log-probs of all tokens of a prompt, and of the most likely ones, by token id.
Servers that only have OpenAI's ``echo`` return them by the tokens' texts, which do not identify a token: they serve
distillation.kl = "sampled".
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from groupwise.config.sections import DistillationSection
from groupwise.errors import ConfigError, TeacherServerError
from groupwise.integrations.vllm.client import ServerClient
from groupwise.integrations.vllm.errors import ServerError, ServerSetupError
from groupwise.text import Say, excerpt
from groupwise.training.update.teacher import ServerLogps

_Result = TypeVar("_Result")

SMALLEST = -100.0  # log-prob; servers write −9999 or −inf for a token that is impossible
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0  # seconds between two tries
PROBES = 64  # tokens whose texts are compared
MOST_OTHERS = 0.2  # share of them whose text may differ: servers decode single tokens in slightly different ways
REPLACEMENT = "\ufffd"


class ServerTeacher:
    """A server, the model that it has, and how it returns log-probs. Threads share it."""

    def __init__(self, settings: DistillationSection, say: Say = lambda text: None) -> None:
        name = settings.api_key_env
        key = None if name is None else os.environ.get(name)
        if name is not None and not key:
            raise ConfigError(f"distillation.api_key_env: the environment variable {name} is not set")
        self.client = ServerClient(settings.server or "", key, settings.timeout, section="distillation")
        self.wait, self.concurrency, self.say = settings.wait, settings.concurrency, say
        self.model, self.by_id = "", True

    def inspect(self, tokenizer: Any, model_name: str, longest: int, *, full: bool, top_k: int) -> None:
        """Raise an error unless the server has log-probs, the model's tokenizer, and room for ``longest`` tokens."""
        models = self._retry(lambda: self.client.get("/v1/models"))
        try:
            entry = models["data"][0]
            self.model, room = str(entry["id"]), entry.get("max_model_len")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ServerSetupError(f"{self.client.url}/v1/models names no model: {excerpt(models, 100)}") from error
        if isinstance(room, int) and room <= longest:
            raise ServerSetupError(
                f"the teacher {self._name} has room for {room} tokens, but the longest prompt and its completion take "
                f"{longest}, and one is generated; start it with --max-model-len {longest + 1}"
            )
        ids = _probe(tokenizer)
        self._find_api(ids, top_k if full else 0, full)
        texts = self._texts(ids, self._retry(lambda: self._ask(ids, 0)))
        own = [tokenizer.decode([token]) for token in ids]
        pairs = [
            pair
            for pair in zip(own, texts, strict=True)
            if pair[1] is not None and REPLACEMENT not in pair[0] + pair[1]
        ]
        others = [(one, other) for one, other in pairs[1:] if one.strip() != str(other).strip()]
        if len(others) > MOST_OTHERS * len(pairs):
            one, other = others[0]
            raise ConfigError(
                f"the teacher {self._name} has another tokenizer than the model {model_name}: of {len(pairs)} tokens, "
                f"{len(others)} are other texts, the first {other!r} instead of {one!r}. Distillation compares the "
                "probabilities of tokens; choose a teacher with the model's tokenizer"
            )
        if not pairs:
            self.say(f"the teacher {self._name} returns no texts of tokens, so its tokenizer is not compared")

    def score(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[Tensor]], top_k: int
    ) -> list[list[ServerLogps]]:
        """The log-probs of each prompt's completions, with those of the ``top_k`` most likely tokens."""
        jobs = [(prompt, ids.tolist()) for prompt, members in zip(prompts, completions, strict=True) for ids in members]
        with ThreadPoolExecutor(self.concurrency) as threads:
            results = list(threads.map(lambda job: self._retry(lambda: self._score(job[0], job[1], top_k)), jobs))
        answers = iter(results)
        return [[next(answers) for _ in members] for members in completions]

    @property
    def _name(self) -> str:
        return f"{self.model!r} at {self.client.url}"

    def _score(self, prompt: Sequence[int], completion: list[int], top_k: int) -> ServerLogps:
        ids = [*prompt, *completion]
        reply = self._ask(ids, top_k)
        try:
            if not self.by_id:
                logps = [_number(value) for value in reply["logprobs"]["token_logprobs"][len(prompt) : len(ids)]]
                if len(logps) != len(completion):
                    raise ValueError(f"{len(logps)} log-probs of {len(completion)} tokens")
                nothing = torch.zeros(len(logps), 0)
                return ServerLogps(torch.tensor(logps), nothing.long(), nothing)
            entries = reply["prompt_logprobs"][len(prompt) :]
            logps = []
            tops: list[list[tuple[int, float]]] = []
            for token, entry in zip(completion, entries, strict=True):
                known = {int(other): _number(value["logprob"]) for other, value in entry.items()}
                logps.append(known[token])
                tops.append(sorted(known.items(), key=lambda item: -item[1])[: top_k + 1])
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ServerError(
                f"the teacher {self._name} did not return log-probs of its prompt: {error!r:.200}"
            ) from error
        missing = [[(-1, 0.0)] * (top_k + 1 - len(top)) for top in tops]
        rows = [top + more for top, more in zip(tops, missing, strict=True)]
        return ServerLogps(
            torch.tensor(logps),
            torch.tensor([[token for token, _ in row] for row in rows]),
            torch.tensor([[logp for _, logp in row] for row in rows]),
        )

    def _ask(self, ids: Sequence[int], top_k: int) -> Any:
        """The server's answer to a prompt of these tokens."""
        body: dict[str, Any] = {"model": self.model, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0}
        body |= {"prompt_logprobs": top_k} if self.by_id else {"echo": True, "logprobs": 1}
        reply = self.client.post("/v1/completions", body)
        try:
            return reply["choices"][0]
        except (KeyError, IndexError, TypeError) as error:
            raise ServerError(
                f"the teacher {self._name} answered without a completion: {excerpt(reply, 100)}"
            ) from error

    def _find_api(self, ids: Sequence[int], top_k: int, full: bool) -> None:
        """Find out whether the server returns log-probs by token ids, or only by OpenAI's echo."""
        reason = ""
        for self.by_id in (True, False):
            try:
                reply = self._retry(lambda: self._ask(ids, top_k))
                if self.by_id and reply.get("prompt_logprobs"):
                    return
                if not self.by_id and (reply.get("logprobs") or {}).get("token_logprobs"):
                    break
            except ServerSetupError as error:
                reason = reason or f" ({error})"
        else:
            raise ServerSetupError(
                f"the teacher {self._name} returns no log-probs of its prompts{reason}; serve it with vLLM, or load it "
                "with distillation.teacher"
            )
        if full:
            raise ServerSetupError(
                f"the teacher {self._name} has no prompt_logprobs{reason}, only OpenAI's echo, which does not say "
                "which tokens are likely; set distillation.kl to 'sampled', or serve it with vLLM"
            )

    def _texts(self, ids: Sequence[int], reply: Any) -> list[str | None]:
        """The texts of the probe's tokens; None where the server returns none."""
        try:
            if not self.by_id:
                return [None if text is None else str(text) for text in reply["logprobs"]["tokens"][: len(ids)]]
            entries = [{}, *reply["prompt_logprobs"][1:]]
            return [entry.get(str(token), {}).get("decoded_token") for token, entry in zip(ids, entries, strict=True)]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ServerError(
                f"the teacher {self._name} did not return log-probs of a probe: {error!r:.200}"
            ) from error

    def _retry(self, work: Callable[[], _Result]) -> _Result:
        """``work()``, again after a pause if the server fails, until it has failed for distillation.wait seconds."""
        deadline, pause = time.monotonic() + self.wait, FIRST_PAUSE
        while True:
            try:
                return work()
            except ServerError as error:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TeacherServerError(
                        f"the teacher's server {self.client.url} has failed for {self.wait:g} seconds "
                        f"(distillation.wait): {error}. Start it again, then the run, with --resume if it has saved a "
                        "step"
                    ) from error
                time.sleep(min(pause, left))
                pause = min(2 * pause, LONGEST_PAUSE)


def make_server_teacher(
    settings: DistillationSection, tokenizer: Any, model_name: str, longest: int, say: Say
) -> ServerTeacher:
    """The server of ``[distillation]``, which was asked and can be used; ``longest``: a prompt and its completion."""
    teacher = ServerTeacher(settings, say)
    teacher.inspect(tokenizer, model_name, longest, full=settings.kl == "full", top_k=settings.top_k)
    return teacher


def _probe(tokenizer: Any) -> list[int]:
    """Tokens from all parts of the vocabulary, the last one included."""
    ids = sorted(set(tokenizer.get_vocab().values()))
    return [ids[len(ids) * number // PROBES] for number in range(PROBES)] + [ids[-1]]


def _number(value: Any) -> float:
    number = float(value)
    if math.isnan(number):
        raise ValueError("a log-prob is NaN")
    return min(0.0, max(SMALLEST, number))
