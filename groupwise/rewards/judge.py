"""A language model as the judge: the score it gives to an answer, from any endpoint that speaks OpenAI's chat API."""

from __future__ import annotations

import asyncio
import math
import os
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import responses
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from groupwise.errors import ConfigError, MissingExtraError, RewardError, check_choice
from groupwise.rewards.scorer import LOST_BATCHES
from groupwise.rewards.text import excerpt
from groupwise.rewards.verdict import DEFAULT_RUBRIC, parse_score, question
from groupwise.rewards.writing import THINKING_ENDS, answer_of, check_mark, prompt_text

Log = Callable[[str, Any], None]

OPENAI = "https://api.openai.com/v1"
OPENAI_KEY = "OPENAI_API_KEY"
ON_FAILURE = ("none", "raise")
REFUSALS = (401, 403, 404)  # no retry changes them: a wrong key, no right, a wrong address or model
SHOWN = 8  # as many characters of a key in a row are a leak


def judge(
    *,
    model: str,
    endpoint: str = OPENAI,
    api_key_env: str | None = None,
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
    """A reward from 0 to 1: the score that a language model gives to each answer, on its ``scale``.

    ``rubric`` is a text in which {prompt} and {answer} stand where these go, or the path of a file with such a text;
    {low} and {high} are the ends of the scale. How to end with a score is added to it. Only what follows the last
    ``after`` of an answer is judged. ``system`` is a system message, if one is wanted. ``temperature`` and
    ``max_tokens`` are sent as they are, and left out if they are "none", as some models want it.

    The key is the value of the environment variable ``api_key_env``, and is neither kept nor repeated anywhere. By
    default it is that of OPENAI_API_KEY for api.openai.com, and no key for other endpoints, such as vLLM's or
    llama.cpp's: a key is sent only to whom it is meant for.

    At most ``concurrency`` requests are under way at once, and rows of a batch with the same prompt and answer share
    one. A request has ``timeout`` seconds and is tried again up to ``retries`` times after 408, 409, 429, 5xx and where
    there is no answer, each time after a longer wait or the one that the endpoint asks for; in all it has
    timeout × (retries + 1) seconds. Since a batch is many requests, raise scoring.timeout (60 s by default), which
    limits the whole of it.

    A row whose request failed, or whose verdict has no score that can be read, is not scored (``on_failure="none"``)
    and counted in judge/requests_failed and judge/parse_failures, both shares of the rows; with "raise" it is an error.
    It is one in any case if every request of a batch fails, if the endpoint answers 401, 403 or 404, or if no verdict
    of three batches in a row can be read. judge/score and judge/verdict are columns of the records.

    A row that is not scored has the sum of the other rewards alone, if there are any, and so looks worse than it may
    be; advantages.combine = "normalize_then_sum" compares each reward among the rows that have it.
    """
    _check_openai()
    check_mark(after)
    check_choice("on_failure", on_failure, ON_FAILURE, ConfigError)
    url = _checked_url(endpoint)
    asked = _Judge(
        model=_checked_text("model", model),
        url=url,
        variable=_checked_variable(api_key_env, url),
        rubric=_read_rubric(rubric),
        scale=_checked_scale(scale),
        concurrency=int(_checked_number("concurrency", concurrency, 1, whole=True)),
        timeout=_checked_number("timeout", timeout, 0.001),
        retries=int(_checked_number("retries", retries, 0, whole=True)),
        system=None if system is None else _checked_text("system", system),
        settings=_settings(temperature, max_tokens),
    )

    async def judge(
        prompts: Sequence[Any],
        completions: Sequence[Any],
        log_extra: Log | None = None,
        log_metric: Log | None = None,
        **_: Any,
    ) -> list[float | None]:
        pairs = [
            (prompt_text(prompt), answer_of(completion, after))
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        distinct = list(dict.fromkeys(pairs))
        found = dict(zip(distinct, await asked.verdicts(distinct), strict=True))
        rows = [found[pair] for pair in pairs]
        if log_extra is not None:
            log_extra("judge/score", [row.score for row in rows])
            log_extra("judge/verdict", [row.text for row in rows])
        if log_metric is not None and rows:
            for name, value in _measures(rows).items():
                log_metric(name, value)
        if on_failure == "raise":
            _refuse_failures(rows)
        low, high = asked.scale
        return [None if row.score is None else (row.score - low) / (high - low) for row in rows]

    return judge


@dataclass(frozen=True)
class _Verdict:
    """What became of one request: the judge's text and the score in it, or why there is none."""

    text: str | None = None
    score: float | None = None
    failure: str | None = None
    seconds: float = 0.0


class _Refused(Exception):
    """The endpoint will answer no request: to be told at once."""


@dataclass
class _Judge:
    """The endpoint and how it is asked. The key is not here: it is read from the environment where it is used."""

    model: str
    url: str
    variable: str | None
    rubric: str
    scale: tuple[float, float]
    concurrency: int
    timeout: float
    retries: int
    system: str | None
    settings: dict[str, Any]
    unread: int = 0  # batches in a row of which no verdict could be read
    # A semaphore belongs to the loop in which it is waited for; rows that are tried one by one share it there.
    slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = field(default_factory=WeakKeyDictionary)

    async def verdicts(self, pairs: Sequence[tuple[str, str]]) -> list[_Verdict]:
        """The verdict on each prompt and answer, in their order."""
        from openai import AsyncOpenAI

        if not pairs:
            return []
        slots = self.slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.concurrency))
        refusal = ""
        # A client holds connections of this loop, so it lasts as long as the batch.
        async with AsyncOpenAI(
            api_key=self._key() or "none", base_url=self.url, timeout=self.timeout, max_retries=self.retries
        ) as client:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._verdict(client, slots, *pair)) for pair in pairs]
            except* _Refused as refused:
                refusal = str(refused.exceptions[0])
        if refusal:
            raise RewardError(refusal)
        found = [task.result() for task in tasks]
        self._check(found)
        return found

    async def _verdict(self, client: Any, slots: asyncio.Semaphore, prompt: str, answer: str) -> _Verdict:
        status, failure, text, cut = None, "", "", False
        async with slots:
            start = time.perf_counter()
            try:
                async with asyncio.timeout(self.timeout * (self.retries + 1)):
                    response = await client.chat.completions.create(
                        model=self.model, messages=self._messages(prompt, answer), **self.settings
                    )
                text, cut = _content(response)
            except Exception as error:  # it may repeat the headers of the request: what it says is chosen with care
                status, failure = self._described(error)
            seconds = time.perf_counter() - start
        if status in REFUSALS:
            raise _Refused(f"{self._where()} refuses to judge: it answered {failure}; {self._remedy(status)}")
        if failure:
            return _Verdict(failure=failure, seconds=seconds)
        # What a verdict that was cut off would have ended with is not known.
        score = None if cut else parse_score(text, *self.scale)
        return _Verdict("(not recorded: it repeats the key)" if self._shows_key(text) else text, score, None, seconds)

    def _messages(self, prompt: str, answer: str) -> list[dict[str, str]]:
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*before, {"role": "user", "content": question(self.rubric, prompt, answer, *self.scale)}]

    def _check(self, verdicts: Sequence[_Verdict]) -> None:
        failures = Counter(each.failure for each in verdicts if each.failure)
        if failures.total() == len(verdicts):
            reason, count = failures.most_common(1)[0]
            often = f"{reason} ({count} times)" if len(failures) > 1 else reason
            raise RewardError(f"{self._where()} answered none of {len(verdicts)} requests: {often}")
        self.unread = self.unread + 1 if all(each.score is None for each in verdicts) else 0
        if self.unread >= LOST_BATCHES:
            last = next(each.text for each in reversed(verdicts) if each.failure is None)
            raise RewardError(
                f"no verdict of the last {self.unread} batches has a score that can be read; {self._where()} ended one "
                f"with {excerpt((last or '')[-80:], 80)} (if verdicts are cut off, raise max_tokens)"
            )

    def _described(self, error: Exception) -> tuple[int | None, str]:
        """The status of the endpoint's answer, if it gave one, and what went wrong: never with the key in it."""
        from openai import APIConnectionError, APIStatusError, APITimeoutError

        if isinstance(error, APIStatusError):
            status = error.status_code
            name = f"{status} {responses.get(status, '')}".strip()
            body: Any = error.body
            said = " ".join(str(body.get("message") if isinstance(body, Mapping) else body or "").split())
            hidden = status in (401, 403) or not said or said.startswith("<") or self._shows_key(said)
            return status, name if hidden else f"{name}, {excerpt(said, 160)}"
        if isinstance(error, (APITimeoutError, TimeoutError)):
            return None, f"no answer within {self.timeout:g} s"
        if isinstance(error, APIConnectionError):
            return None, f"the connection failed ({type(error.__cause__ or error).__name__})"
        return None, f"something that is no chat completion ({type(error).__name__}); an endpoint often ends in /v1"

    def _shows_key(self, text: str) -> bool:
        key = self._key()
        pieces = {key[start : start + SHOWN] for start in range(max(1, len(key) - SHOWN + 1))}
        low = text.lower()
        return bool(key) and ("bearer " in low or any(piece.lower() in low for piece in pieces))

    def _key(self) -> str:
        return os.environ.get(self.variable, "").strip() if self.variable else ""

    def _where(self) -> str:
        return f"the judge {self.model!r} at {self.url}"

    def _remedy(self, status: int | None) -> str:
        if status == 404:
            return "see whether endpoint and model are right"
        return f"see whether {self.variable} has the right key" if self.variable else "name its key in api_key_env"


