"""Requests and answers of OpenAI's chat completions API, as far as a policy that is trained can have them.

The policy is trained on what it samples, so a request cannot change how it samples: temperature and filters are those
of the recipe. What is sampled is recorded, so there is one answer to a request (``n``), of the policy (``model``).
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from groupwise.conversations.episodes import EpisodeTurn
from groupwise.data.rows import content_text, describe_type
from groupwise.environments import AssistantTurn, Message, Schema
from groupwise.errors import InputError, check_integer
from groupwise.text import excerpt

MODEL = "policy"
"""The name of the policy in requests."""

# Facts about the caller, and what does not change the answer.
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "stream_options"}
# What a parameter may be, apart from null: what it is anyway.
FIXED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stop": ([], ""),
    "seed": (),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "tool_choice": ("auto",),
}
READ = {"model", "messages", "tools", "max_tokens", "max_completion_tokens", "logprobs", "stream"}
ROLES = ("system", "user", "assistant", "tool")


class RequestRefused(InputError):
    """A request to the policy that cannot be answered. ``code`` names the reason, such as ``turn_limit``."""

    def __init__(self, message: str, code: str = "invalid_request", status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


def error_body(refused: RequestRefused) -> dict[str, Any]:
    """An error in OpenAI's form."""
    return {"error": {"message": str(refused), "type": "invalid_request_error", "param": None, "code": refused.code}}


@dataclass(frozen=True)
class ChatRequest:
    """A request for a turn, checked. ``tools`` are schemas; ``max_tokens`` is None without a limit of its own."""

    messages: list[Message]
    tools: list[Schema]
    max_tokens: int | None
    logprobs: bool

    @classmethod
    def read(cls, body: Any, sampling: Mapping[str, Any]) -> ChatRequest:
        """The request that a JSON body holds; ``sampling`` has the recipe's values of parameters."""
        if not isinstance(body, Mapping):
            raise RequestRefused(f"the body of a request is a JSON object, got {excerpt(body)}")
        given = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
        allowed = {**FIXED, **{name: () if value is None else (value,) for name, value in sampling.items()}}
        if not given.get("tools"):
            allowed["tool_choice"] = ("auto", "none")
        for name, value in given.items():
            if name in allowed and value not in allowed[name]:
                values = [json.dumps(entry) for entry in allowed[name]]
                raise RequestRefused(
                    f"{name} must be left out{f' or {values[0]}' if values else ''}, got {excerpt(value)}: the policy "
                    "is trained on what it samples, so the recipe ([sampling]) says how, and not a request",
                    "unsupported_value",
                )
            if name not in allowed and name not in READ:
                raise RequestRefused(f"there is no parameter {excerpt(name)}; leave it out", "unsupported_parameter")
        if (model := given.get("model", MODEL)) != MODEL:
            what = f"there is no model {excerpt(model)} here; the model that is trained has the name {MODEL!r}"
            raise RequestRefused(what, "model_not_found", 404)
        _flag(given, "stream")
        return cls(
            messages=_read_messages(given.get("messages")),
            tools=_read_tools(given.get("tools")),
            max_tokens=_read_limit(given),
            logprobs=_flag(given, "logprobs"),
        )


def _read_limit(given: Mapping[str, Any]) -> int | None:
    limits = [_count(name, given[name]) for name in ("max_tokens", "max_completion_tokens") if name in given]
    return min(limits, default=None)


def _count(name: str, value: Any) -> int:
    try:
        return check_integer(name, value, 1)
    except InputError as error:
        raise RequestRefused(str(error), "invalid_value") from None


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise RequestRefused(f"{name} must be true or false, got {excerpt(value)}", "invalid_value")
    return value


def _read_tools(value: Any) -> list[Schema]:
    if value is None:
        return []
    if not isinstance(value, (list, tuple)):
        raise RequestRefused(f"tools is {describe_type(value)}; it must be a list of tools")
    for number, tool in enumerate(value, start=1):
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            form = '{"type": "function", "function": {"name": …, "description": …, "parameters": …}}'
            raise RequestRefused(f"tool {number} is {excerpt(tool)}; a tool is {form}")
    return [dict(tool) for tool in value]


def _read_messages(value: Any) -> list[Message]:
    if not isinstance(value, (list, tuple)) or not value:
        what = "missing" if value is None else "empty" if value in ([], ()) else describe_type(value)
        raise RequestRefused(f"messages is {what}; it must be a list of messages, at least one")
    return [read_message(message, number) for number, message in enumerate(value, start=1)]


