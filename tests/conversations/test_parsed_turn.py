"""What the model said: thinking, calls in the formats of models, and what is told about those that cannot be read."""

from __future__ import annotations

import ast
import json
import keyword
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.conversations import CALL_FORMATS, parse_turn
from groupwise.conversations.call_json import call_of, read_json
from groupwise.conversations.tool_calls import CallError
from groupwise.environments import ToolCall
from groupwise.errors import InputError
from tests.conversations.families import SEARCH

ONE = {"query": "Paris"}
WRITTEN = {
    "hermes": ["<tool_call>\n{args}\n</tool_call>"],
    "llama3": ["{args}", "<|python_tag|>{args}"],
    "mistral": ["[TOOL_CALLS] [{args}]", "[TOOL_CALLS][{args}]", "[TOOL_CALLS]{args}"],
    "json": ["```json\n{args}\n```", "```tool_call\n{args}\n```"],
}
BY_NAME = {
    "mistral": ["[TOOL_CALLS]search[ARGS]{args}", "[TOOL_CALLS]search{args}"],
    "deepseek": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n{args}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{args}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ],
}
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(), JSON, max_size=3)


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in WRITTEN.items() for text in texts])
@given(arguments=ARGUMENTS, indent=st.sampled_from([None, 2]), escape=st.booleans())
def test_a_call_in_json_is_read_back(name, text, arguments, indent, escape):
    """Whatever the arguments are, closing tags among them, as long as they do not end a Markdown fence."""
    key = "parameters" if name == "llama3" else "arguments"
    written = json.dumps({"name": "search", key: arguments}, indent=indent, ensure_ascii=escape)
    if "```" in written or "[TOOL_CALLS]" in written:
        return
    turn = parse_turn(text.replace("{args}", written), name)
    assert turn.calls == (ToolCall("search", arguments, "call00000"),)
    assert turn.problems == ()
    assert turn.content == turn.thinking == ""


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BY_NAME.items() for text in texts])
@given(arguments=ARGUMENTS)
def test_a_call_by_name_is_read_back(name, text, arguments):
    written = json.dumps(arguments)
    if "```" not in written:
        assert parse_turn(text.replace("{args}", written), name).calls == (ToolCall("search", arguments, "call00000"),)


@given(
    st.dictionaries(
        st.from_regex(r"[a-z][a-z0-9_]{0,5}", fullmatch=True),
        st.text(st.characters(exclude_characters="`\x00", codec="utf-8")),
        max_size=3,
    )
)
def test_a_call_in_python_is_read_back(arguments):
    written = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    for code in (f"search({written})", f"print(search({written}))"):
        turn = parse_turn(f"Let me see.\n```tool_code\n{code}\n```", "gemma")
        if not turn.problems:
            assert turn.calls == (ToolCall("search", arguments, "call00000"),)
            assert turn.content == "Let me see."
        else:
            assert any(map(keyword.iskeyword, arguments))


def test_texts_and_several_calls():
    text = (
        'I look.\n<tool_call>\n{"name": "search", "arguments": {"query": "a"}}\n</tool_call>\n'
        '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
    )
    turn = parse_turn(text, "hermes", first_call=3)
    assert turn.content == "I look."
    assert turn.calls == (ToolCall("search", {"query": "a"}, "call00003"), ToolCall("add", {"x": 1}, "call00004"))
    two = '[TOOL_CALLS] [{"name": "a", "arguments": {}, "id": "abcdefghi"}, {"name": "b", "arguments": {}}]'
    calls = (ToolCall("a", {}, "abcdefghi"), ToolCall("b", {}, "call00001"))
    assert parse_turn(f"Well {two}", "mistral").calls == calls
    newer = "[TOOL_CALLS]a[CALL_ID]abcdefghi[ARGS]{}[TOOL_CALLS]b[ARGS]{}"
    assert parse_turn(newer, "mistral").calls == calls
    several = '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}'
    assert [call.name for call in parse_turn(several, "llama3").calls] == ["a", "b"]
    code = "```tool_code\na(x=1)\nb(y=[True, None])\n```"
    assert [call.arguments for call in parse_turn(code, "gemma").calls] == [{"x": 1}, {"y": [True, None]}]
    begin, sep, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    calls = f"{begin}function{sep}a\n```json\n{{}}\n```{end}\n{begin}function{sep}b\n```json\n{{}}\n```{end}"
    turn = parse_turn(f"So.<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>", "deepseek")
    assert [call.name for call in turn.calls] == ["a", "b"]
    assert turn.content == "So."


