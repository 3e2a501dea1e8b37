"""The formats in which models write calls of tools.

Each format is a function from a text without its thinking to the calls in it. A call that cannot be read is a problem:
a sentence that says what is wrong and what to write, which an environment may give to the model.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from groupwise.conversations.call_json import MAX_CHARACTERS, arguments_of, call_of, read_json, read_json_at
from groupwise.conversations.tool_calls import CallError, FoundCalls, call_id
from groupwise.environments import ToolCall
from groupwise.text import error_reason

Parameters = Mapping[str, Mapping[str, Any]]


class CallFormat(NamedTuple):
    """``tags``: what opens and closes a call (nothing: the end of the turn); ``example``: what a model should write.

    ``find`` takes the text, the number of the next call, and the parameters of the tools.
    """

    tags: tuple[str, str | None]
    example: str
    find: Callable[[str, int, Parameters], FoundCalls]


class _Calls:
    """Collects the calls of a turn."""

    def __init__(self, example: str, number: int) -> None:
        self.calls: list[ToolCall] = []
        self.problems: list[str] = []
        self._example, self._number = example, number

    def add(self, read: Callable[..., ToolCall | Sequence[ToolCall]], *arguments: Any) -> None:
        """What ``read`` returns for a call's number and the arguments, one call or several; or what is wrong."""
        try:
            made = read(self._number + len(self.calls), *arguments)
        except CallError as error:
            self.problems.append(f"The tool call was not understood: {error}. Write it as: {self._example}")
        else:
            self.calls += [made] if isinstance(made, ToolCall) else made

    def found(self, content: str) -> FoundCalls:
        return FoundCalls(content.strip(), self.calls, self.problems)