def read_message(message: Any, number: int = 1) -> Message:
    """A message with what a chat template takes of it: text, and arguments of calls as objects."""
    where = f"message {number}"
    if not isinstance(message, Mapping):
        raise RequestRefused(f"{where} is {describe_type(message)}; a message is an object with a role and a content")
    role = "system" if message.get("role") == "developer" else message.get("role")
    if role not in ROLES:
        raise RequestRefused(f"{where} has the role {excerpt(role)}; it must be one of {', '.join(ROLES)}")
    if message.get("function_call") is not None:
        raise RequestRefused(f"{where} has a function_call, the former kind of calls; use tools and tool_calls")
    calls = message.get("tool_calls") or []
    content = message.get("content")
    text = "" if content is None and calls else "" if content in ("", []) else content_text(content)
    if text is None:
        kind = describe_type(content)
        raise RequestRefused(f"{where}: its content is {kind}; it must be a text or a list of parts of the type 'text'")
    read: Message = {"role": role, "content": text}
    for name in ("name", "tool_call_id"):
        if (value := message.get(name)) is not None:
            if not isinstance(value, str):
                raise RequestRefused(f"{where}: its {name} is {describe_type(value)}; it must be a text")
            read[name] = value
    if calls:
        if role != "assistant" or not isinstance(calls, (list, tuple)):
            raise RequestRefused(f"{where}: tool_calls is a list that only messages of the assistant have")
        read["tool_calls"] = [_read_call(call, where) for call in calls]
    return read


def _read_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        form = '{"id": …, "type": "function", "function": {"name": …, "arguments": …}}'
        raise RequestRefused(f"{where}: a call of a tool is {form}, got {excerpt(call)}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            what = f"{where}: the arguments of {excerpt(function['name'])} are not JSON: {excerpt(arguments)}"
            raise RequestRefused(what) from None
    number = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**number, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def same_message(one: Message, other: Message) -> bool:
    """Whether two messages say the same; clients may trim what the assistant said."""
    if one["role"] == other["role"] == "assistant":
        one, other = ({**message, "content": message["content"].strip()} for message in (one, other))
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)  # NaN is the same there


def assistant_message(said: AssistantTurn) -> Message:
    """What the model said, in OpenAI's form; ``reasoning_content`` is its thinking, as in vLLM."""
    message: Message = {"role": "assistant", "content": said.text if said.text or not said.calls else None}
    if said.thinking is not None:
        message["reasoning_content"] = said.thinking
    if said.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in said.calls
        ]
    return message


def completion_body(request: ChatRequest, turn: EpisodeTurn, prompt_tokens: int, tokenizer: Any) -> dict[str, Any]:
    """The answer to a request in OpenAI's form."""
    count = len(turn.sampled.ids)
    is_cut = turn.sampled.stop_reason == "length"
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": count, "total_tokens": prompt_tokens + count}
    choice = {
        "index": 0,
        "message": assistant_message(turn.said),
        "logprobs": _logprobs(turn, tokenizer) if request.logprobs else None,
        "finish_reason": "length" if is_cut else "tool_calls" if turn.said.calls else "stop",
    }
    about = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
    }
    return {**about, "choices": [choice], "usage": usage}


def _logprobs(turn: EpisodeTurn, tokenizer: Any) -> dict[str, Any]:
    """The log-prob of each sampled token, which is that under the full distribution at the recipe's temperature."""
    content = []
    for token, logp in zip(turn.sampled.ids.tolist(), turn.sampled.logps.tolist(), strict=True):
        text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        content.append({"token": text, "logprob": logp, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": content, "refusal": None}


def stream_chunks(request: Mapping[str, Any], body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """An answer as the chunks of a stream: the complete message in one, then why it ended, and the usage if wanted."""
    options = request.get("stream_options")
    (choice,) = body["choices"]
    calls = [{"index": number, **call} for number, call in enumerate(choice["message"].get("tool_calls", ()))]
    delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
    about = {**{name: body[name] for name in ("id", "created", "model")}, "object": "chat.completion.chunk"}
    parts = [
        {"index": 0, "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None},
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]},
    ]
    chunks = [{**about, "choices": [part]} for part in parts]
    if isinstance(options, Mapping) and options.get("include_usage") is True:
        chunks.append({**about, "choices": [], "usage": body["usage"]})
    return chunks