CODER = "<tool_call>\n<function=search>\n<parameter=query>\n{}\n</parameter>\n</function>\n</tool_call>"


def test_the_format_of_qwen3_coder():
    turn = parse_turn("Hm.\n" + CODER.format("line 1\nline 2\n"), "qwen3_coder")
    assert turn.calls == (ToolCall("search", {"query": "line 1\nline 2\n"}, "call00000"),)
    assert turn.content == "Hm."
    assert parse_turn(CODER.format("3"), "qwen3_coder").calls[0].arguments == {"query": "3"}
    typed = {"name": "search", "parameters": {"properties": {"query": {"type": "integer"}}}}
    assert parse_turn(CODER.format("3"), "qwen3_coder", tools=[typed]).calls[0].arguments == {"query": 3}
    wrong = parse_turn(CODER.format("three"), "qwen3_coder", tools=[typed])
    assert not wrong.calls
    assert "'query' is of the type integer" in wrong.problems[0]


def test_built_in_tools_of_llama():
    turn = parse_turn('<|python_tag|>brave_search.call(query="Paris")', "llama3")
    assert turn.calls == (ToolCall("brave_search", {"query": "Paris"}, "call00000"),)
    turn = parse_turn("<|python_tag|>print(1 + 1)\n", "llama3")
    assert turn.calls == (ToolCall("code_interpreter", {"code": "print(1 + 1)"}, "call00000"),)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "Nothing to call, { or }."),
        ("llama3", '{"answer": 42}'),
        ("llama3", 'The call is {"name": "search", "parameters": {}}.'),
        ("llama3", '{"name": "Ada"}'),
        ("json", '```json\n{"answer": 42}\n```'),
        ("json", "```json\n[1, 2\n```"),
        ("json", "```python\nsearch()\n```"),
        ("gemma", "```python\nsearch()\n```"),
        ("mistral", "TOOL_CALLS"),
        ("deepseek", "a"),
        ("qwen3_coder", "a </tool_call> b"),
    ],
)
def test_an_answer_is_no_call(name, text):
    assert parse_turn(text, name) == (text, (), (), "")


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("hermes", '<tool_call>{"name": "a", "arguments": {"x": }}</tool_call>', "not valid .*line 1, column 34"),
        ("hermes", '<tool_call>{"name": "a", "args": {}}</tool_call>', "no key 'args'"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'no "name"'),
        ("hermes", '<tool_call>{"name": ""}</tool_call>', 'no "name"'),
        ("hermes", '<tool_call>{"name": "a", "arguments": [1]}</tool_call>', "JSON object, not a list"),
        ("hermes", '<tool_call>{"name": "a", "arguments": {}, "parameters": {}}</tool_call>', "both"),
        ("hermes", '<tool_call>{"name": "a", "name": "b"}</tool_call>', "'name' is there twice"),
        ("hermes", '<tool_call>{"name": "a"} {"name": "b"}</tool_call>', "nothing may follow"),
        ("hermes", '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', "NaN is not JSON"),
        ("hermes", "<tool_call>search</tool_call>", "not valid"),
        ("hermes", "<tool_call>3</tool_call>", "a call is a JSON object, not a number"),
        ("hermes", '<tool_call>{"name": "a", "arguments": {"x": 1', "not valid"),
        ("hermes", "<tool_call>" + "[" * 100_000, "nested too deeply"),
        ("hermes", '<tool_call>{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}</tool_call>", "too long"),
        ("hermes", '<tool_call>{"name": "a", "arguments": {"x": "' + "a" * 300_000 + '"}}</tool_call>', "200,000"),
        ("llama3", '{"name": "a", "parameters": {"x": }', "not valid"),
        ("llama3", '{"name": "a", "parameters": {}} and more', "text follows the call"),
        ("llama3", "<|python_tag|>", "nothing after"),
        ("mistral", '[TOOL_CALLS] [{"name": "a", "arguments": {}}', "not valid"),
        ("mistral", "[TOOL_CALLS] []", "empty"),
        ("mistral", "[TOOL_CALLS]a[ARGS]{", "not valid"),
        ("deepseek", "<｜tool▁calls▁begin｜>search<｜tool▁calls▁end｜>", "tool▁call▁begin"),
        ("deepseek", "<｜tool▁call▁begin｜>search<｜tool▁call▁end｜>", "tool▁sep"),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>\n{}<｜tool▁call▁end｜>", "no name"),
        ("gemma", "```tool_code\nsearch('Paris')\n```", "every argument needs its name"),
        ("gemma", "```tool_code\nsearch(query=open('x'))\n```", "no constant"),
        ("gemma", "```tool_code\nsearch(query={1, 2})\n```", "JSON does not have"),
        ("gemma", "```tool_code\nsearch(query=b'Paris')\n```", "JSON does not have"),
        ("gemma", "```tool_code\nimport os\n```", "only calls"),
        ("gemma", "```tool_code\n(lambda: 1)()\n```", "not the name"),
        ("gemma", "```tool_code\n\n```", "no call in it"),
        ("gemma", "```tool_code\nsearch(\n```", "not a call in Python"),
        ("gemma", "```tool_code\n" + "(" * 10_000, "not a call in Python"),
        ("json", '```json\n{"name": "a", "arguments": }\n```', "not valid"),
        ("qwen3_coder", "<tool_call>search</tool_call>", "no <function=TOOL>"),
        ("qwen3_coder", CODER.format("a").replace("</function>", ""), "does not end with </function>"),
        ("qwen3_coder", CODER.format("a").replace("</parameter>", ""), "does not end with </parameter>"),
        ("qwen3_coder", CODER.format("a").replace("<parameter=query>", ""), "is in no <parameter=ARGUMENT>"),
        ("qwen3_coder", CODER.format("a").replace("search", " "), "no name"),
    ],
)
def test_a_problem_says_what_to_write(name, text, problem):
    turn = parse_turn(f"Hm. {text}" if name != "llama3" else text, name)
    assert turn.calls == ()
    assert len(turn.problems) == 1
    assert turn.problems[0].startswith("The tool call was not understood: ")
    assert turn.problems[0].endswith(f"Write it as: {CALL_FORMATS[name].example}")
    assert len(turn.problems[0]) < 500
    assert re.search(problem, turn.problems[0])


