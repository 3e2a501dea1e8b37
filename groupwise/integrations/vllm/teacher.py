"""A teacher behind a server: log-probs of given tokens from vLLM's completions API, or from one with OpenAI's echo.

vLLM returns with ``prompt_logprobs`` the log-probs of all tokens of a prompt, and of the most likely ones, by token id.
Servers that only have OpenAI's ``echo`` return them by the tokens' texts, which do not identify a token: they serve
distillation.kl = "sampled".

A reply is used only if it is about the tokens that were sent and its log-probs can be ones. Any other is asked for
again a few times, and then ends the run with a sentence that names the field.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch
from torch import Tensor

from groupwise.config.sections import DistillationSection
from groupwise.errors import ConfigError, TeacherServerError
from groupwise.integrations.vllm.client import MAX_REPLY, ServerClient, read_key
from groupwise.integrations.vllm.errors import ReplyError, ServerError, ServerSetupError
from groupwise.text import Say, excerpt, plural
from groupwise.training.update.teacher import ServerLogps

_Result = TypeVar("_Result")

SMALLEST = -100.0  # log-prob; servers write −9999 for a token that is impossible
LARGEST = 1e-3  # a log-prob of 0, rounded
MOST_PROBABILITY = 1.02  # of the most likely tokens together, rounded
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0  # seconds between two tries
POLL = 0.2  # seconds between two looks at requests under way
WRONG_REPLIES = 3  # a server that answers with something else so often will go on with it
PROBES = 64  # tokens whose texts are compared, and as many special ones
MOST_OTHERS = 0.2  # share of them whose text may differ: servers decode single tokens in slightly different ways
REPLACEMENT = "\ufffd"
REPLY_BYTES, TOKEN_BYTES, LOGP_BYTES = 2**16, 2**10, 2**9  # room in a reply: for itself, each token, each log-prob
REMEDY = "Serve it with vLLM and nothing in between that changes requests, or load it with distillation.teacher"


class _Stopped(Exception):
    """Another request has failed for good."""


class ServerTeacher:
    """A server, the model that it has, and how it returns log-probs. Threads share it."""

    def __init__(self, settings: DistillationSection, say: Say = lambda text: None) -> None:
        key = read_key(settings.api_key_env, "distillation")
        self.client = ServerClient(settings.server or "", key, settings.timeout, section="distillation")
        self.wait, self.concurrency, self.say = settings.wait, settings.concurrency, say
        self.model, self.by_id = "", True
        self.context_length: int | None = None
        self._decode: Callable[[int], str] | None = None  # compares the texts of an echo

    def inspect(self, tokenizer: Any, model_name: str, longest: int, *, full: bool, top_k: int) -> None:
        """Raise an error unless the server has log-probs, the model's tokenizer, and room for ``longest`` tokens."""
        models = self._retry(lambda: self.client.get("/v1/models"))
        try:
            entry = models["data"][0]
            self.model, room = str(entry["id"]), entry.get("max_model_len")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ServerSetupError(
                f"{self.client.url}/v1/models names no model, but answers {excerpt(models, 100)}; distillation.server "
                "must be the address of a server like vLLM's"
            ) from error
        if isinstance(room, int) and room <= longest:
            raise ServerSetupError(
                f"the teacher {self._name} has room for {room} tokens, but the longest prompt and its completion take "
                f"{longest}, and one is generated; start it with --max-model-len {longest + 1}"
            )
        self.context_length = room - 1 if isinstance(room, int) else None
        probe, special = _probe(tokenizer)
        size = max(2, longest if self.context_length is None else self.context_length)
        pieces = [probe[start : start + size] for start in range(0, len(probe), size)]
        self._find_api(pieces[0], top_k if full else 0, full)
        texts = [text for ids in pieces for text in self._texts(ids)]
        own = [tokenizer.decode([token]) for token in probe]
        pairs = [(one, other) for one, other in zip(own, texts, strict=True) if other is not None]
        others = _others(pairs)
        of_special = {tokenizer.decode([token]) for token in special}
        swapped = [(one, other) for one, other in others if one in of_special and other in of_special]
        if len(others) > MOST_OTHERS * len(pairs) or swapped:
            one, other = (swapped or others)[0]
            raise ConfigError(
                f"the teacher {self._name} has another tokenizer than the model {model_name}: of {len(pairs)} tokens, "
                f"{len(others)} are other texts, the first {excerpt(other)} instead of {excerpt(one)}. Distillation "
                "compares the probabilities of tokens; choose a teacher with the model's tokenizer"
            )
        if not pairs:
            self.say(f"the teacher {self._name} returns no texts of tokens, so its tokenizer is not compared")
        self._decode = None if self.by_id else lambda token: str(tokenizer.decode([token]))

    def score(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[Tensor]], top_k: int
    ) -> list[list[ServerLogps]]:
        """The log-probs of each prompt's completions, with those of the ``top_k`` most likely tokens."""
        jobs = [(prompt, ids.tolist()) for prompt, members in zip(prompts, completions, strict=True) for ids in members]
        failed, errors = threading.Event(), []

        def answer(job: tuple[Sequence[int], list[int]]) -> ServerLogps | None:
            if failed.is_set():
                return None
            try:
                return self._retry(lambda: self._score(job[0], job[1], top_k), failed)
            except _Stopped:
                return None
            except Exception as error:
                errors.append(error)
                failed.set()
                return None

        with ThreadPoolExecutor(self.concurrency) as threads:
            futures = [threads.submit(answer, job) for job in jobs]

            def finish() -> None:
                while wait(futures, timeout=POLL).not_done:
                    if failed.is_set():
                        self.client.abort()  # again and again: a request may just be beginning

            try:
                finish()
            except BaseException:  # such as Ctrl-C
                failed.set()
                finish()
                raise
        if errors:
            raise errors[0]
        answers = iter([result for future in futures if (result := future.result()) is not None])
        return [[next(answers) for _ in members] for members in completions]

    @property
    def _name(self) -> str:
        return f"{excerpt(self.model)} at {self.client.url}"

    def _score(self, prompt: Sequence[int], completion: list[int], top_k: int) -> ServerLogps:
        ids = [*prompt, *completion]
        reply = self._ask(ids, top_k)
        if not self.by_id:
            values = self._echoed(reply, ids)
            nothing = torch.zeros(len(completion), 0)
            return ServerLogps(torch.tensor(values[len(prompt) :]), nothing.long(), nothing)
        entries = self._entries(reply, ids)
        logps: list[float] = []
        tops: list[list[tuple[int, float]]] = []
        for place in range(len(prompt), len(ids)):
            known = self._likely(entries[place], f"prompt_logprobs[{place}]")
            logps.append(known[ids[place]])
            tops.append(sorted(known.items(), key=lambda item: -item[1])[: top_k + 1])
        missing = [[(-1, 0.0)] * (top_k + 1 - len(top)) for top in tops]
        rows = [top + more for top, more in zip(tops, missing, strict=True)]
        return ServerLogps(
            torch.tensor(logps),
            torch.tensor([[token for token, _ in row] for row in rows]),
            torch.tensor([[logp for _, logp in row] for row in rows]),
        )

    def _entries(self, reply: Mapping[str, Any], ids: Sequence[int]) -> Sequence[Any]:
        """vLLM's ``prompt_logprobs`` of these tokens: an entry each, with the token itself in all but the first."""
        entries = self._list(reply.get("prompt_logprobs"), "prompt_logprobs", len(ids), len(ids))
        for place, token in enumerate(ids[1:], start=1):
            entry = entries[place]
            if not isinstance(entry, dict) or str(token) not in entry:
                found = f"those of {excerpt(', '.join(entry))}" if isinstance(entry, dict) else excerpt(entry)
                raise self._wrong(
                    f"prompt_logprobs[{place}] has no log-prob of the token that was sent, {token}, but {found}"
                )
        return entries

    def _likely(self, entry: Mapping[str, Any], field: str) -> dict[int, float]:
        """An entry's log-probs by token."""
        known: dict[int, float] = {}
        for name, value in entry.items():
            if not (name.isascii() and name.isdecimal() and len(name) < 10):
                raise self._wrong(f"{field} names a token {excerpt(name)}, which is no token id")
            logp = value.get("logprob") if isinstance(value, dict) else None
            known[int(name)] = self._logp(logp, f'{field}["{name}"].logprob')
        if sum(map(math.exp, known.values())) > MOST_PROBABILITY:
            raise self._wrong(f"the probabilities of the tokens in {field} add up to more than 1")
        return known

    def _echoed(self, reply: Mapping[str, Any], ids: Sequence[int]) -> list[float]:
        """The log-probs of these tokens from OpenAI's ``echo``; that of the first is 0."""
        echo = reply.get("logprobs")
        if not isinstance(echo, dict):
            raise self._wrong(f"logprobs is {excerpt(echo)}, not a table")
        values = self._list(echo.get("token_logprobs"), "logprobs.token_logprobs", len(ids), len(ids) + 1)
        if echo.get("tokens") is not None and self._decode is not None:
            texts = self._list(echo["tokens"], "logprobs.tokens", len(ids), len(ids) + 1)
            pairs = [(self._decode(token), str(text)) for token, text in zip(ids, texts, strict=False)]
            others = _others(pairs)
            if len(others) > MOST_OTHERS * len(pairs):
                one, other = others[0]
                raise self._wrong(
                    f"logprobs.tokens are not those that were sent: {len(others)} of {len(pairs)} differ, the first is "
                    f"{excerpt(other)} instead of {excerpt(one)}"
                )
        places = range(1, len(ids))
        return [0.0, *(self._logp(values[place], f"logprobs.token_logprobs[{place}]") for place in places)]

    def _ask(self, ids: Sequence[int], top_k: int) -> dict[str, Any]:
        """The server's answer to a prompt of these tokens."""
        body: dict[str, Any] = {"model": self.model, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0}
        body |= {"prompt_logprobs": top_k} if self.by_id else {"echo": True, "logprobs": 1}
        limit = REPLY_BYTES + len(ids) * (TOKEN_BYTES + LOGP_BYTES * (top_k + 1))
        reply = self.client.post("/v1/completions", body, limit=min(limit, MAX_REPLY))
        choices = reply.get("choices") if isinstance(reply, dict) else None
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise self._wrong(f"choices has no completion, but {excerpt(reply, 100)}")
        usage, sent = reply.get("usage"), choices[0].get("prompt_token_ids")
        count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if isinstance(count, int) and count != len(ids):
            raise self._wrong(f"usage.prompt_tokens is {count:,}, but {plural(len(ids), 'token')} were sent")
        if sent is not None and sent != list(ids):
            raise self._wrong("prompt_token_ids are other tokens than those that were sent")
        return choices[0]

    def _list(self, value: Any, field: str, least: int, most: int) -> list[Any]:
        if not isinstance(value, list):
            raise self._wrong(f"{field} is {excerpt(value)}, not a list")
        if not least <= len(value) <= most:
            raise self._wrong(f"{field} is about {plural(len(value), 'token')}, but {least:,} were sent")
        return value

    def _logp(self, value: Any, field: str) -> float:
        """A log-prob; those of impossible tokens are `SMALLEST`."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(f"{field} is {excerpt(value)}, not a number")
        if not value <= LARGEST or value == -math.inf:  # NaN is not
            shown = f"{value:g}" if isinstance(value, float) else excerpt(value)
            raise self._wrong(f"{field} is {shown}; a log-prob is a number of at most 0")
        return min(0.0, float(max(SMALLEST, value)))

    def _wrong(self, sentence: str) -> ReplyError:
        return ReplyError(f"the answer of the teacher {self._name} cannot be used: {sentence}")

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

    def _texts(self, ids: Sequence[int]) -> list[str | None]:
        """The texts of these tokens by the server; None where it returns none."""

        def ask() -> list[Any]:
            reply = self._ask(ids, 0)
            if not self.by_id:
                self._echoed(reply, ids)
                return reply["logprobs"].get("tokens") or [None] * len(ids)
            entries = self._entries(reply, ids)
            for place in range(1, len(ids)):
                self._likely(entries[place], f"prompt_logprobs[{place}]")
            tokens = enumerate(ids[1:], start=1)
            return [None, *(entries[place][str(token)].get("decoded_token") for place, token in tokens)]

        return [None if text is None else str(text) for text in self._retry(ask)[: len(ids)]]

    def _retry(self, work: Callable[[], _Result], stop: threading.Event | None = None) -> _Result:
        """``work()``, again after a pause if the server fails, until it has failed for distillation.wait seconds.

        stop: set if another request has failed for good.
        """
        deadline, pause, wrong, stop = math.inf, FIRST_PAUSE, 0, stop or threading.Event()
        resume = "Start it again, then the run, with --resume if it has saved a step"
        while True:
            try:
                return work()
            except ServerError as error:
                if stop.is_set():
                    raise _Stopped from error
                wrong += isinstance(error, ReplyError)
                if wrong == WRONG_REPLIES:
                    raise TeacherServerError(f"{error}. {REMEDY}") from error
                deadline = min(deadline, time.monotonic() + self.wait)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TeacherServerError(
                        f"the teacher's server {self.client.url} has failed for {self.wait:g} seconds "
                        f"(distillation.wait): {error}. {resume}"
                    ) from error
                if stop.wait(min(pause, left)):
                    raise _Stopped from error
                pause = min(2 * pause, LONGEST_PAUSE)


def make_server_teacher(
    settings: DistillationSection, tokenizer: Any, model_name: str, longest: int, say: Say
) -> ServerTeacher:
    """The server of ``[distillation]``, which was asked and can be used; ``longest``: a prompt and its completion."""
    teacher = ServerTeacher(settings, say)
    teacher.inspect(tokenizer, model_name, longest, full=settings.kl == "full", top_k=settings.top_k)
    return teacher


def _probe(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Tokens from all parts of the vocabulary, the last one included, and special ones; and the special ones alone."""
    ids = sorted(set(tokenizer.get_vocab().values()))
    special = sorted(set(tokenizer.get_added_vocab().values()))[-PROBES:]
    return [*(ids[len(ids) * number // PROBES] for number in range(PROBES)), ids[-1], *special], special


def _others(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The pairs of two different texts, but for white space, and where both can be compared."""
    return [pair for pair in pairs if REPLACEMENT not in pair[0] + pair[1] and pair[0].strip() != pair[1].strip()]