def _content(response: Any) -> tuple[str, bool]:
    """The text of a chat completion, and whether it was cut off."""
    choice = response.choices[0]
    content = choice.message.content
    if content is not None and not isinstance(content, str):
        raise TypeError("the content is no text")
    return content or "", choice.finish_reason == "length"


def _measures(rows: Sequence[_Verdict]) -> dict[str, float]:
    scores = [row.score for row in rows if row.score is not None]
    failed = sum(row.failure is not None for row in rows)
    found = {
        "judge/requests_failed": failed / len(rows),
        "judge/parse_failures": (len(rows) - len(scores) - failed) / len(rows),
        "judge/seconds": sum(row.seconds for row in rows) / len(rows),
    }
    return {**found, "judge/mean_score": sum(scores) / len(scores)} if scores else found


def _refuse_failures(rows: Sequence[_Verdict]) -> None:
    without = [row for row in rows if row.score is None]
    if without:
        reason = without[0].failure or f"a verdict without a score, {excerpt((without[0].text or '')[-80:], 80)}"
        raise RewardError(f"{len(without)} of {len(rows)} answers could not be judged; the first: {reason}")


def _check_openai() -> None:
    try:
        import openai  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("the judge", "openai", "judge") from error


def _checked_url(endpoint: object) -> str:
    example = f"give one such as {OPENAI} or http://localhost:8000/v1"
    if not isinstance(endpoint, str):
        raise ConfigError(f"endpoint must be the address of a chat API, got {excerpt(endpoint)}; {example}")
    try:
        parts = urlsplit(endpoint)
        _ = parts.port
    except ValueError as error:
        raise ConfigError(f"endpoint is no address: {error}; {example}") from None
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(
            "endpoint must be a plain address without a user, a password or a query; put the key in an environment "
            "variable and name that in api_key_env"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"endpoint must begin with http:// or https:// and a host, got {endpoint!r}; {example}")
    return endpoint.rstrip("/").removesuffix("/chat/completions")


