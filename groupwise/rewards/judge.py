"""A language model as a judge: a reward from the scores of any endpoint with OpenAI's chat API."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import responses
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from groupwise.errors import ConfigError, MissingExtraError, RewardError, check_choice, check_integer
from groupwise.paths import read_file
from groupwise.redaction import Secret, remember_secret
from groupwise.rewards.options import check_after, check_number, check_text, is_finite_number
from groupwise.rewards.scorer import LOST_BATCHES
from groupwise.rewards.text import THINKING_ENDS, answer_of, prompt_text
from groupwise.rewards.verdict import DEFAULT_RUBRIC, parse_score, question
from groupwise.text import excerpt, one_line

OPENAI = "https://api.openai.com/v1"
OPENAI_KEY = "OPENAI_API_KEY"
REFUSALS = (401, 403, 404)  # a wrong key, no permission, a wrong address or model: retries do not help
KEY_PIECE = 8  # a text with this many consecutive characters of the key leaks it
MAX_REPLY = 4 * 2**20  # bytes


def judge(
    *,
    model: str,
    endpoint: str = OPENAI,
    api_key_env: str | None = None,
    api_key: str | None = None,
    rubric: str = DEFAULT_RUBRIC,
    scale: Sequence[float] = (1, 10),
    concurrency: int = 16,
    timeout: float = 60.0,
    retries: int = 4,
    temperature: float | str | None = 0.0,
    max_tokens: int | str | None = 256,
    system: str | None = None,
    after: str | None = THINKING_ENDS,
    on_failure: str = "none",
) -> Callable[..., Awaitable[list[float | None]]]:
    """A reward from 0 to 1: the score that a language model gives to each answer, mapped from its ``scale``.

    ``rubric`` is a text with {prompt} and {answer} in it, or the path of a file with such a text; {low} and {high} are
    the ends of the scale. Only the text after the last ``after`` of an answer is judged. ``system`` is an optional
    system message. The value "none" of ``temperature`` and ``max_tokens`` leaves them out, as some models require.
    The key is read from the environment variable ``api_key_env``; by default that is OPENAI_API_KEY for
    api.openai.com, and other endpoints, such as vLLM or llama.cpp, get no key. ``api_key`` is the key itself, in a
    recipe as ``{ env = "NAME" }``. Requests go to the endpoint's own host only, and a reply is limited to 4 MiB.

    At most ``concurrency`` requests run at the same time; equal rows share one. A request without an answer within
    ``timeout`` seconds is retried up to ``retries`` times. scoring.timeout (60 s by default) limits the complete batch.

    With ``on_failure="none"`` a row whose request fails, or whose verdict has no readable score, is not scored: it has
    only the sum of its other rewards, unless advantages.combine = "normalize_then_sum" compares each reward only among
    the rows that have it. With "raise" it is an error. It is always one if every request of a batch fails, if the
    endpoint answers 401, 403 or 404, or if three batches in a row have no readable verdict.
    """
    if importlib.util.find_spec("openai") is None:
        raise MissingExtraError("the judge", "openai", "judge")
    check_after(after)
    check_choice("on_failure", on_failure, ("none", "raise"), ConfigError)
    url = _check_url(endpoint)
    sampling: dict[str, Any] = {"model": check_text("model", model)}
    if temperature not in (None, "none"):
        sampling["temperature"] = check_number("temperature", temperature, 0)
    if max_tokens not in (None, "none"):
        sampling["max_tokens"] = check_integer("max_tokens", max_tokens, 1, ConfigError)
    client = JudgeClient(
        url=url,
        key=_key_of(api_key, api_key_env, url),
        rubric=_read_rubric(rubric),
        scale=_check_scale(scale),
        concurrency=check_integer("concurrency", concurrency, 1, ConfigError),
        timeout=check_number("timeout", timeout, 0.001),
        retries=check_integer("retries", retries, 0, ConfigError),
        system=None if system is None else check_text("system", system),
        sampling=sampling,
    )

    async def judge(
        prompts: Sequence[Any],
        completions: Sequence[Any],
        log_extra: Callable[[str, list[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **_: Any,
    ) -> list[float | None]:
        answers = (answer_of(completion, after) for completion in completions)
        pairs = list(zip(map(prompt_text, prompts), answers, strict=True))
        distinct = list(dict.fromkeys(pairs))
        verdicts = dict(zip(distinct, await client.verdicts(distinct), strict=True))
        rows = [verdicts[pair] for pair in pairs]
        if log_extra is not None:
            log_extra("judge/score", [row.score for row in rows])
            log_extra("judge/verdict", [row.text for row in rows])
        if log_metric is not None and rows:
            scores = [row.score for row in rows if row.score is not None]
            failed = sum(row.failure is not None for row in rows)
            log_metric("judge/requests_failed", failed / len(rows))
            log_metric("judge/parse_failures", (len(rows) - len(scores) - failed) / len(rows))
            log_metric("judge/seconds", sum(row.seconds for row in rows) / len(rows))
            if scores:
                log_metric("judge/mean_score", sum(scores) / len(scores))
        unscored = [row for row in rows if row.score is None]
        if on_failure == "raise" and unscored:
            reason = unscored[0].failure or f"a verdict without a score, {excerpt((unscored[0].text or '')[-80:], 80)}"
            raise RewardError(f"{len(unscored)} of {len(rows)} answers could not be judged; the first: {reason}")
        low, high = client.scale
        return [None if row.score is None else (row.score - low) / (high - low) for row in rows]

    return judge


@dataclass(frozen=True)
class JudgeVerdict:
    """The judge's text and the score in it, or why the request failed."""

    text: str | None = None
    score: float | None = None
    failure: str | None = None
    seconds: float = 0.0