HERMES = '<tool_call>\n{"name": "TOOL", "arguments": {"ARGUMENT": VALUE}}\n</tool_call>'
CODER = "<tool_call>\n<function=TOOL>\n<parameter=ARGUMENT>\nVALUE\n</parameter>\n</function>\n</tool_call>"
LLAMA = '{"name": "TOOL", "parameters": {"ARGUMENT": VALUE}}'
MISTRAL = '[TOOL_CALLS] [{"name": "TOOL", "arguments": {"ARGUMENT": VALUE}}]'
DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>TOOL\n```json\n"
    '{"ARGUMENT": VALUE}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
GEMMA = "```tool_code\nTOOL(ARGUMENT=VALUE)\n```"
FENCED = '```json\n{"name": "TOOL", "arguments": {"ARGUMENT": VALUE}}\n```'


def _hermes(text: str, number: int, _: Parameters) -> FoundCalls:
    """Hermes, Qwen2.5, Qwen3, SmolLM3: a JSON object in tags."""
    found = _Calls(HERMES, number)
    content, at = "", 0
    while (start := text.find("<tool_call>", at)) >= 0:
        content += text[at:start]
        start += len("<tool_call>")
        at = _end_of_tag(text, start)
        body = text[start:at].removesuffix("</tool_call>")
        found.add(_json_call, body)
    return found.found(content + text[at:])


def _end_of_tag(text: str, start: int) -> int:
    """Where the tag that was opened before ``start`` ends. The closing tag may be part of an argument, too."""
    try:
        _, end = read_json_at(text, start, repair=False)
    except CallError:
        end = start
    close = text.find("</tool_call>", end)
    following = text.find("<tool_call>", end)
    if 0 <= following < close or (close < 0 <= following):
        return following  # not closed before the next one
    return len(text) if close < 0 else close + len("</tool_call>")


_FUNCTION = re.compile(r"<function=([^>\n]*)>(.*?)(</function>|$)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>(.*?)(</parameter>|(?=<parameter=)|$)", re.DOTALL)
_TAG = re.compile(r"</?tool_call>")


def _qwen3_coder(text: str, number: int, parameters: Parameters) -> FoundCalls:
    """Qwen3-Coder, Qwen3.5: a tag per parameter. Values are texts, unless the tool's schema says otherwise."""
    found = _Calls(CODER, number)
    content, at = "", 0
    for match in _FUNCTION.finditer(text):
        content += text[at : match.start()]
        at = match.end()
        found.add(_coder_call, match, parameters)
    content += text[at:]
    if not found.calls and not found.problems and "<tool_call>" in content:
        found.add(_no_call, "there is no <function=TOOL> in it")
        return found.found(content[: content.index("<tool_call>")])
    return found.found(_TAG.sub("", content) if found.calls or found.problems else content)


def _coder_call(number: int, match: re.Match[str], parameters: Parameters) -> ToolCall:
    name, body, close = match[1].strip(), match[2], match[3]
    if not name:
        raise CallError("the call has no name of a tool")
    if not close:
        raise CallError("it does not end with </function>")
    arguments: dict[str, Any] = {}
    for parameter in _PARAMETER.finditer(body):
        key, value = parameter[1].strip(), parameter[2].removeprefix("\n").removesuffix("\n")
        if key in arguments:
            raise CallError(f"the parameter {key!r} is there twice")
        if not parameter[3]:
            raise CallError(f"the parameter {key!r} does not end with </parameter>")
        arguments[key] = _typed(key, value, parameters.get(name, {}).get(key, {}))
    rest = _PARAMETER.sub("", body).strip()
    if rest:
        raise CallError(f"{rest[:30]!r} is in no <parameter=ARGUMENT>")
    return ToolCall(name, arguments, call_id(number))


def _typed(key: str, value: str, schema: Any) -> Any:
    kind = schema.get("type", "string") if isinstance(schema, Mapping) else "string"
    if kind == "string" or (isinstance(kind, list) and "string" in kind):
        return value
    try:
        return read_json(value)
    except CallError as error:
        raise CallError(f"the value of {key!r} is of the type {kind}, and {error}") from None


_BUILT_IN = re.compile(r"\s*([A-Za-z_][\w.]*)\.call\((.*)\)\s*", re.DOTALL)


def _llama3(text: str, number: int, _: Parameters) -> FoundCalls:
    """Llama 3.x: a JSON object as the complete turn; or after a tag, a built-in tool or Python code, too."""
    found = _Calls(LLAMA, number)
    content, tag, after = text.partition("<|python_tag|>")
    if tag and not after.lstrip().startswith("{"):
        found.add(_built_in, after)
        return found.found(content)
    body = after if tag else text
    if not body.lstrip().startswith("{") or not (tag or _is_call(body)):
        return found.found(text)
    while body.strip():
        rest: list[str] = []
        found.add(_first_call, body, rest)
        body = rest[0] if rest else ""
    return found.found(content if tag else "")


def _first_call(number: int, body: str, rest: list[str]) -> ToolCall:
    """The first of some calls in JSON, between which there may be semicolons; ``rest`` gets the text after it."""
    value, end = read_json_at(body, 0)
    call = call_of(value, call_id(number))
    following = body[end:].strip().removeprefix(";").strip()
    if following and not following.startswith("{"):
        raise CallError("text follows the call; a call is a complete answer")
    rest.append(following)
    return call


def _built_in(number: int, text: str) -> ToolCall:
    match = _BUILT_IN.fullmatch(text)
    if match is not None:
        (call,) = _python_calls(number, f"{match[1]}({match[2]})")
        return call
    if not text.strip():
        raise CallError("there is nothing after <|python_tag|>")
    return ToolCall("code_interpreter", {"code": text.strip()}, call_id(number))


def _is_call(text: str) -> bool:
    """Whether JSON is a call and not an answer in JSON."""
    try:
        value, _ = read_json_at(text, 0)
    except CallError:
        return re.match(r"""\s*\{\s*["']?(name|function|type)["']?\s*:""", text) is not None
    return isinstance(value, dict) and ("name" in value or "function" in value) and len(value) > 1


_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?\s*(?=\{)")


def _mistral(text: str, number: int, _: Parameters) -> FoundCalls:
    """Mistral: a list of JSON objects after a tag; from version 11 on, a tag, a name and arguments for each call."""
    found = _Calls(MISTRAL, number)
    content, *bodies = text.split("[TOOL_CALLS]")
    for body in bodies:
        found.add(_mistral_calls, body)
    return found.found(content)


def _mistral_calls(number: int, body: str) -> list[ToolCall]:
    named = _NAMED.match(body)
    if named is not None:
        return [ToolCall(named[1], arguments_of(read_json(body[named.end() :])), named[2] or call_id(number))]
    value = read_json(body)
    values = value if isinstance(value, list) else [value]
    if not values:
        raise CallError("the list of calls is empty")
    return [call_of(entry, call_id(number + place)) for place, entry in enumerate(values)]


_DEEPSEEK = re.compile(r"<｜tool▁call▁begin｜>(.*?)(<｜tool▁call▁end｜>|(?=<｜tool▁call▁begin｜>)|$)", re.DOTALL)
_DEEPSEEK_TAG = re.compile(r"<｜tool▁calls▁(begin|end)｜>")


def _deepseek(text: str, number: int, _: Parameters) -> FoundCalls:
    """DeepSeek V3 and R1: a type, a name and fenced JSON; V3.1: a name and JSON."""
    found = _Calls(DEEPSEEK, number)
    for match in _DEEPSEEK.finditer(text):
        found.add(_deepseek_call, match[1])
    content = _DEEPSEEK_TAG.sub("", _DEEPSEEK.sub("", text))
    if not found.calls and not found.problems and "<｜tool▁calls▁begin｜>" in text:
        found.add(_no_call, "there is no <｜tool▁call▁begin｜> in it")
    return found.found(content)


def _deepseek_call(number: int, body: str) -> ToolCall:
    before, separator, after = body.partition("<｜tool▁sep｜>")
    if not separator:
        raise CallError("there is no <｜tool▁sep｜> before the name of the tool")
    name, _, arguments = after.partition("\n")
    if before.strip() != "function":  # V3.1
        name, arguments = before, after
    if not name.strip():
        raise CallError("the call has no name of a tool")
    return ToolCall(name.strip(), arguments_of(read_json(_without_fence(arguments.strip()))), call_id(number))


def _without_fence(text: str) -> str:
    if text.startswith("```") and text.endswith("```"):
        return text.strip("`").removeprefix("json")
    return text