def _checked_variable(name: object, url: str) -> str | None:
    """The environment variable that has the key, or None where none is needed."""
    host = urlsplit(url).hostname or ""
    if name is None and host != "api.openai.com" and not host.endswith(".api.openai.com"):
        return None
    variable = OPENAI_KEY if name is None else name
    if not isinstance(variable, str) or not re.fullmatch("[A-Z_][A-Z0-9_]*", variable):
        raise ConfigError(
            f"api_key_env must be the name of an environment variable, in capitals such as {OPENAI_KEY}, and not the "
            "key itself (what was given is not repeated here, in case it is one)"
        )
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"the environment variable {variable} is not set; it must have the key for {url}")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(f"the value of {variable} cannot be a key: it has spaces or characters that no key has")
    return variable


def _read_rubric(rubric: object) -> str:
    text = _checked_text("rubric", rubric)
    if "{answer}" in text:
        return text
    path = Path(os.path.expanduser(text))
    wanted = "give a text with {answer} in it, or the path of a file with such a text"
    if not os.path.isfile(path):
        raise ConfigError(f"rubric is {excerpt(text)}, which has no {{answer}} in it and is no file; {wanted}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the rubric {path} cannot be read: {error}") from error
    if "{answer}" not in text:
        raise ConfigError(f"the rubric {path} does not say where the answer goes; {wanted}")
    return text


def _checked_scale(scale: object) -> tuple[float, float]:
    ends = list(scale) if isinstance(scale, Sequence) and not isinstance(scale, str) else []
    if len(ends) != 2 or not all(_is_number(end) for end in ends) or not ends[0] < ends[1]:
        raise ConfigError(f"scale must be the lowest and the highest score, such as [1, 10], got {excerpt(scale)}")
    return float(ends[0]), float(ends[1])


def _settings(temperature: object, max_tokens: object) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if temperature not in (None, "none"):
        found["temperature"] = _checked_number("temperature", temperature, 0)
    if max_tokens not in (None, "none"):
        found["max_tokens"] = int(_checked_number("max_tokens", max_tokens, 1, whole=True))
    return found


def _checked_text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{name} must be a text, got {excerpt(value)}")
    return value


def _checked_number(name: str, value: Any, least: float, *, whole: bool = False) -> float:
    if not _is_number(value) or value < least or (whole and value != int(value)):
        kind = "whole number" if whole else "number"
        raise ConfigError(f"{name} must be a {kind} of at least {least:g}, got {excerpt(value)}")
    return float(value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