class RefusedReply(BaseException):
    """A reply that is not read further. Not an `Exception`, after which the client would send the request again."""


@dataclass(frozen=True)
class JudgeKey:
    """The key of an endpoint, or the environment variable with it, which is read when it is used."""

    variable: str | None = None
    value: Secret | None = None

    def read(self) -> str:
        if self.value is not None:
            return self.value.reveal()
        return os.environ.get(self.variable or "", "").strip()

    def __str__(self) -> str:
        return "the key in api_key" if self.variable is None else f"the key in {self.variable}"


@dataclass
class JudgeClient:
    """Sends questions to the endpoint."""

    url: str
    key: JudgeKey | None
    rubric: str
    scale: tuple[float, float]
    concurrency: int
    timeout: float
    retries: int
    system: str | None
    sampling: dict[str, Any]
    unreadable_batches: int = 0  # in a row
    # A semaphore belongs to one event loop. Rows that are retried one by one share it.
    slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = field(default_factory=WeakKeyDictionary)

    async def verdicts(self, pairs: Sequence[tuple[str, str]]) -> list[JudgeVerdict]:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        if not pairs:
            return []
        slots = self.slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.concurrency))
        refusal = ""
        # The client's connections belong to this loop, so it is closed after the batch.
        options: dict[str, Any] = {"timeout": self.timeout, "max_retries": self.retries}
        # Uncompressed, so that a small reply cannot grow. Proxies of the environment are used.
        http = DefaultAsyncHttpxClient(
            headers={"Accept-Encoding": "identity"},
            event_hooks={"request": [self._check_request], "response": [self._check_response]},
        )
        key = "none" if self.key is None else self.key.read()
        async with AsyncOpenAI(api_key=key, base_url=self.url, http_client=http, **options) as client:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._verdict(client, slots, *pair)) for pair in pairs]
            except* RewardError as refused:  # the endpoint will not answer any request
                refusal = str(refused.exceptions[0])
        if refusal:
            raise RewardError(refusal)
        verdicts = [task.result() for task in tasks]
        self._check(verdicts)
        return verdicts

    async def _verdict(self, client: Any, slots: asyncio.Semaphore, prompt: str, answer: str) -> JudgeVerdict:
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages.append({"role": "user", "content": question(self.rubric, prompt, answer, *self.scale)})
        status, failure, text, cut = None, "", "", False
        async with slots:
            start = time.perf_counter()
            try:
                async with asyncio.timeout(self.timeout * (self.retries + 1)):
                    response = await client.chat.completions.create(messages=messages, **self.sampling)
                choice = response.choices[0]
                text, cut = choice.message.content or "", choice.finish_reason == "length"
                if not isinstance(text, str):
                    raise TypeError("the content is not a text")
            except (Exception, RefusedReply) as error:
                status, failure = self._describe(error)
            seconds = time.perf_counter() - start
        if status in REFUSALS:
            remedy = f"check {self.key}" if self.key else "name its key in api_key_env"
            remedy = "check endpoint and model" if status == 404 else remedy
            raise RewardError(f"{self.name} refuses to judge: it answered {failure}; {remedy}")
        if failure:
            return JudgeVerdict(failure=failure, seconds=seconds)
        score = None if cut else parse_score(text, *self.scale)
        shown = "(not recorded: it repeats the key)" if self._shows_key(text) else text
        return JudgeVerdict(shown, score, None, seconds)

    async def _check_request(self, request: Any) -> None:
        """Called before each request, also one that follows a redirect: the text and the key go to no other host."""
        if _origin(str(request.url)) != _origin(self.url):
            scheme, host, port = _origin(str(request.url))
            place = one_line(f"{scheme}://{host}:{port}")[:100]
            raise RefusedReply(f"it redirects to {place}, which is another host; if that is right, set endpoint to it")
        request.extensions["groupwise_deadline"] = time.monotonic() + self.timeout

    async def _check_response(self, response: Any) -> None:
        """Called before the body is read."""
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise RefusedReply("the reply is compressed, though the request asked for plain text")
        if response.headers.get("content-length", "0").isdecimal():  # it may lie, so the bytes are counted, too
            _check_size(int(response.headers.get("content-length", "0")))
        response.stream = _limited_stream(response, response.request.extensions["groupwise_deadline"])

    def _check(self, verdicts: Sequence[JudgeVerdict]) -> None:
        failures = Counter(verdict.failure for verdict in verdicts if verdict.failure)
        if failures.total() == len(verdicts):
            reason, number = failures.most_common(1)[0]
            times = f" ({number} times)" if len(failures) > 1 else ""
            raise RewardError(f"{self.name} answered none of {len(verdicts)} requests: {reason}{times}")
        unreadable = all(verdict.score is None for verdict in verdicts)
        self.unreadable_batches = self.unreadable_batches + 1 if unreadable else 0
        if self.unreadable_batches >= LOST_BATCHES:
            last = next(verdict.text for verdict in reversed(verdicts) if verdict.failure is None)
            raise RewardError(
                f"no verdict of the last {self.unreadable_batches} batches has a readable score; {self.name} ended "
                f"one with {excerpt((last or '')[-80:], 80)} (if verdicts are cut off, raise max_tokens)"
            )

    def _describe(self, error: BaseException) -> tuple[int | None, str]:
        """The status of the endpoint's answer, if there is one, and what went wrong, without the key."""
        from openai import APIConnectionError, APIStatusError, APITimeoutError

        if isinstance(error, RefusedReply):
            return None, str(error)
        if isinstance(error, APIStatusError):
            status = error.status_code
            name = f"{status} {responses.get(status, '')}".strip()
            body: Any = error.body
            message = " ".join(str(body.get("message") if isinstance(body, Mapping) else body or "").split())
            hidden = status in (401, 403) or not message or message.startswith("<") or self._shows_key(message)
            return status, name if hidden else f"{name}, {excerpt(message, 160)}"
        if isinstance(error, (APITimeoutError, TimeoutError)) or isinstance(error.__cause__, TimeoutError):
            return None, f"no answer within {self.timeout:g} s"
        if isinstance(error, APIConnectionError):
            return None, f"the connection failed ({type(error.__cause__ or error).__name__})"
        return None, f"the reply is not a chat completion ({type(error).__name__}); an endpoint often ends in /v1"

    def _shows_key(self, text: str) -> bool:
        key, text = "" if self.key is None else self.key.read().lower(), text.lower()
        pieces = (key[start : start + KEY_PIECE] for start in range(max(1, len(key) - KEY_PIECE + 1)))
        return bool(key) and ("bearer " in text or any(piece in text for piece in pieces))

    @property
    def name(self) -> str:
        return f"the judge {self.sampling['model']!r} at {self.url}"