_TOOL_CODE = re.compile(r"```tool_code[ \t]*\n(.*?)(```|$)", re.DOTALL)


def _gemma(text: str, number: int, _: Parameters) -> FoundCalls:
    """Gemma: fenced Python calls, whose arguments have names and are constants. Nothing is executed."""
    found = _Calls(GEMMA, number)
    for match in _TOOL_CODE.finditer(text):
        found.add(_python_calls, match[1])
    return found.found(_TOOL_CODE.sub("", text))


def _python_calls(number: int, code: str) -> list[ToolCall]:
    if len(code) > MAX_CHARACTERS:
        raise CallError(f"the call has more than {MAX_CHARACTERS:,} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an escape that Python does not have
            statements = ast.parse(code.strip()).body
        nodes = [statement.value if isinstance(statement, ast.Expr) else None for statement in statements]
        calls = [_python_call(node, number + place) for place, node in enumerate(nodes)]
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise CallError(f"it is not a call in Python ({error_reason(error)})") from None
    if not calls:
        raise CallError("there is no call in it")
    return calls


def _python_call(node: ast.AST | None, number: int) -> ToolCall:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and len(node.args) == 1:
        node = node.args[0]
    if not isinstance(node, ast.Call):
        raise CallError("only calls of tools may be in it")
    name = ast.unparse(node.func)
    if not re.fullmatch(r"[A-Za-z_][\w.]*", name):
        raise CallError(f"{name[:30]!r} is not the name of a tool")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise CallError("every argument needs its name")
    try:
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
        written = json.dumps(arguments, allow_nan=False)
    except (ValueError, TypeError):
        raise CallError("an argument is no constant, or one that JSON does not have, such as a set") from None
    return ToolCall(name, json.loads(written), call_id(number))


_FENCE = re.compile(r"```(?:json|tool_call)[ \t]*\n(.*?)(```|$)", re.DOTALL)


def _fenced_json(text: str, number: int, _: Parameters) -> FoundCalls:
    """Models without a format of their own: fenced JSON with the keys of a call. Other fenced JSON is text."""
    found = _Calls(FENCED, number)
    content, at = "", 0
    for match in _FENCE.finditer(text):
        if _is_call(match[1]):
            content += text[at : match.start()]
            at = match.end()
            found.add(_json_call, match[1])
    return found.found(content + text[at:])


def _json_call(number: int, body: str) -> ToolCall:
    return call_of(read_json(body), call_id(number))


def _no_call(_: int, reason: str) -> ToolCall:
    raise CallError(reason)


CALL_FORMATS = {
    "hermes": CallFormat(("<tool_call>", "</tool_call>"), HERMES, _hermes),
    "qwen3_coder": CallFormat(("<tool_call>", "</tool_call>"), CODER, _qwen3_coder),
    "llama3": CallFormat(("<|python_tag|>", None), LLAMA, _llama3),
    "mistral": CallFormat(("[TOOL_CALLS]", None), MISTRAL, _mistral),
    "deepseek": CallFormat(("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"), DEEPSEEK, _deepseek),
    "gemma": CallFormat(("```tool_code", "```"), GEMMA, _gemma),
    "json": CallFormat(("```json", "```"), FENCED, _fenced_json),
}

TAGS = frozenset(
    f"{before}{name}{after}"
    for names, tags in (
        (("tool_call", "tool_response", "tools", "think"), (("<", ">"), ("</", ">"))),
        (("TOOL_CALLS", "TOOL_RESULTS", "AVAILABLE_TOOLS", "THINK"), (("[", "]"), ("[/", "]"))),
    )
    for name in names
    for before, after in tags
)
"""Tags of calls, their results and thinking, which are single tokens for some tokenizers."""