def test_the_examples_are_calls():
    for name, call_format in CALL_FORMATS.items():
        text = call_format.example.replace("VALUE", '"x"')
        turn = parse_turn(text, name)
        assert [call.name for call in turn.calls] == ["TOOL"], name
        assert list(turn.calls[0].arguments) == ["ARGUMENT"]


@pytest.mark.parametrize(
    "text",
    [
        "{'name': 'a', 'arguments': {'x': \"it's\", 'y': [1, 2,], 'z': True,},}",
        '{"name": "a", "arguments": {"x": "it\'s", "y": [1, 2], "z": true}, }',
        "{'name': 'a', 'arguments': {'x': 'it\\'s', 'y': [1, 2], 'z': True}}",
    ],
)
def test_json_with_one_meaning_only_is_read(text):
    expected = {"x": "it's", "y": [1, 2], "z": True}
    assert parse_turn(f"<tool_call>{text}</tool_call>", "hermes").calls[0].arguments == expected


def test_a_line_break_in_a_text_is_read():
    assert read_json('{"code": "a\nb\tc"}') == {"code": "a\nb\tc"}
    backslashes = r"""{'path': 'C:\\', 'quote': '\"', 'both': '\\"'}"""
    assert read_json(backslashes) == {"path": "C:\\", "quote": '"', "both": '\\"'}
    assert read_json("{'say': 'say \"hi\", None, True,}'}") == {"say": 'say "hi", None, True,}'}


@pytest.mark.parametrize(
    "text", ["{'a': 'it's'}", "{a: 1}", "{'a' 'b'}", "{,}", "[1,,2]", "{'a': 1} // why", "'", "None,"]
)
def test_json_with_other_meanings_is_not(text):
    with pytest.raises(CallError):
        read_json(text)


@given(JSON)
def test_python_literals_are_read(value):
    """As models write them; Python's own reader is the peer."""
    text = repr(value)
    if "\\x" in text or "\\U" in text or "\\u" in text or "e+" in text or "inf" in text:
        return
    assert read_json(text) == ast.literal_eval(text)


def test_calls_of_openai():
    call = {"id": "abc", "type": "function", "function": {"name": "a", "arguments": '{"x": 1}'}}
    assert call_of(call, "call00000") == ToolCall("a", {"x": 1}, "abc")
    assert call_of({"name": "a"}, "call00000") == ToolCall("a", {}, "call00000")
    assert call_of({"name": "a", "arguments": ""}, "call00000").arguments == {}


CALL = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'