def _check_url(endpoint: object) -> str:
    address = str(endpoint)
    try:
        parts = urlsplit(address)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_valid &= not (parts.username or parts.password or parts.query or parts.fragment)
    except ValueError:  # a port out of range, for example
        is_valid = False
    if not is_valid:  # the address is not repeated, in case there is a key in it
        raise ConfigError(
            f"endpoint must be a plain address such as {OPENAI} or http://localhost:8000/v1, without a password or a "
            "query; put the key in an environment variable and name that in api_key_env"
        )
    return address.rstrip("/").removesuffix("/chat/completions")


def _key_of(key: object, variable: object, url: str) -> JudgeKey | None:
    """The key, or the environment variable with it; None if the endpoint needs no key."""
    if key is not None:
        if variable is not None:
            raise ConfigError("api_key and api_key_env are both set; leave one of them out")
        if not isinstance(key, str):
            raise ConfigError('api_key must be a text, in a recipe api_key = { env = "NAME" }')
        _check_key(key.strip(), "api_key")
        return JudgeKey(value=Secret(key.strip()))
    host = urlsplit(url).hostname or ""
    if variable is None and host != "api.openai.com" and not host.endswith(".api.openai.com"):
        return None
    name = OPENAI_KEY if variable is None else variable
    if not isinstance(name, str) or not re.fullmatch("[A-Z_][A-Z0-9_]*", name):
        # The value is not repeated, in case it is a key.
        raise ConfigError(
            f"api_key_env must be the name of an environment variable, such as {OPENAI_KEY}, and not the key itself; "
            "set that variable to the key"
        )
    value = os.environ.get(name, "").strip()
    if not value:
        raise ConfigError(f"the environment variable {name} is not set; set it to the key for {url}")
    _check_key(value, name)
    remember_secret(value)
    return JudgeKey(name)


