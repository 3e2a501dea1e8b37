"""A conversation that a user's own code leads: ``rollout(model, row)`` asks the model for turns, and returns a reward.

The turns of all conversations are sampled together, as those of conversations with environments are. A request repeats
the conversation so far, as clients of chat APIs do, and must go on with it: the tokens that were sampled are kept, and
only the messages behind them become new tokens. So a rollout is one conversation, which is trained as one sequence.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from groupwise.conversations.chat_requests import (
    MODEL,
    ChatRequest,
    RequestRefused,
    assistant_message,
    completion_body,
    read_message,
    same_message,
)
from groupwise.conversations.endpoint import ChatEndpoint
from groupwise.conversations.episodes import Episode, EpisodeLimits
from groupwise.conversations.formats import TurnFormat
from groupwise.environments import EnvironmentFailed, Message, Schema
from groupwise.environments.background import LongCall
from groupwise.environments.failures import value_of
from groupwise.environments.message_text import limited_text
from groupwise.environments.watch import checked_reward
from groupwise.text import error_reason, excerpt, plural


class RolloutModel:
    """The policy in one conversation, as a rollout function gets it.

    base_url, api_key, name: for a client of OpenAI's API. The key is that of this conversation.
    seed: equal for the conversations of a group.
    """

    name = MODEL

    def __init__(self, endpoint: ChatEndpoint, base_url: str, api_key: str, seed: int) -> None:
        self.base_url, self.api_key, self.seed = base_url, api_key, seed
        self._endpoint, self._loop = endpoint, asyncio.get_running_loop()

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Schema] | None = None, **parameters: Any
    ) -> dict[str, Any]:
        """The model's next message, in OpenAI's form. ``parameters``: others of the API, such as max_tokens.

        Raises `RequestRefused` for a request that cannot be answered.
        """
        body = {"messages": messages, "tools": tools, **parameters}
        asked = self._endpoint.ask(self.api_key, body)  # by the key, too: it ends with the conversation
        answer = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asked, self._loop))
        message: dict[str, Any] = answer["choices"][0]["message"]
        return message


@dataclass(frozen=True)
class TurnRequest:
    """What a rollout function asks for: a turn after these tokens, which show the model these messages."""

    ids: list[int]
    messages: list[Message]
    max_tokens: int | None
    format: TurnFormat

    def add_to(self, episode: Episode) -> None:
        """Append the tokens: the prompt, or what follows the last turn."""
        if episode.turns:
            episode.turns[-1].given, episode.turns[-1].messages = self.ids, self.messages
        else:
            episode.prompt = self.ids


@dataclass(frozen=True)
class RolloutEnd:
    """The function returned; ``outcome`` as in `Episode`."""

    outcome: str


@dataclass
class RolloutFunction:
    """What makes the conversations of a rollout function, plain or async.

    formats: how turns become tokens when the model may call these tools. sampling: the parameters of requests that the
    recipe decides, with their values. must_reward: nothing else rewards a conversation.
    """

    function: Callable[..., Any]
    formats: Callable[[Sequence[Schema]], TurnFormat]
    tokenizer: Any
    limits: EpisodeLimits
    sampling: Mapping[str, Any] = field(default_factory=dict)
    must_reward: bool = False

    def __post_init__(self) -> None:
        self.name = getattr(self.function, "__name__", type(self.function).__name__)
        self.endpoint = ChatEndpoint()

    def __call__(self) -> RolloutConversation:
        return RolloutConversation(self)


@dataclass
class _Asked:
    """A request that was accepted, and its answer. ``is_dropped``: nobody waits for the answer any more."""

    request: ChatRequest
    turn: TurnRequest
    answer: asyncio.Future[dict[str, Any]]
    is_dropped: bool = False


class RolloutConversation:
    """One conversation after the other of a rollout function; the sampler calls it as it calls environments.

    All methods are called on the event loop of the sampler. The function itself is not, so it cannot block that.
    """

    counts: Mapping[str, float] = MappingProxyType({})

    def __init__(self, rollout: RolloutFunction) -> None:
        self.rollout, self.name = rollout, rollout.name
        self._call: LongCall | None = None
        self._key = ""
        self._asked: _Asked | None = None  # the last request

    async def start(self, row: dict[str, Any], seed: int, episode: Episode) -> TurnRequest | RolloutEnd:
        """Call the function, and wait for its first request."""
        self._episode = episode
        self._messages: list[Message] = []  # that the model was shown, and said
        self._asked = None
        self._outcome, self._refusal = "done", ""  # the limit at which the last request was refused
        self._value: Any = None
        try:
            base_url, self._key = await self.rollout.endpoint.add(self)
        except OSError as error:
            raise EnvironmentFailed(f"has no local endpoint: {error_reason(error)}", self._where) from error
        model = RolloutModel(self.rollout.endpoint, base_url, self._key, seed)
        self._call = LongCall(self.rollout.function, model, row, name=f"groupwise-{self.name}")
        return await self._next(self._call, self.rollout.limits.environment.wait_seconds)

    async def hear(self, is_cut: bool) -> TurnRequest | RolloutEnd:
        """Answer the last request by the episode's last turn, which a limit may have cut; wait for the next request."""
        asked, call, turn = self._asked, self._call, self._episode.turns[-1]
        if asked is None or call is None:
            raise EnvironmentFailed("did not ask for a turn", self._where)
        if call.task.done():
            return self._end(call)
        self._messages = [*asked.request.messages, read_message(assistant_message(turn.said))]
        is_shortened = len(turn.sampled.ids) == asked.request.max_tokens
        self._outcome = "token_limit" if is_cut and not is_shortened else "done"
        context = self._episode.length - len(turn.sampled.ids)
        asked.answer.set_result(completion_body(asked.request, turn, context, self.rollout.tokenizer))
        return await self._next(call, self.rollout.limits.environment.turn_seconds)

    async def reward(self) -> float | dict[str, float | None] | None:
        """What the function returned, checked."""
        await self.close()
        reward = checked_reward(self._value, self._where)
        if reward is None and self.rollout.must_reward and not self._refusal:
            what = "returned no reward (None), and the run has no reward functions; return a number, or add [[rewards]]"
            raise EnvironmentFailed(what, self._where)
        return reward

    async def close(self) -> None:
        """Give up what still runs. The key of the conversation ends."""
        self.rollout.endpoint.remove(self._key)
        if self._asked is not None:
            self._asked.answer.cancel()
        if self._call is not None:
            self._call.task.cancel()
            self._call = None

    async def ask(self, body: Any) -> dict[str, Any]:
        """The answer to a request in the form of OpenAI's API; raises `RequestRefused`."""
        request = ChatRequest.read(body, self.rollout.sampling)
        asked = self._asked
        if asked is None or not asked.is_dropped or request != asked.request:  # otherwise it is asked again
            asked = self._accept(request)
        asked.is_dropped = False
        try:
            return await asyncio.shield(asked.answer)
        except asyncio.CancelledError:
            asked.is_dropped = True
            raise

    async def _next(self, call: LongCall, seconds: float) -> TurnRequest | RolloutEnd:
        """The next request of the function, or its end."""
        self._wanted: asyncio.Future[TurnRequest] = asyncio.get_running_loop().create_future()
        waiting: set[asyncio.Future[Any]] = {self._wanted, call.task}
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if call.task.done():
            return self._end(call)
        if self._wanted.done():
            return self._wanted.result()
        self._wanted.cancel()
        what = f"did not go on within {seconds:g} s and was abandoned; it was in {await call.give_up()}"
        raise EnvironmentFailed(what, self._where, timed_out=True)

    def _end(self, call: LongCall) -> RolloutEnd:
        outcome = call.task.result()
        turns = self._episode.turns
        if not (self._refusal and turns and isinstance(outcome.error, Exception)):  # it was told of a limit
            self._value = value_of(outcome, self._where, 0.0)
        if self._asked is not None and not self._asked.answer.done():
            raise EnvironmentFailed("returned before a request to the model was answered; await it", self._where)
        if not turns:
            raise EnvironmentFailed("returned without asking the model for a turn", self._where)
        return RolloutEnd(self._refusal or self._outcome)

    def _accept(self, request: ChatRequest) -> _Asked:
        """Note a request that goes on with the conversation, and wake `_next`."""
        if self._wanted.done() or (self._asked is not None and not self._asked.answer.done()):
            raise RequestRefused(
                "the last request of this conversation has not been answered yet: a rollout is one conversation, so "
                "its requests follow one another; await each of them",
                "conversation_busy",
            )
        limits, turns = self.rollout.limits, self._episode.turns
        messages = self._new_messages(request)
        if len(turns) == limits.max_turns:
            self._refuse("turn_limit", "turn_limit", f"environment.max_turns = {limits.max_turns}")
        try:
            turn_format = self.rollout.formats(request.tools)
            if turns:
                ids = turn_format.given_after(messages, turns[-1].sampled.ids.tolist())
            else:
                ids = turn_format.prompt(messages)
        except Exception as error:  # chat templates and tokenizers are other people's code
            raise RequestRefused(f"these messages cannot be shown to the model: {error_reason(error)}") from error
        if (limits.room(self._episode) - len(ids) if turns else limits.room(Episode(ids))) < 1:
            count = plural(self._episode.length + len(ids) if turns else len(ids), "token")
            what = (
                f"tokens (environment.max_tokens and what the model's context holds) with the {count} of this request"
            )
            self._refuse("token_limit", "context_length_exceeded", what)
        turn = TurnRequest(ids, messages, request.max_tokens, turn_format)
        self._asked = _Asked(request, turn, asyncio.get_running_loop().create_future())
        self._refusal = ""
        self._wanted.set_result(turn)
        return self._asked

    def _new_messages(self, request: ChatRequest) -> list[Message]:
        """The messages after those that the conversation has already, which the request must repeat."""
        if self._asked is None:
            return request.messages
        if request.tools != self._asked.request.tools:
            raise RequestRefused(
                "the tools are others than in the request before; the model was told of them at the beginning of the "
                "conversation, so they stay the same in a rollout",
                "conversation_changed",
            )
        pairs = itertools.zip_longest(self._messages, request.messages[: len(self._messages)])
        for number, (known, given) in enumerate(pairs, start=1):
            if given is None or not same_message(known, given):
                difference = f"message {number} is {excerpt(given)}, and was {excerpt(known)}"
                raise RequestRefused(
                    f"the request does not go on with the conversation: {difference}. A rollout is one conversation: "
                    "repeat all of its messages as they were, and append new ones. Summarised histories, other agents "
                    "and several answers to one prompt are other conversations, which need a rollout of their own",
                    "conversation_changed",
                )
        new = request.messages[len(self._messages) :]
        if not new:
            raise RequestRefused("there is no new message after the assistant's; append one", "conversation_changed")
        most = self.rollout.limits.environment.max_reply_chars
        return [{**message, "content": limited_text(message["content"], most)} for message in new]

    def _refuse(self, outcome: str, code: str, limit: str) -> None:
        self._refusal = outcome
        raise RequestRefused(f"the conversation is at its limit of {limit}; return the reward of the rollout now", code)

    @property
    def _where(self) -> str:
        return f"rollout {self.name}:"