def test_a_call_inside_of_thinking_is_no_call():
    turn = parse_turn(f"<think>\nI could {CALL}\n</think>\n\nDone.", "hermes")
    assert turn == ("Done.", (), (), f"I could {CALL}")
    turn = parse_turn(f"I could {CALL}\n</think>\n{CALL}", "hermes", opens_thinking=True)
    assert len(turn.calls) == 1
    assert turn.thinking == f"I could {CALL}"
    turn = parse_turn(f"{CALL}<think>{CALL}</think>{CALL}", "hermes")
    assert len(turn.calls) == 2
    turn = parse_turn(f"[THINK]{CALL}[/THINK]b", "hermes")
    assert turn == ("b", (), (), CALL)


@pytest.mark.parametrize(("text", "opens"), [(f"<think>a {CALL}", False), (f"a {CALL}", True)])
def test_thinking_that_does_not_end(text, opens):
    turn = parse_turn(text, "hermes", opens_thinking=opens)
    assert turn.content == ""
    assert turn.calls == ()
    assert turn.thinking == f"a {CALL}"
    assert "Write </think>" in turn.problems[0]


def test_thinking_inside_of_a_call_is_an_argument():
    text = '<tool_call>{"name": "a", "arguments": {"x": "<think>b</think>"}}</tool_call>'
    turn = parse_turn(text, "hermes")
    assert turn.calls[0].arguments == {"x": "<think>b</think>"}
    assert turn.thinking == ""


def test_a_tool_that_does_not_exist():
    text = '<tool_call>{"name": "serch", "arguments": {}}</tool_call>'
    turn = parse_turn(text, "hermes", tools=[SEARCH])
    assert turn.calls == ()
    assert turn.problems == ("There is no tool 'serch'; did you mean 'search'? The tools are: search.",)
    assert parse_turn(text.replace("serch", "zzz"), "hermes", tools=[SEARCH]).problems == (
        "There is no tool 'zzz'. The tools are: search.",
    )


def test_an_unknown_format():
    with pytest.raises(InputError, match=r"'herms'.*did you mean 'hermes'"):
        parse_turn("", "herms")


@pytest.mark.parametrize("name", CALL_FORMATS)
@given(data=st.data())
def test_any_text_is_parsed(name, data):
    """Pieces of the formats in any order: no error, and nothing that is not a call becomes one with another type."""
    tags = [tag for call_format in CALL_FORMATS.values() for tag in call_format.tags if tag]
    others = [
        "<think>",
        "</think>",
        '{"name": "a"',
        ', "arguments": {',
        "}",
        "search(",
        ")",
        "\n",
        "```",
        "function",
        "1",
    ]
    others += [
        "<function=",
        ">",
        "<parameter=x>",
        "</parameter>",
        "</function>",
        "<｜tool▁sep｜>",
        "[",
        "]",
        "'",
        '"',
        ",",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from([*tags, *others]), max_size=15)))
    turn = parse_turn(text, name, opens_thinking=data.draw(st.booleans()))
    for call in turn.calls:
        assert isinstance(call.name, str)
        assert call.name.strip()
        assert isinstance(call.arguments, dict)
    assert all(problem.strip() for problem in turn.problems)


@pytest.mark.parametrize(
    ("name", "piece"),
    [
        ("hermes", "<tool_call>{'a': '"),
        ("hermes", '<tool_call>{"a": "'),
        ("hermes", "<think></think>"),
        ("hermes", "<tool_call>'\\'"),
        ("hermes", "<tool_call>" + ", " * 50),
        ("llama3", "{'name" + "\\'" * 50),
        ("llama3", '{"name": "a", "parameters": {}};'),
        ("mistral", "[TOOL_CALLS]a"),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```\n\n"),
        ("qwen3_coder", "<function=a><parameter=b>"),
        ("gemma", "```tool_code\n"),
        ("json", '```json\n{"name": "a"'),
    ],
)
def test_a_turn_that_repeats_itself_has_few_problems(name, piece):
    """As models do that were trained too far."""
    turn = parse_turn(piece * 3000, name)
    assert len(turn.problems) <= 5
    assert sum(map(len, turn.problems)) < 3000


@pytest.mark.parametrize("code", ["-" * 50_000 + "1", "a." * 50_000, "not " * 50_000, "(" * 150, "a(" * 5000, "[" * 90])
def test_python_that_is_nested_deeply(code):
    assert parse_turn(f"```tool_code\na(x={code})\n```", "gemma").calls == ()


def test_without_a_format_nothing_is_a_call():
    text = '<think>Hm.</think> <tool_call>{"name": "search", "arguments": {}}</tool_call>'
    assert parse_turn(text, None) == (text.removeprefix("<think>Hm.</think> "), (), (), "Hm.")
    assert parse_turn("Hm.</think>Yes", None, opens_thinking=True) == ("Yes", (), (), "Hm.")