def _check_key(key: str, name: str) -> None:
    """Raise an error for what no header can hold, such as a newline."""
    if not key or not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(f"the value of {name} cannot be a key: it has spaces or characters that no key has")


def _origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port."""
    parts = urlsplit(url)
    return parts.scheme.lower(), (parts.hostname or "").lower(), parts.port or (443 if parts.scheme == "https" else 80)


def _limited_stream(response: Any, deadline: float) -> Any:
    """The body of a reply, which ends with an error if it is too large or not complete at the ``deadline``."""
    http = sys.modules[type(response).__module__.partition(".")[0]]  # httpx, or httpx2 with newer versions of openai
    stream = response.stream

    class LimitedStream(http.AsyncByteStream):  # type: ignore[name-defined, misc]
        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for chunk in stream:
                size += len(chunk)
                _check_size(size)
                if time.monotonic() > deadline:
                    raise TimeoutError
                yield chunk

        async def aclose(self) -> None:
            await stream.aclose()

    return LimitedStream()


def _check_size(size: int) -> None:
    if size > MAX_REPLY:
        raise RefusedReply(f"the reply has more than {MAX_REPLY // 2**20} MiB")


def _read_rubric(rubric: object) -> str:
    text = check_text("rubric", rubric)
    path = os.path.expanduser(text)
    if "{answer}" not in text and os.path.isfile(path):
        try:
            text = read_file(path, ConfigError).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ConfigError(f"the rubric {path} cannot be read: {error}") from error
    if "{answer}" not in text:
        raise ConfigError(f"rubric must be a text with {{answer}} in it, or a file of one, got {excerpt(rubric, 300)}")
    return text


def _check_scale(scale: object) -> tuple[float, float]:
    ends = list(scale) if isinstance(scale, Sequence) and not isinstance(scale, str) else []
    if len(ends) != 2 or not all(map(is_finite_number, ends)) or not ends[0] < ends[1]:
        raise ConfigError(f"scale must be the lowest and the highest score, such as [1, 10], got {excerpt(scale)}")
    return float(ends[0]), float(ends[1])
